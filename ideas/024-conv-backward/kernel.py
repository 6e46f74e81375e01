"""The convolution's backward: rows in short runs, packed ones too, and x that lies along time in tiles.

Parent: 001 (one wave of strips down time, which visit packed sequences in turn; x along time is read 2 bytes a lane).
Delta: a run is 256 rows (packed: 128) of 128 channels. Each of its 4 warps walks down a quarter of them, 8 bytes of
    channels a thread, the next rows' loads issued before the present rows' arithmetic; windows, gradients and sums stay
    in registers. x and dy are loaded by plain rows; where a sequence starts near, masks of such rows, from one vector
    load of cu_seqlens, cut the window.
    x along time in tiles [BD channels, BT rows]: a thread has 16 rows of a channel; dy is turned to lie so in shared
    memory, and dx back. Sums are one partial a CTA, added up by 001's second kernel, which fills all of dw and db: they
    are no longer cleared first.
    log2 e is folded into weights, and silu's gradient is 7 instructions.
Why it should be faster: 001's strips lose 13 us a call to one wave, at 30 instructions an element where this has 25.
    Packed, its 2 CTAs a multiprocessor wait for the sequence's bounds, the weights, the first rows, each group and the
    last rows one after another: 66 us where the bytes take 24. Along time it asks for 32 sectors of x a row and warp;
    here x, dy and dx move once, in lines of 128 bytes.
Constraints: as 001. States, and whatever else fits neither, are 001's kernels. x counts as turned where time is its
    unit stride and channels are not; it is read 16 bytes a thread where T is a multiple of 16. Distances of rows are
    compiled into runs.
"""
import torch
import triton
import triton.language as tl

from kernel_fun._common.launch import launch
from kernel_fun.cconv.stages.k001_conv_strip import BWD as STRIP
from kernel_fun.cconv.stages.k001_conv_strip import BWD_STAGES as STRIP_STAGES
from kernel_fun.cconv.stages.k001_conv_strip import (
    INTERPRETED,
    _bias,
    _channels,
    _push,
    conv_bwd_kernel,
    conv_sum_kernel,
)
from kernel_fun.cconv.stages.k001_conv_strip import _launch as strip_launch
from kernel_fun.cconv.stages.k001_conv_strip import bwd as strip_bwd
from kernel_fun.cconv.stages.k001_conv_strip import supports as strip_supports

FAMILY = "cconv"

# Rows of channels: bytes of channels a thread. What dense rows take, "runs" or 001's "strips", and packed ones, "runs"
# or "tiles". Of a run: segments one after another in time, warps beside each other in channels in each of them, rows of
# a group (W - 1 at least), and pairs of groups of a segment (packed: 56 rows at most); the next group is in registers
# (STAGES 0), or STAGES - 1 are on their way to shared memory; registers a thread at most.
BYTES = 8
DENSE, PACKED = "runs", "runs"
RUN, PACKED_RUN = (4, 1, 4, 8), (4, 1, 4, 4)
STAGES = 0
RUN_REGS = 128
# Of packed tiles: rows a thread, and warps, each of which has a segment of that many rows; registers a thread at most.
ROWS = 8
WARPS = 8
REGS = 128
CUTS = 512           # packed sequences at most
# Turned x: channels and rows of a tile, warps; registers a thread at most where x is read 16 bytes a thread.
TURNED = (64, 64, 4)
TURNED_REGS = None
GRID = 65535         # CTAs along the grid's second and third axes

EXACT = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
G = tl.constexpr(16)   # rows of turned x a thread has beside each other


# ----------------------------------------------------------------------------------------------------- device functions
@triton.jit
def _wide(b):
    """fp32 of bf16, fp16 or fp32. The compiler takes two instructions for a register's upper bf16; one will do."""
    if EXACT or b.dtype != tl.bfloat16:
        return b.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; shl.b32 t, $2, 16; and.b32 u, $2, 0xffff0000; mov.b32 $0, t; mov.b32 $1, u; }",
            "=f,=f,r", [b], dtype=tl.float32, is_pure=True, pack=2,
        )


@triton.jit
def _scale(SILU: tl.constexpr):
    """What weights and bias are multiplied by, so that pre-activations are what `_grad` wants. Its result is divided by
    as much: times such a weight it is right, and sums of it are multiplied as they are written."""
    return LOG2E if SILU else 1.0


@triton.jit
def _grad(dy, u, SILU: tl.constexpr):
    """dy silu'(z) / c = dy s (1/c + u (1 - s) / c^2) of u = c z, c = log2(e), s = 1 / (1 + 2^-u)."""
    if not SILU:
        g = dy
    elif EXACT:
        z = u * (1.0 / LOG2E)
        s = 1.0 / (1.0 + tl.exp(-z))
        g = dy * (s + z * s * (1.0 - s)) * (1.0 / LOG2E)
    else:
        g = tl.inline_asm_elementwise(
            """{ .reg .f32 s, t; neg.f32 t, $2; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 s, t; fma.rn.f32 t, s, 0fBEF5FDF0, 0f3EF5FDF0; fma.rn.f32 t, t, $2, 0f3F317218;
            mul.f32 s, s, $1; mul.f32 $0, s, t; }""",
            "=f,f,f", [dy, u], dtype=tl.float32, is_pure=True, pack=1,
        )
    return g


# ----------------------------------------------------------------------------------------------------- rows of channels
@triton.jit
def _weights(weight, o_d, m_d, W: tl.constexpr):
    """[BD, W] as they lie, a channel's beside each other; three taps are filled up to four."""
    o_w = tl.arange(0, 4 if W == 3 else W)
    return tl.load(weight + o_d[:, None] * W + o_w[None, :], mask=m_d[:, None] & (o_w < W)[None, :], other=0)


@triton.jit
def _lags(b_w, W: tl.constexpr, SILU: tl.constexpr):
    """W tensors [1, BD] of `_weights`, scaled, by lag: the first multiplies the row itself."""
    b_w = b_w.to(tl.float32) * _scale(SILU)
    if W == 2:
        w0, w1 = tl.split(b_w)
        ws = (w1[None, :], w0[None, :])
    else:
        even, odd = tl.split(tl.reshape(b_w, (b_w.shape[0], 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        if W == 3:
            ws = (w2[None, :], w1[None, :], w0[None, :])
        else:
            ws = (w3[None, :], w2[None, :], w1[None, :], w0[None, :])
    return ws


@triton.jit
def _load_row(p, t, T, m_d, INSIDE: tl.constexpr):
    """A row of every segment, by time `t` [SEG]; INSIDE: it exists."""
    if INSIDE:
        b = tl.load(p)
    else:
        b = tl.load(p, mask=((t >= 0) & (t < T))[:, None] & m_d[None, :], other=0)
    return b


@triton.jit
def _cuts(bos, eos, row, LENGTH: tl.constexpr):
    """[SEG] masks int64: bit i of a segment whose first row is `row` [SEG] is 1 where one of the sequences [bos, eos)
    starts at row + i, i < LENGTH <= 63. An empty one starts nowhere, so that no bit is added twice."""
    tl.static_assert(LENGTH <= 63)
    i = bos.to(tl.int64)[None, :] - row[:, None]
    hit = (eos > bos)[None, :] & (i >= 0) & (i < LENGTH)
    return tl.sum(tl.where(hit, (i * 0 + 1) << (i & 63), 0), 1)


@triton.jit
def _joined(b, cut, first: tl.constexpr, k: tl.constexpr, CUT: tl.constexpr):
    """b where none of the k rows that start at bit `first` of `cut` starts a sequence, else 0."""
    if CUT:
        b = tl.where((cut & (((1 << k) - 1) << first)) == 0, b, 0.0)
    return b


@triton.jit
def _write_sums(sums, p, D, m_d, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr):
    """A CTA's sums [SEG, BD], of the weights by lag and of the bias, to its rows of `partial`."""
    for k in tl.static_range(W):
        tl.store(p + (W - 1 - k) * D, tl.sum(sums[k], 0) * _scale(SILU), mask=m_d)
    if BIAS:
        tl.store(p + W * D, tl.sum(sums[W], 0) * _scale(SILU), mask=m_d)


# ----------------------------------------------------------------------------------------------------------------- runs
@triton.jit
def _load_rows(p, t, T, m_d, STRIDE: tl.constexpr, N: tl.constexpr, INSIDE: tl.constexpr):
    """N rows of every segment, the first at pointers p and time t [SEG]."""
    rows = ()
    for j in tl.static_range(N):
        rows += (_load_row(p + j * STRIDE, t + j, T, m_d, INSIDE),)
    return rows


@triton.jit
def _load_group(p_x, p_dy, r, t, T, m_d, SX: tl.constexpr, SY: tl.constexpr, N: tl.constexpr, INSIDE: tl.constexpr):
    """Rows r to r + N of every segment, of x and of dy; p_x, p_dy and t are of row 0."""
    xs = _load_rows(p_x + r * SX, t + r, T, m_d, SX, N, INSIDE)
    dys = _load_rows(p_dy + r * SY, t + r, T, m_d, SY, N, INSIDE)
    return xs, dys


@triton.jit
def _run_row(b_x, b_dy, ring, ws, b_b, cut, j: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, CUT: tl.constexpr):
    """A row widened, with the W - 1 before it as far as they are of its sequence, and its pre-activation's gradient.
    Bit i of `cut` is of the row i - (W - 2) from that for which j is 0."""
    past = (_wide(b_x),)
    z = past[0] * ws[0]
    if b_b is not None:
        z += b_b
    for k in tl.static_range(1, W):
        past += (_joined(ring[k - 1], cut, W - 1 + j - k, k, CUT),)
        z += past[k] * ws[k]
    return past, _grad(_wide(b_dy), z, SILU)


@triton.jit
def _run_sums(sums, g, past, W: tl.constexpr):
    new = ()
    for k in tl.static_range(W):
        new += (sums[k] + g * past[k],)
    return new + (sums[W] + g,)  # noqa: RUF005  (Triton has no starred tuples)


@triton.jit
def _run_group(xs, dys, state, p_dx, r, t, T, m_d, ws, b_b, cuts, D: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
               SILU: tl.constexpr, INSIDE: tl.constexpr, CUT: tl.constexpr):
    """G rows in; the rows of dx W - 1 before each of them, r to r + G of every segment, out. The state is the W - 1
    rows before, their gradients, and the sums. Bit i of `cuts` is of row i - (W - 2)."""
    ring, grads, sums = state
    p_dx += r * D
    cut = None
    if CUT:
        cut = (cuts >> (r + (W - 1))).to(tl.int32)
    for j in tl.static_range(G):
        past, g = _run_row(xs[j], dys[j], ring, ws, b_b, cut, j, W, SILU, CUT)
        sums = _run_sums(sums, g, past, W)
        d = _joined(g, cut, j, W - 1, CUT) * ws[W - 1]
        for k in tl.static_range(1, W - 1):
            d += _joined(grads[W - 2 - k], cut, j, k, CUT) * ws[k]
        d += grads[W - 2] * ws[0]
        d = d.to(p_dx.dtype.element_ty)
        if INSIDE:
            tl.store(p_dx + j * D, d)
        else:
            tl.store(p_dx + j * D, d, mask=(t + (r + j) < T)[:, None] & m_d[None, :])
        ring = _push(past[0], ring, W)
        grads = _push(g, grads, W)
    return ring, grads, sums


@triton.jit
def _run(before, xs, dys, p_x, p_dy, p_dx, i_t, t, T, m_d, ws, b_b, cuts, sums, D: tl.constexpr, SX: tl.constexpr,
         SY: tl.constexpr, W: tl.constexpr, G: tl.constexpr, PAIRS: tl.constexpr, SILU: tl.constexpr,
         INSIDE: tl.constexpr, STAGES: tl.constexpr, CUT: tl.constexpr):
    """All rows of a CTA; returns the sums [SEG, BD], of the weights by lag, then of the bias."""
    ring = (_wide(before[W - 2]),)
    for k in tl.static_range(1, W - 1):
        ring += (_wide(before[W - 2 - k]),)
    grads = ring
    cut = None
    if CUT:
        cut = cuts.to(tl.int32)
    for j in tl.static_range(W - 1):
        past, g = _run_row(xs[j], dys[j], ring, ws, b_b, cut, j, W, SILU, CUT)
        if i_t == 0:
            sums = _run_sums(sums, tl.where((t == 0)[:, None], g, 0.0), past, W)
        ring = _push(past[0], ring, W)
        grads = _push(g, grads, W)
    state = (ring, grads, sums)
    # addresses and times anew from r: carried ones would cross shared memory after the loop
    LAST: tl.constexpr = (2 * PAIRS - 1) * G
    if STAGES:
        for i in tl.range(0, 2 * PAIRS - 1, num_stages=STAGES):
            r = i * G
            xs2, dys2 = _load_group(p_x, p_dy, r + (W - 1), t, T, m_d, SX, SY, G, INSIDE)
            state = _run_group(xs2, dys2, state, p_dx, r, t, T, m_d, ws, b_b, cuts, D, W, G, SILU, INSIDE, CUT)
    else:
        xs = _tail(xs, W - 1, G)
        dys = _tail(dys, W - 1, G)
        for i in tl.range(0, PAIRS - 1, num_stages=1):
            r = i * (2 * G)
            xs2, dys2 = _load_group(p_x, p_dy, r + (W - 1 + G), t, T, m_d, SX, SY, G, INSIDE)
            state = _run_group(xs, dys, state, p_dx, r, t, T, m_d, ws, b_b, cuts, D, W, G, SILU, INSIDE, CUT)
            xs, dys = _load_group(p_x, p_dy, r + (W - 1 + 2 * G), t, T, m_d, SX, SY, G, INSIDE)
            state = _run_group(xs2, dys2, state, p_dx, r + G, t, T, m_d, ws, b_b, cuts, D, W, G, SILU, INSIDE, CUT)
    # the last rows that come in are the next segment's, or beyond the end
    xs2, dys2 = _load_group(p_x, p_dy, LAST + W - 1, t, T, m_d, SX, SY, G, False)
    if STAGES == 0:
        state = _run_group(xs, dys, state, p_dx, LAST - G, t, T, m_d, ws, b_b, cuts, D, W, G, SILU, INSIDE, CUT)
    state = _run_group(xs2, dys2, state, p_dx, LAST, t, T, m_d, ws, b_b, cuts, D, W, G, SILU, INSIDE, CUT)
    return state[2]


@triton.jit(do_not_specialize=["N", "T"])
def conv_run_bwd_kernel(
    x, dy,         # [B, T, D], rows SX and SY apart, channels one after another
    dx,            # [B, T, D] contiguous
    partial,       # [CTAs of time and batch, W (+ 1 with a bias), D] fp32: sums by weight column, then the bias
    weight,        # [D, W]
    bias,          # [D] or None
    cu_seqlens,    # [N + 1] or None
    N, T, sx_n, sy_n,
    D: tl.constexpr, SX: tl.constexpr, SY: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SEG: tl.constexpr,
    G: tl.constexpr, PAIRS: tl.constexpr, SILU: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, N2: tl.constexpr,
):
    """One CTA: SEG segments of L = 2 G PAIRS rows of one batch row, BD channels; FULL: all rows of it exist. N2: 0 if
    dense, else a power of two, N at least.

    dx trails the newest row by W - 1, so that a segment takes in the W - 1 rows after it. Their gradients enter its
    sums, in place of those of its own first W - 1 rows, which only the first of all has to add. The distances of rows
    are constants: an address then is part of its load or store."""
    L: tl.constexpr = 2 * G * PAIRS
    INSIDE: tl.constexpr = FULL and D % BD == 0
    i_b = tl.program_id(2).to(tl.int64)
    i_t = tl.program_id(1) * (SEG * L)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_r = tl.arange(0, SEG) * L
    t = i_t + o_r
    p_x = x + i_b * sx_n + i_t.to(tl.int64) * SX + (o_r * SX)[:, None] + o_d[None, :]
    p_dy = dy + i_b * sy_n + i_t.to(tl.int64) * SY + (o_r * SY)[:, None] + o_d[None, :]
    p_dx = dx + (i_b * T + i_t) * D + (o_r * D)[:, None] + o_d[None, :]
    b_w = _weights(weight, o_d, m_d, W)   # before x: they are there first, and are turned while x comes
    if cu_seqlens is not None:
        o_n = tl.arange(0, N2)
        bos = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0)
        eos = tl.load(cu_seqlens + o_n + 1, mask=o_n < N, other=0)
    before = _load_rows(p_x - (W - 1) * SX, t - (W - 1), T, m_d, SX, W - 1, False)
    FIRST: tl.constexpr = W - 1 if STAGES else W - 1 + G
    xs = _load_rows(p_x, t, T, m_d, SX, FIRST, INSIDE)
    dys = _load_rows(p_dy, t, T, m_d, SY, FIRST, INSIDE)
    ws = _lags(b_w, W, SILU)
    b_b = None
    if bias is not None:
        b_b = _bias(bias, o_d, m_d)[None, :] * _scale(SILU)
    sums = ()
    for _k in tl.static_range(W + 1):
        sums += (tl.zeros([SEG, BD], tl.float32),)
    if cu_seqlens is None:
        sums = _run(before, xs, dys, p_x, p_dy, p_dx, i_t, t, T, m_d, ws, b_b, None, sums, D, SX, SY, W, G, PAIRS, SILU,
                    INSIDE, STAGES, False)
    else:
        cuts = _cuts(bos, eos, t - (W - 2), L + 2 * W - 3)
        if tl.max((cuts != 0).to(tl.int32), 0) != 0:
            sums = _run(before, xs, dys, p_x, p_dy, p_dx, i_t, t, T, m_d, ws, b_b, cuts[:, None], sums, D, SX, SY, W, G,
                        PAIRS, SILU, INSIDE, STAGES, True)
        else:
            sums = _run(before, xs, dys, p_x, p_dy, p_dx, i_t, t, T, m_d, ws, b_b, None, sums, D, SX, SY, W, G, PAIRS,
                        SILU, INSIDE, STAGES, False)
    HEIGHT: tl.constexpr = W if bias is None else W + 1
    p = partial + (i_b * tl.num_programs(1) + tl.program_id(1)) * HEIGHT * D + o_d
    _write_sums(sums, p, D, m_d, W, bias is not None, SILU)


@triton.jit
def _tail(rows, first: tl.constexpr, N: tl.constexpr):
    """N of the rows, from number `first` on."""
    out = ()
    for j in tl.static_range(N):
        out += (rows[first + j],)
    return out


# ---------------------------------------------------------------------------------------------------------- packed rows
@triton.jit
def _tile_rows(xs, dys, p_dx, D, o_t, T, m_d, ws, b_b, cut, sums, W: tl.constexpr, R: tl.constexpr, SILU: tl.constexpr,
               CUT: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr):
    """R rows of every segment: writes dx and returns the sums [SEG, BD], of the weights by lag, then of the bias.
    xs[i + W - 1] and dys[i] are row i; bit i of `cut` is of row i - (W - 2)."""
    gs = ()
    for i in tl.static_range(R + W - 1):
        x0 = _wide(xs[i + W - 1])
        z = x0 * ws[0]
        if b_b is not None:
            z += b_b
        past = (x0,)
        for k in tl.static_range(1, W):
            xk = _joined(_wide(xs[i + W - 1 - k]), cut, i + W - 1 - k, k, CUT)
            z += xk * ws[k]
            past += (xk,)
        g = _grad(_wide(dys[i]), z, SILU)
        gs += (g,)
        if i < R:
            new = ()
            for k in tl.static_range(W):
                new += (sums[k] + g * past[k],)
            sums = new + (sums[W] + g,)  # noqa: RUF005  (Triton has no starred tuples)
        if i >= W - 1:
            d = gs[i - W + 1] * ws[0]
            for k in tl.static_range(1, W):
                d += _joined(gs[i - W + 1 + k], cut, i, k, CUT) * ws[k]
            d = d.to(p_dx.dtype.element_ty)
            if FULL and EVEN:
                tl.store(p_dx, d)
            else:
                tl.store(p_dx, d, mask=(o_t + (i - W + 1) < T)[:, None] & m_d[None, :])
            p_dx += D
    return sums


@triton.jit(do_not_specialize=["N", "T"])
def conv_tile_bwd_kernel(
    x, dy,         # [B, T, D] by strides, channels one after another
    dx,            # [B, T, D] contiguous
    partial,       # [CTAs of time and batch, W (+ 1 with a bias), D] fp32: sums by weight column, then the bias
    weight,        # [D, W]
    bias,          # [D] or None
    cu_seqlens,    # [N + 1]
    N, T, D, sx_n, sx_t, sy_n, sy_t,
    W: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, SEG: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, N2: tl.constexpr,
):
    """One CTA: SEG segments of R rows of one batch row, BD channels; FULL: all rows of it exist, EVEN: all channels.
    N2: a power of two, N at least."""
    i_b = tl.program_id(2).to(tl.int64)
    i_t = tl.program_id(1) * (SEG * R)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_r = tl.arange(0, SEG) * R
    o_t = i_t + o_r
    p_x = x + i_b * sx_n + i_t.to(tl.int64) * sx_t + ((o_r - (W - 1)) * sx_t)[:, None] + o_d[None, :]
    p_dy = dy + i_b * sy_n + i_t.to(tl.int64) * sy_t + (o_r * sy_t)[:, None] + o_d[None, :]
    p_dx = dx + (i_b * T + i_t) * D + (o_r * D)[:, None] + o_d[None, :]
    b_w = _weights(weight, o_d, m_d, W)   # before x: they are there first, and are turned while x comes
    o_n = tl.arange(0, N2)
    bos = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0)
    eos = tl.load(cu_seqlens + o_n + 1, mask=o_n < N, other=0)
    xs = ()
    dys = ()
    for j in tl.static_range(R + 2 * (W - 1)):
        xs += (_load_row(p_x, o_t + (j - W + 1), T, m_d, FULL and EVEN and j >= W - 1 and j < R + W - 1),)
        p_x += sx_t
        if j >= W - 1:
            dys += (_load_row(p_dy, o_t + (j - W + 1), T, m_d, FULL and EVEN and j < R + W - 1),)
            p_dy += sy_t
    ws = _lags(b_w, W, SILU)
    b_b = None
    if bias is not None:
        b_b = _bias(bias, o_d, m_d)[None, :] * _scale(SILU)
    sums = ()
    for _k in tl.static_range(W + 1):
        sums += (tl.zeros([SEG, BD], tl.float32),)
    tl.static_assert(R + 2 * W - 3 <= 31)
    cut = _cuts(bos, eos, o_t - (W - 2), R + 2 * W - 3).to(tl.int32)
    if tl.max(cut, 0) != 0:
        sums = _tile_rows(xs, dys, p_dx, D, o_t, T, m_d, ws, b_b, cut[:, None], sums, W, R, SILU, True, EVEN, FULL)
    else:
        sums = _tile_rows(xs, dys, p_dx, D, o_t, T, m_d, ws, b_b, None, sums, W, R, SILU, False, EVEN, FULL)
    HEIGHT: tl.constexpr = W if bias is None else W + 1
    p = partial + (i_b * tl.num_programs(1) + tl.program_id(1)) * HEIGHT * D + o_d
    _write_sums(sums, p, D, m_d, W, bias is not None, SILU)


# ------------------------------------------------------------------------------------------------------------- turned x
# A tensor [BD, BG n] as n tensors [BD, BG]: number i holds column n g + i of every group g. A thread has whole groups,
# so that nothing is copied.
@triton.jit
def _quarters(b, BD: tl.constexpr, BG: tl.constexpr):
    even, odd = tl.split(tl.reshape(b, (BD, BG, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _sixteenths(b, BD: tl.constexpr, BG: tl.constexpr):
    even, odd = tl.split(tl.reshape(b, (BD, BG * 4, 2, 2)))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    a0 = _quarters(a0, BD, BG)   # columns 0, 4, 8, 12
    a1 = _quarters(a1, BD, BG)
    a2 = _quarters(a2, BD, BG)
    a3 = _quarters(a3, BD, BG)
    c = ()
    for i in tl.static_range(4):
        c += (a0[i], a1[i], a2[i], a3[i])
    return c


@triton.jit
def _whole(c, BD: tl.constexpr, BG: tl.constexpr):
    """The inverse of `_sixteenths`."""
    a = ()
    for i in tl.static_range(4):   # columns i, i + 4, i + 8, i + 12
        a += (tl.reshape(tl.join(tl.join(c[i], c[i + 8]), tl.join(c[i + 4], c[i + 12])), (BD, BG * 4)),)
    return tl.reshape(tl.join(tl.join(a[0], a[2]), tl.join(a[1], a[3])), (BD, BG * 16))


@triton.jit
def _sum(xs, ws, i: tl.constexpr, b_b, W: tl.constexpr):
    """Pre-activation [BD, BG] of row i of every group: xs[4 + i] is the row itself."""
    z = _wide(xs[4 + i]) * ws[W - 1]
    if b_b is not None:
        z += b_b
    for k in tl.static_range(1, W):
        z += _wide(xs[4 + i - k]) * ws[W - 1 - k]
    return z


@triton.jit
def _grads(xs, dys, ws, b_b, W: tl.constexpr, SILU: tl.constexpr):
    """Gradients of the pre-activations of every group's rows and of the W - 1 rows after them."""
    gs = ()
    for i in tl.static_range(G + W - 1):
        gs += (_grad(_wide(dys[i]), _sum(xs, ws, i, b_b, W), SILU),)
    return gs


@triton.jit
def _dx(gs, ws, W: tl.constexpr, dtype: tl.constexpr):
    """dx of every group's rows: the gradient k rows later meets the weight of lag k."""
    out = ()
    for i in tl.static_range(G):
        d = gs[i] * ws[W - 1]
        for k in tl.static_range(1, W):
            d += gs[i + k] * ws[W - 1 - k]
        out += (d.to(dtype),)
    return out


@triton.jit
def _total(gs, xs, w: tl.constexpr, W: tl.constexpr):
    """The groups' sums [BD, BG] for column w of the weights, or for the bias where w is W."""
    s = gs[0] * _wide(xs[4 - (W - 1 - w)]) if w < W else gs[0]
    for i in tl.static_range(1, G):
        if w < W:
            s += gs[i] * _wide(xs[4 + i - (W - 1 - w)])
        else:
            s += gs[i]
    return s


@triton.jit
def conv_turned_bwd_kernel(
    x,             # [B, T, D] by strides, rows one after another
    dy,            # [B, T, D] by strides
    dx,            # [B, T, D] contiguous
    partial,       # [CTAs of time and batch, W (+ 1 with a bias), D] fp32: sums by weight column, then the bias
    weight,        # [D, W]
    bias,          # [D] or None
    T, D, sx_n, sx_d, sy_n, sy_t, sy_d,
    W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    DY_UNIT: tl.constexpr,
):
    """One CTA: BT rows of one batch row, BD channels; FULL: all rows of it exist, EVEN: all channels."""
    BG: tl.constexpr = BT // G
    i_b = tl.program_id(2).to(tl.int64)
    i_d = tl.program_id(0) * BD
    i_t = tl.program_id(1) * BT
    o_d = i_d + tl.arange(0, BD)
    m_d = o_d < D
    o_r = tl.arange(0, BT)
    o_q = tl.arange(0, BG * 4)
    o_q = o_q // 4 * G + o_q % 4   # every group's first four rows
    m_r = i_t + o_r < T
    m_p = (i_t + o_q >= 4) & (i_t + o_q < T + 4)
    m_q = i_t + o_q + G < T
    p_x = x + i_b * sx_n + (o_d.to(tl.int64) * sx_d)[:, None] + i_t
    p_dy = dy + i_b * sy_n + i_t.to(tl.int64) * sy_t + _channels(o_d, sy_d, DY_UNIT)[None, :]
    ws = ()
    for w in tl.static_range(W):
        ws += ((tl.load(weight + o_d * W + w, mask=m_d, other=0).to(tl.float32) * _scale(SILU))[:, None],)
    b_b = None
    if bias is not None:
        b_b = _bias(bias, o_d, m_d)[:, None] * _scale(SILU)
    if FULL and EVEN:
        now = tl.load(p_x + o_r[None, :])
        b_dy = tl.load(p_dy + (o_r * sy_t)[:, None])
    else:
        now = tl.load(p_x + o_r[None, :], mask=m_d[:, None] & m_r[None, :], other=0)
        b_dy = tl.load(p_dy + (o_r * sy_t)[:, None], mask=m_r[:, None] & m_d[None, :], other=0)
    past = tl.load(p_x + (o_q - 4)[None, :], mask=m_d[:, None] & m_p[None, :], other=0)
    later = tl.load(p_x + (o_q + G)[None, :], mask=m_d[:, None] & m_q[None, :], other=0)
    b_dq = tl.load(p_dy + ((o_q + G) * sy_t)[:, None], mask=m_q[:, None] & m_d[None, :], other=0)
    dys = _sixteenths(tl.trans(b_dy), BD, BG) + _quarters(tl.trans(b_dq), BD, BG)
    xs = _quarters(past, BD, BG) + _sixteenths(now, BD, BG) + _quarters(later, BD, BG)
    gs = _grads(xs, dys, ws, b_b, W, SILU)
    b_dx = tl.trans(_whole(_dx(gs, ws, W, dx.dtype.element_ty), BD, BG))
    p_dx = dx + (i_b * T + i_t) * D + i_d + (o_r * D)[:, None] + tl.arange(0, BD)[None, :]
    if FULL and EVEN:
        tl.store(p_dx, b_dx)
    else:
        tl.store(p_dx, b_dx, mask=m_r[:, None] & m_d[None, :])
    HEIGHT: tl.constexpr = W if bias is None else W + 1
    p = partial + (i_b * tl.num_programs(1) + tl.program_id(1)) * HEIGHT * D + o_d
    for w in tl.static_range(HEIGHT):
        tl.store(p + w * D, tl.sum(_total(gs, xs, w, W), 1) * _scale(SILU), mask=m_d)


# ----------------------------------------------------------------------------------------------------------------- host
def supports(p) -> tuple[bool, str]:
    return strip_supports(p)


def _bounds(p) -> int:
    """Sequences that a kernel is compiled for: two kinds, as packed batches rarely have as many as the one before."""
    return 0 if not p.varlen else 64 if p.N <= 64 else triton.next_power_of_2(CUTS)


def turned(x) -> bool:
    """Does time come first in memory?"""
    return x.stride(1) == 1 and x.stride(2) != 1


def _fits(x, dy, rows: int) -> bool:
    """Do the grid and the offsets within a tile of `rows` rows hold x [B, T, D] and dy?"""
    B, T, D = x.shape
    row = max(dy.stride(1), D, x.stride(1))
    return B <= GRID and triton.cdiv(T, rows) <= GRID and (rows + 20) * row < 2**31


def bwd(*, x, weight, bias, h0, dy, dht, p, cu_seqlens):
    """-> dx [B,T,D] contiguous in x's dtype; dw, db, dh0 in their inputs' dtypes or None; dresidual is dy itself."""
    if not x.numel() or h0 is not None or dht is not None:
        return strip_bwd(x=x, weight=weight, bias=bias, h0=h0, dy=dy, dht=dht, p=p, cu_seqlens=cu_seqlens)
    packed = cu_seqlens is not None
    rows_lie = x.stride(2) == 1 and dy.stride(2) == 1 and not (packed and p.N > CUTS)
    if rows_lie and (PACKED if packed else DENSE) == "runs" and _fits(x, dy, _run_rows(packed)):
        run = _runs
    elif rows_lie and packed and PACKED == "tiles" and _fits(x, dy, WARPS * ROWS):
        run = _tiles
    elif turned(x) and not packed and _fits(x, dy, TURNED[1]):
        run = _turned
    else:
        run = _strips
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = run(x, dy, dx, weight.contiguous(), bias, p, cu_seqlens)
    dw, db = _sums(partial, weight, bias)
    return {"dx": dx, "dw": dw, "db": db, "dresidual": dy if p.has_residual else None, "dh0": None}


def _partial(x, parts: int, W: int, bias):
    """The sums of `parts` CTAs or strips, to be written: [parts, W (+ 1), D] fp32."""
    return torch.empty((parts, W + (bias is not None), x.shape[2]), dtype=torch.float32, device=x.device)


def _sums(partial, weight, bias):
    """dw [D, W] and db [D] or None of `_partial`."""
    parts, rows, D = partial.shape
    dw, db = (None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (weight, bias))
    BC = min(32, triton.next_power_of_2(D))
    BS = min(max(triton.next_power_of_2(parts), 64), 256)
    launch(
        conv_sum_kernel, (triton.cdiv(D, BC), rows), partial, dw, db, parts, D,
        W=weight.shape[1], ROWS=rows, BS=BS, BC=BC, num_warps=BS // 32 if BS > 64 else 4,
    )
    return dw, db


def _tiles(x, dy, dx, weight, bias, p, cu_seqlens):
    """Writes dx of packed rows whose channels are of unit stride; returns `_partial`."""
    B, T, D = x.shape
    BD, BT = min(32 * BYTES // x.element_size(), triton.next_power_of_2(D)), WARPS * ROWS
    NT = triton.cdiv(T, BT)
    partial = _partial(x, B * NT, weight.shape[1], bias)
    launch(
        conv_tile_bwd_kernel, (triton.cdiv(D, BD), NT, B), x, dy, dx, partial, weight, bias, cu_seqlens, p.N, T, D,
        *x.stride()[:2], *dy.stride()[:2],
        W=weight.shape[1], BD=BD, R=ROWS, SEG=WARPS, SILU=p.activation == "silu", EVEN=D % BD == 0,
        FULL=_all_rows(p, BT), N2=_bounds(p), num_warps=WARPS, maxnreg=REGS,
    )
    return partial


def _all_rows(p, rows: int) -> bool:
    """Do all CTAs of `rows` rows have all of them? Not asked of packed rows: their totals differ call by call, and few
    are whole, so that one build serves all."""
    return not p.varlen and p.T % rows == 0


def _run_rows(packed: bool) -> int:
    """Rows of a CTA of runs."""
    segments, _, group, pairs = PACKED_RUN if packed else RUN
    return segments * 2 * group * pairs


def _runs(x, dy, dx, weight, bias, p, cu_seqlens):
    """Writes dx where channels are of unit stride; returns `_partial`."""
    B, T, D = x.shape
    segments, beside, group, pairs = PACKED_RUN if p.varlen else RUN
    BD, BT = min(32 * beside * BYTES // x.element_size(), triton.next_power_of_2(D)), _run_rows(p.varlen)
    NT = triton.cdiv(T, BT)
    partial = _partial(x, B * NT, weight.shape[1], bias)
    launch(
        conv_run_bwd_kernel, (triton.cdiv(D, BD), NT, B), x, dy, dx, partial, weight, bias, cu_seqlens, p.N,
        T, x.stride(0), dy.stride(0),
        D=D, SX=x.stride(1), SY=dy.stride(1), W=weight.shape[1], BD=BD, SEG=segments, G=group, PAIRS=pairs,
        SILU=p.activation == "silu", FULL=_all_rows(p, BT), STAGES=STAGES, N2=_bounds(p), num_warps=segments * beside,
        maxnreg=RUN_REGS,
    )
    return partial


def _turned(x, dy, dx, weight, bias, p, cu_seqlens):
    """Writes dx where x's time is of unit stride; returns `_partial`. Dense rows alone."""
    B, T, D = x.shape
    BD, BT, warps = TURNED
    NT = triton.cdiv(T, BT)
    partial = _partial(x, B * NT, weight.shape[1], bias)
    launch(
        conv_turned_bwd_kernel, (triton.cdiv(D, BD), NT, B), x, dy, dx, partial, weight, bias,
        T, D, x.stride(0), x.stride(2), *dy.stride(),
        W=weight.shape[1], BD=BD, BT=BT, SILU=p.activation == "silu", EVEN=D % BD == 0, FULL=T % BT == 0,
        DY_UNIT=dy.stride(2) == 1, num_warps=warps,
        maxnreg=TURNED_REGS if x.element_size() == 2 and T % 16 == 0 else None,
    )
    return partial


def _strips(x, dy, dx, weight, bias, p, cu_seqlens):
    """001's kernel, without states: writes dx, returns `_partial`."""
    B, T, D = x.shape
    W = weight.shape[1]
    grid, L, NS, BD, warps = strip_launch(x, W, STRIP, x.element_size(), W - 1, cu_seqlens)
    partial = _partial(x, B * NS, W, bias)
    launch(
        conv_bwd_kernel, grid, x, dy, dx, partial, weight, bias, None, None, cu_seqlens, p.N, T, D, L, NS,
        *x.stride(), *dy.stride(),
        W=W, BD=BD, G=STRIP["G"], SILU=p.activation == "silu", EVEN=D % BD == 0, X_UNIT=x.stride(2) == 1,
        DY_UNIT=dy.stride(2) == 1, STAGES=STRIP_STAGES, num_warps=warps, maxnreg=STRIP["regs"],
    )
    return partial


SPANS = {"bwd": bwd}

_TYPES = {"x": "*bf16", "dy": "*bf16", "dx": "*bf16", "partial": "*fp32", "weight": "*fp32"}
_TYPES |= dict.fromkeys(("D", "sx_n", "sy_n", "sy_t"), "i32:16")
_FIXED = {"bias": None, "W": 4, "SILU": True, "FULL": True}
_RUN = _FIXED | {"D": 2048, "SX": 2048, "SY": 2048, "STAGES": STAGES}
_ROWS = {n: t for n, t in _TYPES.items() if n not in ("D", "sy_t")} | {"N": "i32", "T": "i32"}
_CU = {"cu_seqlens": "*i64"}


def _run_shape(segments: int, beside: int, group: int, pairs: int) -> dict:
    return {"BD": 16 * BYTES * beside, "SEG": segments, "G": group, "PAIRS": pairs}


COMPILE = [
    (
        conv_run_bwd_kernel, _ROWS, _RUN | _run_shape(*RUN) | {"cu_seqlens": None, "N2": 0}, RUN[0] * RUN[1], 3,
        {"maxnreg": RUN_REGS},
    ),
    (
        conv_run_bwd_kernel, _ROWS | _CU, _RUN | _run_shape(*PACKED_RUN) | {"N2": 64}, PACKED_RUN[0] * PACKED_RUN[1], 3,
        {"maxnreg": RUN_REGS},
    ),
    (
        conv_tile_bwd_kernel, _TYPES | _CU | {"sx_t": "i32:16", "N": "i32", "T": "i32"},
        _FIXED | {"EVEN": True, "BD": 16 * BYTES, "R": ROWS, "SEG": WARPS, "N2": 64}, WARPS, 3, {"maxnreg": REGS},
    ),
    (
        conv_turned_bwd_kernel, _TYPES | {"T": "i32:16", "sx_d": "i32:16"},
        _FIXED | {"EVEN": True, "sy_d": 1, "BD": TURNED[0], "BT": TURNED[1], "DY_UNIT": True}, TURNED[2], 3,
        {"maxnreg": TURNED_REGS},
    ),
]
