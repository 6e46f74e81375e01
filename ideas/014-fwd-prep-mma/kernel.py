"""The whole forward in two kernels, the first in registers and by mma.sync.

Parent: 013-fwd-operands (its scan, from there) and 009-bwd-grads-pair (whose levels these are, forwards).
Delta: what comes before the scan was 004's Triton program. Here, in CuTe and PTX, a CTA copies its q, k, g once, and
    warp w owns rows 16 w to 16 w + 15: 32 columns at a time it makes decays, the scan's operands and the scores
    inside its rows without leaving its registers. A fragment of rows is the same as target and as source.
    A product with a matrix of +-1/2 sums the steps of 8 rows relative to their middle. From 2^that, its reciprocal and
    half the group's whole decay (row 7's own value) all other decays are products: two exponentials an element.
    Inside 8 rows scores are two-sided products; from 8 rows to the next 8, in blocks of 16 and of 32, one-sided.
    The inverse: blocks of 16 by doubling, then each warp its row of blocks, A_ij = -(sum over m of A_im L_mj) A_jj.
Why it should be faster: 004 takes 83 instructions an element, reads q and k twice and waits for g in its loop (1.14 ms
    at 16384 chunks and heads, floor 0.45); this one takes 55, waits once, and has 16 warps a multiprocessor (IDEA.md).
Constraints: sm_90, K = 128, V a multiple of 128, bf16 q, k, v; a step's decay is at least 2^-32 (2^-31.5 where gk is
    not written). Any gate, any T, packed sequences, GVA. Where 010's segments serve it stands for 004 alone.
"""

import functools
import types

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kernel_fun._common import blocks, cutecall, ptx
from kernel_fun.kda.stages.k013_fwd_operands import handover, scan

FAMILY = "kda"
K, THREADS = 128, 128  # key dimension; of a CTA
CTAS, KEEPING = 4, 3  # a multiprocessor's CTAs, and where q, k or gk are kept: registers are 65536 over that
SLABS, COLS = 4, 32  # columns a warp holds at a time; a thread has 8 consecutive ones in rows r and r + 8 of the warp's
LOG2_E = 1.4426950408889634
UNIT = 1024.0  # steps are summed in units of 2^-10, where fp16 is exact enough
SHRINK = 2.0**-20  # keys that are not normalised: room for them times up to 2^126
# shared memory, bytes
# a [64,128] bf16 tile, swizzled as in `blocks`: of q, k, bf16 g, then of operands for products between blocks of rows
TILE = 64 * 256
EXTRA = 16 * 256  # the fourth such operand of block 3
TABLE = 4 * 256  # [4 blocks, 2 groups, 32 columns] fp32
FACTORS = 384  # a warp's [3, 32] fp32
RAW = 64 * 528  # fp32 g, rows 528 bytes apart


# ------------------------------------------------------------------------------------- gates, decays, scores, operands
# t has what a thread knows and does not change, by name: a_ are addresses in global memory, s_ in shared memory.
def _copy_rows(cfg, t):
    """Begin the copies of the warp's own rows of q and k, then (second group) of the gates and their bias."""
    row, piece = t.lane // 16, t.lane % 16
    to = t.s_q + t.w * 4096 + row * 256 + (piece ^ blocks.turned(row)) * 16
    swizzled = [to ^ (i * 16) for i in range(4)]
    left = t.n_t - t.row0 - row  # how many rows there are from the thread's first one on
    tiles = [(t.a_q, 0, cfg.H), (t.a_k, TILE, cfg.H)] + [(t.a_g, 2 * TILE, cfg.HV)] * (cfg.g_bytes == 2)
    for tile, (base, offset, heads) in enumerate(tiles):
        address = base + Int64((t.row0 + row) * (heads * K * 2) + piece * 16)
        for i in range(8):
            n = None if cfg.full else Int32(left > 2 * i) * 16
            blocks.copy16(swizzled[i % 4], offset + i * 512, address, 2 * i * heads * (K * 2), n)
        if tile == 1:
            ptx.commit()
    if cfg.g_bytes == 4:
        address = t.a_g + Int64(t.row0 * (cfg.HV * K * 4) + t.lane * 16)
        for i in range(16):
            n = None if cfg.full else Int32(t.n_t - t.row0 > i) * 16
            blocks.copy16(t.s_raw + t.row0 * 528 + t.lane * 16, i * 528, address, i * cfg.HV * (K * 4), n)
    if cfg.has_bias:  # every warp copies all of it, and waits for its own copy only
        blocks.copy16(t.s_bias + t.lane * 16, 0, t.a_bias + Int64(t.lane * 16), 0, None)
    ptx.commit()


def _steps(cfg, t, x, shift):
    """Two raw gates -> log2 decays of the steps times UNIT, floored; `shift` is the bias times the factor of x."""
    floor, y = -cfg.floor * UNIT, []
    for v in x:
        if cfg.gate == "log":
            y.append(blocks.at_least(v * (LOG2_E * UNIT), floor))
        elif cfg.gate == "softplus":
            z = blocks.fma(v, Float32(LOG2_E), shift)
            soft = ptx.lg2(1.0 + blocks.ex2_below(z)) + blocks.at_least(z, 0.0)
            y.append(blocks.at_least(soft * t.rate, floor))
        else:
            z = ptx.ex2(blocks.fma(v, t.rate, shift))
            y.append(blocks.at_least(t.bound * ptx.rcp(1.0 + z), floor))
    return y


def _decays(cfg, t, s, at):
    """Log2 decays of the thread's elements relative to the middle of their 8 rows, and 2^them: [2 rows][8 columns].
    Gates are read with rows and columns exchanged, so that a product may sum over rows."""
    raw, exponent, decay = [[], []], [[], []], [[], []]
    if cfg.g_bytes == 2:
        raw = [[ptx.transpose(x) for x in ptx.lds_frag(at + 2 * TILE + i * 2048)] for i in range(2)]
    for j in range(4):
        shift, steps = Float32(0.0), []
        if cfg.has_bias:
            shift = ptx.lds1(t.s_bias + (s * COLS + t.g_col + 2 * j) * 4)
            shift = shift * (LOG2_E if cfg.gate == "softplus" else t.rate)
        for i in range(2):
            if cfg.g_bytes == 2:
                x = ptx.unpack(raw[i][j])
            else:
                to = t.s_raw + (t.row0 + 8 * i + t.c) * 528 + (s * COLS + t.g_col + 2 * j) * 4
                x = ptx.lds1(to), ptx.lds1(to + 528)
            steps += _steps(cfg, t, x, shift)
        e = blocks.sum_from_middle(t.sum_a, steps)
        for i in range(2):
            exponent[i] += e[2 * i : 2 * i + 2]
            d = [ptx.ex2(x) for x in e[2 * i : 2 * i + 2]]
            decay[i] += [blocks.at_least(x, 2.0**-126) for x in d] if cfg.floor == 32.0 else d
    return exponent, decay


def _block_factors(cfg, t, table, logs, s):
    """A lane's column: for this warp's rows the decays over whole blocks of 16, and gk before each group's middle."""
    lane4 = t.lane * 4
    total = []
    for b in range(4):
        x = ptx.lds1(table + lane4 + b * 256) * ptx.lds1(table + lane4 + b * 256 + 128)
        total.append(x * x)
    one, zero, before, after = Float32(1.0), Float32(0.0), total[0] * total[1], total[2] * total[3]
    far = ptx.pick(t.is0, total[1], total[2])  # of the block between, for blocks 0 and 3
    ptx.sts1(t.s_factor + 256 + lane4, far)
    if cfg.tiles:
        blocks.store("f32", t.a_vec + Int64((s * COLS + t.lane) * 4), 0, [before * after], Int32(t.w == s))
        up = ptx.pick(t.is0, one, ptx.pick(t.is1, total[0], before))
        down = ptx.pick(t.is3, one, ptx.pick(t.is2, total[3], after))
        ptx.sts1(t.s_factor + lane4, ptx.pick(t.is3, up * far, up))
        ptx.sts1(t.s_factor + 128 + lane4, ptx.pick(t.is0, down * far, down))
    if cfg.gk:
        own = [ptx.lds1(logs + t.w * 256 + lane4 + i * 128) for i in range(2)]
        offset = zero
        for b, later in ((0, 1 - t.is0), (1, t.is2 + t.is3), (2, t.is3)):
            x = 2.0 * (ptx.lds1(logs + lane4 + b * 256) + ptx.lds1(logs + lane4 + b * 256 + 128))
            offset = offset + ptx.pick(later, x, zero)
        ptx.sts1(t.s_offset + lane4, offset + own[0])
        ptx.sts1(t.s_offset + 128 + lane4, offset + 2.0 * own[0] + own[1])


@cute.jit
def _exchange(w, to, ku, qu, ke, far):
    """Operands for products with other blocks, over the raw tiles: sources decayed to their block's end or the half's,
    targets since their block's first row or the half's."""
    if w == 0:
        ptx.sts_frag(to + TILE, blocks.packed(ke))
        ptx.sts_frag(to + 2 * TILE, blocks.packed(blocks.times(ke, far)))
    elif w == 3:
        ptx.sts_frag(to, blocks.packed(blocks.times(qu, far)))
        ptx.sts_frag(to + TILE, blocks.packed(blocks.times(ku, far)))
        ptx.sts_frag(to + 2 * TILE, blocks.packed(qu))
        ptx.sts_frag(to + 3 * TILE - 3 * 4096, blocks.packed(ku))
    else:
        ptx.sts_frag(to, blocks.packed(qu))
        ptx.sts_frag(to + TILE, blocks.packed(ku))
        ptx.sts_frag(to + 2 * TILE, blocks.packed(ke))


def _slab(cfg, t, s, acc):
    """32 columns of the warp's 16 rows: operands out, and scores inside the 16 rows added to acc."""
    low, high, cross = acc[:4], acc[4:8], acc[8:]
    at = t.mine ^ (s * 64)
    exponent, decay = _decays(cfg, t, s, at)
    table, logs = t.s_table + (s % 2) * TABLE, t.s_logs + (s % 2) * TABLE
    own = t.w * 256 + t.lc * 32
    for i in range(2):  # half of the group's whole decay is what its last row has
        for j in (0, 4):
            blocks.sts4_if(t.last, table + own + i * 128 + j * 4, decay[i][j : j + 4])
            if cfg.gk:
                blocks.sts4_if(t.last, logs + own + i * 128 + j * 4, exponent[i][j : j + 4])
    cute.arch.sync_threads()
    _block_factors(cfg, t, table, logs, s)
    cute.arch.sync_warp()
    eight = lambda x: [*ptx.lds4(x), *ptx.lds4(x + 16)]  # noqa: E731
    for i in range(2):
        q2, k2 = ptx.lds_frag(at + i * 2048), ptx.lds_frag(at + TILE + i * 2048)
        el, eh, far = eight(table + own), eight(table + own + 128), eight(t.s_factor + 256 + t.lc * 32)
        kf, qf, kd, out_q, out_k = [], [], [], [], []
        for j in range(4):
            qs, ks = ptx.unpack(q2[j]), ptx.unpack(k2[j])
            if cfg.l2norm:
                ks = [x * t.rk[i] for x in ks]
                if cfg.units:
                    out_q.append(ptx.pack(*[x * t.q_rstd[i] for x in qs]))
                    out_k.append(ptx.pack(*ks))
            for e in range(2):
                d = decay[i][2 * j + e]
                kf.append(ks[e] * d)
                qf.append(qs[e] * t.rq[i] * d)
                kd.append(ks[e] * (ptx.rcp(d) if cfg.l2norm else ptx.rcp(d) * SHRINK))
        pq, pk, ps = blocks.packed(qf), blocks.packed(kf), blocks.packed(kd)
        edge = el if i == 0 else eh
        edge_kd = edge if cfg.l2norm else [x * (1.0 / SHRINK) for x in edge]
        # decays since the block's first row (ku, qu) and up to its last one (ke)
        ku, qu, ke = blocks.times(kf, edge), blocks.times(qf, edge), blocks.times(kd, edge_kd)
        if i == 0:
            for x in (0, 2):
                low = ptx.mma16(low, (pq[x], pk[x], pq[x + 1], pk[x + 1]), ps[x : x + 2])
            source = blocks.packed(ke)
            ke = blocks.times(ke, blocks.times(eh, eh))
        else:
            for x in (0, 2):
                high = ptx.mma16(high, (pq[x], pk[x], pq[x + 1], pk[x + 1]), ps[x : x + 2])
            pq, pk = blocks.packed(qu), blocks.packed(ku)
            for x in (0, 2):
                cross = ptx.mma16(cross, (pq[x], pk[x], pq[x + 1], pk[x + 1]), source[x : x + 2])
            ku, qu = (blocks.times(z, blocks.times(el, el)) for z in (ku, qu))
        if cfg.tiles:
            up, down = eight(t.s_factor + t.lc * 32), eight(t.s_factor + 128 + t.lc * 32)
            for n, (x, y) in enumerate(((ku, up), (ke, down), (qu, up))):
                to = t.a_tiles + Int64(s * (COLS * 2))
                blocks.store("b32", to, n * TILE + i * 2048, blocks.packed(blocks.times(x, y)))
        p = None if cfg.full else t.live[i]
        if cfg.gk:
            x = [a + b for a, b in zip(exponent[i], eight(t.s_offset + i * 128 + t.lc * 32), strict=True)]
            for j in (0, 4):
                blocks.store("f32", t.a_gk + Int64(s * (COLS * 4)), i * cfg.HV * (32 * K) + j * 4, x[j : j + 4], p)
        if cfg.units:
            if cfg.HV > cfg.H:  # the first value head of a group writes for all
                p = t.first_head if cfg.full else p * t.first_head
            for base, x in ((t.a_qn, out_q), (t.a_kn, out_k)):
                blocks.store("b32", base + (t.q_place + s * (COLS * 2)), i * cfg.H * (16 * K), x, p)
        _exchange(t.w, at + i * 2048, ku, qu, ke, far)
    return [*low, *high, *cross]


# ------------------------------------------------------------------------------------ scores between blocks, inverse
def _close(cfg, t, low, high, cross):
    """From the scores inside blocks to Aqk and Akk."""
    zero, half = Float32(0.0), cfg.l2norm
    strict, same = [Int32(t.c + e < t.r) for e in range(2)], [Int32(t.c + e == t.r) for e in range(2)]
    if not cfg.l2norm:
        low, high = ([x * (1.0 / SHRINK) for x in y] for y in (low, high))
    lower = [ptx.pick(strict[e], low[2 + e] * -t.beta[0], zero) for e in range(2)]
    lower += [cross[2 + e] * -t.beta[1] for e in range(2)] + [zero, zero]
    lower += [ptx.pick(strict[e], high[2 + e] * -t.beta[1], zero) for e in range(2)]
    own = blocks.invert(lower, t.r, t.c, half)
    diag = []
    for i, x in ((0, low), (1, high)):
        diag.append(ptx.pack(*[ptx.pick(strict[e], x[e], ptx.pick(same[e], t.qk[i], zero)) for e in range(2)]))
    diag = (diag[0], ptx.pack(cross[0], cross[1]), Uint32(0), diag[1])
    cute.arch.sync_threads()

    # ---------------------------------------------------------------- warp 0: block 3 with 2; others: theirs with the
    # other half or their pair. Of a source the pieces of 8 columns come before the other 8 rows: B fragments
    row = t.lane % 16
    spot = row * 256 + ((t.lane // 16) ^ blocks.turned(row)) * 16
    source_spot = (t.lane % 8 + (t.lane // 16) * 8) * 256 + ((t.lane // 8) % 2 ^ blocks.turned(row)) * 16
    wide = 1 - t.is0 - t.is1
    t_q = t.s_q + t.target * 4096 + t.is0 * (2 * TILE) + spot
    t_k = t.s_q + TILE + t.target * 4096 + t.is0 * (2 * TILE - 3 * 4096) + spot
    source = t.s_q + 2 * TILE + t.is0 * 8192 - t.is1 * TILE + source_spot
    scores = [[ptx.zeros(4) for _ in range(4)] for _ in range(2)]  # [q, k][8 columns each of two blocks]
    for kk in range(8):
        a = [blocks.rows(t_q ^ (kk * 32)), blocks.rows(t_k ^ (kk * 32))]
        for b, base in enumerate((source, source + wide * 4096)):
            n = blocks.rows(base ^ (kk * 32))
            for x in range(2):
                scores[x][2 * b] = ptx.mma16(scores[x][2 * b], a[x], n[:2])
                scores[x][2 * b + 1] = ptx.mma16(scores[x][2 * b + 1], a[x], n[2:])
    if not half:
        cute.arch.sync_threads()  # the second parts of the operands need more room
    # tiles of the triangular system, [16,16] each: L10, L20, L21, L30, L31, L32, then the inverses A0, A1, A2
    place = row * 32 + ((t.lane // 16) ^ ((row // 4) % 2)) * 16
    spots = [[t.s_q + i * 512 + place for i in range(8)] + [t.s_table + place]]
    if not half:
        spots.append([t.s_q + 8192 + i * 512 + place for i in range(9)])
    left = []
    for b in range(2):
        x = [*scores[1][2 * b], *scores[1][2 * b + 1]]
        left.append(blocks.operand([x[i] * t.beta[2 + i // 2 % 2] for i in range(8)], half))
    own_parts = blocks.operand(own, half)
    slot = (t.is0 * 5 + t.is2 + t.is3 * 3) * 512
    for part, at in enumerate(spots):
        blocks.put(at[0] + slot, left[0][part])
        blocks.put_if(wide, at[0] + slot + 512, left[1][part])
        blocks.put_if(t.is0 + t.is1, at[6] + t.w * 512, own_parts[part])
        blocks.put_if(t.is2, at[8], own_parts[part])
    cute.arch.sync_threads()

    # ---------------------------------------------------------------- Aqk over the raw k, Akk over g: rows of 128 bytes
    cell = [row * 128 + ((2 * b + t.lane // 16) ^ (row % 8)) * 16 for b in range(4)]
    band = t.w * 2048
    s_qk, s_kk = t.s_q + TILE, t.s_q + 2 * TILE
    q_blocks = [blocks.packed([*scores[0][2 * b], *scores[0][2 * b + 1]]) for b in range(2)]
    beside = row * 128 + ((t.is0 * 4 + t.lane // 16) ^ (row % 8)) * 16
    blocks.put(s_qk + t.target * 2048 + beside, q_blocks[0])
    blocks.put_if(wide, s_qk + t.target * 2048 + cell[1], q_blocks[1])
    blocks.put(s_qk + band + row * 128 + ((2 * t.w + t.lane // 16) ^ (row % 8)) * 16, diag)
    for b in range(1, 4):
        blocks.put_if(Int32(t.w < b), s_qk + band + cell[b], None)
    for j, x in blocks.inverse_row(own, (t.is0, t.is1, t.is2, t.is3), spots, half):
        blocks.put(s_kk + band + cell[j], blocks.packed(x))
    cute.arch.sync_threads()
    at = t.lane // 8
    for i in range(4):
        p = None if cfg.full else Int32(t.row0 + at + 4 * i < t.n_t)
        spot = band + at * 128 + i * 512 + ((t.lane % 8) ^ (at + 4 * (i % 2))) * 16
        for base, x in ((t.a_qk, s_qk), (t.a_kk, s_kk)):
            address = base + Int64((t.row0 + at) * (cfg.HV * 128) + t.lane % 8 * 16)
            blocks.store("b32", address, i * cfg.HV * (4 * 128), ptx.lds_frag(x + spot), p)


@cute.kernel
def _kernel(
    mQ, mK, mG, mAlog, mBias, mBeta, oTiles, oVec, oAqk, oAkk, oQ, oK, oGk, oQr, oKr, oBeta, mCu, mChunks, T, scale,
    lower_bound, beta_scale, cfg: cutlass.Constexpr,
):
    (tid, _, _), (hv, nth, batch) = cute.arch.thread_idx(), cute.arch.block_idx()
    # first token of the chunk in the flattened batch, and how many of its 64 rows exist
    if const_expr(cfg.varlen):
        chunk = nth
        seq = Int64(mChunks[2 * nth])
        first = Int64(mCu[seq]) + Int64(mChunks[2 * nth + 1]) * 64
        n_t = Int32(cutlass.min(Int64(mCu[seq + 1]) - first, Int64(64)))
    else:
        chunk = batch * ((T + 63) // 64) + nth
        first = Int64(batch) * T + nth * 64
        n_t = cutlass.min(T - nth * 64, 64)
    smem = cute.arch.alloc_smem(Uint32, cfg.smem // 4, 1024).toint()
    t = types.SimpleNamespace(n_t=n_t, lane=tid % 32, w=cute.arch.make_warp_uniform(tid // 32))
    t.r, t.lc, t.row0 = t.lane // 4, t.lane % 4, t.w * 16
    t.c, t.last = t.lc * 2, Int32(t.r == 7)
    t.is0, t.is1, t.is2, t.is3 = (Int32(t.w == x) for x in range(4))
    t.target = t.w + t.is0 * 3  # the row block of this warp's products with other blocks
    t.rows = [t.row0 + t.r, t.row0 + t.r + 8]
    t.live = [Int32(x < n_t) for x in t.rows]
    # addresses of the chunk's first row in each layout, or of the thread's own place
    H, HV = cfg.H, cfg.HV
    head, qhead, at = first * HV + hv, first * H + hv // (HV // H), Int64(chunk) * HV + hv
    t.first_head = Int32(hv % (HV // H) == 0)
    t.a_q, t.a_k = (x.iterator.toint() + qhead * (K * 2) for x in (mQ, mK))
    t.a_g, t.a_bias = mG.iterator.toint() + head * (K * cfg.g_bytes), mBias.iterator.toint() + hv * (K * 4)
    t.a_qk, t.a_kk = oAqk.iterator.toint() + head * 128, oAkk.iterator.toint() + head * 128
    t.a_tiles = oTiles.iterator.toint() + at * (3 * TILE) + Int64(t.rows[0] * 256 + t.lc * 16)
    t.a_vec = oVec.iterator.toint() + at * ((K + 64) * 4)
    t.a_gk = oGk.iterator.toint() + head * (K * 4) + Int64(t.rows[0] * (HV * K * 4) + t.lc * 32)
    t.a_qn, t.a_kn = oQ.iterator.toint(), oK.iterator.toint()
    t.q_place = qhead * (K * 2) + Int64(t.rows[0] * (H * K * 2) + t.lc * 16)
    # places in shared memory, q's tile first; the thread's own is in its first row
    t.s_q, t.s_table = smem, smem + 3 * TILE + EXTRA
    t.s_factor = t.s_table + 2 * TABLE + t.w * FACTORS
    t.s_bias = t.s_table + 2 * TABLE + 4 * FACTORS
    t.s_logs = t.s_bias + K * 4
    t.s_offset = t.s_logs + 2 * TABLE + t.w * 256
    t.s_raw = smem + (cfg.smem - RAW)
    t.mine = smem + t.w * 4096 + t.r * 256 + (t.lc ^ blocks.turned(t.r)) * 16
    t.g_col = (t.r // 2) * 8 + t.r % 2  # the first of this thread's columns of the gates, transposed; then every second

    _copy_rows(cfg, t)
    # ---------------------------------------------------------------- small things, meanwhile
    t.beta = []
    for i in range_constexpr(4):
        token = t.rows[i % 2] if i < 2 else t.target * 16 + t.r + 8 * (i - 2)
        value = Float32(mBeta[head + Int64(cutlass.min(token, n_t - 1)) * HV])
        if const_expr(cfg.beta_sigmoid):
            value = beta_scale * ptx.rcp(1.0 + ptx.ex2(value * (-LOG2_E)))
        t.beta.append(value)
    for i in range_constexpr(2):
        lane0 = Int32(t.lc == 0)
        if const_expr(cfg.tiles):
            value = ptx.pick(t.live[i], t.beta[i], Float32(0.0))
            blocks.store("f32", t.a_vec + Int64(t.rows[i] * 4), K * 4, [value], lane0)
        if const_expr(cfg.beta_out):
            place = oBeta.iterator.toint() + head * 4 + Int64(t.rows[i] * (HV * 4))
            blocks.store("f32", place, 0, [t.beta[i]], lane0 * t.live[i])
    rate = Float32(1.0)
    if const_expr(cfg.has_A):
        rate = ptx.ex2(Float32(mAlog[hv]) * LOG2_E)
    t.rate = rate * (-UNIT if cfg.gate == "softplus" else -LOG2_E)
    t.bound = lower_bound * (LOG2_E * UNIT)
    t.sum_a = blocks.middle_fragment(t.r, t.c, n_t - t.row0)
    blocks.wait_group(1)
    cute.arch.sync_warp()
    t.rq, t.rk, t.qk, t.q_rstd = [], [], [], []
    for i, (qq, qk, kk) in enumerate(blocks.row_dots(smem + t.w * 4096, TILE, t.lane, cfg.l2norm)):
        if const_expr(cfg.l2norm):
            rstd = [blocks.rsqrt(x + 1e-6) for x in (qq, kk)]
            t.q_rstd.append(rstd[0])
            t.rk.append(rstd[1])
            t.rq.append(rstd[0] * scale)
            t.qk.append(qk * t.rq[i] * rstd[1])
            if const_expr(cfg.norms):
                for base, value in ((oQr, rstd[0]), (oKr, rstd[1])):
                    place = base.iterator.toint() + qhead * 4 + Int64(t.rows[i] * (H * 4))
                    blocks.store("f32", place, 0, [value], t.live[i] * Int32(t.lc == 0) * t.first_head)
        else:
            t.rq.append(scale)
            t.qk.append(qk * scale)
    blocks.wait_group(0)
    cute.arch.sync_warp()
    # scores inside the warp's 16 rows, two columns of q then of k: among rows 0-7, 8-15, and of 8-15 with 0-7
    acc = ptx.zeros(12)
    for s in cutlass.range(SLABS, unroll=1):
        acc = _slab(cfg, t, s, acc)
    _close(cfg, t, acc[:4], acc[4:8], acc[8:])


class _Config:
    """What the kernel is specialised for. Wanted are, if tiles: the scan's operands; units: normalised q, k; norms:
    q_rstd, k_rstd."""

    def __init__(self, *key):
        names = "H HV varlen full gate l2norm beta_sigmoid has_A has_bias g_bytes tiles gk units norms beta_out"
        self.__dict__.update(zip(names.split(), key, strict=True))
        self.floor = 32.0 if self.gk else 31.5  # 8 steps of 31.5 leave 2^-126 from their middle on, a normal number
        self.smem = 3 * TILE + EXTRA + 2 * TABLE + 4 * FACTORS + K * 4
        self.smem += (2 * TABLE + 1024) * self.gk + RAW * (self.g_bytes == 4)
        self.ctas = 2 if self.g_bytes == 4 else KEEPING if self.gk or self.units else CTAS


def _launcher(cfg):
    @cute.jit
    def start(
        mQ, mK, mG, mAlog, mBias, mBeta, oTiles, oVec, oAqk, oAkk, oQ, oK, oGk, oQr, oKr, oBeta, mCu, mChunks, T: Int32,
        scale: Float32, lower_bound: Float32, beta_scale: Float32, chunks: Int32, batch: Int32, stream,
    ):
        _kernel(
            mQ, mK, mG, mAlog, mBias, mBeta, oTiles, oVec, oAqk, oAkk, oQ, oK, oGk, oQr, oKr, oBeta, mCu, mChunks, T,
            scale, lower_bound, beta_scale, cfg,
        ).launch(
            grid=[cfg.HV, chunks, batch], block=[THREADS, 1, 1], min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=100, stream=stream,
        )

    return start


@functools.cache
def _compile(cfg_key, dtypes, options="--enable-tvm-ffi"):
    """The kernel for one specialisation; takes the 18 tensors flattened, then the numbers."""
    numbers = (Int32(1), Float32(1.0), Float32(0.0), Float32(1.0), Int32(1), Int32(1))
    return cutecall.compile_for(_launcher(_Config(*cfg_key)), dtypes, numbers, options)


# ----------------------------------------------------------------------------------------------------------- host code
SPAN, FRONT = "fwd.norm..fwd.out", "fwd.norm..fwd.intra"
FRONT_WRITES = ("q", "k", "q_rstd", "k_rstd", "beta", "gk", "Aqk", "Akk")
WRITES = {SPAN: (*FRONT_WRITES, "o", "ht")}


def supports(p) -> tuple[bool, str]:
    """Every gate, length, packing and head grouping; the widths and types this file was written for."""
    if p.arch[0] != 9:
        return False, f"needs compute capability 9.x, got {p.arch[0]}.{p.arch[1]}"
    if p.K != K:
        return False, f"needs K={K}, got {p.K}"
    if p.V % 128:
        return False, f"needs V a multiple of 128, got {p.V}"
    if p.dtype != torch.bfloat16:
        return False, f"needs bf16 q, k, v, got {p.dtype}"
    if p.g_dtype not in (torch.bfloat16, torch.float32) or p.beta_dtype == torch.float64:
        return False, f"needs a bf16 or fp32 gate and no fp64 beta, got {p.g_dtype}, {p.beta_dtype}"
    if not p.NT:
        return False, "needs a token"
    if max(p.B, p.chunks_per_row) > 65535:
        return False, f"needs at most 65535 chunks in a row and rows (a grid's limit), got {p.chunks_per_row}, {p.B}"
    if max(p.B * p.T, p.NT * p.HV * 192) >= 2**31:
        return False, f"needs fewer than 2^31 / 192 chunks times heads (a descriptor's coordinates), got {p.NT * p.HV}"
    return True, ""


def spans(p):
    """Where 010's segments serve, what comes before them; elsewhere the whole forward."""
    few = p.N * p.HV * (p.V // 128) <= 66 and p.NT >= 16 * p.N
    return {FRONT: run_front} if few else {SPAN: run}


def _prepare(q_raw, k_raw, g_raw, A_log, dt_bias, beta_raw, p, cu_seqlens, chunk_indices, wanted, tiles):
    """Aqk, Akk and what is wanted of q, k, q_rstd, k_rstd, beta, gk; the scan's operands and vectors, if `tiles`."""
    new, f32 = q_raw.new_empty, {"dtype": torch.float32}
    made = {"Aqk": new((p.B, p.T, p.HV, 64)), "Akk": new((p.B, p.T, p.HV, 64))}
    units, norms = (p.l2norm and not wanted.isdisjoint(pair) for pair in (("q", "k"), ("q_rstd", "k_rstd")))
    if units:
        made |= {"q": new(q_raw.shape), "k": new(k_raw.shape)}
    if norms:
        made |= {"q_rstd": new(q_raw.shape[:3], **f32), "k_rstd": new(k_raw.shape[:3], **f32)}
    beta_out = p.beta_sigmoid and "beta" in wanted
    if beta_out:
        made["beta"] = new(beta_raw.shape, **f32)
    if "gk" in wanted:
        made["gk"] = new(g_raw.shape, **f32)
    operands, vec = handover(p, q_raw) if tiles else (None, None)
    key = (p.H, p.HV, p.varlen, not p.varlen and p.T % 64 == 0, p.gate, p.l2norm, p.beta_sigmoid, A_log is not None,
           dt_bias is not None, p.g_dtype.itemsize, tiles, "gk" in made, units, norms, beta_out)
    bias = None if dt_bias is None else dt_bias.float()
    given = (q_raw, k_raw, g_raw, A_log, bias, beta_raw, operands, vec)
    given += tuple(made.get(n) for n in ("Aqk", "Akk", "q", "k", "gk", "q_rstd", "k_rstd", "beta"))
    none, table = (cutecall.absent(q_raw.device, x) for x in (torch.float32, torch.int64))
    tensors = [none if x is None else cutecall.flat(x) for x in given]
    tensors += [table if x is None else x.reshape(-1) for x in (cu_seqlens, chunk_indices)]
    _compile(key, tuple(x.dtype for x in tensors))(
        *tensors, p.T, p.scale, 0.0 if p.lower_bound is None else p.lower_bound, p.beta_scale, p.chunks_per_row,
        1 if p.varlen else p.B,
    )
    if not p.l2norm:
        made |= {"q": q_raw, "k": k_raw, "q_rstd": None, "k_rstd": None}
    if not p.beta_sigmoid:
        made["beta"] = beta_raw
    return made, operands, vec


def run_front(
    *, q_raw, k_raw, beta_raw, g_raw, A_log, dt_bias, p, cu_seqlens, chunk_indices, wanted=frozenset(FRONT_WRITES)
):
    """The first kernel alone. Returns Aqk, Akk [B,T,HV,64] p.dtype, upper parts zero; and of the others those that are
    `wanted`: q, k (p.dtype; the raw ones when nothing is normalised), q_rstd, k_rstd [B,T,H] fp32 or None, beta
    [B,T,HV] (fp32; the raw one when there is no sigmoid), gk [B,T,HV,K] fp32."""
    return _prepare(
        q_raw, k_raw, g_raw, A_log, dt_bias, beta_raw, p, cu_seqlens, chunk_indices, wanted, tiles=False
    )[0]


def run(
    *, q_raw, k_raw, v, beta_raw, g_raw, A_log, dt_bias, h0, p, cu_seqlens, chunk_indices, chunk_offsets,
    wanted=frozenset(WRITES[SPAN]),
):
    """Tensors as in the chain's contract: what run_front returns, o [B,T,HV,V] (p.dtype), and ht, fp32 [N,HV,K,V] or
    None."""
    made, operands, vec = _prepare(
        q_raw, k_raw, g_raw, A_log, dt_bias, beta_raw, p, cu_seqlens, chunk_indices, wanted, tiles=True
    )

    o, ht = scan(
        operands=operands, vec=vec, Akk=made["Akk"], Aqk=made["Aqk"], v=v, h0=h0, p=p, cu_seqlens=cu_seqlens,
        chunk_offsets=chunk_offsets,
    )
    return made | {"o": o, "ht": ht}


SPANS = {SPAN: run}
