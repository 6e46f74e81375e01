"""Short causal depthwise convolution as strips: a CTA walks down time over a block of channels, forward and backward.

Parent: 000 (fla's tiles of 64 rows, whose backward runs the forward again and writes one partial dw per 64 rows).
Delta: the window lives in registers (a ring of W-1 rows), and rows are loaded a group ahead of the work on them: the
    forward's 8 by plain loads, the backward's 4 by asynchronous copies, two groups on their way.
    The backward recomputes the pre-activation from the same ring: x and dy are read once, dx is written once, and
    the fp32 partials of dw and db, one per strip, are summed in a fixed order by a second small kernel.
Why it should be faster: bytes. Forward 2 per element (bf16: 4 B), backward 3 (6 B), plus the halo and one partial per
    strip (under 3 %); fla's backward moves 5, and W reads of each from the caches. About 14 and 29 instructions an
    element keep the issue slots under 65 % when memory is saturated.
Constraints: W 2 to 4; bf16, fp16, fp32; any strides of x and dy (fast where channels are unit-stride).
    Packed sequences are cut at uniform rows, not per sequence; a strip visits the sequences it overlaps in turn.
    T = 0 and B = 0 are handled here (outputs of the right shape, states passed through, zero gradients).
"""
import functools
import os

import torch
import triton
import triton.language as tl

FAMILY = "cconv"

# BD: channels of a CTA at most; G: rows of a group; ctas: how many fit on one multiprocessor; regs: the registers a
# thread that let them fit (with states the edges of a strip would spill under that cap, so it is lifted there);
# rows: a strip's length at most (None: any). 128 is 4 waves at T 8192; the forward gains 1.4 % over one wave by it.
FWD = {"BD": 512, "warps": 4, "G": 8, "ctas": 8, "regs": 64, "rows": 128}
BWD = {"BD": 1024, "warps": 8, "G": 4, "ctas": 2, "regs": 128, "rows": None}
BWD_STAGES = 3  # groups on their way and at work
MIN_ROWS = 16  # a shorter strip would read mostly halo

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
FAST_SIGMOID = tl.constexpr(not INTERPRETED)


# ----------------------------------------------------------------------------------------------------- device functions
@triton.jit
def _sigmoid(z):
    """1 / (1 + 2^(-z log2 e)) in four instructions; the interpreter has no inline assembly."""
    if FAST_SIGMOID:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _channels(o_d, stride, UNIT: tl.constexpr):
    """Offsets of the channels, known to be consecutive where they are: that makes the accesses 16 bytes wide."""
    if UNIT:
        return o_d
    else:
        return o_d.to(tl.int64) * stride


@triton.jit
def _sequence(x, cu_seqlens, n, T, s_n):
    """x at the batch row of sequence n, and the sequence's first and end row there."""
    bos = n * 0
    eos = bos + T
    if cu_seqlens is None:
        x += n.to(tl.int64) * s_n
    else:
        bos = tl.load(cu_seqlens + n).to(tl.int32)
        eos = tl.load(cu_seqlens + n + 1).to(tl.int32)
    return x, bos, eos


@triton.jit
def _row(p, m_d, EVEN: tl.constexpr):
    """One row of channels at pointers p."""
    if EVEN:
        b = tl.load(p)
    else:
        b = tl.load(p, mask=m_d, other=0)
    return b


@triton.jit
def _row_if(p, take, m_d):
    """A row of channels where the scalar `take` holds, else zeros."""
    return tl.load(p, mask=m_d & take, other=0).to(tl.float32)


@triton.jit
def _put(p, b, m_d, EVEN: tl.constexpr):
    if EVEN:
        tl.store(p, b.to(p.dtype.element_ty))
    else:
        tl.store(p, b.to(p.dtype.element_ty), mask=m_d)


@triton.jit
def _past(x, sx_t, h0, n, t, bos, o_d, m_d, D, W: tl.constexpr):
    """Input row t < eos: of x inside the sequence, of its initial state before it, zeros where there is none."""
    b = _row_if(x + t.to(tl.int64) * sx_t, t >= bos, m_d)
    if h0 is not None:
        slot = t - bos + W
        b += _row_if(h0 + n.to(tl.int64) * D * W + o_d * W + slot, (slot >= 0) & (slot < W), m_d)
    return b


@triton.jit
def _ring(x, sx_t, h0, n, t, bos, o_d, m_d, D, W: tl.constexpr):
    """The W - 1 rows before row t, nearest first."""
    rows = (_past(x, sx_t, h0, n, t - 1, bos, o_d, m_d, D, W),)
    for k in tl.static_range(2, W):
        rows += (_past(x, sx_t, h0, n, t - k, bos, o_d, m_d, D, W),)
    return rows


@triton.jit
def _push(row, ring, W: tl.constexpr):
    """The ring after one step: `row` is now the nearest, and the oldest is gone."""
    rows = (row,)
    for k in tl.static_range(W - 2):
        rows += (ring[k],)
    return rows


@triton.jit
def _lags(weight, o_d, m_d, W: tl.constexpr):
    """W weights by lag: the first multiplies the row itself, number k the row k before it."""
    ws = (tl.load(weight + o_d * W + (W - 1), mask=m_d, other=0).to(tl.float32),)
    for k in tl.static_range(1, W):
        ws += (tl.load(weight + o_d * W + (W - 1 - k), mask=m_d, other=0).to(tl.float32),)
    return ws


@triton.jit
def _bias(bias, o_d, m_d):
    b_b = None
    if bias is not None:
        b_b = tl.load(bias + o_d, mask=m_d, other=0).to(tl.float32)
    return b_b


@triton.jit
def _dot(x0, ring, ws, b, W: tl.constexpr):
    """Pre-activation: b + sum over lags of row times weight; b may be None."""
    z = x0 * ws[0]
    if b is not None:
        z += b
    for k in tl.static_range(1, W):
        z += ring[k - 1] * ws[k]
    return z


@triton.jit
def _first_sequence(cu_seqlens, N, t):
    """The sequence that holds row t: the last n < N with cu_seqlens[n] <= t."""
    lo = t * 0
    hi = lo + N
    while hi - lo > 1:
        mid = (lo + hi) // 2
        inside = tl.load(cu_seqlens + mid) <= t
        lo = tl.where(inside, mid, lo)
        hi = tl.where(inside, hi, mid)
    return lo


@triton.jit
def _place(D, L, NS, T, BD: tl.constexpr):
    """This CTA's strip and batch row, its rows [a, e), and its channels."""
    ND = tl.cdiv(D, BD)
    i_s = tl.program_id(0) // ND
    i_b = i_s // NS
    a = (i_s % NS) * L
    o_d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    return i_s, i_b, a, tl.minimum(a + L, T), o_d


# -------------------------------------------------------------------------------------------------------------- forward
@triton.jit
def _fwd_row(x0, ring, ws, b_b, p_r, p_y, m_d, W: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
             EVEN: tl.constexpr):
    """Write one row of y; returns the ring after it."""
    z = _dot(x0, ring, ws, b_b, W)
    if SILU:
        z *= _sigmoid(z)
    if RESIDUAL:
        z += _row(p_r, m_d, EVEN).to(tl.float32)
    _put(p_y, z, m_d, EVEN)
    return _push(x0, ring, W)


@triton.jit
def _fwd_piece(x, y, residual, h0, n, a, e, bos, D, sx_t, o_d, m_d, ws, b_b,
               W: tl.constexpr, G: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr):
    """Rows [a, e) of the sequence that starts at row bos. x, y and residual point at their channels of row 0."""
    RESIDUAL: tl.constexpr = residual is not None
    p_x = x + a.to(tl.int64) * sx_t
    p_y = y + a.to(tl.int64) * D
    p_r = p_y
    if RESIDUAL:
        p_r = residual + a.to(tl.int64) * D
    ring = _ring(x, sx_t, h0, n, a, bos, o_d, m_d, D, W)
    groups = (e - a) // G
    for _ in tl.range(0, groups, num_stages=1):
        rows = ()
        for _r in tl.static_range(G):
            rows += (_row(p_x, m_d, EVEN),)
            p_x += sx_t
        for r in tl.static_range(G):
            ring = _fwd_row(rows[r].to(tl.float32), ring, ws, b_b, p_r, p_y, m_d, W, SILU, RESIDUAL, EVEN)
            p_y += D
            p_r += D
    rest = a + groups * G
    for i in range(0, e - rest):
        o_t = (rest + i).to(tl.int64)   # not a carried pointer: the compiler would forget its alignment
        x0 = _row(x + o_t * sx_t, m_d, EVEN).to(tl.float32)
        p_y = y + o_t * D
        p_r = p_y
        if RESIDUAL:
            p_r = residual + o_t * D
        ring = _fwd_row(x0, ring, ws, b_b, p_r, p_y, m_d, W, SILU, RESIDUAL, EVEN)


@triton.jit(do_not_specialize=["N", "T", "L", "NS"])
def conv_fwd_kernel(
    x,             # [B, T, D] by strides
    y,             # [B, T, D] contiguous
    weight,        # [D, W]
    bias,          # [D] or None
    residual,      # [B, T, D] contiguous, or None
    h0,            # [N, D, W] or None
    cu_seqlens,    # [N + 1] or None
    N, T, D, L, NS, sx_n, sx_t, sx_d,
    W: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr, X_UNIT: tl.constexpr,
):
    """One CTA: L rows of one batch row, BD channels."""
    _, i_b, a, e, o_d = _place(D, L, NS, T, BD)
    m_d = o_d < D
    ws = _lags(weight, o_d, m_d, W)
    b_b = _bias(bias, o_d, m_d)
    x += i_b.to(tl.int64) * sx_n + _channels(o_d, sx_d, X_UNIT)
    y += i_b.to(tl.int64) * T * D + o_d
    if residual is not None:
        residual += i_b.to(tl.int64) * T * D + o_d
    if cu_seqlens is None:
        _fwd_piece(x, y, residual, h0, i_b, a, e, a * 0, D, sx_t, o_d, m_d, ws, b_b, W, G, SILU, EVEN)
    else:
        n = _first_sequence(cu_seqlens, N, a)
        while (a < e) & (n < N):
            bos = tl.load(cu_seqlens + n).to(tl.int32)
            stop = tl.minimum(e, tl.load(cu_seqlens + n + 1).to(tl.int32))
            if a < stop:
                _fwd_piece(x, y, residual, h0, n, a, stop, bos, D, sx_t, o_d, m_d, ws, b_b, W, G, SILU, EVEN)
            a = tl.maximum(a, stop)
            n += 1


@triton.jit(do_not_specialize=["T"])
def conv_ht_kernel(x, h0, ht, cu_seqlens, T, D, sx_n, sx_t, sx_d, W: tl.constexpr, BD: tl.constexpr,
                   X_UNIT: tl.constexpr):
    """One CTA: the last W inputs of one sequence, BD channels. ht [N, D, W]."""
    ND = tl.cdiv(D, BD)
    n = tl.program_id(0) // ND
    o_d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    x, bos, eos = _sequence(x, cu_seqlens, n, T, sx_n)
    x += _channels(o_d, sx_d, X_UNIT)
    for w in tl.static_range(W):
        b = _past(x, sx_t, h0, n, eos - W + w, bos, o_d, m_d, D, W)
        tl.store(ht + n.to(tl.int64) * D * W + o_d * W + w, b.to(ht.dtype.element_ty), mask=m_d)


# ------------------------------------------------------------------------------------------------------------- backward
@triton.jit
def _grad(dy, z, SILU: tl.constexpr):
    """Gradient of the pre-activation z."""
    if SILU:
        s = _sigmoid(z)
        dy *= s + z * s * (1.0 - s)
    return dy


@triton.jit
def _add(sums, g, x0, ring, W: tl.constexpr):
    """Add a row of gradients g to the sums: of the weight by lag, then of the bias."""
    out = (sums[0] + g * x0,)
    for k in tl.static_range(1, W):
        out += (sums[k] + g * ring[k - 1],)
    return out + (sums[W] + g,)  # noqa: RUF005  (Triton has no starred tuples)


@triton.jit
def _dx(g0, grads, ws, W: tl.constexpr):
    """dx of the row W - 1 before the newest: the newest gradient g0 meets the oldest weight."""
    d = grads[W - 2] * ws[0]
    for k in tl.static_range(1, W - 1):
        d += grads[W - 2 - k] * ws[k]
    return d + g0 * ws[W - 1]


@triton.jit
def _bwd_edge(x, dy, t, sx_t, sy_t, inside, own, ring, sums, ws, b_b, m_d, W: tl.constexpr, SILU: tl.constexpr):
    """Row t, near an end: its gradient is 0 unless `inside` the sequence; it enters the sums if the strip's `own`."""
    x0 = _row_if(x + t.to(tl.int64) * sx_t, inside, m_d)
    g0 = _grad(_row_if(dy + t.to(tl.int64) * sy_t, inside, m_d), _dot(x0, ring, ws, b_b, W), SILU)
    return g0, _push(x0, ring, W), _add(sums, tl.where(own, g0, 0.0), x0, ring, W)


@triton.jit
def _bwd_row(b_x, b_dy, ring, grads, sums, ws, b_b, p_dx, m_d, W: tl.constexpr, SILU: tl.constexpr,
             EVEN: tl.constexpr):
    """One row well inside: x and dy in, dx of the row W - 1 before it out; returns the ring, gradients and sums."""
    x0 = b_x.to(tl.float32)
    g0 = _grad(b_dy.to(tl.float32), _dot(x0, ring, ws, b_b, W), SILU)
    _put(p_dx, _dx(g0, grads, ws, W), m_d, EVEN)
    return _push(x0, ring, W), _push(g0, grads, W), _add(sums, g0, x0, ring, W)


@triton.jit
def _bwd_piece(x, dy, dx, h0, dht, n, a, e, bos, eos, D, sx_t, sy_t, o_d, m_d, ws, b_b, sums,
               W: tl.constexpr, G: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr):
    """Rows [a, e) of the sequence [bos, eos). dx trails the newest row by W - 1: it starts with the gradients of the
    first W - 1 rows in hand, and ends with those of the W - 1 rows after the strip, which another strip sums."""
    LAST: tl.constexpr = W - 1 if dht is None else W   # rows of dx after the main loop; dht reaches the last W
    ring = _ring(x, sx_t, h0, n, a, bos, o_d, m_d, D, W)
    grads = ring
    for j in tl.static_range(W - 1):
        t = a + j
        g0, ring, sums = _bwd_edge(x, dy, t, sx_t, sy_t, t < eos, t < e, ring, sums, ws, b_b, m_d, W, SILU)
        grads = _push(g0, grads, W)
    end = tl.maximum(a, e - LAST)
    groups = (end - a) // G
    p_x = x + (a + (W - 1)).to(tl.int64) * sx_t
    p_dy = dy + (a + (W - 1)).to(tl.int64) * sy_t
    p_dx = dx + a.to(tl.int64) * D
    for _ in tl.range(0, groups, num_stages=STAGES):
        xs = ()
        dys = ()
        for _r in tl.static_range(G):
            xs += (_row(p_x, m_d, EVEN),)
            dys += (_row(p_dy, m_d, EVEN),)
            p_x += sx_t
            p_dy += sy_t
        for r in tl.static_range(G):
            ring, grads, sums = _bwd_row(xs[r], dys[r], ring, grads, sums, ws, b_b, p_dx, m_d, W, SILU, EVEN)
            p_dx += D
    rest = a + groups * G
    for i in range(0, end - rest):
        o_s = (rest + i).to(tl.int64)
        o_t = o_s + (W - 1)
        ring, grads, sums = _bwd_row(_row(x + o_t * sx_t, m_d, EVEN), _row(dy + o_t * sy_t, m_d, EVEN),
                                     ring, grads, sums, ws, b_b, dx + o_s * D, m_d, W, SILU, EVEN)
    for j in tl.static_range(LAST):
        s = end + j
        t = s + (W - 1)
        g0, ring, sums = _bwd_edge(x, dy, t, sx_t, sy_t, (t < eos) & (s < e), (t < e) & (s < e), ring, sums,
                                   ws, b_b, m_d, W, SILU)
        d = _dx(g0, grads, ws, W)
        if dht is not None:
            slot = s - eos + W
            d += _row_if(dht + n.to(tl.int64) * D * W + o_d * W + slot, (slot >= 0) & (slot < W), m_d)
        tl.store(dx + s.to(tl.int64) * D, d.to(dx.dtype.element_ty), mask=m_d & (s < e))
        grads = _push(g0, grads, W)
    return sums


@triton.jit(do_not_specialize=["N", "T", "L", "NS"])
def conv_bwd_kernel(
    x, dy,         # [B, T, D] by strides
    dx,            # [B, T, D] contiguous
    partial,       # [strips, W (+ 1 with a bias), D] fp32: sums of each strip, by weight column, then the bias
    weight,        # [D, W]
    bias,          # [D] or None
    h0, dht,       # [N, D, W] or None
    cu_seqlens,    # [N + 1] or None
    N, T, D, L, NS, sx_n, sx_t, sx_d, sy_n, sy_t, sy_d,
    W: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr,
    X_UNIT: tl.constexpr, DY_UNIT: tl.constexpr, STAGES: tl.constexpr,
):
    """One CTA: L rows of one batch row, BD channels."""
    i_s, i_b, a, e, o_d = _place(D, L, NS, T, BD)
    m_d = o_d < D
    ws = _lags(weight, o_d, m_d, W)
    b_b = _bias(bias, o_d, m_d)
    x += i_b.to(tl.int64) * sx_n + _channels(o_d, sx_d, X_UNIT)
    dy += i_b.to(tl.int64) * sy_n + _channels(o_d, sy_d, DY_UNIT)
    dx += i_b.to(tl.int64) * T * D + o_d
    sums = ()
    for _k in tl.static_range(W + 1):
        sums += (tl.zeros([BD], tl.float32),)
    if cu_seqlens is None:
        sums = _bwd_piece(x, dy, dx, h0, dht, i_b, a, e, a * 0, T, D, sx_t, sy_t, o_d, m_d, ws, b_b, sums,
                          W, G, SILU, EVEN, STAGES)
    else:
        n = _first_sequence(cu_seqlens, N, a)
        while (a < e) & (n < N):
            bos = tl.load(cu_seqlens + n).to(tl.int32)
            eos = tl.load(cu_seqlens + n + 1).to(tl.int32)
            stop = tl.minimum(e, eos)
            if a < stop:
                sums = _bwd_piece(x, dy, dx, h0, dht, n, a, stop, bos, eos, D, sx_t, sy_t, o_d, m_d, ws, b_b, sums,
                                  W, G, SILU, EVEN, STAGES)
            a = tl.maximum(a, stop)
            n += 1
    ROWS: tl.constexpr = W if bias is None else W + 1
    p = partial + i_s.to(tl.int64) * ROWS * D + o_d
    for k in tl.static_range(W):
        tl.store(p + (W - 1 - k) * D, sums[k], mask=m_d)
    if bias is not None:
        tl.store(p + W * D, sums[W], mask=m_d)


@triton.jit(do_not_specialize=["S"])
def conv_sum_kernel(partial, dw, db, S, D, W: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr):
    """Sum the strips' partials [S, ROWS, D] in one fixed order into dw [D, W] and, with a bias, db [D]."""
    i_w = tl.program_id(1)
    o_d = tl.program_id(0) * BC + tl.arange(0, BC)
    m_d = o_d < D
    o_s = tl.arange(0, BS)
    acc = tl.zeros((BS, BC), tl.float32)
    for s in range(0, S, BS):
        p = partial + (s + o_s).to(tl.int64)[:, None] * ROWS * D + i_w * D + o_d[None, :]
        acc += tl.load(p, mask=((s + o_s) < S)[:, None] & m_d[None, :], other=0)
    total = tl.sum(acc, 0)
    if i_w < W:
        tl.store(dw + o_d * W + i_w, total.to(dw.dtype.element_ty), mask=m_d)
    elif db is not None:
        tl.store(db + o_d, total.to(db.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["T"])
def conv_dh0_kernel(x, dy, weight, bias, h0, dht, dh0, cu_seqlens, T, D, sx_n, sx_t, sx_d, sy_n, sy_t, sy_d,
                    W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, X_UNIT: tl.constexpr, DY_UNIT: tl.constexpr):
    """One CTA: the gradient of one sequence's initial state, BD channels, from its first W - 1 rows. dh0 [N, D, W]."""
    ND = tl.cdiv(D, BD)
    n = tl.program_id(0) // ND
    o_d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_h = n.to(tl.int64) * D * W + o_d * W
    ws = _lags(weight, o_d, m_d, W)
    b_b = _bias(bias, o_d, m_d)
    x, bos, eos = _sequence(x, cu_seqlens, n, T, sx_n)
    dy, bos, eos = _sequence(dy, cu_seqlens, n, T, sy_n)
    x += _channels(o_d, sx_d, X_UNIT)
    dy += _channels(o_d, sy_d, DY_UNIT)
    ring = _ring(x, sx_t, h0, n, bos, bos, o_d, m_d, D, W)
    gs = ()
    for j in tl.static_range(W - 1):
        t = (bos + j).to(tl.int64)
        x0 = _row_if(x + t * sx_t, t < eos, m_d)
        g = _row_if(dy + t * sy_t, t < eos, m_d)
        gs += (_grad(g, _dot(x0, ring, ws, b_b, W), SILU),)
        ring = _push(x0, ring, W)
    for j in tl.static_range(W):
        d = tl.zeros([BD], tl.float32)
        for t in tl.static_range(j):   # slot j lies W - j rows before row 0, so row t sees it at lag t + W - j
            d += gs[t] * ws[t + W - j]
        if dht is not None:
            slot = j - (eos - bos)     # a sequence shorter than the window hands the slot on to ht
            d += _row_if(dht + o_h + slot, slot >= 0, m_d)
        tl.store(dh0 + o_h + j, d.to(dh0.dtype.element_ty), mask=m_d)


# ----------------------------------------------------------------------------------------------------------------- host
def supports(p) -> tuple[bool, str]:
    if p.W not in (2, 3, 4):
        return False, f"needs W in 2..4, got {p.W}"
    for name, dtype in (("x", p.dtype), ("weight", p.w_dtype)):
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return False, f"needs {name} in bfloat16, float16 or float32, got {str(dtype).removeprefix('torch.')}"
    if p.activation not in (None, "silu"):
        return False, f"needs activation None or 'silu', got {p.activation!r}"
    if p.arch != (0, 0) and p.arch[0] < 9:
        return False, f"needs compute capability 9.0 or newer, got {p.arch[0]}.{p.arch[1]}"
    return True, ""


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _block(D: int, itemsize: int, cfg: dict) -> tuple[int, int]:
    """Channels and warps of a CTA: 16 bytes a thread, a divisor of D where one of 256 channels or more exists."""
    most = min(cfg["BD"] * 2 // itemsize, triton.next_power_of_2(D))
    BD = most
    while D % BD and BD > 256:
        BD //= 2
    if D % BD:
        BD = most
    return BD, max(1, cfg["warps"] * BD * itemsize // (2 * cfg["BD"]))


@functools.lru_cache(maxsize=1024)
def _strip_rows(T: int, columns: int, slots: int, G: int, extra: int, longest: int | None) -> int:
    """Rows of a strip. Of all cuts of T rows into strips no longer than `longest` (None: any), the one whose waves of
    `slots` CTAs end first; a CTA's start-up, halo and partial sums count as 12 rows. The main loop then takes whole
    groups: rows = extra modulo G."""
    least = triton.cdiv(T, longest or T)
    most = max(least, min(T // MIN_ROWS, triton.cdiv(4 * slots, columns)))
    cuts = min(range(least, most + 1), key=lambda k: (triton.cdiv(columns * k, slots) * (triton.cdiv(T, k) + 12), k))
    return max(triton.cdiv(triton.cdiv(T, cuts) - extra, G), 1) * G + extra


def _launch(x, W: int, cfg: dict, itemsize: int, extra: int, cu_seqlens) -> tuple:
    """(grid, rows a strip, strips a batch row, BD, warps)."""
    B, T, D = x.shape
    BD, warps = _block(D, itemsize, cfg)
    ND = triton.cdiv(D, BD)
    slots = _multiprocessors(x.device) * cfg["ctas"] * (cfg["warps"] // warps)
    L = _strip_rows(T, B * ND, slots, cfg["G"], extra, cfg["rows"])
    if cu_seqlens is not None:  # a CTA visits its sequences in turn: about 16 of mean length at most
        mean = max(T // max(len(cu_seqlens) - 1, 1), 1)
        L = min(L, triton.cdiv(16 * mean, cfg["G"]) * cfg["G"] + extra)
    NS = triton.cdiv(T, L)
    return (B * NS * ND,), L, NS, BD, warps


def _packed(*tensors):
    return (None if t is None else t.contiguous() for t in tensors)


def fwd(*, x, weight, bias, residual, h0, p, cu_seqlens):
    """x [B,T,D], weight [D,W], bias [D], residual [B,T,D], h0 [N,D,W] -> y [B,T,D] contiguous, ht [N,D,W] or None."""
    B, T, D = x.shape
    W = weight.shape[1]
    y = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    weight, residual, h0 = _packed(weight, residual, h0)
    if y.numel():
        grid, L, NS, BD, warps = _launch(x, W, FWD, x.element_size(), 0, cu_seqlens)
        conv_fwd_kernel[grid](
            x, y, weight, bias, residual, h0, cu_seqlens, p.N, T, D, L, NS, *x.stride(),
            W=W, BD=BD, G=FWD["G"], SILU=p.activation == "silu", EVEN=D % BD == 0, X_UNIT=x.stride(2) == 1,
            num_warps=warps, maxnreg=FWD["regs"] if h0 is None else None,
        )
    ht = None
    if p.output_final_state:
        ht = torch.empty((p.N, D, W), dtype=x.dtype, device=x.device)
        if ht.numel():
            BD = min(256, triton.next_power_of_2(D))
            conv_ht_kernel[(p.N * triton.cdiv(D, BD),)](
                x, h0, ht, cu_seqlens, T, D, *x.stride(), W=W, BD=BD, X_UNIT=x.stride(2) == 1, num_warps=2
            )
    return {"y": y, "ht": ht}


def bwd(*, x, weight, bias, h0, dy, dht, p, cu_seqlens):
    """-> dx [B,T,D] contiguous in x's dtype; dw, db, dh0 in their inputs' dtypes or None; dresidual is dy itself."""
    B, T, D = x.shape
    W = weight.shape[1]
    silu = p.activation == "silu"
    rows = W if bias is None else W + 1
    dx = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    dw = torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
    db = None if bias is None else torch.zeros_like(bias)
    weight, h0, dht = _packed(weight, h0, dht)
    units = {"X_UNIT": x.stride(2) == 1, "DY_UNIT": dy.stride(2) == 1}
    if dx.numel():
        extra = W - 1 if dht is None else W
        grid, L, NS, BD, warps = _launch(x, W, BWD, x.element_size(), extra, cu_seqlens)
        partial = torch.empty((B * NS, rows, D), dtype=torch.float32, device=x.device)
        conv_bwd_kernel[grid](
            x, dy, dx, partial, weight, bias, h0, dht, cu_seqlens, p.N, T, D, L, NS, *x.stride(), *dy.stride(),
            W=W, BD=BD, G=BWD["G"], SILU=silu, EVEN=D % BD == 0, STAGES=BWD_STAGES, **units,
            num_warps=warps, maxnreg=BWD["regs"] if h0 is None and dht is None else None,
        )
        BC = min(32, triton.next_power_of_2(D))
        conv_sum_kernel[(triton.cdiv(D, BC), rows)](
            partial, dw, db, B * NS, D, W=W, ROWS=rows, BS=64, BC=BC, num_warps=4
        )
    dh0 = None
    if h0 is not None:
        dh0 = torch.empty_like(h0)
        if dh0.numel():
            BD = min(256, triton.next_power_of_2(D))
            conv_dh0_kernel[(p.N * triton.cdiv(D, BD),)](
                x, dy, weight, bias, h0, dht, dh0, cu_seqlens, T, D, *x.stride(), *dy.stride(),
                W=W, BD=BD, SILU=silu, num_warps=2, **units,
            )
    return {"dx": dx, "dw": dw, "db": db, "dresidual": dy if p.has_residual else None, "dh0": dh0}


SPANS = {"fwd": fwd, "bwd": bwd}

_TYPES = {"x": "*bf16", "weight": "*fp32", "D": "i32:16", "sx_n": "i32:16", "sx_t": "i32:16"}
_TYPES |= dict.fromkeys(("N", "T", "L", "NS"), "i32")
_FIXED = {"bias": None, "h0": None, "cu_seqlens": None, "sx_d": 1, "W": 4, "SILU": True, "EVEN": True, "X_UNIT": True}
COMPILE = [
    (
        conv_fwd_kernel, _TYPES | {"y": "*bf16"}, _FIXED | {"residual": None, "BD": FWD["BD"], "G": FWD["G"]},
        FWD["warps"], 3, {"maxnreg": FWD["regs"]},
    ),
    (
        conv_bwd_kernel,
        _TYPES | {"dy": "*bf16", "dx": "*bf16", "partial": "*fp32", "sy_n": "i32:16", "sy_t": "i32:16"},
        _FIXED | {"dht": None, "sy_d": 1, "DY_UNIT": True, "BD": BWD["BD"], "G": BWD["G"], "STAGES": BWD_STAGES},
        BWD["warps"], 3, {"maxnreg": BWD["regs"]},
    ),
]
