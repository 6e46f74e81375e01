"""The backward's two scans with every tile asked for earlier: three tiles of keys, and nothing waits for what it does
not read.

Parent: 017-bwd-scan-one. Its arithmetic, its preparation of operands, its segments and join are here as they are.
Delta: k has three buffers and is asked for as a step begins, not when a step's products have let go of it. The third is
    where v_new and dv were staged: v_new now waits in Aqk's two buffers, for which the forward scan has no use, dv in
    the dead gate tile once dh has left it. The reverse scan multiplies do by q 2^gk first, and gives q, do and Akk back
    before its last product, not after it. The forward gate is asked for when h has left, not when v_new is ready. What
    only products read (v or do, Akk) is waited for by the products.
Why it should be faster: from the request for a tile of the chunk after next to the first wait for it, in steps, counted
    in instructions: forwards k and g 0.7, now 1.3 and 1.2; backwards k and q 0.25, now 1.2 and 0.7; g 1.0, now 0.95.
Constraints: 017's: sm_90, K 64 or 128, V a multiple of 64, bf16 or fp16; any gate, any T, packed sequences, GVA.
"""
import functools
from types import SimpleNamespace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernel_fun._common.launch import launch
from kernel_fun._common.problem import CHUNK
from kernel_fun._common.tiles import tiles
from kernel_fun.kda.stages.k012_bwd_split import ERASED, WALK, _token, dAqk, segment_plan
from kernel_fun.kda.stages.k017_bwd_scan_one import (
    _mask,
    _minus_beta,
    _norms,
    _prepare,
    _put_last,
    _tile,
    cut,
    join_kernel,
    reach_kernel,
    units,
)
from kernel_fun.kda.stages.k017_bwd_scan_one import _scan_job as _parents_job
from kernel_fun.kda.stages.k017_bwd_scan_one import supports as supports

FAMILY = "kda"
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier     # renamed in Triton 3.7


# ----------------------------------------------------------------------------------------------------- the copying warp
# Shapes in shared memory: k [64, K] of three chunks; of two, i and i + 1: q [64, K], g [64, K] fp32, x (v or do)
# [64, BV], Aq and A [64, 64]; kg [64, K] of one, forwards of two, where q would be. Forwards Aq holds v_new until it
# has left; in a dead g lies h, or dh and after it dv. A fetched tile is raw until `_prepare` has made it an operand.
# mbarriers, two of each but `left`. The copying warp says `ready` (what is prepared has come: k, g, backwards q, Aq),
# `late` (what only products read has: x, A), `left` (the last v_new has, or dh). It is told `staged` (h or dh lies in
# g; k of the chunk before is free), `half` (v_new or dv lies there; forwards x and A are free, backwards Aq), `whole`
# (backwards: q, x and A are).
# No circle: the tiles that a step waits for are asked for when the step before has told its last at the latest, and
# `left` follows `staged` of the same step with no other wait between. No phase is passed by: chunk i + 2's copies count
# towards the next phase of chunk i's barriers, and are asked for after step i has told `staged` or `half`, those of x
# and A after `half` or `whole`; by then all has waited for chunk i's, for `ready` in step i - 1, for `late` before x is
# multiplied.
@gluon.jit
def _leave(d_out, tile, n_tok, bos, t_out, c_x, BV: gl.constexpr, FULL: gl.constexpr):
    """v_new or dv of a full chunk; those of another are written by `_put_last`."""
    out = tile._reinterpret(d_out.dtype, [64, BV], d_out.layout)
    if FULL:
        tma.async_copy_shared_to_global(d_out, [(bos + t_out * 64).to(gl.int32), c_x], out)
    else:
        if n_tok - t_out * 64 >= 64:
            tma.async_copy_shared_to_global(d_out, [(bos + t_out * 64).to(gl.int32), c_x], out)


@gluon.jit
def _copies(
    d_q, d_k, d_x, d_g, d_Aq, d_A, d_state, d_out, k, q, g, x, Aq, A, ready, late, staged, half, whole, left,
    bos, n_tok, i_c, i_h, i_hv, i_v,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, EMIT: gl.constexpr,
    BACK: gl.constexpr,
):
    """All copies of one scan, each as soon as its buffer is free: step i - 2's results out, chunk i's tiles in."""
    READY: gl.constexpr = 64 * (8 * K + 128 if BACK else 6 * K)
    NT = (n_tok + 63) // 64
    c_k, c_g, c_A = (i_h * K).to(gl.int32), (i_hv * K).to(gl.int32), (i_hv * 64).to(gl.int32)
    c_x, c_v = (i_hv * V + i_v).to(gl.int32), i_v.to(gl.int32)
    for i in range(NT + 2):
        s, phase, on = i & 1, ((i >> 1) & 1) ^ 1, i < NT        # the first two waits are for what was never taken
        if BACK:
            row, t_out = (bos + (NT - 1 - i) * 64).to(gl.int32), NT + 1 - i
        else:
            row, t_out = (bos + i * 64).to(gl.int32), i - 2
        if EMIT:
            mbarrier.wait(staged.index(s), phase)
        else:
            mbarrier.wait(half.index(s), phase)              # nothing is staged where no chunk's state is wanted
        mbarrier.expect(ready.index(s), READY, pred=on)
        tma.async_copy_global_to_shared(d_k, [row, c_k], ready.index(s), k.index(i % 3), pred=on)
        if EMIT:
            if i >= 2:
                at = [(((i_c + t_out) * HV + i_hv) * K).to(gl.int32), c_v]
                tma.async_copy_shared_to_global(d_state, at, g.index(s)._reinterpret(k.dtype, [K, BV], d_state.layout))
                tma.store_wait(0)                            # g is free, forwards of h, and Aq of the last v_new
                barrier()
                mbarrier.arrive(left, count=1, pred=i > (1 if BACK else 2))
            if BACK:
                mbarrier.wait(half.index(s), phase)
                if i >= 2:
                    _leave(d_out, g.index(s), n_tok, bos, t_out, c_x, BV, FULL)
                    tma.store_wait(0)                        # g is free of dv
                    barrier()
        tma.async_copy_global_to_shared(d_g, [row, c_g], ready.index(s), g.index(s), pred=on)
        if BACK:
            tma.async_copy_global_to_shared(d_Aq, [row, c_A], ready.index(s), Aq.index(s), pred=on)
            mbarrier.wait(whole.index(s), phase)
            tma.async_copy_global_to_shared(d_q, [row, c_k], ready.index(s), q.index(s), pred=on)
        elif EMIT:
            mbarrier.wait(half.index(s), phase)
        mbarrier.expect(late.index(s), 128 * (BV + 64), pred=on)
        tma.async_copy_global_to_shared(d_x, [row, c_x], late.index(s), x.index(s), pred=on)
        tma.async_copy_global_to_shared(d_A, [row, c_A], late.index(s), A.index(s), pred=on)
        if EMIT and not BACK:  # noqa: SIM102
            if i >= 2:
                _leave(d_out, Aq, n_tok, bos, t_out, c_x, BV, FULL)
    tma.store_wait(0)


# ------------------------------------------------------------------------------------------------------------ the scans
@gluon.jit
def _forwards(
    d_state, d_out, k, kg, g, v, Aq, A, decay, betas, ready, late, staged, half, left, p_g, p_beta, p_rk, p_vn, b_S,
    bos, n_tok, i_h, i_hv, i_v, has_v,
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
    out = Aq._reinterpret(DT, [64, BV], d_out.layout)
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
    decay.store(gl.exp2(b_gn))
    betas.store(b_beta)
    fence_async_shared()
    barrier()

    for i in range(NT):
        s, n, more = i & 1, (i & 1) ^ 1, i + 1 < NT
        k_n, kg_n, g_n = k.index((i + 1) % 3), kg.index(n), g.index(n)
        row, n_t, n_n = bos + i * 64, gl.minimum(n_tok - i * 64, 64), gl.minimum(n_tok - i * 64 - 64, 64)
        b_gn = gl.load(p_g + ((row + 64 + n_n - 1) * HV + i_hv) * K + o_k, mask=(o_k >= 0) & more, other=0.0)
        b_beta = gl.load(p_beta + (row + 64 + o_t) * HV + i_hv, mask=o_t < n_n, other=0.0).to(gl.float32)
        b_lo = _norms(p_rk, row + 64, i_h, n_n, 0, P, H, NORM)
        b_hi = _norms(p_rk, row + 64, i_h, n_n, 32, P, H, NORM)
        b_Sb = b_S.to(DT)
        x = warpgroup_mma(
            gl.convert_layout(b_Sb, A64), k.index(i % 3).permute((1, 0)), gl.zeros([BV, 64], gl.float32, S64),
            use_acc=False, is_async=True,
        )
        # under kb S: the state to its tile
        if EMIT:
            g.index(s)._reinterpret(DT, [K, BV], d_state.layout).permute((1, 0)).store(b_Sb)
            fence_async_shared()
            barrier()
            mbarrier.arrive(staged.index(s), count=1)
        mbarrier.wait(late.index(s), (i >> 1) & 1)            # v and Akk have come
        if not FULL:  # noqa: SIM102  (compile-time and run-time conditions)
            if n_t < 64:
                _mask(v.index(s), n_t, BV, False, FULL, NW)
                _mask(A.index(s), n_t, 64, False, FULL, NW)
                fence_async_shared()
                barrier()
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
        barrier()                                            # nobody reads v or A any more
        mbarrier.arrive(half.index(s), count=1)
        if EMIT:
            _put_last(p_vn, out, row, i_hv * V + i_v, n_t, HV * V, BV, FULL, NW)
        _prepare(k_n, k_n, kg_n, g_n, b_gn, b_gn, b_hi, b_hi, n_n, 32, 32, P, False, FULL, NORM)
        decay.store(gl.exp2(b_gn))
        betas.store(b_beta)
        b_S = warpgroup_mma_wait(0, [x])
        fence_async_shared()
        barrier()
    return b_S


@gluon.jit
def _backwards(
    d_state, d_out, k, q, kg, g, do, Aq, A, decay, ready, late, staged, half, whole, left, p_g, p_beta, p_rk, p_rq,
    p_dv, b_S, unit, bos, n_tok, i_h, i_hv, i_v,
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
    if not FULL:
        mbarrier.wait(late.index(0), 0, pred=NT > 0)
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
        b_S = b_S * decay.load(gl.SliceLayout(0, SK))[None, :]          # not under a product: ptxas would add a wait
        x = warpgroup_mma(                                   # this product first: the other way round ptxas adds a wait
            gl.convert_layout(b_Sb, A64), kg.permute((1, 0)), gl.zeros([BV, 64], gl.float32, S64),
            use_acc=False, is_async=True,
        )
        # under kg dS: the state's gradient to its tile
        if EMIT:
            g.index(s)._reinterpret(DT, [K, BV], d_state.layout).permute((1, 0)).store(b_Sb)
            fence_async_shared()
            barrier()
            mbarrier.arrive(staged.index(s), count=1)
        mbarrier.wait(late.index(s), (i >> 1) & 1)            # do and Akk have come
        x = warpgroup_mma(do.index(s).permute((1, 0)), Aq.index(s), x, is_async=True)
        y = warpgroup_mma(do.index(s).permute((1, 0)), q.index(s), b_S, is_async=True)
        b_dvn = warpgroup_mma_wait(1, [x])
        b_dvb = b_dvn.to(DT)                                 # the unit diagonal of Akk meets an unrounded dvn
        x = warpgroup_mma(
            gl.convert_layout(b_dvb, A64), A.index(s), b_dvn - b_dvb.to(gl.float32), is_async=True,
        )
        # under (q 2^gk)^T do and Akk^T dvn: dvn leaves, half of the next chunk
        if EMIT:
            mbarrier.wait(left, i & 1)                       # the state's gradient has
            out = g.index(s)._reinterpret(DT, [64, BV], d_out.layout)
            out.permute((1, 0)).store(b_dvb)
        fence_async_shared()
        barrier()                                            # nobody reads kg or Aq any more
        if EMIT and not FULL:  # noqa: SIM102
            if i == 0:
                _put_last(p_dv, out, row, i_hv * V + i_v, n_t, HV * V, BV, FULL, NW)
                barrier()                                    # g is fetched over it
        mbarrier.arrive(half.index(s), count=1)
        mbarrier.wait(ready.index(n), ((i + 1) >> 1) & 1, pred=more)
        k_n, q_n, g_n = k.index((i + 1) % 3), q.index(n), g.index(n)
        _prepare(k_n, q_n, kg, g_n, b_gn, b_lo, k_lo, q_lo, 64, 0, 32, P, True, True, NORM, GAIN)
        b_y, y = warpgroup_mma_wait(0, [x, y])
        y = warpgroup_mma(gl.convert_layout(b_y.to(DT), AK), k.index(i % 3), y, is_async=True)
        # under kb'^T y: the other half
        barrier()                                            # nobody reads q, do or A any more
        mbarrier.arrive(whole.index(s), count=1)
        _prepare(k_n, q_n, kg, g_n, b_gn, b_hi, k_hi, q_hi, 64, 32, 32, P, True, True, NORM, GAIN)
        _mask(Aq.index(n), 64, 64, True, True, NW)
        decay.store(gl.exp2(b_gn))
        b_S = warpgroup_mma_wait(0, [y])
        fence_async_shared()
        barrier()
    return b_S


@gluon.jit
def _scan(
    d_dh, d_dv, k, q, kg, g, x, Aq, A, decay, betas, ready, late, staged, half, whole, left,
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
            d_dh, d_dv, k, q, kg, g, x, Aq, A, decay, ready, late, staged, half, whole, left, gk, beta, k_rstd, q_rstd,
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
            d_dh, d_dv, k, q, g, x, Aq, A, decay, betas, ready, late, staged, half, left, gk, beta, k_rstd, v_new, b_S,
            bos, n_tok, i_h, i_hv, i_v, has_v, H, HV, K, V, BV, FULL, EMIT, NORM, NW,
        )
    if not EMIT:
        gl.store(parts + (p_parts + column), b_S, mask=(o_v < keep * BV) & (o_k >= 0))


@gluon.jit
def _copies_of(
    d_q, d_k, d_v, d_g, d_Aq, d_A, d_do, d_h, d_vn, d_dh, d_dv, k, q, g, x, Aq, A, ready, late, staged, half, whole,
    left, bos, n_tok, i_c, i_h, i_hv, i_v, back,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FULL: gl.constexpr, EMIT: gl.constexpr,
):
    if back > 0:
        _copies(
            d_q, d_k, d_do, d_g, d_Aq, d_A, d_dh, d_dv, k, q, g, x, Aq, A, ready, late, staged, half, whole, left,
            bos, n_tok, i_c, i_h, i_hv, i_v, HV, K, V, BV, FULL, EMIT, True,
        )
    else:
        _copies(
            d_k, d_k, d_v, d_g, d_A, d_A, d_h, d_vn, k, q, g, x, Aq, A, ready, late, staged, half, whole, left,
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

    k = gl.allocate_shared_memory(DT, [3, 64, K], d_k.layout)
    q = gl.allocate_shared_memory(DT, [2, 64, K], d_q.layout)
    kg = gl.allocate_shared_memory(DT, [64, K], d_k.layout)
    g = gl.allocate_shared_memory(gl.float32, [2, 64, K], d_g.layout)
    x = gl.allocate_shared_memory(DT, [2, 64, BV], d_do.layout)
    Aq = gl.allocate_shared_memory(DT, [2, 64, 64], d_Aq.layout)
    A = gl.allocate_shared_memory(DT, [2, 64, 64], d_A.layout)
    decay = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    late = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    half = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    whole = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for j in gl.static_range(2):
        mbarrier.init(ready.index(j), count=1)
        mbarrier.init(late.index(j), count=1)
        mbarrier.init(staged.index(j), count=1)
        mbarrier.init(half.index(j), count=1)
        mbarrier.init(whole.index(j), count=1)
    mbarrier.init(left, count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_scan, (d_dh, d_dv, k, q, kg, g, x, Aq, A, decay, betas, ready, late, staged, half, whole, left,
                 v_new, dv, gk, beta, q_rstd, k_rstd, h0, dht, dh0, parts, unit, bos, n_tok, i_h, i_hv, i_v, has_v,
                 back, first, last, used, keep, p_state, p_parts, column,
                 H, HV, K, V, BV, HAS_H0, HAS_DHT, FULL, CUT, EMIT, NORM, GAIN)),
        (_copies_of, (d_q, d_k, d_v, d_g, d_Aq, d_A, d_do, d_h, d_vn, d_dh, d_dv, k, q, g, x, Aq, A,
                      ready, late, staged, half, whole, left, bos, n_tok, i_c, i_h, i_hv, i_v, back.to(gl.int32),
                      HV, K, V, BV, FULL, EMIT)),
    ], [1], [24])
    for j in gl.static_range(2):
        mbarrier.invalidate(ready.index(j))
        mbarrier.invalidate(late.index(j))
        mbarrier.invalidate(staged.index(j))
        mbarrier.invalidate(half.index(j))
        mbarrier.invalidate(whole.index(j))
    mbarrier.invalidate(left)


# ----------------------------------------------------------------------------------------------------------- host code
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
    of = _of(p, h0 is not None, dht is not None)
    h, dh = (v.new_empty(of.states, dtype=p.dtype) for _ in range(2))
    v_new, dv = (_token(v, p, cu_seqlens, p.V, p.dtype) for _ in range(2))
    dh0 = None if h0 is None else torch.empty_like(h0)
    segments = reach = parts = None
    if of.few:
        segments = torch.empty(of.n, 5, dtype=torch.int64, device=v.device)
        reach = torch.empty(2, of.n, p.HV, dtype=torch.int32, device=v.device)
        parts = torch.empty(of.n, p.HV, p.K, 2 * p.V + p.K, dtype=torch.float32, device=v.device)
        launch(
            reach_kernel, of.reach_grid,
            k_raw, k_rstd, gk, beta, cu_seqlens, chunk_offsets, segments, reach, p.T, p.N, of.n, of.L, of.P, **of.reach,
        )
    keys = [tiles(x, columns, CHUNK, p.K) for x, columns in ((q_raw, of.K), (k_raw, of.K), (gk, of.G))]
    scores = [tiles(x, of.A, CHUNK, CHUNK) for x in (Aqk, Akk)]

    def values_of(bv):
        """The other descriptors, as the kernel takes them, for BV columns a program."""
        t_v, t_do, t_vn, t_dv = (tiles(x, of.V, CHUNK, bv) for x in (v, do, v_new, dv))
        t_h, t_dh = (tiles(x, p.V, p.K, bv) for x in (h, dh))
        return keys[0], keys[1], t_v, keys[2], *scores, t_do, t_h, t_vn, t_dh, t_dv

    others = (
        v_new, dv, gk, beta, q_rstd, k_rstd, h0, dht, dh0, cu_seqlens, chunk_offsets, segments, reach, parts, of.unit,
        p.T, of.n,
    )
    emitting = values_of(of.emit["BV"])
    if of.few:
        building = emitting if of.build["BV"] == of.emit["BV"] else values_of(of.build["BV"])
        launch(scan_kernel, of.build_grid, *building, *others, **of.build)
        launch(join_kernel, of.join_grid, parts, reach, chunk_offsets, p.T, of.n, of.L, of.P, **of.join)
    launch(scan_kernel, of.emit_grid, *emitting, *others, **of.emit)
    out = {"h": h, "v_new": v_new, "dh": dh, "dh0": dh0, "dv": dv}
    if "dAqk" in wanted:                     # a later stage may form it itself
        out["dAqk"] = dAqk(do=do, v_new=v_new, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    return out


@functools.lru_cache(maxsize=4096)  # packed batches are a new problem nearly every time
def _of(p, has_h0, has_dht):
    """What launches for a problem have in common: columns of its matrices, segments, grids and constants."""
    few, (L, P, n) = cut(p), (0, 0, p.N)
    if few:
        L, P, n = segment_plan(p)
    unit, gain = units(p)
    shape = {"HV": p.HV, "K": p.K, "VARLEN": p.varlen}

    def scan(bv, columns, emit):
        """BV columns of `columns` a program."""
        return (columns // bv * p.HV * n,), shape | {
            "H": p.H, "V": p.V, "BV": bv, "HAS_H0": has_h0, "HAS_DHT": has_dht,
            "FULL": not p.varlen and p.T % CHUNK == 0, "CUT": few, "EMIT": emit, "NORM": p.l2norm, "GAIN": gain,
            "num_warps": bv // 16,
        }

    build_grid, build = scan(min(_tile(p), p.K), 2 * p.V + p.K, False)
    emit_grid, emit = scan(_tile(p), 2 * p.V, True)
    return SimpleNamespace(
        states=(p.B, p.chunks_per_row, p.HV, p.K, p.V), K=p.H * p.K, G=p.HV * p.K, V=p.HV * p.V, A=p.HV * CHUNK,
        few=few, n=n, L=L, P=P, unit=unit, build_grid=build_grid, build=build, emit_grid=emit_grid, emit=emit,
        reach_grid=(2 * n * p.HV,),
        reach=shape | {"H": p.H, "NORM": p.l2norm, "ERASED": ERASED, "WALK": WALK, "num_warps": 8},
        join_grid=(2 * (p.V // 32) * p.HV * p.N,), join=shape | {"V": p.V, "BV": 32, "MOST": 256, "num_warps": 8},
    )


SPANS = {"bwd.recompute..bwd.dhu": run}


def _scan_job(*args, **kw):
    return scan_kernel, *_parents_job(*args, **kw)[1:]


COMPILE = [
    _scan_job(False, True, True, V=256),
    _scan_job(False, True, False),
    _scan_job(False, True, True, K=64, V=192, BV=64, half="fp16"),
    _scan_job(False, True, False, K=64),
    _scan_job(False, True, True, V=64, BV=64),
    _scan_job(True, True, True),
    _scan_job(True, True, False),
    _scan_job(True, False, True),
    _scan_job(True, False, False, K=64, V=64, BV=64),
]
