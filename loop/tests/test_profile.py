"""Profiles: the text keeps what a person wrote, and the compiler's report is read from kernels as Triton keeps them."""

import types

import pytest
import torch

from loop import cases, profile, promote, registry

TABLES = {"005-sum-heads": {"mine": (2.0, 1), "fla_b": (1.0, 2)}, "000": {"fla_a": (6.0, 1)}}


def test_resources_are_read_through_wrappers():
    compiled = types.SimpleNamespace(n_regs=168, n_spills=4, metadata=types.SimpleNamespace(shared=98304, num_warps=8))
    kernel = types.SimpleNamespace(device_caches={0: ({"key": compiled}, {}, None, None, None)}, fn=None)
    module = types.SimpleNamespace(wrapped=types.SimpleNamespace(fn=kernel), helper=len, VALUE=3)
    report = {"kernel": "wrapped", "registers": 168, "spills": 4, "shared bytes": 98304, "warps": 8}
    assert profile.resources(module) == [report]


def test_a_kernel_that_was_never_launched_has_no_report():
    cache = {0: ({"x": types.SimpleNamespace(n_regs=None)},)}
    assert profile.resources(types.SimpleNamespace(k=types.SimpleNamespace(device_caches=cache))) == []


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
