"""The in-chunk cumulative gate again, in the backward, from the raw gate.

Parent: 004-fwd-prep (its gate: steps floored at 2^-32).
Delta: fla forms gk with an autotuned kernel of its own, whose steps are not floored as the forward's were. This is the
    forward's gate and cumsum alone, program = chunk, value head and 64 columns; the tensor cores do the running sum.
Why it should be faster: it need not be on the device, where fla is at 89 % of the copy rate with the same bytes (768 a
    token and head); but a launch costs 0.1 ms less of the host's time, and small calls wait for the host (IDEA.md).
Constraints: sm_90 or later; K = 64 or 128; fp16 or bf16 q, k, v; a raw gate (softplus or safe); short calls. Any T,
    packed sequences.
"""

import torch
import triton
import triton.language as tl

from kernel_fun._common.launch import launch

FAMILY = "kda"
BK, WARPS = 64, 4
MOST = 8192  # chunks times heads: where the host's time counts
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit(do_not_specialize=["T", "NT"])
def regate_kernel(
    g, A_log, dt_bias, gk, cu_seqlens, chunk_indices, lower_bound, T, NT,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, VARLEN: tl.constexpr, FAST: tl.constexpr,
):
    NK: tl.constexpr = K // BK
    i_k, i_hv, i_c = tl.program_id(0) % NK, tl.program_id(0) // NK % HV, tl.program_id(0) // (NK * HV)
    if VARLEN:
        i_n = tl.load(chunk_indices + 2 * i_c).to(tl.int64)
        i_t = tl.load(chunk_indices + 2 * i_c + 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        rows = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos - i_t * 64
        t0 = bos + i_t * 64
    else:
        rows = tl.cast(T - i_c % NT * 64, tl.int64)
        t0 = (i_c // NT).to(tl.int64) * T + i_c % NT * 64
    o_t, o_k = tl.arange(0, 64), i_k * BK + tl.arange(0, BK)
    m = (o_t < rows)[:, None]
    at = (t0 * HV + i_hv) * K + o_t[:, None] * (HV * K) + o_k[None, :]
    x = tl.load(g + at, mask=m, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(dt_bias + i_hv * K + o_k).to(tl.float32)[None, :]
    A = 1.0
    if HAS_A:
        A = tl.exp2(tl.load(A_log + i_hv).to(tl.float32) * LOG2E)
    if SOFTPLUS:
        x *= LOG2E
        y = -A * tl.where(x > 20.0, x, _log2(1.0 + tl.exp2(x), FAST))
    else:
        y = (lower_bound * LOG2E) / (1.0 + tl.exp2(x * (A * -LOG2E)))
    y = tl.where(o_t[:, None] < rows, tl.maximum(y, -32.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
    # the running sum is a product with a triangle of ones; y in three parts of 8 bits, each product exact
    ones = tl.where(o_t[:, None] >= o_t[None, :], 1.0, 0.0).to(tl.bfloat16)
    hi = y.to(tl.bfloat16)
    y -= hi.to(tl.float32)
    mid = y.to(tl.bfloat16)
    lo = (y - mid.to(tl.float32)).to(tl.bfloat16)
    b_g = tl.dot(ones, hi, tl.dot(ones, mid, tl.dot(ones, lo)))
    tl.store(gk + at, b_g, mask=m)


def supports(p):
    """Gates that are activated in the kernel (a precomputed one is kept by the forward), where other kernels of this
    package run as well: alone this one is not worth leaving fla's operator for."""
    if p.arch[0] < 9 and p.arch != (0, 0):
        return False, f"needs compute capability 9.0 or later, got {p.arch[0]}.{p.arch[1]}"
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    if p.gate not in ("softplus", "safe"):
        return False, f"needs a raw gate (softplus or safe), got {p.gate}"
    if p.NT * p.HV > MOST:
        return False, f"needs at most {MOST} chunks times heads (of more, fla's kernel is faster), got {p.NT * p.HV}"
    return True, ""


def run(*, g_raw, A_log, dt_bias, p, cu_seqlens, chunk_indices):
    """gk [B,T,HV,K] fp32: log2 of the decay from the chunk's start up to and including each token."""
    gk = g_raw.new_empty(g_raw.shape, dtype=torch.float32)
    launch(
        regate_kernel, (p.NT * p.HV * (p.K // BK),),
        g_raw, A_log, dt_bias, gk, cu_seqlens, chunk_indices, p.lower_bound or 0.0,
        p.T, p.chunks_per_row,
        HV=p.HV, K=p.K, BK=BK, SOFTPLUS=p.gate == "softplus", HAS_A=A_log is not None,
        HAS_BIAS=dt_bias is not None, VARLEN=p.varlen, FAST=p.arch != (0, 0), num_warps=WARPS,
    )  # fmt: skip
    return {"gk": gk}


SPANS = {"bwd.regate": run}

COMPILE = [
    (
        regate_kernel,
        {
            "g": "*bf16", "A_log": "*fp32", "dt_bias": "*fp32", "gk": "*fp32", "cu_seqlens": "*i64",
            "chunk_indices": "*i64", "lower_bound": "fp32", "T": "i32", "NT": "i32",
        },
        {"HV": 16, "K": 128, "BK": BK, "SOFTPLUS": softplus, "HAS_A": True, "HAS_BIAS": True, "VARLEN": False,
         "FAST": True},
        WARPS,
        1,
    )
    for softplus in (True, False)
]  # fmt: skip
