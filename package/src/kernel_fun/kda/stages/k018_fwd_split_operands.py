"""The forward of few, long sequences from ready operands: segments side by side, and nothing built inside a step.

Parent: 010-fwd-split (its segments and join) and 014-fwd-prep-mma (its preparation), with the scan of 013-fwd-operands.
Delta: 010 makes k 2^gk, q 2^gk, k 2^(G - gk) of every chunk in every step of build and of emit, from q, k, gk that 014
    wrote for it. Here 014 writes the operands themselves, and build and emit are 013's scan over segments: a warp that
    copies, and warpgroups that carry 64 columns of S^T each and wait for data, not for each other.
    reach: a chunk's map is S -> 2^G S - kg^T Akk (beta kb S), so its norm is at most
        max 2^G + sum over rows r >= s of |kg_r| |Akk_rs| |beta_s kb_s|,
    from the operands as they are. 010's bound adds up each step's slowest channel: where gates scatter a fraction of
    what any channel loses over a chunk. Either holds for any gate, beta and key; of each chunk the better one counts.
    Columns of M are scanned with copies of v from behind its last column, which TMA fills with zeros.
Why it should be faster: emit is bound by its copies, 96 KB a step and multiprocessor, 3.1 us where 010's takes 4.75. At
    the benchmarks' gates one to three chunks erase a state where 010 counts up to 10 (IDEA.md).
Constraints: where both 014 and 010 serve: sm_90, K = 128, V a multiple of 128, bf16, few scans of many chunks. Any
    gate, any T, packed sequences, GVA, states.
"""
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

from kernel_fun._common import cute
from kernel_fun._common.launch import launch
from kernel_fun.kda.stages.k010_fwd_split import segment_plan
from kernel_fun.kda.stages.k010_fwd_split import supports as may_be_cut
from kernel_fun.kda.stages.k013_fwd_operands import LOG2E, _barrier, _steps, _tiles, _vector
from kernel_fun.kda.stages.k014_fwd_prep_mma import FRONT_WRITES, _prepare
from kernel_fun.kda.stages.k014_fwd_prep_mma import supports as may_be_prepared

FAMILY = "kda"
BV = 128                    # columns a program, 64 a warpgroup
ERASED = 48.0               # bits: what is dropped is below 2^-48 |S_in|, fp32 rounds at 2^-24
WALK = 32                   # chunks that reach looks back at most


# ------------------------------------------------------------------------------------------ segments: reach, join
# L and P come at run time: packed batches have ever new ones, and each would compile again.
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
def _length(x):
    """At least |row|, for each row: squares in units of 2^-64, and what they can lose below 2^-126 added."""
    x = x * 4294967296.0
    return tl.sqrt(tl.sum(x * x, 1) + 1.6e-36) * (1 / 4294967296.0)


@triton.jit
def _bits(
    k, g, dt_bias, tiles, vec, Akk, A, lower_bound, chunk, t0, i_h, i_hv,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, FAST: tl.constexpr,
):
    """How much a whole chunk from token t0 on shrinks any state: -log2 of the smaller of two bounds of its map's norm.
    NaN where an operand is."""
    o_r = tl.arange(0, 64)
    o_k = tl.arange(0, K)
    row = t0 + o_r
    at = chunk * HV + i_hv
    p_x = tiles + at * (192 * K) + (o_r[:, None] * K + o_k[None, :])
    b_kb = tl.load(p_x).to(tl.float32)
    b_kg = tl.load(p_x + 64 * K).to(tl.float32)
    b_A = tl.load(Akk + (row[:, None] * HV + i_hv) * 64 + o_r[None, :]).to(tl.float32)
    b_d = tl.load(vec + at * (K + 64) + o_k)
    b_b = tl.load(vec + at * (K + 64) + K + o_r)
    b_g = tl.load(g + (row[:, None] * HV + i_hv) * K + o_k[None, :]).to(tl.float32)
    b_k = tl.load(k + (row[:, None] * H + i_h) * K + o_k[None, :]).to(tl.float32)

    # ---- the map as a whole: past the rows, and through them
    enters = tl.abs(b_b) * _length(b_kb)
    through = tl.sum(tl.sum(tl.abs(b_A) * enters[None, :], 1) * _length(b_kg))
    whole = -tl.log2(tl.max(b_d) + through)

    # ---- step by step: 2^(max g) max(1, |1 - beta |k|^2|); a step's floor is 2^-31.5 or below
    if HAS_BIAS:
        b_g += tl.load(dt_bias + i_hv * K + o_k).to(tl.float32)[None, :]
    slowest = tl.maximum(tl.max(_steps(b_g, A, lower_bound, GATE, HAS_A, FAST), 1), -31.5)
    b_s = tl.sum(b_k * b_k, 1)
    if L2NORM:
        b_s = b_s / (b_s + 1e-6)
    grows = tl.maximum(tl.abs(1.0 - b_b * b_s), 1.0)
    return tl.maximum(whole, tl.sum(-slowest - tl.log2(grows)), propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["T", "N", "L", "P"])
def reach_kernel(
    k, g, A_log, dt_bias, tiles, vec, Akk, cu_seqlens, chunk_offsets, segments, start, lower_bound, T, N, L, P,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, VARLEN: tl.constexpr, GATE: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, FAST: tl.constexpr, ERASED: tl.constexpr,
    WALK: tl.constexpr,
):
    """segments[slot] = first token, number of tokens (0: slot not used), first chunk of all, 4 times the sequence + 1
    if its first + 2 if its last. start[slot, head] = chunk of the segment from which B is scanned; -1 where M is
    needed. k, g: raw."""
    i_s = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    if VARLEN:
        o_n = tl.arange(0, 128)
        c = tl.load(chunk_offsets + o_n, mask=o_n < N, other=0).to(tl.int64)
        i_n = (tl.sum(((o_n < N) & (c // L + o_n <= i_s)).to(tl.int32)) - 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        n_t = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos
        chunk = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        i_n = (i_s // P).to(tl.int64)
        bos = i_n * T
        n_t = T.to(tl.int64)
        chunk = i_n * ((T + 63) // 64)
    base, n_seg = _sequence(chunk_offsets, i_n, T, L, P, VARLEN)
    s = (i_s - base).to(tl.int32)
    used = s < n_seg
    first = s == 0
    last = s == n_seg - 1
    bos += s * (L * 64)
    chunk += s * L
    n_t = tl.where(used, tl.minimum(n_t - s * (L * 64), L * 64), 0)
    if i_hv == 0:
        tl.store(segments + i_s * 4, bos)
        tl.store(segments + i_s * 4 + 1, n_t)
        tl.store(segments + i_s * 4 + 2, chunk)
        tl.store(segments + i_s * 4 + 3, i_n * 4 + first.to(tl.int64) + 2 * last.to(tl.int64))

    A = 1.0
    if HAS_A:
        A = tl.exp2(tl.load(A_log + i_hv).to(tl.float32) * LOG2E)
    bits = tl.where(used & (s < n_seg - 1), 0.0, ERASED)         # nothing follows the last segment; the others are full
    most = tl.minimum(L, WALK)
    n = 0
    while (not (bits >= ERASED)) & (n < most):
        n += 1
        bits += _bits(
            k, g, dt_bias, tiles, vec, Akk, A, lower_bound, chunk + (L - n), bos + (L - n) * 64, i_hv // (HV // H),
            i_hv, H, HV, K, GATE, HAS_A, HAS_BIAS, L2NORM, FAST,
        )
    at = tl.where(bits >= ERASED, L - n, tl.where(first, 0, -1))  # the first segment's S_in is known
    tl.store(start + i_s * HV + i_hv, at.to(tl.int32))


@triton.jit(do_not_specialize=["T", "L", "P"])
def join_kernel(
    parts, start, chunk_offsets, T, L, P,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MOST: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """In parts [slots, HV, K, V + K], holding (B, M): where M counts, B becomes the state at the segment's end.
    A sequence has at most MOST segments."""
    i_v = tl.program_id(0) % (V // BV)
    i_hv = tl.program_id(0) // (V // BV) % HV
    i_n = (tl.program_id(0) // (V // BV * HV)).to(tl.int64)
    base, n_seg = _sequence(chunk_offsets, i_n, T, L, P, VARLEN)
    o_s = tl.arange(0, MOST)
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


# ------------------------------------------------------------------------------- build, emit: 013's scan, of segments
# Partitions of warps: each warpgroup carries 64 columns, one warp starts the copies. Shapes in shared memory: kb, kg,
# qg [64, K]; A, Aq, v, out [64, 64]; two of each, for chunks i and i + 1 (v: a warpgroup), but one out a warpgroup. A
# chunk's kb and v ("early") are free for the chunk after next halfway through its step, the others ("late") at its end.
@gluon.jit
def _copies(
    d_x, d_A, d_Aq, d_v, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, tile, bos, c_A, c_v, NT,
    HV: gl.constexpr, K: gl.constexpr, NP: gl.constexpr, EMIT: gl.constexpr,
):
    """All copies of a segment, each as soon as its buffer is free; columns from d_v's width on come as zeros."""
    BYTES: gl.constexpr = (256 if EMIT else 128) * (K + 64)
    for i in range(NT):
        s, phase = i & 1, ((i >> 1) & 1) ^ 1                    # the first two waits are for what was never taken
        row, at = (bos + i * 64).to(gl.int32), ((tile + i * HV) * 192).to(gl.int32)
        mbarrier.wait(early_free.index(s), phase)
        mbarrier.expect(early.index(s), 128 * (K + 64 * NP))
        tma.async_copy_global_to_shared(d_x, [at, 0], early.index(s), kb.index(s))
        for w in gl.static_range(NP):
            tma.async_copy_global_to_shared(d_v, [row, c_v + 64 * w], early.index(s), v.index(NP * s + w))
        mbarrier.wait(late_free.index(s), phase)
        mbarrier.expect(late.index(s), BYTES)
        tma.async_copy_global_to_shared(d_A, [row, c_A], late.index(s), A.index(s))
        if EMIT:
            tma.async_copy_global_to_shared(d_x, [at + 128, 0], late.index(s), qg.index(s))
        tma.async_copy_global_to_shared(d_x, [at + 64, 0], late.index(s), kg.index(s))
        if EMIT:
            tma.async_copy_global_to_shared(d_Aq, [row, c_A], late.index(s), Aq.index(s))


@gluon.jit
def _steps_of(
    d_o, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, small, out, vec, h0, parts, o, ht, tile, bos, c_v,
    p_state, p_part, diag, known, keep, n_t, W: gl.constexpr, NP: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr, EMIT: gl.constexpr, FULL: gl.constexpr,
):
    """The chunks of n_t tokens from bos on, for 64 columns.

    Emitting, they are values, from column c_v of v's rows on; the first state is h0's at p_state if it is `known`, else
    parts' at p_part; the last one goes to ht if `keep`. Building, they are columns of (B, M): from h0 if `known`, else
    from zero or, in M, column m from 1 in row m + diag; they are kept in parts at p_part if `keep`."""
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
    b_S = gl.zeros([64, K], gl.float32, SK)                     # the state, transposed
    if EMIT:
        p_w = p_part + o_d * (V + K) + o_m
        b_S += gl.load(parts + p_w, mask=(o_m >= known * 64) & (o_d >= 0), other=0.0)
    else:
        b_S = gl.where(o_m + diag == o_d, b_S + 1.0, b_S)
    if HAS_H0:
        b_S += gl.load(h0 + (p_state + o_d * V + o_m), mask=(o_m < known * 64) & (o_d >= 0), other=0.0)
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
        if EMIT:
            y = warpgroup_mma(
                b_hA, qg.index(s).permute((1, 0)), gl.zeros([64, 64], gl.float32, S64), use_acc=False, is_async=True,
            )
            tma.store_wait(0)                                   # the last o has left its tile
        b_S = b_S * small.index(2 * W + s).slice(0, K).load(gl.SliceLayout(0, SK))[None, :]
        _barrier()                                              # nobody here reads kb or v any more
        mbarrier.arrive(early_free.index(s), count=1)
        small.index(2 * W + 1 - s).store(b_small)
        b_vn = warpgroup_mma_wait(1 if EMIT else 0, [x])
        if not FULL:
            b_vn = gl.where(live, b_vn, 0.0)                    # so do Akk's
        b_vb = b_vn.to(DT)

        # ---- S^T <- 2^G S^T + v_new kg, o^T = S^T qg^T + v_new Aqk^T
        z = warpgroup_mma(gl.convert_layout(b_vb, AK), kg.index(s), b_S, is_async=True)
        if EMIT:
            y = warpgroup_mma(gl.convert_layout(b_vb, A64), Aq.index(s).permute((1, 0)), y, is_async=True)
            b_S = warpgroup_mma_wait(1, [z])
            b_h = b_S.to(DT)
            out.permute((1, 0)).store(warpgroup_mma_wait(0, [y]).to(DT))
            fence_async_shared()
        else:
            b_S = warpgroup_mma_wait(0, [z])
            b_h = b_S.to(DT)
        _barrier()                                              # products done, o is in its tile
        mbarrier.arrive(late_free.index(s), count=1)
        if EMIT and FULL:
            tma.async_copy_shared_to_global(d_o, [row.to(gl.int32), c_v], out)
        elif EMIT:
            if n_t - i * 64 >= 64:
                tma.async_copy_shared_to_global(d_o, [row.to(gl.int32), c_v], out)
            else:
                o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, CV))[:, None]
                o_v = gl.arange(0, 64, layout=gl.SliceLayout(0, CV))[None, :]
                p_o = row * (HV * V) + c_v + (o_r * (HV * V) + o_v)
                gl.store(o + p_o, out.load(CV), mask=(o_r < n_t - i * 64) & (o_v >= 0))
    m_keep = (o_m < keep * 64) & (o_d >= 0)
    if EMIT:
        tma.store_wait(0)
    else:
        gl.store(parts + (p_part + o_d * (V + K) + o_m), b_S, mask=m_keep)
    if EMIT and HAS_HT:
        gl.store(ht + (p_state + o_d * V + o_m), b_S, mask=m_keep)


@gluon.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    d_x, d_A, d_Aq, d_v, d_o,                                  # descriptors
    vec, h0, segments, start, parts, o, ht, T, N,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr,
    EMIT: gl.constexpr, VARLEN: gl.constexpr, FULL: gl.constexpr,
):
    """EMIT: BV value columns of o of a segment and head from its start state, and ht. Otherwise BV columns of (B, M),
    without qg, Aqk, o, ht; only whole chunks (FULL)."""
    DT: gl.constexpr = d_x.dtype
    NP: gl.constexpr = BV // 64
    WIDE: gl.constexpr = V + K
    NV: gl.constexpr = (V if EMIT else WIDE) // BV
    i_v = gl.program_id(0) % NV
    i_hv = (gl.program_id(0) // NV % HV).to(gl.int64)
    i_s = (gl.program_id(0) // (NV * HV)).to(gl.int64)
    bos = gl.load(segments + i_s * 4)
    n_t = gl.load(segments + i_s * 4 + 1).to(gl.int32)
    tile = gl.load(segments + i_s * 4 + 2) * HV + i_hv         # HV further each chunk
    flags = gl.load(segments + i_s * 4 + 3)
    i_n = flags >> 2
    known = flags.to(gl.int32) & 1                             # the start state is h0
    keep = (flags.to(gl.int32) >> 1) & 1                       # the end state is wanted
    c_v = (i_hv * V + i_v * BV).to(gl.int32)
    p_state = (i_n * HV + i_hv) * (K * V) + i_v * BV
    diag = i_v * BV - V
    if EMIT:                                                   # what the segment before left
        p_part = ((i_s - 1) * HV + i_hv) * (K * WIDE) + i_v * BV
    else:
        p_part = (i_s * HV + i_hv) * (K * WIDE) + i_v * BV
        c_0 = gl.load(start + i_s * HV + i_hv)
        values = diag < 0                                      # the other columns are M's
        wanted = (keep == 0) & (n_t > 0) & (values | (c_0 < 0))
        c_0 = gl.maximum(c_0, 0)
        known = (values & (known == 1) & (c_0 == 0)).to(gl.int32)
        keep = wanted.to(gl.int32)
        bos = bos + c_0 * 64
        tile = tile + c_0 * HV
        n_t = (n_t - c_0 * 64) * keep
        c_v = gl.where(values, c_v, HV * V)
    NT = (n_t + 63) // 64
    c_A = (i_hv * 64).to(gl.int32)

    kb = gl.allocate_shared_memory(DT, [2, 64, K], d_x.layout)
    kg = gl.allocate_shared_memory(DT, [2, 64, K], d_x.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    v = gl.allocate_shared_memory(DT, [2 * NP, 64, 64], d_v.layout)
    small = gl.allocate_shared_memory(gl.float32, [2 * NP, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qg, Aq, out = kb, A, v
    if EMIT:
        qg = gl.allocate_shared_memory(DT, [2, 64, K], d_x.layout)
        Aq = gl.allocate_shared_memory(DT, [2, 64, 64], d_Aq.layout)
        out = gl.allocate_shared_memory(DT, [NP, 64, 64], d_o.layout)
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

    gl.warp_specialize([
        (_steps_of, (d_o, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, small, out.index(0), vec, h0, parts,
                     o, ht, tile, bos, c_v, p_state, p_part, diag, known, keep, n_t, 0,
                     NP, HV, K, V, HAS_H0, HAS_HT, EMIT, FULL)),
        (_steps_of, (d_o, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, small, out.index(1), vec, h0, parts,
                     o, ht, tile, bos, c_v + 64, p_state + 64, p_part + 64, diag + 64, known, keep, n_t, 1,
                     NP, HV, K, V, HAS_H0, HAS_HT, EMIT, FULL)),
        (_copies, (d_x, d_A, d_Aq, d_v, kb, kg, qg, A, Aq, v, early, late, early_free, late_free, tile, bos, c_A, c_v,
                   NT, HV, K, NP, EMIT)),
    ], [4, 1], [240, 24])
    for j in gl.static_range(2):
        mbarrier.invalidate(early.index(j))
        mbarrier.invalidate(late.index(j))
        mbarrier.invalidate(early_free.index(j))
        mbarrier.invalidate(late_free.index(j))

    if EMIT and VARLEN:  # noqa: SIM102  (compile-time and run-time conditions)
        if (i_n == N - 1) & (keep == 1):                       # tokens after the last sequence belong to none
            CV: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
            o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, CV))[:, None]
            o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, CV))[None, :]
            b_o = gl.zeros([64, BV], DT, CV)
            for i_t in range(n_t, (T - bos).to(gl.int32), 64):
                p_o = (bos + i_t) * (HV * V) + c_v + (o_r * (HV * V) + o_v)
                gl.store(o + p_o, b_o, mask=(bos + i_t + o_r < T) & (o_v >= 0))


# ---------------------------------------------------------------------------------------------------------- host code
SPAN = "fwd.norm..fwd.out"
WRITES = {SPAN: (*FRONT_WRITES, "o", "ht")}


def supports(p) -> tuple[bool, str]:
    """Where 014 prepares and 010 cuts; and the CuTe DSL, which 014 is written in, can run."""
    for served, why in (may_be_prepared(p), may_be_cut(p)):
        if not served:
            return False, why
    why = cute.reason()
    return not why, why


def scan(*, k_raw, g_raw, A_log, dt_bias, operands, vec, Akk, Aqk, v, h0, p, cu_seqlens, chunk_offsets):
    """What follows the preparation, four launches. `operands`, `vec`: 013's `handover`. Akk (with its unit diagonal)
    and Aqk (the scale in it) [B,T,HV,64] p.dtype, zero above their diagonals; the raw k and g say, with these, where
    scans may start. Returns o [B,T,HV,V] p.dtype, ht [N,HV,K,V] fp32 or None."""
    o = torch.empty_like(v)
    ht = v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32) if p.output_final_state else None
    L, P, slots = segment_plan(p)
    segments = torch.empty(slots, 4, dtype=torch.int64, device=v.device)
    start = torch.empty(slots, p.HV, dtype=torch.int32, device=v.device)
    parts = v.new_empty(slots, p.HV, p.K, p.V + p.K, dtype=torch.float32)
    launch(
        reach_kernel, (slots * p.HV,),
        k_raw, g_raw, A_log, dt_bias, operands, vec, Akk, cu_seqlens, chunk_offsets, segments, start,
        p.lower_bound or 0.0, p.T, p.N, L, P,
        H=p.H, HV=p.HV, K=p.K, VARLEN=p.varlen, GATE=p.gate, HAS_A=A_log is not None, HAS_BIAS=dt_bias is not None,
        L2NORM=p.l2norm, FAST=v.is_cuda, ERASED=ERASED, WALK=WALK, num_warps=8,
    )
    given = [_tiles(operands, p.K)]
    given += [_tiles(x.view(p.B * p.T, -1), 64) for x in (Akk, Aqk, v, o)]

    def segments_of(columns, emit):
        launch(
            scan_kernel, (columns // BV * p.HV * slots,), *given, vec, h0, segments, start, parts, o, ht, p.T, p.N,
            HV=p.HV, K=p.K, V=p.V, BV=BV, HAS_H0=h0 is not None, HAS_HT=ht is not None, EMIT=emit, VARLEN=p.varlen,
            FULL=not emit or (not p.varlen and p.T % 64 == 0), num_warps=4,
        )

    segments_of(p.V + p.K, False)
    launch(
        join_kernel, (p.V // 32 * p.HV * p.N,), parts, start, chunk_offsets, p.T, L, P,
        HV=p.HV, K=p.K, V=p.V, BV=32, MOST=256, VARLEN=p.varlen, num_warps=8,
    )
    segments_of(p.V, True)
    return o, ht


def run(
    *, q_raw, k_raw, v, beta_raw, g_raw, A_log, dt_bias, h0, p, cu_seqlens, chunk_indices, chunk_offsets,
    wanted=frozenset(WRITES[SPAN]),
):
    """Tensors as in the chain's contract. Returns o [B,T,HV,V] (p.dtype), ht, fp32 [N,HV,K,V] or None, Aqk, Akk
    [B,T,HV,64] p.dtype; and what of q, k, q_rstd, k_rstd, beta, gk is `wanted`, as 014 does."""
    made, operands, vec = _prepare(
        q_raw, k_raw, g_raw, A_log, dt_bias, beta_raw, p, cu_seqlens, chunk_indices, wanted, tiles=True
    )
    o, ht = scan(
        k_raw=k_raw, g_raw=g_raw, A_log=A_log, dt_bias=dt_bias, operands=operands, vec=vec, Akk=made["Akk"],
        Aqk=made["Aqk"], v=v, h0=h0, p=p, cu_seqlens=cu_seqlens, chunk_offsets=chunk_offsets,
    )
    return made | {"o": o, "ht": ht}


SPANS = {SPAN: run}


def _scan_job(V, EMIT, FULL):
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    tiles = {"d_x": 128, "d_A": 64, "d_Aq": 64, "d_v": 64, "d_o": 64}
    types = {name: f"tensordesc<bf16[64, {columns}],{layout}>" for name, columns in tiles.items()}
    types |= {n: _TYPES[n] for n in ("vec", "segments", "start", "T", "N")}
    types |= {"h0": "*fp32", "parts": "*fp32", "o": "*bf16", "ht": "*fp32"}
    shape = {"HV": 16, "K": 128, "V": V, "BV": BV, "HAS_H0": True, "HAS_HT": True}
    return scan_kernel, types, shape | {"EMIT": EMIT, "VARLEN": not FULL, "FULL": FULL or not EMIT}, 4, 1


_TYPES = dict.fromkeys(("k", "g", "tiles", "Akk"), "*bf16") | dict.fromkeys(("A_log", "dt_bias", "vec"), "*fp32")
_TYPES |= {"cu_seqlens": "*i64", "chunk_offsets": "*i64", "segments": "*i64", "start": "*i32", "lower_bound": "fp32"}
_TYPES |= dict.fromkeys(("T", "N", "L", "P"), "i32")
COMPILE = [
    _scan_job(V, EMIT, FULL) for V, FULL in ((128, True), (256, False)) for EMIT in (True, False)
] + [
    (
        reach_kernel, _TYPES,
        {"H": 16, "HV": 16, "K": 128, "VARLEN": varlen, "GATE": gate, "HAS_A": True, "HAS_BIAS": True, "L2NORM": True,
         "FAST": True, "ERASED": ERASED, "WALK": WALK},
        8, 3,
    )
    for gate, varlen in (("softplus", False), ("safe", True))
] + [
    (
        join_kernel, {n: _TYPES[n] for n in ("start", "chunk_offsets", "T", "L", "P")} | {"parts": "*fp32"},
        {"HV": 16, "K": 128, "V": 128, "BV": 32, "MOST": 256, "VARLEN": varlen}, 8, 3,
    )
    for varlen in (False, True)
]
