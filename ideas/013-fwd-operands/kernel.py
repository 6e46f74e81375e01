"""The whole forward in two kernels that meet in ready operands.

Parent: 007-fwd-scan and, for what comes before it, 004-fwd-prep.
Delta: 007's scan makes k 2^gk, q 2^gk and k 2^(G - gk) again in every step, on the warps that carry its chain, from
    1 KB a token-head of q, k, gk. Here the first kernel writes them, rounded once (norms and scale inside), chunk by
    chunk as the tiles that the scan copies. So the scan has no exponential, builds nothing and masks nothing:
        r = beta (v^T - S^T kb^T)    v_new = r + r (Akk - I)^T
        S^T <- 2^G S^T + v_new kg    o^T = S^T qg^T + v_new Aqk^T
    with S^T [64, K] a warpgroup in fp32 accumulators as in 007. A warp of its own copies two chunks ahead, and
    warpgroups wait for data, not for each other. The first kernel is 004; there gk waits, until the scores are done and
    registers are free, in the bytes of kb and kg.
Why it should be faster: 768 B a token-head of operands instead of 1024 of q, k, gk; q, k only where a backward wants
    them. A step is 2048 cycles of tensor cores and 550 instructions a warp (007: 1430): copies bound it (IDEA.md).
Constraints: sm_90, K 64 or 128, V a multiple of 128, bf16 or fp16. Any gate (exponents as in 004, 007), any T, packed
    sequences, GVA. Not where 010's segments serve: few scans of many chunks.
"""
import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel_fun._common.launch import launch

FAMILY = "kda"
BK, WARPS = 64, 4
REGS = 255                         # of the first kernel: two programs a multiprocessor; with 168 three fit, and spill
LOG2E = tl.constexpr(1.4426950408889634)
# Triton gives threads to a load's axes in order of contiguity; ties go first axis first until 3.6, last axis first from
# 3.7 on. The groups must get theirs before rows and halves, which then lie in one thread's registers: the speed comes
# from there. Results do not depend on it.
_I = 0 if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7) else 2
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier     # renamed in Triton 3.7


# ------------------------------------------------------------------------------------------- operands of every chunk
@triton.jit
def _steps(x, A, lower_bound, GATE: tl.constexpr, HAS_A: tl.constexpr, FAST: tl.constexpr):
    """Raw gate (bias added) -> log2 of the step decay, floored at -32."""
    if GATE == "log":
        y = x * LOG2E
    elif GATE == "softplus":
        x *= LOG2E
        y = -A * tl.where(x > 20.0, x, _log2(1.0 + tl.exp2(x), FAST))
    else:
        if HAS_A:
            x *= A
        y = (lower_bound * LOG2E) / (1.0 + tl.exp2(x * (-LOG2E)))
    return tl.maximum(y, -32.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pick(x, here, axis: tl.constexpr):
    """The one element along `axis` where `here` holds, bit for bit: costs nothing where the axis lies in registers."""
    bits = tl.where(here, x.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(bits, axis, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _blocks(x, N: tl.constexpr, BK: tl.constexpr, I: tl.constexpr):
    """Tile -> [64/N blocks, N rows, BK]."""
    if I == 0:
        x = tl.permute(x, (2, 0, 1, 3))
    else:
        x = tl.permute(x, (0, 2, 1, 3))
    return tl.reshape(x, [64 // N, N, BK])


@triton.jit
def _halves(x, BK: tl.constexpr, I: tl.constexpr):
    """Tile -> rows 0..31 and rows 32..63, each [32, BK]."""
    if I == 0:
        lo, hi = tl.split(tl.permute(x, (0, 1, 3, 2)))
    else:
        lo, hi = tl.split(tl.permute(x, (2, 1, 3, 0)))
    return tl.reshape(lo, [32, BK]), tl.reshape(hi, [32, BK])


@triton.jit
def _along(n: tl.constexpr, axis: tl.constexpr):
    """0 .. n-1 along one axis of a tile."""
    x = tl.arange(0, n)
    if axis == 0:
        return x[:, None, None, None]
    elif axis == 1:
        return x[None, :, None, None]
    else:
        return x[None, None, :, None]


@triton.jit
def _spread(x):
    """[4, 16, 16] diagonal blocks -> [2, 32, 32], each block repeated across its rows."""
    return tl.reshape(tl.broadcast_to(tl.reshape(x, [2, 32, 1, 16]), [2, 32, 2, 16]), [2, 32, 32])


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _mm(a, b, DTYPE: tl.constexpr):
    if DTYPE.is_fp32():
        return tl.dot(a, b, input_precision="tf32")
    else:
        return tl.dot(a.to(DTYPE), b.to(DTYPE))


@triton.jit(do_not_specialize=["T", "NT"])
def prep_kernel(
    q, k, g, A_log, dt_bias, beta,              # raw inputs
    tiles, vec,                                 # the scan's operands: kb, kg, qg of every chunk; 2^G and beta
    Aqk, Akk, qn, kn, gk, q_rstd, k_rstd, b_out,
    cu_seqlens, chunk_indices,
    scale, lower_bound, beta_scale, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr,
    VARLEN: tl.constexpr, FULL: tl.constexpr, TWO_SIDED: tl.constexpr, BK: tl.constexpr, I: tl.constexpr,
    OP: tl.constexpr, INV: tl.constexpr, FAST: tl.constexpr, UNITS: tl.constexpr, GK: tl.constexpr,
    BETA: tl.constexpr,
):
    pid = tl.program_id(0)
    i_hv, i_c = pid % HV, pid // HV
    i_h = i_hv // (HV // H)
    if VARLEN:
        i_n = tl.load(chunk_indices + 2 * i_c).to(tl.int64)
        i_t = tl.load(chunk_indices + 2 * i_c + 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        rows = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos - i_t * 64
        t0 = bos + i_t * 64
    else:
        i_t = i_c % NT
        rows = T - i_t * 64
        t0 = (i_c // NT).to(tl.int64) * T + i_t * 64
    rows = tl.minimum(rows, 64).to(tl.int32)
    if FULL:
        rows = 64

    p_q = q + (t0 * H + i_h) * K
    p_k = k + (t0 * H + i_h) * K
    p_g = g + (t0 * HV + i_hv) * K
    o_r = t0 * HV + i_hv
    r = tl.arange(0, 64)

    # ---- the raw rows' own dots: squared norms, the diagonal of Aqk
    rd = tl.arange(0, 16)[None, :, None]
    sd = tl.arange(0, 16)[None, None, :]
    r4 = 16 * tl.arange(0, 4)[:, None, None] + rd
    o4 = r4 * (H * K) + tl.arange(0, K)[None, None, :]
    a_q = tl.load(p_q + o4, mask=r4 < rows, other=0.0)
    a_k = tl.load(p_k + o4, mask=r4 < rows, other=0.0)
    a_kt = tl.permute(a_k, (0, 2, 1))
    eye = rd == sd
    qk = tl.sum(tl.where(eye, tl.dot(a_q, a_kt), 0.0), 2)
    if L2NORM:
        rq = tl.rsqrt(tl.sum(tl.where(eye, tl.dot(a_q, tl.permute(a_q, (0, 2, 1))), 0.0), 2) + 1e-6)
        rk = tl.rsqrt(tl.sum(tl.where(eye, tl.dot(a_k, a_kt), 0.0), 2) + 1e-6)
        if UNITS and i_hv % (HV // H) == 0:
            tl.store(q_rstd + (t0 + r) * H + i_h, tl.reshape(rq, [64]), mask=r < rows)
            tl.store(k_rstd + (t0 + r) * H + i_h, tl.reshape(rk, [64]), mask=r < rows)
    else:
        rq = tl.full([4, 16], 1.0, tl.float32)
        rk = rq

    # ---- tiles [4 groups, 8 rows, 2 halves, BK], groups on axis I
    h = _along(2, 2 - I)
    i = _along(4, I)
    j = _along(8, 1)
    d = tl.max_contiguous(tl.arange(0, BK), 2)[None, None, None, :]
    m = 32 * h + 8 * i + j < rows
    o_qk = (8 * H * K) * i + d + (32 * H * K) * h + (H * K) * j
    o_g = (8 * HV * K) * i + d + (32 * HV * K) * h + (HV * K) * j
    p_x = tiles + (i_c.to(tl.int64) * HV + i_hv) * (3 * 64 * K)
    p_vec = vec + (i_c.to(tl.int64) * HV + i_hv) * (K + 64)
    # until the end gk lies where kb and kg will: of each 64 channels the first 32 in kb's bytes, the others in kg's
    p_gk = p_x.to(tl.pointer_type(tl.float32))
    x1 = tl.arange(0, BK)
    x1 = tl.max_contiguous(tl.multiple_of(x1 + (x1 >> 5) * (32 * K - 32), 2), 2)
    o_s = (4 * K) * i + (16 * K) * h + (K // 2) * j + x1[None, None, None, :]
    up = i & 1
    up2 = i & 2
    A = 1.0
    if HAS_A:
        A = tl.exp2(tl.load(A_log + i_hv).to(tl.float32) * LOG2E)

    qk32 = tl.zeros([64, 32], tl.float32)
    q16 = tl.zeros([2, 32, 32], tl.float32)
    k16 = tl.zeros([2, 32, 32], tl.float32)
    q8 = tl.zeros([4, 16, 16], tl.float32)
    k8 = tl.zeros([4, 16, 16], tl.float32)
    for k0 in tl.range(0, K, BK):
        # decays: c inside the group, X before it within its 16 or 32 rows
        past: tl.constexpr = 0.0 if GATE == "log" else float("-inf")  # raw values that mean no decay
        x = tl.load(p_g + k0 + o_g, mask=m, other=past).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(dt_bias + i_hv * K + k0 + d).to(tl.float32)
        c = tl.cumsum(_steps(x, A, lower_bound, GATE, HAS_A, FAST), 1)
        tot = _pick(c, j == 7, 1)
        pair = tl.sum(tl.reshape(tot, [2, 2, 2, BK]), 1 + I // 2, keep_dims=True)
        pair = tl.reshape(tl.broadcast_to(pair, [2, 2, 2, BK]), [4 - I, 1, 2 + I, BK])
        quad = tl.sum(tot, I, keep_dims=True)
        X16 = tl.where(up != 0, pair - tot, 0.0)
        X32 = tl.where(up2 != 0, quad - pair, 0.0) + X16
        G = tl.sum(quad, 2 - I, keep_dims=True)
        X64 = X32 + tl.where(h != 0, G - quad, 0.0)
        tl.store(p_gk + k0 // 2 + o_s, c + X64)

        b_q = tl.load(p_q + k0 + o_qk, mask=m, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + k0 + o_qk, mask=m, other=0.0).to(tl.float32)

        # scores between the halves, between 16-row blocks of a half, between 8-row groups of a block
        f = tl.exp2(tl.where(h != 0, c + X32, quad - X32 - c))
        k_lo, k_hi = _halves((b_k * f).to(OP), BK, I)
        _, q_hi = _halves((b_q * f).to(OP), BK, I)
        qk_hi = tl.reshape(tl.permute(tl.join(q_hi, k_hi), (2, 0, 1)), [64, BK])
        qk32 = tl.dot(qk_hi, k_lo.T, qk32)

        f = tl.exp2(tl.where(up2 != 0, 1.0, -1.0) * c + tl.where(up2 != 0, X16, pair - X16))
        kf = _blocks((b_k * f).to(OP), 32, BK, I)
        kt = tl.permute(kf, (0, 2, 1))
        q16 = tl.dot(_blocks((b_q * f).to(OP), 32, BK, I), kt, q16)
        k16 = tl.dot(kf, kt, k16)
        f = tl.exp2(tl.where(up != 0, 1.0, -1.0) * c + tl.where(up != 0, 0.0, tot))
        kf = _blocks((b_k * f).to(OP), 16, BK, I)
        kt = tl.permute(kf, (0, 2, 1))
        low = (rd >> 3) > (sd >> 3)
        q8 = tl.where(low, tl.dot(_blocks((b_q * f).to(OP), 16, BK, I), kt, q8), q8)
        k8 = tl.where(low, tl.dot(kf, kt, k8), k8)

        # scores inside an 8-row group
        if TWO_SIDED:
            e = c - 0.5 * (_pick(c, j == 3, 1) + _pick(c, j == 4, 1))
            f = tl.exp2(e)
            kt = tl.permute(_blocks((b_k * tl.exp2(-e)).to(OP), 16, BK, I), (0, 2, 1))
            low = ((rd >> 3) == (sd >> 3)) & (rd > sd)
            q8 = tl.where(low, tl.dot(_blocks((b_q * f).to(OP), 16, BK, I), kt, q8), q8)
            k8 = tl.where(low, tl.dot(_blocks((b_k * f).to(OP), 16, BK, I), kt, k8), k8)
        else:
            for lv in tl.static_range(3):
                cl = tl.reshape(c, [4 - I, 4 >> lv, 2 << lv, 2 + I, BK])
                at = tl.arange(0, 2 << lv)[None, None, :, None, None]
                e = cl - _pick(cl, at == (1 << lv) - 1, 2)
                f = tl.exp2(tl.reshape(tl.where(at >= (1 << lv), e, -e), [4 - I, 8, 2 + I, BK]))
                kf = _blocks((b_k * f).to(OP), 16, BK, I)
                kt = tl.permute(kf, (0, 2, 1))
                low = ((rd >> lv) ^ (sd >> lv)) == 1
                q8 = tl.where(low, tl.dot(_blocks((b_q * f).to(OP), 16, BK, I), kt, q8), q8)
                k8 = tl.where(low, tl.dot(kf, kt, k8), k8)

    # ---- L = diag(beta) strict(Mkk), inverse of I + L inside 16-row blocks
    o_b = o_r + HV * r
    b = tl.load(beta + o_b, mask=r < rows, other=0.0).to(tl.float32)
    if SIGMOID:
        b = beta_scale / (1.0 + tl.exp2(b * (-LOG2E)))
        if BETA:
            tl.store(b_out + o_b, b, mask=r < rows)
        b = tl.where(r < rows, b, 0.0)
    tl.store(p_vec + K + r, b)
    rk_w = tl.reshape(rk, [64])[:, None]
    rq_w = tl.reshape(rq, [64])[:, None]
    w = tl.reshape(b, [4, 16]) * rk
    L = tl.where(rd > sd, k8 * w[:, :, None] * rk[:, None, :], 0.0)
    Ad = tl.where(eye, 1.0, 0.0) - tl.where(((rd >> 1) == (sd >> 1)), L, 0.0)
    for lv in tl.static_range(1, 4):
        Ad -= _mm(_mm(Ad, tl.where(((rd >> lv) ^ (sd >> lv)) == 1, L, 0.0), INV), Ad, INV)

    # ---- inside halves
    r3 = tl.arange(0, 32)[None, :, None]
    s3 = tl.arange(0, 32)[None, None, :]
    h3 = 32 * tl.arange(0, 2)[:, None, None]
    same = (r3 >> 4) == (s3 >> 4)
    low = (r3 >> 4) > (s3 >> 4)
    w = tl.reshape(w, [2, 32])
    rk = tl.reshape(rk, [2, 32])
    rq = tl.reshape(rq, [2, 32]) * scale
    A3 = tl.where(same, _spread(Ad), 0.0)
    L = tl.where(low, k16 * w[:, :, None] * rk[:, None, :], 0.0)
    A3 -= _mm(_mm(A3, L, INV), A3, INV)
    q8 = tl.where(eye, qk[:, :, None], q8)
    M3 = tl.where(same, _spread(q8), q16)
    M3 = tl.where(r3 >= s3, M3 * rq[:, :, None] * rk[:, None, :], 0.0)
    o3 = o_r * 64 + (h3 + r3) * (HV * 64) + h3 + s3
    tl.store(Aqk + o3, M3.to(Aqk.dtype.element_ty), mask=h3 + r3 < rows)
    tl.store(Akk + o3, A3.to(Akk.dtype.element_ty), mask=h3 + r3 < rows)

    # ---- between them
    r2 = tl.arange(0, 32)[:, None]
    s2 = tl.arange(0, 32)[None, :]
    q32, k32 = tl.split(tl.permute(tl.reshape(qk32, [2, 32, 32]), (1, 2, 0)))
    A11, A22 = tl.split(tl.permute(A3, (1, 2, 0)))
    _, w_hi = tl.split(tl.permute(w, (1, 0)))
    _, rq_hi = tl.split(tl.permute(rq, (1, 0)))
    rk_lo, _ = tl.split(tl.permute(rk, (1, 0)))
    A21 = -_mm(_mm(A22, k32 * w_hi[:, None] * rk_lo[None, :], INV), A11, INV)
    M21 = q32 * rq_hi[:, None] * rk_lo[None, :]
    o2 = o_r * 64 + r2 * (HV * 64) + s2
    tl.store(Aqk + o2 + HV * 2048, M21.to(Aqk.dtype.element_ty), mask=r2 + 32 < rows)
    tl.store(Akk + o2 + HV * 2048, A21.to(Akk.dtype.element_ty), mask=r2 + 32 < rows)
    zero = tl.zeros([32, 32], Akk.dtype.element_ty)
    tl.store(Aqk + o2 + 32, zero, mask=r2 < rows)
    tl.store(Akk + o2 + 32, zero, mask=r2 < rows)

    # ---- what the scan multiplies, zero beyond the sequence
    rw = tl.arange(0, 64)[:, None]
    x1 = tl.arange(0, BK)
    cw = x1[None, :]
    cs = tl.max_contiguous(tl.multiple_of(x1 + (x1 >> 5) * (32 * K - 32), 8), 8)[None, :]
    o_w = rw * (H * K) + cw
    tl.debug_barrier()                          # gk is written
    for k0 in tl.range(0, K, BK):
        e = tl.load(p_gk + k0 // 2 + rw * (K // 2) + cs)
        G = tl.load(p_gk + k0 // 2 + 63 * (K // 2) + cs)
        y = tl.load(p_k + k0 + o_w, mask=rw < rows, other=0.0).to(tl.float32)
        x = tl.load(p_q + k0 + o_w, mask=rw < rows, other=0.0).to(tl.float32)
        if L2NORM:
            y *= rk_w
            x *= rq_w
            if UNITS and i_hv % (HV // H) == 0:  # the first value head of a group writes for all
                tl.store(kn + (t0 * H + i_h) * K + k0 + o_w, y.to(OP), mask=rw < rows)
                tl.store(qn + (t0 * H + i_h) * K + k0 + o_w, x.to(OP), mask=rw < rows)
        if GK:
            tl.store(gk + o_r * K + k0 + rw * (HV * K) + cw, e, mask=rw < rows)
        f = tl.exp2(e)
        p_w = p_x + k0 + rw * K + cw
        tl.store(p_w + 128 * K, (x * (f * scale)).to(OP))
        tl.store(p_vec + k0 + cw, tl.exp2(G))
        tl.debug_barrier()                      # everybody has read gk
        tl.store(p_w, (y * f).to(OP))
        tl.store(p_w + 64 * K, (y * tl.exp2(G - e)).to(OP))

# ------------------------------------------------------------------------------------------------------------ the scan
# Partitions of warps: each warpgroup carries 64 value columns, one warp starts the copies. Shapes in shared memory: kb,
# kg, qg [64, K]; A, Aq, v, out [64, 64]; two of each, for chunks i and i + 1 (v: a warpgroup), but one out a warpgroup.
# A chunk's kb and v ("early") are free for the chunk after next halfway through its step, the others ("late") at its
# end.
@gluon.jit
def _copies(
    d_x, d_A, d_Aq, d_v, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, tile, bos, c_A, c_v, NT,
    HV: gl.constexpr, K: gl.constexpr, NP: gl.constexpr,
):
    """All copies of a scan, each as soon as its buffer is free."""
    for i in range(NT):
        s, phase = i & 1, ((i >> 1) & 1) ^ 1                    # the first two waits are for what was never taken
        row, at = (bos + i * 64).to(gl.int32), ((tile + i * HV) * 192).to(gl.int32)
        mbarrier.wait(early_free.index(s), phase)
        mbarrier.expect(early.index(s), 128 * (K + 64 * NP))
        tma.async_copy_global_to_shared(d_x, [at, 0], early.index(s), kb.index(s))
        for w in gl.static_range(NP):
            tma.async_copy_global_to_shared(d_v, [row, c_v + 64 * w], early.index(s), v.index(NP * s + w))
        mbarrier.wait(late_free.index(s), phase)
        mbarrier.expect(late.index(s), 256 * (K + 64))
        tma.async_copy_global_to_shared(d_A, [row, c_A], late.index(s), A.index(s))
        tma.async_copy_global_to_shared(d_x, [at + 128, 0], late.index(s), qg.index(s))
        tma.async_copy_global_to_shared(d_x, [at + 64, 0], late.index(s), kg.index(s))
        tma.async_copy_global_to_shared(d_Aq, [row, c_A], late.index(s), Aq.index(s))


@gluon.jit
def _vector(vec, tile, o_e, on, K: gl.constexpr):
    """2^G (K values) and beta (64) of a chunk; 256 lanes."""
    return gl.load(vec + tile * (K + 64) + o_e, mask=(o_e < K + 64) & on, other=0.0)


@gluon.jit
def _steps_of(
    d_o, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, small, out, vec, h0, o, ht, tile, bos, c_v, p_state,
    n_t, W: gl.constexpr, NP: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_HT: gl.constexpr, FULL: gl.constexpr,
):
    """The chunks of n_t tokens from bos on, 64 value columns from column c_v of v's rows on."""
    DT: gl.constexpr = kb.dtype
    S64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    A64: gl.constexpr = gl.DotOperandLayout(0, S64, 2)
    AK: gl.constexpr = gl.DotOperandLayout(0, SK, 2)
    CV: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    NT = (n_t + 63) // 64

    o_e = gl.arange(0, 256, layout=ROW)
    small.index(2 * W).store(_vector(vec, tile, o_e, NT > 0, K))
    b_next = _vector(vec, tile + HV, o_e, NT > 1, K)
    o_m = gl.arange(0, 64, layout=gl.SliceLayout(1, SK))[:, None]
    o_d = gl.arange(0, K, layout=gl.SliceLayout(0, SK))[None, :]
    p_h = p_state + o_d * V + o_m
    b_S = gl.zeros([64, K], gl.float32, SK)                     # the state, transposed
    if HAS_H0:
        b_S += gl.load(h0 + p_h)
    b_h = b_S.to(DT)
    _barrier()

    for i in range(NT):
        s, phase, row = i & 1, (i >> 1) & 1, bos + i * 64
        b_small = b_next                                        # of the next chunk, asked for a step ago
        b_next = _vector(vec, tile + (i + 2) * HV, o_e, i + 2 < NT, K)

        # ---- r = beta (v^T - S^T kb^T)
        mbarrier.wait(early.index(s), phase)
        b_hA = gl.convert_layout(b_h, A64)
        x = warpgroup_mma(
            b_hA, kb.index(s).permute((1, 0)), gl.zeros([64, 64], gl.float32, S64), use_acc=False, is_async=True,
        )
        b_v = v.index(NP * s + W).permute((1, 0)).load(S64).to(gl.float32)
        b_b = small.index(2 * W + s).slice(K, 64).load(gl.SliceLayout(0, S64))[None, :]
        b_r = b_b * (b_v - warpgroup_mma_wait(0, [x]))
        if not FULL:
            live = gl.arange(0, 64, layout=gl.SliceLayout(0, S64))[None, :] < n_t - i * 64
            b_r = gl.where(live, b_r, 0.0)                      # a tile ends in rows of what comes next

        # ---- v_new = r + r (Akk - I)^T: the unit diagonal meets an unrounded r; behind it the read-out of the state
        b_rb = b_r.to(DT)
        mbarrier.wait(late.index(s), phase)
        x = warpgroup_mma(
            gl.convert_layout(b_rb, A64), A.index(s).permute((1, 0)), b_r - b_rb.to(gl.float32), is_async=True,
        )
        y = warpgroup_mma(
            b_hA, qg.index(s).permute((1, 0)), gl.zeros([64, 64], gl.float32, S64), use_acc=False, is_async=True,
        )
        b_S = b_S * small.index(2 * W + s).slice(0, K).load(gl.SliceLayout(0, SK))[None, :]
        tma.store_wait(0)                                       # the last o has left its tile
        _barrier()                                              # nobody here reads kb or v any more
        mbarrier.arrive(early_free.index(s), count=1)
        small.index(2 * W + 1 - s).store(b_small)
        b_vn = warpgroup_mma_wait(1, [x])
        if not FULL:
            b_vn = gl.where(live, b_vn, 0.0)                    # so do Akk's
        b_vb = b_vn.to(DT)

        # ---- S^T <- 2^G S^T + v_new kg, o^T = S^T qg^T + v_new Aqk^T
        z = warpgroup_mma(gl.convert_layout(b_vb, AK), kg.index(s), b_S, is_async=True)
        y = warpgroup_mma(gl.convert_layout(b_vb, A64), Aq.index(s).permute((1, 0)), y, is_async=True)
        b_S = warpgroup_mma_wait(1, [z])
        b_h = b_S.to(DT)
        out.permute((1, 0)).store(warpgroup_mma_wait(0, [y]).to(DT))
        fence_async_shared()
        _barrier()                                              # products done, o is in its tile
        mbarrier.arrive(late_free.index(s), count=1)
        if FULL:
            tma.async_copy_shared_to_global(d_o, [row.to(gl.int32), c_v], out)
        else:
            if n_t - i * 64 >= 64:
                tma.async_copy_shared_to_global(d_o, [row.to(gl.int32), c_v], out)
            else:
                o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, CV))[:, None]
                o_v = gl.arange(0, 64, layout=gl.SliceLayout(0, CV))[None, :]
                p_o = row * (HV * V) + c_v + (o_r * (HV * V) + o_v)
                gl.store(o + p_o, out.load(CV), mask=(o_r < n_t - i * 64) & (o_v >= 0))
    tma.store_wait(0)
    if HAS_HT:
        gl.store(ht + p_h, b_S)


@gluon.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    d_x, d_A, d_Aq, d_v, d_o,                                  # descriptors
    vec, h0, o, ht, cu_seqlens, chunk_offsets, T, N,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr,
    VARLEN: gl.constexpr, FULL: gl.constexpr,
):
    """A program: BV value columns of a sequence and head. d_x, vec: see `handover`."""
    DT: gl.constexpr = d_x.dtype
    NP: gl.constexpr = BV // 64
    NV: gl.constexpr = V // BV
    i_v = gl.program_id(0) % NV
    i_hv = (gl.program_id(0) // NV % HV).to(gl.int64)
    i_n = (gl.program_id(0) // (NV * HV)).to(gl.int64)
    if VARLEN:
        bos = gl.load(cu_seqlens + i_n).to(gl.int64)
        n_t = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - bos).to(gl.int32)
        first = gl.load(chunk_offsets + i_n).to(gl.int64)
    else:
        bos = i_n * T
        n_t = T
        first = i_n * ((T + 63) // 64)
    NT = (n_t + 63) // 64
    tile = first * HV + i_hv                                   # HV further each chunk
    c_A, c_v = (i_hv * 64).to(gl.int32), (i_hv * V + i_v * BV).to(gl.int32)
    p_state = (i_n * HV + i_hv) * (K * V) + i_v * BV

    kb = gl.allocate_shared_memory(DT, [2, 64, K], d_x.layout)
    kg = gl.allocate_shared_memory(DT, [2, 64, K], d_x.layout)
    qg = gl.allocate_shared_memory(DT, [2, 64, K], d_x.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    Aq = gl.allocate_shared_memory(DT, [2, 64, 64], d_Aq.layout)
    v = gl.allocate_shared_memory(DT, [2 * NP, 64, 64], d_v.layout)
    out = gl.allocate_shared_memory(DT, [NP, 64, 64], d_o.layout)
    small = gl.allocate_shared_memory(gl.float32, [2 * NP, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    early = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    late = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    early_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    late_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(2):
        mbarrier.init(early.index(j), count=1)
        mbarrier.init(late.index(j), count=1)
        mbarrier.init(early_free.index(j), count=NP)
        mbarrier.init(late_free.index(j), count=NP)
    fence_async_shared()

    if NP == 2:
        gl.warp_specialize([
            (_steps_of, (d_o, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, small, out.index(0),
                         vec, h0, o, ht, tile, bos, c_v, p_state, n_t, 0,
                         NP, HV, K, V, HAS_H0, HAS_HT, FULL)),
            (_steps_of, (d_o, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, small, out.index(1),
                         vec, h0, o, ht, tile, bos, c_v + 64, p_state + 64, n_t, 1,
                         NP, HV, K, V, HAS_H0, HAS_HT, FULL)),
            (_copies, (d_x, d_A, d_Aq, d_v, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, tile, bos, c_A,
                       c_v, NT, HV, K, NP)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_steps_of, (d_o, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, small, out.index(0),
                         vec, h0, o, ht, tile, bos, c_v, p_state, n_t, 0,
                         NP, HV, K, V, HAS_H0, HAS_HT, FULL)),
            (_copies, (d_x, d_A, d_Aq, d_v, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, tile, bos, c_A,
                       c_v, NT, HV, K, NP)),
        ], [1], [24])
    for j in gl.static_range(2):
        mbarrier.invalidate(early.index(j))
        mbarrier.invalidate(late.index(j))
        mbarrier.invalidate(early_free.index(j))
        mbarrier.invalidate(late_free.index(j))

    if VARLEN:  # noqa: SIM102  (compile-time and run-time conditions)
        if i_n == N - 1:                                       # tokens after the last sequence belong to none
            CV: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
            o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, CV))[:, None]
            o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, CV))[None, :]
            b_o = gl.zeros([64, BV], DT, CV)
            for i_t in range(n_t, (T - bos).to(gl.int32), 64):
                p_o = (bos + i_t) * (HV * V) + c_v + (o_r * (HV * V) + o_v)
                gl.store(o + p_o, b_o, mask=(bos + i_t + o_r < T) & (o_v >= 0))


# ----------------------------------------------------------------------------------------------------------- host code
SPAN = "fwd.norm..fwd.out"
WRITES = {SPAN: ("q", "k", "q_rstd", "k_rstd", "beta", "gk", "Aqk", "Akk", "o", "ht")}


def supports(p) -> tuple[bool, str]:
    """Where every multiprocessor has a scan, or the sequences are too short to be cut."""
    if p.arch[0] != 9:
        return False, f"needs compute capability 9.x, got {p.arch[0]}.{p.arch[1]}"
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 128:  # one warpgroup and a copying warp, for V = 64 or 192, has not run on a GPU
        return False, f"needs V a multiple of 128, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    if not p.NT:
        return False, "needs a token"
    if max(p.B * p.T, p.NT * p.HV * 192) >= 2**31:
        return False, f"needs fewer than 2^31 / 192 chunks times heads (a descriptor's coordinates), got {p.NT * p.HV}"
    scans = p.N * p.HV * (p.V // _tile(p))
    if scans <= 66 and p.NT >= 16 * p.N:
        few = f"got {scans} of {p.NT // p.N}"
        return False, f"needs more than 66 scans, or fewer than 16 chunks in each: 010 cuts them, {few}"
    return True, ""


def _tile(p):
    return 64 if p.V % 128 else 128                 # one warpgroup per 64 value columns


@functools.cache
def _swizzled():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _tiles(x, columns):
    """A descriptor of [64, columns] tiles of a matrix."""
    return TensorDescriptor.from_tensor(x, [64, columns], _swizzled())


def handover(p, like):
    """Room for what the two kernels meet in, chunks in `chunk_indices`' order (dense: [B, T / 64]).

    operands [NT * HV * 3 * 64, K] in p.dtype: of every chunk and head kb = k 2^gk, kg = k 2^(G - gk) and
    qg = scale q 2^gk, 64 rows each, zero beyond the sequence's end. vec [NT * HV, K + 64] fp32: 2^G, then beta, zero
    beyond the end.
    """
    operands = like.new_empty(p.NT * p.HV * 3 * 64, p.K, dtype=p.dtype)
    return operands, like.new_empty(p.NT * p.HV, p.K + 64, dtype=torch.float32)


def scan(*, operands, vec, Akk, Aqk, v, h0, p, cu_seqlens, chunk_offsets):
    """The scan alone, one launch. `operands`, `vec`: see `handover`. Akk (with its unit diagonal) and Aqk (the scale in
    it) [B,T,HV,64] p.dtype, zero above their diagonals. Returns o [B,T,HV,V] p.dtype, ht [N,HV,K,V] fp32 or None."""
    o = torch.empty_like(v)
    ht = v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32) if p.output_final_state else None
    Akk, Aqk, values, out = (x.view(p.B * p.T, -1) for x in (Akk, Aqk, v, o))
    bv = _tile(p)
    launch(
        scan_kernel, (p.V // bv * p.HV * p.N,),
        _tiles(operands, p.K), _tiles(Akk, 64), _tiles(Aqk, 64), _tiles(values, 64), _tiles(out, 64),
        vec, h0, o, ht, cu_seqlens, chunk_offsets, p.T, p.N,
        HV=p.HV, K=p.K, V=p.V, BV=bv, HAS_H0=h0 is not None, HAS_HT=ht is not None, VARLEN=p.varlen,
        FULL=not p.varlen and p.T % 64 == 0, num_warps=4,
    )
    return o, ht


def run(
    *, q_raw, k_raw, v, beta_raw, g_raw, A_log, dt_bias, h0, p, cu_seqlens, chunk_indices, chunk_offsets,
    wanted=frozenset(WRITES[SPAN]),
):
    """Tensors as in the chain's contract.

    Returns o [B,T,HV,V] (p.dtype) and ht, fp32 [N,HV,K,V] or None; Aqk, Akk [B,T,HV,64] p.dtype, upper parts zero; and
    of the others those that are `wanted`: q, k (p.dtype; the raw ones when nothing is normalised), q_rstd, k_rstd
    [B,T,H] fp32 or None, beta [B,T,HV] (fp32; the raw one when there is no sigmoid), gk [B,T,HV,K] fp32.
    """
    new, f32 = q_raw.new_empty, {"dtype": torch.float32}
    made = {"Aqk": new((p.B, p.T, p.HV, 64)), "Akk": new((p.B, p.T, p.HV, 64))}
    units = p.l2norm and not wanted.isdisjoint(("q", "k", "q_rstd", "k_rstd"))
    if units:
        made |= {"q": new(q_raw.shape), "k": new(k_raw.shape)}
        made |= {"q_rstd": new(q_raw.shape[:3], **f32), "k_rstd": new(k_raw.shape[:3], **f32)}
    elif not p.l2norm:
        made |= {"q": q_raw, "k": k_raw, "q_rstd": None, "k_rstd": None}
    if not p.beta_sigmoid:
        made["beta"] = beta_raw
    elif "beta" in wanted:
        made["beta"] = new(beta_raw.shape, **f32)
    if "gk" in wanted:
        made["gk"] = new(g_raw.shape, **f32)
    operands, vec = handover(p, q_raw)
    half = p.dtype == torch.float16
    launch(
        prep_kernel, (p.NT * p.HV,),
        q_raw, k_raw, g_raw, A_log, dt_bias, beta_raw,
        operands, vec,
        *(made.get(name) for name in ("Aqk", "Akk", "q", "k", "gk", "q_rstd", "k_rstd", "beta")),
        cu_seqlens, chunk_indices,
        p.scale, p.lower_bound or 0.0, p.beta_scale, p.T, p.chunks_per_row,
        H=p.H, HV=p.HV, K=p.K,
        GATE=p.gate, HAS_A=A_log is not None, HAS_BIAS=dt_bias is not None, L2NORM=p.l2norm, SIGMOID=p.beta_sigmoid,
        VARLEN=p.varlen, FULL=not p.varlen and p.T % 64 == 0, TWO_SIDED=not half, BK=BK, I=_I,
        OP=tl.float16 if half else tl.bfloat16, INV=tl.float16 if p.l2norm else tl.float32, FAST=q_raw.is_cuda,
        UNITS=units, GK="gk" in made, BETA=p.beta_sigmoid and "beta" in made,
        num_warps=WARPS, num_stages=1, maxnreg=REGS,
    )
    o, ht = scan(
        operands=operands, vec=vec, Akk=made["Akk"], Aqk=made["Aqk"], v=v, h0=h0, p=p, cu_seqlens=cu_seqlens,
        chunk_offsets=chunk_offsets,
    )
    return made | {"o": o, "ht": ht}


SPANS = {SPAN: run}


def _scan_job(K, V, BV, FULL):
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    tiles = {"d_x": K, "d_A": 64, "d_Aq": 64, "d_v": 64, "d_o": 64}
    types = {name: f"tensordesc<bf16[64, {columns}],{layout}>" for name, columns in tiles.items()}
    types |= {"vec": "*fp32", "h0": "*fp32", "o": "*bf16", "ht": "*fp32", "T": "i32", "N": "i32"}
    shape = {"HV": 16, "K": K, "V": V, "BV": BV, "HAS_H0": True, "HAS_HT": True, "VARLEN": not FULL, "FULL": FULL}
    packed = dict.fromkeys(("cu_seqlens", "chunk_offsets"), "*i64")
    types, shape = (types, shape | dict.fromkeys(packed)) if FULL else (types | packed, shape)
    return scan_kernel, types, shape, 4, 1


_TYPES = dict.fromkeys(("q", "k", "g", "beta", "qn", "kn", "Aqk", "Akk", "tiles"), "*bf16")
_TYPES |= dict.fromkeys(("A_log", "dt_bias", "gk", "q_rstd", "k_rstd", "b_out", "vec"), "*fp32")
_TYPES |= {"cu_seqlens": "*i64", "chunk_indices": "*i64", "T": "i32", "NT": "i32"}
_TYPES |= dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
COMPILE = [
    _scan_job(K, V, BV, FULL)
    for K, V, BV, FULL in ((128, 128, 128, True), (128, 256, 128, False), (64, 64, 64, True))
] + [
    (
        prep_kernel, _TYPES,
        {"H": 16, "HV": 16, "K": K, "GATE": gate, "HAS_A": True, "HAS_BIAS": True, "L2NORM": True, "SIGMOID": True,
         "VARLEN": False, "FULL": True, "TWO_SIDED": True, "BK": BK, "I": _I, "OP": tl.bfloat16, "INV": tl.float16,
         "FAST": True, "UNITS": keep, "GK": False, "BETA": keep},
        WARPS, 1, {"maxnreg": REGS},
    )
    for K, gate, keep in ((128, "softplus", True), (128, "softplus", False), (64, "log", True))
]
