"""One idea's spans by themselves: what each of its kernels takes, and how far its tensors are from fla's stages.

For the hours of trying variants, with module constants set from the command line (`CTAS=3`). Nothing is recorded and
nothing here is evidence for a verdict: times are torch's profiler's, differences are from another implementation's
bf16 and not from fp64. On a CPU the kernels are interpreted and the time is the host's.
"""

import ast
import importlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kernel_fun._common import promoted
from loop import arms, calls, compare, contract, interpreter, registry, spans, steps
from loop.cases import Case

CALLS = 5


class Unsupported(ValueError):
    """The idea declines the case; its reason, in one line."""


@dataclass(frozen=True)
class Timed:
    """A span's kernels, ms a call and launches by name (on a CPU: none), and relative differences by tensor."""

    idea: str
    case: str
    span: str
    ms: float
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)


def settings(pairs: Iterable[str]) -> dict:
    """`["CTAS=3"]` -> {"CTAS": 3}. ValueError in one line for what is no NAME=VALUE of a Python literal."""
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            if not (equals and name.isidentifier()):
                raise ValueError
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError(f"--set {pair!r}: expected NAME=VALUE, a module constant and a Python literal") from None
    return found


def module_of(idea: str, constants: dict):
    """The idea's kernel module, built for this call alone, with `constants` in place of its own. ValueError for a name
    that it does not have."""
    module = registry.fresh(idea)
    for name, value in constants.items():
        if not hasattr(module, name):
            near = registry.closest(name, [n for n in vars(module) if n.isupper()])
            raise ValueError(f"--set {name}: {idea} has no such constant{near}")
        setattr(module, name, value)
    return module


def time_spans(idea: str, case: Case, constants: dict | None = None, seed: int = 0) -> list[Timed]:
    """One entry a span of the idea, on operands from the chain of fla's stages (on a CPU the plain-torch ones).

    In one line: ValueError when the idea is of another family, Unsupported when it declines the case."""
    module = module_of(idea, constants or {})
    if case.family != module.FAMILY:
        raise ValueError(f"idea {idea} is of family {module.FAMILY}, case {case.id} of {case.family}")
    p = case.problem(arms.arch())
    ok, reason = module.supports(p)
    if not ok:
        raise Unsupported(f"idea {idea} does not support {case.id}: {reason}")
    chain = importlib.import_module(f"kernel_fun.{case.family}.chain")
    own = promoted.module_steps(module, p, idea, chain.STAGES, chain.OUTPUTS)
    return [_one(idea, case, p, chain, step, seed) for step in own]


def _one(idea: str, case: Case, p, chain, step, seed: int) -> Timed:
    env, meta, theirs = _around(case, p, chain, step.span, seed)
    with torch.no_grad():
        ours = step(env, meta)
        shared = [n for n, t in ours.items() if _comparable(t, theirs.get(n), env.get(n))]
        apart = {n: compare.difference(ours[n], theirs[n]).rel_rms for n in shared}
        del ours, theirs
        ms, kernels = _timed(lambda: step(env, meta))
    return Timed(idea, case.id, steps.span(step), ms, kernels, apart)


def _around(case: Case, p, chain, span: Sequence[str], seed: int) -> tuple[dict, dict, dict]:
    """Every tensor before the span, the meta arguments, and what the base's stages make of the span."""
    if not arms.on_gpu():
        interpreter.install()
    env, meta = spans.start(case, p, seed, "cuda" if arms.on_gpu() else "cpu")
    base = chain.base_steps(p, "fla" if arms.on_gpu() else "reference")
    names = [s.name for s in contract.stages(case.family)]
    first, last = names.index(span[0]), names.index(span[-1])
    with torch.no_grad():
        for step in base:
            if names.index(step.span[-1]) < first:
                env |= step(env, meta)
        theirs = dict(env)
        for step in base:
            if first <= names.index(step.span[-1]) <= last:
                theirs |= step(theirs, meta)
    return env, meta, theirs


def _comparable(ours, theirs, given) -> bool:
    both = torch.is_tensor(ours) and torch.is_tensor(theirs)
    return both and ours is not given and ours.is_floating_point() and ours.shape == theirs.shape


def _timed(call) -> tuple[float, dict[str, tuple[float, int]]]:
    """(ms a call, kernels): the sum of the kernels' times; on a CPU the host's time."""
    call()
    if not arms.on_gpu():
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start), {}
    kernels = {n: x for n, x in calls.kernels(call, CALLS).items() if not n.startswith("Activity")}
    return sum(ms for ms, _ in kernels.values()), kernels


def table(found: Sequence[Timed]):
    """One rich table: a line a span, a dim line a kernel."""
    from rich.table import Table

    made = Table("case", "idea", "span", "ms", "launches", "apart from " + ("fla" if arms.on_gpu() else "plain torch"))
    for x in found:
        apart = ", ".join(f"{n} {d:.1e}" for n, d in x.apart.items())
        made.add_row(x.case, x.idea, x.span, f"{x.ms:.4f}", "", apart)
        for name, (ms, launches) in x.kernels.items():
            made.add_row("", "", f"  {name[:80]}", f"{ms:.4f}", str(launches), "", style="dim")
    return made
