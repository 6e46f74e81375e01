"""All gradients of a chunk in one kernel: what 021's value side hands to its key side stays in the multiprocessor.

Parent: 021.
Delta: one kernel of 8 warps a chunk and head. A warp has 16 key columns of all 64 rows from the first product to the
    last: its accumulators of x^T = h do^T and the like lie where 021's key side wants them. h and dh go from memory to
    registers, a row once; do, v_new and y = Akk^T dv to all warps through shared memory. In a first pass over V are
    formed dk through kg, D and E, in a second the states' parts of dq and dk; then follows 021's key side. q and k come
    a block of 16 rows at a time, into what the blocks before have left, and stay for the norm.
Why it should be faster: 4496 bytes a token and value head where 021's two kernels move 7042.
Constraints: sm_90, K = V = 128, bf16. Any gate (exponents are <= 0, or within 112 of 0), any T, packed sequences, GVA;
    token and state rows below 2^31.
"""

import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kernel_fun._common import cutecall, ptx
from kernel_fun._common.launch import launch
from kernel_fun.kda.stages.k011_bwd_grads_ring import ZERO_PROGRAMS, zero_tail_kernel
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
from kernel_fun.kda.stages.k015_bwd_keys import supports as parents_supports
from kernel_fun.kda.stages.k019_bwd_keys_exact import _Config, group_kernel
from kernel_fun.kda.stages.k021_bwd_keys_turned import (
    BIAS,
    E_AT,
    GK,
    STRETCH,
    XD,
    XG,
    XS,
    _as_source,
    _as_target,
    _columns,
    _copy_gate,
    _from_middle,
    _gates,
    _halved,
    _inside,
    _of_row,
    _raw_gate,
    _rows,
    _split,
    of_lane,
    put_turned,
    sum_later_lanes,
    sums_kernel,
)
from kernel_fun.kda.stages.k021_bwd_keys_turned import _of as parents_of
from kernel_fun.kda.stages.k021_bwd_keys_turned import _place as parents_places

FAMILY = "kda"
V = 128
# To be timed; results do not depend on them:
AHEAD, AHEAD_AT = 224, 2  # L2 fetches what the CTA so many later reads (0: nothing); asked for in block 3, 2, 1 or 0
LINE = 64  # bytes that L2 fetches at a request of ours, at least
STATES_AT = 0  # h and dh are asked for before the first wait (0), behind it (1) or between the halves of y (2)
GATES_AT = 1  # gk is asked for before this half of y: it is wanted last, and its addresses take 70 instructions
EARLY = 3  # of four parts of h, asked for again during the first pass over V
SMS, PAUSE = 132, 0  # ns that the second CTA of a multiprocessor waits at the start, not to load when the first does
ALL = SMEM + 65 * 4
# Shared memory, 115,588 bytes: 021's, with other tenants, and at its end y v. WARP bytes for each of 8 warps, of which
#       0..4095   8 rows of do, and from DV on of dv and then y; after the second pass xq and xu, 512 bytes for 8 rows;
#                 a block's, once it has read them, take q and k of the block before it
#   GK  ..8287    gk of the warp's columns; then dq and dk of these
#   XD  ..10335   8 rows of v_new; after the first pass k of the warp's columns, dk through kg of these, then dg
#   XS  ..11359   8 rows of Akk; after the last y q and k of the last block
#   XG  ..11871   the raw gate of a block; at the end dbeta
# and behind them, from `matrices` on, D and E with what rounding them leaves (before: v, then dv of the call's, and
# from YV on y v), then beta, D's diagonal and norms. A tile's rows of 128 columns of V are 256 bytes; its 16-byte
# pieces lie in an order that depends on the row: neither one piece of 8 rows nor 4 of two rows meet a bank twice.
DV, YV = 2048, 16384
POINTERS = (
    "q", "k", "gk", "v", "vn", "do", "dv", "A", "h", "dh", "graw", "bias", "qr", "kr", "v_out", "dq", "dk", "dg", "dA",
    "dbias",
)
_ptx = cute.arch.inline_ptx


# ===================================================================================================== PTX, as in `ptx`
def put_rows(addr, x):
    """Two or four 8x8 bf16 matrices to shared memory: the opposite of `ptx.ldmatrix_n`."""
    n = len(x)
    regs = ", ".join(f"{{$r{i + 1}}}" for i in range(n))
    _ptx(f"stmatrix.sync.aligned.m8n8.x{n}.shared.b16 [{{$r0}}], {{{regs}}};", read_only_args=[addr, *x])


def load_state(address, off):
    """16 bytes that nobody else of the multiprocessor reads, and not this thread soon again."""
    return _ptx(
        f"ld.global.L1::no_allocate.L2::128B.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{off}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def keep_order():
    """The assembler moves no load past this: it would issue loads behind a wait for copies."""
    _ptx("bar.warp.sync -1;")


def begun(address):
    """A branch that is never taken (the address is not 0): the assembler moves no copy past this, where else it first
    computes all addresses."""
    _ptx("{ .reg .pred p; setp.eq.s64 p, {$r0}, 0; @p exit; }", read_only_args=[address])


def pause(ns, flag):
    _ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r0}}, 0; @p nanosleep.u32 {ns}; }}", read_only_args=[flag]
    )


def ask_l2(address, off, flag):
    """Have L2 fetch what is there, if the flag is not 0."""
    _ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; @p prefetch.global.L2 [{{$r0}}+{off}]; }}",
        read_only_args=[address, flag],
    )


def ask_l2_for(address, n, flag):
    """The same for n bytes."""
    _ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; @p cp.async.bulk.prefetch.L2.global [{{$r0}}], {n}; }}",
        read_only_args=[address, flag],
    )


# ============================================================================================================== copies
def _order(row):
    """What the pieces' numbers of a tile's row are xored with: the row's three bits, turned around."""
    return row % 2 * 4 + row // 2 % 2 * 2 + row // 4 % 2


def _copy_tile(cfg, io, at, n_t, place, base, step=WARP):
    """Begin the copy of 64 rows of all columns, 8 rows `step` bytes behind the 8 before; a warp two whole rows at a
    time."""
    row, part = at.tid // 16, at.tid % 16
    to = at.smem + at.tid // 128 * step + row % 8 * 256 + (part ^ _order(row)) * 16 + place
    source = base + (at.head + Int64(row) * cfg.HV) * (V * 2) + part * 16
    for m in range(4):
        ptx.copy_row(to + 2 * m * step, source, 16 * m * cfg.HV * V * 2, 16, n_t - row, 16 * m, L2)


def _copy_system(cfg, io, at, n_t):
    """Of Akk, [64,64], 8 columns a thread; zeros above the diagonal."""
    row, part = at.tid // 8, at.tid % 8
    to = at.smem + at.tid // 64 * WARP + XS + row % 8 * 128 + (part ^ row % 8) * 16
    source = io.A + (at.head + Int64(row) * cfg.HV) * 128 + part * 16
    for m in range(2):
        above = Int32(part > at.tid // 64 + 4 * m)
        ptx.copy_row(to + 4 * m * WARP, source, 32 * m * cfg.HV * 128, 16, (n_t - row) * (1 - above), 32 * m)


def _copy_gates(cfg, io, at, n_t):
    """gk, whole rows, and dt_bias."""
    warp, lane = at.warp, at.lane
    gates = io.gk + at.head * (K * 4) + lane * 16
    for m in range(8):  # rows that do not exist are the last one
        row = Int64(warp + ptx.at_most(n_t - 1 - warp, 8 * m))
        place = at.smem + lane // 4 * WARP + GK + warp // 2 * STRETCH + warp % 2 * 64 + lane % 4 * 16
        ptx.copy(place + m * 128, gates + row * (at.sG * 4), 16, L2)
    if cfg.has_bias:
        piece = lane % 4
        ptx.copy(at.own + BIAS + piece // 2 * STRETCH + piece % 2 * 16, io.bias + piece * 16, 16)


def _copy_block(cfg, io, at, b, place, base):
    """Begin the copy of 16 rows of q or k, the warp's columns."""
    ptx.copy_row(at.piece + place, base + at.qg * 2, 16 * b * cfg.H * K * 2, 16, at.left, 16 * b, L2)


def _inputs_at(b):
    """Where q and where k of a block are."""
    return (XS, XS + 512) if b == 3 else ((b + 1) * 512, DV + (b + 1) * 512)


def _copy_inputs(cfg, io, at, b):
    for place, base in zip(_inputs_at(b), (io.q, io.k), strict=True):
        _copy_block(cfg, io, at, b, place, base)
    ptx.commit()


def _copy_last(cfg, io, at):
    """What the last block needs, when Akk is no longer needed."""
    _copy_inputs(cfg, io, at, 3)
    _copy_gate(cfg, io, at, 3)


def _ask_ahead(cfg, locate, tokens, ctas):
    """Have L2 fetch what a CTA will read that starts when this one is about to end. It asks for 170 KB at once, and all
    else of its multiprocessor waits behind them. From this chunk on there are so many tokens and CTAs."""
    io, at = locate(12)
    chunks = -(-AHEAD // cfg.HV)
    exists = Int32(64 * (chunks + 1) <= tokens) * Int32(chunks * cfg.HV < ctas)
    row, part = at.tid // 4, at.tid % 4
    token, qtoken = (x + (64 * chunks + Int64(row)) * n for x, n in ((at.head, cfg.HV), (at.qhead, cfg.H)))
    raw = cfg.gate != "log"
    asked = [(x, 256, token) for x in (io.dv, io.v, io.do, io.vn)] + [(io.A, 128, token), (io.gk, 512, token)]
    asked += [(io.q, 256, qtoken), (io.k, 256, qtoken)] + [(io.graw, 128 * cfg.g_bytes, token)] * raw
    for base, size, first in asked:
        for off in range(0, size // 4, LINE):
            ask_l2(base + first * size + part * (size // 4), off, exists)
    for base in (io.dh, io.h):  # of the warp's rows
        ask_l2_for(base + chunks * cfg.HV * K * V * 2, 16 * V * 2, exists * Int32(at.lane == 0))


# ======================================================================================== y = Akk^T dv, 16 columns of V
def _solved(at, half):
    """y of the warp's columns, in two blocks of 16 rows: [8 columns] C fragments."""
    y = {r: [ptx.zeros(4), ptx.zeros(4)] for r in (2 * half, 2 * half + 1)}
    for t in range(2 * half, 4):
        b = ptx.ldmatrix_n(at.tile + DV + 2 * t * WARP, 4, True)
        for r in filter(lambda r: r <= t, y):
            a = ptx.ldmatrix_n(at.system[r] + 2 * t * WARP, 4, True)
            y[r] = [ptx.mma16(y[r][n], a, b[2 * n : 2 * n + 2]) for n in range(2)]
    return y


def _place_y(at, y):
    """y over dv: nobody else reads the warp's columns."""
    ptx.sync_warp()
    for r, x in y.items():
        put_rows(at.tile + DV + 2 * r * WARP, _fragment(x))


def _fragment(x):
    """Two C fragments beside each other as four matrices."""
    lo, hi = _packed(x[0]), _packed(x[1])
    return [lo[0], lo[1], hi[0], hi[1]]


def _solve(io, at, half):
    """y of half of the rows, in dv's place: later ones do without; dv of the call's, by way of v's place; a warp's
    share of y v."""
    y, q, sums = _solved(at, half), at.lane % 4, []
    for r, x in y.items():
        v = ptx.ldmatrix_n(at.v_tile + r * 4096, 4, False)
        v = [_times(x[n], _quads(v[2 * n : 2 * n + 2])) for n in range(2)]
        sums.append(_halved(q % 2, *[v[0][i] + v[0][i + 1] + v[1][i] + v[1][i + 1] for i in (0, 2)], 1))
    ptx.sts1(at.yv + half * 128, _halved(q // 2, *sums, 2))
    _place_y(at, y)
    for r, x in y.items():
        beta = [ptx.lds1(at.betas + r * 256 + i * 128) for i in range(2)]
        put_rows(at.v_tile + r * 4096, _fragment([_times(z, [beta[0]] * 2 + [beta[1]] * 2) for z in x]))
    ptx.sync_warp()
    for r in y:
        out = ptx.lds_frag(at.sixteen + r * 4096)
        ptx.store_row("b32", io.v_out + at.value, 16 * r * at.sV, at.left, 16 * r, *out)


# ============================================================================================== products along V, twice
# A product of two rows does not mind in which order it takes their columns. Of each 32 a lane has 8 beside each other,
# 16 bytes, of one row of h or dh as of one of do, y or v_new: operands of two products of 16.
def _state(base, u):
    """32 columns of two of the warp's 16 rows of h or dh, in four registers each: also B fragments of two products."""
    return [load_state(base, u * 64 + i * 16 * V) for i in range(2)]


def _add_values(at):
    """y v of all columns: a warp adds up 8 rows', which wait behind everything else for the end."""
    row, part = at.lane % 8, at.lane // 8
    place = at.matrices + YV + part * 512 + ((at.warp ^ part) * 8 + row) * 4
    x, row = [ptx.lds1(place + w * 256) for w in range(2)], at.warp * 8 + row
    # lanes that have none write where nobody reads
    ptx.sts1(at.smem + SMEM + row * 4 + Int32(part > 0) * (64 - row) * 4, ptx.sum_lanes(x[0] + x[1], 8, 16))


def _in_turn(at, x, y):
    """Two rows' as A fragments of two products, whose registers lie otherwise. The compiler would copy them for each
    product anew; that `nothing` is 0 it does not know."""
    x, y = ([a | at.nothing for a in b] for b in (x, y))
    return [[x[s], y[s], x[s + 1], y[s + 1]] for s in (0, 2)]


def _add_diagonals(hh, dh, h):
    """h dh^T of the warp's 16 rows with 8 of them and 8 others."""
    for s in range(2):
        hh[:] = [ptx.mma16(hh[i], dh[s], h[i][2 * s : 2 * s + 2]) for i in range(2)]


def _diagonals(lane, hh):
    """Sums of h dh over V, of a thread's two columns: a lane of four has some."""
    mine, odd = Int32(lane % 4 == lane // 8), lane // 4 % 2
    return [ptx.pick(mine, ptx.pick(odd, x[1], x[0]), Float32(0.0)) for x in (hh[0][:2], hh[1][2:])]


def _first_pass(io, at, sums, dh):
    """dh v_new^T, and [do; y] v_new^T of 8 rows a warp. Asks for parts of h again, where parts of dh have been."""
    h = []
    for u in range(4):
        off = u // 2 * 128
        rows = _in_turn(at, *[ptx.lds_frag(at.mine[u % 2] + x + off) for x in (0, DV)])
        for j in range(8):
            vn = ptx.lds_frag(at.half[u % 2] + XD + j * WARP + off)
            for s in range(2):
                sums.xd[j] = ptx.mma16(sums.xd[j], dh[u][s], vn[2 * s : 2 * s + 2])
                sums.de[j] = ptx.mma16(sums.de[j], rows[s], vn[2 * s : 2 * s + 2])
        if u + EARLY >= 4:
            h.append(_state(io.h, len(h)))
            keep_order()
    return h


def _second_pass(at, h, u, xq, xu):
    """h do^T and h y^T."""
    for j in range(8):
        for sums, place in ((xq, 0), (xu, DV)):
            x = ptx.lds_frag(at.half[u % 2] + place + j * WARP + u // 2 * 128)
            for s in range(2):
                sums[j] = ptx.mma16(sums[j], h[s], x[2 * s : 2 * s + 2])


def _place_pairs(at, de, scale):
    """D and E of the warp's 8 rows from [do; y] v_new^T; of the 8 x 8 blocks on the diagonal also, to the right of
    them, what rounding leaves; and D's diagonal. Nobody reads anything else above the diagonal."""
    warp, lane, r, q = at.warp, at.lane, at.lane // 4, at.lane % 4
    factors, here, to = [scale, scale, Float32(-1.0), Float32(-1.0)], de[0], at.matrices + warp * 8 * PITCH
    for n in (0, 4):
        x = [_packed(_times(x, factors)) for x in de[n : n + 4]]
        for m in range(2):
            put_rows(to + lane % 8 * PITCH + lane // 8 * 16 + m * E_AT + n * 16, [y[m] for y in x])
    for j in range(1, 8):
        here = [ptx.pick(Int32(warp == j), x, y) for x, y in zip(de[j], here, strict=True)]
    here = _times(here, factors)
    # lanes that have nothing of the diagonal write where nobody reads
    mine, row = Int32(q == r // 2), warp * 8 + r
    diag = at.matrices + mine * (2 * E_AT + row // 2 * 32 + row % 2 * 4 + 8) + (1 - mine) * 128
    ptx.sts1(diag, ptx.pick(r % 2, here[1], here[0]))
    here = [ptx.pick(Int32(r - 2 * q > n % 2), x, Float32(0.0)) for n, x in enumerate(here)]
    near = _packed(here)
    rest = _packed([x - y for x, y in zip(here, _quads(near), strict=True)])
    ptx.sync_warp()
    put_rows(to + lane % 8 * PITCH + lane // 8 % 2 * E_AT + (warp + lane // 16) * 16, near + rest)


def _through_states(at, xd):
    """dk through kg, packed."""
    last, packed = _columns(_of_row(at, 7, 7)), []
    for j in range(8):
        packed += _packed(_times(xd[j], _below(last, _gates(at, j))))
    return packed


def _sources(cfg, at, xd, tail):
    """Each block but the last as a source for later blocks: bf16(k 2^(gk at its end - gk)) as A fragments. dk through
    kg takes k's place. Returns also the decays over the second and the third block, and what all rows' dg share."""
    ends, last = [_of_row(at, 2 * a + 1, 7) for a in range(3)], _of_row(at, 7, 7)
    total, sources = [x * ptx.ex2(y) for x, y in zip(tail, last, strict=True)], []
    for b in range(4):
        ks, packed = ptx.ldmatrix_n(at.turned + XD + b * 512, 4, True), []
        for i in range(2):
            j = 2 * b + i
            k = _quads(ks[2 * i : 2 * i + 2])
            if cfg.scaled:
                k = _times(k, _rows(ptx.lds2f(at.rows + j * 128 + 24)))
            for n, y in enumerate(_quads(xd[2 * j : 2 * j + 2])):
                total[n // 2] = total[n // 2] + k[n] * y
            if b < 3:
                packed += _packed(_times(k, _below(_columns(ends[b]), _gates(at, j))))
        if b < 3:
            sources.append(packed)
    ptx.sync_warp()
    for b in range(4):
        put_turned(at.turned + XD + b * 512, xd[4 * b : 4 * b + 4])
    return sources, [_below(ends[m], ends[m - 1]) for m in (1, 2)], [ptx.sum_lanes(x, 1, 2) for x in total]


def _place_states(at, scale, xq, xu):
    """The states' parts of dq and of dk that beta multiplies, over the tiles that they came from."""
    for b in range(4):
        x, z = [], []
        for j in (2 * b, 2 * b + 1):
            up = [ptx.ex2(y) for y in _gates(at, j)]
            x += _packed(_times(xq[j], [y * scale for y in up]))
            z += _packed(_times(xu[j], [-y for y in up]))
        put_turned(at.turned + b * 512, x)
        put_turned(at.turned + DV + b * 512, z)


def _ask_norm(cfg, io, at, token):
    """A norm of q or of k for half of the CTA."""
    if cfg.scaled:
        base = io.qr + Int64(at.tid // 64 % 2) * (io.kr - io.qr)
        return ptx.load_row("f32", 1, Float32, base + token * 4, 0, at.tid // 128, 0)
    return Float32(0.0)


def _first_sweep(cfg, io, at, n_t, beta, token):
    """D, E and dk through kg before they are scaled, and sums of h dh; y v goes to the end of shared memory. Asks for
    all that there is room for at once; what is wanted first is waited for first."""
    sums, states = _Names(xd=[ptx.zeros(4)] * 8, de=[ptx.zeros(4)] * 8), []
    ask = lambda: [[_state(x, u) for u in range(4)] for x in (io.dh, io.h)]  # noqa: E731
    norm = _ask_norm(cfg, io, at, token)
    _copy_system(cfg, io, at, n_t)
    _copy_tile(cfg, io, at, n_t, DV, io.dv)
    _copy_tile(cfg, io, at, n_t, 8 * WARP, io.v, 2048)
    ptx.commit()
    begun(io.A)
    _copy_tile(cfg, io, at, n_t, 0, io.do)
    _copy_tile(cfg, io, at, n_t, XD, io.vn)
    ptx.commit()
    begun(io.do)
    if STATES_AT == 0:
        states = ask()  # registers are free yet
        keep_order()
    ptx.wait_group(1)
    row = at.tid % 64  # of what belongs to rows: beta, room for D's diagonal, norms
    place = at.matrices + 2 * E_AT + row // 2 * 32 + row % 2 * 4 + at.tid // 64 * 8
    ptx.sts1(place, ptx.pick(at.tid // 128, norm, beta))
    ptx.sync_cta()
    for half in range(2):
        if half + 1 == STATES_AT:
            states = ask()
        if half == GATES_AT:
            _copy_gates(cfg, io, at, n_t)
            ptx.commit()
        _solve(io, at, half)
    dh, hh = [_in_turn(at, *x) for x in states[0]], [ptx.zeros(4), ptx.zeros(4)]
    for x, y in zip(dh, states[1], strict=True):
        _add_diagonals(hh, x, y)
    sums.tail = _diagonals(at.lane, hh)
    ptx.wait_group(1)
    ptx.sync_cta()
    _copy_last(cfg, io, at)
    _add_values(at)
    return sums, _first_pass(io, at, sums, dh)


def _value_side(cfg, locate, n_t, scale, beta, token):
    """All that depends on V: D and E, D's diagonal, dk through kg and the states' parts, in their places. Returns
    `_sources`'."""
    io, at = locate(0)
    sums, h = _first_sweep(cfg, io, at, n_t, beta, token)
    ptx.wait_group(2)
    ptx.sync_cta()
    io, at = locate(13)
    for b in range(4):
        _copy_block(cfg, io, at, b, XD + b * 512, io.k)
    ptx.commit()
    _place_pairs(at, sums.de, scale)
    xd = _through_states(at, sums.xd)
    at.nothing = at.nothing & functools.reduce(lambda x, y: x ^ y, xd)  # no product of h before they are packed
    xq, xu = [ptx.zeros(4)] * 8, [ptx.zeros(4)] * 8
    for u in range(4):
        if u + EARLY < 4:
            h.append(_state(io.h, u + EARLY))
            keep_order()
        _second_pass(at, _in_turn(at, *h[u]), u, xq, xu)
    ptx.wait_group(0)
    ptx.sync_cta()
    _, at = locate(14)
    _place_states(at, scale, xq, xu)
    return _sources(cfg, at, xd, sums.tail)


# ================================================================================================== key side, as in 021
def _gradients(cfg, io, at, lane, rate, lower_bound, ask_ahead, sources, decays, shared):
    """Everything of the warp's columns but dbeta; returns their share of dA_log."""
    targets, db_rows, dA, dbias, end = [None] * 4, [None] * 4, Float32(0.0), ptx.zeros(2), None
    unit = LOG2_E if cfg.gate == "softplus" else 1.0
    for b in (3, 2, 1, 0):
        if AHEAD and b == AHEAD_AT:
            ask_ahead()
        if b < 3:
            ptx.wait_group(1)
            ptx.sync_warp()
        before = _of_row(at, 2 * b - 1, 7) if b else None
        bias = ptx.zeros(2)
        if cfg.has_bias:
            bias = [unit * ptx.lds1(at.column + BIAS + j * STRETCH) for j in range(2)]
        db, ours, low = [None, None], [None, None], _Names()
        states = [ptx.ldmatrix_n(at.turned + y + 2 * b * 256, 4, True) for y in (0, DV)]
        if b:  # into their place, for the next block
            ptx.sync_warp()
            _copy_inputs(cfg, io, at, b - 1)

        # ---- the lower rows as sources, for the upper ones; all else of them is read again: registers are short
        k = _quads(ptx.ldmatrix_n(at.turned + _inputs_at(b)[1], 2, True))
        if cfg.scaled:
            k = _times(k, _rows(ptx.lds2f(at.rows + 2 * b * 128 + 24)))
        low.fm = _from_middle(at, 2 * b, _gates(at, 2 * b))
        low.source, low.last = _split(k, low.fm), [ptx.rcp(of_lane(low.fm[n], 3)) for n in (1, 3)]

        for i in (1, 0):
            j, row = 2 * b + i, 16 * b + 8 * i
            q, k = (_quads(ptx.ldmatrix_n(at.turned + x + i * 256, 2, True)) for x in _inputs_at(b))
            g, (*beta, d0, d1) = _gates(at, j), ptx.lds4(at.rows + j * 128)
            if cfg.scaled:
                *q_rstd, k0, k1 = ptx.lds4(at.rows + j * 128 + 16)
                q, k = _times(q, _rows(q_rstd)), _times(k, _rows([k0, k1]))
            kb, x = _times(k, _rows(beta)), [_quads(y[2 * i : 2 * i + 2]) for y in states]
            sums = _Names(dq=x[0], zk=x[1])  # begin with the states' parts
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
                    ptx.wait_group(1 if b else 0)
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
        xs = [[ptx.lds2(given + x + j % 2 * 256) for x in _inputs_at(j // 2)] for j in range(8)]
        mine = Int32(lc == r // 2)
        dots = at.own + mine * (r * 8) + (1 - mine) * (XD + lane * 8)
        for j in range(8):
            a = [x[n] | at.nothing for n in range(2) for x in xs[j]]  # see `_in_turn`
            x, y = (ptx.mma16(ptx.zeros(4), a, d) for d in ds[j])
            ptx.sts2(dots + j * 64, [ptx.pick(r % 2, x[1], x[0]), ptx.pick(r % 2, y[3], y[2])])
    ptx.sync_cta()
    if cfg.l2norm:  # a warp sums 8 rows' over all warps, and multiplies by what remains of the norm for the rows given
        row = warp * 8 + lane % 8
        parts = [ptx.lds2f(at.smem + (lane // 8 * 2 + x) * WARP + row * 8) for x in range(2)]
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
    """021's addresses, and those of the side that depends on V: of tiles' rows, where a place begins with a warp's."""
    parents_places(at, smem, warp, lane, n_t)
    at.nothing = Uint32(n_t >> 31)
    r, q = lane // 4, lane % 4
    at.half = [smem + r * 256 + ((q + x * 4) ^ _order(r)) * 16 for x in range(2)]  # 32 columns of row r, these by two
    at.mine = [x + warp * WARP for x in at.half]
    row, tile = lane % 8, lane // 8  # of four 8 x 8 tiles, as ldmatrix takes them
    part = row * 256 + ((2 * warp + tile // 2) ^ _order(row)) * 16
    at.tile, at.v_tile = smem + tile % 2 * WARP + part, at.matrices + tile % 2 * 2048 + part
    system = smem + tile // 2 * WARP + XS + row * 128
    at.system = [system + ((2 * x + tile % 2) ^ row) * 16 for x in range(4)]
    row = lane // 2 % 8
    at.sixteen = at.matrices + lane // 16 * 2048 + row * 256 + ((2 * warp + lane % 2) ^ _order(row)) * 16
    at.betas = at.matrices + 2 * E_AT + r // 2 * 32 + r % 2 * 4
    at.yv = at.matrices + YV + warp * 256 + ((q ^ warp // 2) * 8 + r) * 4


def _located(cfg, pointers, smem, tid, warp, n_t, chunk, hv, head, qhead, again):
    """Where a thread's values are, in global and in shared memory. With another number `again` the compiler does not
    know that it is what it was, and keeps nothing for it in registers."""
    io, at = _Names(zip(POINTERS, pointers, strict=True)), _Names()
    at.tid = (tid | n_t >> (31 - again)) & (THREADS - 1)  # n_t is at most 64
    at.warp, at.lane = warp, at.tid % 32
    _place(at, smem, warp, at.lane, n_t)
    _addresses(cfg, at, io, warp, at.lane, chunk, hv, head, qhead)
    return io, at


def _addresses(cfg, at, io, warp, lane, chunk, hv, head, qhead):
    """Element offsets of the thread's first values, and rows' strides; the chunk's small vectors at its columns."""
    col, part, row = warp * 16, (Int64(chunk) * cfg.HV + hv) * K, lane // 2
    at.head, at.qhead, at.sG, at.sV = head, qhead, cfg.HV * K, cfg.HV * V * 2
    at.g = at.qg = (head + row * cfg.HV) * K + col + lane % 2 * 8
    if cfg.H != cfg.HV:
        at.qg = (qhead + row * cfg.H) * K + col + lane % 2 * 8
    at.g32 = ((head + 2 * (lane % 4) * cfg.HV) * K + col + lane // 4) * 4  # in bytes, as the next
    at.value = ((head + row * cfg.HV) * V + col + lane % 2 * 8) * 2
    state = (part + col + lane // 4) * (V * 2) + lane % 4 * 16
    io.h, io.dh = io.h + state, io.dh + state
    io.bias = io.bias + (Int64(hv) * K + col) * 4
    io.dbias = io.dbias + (part + col + lane // 4) * 4


@cute.kernel
def _kernel(
    mQ, mK, mGk, mBeta, mV, mVn, mDo, mDv, mA, mH, mDh, mGraw, mAlog, mBias, mQr, mKr, oV, oDq, oDk, oDg, oDb, oDA,
    oDbias, mCu, mChunks, T: Int32, scale: Float32, lower_bound: Float32, beta_scale: Float32, cfg: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    pid, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
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

    if const_expr(PAUSE > 0):
        _, row, _ = cute.arch.block_idx()
        pause(PAUSE, Int32(pid // SMS == 1) * Int32(row == 0))
    smem = cute.arch.alloc_smem(Uint32, ALL // 4, 16).toint()
    tensors = (mQ, mK, mGk, mV, mVn, mDo, mDv, mA, mH, mDh, mGraw, mBias, mQr, mKr, oV, oDq, oDk, oDg, oDA, oDbias)
    pointers = [x.iterator.toint() for x in tensors]
    head, qhead = first * cfg.HV + hv, first * cfg.H + h
    locate = functools.partial(_located, cfg, pointers, smem, tid, warp, n_t, chunk, hv, head, qhead)

    row = Int64(cutlass.min(tid % 64, n_t - 1))
    beta = ptx.pick(Int32(tid % 64 < n_t), Float32(mBeta[head + row * cfg.HV]), Float32(0.0))
    shared = _value_side(cfg, locate, n_t, scale, beta, qhead + row * cfg.H)
    io, at = locate(15)
    tid, lane = at.tid, at.lane
    ctas, batches, _ = cute.arch.grid_dim()
    left = Int64(T) * batches - first, ctas * batches - chunk * cfg.HV  # packed tokens may be more than are in chunks
    ask_ahead = functools.partial(_ask_ahead, cfg, locate, *left)
    rate = Float32(1.0)
    if const_expr(cfg.has_A):
        rate = ptx.ex2(Float32(mAlog[hv]) * LOG2_E)
    dA = _gradients(cfg, io, at, lane, rate, lower_bound, ask_ahead, *shared)
    if const_expr(cfg.has_A):
        ptx.store_row("f32", io.dA + ((Int64(chunk) * 8 + warp) * cfg.HV + hv) * 4, 0, 1 - lane, 0, dA)
    _close(cfg, io, at, warp, lane, n_t)
    if tid < n_t:
        d_beta = Float32(ptx.lds1(smem + SMEM + tid % 64 * 4))
        for other in range_constexpr(8):
            d_beta = d_beta + ptx.lds1(smem + other * WARP + XG + tid * 4)
        token = head + Int64(tid) * cfg.HV
        if const_expr(cfg.beta_sigmoid):
            beta = Float32(ptx.lds1(at.matrices + 2 * E_AT + tid % 64 // 2 * 32 + tid % 2 * 4))
            d_beta = d_beta * beta * (1.0 - beta / beta_scale)
        oDb[token] = d_beta.to(oDb.element_type)


# ---------------------------------------------------------------------------------------------------------- host code
def _launcher(cfg):
    @cute.jit
    def start(
        mQ, mK, mGk, mBeta, mV, mVn, mDo, mDv, mA, mH, mDh, mGraw, mAlog, mBias, mQr, mKr, oV, oDq, oDk, oDg, oDb,
        oDA, oDbias, mCu, mChunks,
        T: Int32, scale: Float32, lower_bound: Float32, beta_scale: Float32, grid: Int32, rows: Int32, stream,
    ):
        _kernel(
            mQ, mK, mGk, mBeta, mV, mVn, mDo, mDv, mA, mH, mDh, mGraw, mAlog, mBias, mQr, mKr, oV, oDq, oDk, oDg, oDb,
            oDA, oDbias, mCu, mChunks, T, scale, lower_bound, beta_scale, cfg,
        ).launch(
            grid=[grid, rows, 1], block=[THREADS, 1, 1], min_blocks_per_mp=2, preferred_smem_carveout=100, stream=stream
        )

    return start


@functools.cache
def _compile(cfg_key, dtypes):
    """The kernel for one specialisation; takes the 25 tensors flattened, then the numbers, and runs on torch's
    current stream."""
    numbers = (Int32(1), Float32(1.0), Float32(0.0), Float32(1.0), Int32(1), Int32(1))
    return cutecall.compile_for(_launcher(_Config(*cfg_key)), dtypes, numbers)


def run(
    *, q_raw, k_raw, q_rstd, k_rstd, v, v_new, gk, beta, Akk, h, do, dh, dv, g_raw, A_log, dt_bias, p, cu_seqlens,
    chunk_indices,
):
    """Tensors as in the chain's contract; returns dq, dk [B,T,H,K], dv, dg, dbeta in the inputs' dtypes, dA_log,
    ddt_bias."""
    has_A, has_bias = A_log is not None, dt_bias is not None
    of = parents_of(p, has_A, has_bias)
    _, n_bias, n_A, _ = of.singles
    dA, dbias = (gk.new_empty(n) if n else None for n in (n_A, n_bias))
    dv_out = v.new_empty(v.shape)
    dq, dk, dg = (torch.empty_like(gk, dtype=dtype) for dtype in (p.dtype, p.dtype, p.g_dtype))
    dbeta = torch.empty_like(beta, dtype=p.beta_dtype)
    f32, i64 = cutecall.absent(gk.device, torch.float32), cutecall.absent(gk.device, torch.int64)
    given = (
        q_raw, k_raw, gk, beta, v, v_new, do, dv, Akk, h, dh, g_raw, A_log, dt_bias, q_rstd, k_rstd, dv_out, dq, dk, dg,
        dbeta, dA, dbias,
    )
    tensors = [f32 if x is None else cutecall.flat(x) for x in given]
    tensors += [i64 if x is None else cutecall.flat(x) for x in (cu_seqlens, chunk_indices)]
    kernel = _compile(of.key, tuple([x.dtype for x in tensors]))
    kernel(*tensors, p.T, p.scale, *of.numbers[1:])
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


def supports(p):
    if p.V != V:  # wider ones read h, do and dv twice, and lose to 021's two kernels
        return False, f"needs V={V}, got {p.V}"
    return parents_supports(p)


def run_log_gate(*, q_raw, k_raw, q_rstd, k_rstd, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(**locals(), g_raw=None, A_log=None, dt_bias=None)


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}
