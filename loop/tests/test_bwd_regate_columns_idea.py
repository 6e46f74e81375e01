"""Idea 026 in the interpreter: the gate it makes again is that of its stage in fp64, whatever heads a program holds."""

from dataclasses import replace

import pytest
import torch

from loop import cases, registry, sm90, spans

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
HEADS = {  # columns of a chunk: less than a program's, as many, more, and a part of a second program's
    "192": {"H": 3, "HV": 3}, "512": {"H": 8, "HV": 8}, "640": {"H": 5, "HV": 5, "K": 128}, "1088": {"H": 17, "HV": 17},
}  # fmt: skip


def check(case):
    found = spans.check_spans(registry.load("026"), case)
    assert [e.tensor for e in found] == ["gk"]
    assert [str(e) for e in found if not e.ok] == []


@pytest.mark.parametrize(
    "name", ["tiny_gate", "tiny_safe", "tiny_ragged", "tiny_varlen", "tiny_raw", "tiny_raw_safe", "tiny_fp16"]
)
def test_the_gate_is_within_its_budget(name):
    check(cases.get("kda", name))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ["tiny_gate", "tiny_varlen"])
def test_whatever_heads_a_program_holds(heads, name):
    check(replace(cases.get("kda", name), **HEADS[heads]))


def regate(g, T=None):
    p = cases.get("kda", "tiny_gate").problem()
    p = replace(p, B=1, T=g.shape[1], NT=-(-g.shape[1] // 64), N=1, HV=g.shape[2], H=g.shape[2], has_dt_bias=False)
    run = registry.load("026").run
    return run(g_raw=g, A_log=torch.zeros(p.HV), dt_bias=None, p=p, cu_seqlens=None, chunk_indices=None)["gk"]


def test_a_nan_stays_in_its_column_and_chunk():
    g = torch.randn(1, 130, 2, 64).bfloat16()
    g[0, 70, 1, 5] = float("nan")
    spoilt = regate(g).isnan()
    assert spoilt[0, 70:128, 1, 5].all()
    assert spoilt.sum() == 58


def test_steps_are_floored_as_the_forwards_are():
    g = torch.full((1, 64, 1, 64), 1e4).bfloat16()
    assert torch.equal(regate(g)[0, :, 0, 0], -32.0 * torch.arange(1, 65))


def test_no_token():
    assert regate(torch.empty(1, 0, 2, 64).bfloat16()).shape == (1, 0, 2, 64)


def test_rows_are_asked_for_together():
    """A full chunk's loads have no predicate, so that none of them waits for another's."""
    full, *_ = (b.sass.split("EXIT")[0] for b in sm90.compile_each(registry.load("026").COMPILE[:1]))
    loads = [line for line in full.splitlines() if "LDG.E.64 " in line]
    assert len(loads) == 16
    assert not any("@" in line.split("LDG")[0] for line in loads)
