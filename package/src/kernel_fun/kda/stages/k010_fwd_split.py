"""The forward scan of few, long sequences: segments side by side, each from its exact start state.

Parent: 007-fwd-scan (its algebra: S^T in registers, operands built under the products, exact unit diagonals).
Delta: 007 has one program per (V tile, head, sequence); with 16 or 32 of them on 132 multiprocessors their chain of
    chunks is the whole time. Over a segment of chunks the scan is affine, S_out = M S_in + B. Four launches:
    reach     cuts sequences into segments and walks back from each segment's end until the decay has erased S_in:
              |M| <= prod over steps of max_d 2^g_d max(1, |1 - beta |k|^2|) < 2^-48, at any gate, beta and k;
    build     scans without readout: B from zero over what was reached; where the bound was not met, B over the whole
              segment and M, the same scan on K more columns with v = 0 from the identity;
    join      S_i+1 = M_i S_i + B_i in fp32 where M_i is needed, serial over segments;
    emit      the scan of every segment from its start state, with o.
    A step's tiles come by TMA and become operands in place, as in 008-bwd-scan: no flat copies beside the operands.
Why it should be faster: emit has P times 007's programs and 1/P of its chain; build is a chain of at most 1/P on idle
    multiprocessors, without q, Aqk and o. Bytes rise from 1.8 to at most 2.9 KB a token-head (K = V = 128), 1.5 ms at
    4.2 TB/s for 65536 tokens of 32 heads, where the chain takes 6 (IDEA.md).
Constraints: as 007 (sm_90, K 64 or 128, V a multiple of 64, bf16 or fp16; any gate, any T, packed, GVA), and so few
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

FAMILY = "kda"
SMS = 132                   # of an H200
MIN_CHUNKS = 4              # a segment's; below, its prologues cost more than its steps
ERASED = 48.0               # bits: what is dropped is below 2^-48 |S_in|, fp32 rounds at 2^-24
WALK = 32                   # chunks that reach looks back at most
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier     # renamed in Triton 3.7


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
    k, gk, beta, cu_seqlens, chunk_offsets, segments, start, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, P: tl.constexpr, VARLEN: tl.constexpr,
    ERASED: tl.constexpr, WALK: tl.constexpr,
):
    """segments[slot] = first token, number of tokens (0: slot not used), sequence, 1 if its first + 2 if its last.
    start[slot, head] = chunk of the segment from which B is scanned; -1 where M is needed."""
    i_s = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    if VARLEN:
        o_n = tl.arange(0, 128)
        c = tl.load(chunk_offsets + o_n, mask=o_n < N, other=0).to(tl.int64)
        i_n = (tl.sum(((o_n < N) & (c // L + o_n <= i_s)).to(tl.int32)) - 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        n_t = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos
    else:
        i_n = (i_s // P).to(tl.int64)
        bos = i_n * T
        n_t = T.to(tl.int64)
    base, n_seg = _sequence(chunk_offsets, i_n, T, L, P, VARLEN)
    s = (i_s - base).to(tl.int32)
    used = s < n_seg
    first = s == 0
    last = s == n_seg - 1
    bos += s * (L * 64)
    n_t = tl.where(used, tl.minimum(n_t - s * (L * 64), L * 64), 0)
    if i_hv == 0:
        tl.store(segments + i_s * 4, bos)
        tl.store(segments + i_s * 4 + 1, n_t)
        tl.store(segments + i_s * 4 + 2, i_n)
        tl.store(segments + i_s * 4 + 3, first.to(tl.int64) + 2 * last.to(tl.int64))

    bits = tl.where(used & (s < n_seg - 1), 0.0, ERASED)         # nothing follows the last segment; the others are full
    most = tl.minimum(L, WALK)
    n = 0
    while (bits < ERASED) & (n < most):
        near, far = _bits(
            k, gk, beta, bos, n_t, L - 1 - n, -1, n + 1 < most, i_hv // (HV // H), i_hv, H, HV, K,
        )
        one = (bits + near >= ERASED) | (n + 1 >= most)
        bits += near + tl.where(one, 0.0, far)
        n += tl.where(one, 1, 2)
    at = L - n
    at = tl.where(bits < ERASED, tl.where(first, 0, -1), at)      # the first segment's S_in is known
    tl.store(start + i_s * HV + i_hv, at.to(tl.int32))


@triton.jit(do_not_specialize=["T"])
def join_kernel(
    parts, start, chunk_offsets, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BV: tl.constexpr,
    SLOTS: tl.constexpr, VARLEN: tl.constexpr,
):
    """In parts [slots, HV, K, V + K], holding (B, M): where M counts, B becomes the state at the segment's end."""
    i_v = tl.program_id(0) % (V // BV)
    i_hv = tl.program_id(0) // (V // BV) % HV
    i_n = (tl.program_id(0) // (V // BV * HV)).to(tl.int64)
    base, n_seg = _sequence(chunk_offsets, i_n, T, L, P, VARLEN)
    o_s = tl.arange(0, SLOTS)
    b_start = tl.load(start + (base + o_s) * HV + i_hv, mask=(o_s > 0) & (o_s < n_seg - 1), other=0)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    W: tl.constexpr = V + K
    p_s = parts + (base * HV + i_hv) * (K * W) + o_k[:, None] * W
    if tl.min(b_start) < 0:
        b_s = tl.load(p_s + o_v[None, :])
        for s in range(1, n_seg - 1):
            p_s += HV * K * W
            b_b = tl.load(p_s + o_v[None, :])
            if tl.load(start + (base + s) * HV + i_hv) < 0:
                b_m = tl.load(p_s + V + o_k[None, :])
                b_b += tl.dot(b_m, b_s, input_precision="tf32x3")
                tl.store(p_s + o_v[None, :], b_b)
            b_s = b_b


# -------------------------------------------------------------------------------------- build, emit: scan of segments
# Shapes in shared memory: k, q, kg [64, K]; g [64, K] fp32; v, out [64, BV]; A, Aq [64, 64]; two of each for chunks i
# and i + 1, but one v and one out. A fetched tile is raw until, in the step before its own, it becomes an operand.
@gluon.jit
def _fetch_gates(d_g, g, bar, row, c_g, on, K: gl.constexpr, EMIT: gl.constexpr):
    """First copy of a chunk whose tiles `bar` counts: gk, and with `_fetch_keys` and `_fetch_queries` all of them."""
    BYTES: gl.constexpr = 64 * (8 * K + 256 if EMIT else 6 * K + 128)
    mbarrier.expect(bar, BYTES, pred=on)
    tma.async_copy_global_to_shared(d_g, [row.to(gl.int32), c_g], bar, g, pred=on)


@gluon.jit
def _fetch_keys(d_k, d_A, k, A, bar, row, c_k, c_A, on):
    tma.async_copy_global_to_shared(d_k, [row.to(gl.int32), c_k], bar, k, pred=on)
    tma.async_copy_global_to_shared(d_A, [row.to(gl.int32), c_A], bar, A, pred=on)


@gluon.jit
def _fetch_queries(d_q, d_Aq, q, Aq, bar, row, c_k, c_A, on, EMIT: gl.constexpr):
    if EMIT:
        tma.async_copy_global_to_shared(d_q, [row.to(gl.int32), c_k], bar, q, pred=on)
        tma.async_copy_global_to_shared(d_Aq, [row.to(gl.int32), c_A], bar, Aq, pred=on)


@gluon.jit
def _fetch_v(d_v, v, bar, row, c_v, on, BV: gl.constexpr):
    mbarrier.expect(bar, 128 * BV, pred=on)
    tma.async_copy_global_to_shared(d_v, [row.to(gl.int32), c_v], bar, v, pred=on)


@gluon.jit
def _prepare(
    k, q, kg, g, b_gn, scale, n_t, R0: gl.constexpr, R: gl.constexpr, P: gl.constexpr, EMIT: gl.constexpr,
    FULL: gl.constexpr,
):
    """Rows R0 .. R0 + R: k becomes k 2^gk and q scale q 2^gk in place, kg = k 2^(G - gk); zero from row n_t on."""
    b_k = k.slice(R0, R).load(P).to(gl.float32)
    b_g = g.slice(R0, R).load(P)
    if EMIT:
        b_q = q.slice(R0, R).load(P).to(gl.float32)
    if not FULL:
        m_t = (R0 + gl.arange(0, R, layout=gl.SliceLayout(1, P)) < n_t)[:, None]
        b_k = gl.where(m_t, b_k, 0.0)
        b_g = gl.where(m_t, b_g, b_gn[None, :])
        if EMIT:
            b_q = gl.where(m_t, b_q, 0.0)
    b_up = gl.exp2(b_g)
    k.slice(R0, R).store((b_k * b_up).to(k.dtype))
    kg.slice(R0, R).store((b_k * gl.exp2(b_gn[None, :] - b_g)).to(k.dtype))
    if EMIT:
        q.slice(R0, R).store((b_q * (b_up * scale)).to(k.dtype))


@gluon.jit
def _mask_scores(A, Aq, n_t, EMIT: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr):
    """Zero, in place, the rows of A and Aq from n_t on, and what lies above Aq's diagonal: nobody has written it."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    o_c = gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
    if not FULL:
        A.store(gl.where((o_c >= 0) & (o_r < n_t), A.load(L), 0.0))
    if EMIT:
        Aq.store(gl.where((o_r >= o_c) & (o_r < n_t), Aq.load(L), 0.0))


@gluon.jit
def _vectors(
    gk, beta, Aqk, row, n, o_k, o_t, i_hv, HV: gl.constexpr, K: gl.constexpr, EMIT: gl.constexpr,
):
    """Of the chunk at `row` with n tokens (none if n <= 0): gk's last row [K], beta [64] and Aqk's diagonal [64]."""
    b_gn = gl.load(gk + ((row + n - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & (n > 0), other=0.0)
    p_row = (row + o_t) * HV + i_hv
    b_beta = gl.load(beta + p_row, mask=o_t < n, other=0.0).to(gl.float32)
    b_d = b_beta
    if EMIT:
        b_d = gl.load(Aqk + p_row * 64 + o_t, mask=o_t < n, other=0.0).to(gl.float32)
    return b_gn, b_beta, b_d


@gluon.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    d_q, d_k, d_g, d_v, d_A, d_Aq, d_o,                        # descriptors
    gk, beta, Aqk, h0, segments, start, parts, o, ht, scale, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_HT: gl.constexpr, EMIT: gl.constexpr, VARLEN: gl.constexpr, FULL: gl.constexpr,
):
    """EMIT: o of a segment from its start state, and ht. Otherwise BV columns of (B, M), without q, Aqk, o, ht."""
    DT: gl.constexpr = d_k.dtype
    NW: gl.constexpr = BV // 16
    W: gl.constexpr = V + K
    NV: gl.constexpr = V // BV if EMIT else W // BV
    S64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    A64: gl.constexpr = gl.DotOperandLayout(0, S64, 2)
    AK: gl.constexpr = gl.DotOperandLayout(0, SK, 2)
    P: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [NW, 1], [1, 0])
    CV: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [NW, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    i_v = gl.program_id(0) % NV
    i_hv = (gl.program_id(0) // NV % HV).to(gl.int64)
    i_s = (gl.program_id(0) // (NV * HV)).to(gl.int64)
    i_h = i_hv // (HV // H)
    bos = gl.load(segments + i_s * 4)
    n_t = gl.load(segments + i_s * 4 + 1).to(gl.int32)
    i_n = gl.load(segments + i_s * 4 + 2)
    ends = gl.load(segments + i_s * 4 + 3).to(gl.int32)
    known = ends & 1                                            # the start state is h0
    keep = ends >> 1                                            # the end state is wanted
    has_v = i_v >= 0
    if not EMIT:
        c_0 = gl.load(start + i_s * HV + i_hv)
        has_v = i_v * BV < V                                    # the others are columns of M
        wanted = (keep == 0) & (n_t > 0) & (has_v | (c_0 < 0))
        c_0 = gl.maximum(c_0, 0)
        known = (has_v & (known == 1) & (c_0 == 0)).to(gl.int32)
        keep = wanted.to(gl.int32)
        bos = bos + c_0 * 64
        n_t = (n_t - c_0 * 64) * keep
    NT = (n_t + 63) // 64

    k = gl.allocate_shared_memory(DT, [2, 64, K], d_k.layout)
    kg = gl.allocate_shared_memory(DT, [2, 64, K], d_k.layout)
    g = gl.allocate_shared_memory(gl.float32, [2, 64, K], d_g.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    v = gl.allocate_shared_memory(DT, [64, BV], d_v.layout)
    decay = gl.allocate_shared_memory(gl.float32, [2, K], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    bar = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())       # the last is v's
    q, Aq, diag = k, A, betas
    if EMIT:
        q = gl.allocate_shared_memory(DT, [2, 64, K], d_q.layout)
        Aq = gl.allocate_shared_memory(DT, [2, 64, 64], d_Aq.layout)
        diag = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
        out = gl.allocate_shared_memory(DT, [64, BV], d_o.layout)

    # ---- the start state, transposed
    o_m = gl.arange(0, BV, layout=gl.SliceLayout(1, SK))[:, None]
    o_d = gl.arange(0, K, layout=gl.SliceLayout(0, SK))[None, :]
    p_h = (i_n * HV + i_hv) * (K * V) + i_v * BV + (o_d * V + o_m)
    p_w = i_v * BV + (o_d * W + o_m)
    b_S = gl.zeros([BV, K], gl.float32, SK)
    if EMIT:                                                    # what the segment before left
        p_before = ((i_s - 1) * HV + i_hv) * (K * W) + p_w
        b_S += gl.load(parts + p_before, mask=(o_m >= known * BV) & (o_d >= 0), other=0.0)
    else:
        b_S = gl.where(o_m + (i_v * BV - V) == o_d, b_S + 1.0, b_S)
    if HAS_H0:
        b_S += gl.load(h0 + p_h, mask=(o_m < known * BV) & (o_d >= 0), other=0.0)

    # ---- operands of chunk 0, copies for chunks 1 and 2
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, P))
    o_t = gl.arange(0, 64, layout=ROW)
    c_k, c_g, c_A = (i_h * K).to(gl.int32), (i_hv * K).to(gl.int32), (i_hv * 64).to(gl.int32)
    c_v = (i_hv * V + i_v * BV).to(gl.int32)
    for j in gl.static_range(3):
        mbarrier.init(bar.index(j), count=1)
    for j in gl.static_range(2):
        _fetch_gates(d_g, g.index(j), bar.index(j), bos + j * 64, c_g, j < NT, K, EMIT)
        _fetch_keys(d_k, d_A, k.index(j), A.index(j), bar.index(j), bos + j * 64, c_k, c_A, j < NT)
        _fetch_queries(d_q, d_Aq, q.index(j), Aq.index(j), bar.index(j), bos + j * 64, c_k, c_A, j < NT, EMIT)
    _fetch_v(d_v, v, bar.index(2), bos, c_v, has_v & (NT > 0), BV)
    n_n = gl.minimum(n_t, 64)                                   # rows of the chunk being prepared
    b_gn, b_beta, b_d = _vectors(gk, beta, Aqk, bos, n_n, o_k, o_t, i_hv, HV, K, EMIT)
    mbarrier.wait(bar.index(0), 0, pred=NT > 0)
    for r in gl.static_range(0, 64, 32):
        _prepare(k.index(0), q.index(0), kg.index(0), g.index(0), b_gn, scale, n_n, r, 32, P, EMIT, FULL)
    _mask_scores(A.index(0), Aq.index(0), n_n, EMIT, FULL, NW)
    decay.index(0).store(gl.exp2(b_gn))
    betas.index(0).store(b_beta)
    if EMIT:
        diag.index(0).store(b_d)
    fence_async_shared()
    _barrier()
    _fetch_gates(d_g, g.index(0), bar.index(0), bos + 128, c_g, NT > 2, K, EMIT)

    for i in range(NT):
        s, n, more = i & 1, (i & 1) ^ 1, i + 1 < NT
        row = bos + i * 64
        n_n = gl.minimum(n_t - i * 64 - 64, 64)
        b_gn, b_beta, b_d = _vectors(gk, beta, Aqk, row + 64, n_n, o_k, o_t, i_hv, HV, K, EMIT)

        # ---- X = S^T kb^T; meanwhile half of the next chunk's operands
        b_h = gl.convert_layout(b_S.to(DT), A64)
        x = warpgroup_mma(
            b_h, k.index(s).permute((1, 0)), gl.zeros([BV, 64], gl.float32, S64), use_acc=False, is_async=True,
        )
        mbarrier.wait(bar.index(2), i & 1, pred=has_v)
        b_v = v.permute((1, 0)).load(S64).to(gl.float32)
        if not (FULL and EMIT):
            o_c = gl.arange(0, 64, layout=gl.SliceLayout(0, S64))[None, :]
            b_v = gl.where((o_c < n_t - i * 64) & has_v, b_v, 0.0)
        b_b = betas.index(s).load(gl.SliceLayout(0, S64))
        mbarrier.wait(bar.index(n), ((i + 1) >> 1) & 1, pred=more)
        _prepare(k.index(n), q.index(n), kg.index(n), g.index(n), b_gn, scale, n_n, 0, 32, P, EMIT, FULL)
        b_r = b_b[None, :] * (b_v - warpgroup_mma_wait(0, [x]))

        # ---- v_new = r + r (Akk - I)^T: the unit diagonal meets an unrounded r
        b_rb = b_r.to(DT)
        x = warpgroup_mma(
            gl.convert_layout(b_rb, A64), A.index(s).permute((1, 0)), b_r - b_rb.to(gl.float32), is_async=True,
        )
        b_S = b_S * decay.index(s).load(gl.SliceLayout(0, SK))[None, :]
        b_vn = warpgroup_mma_wait(0, [x])
        b_vb = b_vn.to(DT)

        # ---- S^T <- 2^G S^T + v_new kg, o^T = (scale qg S)^T + v_new Aqk^T; meanwhile the other half
        x = warpgroup_mma(gl.convert_layout(b_vb, AK), kg.index(s), b_S, is_async=True)
        if EMIT:
            y = diag.index(s).load(gl.SliceLayout(0, S64))[None, :] * (b_vn - b_vb.to(gl.float32))
            y = warpgroup_mma(b_h, q.index(s).permute((1, 0)), y, is_async=True)
            y = warpgroup_mma(gl.convert_layout(b_vb, A64), Aq.index(s).permute((1, 0)), y, is_async=True)
            tma.store_wait(0)                                   # the last o has left its tile
        fence_async_shared()
        _barrier()                                              # nobody reads k, A or v any more
        _fetch_v(d_v, v, bar.index(2), row + 64, c_v, has_v & more, BV)
        _fetch_keys(d_k, d_A, k.index(s), A.index(s), bar.index(s), row + 128, c_k, c_A, i + 2 < NT)
        _prepare(k.index(n), q.index(n), kg.index(n), g.index(n), b_gn, scale, n_n, 32, 32, P, EMIT, FULL)
        _mask_scores(A.index(n), Aq.index(n), n_n, EMIT, FULL, NW)
        decay.index(n).store(gl.exp2(b_gn))
        betas.index(n).store(b_beta)
        if EMIT:
            diag.index(n).store(b_d)
            b_S, y = warpgroup_mma_wait(0, [x, y])
            out.permute((1, 0)).store(y.to(DT))
        else:
            b_S = warpgroup_mma_wait(0, [x])
        fence_async_shared()
        _barrier()                                              # products done, the next chunk's operands are there
        _fetch_queries(
            d_q, d_Aq, q.index(s), Aq.index(s), bar.index(s), row + 128, c_k, c_A, i + 2 < NT, EMIT,
        )
        _fetch_gates(d_g, g.index(n), bar.index(n), row + 192, c_g, i + 3 < NT, K, EMIT)
        if EMIT and FULL:
            tma.async_copy_shared_to_global(d_o, [row.to(gl.int32), c_v], out)
        elif EMIT:
            o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, CV))[:, None]
            o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, CV))[None, :]
            p_o = row * (HV * V) + i_hv * V + i_v * BV + (o_r * (HV * V) + o_v)
            gl.store(o + p_o, out.load(CV), mask=(o_r < n_t - i * 64) & (o_v >= 0))
    if EMIT:
        tma.store_wait(0)
    for j in gl.static_range(3):
        mbarrier.invalidate(bar.index(j))

    m_keep = (o_m < keep * BV) & (o_d >= 0)
    if not EMIT:
        gl.store(parts + ((i_s * HV + i_hv) * (K * W) + p_w), b_S, mask=m_keep)
    if EMIT and HAS_HT:
        gl.store(ht + p_h, b_S, mask=m_keep)
    if EMIT and VARLEN:  # noqa: SIM102  (compile-time and run-time conditions)
        if (i_n == N - 1) & (keep == 1):                       # tokens after the last sequence belong to none
            o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, CV))[:, None]
            o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, CV))[None, :]
            b_o = gl.zeros([64, BV], DT, CV)
            for i_t in range(n_t, (T - bos).to(gl.int32), 64):
                p_o = (bos + i_t) * (HV * V) + i_hv * V + i_v * BV + (o_r * (HV * V) + o_v)
                gl.store(o + p_o, b_o, mask=(bos + i_t + o_r < T) & (o_v >= 0))


# ------------------------------------------------------------------------------------------------------- host code
def _tile(p):
    return 64 if p.V % 128 else 128                 # one warpgroup per 64 value columns


def segment_plan(p):
    """(L, P, slots): chunks a segment, segments a sequence (dense), room for segments. At most one program per
    multiprocessor emits; a sequence of c chunks has ceil(c / L) segments and, packed, a slot that may stay empty."""
    room = SMS // (p.HV * (p.V // _tile(p)))
    if p.varlen:
        chunks = max(MIN_CHUNKS, -(-p.NT // (room - p.N)))
        return chunks, 1, p.NT // chunks + p.N
    n = -(-p.T // 64)
    chunks = max(MIN_CHUNKS, -(-n // (room // p.N)))
    return chunks, -(-n // chunks), p.N * -(-n // chunks)


def supports(p):
    if p.arch[0] != 9:
        return False, f"needs compute capability 9.x, got {p.arch[0]}.{p.arch[1]}"
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 64:
        return False, f"needs V a multiple of 64, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    scans = p.N * p.HV * (p.V // _tile(p))
    if scans > SMS // 2:
        return False, f"needs at most {SMS // 2} scans (sequences x heads x V tiles), got {scans}"
    if p.B * p.T >= 2**31:
        return False, f"needs fewer than 2^31 tokens (a descriptor's coordinates), got {p.B * p.T}"
    if p.NT < 4 * MIN_CHUNKS * p.N or not p.N:
        return False, f"needs {4 * MIN_CHUNKS} chunks of 64 tokens a sequence, got {p.NT} in {p.N}"
    return True, ""


@functools.cache
def _swizzled(itemsize):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)


def run(*, q, k, v, beta, Akk, gk, h0, Aqk, p, cu_seqlens, chunk_offsets):
    """Tensors as in the chain's contract. Returns o [B,T,HV,V] (p.dtype) and ht, fp32 [N,HV,K,V] or None."""
    o = torch.empty_like(v)
    ht = v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32) if p.output_final_state else None
    L, P, slots = segment_plan(p)
    segments = torch.empty(slots, 4, dtype=torch.int64, device=v.device)
    start = torch.empty(slots, p.HV, dtype=torch.int32, device=v.device)
    parts = v.new_empty(slots, p.HV, p.K, p.V + p.K, dtype=torch.float32)
    cut = {"L": L, "P": P, "VARLEN": p.varlen}
    launch(
        reach_kernel, (slots * p.HV,), k, gk, beta, cu_seqlens, chunk_offsets, segments, start, p.T, p.N,
        H=p.H, HV=p.HV, K=p.K, **cut, ERASED=ERASED, WALK=WALK, num_warps=8,
    )

    def tiles(x, columns):
        """A descriptor of [64, columns] tiles of the tokens of x."""
        return TensorDescriptor.from_tensor(x.view(p.B * p.T, -1), [64, columns], _swizzled(x.element_size()))

    keys = [tiles(x, p.K) for x in (q, k, gk)]
    scores = [tiles(x, 64) for x in (Akk, Aqk)]

    def scan(bv, columns, emit):
        launch(
            scan_kernel, (columns // bv * p.HV * slots,), *keys, tiles(v, bv), *scores, tiles(o, bv),
            gk, beta, Aqk, h0, segments, start, parts, o, ht, p.scale, p.T, p.N,
            H=p.H, HV=p.HV, K=p.K, V=p.V, BV=bv, HAS_H0=h0 is not None, HAS_HT=ht is not None, EMIT=emit,
            VARLEN=p.varlen, FULL=not p.varlen and p.T % 64 == 0, num_warps=bv // 16,
        )

    scan(min(_tile(p), p.K), p.V + p.K, False)
    launch(
        join_kernel, (p.V // 32 * p.HV * p.N,), parts, start, chunk_offsets, p.T,
        HV=p.HV, K=p.K, V=p.V, BV=32, SLOTS=256, **cut, num_warps=8,
    )
    scan(_tile(p), p.V, True)
    return {"o": o, "ht": ht}


SPANS = {"fwd.wy..fwd.out": run}


def _descriptor(kind, columns):
    bits = 32 if kind == "fp32" else 16
    layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=2)"
    return f"tensordesc<{kind}[64, {columns}],{layout}>"


def _scan_job(K, V, BV, EMIT, FULL):
    tiles = {"d_q": K, "d_k": K, "d_g": K, "d_v": BV, "d_A": 64, "d_Aq": 64, "d_o": BV}
    types = {name: _descriptor("fp32" if name == "d_g" else "bf16", columns) for name, columns in tiles.items()}
    types |= {name: _TYPES[name] for name in ("gk", "beta", "Aqk", "h0", "segments", "start", "parts", "o", "ht")}
    types |= {"scale": "fp32", "T": "i32", "N": "i32"}
    shape = {"H": 16, "HV": 16, "K": K, "V": V, "BV": BV, "HAS_H0": True, "HAS_HT": True}
    return scan_kernel, types, shape | {"EMIT": EMIT, "VARLEN": not FULL, "FULL": FULL}, BV // 16, 1


_TYPES = {
    "k": "*bf16", "gk": "*fp32", "beta": "*fp32", "Aqk": "*bf16", "h0": "*fp32", "segments": "*i64", "start": "*i32",
    "parts": "*fp32", "o": "*bf16", "ht": "*fp32", "T": "i32", "N": "i32", "cu_seqlens": "*i64",
    "chunk_offsets": "*i64",
}
_CUT = {"HV": 16, "K": 128, "L": 8, "P": 8, "VARLEN": True}
COMPILE = [
    _scan_job(K, V, BV, EMIT, FULL)
    for K, V, BV, FULL in ((128, 128, 128, True), (128, 128, 128, False), (64, 128, 64, True))
    for EMIT in (True, False)
] + [
    (reach_kernel, {n: _TYPES[n] for n in _TYPES if n not in ("Aqk", "h0", "parts", "o", "ht")},
     _CUT | {"H": 16, "ERASED": ERASED, "WALK": WALK}, 8, 3),
    (join_kernel, {n: _TYPES[n] for n in ("parts", "start", "T", "chunk_offsets")},
     _CUT | {"V": 128, "BV": 32, "SLOTS": 256}, 8, 3),
]
