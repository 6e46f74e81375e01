"""All gradients of a chunk, in two kernels that meet in bf16; in the second a warp has all rows of its columns.

Parent: 011.
Delta: the key side. A warp has all 64 rows of 16 columns instead of 16 rows of 64, so each row's role in each pair of
    blocks is known when the kernel is compiled, operands for other blocks stay in registers, and only row dots pass
    between warps. Pairs inside 8 rows are one two-sided product, anchored in their middle, each step floored at 2^-32;
    pairs of different blocks of 16 rows take one operand a role whatever their distance, sums of products being moved
    from one block's end to the next. dq and dk wait for the norm in shared memory. The value side is 011's.
Why it should be faster: the key side was bound by instructions (268 a matrix element) and by waits: for other warps'
    operands, for the raw gate, and for dq, dk, q and k read again from L2. Here they are 139, and all is copied ahead.
Constraints: sm_90, K = 128, V a multiple of 64, bf16. Any gate (exponents are <= 0, or within 112 of 0), any T, packed
    sequences, GVA; token and state rows below 2^31 (descriptors take 32-bit coordinates).
"""

import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kernel_fun._common import ptx
from kernel_fun._common.launch import launch
from kernel_fun._common.problem import CHUNK
from kernel_fun.kda.stages.k011_bwd_grads_ring import (
    BV,
    VALUE_STAGES,
    VALUE_WARPS,
    ZERO_PROGRAMS,
    _flat,
    _multiprocessors,
    _tiles,
    value_kernel,
    zero_tail_kernel,
)

FAMILY = "kda"
K = 128  # key dimension
# Shared memory, in bytes. Each of 8 warps has 16 columns of its own. For each 8 rows its lanes keep 16 bytes
# of q and k, 16 of gk (and then of dq and dk); for each 16 rows 16 of dk through kg (and then of row dots), and, of one
# block of 16 rows at a time, 32 of dq and dk from the states and 16 of the raw gate. Then the decays over the second
# and the third block, and dt_bias, at its columns; the total decay has the last decay's place first.
THREADS = 256
KEYS, GK, XD, XS, XG, EDGE, WARP = 2048, 4096, 8192, 10240, 11264, 11776, 11968
L2 = ".L2::128B"  # a warp copies 32 bytes of a row, others of its CTA the rest
PITCH = 144  # of a row of D or E: ldmatrix meets no bank twice
SMEM = 8 * WARP + 2 * 64 * PITCH + 64 * 16 + 128  # a row's beta, D's diagonal, norms of q and k; and what is overread
POINTERS = ("q", "k", "gk", "xq", "xu", "xd", "D", "E", "tail", "graw", "bias", "dq", "dk", "dg", "dA", "dbias")
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


# =================================================================================================== a warp, 16 columns
# A thread's columns are four consecutive ones, in rows r and r + 8 of each block of 16 rows. Work goes by pairs of
# them, 2 jj + e: its four values of a block are then a C fragment, [row][e].
def _packed(x):
    """bf16 pairs, one a row."""
    return [ptx.pack(x[0], x[1]), ptx.pack(x[2], x[3])]


def _turned(x):
    """From C to B fragments, or back."""
    return [ptx.transpose(y) for y in x]


def _times(x, y):
    return [a * b for a, b in zip(x, y, strict=True)]


def _below(x, y):
    """2^(x - y)."""
    return [ptx.ex2(a - b) for a, b in zip(x, y, strict=True)]


def _quads(x):
    return [*ptx.unpack(x[0]), *ptx.unpack(x[1])]


def _gate_bwd(cfg, x, dy, rate, lower_bound):
    """Gradient at four raw gates (bias added; softplus: in log2 units) from dy at the log gates, and their share of
    dA_log; 0 if rate is."""
    dx, da = [], Float32(0.0)
    for v, d in zip(x, dy, strict=True):
        if cfg.gate == "softplus":
            t = ptx.ex2(ptx.at_most(v, 126.0))
            d = -rate * d
            dx.append(d * (t * ptx.rcp(1.0 + t)))
            da = da + d * ptx.larger(ptx.lg2(1.0 + t), v)
        else:
            sigmoid = ptx.rcp(1.0 + ptx.ex2(rate * v * -LOG2_E))
            dx.append(lower_bound * rate * d * (sigmoid * (1.0 - sigmoid)))
            da = da + dx[-1] * v
    return dx, da


class _Names(dict):
    """Values under names; read and written as attributes."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


def _copy_inputs(cfg, io, at, b):
    """Begin the copies of what only block b's end needs."""
    for i in range(2):
        row = 16 * b + 8 * i
        for x, base in enumerate((io.xq, io.xu)):
            ptx.copy_row(at.lane + XS + i * 512 + x * 8, base + at.g * 2, row * at.sG * 2, 8, at.left, row, L2)
    ptx.commit()


def _copy_gate(cfg, io, at, b):
    for i in range(2):
        row = 16 * b + 8 * i
        if cfg.gate != "log" and cfg.g_bytes == 2:
            ptx.copy_row(at.lane + XG + i * 8, io.graw + at.g * 2, row * at.sG * 2, 8, at.left, row, L2)
    ptx.commit()


def _raw_gate(cfg, io, at, b):
    """The raw gate of a block at its end: where it is fp32, from memory."""
    if cfg.gate == "log":
        return None
    if cfg.g_bytes == 2:
        x = ptx.lds_frag(at.lane + XG)
        return [_quads(x[:2]), _quads(x[2:])]
    rows = [16 * b, 16 * b + 8]
    return [ptx.load_row("f32", 4, Float32, io.graw + at.g * 4, row * at.sG * 4, at.left, row) for row in rows]


def _start(cfg, io, at, tid, n_t):
    """Begin all other copies, in two groups: what the sources of other blocks need, and the rest. The CTA copies whole
    rows, a warp two of bf16 or one of gk at a time; eight lanes take parts that meet no bank twice."""
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
    row = tid // 8
    for i in range(2):
        for x, base in enumerate((io.D, io.E)):
            to = at.matrices + x * 64 * PITCH + (row + 32 * i) * PITCH + tid % 8 * 16
            source = base + (at.head + Int64(row) * cfg.HV) * 128 + tid % 8 * 16
            ptx.copy_row(to, source, 32 * i * cfg.HV * 128, 16, n_t - row, 32 * i, L2)
    _copy_inputs(cfg, io, at, 3)
    _copy_gate(cfg, io, at, 3)


def _sources(at):
    """Each block but the last as a source for later blocks: bf16(k 2^(gk at its end - gk)) as B fragments, [jj][row].
    Leaves the decays from one block's end to the next in shared memory; returns also what all rows' dg share."""
    ends = [ptx.lds4(at.column + GK + (2 * a + 1) * 512 + 7 * 64) for a in range(3)]
    total, sources = ptx.zeros(4), []
    for b in range(4):
        rows = []
        for i in range(2):
            k, pd = (_quads(ptx.lds2(at.pair + place + (2 * b + i) * 256)) for place in (KEYS, XD))
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


def _decay(x, at, m, jj):
    """A product's sum moved over block m."""
    return _times(x, ptx.lds2f(at.column + EDGE + 64 * m - 64 + jj * 8) * 2)


def _matrix(at, x, row, col, transposed=False):
    """A fragment of the [16,16] block (row, col) of D (x = 0) or E."""
    lane = at.turned if transposed else at.straight
    return ptx.ldmatrix_n(lane + x * 64 * PITCH + row * 16 * PITCH + col * 32, 4, transposed)


class _Sums:
    """A block's sums: dq, zk (its part of dk that beta multiplies), uk (the other), dg; lists of four, or None."""

    def __init__(self):
        self.dq, self.zk, self.uk, self.dg = ([None] * 4 for _ in range(4))

    @staticmethod
    def add(to, i, x, y):
        to[i] = x * y if to[i] is None else to[i] + x * y

    def target(self, f, qx, kx, x, z, rows=(0, 1)):
        """Rows that are the later one of their pairs: their rounded operands and the products."""
        for row in rows:
            qr, kr = ptx.unpack(qx[row]), ptx.unpack(kx[row])
            for e in range(2):
                i = 2 * row + e
                self.add(self.dq, i, f[i], x[i])
                self.add(self.zk, i, f[i], z[i])
                self.add(self.dg, i, qr[e], x[i])
                self.add(self.dg, i, kr[e], z[i])

    def source(self, f, kx, u):
        """Rows that are the earlier one; the same operand times its product leaves dg that a later row's adds."""
        for row in range(2):
            kr = ptx.unpack(kx[row])
            for e in range(2):
                i = 2 * row + e
                self.add(self.uk, i, f[i], u[i])
                self.add(self.dg, i, -kr[e], u[i])


def _inside(at, b, jj, q, k, kb, g, sums):
    """The pairs of a block of 16 rows: those in the same 8 rows, from their middle; then the upper 8 with the lower."""
    zeros, gk = ptx.zeros(4), GK + 2 * b * 512 + jj * 8
    block = b * (16 * PITCH + 32)  # its 8 x 8 blocks of D and E: both on the diagonal, then the lower left one
    upper = ptx.ldmatrix_n(at.diagonal + block, 4, False)
    lower = ptx.ldmatrix_n(at.diagonal + block + 8 * PITCH, 2, False)
    turned, corner = (ptx.ldmatrix_n(at.diagonal_turned + block + x, 4, True) for x in (0, 8 * PITCH))
    middle = [x for i in range(2) for x in ptx.lds2f(at.column + gk + i * 512 + 3 * 64)]
    e = ptx.bound_exponents([x - y for x, y in zip(g, middle, strict=True)], 32, 112)
    fp, fm = [ptx.ex2(x) for x in e], [ptx.ex2(-x) for x in e]
    qx, kx, ks = _packed(_times(q, fp)), _packed(_times(kb, fp)), _packed(_times(k, fm))
    qt, kt, st = _turned(qx), _turned(kx), _turned(ks)
    lo, hi = ptx.mma8(zeros, upper[:2], st[0]), ptx.mma8(zeros, upper[2:], st[1])
    # the upper 8 rows with the lower ones, from the middle of the lower
    base = [x - ptx.of_row(y, 7) for x, y in zip(ptx.lds2f(at.column + gk + 7 * 64), e[:2], strict=True)]
    f = [None, None, *_below(g[2:], base)]
    far = [ptx.pack(x[2] * f[2], x[3] * f[3]) for x in (q, kb)]
    y = ptx.mma8(zeros, lower, st[0])
    u, v = (ptx.mma16(zeros, turned, (qt[i], kt[i])) for i in range(2))  # half of each counts, the rest means nothing
    u = ptx.mma16(u, corner, _turned(far))
    sums.target(fp, qx, kx, [lo[0], lo[1], hi[0], hi[1]], [lo[2], lo[3], hi[2], hi[3]])
    sums.target(f, [None, far[0]], [None, far[1]], [None, None, y[0], y[1]], [None, None, y[2], y[3]], rows=(1,))
    sums.source(fm, ks, [*u[:2], *v[2:]])


def _as_target(at, b, jj, q, kb, g, sources, sums):
    """Block b with all earlier ones, seen from the end of the block before it. Returns its operands as B fragments."""
    f = _below(g, ptx.lds2f(at.column + GK + (2 * b - 1) * 512 + 7 * 64 + jj * 8) * 2)
    qx, kx = _packed(_times(q, f)), _packed(_times(kb, f))
    x, z = ptx.zeros(4), ptx.zeros(4)
    for a in range(b):
        if a:
            x, z = _decay(x, at, a, jj), _decay(z, at, a, jj)
        x = ptx.mma16(x, _matrix(at, 0, b, a), sources[a][jj])
        z = ptx.mma16(z, _matrix(at, 1, b, a), sources[a][jj])
    sums.target(f, qx, kx, x, z)
    return _turned(qx), _turned(kx)


def _as_source(at, b, jj, g, source, targets, sums):
    """Block b with all later ones, seen from its end."""
    u = ptx.zeros(4)
    for t in range(3, b, -1):
        if t < 3:
            u = _decay(u, at, t, jj)
        for x in range(2):
            u = ptx.mma16(u, _matrix(at, x, t, b, transposed=True), targets[t][jj][x])
    f = _below(ptx.lds2f(at.column + GK + (2 * b + 1) * 512 + 7 * 64 + jj * 8) * 2, g)
    sums.source(f, _turned(source[jj]), u)


def _gradients(cfg, io, at, lane, rate, lower_bound):
    """Everything of the warp's columns but dbeta; returns their share of dA_log."""
    ptx.wait_group(1)
    ptx.sync_cta()
    sources, shared = _sources(at)
    ptx.wait_group(0)
    ptx.sync_cta()
    targets, db_rows, dA, dbias = [[None, None] for _ in range(4)], [None] * 4, Float32(0.0), ptx.zeros(4)
    for b in (3, 2, 1, 0):
        qk = [[*ptx.lds2(at.pair + j * 256), *ptx.lds2(at.pair + KEYS + j * 256)] for j in (2 * b, 2 * b + 1)]
        beta, diag, _, _ = zip(*[ptx.lds4(at.rows + (16 * b + 8 * i) * 16) for i in range(2)], strict=True)
        db, qd, kd, xs = ptx.zeros(2), ptx.zeros(2), ptx.zeros(2), None
        stash, dg = [[], []], [[], []]
        for jj in range(2):
            q, k = ([y for x in qk for y in ptx.unpack(x[n + jj])] for n in (0, 2))
            g = [y for i in range(2) for y in ptx.lds2f(at.lane + GK + (2 * b + i) * 512 + jj * 8)]
            kb = [k[n] * beta[n // 2] for n in range(4)]
            sums = _Sums()
            _inside(at, b, jj, q, k, kb, g, sums)
            if b:
                targets[b][jj] = _as_target(at, b, jj, q, kb, g, sources, sums)
            if b < 3:
                _as_source(at, b, jj, g, sources[b], targets, sums)

            # ---- add the states' part and the pairs of a row with itself
            if xs is None:
                ptx.wait_group(0)
                xs = [ptx.lds_frag(at.lane + XS + i * 512) for i in range(2)]
                xd = [x for i in range(2) for x in ptx.lds2(at.pair + XD + (2 * b + i) * 256)]
                if b:
                    _copy_inputs(cfg, io, at, b - 1)
            pq, pu = ([y for x in xs for y in ptx.unpack(x[n + jj])] for n in (0, 2))
            pd, dq, dk = [y for i in range(2) for y in ptx.unpack(xd[2 * i + jj])], [], []
            for n in range(4):
                i = n // 2
                t = sums.zk[n] + pu[n]
                dq.append(sums.dq[n] + pq[n] + diag[i] * k[n])
                dk.append(beta[i] * t + (sums.uk[n] + pd[n]) + diag[i] * q[n])
                dg[i].append(sums.dg[n] + q[n] * pq[n] + kb[n] * pu[n] - k[n] * pd[n])
                db[i], qd[i], kd[i] = db[i] + k[n] * t, qd[i] + q[n] * dq[n], kd[i] + k[n] * dk[n]
            stash[0] += _packed(dq)
            stash[1] += _packed(dk)
        ptx.sync_warp()  # everybody has read gk of this block: dq and dk take its place
        for i in range(2):
            ptx.sts_frag(at.lane + GK + (2 * b + i) * 512, [x[i + 2 * jj] for x in stash for jj in range(2)])
        ptx.sts4(at.lane + XD + b * 512, [*qd, *kd])
        mine, other = (ptx.pick(at.odd, db[i], db[1 - i]) for i in (1, 0))  # an odd lane keeps row r + 8
        db_rows[b] = ptx.sum_lanes(mine + ptx.exchange(other, 1), 2)

        # ---- dg: summed over this and all later rows; through the gate; out
        for i in (1, 0):
            dg[i] = [ptx.sum_later_rows(x) + y for x, y in zip(dg[i], shared, strict=True)]
            if i or b:
                shared = [ptx.of_row(y, 0) for y in dg[i]]
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


def _close_norm(cfg, io, at):
    """dq and dk of the warp's columns, from shared memory, through the norm: rstd (dy - y <y, dy>)."""
    if cfg.l2norm:  # the row dots of all warps: a warp sums one of q and k in one block of rows
        parts = [ptx.lds2f(at.dots + other * WARP) for other in range(8)]
        ptx.sts2(at.sums, [ptx.sum_lanes(sum(x[1:], x[0]), 1, 2) for x in zip(*parts, strict=True)])
        ptx.sync_cta()
    for b in range(4):
        if cfg.l2norm:
            s = ptx.lds4(at.norm + b * 128)
        for i in range(2):
            j, row = 2 * b + i, 16 * b + 8 * i
            packed = ptx.lds_frag(at.lane + GK + j * 512)
            dq, dk = _quads(packed[:2]), _quads(packed[2:])
            if cfg.l2norm:
                y = [*ptx.lds2(at.pair + j * 256), *ptx.lds2(at.pair + KEYS + j * 256)]
                _, _, q_rstd, k_rstd = ptx.lds4(at.rows + row * 16)
                qs, ks = q_rstd * s[i], k_rstd * s[2 + i]
                dq = [q_rstd * d - x * qs for d, x in zip(dq, _quads(y[:2]), strict=True)]
                dk = [k_rstd * d - x * ks for d, x in zip(dk, _quads(y[2:]), strict=True)]
            for base, x in ((io.dq, dq), (io.dk, dk)):
                out, off = base + at.g * cfg.dq_bytes, row * at.sG * cfg.dq_bytes
                if cfg.dq_bytes == 4:
                    ptx.store_row("f32", out, off, at.left, row, *x)
                else:
                    ptx.store_row("b32", out, off, at.left, row, ptx.pack(x[0], x[1]), ptx.pack(x[2], x[3]))


def _place(mine, smem, tid, warp, lane, n_t):
    """Where a thread's values are: its addresses in shared memory, and rows left from its own first one on."""
    r, lc = lane // 4, lane % 4
    own, matrices = smem + warp * WARP, smem + 8 * WARP
    mine.smem, mine.lane, mine.pair, mine.column = smem, own + lane * 16, own + lane * 8, own + lc * 16
    mine.matrices, mine.straight = matrices, matrices + lane % 16 * PITCH + lane // 16 * 16
    mine.turned = matrices + (lane % 8 + lane // 16 * 8) * PITCH + lane // 8 % 2 * 16
    part, other = lane // 8, 64 * PITCH  # of four 8 x 8 blocks: D, E above and D, E below; turned, D above and below, E
    mine.diagonal = matrices + (lane % 8 + part // 2 * 8) * PITCH + part // 2 * 16 + part % 2 * other
    mine.diagonal_turned = matrices + (lane % 8 + part % 2 * 8) * PITCH + part % 2 * 16 + part // 2 * other
    mine.rows = matrices + 2 * 64 * PITCH + r * 16
    mine.odd, mine.left = lane % 2, n_t - r
    mine.db = own + XS + (lane % 2 * 8 + r) * 4
    mine.dots = smem + XD + warp // 2 * 512 + lane * 16 + warp % 2 * 8
    mine.sums = matrices + (warp // 2 * 8 + r) * 16 + warp % 2 * 8
    mine.norm = matrices + r * 16


def _addresses(cfg, at, io, warp, lane, chunk, hv, head, qhead):
    """Element offsets of the thread's first value, and rows' strides; the chunk's small vectors at its columns."""
    r, col = lane // 4, warp * 16 + lane % 4 * 4
    at.head, at.qhead, at.sG, at.g = head, qhead, cfg.HV * K, (head + r * cfg.HV) * K + col
    part = (Int64(chunk) * cfg.HV + hv) * K + col
    io.tail, io.bias, io.dbias = io.tail + part * 4, io.bias + (Int64(hv) * K + col) * 4, io.dbias + part * 4


@cute.kernel
def _kernel(
    mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mDiag, mTail, mYv, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk, oDg, oDb,
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
    tensors = (mQ, mK, mGk, mXq, mXu, mXd, mD, mE, mTail, mGraw, mBias, oDq, oDk, oDg, oDA, oDbias)
    io, at = _Names(zip(POINTERS, [x.iterator.toint() for x in tensors], strict=True)), _Names()
    head, qhead = first * cfg.HV + hv, first * cfg.H + h
    _place(at, smem, tid, warp, lane, n_t)
    _addresses(cfg, at, io, warp, lane, chunk, hv, head, qhead)
    _start(cfg, io, at, tid, n_t)

    row = Int64(cutlass.min(tid % 64, n_t - 1))
    token, lives, zero = head + row * cfg.HV, Int32(tid % 64 < n_t), Float32(0.0)
    values = [Float32(mBeta[token]), Float32(mDiag[token]), zero, zero]
    if const_expr(cfg.l2norm):
        values[2], values[3] = Float32(mQr[qhead + row * cfg.H]), Float32(mKr[qhead + row * cfg.H])
    rate = Float32(1.0)
    if const_expr(cfg.has_A):
        rate = ptx.ex2(Float32(mAlog[hv]) * LOG2_E)
    beta = ptx.pick(lives, values[0], zero)
    ptx.sts4(at.matrices + 2 * 64 * PITCH + tid % 64 * 16, [beta, ptx.pick(lives, values[1], zero), *values[2:]])

    dA = _gradients(cfg, io, at, lane, rate, lower_bound)
    if const_expr(cfg.has_A):
        ptx.store_row("f32", io.dA + ((Int64(chunk) * 8 + warp) * cfg.HV + hv) * 4, 0, 1 - lane, 0, dA)
    d_beta = Float32(mYv[token])
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
        self.varlen, self.gate, self.l2norm, self.beta_sigmoid = varlen, gate, l2norm, beta_sigmoid
        self.has_A, self.has_bias, self.g_bytes = has_A, has_bias, g_bytes
        self.H, self.HV = H, HV
        self.dq_bytes = 2 if H == HV else 4  # grouped heads are summed in fp32 afterwards


def _launcher(cfg):
    @cute.jit
    def start(
        mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mDiag, mTail, mYv, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk, oDg,
        oDb, oDA, oDbias, mCu, mChunks,
        T: Int32, lower_bound: Float32, beta_scale: Float32, grid: Int32, rows: Int32, stream,
    ):
        _kernel(
            mQ, mK, mGk, mBeta, mXq, mXu, mXd, mD, mE, mDiag, mTail, mYv, mGraw, mAlog, mBias, mQr, mKr, oDq, oDk,
            oDg, oDb, oDA, oDbias, mCu, mChunks, T, lower_bound, beta_scale, cfg,
        ).launch(
            grid=[grid, rows, 1], block=[THREADS, 1, 1], min_blocks_per_mp=2, preferred_smem_carveout=100, stream=stream
        )

    return start


_TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: Float32}
_TYPES |= {torch.int64: Int64, torch.int32: Int32}


@functools.cache
def _compile(cfg_key, dtypes, options="--enable-tvm-ffi"):
    """The kernel for one specialisation; takes the 25 tensors flattened, then the numbers, and runs on torch's
    current stream."""
    tensors = [cute.runtime.make_fake_compact_tensor(_TYPES[d], (cute.sym_int64(),), assumed_align=16) for d in dtypes]
    numbers = (Int32(1), Float32(0.0), Float32(1.0), Int32(1), Int32(1))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_launcher(_Config(*cfg_key)), *tensors, *numbers, stream, options=options)


@functools.cache
def _absent(device, dtype):
    """Stands in for a tensor the call does not have; never read."""
    return torch.zeros(4, dtype=dtype, device=device)


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
        (p.B < 2**16, f"needs B below 2^16, got {p.B}"),
        (rows < 2**31, f"needs token and state rows below 2^31, got {rows}"),
    ):
        if not ok:
            return False, reason
    return True, ""


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
    launch(
        value_kernel, (programs,), *tokens, *states, gates, gk, beta, xq, xu, xd, D, E, diag, tail, yv, dv_out,
        cu_seqlens, chunk_indices, p.scale, p.T, p.NT * p.HV, programs,
        HV=p.HV, K=p.K, V=p.V, IS_VARLEN=p.varlen, STAGES=VALUE_STAGES, num_warps=VALUE_WARPS,
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
    cfg_key = (p.varlen, p.gate, p.l2norm, p.beta_sigmoid, has_A, has_bias, p.g_dtype.itemsize, p.H, p.HV)
    dq_dtype = torch.float32 if p.HV != p.H else p.dtype
    dq, dk, dg = (torch.empty_like(gk, dtype=dtype) for dtype in (dq_dtype, dq_dtype, p.g_dtype))
    dbeta = torch.empty_like(beta, dtype=p.beta_dtype)
    dA = None if A_log is None else q.new_empty(p.NT, 8, p.HV, dtype=torch.float32)
    dbias = None if dt_bias is None else q.new_empty(p.NT, p.HV, p.K, dtype=torch.float32)
    f32, i64 = _absent(q.device, torch.float32), _absent(q.device, torch.int64)
    given = (q, k, gk, beta, *states, g_raw, A_log, dt_bias, q_rstd, k_rstd, dq, dk, dg, dbeta, dA, dbias)
    tensors = [f32 if x is None else _flat(x) for x in given]
    tensors += [i64 if x is None else x.reshape(-1) for x in (cu_seqlens, chunk_indices)]
    kernel = _compile(cfg_key, tuple(x.dtype for x in tensors))
    rows = 1 if p.varlen else p.B  # the grid's second axis
    kernel(*tensors, p.T, 0.0 if p.lower_bound is None else p.lower_bound, p.beta_scale, p.NT * p.HV // rows, rows)
    if p.varlen:
        launch(
            zero_tail_kernel, (ZERO_PROGRAMS.value,), dq, dk, dv_out, dg, dbeta, cu_seqlens, p.N, p.T,
            HV=p.HV, K=p.K, V=p.V, num_warps=4,
        )
    if p.HV != p.H:
        group = (p.B, p.T, p.H, p.HV // p.H, p.K)
        dq, dk = dq.view(group).sum(3), dk.view(group).sum(3)
    dA = None if dA is None else dA.sum((0, 1)).view_as(A_log)
    dbias = None if dbias is None else dbias.sum(0).view_as(dt_bias)
    return {"dq": dq, "dk": dk, "dv": dv_out, "dg": dg, "dbeta": dbeta, "dA_log": dA, "ddt_bias": dbias}


def run_log_gate(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, q_rstd, k_rstd, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(**locals(), g_raw=None, A_log=None, dt_bias=None)


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}
