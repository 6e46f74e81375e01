"""The one timing routine of this repository (protocol v2): paired blocks of interleaved arms in one process.

Per case and mode: every arm is warmed; each is captured into a CUDA graph over input sets that together exceed the L2,
or all run eagerly when one cannot be captured; then in each block every arm is run once untimed and once timed, in
rotated and reversed order, behind a short device-side wait so that the host's launch work is never in the number. The
baseline runs twice in each block (A/A): what it differs from itself by is what the run cannot tell apart. A GPU's first
blocks are not kept (in v1 they were): the clock is still low. Clocks are read, never set. On a CPU the same blocks are
timed with the host's clock; such rows say so and promote nothing. Modes that end in -loop time eager calls one after
another, behind no wait, as a training script makes them: the slower of host and device counts. They promote nothing.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import torch

from loop import arms, calls, cases, check, inputs, nvml, registry, results, stats, verdict
from loop.lanes import ContextLost, Lane, Run, drop, guarded, one_line, stop_if_lost
from loop.rows import MODES, Row, Writer

BLOCKS, SLOW_BLOCKS = 21, 15
CPU_BLOCKS, CPU_SLOW_BLOCKS = 5, 3
SLOW_RUN_S = 8.0  # a run that would take longer than this does the smaller number of blocks
SAMPLE_S, CPU_SAMPLE_S = 1e-3, 1e-2  # a timed sample lasts at least this
L2_MULTIPLE = 3  # all input sets together, in multiples of the L2
MAX_SETS = 8
SETTLE_S = 0.4  # of blocks that are not kept: after those products the clock takes up to 0.22 s to come back
WARM_S = 0.5  # of matrix products before the first block, so that the clocks have settled
QUEUE_S = 0.02  # of host time may be enqueued ahead
LAUNCH_S = 2e-4  # the device waits at least this long while the host enqueues a sample
LOOP_S = 2e-2  # a sample of a plain loop lasts at least this
MAX_CLOCK_HZ = 2.0e9  # turns seconds into cycles of that wait


def bench(
    family: str,
    impls: Sequence[str | arms.Arm],
    case,
    mode: str,
    *,
    checks: dict | None = None,
    baselines: Sequence[str] = ("000",),
    blocks: int | None = None,
    seed: int = 0,
    writer: Writer | None = None,
    cmd: str = "",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Row]:
    """Time the arms on a case in one mode; one row per arm and baseline, written as soon as the run ends.

    Args:
        impls: arm names, or arms. The baselines are added when they are missing.
        case: from `loop.cases`. mode: fwd, bwd, fwdbwd, or one of them with -loop.
        checks: arm name -> CheckResult of this process. An arm without one is checked here and added; one that did not
            pass is a row with its status and no time; a result of another process, arm, source or case is refused.
        blocks: default 21, 15 for runs that would take over 8 s, 5 on a CPU. progress: called as (what, done, total).

    Raises ValueError for an unknown mode, arm or family, or a GPU case without a GPU; it writes no row then.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; known: {', '.join(MODES)}")
    device = "cuda" if arms.on_gpu() else "cpu"
    cases.require_device(case, device)
    built = {a.name: a for a in (x if isinstance(x, arms.Arm) else arms.make(family, x) for x in impls)}
    for name in baselines:
        if name not in built:
            built = {name: arms.make(family, name), **built}
    checks = {} if checks is None else checks
    lanes, run = [Lane(arm) for arm in built.values()], Run(loop=mode.endswith(calls.LOOP))
    cmd = cmd or results.command(family, list(built), case.id, mode, baselines, blocks)
    base = next(lane for lane in lanes if lane.arm.name == baselines[0])
    try:
        for lane in lanes:
            lane.failure = _admit(lane.arm, case, mode, checks, progress)
            stop_if_lost(lane)
        live = [lane for lane in lanes if lane.failure is None]
        if base in live:
            _measure(run, live, base, case, mode, seed, blocks, progress)
    except ContextLost as lost:
        results.rows_of(run, [lost.lane], [lost.lane.arm.name], case, mode, checks, cmd, seed, writer)
        raise
    return results.rows_of(run, lanes, baselines, case, mode, checks, cmd, seed, writer)


def _admit(arm: arms.Arm, case, mode: str, checks: dict, progress) -> tuple[str, str] | None:
    """None when the arm may be timed; else the status and reason of its row."""
    try:
        ok, reason = arm.supports(case)
    except registry.IdeaError as err:
        return "ERROR", str(err)
    if not ok:
        return "UNSUPPORTED", reason
    if arm.name not in checks:
        progress(f"check {arm.name}", 0, 1)
        checks[arm.name] = check.check(arm, case)
    result = checks[arm.name]
    if not result.ok:
        return str(result.status), result.message
    verdict.require(result.token, arm, case, result.device, grad=calls.pass_of(mode) != "fwd")
    return None


# ------------------------------------------------------------------------------------------------------------ measuring
def _measure(run: Run, lanes: list[Lane], base: Lane, case, mode: str, seed: int, blocks: int | None, progress) -> None:
    """Fill the lanes' samples, or their failures."""
    device = "cuda" if arms.on_gpu() else "cpu"
    sets = _input_sets(run, case, seed, device)
    try:
        for lane in lanes:
            progress(f"warm up {lane.arm.name}", 0, 1)
            guarded(lane, lambda lane=lane: _prepare(lane, sets, mode))
        alive = [lane for lane in lanes if lane.failure is None]
        if base not in alive:
            return
        if device == "cpu":
            _blocks(run, alive, base, blocks, _cpu_sample, progress)
            return
        _capture(run, alive, case)
        _heat()
        with torch.cuda.stream(_stream()):
            _blocks(run, alive, base, blocks, _gpu_sample, progress)
            for lane in alive:  # last, so that the profiler is not in the times; without it a time is still a time
                with contextlib.suppress(RuntimeError, AssertionError, LookupError, ValueError, OSError):
                    lane.launches = lane.arm.launches(sets[0], calls.pass_of(mode))
    finally:
        for lane in lanes:
            drop(lane)


def _input_sets(run: Run, case, seed: int, device: str) -> list[inputs.Inputs]:
    """Input sets with different values: as many as exceed the L2 together, one when one does already."""
    sets = [inputs.make(case, seed, device)]
    run.set_bytes = sum(t.numel() * t.element_size() for t in sets[0].values() if torch.is_tensor(t))
    if device == "cuda":
        l2 = torch.cuda.get_device_properties().L2_cache_size
        run.sets = min(MAX_SETS, max(1, math.ceil(L2_MULTIPLE * l2 / max(run.set_bytes, 1))))
    for i in range(1, run.sets):
        sets.append(inputs.make(case, seed + i, device))
        sets[-1]["cu_seqlens"] = sets[0]["cu_seqlens"]  # one tensor, so that what is kept per cu_seqlens is kept once
    return sets


def _prepare(lane: Lane, sets: list[inputs.Inputs], mode: str) -> None:
    """Compile, warm and estimate one arm; read its memory."""
    if not arms.on_gpu():
        lane.calls = [calls.make(lane.arm, one, mode) for one in sets]
        lane.unit = _eager(lane)
        lane.unit()
        start = time.perf_counter()
        lane.unit()
        lane.unit_s = lane.host_s = time.perf_counter() - start
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream()):
        calls.make(lane.arm, sets[0], "fwd" if calls.pass_of(mode) == "fwd" else "fwdbwd")()  # tunes first
        lane.peak_bytes, lane.saved_bytes = calls.memory(lane.arm, sets[0], mode)
        lane.calls = [calls.make(lane.arm, one, mode) for one in sets]
        lane.unit = _eager(lane)
        lane.unit()
        lane.caller_ms = calls.caller_ms(lane.calls[0])
        lane.unit_s, lane.host_s = _estimate(lane.unit)


def _estimate(unit: Callable[[], None]) -> tuple[float, float]:
    """(device seconds, host seconds) of one unit, roughly: enough to choose how often to repeat it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    unit()
    end.record()
    host = time.perf_counter() - began
    end.synchronize()
    return start.elapsed_time(end) / 1e3, host


def _eager(lane: Lane) -> Callable[[], None]:
    def unit():
        for call in lane.calls:
            call()

    return unit


def _capture(run: Run, lanes: list[Lane], case) -> None:
    """One graph per lane over all input sets, in one memory pool; all lanes stay eager when one cannot be captured.

    Packed cases stay eager: a graph would freeze their chunk tables, so the package sends a captured call to fla.
    """
    if run.loop:
        run.timer = "loop"
        return
    if case.lengths:
        run.timer, run.timer_note = "eager", "packed sequences: a graph would freeze their chunk tables"
        return
    pool, outside, graphs = torch.cuda.graph_pool_handle(), torch.cuda.current_stream(), []
    for lane in lanes:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=_stream()):
                lane.unit()
        except Exception as err:
            run.timer, run.timer_note = "eager", f"{lane.arm.name} cannot be captured: {one_line(err)}"
            del graph
            graphs.clear()
            torch.cuda.set_stream(outside)  # a capture that fails leaves its own stream in place,
            _reset_generator()  # and the default generator in the belief that it is being captured
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return
        graphs.append(graph)
    run.timer = "graph"
    with torch.cuda.stream(_stream()):
        for lane, graph in zip(lanes, graphs, strict=True):
            graph.replay()
            lane.unit, (lane.unit_s, lane.host_s) = graph.replay, _estimate(graph.replay)


def _reset_generator() -> None:
    torch.cuda.init()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(device="cuda").graphsafe_get_state())


_streams: dict[int, torch.cuda.Stream] = {}


def _stream() -> torch.cuda.Stream:
    """The one side stream that everything is warmed, captured and timed on."""
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


def _heat(seconds: float = WARM_S) -> None:
    """bf16 matrix products until the clocks have settled under load."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(8):
            torch.mm(a, a)
        torch.cuda.synchronize()


def _blocks(run: Run, lanes: list[Lane], base: Lane, blocks: int | None, sample: Callable, progress) -> None:
    """The paired blocks: every lane and the A/A copy of the baseline once each, in the protocol's order."""
    gpu = run.timer != "cpu"
    for lane in lanes:
        least = (LOOP_S if run.loop else SAMPLE_S) if gpu else CPU_SAMPLE_S
        lane.reps = max(1, math.ceil(least / max(lane.unit_s, 1e-6)))
        if run.timer == "eager":  # the launches of a sample must fit the device's queue
            lane.reps = min(lane.reps, max(1, int(QUEUE_S / lane.host_s)))
    block_s = sum(lane.unit_s * (1 + lane.reps) for lane in [*lanes, base])
    usual, fewer = (BLOCKS, SLOW_BLOCKS) if gpu else (CPU_BLOCKS, CPU_SLOW_BLOCKS)
    run.blocks = blocks or (usual if usual * block_s < SLOW_RUN_S else fewer)
    places, began = [*lanes, None], time.perf_counter()
    orders = stats.block_orders(len(places), run.blocks)
    unsettled = gpu
    while unsettled:
        _block(run, places, base, orders[0], sample, keep=False)
        unsettled = time.perf_counter() - began < SETTLE_S
    for number, order in enumerate(orders):
        progress("blocks", number, run.blocks)
        _block(run, places, base, order, sample, keep=True)
        run.throttle.update(nvml.throttle() if gpu else ())
    progress("blocks", run.blocks, run.blocks)


def _block(run: Run, places: list, base: Lane, order: Sequence[int], sample: Callable, keep: bool) -> None:
    for lane in (places[place] for place in order):
        ms, mhz = sample(lane or base, run)
        if keep:
            (lane.samples if lane else run.aa_samples).append(ms)
            if lane and mhz is not None:
                lane.mhz.append(mhz)


def _gpu_sample(lane: Lane, run: Run) -> tuple[float, int | None]:
    """ms per call of one timed sample, and the SM clock during it."""
    wait = 0.0 if run.loop else LAUNCH_S + (1.2 * lane.host_s * lane.reps if run.timer == "eager" else 0.0)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    lane.unit()
    torch.cuda._sleep(int(min(wait, 0.05) * MAX_CLOCK_HZ))
    start.record()
    for _ in range(lane.reps):
        lane.unit()
    end.record()
    mhz = nvml.sm_mhz()
    end.synchronize()
    return start.elapsed_time(end) / (lane.reps * run.sets), mhz


def _cpu_sample(lane: Lane, run: Run) -> tuple[float, int | None]:
    began = time.perf_counter()
    for _ in range(lane.reps):
        lane.unit()
    return 1e3 * (time.perf_counter() - began) / (lane.reps * run.sets), None
