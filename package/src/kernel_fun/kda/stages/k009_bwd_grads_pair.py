"""All gradients of a chunk, in two kernels that meet in bf16.

Parent: 006 (its register-resident in-chunk products), 005 (its one pass over V).
Delta: the value side (Triton, wgmma) hands the key side (CuTe, mma.sync) bf16 operands instead of fp32 sums: dq and the
    two parts of dk from the boundary states, and the strictly lower gradients of Mqk and Mkk, which the products would
    round to bf16 anyway. dAqk is formed here, so nothing reads fla's. The gate's gradient takes the same bf16 values on
    both sides of its sum.
Why it should be faster: 005 writes and 006 reads 2.3 KB a token-head between them, this pair 1.2 KB: 4.6 GB less at B16
    T8192 H16 K128 V256, 1.1 of their 11.3 ms; and the value side needs neither q nor k.
Constraints: sm_90, K = 128, V a multiple of 64, bf16. Any gate (every exponent <= 0), any T, packed sequences, GVA.
"""

import functools

import cutlass
import cutlass.cute as cute
import torch
import triton
import triton.language as tl
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kernel_fun._common import ptx
from kernel_fun._common.problem import CHUNK

FAMILY = "kda"
K = 128  # key dimension
# value side
BV, VALUE_WARPS, VALUE_STAGES = 64, 8, 3
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


# ======================================================================================== value side: one pass over V
@triton.jit(do_not_specialize=["T"])
def value_kernel(
    gk, beta, Akk, do, v_new, dv, v, h,
    dh,  # in
    xq, xu, xd, D, E, diag, tail, yv,
    dv_out,  # out
    cu_seqlens, chunk_indices, scale, T, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, IS_VARLEN: tl.constexpr, STAGES: tl.constexpr,
):
    i_c, i_hv = (tl.program_id(0) // HV).to(tl.int64), (tl.program_id(0) % HV).to(tl.int64)  # chunk of the call, head
    if IS_VARLEN:
        i_n, i_t = tl.load(chunk_indices + i_c * 2).to(tl.int64), tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        row, n_t = bos + i_t * BT, tl.minimum(eos - bos - i_t * BT, BT).to(tl.int32)
    else:
        NT = tl.cdiv(T, BT)
        row, n_t = i_c // NT * T + i_c % NT * BT, tl.minimum(T - (i_c % NT) * BT, BT).to(tl.int32)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, BV)
    m_t = (o_t < n_t)[:, None]
    head, state = row * HV + i_hv, (i_c * HV + i_hv) * K
    # transposed (row s of b_At is column s of Akk); zero beyond the sequence, so y there is zero
    b_At = tl.load(Akk + head * BT + o_t[None, :] * (HV * BT) + o_t[:, None], mask=(o_t < n_t)[None, :], other=0.0)
    b_beta = tl.load(beta + head + o_t * HV, mask=o_t < n_t, other=0.0).to(tl.float32)
    b_xq = tl.zeros([BT, K], tl.float32)
    b_xu = tl.zeros([BT, K], tl.float32)
    b_xd = tl.zeros([BT, K], tl.float32)
    b_D = tl.zeros([BT, BT], tl.float32)
    b_E = tl.zeros([BT, BT], tl.float32)
    b_hh = tl.zeros([K], tl.float32)
    b_yv = tl.zeros([BT], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_tv = head * V + o_t[:, None] * (HV * V) + (i_v + o_v)[None, :]
        o_kv = state * V + o_k[:, None] * V + (i_v + o_v)[None, :]
        b_dv = tl.load(dv + o_tv, mask=m_t, other=0.0)
        b_h = tl.load(h + o_kv)
        b_do = tl.load(do + o_tv, mask=m_t, other=0.0)
        b_vn = tl.load(v_new + o_tv, mask=m_t, other=0.0)
        b_dh = tl.load(dh + o_kv)
        b_y = tl.dot(b_At, b_dv)  # gradient of the triangular system's right-hand side, over beta
        b_yl = b_y.to(b_do.dtype)
        b_xq = tl.dot(b_do, tl.trans(b_h), b_xq)
        b_xd = tl.dot(b_vn, tl.trans(b_dh), b_xd)
        b_xu = tl.dot(b_yl, tl.trans(b_h), b_xu)
        b_D = tl.dot(b_do, tl.trans(b_vn), b_D)
        b_hh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        # Subtracted, not accumulated, and last: the program then waits for its products here. h and dh also go to
        # registers, and such a load gets no spare buffer: the next copy would land in one that is still being read.
        b_E -= tl.dot(b_yl, tl.trans(b_vn))
        b_v = tl.load(v + o_tv, mask=m_t, other=0.0)
        b_yv += tl.sum(b_y * b_v.to(tl.float32), 1)
        tl.store(dv_out + o_tv, (b_beta[:, None] * b_y).to(dv_out.dtype.element_ty), mask=m_t)
    o_tt = head * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
    b_lower = o_t[:, None] > o_t[None, :]
    tl.store(D + o_tt, tl.where(b_lower, b_D * scale, 0.0).to(D.dtype.element_ty), mask=m_t)
    tl.store(E + o_tt, tl.where(b_lower, b_E, 0.0).to(E.dtype.element_ty), mask=m_t)
    b_diag = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_D, 0.0), 1) * scale
    tl.store(diag + head + o_t * HV, b_diag, mask=o_t < n_t)
    tl.store(yv + head + o_t * HV, b_yv, mask=o_t < n_t)
    # gk is read twice, and each time late: registers are short here
    o_tk = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
    p_g = (
        gk + head * K + tl.minimum(o_t, n_t - 1)[:, None] * (HV * K) + o_k[None, :]
    )  # a row beyond the end does not decay
    b_up = tl.exp2(tl.load(p_g))
    tl.store(xq + o_tk, (b_xq * b_up * scale).to(xq.dtype.element_ty), mask=m_t)
    tl.store(xu + o_tk, (-b_xu * b_up).to(xu.dtype.element_ty), mask=m_t)
    b_gn = tl.load(gk + head * K + (n_t - 1) * (HV * K) + o_k)
    tl.store(xd + o_tk, (b_xd * tl.exp2(b_gn[None, :] - tl.load(p_g))).to(xd.dtype.element_ty), mask=m_t)
    tl.store(tail + state + o_k, tl.exp2(b_gn) * b_hh)


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
    a0, a1, a2, a3 = block
    keep = Uint32(0) - Uint32(flag)
    mixed = [
        (x & keep) | (y & ~keep)
        for x, y in zip(
            block, (ptx.transpose(a0), ptx.transpose(a2), ptx.transpose(a1), ptx.transpose(a3)), strict=True
        )
    ]
    return mixed


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
    mQ: cute.Tensor, mK: cute.Tensor, mGk: cute.Tensor, mBeta: cute.Tensor, mXq: cute.Tensor, mXu: cute.Tensor,
    mXd: cute.Tensor, mD: cute.Tensor, mE: cute.Tensor, mDiag: cute.Tensor, mTail: cute.Tensor, mYv: cute.Tensor,
    mGraw: cute.Tensor, mAlog: cute.Tensor, mBias: cute.Tensor, mQr: cute.Tensor, mKr: cute.Tensor, oDq: cute.Tensor,
    oDk: cute.Tensor, oDg: cute.Tensor, oDb: cute.Tensor, oDA: cute.Tensor, oDbias: cute.Tensor, mCu: cute.Tensor,
    mChunks: cute.Tensor, T: Int32, H: Int32, HV: Int32, lower_bound: Float32, beta_scale: Float32,
    cfg: cutlass.Constexpr,
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
    dA = Float32(0.0)
    rate = one
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
            if const_expr(n < 8):
                flag = (r // n) % 2
                flags = [flag, flag]
            else:
                flags = [Int32(0), Int32(1)]
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
                    lo, hi = (
                        ptx.mma16(ptx.zeros(4), frag[0], (kb[0], qb[0])),
                        ptx.mma16(ptx.zeros(4), frag[1], (kb[1], qb[1])),
                    )
                    x, z = [lo[0], lo[1], hi[0], hi[1]], [lo[2], lo[3], hi[2], hi[3]]
                else:
                    d1, e1, e1t, d1t = frag[0]
                    lo, hi = (
                        ptx.mma16(ptx.zeros(4), (zero, e1t, zero, d1t), (kb[1], qb[1])),
                        ptx.mma8(ptx.zeros(4), (d1, e1), kb[0]),
                    )
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
        mQ: cute.Tensor, mK: cute.Tensor, mGk: cute.Tensor, mBeta: cute.Tensor, mXq: cute.Tensor, mXu: cute.Tensor,
        mXd: cute.Tensor, mD: cute.Tensor, mE: cute.Tensor, mDiag: cute.Tensor, mTail: cute.Tensor, mYv: cute.Tensor,
        mGraw: cute.Tensor, mAlog: cute.Tensor, mBias: cute.Tensor, mQr: cute.Tensor, mKr: cute.Tensor,
        oDq: cute.Tensor, oDk: cute.Tensor, oDg: cute.Tensor, oDb: cute.Tensor, oDA: cute.Tensor,
        oDbias: cute.Tensor, mCu: cute.Tensor, mChunks: cute.Tensor, T: Int32, H: Int32, HV: Int32,
        lower_bound: Float32, beta_scale: Float32, grid: Int32, stream,
    ):
        _kernel(
            mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mDiag, mTail, mYv, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk,
            oDg, oDb, oDA, oDbias, mCu, mChunks, T, H, HV, lower_bound, beta_scale, cfg,
        ).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=2, preferred_smem_carveout=100, stream=stream
        )

    return launch


_TYPES = {
    torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: Float32, torch.int64: Int64,
    torch.int32: Int32,
}


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
    if p.arch[0] != 9:
        return False, f"needs compute capability 9.x, got {p.arch[0]}.{p.arch[1]}"
    if p.K != K:
        return False, f"needs K={K}, got {p.K}"
    if p.V % BV:
        return False, f"needs V a multiple of {BV}, got {p.V}"
    if p.dtype != torch.bfloat16:
        return False, f"needs bf16 q, k, v, got {p.dtype}"
    if p.g_dtype not in (torch.bfloat16, torch.float32):
        return False, f"needs a bf16 or fp32 gate, got {p.g_dtype}"
    if p.beta_dtype not in _TYPES:
        return False, f"needs bf16, fp16 or fp32 beta, got {p.beta_dtype}"
    return True, ""


def _value_side(new, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices):
    """Tensors for the key side: dq, dk in beta kb, dk in kg (bf16 [B,T,HV,K]); D, E (bf16 [B,T,HV,64]); diag, tail,
    yv; and dv."""
    xq, xu, xd = (new(p.K, dtype=p.dtype) for _ in range(3))
    D, E, diag, yv = new(CHUNK, dtype=p.dtype), new(CHUNK, dtype=p.dtype), new(), new()
    tail, dv_out = v.new_empty(p.NT, p.HV, p.K, dtype=torch.float32), new(p.V, dtype=p.dtype)
    value_kernel[(p.NT * p.HV,)](
        gk, beta, Akk, do, v_new, dv, v, h, dh, xq, xu, xd, D, E, diag, tail, yv, dv_out, cu_seqlens, chunk_indices,
        p.scale, p.T, HV=p.HV, K=p.K, V=p.V, BT=CHUNK, BV=BV, IS_VARLEN=p.varlen, STAGES=VALUE_STAGES,
        num_warps=VALUE_WARPS, num_stages=VALUE_STAGES,
    )
    return (xq, xu, xd, D, E, diag, tail, yv), dv_out


def run(
    *, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, g_raw, A_log, dt_bias, q_rstd, k_rstd, p, cu_seqlens, chunk_indices
):
    """Tensors as in the chain's contract; returns dq, dk [B,T,H,K], dv, dg, dbeta in the inputs' dtypes, dA_log,
    ddt_bias."""

    def new(*shape, dtype=torch.float32):
        x = torch.empty(p.B, p.T, p.HV, *shape, dtype=dtype, device=q.device)
        if p.varlen:  # tokens after the last sequence belong to none: their gradient is zero
            x[:, cu_seqlens[-1] :] = 0
        return x

    states, dv_out = _value_side(new, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices)
    cfg_key = (
        p.varlen, p.gate, p.l2norm, p.beta_sigmoid, A_log is not None, dt_bias is not None, p.g_dtype.itemsize,
        p.HV != p.H,
    )
    dq, dk = (new(p.K, dtype=torch.float32 if p.HV != p.H else p.dtype) for _ in range(2))
    dg, dbeta = new(p.K, dtype=p.g_dtype), new(dtype=p.beta_dtype)
    dA = None if A_log is None else q.new_empty(p.NT, 8, p.HV, dtype=torch.float32)
    dbias = None if dt_bias is None else q.new_empty(p.NT, 4, p.HV, p.K, dtype=torch.float32)
    f32, i64 = _absent(q.device, torch.float32), _absent(q.device, torch.int64)
    given = (q, k, gk, beta, *states, g_raw, A_log, dt_bias, q_rstd, k_rstd, dq, dk, dg, dbeta, dA, dbias)
    tensors = [f32 if x is None else _flat(x) for x in given]
    tensors += [i64 if x is None else x.reshape(-1) for x in (cu_seqlens, chunk_indices)]
    kernel = _compile(cfg_key, tuple(x.dtype for x in tensors))
    kernel(*tensors, p.T, p.H, p.HV, 0.0 if p.lower_bound is None else p.lower_bound, p.beta_scale, p.NT * p.HV)
    if p.HV != p.H:
        group = (p.B, p.T, p.H, p.HV // p.H, p.K)
        dq, dk = dq.view(group).sum(3), dk.view(group).sum(3)
    return {
        "dq": dq,
        "dk": dk,
        "dv": dv_out,
        "dg": dg,
        "dbeta": dbeta,
        "dA_log": None if dA is None else dA.sum((0, 1)).view_as(A_log),
        "ddt_bias": None if dbias is None else dbias.sum((0, 1)).view_as(dt_bias),
    }


def run_log_gate(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, q_rstd, k_rstd, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(
        q=q, k=k, v=v, v_new=v_new, gk=gk, beta=beta, Akk=Akk, h=h, do=do, dh=dh, dv=dv, g_raw=None, A_log=None,
        dt_bias=None, q_rstd=q_rstd, k_rstd=k_rstd, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
    )


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}


_POINTERS = {
    **dict.fromkeys(("gk", "beta", "diag", "tail", "yv"), "*fp32"),
    **dict.fromkeys(("Akk", "do", "v_new", "dv", "v", "h", "dh", "xq", "xu", "xd", "D", "E", "dv_out"), "*bf16"),
}
COMPILE = [  # the value side; the key side is compiled by _compile
    (
        value_kernel,
        {**_POINTERS, "cu_seqlens": "*i64", "chunk_indices": "*i64", "scale": "fp32", "T": "i32"},
        {"HV": 16, "K": K, "V": V, "BT": CHUNK, "BV": BV, "IS_VARLEN": False, "STAGES": VALUE_STAGES},
        VALUE_WARPS,
        VALUE_STAGES,
    )
    for V in (128, 256)
]
