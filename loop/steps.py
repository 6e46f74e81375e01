"""What every step of a chain takes, as torch's profiler sees it: where time goes, but no evidence for a verdict.

Each step runs inside a named range. On a GPU the ranges come back as spans of the device's time, and a step's time is
that of the kernels that start in its spans; on a CPU it is the range's own.
"""

import bisect
import dataclasses
import importlib
from collections.abc import Iterable

import torch

from loop import arms, calls, interpreter

CALLS = 5
_MARK = "stage "


def times(family: str, case, given, *, ideas: Iterable = (), shipped: bool = False) -> list[dict]:
    """`span`, `source` and `ms` per call of every step of a forward and backward, in order.

    The chain is fla's stages (on a CPU the plain-torch ones), with the shipped kernels and the idea modules in it.
    ValueError when the profiler gave no times, rather than a table of zeros.
    """
    chain, base = importlib.import_module(f"kernel_fun.{family}.chain"), "fla" if arms.on_gpu() else "reference"
    if not arms.on_gpu():
        interpreter.install()  # without it the shipped kernels multiply the bits of bf16 numbers
    plan = chain.make_plan(case.problem(arms.arch()), ideas=tuple(ideas), base=base, shipped=shipped)
    marked = {
        side: tuple(dataclasses.replace(s, fn=_marked(s)) for s in getattr(plan, side))
        for side in ("forward", "backward")
    }
    run = arms.plan_runner(family, lambda p, grad: dataclasses.replace(plan, **marked))
    call = calls.make(dataclasses.replace(arms.make(family, "000"), run=run), given, "fwdbwd")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if arms.on_gpu():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    for _ in range(2):
        call()
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        for _ in range(CALLS):
            call()
        if arms.on_gpu():
            torch.cuda.synchronize()
    total = on_device(profile.events()) if arms.on_gpu() else on_host(profile.events())
    if not any(total.values()):
        raise ValueError("torch's profiler gave no time for any step here; on a GPU it needs CUPTI and permission")
    return [
        {"span": span(s), "source": s.source, "ms": total.get(span(s), 0.0) / CALLS}
        for s in (*plan.forward, *plan.backward)
    ]


def on_host(events) -> dict[str, float]:
    """Span -> ms, all calls together, of the ranges themselves."""
    total: dict[str, float] = {}
    for e in events:
        if e.name.startswith(_MARK):
            total[e.name[len(_MARK) :]] = total.get(e.name[len(_MARK) :], 0.0) + e.time_range.elapsed_us() / 1e3
    return total


def on_device(events) -> dict[str, float]:
    """Span -> ms, all calls together, of the kernels that start within the device's view of the ranges."""
    mine = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    ranges = sorted((e.time_range.start, e.time_range.end, e.name) for e in mine if e.name.startswith(_MARK))
    starts = [start for start, _, _ in ranges]
    total: dict[str, float] = {}
    for e in mine:
        at = bisect.bisect_right(starts, e.time_range.start) - 1
        if not e.name.startswith(_MARK) and at >= 0 and e.time_range.start <= ranges[at][1]:
            name = ranges[at][2][len(_MARK) :]
            total[name] = total.get(name, 0.0) + e.time_range.elapsed_us() / 1e3
    return total


def span(step) -> str:
    """A step's span as it is written: `first`, or `first..last`."""
    return step.span[0] if len(step.span) == 1 else f"{step.span[0]}..{step.span[-1]}"


def _marked(step):
    def run(**tensors):
        with torch.profiler.record_function(_MARK + span(step)):
            return step.fn(**tensors)

    return run
