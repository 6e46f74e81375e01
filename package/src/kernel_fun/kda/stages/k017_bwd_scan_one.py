"""The backward's two scans, many or few, in one kernel: a copying warp beside them, and no rounding of the scale.

Parent: 008-bwd-scan (both scans) and 012-bwd-split (few long sequences in segments, with its reach and join), whose
    loops are here once: without segments where there are many scans, in a build and an emit where few.
Delta: one warp issues every copy, both ways; the eight that carry the products only say that a tile is full or free,
    and go on. q and k come as the caller gave them, and their rows are normalised here. Backwards the state is
    carried in units of the scale, dS / scale:
        dv = Aqk^T do + kg bf16(dS)    y = Akk^T dv    dS / scale <- 2^G dS / scale + (q 2^gk)^T do + kb'^T y
    with kb' = -(beta / scale) k 2^gk, so that neither q 2^gk nor y is multiplied before its one rounding.
Why it should be faster: 10 and 7 barriers of all warps a step instead of 14 and 12, a seventh of the instructions
    fewer; and the forward need not write normalised q and k, and keep them (4 bytes of each element).
Why more exact: scale is no power of two, so bf16(scale q 2^gk) rounds even where nothing decays and q 2^gk is exact;
    and k 2^gk stays k where a chunk decays by less than half a bf16 step, always to the same side. beta breaks that.
Constraints: sm_90, K 64 or 128, V a multiple of 64, bf16 or fp16. Any gate (every exponent is <= 0), any T, packed
    sequences, GVA; token and state rows below 2^31 (a descriptor's coordinates).
"""
import functools
import math

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
from kernel_fun._common.problem import CHUNK
from kernel_fun.kda.stages.k012_bwd_split import (
    ERASED,
    MIN_CHUNKS,
    SMS,
    WALK,
    _descriptor,
    _token,
    dAqk,
    segment_plan,
)

FAMILY = "kda"
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier     # renamed in Triton 3.7


# ------------------------------------------------------------------------------------------ segments: reach, join
# 012's, but L, P and SLOTS come at run time: packed batches have ever new ones, and each would compile again.
@triton.jit
def _sequence(chunk_offsets, i_n, T, L, P, VARLEN: tl.constexpr):
    """A sequence's first slot and its number of segments of L chunks (one when it is empty)."""
    if VARLEN:
        c_0 = tl.load(chunk_offsets + i_n).to(tl.int64)
        c_1 = tl.load(chunk_offsets + i_n + 1).to(tl.int64)
        base = c_0 // L + i_n                           # leaves room for ceil((c_1 - c_0) / L) slots
        n_seg = tl.maximum((c_1 - c_0 + L - 1) // L, 1).to(tl.int32)
    else:
        base = i_n * P
        n_seg = P
    return base, n_seg


@triton.jit
def _bits(
    k, k_rstd, gk, beta, bos, n_t, at, step, both, i_h, i_hv,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
):
    """How much chunk `at` of n_t tokens from bos on, and chunk `at + step` if `both`, shrink any state: -log2 of bounds
    of their maps' norms. Two at a time, as the walk waits for memory."""
    o_r, o_k = tl.arange(0, 128), tl.arange(0, K)
    o_t = (at + o_r // 64 * step) * 64 + o_r % 64
    live = (o_t >= 0) & (o_t < n_t) & ((o_r < 64) | both)
    m = live[:, None] & (o_k >= 0)[None, :]
    row = bos + o_t
    p_g = gk + (row[:, None] * HV + i_hv) * K + o_k[None, :]
    b_g = tl.load(p_g, mask=m, other=0.0) - tl.load(p_g - HV * K, mask=m & (o_r % 64 > 0)[:, None], other=0.0)
    b_k = tl.load(k + (row[:, None] * H + i_h) * K + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    if NORM:
        b_k *= tl.load(k_rstd + row * H + i_h, mask=live, other=0.0)[:, None]
    b_b = tl.load(beta + row * HV + i_hv, mask=live, other=0.0).to(tl.float32)
    slowest = tl.max(tl.where(b_g == b_g, b_g, 0.0), 1)           # after a gate of -inf the difference says nothing
    grows = tl.maximum(tl.abs(1.0 - b_b * tl.sum(b_k * b_k, 1)), 1.0)
    b_x = tl.where(live, -slowest - tl.log2(grows), 0.0)
    return tl.sum(tl.where(o_r < 64, b_x, 0.0)), tl.sum(tl.where(o_r < 64, 0.0, b_x))


@triton.jit(do_not_specialize=["T", "N", "SLOTS", "L", "P"])
def reach_kernel(
    k, k_rstd, gk, beta, cu_seqlens, chunk_offsets, segments, reach, T, N, SLOTS, L, P,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, VARLEN: tl.constexpr, NORM: tl.constexpr,
    ERASED: tl.constexpr, WALK: tl.constexpr,
):
    """segments[slot] = first token, number of tokens (0: slot not used), sequence, 1 if its first + 2 if its last,
    chunk index in h. reach[0, slot, head] = chunk from which B is scanned, reach[1, ..] = chunk before which
    dB is; -1 where M is needed."""
    back = tl.program_id(0) % 2
    i_hv = tl.program_id(0) // 2 % HV
    i_s = tl.program_id(0) // (2 * HV)
    if VARLEN:
        o_n = tl.arange(0, 128)
        c = tl.load(chunk_offsets + o_n, mask=o_n < N, other=0).to(tl.int64)
        i_n = (tl.sum(((o_n < N) & (c // L + o_n <= i_s)).to(tl.int32)) - 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        n_t = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos
        i_c = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        i_n = (i_s // P).to(tl.int64)
        bos = i_n * T
        n_t = T.to(tl.int64)
        i_c = i_n * ((n_t + 63) // 64)
    base, n_seg = _sequence(chunk_offsets, i_n, T, L, P, VARLEN)
    s = (i_s - base).to(tl.int32)
    used = s < n_seg
    first = s == 0
    last = s == n_seg - 1
    bos += s * (L * 64)
    n_t = tl.where(used, tl.minimum(n_t - s * (L * 64), L * 64), 0).to(tl.int32)
    if tl.program_id(0) % (2 * HV) == 0:
        tl.store(segments + i_s * 5, bos)
        tl.store(segments + i_s * 5 + 1, n_t.to(tl.int64))
        tl.store(segments + i_s * 5 + 2, i_n)
        tl.store(segments + i_s * 5 + 3, first.to(tl.int64) + 2 * last.to(tl.int64))
        tl.store(segments + i_s * 5 + 4, i_c + s * L)

    chunks = (n_t + 63) // 64
    i_h = i_hv // (HV // H)
    end = tl.where(back == 1, first, last)                       # beyond it nothing is built
    bits = tl.where(used & (end == 0), 0.0, ERASED)
    most = tl.minimum(chunks, WALK)
    n = 0
    while (bits < ERASED) & (n < most):
        at = tl.where(back == 1, n, chunks - 1 - n)
        near, far = _bits(
            k, k_rstd, gk, beta, bos, n_t, at, 2 * back - 1, n + 1 < most, i_h, i_hv, H, HV, K, NORM
        )
        one = (bits + near >= ERASED) | (n + 1 >= most)
        bits += near + tl.where(one, 0.0, far)
        n += tl.where(one, 1, 2)
    known = tl.where(back == 1, last, first)                     # what is beyond is given
    n = tl.where(bits < ERASED, tl.where(known, chunks, -1), n)
    n = tl.where((back == 0) & (n >= 0), chunks - n, n)
    tl.store(reach + (back * SLOTS + i_s) * HV + i_hv, n)


@triton.jit(do_not_specialize=["T", "SLOTS", "L", "P"])
def join_kernel(
    parts, reach, chunk_offsets, T, SLOTS, L, P,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MOST: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """In parts [slots, HV, K, V + K + V], holding (B, M, dB): where M counts, B becomes the state at the segment's end
    and dB the gradient of the one at its start. A sequence has at most MOST segments."""
    back = tl.program_id(0) % 2
    i_v = tl.program_id(0) // 2 % (V // BV)
    i_hv = tl.program_id(0) // (2 * (V // BV)) % HV
    i_n = (tl.program_id(0) // (2 * (V // BV) * HV)).to(tl.int64)
    base, n_seg = _sequence(chunk_offsets, i_n, T, L, P, VARLEN)
    p_r = reach + (back * SLOTS + base) * HV + i_hv
    o_s = tl.arange(0, MOST)
    b_reach = tl.load(p_r + o_s * HV, mask=(o_s > 0) & (o_s < n_seg - 1), other=0)
    o_k = tl.arange(0, K)
    W: tl.constexpr = 2 * V + K
    STEP: tl.constexpr = HV * K * W
    p_m = parts + (base * HV + i_hv) * (K * W) + o_k[:, None] * W
    p_x = p_m + i_v * BV + tl.arange(0, BV)[None, :] + back * (V + K)
    if tl.min(b_reach) < 0:
        b_x = tl.load(p_x + tl.where(back == 1, n_seg - 1, 0) * STEP)
        for i in range(1, n_seg - 1):
            s = tl.where(back == 1, n_seg - 1 - i, i).to(tl.int64)
            b_b = tl.load(p_x + s * STEP)
            if tl.load(p_r + s * HV) < 0:
                b_m = tl.load(p_m + s * STEP + V + o_k[None, :])
                if back == 1:
                    b_m = tl.trans(b_m)
                b_b += tl.dot(b_m, b_x, input_precision="tf32x3")
                tl.store(p_x + s * STEP, b_b)
            b_x = b_b


# ----------------------------------------------------------------------------------------------------- the copying warp
# Shapes in shared memory: k, q, kg [64, K]; g [64, K] fp32; x (v or do), out [64, BV]; Aq, A [64, 64]; of all but kg
# and out two, for chunks i and i + 1. Forwards q's two hold kg. A fetched tile is raw until `_prepare` has made it an
# operand. mbarriers: `ready` (the tiles have come), `staged` (in the dead g lies h or dh), `half` (out is full; Aq,
# forwards k, x and A, are free), `whole` (the others are), `left` (out is free); two of each but `left`.
@gluon.jit
def _copies(
    d_q, d_k, d_x, d_g, d_Aq, d_A, d_state, d_out, k, q, g, x, Aq, A, out, ready, staged, half, whole, left,
    bos, n_tok, i_c, i_h, i_hv, i_v,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, EMIT: gl.constexpr,
    BACK: gl.constexpr,
):
    """All copies of one scan, each as soon as its buffer is free: step i - 2's results out, chunk i's tiles in."""
    BYTES: gl.constexpr = 64 * ((8 * K + 256 if BACK else 6 * K + 128) + 2 * BV)
    NT = (n_tok + 63) // 64
    c_k, c_g, c_A = (i_h * K).to(gl.int32), (i_hv * K).to(gl.int32), (i_hv * 64).to(gl.int32)
    c_x, c_v = (i_hv * V + i_v).to(gl.int32), i_v.to(gl.int32)
    for i in range(NT + 2):
        s, phase, on = i & 1, ((i >> 1) & 1) ^ 1, i < NT        # the first two waits are for what was never taken
        if BACK:
            row, t_out = (bos + (NT - 1 - i) * 64).to(gl.int32), NT + 1 - i
        else:
            row, t_out = (bos + i * 64).to(gl.int32), i - 2
        if EMIT:  # noqa: SIM102  (compile-time and run-time conditions, here and below)
            if i >= 2:
                mbarrier.wait(staged.index(s), phase)
                at = [(((i_c + t_out) * HV + i_hv) * K).to(gl.int32), c_v]
                tma.async_copy_shared_to_global(d_state, at, g.index(s)._reinterpret(k.dtype, [K, BV], d_state.layout))
                tma.store_wait(0)                            # g can be fetched with the others then, and out is free
                barrier()
                mbarrier.arrive(left, count=1, pred=i > 2)
        mbarrier.wait(half.index(s), phase)
        mbarrier.expect(ready.index(s), BYTES, pred=on)
        tma.async_copy_global_to_shared(d_g, [row, c_g], ready.index(s), g.index(s), pred=on)
        if BACK:
            tma.async_copy_global_to_shared(d_Aq, [row, c_A], ready.index(s), Aq.index(s), pred=on)
        else:
            tma.async_copy_global_to_shared(d_k, [row, c_k], ready.index(s), k.index(s), pred=on)
            tma.async_copy_global_to_shared(d_x, [row, c_x], ready.index(s), x.index(s), pred=on)
            tma.async_copy_global_to_shared(d_A, [row, c_A], ready.index(s), A.index(s), pred=on)
        if EMIT:  # noqa: SIM102
            if i >= 2:
                if FULL:
                    tma.async_copy_shared_to_global(d_out, [(bos + t_out * 64).to(gl.int32), c_x], out)
                else:
                    if n_tok - t_out * 64 >= 64:
                        tma.async_copy_shared_to_global(d_out, [(bos + t_out * 64).to(gl.int32), c_x], out)
        if BACK:
            mbarrier.wait(whole.index(s), phase)
            tma.async_copy_global_to_shared(d_k, [row, c_k], ready.index(s), k.index(s), pred=on)
            tma.async_copy_global_to_shared(d_q, [row, c_k], ready.index(s), q.index(s), pred=on)
            tma.async_copy_global_to_shared(d_x, [row, c_x], ready.index(s), x.index(s), pred=on)
            tma.async_copy_global_to_shared(d_A, [row, c_A], ready.index(s), A.index(s), pred=on)
    tma.store_wait(0)


# ------------------------------------------------------------------------------------------------------------ the scans
@gluon.jit
def _norms(p_rstd, row, i_h, n_t, R0: gl.constexpr, P: gl.constexpr, H: gl.constexpr, NORM: gl.constexpr):
    """What rows R0 .. R0 + 32 are to be multiplied by to be normalised, as `_prepare` wants it."""
    o_t = R0 + gl.arange(0, 32, layout=gl.SliceLayout(1, P))
    return gl.load(p_rstd + (row + o_t) * H + i_h, mask=o_t < n_t, other=0.0) if NORM else o_t  # which nobody reads


@gluon.jit
def _prepare(
    k, q, kg, g, b_gn, b_b, b_rk, b_rq, n_t, R0: gl.constexpr, R: gl.constexpr, P: gl.constexpr, BACK: gl.constexpr,
    FULL: gl.constexpr, NORM: gl.constexpr, GAIN: gl.constexpr = 1.0,
):
    """Rows R0 .. R0 + R of k and q, normalised: k becomes k 2^gk, backwards b_b k 2^gk, and q GAIN q 2^gk in place;
    kg = k 2^(G - gk). Zero from row n_t on."""
    b_k = k.slice(R0, R).load(P).to(gl.float32)
    b_g = g.slice(R0, R).load(P)
    if BACK:
        b_q = q.slice(R0, R).load(P).to(gl.float32)
    if not FULL:
        m_t = (R0 + gl.arange(0, R, layout=gl.SliceLayout(1, P)) < n_t)[:, None]
        b_k = gl.where(m_t, b_k, 0.0)
        b_g = gl.where(m_t, b_g, b_gn[None, :])
        if BACK:
            b_q = gl.where(m_t, b_q, 0.0)
    b_up = gl.exp2(b_g)
    if NORM:
        b_k *= b_rk[:, None]
    if BACK:
        k.slice(R0, R).store((b_k * (b_up * b_b[:, None])).to(k.dtype))
        if NORM:
            b_q *= b_rq[:, None]
        if GAIN != 1.0:
            b_up *= GAIN
        q.slice(R0, R).store((b_q * b_up).to(k.dtype))
    else:
        k.slice(R0, R).store((b_k * b_up).to(k.dtype))
    kg.slice(R0, R).store((b_k * gl.exp2(b_gn[None, :] - b_g)).to(k.dtype))


@gluon.jit
def _mask(tile, n_t, COLS: gl.constexpr, TRI: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr):
    """Zero, in place, the rows of [64, COLS] from n_t on, and if TRI what lies above the diagonal."""
    if TRI or not FULL:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [NW, 1], [1, 0])
        o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
        o_c = gl.arange(0, COLS, layout=gl.SliceLayout(0, L))[None, :]
        if TRI:
            tile.store(gl.where((o_r >= o_c) & (o_r < n_t), tile.load(L), 0.0))
        else:
            tile.store(gl.where((o_c >= 0) & (o_r < n_t), tile.load(L), 0.0))


@gluon.jit
def _put_last(
    p_x, tile, row, col, n_t, STRIDE: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr,
):
    """The rows below n_t of a tile [64, BV], where a chunk is not full; full ones leave by the copying warp."""
    if not FULL:  # noqa: SIM102  (compile-time and run-time conditions)
        if n_t < 64:
            L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [NW, 1], [1, 0])
            o_t = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
            o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, L))[None, :]
            gl.store(p_x + row * STRIDE + col + o_t * STRIDE + o_v, tile.load(L), mask=(o_t < n_t) & (o_v >= 0))


@gluon.jit
def _forwards(
    d_state, k, kg, g, v, A, out, decay, betas, ready, staged, half, left, p_g, p_beta, p_rk, p_vn, b_S, bos, n_tok,
    i_h, i_hv, i_v, has_v,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr,
    EMIT: gl.constexpr, NORM: gl.constexpr, NW: gl.constexpr,
):
    """From the transposed state b_S [BV, K] to the last one; on the way, if EMIT, each chunk's first state and v_new.
    v counts as zero if not `has_v`."""
    S64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    A64: gl.constexpr = gl.DotOperandLayout(0, S64, 2)
    AK: gl.constexpr = gl.DotOperandLayout(0, SK, 2)
    P: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [NW, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    DT: gl.constexpr = k.dtype
    NT = (n_tok + 63) // 64
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, P))
    o_t = gl.arange(0, 64, layout=ROW)
    n_n = gl.minimum(n_tok, 64)                              # rows of the chunk being prepared
    b_gn = gl.load(p_g + ((bos + n_n - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & (NT > 0), other=0.0)
    b_beta = gl.load(p_beta + (bos + o_t) * HV + i_hv, mask=o_t < n_n, other=0.0).to(gl.float32)
    mbarrier.wait(ready.index(0), 0, pred=NT > 0)
    k_0, kg_0, g_0 = k.index(0), kg.index(0), g.index(0)
    for r in gl.static_range(0, 64, 32):
        b_rk = _norms(p_rk, bos, i_h, n_n, r, P, H, NORM)
        _prepare(k_0, k_0, kg_0, g_0, b_gn, b_gn, b_rk, b_rk, n_n, r, 32, P, False, FULL, NORM)
    _mask(v.index(0), n_n, BV, False, FULL, NW)
    _mask(A.index(0), n_n, 64, False, FULL, NW)
    decay.store(gl.exp2(b_gn))
    betas.store(b_beta)
    fence_async_shared()
    barrier()

    for i in range(NT):
        s, n, more = i & 1, (i & 1) ^ 1, i + 1 < NT
        k_n, kg_n, g_n = k.index(n), kg.index(n), g.index(n)
        row, n_t, n_n = bos + i * 64, gl.minimum(n_tok - i * 64, 64), gl.minimum(n_tok - i * 64 - 64, 64)
        b_gn = gl.load(p_g + ((row + 64 + n_n - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & more, other=0.0)
        b_beta = gl.load(p_beta + (row + 64 + o_t) * HV + i_hv, mask=o_t < n_n, other=0.0).to(gl.float32)
        b_lo = _norms(p_rk, row + 64, i_h, n_n, 0, P, H, NORM)
        b_hi = _norms(p_rk, row + 64, i_h, n_n, 32, P, H, NORM)
        b_Sb = b_S.to(DT)
        x = warpgroup_mma(
            gl.convert_layout(b_Sb, A64), k.index(s).permute((1, 0)), gl.zeros([BV, 64], gl.float32, S64),
            use_acc=False, is_async=True,
        )
        # under kb S: the state to its tile
        if EMIT:
            g.index(s)._reinterpret(DT, [K, BV], d_state.layout).permute((1, 0)).store(b_Sb)
            fence_async_shared()
            barrier()
            mbarrier.arrive(staged.index(s), count=1)
        b_v = v.index(s).permute((1, 0)).load(S64)
        b_b = betas.load(gl.SliceLayout(0, S64))
        if not EMIT:
            b_v = gl.where((gl.arange(0, 64, layout=gl.SliceLayout(0, S64)) >= 0)[None, :] & has_v, b_v, 0.0)
        b_r = b_b[None, :] * (b_v.to(gl.float32) - warpgroup_mma_wait(0, [x]))
        b_rb = b_r.to(DT)                                    # the unit diagonal of Akk meets an unrounded r
        x = warpgroup_mma(
            gl.convert_layout(b_rb, A64), A.index(s).permute((1, 0)), b_r - b_rb.to(gl.float32), is_async=True,
        )
        # under Akk r: half of the next chunk
        b_S = b_S * decay.load(gl.SliceLayout(0, SK))[None, :]
        mbarrier.wait(ready.index(n), ((i + 1) >> 1) & 1, pred=more)
        _prepare(k_n, k_n, kg_n, g_n, b_gn, b_gn, b_lo, b_lo, n_n, 0, 32, P, False, FULL, NORM)
        if EMIT:
            mbarrier.wait(left, (i & 1) ^ 1)                 # the last v_new has
        b_vn = warpgroup_mma_wait(0, [x]).to(DT)
        x = warpgroup_mma(gl.convert_layout(b_vn, AK), kg.index(s), b_S, is_async=True)
        # under kg^T v_new: it and the state leave, the chunk after next is fetched, the other half
        if EMIT:
            out.permute((1, 0)).store(b_vn)
        fence_async_shared()
        barrier()                                            # nobody reads k, v or A any more
        mbarrier.arrive(half.index(s), count=1)
        if EMIT:
            _put_last(p_vn, out, row, i_hv * V + i_v, n_t, HV * V, BV, FULL, NW)
        _prepare(k_n, k_n, kg_n, g_n, b_gn, b_gn, b_hi, b_hi, n_n, 32, 32, P, False, FULL, NORM)
        _mask(v.index(n), n_n, BV, False, FULL, NW)
        _mask(A.index(n), n_n, 64, False, FULL, NW)
        decay.store(gl.exp2(b_gn))
        betas.store(b_beta)
        b_S = warpgroup_mma_wait(0, [x])
        fence_async_shared()
        barrier()
    return b_S


@gluon.jit
def _minus_beta(p_beta, row, i_hv, n_t, inverse, R0: gl.constexpr, P: gl.constexpr, HV: gl.constexpr):
    """-beta / scale of rows R0 .. R0 + 32, zero from row n_t on, as `_prepare` wants it."""
    o_t = R0 + gl.arange(0, 32, layout=gl.SliceLayout(1, P))
    b_b = gl.load(p_beta + (row + o_t) * HV + i_hv, mask=o_t < n_t, other=0.0).to(gl.float32)
    return b_b * (0.0 - inverse)


@gluon.jit
def _backwards(
    d_state, k, q, kg, g, do, Aq, A, out, decay, ready, staged, half, whole, left, p_g, p_beta, p_rk, p_rq, p_dv, b_S,
    unit, bos, n_tok, i_h, i_hv, i_v,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr,
    EMIT: gl.constexpr, NORM: gl.constexpr, NW: gl.constexpr, GAIN: gl.constexpr,
):
    """From the last state's gradient b_S [BV, K], in `unit`s, to the first's; on the way, if EMIT, each chunk's last
    state's and v_new's, in ones."""
    S64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    A64: gl.constexpr = gl.DotOperandLayout(0, S64, 2)
    AK: gl.constexpr = gl.DotOperandLayout(0, SK, 2)
    P: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [NW, 1], [1, 0])
    DT: gl.constexpr = k.dtype
    inverse = 1.0 / unit
    NT = (n_tok + 63) // 64
    last = bos + (NT - 1) * 64
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, P))
    n_t = n_tok - (NT - 1) * 64                              # rows of the last chunk; every earlier one is full
    b_gn = gl.load(p_g + ((last + n_t - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & (NT > 0), other=0.0)
    n_b = gl.minimum(NT, 1) * n_t
    mbarrier.wait(ready.index(0), 0, pred=NT > 0)
    for r in gl.static_range(0, 64, 32):
        b_b = _minus_beta(p_beta, last, i_hv, n_b, inverse, r, P, HV)
        b_rk, b_rq = _norms(p_rk, last, i_h, n_b, r, P, H, NORM), _norms(p_rq, last, i_h, n_b, r, P, H, NORM)
        _prepare(k.index(0), q.index(0), kg, g.index(0), b_gn, b_b, b_rk, b_rq, n_t, r, 32, P, True, FULL, NORM, GAIN)
    _mask(do.index(0), n_t, BV, False, FULL, NW)
    _mask(A.index(0), n_t, 64, False, FULL, NW)
    _mask(Aq.index(0), n_t, 64, True, FULL, NW)              # nobody has written Aqk above its diagonal
    decay.store(gl.exp2(b_gn))
    fence_async_shared()
    barrier()

    for i in range(NT):
        s, n, more = i & 1, (i & 1) ^ 1, i + 1 < NT
        row, i_t = last - i * 64, NT - 1 - i
        b_gn = gl.load(p_g + ((row - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & more, other=0.0)
        n_b = gl.minimum(i_t, 1) * 64
        b_lo = _minus_beta(p_beta, row - 64, i_hv, n_b, inverse, 0, P, HV)
        b_hi = _minus_beta(p_beta, row - 64, i_hv, n_b, inverse, 32, P, HV)
        k_lo, k_hi = _norms(p_rk, row - 64, i_h, n_b, 0, P, H, NORM), _norms(p_rk, row - 64, i_h, n_b, 32, P, H, NORM)
        q_lo, q_hi = _norms(p_rq, row - 64, i_h, n_b, 0, P, H, NORM), _norms(p_rq, row - 64, i_h, n_b, 32, P, H, NORM)
        b_Sb = (b_S * unit).to(DT)
        x = warpgroup_mma(                                   # this product first: the other way round ptxas adds a wait
            gl.convert_layout(b_Sb, A64), kg.permute((1, 0)), gl.zeros([BV, 64], gl.float32, S64),
            use_acc=False, is_async=True,
        )
        x = warpgroup_mma(do.index(s).permute((1, 0)), Aq.index(s), x, is_async=True)
        # under kg dS + Aqk^T do: what is left of the last step, the state's gradient to its tile
        mbarrier.arrive(whole.index(n), count=1, pred=i > 0)
        if EMIT:
            g.index(s)._reinterpret(DT, [K, BV], d_state.layout).permute((1, 0)).store(b_Sb)
            fence_async_shared()
            barrier()
            mbarrier.arrive(staged.index(s), count=1)
        b_dvn = warpgroup_mma_wait(0, [x])
        b_dvb = b_dvn.to(DT)                                 # the unit diagonal of Akk meets an unrounded dvn
        x = warpgroup_mma(
            gl.convert_layout(b_dvb, A64), A.index(s), b_dvn - b_dvb.to(gl.float32), is_async=True,
        )
        b_S = b_S * decay.load(gl.SliceLayout(0, SK))[None, :]
        y = warpgroup_mma(do.index(s).permute((1, 0)), q.index(s), b_S, is_async=True)
        # under Akk^T dvn and (q 2^gk)^T do: dvn and the state's gradient leave, half of the next chunk
        if EMIT:
            mbarrier.wait(left, (i & 1) ^ 1)                 # the last dvn has
            out.permute((1, 0)).store(b_dvb)
        fence_async_shared()
        barrier()                                            # nobody reads kg or Aq any more
        mbarrier.arrive(half.index(s), count=1)
        if EMIT:
            _put_last(p_dv, out, row, i_hv * V + i_v, gl.minimum(n_tok - i_t * 64, 64), HV * V, BV, FULL, NW)
        mbarrier.wait(ready.index(n), ((i + 1) >> 1) & 1, pred=more)
        _prepare(k.index(n), q.index(n), kg, g.index(n), b_gn, b_lo, k_lo, q_lo, 64, 0, 32, P, True, True, NORM, GAIN)
        b_y = warpgroup_mma_wait(1, [x]).to(DT)
        y = warpgroup_mma(gl.convert_layout(b_y, AK), k.index(s), y, is_async=True)
        # under kb'^T y: the other half
        _prepare(k.index(n), q.index(n), kg, g.index(n), b_gn, b_hi, k_hi, q_hi, 64, 32, 32, P, True, True, NORM, GAIN)
        _mask(Aq.index(n), 64, 64, True, True, NW)
        decay.store(gl.exp2(b_gn))
        b_S = warpgroup_mma_wait(0, [y])
        fence_async_shared()
        barrier()                                            # nobody reads k, q, do or A any more
    mbarrier.arrive(whole.index((NT + 1) & 1), count=1, pred=NT > 0)
    return b_S


@gluon.jit
def _scan(
    d_dh, k, q, kg, g, x, Aq, A, out, decay, betas, ready, staged, half, whole, left,
    v_new, dv, gk, beta, q_rstd, k_rstd, h0, dht, dh0, parts, unit, bos, n_tok, i_h, i_hv, i_v, has_v, back, first,
    last, used, keep, p_state, p_parts, column,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_DHT: gl.constexpr, FULL: gl.constexpr, CUT: gl.constexpr, EMIT: gl.constexpr, NORM: gl.constexpr,
    GAIN: gl.constexpr,
):
    """One scan from its start state to where its end state belongs; offsets as in `scan_kernel`."""
    NW: gl.constexpr = BV // 16
    W: gl.constexpr = 2 * V + K
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, SK))[None, :]
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, SK))[:, None]
    p_state = p_state + (o_k * V + o_v)
    p_parts = p_parts + (o_k * W + o_v)
    b_S = gl.zeros([BV, K], gl.float32, SK)
    if back:
        if CUT and EMIT:
            m = (o_v < (1 - last) * used * BV) & (o_k >= 0)     # what the segment after left
            b_S += gl.load(parts + (p_parts + (HV * K * W + V + K + i_v)), mask=m, other=0.0)
        if HAS_DHT:
            b_S += gl.load(dht + p_state, mask=(o_v < last * BV) & (o_k >= 0), other=0.0)
        b_S = _backwards(
            d_dh, k, q, kg, g, x, Aq, A, out, decay, ready, staged, half, whole, left, gk, beta, k_rstd, q_rstd,
            dv, b_S * (1.0 / unit), unit, bos, n_tok, i_h, i_hv, i_v, H, HV, K, V, BV, FULL, EMIT, NORM, NW, GAIN,
        )
        b_S = b_S * unit
        if EMIT and HAS_H0:
            gl.store(dh0 + p_state, b_S, mask=(o_v < first * BV) & (o_k >= 0))
    else:
        if CUT and EMIT:
            m = (o_v < (1 - first) * used * BV) & (o_k >= 0)    # what the segment before left
            b_S += gl.load(parts + (p_parts + (i_v - HV * K * W)), mask=m, other=0.0)
        if not EMIT:
            b_S = gl.where(o_v + (column - V) == o_k, b_S + 1.0, b_S)
        if HAS_H0:
            b_S += gl.load(h0 + p_state, mask=(o_v < first * BV) & (o_k >= 0), other=0.0)
        b_S = _forwards(
            d_dh, k, q, g, x, A, out, decay, betas, ready, staged, half, left, gk, beta, k_rstd, v_new, b_S,
            bos, n_tok, i_h, i_hv, i_v, has_v, H, HV, K, V, BV, FULL, EMIT, NORM, NW,
        )
    if not EMIT:
        gl.store(parts + (p_parts + column), b_S, mask=(o_v < keep * BV) & (o_k >= 0))


@gluon.jit
def _copies_of(
    d_q, d_k, d_v, d_g, d_Aq, d_A, d_do, d_h, d_vn, d_dh, d_dv, k, q, g, x, Aq, A, out, ready, staged, half, whole,
    left, bos, n_tok, i_c, i_h, i_hv, i_v, back,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, EMIT: gl.constexpr,
):
    if back > 0:
        _copies(
            d_q, d_k, d_do, d_g, d_Aq, d_A, d_dh, d_dv, k, q, g, x, Aq, A, out, ready, staged, half, whole, left,
            bos, n_tok, i_c, i_h, i_hv, i_v, HV, K, V, BV, FULL, EMIT, True,
        )
    else:
        _copies(
            d_k, d_k, d_v, d_g, d_A, d_A, d_h, d_vn, k, q, g, x, A, A, out, ready, staged, half, whole, left,
            bos, n_tok, i_c, i_h, i_hv, i_v, HV, K, V, BV, FULL, EMIT, False,
        )


@gluon.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    d_q, d_k, d_v, d_g, d_Aq, d_A, d_do, d_h, d_vn, d_dh, d_dv,                # descriptors
    v_new, dv, gk, beta, q_rstd, k_rstd, h0, dht, dh0, cu_seqlens, chunk_offsets, segments, reach, parts, unit, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_DHT: gl.constexpr, VARLEN: gl.constexpr, FULL: gl.constexpr, CUT: gl.constexpr, EMIT: gl.constexpr,
    NORM: gl.constexpr, GAIN: gl.constexpr,
):
    """EMIT: both scans of one of N sequences, or CUT of N segments, backwards first. Otherwise BV columns of a
    segment's (B, M, dB), in this order."""
    DT: gl.constexpr = d_k.dtype
    NV: gl.constexpr = V // BV
    W: gl.constexpr = 2 * V + K
    NB: gl.constexpr = W // BV
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pid = gl.program_id(0)
    if EMIT:                                                    # the longer programs first
        back, i_v = pid < NV * HV * N, pid % NV * BV
        i_hv, i_s = (pid // NV % HV).to(gl.int64), (pid // (NV * HV) % N).to(gl.int64)
        column = i_v
    else:
        column = pid % NB * BV
        i_hv, i_s = (pid // NB % HV).to(gl.int64), (pid // (NB * HV)).to(gl.int64)
        back = column >= V + K
        i_v = gl.where(back, column - (V + K), column)
    i_h = i_hv // (HV // H)
    if CUT:
        bos = gl.load(segments + i_s * 5)
        n_tok = gl.load(segments + i_s * 5 + 1).to(gl.int32)
        i_n = gl.load(segments + i_s * 5 + 2)
        ends = gl.load(segments + i_s * 5 + 3).to(gl.int32)
        i_c = gl.load(segments + i_s * 5 + 4)
        first, last = ends & 1, ends >> 1
        used = gl.minimum(n_tok, 1)
    else:
        i_n, first, last, used = i_s, 1, 1, 1
        if VARLEN:
            bos = gl.load(cu_seqlens + i_n).to(gl.int64)
            n_tok = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - bos).to(gl.int32)
            i_c = gl.load(chunk_offsets + i_n).to(gl.int64)
        else:
            bos, n_tok, i_c = i_n * T, T, i_n * ((T + 63) // 64)
    has_v = column >= 0
    keep = used
    if not EMIT:
        to_f = gl.load(reach + i_s * HV + i_hv)
        to_b = gl.load(reach + (N + i_s) * HV + i_hv)
        has_v = column < V
        is_m = (column >= V) & (column < V + K)
        wanted = gl.where(back, first == 0, gl.where(is_m, (to_f < 0) | (to_b < 0), last == 0))
        keep = used * wanted.to(gl.int32)
        c_0 = gl.where(has_v, gl.maximum(to_f, 0), 0)
        n_back = gl.where(to_b < 0, n_tok, gl.minimum(to_b * 64, n_tok))
        first = first * (has_v & (c_0 == 0)).to(gl.int32)       # now: starts from h0, from dht
        last = last * (n_back == n_tok).to(gl.int32)
        bos = bos + c_0 * 64
        n_tok = gl.where(back, n_back, n_tok - c_0 * 64) * keep
    p_state = (i_n * HV + i_hv) * (K * V) + i_v
    p_parts = (i_s * HV + i_hv) * (K * W)

    k = gl.allocate_shared_memory(DT, [2, 64, K], d_k.layout)
    q = gl.allocate_shared_memory(DT, [2, 64, K], d_q.layout)
    kg = gl.allocate_shared_memory(DT, [64, K], d_k.layout)
    g = gl.allocate_shared_memory(gl.float32, [2, 64, K], d_g.layout)
    x = gl.allocate_shared_memory(DT, [2, 64, BV], d_do.layout)
    Aq = gl.allocate_shared_memory(DT, [2, 64, 64], d_Aq.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    out = gl.allocate_shared_memory(DT, [64, BV], d_dv.layout)
    decay = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    half = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    whole = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for j in gl.static_range(2):
        mbarrier.init(ready.index(j), count=1)
        mbarrier.init(staged.index(j), count=1)
        mbarrier.init(half.index(j), count=1)
        mbarrier.init(whole.index(j), count=1)
    mbarrier.init(left, count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_scan, (d_dh, k, q, kg, g, x, Aq, A, out, decay, betas, ready, staged, half, whole, left,
                 v_new, dv, gk, beta, q_rstd, k_rstd, h0, dht, dh0, parts, unit, bos, n_tok, i_h, i_hv, i_v, has_v,
                 back, first, last, used, keep, p_state, p_parts, column,
                 H, HV, K, V, BV, HAS_H0, HAS_DHT, FULL, CUT, EMIT, NORM, GAIN)),
        (_copies_of, (d_q, d_k, d_v, d_g, d_Aq, d_A, d_do, d_h, d_vn, d_dh, d_dv, k, q, g, x, Aq, A, out,
                      ready, staged, half, whole, left, bos, n_tok, i_c, i_h, i_hv, i_v, back.to(gl.int32),
                      HV, K, V, BV, FULL, EMIT)),
    ], [1], [24])
    for j in gl.static_range(2):
        mbarrier.invalidate(ready.index(j))
        mbarrier.invalidate(staged.index(j))
        mbarrier.invalidate(half.index(j))
        mbarrier.invalidate(whole.index(j))
    mbarrier.invalidate(left)


# ----------------------------------------------------------------------------------------------------------- host code
def _tile(p):
    return 64 if p.V % 128 else 128                 # one warpgroup per 64 value columns


def cut(p):
    """Are the scans so few that sequences are cut into segments?"""
    return p.N * p.HV * (p.V // _tile(p)) <= SMS // 4 and p.NT >= 4 * MIN_CHUNKS * p.N


def units(p):
    """(unit, gain): the reverse state is carried in `unit`s, q 2^gk is multiplied by the power of two `gain`; their
    product is the scale. In bf16 gain is 1; fp16 and odd scales want a unit of 1 to 2, so that beta / unit stays small.
    """
    m, e = math.frexp(p.scale)
    if m and abs(e) < 32 and p.dtype == torch.bfloat16:
        return float(p.scale), 1.0
    return (2.0 * m, 2.0 ** (e - 1)) if m else (1.0, 0.0)


def supports(p):
    if p.arch != (9, 0):
        return False, f"needs compute capability 9.0, got {p.arch[0]}.{p.arch[1]}"
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 64:
        return False, f"needs V a multiple of 64, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    if not p.NT:
        return False, "needs a token"
    if max(p.B * p.T, p.NT * p.HV * p.K) >= 2**31:
        return False, f"needs fewer than 2^31 rows of states (a descriptor's coordinates), got {p.NT * p.HV * p.K}"
    return True, ""


@functools.cache
def _swizzled(itemsize):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)


def _tiles(x, rows, columns):
    """A descriptor of [rows, columns] tiles of a contiguous matrix."""
    return TensorDescriptor.from_tensor(x, [rows, columns], _swizzled(x.element_size()))


def run(
    *, q_raw, k_raw, q_rstd, k_rstd, v, gk, beta, Akk, Aqk, h0, dht, do, p, cu_seqlens, chunk_indices, chunk_offsets,
    wanted=frozenset({"dAqk"}),
):
    """Tensors as in the chain's contract: q and k as the caller gave them, and what normalises their rows, so that the
    forward need not keep them normalised.

    Returns h, dh [B,NT,HV,K,V] and v_new, dv [B,T,HV,V] in the problem's dtype, dAqk [B,T,HV,64] fp32 and dh0
    [N,HV,K,V] fp32 (None without h0). dv is the gradient of v_new; the next stage applies Akk and beta to it. dAqk is
    left out where `wanted`, the names that a later stage reads, does not have it.
    """
    h, dh = (torch.empty(p.B, p.chunks_per_row, p.HV, p.K, p.V, dtype=p.dtype, device=v.device) for _ in range(2))
    v_new, dv = (_token(v, p, cu_seqlens, p.V, p.dtype) for _ in range(2))
    dh0 = None if h0 is None else torch.empty_like(h0)
    few, n = cut(p), p.N
    segments = reach = parts = None
    if few:
        L, P, n = segment_plan(p)
        segments = torch.empty(n, 5, dtype=torch.int64, device=v.device)
        reach = torch.empty(2, n, p.HV, dtype=torch.int32, device=v.device)
        parts = torch.empty(n, p.HV, p.K, 2 * p.V + p.K, dtype=torch.float32, device=v.device)
        shape = {"HV": p.HV, "K": p.K, "VARLEN": p.varlen}
        launch(
            reach_kernel, (2 * n * p.HV,),
            k_raw, k_rstd, gk, beta, cu_seqlens, chunk_offsets, segments, reach, p.T, p.N, n, L, P,
            H=p.H, NORM=p.l2norm, **shape, ERASED=ERASED, WALK=WALK, num_warps=8,
        )
    token = {"q": q_raw, "k": k_raw, "v": v, "gk": gk, "Aqk": Aqk, "Akk": Akk, "do": do, "v_new": v_new, "dv": dv}
    rows = {name: x.view(p.B * p.T, -1) for name, x in token.items()}
    tiles = {name: _tiles(rows[name], CHUNK, p.K) for name in ("q", "k", "gk")}
    tiles |= {name: _tiles(rows[name], CHUNK, CHUNK) for name in ("Aqk", "Akk")}
    unit, gain = units(p)

    def scan(bv, columns, emit):
        """BV columns of `columns` a program."""
        mine = tiles | {name: _tiles(rows[name], CHUNK, bv) for name in ("v", "do", "v_new", "dv")}
        states = [_tiles(x.view(-1, p.V), p.K, bv) for x in (h, dh)]
        launch(
            scan_kernel, (columns // bv * p.HV * n,),
            *(mine[name] for name in ("q", "k", "v", "gk", "Aqk", "Akk", "do")),
            states[0], mine["v_new"], states[1], mine["dv"],
            v_new, dv, gk, beta, q_rstd, k_rstd, h0, dht, dh0, cu_seqlens, chunk_offsets, segments, reach, parts, unit,
            p.T, n, H=p.H, HV=p.HV, K=p.K, V=p.V, BV=bv, HAS_H0=h0 is not None, HAS_DHT=dht is not None,
            VARLEN=p.varlen, FULL=not p.varlen and p.T % CHUNK == 0, CUT=few, EMIT=emit, NORM=p.l2norm, GAIN=gain,
            num_warps=bv // 16,
        )

    if few:
        scan(min(_tile(p), p.K), 2 * p.V + p.K, False)
        launch(
            join_kernel, (2 * (p.V // 32) * p.HV * p.N,), parts, reach, chunk_offsets, p.T, n, L, P,
            V=p.V, BV=32, MOST=256, **shape, num_warps=8,
        )
    scan(_tile(p), 2 * p.V, True)
    out = {"h": h, "v_new": v_new, "dh": dh, "dh0": dh0, "dv": dv}
    if "dAqk" in wanted:                     # a later stage may form it itself
        out["dAqk"] = dAqk(do=do, v_new=v_new, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    return out


SPANS = {"bwd.recompute..bwd.dhu": run}


def _scan_job(CUT, EMIT, FULL, K=128, V=128, BV=128, half="bf16"):
    tiles = {"d_q": K, "d_k": K, "d_v": BV, "d_Aq": 64, "d_A": 64, "d_do": BV, "d_vn": BV, "d_dv": BV}
    types = {name: _descriptor(half, 64, columns) for name, columns in tiles.items()}
    types |= {"d_g": _descriptor("fp32", 64, K), "d_h": _descriptor(half, K, BV), "d_dh": _descriptor(half, K, BV)}
    types |= {"v_new": f"*{half}", "dv": f"*{half}", "unit": "fp32", "T": "i32", "N": "i32"}
    types |= dict.fromkeys(("gk", "beta", "q_rstd", "k_rstd", "h0", "dht", "dh0"), "*fp32")
    cuts, packed = {"segments": "*i64", "reach": "*i32", "parts": "*fp32"}, ("cu_seqlens", "chunk_offsets")
    shape = {"H": 16, "HV": 16, "K": K, "V": V, "BV": BV, "HAS_H0": True, "HAS_DHT": True, "VARLEN": not FULL}
    shape |= {"FULL": FULL, "CUT": CUT, "EMIT": EMIT, "NORM": True, "GAIN": 1.0 if half == "bf16" else 0.0625}
    types, shape = (types | cuts, shape) if CUT else (types, shape | dict.fromkeys(cuts))
    types, shape = (types, shape | dict.fromkeys(packed)) if FULL else (types | dict.fromkeys(packed, "*i64"), shape)
    return scan_kernel, types, shape, BV // 16, 1


_RUN = dict.fromkeys(("T", "N", "SLOTS", "L", "P"), "i32") | {"chunk_offsets": "*i64", "reach": "*i32"}
_KEYS = {"k": "*bf16", "k_rstd": "*fp32", "gk": "*fp32", "beta": "*fp32", "cu_seqlens": "*i64", "segments": "*i64"}


def _cut_jobs(VARLEN):
    shape = {"HV": 16, "K": 128, "VARLEN": VARLEN}
    return [
        (reach_kernel, _RUN | _KEYS, shape | {"H": 16, "NORM": True, "ERASED": ERASED, "WALK": WALK}, 8, 3),
        (join_kernel, {n: _RUN[n] for n in _RUN if n != "N"} | {"parts": "*fp32"},
         shape | {"V": 128, "BV": 32, "MOST": 256}, 8, 3),
    ]


COMPILE = [
    _scan_job(False, True, True, V=256),
    _scan_job(False, True, False),
    _scan_job(False, True, True, K=64, V=192, BV=64, half="fp16"),
    _scan_job(True, True, True),
    _scan_job(True, True, False),
    _scan_job(True, False, True),
    _scan_job(True, False, False, K=64, V=64, BV=64),
    *_cut_jobs(False),
    *_cut_jobs(True),
]
