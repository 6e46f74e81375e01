"""Idea 004 in the interpreter against its definition in fp64: gates, masks, lengths, grouped heads, repeated keys."""
import math
import os

import pytest
import torch

from kernel_fun._common.packed import describe
from kernel_fun._common.problem import KdaProblem
from loop import registry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
IDEA = "004"


def problem(B=1, T=64, H=1, HV=1, K=64, N=None, NT=None, **kw):
    chunks = B * math.ceil(T / 64) if NT is None else NT
    kw.setdefault("dtype", torch.bfloat16)
    return KdaProblem(B=B, T=T, H=H, HV=HV, K=K, V=64, N=N or B, NT=chunks, scale=K**-0.5, **kw)


def inputs(p, seed=0, keys="randn", gate=None):
    gen = torch.Generator().manual_seed(seed)
    rnd = lambda *s: torch.randn(*s, generator=gen)  # noqa: E731
    q, k = rnd(p.B, p.T, p.H, p.K), rnd(p.B, p.T, p.H, p.K)
    if keys == "equal":
        k = k[:, :1].expand_as(k).clone()
    if not p.l2norm:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g = rnd(p.B, p.T, p.HV, p.K)
    if p.gate == "log":
        g = torch.nn.functional.logsigmoid(g)
    if gate == "strong":
        g = torch.full_like(g, -11.0)
    elif gate == "masks":
        at = torch.rand(g.shape, generator=gen)
        g = torch.where(at < 0.3, -1000.0, torch.where(at < 0.4, -math.inf, g))
    elif gate == "weak":
        g = torch.full_like(g, -1e-3)
    beta = rnd(p.B, p.T, p.HV)
    if not p.beta_sigmoid:
        beta = beta.sigmoid()
    A_log = torch.rand(p.HV, generator=gen).mul(15).add(1).log() if p.has_A_log else None
    if gate == "raw":  # a quarter of the raw gates far out, and by turns A = 16 and 1/16
        size = torch.tensor([20.0, 60.0, 200.0])[torch.randint(3, g.shape, generator=gen)]
        g = torch.where(torch.rand(g.shape, generator=gen) < 0.25, g.sign() * size, g)
        A_log = math.log(16) * (1 - 2 * (torch.arange(p.HV) % 2.0)) if p.has_A_log else None
    bias = 0.5 * rnd(p.HV * p.K) if p.has_dt_bias else None
    return {
        "q_raw": q.to(p.dtype), "k_raw": k.to(p.dtype), "g_raw": g.to(p.g_dtype), "beta_raw": beta.to(p.beta_dtype),
        "A_log": A_log, "dt_bias": bias,
    }


def reference(p, x, spans):
    """The stages by their definitions, one chunk at a time, in fp64."""
    q, k, g, b = (x[n].double() for n in ("q_raw", "k_raw", "g_raw", "beta_raw"))
    out = {}
    if p.l2norm:
        out["q_rstd"], out["k_rstd"] = ((t.square().sum(-1) + 1e-6).rsqrt() for t in (q, k))
        q, k = q * out["q_rstd"][..., None], k * out["k_rstd"][..., None]
    if p.beta_sigmoid:
        b = p.beta_scale * b.sigmoid()
    if p.has_dt_bias:
        g = g + x["dt_bias"].double().view(p.HV, p.K)
    A = x["A_log"].double().exp()[:, None] if p.has_A_log else 1.0
    if p.gate == "softplus":
        g = -A * torch.nn.functional.softplus(g)
    elif p.gate == "safe":
        g = p.lower_bound * (A * g).sigmoid()
    g = (g / math.log(2)).clamp_min(-32.0)
    rep = p.HV // p.H
    qe, ke = q.repeat_interleave(rep, 2), k.repeat_interleave(rep, 2)
    gk = torch.zeros_like(g)
    Aqk = torch.zeros(p.B, p.T, p.HV, 64, dtype=torch.float64)
    Akk = Aqk.clone()
    for bi, lo, hi in spans:
        for t in range(lo, hi, 64):
            rows = slice(t, min(t + 64, hi))
            n = rows.stop - rows.start
            gk[bi, rows] = g[bi, rows].cumsum(0)
            for hv in range(p.HV):
                c = gk[bi, rows, hv]
                E = (c[:, None] - c[None]).clamp_max(0).exp2()
                qc, kc, bc = qe[bi, rows, hv], ke[bi, rows, hv], b[bi, rows, hv][:, None]
                Aqk[bi, rows, hv, :n] = p.scale * torch.einsum("rd,sd,rsd->rs", qc, kc, E).tril()
                L = bc * torch.einsum("rd,sd,rsd->rs", kc, kc, E).tril(-1)
                Akk[bi, rows, hv, :n] = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + L)
    return {**out, "q": q, "k": k, "beta": b, "gk": gk, "Aqk": Aqk, "Akk": Akk}


def check(p, x, lens=None, A_tol=4e-3):
    cu = ci = None
    spans = [(i, 0, p.T) for i in range(p.B)]
    if lens is not None:
        ends = torch.tensor([0, *lens]).cumsum(0)
        packed = describe(ends)
        cu, ci = ends, packed.chunk_indices
        spans = [(0, int(a), int(b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    idea = registry.load(IDEA)
    assert idea.supports(p) == (True, "")
    got = idea.run(**x, p=p, cu_seqlens=cu, chunk_indices=ci)
    want = reference(p, x, spans)
    store = 2.0**-9 if p.dtype == torch.bfloat16 else 2.0**-12
    for name, ref in want.items():
        have = got[name].double()
        assert have.isfinite().all(), name
        err = (have - ref).norm() / ref.norm().clamp_min(1e-30)
        tol = {"gk": 1e-5, "beta": 1e-6, "q_rstd": 1e-6, "k_rstd": 1e-6, "q": store, "k": store}.get(name, A_tol)
        assert err < tol, f"{name}: relative RMS error {float(err):.2e}, allowed {tol:.1e}"
    return got


RAW = {"gate": "softplus", "has_A_log": True, "has_dt_bias": True, "l2norm": True, "beta_sigmoid": True,
       "g_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16}


@pytest.mark.parametrize("axis", [0, 2])
def test_everything_in_kernel(axis, monkeypatch):
    """Both tile layouts: which one is fast depends on the Triton version, the result must not."""
    monkeypatch.setattr(registry.load(IDEA), "_I", axis)
    p = problem(T=64, H=1, HV=2, K=128, **RAW)
    check(p, inputs(p))


def test_ragged_batch():
    p = problem(B=2, T=75, **RAW)
    check(p, inputs(p, seed=1))


def test_packed():
    lens = (3, 70, 64, 0, 9)
    p = problem(T=sum(lens), N=len(lens), NT=5, varlen=True, **RAW)
    check(p, inputs(p, seed=2), lens=lens)


@pytest.mark.parametrize("A", [True, False])
def test_safe_gate(A):
    p = problem(T=40, gate="safe", lower_bound=-5.0, safe_gate=True, has_A_log=A, has_dt_bias=A, l2norm=True)
    check(p, inputs(p, seed=3))


@pytest.mark.parametrize("gate", ["softplus", "safe"])
def test_large_raw_gates(gate):
    bounds = {"lower_bound": -5.0, "safe_gate": True} if gate == "safe" else {}
    p = problem(HV=2, **RAW | {"gate": gate} | bounds)
    check(p, inputs(p, seed=7, gate="raw"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["strong", "masks", "weak"])
def test_extreme_gates(gate, dtype):
    p = problem(dtype=dtype, g_dtype=torch.float32)
    check(p, inputs(p, seed=4, gate=gate), A_tol=4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("beta", [1.0, 1.99])
def test_repeated_keys(beta, l2norm):
    """(I + L)^-1 stays bounded here while powers of L reach 1e5; its operands' rounding moves it by a few percent."""
    p = problem(neg_eigval=True, l2norm=l2norm)
    x = inputs(p, seed=5, keys="equal", gate="weak")
    x["beta_raw"] = torch.full_like(x["beta_raw"], beta)
    check(p, x, A_tol=1e-2 if beta == 1.0 else 0.1)


def test_upper_triangle_of_Akk_is_zero():
    p = problem(T=64, **RAW)
    Akk = check(p, inputs(p, seed=6))["Akk"][0, :, 0]
    assert not Akk.triu(1).any()
    assert (Akk.diagonal() == 1).all()


def test_says_no():
    idea = registry.load(IDEA)
    assert idea.supports(problem(K=96)) == (False, "needs K=64 or 128, got 96")
    assert not idea.supports(problem(dtype=torch.float32))[0]
    assert os.environ.get("TRITON_INTERPRET") == "1"
