"""Short causal depthwise convolution, forward, as tiles: all loads of a tile are on their way before any arithmetic.

Parent: 001 (strips of 128 rows, groups of 8 rows loaded and worked on in turn, one wave of CTAs at T 2048).
Delta: a CTA takes a tile [WARPS x ROWS rows, BD channels] once. A thread has 8 bytes of channels of ROWS + W - 1
    consecutive rows, loaded one after another; its neighbours' rows it reads again, from L1. Weights are loaded as they
    lie, 16 bytes a channel, and turned in shared memory while x is on its way. Packed rows need no table: x is loaded
    by plain rows, and a mask of the rows at which a sequence starts, found from cu_seqlens meanwhile, cuts the window.
    x that lies as [B,D,T] is read 16 bytes of time a thread, convolved there, and turned as it is stored.
Why it should be faster: 001 loses 10 us a call to one wave of long strips, and to weights read in steps of 16 bytes
    (32 lines a request) before the first row; turned x was read 2 bytes a lane. Bytes are the same, 2 per element.
Constraints: as 001. What has an initial state, or a grid beyond CUDA's, is 001's kernel; packed rows too where they
    are more than CUTS sequences, or x is turned. x counts as turned where time is its unit stride and channels are not;
    its loads are 16 bytes wide where T is a multiple of 16.
"""
import torch
import triton
import triton.language as tl

from kernel_fun._common.launch import launch
from kernel_fun.cconv.stages.k001_conv_strip import INTERPRETED, conv_ht_kernel
from kernel_fun.cconv.stages.k001_conv_strip import fwd as strip_fwd
from kernel_fun.cconv.stages.k001_conv_strip import supports as strip_supports

FAMILY = "cconv"

# Of the tiles: bytes of channels a thread, rows a thread, and warps, each of which has a segment of that many rows.
BYTES = 8
ROWS = 8
WARPS = 4
TURNED = (64, 64, 4)   # channels and rows of a tile of turned x, warps
CUTS = 512             # packed sequences at most
GRID = 65535           # CTAs along the grid's second and third axes

EXACT = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)


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
def _silu(u):
    """silu(z) = u / (c + c 2^-u) of u = c z, c = log2(e). Of two elements one reciprocal, that of their denominators'
    product; where 2^-u exceeds 2^60 it stays 2^60, so that the product is finite. Below z = -41 that is z / 2^60
    and not 0, and |z| must stay below 2e38."""
    if EXACT:
        z = u * (1.0 / LOG2E)
        return z / (1.0 + tl.exp(-z))
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 a, b, p, q; neg.f32 a, $2; neg.f32 b, $3; min.f32 a, a, 0f42700000; min.f32 b, b, 0f42700000;
            ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; fma.rn.f32 a, a, 0f3FB8AA3B, 0f3FB8AA3B;
            fma.rn.f32 b, b, 0f3FB8AA3B, 0f3FB8AA3B; mul.f32 p, a, b; rcp.approx.ftz.f32 p, p; mul.f32 q, p, $2;
            mul.f32 p, p, $3; mul.f32 $0, q, b; mul.f32 $1, p, a; }""",
            "=f,=f,f,f", [u], dtype=tl.float32, is_pure=True, pack=2,
        )


@triton.jit
def _scale(SILU: tl.constexpr):
    """What weights and bias are multiplied by, so that the sum is what `_silu` wants."""
    return LOG2E if SILU else 1.0


@triton.jit
def _weights(weight, o_d, m_d, W: tl.constexpr):
    """[BD, W] as they lie, a channel's beside each other; three taps are filled up to four."""
    o_w = tl.arange(0, 4 if W == 3 else W)
    return tl.load(weight + o_d[:, None] * W + o_w[None, :], mask=m_d[:, None] & (o_w < W)[None, :], other=0)


@triton.jit
def _taps(b_w, W: tl.constexpr, SILU: tl.constexpr):
    """W tensors [BD], scaled, of `_weights`."""
    b_w = b_w.to(tl.float32) * _scale(SILU)
    if W == 2:
        w0, w1 = tl.split(b_w)
        taps = (w0, w1)
    else:
        even, odd = tl.split(tl.reshape(b_w, (b_w.shape[0], 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        taps = (w0, w1, w2)
        if W == 4:
            taps += (w3,)
    return taps


@triton.jit
def _cuts(bos, eos, row, LENGTH: tl.constexpr):
    """[SEG] masks: bit i of a segment whose first row is `row` [SEG] is 1 where one of the sequences [bos, eos) starts
    at row + i. An empty one starts nowhere, so that no bit is added twice."""
    tl.static_assert(LENGTH <= 31)
    i = bos.to(tl.int32)[None, :] - row[:, None]
    hit = (eos > bos)[None, :] & (i >= 0) & (i < LENGTH)
    return tl.sum(tl.where(hit, 1 << (i & 31), 0), 1)


# ----------------------------------------------------------------------------------------------------- rows of channels
@triton.jit
def _tile_row(xs, j: tl.constexpr, ws, b, cut, W: tl.constexpr, SILU: tl.constexpr, CUT: tl.constexpr):
    """Row j of every segment [SEG, BD], from the W loaded rows that end there: xs[j] is the oldest. With CUT, bit i of
    `cut` [SEG, 1] says that a sequence starts at row i - (W - 2)."""
    z = _wide(xs[j + W - 1]) * ws[W - 1][None, :]
    if b is not None:
        z += b[None, :]
    for k in tl.static_range(1, W):   # row j - k counts unless one of the rows j - k + 1 to j starts a sequence
        x = _wide(xs[j + W - 1 - k])
        if CUT:
            x = tl.where((cut & (((1 << k) - 1) << (j + W - 1 - k))) == 0, x, 0.0)
        z += x * ws[W - 1 - k][None, :]
    if SILU:
        z = _silu(z)
    return z


@triton.jit
def _tile_rows(xs, rs, p_y, D, o_t, T, m_d, ws, b, cut, W: tl.constexpr, R: tl.constexpr, SILU: tl.constexpr,
               CUT: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr):
    """Compute and write R rows of every segment."""
    for j in tl.static_range(R):
        z = _tile_row(xs, j, ws, b, cut, W, SILU, CUT)
        if len(rs):
            z += rs[j].to(tl.float32)
        z = z.to(p_y.dtype.element_ty)
        if FULL and EVEN:
            tl.store(p_y, z)
        else:
            tl.store(p_y, z, mask=(o_t + j < T)[:, None] & m_d[None, :])
        p_y += D


@triton.jit(do_not_specialize=["N", "T"])
def conv_tile_kernel(
    x,             # [B, T, D] by strides, channels one after another
    y,             # [B, T, D] contiguous
    weight,        # [D, W]
    bias,          # [D] or None
    residual,      # [B, T, D] contiguous, or None
    cu_seqlens,    # [N + 1] or None
    N, T, D, sx_n, sx_t,
    W: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, SEG: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, N2: tl.constexpr,
):
    """One CTA: SEG segments of R rows of one batch row, BD channels; FULL: all rows of it exist, EVEN: all channels.
    N2: 0 if dense, else a power of two, N at least."""
    i_b = tl.program_id(2).to(tl.int64)
    i_t = tl.program_id(1) * (SEG * R)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_r = tl.arange(0, SEG) * R
    o_t = i_t + o_r
    p_x = x + i_b * sx_n + i_t.to(tl.int64) * sx_t + ((o_r - (W - 1)) * sx_t)[:, None] + o_d[None, :]
    o_y = i_b * T * D + i_t.to(tl.int64) * D
    b_w = _weights(weight, o_d, m_d, W)   # before x: they are there first, and are turned while x comes
    bos, eos = None, None
    if cu_seqlens is not None:
        o_n = tl.arange(0, N2)
        bos = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0)
        eos = tl.load(cu_seqlens + o_n + 1, mask=o_n < N, other=0)
    xs = ()
    for j in tl.static_range(R + W - 1):
        if j >= W - 1 and FULL and EVEN:
            xs += (tl.load(p_x),)
        elif j >= W - 1:
            xs += (tl.load(p_x, mask=(o_t + (j - W + 1) < T)[:, None] & m_d[None, :], other=0),)
        elif FULL and EVEN:
            xs += (tl.load(p_x, mask=(o_t + (j - W + 1) >= 0)[:, None], other=0),)
        else:
            m_t = (o_t + (j - W + 1) >= 0) & (o_t + (j - W + 1) < T)
            xs += (tl.load(p_x, mask=m_t[:, None] & m_d[None, :], other=0),)
        p_x += sx_t
    rs = ()
    if residual is not None:
        p_r = residual + o_y + (o_r * D)[:, None] + o_d[None, :]
        for j in tl.static_range(R):
            rs += (tl.load(p_r, mask=(o_t + j < T)[:, None] & m_d[None, :], other=0),)
            p_r += D
    ws = _taps(b_w, W, SILU)
    b = None
    if bias is not None:
        b = tl.load(bias + o_d, mask=m_d, other=0).to(tl.float32) * _scale(SILU)
    p_y = y + o_y + (o_r * D)[:, None] + o_d[None, :]
    if cu_seqlens is None:
        _tile_rows(xs, rs, p_y, D, o_t, T, m_d, ws, b, None, W, R, SILU, False, EVEN, FULL)
    else:
        cut = _cuts(bos, eos, o_t - (W - 2), R + W - 2)
        if tl.max(cut, 0) != 0:
            _tile_rows(xs, rs, p_y, D, o_t, T, m_d, ws, b, cut[:, None], W, R, SILU, True, EVEN, FULL)
        else:
            _tile_rows(xs, rs, p_y, D, o_t, T, m_d, ws, b, None, W, R, SILU, False, EVEN, FULL)


# ------------------------------------------------------------------------------------------------------------- turned x
@triton.jit
def _eighths(b, BD: tl.constexpr, BG: tl.constexpr):
    """[BD, 8 BG] as 8 tensors [BD, BG]: number i holds column 8 g + i of every group g. Within a thread, no copies."""
    a0, a1 = tl.split(tl.reshape(b, (BD, BG, 2, 2, 2)))   # i & 1
    a00, a01 = tl.split(a0)                               # i >> 1 & 1
    a10, a11 = tl.split(a1)
    c0, c4 = tl.split(a00)
    c2, c6 = tl.split(a01)
    c1, c5 = tl.split(a10)
    c3, c7 = tl.split(a11)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _whole(c, BD: tl.constexpr, BG: tl.constexpr):
    """The inverse of `_eighths`."""
    a0 = tl.join(tl.join(c[0], c[4]), tl.join(c[2], c[6]))
    a1 = tl.join(tl.join(c[1], c[5]), tl.join(c[3], c[7]))
    return tl.reshape(tl.join(a0, a1), (BD, BG * 8))


@triton.jit
def conv_turned_kernel(
    x,             # [B, T, D] by strides, rows one after another
    y,             # [B, T, D] contiguous
    weight,        # [D, W]
    bias,          # [D] or None
    residual,      # [B, T, D] contiguous, or None
    T, D, sx_n, sx_d,
    W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
):
    """One CTA: BT rows of one batch row, BD channels; all rows of it exist if FULL, all channels if EVEN."""
    BG: tl.constexpr = BT // 8
    i_b = tl.program_id(2).to(tl.int64)
    i_t = tl.program_id(1) * BT
    i_d = tl.program_id(0) * BD
    o_d = i_d + tl.arange(0, BD)
    o_t = i_t + tl.arange(0, BT)
    m_d = o_d < D
    p_x = x + i_b * sx_n + (o_d.to(tl.int64) * sx_d)[:, None] + o_t[None, :]
    b_w = _weights(weight, o_d, m_d, W)
    if FULL and EVEN:
        now = tl.load(p_x)
    else:
        now = tl.load(p_x, mask=m_d[:, None] & (o_t < T)[None, :], other=0)
    # the group of 8 rows before each, from L1 but for the tile's first
    past = tl.load(p_x - 8, mask=m_d[:, None] & ((o_t >= 8) & (o_t < T + 8))[None, :], other=0)
    ws = _taps(b_w, W, SILU)
    b = None
    if bias is not None:
        b = tl.load(bias + o_d, mask=m_d, other=0).to(tl.float32) * _scale(SILU)
    xs = _eighths(past, BD, BG) + _eighths(now, BD, BG)
    ys = ()
    for i in tl.static_range(8):
        ys += (_tile_column(xs, i, ws, b, W, SILU),)
    z = tl.trans(_whole(ys, BD, BG))
    o_y = (i_b * T + i_t) * D + i_d + (tl.arange(0, BT) * D)[:, None] + tl.arange(0, BD)[None, :]
    m_y = (o_t < T)[:, None] & m_d[None, :]
    if residual is not None:
        z = z.to(tl.float32) + tl.load(residual + o_y, mask=m_y, other=0).to(tl.float32)
    if FULL and EVEN:
        tl.store(y + o_y, z.to(y.dtype.element_ty))
    else:
        tl.store(y + o_y, z.to(y.dtype.element_ty), mask=m_y)


@triton.jit
def _tile_column(xs, i: tl.constexpr, ws, b, W: tl.constexpr, SILU: tl.constexpr):
    """Row i of every group of 8 [BD, BG]: xs[8 + i] is the row itself, what comes before it the rows before."""
    z = _wide(xs[8 + i]) * ws[W - 1][:, None]
    if b is not None:
        z += b[:, None]
    for k in tl.static_range(1, W):
        z += _wide(xs[8 + i - k]) * ws[W - 1 - k][:, None]
    if SILU:
        z = _silu(z)
    return z


# ----------------------------------------------------------------------------------------------------------------- host
def supports(p) -> tuple[bool, str]:
    return strip_supports(p)


def _bounds(p) -> int:
    """Sequences that a tile is compiled for: two kinds, as packed batches rarely have as many as the one before."""
    return 0 if not p.varlen else 64 if p.N <= 64 else triton.next_power_of_2(CUTS)


def turned(x) -> bool:
    """Does time come first in memory?"""
    return x.stride(1) == 1 and x.stride(2) != 1


def _fits(x, rows: int) -> bool:
    """Do the grid and the offsets within a tile of `rows` rows hold x [B, T, D]?"""
    B, T, _ = x.shape
    return B <= GRID and triton.cdiv(T, rows) <= GRID and (rows + 3) * max(x.stride(1), x.shape[2]) < 2**31


def fwd(*, x, weight, bias, residual, h0, p, cu_seqlens):
    """x [B,T,D], weight [D,W], bias [D], residual [B,T,D], h0 [N,D,W] -> y [B,T,D] contiguous, ht [N,D,W] or None."""
    plain = x.numel() and h0 is None
    few = not p.varlen or p.N <= CUTS
    if plain and few and x.stride(2) == 1 and _fits(x, WARPS * ROWS):
        y = _tiles(x, weight.contiguous(), bias, residual, p, cu_seqlens)
    elif plain and turned(x) and cu_seqlens is None and _fits(x, TURNED[1]):
        y = _turned(x, weight.contiguous(), bias, residual, p)
    else:
        return strip_fwd(x=x, weight=weight, bias=bias, residual=residual, h0=h0, p=p, cu_seqlens=cu_seqlens)
    return {"y": y, "ht": _final(x, p, cu_seqlens) if p.output_final_state else None}


def _tiles(x, weight, bias, residual, p, cu_seqlens):
    """y [B, T, D] of x whose channels have unit stride."""
    B, T, D = x.shape
    y = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    BD, BT = min(32 * BYTES // x.element_size(), triton.next_power_of_2(D)), WARPS * ROWS
    launch(
        conv_tile_kernel, (triton.cdiv(D, BD), triton.cdiv(T, BT), B), x, y, weight, bias,
        None if residual is None else residual.contiguous(), cu_seqlens, p.N, T, D, x.stride(0), x.stride(1),
        W=weight.shape[1], BD=BD, R=ROWS, SEG=WARPS, SILU=p.activation == "silu", EVEN=D % BD == 0,
        FULL=T % BT == 0 and not p.varlen,  # packed totals differ call by call, and few are whole: one build serves all
        N2=_bounds(p), num_warps=WARPS,
    )
    return y


def _turned(x, weight, bias, residual, p):
    """y [B, T, D] of x whose rows have unit stride."""
    B, T, D = x.shape
    y = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    BD, BT, warps = TURNED
    launch(
        conv_turned_kernel, (triton.cdiv(D, BD), triton.cdiv(T, BT), B), x, y, weight, bias,
        None if residual is None else residual.contiguous(), T, D, x.stride(0), x.stride(2),
        W=weight.shape[1], BD=BD, BT=BT, SILU=p.activation == "silu", EVEN=D % BD == 0, FULL=T % BT == 0,
        num_warps=warps,
    )
    return y


def _final(x, p, cu_seqlens):
    """ht [N, D, W], without an initial state."""
    D = x.shape[2]
    ht = torch.empty((p.N, D, p.W), dtype=x.dtype, device=x.device)
    BD = min(256, triton.next_power_of_2(D))
    launch(
        conv_ht_kernel, (p.N * triton.cdiv(D, BD),), x, None, ht, cu_seqlens, p.T, D, *x.stride(),
        W=p.W, BD=BD, X_UNIT=x.stride(2) == 1, num_warps=2,
    )
    return ht


SPANS = {"fwd": fwd}

_TYPES = {"x": "*bf16", "y": "*bf16", "weight": "*fp32", "D": "i32:16", "sx_n": "i32:16"}
_TILE = _TYPES | {"sx_t": "i32:16", "N": "i32", "T": "i32"}
_FIXED = {"bias": None, "residual": None, "W": 4, "SILU": True, "EVEN": True, "FULL": True}
_ROWS = _FIXED | {"BD": 16 * BYTES, "R": ROWS, "SEG": WARPS}
COMPILE = [
    (conv_tile_kernel, _TILE, _ROWS | {"cu_seqlens": None, "N2": 0}, WARPS, 3),
    (conv_tile_kernel, _TILE | {"cu_seqlens": "*i64"}, _ROWS | {"N2": 64}, WARPS, 3),
    (
        conv_turned_kernel, _TYPES | {"T": "i32:16", "sx_d": "i32:16"},
        _FIXED | {"BD": TURNED[0], "BT": TURNED[1]}, TURNED[2], 3,
    ),
]
