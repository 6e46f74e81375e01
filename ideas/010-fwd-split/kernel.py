"""The forward scan of few, long sequences: segments side by side, each from its exact start state.

Parent: 007-fwd-scan (its step, unchanged).
Delta: 007 has one program per (V tile, head, sequence); with 16 or 32 of them on 132 multiprocessors their chain of
    chunks is the whole time. Over a segment of chunks the scan is affine, S_out = M S_in + B. Four launches:
    reach     cuts sequences into segments and walks back from each segment's end until the decay has erased S_in:
              |M| <= prod over steps of max_d 2^g_d max(1, |1 - beta |k|^2|) < 2^-48, at any gate, beta and k;
    build     scans without readout: B from zero over what was reached; where the bound was not met, B over the whole
              segment and M, the same scan on K more columns with v = 0 from the identity;
    join      S_i+1 = M_i S_i + B_i in fp32 where M_i is needed, serial over segments;
    emit      007's scan of every segment from its start state.
Why it should be faster: emit has P times 007's programs and 1/P of its chain; build is a chain of at most 1/P on idle
    multiprocessors, without q, Aqk and o. Bytes rise from 1.8 to at most 2.9 KB a token-head (K = V = 128), 1.5 ms at
    4.2 TB/s for 65536 tokens of 32 heads, where the chain takes 6 (IDEA.md).
Constraints: as 007 (sm_90, K 64 or 128, V a multiple of 64, bf16 or fp16; any gate, any T, packed, GVA), and so few
    scans that two segments a sequence fit on 132 multiprocessors, sequences of 16 chunks or more on average.
"""
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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

    o_t = tl.arange(0, 64)
    o_k = tl.arange(0, K)
    bits = tl.where(used & (s < n_seg - 1), 0.0, ERASED)         # nothing follows the last segment
    at = L
    while (bits < ERASED) & (at > tl.maximum(L - WALK, 0)):
        at -= 1
        row = bos + at * 64 + o_t
        p_g = gk + (row[:, None] * HV + i_hv) * K + o_k[None, :]
        b_g = tl.load(p_g) - tl.load(p_g - HV * K, mask=(o_t > 0)[:, None] & (o_k >= 0)[None, :], other=0.0)
        b_k = tl.load(k + (row[:, None] * H + i_hv // (HV // H)) * K + o_k[None, :]).to(tl.float32)
        b_b = tl.load(beta + row * HV + i_hv).to(tl.float32)
        slowest = tl.max(tl.where(b_g == b_g, b_g, 0.0), 1)       # after a gate of -inf the difference says nothing
        grows = tl.maximum(tl.abs(1.0 - b_b * tl.sum(b_k * b_k, 1)), 1.0)
        bits -= tl.sum(slowest + tl.log2(grows))
    at = tl.where(bits < ERASED, tl.where(first, 0, -1), at)      # the first segment's S_in is known
    tl.store(start + i_s * HV + i_hv, at.to(tl.int32))


@triton.jit(do_not_specialize=["T"])
def join_kernel(
    parts, start, chunk_offsets, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """In parts [slots, HV, K, V + K], holding (B, M): where M counts, B becomes the state at the segment's end."""
    i_v = tl.program_id(0) % (V // BV)
    i_hv = tl.program_id(0) // (V // BV) % HV
    i_n = (tl.program_id(0) // (V // BV * HV)).to(tl.int64)
    base, n_seg = _sequence(chunk_offsets, i_n, T, L, P, VARLEN)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    W: tl.constexpr = V + K
    p_s = parts + (base * HV + i_hv) * (K * W) + o_k[:, None] * W
    b_s = tl.load(p_s + o_v[None, :], mask=(o_k < (n_seg - 1) * K)[:, None] & (o_v >= 0)[None, :], other=0.0)
    for s in range(1, n_seg - 1):
        p_s += HV * K * W
        b_b = tl.load(p_s + o_v[None, :])
        if tl.load(start + (base + s) * HV + i_hv) < 0:
            b_m = tl.load(p_s + V + o_k[None, :])
            b_b += tl.dot(b_m, b_s, input_precision="tf32x3")
            tl.store(p_s + o_v[None, :], b_b)
        b_s = b_b


# -------------------------------------------------------------------------------------- build, emit: scan of segments
@gluon.jit
def _load_keys(
    raw_q, raw_k, raw_g, q, k, gk, row_h, row_hv, j: gl.constexpr, live,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, EMIT: gl.constexpr, C16: gl.constexpr, C32: gl.constexpr,
):
    """Start the copies of 64 columns of q, k, gk; rows from `live` on are zero."""
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C16))
    o_k = gl.arange(0, 64, gl.SliceLayout(0, C16))
    offs = o_t[:, None] * (H * K) + (64 * j + o_k)[None, :]
    m = (o_t < live)[:, None]
    async_copy.async_copy_global_to_shared(raw_k.index(j), k + row_h * K + offs, mask=m)
    if EMIT:
        async_copy.async_copy_global_to_shared(raw_q.index(j), q + row_h * K + offs, mask=m)
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C32))
    o_k = gl.arange(0, 64, gl.SliceLayout(0, C32))
    offs = o_t[:, None] * (HV * K) + (64 * j + o_k)[None, :]
    async_copy.async_copy_global_to_shared(raw_g.index(j), gk + row_hv * K + offs, mask=(o_t < live)[:, None])


@gluon.jit
def _load_scores(sL, sM, s, Akk, Aqk, row_hv, live, HV: gl.constexpr, EMIT: gl.constexpr, C16: gl.constexpr):
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C16))
    o_s = gl.arange(0, 64, gl.SliceLayout(0, C16))
    offs = o_t[:, None] * (HV * 64) + o_s[None, :]
    m = (o_t < live)[:, None]
    async_copy.async_copy_global_to_shared(sL.index(s), Akk + row_hv * 64 + offs, mask=m)
    if EMIT:
        async_copy.async_copy_global_to_shared(sM.index(s), Aqk + row_hv * 64 + offs, mask=m)


@gluon.jit
def _load_v(sV, v, row_hv, live, HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, CV: gl.constexpr):
    o_t = gl.arange(0, 64, gl.SliceLayout(1, CV))
    o_v = gl.arange(0, BV, gl.SliceLayout(0, CV))
    offs = o_t[:, None] * (HV * V) + o_v[None, :]
    async_copy.async_copy_global_to_shared(sV, v + row_hv * V + offs, mask=(o_t < live)[:, None])


@gluon.jit
def _last(gk, row_hv, n, j: gl.constexpr, K: gl.constexpr, L: gl.constexpr):
    """gk's row at row_hv (the chunk's last), 64 columns; not read when the segment is empty."""
    o_k = gl.arange(0, 64, L)
    return gl.load(gk + row_hv * K + 64 * j + o_k, mask=o_k < gl.minimum(n, 1) * 64, other=0.0)


@gluon.jit
def _build(kb, qg, kg, s, raw_q, raw_k, raw_g, b_G, j: gl.constexpr, EMIT: gl.constexpr, C32: gl.constexpr):
    """64 columns of k 2^gk, q 2^gk and k 2^(G - gk)."""
    dt: gl.constexpr = raw_k.dtype
    b_g = raw_g.index(j).load(C32)
    b_k = raw_k.index(j).load(C32).to(gl.float32)
    f = gl.exp2(b_g)
    kb.index(2 * j + s).store((b_k * f).to(dt))
    if EMIT:
        qg.index(2 * j + s).store((raw_q.index(j).load(C32).to(gl.float32) * f).to(dt))
    kg.index(2 * j + s).store((b_k * gl.exp2(b_G[None, :] - b_g)).to(dt))


@gluon.jit
def _mask(sL, sM, s, EMIT: gl.constexpr, C16: gl.constexpr):
    """Keep what is strictly below the diagonals of Akk and Aqk."""
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C16))
    o_s = gl.arange(0, 64, gl.SliceLayout(0, C16))
    strict = o_t[:, None] > o_s[None, :]
    b_L = sL.index(s).load(C16)
    sL.index(s).store(gl.where(strict, b_L, gl.zeros_like(b_L)))
    if EMIT:
        b_M = sM.index(s).load(C16)
        sM.index(s).store(gl.where(strict, b_M, gl.zeros_like(b_M)))


@gluon.jit
def _small(
    gk, beta, Aqk, row_hv, last, live, n, HV: gl.constexpr, K: gl.constexpr, EMIT: gl.constexpr, L1: gl.constexpr,
):
    """One vector [256]: 2^G (K values), from 128 on beta, from 192 on the diagonal of Aqk."""
    e = gl.arange(0, 256, L1)
    t = e & 63
    b_G = gl.load(gk + last * K + e, mask=(e < K) & (n > 0), other=0.0)
    b_b = gl.load(beta + row_hv + t * HV, mask=(e >= 128) & (e < 192) & (t < live), other=0.0).to(gl.float32)
    if EMIT:
        b_b += gl.load(Aqk + row_hv * 64 + t * (HV * 64 + 1), mask=(e >= 192) & (t < live), other=0.0).to(gl.float32)
    return gl.where(e < 128, gl.exp2(b_G), b_b)


@gluon.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    q, k, gk, v, beta, Aqk, Akk, h0, segments, start, parts, o, ht, scale, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    EMIT: gl.constexpr, VARLEN: gl.constexpr, NW: gl.constexpr,
):
    """EMIT: o of a segment from its start state, and ht. Otherwise BV columns of (B, M), without q, Aqk, o, ht."""
    dt: gl.constexpr = k.dtype.element_ty
    NK: gl.constexpr = K // 64
    W: gl.constexpr = V + K
    NV: gl.constexpr = V // BV if EMIT else W // BV
    C16: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    C32: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [NW, 1], [1, 0])
    CV: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [NW, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, M)
    SW: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    i_v = gl.program_id(0) % NV
    i_hv = gl.program_id(0) // NV % HV
    i_s = (gl.program_id(0) // (NV * HV)).to(gl.int64)
    i_h = i_hv // (HV // H)
    bos = gl.load(segments + i_s * 4)
    n_t = gl.load(segments + i_s * 4 + 1).to(gl.int32)
    i_n = gl.load(segments + i_s * 4 + 2)
    ends = gl.load(segments + i_s * 4 + 3).to(gl.int32)
    known = ends & 1                                            # the start state is h0
    keep = ends >> 1                                            # the end state is wanted
    v_rows = n_t                                                # rows of v, 0 in columns of M
    if not EMIT:
        c_0 = gl.load(start + i_s * HV + i_hv)
        is_m = (i_v * BV >= V).to(gl.int32)
        keep = (1 - keep) * gl.minimum(n_t, 1) * (1 - is_m * (c_0 >= 0).to(gl.int32))
        c_0 = gl.maximum(c_0, 0)
        known = known * (1 - is_m) * (c_0 == 0).to(gl.int32)
        bos += c_0 * 64
        n_t = (n_t - c_0 * 64) * keep
        v_rows = n_t * (1 - is_m)
    v += i_v * BV

    raw_k = gl.allocate_shared_memory(dt, [NK, 64, 64], FLAT)
    raw_g = gl.allocate_shared_memory(gl.float32, [NK, 64, 64], FLAT)
    kb = gl.allocate_shared_memory(dt, [2 * NK, 64, 64], SW)
    kg = gl.allocate_shared_memory(dt, [2 * NK, 64, 64], SW)
    sL = gl.allocate_shared_memory(dt, [2, 64, 64], SW)
    sV = gl.allocate_shared_memory(dt, [64, BV], SW)
    small = gl.allocate_shared_memory(gl.float32, [2, 256], FLAT1)
    raw_q = raw_k
    qg = kb
    sM = sL
    if EMIT:
        raw_q = gl.allocate_shared_memory(dt, [NK, 64, 64], FLAT)
        qg = gl.allocate_shared_memory(dt, [2 * NK, 64, 64], SW)
        sM = gl.allocate_shared_memory(dt, [2, 64, 64], SW)
        sO = gl.allocate_shared_memory(dt, [64, BV], SW)

    o_m = gl.arange(0, BV, gl.SliceLayout(1, M))
    o_c = gl.arange(0, 64, ROW)
    p_h = (i_n * HV + i_hv) * (K * V) + i_v * BV + (o_m[:, None] + (o_c * V)[None, :])
    p_w = i_v * BV + (o_m[:, None] + (o_c * W)[None, :])
    m_keep = (o_m < keep * BV)[:, None]
    zero = gl.zeros([BV, 64], gl.float32, M)
    S0 = zero
    S1 = zero
    if EMIT:
        p_0 = ((i_s - 1) * HV + i_hv) * (K * W) + p_w           # what the segment before left
        m_parts = (o_m >= known * BV)[:, None]
        S0 = gl.load(parts + p_0, mask=m_parts, other=0.0)
        if NK == 2:
            S1 = gl.load(parts + p_0 + 64 * W, mask=m_parts, other=0.0)
    else:
        column = (i_v * BV - V + o_m)[:, None]
        S0 = gl.where(column == o_c[None, :], zero + 1.0, zero)
        if NK == 2:
            S1 = gl.where(column == o_c[None, :] + 64, zero + 1.0, zero)
    if h0 is not None:
        m_known = (o_m < known * BV)[:, None]
        S0 += gl.load(h0 + p_h, mask=m_known, other=0.0)
        if NK == 2:
            S1 += gl.load(h0 + p_h + 64 * V, mask=m_known, other=0.0)

    # ---- prologue: operands of chunk 0, copies for chunk 1
    row = bos * HV + i_hv
    for j in gl.static_range(NK):
        _load_keys(raw_q, raw_k, raw_g, q, k, gk, bos * H + i_h, row, j, n_t, H, HV, K, EMIT, C16, C32)
    _load_scores(sL, sM, 0, Akk, Aqk, row, n_t, HV, EMIT, C16)
    async_copy.commit_group()
    last = (bos + gl.minimum(n_t, 64) - 1) * HV + i_hv
    async_copy.wait_group(0)
    for j in gl.static_range(NK):
        b_G = _last(gk, last, n_t, j, K, gl.SliceLayout(0, C32))
        _build(kb, qg, kg, 0, raw_q, raw_k, raw_g, b_G, j, EMIT, C32)
    _mask(sL, sM, 0, EMIT, C16)
    small.index(0).store(_small(gk, beta, Aqk, row, last, n_t, n_t, HV, K, EMIT, L1))
    fence_async_shared()
    _barrier()
    row1 = row + 64 * HV
    row1h = (bos + 64) * H + i_h
    _load_keys(raw_q, raw_k, raw_g, q, k, gk, row1h, row1, 0, n_t - 64, H, HV, K, EMIT, C16, C32)
    _load_v(sV, v, row, v_rows, HV, V, BV, CV)
    async_copy.commit_group()
    if NK == 2:
        _load_keys(raw_q, raw_k, raw_g, q, k, gk, row1h, row1, 1, n_t - 64, H, HV, K, EMIT, C16, C32)
    _load_scores(sL, sM, 1, Akk, Aqk, row1, n_t - 64, HV, EMIT, C16)
    async_copy.commit_group()

    o_t = gl.arange(0, 64, gl.SliceLayout(1, CV))
    o_v = gl.arange(0, BV, gl.SliceLayout(0, CV))
    p_o = i_v * BV + (o_t[:, None] * (HV * V) + o_v[None, :])
    s = 0
    for i_t in range(0, n_t, 64):
        # ---- rows of the next chunk
        live = n_t - i_t - 64                                  # how many are left
        row = (bos + i_t) * HV + i_hv
        row1 = row + 64 * HV
        row2 = row + 128 * HV
        row2h = (bos + i_t + 128) * H + i_h
        last = (bos + gl.minimum(i_t + 128, n_t) - 1) * HV + i_hv
        b_small = _small(gk, beta, Aqk, row1, last, live, n_t, HV, K, EMIT, L1)
        b_G = _last(gk, last, n_t, 0, K, gl.SliceLayout(0, C32))

        # ---- X = S^T kb^T; meanwhile half of the next operands. S is scaled before: ptxas waits for every
        # product in flight before it lets an accumulator of the last iteration be touched
        h_0 = gl.convert_layout(S0.to(dt), A)
        S0 = S0 * small.index(s).slice(0, 64).load(ROW)[None, :]
        if NK == 2:
            h_1 = gl.convert_layout(S1.to(dt), A)
            S1 = S1 * small.index(s).slice(64, 64).load(ROW)[None, :]
        x = warpgroup_mma(h_0, kb.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if NK == 2:
            x = warpgroup_mma(h_1, kb.index(2 + s).permute((1, 0)), x, is_async=True)
        async_copy.wait_group(1)
        _build(kb, qg, kg, 1 - s, raw_q, raw_k, raw_g, b_G, 0, EMIT, C32)
        b_v = sV.permute((1, 0)).load(M).to(gl.float32)
        b_beta = small.index(s).slice(128, 64).load(ROW)[None, :]
        x = warpgroup_mma_wait(0, deps=[x])

        # ---- vn = r + r (Akk - I)^T
        r = b_beta * (b_v - x)
        vn = warpgroup_mma(gl.convert_layout(r.to(dt), A), sL.index(s).permute((1, 0)), r, is_async=True)
        if EMIT:
            y = warpgroup_mma(h_0, qg.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
            if NK == 2:
                y = warpgroup_mma(h_1, qg.index(2 + s).permute((1, 0)), y, is_async=True)
        _barrier()                                             # everybody has read the raw half and v
        _load_keys(raw_q, raw_k, raw_g, q, k, gk, row2h, row2, 0, live - 64, H, HV, K, EMIT, C16, C32)
        _load_v(sV, v, row1, v_rows - i_t - 64, HV, V, BV, CV)
        async_copy.commit_group()
        if NK == 2:
            b_G = _last(gk, last, n_t, 1, K, gl.SliceLayout(0, C32))
        if EMIT:
            b_d = small.index(s).slice(192, 64).load(ROW)[None, :]
            vn, y = warpgroup_mma_wait(0, deps=[vn, y])
        else:
            vn = warpgroup_mma_wait(0, deps=[vn])

        # ---- S^T <- 2^G S^T + vn kg, o^T = scale X_2 + d vn + vn strict(Aqk)^T; meanwhile the other half
        b_vn = gl.convert_layout(vn.to(dt), A)
        S0 = warpgroup_mma(b_vn, kg.index(s), S0, is_async=True)
        if NK == 2:
            S1 = warpgroup_mma(b_vn, kg.index(2 + s), S1, is_async=True)
        if EMIT:
            y = warpgroup_mma(b_vn, sM.index(s).permute((1, 0)), y * scale + b_d * vn, is_async=True)
        async_copy.wait_group(1)
        if NK == 2:
            _build(kb, qg, kg, 1 - s, raw_q, raw_k, raw_g, b_G, 1, EMIT, C32)
        _mask(sL, sM, 1 - s, EMIT, C16)
        small.index(1 - s).store(b_small)
        if EMIT:
            if NK == 2:
                S0, S1, y = warpgroup_mma_wait(0, deps=[S0, S1, y])
            else:
                S0, y = warpgroup_mma_wait(0, deps=[S0, y])
            sO.permute((1, 0)).store(y.to(dt))
        elif NK == 2:
            S0, S1 = warpgroup_mma_wait(0, deps=[S0, S1])
        else:
            S0 = warpgroup_mma_wait(0, deps=[S0])
        fence_async_shared()
        _barrier()                                             # products done, the next chunk's operands are there
        if NK == 2:
            _load_keys(raw_q, raw_k, raw_g, q, k, gk, row2h, row2, 1, live - 64, H, HV, K, EMIT, C16, C32)
        _load_scores(sL, sM, s, Akk, Aqk, row2, live - 64, HV, EMIT, C16)
        async_copy.commit_group()
        if EMIT:
            gl.store(o + row * V + p_o, sO.load(CV), mask=(o_t < live + 64)[:, None])
        s = 1 - s
    async_copy.wait_group(0)

    if not EMIT:
        p_1 = (i_s * HV + i_hv) * (K * W) + p_w
        gl.store(parts + p_1, S0, mask=m_keep)
        if NK == 2:
            gl.store(parts + p_1 + 64 * W, S1, mask=m_keep)
    if EMIT and ht is not None:
        gl.store(ht + p_h, S0, mask=m_keep)
        if NK == 2:
            gl.store(ht + p_h + 64 * V, S1, mask=m_keep)
    if EMIT and VARLEN:  # noqa: SIM102  (compile-time and run-time conditions)
        if (i_n == N - 1) & (keep == 1):                       # tokens after the last sequence belong to none
            b_o = gl.zeros([64, BV], dt, CV)
            for i_t in range(n_t, (T - bos).to(gl.int32), 64):
                gl.store(o + ((bos + i_t) * HV + i_hv) * V + p_o, b_o, mask=(bos + i_t + o_t < T)[:, None])


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
    if p.NT < 4 * MIN_CHUNKS * p.N or not p.N:
        return False, f"needs {4 * MIN_CHUNKS} chunks of 64 tokens a sequence, got {p.NT} in {p.N}"
    return True, ""


def run(*, q, k, v, beta, Akk, gk, h0, Aqk, p, cu_seqlens, chunk_offsets):
    """Tensors as in the chain's contract. Returns o [B,T,HV,V] (p.dtype) and ht, fp32 [N,HV,K,V] or None."""
    o = torch.empty_like(v)
    ht = v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32) if p.output_final_state else None
    L, P, slots = segment_plan(p)
    segments = torch.empty(slots, 4, dtype=torch.int64, device=v.device)
    start = torch.empty(slots, p.HV, dtype=torch.int32, device=v.device)
    parts = v.new_empty(slots, p.HV, p.K, p.V + p.K, dtype=torch.float32)
    cut = {"L": L, "P": P, "VARLEN": p.varlen}
    reach_kernel[(slots * p.HV,)](
        k, gk, beta, cu_seqlens, chunk_offsets, segments, start, p.T, p.N,
        H=p.H, HV=p.HV, K=p.K, **cut, ERASED=ERASED, WALK=WALK, num_warps=8,
    )

    def scan(bv, columns, emit):
        scan_kernel[(columns // bv * p.HV * slots,)](
            q, k, gk, v, beta, Aqk, Akk, h0, segments, start, parts, o, ht, p.scale, p.T, p.N,
            H=p.H, HV=p.HV, K=p.K, V=p.V, BV=bv, EMIT=emit, VARLEN=p.varlen, NW=bv // 16, num_warps=bv // 16,
        )

    scan(min(_tile(p), p.K), p.V + p.K, False)
    join_kernel[(p.V // 32 * p.HV * p.N,)](
        parts, start, chunk_offsets, p.T, HV=p.HV, K=p.K, V=p.V, BV=32, **cut, num_warps=8,
    )
    scan(_tile(p), p.V, True)
    return {"o": o, "ht": ht}


SPANS = {"fwd.wy..fwd.out": run}

_TYPES = {
    "q": "*bf16", "k": "*bf16", "gk": "*fp32", "v": "*bf16", "beta": "*fp32", "Aqk": "*bf16", "Akk": "*bf16",
    "segments": "*i64", "start": "*i32", "parts": "*fp32", "o": "*bf16", "scale": "fp32", "T": "i32", "N": "i32",
}
_DENSE = {"h0": None, "ht": None, "H": 16, "HV": 16, "VARLEN": False}
_CUT = {"HV": 16, "K": 128, "L": 8, "P": 8}
_PACKED = {"cu_seqlens": "*i64", "chunk_offsets": "*i64"}
COMPILE = [
    (scan_kernel, _TYPES, _DENSE | {"K": K, "V": V, "BV": BV, "EMIT": EMIT, "NW": BV // 16}, BV // 16, 1)
    for K, V, BV in ((128, 128, 128), (64, 128, 64), (128, 64, 64)) for EMIT in (True, False)
] + [
    (reach_kernel, {n: _TYPES[n] for n in ("k", "gk", "beta", "segments", "start", "T", "N")} | _PACKED,
     _CUT | {"H": 16, "VARLEN": True, "ERASED": ERASED, "WALK": WALK}, 8, 3),
    (join_kernel, {n: _TYPES[n] for n in ("parts", "start", "T")} | {"chunk_offsets": "*i64"},
     _CUT | {"V": 128, "BV": 32, "VARLEN": True}, 8, 3),
]  # fmt: skip
