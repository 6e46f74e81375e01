"""The backward's scans of few, long sequences: segments side by side, each from its exact states at both ends.

Parent: 008-bwd-scan (both its scans, step by step unchanged), 010-fwd-split (how a sequence is cut).
Delta: 008 has two programs per (V tile, head, sequence). Over a segment of chunks both scans are affine with the same
    map: S_out = M S_in + B forwards, dS_in = M^T dS_out + dB backwards. Four launches:
    reach     cuts sequences into segments; walks back from a segment's end, and on from its start, until the decay has
              erased what was beyond: |M| <= prod over steps of max_d 2^g_d max(1, |1 - beta |k|^2|) < 2^-48;
    build     B and dB over what was reached, without storing a step; where a bound was not met, over the whole segment,
              and M, the forward scan of K more columns with v = 0 from the identity;
    join      S_i+1 = M_i S_i + B_i and dS_i = M_i^T dS_i+1 + dB_i in fp32 where M_i is needed, serial over segments;
    emit      008's scans of every segment.
Why it should be faster: emit has P times 008's programs and 1/P of its chain; build runs on idle multiprocessors.
Constraints: as 008 on sm_90 (K 64 or 128, V a multiple of 64, bf16 or fp16; any gate, any T, packed, GVA), and so few
    scans that two segments a sequence fit on 132 multiprocessors, sequences of 16 chunks or more on average.
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
from kernel_fun._common.problem import CHUNK
from kernel_fun._common.tails import zero_tail

FAMILY = "kda"
SMS = 132                   # of an H200
MIN_CHUNKS = 4              # a segment's; below, its prologues cost more than its steps
ERASED = 48.0               # bits: what is dropped is below 2^-48 |S_in|, fp32 rounds at 2^-24
WALK = 32                   # chunks that reach looks at from each end at most
A_BV, A_STAGES, A_WARPS = 64, 3, 4       # the dAqk kernel: value columns per step
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier     # renamed in Triton 3.7


# ------------------------------------------------------------------------------------------ segments: reach, join
@triton.jit
def _sequence(chunk_offsets, i_n, T, L: tl.constexpr, P: tl.constexpr, VARLEN: tl.constexpr):
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
def _bits(k, gk, beta, bos, n_t, at, step, both, i_h, i_hv, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr):
    """How much chunk `at` of n_t tokens from bos on, and chunk `at + step` if `both`, shrink any state: -log2 of bounds
    of their maps' norms. Two at a time, as the walk waits for memory."""
    o_r = tl.arange(0, 128)
    o_k = tl.arange(0, K)
    o_t = (at + o_r // 64 * step) * 64 + o_r % 64
    live = (o_t >= 0) & (o_t < n_t) & ((o_r < 64) | both)
    m = live[:, None] & (o_k >= 0)[None, :]
    row = bos + o_t
    p_g = gk + (row[:, None] * HV + i_hv) * K + o_k[None, :]
    b_g = tl.load(p_g, mask=m, other=0.0) - tl.load(p_g - HV * K, mask=m & (o_r % 64 > 0)[:, None], other=0.0)
    b_k = tl.load(k + (row[:, None] * H + i_h) * K + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(beta + row * HV + i_hv, mask=live, other=0.0).to(tl.float32)
    slowest = tl.max(tl.where(b_g == b_g, b_g, 0.0), 1)           # after a gate of -inf the difference says nothing
    grows = tl.maximum(tl.abs(1.0 - b_b * tl.sum(b_k * b_k, 1)), 1.0)
    b_x = tl.where(live, -slowest - tl.log2(grows), 0.0)
    return tl.sum(tl.where(o_r < 64, b_x, 0.0)), tl.sum(tl.where(o_r < 64, 0.0, b_x))


@triton.jit(do_not_specialize=["T", "N"])
def reach_kernel(
    k, gk, beta, cu_seqlens, chunk_offsets, segments, reach, T, N, SLOTS,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, P: tl.constexpr, VARLEN: tl.constexpr,
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
        near, far = _bits(k, gk, beta, bos, n_t, at, 2 * back - 1, n + 1 < most, i_h, i_hv, H, HV, K)
        one = (bits + near >= ERASED) | (n + 1 >= most)
        bits += near + tl.where(one, 0.0, far)
        n += tl.where(one, 1, 2)
    known = tl.where(back == 1, last, first)                     # what is beyond is given
    n = tl.where(bits < ERASED, tl.where(known, chunks, -1), n)
    n = tl.where((back == 0) & (n >= 0), chunks - n, n)
    tl.store(reach + (back * SLOTS + i_s) * HV + i_hv, n)


@triton.jit(do_not_specialize=["T", "SLOTS"])
def join_kernel(
    parts, reach, chunk_offsets, T, SLOTS,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BV: tl.constexpr,
    MOST: tl.constexpr, VARLEN: tl.constexpr,
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


# -------------------------------------------------------------------------------------------- build, emit: both scans
# Shapes in shared memory: k, q, kg [64, K]; g [64, K] fp32; x (v or do) [64, BV]; Aq, A [64, 64]; two of each, for
# chunks i and i + 1, but one kg backwards. A fetched tile is raw until `_prepare` has made it an operand.
@gluon.jit
def _fetch(
    d_k, d_g, d_x, d_A, d_q, d_Aq, k, g, x, A, q, Aq, bar, row, c_k, c_g, c_x, c_A, on,
    K: gl.constexpr, BV: gl.constexpr, BACK: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
):
    """Start the copies of one chunk's tiles, first token `row`; `bar` completes with all of them. Nothing if not `on`.

    EARLY are those whose buffers a reverse step has done with halfway, LATE the others.
    """
    if EARLY:
        BYTES: gl.constexpr = 64 * ((8 * K + 256 if BACK else 6 * K + 128) + 2 * BV)
        mbarrier.expect(bar, BYTES, pred=on)
        tma.async_copy_global_to_shared(d_g, [row, c_g], bar, g, pred=on)
        if BACK:
            tma.async_copy_global_to_shared(d_Aq, [row, c_A], bar, Aq, pred=on)
    if LATE:
        tma.async_copy_global_to_shared(d_k, [row, c_k], bar, k, pred=on)
        tma.async_copy_global_to_shared(d_x, [row, c_x], bar, x, pred=on)
        tma.async_copy_global_to_shared(d_A, [row, c_A], bar, A, pred=on)
        if BACK:
            tma.async_copy_global_to_shared(d_q, [row, c_k], bar, q, pred=on)


@gluon.jit
def _prepare(
    k, q, kg, g, b_gn, scale, n_t, R0: gl.constexpr, R: gl.constexpr, P: gl.constexpr, BACK: gl.constexpr,
    FULL: gl.constexpr,
):
    """Rows R0 .. R0 + R: k becomes k 2^gk and q scale q 2^gk in place, kg = k 2^(G - gk); zero from row n_t on."""
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
    k.slice(R0, R).store((b_k * b_up).to(k.dtype))
    kg.slice(R0, R).store((b_k * gl.exp2(b_gn[None, :] - b_g)).to(k.dtype))
    if BACK:
        q.slice(R0, R).store((b_q * (b_up * scale)).to(k.dtype))


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
def _put_rows(
    x, p_x, tile, row, col, n_t, STRIDE: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr,
):
    """A staged tile [64, BV] to memory: by TMA where every chunk is full, else by pointer and only below n_t."""
    if FULL:
        tma.async_copy_shared_to_global(x, [row.to(gl.int32), col.to(gl.int32)], tile)
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [NW, 1], [1, 0])
        o_t = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
        o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, L))[None, :]
        gl.store(p_x + row * STRIDE + col + o_t * STRIDE + o_v, tile.load(L), mask=(o_t < n_t) & (o_v >= 0))


@gluon.jit
def _forwards(
    d_k, d_g, d_v, d_A, d_h, d_vn, p_g, p_beta, p_vn, b_S, bos, n_tok, i_c, i_h, i_hv, i_v, has_v,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, EMIT: gl.constexpr,
    NW: gl.constexpr,
):
    """From the transposed state b_S [BV, K] to the last one; on the way, if EMIT, each chunk's first state and v_new.
    v counts as zero if not `has_v`."""
    S64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    A64: gl.constexpr = gl.DotOperandLayout(0, S64, 2)
    AK: gl.constexpr = gl.DotOperandLayout(0, SK, 2)
    P: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [NW, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DT: gl.constexpr = d_k.dtype
    k = gl.allocate_shared_memory(DT, [2, 64, K], d_k.layout)
    kg = gl.allocate_shared_memory(DT, [2, 64, K], d_k.layout)
    g = gl.allocate_shared_memory(gl.float32, [2, 64, K], d_g.layout)
    v = gl.allocate_shared_memory(DT, [2, 64, BV], d_v.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    if EMIT:
        out = gl.allocate_shared_memory(DT, [64, BV], d_vn.layout)
    decay = gl.allocate_shared_memory(gl.float32, [2, K], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    NT = (n_tok + 63) // 64
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, P))
    o_t = gl.arange(0, 64, layout=ROW)
    c_k, c_g, c_A = (i_h * K).to(gl.int32), (i_hv * K).to(gl.int32), (i_hv * 64).to(gl.int32)
    c_v = (i_hv * V + i_v).to(gl.int32)

    for j in gl.static_range(2):
        mbarrier.init(bar.index(j), count=1)
    for j in gl.static_range(2):
        _fetch(
            d_k, d_g, d_v, d_A, d_k, d_A, k.index(j), g.index(j), v.index(j), A.index(j), k.index(j), A.index(j),
            bar.index(j), (bos + j * 64).to(gl.int32), c_k, c_g, c_v, c_A, j < NT, K, BV, False, True, True,
        )
    n_n = gl.minimum(n_tok, 64)                              # rows of the chunk being prepared
    b_gn = gl.load(p_g + ((bos + n_n - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & (NT > 0), other=0.0)
    b_beta = gl.load(p_beta + (bos + o_t) * HV + i_hv, mask=o_t < n_n, other=0.0).to(gl.float32)
    mbarrier.wait(bar.index(0), 0, pred=NT > 0)
    for r in gl.static_range(0, 64, 32):
        _prepare(k.index(0), k.index(0), kg.index(0), g.index(0), b_gn, 0.0, n_n, r, 32, P, False, FULL)
    _mask(v.index(0), n_n, BV, False, FULL, NW)
    _mask(A.index(0), n_n, 64, False, FULL, NW)
    decay.index(0).store(gl.exp2(b_gn))
    betas.index(0).store(b_beta)
    fence_async_shared()
    barrier()

    for i in range(NT):
        s, n, more = i & 1, (i & 1) ^ 1, i + 1 < NT
        row, n_t, n_n = bos + i * 64, gl.minimum(n_tok - i * 64, 64), gl.minimum(n_tok - i * 64 - 64, 64)
        b_gn = gl.load(p_g + ((row + 64 + n_n - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & more, other=0.0)
        b_beta = gl.load(p_beta + (row + 64 + o_t) * HV + i_hv, mask=o_t < n_n, other=0.0).to(gl.float32)
        b_Sb = b_S.to(DT)
        x = warpgroup_mma(
            gl.convert_layout(b_Sb, A64), k.index(s).permute((1, 0)), gl.zeros([BV, 64], gl.float32, S64),
            use_acc=False, is_async=True,
        )
        # under kb S: the state leaves
        if EMIT:
            state = g.index(s)._reinterpret(DT, [K, BV], d_h.layout)
            state.permute((1, 0)).store(b_Sb)
        b_v = v.index(s).permute((1, 0)).load(S64)
        b_b = betas.index(s).load(gl.SliceLayout(0, S64))
        if EMIT:
            fence_async_shared()
            barrier()
            at = [(((i_c + i) * HV + i_hv) * K).to(gl.int32), i_v.to(gl.int32)]
            tma.async_copy_shared_to_global(d_h, at, state)
        else:
            b_v = gl.where((gl.arange(0, 64, layout=gl.SliceLayout(0, S64)) >= 0)[None, :] & has_v, b_v, 0.0)
        b_r = b_b[None, :] * (b_v.to(gl.float32) - warpgroup_mma_wait(0, [x]))
        b_rb = b_r.to(DT)                                    # the unit diagonal of Akk meets an unrounded r
        x = warpgroup_mma(
            gl.convert_layout(b_rb, A64), A.index(s).permute((1, 0)), b_r - b_rb.to(gl.float32), is_async=True,
        )
        # under Akk r: half of the next chunk
        b_S = b_S * decay.index(s).load(gl.SliceLayout(0, SK))[None, :]
        mbarrier.wait(bar.index(n), ((i + 1) >> 1) & 1, pred=more)
        _prepare(k.index(n), k.index(n), kg.index(n), g.index(n), b_gn, 0.0, n_n, 0, 32, P, False, FULL)
        b_vn = warpgroup_mma_wait(0, [x]).to(DT)
        x = warpgroup_mma(gl.convert_layout(b_vn, AK), kg.index(s), b_S, is_async=True)
        # under kg^T v_new: v_new leaves, the chunk after next is fetched, the other half
        if EMIT:
            out.permute((1, 0)).store(b_vn)
            tma.store_wait(0)                                # the state has left its tile
        fence_async_shared()
        barrier()                                            # and nobody reads k, v or A any more
        _fetch(
            d_k, d_g, d_v, d_A, d_k, d_A, k.index(s), g.index(s), v.index(s), A.index(s), k.index(s), A.index(s),
            bar.index(s), (row + 128).to(gl.int32), c_k, c_g, c_v, c_A, i + 2 < NT, K, BV, False, True, True,
        )
        if EMIT:
            _put_rows(d_vn, p_vn, out, row, i_hv * V + i_v, n_t, HV * V, BV, FULL, NW)
        _prepare(k.index(n), k.index(n), kg.index(n), g.index(n), b_gn, 0.0, n_n, 32, 32, P, False, FULL)
        _mask(v.index(n), n_n, BV, False, FULL, NW)
        _mask(A.index(n), n_n, 64, False, FULL, NW)
        decay.index(n).store(gl.exp2(b_gn))
        betas.index(n).store(b_beta)
        b_S = warpgroup_mma_wait(0, [x])
        if EMIT:
            tma.store_wait(0)
        fence_async_shared()
        barrier()
    for j in gl.static_range(2):
        mbarrier.invalidate(bar.index(j))
    return b_S


@gluon.jit
def _backwards(
    d_q, d_k, d_g, d_do, d_Aq, d_A, d_dh, d_dv, p_g, p_beta, p_dv, b_S, scale, bos, n_tok, i_c, i_h, i_hv, i_v,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, EMIT: gl.constexpr,
    NW: gl.constexpr,
):
    """From the last state's gradient b_S [BV, K] to the first's; on the way, if EMIT, each chunk's last state's and
    v_new's."""
    S64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    A64: gl.constexpr = gl.DotOperandLayout(0, S64, 2)
    AK: gl.constexpr = gl.DotOperandLayout(0, SK, 2)
    P: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [NW, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DT: gl.constexpr = d_k.dtype
    k = gl.allocate_shared_memory(DT, [2, 64, K], d_k.layout)
    q = gl.allocate_shared_memory(DT, [2, 64, K], d_q.layout)
    kg = gl.allocate_shared_memory(DT, [64, K], d_k.layout)
    g = gl.allocate_shared_memory(gl.float32, [2, 64, K], d_g.layout)
    do = gl.allocate_shared_memory(DT, [2, 64, BV], d_do.layout)
    Aq = gl.allocate_shared_memory(DT, [2, 64, 64], d_Aq.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    if EMIT:
        out = gl.allocate_shared_memory(DT, [64, BV], d_dv.layout)
    decay = gl.allocate_shared_memory(gl.float32, [2, K], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    NT = (n_tok + 63) // 64
    last = bos + (NT - 1) * 64
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, P))
    o_t = gl.arange(0, 64, layout=ROW)
    c_k, c_g, c_A = (i_h * K).to(gl.int32), (i_hv * K).to(gl.int32), (i_hv * 64).to(gl.int32)
    c_v = (i_hv * V + i_v).to(gl.int32)

    for j in gl.static_range(2):
        mbarrier.init(bar.index(j), count=1)
    for j in gl.static_range(2):
        _fetch(
            d_k, d_g, d_do, d_A, d_q, d_Aq, k.index(j), g.index(j), do.index(j), A.index(j), q.index(j), Aq.index(j),
            bar.index(j), (last - j * 64).to(gl.int32), c_k, c_g, c_v, c_A, j < NT, K, BV, True, True, True,
        )
    n_t = n_tok - (NT - 1) * 64                              # rows of the last chunk; every earlier one is full
    b_gn = gl.load(p_g + ((last + n_t - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & (NT > 0), other=0.0)
    b_beta = gl.load(p_beta + (last + o_t) * HV + i_hv, mask=(o_t < n_t) & (NT > 0), other=0.0).to(gl.float32)
    mbarrier.wait(bar.index(0), 0, pred=NT > 0)
    for r in gl.static_range(0, 64, 32):
        _prepare(k.index(0), q.index(0), kg, g.index(0), b_gn, scale, n_t, r, 32, P, True, FULL)
    _mask(do.index(0), n_t, BV, False, FULL, NW)
    _mask(A.index(0), n_t, 64, False, FULL, NW)
    _mask(Aq.index(0), n_t, 64, True, FULL, NW)              # nobody has written Aqk above its diagonal
    decay.index(0).store(gl.exp2(b_gn))
    betas.index(0).store(b_beta)
    fence_async_shared()
    barrier()

    for i in range(NT):
        s, n, more = i & 1, (i & 1) ^ 1, i + 1 < NT
        row, i_t = last - i * 64, NT - 1 - i
        b_gn = gl.load(p_g + ((row - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & more, other=0.0)
        b_beta = gl.load(p_beta + (row - 64 + o_t) * HV + i_hv, mask=(o_t >= 0) & more, other=0.0).to(gl.float32)
        b_Sb = b_S.to(DT)
        x = warpgroup_mma(                                   # this product first: the other way round ptxas adds a wait
            gl.convert_layout(b_Sb, A64), kg.permute((1, 0)), gl.zeros([BV, 64], gl.float32, S64),
            use_acc=False, is_async=True,
        )
        x = warpgroup_mma(do.index(s).permute((1, 0)), Aq.index(s), x, is_async=True)
        # under kg dS + Aqk^T do: the state's gradient leaves
        if EMIT:
            state = g.index(s)._reinterpret(DT, [K, BV], d_dh.layout)
            state.permute((1, 0)).store(b_Sb)
        b_b = betas.index(s).load(gl.SliceLayout(0, S64))
        if EMIT:
            fence_async_shared()
            barrier()
            at = [(((i_c + i_t) * HV + i_hv) * K).to(gl.int32), i_v.to(gl.int32)]
            tma.async_copy_shared_to_global(d_dh, at, state)
        b_dvn = warpgroup_mma_wait(0, [x])
        b_dvb = b_dvn.to(DT)                                 # the unit diagonal of Akk meets an unrounded dvn
        x = warpgroup_mma(
            gl.convert_layout(b_dvb, A64), A.index(s), b_dvn - b_dvb.to(gl.float32), is_async=True,
        )
        b_S = b_S * decay.index(s).load(gl.SliceLayout(0, SK))[None, :]
        y = warpgroup_mma(do.index(s).permute((1, 0)), q.index(s), b_S, is_async=True)
        # under Akk^T dvn and qg^T do: dvn leaves, half of the next chunk
        if EMIT:
            out.permute((1, 0)).store(b_dvb)
            tma.store_wait(0)                                # the gradient has left its tile
        fence_async_shared()
        barrier()                                            # and nobody reads kg or Aq any more
        _fetch(
            d_k, d_g, d_do, d_A, d_q, d_Aq, k.index(s), g.index(s), do.index(s), A.index(s), q.index(s), Aq.index(s),
            bar.index(s), (row - 128).to(gl.int32), c_k, c_g, c_v, c_A, i + 2 < NT, K, BV, True, True, False,
        )
        if EMIT:
            _put_rows(d_dv, p_dv, out, row, i_hv * V + i_v, gl.minimum(n_tok - i_t * 64, 64), HV * V, BV, FULL, NW)
        mbarrier.wait(bar.index(n), ((i + 1) >> 1) & 1, pred=more)
        _prepare(k.index(n), q.index(n), kg, g.index(n), b_gn, scale, 64, 0, 32, P, True, True)
        b_y = warpgroup_mma_wait(1, [x])
        b_y = (b_y * (0.0 - b_b)[None, :]).to(DT)
        y = warpgroup_mma(gl.convert_layout(b_y, AK), k.index(s), y, is_async=True)
        # under kb^T (beta y): the other half
        _prepare(k.index(n), q.index(n), kg, g.index(n), b_gn, scale, 64, 32, 32, P, True, True)
        _mask(Aq.index(n), 64, 64, True, True, NW)
        decay.index(n).store(gl.exp2(b_gn))
        betas.index(n).store(b_beta)
        b_S = warpgroup_mma_wait(0, [y])
        if EMIT:
            tma.store_wait(0)
        fence_async_shared()
        barrier()
        _fetch(
            d_k, d_g, d_do, d_A, d_q, d_Aq, k.index(s), g.index(s), do.index(s), A.index(s), q.index(s), Aq.index(s),
            bar.index(s), (row - 128).to(gl.int32), c_k, c_g, c_v, c_A, i + 2 < NT, K, BV, True, False, True,
        )
    for j in gl.static_range(2):
        mbarrier.invalidate(bar.index(j))
    return b_S


@gluon.jit(do_not_specialize=["SLOTS"])
def scan_kernel(
    d_q, d_k, d_v, d_g, d_Aq, d_A, d_do, d_h, d_vn, d_dh, d_dv,                # descriptors
    v_new, dv, gk, beta, h0, dht, dh0, segments, reach, parts, scale, SLOTS,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_DHT: gl.constexpr, FULL: gl.constexpr, EMIT: gl.constexpr,
):
    """EMIT: both scans of a segment, backwards first. Otherwise BV columns of its (B, M, dB), in this order."""
    NW: gl.constexpr = BV // 16
    NV: gl.constexpr = V // BV
    W: gl.constexpr = 2 * V + K
    NB: gl.constexpr = 2 * NV if EMIT else W // BV
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    pid = gl.program_id(0)
    if EMIT:                                                    # the longer programs first
        back, i_v = pid < NV * HV * SLOTS, pid % NV * BV
        i_hv, i_s = (pid // NV % HV).to(gl.int64), (pid // (NV * HV) % SLOTS).to(gl.int64)
        column = i_v
    else:
        column = pid % NB * BV
        i_hv, i_s = (pid // NB % HV).to(gl.int64), (pid // (NB * HV)).to(gl.int64)
        back = column >= V + K
        i_v = gl.where(back, column - (V + K), column)
    i_h = i_hv // (HV // H)
    bos = gl.load(segments + i_s * 5)
    n_tok = gl.load(segments + i_s * 5 + 1).to(gl.int32)
    i_n = gl.load(segments + i_s * 5 + 2)
    ends = gl.load(segments + i_s * 5 + 3).to(gl.int32)
    i_c = gl.load(segments + i_s * 5 + 4)
    first, last = ends & 1, ends >> 1
    used = gl.minimum(n_tok, 1)
    has_v = column >= 0
    keep = used
    if not EMIT:
        to_f = gl.load(reach + i_s * HV + i_hv)
        to_b = gl.load(reach + (SLOTS + i_s) * HV + i_hv)
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
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, SK))[None, :]
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, SK))[:, None]
    p_state = (i_n * HV + i_hv) * (K * V) + i_v + (o_k * V + o_v)
    p_parts = (i_s * HV + i_hv) * (K * W) + (o_k * W + o_v)
    b_S = gl.zeros([BV, K], gl.float32, SK)
    if back:
        if EMIT:
            m = (o_v < (1 - last) * used * BV) & (o_k >= 0)     # what the segment after left
            b_S += gl.load(parts + (p_parts + (HV * K * W + V + K + i_v)), mask=m, other=0.0)
        if HAS_DHT:
            b_S += gl.load(dht + p_state, mask=(o_v < last * BV) & (o_k >= 0), other=0.0)
        b_S = _backwards(
            d_q, d_k, d_g, d_do, d_Aq, d_A, d_dh, d_dv, gk, beta, dv, b_S, scale, bos, n_tok, i_c, i_h, i_hv, i_v,
            HV, K, V, BV, FULL, EMIT, NW,
        )
        if EMIT and HAS_H0:
            gl.store(dh0 + p_state, b_S, mask=(o_v < first * BV) & (o_k >= 0))
    else:
        if EMIT:
            m = (o_v < (1 - first) * used * BV) & (o_k >= 0)    # what the segment before left
            b_S += gl.load(parts + (p_parts + (i_v - HV * K * W)), mask=m, other=0.0)
        else:
            b_S = gl.where(o_v + (column - V) == o_k, b_S + 1.0, b_S)
        if HAS_H0:
            b_S += gl.load(h0 + p_state, mask=(o_v < first * BV) & (o_k >= 0), other=0.0)
        b_S = _forwards(
            d_k, d_g, d_v, d_A, d_h, d_vn, gk, beta, v_new, b_S, bos, n_tok, i_c, i_h, i_hv, i_v, has_v,
            HV, K, V, BV, FULL, EMIT, NW,
        )
    if not EMIT:
        gl.store(parts + (p_parts + column), b_S, mask=(o_v < keep * BV) & (o_k >= 0))


# ------------------------------------------------------------------------------------------------------------- dAqk
@triton.jit
def _rows(x, row, col, n_t, STRIDE: tl.constexpr, C: tl.constexpr):
    """The [64, C] tile of a token tensor at (row, col); rows from n_t on are zero."""
    o_t = tl.arange(0, 64)
    p_x = x + row * STRIDE + col + o_t[:, None] * STRIDE + tl.arange(0, C)[None, :]
    return tl.load(p_x, mask=(o_t < n_t)[:, None], other=0.0)


@triton.jit(do_not_specialize=["T"])
def dAqk_kernel(
    do, v_new, dAqk, cu_seqlens, chunk_indices, scale, T,
    HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, IS_VARLEN: tl.constexpr, STAGES: tl.constexpr,
):
    i_c, i_hv = (tl.program_id(0) // HV).to(tl.int64), (tl.program_id(0) % HV).to(tl.int64)
    if IS_VARLEN:
        i_n, i_t = tl.load(chunk_indices + i_c * 2).to(tl.int64), tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        row, n_t = bos + i_t * 64, tl.minimum(eos - bos - i_t * 64, 64).to(tl.int32)
    else:
        NT = tl.cdiv(T, 64)
        row, n_t = i_c // NT * T + i_c % NT * 64, tl.minimum(T - (i_c % NT) * 64, 64).to(tl.int32)
    o_t = tl.arange(0, 64)
    b_a = tl.zeros([64, 64], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_do = _rows(do, row, i_hv * V + i_v, n_t, HV * V, BV)
        b_vn = _rows(v_new, row, i_hv * V + i_v, n_t, HV * V, BV)
        b_a = tl.dot(b_do, tl.trans(b_vn), b_a)
    b_a = tl.where(o_t[:, None] >= o_t[None, :], b_a * scale, 0.0)
    tl.store(dAqk + (row * HV + i_hv) * 64 + o_t[:, None] * (HV * 64) + o_t[None, :], b_a, mask=(o_t < n_t)[:, None])


# ------------------------------------------------------------------------------------------------------- host code
def _tile(p):
    return 64 if p.V % 128 else 128                 # one warpgroup per 64 value columns


def segment_plan(p):
    """(L, P, slots): chunks a segment, segments a sequence (dense), room for segments. At most one program per
    multiprocessor emits; a sequence of c chunks has ceil(c / L) segments and, packed, a slot that may stay empty."""
    room = SMS // (2 * p.HV * (p.V // _tile(p)))
    if p.varlen:
        chunks = max(MIN_CHUNKS, -(-p.NT // (room - p.N)))
        return chunks, 1, p.NT // chunks + p.N
    n = -(-p.T // CHUNK)
    chunks = max(MIN_CHUNKS, -(-n // (room // p.N)))
    return chunks, -(-n // chunks), p.N * -(-n // chunks)


def supports(p):
    if p.arch != (9, 0):
        return False, f"needs compute capability 9.0, got {p.arch[0]}.{p.arch[1]}"
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 64:
        return False, f"needs V a multiple of 64, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    scans = p.N * p.HV * (p.V // _tile(p))
    if scans > SMS // 4:
        return False, f"needs at most {SMS // 4} scans (sequences x heads x V tiles), got {scans}"
    if p.NT < 4 * MIN_CHUNKS * p.N or not p.N:
        return False, f"needs {4 * MIN_CHUNKS} chunks of {CHUNK} tokens a sequence, got {p.NT} in {p.N}"
    if max(p.B * p.T, p.NT * p.HV * p.K) >= 2**31:
        return False, f"needs fewer than 2^31 rows of states (a descriptor's coordinates), got {p.NT * p.HV * p.K}"
    return True, ""


def _token(like, p, cu_seqlens, columns, dtype):
    x = torch.empty(p.B, p.T, p.HV, columns, dtype=dtype, device=like.device)
    return zero_tail(x, cu_seqlens) if p.varlen else x     # tokens after the last sequence belong to none


@functools.cache
def _swizzled(itemsize):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)


def _tiles(x, rows, columns):
    """A descriptor of [rows, columns] tiles of a contiguous matrix."""
    return TensorDescriptor.from_tensor(x, [rows, columns], _swizzled(x.element_size()))


def dAqk(*, do, v_new, p, cu_seqlens, chunk_indices):
    """scale tril(do v_new^T) per chunk: [B,T,HV,64] fp32, zeros above the diagonal."""
    out = _token(do, p, cu_seqlens, CHUNK, torch.float32)
    launch(
        dAqk_kernel, (p.NT * p.HV,), do, v_new, out, cu_seqlens, chunk_indices, p.scale, p.T,
        HV=p.HV, V=p.V, BV=A_BV, IS_VARLEN=p.varlen, STAGES=A_STAGES, num_warps=A_WARPS, num_stages=A_STAGES,
    )
    return out


def run(
    *, q, k, v, gk, beta, Akk, Aqk, h0, dht, do, p, cu_seqlens, chunk_indices, chunk_offsets, wanted=frozenset({"dAqk"})
):
    """Tensors as in the chain's contract.

    Returns h, dh [B,NT,HV,K,V] and v_new, dv [B,T,HV,V] in the problem's dtype, dAqk [B,T,HV,64] fp32 and dh0
    [N,HV,K,V] fp32 (None without h0). dv is the gradient of v_new; the next stage applies Akk and beta to it. dAqk is
    left out where `wanted`, the names that a later stage reads, does not have it.
    """
    h, dh = (torch.empty(p.B, p.chunks_per_row, p.HV, p.K, p.V, dtype=p.dtype, device=q.device) for _ in range(2))
    v_new, dv = (_token(q, p, cu_seqlens, p.V, p.dtype) for _ in range(2))
    dh0 = None if h0 is None else torch.empty_like(h0)
    L, P, slots = segment_plan(p)
    segments = torch.empty(slots, 5, dtype=torch.int64, device=q.device)
    reach = torch.empty(2, slots, p.HV, dtype=torch.int32, device=q.device)
    parts = torch.empty(slots, p.HV, p.K, 2 * p.V + p.K, dtype=torch.float32, device=q.device)
    cut = {"HV": p.HV, "K": p.K, "L": L, "P": P, "VARLEN": p.varlen}
    launch(
        reach_kernel, (2 * slots * p.HV,), k, gk, beta, cu_seqlens, chunk_offsets, segments, reach, p.T, p.N, slots,
        H=p.H, **cut, ERASED=ERASED, WALK=WALK, num_warps=8,
    )
    token = {"q": q, "k": k, "v": v, "gk": gk, "Aqk": Aqk, "Akk": Akk, "do": do, "v_new": v_new, "dv": dv}
    rows = {name: x.view(p.B * p.T, -1) for name, x in token.items()}
    keys = {name: _tiles(rows[name], CHUNK, p.K) for name in ("q", "k", "gk")}
    keys |= {name: _tiles(rows[name], CHUNK, CHUNK) for name in ("Aqk", "Akk")}

    def scan(bv, tiles, emit):
        wide = {name: _tiles(rows[name], CHUNK, bv) for name in ("v", "do", "v_new", "dv")} | keys
        states = [_tiles(x.view(-1, p.V), p.K, bv) for x in (h, dh)]
        launch(
            scan_kernel, (tiles * p.HV * slots,), *(wide[name] for name in ("q", "k", "v", "gk", "Aqk", "Akk", "do")),
            states[0], wide["v_new"], states[1], wide["dv"],
            v_new, dv, gk, beta, h0, dht, dh0, segments, reach, parts, p.scale, slots,
            H=p.H, HV=p.HV, K=p.K, V=p.V, BV=bv, HAS_H0=h0 is not None, HAS_DHT=dht is not None,
            FULL=not p.varlen and p.T % CHUNK == 0, EMIT=emit, num_warps=bv // 16,
        )

    narrow = min(_tile(p), p.K)
    scan(narrow, (2 * p.V + p.K) // narrow, False)
    launch(
        join_kernel, (2 * (p.V // 32) * p.HV * p.N,), parts, reach, chunk_offsets, p.T, slots,
        V=p.V, BV=32, MOST=256, **cut, num_warps=8,
    )
    scan(_tile(p), 2 * p.V // _tile(p), True)
    out = {"h": h, "v_new": v_new, "dh": dh, "dh0": dh0, "dv": dv}
    if "dAqk" in wanted:                     # a later stage may form it itself
        out["dAqk"] = dAqk(do=do, v_new=v_new, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    return out


SPANS = {"bwd.recompute..bwd.dhu": run}


def _descriptor(kind, rows, columns):
    bits = 32 if kind == "fp32" else 16
    layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=2)"
    return f"tensordesc<{kind}[{rows}, {columns}],{layout}>"


def _scan_job(EMIT, FULL, K=128, V=128, BV=128):
    tiles = {"d_q": K, "d_k": K, "d_v": BV, "d_Aq": 64, "d_A": 64, "d_do": BV, "d_vn": BV, "d_dv": BV}
    types = {name: _descriptor("bf16", 64, columns) for name, columns in tiles.items()}
    types |= {"d_g": _descriptor("fp32", 64, K), "d_h": _descriptor("bf16", K, BV), "d_dh": _descriptor("bf16", K, BV)}
    types |= {"v_new": "*bf16", "dv": "*bf16", "scale": "fp32", "SLOTS": "i32", "segments": "*i64", "reach": "*i32"}
    types |= dict.fromkeys(("gk", "beta", "h0", "dht", "dh0", "parts"), "*fp32")
    shape = {"H": 16, "HV": 16, "K": K, "V": V, "BV": BV, "HAS_H0": True, "HAS_DHT": True}
    return scan_kernel, types, shape | {"EMIT": EMIT, "FULL": FULL}, BV // 16, 1


_PACKED = {"chunk_offsets": "*i64", "T": "i32", "SLOTS": "i32", "reach": "*i32"}
_KEYS = {"k": "*bf16", "gk": "*fp32", "beta": "*bf16", "cu_seqlens": "*i64", "segments": "*i64", "N": "i32"}
_CUT = {"HV": 16, "K": 128, "L": 8, "P": 8, "VARLEN": True}
COMPILE = [
    _scan_job(True, True),
    _scan_job(True, False),
    _scan_job(False, True),
    (reach_kernel, _PACKED | _KEYS, _CUT | {"H": 16, "ERASED": ERASED, "WALK": WALK}, 8, 3),
    (join_kernel, _PACKED | {"parts": "*fp32"}, _CUT | {"V": 128, "BV": 32, "MOST": 256}, 8, 3),
]
