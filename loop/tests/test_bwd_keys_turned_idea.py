"""Idea 021 against its stages in fp64, on the CPU: 019's value side as torch, its own key side thread by thread."""

import re
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from loop import registry, spans
from loop.tests import cute_banks, cute_cpu, cute_races, gluon_as_torch
from loop.tests.test_bwd_keys_exact_idea import SMALL, Both, pairs_alone, value_side
from loop.tests.test_bwd_keys_idea import STEPS

pytest.importorskip("cutlass", reason="the idea's key side needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested there")
PATH = registry.find("021").kernel
pairs_alone = partial(pairs_alone, path=PATH)


def emulated(monkeypatch, source=PATH):
    """The idea with its kernels on the CPU."""
    idea, keys = registry.load("021"), Both(source)
    values, _ = value_side()
    monkeypatch.setattr(idea, "value_kernel", values.value_kernel)
    monkeypatch.setattr(idea, "tiles", gluon_as_torch.tiles)
    monkeypatch.setattr(idea, "supports", lambda p: (True, ""))
    monkeypatch.setattr(idea, "_compile", lambda cfg, dtypes: cute_cpu.launcher(keys, keys._Config(*cfg)))
    return idea


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_is_within_its_budget(name, monkeypatch):
    """The emulation raises on overflow and on NaNs, so that neither can hide in a row nobody stores."""
    if name == "raw_safe":
        cute_cpu.far_out(monkeypatch)
    found = spans.check_spans(emulated(monkeypatch), SMALL[name])
    assert {e.tensor for e in found} >= {"dq", "dk", "dv", "dg", "dbeta"}
    assert [str(e) for e in found if not e.ok] == []


def races(monkeypatch, name, source=PATH):
    class Ptx(cute_races.Ptx):
        found: ClassVar = []

    monkeypatch.setattr(cute_cpu, "Ptx", Ptx)
    spans.check_spans(emulated(monkeypatch, source), SMALL[name])
    return Ptx.found


@pytest.mark.parametrize("name", ["gate", "fp32_gate", "log_normed", "gva", "ragged"])
def test_no_thread_reads_or_overwrites_too_early(name, monkeypatch):
    assert races(monkeypatch, name) == []


BARRIERS = [m.span() for m in re.finditer(r"ptx\.sync_(warp|cta)\(\)", PATH.read_text())]


@pytest.mark.parametrize("span", BARRIERS, ids=str)
def test_every_barrier_is_needed(span, monkeypatch, tmp_path):
    text, copy = PATH.read_text(), tmp_path / "kernel.py"
    copy.write_text(text[: span[0]] + "None" + text[span[1] :])
    assert races(monkeypatch, "gate", copy) != []


@pytest.mark.parametrize("name", STEPS)
def test_pairs_of_rows_at_any_gate(name):
    got, want = pairs_alone(STEPS[name])
    for x, y, limit in zip(got, want, (4e-3, 4e-3, 5e-3, 3e-3), strict=True):
        scale = max(y.norm().item(), 1e-6)
        assert (x - y).norm() <= limit * scale, (name, float((x - y).norm() / scale))


@pytest.mark.parametrize("step", [-5.0, -16.0, -24.0])
def test_pairs_close_by_are_exact_to_sixteen_bits(step):
    """At strong gates neighbours are all there is; of them only those of different 16 rows are rounded, 3 of 63."""
    (_, _, dg, _), (_, _, want, _) = pairs_alone(torch.full((64, 128), step))
    row = torch.arange(64)
    for rows, limit in ((row % 16 != 0, 3e-5), ((row % 16 == 0) & (row > 0), 5e-3)):
        assert (dg - want)[rows].norm() <= limit * want[rows].norm()


@pytest.mark.parametrize("name", ["none", "typical", "beyond", "masks"])
def test_every_pair_leaves_dg_as_it_entered(name):
    """The same operands on both sides, or 16 bits of them: the sum over a chunk is 0 up to 2^-16 of what it leaves."""
    (_, _, dg, _), _ = pairs_alone(STEPS[name])
    assert dg[0].abs().max() <= 2.0**-16 * dg.abs().sum(0).max()


def test_equal_keys_leave_no_gradient_where_nothing_passes():
    """Unit keys, all the same, at g = -5: what the pairs leave behind is below 2^-17 of them."""
    one = F.normalize(torch.ones(64, 128), dim=-1).bfloat16()
    step = torch.full((64, 128), -5 / 0.6931471805599453)
    (_, _, dg, _), (_, _, want, _) = pairs_alone(step, q=one, k=one)
    assert (dg - want)[0].abs().max() <= 2.0**-17 * want.abs().sum(0).max()


def test_no_access_to_shared_memory_meets_a_bank_twice():
    """A warp's reads, and what it turns, take no more passes over the 32 banks than there are 128 bytes."""
    met = cute_banks.most(lambda: pairs_alone(STEPS["typical"]), ("lds", "ldmatrix_n", "put_turned"))
    assert met
    assert max(met) == 1


@pytest.mark.parametrize(("HV", "NT"), [(1, 1), (3, 256), (16, 515), (2, 2050)])
def test_sums_over_chunks(HV, NT):
    idea, gen = registry.load("021"), torch.Generator().manual_seed(3)
    dA, dbias = torch.randn(NT * 8 * HV, generator=gen), torch.randn(NT * HV * 128, generator=gen)
    want = dA.view(NT, 8, HV).double().sum((0, 1)), dbias.view(NT, HV * 128).double().sum(0)
    p = replace(SMALL["gate"].problem(), HV=HV, NT=NT)
    for has_A, has_bias in ((True, True), (True, False), (False, True)):
        got = [torch.full_like(x, float("nan"), dtype=torch.float32) for x in want]
        parts = [x if has else None for x, has in zip((dA, dbias, *got), (has_A, has_bias) * 2, strict=True)]
        of = idea._of(p, has_A, has_bias)
        idea.launch(idea.sums_kernel, of.sums_grid, *parts, NT, **of.sums)
        for x, y, has in zip(got, want, (has_A, has_bias), strict=True):
            assert (x.double() - y).abs().max() < 1e-5 * NT**0.5 * 3 if has else x.isnan().all()


@pytest.mark.parametrize("together", [True, False])
def test_what_passes_between_the_sides_is_aligned_and_apart(together):
    """As one piece or as several; also without a gate's parameters, and with an odd number of tokens and heads."""
    idea = registry.load("021")
    for has_A, has_bias, HV in ((True, True, 3), (False, False, 1)):
        of = idea._of(replace(SMALL["gate"].problem(), T=67, NT=2, B=1, H=1, HV=HV), has_A, has_bias)
        for sizes, dtype in ((of.halves, torch.bfloat16), (of.singles, torch.float32)):
            parts = idea._scratch(torch.empty(0), sizes, dtype, together)
            assert [(x.numel(), x.dtype, x.dim()) for x in parts] == [(n, dtype, 1) for n in sizes]
            spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in parts if x.numel())
            assert all(start % 16 == 0 for start, _ in spans)
            assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_refuses_what_it_cannot_do():
    idea = registry.load("021")
    p = replace(SMALL["gate"].problem(), arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=64)) == (False, "needs K=128, got 64")
    assert not idea.supports(replace(p, B=2**16))[0]
