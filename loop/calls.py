"""One call of an arm in one mode, without arguments: what the timer, the profiler and the memory reading all run.

fwd      the forward without gradients, which keeps nothing for a backward
bwd      `torch.autograd.grad` on the retained graph of a forward that ran beforehand
fwdbwd   forward, then `torch.autograd.grad`; nothing accumulates
"""
# A mode may end in -loop: the same call, but timed in a plain loop of eager calls (see `loop.bench`).

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from loop.inputs import INCOMING, Inputs

LOOP = "-loop"


def pass_of(mode: str) -> str:
    """What a mode times: fwd, bwd or fwdbwd."""
    return mode.removesuffix(LOOP)


def make(arm, inputs: Inputs, mode: str) -> Callable[[], object]:
    """The call. For "bwd" the forward runs here, on the current stream; its residuals live as long as the call does."""
    mode = pass_of(mode)
    if mode == "fwd":
        return lambda: arm.op(inputs, False)
    with_leaves, leaves = leaf_inputs(inputs)
    if mode == "fwdbwd":
        return lambda: gradients(arm.op(with_leaves, True), inputs, leaves)
    results = arm.op(with_leaves, True)
    return lambda: gradients(results, inputs, leaves, retain=True)


def leaf_inputs(inputs: Inputs) -> tuple[Inputs, list[torch.Tensor]]:
    """The inputs with every differentiable tensor as a leaf (sharing memory), and those leaves."""
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.leaves().items()}
    return inputs.like({**inputs, **leaves}), list(leaves.values())


def gradients(results, inputs: Inputs, leaves: list[torch.Tensor], retain: bool = False) -> tuple:
    """Gradients of the results against the case's incoming gradients."""
    incoming = (inputs[name] for name in INCOMING[inputs.case.family])
    pairs = [(r, d) for r, d in zip(results, incoming, strict=True) if r is not None and d is not None]
    return torch.autograd.grad(
        [r for r, _ in pairs], leaves, [d for _, d in pairs], retain_graph=retain, allow_unused=True
    )


def memory(arm, inputs: Inputs, mode: str) -> tuple[int | None, int | None]:
    """(peak, saved) in bytes over the inputs: the most held during one eager call, and what a forward leaves for the
    backward.

    For "bwd" the peak is the backward's, residuals included. `saved` excludes the results; None in "fwd". (None, None)
    on a CPU.
    """
    if not torch.cuda.is_available():
        return None, None
    mode = pass_of(mode)
    with_leaves, leaves = leaf_inputs(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = arm.op(with_leaves, mode != "fwd")
    saved = None
    if mode != "fwd":
        held = sum(r.untyped_storage().nbytes() for r in results if r is not None)
        saved = torch.cuda.memory_allocated() - before - held
        if mode == "bwd":
            torch.cuda.reset_peak_memory_stats()
        gradients(results, inputs, leaves)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, saved


def caller_ms(call: Callable, seconds: float = 0.3, least: int = 5, most: int = 50) -> float:
    """One call as somebody waiting for it sees it: host clock, launches included, nothing queued before it. The median
    of `least` to `most` calls, as many as take `seconds`: a process that has just done something else needs a few
    before its caches, and so a short call's time, are those of a training loop."""
    times, until = [], time.perf_counter() + seconds
    while len(times) < least or (len(times) < most and time.perf_counter() < until):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def launches(call: Callable[[], object]) -> list[dict]:
    """What the driver gave each kernel of one warm call, in whatever language it was written, one dict a kernel and
    launch shape: `kernel`, `registers` a thread, `shared` bytes a block, `grid` and `block`."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:  # the events that torch hands out leave these facts behind
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return launches_of(json.loads(path.read_text(encoding="utf-8")))


def launches_of(trace: dict) -> list[dict]:
    """The kernels of a trace, each launch shape once, in order."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            facts = event["args"]
            one = {"kernel": event["name"], "registers": facts["registers per thread"],
                   "shared": facts["shared memory"], "grid": facts["grid"], "block": facts["block"]}  # fmt: skip
            if one not in found:
                found.append(one)
    return found


def kernels(call: Callable[[], object], times: int) -> dict[str, tuple[float, int]]:
    """Device kernel -> (ms, launches) a call, slowest first, from torch's profiler over `times` calls of a warm one."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms, count = found.get(event.name, (0.0, 0))
            found[event.name] = (ms + event.time_range.elapsed_us() / 1e3, count + 1)
    per_call = {name: (ms / times, round(count / times)) for name, (ms, count) in found.items()}
    return dict(sorted(per_call.items(), key=lambda item: -item[1][0]))
