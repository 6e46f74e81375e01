"""All gradients of a chunk, as 015; in pairs of rows close by, nothing is rounded to eight bits any more.

Parent: 015.
Delta: pairs in the same 16 rows. Their operands are two bf16 numbers each, and so are D and E inside 8 rows, so that
    products have 16 bits; dg is then formed once, from the sums that dq and dk take, in which the states' parts are
    already. What the value side drops of D and E there, 32 bytes a row, comes in a tensor of its own, and waits in
    their rows to the right of the diagonal. What is above the diagonal is neither written nor read. Row sources are
    formed while q, D and E still arrive. Grouped heads leave bf16 partials without the norm; one kernel sums a group
    and applies the norm to the sum.
Why it should be faster: grouped heads move 1.6 GB instead of 3.5 at B4 T8192 H16 HV32, in one launch instead of four.
    Otherwise it is not: it is more exact. With strong gates a term of dg carried three roundings to bf16 more than
    fla's (D, and both operands), which cost the case strong_mask its limit.
Constraints: sm_90, K = 128, V a multiple of 64, bf16. Any gate (exponents are <= 0, or within 112 of 0), any T, packed
    sequences, GVA; token and state rows below 2^31 (descriptors take 32-bit coordinates).
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

from kernel_fun._common import cutecall, ptx
from kernel_fun._common.launch import launch
from kernel_fun._common.problem import CHUNK
from kernel_fun.kda.stages.k011_bwd_grads_ring import (
    BV,
    VALUE_STAGES,
    VALUE_WARPS,
    ZERO_PROGRAMS,
    _multiprocessors,
    _tiles,
    zero_tail_kernel,
)
from kernel_fun.kda.stages.k015_bwd_keys import (
    EDGE,
    GK,
    KEYS,
    L2,
    LN_2,
    LOG2_E,
    PITCH,
    SMEM,
    THREADS,
    WARP,
    XD,
    XS,
    K,
    _addresses,
    _as_source,
    _as_target,
    _below,
    _close_norm,
    _copy_gate,
    _copy_inputs,
    _gate_bwd,
    _Names,
    _packed,
    _quads,
    _raw_gate,
    _Sums,
    _times,
    _turned,
)
from kernel_fun.kda.stages.k015_bwd_keys import _place as _parents_places
from kernel_fun.kda.stages.k015_bwd_keys import supports as supports

FAMILY = "kda"
POINTERS = ("q", "k", "gk", "xq", "xu", "xd", "D", "E", "rest", "tail", "graw", "bias", "dq", "dk", "dg", "dA", "dbias")
GROUP_ROWS = 32  # rows of a program that sums a group's partials
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name since Triton 3.7, and before

# ==================================================================================== value side: one pass over V
# Slabs of 64 columns pass through a ring of STAGES stages: [do; dv], [v_new; v], both [128,64], and [h; dh], [2K,64].
# After its V // 64 slabs a chunk's gk, [64,K], takes a stage too, and then the chunk's sums leave through that. Akk is
# fetched with a chunk's first slab; copies are never further ahead than the next chunk, so it has two buffers. All
# as in 011, but for the last stores.
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
def _put(x, tile, n_t, STRIDE: gl.constexpr, C: gl.constexpr, LOWER: gl.constexpr, L: gl.constexpr):
    """The rows below n_t of a staged [64,C] tile to x, 16 bytes a thread; of 16 x 16 blocks, if LOWER, only those that
    are not above the diagonal."""
    o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    o_c = gl.arange(0, C, layout=gl.SliceLayout(0, L))[None, :]
    b_here = (o_r < n_t) & ((o_c // 16 <= o_r // 16) if LOWER else (o_c >= 0))
    gl.store(x + (o_r * STRIDE + o_c), tile.load(L), mask=b_here)


@gluon.jit(do_not_specialize=["T", "total", "programs"])
def value_kernel(
    d_do, d_dv, d_vn, d_v, d_A, d_h, d_dh, d_g, gk, beta, xq, xu, xd, D, E, rest, rows, tail, dv_out, cu_seqlens,
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
    CR: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0])
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
    o_p = gl.arange(0, 128, layout=gl.SliceLayout(1, CR))
    o_rest = (o_p % 64 * (HV * 16) + o_p // 64 * 8)[:, None] + gl.arange(0, 8, layout=gl.SliceLayout(0, CR))[None, :]
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
            _put(dv_out + head * V + i_v * 64, out, n_t, HV * V, 64, False, C64)
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
        b_diag = gl.sum(gl.where(o_a[:, None] == o_s[None, :], b_a, 0.0), 1) * scale
        b_a = gl.where((o_a % 64)[:, None] > o_s[None, :], b_a * b_sign[:, None], 0.0)
        s_a.store(b_a.to(DT))
        # what 8 bits leave of the pairs in the same 8 rows
        b_near = gl.where((o_a % 64 // 8)[:, None] == (o_s // 8)[None, :], b_a, 0.0)
        b_near = gl.sum(b_near.reshape([128, 8, 8]), 1)
        b_near = gl.convert_layout((b_near - b_near.to(DT).to(gl.float32)).to(DT), CR)
        gl.store(rest + head * 16 + o_rest, b_near, mask=(o_p % 64 < n_t)[:, None])
        gl.store(rows + (head + o_a * HV) * 2, b_diag, mask=o_a < n_t)
        gl.store(rows + (head + o_y * HV) * 2 + 1, gl.sum(b_yv, 1), mask=o_y < n_t)
        mbarrier.wait(bars.index(now), i_s // STAGES & 1)
        b_up = gl.exp2(g.load(SX))
        b_down = gl.exp2(b_gn[:, None] - g.permute((1, 0)).load(S64))
        s_xd.permute((1, 0)).store((b_xd * b_down).to(DT))
        barrier()  # everybody has read gk
        s_x.index(0).store((b_xq * (b_up * scale)).to(DT))
        s_x.index(1).store((b_xu * (0.0 - b_up)).to(DT))
        gl.store(tail + (i_c * HV + i_hv) * K + o_h, gl.exp2(b_gh) * b_hh)
        barrier()
        _put(xq + head * K, s_x.index(0), n_t, HV * K, K, False, CK)
        _put(xu + head * K, s_x.index(1), n_t, HV * K, K, False, CK)
        _put(xd + head * K, s_xd, n_t, HV * K, K, False, CK)
        _put(D + head * 64, s_a.slice(0, 64), n_t, HV * 64, 64, True, C64)
        _put(E + head * 64, s_a.slice(64, 64), n_t, HV * 64, 64, True, C64)
        fence_async_shared()
        barrier()
        _fetch(ring, now, i_s + STAGES, ahead, HV, K, V)
        i_s, row, n_t, b_beta = i_s + 1, next_row, next_n_t, next_beta
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


# ============================================================================================== a group's key gradients
@triton.jit
def _group(partial, x, rstd, out, o_r, live, G: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr):
    """Partials [rows,G,K] summed over G, and taken through the norm of x where there is one; 0 where not live."""
    o_k = tl.arange(0, K)[None, :]
    b_d = tl.zeros([o_r.shape[0], K], tl.float32)
    for j in tl.static_range(G):
        b_d += tl.load(partial + (o_r * G + j)[:, None] * K + o_k, mask=live[:, None], other=0.0).to(tl.float32)
    if NORM:
        b_rstd = tl.load(rstd + o_r, mask=live, other=0.0)[:, None]
        b_x = tl.load(x + o_r[:, None] * K + o_k, mask=live[:, None], other=0.0).to(tl.float32) * b_rstd
        b_d = b_rstd * (b_d - b_x * tl.sum(b_x * b_d, 1)[:, None])
    return b_d.to(out.dtype.element_ty)


@triton.jit(do_not_specialize=["N", "rows"])
def group_kernel(
    dq_heads, dk_heads, q_raw, k_raw, q_rstd, k_rstd, dq, dk, cu_seqlens, N, rows, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, NORM: tl.constexpr, IS_VARLEN: tl.constexpr, BR: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_o, here, live = o_r[:, None] * K + tl.arange(0, K)[None, :], o_r < rows, o_r < rows
    if IS_VARLEN:  # tokens after the last sequence belong to none
        live = o_r < tl.load(cu_seqlens + N).to(tl.int64) * H
    if tl.program_id(1) == 0:
        tl.store(dq + o_o, _group(dq_heads, q_raw, q_rstd, dq, o_r, live, G, K, NORM), mask=here[:, None])
    else:
        tl.store(dk + o_o, _group(dk_heads, k_raw, k_rstd, dk, o_r, live, G, K, NORM), mask=here[:, None])


# ============================================================ key side: 015's, but for pairs in the same 16 rows
def _start(cfg, io, at, tid, n_t):
    """Begin all other copies, in three groups: what the sources of other blocks need, the rest, the raw gate. The CTA
    copies whole rows, a warp two of bf16 or one of gk at a time; eight lanes take parts that meet no bank twice."""
    warp, lane = tid // 32, tid % 32
    low, part = warp * 2 + lane // 4 % 2, lane % 4 + lane // 8 * 4  # row of 16, 16 bytes of it
    to = at.smem + part // 2 * WARP + low // 8 * 256 + low % 8 * 32 + part % 2 * 16

    def rows(place, base, head, heads):
        source = base + (head + Int64(low) * heads) * (K * 2) + part * 16
        for m in range(4):
            ptx.copy_row(to + place + m * 512, source, 16 * m * heads * K * 2, 16, n_t - low, 16 * m, L2)

    gates = io.gk + at.head * (K * 4) + lane * 16
    for m in range(8):
        row = Int64(warp + ptx.at_most(n_t - 1 - warp, 8 * m))
        place = at.smem + lane // 4 * WARP + GK + warp * 64 + lane % 4 * 16
        ptx.copy(place + m * 512, gates + row * (at.sG * 4), 16, L2)
    rows(KEYS, io.k, at.qhead, cfg.H)
    rows(XD, io.xd, at.head, cfg.HV)
    ptx.copy(at.column + EDGE + 64, io.tail, 16)
    if cfg.has_bias:
        ptx.copy(at.column + EDGE + 128, io.bias, 16)
    ptx.commit()
    rows(0, io.q, at.qhead, cfg.H)
    row, part = tid // 8, tid % 8
    for i in range(2):  # nobody reads what is above the diagonal: there zeros go, all to the row's padding
        above = Int32(part > row // 8 + 4 * i)
        for x, base in enumerate((io.D, io.E)):
            to = at.matrices + x * 64 * PITCH + (row + 32 * i) * PITCH + (part + above * (8 - part)) * 16
            source = base + (at.head + Int64(row) * cfg.HV) * 128 + part * 16
            ptx.copy_row(to, source, 32 * i * cfg.HV * 128, 16, (n_t - row) * (1 - above), 32 * i, L2)
    row, x = tid % 64, tid // 64 % 2  # to the right of each 8 x 8 block on the diagonal what it leaves
    to = at.matrices + x * 64 * PITCH + row * PITCH + row // 8 * 16 + 16
    ptx.copy_row(to, io.rest + (at.head + Int64(row) * cfg.HV) * 32 + x * 16, 0, 16, n_t - row, 0, L2)
    _copy_inputs(cfg, io, at, 3)
    _copy_gate(cfg, io, at, 3)


def _sources(cfg, at):
    """Each block but the last as a source for later blocks: bf16(k 2^(gk at its end - gk)) as B fragments, [jj][row].
    Leaves the decays from one block's end to the next in shared memory; returns also what all rows' dg share."""
    ends = [ptx.lds4(at.column + GK + (2 * a + 1) * 512 + 7 * 64) for a in range(3)]
    total, sources = ptx.zeros(4), []
    for b in range(4):
        rows = []
        for i in range(2):
            k, pd = (_quads(ptx.lds2(at.pair + place + (2 * b + i) * 256)) for place in (KEYS, XD))
            if cfg.scaled:
                k = _times(k, [ptx.lds1(at.rows + (2 * b + i) * 128 + 12)] * 4)
            total = [t + x * y for t, x, y in zip(total, k, pd, strict=True)]
            if b < 3:
                rows.append(_times(k, _below(ends[b], ptx.lds4(at.lane + GK + (2 * b + i) * 512))))
        if b < 3:
            sources.append([_turned(_packed(rows[0][n : n + 2] + rows[1][n : n + 2])) for n in (0, 2)])
    tail = ptx.lds4(at.column + EDGE + 64)
    shared = [ptx.sum_lanes(x, 4, 8, 16) + y for x, y in zip(total, tail, strict=True)]
    ptx.sync_warp()
    for m in (1, 2):
        ptx.sts4(at.column + EDGE + 64 * m - 64, _below(ends[m], ends[m - 1]))
    return sources, shared


def _split(x, f):
    """x f as the sum of two bf16, both as B fragments, a row each."""
    y = _times(x, f)
    hi = _packed(y)
    return _turned(hi), _turned(_packed([v - w for v, w in zip(y, _quads(hi), strict=True)]))


def _inside(at, b, jj, q, k, kb, g, sums):
    """The pairs of a block of 16 rows: those in the same 8 rows, from their middle; then the upper 8 with the lower,
    from the last of these, whose operands stay the same. dq, zk and uk get 16 bits of each; dg follows from them."""
    zeros, gk, block = ptx.zeros(4), GK + 2 * b * 512 + jj * 8, b * (16 * PITCH + 32)
    near = [ptx.ldmatrix_n(at.diagonal + block + i * (8 * PITCH + 16), 4, False) for i in range(2)]
    far = ptx.ldmatrix_n(at.diagonal + block + 8 * PITCH, 2, False)
    middle = [x for i in range(2) for x in ptx.lds2f(at.column + gk + i * 512 + 3 * 64)]
    e = ptx.bound_exponents([x - y for x, y in zip(g, middle, strict=True)], 32, 112)
    fp, fm, f = [ptx.ex2(x) for x in e], [ptx.ex2(-x) for x in e], _below(g[2:], ptx.lds2f(at.column + gk + 7 * 64))
    last = [ptx.of_row(x, 7) for x in fp[:2]]
    st, st_lo = _split(k, fm)
    x = [ptx.mma16(zeros, near[i], (st[i], st[i])) for i in range(2)]
    x = [ptx.mma8(x[i], near[i][:2], st_lo[i]) for i in range(2)]
    y = ptx.mma8(ptx.mma8(zeros, far, st_lo[0]), far, st[0])
    for n in range(4):
        for to, m in ((sums.dq, n % 2), (sums.zk, n % 2 + 2)):
            sums.add(to, n, fp[n], x[n // 2][m])
            if n > 1:
                sums.add(to, n, f[n - 2] * last[n - 2], y[m])
    for n in range(4):
        sums.dg[n] = q[n] * sums.dq[n] + kb[n] * sums.zk[n]
    back, back_lo = (ptx.ldmatrix_n(at.diagonal_turned + block + x, 4, True) for x in (0, 16))
    (qt, qt_lo), (kt, kt_lo) = _split(q, fp), _split(kb, fp)
    u = []
    for i in range(2):
        u.append(ptx.mma16(zeros, back, (qt_lo[i], kt_lo[i])))
        u[i] = ptx.mma16(ptx.mma16(u[i], back, (qt[i], kt[i])), back_lo, (qt[i], kt[i]))
    over, over_lo = _split([q[2], q[3], kb[2], kb[3]], f * 2)
    far_back = ptx.ldmatrix_n(at.diagonal_turned + block + 8 * PITCH, 4, True)
    w = ptx.mma16(ptx.mma16(zeros, far_back, over_lo), far_back, over)  # half counts, the rest means nothing; so below
    u = [u[0][0] + last[0] * w[0], u[0][1] + last[1] * w[1], *u[1][2:]]
    for n in range(4):
        sums.add(sums.uk, n, fm[n], u[n])
        sums.dg[n] = sums.dg[n] - k[n] * sums.uk[n]


def _gradients(cfg, io, at, lane, rate, lower_bound):
    """Everything of the warp's columns but dbeta; returns their share of dA_log."""
    ptx.wait_group(2)
    ptx.sync_cta()
    sources, shared = _sources(cfg, at)
    ptx.wait_group(1)  # all but the raw gate, which a thread copies for itself, as the inputs of the blocks to come
    ptx.sync_cta()
    targets, db_rows, dA, dbias = [[None, None] for _ in range(4)], [None] * 4, Float32(0.0), ptx.zeros(4)
    for b in (3, 2, 1, 0):
        qk = [[*ptx.lds2(at.pair + j * 256), *ptx.lds2(at.pair + KEYS + j * 256)] for j in (2 * b, 2 * b + 1)]
        beta, diag, *rstd = zip(*[ptx.lds4(at.rows + (16 * b + 8 * i) * 16) for i in range(2)], strict=True)
        db, qd, kd = ptx.zeros(2), ptx.zeros(2), ptx.zeros(2)
        ptx.wait_group(1)
        stash, dg = [[], []], [[], []]
        for jj in range(2):
            q, k = ([y for x in qk for y in ptx.unpack(x[n + jj])] for n in (0, 2))
            if cfg.scaled:
                q, k = (_times(x, [r[0], r[0], r[1], r[1]]) for x, r in zip((q, k), rstd, strict=True))
            g = [y for i in range(2) for y in ptx.lds2f(at.lane + GK + (2 * b + i) * 512 + jj * 8)]
            kb = [k[n] * beta[n // 2] for n in range(4)]
            sums = _Sums()
            xs = [ptx.lds_frag(at.lane + XS + i * 512) for i in range(2)]
            xd = [ptx.lds2(at.pair + XD + (2 * b + i) * 256) for i in range(2)]
            for to, x in (("dq", [x[jj] for x in xs]), ("zk", [x[2 + jj] for x in xs]), ("uk", [x[jj] for x in xd])):
                setattr(sums, to, _quads(x))  # begin with the states' parts
            if jj and b:
                _copy_inputs(cfg, io, at, b - 1)
            _inside(at, b, jj, q, k, kb, g, sums)
            if b:
                targets[b][jj] = _as_target(at, b, jj, q, kb, g, sources, sums)
            if b < 3:
                _as_source(at, b, jj, g, sources[b], targets, sums)

            # ---- add the pairs of a row with itself
            dq, dk = [], []
            for n in range(4):
                i = n // 2
                dq.append(sums.dq[n] + diag[i] * k[n])
                dk.append(beta[i] * sums.zk[n] + sums.uk[n] + diag[i] * q[n])
                dg[i].append(sums.dg[n])
                db[i] = db[i] + k[n] * sums.zk[n]
                qd[i], kd[i] = qd[i] + q[n] * dq[n], kd[i] + k[n] * dk[n]
            stash[0] += _packed(dq)
            stash[1] += _packed(dk)
        ptx.sync_warp()  # everybody has read gk of this block: dq and dk take its place
        for i in range(2):
            ptx.sts_frag(at.lane + GK + (2 * b + i) * 512, [x[i + 2 * jj] for x in stash for jj in range(2)])
        if cfg.l2norm:  # once more times rstd, as the norm's gradient multiplies them by the rows given
            ptx.sts4(at.lane + XD + b * 512, [x * y for x, y in zip((*qd, *kd), (*rstd[0], *rstd[1]), strict=True)])
        mine, other = (ptx.pick(at.odd, db[i], db[1 - i]) for i in (1, 0))  # an odd lane keeps row r + 8
        db_rows[b] = ptx.sum_lanes(mine + ptx.exchange(other, 1), 2)

        # ---- dg: summed over this and all later rows; through the gate; out
        for i in (1, 0):
            dg[i] = [ptx.sum_later_rows(x) + y for x, y in zip(dg[i], shared, strict=True)]
            if i or b:
                shared = [ptx.of_row(y, 0) for y in dg[i]]
        ptx.wait_group(1 if b else 0)
        graw, unit = _raw_gate(cfg, io, at, b), LOG2_E if cfg.gate == "softplus" else 1.0
        bias = [unit * x for x in ptx.lds4(at.column + EDGE + 128)] if cfg.has_bias else ptx.zeros(4)
        if b:
            _copy_gate(cfg, io, at, b - 1)
        for i in range(2):
            row, y = 16 * b + 8 * i, dg[i]
            if cfg.gate != "log":
                x = [unit * v + w for v, w in zip(graw[i], bias, strict=True)]
                y, da = _gate_bwd(cfg, x, y, ptx.pick(Int32(at.left > row), rate, Float32(0.0)), lower_bound)
                dA = dA + da
                dbias = [v + w for v, w in zip(dbias, y, strict=True)]
            out, off = io.dg + at.g * cfg.g_bytes, row * at.sG * cfg.g_bytes
            if cfg.g_bytes == 2:
                ptx.store_row("b32", out, off, at.left, row, ptx.pack(y[0], y[1]), ptx.pack(y[2], y[3]))
            else:
                ptx.store_row("f32", out, off, at.left, row, *y)
    if cfg.has_bias:
        dbias = [ptx.sum_lanes(x, 4, 8, 16) for x in dbias]
        ptx.store_row("f32", io.dbias, 0, 1 - lane // 4, 0, *dbias)
    for b in range(4):
        ptx.sts1(at.db + 64 * b, db_rows[b])
    return ptx.sum_lanes(dA * (LN_2 if cfg.gate == "softplus" else 1.0), 1, 2, 4, 8, 16)


def _place(mine, smem, tid, warp, lane, n_t):
    """015's addresses; but `diagonal` is that of D's and E's same 8 x 8 block, and of what is to the right of each."""
    _parents_places(mine, smem, tid, warp, lane, n_t)
    part = lane // 8
    mine.diagonal = mine.matrices + lane % 8 * PITCH + part // 2 * 16 + part % 2 * 64 * PITCH


@cute.kernel
def _kernel(
    mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mRest, mRows, mTail, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk, oDg, oDb,
    oDA, oDbias, mCu, mChunks, T: Int32, lower_bound: Float32, beta_scale: Float32, cfg: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    pid, _, _ = cute.arch.block_idx()
    lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
    chunk, hv = pid // cfg.HV, pid % cfg.HV
    h = hv // (cfg.HV // cfg.H)

    # first token of the chunk in the flattened batch, and how many of its 64 rows exist
    if const_expr(cfg.varlen):
        seq, t = Int64(mChunks[2 * chunk]), Int64(mChunks[2 * chunk + 1])
        bos, eos = Int64(mCu[seq]), Int64(mCu[seq + 1])
        first = bos + t * 64
        n_t = Int32(cutlass.min(eos - first, Int64(64)))
    else:
        _, batch, _ = cute.arch.block_idx()
        first = Int64(batch) * T + chunk * 64
        n_t = cutlass.min(T - chunk * 64, 64)
        chunk = batch * ((T + 63) // 64) + chunk

    smem = cute.arch.alloc_smem(Uint32, SMEM // 4, 16).toint()
    tensors = (mQ, mK, mGk, mXq, mXu, mXd, mD, mE, mRest, mTail, mGraw, mBias, oDq, oDk, oDg, oDA, oDbias)
    io, at = _Names(zip(POINTERS, [x.iterator.toint() for x in tensors], strict=True)), _Names()
    head, qhead = first * cfg.HV + hv, first * cfg.H + h
    _place(at, smem, tid, warp, lane, n_t)
    _addresses(cfg, at, io, warp, lane, chunk, hv, head, qhead)
    _start(cfg, io, at, tid, n_t)

    row = Int64(cutlass.min(tid % 64, n_t - 1))
    token, lives, zero = head + row * cfg.HV, Int32(tid % 64 < n_t), Float32(0.0)
    values = [Float32(mBeta[token]), Float32(mRows[2 * token]), zero, zero]
    if const_expr(cfg.scaled):
        values[2], values[3] = Float32(mQr[qhead + row * cfg.H]), Float32(mKr[qhead + row * cfg.H])
    rate = Float32(1.0)
    if const_expr(cfg.has_A):
        rate = ptx.ex2(Float32(mAlog[hv]) * LOG2_E)
    beta = ptx.pick(lives, values[0], zero)
    ptx.sts4(at.matrices + 2 * 64 * PITCH + tid % 64 * 16, [beta, ptx.pick(lives, values[1], zero), *values[2:]])

    dA = _gradients(cfg, io, at, lane, rate, lower_bound)
    if const_expr(cfg.has_A):
        ptx.store_row("f32", io.dA + ((Int64(chunk) * 8 + warp) * cfg.HV + hv) * 4, 0, 1 - lane, 0, dA)
    d_beta = Float32(mRows[2 * token + 1])
    ptx.sync_cta()
    _close_norm(cfg, io, at)
    if tid < n_t:
        for other in range_constexpr(8):
            d_beta = d_beta + ptx.lds1(smem + other * WARP + XS + tid * 4)
        if const_expr(cfg.beta_sigmoid):
            d_beta = d_beta * beta * (1.0 - beta / beta_scale)
        oDb[token] = d_beta.to(oDb.element_type)


# ---------------------------------------------------------------------------------------------------------- host code
class _Config:
    """What the kernel is specialised for."""

    def __init__(self, varlen, gate, l2norm, beta_sigmoid, has_A, has_bias, g_bytes, H, HV):
        self.varlen, self.gate, self.beta_sigmoid = varlen, gate, beta_sigmoid
        self.scaled, self.l2norm = l2norm, l2norm and H == HV  # rows are normed here; so is, for 015, their gradient
        self.has_A, self.has_bias, self.g_bytes = has_A, has_bias, g_bytes
        self.H, self.HV = H, HV
        self.dq_bytes = 2


def _launcher(cfg):
    @cute.jit
    def start(
        mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mRest, mRows, mTail, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk, oDg,
        oDb, oDA, oDbias, mCu, mChunks,
        T: Int32, lower_bound: Float32, beta_scale: Float32, grid: Int32, rows: Int32, stream,
    ):
        _kernel(
            mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mRest, mRows, mTail, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk,
            oDg, oDb, oDA, oDbias, mCu, mChunks, T, lower_bound, beta_scale, cfg,
        ).launch(
            grid=[grid, rows, 1], block=[THREADS, 1, 1], min_blocks_per_mp=2, preferred_smem_carveout=100, stream=stream
        )

    return start


@functools.cache
def _compile(cfg_key, dtypes):
    """The kernel for one specialisation; takes the 25 tensors flattened, then the numbers, and runs on torch's
    current stream."""
    numbers = (Int32(1), Float32(0.0), Float32(1.0), Int32(1), Int32(1))
    return cutecall.compile_for(_launcher(_Config(*cfg_key)), dtypes, numbers)


def value_side(*, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices):
    """Tensors for the key side: dq, dk in beta kb, dk in kg (bf16 [B,T,HV,K]); D, E (bf16 [B,T,HV,64]), without what
    lies above their diagonal blocks; what their 8 x 8 blocks on the diagonal leave ([B,T,HV,2,8]); diagonal of D and
    dbeta's part through v (fp32 [B,T,HV,2]); tail (fp32 [NT,HV,K]); and dv. Rows that belong to no sequence are left as
    they are."""
    shape = (p.B, p.T, p.HV)
    xq, xu, xd, D, E, rest, dv_out = (v.new_empty(*shape, n) for n in (p.K, p.K, p.K, CHUNK, CHUNK, 16, p.V))
    rows, tail = gk.new_empty(*shape, 2), gk.new_empty(p.NT, p.HV, p.K)
    tokens = [_tiles(cutecall.flat(x).view(p.B * p.T, -1), CHUNK, BV) for x in (do, dv, v_new, v, Akk)]
    states = [_tiles(cutecall.flat(x).view(-1, p.V), p.K, BV) for x in (h, dh)]
    gates = _tiles(cutecall.flat(gk).view(p.B * p.T, -1), CHUNK, p.K)
    programs = min(p.NT * p.HV, _multiprocessors(v.device))
    launch(
        value_kernel, (programs,), *tokens, *states, gates, gk, beta, xq, xu, xd, D, E, rest, rows, tail, dv_out,
        cu_seqlens, chunk_indices, p.scale, p.T, p.NT * p.HV, programs,
        HV=p.HV, K=p.K, V=p.V, IS_VARLEN=p.varlen, STAGES=VALUE_STAGES, num_warps=VALUE_WARPS,
    )
    return (xq, xu, xd, D, E, rest, rows, tail), dv_out


def run(
    *, q_raw, k_raw, q_rstd, k_rstd, v, v_new, gk, beta, Akk, h, do, dh, dv, g_raw, A_log, dt_bias, p, cu_seqlens,
    chunk_indices,
):
    """Tensors as in the chain's contract; returns dq, dk [B,T,H,K], dv, dg, dbeta in the inputs' dtypes, dA_log,
    ddt_bias."""
    states, dv_out = value_side(
        v=v, v_new=v_new, gk=gk, beta=beta, Akk=Akk, h=h, do=do, dh=dh, dv=dv, p=p, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    has_A, has_bias = A_log is not None, dt_bias is not None
    cfg_key = (p.varlen, p.gate, p.l2norm, p.beta_sigmoid, has_A, has_bias, p.g_dtype.itemsize, p.H, p.HV)
    dq, dk, dg = (torch.empty_like(gk, dtype=dtype) for dtype in (p.dtype, p.dtype, p.g_dtype))
    dbeta = torch.empty_like(beta, dtype=p.beta_dtype)
    dA = None if A_log is None else q_raw.new_empty(p.NT, 8, p.HV, dtype=torch.float32)
    dbias = None if dt_bias is None else q_raw.new_empty(p.NT, p.HV, p.K, dtype=torch.float32)
    f32, i64 = cutecall.absent(gk.device, torch.float32), cutecall.absent(gk.device, torch.int64)
    given = (q_raw, k_raw, gk, beta, *states, g_raw, A_log, dt_bias, q_rstd, k_rstd, dq, dk, dg, dbeta, dA, dbias)
    tensors = [f32 if x is None else cutecall.flat(x) for x in given]
    tensors += [i64 if x is None else x.reshape(-1) for x in (cu_seqlens, chunk_indices)]
    kernel = _compile(cfg_key, tuple(x.dtype for x in tensors))
    rows = 1 if p.varlen else p.B  # the grid's second axis
    kernel(*tensors, p.T, 0.0 if p.lower_bound is None else p.lower_bound, p.beta_scale, p.NT * p.HV // rows, rows)
    if p.varlen:
        launch(
            zero_tail_kernel, (ZERO_PROGRAMS.value,), dq, dk, dv_out, dg, dbeta, cu_seqlens, p.N, p.T,
            HV=p.HV, K=p.K, V=p.V, num_warps=4,
        )
    if p.HV != p.H:  # the norm is applied to a group's sum
        heads, (dq, dk), rows = (dq, dk), (torch.empty_like(x) for x in (q_raw, k_raw)), p.B * p.T * p.H
        launch(
            group_kernel, (triton.cdiv(rows, GROUP_ROWS), 2), *heads, q_raw, k_raw, q_rstd, k_rstd, dq, dk, cu_seqlens,
            p.N, rows, H=p.H, G=p.HV // p.H, K=p.K, NORM=p.l2norm, IS_VARLEN=p.varlen, BR=GROUP_ROWS, num_warps=4,
        )
    dA = None if dA is None else dA.sum((0, 1)).view_as(A_log)
    dbias = None if dbias is None else dbias.sum(0).view_as(dt_bias)
    return {"dq": dq, "dk": dk, "dv": dv_out, "dg": dg, "dbeta": dbeta, "dA_log": dA, "ddt_bias": dbias}


def run_log_gate(*, q_raw, k_raw, q_rstd, k_rstd, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(**locals(), g_raw=None, A_log=None, dt_bias=None)


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}


_GROUP = dict.fromkeys(("dq_heads", "dk_heads", "q_raw", "k_raw", "dq", "dk"), "*bf16") | {"N": "i32", "rows": "i32"}
_GROUP |= {"q_rstd": "*fp32", "k_rstd": "*fp32", "cu_seqlens": "*i64"}
COMPILE = [
    (group_kernel, _GROUP, {"H": 16, "G": G, "K": K, "NORM": norm, "IS_VARLEN": varlen, "BR": GROUP_ROWS}, 4, 1)
    for G, norm, varlen in ((2, True, False), (4, False, True))
]
