"""All gradients of a chunk, as 019; the key side holds its columns as rows of its products, and transposes nothing.

Parent: 019.
Delta: the key side computes dq^T and dk^T. A sum of [16 columns, 8 rows] lies in a warp's registers as the other
    factor of the next product is wanted, so what is formed there is an operand without movmatrix; D and E come by
    ldmatrix as they are, half as often, as nothing is fetched for two halves of a warp's columns. q, k, the states'
    parts, the raw gate, dq, dk and dg pass between rows of memory and columns of registers by ldmatrix and stmatrix,
    which transpose for nothing. The same products of the same operands as 019's, and the same value side.
Why it should be faster: 019's key side is bound by the pipe of loads, stores and shuffles. Of some 775 instructions of
    it a warp and chunk 176 are movmatrix; here are 497.
Constraints: sm_90, K = 128, V a multiple of 64, bf16. Any gate (exponents are <= 0, or within 112 of 0), any T, packed
    sequences, GVA; token and state rows below 2^31 (descriptors take 32-bit coordinates).
"""

import functools
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import torch
import triton
import triton.language as tl
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kernel_fun._common import cutecall, ptx
from kernel_fun._common.launch import launch
from kernel_fun._common.problem import CHUNK
from kernel_fun._common.tiles import tiles
from kernel_fun.kda.stages.k011_bwd_grads_ring import (
    BV,
    VALUE_STAGES,
    VALUE_WARPS,
    ZERO_PROGRAMS,
    _multiprocessors,
    zero_tail_kernel,
)
from kernel_fun.kda.stages.k015_bwd_keys import (
    L2,
    LN_2,
    LOG2_E,
    PITCH,
    SMEM,
    THREADS,
    WARP,
    K,
    _below,
    _gate_bwd,
    _Names,
    _packed,
    _quads,
    _times,
)
from kernel_fun.kda.stages.k015_bwd_keys import supports as supports
from kernel_fun.kda.stages.k019_bwd_keys_exact import GROUP_ROWS, POINTERS, _Config, group_kernel, value_kernel

FAMILY = "kda"
# Shared memory, in bytes: 015's, in another order. Each of 8 warps has 16 columns of its own, 32 bytes of a row. In 8
# rows of a tile the two 16-byte halves change places from the fifth row on, so that eight halves meet no bank twice.
# For each 8 rows such tiles of q and k; for each 16 of dk through kg (and then of dg); of one block of 16 rows at a
# time those of dq and dk from the states (at the end row dots), of the raw gate (at the end dbeta); the total decay.
# gk, and then dq and dk, have 64 bytes a row, two rows beside each other: 128 bytes of every 8 rows, then all that is
# two rows further. Between these stretches is room for the second bank of four rows, and so for dt_bias.
KEYS, GK, XD, XS, XG, EDGE = 256, 4096, 8288, 10336, 11360, 11872
STRETCH = 8 * 128 + 32
BIAS = GK + 8 * 128
E_AT = 64 * PITCH
_ptx = cute.arch.inline_ptx
SUMS_ROWS, SUMS_COLUMNS = 256, 32  # of partial sums that a program loads at once
TOGETHER = 2**27  # bytes of what passes between value and key side that are allocated in one piece


# ===================================================================================================== PTX, as in `ptx`
# Eight rows are here those of four lanes, 2 (lane % 4) and the next.
def put_turned(addr, x):
    """Two or four 8x8 bf16 matrices to shared memory, transposed: the opposite of `ptx.ldmatrix_n`."""
    n = len(x)
    regs = ", ".join(f"{{$r{i + 1}}}" for i in range(n))
    _ptx(f"stmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16 [{{$r0}}], {{{regs}}};", read_only_args=[addr, *x])


def of_lane(x, lane):
    """x of one of the four lanes."""
    return _ptx(
        f"shfl.sync.idx.b32 {{$w0}}, {{$r0}}, {lane}, 0x1c1f, -1;", write_only_types=[Float32], read_only_args=[x]
    )


def sum_later_lanes(x):
    """The sum over the later ones of the four lanes."""
    return _ptx(
        "{ .reg .pred p; .reg .f32 x, y, z; shfl.sync.down.b32 y|p, {$r0}, 1, 0x1c1f, -1; "
        "selp.f32 y, y, 0f00000000, p; add.f32 x, {$r0}, y; shfl.sync.down.b32 z|p, x, 2, 0x1c1f, -1; "
        "@p add.f32 y, y, z; mov.f32 {$w0}, y; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def bound_pairs(e, step, limit):
    """`ptx.bound_exponents` where the eight rows are those of four lanes."""
    n = len(e)
    r, w = [f"{{$r{i}}}" for i in range(n)], [f"{{$w{i}}}" for i in range(n)]
    code = [f"{{ .reg .pred p, q; .reg .f32 a, b, m, x, y, z; abs.f32 m, {r[0]};"]
    code += [f"abs.f32 x, {x}; max.f32 m, m, x;" for x in r[1:]]
    code += [f"mov.f32 {x}, {y};" for x, y in zip(w, r, strict=True)]
    code.append(f"setp.gt.f32 p, m, {float(limit)}; vote.sync.any.pred q, p, -1; @!q bra.uni BOUNDED;")
    for i in range(0, n, 2):
        code.append(f"shfl.sync.up.b32 y|p, {r[i + 1]}, 1, 0x1c00, -1; sub.f32 a, y, {r[i]};")
        code.append(f"sub.f32 a, a, {float(step)}; max.f32 a, a, 0f00000000; selp.f32 a, a, 0f00000000, p;")
        code.append(f"sub.f32 b, {r[i]}, {r[i + 1]}; sub.f32 b, b, {float(step)}; max.f32 b, b, 0f00000000;")
        code.append("add.f32 x, a, b; shfl.sync.up.b32 y|p, x, 1, 0x1c00, -1; selp.f32 y, y, 0f00000000, p;")
        code.append("add.f32 x, x, y; shfl.sync.up.b32 z|p, x, 2, 0x1c00, -1; @p add.f32 y, y, z;")
        code.append(f"add.f32 a, a, y; add.f32 b, b, a; add.f32 a, a, {r[i]}; add.f32 b, b, {r[i + 1]};")
        code.append("shfl.sync.idx.b32 y, b, 1, 0x1c1f, -1; shfl.sync.idx.b32 z, a, 2, 0x1c1f, -1; add.f32 y, y, z;")
        code.append(f"fma.rn.f32 {w[i]}, y, 0fBF000000, a; fma.rn.f32 {w[i + 1]}, y, 0fBF000000, b;")
    code.append("BOUNDED: }")
    return _ptx(" ".join(code), write_only_types=[Float32] * n, read_only_args=[*e])


# =================================================================================================== a warp, 16 columns
# Of each 8 rows a thread has two, 2 (lane % 4) and the next, in columns lane / 4 and 8 further. Its four values, two
# rows of a column and two of the other, are a C fragment of the transposed [columns, rows], and packed half of an A
# fragment. Of a block's 16 rows i = 0 are the lower 8, i = 1 the upper. What belongs to a row comes in pairs, what
# belongs to a column as well.
def _rows(x):
    return [x[0], x[1], x[0], x[1]]


def _columns(x):
    return [x[0], x[0], x[1], x[1]]


def _line(row):
    """Where one row of 8 is in gk's place."""
    return row // 2 * STRETCH + row % 2 * 64


def _of_columns(address):
    return [ptx.lds1(address + j * 32) for j in range(2)]


def _gates(at, j):
    """gk of the j-th 8 rows."""
    return [ptx.lds1(at.gate + GK + j * 128 + n % 2 * 64 + n // 2 * 32) for n in range(4)]


def _of_row(at, j, row):
    """gk of one row of the j-th eight."""
    return _of_columns(at.column + GK + j * 128 + _line(row))


def _start(cfg, io, at, tid, n_t):
    """Begin all other copies, in three groups: what the sources of other blocks need, the rest, the raw gate. The CTA
    copies whole rows, a warp two of bf16 or one of gk at a time; eight lanes take parts that meet no bank twice."""
    warp, lane = tid // 32, tid % 32
    low, part = warp * 2 + lane // 4 % 2, lane % 4 + lane // 8 * 4  # row of 16, 16 bytes of it
    to = at.smem + part // 2 * WARP + low % 8 * 32 + (part % 2 ^ low % 8 // 4) * 16

    def rows(place, pitch, base, head, heads):
        source = base + (head + Int64(low) * heads) * (K * 2) + part * 16
        for m in range(4):
            ptx.copy_row(
                to + low // 8 * pitch + place + m * 2 * pitch, source, 16 * m * heads * K * 2, 16, n_t - low, 16 * m, L2
            )

    gates = io.gk + at.head * (K * 4) + lane * 16
    for m in range(8):
        row = Int64(warp + ptx.at_most(n_t - 1 - warp, 8 * m))
        place = at.smem + lane // 4 * WARP + GK + warp // 2 * STRETCH + warp % 2 * 64 + lane % 4 * 16
        ptx.copy(place + m * 128, gates + row * (at.sG * 4), 16, L2)
    rows(KEYS, 512, io.k, at.qhead, cfg.H)
    rows(XD, 256, io.xd, at.head, cfg.HV)
    piece = lane % 4
    ptx.copy(at.own + EDGE + piece * 16, io.tail + piece * 16, 16)
    if cfg.has_bias:
        ptx.copy(at.own + BIAS + piece // 2 * STRETCH + piece % 2 * 16, io.bias + piece * 16, 16)
    ptx.commit()
    rows(0, 512, io.q, at.qhead, cfg.H)
    row, part = tid // 8, tid % 8
    for i in range(2):  # nobody reads what is above the diagonal: there zeros go, all to the row's padding
        above = Int32(part > row // 8 + 4 * i)
        for x, base in enumerate((io.D, io.E)):
            to = at.matrices + x * E_AT + (row + 32 * i) * PITCH + (part + above * (8 - part)) * 16
            source = base + (at.head + Int64(row) * cfg.HV) * 128 + part * 16
            ptx.copy_row(to, source, 32 * i * cfg.HV * 128, 16, (n_t - row) * (1 - above), 32 * i, L2)
    row, x = tid % 64, tid // 64 % 2  # to the right of each 8 x 8 block on the diagonal what it leaves
    to = at.matrices + x * E_AT + row * PITCH + row // 8 * 16 + 16
    ptx.copy_row(to, io.rest + (at.head + Int64(row) * cfg.HV) * 32 + x * 16, 0, 16, n_t - row, 0, L2)
    _copy_inputs(cfg, io, at, 3)
    _copy_gate(cfg, io, at, 3)


def _copy_inputs(cfg, io, at, b):
    """Begin the copies of what only block b needs, a lane 16 bytes of a row."""
    for x, base in enumerate((io.xq, io.xu)):
        to = at.piece + XS + at.upper * 256 + x * 256
        ptx.copy_row(to, base + at.g * 2, 16 * b * at.sG * 2, 16, at.left, 16 * b, L2)
    ptx.commit()


def _copy_gate(cfg, io, at, b):
    if cfg.gate != "log" and cfg.g_bytes == 2:
        ptx.copy_row(at.piece + XG, io.graw + at.g * 2, 16 * b * at.sG * 2, 16, at.left, 16 * b, L2)
    ptx.commit()


def _raw_gate(cfg, io, at, b, i):
    """The raw gate of 8 rows: where it is fp32, from memory."""
    if cfg.g_bytes == 2:
        return _quads(ptx.ldmatrix_n(at.turned + XG + i * 256, 2, True))
    row, x = 16 * b + 8 * i, []
    for n in range(4):
        off = (row + n % 2) * at.sG * 4 + n // 2 * 32
        x.append(ptx.load_row("f32", 1, Float32, io.graw + at.g32, off, at.later, row + n % 2))
    return x


def _sources(cfg, at):
    """Each block but the last as a source for later blocks: bf16(k 2^(gk at its end - gk)) as A fragments. Returns also
    the decays over the second and the third block, and what all rows' dg share."""
    ends = [_of_row(at, 2 * a + 1, 7) for a in range(3)]
    total, sources = ptx.zeros(2), []
    for b in range(4):
        ks, pds = (ptx.ldmatrix_n(x, 4, True) for x in (at.both + KEYS + b * 1024, at.turned + XD + b * 512))
        packed = []
        for i in range(2):
            k, pd = _quads(ks[2 * i : 2 * i + 2]), _quads(pds[2 * i : 2 * i + 2])
            if cfg.scaled:
                k = _times(k, _rows(ptx.lds2f(at.rows + (2 * b + i) * 128 + 24)))
            for n in range(4):
                total[n // 2] = total[n // 2] + k[n] * pd[n]
            if b < 3:
                packed += _packed(_times(k, _below(_columns(ends[b]), _gates(at, 2 * b + i))))
        if b < 3:
            sources.append(packed)
    tail = _of_columns(at.column + EDGE)
    shared = [ptx.sum_lanes(x, 1, 2) + y for x, y in zip(total, tail, strict=True)]
    return sources, [_below(ends[m], ends[m - 1]) for m in (1, 2)], shared


def _add(sums, name, f, x):
    """Sums of 8 rows: dq, zk (its part of dk that beta multiplies), uk (the other), dg; lists of four."""
    sums[name] = [s + y for s, y in zip(sums[name], _times(f, x), strict=True)]


def _split(x, f):
    """x f as the sum of two bf16, both as halves of A fragments."""
    y = _times(x, f)
    hi = _packed(y)
    return hi, _packed([v - w for v, w in zip(y, _quads(hi), strict=True)])


def _from_middle(at, j, g):
    """2^(gk in the middle of 8 rows - gk); targets take its inverse, so that only one of the two stays in registers."""
    e = bound_pairs([x - y for x, y in zip(g, _columns(_of_row(at, j, 3)), strict=True)], 32, 112)
    return [ptx.ex2(-x) for x in e]


def _back(qs, ks, near, rest=None):
    """What targets hand to sources in two parts of an operand each, through an 8 x 8 block of D and of E."""
    (qh, ql), (kh, kl) = qs, ks
    u = ptx.mma16(ptx.mma16(ptx.zeros(4), (*ql, *kl), near), (*qh, *kh), near)
    return u if rest is None else ptx.mma16(u, (*qh, *kh), rest)


def _inside(at, b, i, q, k, kb, g, low, sums):
    """The pairs of 8 rows, from their middle, and of the upper 8 of a block with the lower, from the last of these,
    whose operands stay the same. dq, zk and uk get 16 bits of each; dg follows from them."""
    fm = _from_middle(at, 2 * b + 1, g) if i else low.fm
    fp = [ptx.rcp(x) for x in fm]
    row = (16 * b + 8 * i) * PITCH + b * 32
    dh, eh, dl, el = ptx.ldmatrix_n(at.near + row + i * 16, 4, False)
    hi, lo = _split(k, fm) if i else low.source
    for name, h, rest in (("dq", dh, dl), ("zk", eh, el)):
        _add(sums, name, fp, ptx.mma8(ptx.mma8(ptx.mma8(ptx.zeros(4), lo, h), hi, rest), hi, h))
    if i:
        f = _below(g, _columns(_of_row(at, 2 * b, 7)))
        moved = _times(f, _columns(low.last))
        for name, m in zip(("dq", "zk"), ptx.ldmatrix_n(at.near + row, 2, False), strict=True):
            _add(sums, name, moved, ptx.mma8(ptx.mma8(ptx.zeros(4), low.source[1], m), low.source[0], m))
    sums.dg = [q[n] * sums.dq[n] + kb[n] * sums.zk[n] for n in range(4)]
    m = ptx.ldmatrix_n(at.near + row + i * 16, 4, True)
    u = _back(_split(q, fp), _split(kb, fp), m[:2], m[2:])
    if i:
        low.u = _times(_back(_split(q, f), _split(kb, f), ptx.ldmatrix_n(at.near + row, 2, True)), _columns(low.last))
    else:
        u = [x + y for x, y in zip(u, low.u, strict=True)]
    sums.uk = _quads(ptx.ldmatrix_n(at.turned + XD + (2 * b + i) * 256, 2, True))
    _add(sums, "uk", fm, u)
    sums.dg = [x - y for x, y in zip(sums.dg, _times(k, sums.uk), strict=True)]


def _as_target(at, b, i, q, kb, g, before, decays, sources, sums):
    """8 rows of block b with all earlier blocks, seen from the end of the block before. Returns their operands."""
    f = _below(g, _columns(before))
    qx, kx = _packed(_times(q, f)), _packed(_times(kb, f))
    x, z = ptx.zeros(4), ptx.zeros(4)
    for a in range(b):
        if a:
            x, z = (_times(y, _columns(decays[a - 1])) for y in (x, z))
        m = ptx.ldmatrix_n(at.block + (16 * b + 8 * i) * PITCH + a * 32, 4, False)
        x, z = ptx.mma16(x, sources[a], m[:2]), ptx.mma16(z, sources[a], m[2:])
    for name, rounded, y in (("dq", qx, x), ("zk", kx, z)):
        _add(sums, name, f, y)
        _add(sums, "dg", _quads(rounded), y)
    return qx, kx


def _as_source(at, b, i, g, end, decays, source, targets, sums):
    """8 rows of block b with all later blocks, seen from its end. The same operand times its product leaves dg that a
    later row's adds."""
    u = ptx.zeros(4)
    for t in range(3, b, -1):
        if t < 3:
            u = _times(u, _columns(decays[t - 1]))
        m = ptx.ldmatrix_n(at.across + 16 * t * PITCH + b * 32 + i * 16, 4, True)
        u = ptx.mma16(ptx.mma16(u, targets[t][0], m[:2]), targets[t][1], m[2:])
    _add(sums, "uk", _below(_columns(end), g), u)
    _add(sums, "dg", [-x for x in _quads(source)], u)


def _halved(flag, x, y, lanes):
    """Sums over two lanes of x where the flag is 0, else of y."""
    return ptx.pick(flag, y, x) + ptx.exchange(ptx.pick(flag, x, y), lanes)


def _gradients(cfg, io, at, lane, rate, lower_bound):
    """Everything of the warp's columns but dbeta; returns their share of dA_log."""
    ptx.wait_group(2)
    ptx.sync_cta()
    sources, decays, shared = _sources(cfg, at)
    ptx.wait_group(1)  # all but the raw gate, as for the blocks to come, whose copies are each warp's own
    ptx.sync_cta()
    targets, db_rows, dA, dbias, end = [None] * 4, [None] * 4, Float32(0.0), ptx.zeros(2), None
    unit = LOG2_E if cfg.gate == "softplus" else 1.0
    for b in (3, 2, 1, 0):
        if b < 3:
            ptx.wait_group(1)
            ptx.sync_warp()
        before = _of_row(at, 2 * b - 1, 7) if b else None
        bias = ptx.zeros(2)
        if cfg.has_bias:
            bias = [unit * ptx.lds1(at.column + BIAS + j * STRETCH) for j in range(2)]
        db, ours, low = [None, None], [None, None], _Names()

        # ---- the lower rows as sources, for the upper ones; all else of them is read again: registers are short
        k = _quads(ptx.ldmatrix_n(at.turned + KEYS + 2 * b * 512, 2, True))
        if cfg.scaled:
            k = _times(k, _rows(ptx.lds2f(at.rows + 2 * b * 128 + 24)))
        low.fm = _from_middle(at, 2 * b, _gates(at, 2 * b))
        low.source, low.last = _split(k, low.fm), [ptx.rcp(of_lane(low.fm[n], 3)) for n in (1, 3)]

        for i in (1, 0):
            j, row = 2 * b + i, 16 * b + 8 * i
            g, x = _gates(at, j), ptx.ldmatrix_n(at.turned + j * 512, 4, True)
            q, k, (*beta, d0, d1) = _quads(x[:2]), _quads(x[2:]), ptx.lds4(at.rows + j * 128)
            if cfg.scaled:
                *q_rstd, k0, k1 = ptx.lds4(at.rows + j * 128 + 16)
                q, k = _times(q, _rows(q_rstd)), _times(k, _rows([k0, k1]))
            kb, x = _times(k, _rows(beta)), ptx.ldmatrix_n(at.turned + XS + i * 512, 4, True)
            sums = _Names(dq=_quads(x[:2]), zk=_quads(x[2:]))  # begin with the states' parts
            if b and not i:
                ptx.sync_warp()
                _copy_inputs(cfg, io, at, b - 1)
            _inside(at, b, i, q, k, kb, g, low, sums)
            if b < 3:
                _as_source(at, b, i, g, end, decays, sources[b][2 * i : 2 * i + 2], targets, sums)
            if b:
                ours[i] = _as_target(at, b, i, q, kb, g, before, decays, sources, sums)

            # ---- add the pairs of a row with itself; dq and dk wait in gk's place
            dq = [x + d * y for x, d, y in zip(sums.dq, _rows([d0, d1]), k, strict=True)]
            dk = [z * m + u for z, m, u in zip(sums.zk, _rows(beta), sums.uk, strict=True)]
            dk = [x + d * y for x, d, y in zip(dk, _rows([d0, d1]), q, strict=True)]
            db[i] = [k[n] * sums.zk[n] + k[n + 2] * sums.zk[n + 2] for n in range(2)]
            ptx.sync_warp()  # everybody has read gk of these rows
            put_turned(at.waiting + j * 128, [*_packed(dq), *_packed(dk)])

            # ---- dg: summed over this and all later rows; through the gate; out
            dg = sums.dg
            for n in range(2):
                later = sum_later_lanes(dg[2 * n] + dg[2 * n + 1]) + shared[n]
                dg[2 * n + 1] = later + dg[2 * n + 1]
                dg[2 * n] = dg[2 * n + 1] + dg[2 * n]
                if j:
                    shared[n] = of_lane(dg[2 * n], 0)
            if cfg.gate != "log":
                if i:
                    ptx.wait_group(0)
                    ptx.sync_warp()
                graw = _raw_gate(cfg, io, at, b, i)
                for n in range(2):
                    x = [unit * v + w for v, w in zip(graw[n::2], bias, strict=True)]
                    alive = ptx.pick(Int32(at.later > row + n), rate, Float32(0.0))
                    dg[n::2], da = _gate_bwd(cfg, x, dg[n::2], alive, lower_bound)
                    dA = dA + da
                dbias = [x + dg[2 * n] + dg[2 * n + 1] for n, x in enumerate(dbias)]
            if cfg.g_bytes == 2:
                put_turned(at.turned + XD + j * 256, _packed(dg))
            else:
                for n in range(4):
                    off = (row + n % 2) * at.sG * 4 + n // 2 * 32
                    ptx.store_row("f32", io.dg + at.g32, off, at.later, row + n % 2, dg[n])
        if b:
            targets[b] = [[*ours[0][x], *ours[1][x]] for x in range(2)]
        end = before
        ptx.sync_warp()
        if b:
            _copy_gate(cfg, io, at, b - 1)
        if cfg.g_bytes == 2:
            x = ptx.lds_frag(at.piece + XD + b * 512)
            ptx.store_row("b32", io.dg + at.g * 2, 16 * b * at.sG * 2, at.left, 16 * b, *x)
        m = [_halved(lane // 16, x, y, 16) for x, y in zip(*db, strict=True)]
        db_rows[b] = _halved(lane // 8 % 2, *m, 8)
    if cfg.has_bias:
        for n in range(2):
            ptx.store_row("f32", io.dbias, n * 32, 1 - lane % 4, 0, ptx.sum_lanes(dbias[n], 1, 2))
    for m in range(2):
        ptx.sts1(at.db + m * 128, _halved(lane // 4 % 2, *db_rows[2 * m : 2 * m + 2], 4))
    return ptx.sum_lanes(dA * (LN_2 if cfg.gate == "softplus" else 1.0), 1, 2, 4, 8, 16)


def _close(cfg, io, at, warp, lane, n_t):
    """dq and dk of the warp's columns, from shared memory, through the norm: rstd (dy - y <y, dy>). A thread has four
    consecutive columns of row lane / 4 of each 8."""
    r, lc = lane // 4, lane % 4
    piece = (lc // 2 ^ r // 4) * 16 + lc % 2 * 8
    given, kept = at.own + r * 32 + piece, at.own + GK + r // 2 * STRETCH + r % 2 * 64 + piece
    out, left = (at.head + r * cfg.HV) * K + warp * 16 + lc * 4, n_t - r
    ptx.sync_warp()
    ds = [[ptx.lds2(kept + j * 128 + x * 32) for x in range(2)] for j in range(8)]
    if cfg.l2norm:  # row dots are the diagonals of products; lanes that have none write where nobody reads
        xs = [[ptx.lds2(given + j * 512 + x * KEYS) for x in range(2)] for j in range(8)]
        mine = Int32(lc == r // 2)
        dots = at.own + mine * (XS + r * 8) + (1 - mine) * (XD + lane * 8)
        for j in range(8):
            a = [xs[j][0][0], xs[j][1][0], xs[j][0][1], xs[j][1][1]]
            x, y = (ptx.mma16(ptx.zeros(4), a, d) for d in ds[j])
            ptx.sts2(dots + j * 64, [ptx.pick(r % 2, x[1], x[0]), ptx.pick(r % 2, y[3], y[2])])
    ptx.sync_cta()
    if cfg.l2norm:  # a warp sums 8 rows' over all warps, and multiplies by what remains of the norm for the rows given
        row = warp * 8 + lane % 8
        parts = [ptx.lds2f(at.smem + (lane // 8 * 2 + x) * WARP + XS + row * 8) for x in range(2)]
        rstd = [ptx.lds1(at.matrices + 2 * E_AT + row // 2 * 32 + row % 2 * 4 + x * 8) for x in (2, 3)]
        s = [ptx.sum_lanes(x + y, 8, 16) for x, y in zip(*parts, strict=True)]
        ptx.sts4(at.matrices + row * 16, [*rstd, *[x * f * f * f for x, f in zip(s, rstd, strict=True)]])
        ptx.sync_cta()
    for j in range(8):
        if cfg.l2norm:
            factors = ptx.lds4(at.matrices + j * 128 + r * 16)
        for x, base in enumerate((io.dq, io.dk)):
            d = ds[j][x]
            if cfg.l2norm:
                rstd, s = factors[x], factors[2 + x]
                d = _packed([rstd * y - s * z for y, z in zip(_quads(d), _quads(xs[j][x]), strict=True)])
            ptx.store_row("b32", base + out * 2, 8 * j * at.sG * 2, left, 8 * j, *d)


def _place(at, smem, warp, lane, n_t):
    """Where a thread's values are: its addresses in shared memory, and rows left from its own first one on."""
    own, matrices, lc = smem + warp * WARP, smem + 8 * WARP, lane % 4
    at.smem, at.own, at.matrices = smem, own, matrices
    at.column, at.gate = own + lane // 4 * 4, own + lane // 4 * 4 + lc * STRETCH
    row, tile = lane % 8, lane // 8  # of four 8 x 8 tiles, as ldmatrix takes them
    half = (tile % 2 ^ row // 4) * 16
    at.turned, at.both = (own + row * 32 + half + tile // 2 * step for step in (256, 512))
    at.waiting = own + GK + row // 2 * STRETCH + row % 2 * 64 + tile // 2 * 32 + half
    at.block = matrices + row * PITCH + tile % 2 * 16 + tile // 2 * E_AT
    at.across = matrices + (row + tile % 2 * 8) * PITCH + tile // 2 * E_AT
    at.near = matrices + row * PITCH + tile % 2 * E_AT + tile // 2 * 16
    at.rows = matrices + 2 * E_AT + lc * 32
    row, at.upper = lane // 2 % 8, lane // 16  # of 16 rows, 16 bytes each: as copies are made
    at.piece = own + at.upper * 256 + row * 32 + (lane % 2 ^ row // 4) * 16
    at.left, at.later = n_t - lane // 2, n_t - 2 * lc
    at.db = own + XG + (lane // 4 % 2 * 16 + lane // 16 * 8 + 2 * lc + lane // 8 % 2) * 4


def _addresses(cfg, at, io, warp, lane, chunk, hv, head, qhead):
    """Element offsets of the thread's first values, and rows' strides; the chunk's small vectors at its columns."""
    col, part = warp * 16, (Int64(chunk) * cfg.HV + hv) * K
    at.head, at.qhead, at.sG = head, qhead, cfg.HV * K
    at.g = (head + lane // 2 * cfg.HV) * K + col + lane % 2 * 8
    at.g32 = ((head + 2 * (lane % 4) * cfg.HV) * K + col + lane // 4) * 4  # in bytes
    io.tail, io.bias = io.tail + (part + col) * 4, io.bias + (Int64(hv) * K + col) * 4
    io.dbias = io.dbias + (part + col + lane // 4) * 4


def _row_values(at, tid, values):
    """beta, D's diagonal, norms of q and k in pairs of rows, a quarter of the CTA each."""
    x = values[0]
    for n in range(1, 4):
        x = ptx.pick(Int32(tid // 64 == n), values[n], x)
    row = tid % 64
    ptx.sts1(at.matrices + 2 * E_AT + row // 2 * 32 + row % 2 * 4 + tid // 64 * 8, x)


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
    _place(at, smem, warp, lane, n_t)
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
    _row_values(at, tid, [beta, ptx.pick(lives, values[1], zero), *values[2:]])

    dA = _gradients(cfg, io, at, lane, rate, lower_bound)
    if const_expr(cfg.has_A):
        ptx.store_row("f32", io.dA + ((Int64(chunk) * 8 + warp) * cfg.HV + hv) * 4, 0, 1 - lane, 0, dA)
    d_beta = Float32(mRows[2 * token + 1])
    _close(cfg, io, at, warp, lane, n_t)
    if tid < n_t:
        for other in range_constexpr(8):
            d_beta = d_beta + ptx.lds1(smem + other * WARP + XG + tid * 4)
        if const_expr(cfg.beta_sigmoid):
            d_beta = d_beta * beta * (1.0 - beta / beta_scale)
        oDb[token] = d_beta.to(oDb.element_type)


# ================================================================================================ sums over all chunks
@triton.jit(do_not_specialize=["NT"])
def sums_kernel(
    dA, dbias, dA_log, ddt_bias, NT, HV: tl.constexpr, K: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """dA [NT,8,HV] and dbias [NT,HV,K] over all but a head and its channels, always in the same order. A program has a
    head of dA (few bytes, if in many lines) or COLUMNS of dbias; both have as many loads in flight."""
    pid, o_r, o_c = tl.program_id(0), tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    if HAS_A:
        if pid < HV:
            AT_ONCE: tl.constexpr = ROWS * COLUMNS // 2
            o_a, sums = tl.arange(0, AT_ONCE), tl.zeros([AT_ONCE], tl.float32)
            for i in range(0, NT * 8, AT_ONCE):
                sums += tl.load(dA + (i + o_a) * HV + pid, mask=i + o_a < NT * 8, other=0.0)
            tl.store(dA_log + pid, tl.sum(sums, 0))
        pid -= HV
    if HAS_BIAS:  # noqa: SIM102  (compile-time and run-time conditions)
        if pid >= 0:
            o_c += pid * COLUMNS
            part = tl.zeros([ROWS, COLUMNS], tl.float32)
            for i in range(0, NT, ROWS):
                part += tl.load(dbias + (i + o_r) * (HV * K) + o_c[None, :], mask=i + o_r < NT, other=0.0)
            tl.store(ddt_bias + o_c, tl.sum(part, 0))


# ---------------------------------------------------------------------------------------------------------- host code
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


def _scratch(like, sizes, dtype, together):
    """Flat tensors of these sizes; parts of one if `together`, which for a short sequence is what the host has time
    for (for a long one it would have to be found in one piece)."""
    if together:
        return like.new_empty(sum(sizes), dtype=dtype).split_with_sizes(sizes)
    return [like.new_empty(n, dtype=dtype) for n in sizes]


def value_side(*, v, v_new, gk, beta, Akk, h, do, dh, dv, tail, rows, of, p, cu_seqlens, chunk_indices):
    """019's, which also says what they hold; what the key side reads is flat here. `tail` and `rows` are written."""
    xq, xu, xd, D, E, rest = _scratch(v, of.halves, v.dtype, of.together)
    dv_out = v.new_empty(p.B, p.T, p.HV, p.V)
    tokens = [tiles(x, of.V, CHUNK, BV) for x in (do, dv, v_new, v)]
    states = [tiles(x, p.V, p.K, BV) for x in (h, dh)]
    programs = min(of.chunks, _multiprocessors(v.device))
    launch(
        value_kernel, (programs,), *tokens, tiles(Akk, of.A, CHUNK, BV), *states, tiles(gk, of.G, CHUNK, p.K), gk, beta,
        xq, xu, xd, D, E, rest, rows, tail, dv_out, cu_seqlens, chunk_indices, p.scale, p.T, of.chunks, programs,
        **of.value,
    )
    return (xq, xu, xd, D, E, rest, rows, tail), dv_out


def run(
    *, q_raw, k_raw, q_rstd, k_rstd, v, v_new, gk, beta, Akk, h, do, dh, dv, g_raw, A_log, dt_bias, p, cu_seqlens,
    chunk_indices,
):
    """Tensors as in the chain's contract; returns dq, dk [B,T,H,K], dv, dg, dbeta in the inputs' dtypes, dA_log,
    ddt_bias."""
    has_A, has_bias = A_log is not None, dt_bias is not None
    of = _of(p, has_A, has_bias)
    tail, dbias, dA, rows = _scratch(gk, of.singles, torch.float32, of.together)
    dA, dbias = dA if has_A else None, dbias if has_bias else None
    states, dv_out = value_side(
        v=v, v_new=v_new, gk=gk, beta=beta, Akk=Akk, h=h, do=do, dh=dh, dv=dv, tail=tail, rows=rows, of=of, p=p,
        cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
    )
    dq, dk, dg = (torch.empty_like(gk, dtype=dtype) for dtype in (p.dtype, p.dtype, p.g_dtype))
    dbeta = torch.empty_like(beta, dtype=p.beta_dtype)
    f32, i64 = cutecall.absent(gk.device, torch.float32), cutecall.absent(gk.device, torch.int64)
    given = (q_raw, k_raw, gk, beta, *states, g_raw, A_log, dt_bias, q_rstd, k_rstd, dq, dk, dg, dbeta, dA, dbias)
    tensors = [f32 if x is None else cutecall.flat(x) for x in given]
    tensors += [i64 if x is None else cutecall.flat(x) for x in (cu_seqlens, chunk_indices)]
    _compile(of.key, tuple([x.dtype for x in tensors]))(*tensors, *of.numbers)
    if p.varlen:
        launch(zero_tail_kernel, (ZERO_PROGRAMS.value,), dq, dk, dv_out, dg, dbeta, cu_seqlens, p.N, p.T, **of.zero)
    if p.HV != p.H:  # the norm is applied to a group's sum
        heads, (dq, dk) = (dq, dk), (torch.empty_like(x) for x in (q_raw, k_raw))
        launch(
            group_kernel, of.group_grid, *heads, q_raw, k_raw, q_rstd, k_rstd, dq, dk, cu_seqlens, p.N, of.keys,
            **of.group,
        )
    dA_log, ddt_bias = (None if x is None else gk.new_empty(x.shape) for x in (A_log, dt_bias))
    if has_A or has_bias:
        launch(sums_kernel, of.sums_grid, dA, dbias, dA_log, ddt_bias, p.NT, **of.sums)
    return {"dq": dq, "dk": dk, "dv": dv_out, "dg": dg, "dbeta": dbeta, "dA_log": dA_log, "ddt_bias": ddt_bias}


@functools.lru_cache(maxsize=4096)  # packed batches are a new problem nearly every time
def _of(p, has_A, has_bias):
    """What calls of a problem have in common: sizes, grids, and what kernels are specialised for."""
    tokens, chunks, rows = p.B * p.T * p.HV, p.NT * p.HV, 1 if p.varlen else p.B  # rows: the grid's second axis
    halves = [tokens * n for n in (p.K, p.K, p.K, CHUNK, CHUNK, 16)]
    lower_bound = 0.0 if p.lower_bound is None else p.lower_bound
    shape = {"HV": p.HV, "K": p.K}
    return SimpleNamespace(
        halves=halves, singles=[chunks * p.K, chunks * p.K * has_bias, chunks * 8 * has_A, tokens * 2],
        together=2 * sum(halves) <= TOGETHER, chunks=chunks, V=p.HV * p.V, A=p.HV * CHUNK, G=p.HV * p.K,
        value=shape | {"V": p.V, "IS_VARLEN": p.varlen, "STAGES": VALUE_STAGES, "num_warps": VALUE_WARPS},
        key=(p.varlen, p.gate, p.l2norm, p.beta_sigmoid, has_A, has_bias, p.g_dtype.itemsize, p.H, p.HV),
        numbers=(p.T, lower_bound, p.beta_scale, chunks // rows, rows), zero=shape | {"V": p.V, "num_warps": 4},
        keys=p.B * p.T * p.H, group_grid=(triton.cdiv(p.B * p.T * p.H, GROUP_ROWS), 2),
        group={"H": p.H, "G": p.HV // p.H, "K": p.K, "NORM": p.l2norm, "IS_VARLEN": p.varlen, "BR": GROUP_ROWS,
               "num_warps": 4},
        sums_grid=(p.HV * has_A + p.HV * (p.K // SUMS_COLUMNS) * has_bias,),
        sums=shape | {"HAS_A": has_A, "HAS_BIAS": has_bias, "ROWS": SUMS_ROWS, "COLUMNS": SUMS_COLUMNS,
                      "num_warps": 8},
    )


def run_log_gate(*, q_raw, k_raw, q_rstd, k_rstd, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(**locals(), g_raw=None, A_log=None, dt_bias=None)


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}


_SUMS = dict.fromkeys(("dA", "dbias", "dA_log", "ddt_bias"), "*fp32") | {"NT": "i32"}
_SHAPE = {"HV": 16, "K": K, "ROWS": SUMS_ROWS, "COLUMNS": SUMS_COLUMNS}
COMPILE = [
    (
        sums_kernel, {n: t for n, t in _SUMS.items() if n not in absent},
        _SHAPE | dict.fromkeys(absent) | {"HAS_A": "dA" not in absent, "HAS_BIAS": "dbias" not in absent}, 8, 1,
    )
    for absent in ((), ("dA", "dA_log"), ("dbias", "ddt_bias"))
]
