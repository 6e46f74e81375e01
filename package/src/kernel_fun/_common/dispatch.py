"""Routes: what a problem runs on a device, with gradients or without, decided once and kept.

A call builds its problem, asks for the route, and either applies the route's plan or goes to fla with the route's
reason.
"""
import itertools

import torch

from . import compat, promoted, support

_DENSE = ("do", "dht")  # incoming gradients that kernels want dense; the convolution's dy may have any strides
_routes: dict = {}
_MAX_ROUTES = 4096  # packed batches make a new problem at nearly every step; past this many the table starts over


class Route:
    """Either a plan or the reason there is none. Stands in for its plan, so that each pass can note that it has run
    once.

    what: the kernels, for the log line. missing: kernels that this installation cannot run, each with why. warm: the
    passes that have run outside a CUDA graph capture, so that nothing is left to compile.
    """

    __slots__ = ("missing", "plan", "reason", "warm", "what")
    on_torch = False

    def __init__(self, plan=None, reason: str = "", what: str = "", missing: tuple[str, ...] = ()):
        self.plan, self.reason, self.what, self.missing, self.warm = plan, reason, what, missing, set()

    @property
    def saved(self) -> tuple[str, ...]:
        return self.plan.saved

    def run_forward(self, env: dict, meta: dict) -> dict:
        env = self.plan.run_forward(env, meta)
        self.warm.add("fwd")
        return env

    def run_backward(self, env: dict, meta: dict) -> dict:
        env.update((name, support.dense(env[name])) for name in _DENSE if name in env)
        env = self.plan.run_backward(env, meta)
        self.warm.add("bwd")
        return env

    def capture_reason(self, x: torch.Tensor, grad: bool, forward: bool = True) -> str:
        """Why this call must not run here under CUDA graph capture, or "": the first run of a pass compiles kernels.

        grad: its backward will run; forward: so will its forward.
        """
        if not support.capturing(x):
            return ""
        cold = [name for name in ("fwd",) * forward + ("bwd",) * grad if name not in self.warm]
        return f"CUDA graph capture of a call whose {' and '.join(cold)} has not run yet" if cold else ""


class ReferenceRoute(Route):
    """Plain torch. Kernels know no autocast, so here too it changes nothing."""

    __slots__ = ()
    on_torch = True

    def run_forward(self, env: dict, meta: dict) -> dict:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return super().run_forward(env, meta)

    def run_backward(self, env: dict, meta: dict) -> dict:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return super().run_backward(env, meta)


def route(family: str, chain, p, x: torch.Tensor, grad: bool) -> Route:
    """The route of problem `p` on the device of `x`. `chain` is the family's chain module.

    Without `grad` it is the forward's alone, and kernels leave out what only a backward reads.
    """
    if p.B * p.T and not x.is_cpu:
        reason = compat.reason(family)  # asks a switch, so it is not kept
        if reason:
            return Route(reason=reason)
    key = (p, x.device.index, grad)
    found = _routes.get(key)
    if found is None:
        if p.B * p.T == 0:
            found = _reference(chain, p, grad, "plain torch, for a call without tokens")
        elif x.is_cpu:
            found = _reference(chain, p, grad, "plain torch on CPU tensors")
        else:
            found = _kernels(family, chain, p, grad)
        if len(_routes) >= _MAX_ROUTES:
            _routes.clear()
        _routes[key] = found
    return found


def _reference(chain, p, grad: bool, what: str) -> Route:
    return ReferenceRoute(chain.make_plan(p, base="reference", shipped=False, grad=grad), what=what)


def _kernels(family: str, chain, p, grad: bool) -> Route:
    steps, reasons = chain.shipped_for(p)
    if not steps:
        return Route(reason="; ".join(_by_reason(reasons)) or "this build ships no kernel for this operator")
    plan = chain.make_plan(p, grad=grad)
    mine = {step.source for step in steps}
    running = tuple(dict.fromkeys(s for s in plan.sources() if s in mine))
    if not running:
        idle = [f"{source}: serves the backward alone" for source in sorted(mine, reverse=True)]
        return Route(reason="; ".join([*idle, *_by_reason(reasons)]))
    what = ", ".join(running) + _left_to_fla(plan)
    return Route(plan, what=what, missing=promoted.missing(f"kernel_fun.{family}"))


def _by_reason(reasons: list[str]) -> list[str]:
    """The reasons of kernels, newest first, each reason once."""
    names: dict[str, list[str]] = {}
    for line in reasons:
        name, _, why = line.partition(": ")
        names.setdefault(why, []).append(name)
    return [f"{of[0]}{f' and {len(of) - 1} older' if of[1:] else ''}: {why}" for why, of in names.items()]


def _left_to_fla(plan) -> str:
    """What of a plan fla's stages run beside kernels, to be added to the names of those."""
    spans = []
    for steps in (plan.forward, plan.backward):
        for mine, run in itertools.groupby(steps, lambda step: not step.source.startswith("fla:")):
            stages = [name for step in run for name in step.span]
            if not mine:
                spans.append(stages[0] if len(stages) == 1 else f"{stages[0]} to {stages[-1]}")
    return f"; fla's own: {', '.join(spans)}" if spans else ""


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
