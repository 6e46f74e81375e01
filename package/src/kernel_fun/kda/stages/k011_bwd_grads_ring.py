"""All gradients of a chunk, in two kernels that meet in bf16; the value side is fed by TMA.

Parent: 009.
Delta: the value side in Gluon. A CTA of two warpgroups per SM walks the chunks; do, dv, v_new, v, h and dh come by TMA,
    64 columns a stage, three stages ahead, also across chunks: copies go on while a chunk's sums leave. y = Akk^T dv is
    rounded and stored, in dv's place, under the products that do not need it; [do; y] v_new^T is one product. Nothing
    is read on the host: a kernel zeros what packed calls hold after their last sequence, only in the five outputs.
Why it should be faster: the value side's 13.2 GB at B16 T8192 H16 K128 V256 (3.1 ms at 4.2 TB/s) came at two thirds of
    that rate, a step's copies waiting for its products and a chunk's first copies for the end of the one before.
Constraints: sm_90, K = 128, V a multiple of 64, bf16. Any gate (every exponent <= 0), any T, packed sequences, GVA;
    token and state rows below 2^31 (descriptors take 32-bit coordinates).
"""

import functools

import cutlass
import cutlass.cute as cute
import torch
import triton
import triton.language as tl
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
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

from kernel_fun._common import ptx
from kernel_fun._common.problem import CHUNK

FAMILY = "kda"
K = 128  # key dimension
# value side
BV, VALUE_WARPS, VALUE_STAGES = 64, 8, 3  # columns a stage, 64 KB of it
ZERO_PROGRAMS = tl.constexpr(64)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name since Triton 3.7, and before
# key side
COLS = 16  # columns a warp holds at a time; a thread has 4 consecutive ones in two rows
SLABS = 4  # of COLS columns for each of the two column halves: 8 warps = 4 row blocks x 2 column halves
THREADS = 256
TILE = 16 * 48  # bytes of a 16 x 16 bf16 exchange tile; rows 48 bytes apart, so ldmatrix meets no bank twice
EXCHANGE = 12 * TILE  # per column half: kx of 4 warps and qx of 2 target warps, at n = 16 and at n = 32
FRAGS = 13 * 128 * 16  # A fragments, 16 bytes a thread each: 6 for n = 16 and 32, 7 below; the column halves share
# A thread copies its own elements of the next slab here while it works on this one: 16 bytes of gk and 8 of q, k and
# the three tensors from the value side for each of its two rows; and each warp 256 bytes of the slab's edges.
ITEMS = 2 * THREADS * 16  # where the 8-byte items begin
EDGES = ITEMS + 10 * THREADS * 8
STAGE = EDGES + 8 * 256
TOTALS = 2 * 4 * COLS * 8
SMEM = 2 * EXCHANGE + FRAGS + 2 * STAGE + TOTALS + 2 * 3 * 64 * 4
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


# ==================================================================================== value side: one pass over V
# Slabs of 64 columns pass through a ring of STAGES stages: [do; dv], [v_new; v], both [128,64], and [h; dh], [2K,64].
# After its V // 64 slabs a chunk's gk, [64,K], takes a stage too, and then the chunk's sums leave through that. Akk is
# fetched with a chunk's first slab; copies are never further ahead than the next chunk, so it has two buffers.
@gluon.jit
def _chunk(i, walk, HV: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Whether the program has an i-th chunk and head; its (or else the last) chunk, head, first token, tokens."""
    pid, programs, total, cu_seqlens, chunk_indices, T = walk
    n = gl.minimum(pid + i * programs, total - 1)
    i_c, i_hv = (n // HV).to(gl.int64), (n % HV).to(gl.int64)
    if IS_VARLEN:
        i_n, i_t = gl.load(chunk_indices + i_c * 2).to(gl.int64), gl.load(chunk_indices + i_c * 2 + 1).to(gl.int64)
        row = gl.load(cu_seqlens + i_n).to(gl.int64) + i_t * 64
        n_t = gl.minimum(gl.load(cu_seqlens + i_n + 1).to(gl.int64) - row, 64).to(gl.int32)
    else:
        NT = (T + 63) // 64
        row, n_t = i_c // NT * T + i_c % NT * 64, gl.minimum(T - (i_c % NT) * 64, 64).to(gl.int32)
    return pid + i * programs < total, i_c, i_hv, row, n_t


@gluon.jit
def _fetch(ring, now, i, at, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Start copying the program's i-th slab or gk, of chunk `at`, to stage `now`; its barrier completes with all."""
    d_do, d_dv, d_vn, d_v, d_A, d_h, d_dh, d_g, pairs, values, states, A, bars = ring
    PARTS: gl.constexpr = V // 64 + 1
    on, i_c, i_hv, row, _ = at
    i_v, bar, row = i % PARTS * 64, bars.index(now), row.to(gl.int32)
    if i_v < V:
        pair = pairs.index(now)._reinterpret(pairs.dtype, [2, 64, 64], d_do.layout)
        value = values.index(now)._reinterpret(pairs.dtype, [2, 64, 64], d_do.layout)
        state = states.index(now)._reinterpret(pairs.dtype, [2, K, 64], d_h.layout)
        col, row_s = (i_hv * V + i_v).to(gl.int32), ((i_c * HV + i_hv) * K).to(gl.int32)
        mbarrier.expect(bar, 128 * (5 * 64 + 2 * K), pred=on & (i_v == 0))
        mbarrier.expect(bar, 128 * (4 * 64 + 2 * K), pred=on & (i_v != 0))
        tma.async_copy_global_to_shared(
            d_A, [row, (i_hv * 64).to(gl.int32)], bar, A.index(i // PARTS & 1), pred=on & (i_v == 0)
        )
        tma.async_copy_global_to_shared(d_dv, [row, col], bar, pair.index(1), pred=on)
        tma.async_copy_global_to_shared(d_dh, [row_s, i_v], bar, state.index(1), pred=on)
        tma.async_copy_global_to_shared(d_vn, [row, col], bar, value.index(0), pred=on)
        tma.async_copy_global_to_shared(d_do, [row, col], bar, pair.index(0), pred=on)
        tma.async_copy_global_to_shared(d_h, [row_s, i_v], bar, state.index(0), pred=on)
        tma.async_copy_global_to_shared(d_v, [row, col], bar, value.index(1), pred=on)
    else:
        g = states.index(now)._reinterpret(gl.float32, [64, K], d_g.layout)
        mbarrier.expect(bar, 256 * K, pred=on)
        tma.async_copy_global_to_shared(d_g, [row, (i_hv * K).to(gl.int32)], bar, g, pred=on)


@gluon.jit
def _zero_rows(tile, n_t, L: gl.constexpr):
    """Zero, in place, the rows of a [64,64] tile from n_t on."""
    o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    o_c = gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
    tile.store(gl.where((o_r < n_t) & (o_c >= 0), tile.load(L), 0.0))


@gluon.jit
def _put(x, tile, n_t, STRIDE: gl.constexpr, C: gl.constexpr, L: gl.constexpr):
    """The rows below n_t of a staged [64,C] tile to x, 16 bytes a thread."""
    o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    o_c = gl.arange(0, C, layout=gl.SliceLayout(0, L))[None, :]
    gl.store(x + (o_r * STRIDE + o_c), tile.load(L), mask=(o_r < n_t) & (o_c >= 0))


@gluon.jit(do_not_specialize=["T", "total", "programs"])
def value_kernel(
    d_do, d_dv, d_vn, d_v, d_A, d_h, d_dh, d_g, gk, beta, xq, xu, xd, D, E, diag, tail, yv, dv_out, cu_seqlens,
    chunk_indices, scale, T, total, programs, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    IS_VARLEN: gl.constexpr, STAGES: gl.constexpr,
):
    DT: gl.constexpr = d_do.dtype
    NV: gl.constexpr = V // 64
    SY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    S64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16])
    SX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    C64: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    CK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [8, 1], [1, 0])
    pairs = gl.allocate_shared_memory(DT, [STAGES, 128, 64], d_do.layout)
    values = gl.allocate_shared_memory(DT, [STAGES, 128, 64], d_do.layout)
    states = gl.allocate_shared_memory(DT, [STAGES, 2 * K, 64], d_h.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    out = gl.allocate_shared_memory(DT, [64, 64], d_do.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (d_do, d_dv, d_vn, d_v, d_A, d_h, d_dh, d_g, pairs, values, states, A, bars)
    walk = (gl.program_id(0), programs, total, cu_seqlens, chunk_indices, T)
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
        _fetch(ring, s, s, _chunk(s // (NV + 1), walk, HV, IS_VARLEN), HV, K, V)

    o_a = gl.arange(0, 128, layout=gl.SliceLayout(1, S64))
    b_sign = gl.where(o_a < 64, gl.zeros([128], gl.float32, gl.SliceLayout(1, S64)) + scale, -1.0)
    o_s, o_k = gl.arange(0, 64, layout=gl.SliceLayout(0, S64)), gl.arange(0, K, layout=gl.SliceLayout(1, S64))
    o_y, o_h = gl.arange(0, 64, layout=gl.SliceLayout(1, SY)), gl.arange(0, K, layout=gl.SliceLayout(1, C64))
    i_s = 0  # stages used so far
    _, _, i_hv, row, n_t = _chunk(0, walk, HV, IS_VARLEN)
    b_beta = gl.load(beta + row * HV + i_hv + o_y * HV, mask=o_y < n_t, other=0.0).to(gl.float32)
    for j in range((total - gl.program_id(0) + programs - 1) // programs):
        _, i_c, i_hv, _, _ = _chunk(j, walk, HV, IS_VARLEN)  # what needs loads has been loaded one chunk earlier
        _, _, next_hv, next_row, next_n_t = _chunk(j + 1, walk, HV, IS_VARLEN)
        head = row * HV + i_hv
        b_xq = gl.zeros([64, K], gl.float32, SX)  # do h^T
        b_xu = gl.zeros([64, K], gl.float32, SX)  # y h^T
        b_xd = gl.zeros([K, 64], gl.float32, S64)  # dh v_new^T
        b_a = gl.zeros([128, 64], gl.float32, S64)  # [do; y] v_new^T
        b_yv = gl.zeros([64, 64], gl.float32, SY)
        b_hh = gl.zeros([K], gl.float32, gl.SliceLayout(1, C64))
        for i_v in range(NV):
            now, ahead = i_s % STAGES, _chunk((i_s + STAGES) // (NV + 1), walk, HV, IS_VARLEN)
            pair = pairs.index(now)._reinterpret(DT, [2, 64, 64], d_do.layout)
            state = states.index(now)._reinterpret(DT, [2, K, 64], d_h.layout)
            value = values.index(now)._reinterpret(DT, [2, 64, 64], d_do.layout)
            h, vn = state.index(0).permute((1, 0)), value.index(0).permute((1, 0))
            mbarrier.wait(bars.index(now), i_s // STAGES & 1)
            if n_t < 64:  # other rows of dv and Akk would reach y; all else that is read there stays in its own rows
                _zero_rows(pair.index(1), n_t, C64)
                _zero_rows(A.index(j & 1), n_t, C64)
                fence_async_shared()
                barrier()
            y = warpgroup_mma(  # gradient of the triangular system's right-hand side, over beta
                A.index(j & 1).permute((1, 0)), pair.index(1), gl.zeros([64, 64], gl.float32, SY), use_acc=False,
                is_async=True,
            )
            b_xd = warpgroup_mma(state.index(1), vn, b_xd, is_async=True)
            b_xq = warpgroup_mma(pair.index(0), h, b_xq, is_async=True)
            b_y = warpgroup_mma_wait(2, [y])
            barrier()  # nobody reads dv, or the last slab's `out`, any more
            pair.index(1).store(b_y.to(DT))  # [do; y] is then one operand, a half for each warpgroup
            out.store((b_beta[:, None] * b_y).to(DT))
            fence_async_shared()
            barrier()
            b_xu = warpgroup_mma(pair.index(1), h, b_xu, is_async=True)
            b_a = warpgroup_mma(pairs.index(now), vn, b_a, is_async=True)
            b_yv += b_y * value.index(1).load(SY).to(gl.float32)
            b_hh += gl.sum(state.index(0).load(C64).to(gl.float32) * state.index(1).load(C64).to(gl.float32), 1)
            _put(dv_out + head * V + i_v * 64, out, n_t, HV * V, 64, C64)
            b_xd, b_xq, b_xu, b_a = warpgroup_mma_wait(0, [b_xd, b_xq, b_xu, b_a])
            fence_async_shared()
            barrier()  # everybody is done with the stage
            _fetch(ring, now, i_s + STAGES, ahead, HV, K, V)
            i_s += 1

        # ---- the chunk's sums leave, while the other stages fill; rows from n_t on are formed, but not stored
        now, p_gn = i_s % STAGES, gk + head * K + (n_t - 1) * (HV * K)  # gk of the last row
        b_gn, b_gh = gl.load(p_gn + o_k), gl.load(p_gn + o_h)
        ahead, p_beta = _chunk((i_s + STAGES) // (NV + 1), walk, HV, IS_VARLEN), beta + next_row * HV + next_hv
        next_beta = gl.load(p_beta + o_y * HV, mask=o_y < next_n_t, other=0.0).to(gl.float32)
        g = states.index(now)._reinterpret(gl.float32, [64, K], d_g.layout)
        s_x = states.index(now)._reinterpret(DT, [2, 64, K], d_h.layout)
        s_xd, s_a = values.index(now)._reinterpret(DT, [64, K], d_h.layout), pairs.index(now)
        b_lower = (o_a & 63)[:, None] > o_s[None, :]
        s_a.store(gl.where(b_lower, b_a * b_sign[:, None], 0.0).to(DT))
        b_diag = gl.sum(gl.where(o_a[:, None] == o_s[None, :], b_a, 0.0), 1) * scale
        gl.store(diag + head + o_a * HV, b_diag, mask=o_a < n_t)
        gl.store(yv + head + o_y * HV, gl.sum(b_yv, 1), mask=o_y < n_t)
        mbarrier.wait(bars.index(now), i_s // STAGES & 1)
        b_up = gl.exp2(g.load(SX))
        b_down = gl.exp2(b_gn[:, None] - g.permute((1, 0)).load(S64))
        s_xd.permute((1, 0)).store((b_xd * b_down).to(DT))
        barrier()  # everybody has read gk
        s_x.index(0).store((b_xq * (b_up * scale)).to(DT))
        s_x.index(1).store((b_xu * (0.0 - b_up)).to(DT))
        gl.store(tail + (i_c * HV + i_hv) * K + o_h, gl.exp2(b_gh) * b_hh)
        barrier()
        _put(xq + head * K, s_x.index(0), n_t, HV * K, K, CK)
        _put(xu + head * K, s_x.index(1), n_t, HV * K, K, CK)
        _put(xd + head * K, s_xd, n_t, HV * K, K, CK)
        _put(D + head * 64, s_a.slice(0, 64), n_t, HV * 64, 64, C64)
        _put(E + head * 64, s_a.slice(64, 64), n_t, HV * 64, 64, C64)
        fence_async_shared()
        barrier()
        _fetch(ring, now, i_s + STAGES, ahead, HV, K, V)
        i_s, row, n_t, b_beta = i_s + 1, next_row, next_n_t, next_beta
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


@triton.jit
def _zero(x, first, end):
    for i in range(first + tl.program_id(0) * 1024, end, ZERO_PROGRAMS * 1024):
        at = i + tl.arange(0, 1024)
        tl.store(x + at, tl.zeros([1024], x.dtype.element_ty), mask=at < end)


@triton.jit(do_not_specialize=["N", "T"])
def zero_tail_kernel(dq, dk, dv, dg, dbeta, cu_seqlens, N, T, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Tokens after the last sequence belong to none: their gradients are zero."""
    first, end = tl.load(cu_seqlens + N).to(tl.int64) * HV, tl.cast(T, tl.int64) * HV
    _zero(dq, first * K, end * K)
    _zero(dk, first * K, end * K)
    _zero(dg, first * K, end * K)
    _zero(dv, first * V, end * V)
    _zero(dbeta, first, end)


# ==================================================================================== key side: products in registers
# ------------------------------------------------------------------------------------------- A fragments of D and E
def _block(base, stride, row, col, r, c, n_t):
    """The [16,16] block at (row, col) of a [64,64] bf16 matrix as A fragments; rows from n_t on are 0."""
    frags = []
    for dr, dc in ((0, 0), (8, 0), (0, 8), (8, 8)):
        at = row + r + dr
        x = ptx.load("b32", 1, Uint32, base, cutlass.min(at, n_t - 1) * stride + col + c + dc, 2)
        frags.append(x & (Uint32(0) - Uint32(at < n_t)))
    return frags


def _toward(flag, block):
    """The block itself for a target warp, its transpose for a source warp."""
    keep = Uint32(0) - Uint32(flag)
    other = [ptx.transpose(block[i]) for i in (0, 2, 1, 3)]
    return [(x & keep) | (y & ~keep) for x, y in zip(block, other, strict=True)]


def _level_mask(r, c, i):
    """Halfword mask of the pairs (r, c), (r, c + 1) inside an 8x8 block that meet at half-size 2^i."""
    lo = Uint32(((r ^ c) >> i) == 1)
    hi = Uint32(((r ^ (c + 1)) >> i) == 1)
    return (Uint32(0) - lo) & Uint32(0xFFFF) | (Uint32(0) - hi) & Uint32(0xFFFF0000)


# --------------------------------------------------------------------------------------------------- one level's work
# A thread's elements are indexed [jj][row][e]: 8-column block jj, row r or r + 8, column e of two. As one C fragment:
# row * 2 + e.
def _operands(q, k, g, gm, bt):
    """f, k f, and the products' operands bf16(q f), bf16(k f beta) for one 8-column block; beta only on target rows."""
    q, k = [*ptx.unpack(q[0]), *ptx.unpack(q[1])], [*ptx.unpack(k[0]), *ptx.unpack(k[1])]
    f = [ptx.decay(g[x], gm[x]) for x in range(4)]
    kf = [k[x] * f[x] for x in range(4)]
    kx = [ptx.pack(kf[2 * row] * bt[row], kf[2 * row + 1] * bt[row]) for row in range(2)]
    qx = [ptx.pack(q[2 * row] * f[2 * row], q[2 * row + 1] * f[2 * row + 1]) for row in range(2)]
    return f, kf, qx, kx


def _update(acc, db, f, kf, qx, kx, x, z, bt, source, target):
    """Add one level's products: x to dq, z to dk, and to dg the same operands times their products, so pairs cancel
    in its sum.

    source[row] is the sign bits of a packed pair on source rows (their k z counts negative), target[row] is 1 on
    target rows.
    """
    dq, dk, dg = acc
    for row in range(2):
        qr, kr = ptx.unpack(qx[row]), ptx.unpack(kx[row] ^ source[row])
        for e in range(2):
            i = 2 * row + e
            dq[i] = dq[i] + f[i] * x[i]
            dk[i] = dk[i] + f[i] * bt[row] * z[i]
            dg[i] = dg[i] + qr[e] * x[i] + kr[e] * z[i]
        db[row] = db[row] + target[row] * (kf[2 * row] * z[2 * row] + kf[2 * row + 1] * z[2 * row + 1])


def _gate_bwd(cfg, x, dy, rate, lower_bound):
    """Gradient at four raw gates (bias added) from dy at the log gates, and their share of dA_log."""
    dx, da = [], Float32(0.0)
    for v, d in zip(x, dy, strict=True):
        if cfg.gate == "softplus":  # sigmoid and softplus from one exponential of -|v|
            t = ptx.ex2(ptx.decay_exponent(v))
            inv = ptx.rcp(1.0 + t)
            positive = Int32(v > 0.0)
            sigmoid = ptx.pick(positive, inv, t * inv)
            softplus = ptx.lg2(1.0 + t) * LN_2 + ptx.pick(positive, v, Float32(0.0))
            dx.append(-rate * sigmoid * d)
            da = da - rate * softplus * d
        else:
            sigmoid = ptx.rcp(1.0 + ptx.ex2(rate * v * -LOG2_E))
            dx.append(lower_bound * rate * sigmoid * (1.0 - sigmoid) * d)
            da = da + dx[-1] * v
    return dx, da


def _copy_slab(stage, tid, warp, lane, aG, iG, items, aEdge, col0, off):
    """Begin the copies of the slab `off` columns on: see STAGE."""
    for i in range(2):
        ptx.copy_async(stage + (i * THREADS + tid) * 16, aG, iG[i] + off, 4, 16)
        for x, (base, index) in enumerate(items):
            ptx.copy_async(stage + ITEMS + (2 * x + i) * (THREADS * 8) + tid * 8, base, index[i] + off, 2, 8)
    ptx.copy_async(stage + EDGES + warp * 256 + lane % 16 * 16, aEdge, col0 + off, 4, 16)


def _gate_input(cfg, base, i):
    """The raw gate at four columns, or None where the kernel does not need it."""
    if cfg.gate == "log":
        return None
    if cfg.g_bytes == 4:
        return ptx.ld4(base, i)
    lo, hi = ptx.ld2(base, i)
    return [*ptx.unpack(lo), *ptx.unpack(hi)]


def _close_norm(cfg, aOut, iG, aIn, iQ, rstd, dot):
    """Take four columns of dq or dk, which this thread stored, through the norm: rstd (dy - y <y, dy>)."""
    if cfg.dq_bytes == 2:
        lo, hi = ptx.ld2(aOut, iG)
        dy = [*ptx.unpack(lo), *ptx.unpack(hi)]
    else:
        dy = ptx.ld4(aOut, iG)
    lo, hi = ptx.ld2(aIn, iQ)
    dx = [rstd * (d - y * dot) for d, y in zip(dy, [*ptx.unpack(lo), *ptx.unpack(hi)], strict=True)]
    (ptx.st2 if cfg.dq_bytes == 2 else ptx.st4)(aOut, iG, dx)


@cute.kernel
def _kernel(
    mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mDiag, mTail, mYv, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk, oDg, oDb,
    oDA, oDbias, mCu, mChunks,
    T: Int32, H: Int32, HV: Int32, lower_bound: Float32, beta_scale: Float32, cfg: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    pid, _, _ = cute.arch.block_idx()
    lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
    w, half = warp % 4, warp // 4  # row block, column half
    r, lc = lane // 4, lane % 4
    c = lc * 2
    chunk, hv = pid // HV, pid % HV
    h = hv // (HV // H)

    # first token of the chunk in the flattened batch, and how many of its 64 rows exist
    if const_expr(cfg.varlen):
        seq, t = Int64(mChunks[2 * chunk]), Int64(mChunks[2 * chunk + 1])
        bos, eos = Int64(mCu[seq]), Int64(mCu[seq + 1])
        first = bos + t * 64
        n_t = Int32(cutlass.min(eos - first, Int64(64)))
    else:
        per_row = (T + 63) // 64
        t = chunk % per_row
        first = Int64(chunk // per_row) * T + t * 64
        n_t = cutlass.min(T - t * 64, 64)

    # addresses of the chunk's first row in each layout, and elements from one row to the next
    head, qhead = first * HV + hv, first * H + h
    aQ, aK = mQ.iterator.toint() + qhead * (K * 2), mK.iterator.toint() + qhead * (K * 2)
    aG, aX = mGk.iterator.toint() + head * (K * 4), mGraw.iterator.toint() + head * (K * cfg.g_bytes)
    aXq, aXu, aXd = (x.iterator.toint() + head * (K * 2) for x in (mXq, mXu, mXd))
    aD, aE = mD.iterator.toint() + head * 128, mE.iterator.toint() + head * 128
    aOq, aOk = (x.iterator.toint() + head * (K * cfg.dq_bytes) for x in (oDq, oDk))
    aOg = oDg.iterator.toint() + head * (K * cfg.g_bytes)
    aTail = mTail.iterator.toint() + (Int64(chunk) * HV + hv) * (K * 4)
    sQ, sG, sA = H * K, HV * K, HV * 64
    col0 = half * 64 + lc * 4  # the thread's first column in slab 0

    smem = cute.arch.alloc_smem(Uint32, SMEM // 4, 16).toint()
    s_exchange = smem + half * EXCHANGE
    s_frag = smem + 2 * EXCHANGE + (w * 32 + lane) * 16
    s_stage = smem + 2 * EXCHANGE + FRAGS
    s_total = s_stage + 2 * STAGE + half * (TOTALS // 2)
    s_dots = s_stage + 2 * STAGE + TOTALS

    row0 = w * 16
    rows = [row0 + r, row0 + r + 8]
    live = [rows[0] < n_t, rows[1] < n_t]
    at = [cutlass.min(rows[0], n_t - 1), cutlass.min(rows[1], n_t - 1)]
    iG, iQ = [x * sG + col0 for x in at], [x * sQ + col0 for x in at]
    # the edges of a slab: gk at the boundaries of n = 16 and 32, the chunk's whole decay, dt_bias; four lanes for each
    edge = lane % 16 // 4
    aEdge = aG + Int64(cutlass.min((w & 2) * 16 + 15, n_t - 1)) * Int64(edge == 0) * (sG * 4)
    aEdge = aEdge + Int64(cutlass.min(31, n_t - 1)) * Int64(edge == 1) * (sG * 4)
    aEdge = aEdge + (aTail - aG) * Int64(edge == 2)
    if const_expr(cfg.has_bias):
        aEdge = aEdge + (mBias.iterator.toint() + Int64(hv) * (K * 4) - aG) * Int64(edge == 3)
    items = ((aQ, iQ), (aK, iQ), (aXq, iG), (aXu, iG), (aXd, iG))
    _copy_slab(s_stage, tid, warp, lane, aG, iG, items, aEdge, col0, 0)

    # ---------------------------------------------------------- A fragments, once per chunk, half by each column half
    odd, top = w % 2, w // 2  # is this warp a target at n = 16, at n = 32
    hi16, lo16 = w | 1, w & 2  # the pair of row blocks that meet at n = 16: rows of hi, columns of lo
    zero = Uint32(0)
    if half == 0:
        D, E = _block(aD, sA, row0, row0, r, c, n_t), _block(aE, sA, row0, row0, r, c, n_t)
        for slot in range_constexpr(2):  # the two 8x8 blocks on the diagonal, for n = 1, 2, 4
            x_d, x_e = D[3 * slot], E[3 * slot]
            x_t, x_e = ptx.transpose(x_d), x_e | ptx.transpose(x_e)
            for i in range_constexpr(3):
                mask = _level_mask(r, c, i)
                ptx.sts_frag(s_frag + (6 + 2 * i + slot) * 2048, (x_d & mask, x_e & mask, zero, x_t & mask))
        ptx.sts_frag(s_frag + 12 * 2048, (D[1], E[1], ptx.transpose(E[1]), ptx.transpose(D[1])))  # n = 8
    else:
        for slot, a in enumerate((aD, aE)):
            ptx.sts_frag(s_frag + slot * 2048, _toward(odd, _block(a, sA, hi16 * 16, lo16 * 16, r, c, n_t)))
            for i in range_constexpr(2):  # partners 0, 1 for target warps, 2, 3 for source warps
                row = (top * w + (1 - top) * (2 + i)) * 16
                part = (top * i + (1 - top) * w) * 16
                ptx.sts_frag(s_frag + (2 + 2 * i + slot) * 2048, _toward(top, _block(a, sA, row, part, r, c, n_t)))
    cute.arch.sync_threads()

    one = Float32(1.0)
    beta, diag = [], []
    for i in range_constexpr(2):
        b = Float32(mBeta[head + Int64(at[i]) * HV])
        beta.append(ptx.pick(Int32(live[i]), b, Float32(0.0)))
        diag.append(ptx.pick(Int32(live[i]), Float32(mDiag[head + Int64(at[i]) * HV]), Float32(0.0)))
    ld_lane = (lane % 8 + (lane // 8) % 2 * 8) * 48 + lane // 16 * 16  # ldmatrix row address of this lane in a tile
    st_lane = r * 48 + lc * 4

    db0, db1, qd0, qd1, kd0, kd1 = ptx.zeros(6)
    dA, rate = Float32(0.0), one
    if const_expr(cfg.has_A):
        rate = ptx.ex2(Float32(mAlog[hv]) * LOG2_E)
    store_dq = ptx.st2 if cfg.dq_bytes == 2 else ptx.st4
    for s in cutlass.range(SLABS, unroll=1):
        db, qd, kd_dot = [db0, db1], [qd0, qd1], [kd0, kd1]
        stage = s_stage + s % 2 * STAGE
        ptx.wait_all()
        cute.arch.sync_warp()  # this slab's copies are there for the warp, and the last slab's are no longer read
        if s + 1 < SLABS:
            _copy_slab(s_stage + (s + 1) % 2 * STAGE, tid, warp, lane, aG, iG, items, aEdge, col0, (s + 1) * COLS)
        # ---------------------------------------------------------------- this slab's q, k, gk
        q, k, g = [[], []], [[], []], [[], []]
        for i in range_constexpr(2):
            keep = Uint32(0) - Uint32(live[i])
            xq, xk = (ptx.lds2(stage + ITEMS + (2 * x + i) * (THREADS * 8) + tid * 8) for x in range(2))
            xg = ptx.lds4(stage + (i * THREADS + tid) * 16)
            for jj in range_constexpr(2):
                q[jj].append(xq[jj] & keep)
                k[jj].append(xk[jj] & keep)
                g[jj] += [xg[2 * jj], xg[2 * jj + 1]]
        s_gk, s_edge = stage + (warp * 32 + lc) * 16, stage + EDGES + warp * 256 + lc * 16

        # ---------------------------------------------------------------- operands for other warps: n = 16 and 32
        g16, g32 = ptx.lds4(s_edge), ptx.lds4(s_edge + 64)
        for level, gm, target, tslot in ((0, g16, odd, top), (1, g32, top, odd)):
            bt = [ptx.pick(target, b, one) for b in beta]
            for jj in range_constexpr(2):
                _, _, qx, kx = _operands(q[jj], k[jj], g[jj], [gm[2 * jj], gm[2 * jj + 1]] * 2, bt)
                for i in range_constexpr(2):
                    to = s_exchange + level * (6 * TILE) + st_lane + i * (8 * 48) + jj * 16
                    ptx.sts(to + w * TILE, kx[i])
                    if target == 1:
                        ptx.sts(to + (4 + tslot) * TILE, qx[i])

        # ---------------------------------------------------------------- n = 1, 2, 4, 8: inside the warp
        acc = [[ptx.zeros(4), ptx.zeros(4), ptx.zeros(4)] for _ in range(2)]
        for i in range_constexpr(4):
            n = 1 << i
            gm = []
            for j in range_constexpr(2):
                m = ((r + 8 * j) | (2 * n - 1)) - n  # of the warp's 16 rows
                gm.append(ptx.lds4(s_gk + (m // 8 * THREADS + m % 8 * 4) * 16))
            flags = [(r // n) % 2] * 2 if n < 8 else [Int32(0), Int32(1)]
            bt = [ptx.pick(flags[j], beta[j], one) for j in range(2)]
            target = [ptx.pick(flags[j], one, Float32(0.0)) for j in range(2)]
            frag = [ptx.lds_frag(s_frag + (6 + 2 * i + slot) * 2048) for slot in range(2 if n < 8 else 1)]
            source = [(Uint32(1) - Uint32(flags[j])) * Uint32(0x80008000) for j in range(2)]
            for jj in range_constexpr(2):
                gj = [gm[0][2 * jj], gm[0][2 * jj + 1], gm[1][2 * jj], gm[1][2 * jj + 1]]
                f, kf, qx, kx = _operands(q[jj], k[jj], g[jj], gj, bt)
                kb, qb = [ptx.transpose(kx[0]), ptx.transpose(kx[1])], [ptx.transpose(qx[0]), ptx.transpose(qx[1])]
                # x and z of the same 8 rows are the two halves of one product: [D 0; E+E^T D^T] [kx; qx]
                if const_expr(n < 8):
                    lo, hi = (ptx.mma16(ptx.zeros(4), frag[i8], (kb[i8], qb[i8])) for i8 in range(2))
                    x, z = [lo[0], lo[1], hi[0], hi[1]], [lo[2], lo[3], hi[2], hi[3]]
                else:
                    d1, e1, e1t, d1t = frag[0]
                    lo = ptx.mma16(ptx.zeros(4), (zero, e1t, zero, d1t), (kb[1], qb[1]))
                    hi = ptx.mma8(ptx.zeros(4), (d1, e1), kb[0])
                    x, z = [Float32(0.0), Float32(0.0), hi[0], hi[1]], [lo[2], lo[3], hi[2], hi[3]]
                _update(acc[jj], db, f, kf, qx, kx, x, z, bt, source, target)

        # ---------------------------------------------------------------- n = 16, 32: with the other warps' tiles
        g16, g32 = ptx.lds4(s_edge), ptx.lds4(s_edge + 64)
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=THREADS // 2)
        for level, gm, flag, partners in ((0, g16, odd, [w ^ 1]), (1, g32, top, [(1 - top) * 2, (1 - top) * 2 + 1])):
            bt = [ptx.pick(flag, b, one) for b in beta]
            target = ptx.pick(flag, one, Float32(0.0))
            source, negative = one - target, (Uint32(1) - Uint32(flag)) * Uint32(0x80008000)
            u, z = [ptx.zeros(4), ptx.zeros(4)], [ptx.zeros(4), ptx.zeros(4)]
            for i, p in enumerate(partners):
                a_d, a_e = (ptx.lds_frag(s_frag + (2 * level + 2 * i + slot) * 2048) for slot in range(2))
                tiles = s_exchange + level * (6 * TILE) + ld_lane
                kb = ptx.ldmatrix(tiles + p * TILE)
                # a target takes the partner's kx for both products; a source takes qx, kept by the partner under its
                # pair's number
                pslot = p // 2 if level == 0 else p % 2
                ub = ptx.ldmatrix(tiles + (flag * p + (1 - flag) * (4 + pslot)) * TILE)
                for jj in range_constexpr(2):
                    u[jj] = ptx.mma16(u[jj], a_d, (ub[2 * jj], ub[2 * jj + 1]))
                    z[jj] = ptx.mma16(z[jj], a_e, (kb[2 * jj], kb[2 * jj + 1]))
            for jj in range_constexpr(2):
                f, kf, qx, kx = _operands(q[jj], k[jj], g[jj], [gm[2 * jj], gm[2 * jj + 1]] * 2, bt)
                x = [target * y for y in u[jj]]
                zz = [z[jj][i] + source * u[jj][i] for i in range(4)]
                _update(acc[jj], db, f, kf, qx, kx, x, zz, bt, [negative, negative], [target, target])

        # ------------------------------------- add the states' part; row dots; dq and dk go out as they are so far
        jG = [x + s * COLS for x in iG]
        x_gate = [_gate_input(cfg, aX, j) for j in jG]
        total = ptx.zeros(4)  # per column: sum of k dk through kg
        for i in range_constexpr(2):
            keep = Uint32(0) - Uint32(live[i])
            xq, xu, xd = (ptx.lds2(stage + ITEMS + (2 * x + i) * (THREADS * 8) + tid * 8) for x in range(2, 5))
            yq, yk = [], []
            for jj in range_constexpr(2):
                dq, dk, dg = acc[jj]
                qf, kf = ptx.unpack(q[jj][i]), ptx.unpack(k[jj][i])
                pq, pu, pd = ptx.unpack(xq[jj] & keep), ptx.unpack(xu[jj] & keep), ptx.unpack(xd[jj] & keep)
                for e in range_constexpr(2):
                    j = 2 * i + e
                    dqe = dq[j] + pq[e] + diag[i] * kf[e]
                    dke = dk[j] + beta[i] * pu[e] + pd[e] + diag[i] * qf[e]
                    ku, kd = kf[e] * pu[e], kf[e] * pd[e]
                    dg[j] = dg[j] + qf[e] * pq[e] + beta[i] * ku - kd
                    total[2 * jj + e] = total[2 * jj + e] + kd
                    db[i] = db[i] + ku
                    qd[i] = qd[i] + qf[e] * dqe
                    kd_dot[i] = kd_dot[i] + kf[e] * dke
                    yq.append(dqe)
                    yk.append(dke)
            if live[i]:
                store_dq(aOq, jG[i], yq)
                store_dq(aOk, jG[i], yk)

        # ---------------------------------------------------------------- suffix sum of dg over the chunk's rows
        dg = [[acc[jj][2][2 * i + e] for jj in range(2) for e in range(2)] for i in range(2)]  # [row][column]
        for i in (1, 0):
            for e in range_constexpr(4):
                x = dg[i][e]
                for step in (1, 2, 4):
                    y = cute.arch.shuffle_sync_down(x, step * 4)
                    x = x + ptx.pick(Int32(r + step < 8), y, Float32(0.0))
                dg[i][e] = x
        for e in range_constexpr(4):
            dg[0][e] = dg[0][e] + cute.arch.shuffle_sync(dg[1][e], lc)
        for e in range_constexpr(4):
            for step in (4, 8, 16):
                total[e] = total[e] + cute.arch.shuffle_sync_bfly(total[e], step)
        if r == 0:
            ptx.sts4(s_total + (w * COLS + lc * 4) * 4, dg[0])
            ptx.sts4(s_total + TOTALS // 4 + (w * COLS + lc * 4) * 4, total)
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=THREADS // 2)
        add = ptx.lds4(s_edge + 128)  # the chunk's whole decay: for every row, as is the total of k dk
        for other in range_constexpr(4):
            to = s_total + (other * COLS + lc * 4) * 4
            x, y = ptx.lds4(to), ptx.lds4(to + TOTALS // 4)
            later = ptx.pick(Int32(other > w), one, Float32(0.0))
            add = [add[e] + y[e] + later * x[e] for e in range(4)]
        dg = [[dg[i][e] + add[e] for e in range(4)] for i in range(2)]

        # ---------------------------------------------------------------- through the gate, and out
        bias = ptx.zeros(4)
        if const_expr(cfg.has_bias):
            bias = ptx.lds4(s_edge + 192)
        dbias = ptx.zeros(4)
        for i in range_constexpr(2):
            y = dg[i]
            if const_expr(cfg.gate != "log"):
                x = x_gate[i]
                live_f = ptx.pick(Int32(live[i]), one, Float32(0.0))
                y, da = _gate_bwd(
                    cfg, [x[e] + bias[e] for e in range(4)], [y[e] * live_f for e in range(4)], rate, lower_bound
                )
                dA = dA + da
                dbias = [dbias[e] + y[e] for e in range(4)]
            if live[i]:
                (ptx.st2 if cfg.g_bytes == 2 else ptx.st4)(aOg, jG[i], y)
        if const_expr(cfg.has_bias):
            for e in range_constexpr(4):
                for step in (4, 8, 16):
                    dbias[e] = dbias[e] + cute.arch.shuffle_sync_bfly(dbias[e], step)
            if r == 0:
                ptx.st4(oDbias.iterator.toint() + ((Int64(chunk) * 4 + w) * HV + hv) * (K * 4), col0 + s * COLS, dbias)
        db0, db1, qd0, qd1, kd0, kd1 = db[0], db[1], qd[0], qd[1], kd_dot[0], kd_dot[1]

    # ---------------------------------------------------------------------- close beta, A_log and the norm
    sums = [db0, db1, qd0, qd1, kd0, kd1]
    for i in range_constexpr(6):
        for step in (1, 2):
            sums[i] = sums[i] + cute.arch.shuffle_sync_bfly(sums[i], step)
    if lc == 0:
        for i in range_constexpr(6):
            ptx.sts1(s_dots + ((half * 3 + i // 2) * 64 + row0 + r + i % 2 * 8) * 4, sums[i])
    cute.arch.sync_threads()
    dots = []
    for i in range_constexpr(6):
        where = s_dots + (i // 2 * 64 + row0 + r + i % 2 * 8) * 4
        dots.append(ptx.lds1(where) + ptx.lds1(where + 3 * 64 * 4))
    if const_expr(cfg.has_A):
        for step in (1, 2, 4, 8, 16):
            dA = dA + cute.arch.shuffle_sync_bfly(dA, step)
        if lane == 0:
            ptx.store("f32", oDA.iterator.toint() + (Int64(chunk) * 8 + warp) * HV * 4, hv, 4, dA)
    for i in range_constexpr(2):
        if live[i]:
            if half * 4 + lc == 0:
                token = head + Int64(rows[i]) * HV
                d_beta = dots[i] + Float32(mYv[token])
                if const_expr(cfg.beta_sigmoid):
                    d_beta = d_beta * beta[i] * (1.0 - beta[i] / beta_scale)
                oDb[token] = d_beta.to(oDb.element_type)
            if const_expr(cfg.l2norm):
                q_rstd = Float32(mQr[qhead + Int64(rows[i]) * H])
                k_rstd = Float32(mKr[qhead + Int64(rows[i]) * H])
                for part in cutlass.range(SLABS, unroll=2):
                    _close_norm(cfg, aOq, iG[i] + part * COLS, aQ, iQ[i] + part * COLS, q_rstd, dots[2 + i])
                    _close_norm(cfg, aOk, iG[i] + part * COLS, aK, iQ[i] + part * COLS, k_rstd, dots[4 + i])


# ---------------------------------------------------------------------------------------------------------- host code
class _Config:
    """What the kernel is specialised for."""

    def __init__(self, varlen, gate, l2norm, beta_sigmoid, has_A, has_bias, g_bytes, grouped):
        self.varlen, self.gate, self.l2norm, self.beta_sigmoid = varlen, gate, l2norm, beta_sigmoid
        self.has_A, self.has_bias, self.g_bytes = has_A, has_bias, g_bytes
        self.dq_bytes = 4 if grouped else 2  # grouped heads are summed in fp32 afterwards


def _launcher(cfg):
    @cute.jit
    def launch(
        mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mDiag, mTail, mYv, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk, oDg,
        oDb, oDA, oDbias, mCu, mChunks,
        T: Int32, H: Int32, HV: Int32, lower_bound: Float32, beta_scale: Float32, grid: Int32, stream,
    ):
        _kernel(
            mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mDiag, mTail, mYv, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk,
            oDg, oDb, oDA, oDbias, mCu, mChunks, T, H, HV, lower_bound, beta_scale, cfg,
        ).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=2, preferred_smem_carveout=100, stream=stream
        )

    return launch


_TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: Float32}
_TYPES |= {torch.int64: Int64, torch.int32: Int32}


@functools.cache
def _compile(cfg_key, dtypes, options="--enable-tvm-ffi"):
    """The kernel for one specialisation; takes the 25 tensors flattened, then the numbers, and runs on torch's
    current stream."""
    tensors = [cute.runtime.make_fake_compact_tensor(_TYPES[d], (cute.sym_int64(),), assumed_align=16) for d in dtypes]
    numbers = (Int32(1), Int32(1), Int32(1), Float32(0.0), Float32(1.0), Int32(1))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_launcher(_Config(*cfg_key)), *tensors, *numbers, stream, options=options)


@functools.cache
def _absent(device, dtype):
    """Stands in for a tensor the call does not have; never read."""
    return torch.zeros(4, dtype=dtype, device=device)


def _flat(x):
    """One dimension, 16-byte aligned: a view of a parameter may begin anywhere."""
    return (x if x.data_ptr() % 16 == 0 else x.clone()).view(-1)


def supports(p):
    rows = max(p.B * p.T, p.NT * p.HV * p.K)
    for ok, reason in (
        (p.arch[0] == 9, f"needs compute capability 9.x, got {p.arch[0]}.{p.arch[1]}"),
        (p.K == K, f"needs K={K}, got {p.K}"),
        (p.V % BV == 0, f"needs V a multiple of {BV}, got {p.V}"),
        (p.dtype == torch.bfloat16, f"needs bf16 q, k, v, got {p.dtype}"),
        (p.g_dtype in (torch.bfloat16, torch.float32), f"needs a bf16 or fp32 gate, got {p.g_dtype}"),
        (p.beta_dtype in _TYPES, f"needs bf16, fp16 or fp32 beta, got {p.beta_dtype}"),
        (p.NT > 0, "needs a token, got none"),
        (rows < 2**31, f"needs token and state rows below 2^31, got {rows}"),
    ):
        if not ok:
            return False, reason
    return True, ""


@functools.cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _tiles(x, rows, columns):
    """A descriptor of [rows, columns] tiles of a matrix."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def value_side(*, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices):
    """Tensors for the key side: dq, dk in beta kb, dk in kg (bf16 [B,T,HV,K]); D, E (bf16 [B,T,HV,64]); diag, tail,
    yv; and dv. Rows that belong to no sequence are left as they are."""
    shape = (p.B, p.T, p.HV)
    xq, xu, xd, D, E, dv_out = (v.new_empty(*shape, n) for n in (p.K, p.K, p.K, CHUNK, CHUNK, p.V))
    diag, yv, tail = gk.new_empty(shape), gk.new_empty(shape), gk.new_empty(p.NT, p.HV, p.K)
    tokens = [_tiles(_flat(x).view(p.B * p.T, -1), CHUNK, BV) for x in (do, dv, v_new, v, Akk)]
    states = [_tiles(_flat(x).view(-1, p.V), p.K, BV) for x in (h, dh)]
    gates = _tiles(_flat(gk).view(p.B * p.T, -1), CHUNK, p.K)
    programs = min(p.NT * p.HV, _multiprocessors(v.device))
    value_kernel[(programs,)](
        *tokens, *states, gates, gk, beta, xq, xu, xd, D, E, diag, tail, yv, dv_out, cu_seqlens, chunk_indices, p.scale,
        p.T, p.NT * p.HV, programs, HV=p.HV, K=p.K, V=p.V, IS_VARLEN=p.varlen, STAGES=VALUE_STAGES,
        num_warps=VALUE_WARPS,
    )
    return (xq, xu, xd, D, E, diag, tail, yv), dv_out


def run(
    *, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, g_raw, A_log, dt_bias, q_rstd, k_rstd, p, cu_seqlens, chunk_indices
):
    """Tensors as in the chain's contract; returns dq, dk [B,T,H,K], dv, dg, dbeta in the inputs' dtypes, dA_log,
    ddt_bias."""
    states, dv_out = value_side(
        v=v, v_new=v_new, gk=gk, beta=beta, Akk=Akk, h=h, do=do, dh=dh, dv=dv, p=p, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    has_A, has_bias = A_log is not None, dt_bias is not None
    cfg_key = (p.varlen, p.gate, p.l2norm, p.beta_sigmoid, has_A, has_bias, p.g_dtype.itemsize, p.HV != p.H)
    dq_dtype = torch.float32 if p.HV != p.H else p.dtype
    dq, dk, dg = (torch.empty_like(gk, dtype=dtype) for dtype in (dq_dtype, dq_dtype, p.g_dtype))
    dbeta = torch.empty_like(beta, dtype=p.beta_dtype)
    dA = None if A_log is None else q.new_empty(p.NT, 8, p.HV, dtype=torch.float32)
    dbias = None if dt_bias is None else q.new_empty(p.NT, 4, p.HV, p.K, dtype=torch.float32)
    f32, i64 = _absent(q.device, torch.float32), _absent(q.device, torch.int64)
    given = (q, k, gk, beta, *states, g_raw, A_log, dt_bias, q_rstd, k_rstd, dq, dk, dg, dbeta, dA, dbias)
    tensors = [f32 if x is None else _flat(x) for x in given]
    tensors += [i64 if x is None else x.reshape(-1) for x in (cu_seqlens, chunk_indices)]
    kernel = _compile(cfg_key, tuple(x.dtype for x in tensors))
    kernel(*tensors, p.T, p.H, p.HV, 0.0 if p.lower_bound is None else p.lower_bound, p.beta_scale, p.NT * p.HV)
    if p.varlen:
        zero_tail_kernel[(ZERO_PROGRAMS.value,)](dq, dk, dv_out, dg, dbeta, cu_seqlens, p.N, p.T, HV=p.HV, K=p.K, V=p.V)
    if p.HV != p.H:
        group = (p.B, p.T, p.H, p.HV // p.H, p.K)
        dq, dk = dq.view(group).sum(3), dk.view(group).sum(3)
    dA = None if dA is None else dA.sum((0, 1)).view_as(A_log)
    dbias = None if dbias is None else dbias.sum((0, 1)).view_as(dt_bias)
    return {"dq": dq, "dk": dk, "dv": dv_out, "dg": dg, "dbeta": dbeta, "dA_log": dA, "ddt_bias": dbias}


def run_log_gate(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, q_rstd, k_rstd, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(**locals(), g_raw=None, A_log=None, dt_bias=None)


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}


_TAIL = dict.fromkeys(("dq", "dk", "dv", "dg"), "*bf16") | dict.fromkeys(("N", "T"), "i32")
_TAIL |= {"dbeta": "*fp32", "cu_seqlens": "*i64"}
COMPILE = [(zero_tail_kernel, _TAIL, {"HV": 16, "K": K, "V": 256}, 4, 1)]  # value_kernel's descriptors need a test
