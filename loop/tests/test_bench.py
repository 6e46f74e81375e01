"""The timing routine, on a CPU, through the code path that a GPU takes: blocks, A/A, verdicts, and every way an arm
can fail.
"""

import dataclasses
import time

import pytest
import torch

from loop import arms, bench, calls, cases, check, contract, inputs, results, rows, sources, verdict
from loop.tests.pretend_gpu import PretendGpu

CASE = cases.get("cconv", "tiny")


@pytest.fixture(scope="module")
def baseline_check():
    return check.check(arms.make("cconv", "000"), CASE)


def variant(name, wrap):
    """The baseline under another name, with its op wrapped."""
    base = arms.make("cconv", "000")
    return dataclasses.replace(base, name=name, run=wrap(base.run), source_sha=name)


@pytest.fixture
def arm_of(monkeypatch):
    """Arms whose source never changes on disk, checked like any other."""
    real = sources.arm
    monkeypatch.setattr(sources, "arm", lambda family, name: name if name.startswith("test-") else real(family, name))
    return variant


def slow(run):
    def op(given):
        end = time.process_time() + 0.15
        while time.process_time() < end:
            pass
        return run(given)

    return op


def test_a_slower_arm_is_slower_and_every_number_is_there(arm_of, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # what a busy machine adds is not in this clock
    found = bench.bench("cconv", ["000", arm_of("test-slow", slow)], CASE, "fwdbwd", blocks=9)
    base, arm = found
    assert (base.arm, base.baseline, arm.arm, arm.baseline) == ("000", "000", "test-slow", "000")
    assert arm.perf.verdict == "SLOWER"
    assert arm.perf.ratio < 1
    assert arm.device == "cpu"
    assert arm.perf.timer == "cpu"
    assert len(arm.perf.block_ms) == len(arm.perf.baseline_block_ms) == len(arm.perf.aa_block_ms) == 9
    assert arm.perf.ms >= 150
    assert base.perf.baseline_ms == pytest.approx(arm.perf.baseline_ms)
    assert base.perf.ratio == pytest.approx(1, abs=0.5)
    assert base.perf.verdict in ("SAME", "UNCLEAR")
    assert arm.perf.floor_ms is None
    assert arm.check.ok
    assert set(arm.check.errors) == {"y", "dx", "dw"}
    assert arm.env["versions"]["torch"] == torch.__version__
    assert "FLA_CONV_GLUON" in arm.env["switches"]
    assert "--mode fwdbwd" in arm.cmd
    assert rows.parse(arm.model_dump_json()) == arm


def test_a_row_names_the_command_that_repeats_it():
    start = "./ladder bench kda --impl"
    for impls, baselines, blocks, wanted in (
        (["000", "005"], ["000"], None, f"{start} 000,005 --case tiny --mode fwd"),
        (["000", "ship", "005"], ["000", "ship"], 7, f"{start} 000,ship,005 --case tiny --mode fwd --blocks 7"),
        (["ship", "005"], ["ship"], None, f"{start} ship,005 --case tiny --mode fwd --baseline ship"),
        (["005", "011"], ["005"], None, f"{start} 005,011 --case tiny --mode fwd --baseline 005"),
    ):
        assert results.command("kda", impls, "tiny", "fwd", baselines, blocks) == wanted


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
def test_modes_time_what_they_say(arm_of, baseline_check, mode):
    passes = []

    def watch(run):
        def op(given):
            passes.append(torch.is_grad_enabled())
            return run(given)

        return op

    arm = arm_of("test-watch", watch)
    checked = check.check(arm, CASE)
    passes.clear()
    found = bench.bench("cconv", ["000", arm], CASE, mode, checks={"000": baseline_check, arm.name: checked}, blocks=1)
    assert [row.status for row in found] == ["PASSED", "PASSED"]
    assert set(passes) == {mode != "fwd"}
    if mode == "bwd":
        assert len(passes) == 1  # one forward, kept; the timed calls are backwards alone


def test_a_second_baseline_gives_rows_of_its_own(arm_of, baseline_check):
    impls = ["000", arm_of("test-a", lambda run: run), arm_of("test-b", lambda run: run)]
    found = bench.bench(
        "cconv", impls, CASE, "fwd", checks={"000": baseline_check}, baselines=("000", "test-a"), blocks=2
    )
    assert [(r.arm, r.baseline) for r in found] == [
        ("000", "000"),
        ("test-a", "000"),
        ("test-b", "000"),
        ("test-b", "test-a"),
    ]


def wrong(run):
    def op(given):
        y, ht = run(given)
        return y * 1.1, ht

    return op


def failing_later(error):
    """Passes its check, then raises `error` in every further call."""

    def wrap(run):
        def op(given):
            if op.broken:
                raise error
            return run(given)

        op.broken = False
        return op

    return wrap


def test_no_time_for_an_arm_that_fails_its_check(arm_of, baseline_check):
    _, row = bench.bench(
        "cconv", ["000", arm_of("test-wrong", wrong)], CASE, "fwd", checks={"000": baseline_check}, blocks=1
    )
    assert row.status == "WRONG_VALUE"
    assert row.perf is None
    assert "y" in row.reason
    assert not row.check.ok


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("CUDA out of memory.\nTried"), "OOM"), (RuntimeError("bad launch"), "ERROR")],
)
def test_what_an_arm_raises_is_its_row_and_the_others_go_on(arm_of, baseline_check, error, status):
    arm = arm_of("test-late", failing_later(error))
    checked = check.check(arm, CASE)
    arm.run.broken = True
    base, row = bench.bench(
        "cconv", ["000", arm], CASE, "fwd", checks={"000": baseline_check, arm.name: checked}, blocks=1
    )
    assert (base.status, row.status) == ("PASSED", status)
    assert "\n" not in row.reason


@pytest.mark.parametrize("when", ["while checking", "while warming up"])
def test_an_arm_that_breaks_the_gpus_context_stops_the_run_with_its_row(arm_of, baseline_check, tmp_path, when):
    arm = arm_of(
        "test-fault", failing_later(RuntimeError("CUDA error: an illegal memory access was encountered\nmore"))
    )
    checks = {"000": baseline_check}
    if when == "while warming up":
        checks[arm.name] = check.check(arm, CASE)
    arm.run.broken = True
    writer = rows.Writer(tmp_path, "x")
    with pytest.raises(bench.ContextLost, match="arm test-fault broke the GPU's context"):
        bench.bench("cconv", ["000", arm], CASE, "fwd", checks=checks, blocks=1, writer=writer)
    (row,) = rows.read(tmp_path)
    assert (row.arm, row.status, row.perf) == ("test-fault", "ERROR", None)
    assert "illegal memory access" in row.reason


def test_without_its_baseline_an_arm_has_no_time(arm_of):
    broken = arm_of("test-base", wrong)
    base, row = bench.bench(
        "cconv", [broken, arm_of("test-fine", lambda run: run)], CASE, "fwd", baselines=("test-base",), blocks=1
    )
    assert (base.status, row.status) == ("WRONG_VALUE", "NO_BASELINE")
    assert "test-base: WRONG_VALUE" in row.reason


def test_an_arm_is_checked_once_for_all_modes(arm_of):
    checks = {}
    bench.bench("cconv", ["000"], CASE, "fwd", checks=checks, blocks=1)
    first = checks["000"]
    bench.bench("cconv", ["000"], CASE, "bwd", checks=checks, blocks=1)
    assert checks["000"] is first


def test_a_check_of_another_process_is_refused(baseline_check):
    forged = dataclasses.replace(baseline_check, token="0" * 64)
    with pytest.raises(verdict.CheckError, match="no passed check in this process"):
        bench.bench("cconv", ["000"], CASE, "fwd", checks={"000": forged})


def test_a_check_of_another_case_is_refused(baseline_check):
    with pytest.raises(verdict.CheckError, match="another check"):
        bench.bench("cconv", ["000"], cases.get("cconv", "tiny_w2"), "fwd", checks={"000": baseline_check})


def test_an_edit_during_the_run_voids_it(arm_of, monkeypatch):
    arm = arm_of("test-edited", lambda run: run)
    edited = []
    real = sources.arm
    monkeypatch.setattr(
        sources, "arm", lambda family, name: "new" if edited and name == "test-edited" else real(family, name)
    )

    def progress(what, done, total):
        if what == "blocks":
            edited.append(True)

    _, row = bench.bench("cconv", ["000", arm], CASE, "fwd", blocks=1, progress=progress)
    assert (row.status, row.perf) == ("SOURCE_CHANGED", None)


def test_an_unsupported_case_says_why(arm_of, baseline_check):
    arm = dataclasses.replace(arm_of("test-no", lambda run: run), supports=lambda case: (False, "needs W=3, got 4"))
    _, row = bench.bench("cconv", ["000", arm], CASE, "fwd", checks={"000": baseline_check}, blocks=1)
    assert (row.status, row.reason) == ("UNSUPPORTED", "needs W=3, got 4")


@pytest.mark.parametrize(
    ("mode", "case", "message"),
    [("both", CASE, "mode 'both' is unknown"), ("fwd", cases.get("cconv", "prod8192_qk"), "needs a GPU")],
)
def test_bad_arguments(mode, case, message):
    if torch.cuda.is_available() and "GPU" in message:
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=message):
        bench.bench("cconv", ["000"], case, mode)


def test_a_floor_that_is_broken_voids_the_time(arm_of, baseline_check, monkeypatch):
    monkeypatch.setattr(
        results, "_floor", lambda family, case, mode: contract.Floor(bytes=10**12, flops=0, ms=238.0, bound="hbm")
    )
    (row,) = bench.bench("cconv", ["000"], CASE, "fwd", checks={"000": baseline_check}, blocks=1)
    assert row.status == "IMPLAUSIBLE"
    assert row.perf is None


@pytest.fixture
def gpu(monkeypatch):
    """loop.bench's GPU path on a pretend device."""
    device = PretendGpu()
    for name, value in device.names().items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    make, eager = inputs.make, bench._eager
    monkeypatch.setattr(arms, "on_gpu", lambda: True)
    monkeypatch.setattr(results, "_floor", lambda family, case, mode: contract.Floor(100, 0, 1e-6, "hbm"))
    monkeypatch.setattr(cases, "require_device", lambda case, device: None)
    monkeypatch.setattr(inputs, "make", lambda case, seed, device: make(case, seed, "cpu"))
    monkeypatch.setattr(bench, "_heat", lambda: None)
    monkeypatch.setattr(bench, "SETTLE_S", 0.0)
    monkeypatch.setattr(bench, "_reset_generator", device.reset_generator)
    monkeypatch.setattr(bench, "_streams", {})
    monkeypatch.setattr(bench.nvml, "sm_mhz", lambda: 1980)
    monkeypatch.setattr(bench.nvml, "throttle", lambda: ("power cap",))
    monkeypatch.setattr(arms, "witness", lambda arm, given, mode: {"kernel": 2})
    monkeypatch.setattr(calls, "memory", lambda arm, given, mode: (5000, 2000))

    def unit_of(lane):
        unit = eager(lane)
        device.bodies.append(unit)
        return unit

    monkeypatch.setattr(bench, "_eager", unit_of)
    return device


def cpu_arm(name="000"):
    return dataclasses.replace(ON_CPU, name=name)


ON_CPU = arms.make("cconv", "000") if not torch.cuda.is_available() else None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a real GPU")
@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
def test_the_gpus_path_replays_graphs_over_sets_past_the_l2(gpu, baseline_check, mode):
    (row,) = bench.bench("cconv", [cpu_arm()], CASE, mode, checks={"000": baseline_check}, blocks=3)
    assert row.status == "PASSED", row.reason
    assert (row.perf.timer, row.perf.timer_note) == ("graph", "")
    assert gpu.captures == 1
    per_set = row.perf.input_bytes // row.perf.input_sets
    assert per_set * (row.perf.input_sets - 1) < 3 * 20_000 <= row.perf.input_bytes
    samples = (1 + 3) * 2  # blocks, the first not kept, times the baseline and its A/A
    assert [len(kept) for kept in (row.perf.block_ms, row.perf.aa_block_ms)] == [3, 3]
    reps = row.perf.calls_per_sample // row.perf.input_sets
    assert gpu.replays == samples * (1 + reps) + 2  # one untimed before each sample; two to warm and estimate
    assert len(gpu.sleeps) == samples
    assert all(s >= bench.LAUNCH_S * bench.MAX_CLOCK_HZ for s in gpu.sleeps)
    assert row.perf.sm_mhz == (1980,) * 3
    assert row.perf.cycles_ratio == pytest.approx(row.perf.ratio)
    assert row.perf.throttle == ("power cap",)
    assert (row.perf.peak_bytes, row.perf.saved_bytes) == (5000, 2000)
    assert row.perf.caller_ms > 0
    assert row.launches == {"kernel": 2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a real GPU")
def test_blocks_are_kept_once_the_clock_has_settled(gpu, baseline_check, monkeypatch):
    monkeypatch.setattr(bench, "SETTLE_S", 0.5)
    began = time.perf_counter()
    (row,) = bench.bench("cconv", [cpu_arm()], CASE, "fwd", checks={"000": baseline_check}, blocks=2)
    assert time.perf_counter() - began > 0.5
    assert len(row.perf.block_ms) == len(row.perf.sm_mhz) == 2
    assert len(gpu.sleeps) > (1 + 2) * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a real GPU")
def test_one_arm_that_cannot_be_captured_keeps_all_of_them_eager(gpu, baseline_check):
    gpu.refuse = "operation not permitted when stream is capturing"
    outside = gpu.current
    (row,) = bench.bench("cconv", [cpu_arm()], CASE, "fwd", checks={"000": baseline_check}, blocks=2)
    assert row.status == "PASSED"
    assert row.perf.timer == "eager"
    assert row.perf.timer_note == "000 cannot be captured: operation not permitted when stream is capturing"
    assert gpu.current is outside  # the failed capture's stream does not stay in place
    assert gpu.replays == 0
    assert gpu.generator_resets == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a real GPU")
def test_packed_sequences_are_never_captured(gpu):
    case = cases.get("cconv", "tiny_varlen")
    (row,) = bench.bench("cconv", [cpu_arm()], case, "fwd", blocks=2)
    assert row.status == "PASSED", row.reason
    assert (row.perf.timer, gpu.captures) == ("eager", 0)
    assert "packed" in row.perf.timer_note


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a real GPU")
@pytest.mark.parametrize("mode", ["fwd-loop", "bwd-loop", "fwdbwd-loop"])
def test_a_plain_loop_is_eager_and_waits_for_nothing(gpu, monkeypatch, mode):
    waits = []
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append, raising=False)
    (row,) = bench.bench("cconv", [cpu_arm()], CASE, mode, blocks=2)
    assert row.status == "PASSED", row.reason
    assert (row.mode, row.perf.timer, gpu.captures) == (mode, "loop", 0)
    assert set(waits) == {0}
    assert rows.parse(row.model_dump_json()).mode == mode


@pytest.mark.gpu
def test_on_a_gpu_a_failed_capture_leaves_a_usable_generator():
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.randn(4, device="cuda").sum().item()
    torch.cuda.set_stream(torch.cuda.default_stream())
    bench._reset_generator()
    assert torch.randn(4, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_on_a_gpu_arms_are_replayed_and_clocks_read():
    case = cases.get("cconv", "t2048")
    row = bench.bench("cconv", ["000"], case, "fwdbwd", blocks=5)[0]
    assert row.status == "PASSED", row.reason
    assert row.perf.timer == "graph", row.perf.timer_note
    assert row.perf.sm_mhz
    assert row.perf.peak_bytes > 0
    assert row.perf.input_bytes >= 3 * row.env["l2_bytes"] or row.perf.input_sets == bench.MAX_SETS
    assert row.launches
    assert row.perf.floor_share < 1.1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
def test_a_replayed_call_computes_what_an_eager_one_does(mode):
    """The captured graph of each mode writes the same gradients as an eager call on the same inputs."""
    case = cases.get("cconv", "t2048")
    arm, given = arms.make("cconv", "000"), inputs.make(case, 0, "cuda")
    with torch.cuda.stream(bench._stream()):
        call = calls.make(arm, given, mode)
        call()
        want = [t.clone() for t in call() if t is not None]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=bench._stream()):
            got = call()
        for t in got:
            if t is not None:
                t.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, (t for t in got if t is not None), strict=True))
