"""The in-chunk gradients in registers: each warp keeps its 16 rows, and the chain closes to the raw inputs in place.

Parent: 000 (replaces fla's intra backward, GVA sum, reverse cumsum, gate, norm and beta backward).
Delta: a dyadic cover of the chunk. At half-size n (1, 2, 4, .. 32) the second half of every 2n-row block meets its
    first half through the row m between them, so every exponent is -|gk_r - gk_m| <= 0 at any gate. Up to n = 8 both
    halves live in one warp: operands go from accumulator to B fragment by movmatrix and nothing is shared; n = 16 and
    32 exchange bf16 tiles through shared memory. Then the suffix sum of dg, the gate's, the norm's and the sigmoid's
    derivative, each element still in its register.
Why it should be faster: fla gives every 16 x 32 tile its own program: 14.8 ms for intra and 2.2 ms for the passes after
    it at B16 T8192 H16 K128. Read once and written once this is 4.1 KB a token-head, 8.6 GB, 2.1 ms; six exponentials
    an element, 7k issue slots a chunk, about 1 ms.
Constraints: sm_90, K = 128, bf16 q and k. Any gate, any T, packed sequences, GVA.
"""

import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kernel_fun._common import ptx

FAMILY = "kda"
K = 128  # key dimension
COLS = 16  # columns a warp holds at a time; a thread has 4 consecutive ones in two rows
SLABS = 4  # of COLS columns for each of the two column halves: 8 warps = 4 row blocks x 2 column halves
THREADS = 256
TILE = 16 * 48  # bytes of a 16 x 16 bf16 exchange tile; rows 48 bytes apart, so ldmatrix meets no bank twice
EXCHANGE = 12 * TILE  # per column half: kx of 4 warps and qx of 2 target warps, at n = 16 and at n = 32
STASH = 64 * K * 4  # fp32 dq or dk, until the row dots for the norm are known
FRAGS = 13 * 128 * 16  # A fragments, 16 bytes a thread each: 6 for n = 16, 32 and 7 below; the column halves share them
SMEM = 2 * EXCHANGE + FRAGS + 2 * STASH + 2 * 4 * COLS * 4 + 2 * 3 * 64 * 4
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


# --------------------------------------------------------------------------------------- A fragments of dAqk and dAkk
def _block(base, stride, row, col, r, c, n_t):
    """The [16,16] block at (row, col) of a [64,64] fp32 matrix as packed A fragments; rows from n_t on are 0."""
    frags = []
    for dr, dc in ((0, 0), (8, 0), (0, 8), (8, 8)):
        at = row + r + dr
        x = ptx.load("f32", 2, Float32, base, cutlass.min(at, n_t - 1) * stride + col + c + dc, 4)
        keep = Uint32(0) - Uint32(at < n_t)
        frags.append(ptx.pack(*x) & keep)
    return frags


def _toward(flag, block):
    """The block itself for a target warp, its transpose for a source warp."""
    a0, a1, a2, a3 = block
    keep = Uint32(0) - Uint32(flag)
    mixed = [
        (x & keep) | (y & ~keep)
        for x, y in zip(block, [ptx.transpose(a) for a in (a0, a2, a1, a3)], strict=True)
    ]
    return mixed


def _level_mask(r, c, i):
    """Halfword mask of the pairs (r, c), (r, c + 1) inside an 8x8 block that meet at half-size 2^i."""
    lo = Uint32(((r ^ c) >> i) == 1)
    hi = Uint32(((r ^ (c + 1)) >> i) == 1)
    return (Uint32(0) - lo) & Uint32(0xFFFF) | (Uint32(0) - hi) & Uint32(0xFFFF0000)


def _strict_lower(r, c):
    lo, hi = Uint32(r > c), Uint32(r > c + 1)
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


def _finish(cfg, aOut, iG, aIn, iQ, stash, rstd, dot):
    """Four columns of one row of dq or dk: from the stash, through the norm, to memory."""
    dy = ptx.lds4(stash)
    if cfg.l2norm:
        lo, hi = ptx.ld2(aIn, iQ)
        dy = [rstd * (d - y * dot) for d, y in zip(dy, [*ptx.unpack(lo), *ptx.unpack(hi)], strict=True)]
    (ptx.st2 if cfg.dq_bytes == 2 else ptx.st4)(aOut, iG, dy)


@cute.kernel
def _kernel(
    mQ: cute.Tensor, mK: cute.Tensor, mGk: cute.Tensor, mBeta: cute.Tensor, mDAqk: cute.Tensor, mDAkk: cute.Tensor,
    mDq: cute.Tensor, mDk: cute.Tensor, mDb: cute.Tensor, mDg: cute.Tensor, mGraw: cute.Tensor, mAlog: cute.Tensor,
    mBias: cute.Tensor, mQr: cute.Tensor, mKr: cute.Tensor, oDq: cute.Tensor, oDk: cute.Tensor, oDg: cute.Tensor,
    oDb: cute.Tensor, oDA: cute.Tensor, oDbias: cute.Tensor, mCu: cute.Tensor, mChunks: cute.Tensor, T: Int32,
    H: Int32, HV: Int32, lower_bound: Float32, beta_scale: Float32, cfg: cutlass.Constexpr,
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
    aG, aDq, aDk = (x.iterator.toint() + head * (K * 4) for x in (mGk, mDq, mDk))
    aDg, aX = mDg.iterator.toint() + head * (K * 4), mGraw.iterator.toint() + head * (K * cfg.g_bytes)
    aDA, aE = mDAqk.iterator.toint() + head * 256, mDAkk.iterator.toint() + head * 256
    aOg = oDg.iterator.toint() + head * (K * cfg.g_bytes)
    sQ, sG, sA = H * K, HV * K, HV * 64
    col0 = half * 64 + lc * 4  # the thread's first column in slab 0

    smem = cute.arch.alloc_smem(Uint32, SMEM // 4, 16).toint()
    s_exchange = smem + half * EXCHANGE
    s_frag = smem + 2 * EXCHANGE + (w * 32 + lane) * 16
    s_stash = smem + 2 * EXCHANGE + FRAGS + tid * 16
    s_total = smem + 2 * EXCHANGE + FRAGS + 2 * STASH + half * (4 * COLS * 4)
    s_dots = smem + 2 * EXCHANGE + FRAGS + 2 * STASH + 2 * 4 * COLS * 4

    # ------------------------------------------------------------------------ A fragments, once per chunk
    low = _strict_lower(r, c)
    row0 = w * 16
    D, E = _block(aDA, sA, row0, row0, r, c, n_t), _block(aE, sA, row0, row0, r, c, n_t)
    d_diag = []  # dAqk[r,r], for the two rows
    for dr in range_constexpr(2):
        diag = cutlass.min(row0 + r + 8 * dr, n_t - 1)
        d_diag.append(ptx.load("f32", 1, Float32, aDA, diag * sA + diag, 4))
    D0, D3, E0, E3 = D[0] & low, D[3] & low, E[0] & low, E[3] & low
    Dt0, Dt3 = ptx.transpose(D0), ptx.transpose(D3)
    Es0, Es3 = E0 | ptx.transpose(E0), E3 | ptx.transpose(E3)
    zero = Uint32(0)
    for i in range_constexpr(3):  # n = 1, 2, 4: the two 8x8 blocks on the diagonal
        mask = _level_mask(r, c, i)
        for slot, (x_d, x_e, x_t) in enumerate(((D0, Es0, Dt0), (D3, Es3, Dt3))):
            ptx.sts_frag(s_frag + (6 + 2 * i + slot) * 2048, (x_d & mask, x_e & mask, zero, x_t & mask))
    ptx.sts_frag(s_frag + 12 * 2048, (D[1], E[1], ptx.transpose(E[1]), ptx.transpose(D[1])))  # n = 8
    odd, top = w % 2, w // 2  # is this warp a target at n = 16, at n = 32
    hi16, lo16 = w | 1, w & 2  # the pair of row blocks that meet at n = 16: rows of hi, columns of lo
    for slot, a in enumerate((aDA, aE)):
        ptx.sts_frag(s_frag + slot * 2048, _toward(odd, _block(a, sA, hi16 * 16, lo16 * 16, r, c, n_t)))
        for i in range_constexpr(2):  # partners 0, 1 for target warps, 2, 3 for source warps
            row = (top * w + (1 - top) * (2 + i)) * 16
            col = (top * i + (1 - top) * w) * 16
            ptx.sts_frag(s_frag + (2 + 2 * i + slot) * 2048, _toward(top, _block(a, sA, row, col, r, c, n_t)))

    rows = [row0 + r, row0 + r + 8]
    live = [rows[0] < n_t, rows[1] < n_t]
    at = [cutlass.min(rows[0], n_t - 1), cutlass.min(rows[1], n_t - 1)]
    one = Float32(1.0)
    beta = []
    for i in range_constexpr(2):
        b = Float32(mBeta[head + Int64(at[i]) * HV])
        beta.append(ptx.pick(Int32(live[i]), b, Float32(0.0)))
    ld_lane = (lane % 8 + (lane // 8) % 2 * 8) * 48 + lane // 16 * 16  # ldmatrix row address of this lane in a tile
    st_lane = r * 48 + lc * 4

    db0, db1, qd0, qd1, kd0, kd1 = ptx.zeros(6)
    dA = Float32(0.0)
    rate = one
    if const_expr(cfg.has_A):
        rate = ptx.ex2(Float32(mAlog[hv]) * LOG2_E)
    for s in cutlass.range(SLABS, unroll=1):
        db, qd, kd = [db0, db1], [qd0, qd1], [kd0, kd1]
        col = col0 + s * COLS
        iG, iQ = [x * sG + col for x in at], [x * sQ + col for x in at]
        # ---------------------------------------------------------------- this slab's q, k, gk
        q, k, g = [[], []], [[], []], [[], []]
        for i in range_constexpr(2):
            keep = Uint32(0) - Uint32(live[i])
            xq, xk, xg = ptx.ld2(aQ, iQ[i]), ptx.ld2(aK, iQ[i]), ptx.ld4(aG, iG[i])
            for jj in range_constexpr(2):
                q[jj].append(xq[jj] & keep)
                k[jj].append(xk[jj] & keep)
                g[jj] += [xg[2 * jj], xg[2 * jj + 1]]

        s_gk = smem + 2 * EXCHANGE + FRAGS + (s * (2 * THREADS) + warp * 32 + lc) * 16
        for i in range_constexpr(2):
            ptx.sts4(s_stash + (s * 2 + i) * (THREADS * 16), [*g[0][2 * i : 2 * i + 2], *g[1][2 * i : 2 * i + 2]])
        cute.arch.sync_warp()
        # the next slab on its way to L2
        for i in range_constexpr(2):
            for base, at_i, size in (
                (aQ, iQ[i], 2),
                (aK, iQ[i], 2),
                (aG, iG[i], 4),
                (aDq, iG[i], 4),
                (aDk, iG[i], 4),
                (aDg, iG[i], 4),
            ):
                ptx.prefetch(base, at_i + COLS, size)

        # ---------------------------------------------------------------- operands for other warps: n = 16 and 32
        g16 = ptx.ld4(aG, cutlass.min(lo16 * 16 + 15, n_t - 1) * sG + col)
        g32 = ptx.ld4(aG, cutlass.min(31, n_t - 1) * sG + col)
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
                    lo, hi = (ptx.mma16(ptx.zeros(4), frag[j], (kb[j], qb[j])) for j in range(2))
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
        g16 = ptx.ld4(aG, cutlass.min(lo16 * 16 + 15, n_t - 1) * sG + col)
        g32 = ptx.ld4(aG, cutlass.min(31, n_t - 1) * sG + col)
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

        # ------------------------------------------------------------- add what came in; row dots; stash for the norm
        cute.arch.sync_warp()  # all lanes are done with gk in the stash
        for i in range_constexpr(2):
            live_f = ptx.pick(Int32(live[i]), one, Float32(0.0))
            xq, xk, xg = ptx.ld4(aDq, iG[i]), ptx.ld4(aDk, iG[i]), ptx.ld4(aDg, iG[i])
            yq, yk = [], []
            for jj in range_constexpr(2):
                dq, dk, dg = acc[jj]
                qf, kf = ptx.unpack(q[jj][i]), ptx.unpack(k[jj][i])
                for e in range_constexpr(2):
                    j = 2 * i + e
                    dqe = dq[j] + xq[2 * jj + e] + d_diag[i] * kf[e]
                    dke = dk[j] + xk[2 * jj + e] + d_diag[i] * qf[e]
                    dg[j] = dg[j] + xg[2 * jj + e] * live_f
                    qd[i] = qd[i] + qf[e] * dqe
                    kd[i] = kd[i] + kf[e] * dke
                    yq.append(dqe)
                    yk.append(dke)
            ptx.sts4(s_stash + (s * 2 + i) * (THREADS * 16), yq)
            ptx.sts4(s_stash + STASH + (s * 2 + i) * (THREADS * 16), yk)

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
        if r == 0:
            ptx.sts4(s_total + (w * COLS + lc * 4) * 4, dg[0])
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=THREADS // 2)
        for later in range_constexpr(1, 4):
            x = ptx.lds4(s_total + (later * COLS + lc * 4) * 4)
            use = ptx.pick(Int32(later > w), one, Float32(0.0))
            for e in range_constexpr(4):
                add = use * x[e]
                dg[0][e] = dg[0][e] + add
                dg[1][e] = dg[1][e] + add

        # ---------------------------------------------------------------- through the gate, and out
        bias = ptx.zeros(4)
        if const_expr(cfg.has_bias):
            bias = ptx.ld4(mBias.iterator.toint(), hv * K + col)
        dbias = ptx.zeros(4)
        for i in range_constexpr(2):
            y = dg[i]
            if const_expr(cfg.gate != "log"):
                if const_expr(cfg.g_bytes == 2):
                    x2 = ptx.ld2(aX, iG[i])
                    x = [*ptx.unpack(x2[0]), *ptx.unpack(x2[1])]
                else:
                    x = ptx.ld4(aX, iG[i])
                live_f = ptx.pick(Int32(live[i]), one, Float32(0.0))
                y, da = _gate_bwd(
                    cfg, [x[e] + bias[e] for e in range(4)], [y[e] * live_f for e in range(4)], rate, lower_bound
                )
                dA = dA + da
                dbias = [dbias[e] + y[e] for e in range(4)]
            if live[i]:
                (ptx.st2 if cfg.g_bytes == 2 else ptx.st4)(aOg, iG[i], y)
        if const_expr(cfg.has_bias):
            for e in range_constexpr(4):
                for step in (4, 8, 16):
                    dbias[e] = dbias[e] + cute.arch.shuffle_sync_bfly(dbias[e], step)
            if r == 0:
                ptx.st4(oDbias.iterator.toint() + ((Int64(chunk) * 4 + w) * HV + hv) * (K * 4), col, dbias)
        db0, db1, qd0, qd1, kd0, kd1 = db[0], db[1], qd[0], qd[1], kd[0], kd[1]

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
                d_beta = dots[i] + Float32(mDb[token])
                if const_expr(cfg.beta_sigmoid):
                    d_beta = d_beta * beta[i] * (1.0 - beta[i] / beta_scale)
                oDb[token] = d_beta.to(oDb.element_type)
            q_rstd, k_rstd = one, one
            if const_expr(cfg.l2norm):
                q_rstd = Float32(mQr[qhead + Int64(rows[i]) * H])
                k_rstd = Float32(mKr[qhead + Int64(rows[i]) * H])
            aOq, aOk = (x.iterator.toint() + head * (K * cfg.dq_bytes) for x in (oDq, oDk))
            for part in cutlass.range(SLABS, unroll=1):
                jG, jQ = rows[i] * sG + col0 + part * COLS, rows[i] * sQ + col0 + part * COLS
                stash = s_stash + (part * 2 + i) * (THREADS * 16)
                _finish(cfg, aOq, jG, aQ, jQ, stash, q_rstd, dots[2 + i])
                _finish(cfg, aOk, jG, aK, jQ, stash + STASH, k_rstd, dots[4 + i])


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
        mQ: cute.Tensor, mK: cute.Tensor, mGk: cute.Tensor, mBeta: cute.Tensor, mDAqk: cute.Tensor,
        mDAkk: cute.Tensor, mDq: cute.Tensor, mDk: cute.Tensor, mDb: cute.Tensor, mDg: cute.Tensor,
        mGraw: cute.Tensor, mAlog: cute.Tensor, mBias: cute.Tensor, mQr: cute.Tensor, mKr: cute.Tensor,
        oDq: cute.Tensor, oDk: cute.Tensor, oDg: cute.Tensor, oDb: cute.Tensor, oDA: cute.Tensor,
        oDbias: cute.Tensor, mCu: cute.Tensor, mChunks: cute.Tensor, T: Int32, H: Int32, HV: Int32,
        lower_bound: Float32, beta_scale: Float32, grid: Int32, stream,
    ):
        _kernel(
            mQ, mK, mGk, mBeta, mDAqk, mDAkk, mDq, mDk, mDb, mDg, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk, oDg, oDb,
            oDA, oDbias, mCu, mChunks, T, H, HV, lower_bound, beta_scale, cfg,
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
    """The kernel for one specialisation; takes the 23 tensors flattened, then the numbers, and runs on torch's
    current stream."""
    tensors = [cute.runtime.make_fake_compact_tensor(_TYPES[d], (cute.sym_int64(),), assumed_align=16) for d in dtypes]
    numbers = (Int32(1), Int32(1), Int32(1), Float32(0.0), Float32(1.0), Int32(1))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_launcher(_Config(*cfg_key)), *tensors, *numbers, stream, options=options)


@functools.cache
def _absent(device, dtype):
    """Stands in for a tensor the call does not have; never read."""
    return torch.zeros(4, dtype=dtype, device=device)


def supports(p):
    if p.arch[0] != 9:
        return False, f"needs compute capability 9.x, got {p.arch[0]}.{p.arch[1]}"
    if p.K != K:
        return False, f"needs K={K}, got {p.K}"
    if p.dtype != torch.bfloat16:
        return False, f"needs bf16 q, k, v, got {p.dtype}"
    if p.g_dtype not in (torch.bfloat16, torch.float32):
        return False, f"needs a bf16 or fp32 gate, got {p.g_dtype}"
    if p.beta_dtype not in _TYPES:
        return False, f"needs bf16, fp16 or fp32 beta, got {p.beta_dtype}"
    return True, ""


def run(
    *, q, k, gk, beta, dAqk, dAkk, dq, dk, db, dg, g_raw, A_log, dt_bias, q_rstd, k_rstd, p, cu_seqlens, chunk_indices
):
    """Tensors as in the chain's contract; returns dq, dk [B,T,H,K], dg, dbeta in the inputs' dtypes, dA_log,
    ddt_bias."""

    def grad(*shape, dtype):
        x = torch.empty(shape, dtype=dtype, device=q.device)
        if p.varlen:  # tokens after the last sequence belong to none: their gradient is zero
            x[:, cu_seqlens[-1] :] = 0
        return x

    cfg_key = (
        p.varlen, p.gate, p.l2norm, p.beta_sigmoid, A_log is not None, dt_bias is not None, p.g_dtype.itemsize,
        p.HV != p.H,
    )
    out_q, out_k = (grad(p.B, p.T, p.HV, p.K, dtype=torch.float32 if p.HV != p.H else p.dtype) for _ in range(2))
    out_g, dbeta = grad(p.B, p.T, p.HV, p.K, dtype=p.g_dtype), grad(p.B, p.T, p.HV, dtype=p.beta_dtype)
    dA = None if A_log is None else q.new_empty(p.NT, 8, p.HV, dtype=torch.float32)
    dbias = None if dt_bias is None else q.new_empty(p.NT, 4, p.HV, p.K, dtype=torch.float32)
    f32, i64 = _absent(q.device, torch.float32), _absent(q.device, torch.int64)
    given = (
        q, k, gk, beta, dAqk, dAkk, dq, dk, db, dg, f32 if g_raw is None else g_raw, A_log, dt_bias, q_rstd, k_rstd,
        out_q, out_k, out_g, dbeta, dA, dbias,
    )
    tensors = [f32 if x is None else x.view(-1) for x in given]
    tensors += [i64 if x is None else x.reshape(-1) for x in (cu_seqlens, chunk_indices)]
    kernel = _compile(cfg_key, tuple(x.dtype for x in tensors))
    kernel(*tensors, p.T, p.H, p.HV, 0.0 if p.lower_bound is None else p.lower_bound, p.beta_scale, p.NT * p.HV)
    if p.HV != p.H:
        group = (p.B, p.T, p.H, p.HV // p.H, p.K)
        out_q, out_k = out_q.view(group).sum(3), out_k.view(group).sum(3)
    return {
        "dq": out_q,
        "dk": out_k,
        "dg": out_g,
        "dbeta": dbeta,
        "dA_log": None if dA is None else dA.sum((0, 1)).view_as(A_log),
        "ddt_bias": None if dbias is None else dbias.sum((0, 1)).view_as(dt_bias),
    }


def run_log_gate(*, q, k, gk, beta, dAqk, dAkk, dq, dk, db, dg, q_rstd, k_rstd, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(
        q=q, k=k, gk=gk, beta=beta, dAqk=dAqk, dAkk=dAkk, dq=dq, dk=dk, db=db, dg=dg, g_raw=None, A_log=None,
        dt_bias=None, q_rstd=q_rstd, k_rstd=k_rstd, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
    )


SPANS = {"bwd.intra..bwd.beta": run}


def spans(p):
    return {"bwd.intra..bwd.beta": run_log_gate if p.gate == "log" else run}
