"""Idea 015 against its stages in fp64, on the CPU: its value side as torch, its key side thread by thread in numpy."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from loop import cases, registry, spans
from loop.tests import cute_cpu, gluon_as_torch

pytest.importorskip("cutlass", reason="the idea's key side needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested there")
PATH = registry.find("015").kernel


def case_of(name, **changes):
    return replace(cases.get("kda", name), **{"K": 128, "V": 64, **changes})


SMALL = {
    "gate": case_of("tiny_gate", T=64),
    "fp32_gate": case_of("tiny_gate", T=64, H=1, g_dtype="fp32"),
    "safe": case_of("tiny_safe", T=64),
    "log": case_of("tiny", T=70),
    "neg": case_of("tiny_neg", T=64),
    "ragged": case_of("tiny_ragged", T=101, B=1),
    "varlen": case_of("tiny_varlen"),
    "gva": case_of("tiny_gva", T=96, H=1, HV=2),
    "strong": case_of("tiny_strong", T=64),
    "mask": case_of("tiny_mask", T=128),
    "reset": case_of("tiny_reset", T=128),
    "weak": case_of("tiny_weak", T=64),
    "raw": case_of("tiny_raw"),  # shorter, its dA_log is next to nothing
    "raw_safe": case_of("tiny_raw_safe", T=64),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_is_within_its_budget(name, monkeypatch):
    """The emulation raises on overflow and on NaNs, so that neither can hide in a row nobody stores."""
    if name == "raw_safe":
        cute_cpu.far_out(monkeypatch)
    idea, keys = registry.load("015"), cute_cpu.load(PATH)
    values, _ = gluon_as_torch.load(registry.find("011").kernel)
    for attr, fake in {
        "value_kernel": values.value_kernel, "_tiles": values._tiles, "supports": lambda p: (True, ""),
        "_compile": lambda cfg, dtypes: cute_cpu.launcher(keys, keys._Config(*cfg)),
    }.items():
        monkeypatch.setattr(idea, attr, fake)
    found = spans.check_spans(idea, SMALL[name])
    assert {e.tensor for e in found} >= {"dq", "dk", "dv", "dg", "dbeta"}
    assert [str(e) for e in found if not e.ok] == []


def pairs_in_fp64(q, k, D, E, beta, step):
    """dq, dk, dg [64,K], db [64] of one chunk's pairs of different rows."""
    q, k, D, E, beta, step = (x.double() for x in (q, k, D, E, beta, step))
    pairs = (torch.arange(64)[:, None] > torch.arange(64)[None, :])[..., None]
    gk = step.cumsum(0)
    decay = torch.where(pairs, torch.exp2(gk[:, None] - gk[None, :]), 0.0)
    by_q, by_k = (torch.einsum("rs,sd,rsd->rd", x, k, decay) for x in (D, E))
    to_k = torch.einsum("rs,rd,rsd->sd", D, q, decay) + torch.einsum("rs,r,rd,rsd->sd", E, beta, k, decay)
    dg = q * by_q + beta[:, None] * k * by_k - k * to_k
    return by_q, beta[:, None] * by_k + to_k, dg.flip(0).cumsum(0).flip(0), (k * by_k).sum(1)


def pairs_alone(step, seed=0):
    """One chunk without states or pairs of a row with itself: dq, dk, dg [64,K], db [64]; and the same from fp64."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (F.normalize(torch.randn(64, 128, generator=draw), dim=-1).bfloat16() for _ in range(2))
    D, E = (torch.randn(64, 64, generator=draw).tril(-1).bfloat16() for _ in range(2))
    beta, gk = 2 * torch.rand(64, generator=draw), step.cumsum(0)
    keys = cute_cpu.load(PATH)
    cfg = keys._Config(False, "log", False, False, False, False, 4, 1, 1)
    none, far = torch.zeros(64 * 128).bfloat16(), torch.zeros(128)
    out = [torch.zeros(64 * 128).bfloat16(), torch.zeros(64 * 128).bfloat16(), torch.zeros(64 * 128), torch.zeros(64)]
    row, table = torch.zeros(64), torch.zeros(4, dtype=torch.int64)
    given = [q, k, gk, beta, none, none, none, D, E, row, far, row, far, far, far, row, row, *out]
    given += [far, far, table, table]
    cute_cpu.launcher(keys, cfg)(*(x.reshape(-1) for x in given), 64, 0.0, 1.0, 1, 1)
    want = pairs_in_fp64(q, k, D, E, beta, step)
    return [x.double().view(y.shape) for x, y in zip(out, want, strict=True)], want


DRAWN = torch.rand(3, 64, 128, generator=torch.Generator().manual_seed(1))
STEPS = {
    "none": torch.zeros(64, 128),
    "weak": -0.01 * DRAWN[0],
    "typical": -2 * DRAWN[0],
    "sixteen": torch.full((64, 128), -16.0),
    "at_the_floor": torch.full((64, 128), -32.0),
    "beyond": -40 * DRAWN[1],
    "masks": torch.where(DRAWN[2] < 0.3, -1443.0, -0.5),
    "one_mask_a_row": torch.where((torch.arange(64) % 5 == 2)[:, None], -1443.0, -0.1).expand(64, 128).contiguous(),
}


@pytest.mark.parametrize("name", STEPS)
def test_pairs_of_rows_at_any_gate(name):
    got, want = pairs_alone(STEPS[name])
    for x, y, limit in zip(got, want, (4e-3, 4e-3, 5e-3, 3e-3), strict=True):
        scale = max(y.norm().item(), 1e-6)
        assert (x - y).norm() <= limit * scale, (name, float((x - y).norm() / scale))


@pytest.mark.parametrize("name", ["none", "typical", "beyond", "masks"])
def test_every_pair_leaves_dg_as_it_entered(name):
    """Rounded operands are the same on both sides: the sum over a chunk is 0 up to fp32's rounding."""
    (_, _, dg, _), _ = pairs_alone(STEPS[name])
    assert dg[0].abs().max() <= 1e-5 * dg.abs().max()


def test_refuses_what_it_cannot_do():
    idea = registry.load("015")
    p = replace(SMALL["gate"].problem(), arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=64)) == (False, "needs K=128, got 64")
    assert not idea.supports(replace(p, B=2**16))[0]
