"""The backward's serial part in one launch: the states again, forwards, and their gradients, backwards, side by side.

Parent: 000 (replaces fla's recompute, re-scan, dAv and dhu).
Delta: neither scan needs w, u, qg or kg from memory: each builds kb = k 2^gk, kg = k 2^(G - gk), qg = q 2^gk (every
    exponent is <= 0) and applies Akk itself. Both carry the transposed state [V, K] in fp32 registers; its bf16 copy is
    the next product's first operand. Forwards r = beta (v - kb S), v_new = r + (Akk - I) r, S = 2^G S + kg^T v_new;
    backwards dv = Aqk^T do + kg dS, y = Akk^T dv, dS = 2^G dS + scale qg^T do - kb^T (beta y): three dependent products
    each. On Hopper (Gluon) a program is two warpgroups of 64 value columns; the next chunk's tiles arrive by TMA and
    become operands, in place, while this chunk's products run; its h or dh leaves from the dead gate tile.
Why it should be faster: 6.3 KB a token-head at K128 V256 and 4.2 KB at V128 instead of fla's 11 and 8.5 KB; the scans
    need nothing of each other, so a small batch fills twice as many SMs. dAqk needs all of V at once and has its own
    kernel (do, v_new in, fp32 out: 1.3 KB or 0.8 KB).
Constraints: K 64 or 128, V a multiple of 64, bf16 or fp16. Any gate, any T, packed sequences, GVA. Elsewhere than on
    sm_90, and for tensors beyond a descriptor's 32-bit coordinates, the same scans run as plain Triton.
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
BV = 128                   # value columns a program carries, 16 a warp; 64 where V is no multiple of it
A_BV, A_STAGES, A_WARPS = 64, 3, 4       # the dAqk kernel: value columns per step
barrier = getattr(gl, "barrier", None) or gl.thread_barrier      # its name since Triton 3.7, and before


# ------------------------------------------------------------------------------------------------- Hopper device code
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
    d_k, d_g, d_v, d_A, d_h, d_vn, p_g, p_beta, p_vn, b_S, bos, n_tok, i_c, i_h, i_hv, i_v,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr,
):
    """The state before each chunk, and v_new, from the transposed state b_S [BV, K] on."""
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
        state = g.index(s)._reinterpret(DT, [K, BV], d_h.layout)
        state.permute((1, 0)).store(b_Sb)
        b_v = v.index(s).permute((1, 0)).load(S64)
        b_b = betas.index(s).load(gl.SliceLayout(0, S64))
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(d_h, [(((i_c + i) * HV + i_hv) * K).to(gl.int32), i_v.to(gl.int32)], state)
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
        out.permute((1, 0)).store(b_vn)
        tma.store_wait(0)                                    # the state has left its tile
        fence_async_shared()
        barrier()                                            # and nobody reads k, v or A any more
        _fetch(
            d_k, d_g, d_v, d_A, d_k, d_A, k.index(s), g.index(s), v.index(s), A.index(s), k.index(s), A.index(s),
            bar.index(s), (row + 128).to(gl.int32), c_k, c_g, c_v, c_A, i + 2 < NT, K, BV, False, True, True,
        )
        _put_rows(d_vn, p_vn, out, row, i_hv * V + i_v, n_t, HV * V, BV, FULL, NW)
        _prepare(k.index(n), k.index(n), kg.index(n), g.index(n), b_gn, 0.0, n_n, 32, 32, P, False, FULL)
        _mask(v.index(n), n_n, BV, False, FULL, NW)
        _mask(A.index(n), n_n, 64, False, FULL, NW)
        decay.index(n).store(gl.exp2(b_gn))
        betas.index(n).store(b_beta)
        b_S = warpgroup_mma_wait(0, [x])
        tma.store_wait(0)
        fence_async_shared()
        barrier()
    for j in gl.static_range(2):
        mbarrier.invalidate(bar.index(j))


@gluon.jit
def _backwards(
    d_q, d_k, d_g, d_do, d_Aq, d_A, d_dh, d_dv, p_g, p_beta, p_dv, b_S, scale, bos, n_tok, i_c, i_h, i_hv, i_v,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, NW: gl.constexpr,
):
    """The gradient of the state after each chunk, and of v_new, from b_S [BV, K] back; returns the first state's."""
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
        state = g.index(s)._reinterpret(DT, [K, BV], d_dh.layout)
        state.permute((1, 0)).store(b_Sb)
        b_b = betas.index(s).load(gl.SliceLayout(0, S64))
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(d_dh, [(((i_c + i_t) * HV + i_hv) * K).to(gl.int32), i_v.to(gl.int32)], state)
        b_dvn = warpgroup_mma_wait(0, [x])
        b_dvb = b_dvn.to(DT)                                 # the unit diagonal of Akk meets an unrounded dvn
        x = warpgroup_mma(
            gl.convert_layout(b_dvb, A64), A.index(s), b_dvn - b_dvb.to(gl.float32), is_async=True,
        )
        b_S = b_S * decay.index(s).load(gl.SliceLayout(0, SK))[None, :]
        y = warpgroup_mma(do.index(s).permute((1, 0)), q.index(s), b_S, is_async=True)
        # under Akk^T dvn and qg^T do: dvn leaves, half of the next chunk
        out.permute((1, 0)).store(b_dvb)
        tma.store_wait(0)                                    # the gradient has left its tile
        fence_async_shared()
        barrier()                                            # and nobody reads kg or Aq any more
        _fetch(
            d_k, d_g, d_do, d_A, d_q, d_Aq, k.index(s), g.index(s), do.index(s), A.index(s), q.index(s), Aq.index(s),
            bar.index(s), (row - 128).to(gl.int32), c_k, c_g, c_v, c_A, i + 2 < NT, K, BV, True, True, False,
        )
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


@gluon.jit(do_not_specialize=["T", "N"])
def bwd_scan_hopper_kernel(
    d_q, d_k, d_v, d_g, d_Aq, d_A, d_do, d_h, d_vn, d_dh, d_dv,                # descriptors
    v_new, dv, gk, beta, h0, dht, dh0, cu_seqlens, chunk_offsets, scale, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_DHT: gl.constexpr, IS_VARLEN: gl.constexpr, FULL: gl.constexpr,
):
    NW: gl.constexpr = BV // 16
    NV: gl.constexpr = V // BV
    SK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, K, 16])
    pid = gl.program_id(0)
    i_v, i_hv, i_n = pid % NV * BV, (pid // NV % HV).to(gl.int64), pid // (NV * HV)
    i_h = i_hv // (HV // H)
    back = i_n < N                                           # the longer programs first
    i_n = (i_n % N).to(gl.int64)
    if IS_VARLEN:
        bos, eos = gl.load(cu_seqlens + i_n).to(gl.int64), gl.load(cu_seqlens + i_n + 1).to(gl.int64)
        i_c, n_tok = gl.load(chunk_offsets + i_n).to(gl.int64), (eos - bos).to(gl.int32)
    else:
        bos, n_tok, i_c = i_n * T, T, i_n * ((T + 63) // 64)
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, SK))[None, :]
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, SK))[:, None]
    o_state = (i_n * HV + i_hv) * K * V + i_v + o_k * V + o_v
    b_S = gl.zeros([BV, K], gl.float32, SK)
    if back:
        if HAS_DHT:
            b_S += gl.load(dht + o_state)
        b_S = _backwards(
            d_q, d_k, d_g, d_do, d_Aq, d_A, d_dh, d_dv, gk, beta, dv, b_S, scale, bos, n_tok, i_c, i_h, i_hv, i_v,
            HV, K, V, BV, FULL, NW,
        )
        if HAS_H0:
            gl.store(dh0 + o_state, b_S)
    else:
        if HAS_H0:
            b_S += gl.load(h0 + o_state)
        _forwards(
            d_k, d_g, d_v, d_A, d_h, d_vn, gk, beta, v_new, b_S, bos, n_tok, i_c, i_h, i_hv, i_v,
            HV, K, V, BV, FULL, NW,
        )


# ------------------------------------------------------------------------------------------------- Triton device code
@triton.jit
def _rows(x, row, col, n_t, STRIDE: tl.constexpr, C: tl.constexpr):
    """The [64, C] tile of a token tensor at (row, col); rows from n_t on are zero."""
    o_t = tl.arange(0, 64)
    p_x = x + row * STRIDE + col + o_t[:, None] * STRIDE + tl.arange(0, C)[None, :]
    return tl.load(p_x, mask=(o_t < n_t)[:, None], other=0.0)


@triton.jit
def _columns(row, col, STRIDE: tl.constexpr, C: tl.constexpr):
    """Offsets of that tile transposed, [C, 64]."""
    return row * STRIDE + col + tl.arange(0, 64)[None, :] * STRIDE + tl.arange(0, C)[:, None]


@triton.jit
def _keys(k, gk, beta, row, n_t, i_h, i_hv, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, DT: tl.constexpr):
    """kb, kg, 2^gk [64, K], 2^G [K] and beta [64] of a chunk; a row from n_t on does not decay and has k = 0."""
    o_t, o_k = tl.arange(0, 64), tl.arange(0, K)
    b_k = _rows(k, row, i_h * K, n_t, H * K, K)
    b_g = tl.load(gk + (row * HV + i_hv) * K + tl.minimum(o_t, n_t - 1)[:, None] * (HV * K) + o_k[None, :])
    b_gn = tl.load(gk + ((row + n_t - 1) * HV + i_hv) * K + o_k)
    b_beta = tl.load(beta + row * HV + i_hv + o_t * HV, mask=o_t < n_t, other=0.0).to(tl.float32)
    b_up = tl.exp2(b_g)
    return (b_k * b_up).to(DT), (b_k * tl.exp2(b_gn[None, :] - b_g)).to(DT), b_up, tl.exp2(b_gn), b_beta


@triton.jit(do_not_specialize=["T", "N"])
def bwd_scan_kernel(
    q, k, v, gk, beta, Aqk, Akk, do, h0, dht, h, v_new, dh, dv, dh0, cu_seqlens, chunk_offsets, scale, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr,
    HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr, IS_VARLEN: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    i_v, i_hv, i_n = pid % NV * BV, (pid // NV % HV).to(tl.int64), pid // (NV * HV)
    i_h = i_hv // (HV // H)
    back = i_n < N
    i_n = (i_n % N).to(tl.int64)
    if IS_VARLEN:
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        i_c, n_tok = tl.load(chunk_offsets + i_n).to(tl.int64), (eos - bos).to(tl.int32)
    else:
        bos, n_tok, i_c = i_n * T, T, i_n * tl.cdiv(T, 64)
    o_t, o_S = tl.arange(0, 64), tl.arange(0, K)[None, :] * V + tl.arange(0, BV)[:, None]
    o_state = (i_n * HV + i_hv) * K * V + i_v + o_S
    NT = tl.cdiv(n_tok, 64)
    b_S = tl.zeros([BV, K], tl.float32)
    if back:
        if HAS_DHT:
            b_S += tl.load(dht + o_state)
        for i in range(NT):
            i_t = NT - 1 - i
            row, n_t = bos + i_t * 64, tl.minimum(n_tok - i_t * 64, 64)
            b_kb, b_kg, b_up, b_decay, b_beta = _keys(k, gk, beta, row, n_t, i_h, i_hv, H, HV, K, DT)
            b_qg = (_rows(q, row, i_h * K, n_t, H * K, K) * (b_up * scale)).to(DT)
            b_A = _rows(Akk, row, i_hv * 64, n_t, HV * 64, 64)
            b_Aq = _rows(Aqk, row, i_hv * 64, n_t, HV * 64, 64)
            b_Aq = tl.where(o_t[:, None] >= o_t[None, :], b_Aq, 0.0).to(DT)
            o_x = _columns(row, i_hv * V + i_v, HV * V, BV)
            b_do = tl.load(do + o_x, mask=(o_t < n_t)[None, :], other=0.0)
            tl.store(dh + ((i_c + i_t) * HV + i_hv) * K * V + i_v + o_S, b_S.to(DT))
            b_dvn = tl.dot(b_S.to(DT), tl.trans(b_kg), tl.dot(b_do, b_Aq))
            b_dvb = b_dvn.to(DT)
            tl.store(dv + o_x, b_dvb, mask=(o_t < n_t)[None, :])
            b_y = tl.dot(b_dvb, b_A, b_dvn - b_dvb.to(tl.float32))
            b_S = tl.dot(b_do, b_qg, b_S * b_decay[None, :])
            b_S = tl.dot((b_y * -b_beta[None, :]).to(DT), b_kb, b_S)
        if HAS_H0:
            tl.store(dh0 + o_state, b_S)
    else:
        if HAS_H0:
            b_S += tl.load(h0 + o_state)
        for i_t in range(NT):
            row, n_t = bos + i_t * 64, tl.minimum(n_tok - i_t * 64, 64)
            b_kb, b_kg, _, b_decay, b_beta = _keys(k, gk, beta, row, n_t, i_h, i_hv, H, HV, K, DT)
            b_A = _rows(Akk, row, i_hv * 64, n_t, HV * 64, 64)
            o_x = _columns(row, i_hv * V + i_v, HV * V, BV)
            b_v = tl.load(v + o_x, mask=(o_t < n_t)[None, :], other=0.0).to(tl.float32)
            tl.store(h + ((i_c + i_t) * HV + i_hv) * K * V + i_v + o_S, b_S.to(DT))
            b_r = b_beta[None, :] * (b_v - tl.dot(b_S.to(DT), tl.trans(b_kb)))
            b_rb = b_r.to(DT)
            b_vn = tl.dot(b_rb, tl.trans(b_A), b_r - b_rb.to(tl.float32)).to(DT)
            tl.store(v_new + o_x, b_vn, mask=(o_t < n_t)[None, :])
            b_S = tl.dot(b_vn, b_kg, b_S * b_decay[None, :])


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
def supports(p):
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 64:
        return False, f"needs V a multiple of 64, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
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
    bv = 64 if p.V % BV else BV
    grid = (2 * p.N * p.HV * (p.V // bv),)
    shape = {
        "H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "BV": bv, "HAS_H0": h0 is not None, "HAS_DHT": dht is not None,
        "IS_VARLEN": p.varlen, "num_warps": bv // 16,
    }
    if p.arch == (9, 0) and max(p.B * p.T, p.NT * p.HV * p.K) < 2**31 and p.NT:
        widths = (p.K, p.K, bv, p.K, CHUNK, CHUNK, bv)
        inputs = [
            _tiles(x.view(p.B * p.T, -1), CHUNK, width)
            for x, width in zip((q, k, v, gk, Aqk, Akk, do), widths, strict=True)
        ]
        outputs = []
        for states, tokens in ((h, v_new), (dh, dv)):
            outputs += [_tiles(states.view(-1, p.V), p.K, bv), _tiles(tokens.view(p.B * p.T, -1), CHUNK, bv)]
        launch(
            bwd_scan_hopper_kernel, grid,
            *inputs, *outputs, v_new, dv, gk, beta, h0, dht, dh0, cu_seqlens, chunk_offsets, p.scale, p.T, p.N,
            FULL=not p.varlen and p.T % CHUNK == 0, **shape,
        )
    else:
        launch(
            bwd_scan_kernel, grid,
            q, k, v, gk, beta, Aqk, Akk, do, h0, dht, h, v_new, dh, dv, dh0, cu_seqlens, chunk_offsets,
            p.scale, p.T, p.N,
            DT={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[p.dtype], **shape,
        )
    out = {"h": h, "v_new": v_new, "dh": dh, "dh0": dh0, "dv": dv}
    if "dAqk" in wanted:                     # a later stage may form it itself
        out["dAqk"] = dAqk(do=do, v_new=v_new, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    return out


SPANS = {"bwd.recompute..bwd.dhu": run}
