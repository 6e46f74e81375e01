"""The in-chunk cumulative gate again, each column's running sum in one thread.

Parent: 016-bwd-regate (its gate and its bits of a step; the sum is fp32 from the first row to the last, not a product).
Delta: a program has 512 columns of a chunk, whatever heads they belong to, and a thread 4 of them: it asks for 16 rows
    at once, 8 bytes each, and adds them up in registers. No product, no shared memory, no shuffle, and nothing waits
    for anything but its rows.
Why it should be faster: the bytes are the same (768 a token and head); 016 stood at 66 % of the copy rate because a
    program had one tile, waited for it, then worked. Here 28 warps a multiprocessor have 2 to 4 KB each under way. And
    there is nothing to try out, so that large calls need no more of fla's kernel, which tunes itself (IDEA.md).
Constraints: 016's (sm_90 or later; K = 64 or 128; fp16 or bf16 q, k, v; a raw gate), but calls of any size.
"""

import torch
import triton
import triton.language as tl

from kernel_fun._common.launch import launch
from kernel_fun.kda.stages.k016_bwd_regate import _log2

FAMILY = "kda"
COLUMNS, ROWS, WARPS = 512, 16, 4  # of a program; rows asked for at once
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sums(
    g, gk, o_c, b_bias, b_rate, lower_bound, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SOFTPLUS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The chunk at g to gk. Of 64 rows, a number known when compiled, none has a predicate: there are too few of them
    for 16 rows, and rows would be asked for one after the other."""
    m_c = o_c < WIDTH
    b_sum = tl.zeros([COLUMNS], tl.float32)
    for r in range(0, 64, ROWS):
        b_rows = ()
        for i in tl.static_range(ROWS):
            b_row = tl.load(g + (r + i) * WIDTH + o_c, mask=m_c & (r + i < rows), other=0.0)
            b_rows = b_rows + (b_row,)  # noqa: RUF005 (Triton knows no star)
        for i in tl.static_range(ROWS):
            x = b_rows[i].to(tl.float32) + b_bias
            if SOFTPLUS:
                x *= LOG2E
                y = -b_rate * tl.where(x > 20.0, x, _log2(1.0 + tl.exp2(x), FAST))
            else:
                y = (lower_bound * LOG2E) / (1.0 + tl.exp2(x * (b_rate * -LOG2E)))
            b_sum += tl.maximum(y, -32.0, propagate_nan=tl.PropagateNan.ALL)
            tl.store(gk + (r + i) * WIDTH + o_c, b_sum, mask=m_c & (r + i < rows))


@triton.jit(do_not_specialize=["T", "NT"])
def columns_kernel(
    g, A_log, dt_bias,  # [B, T, HV, K], [HV], [HV K]
    gk,  # [B, T, HV, K] fp32
    cu_seqlens, chunk_indices, lower_bound, T, NT,
    HV: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, VARLEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS of the HV K of one chunk; NT chunks a batch row."""
    WIDTH: tl.constexpr = HV * K
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    i_c, i_p = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if VARLEN:
        i_n = tl.load(chunk_indices + 2 * i_c).to(tl.int64)
        i_t = tl.load(chunk_indices + 2 * i_c + 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        rows = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos - i_t * 64
        row = bos + i_t * 64
    else:
        rows = tl.cast(T - i_c % NT * 64, tl.int64)
        row = (i_c // NT).to(tl.int64) * T + i_c % NT * 64
    o_c = i_p * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < WIDTH  # known when compiled where COLUMNS divides it
    g += row * WIDTH
    gk += row * WIDTH
    b_bias = tl.zeros([COLUMNS], tl.float32)
    if HAS_BIAS:
        b_bias += tl.load(dt_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_rate = tl.full([COLUMNS], 1.0, tl.float32)
    if HAS_A:
        b_rate = tl.exp2(tl.load(A_log + o_c // K, mask=m_c, other=0.0).to(tl.float32) * LOG2E)
    if rows >= 64:
        _sums(g, gk, o_c, b_bias, b_rate, lower_bound, 64, WIDTH, COLUMNS, ROWS, SOFTPLUS, FAST)
    else:
        _sums(g, gk, o_c, b_bias, b_rate, lower_bound, rows, WIDTH, COLUMNS, ROWS, SOFTPLUS, FAST)


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
    return True, ""


def run(*, g_raw, A_log, dt_bias, p, cu_seqlens, chunk_indices):
    """gk [B,T,HV,K] fp32: log2 of the decay from the chunk's start up to and including each token."""
    gk = g_raw.new_empty(g_raw.shape, dtype=torch.float32)
    if p.NT:
        launch(
            columns_kernel, (p.NT * -(-p.HV * p.K // COLUMNS),),
            g_raw, A_log, dt_bias, gk, cu_seqlens, chunk_indices, p.lower_bound or 0.0, p.T, p.chunks_per_row,
            HV=p.HV, K=p.K, COLUMNS=COLUMNS, ROWS=ROWS, SOFTPLUS=p.gate == "softplus", HAS_A=A_log is not None,
            HAS_BIAS=dt_bias is not None, VARLEN=p.varlen, FAST=p.arch != (0, 0), num_warps=WARPS,
        )  # fmt: skip
    return {"gk": gk}


SPANS = {"bwd.regate": run}


def _compile(softplus, **constants):
    names = ("gk", "A_log", "dt_bias")
    types = {"g": "*bf16", **dict.fromkeys(names, "*fp32"), **dict.fromkeys(("cu_seqlens", "chunk_indices"), "*i64")}
    types |= {"lower_bound": "fp32", "T": "i32", "NT": "i32"}
    fixed = {"HV": 16, "K": 128, "COLUMNS": COLUMNS, "ROWS": ROWS, "SOFTPLUS": softplus, "HAS_A": True}
    return columns_kernel, types, fixed | {"HAS_BIAS": True, "VARLEN": False, "FAST": True} | constants, WARPS, 1


COMPILE = [_compile(True), _compile(False), _compile(True, HV=3, K=64, VARLEN=True)]
