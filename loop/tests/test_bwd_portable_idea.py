"""Idea 025 against its stages in fp64, in Triton's interpreter: every kind of call, and gates that end in no time."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda import reference
from loop import cases, registry, spans
from loop.tests.test_bwd_wy_idea import stage_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case_of(name, **changes):
    return replace(cases.get("kda", name), **changes)


SMALL = {
    "log_fp16": case_of("tiny", B=1, T=70, dtype="fp16", V=128),
    "log_normed": case_of("tiny", B=1, T=70, l2norm=True),
    "wide_fp16": case_of("tiny_gate", T=64, H=1, K=128, V=128, dtype="fp16", g_dtype="fp32"),
    "v_192": case_of("tiny_gate", T=64, H=1, V=192),
    "v_512": case_of("tiny_gate", T=64, H=1, V=512, l2norm=False),
    "safe_fp16": case_of("tiny_safe", T=64, dtype="fp16", g_dtype="fp16", beta_dtype="fp16"),
    "neg_fp16": case_of("tiny_neg", T=64, dtype="fp16", beta_dtype="fp16"),
    "gva_of_three": case_of("tiny_gva", T=64, H=1, HV=3, beta_sigmoid=True),
    "gva_fp16_varlen": case_of("tiny_varlen", H=1, HV=2, dtype="fp16", g_dtype="fp16"),
    "gva_wide": case_of("tiny_gva", T=64, H=1, HV=2, K=128),
    "strong_fp16": case_of("tiny_strong", T=64, dtype="fp16"),
    "mask_fp16": case_of("tiny_mask", dtype="fp16"),
    "weak_fp16": case_of("tiny_weak", T=64, dtype="fp16"),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_is_within_its_budget(name):
    found = spans.check_spans(registry.load("025"), SMALL[name])
    assert {e.tensor for e in found} >= {"dq", "dk", "dv", "dg", "dbeta"}
    assert [str(e) for e in found if not e.ok] == []
    if SMALL[name].dtype == "fp16":  # products have 16 bits, what passes between the kernels 11
        assert [str(e) for e in found if e.rel_rms > 1.5e-3] == []


@pytest.mark.parametrize("gate", ["softplus", "safe"])
@pytest.mark.parametrize("raw", [20.0, 60.0, 200.0])
def test_raw_gates_that_end_at_once_or_never(gate, raw, monkeypatch):
    """A_log = log 16 and inputs of +-raw: a row forgets all, or nothing, and the gate's own derivative is 0 or all.

    With softplus only rows that forget all have a gradient there, 2^-17 of what their neighbours' terms are that cancel
    around them: no product of 16 bits shows it, nor do 019's."""
    case, make = case_of("tiny_gate", T=64, H=1, gate=gate, l2norm=False), spans.inputs.make

    def extreme(*args, **kwargs):
        x = make(*args, **kwargs)
        x["g"].copy_(torch.where(x["g"] < 0, -raw, torch.where(x["g"] > 1, raw, x["g"])))
        x["A_log"].fill_(math.log(16))
        return x

    monkeypatch.setattr(spans.inputs, "make", extreme)
    found = spans.check_spans(registry.load("025"), case)
    beneath = {"dg": 2.0**-10, "dA_log": 0.05, "ddt_bias": 2.0**-8} if gate == "softplus" else {}
    assert [str(e) for e in found if not e.ok and not e.max_abs <= beneath.get(e.tensor, 0)] == []


def draw_steps(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


STEPS = {  # log2 units, [64, K]; with the size of the two-sided groups that they allow
    "none": (64, torch.zeros(64, 64)),
    "weak": (64, -2 * draw_steps(64, 64)),
    "typical": (16, -8 * draw_steps(64, 64)),
    "sixteen": (8, torch.full((64, 64), -16.0)),
    "sixty": (2, torch.full((64, 64), -60.0)),
    "beyond": (1, torch.full((64, 64), -140.0)),
    "uneven": (1, -200 * draw_steps(64, 64, seed=1)),
    "masks": (1, torch.where(draw_steps(64, 64, seed=2) < 0.3, -1443.0, -0.5)),
}


def pairs(step, D, E, seed=0):
    """The key side alone, of one chunk without states or pairs of a row with itself: dq, dk, dg [64,K], db [64]; and
    the same from fp64."""
    idea, draw = registry.load("025"), torch.Generator().manual_seed(seed)
    q, k = (F.normalize(torch.randn(64, 64, generator=draw), dim=-1).half() for _ in range(2))
    beta, gk = 2 * torch.rand(64, generator=draw), step.cumsum(0)
    halves = []
    for x in (D, E):
        x = x + x.T
        halves.append(torch.stack([x.bfloat16(), (x.bfloat16().float() - x).bfloat16()], 1))
    states, rows, out = torch.zeros(64, 64).half(), torch.zeros(64, 8), [torch.zeros(64, 64) for _ in range(3)]
    out.append(torch.zeros(64))
    given = [q, k, gk, beta, states, states, states, *halves, rows, torch.zeros(64), *[None] * 5, *out, *[None] * 4]
    given = [x if x is None else x.to(DEVICE) for x in given]
    idea.key_kernel[(1,)](
        *given, 0.0, 1.0, 64, H=1, HV=1, K=64, GATE="log", HAS_A=False, HAS_BIAS=False, L2NORM=False, SIGMOID=False,
        IS_VARLEN=False, FAST=False, num_warps=8,
    )
    q, k, D, E, beta, gk = (x.double() for x in (q, k, D, E, beta, gk))
    later = (torch.arange(64)[:, None] > torch.arange(64))[..., None]
    decay = torch.where(later, torch.exp2(gk[:, None] - gk[None, :]), 0.0)
    by_q, by_k = (torch.einsum("rs,sd,rsd->rd", x, k, decay) for x in (D, E))
    to_k = torch.einsum("rs,rd,rsd->sd", D, q, decay) + torch.einsum("rs,r,rd,rsd->sd", E, beta, k, decay)
    dg = q * by_q + beta[:, None] * k * by_k - k * to_k
    want = by_q, beta[:, None] * by_k + to_k, dg.flip(0).cumsum(0).flip(0), (k * by_k).sum(1)
    return [x.cpu().double() for x in given[16:20]], want


@pytest.mark.parametrize("name", STEPS)
def test_pairs_of_rows_have_sixteen_bits_at_any_gate(name):
    """dg too, although at strong gates neighbours are all it has; and over the chunk it sums to nothing."""
    draw = torch.Generator().manual_seed(3)
    D, E = (torch.randn(64, 64, generator=draw).tril(-1) for _ in range(2))
    got, want = pairs(STEPS[name][1], D, E)
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() <= 1e-4 * y.norm() + 1e-30, (name, float((x - y).norm() / y.norm()))
    dg = got[2]
    assert dg[0].abs().max() <= 2.0**-14 * (dg - dg.roll(-1, 0)).abs().sum(0).max()


@pytest.mark.parametrize("name", STEPS)
def test_groups_are_as_large_as_their_decay_allows(name):
    size, step = STEPS[name]
    gk = step.double().cumsum(0)
    falls = {n: (gk.view(-1, n, 64)[:, 0] - gk.view(-1, n, 64)[:, -1]).max() for n in (1, 2, 4, 8, 16, 32, 64)}
    assert max(n for n, fall in falls.items() if fall <= registry.load("025").RANGE.value) == size


def test_fp16_takes_gradients_whose_solve_leaves_its_range():
    """dv is within fp16, but neither is Akk^T dv, nor dk before the norm; dv of the call is, by beta."""
    p, x, meta = stage_inputs(B=1, T=64, H=1, HV=1, K=64, V=128, dtype=torch.float16)
    draw = torch.Generator().manual_seed(1)
    x["Akk"] = (torch.eye(64) + torch.ones(64, 64).tril(-1))[None, :, None].half().to(DEVICE)
    x["beta"] = torch.full((1, 64, 1), 2.0**-8, device=DEVICE)
    x["dv"] = (3e4 * torch.rand(1, 64, 1, 128, generator=draw)).half().to(DEVICE)
    one = {n: x[n][0, :, 0].double() for n in ("k", "gk", "v", "Akk")}
    error = x["beta"][0].double() * (one["v"] - (one["k"] * torch.exp2(one["gk"])) @ x["h"][0, 0, 0].double())
    x["v_new"] = (one["Akk"] @ error)[None, :, None].half()  # as the solve leaves it
    p = replace(p, l2norm=True)
    rstd = torch.full((1, 64, 1), 2.0**-10, device=DEVICE)  # keys of norm 1024
    wide = {n: t.double().cpu() for n, t in x.items()}
    assert (wide["Akk"][0, :, 0].T @ wide["dv"][0, :, 0]).max() > 2**17
    p64 = replace(p, dtype=torch.float64)
    dAqk = reference.dAv(v_new=wide["v_new"], do=wide["do"], Aqk=wide["Akk"], p=p64, cu_seqlens=None)["dAqk"]
    want = reference.bwd_wy(**wide, p=p64, cu_seqlens=None)
    both = {n: wide[n] for n in ("q", "k", "gk", "beta")}
    last = {n: want[n] for n in ("dAkk", "dq", "dk", "db", "dg")}
    want |= reference.bwd_intra(**both, **last, dAqk=dAqk, p=p64, cu_seqlens=None)
    norms = {n: wide[n] for n in ("q", "k")} | {"q_rstd": rstd.double().cpu(), "k_rstd": rstd.double().cpu()}
    want |= reference.norm_bwd(**norms, dq=want["dq"], dk=want["dk"], p=p64)
    assert want["dk"].abs().max() * 2**10 > 2**16
    got = registry.load("025").run_log_gate(**x, q_rstd=rstd, k_rstd=rstd, p=p, **meta)
    for name, other in {"dq": "dq", "dk": "dk", "dv": "dv", "dbeta": "db"}.items():
        off = (got[name].double().cpu() - want[other]).norm() / want[other].norm()
        assert off < 1e-3, (name, float(off))


def test_says_what_it_serves():
    idea = registry.load("025")
    for arch in ((0, 0), (8, 0), (8, 9), (9, 0), (12, 0)):
        for dtype in (torch.bfloat16, torch.float16):
            for K, V in ((64, 64), (64, 512), (128, 256)):
                assert idea.supports(KdaProblem(1, 64, 1, 1, K, V, 1, 1, dtype=dtype, arch=arch)) == (True, "")
    p = KdaProblem(1, 64, 1, 1, 64, 64, 1, 1)
    assert not idea.supports(replace(p, arch=(10, 0)))[0]
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 64, got 96")
    assert not idea.supports(replace(p, dtype=torch.float32))[0]
