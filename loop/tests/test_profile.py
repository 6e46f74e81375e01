"""Profiles: the text keeps what a person wrote, and the compiler's report is read from kernels as Triton keeps them."""

import types

import pytest
import torch

import loop.tests.notebook_tools  # noqa: F401
from loop import calls, cases, ncu, plots, profile, promote, registry, steps

TABLES = {"005-sum-heads": {"mine": (2.0, 1), "fla_b": (1.0, 2)}, "000": {"fla_a": (6.0, 1)}}


def test_resources_are_read_through_wrappers():
    compiled = types.SimpleNamespace(n_regs=168, n_spills=4, metadata=types.SimpleNamespace(shared=98304, num_warps=8))
    kernel = types.SimpleNamespace(device_caches={0: ({"key": compiled}, {}, None, None, None)}, fn=None)
    module = types.SimpleNamespace(wrapped=types.SimpleNamespace(fn=kernel), helper=len, VALUE=3)
    report = {"kernel": "wrapped", "registers": 168, "spills": 4, "shared bytes": 98304, "warps": 8}
    report["occupancy"] = "12 %"
    assert profile.resources(module) == [report]


def test_a_kernel_that_was_never_launched_has_no_report():
    cache = {0: ({"x": types.SimpleNamespace(n_regs=None)},)}
    assert profile.resources(types.SimpleNamespace(k=types.SimpleNamespace(device_caches=cache))) == []


def test_what_a_kernel_was_launched_with_is_read_from_the_trace():
    """Of kernels in the CuTe DSL, too, which have no cache to ask as Triton's have."""
    facts = {"registers per thread": 168, "shared memory": 58368, "grid": [4, 16, 1], "block": [128, 2, 1]}
    facts |= {"blocks per SM": 0.5, "stream": 7, "est. achieved occupancy %": 12}
    event = {"ph": "X", "cat": "kernel", "name": "front|a", "ts": 1.0, "dur": 2.0, "args": facts}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "args": {"bytes": 4}}
    other = event | {"args": facts | {"grid": [1, 1, 1]}}
    found = calls.launches_of({"traceEvents": [{"ph": "M", "name": "process_name"}, event, copy, event, other]})
    assert [one["grid"] for one in found] == [[4, 16, 1], [1, 1, 1]]
    line = {"kernel": "front\\|a", "registers": 168, "shared bytes": 58368, "grid": "4 x 16 x 1", "threads": 256}
    assert profile.as_launched(found)[0] == line | {"occupancy": "12 %"}


def test_the_text_asks_for_a_reading_and_keeps_one(add_idea):
    add_idea()
    idea, case = registry.find("005"), cases.get("kda", "tiny")
    report = [{"kernel": "mine", "registers": 168, "spills": 0}]
    first = profile.text(idea, case, "fwdbwd", TABLES, report)
    assert promote.section(first, "Reading") == ""
    assert "| mine | 2.000 | 66.7 % | 1 |" in first
    assert "## Kernels of 000: 6.000 ms a call" in first
    assert "| mine | 168 | 0 |" in first
    written = first.replace(profile.TO_WRITE, "Bound by bytes: 80 % of the copy rate.")
    again = profile.text(idea, case, "fwdbwd", TABLES, report, before=written)
    assert promote.section(again, "Reading") == "Bound by bytes: 80 % of the copy rate."


def test_an_unknown_case_is_named_on_any_machine(add_idea):
    add_idea()
    with pytest.raises(ValueError, match="case 'tinny' is unknown in kda"):
        profile.profile("005", "tinny")


def test_without_a_gpu_there_is_no_profile(add_idea):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    add_idea()
    with pytest.raises(ValueError, match="needs a GPU"):
        profile.profile("005", "small")


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_of_a_call_are_listed():
    from loop import arms, inputs

    case = cases.get("cconv", "t2048")
    times = profile.kernel_times(arms.make("cconv", "000"), inputs.make(case, 0, "cuda"), "fwdbwd")
    assert any("causal_conv1d" in name for name in times)
    assert all(ms > 0 for ms, _ in times.values())


@pytest.mark.gpu
def test_on_a_gpu_a_launch_has_its_registers_and_shared_memory():
    import torch.nn.functional as F

    x = torch.randn(512, 512, device="cuda")
    F.softmax(x, -1)
    (one,) = profile.as_launched(calls.launches(lambda: F.softmax(x, -1)))
    assert one["registers"] > 0
    assert one["threads"] > 0


def test_kernels_are_counted_where_they_start():
    def event(name, start, end, device=torch.autograd.DeviceType.CUDA):
        times = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return types.SimpleNamespace(name=name, time_range=times, device_type=device)

    events = [
        event("stage fwd.norm", 0, 1000, torch.autograd.DeviceType.CPU), event("before", 5, 9),
        event("stage fwd.norm", 10, 30), event("a", 10, 20), event("b", 21, 30), event("between", 31, 35),
        event("stage fwd.beta", 40, 60), event("c", 40, 60), event("stage fwd.norm", 70, 80), event("a", 70, 80),
    ]  # fmt: skip
    assert steps.on_device(events) == {"fwd.norm": pytest.approx(0.029), "fwd.beta": pytest.approx(0.020)}
    assert steps.on_host(events[:1]) == {"fwd.norm": 1.0}


def test_spans_are_held_against_fla_and_the_ceilings(add_idea):
    add_idea()
    case, module = cases.get("kda", "tiny"), registry.load("005")
    fla = [{"span": "bwd.intra", "ms": 3.0}, {"span": "bwd.gva", "ms": 0.5}]
    mine, theirs = profile.spans(case, module, [{"span": "bwd.gva", "ms": 0.25}], fla)
    assert (mine["span"], mine["ms"], theirs["span"], theirs["ms"]) == ("005 bwd.gva", "0.250", "fla bwd.gva", "0.500")
    assert mine["of the copy rate"].endswith(" %")
    assert profile.spans(case, module, [], []) == []  # a step that was pruned has no time and no line


def test_occupancy_is_that_of_the_scarcest():
    assert profile.occupancy(255, 4, 0) == 8 / 64  # 2 blocks of 4 warps at 256 registers
    assert profile.occupancy(32, 4, 100 << 10) == 8 / 64  # 2 blocks of 101 KB
    assert profile.occupancy(16, 4, 0) == 1.0
    assert profile.occupancy(16, 1, 0) == 32 / 64  # 32 blocks and no more


def test_the_text_has_every_table_and_the_plot(add_idea):
    add_idea()
    idea, case = registry.find("005"), cases.get("kda", "tiny")
    picture = plots.kernels(TABLES, "005 on tiny")
    assert picture.alt == "005 on tiny: 005-sum-heads 3.000 ms, the slowest mine; 000 6.000 ms, the slowest fla_a"
    shown = f"![{picture.alt}](x.svg)"
    reached, counters = [{"span": "a", "ms": 1}], [{"kernel": "k", "time": 2}]
    made = profile.text(idea, case, "fwd", TABLES, [], "", reached, counters, shown, [{"kernel": "k", "threads": 1}])
    heads = ("## Spans against", "## As launched", "## Counters")
    assert all(part in made for part in (shown, *heads, "| a | 1 |", "| k | 1 |", "| k | 2 |"))
    assert "## Counters\n\nNone: why" in profile.text(idea, case, "fwd", TABLES, [], counters="None: why")


FAKE = """#!/bin/sh
echo '==PROF== Connected'
echo '"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed"'
echo '"","","us","%"'
echo '"0","my|kernel(int)","12.5","81.0"'
"""


def test_counters_are_read_where_ncu_works(add_idea, tmp_path, monkeypatch):
    add_idea()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ncu.read("005", "tiny", "fwd") == "None: ncu is not installed here."
    fake = tmp_path / "ncu"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (found,) = ncu.read("005", "tiny", "fwd")
    assert (found["kernel"], found["time"], found["memory"]) == ("my\\|kernel(int)", "12.5 us", "81.0 %")
    fake.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM: no permission'\nexit 1\n")
    assert ncu.read("005", "tiny", "fwd") == "None: ==ERROR== ERR_NVGPUCTRPERM: no permission"
