"""Arms: what is checked and timed against what.

    000            fla alone, through its public op (on a CPU the plain-torch chain: fla cannot run there)
    ship           the package: its public op, with the promoted kernels
    005            idea 005 spliced into the package's chain (it wins over promoted kernels of the same stages)
    005+007        both, in one chain
    005@000        spliced into fla's bare chain, so that nothing else differs from 000
    fla-gluon ...  a named peer (see loop/peers.py)

An arm is a differentiable callable of the op-level inputs. Two arms of a run share inputs, process and stream.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernel_fun._common import plan, support
from loop import held, interpreter, registry, sources
from loop.inputs import LEAVES as TENSORS


class ArmError(ValueError):
    """An arm that does not exist or cannot be built; one line."""


class BrokenIdea(ArmError):
    """An arm whose idea is there and does not import, or breaks a rule."""


@dataclass(frozen=True)
class Arm:
    """One implementation of a family's op.

    op(inputs, grad=True) -> (result, ht): `inputs` as `loop.inputs.make` gives them; results as fla returns them (ht is
    None unless the case asks for it). supports(case) -> (ok, reason). `source_sha` is of the arm's own source when it
    was made, `chain_sha` of the shipped chain around an idea. `stages(case)` names what runs each step, where that is
    known. `modules` are the ideas in it, `held` runs it with their steps held to the contract (`loop.held`).
    """

    name: str
    family: str
    what: str
    source_sha: str
    chain_sha: str | None
    run: Callable
    supports: Callable[[object], tuple[bool, str]]
    stages: Callable[[object], tuple[str, ...]]
    modules: tuple = ()
    held: Callable | None = None

    def op(self, inputs, grad: bool = True):
        with torch.set_grad_enabled(grad):
            return self.run(inputs)

    def held_op(self, inputs, grad: bool = True):
        """`op` as a check runs it: raises Rejected where a step of an idea breaks the contract."""
        with torch.set_grad_enabled(grad):
            return (self.held or self.run)(inputs)

    def current_sha(self) -> str:
        """The arm's source as it is on disk now."""
        return sources.arm(self.family, self.name)

    def launches(self, inputs, mode: str = "fwdbwd") -> dict[str, int]:
        """Device kernels of one warm call, by name. Empty on a CPU."""
        return witness(self, inputs, mode)


def arch() -> tuple[int, int]:
    """Compute capability of the current GPU; (0, 0) stands for Triton's interpreter on a CPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def on_gpu() -> bool:
    return torch.cuda.is_available()


def _unknown(family: str, name: str, idea: str) -> ArmError:
    """What to say of a name that is no arm: the closest ones, and all there are, peers that are not here apart."""
    from loop import peers

    listed = map(registry.glance, registry.folders())  # without loading a kernel: that takes seconds
    ids = [i.id for i in listed if i.id != registry.BASELINE and i.family in (family, None)]
    known = [registry.BASELINE, "ship", *ids, *filter(peers.installed, peers.names(family))]
    absent = [peer for peer in peers.names(family) if peer not in known]
    said = f"arms are {', '.join(known)}, and 005+007, 005@000"
    if absent:
        said += f"; not installed here: {', '.join(absent)}"
    return ArmError(f"no arm {name!r} in {family}{registry.closest(idea, known + absent)}; {said}")


def make(family: str, name: str) -> Arm:
    """The arm called `name`. ArmError, in one line, names the closest ones or says what is wrong with the idea."""
    from loop import peers

    if family not in registry.FAMILIES:
        raise ArmError(f"family {family!r} is unknown; known: {', '.join(registry.FAMILIES)}")
    if name == registry.BASELINE:
        return _baseline(family)
    if name == "ship":
        return _ship(family)
    if name in peers.names(family):
        return peers.make(family, name)
    ideas, base = sources.parse(name)
    if base not in ("ship", registry.BASELINE):
        raise ArmError(f"arm {name!r}: the base after @ is ship or 000, got {base!r}")
    numbers = registry.folders()
    for idea in ideas:
        if idea not in numbers or idea == registry.BASELINE:
            raise _unknown(family, name, idea)
    return _spliced(family, name, ideas, base)


# ---------------------------------------------------------------------------------------------------------------- arms
def _yes(case) -> tuple[bool, str]:
    return True, ""


def _chain(family: str):
    return importlib.import_module(f"kernel_fun.{family}.chain")


def _baseline(family: str) -> Arm:
    if not on_gpu():
        run = plan_runner(family, functools.partial(_chain(family).make_plan, base="reference", shipped=False))
        return Arm(
            "000",
            family,
            "the plain-torch chain (fla cannot run on a CPU)",
            sources.arm(family, "000"),
            None,
            run,
            _yes,
            lambda case: ("reference",),
        )
    return Arm(
        "000",
        family,
        f"fla {sources.fla_version()}",
        sources.arm(family, "000"),
        None,
        FLA[family],
        _yes,
        lambda case: ("fla",),
    )


def fla_kda(inputs):
    """`fla.ops.kda.chunk_kda` itself, kept from being handed to a registered backend of ours."""
    from fla.ops.kda import chunk_kda

    tensors = {name: inputs[name] for name in TENSORS["kda"]}
    with support.fla_only():
        return chunk_kda(**tensors, **inputs.case.op_kwargs(), cu_seqlens=inputs["cu_seqlens"])


def fla_cconv(inputs):
    """fla's `causal_conv1d` itself (its Triton backend, unless a switch that rows record says otherwise)."""
    from fla.modules.convolution import causal_conv1d

    tensors = {name: inputs[name] for name in TENSORS["cconv"]}
    with support.fla_only():
        return causal_conv1d(**tensors, **inputs.case.op_kwargs(), cu_seqlens=inputs["cu_seqlens"])


FLA = {"kda": fla_kda, "cconv": fla_cconv}


def _ship(family: str) -> Arm:
    chain = _chain(family)

    def supports(case):
        steps, reasons = chain.shipped_for(case.problem(arch()))
        return (True, "") if steps else (False, "; ".join(reasons) or "the package ships no kernel for this op yet")

    if on_gpu():
        op = getattr(
            importlib.import_module(f"kernel_fun.{family}"), {"kda": "chunk_kda", "cconv": "causal_conv1d"}[family]
        )

        def run(inputs):
            tensors = {name: inputs[name] for name in TENSORS[family]}
            return op(**tensors, **inputs.case.op_kwargs(), cu_seqlens=inputs["cu_seqlens"])
    else:
        interpreter.install()
        run = plan_runner(family, functools.partial(chain.make_plan, base="reference", shipped=True))
    what = "the package" if on_gpu() else "the package's kernels, interpreted, in the plain-torch chain"
    return Arm(
        "ship",
        family,
        what,
        sources.loaded(family),
        None,
        run,
        supports,
        lambda case: chain.make_plan(case.problem(arch()), base="fla" if on_gpu() else "reference").sources(),
    )


def _spliced(family: str, name: str, ideas: list[str], base: str) -> Arm:
    try:
        modules = [registry.load(idea) for idea in ideas]
    except registry.IdeaError as err:
        raise BrokenIdea(str(err)) from err
    for idea, module in zip(ideas, modules, strict=True):
        if family != module.FAMILY:
            raise ArmError(f"idea {idea} belongs to {module.FAMILY}, not to {family}")
    chain = _chain(family)
    _each_takes_part(name, ideas, modules, chain.STAGES)
    shipped = base == "ship" and on_gpu()

    def supports(case):
        for idea, module in zip(ideas, modules, strict=True):
            ok, reason = registry.supports(module, case.problem(arch()))
            if not ok:
                return False, f"{idea}: {reason}"
        return True, ""

    def plan_of(p, grad=True, ideas=modules):
        return chain.make_plan(p, ideas=ideas, base="fla" if on_gpu() else "reference", shipped=shipped, grad=grad)

    around = "the plain-torch chain, interpreted"
    if on_gpu():
        around = "the package's chain" if base == "ship" else "fla's bare chain"
    sha = sources.combined([registry.loaded_sha(Path(module.__file__)) for module in modules])
    return Arm(
        name,
        family,
        f"{'+'.join(ideas)} in {around}",
        sha,
        sources.loaded(family) if shipped else None,
        plan_runner(family, plan_of),
        supports,
        lambda case: plan_of(case.problem(arch())).sources(),
        tuple(modules),
        plan_runner(family, lambda p, grad: plan_of(p, grad, [held.held(module) for module in modules])),
    )


def _each_takes_part(name: str, ideas: list[str], modules: list, stages) -> None:
    """ArmError when an idea would run none of its spans because those before it hold their stages: a row of the arm
    would name it all the same."""
    taken: set[str] = set()
    for idea, module in zip(ideas, modules, strict=True):
        spans = [plan.parse_span(text, stages) for text in module.SPANS]
        free = [span for span in spans if not taken.intersection(span)]
        if not free:
            raise ArmError(f"arm {name!r}: {idea} would not run, its stages are those of the ideas before it")
        taken.update(*free)


def plan_runner(family: str, plan_of: Callable) -> Callable:
    """A runner that builds one plan per problem, and one for calls of it without gradients, and applies it to the
    op-level tensors, as the package's op does. `plan_of(p, grad=...)` is the plan."""
    apply = importlib.import_module(f"kernel_fun.{family}.autograd").apply
    plan_of = functools.lru_cache(maxsize=64)(plan_of)
    as_they_are = ("x", "dy")  # any strides are part of the convolution's contract

    def run(inputs):
        from kernel_fun._common import dispatch, packed

        p = inputs.case.problem(arch())
        tensors = [t if t is None or n in as_they_are else t.contiguous() for n in TENSORS[family] for t in [inputs[n]]]
        cu = inputs["cu_seqlens"]
        tables = packed.describe(cu) if cu is not None else None
        return apply(
            plan_of(p, grad=dispatch.needs_grad(*tensors)),
            p,
            *tensors,
            cu_seqlens=cu,
            chunk_indices=tables and tables.chunk_indices,
            chunk_offsets=tables and tables.chunk_offsets,
        )

    return run


# ------------------------------------------------------------------------------------------------------------- witness
def witness(arm: Arm, inputs, mode: str) -> dict[str, int]:
    """Names and counts of the device kernels in one call of `mode`, from torch's profiler; the call is warmed first."""
    if not on_gpu():
        return {}
    from loop import calls

    call = calls.make(arm, inputs, mode)
    call()
    found: dict[str, int] = {}
    for name, (_, count) in calls.kernels(call, 1).items():
        if not name.startswith(("Memcpy", "Memset", "Activity")):
            found[name[:160]] = found.get(name[:160], 0) + count
    return found
