"""The convolution's backward of x that lies along time, [B,D,T]: read as it lies, and turned only in shared memory.

Parent: 001 (strips down time over channels, whose loads of such an x are 2 bytes a lane).
Delta: a CTA takes tiles [BD channels, BT rows]. A thread has a group of 8 consecutive rows of a channel, 16 bytes of x,
    and reads the rows that it needs of the groups before and after again, from L1. dy comes by rows of channels and is
    turned in shared memory to lie as x; the first W - 1 rows of the next group come the same way. dx is turned back and
    stored by rows of channels. Sums for dw and db are one partial a CTA, added up by 001's second kernel.
Why it should be faster: bytes. x, dy and dx are moved once, in lines of 128 bytes; 001 asks for 32 sectors of x a row
    and warp. 3/8 of the pre-activations are computed twice.
Constraints: as 001. States, packed rows, an x that lies otherwise, and a grid beyond CUDA's are 001's kernel. dy in any
    strides, fast where channels are unit-stride; x is read 16 bytes a thread where T is a multiple of 16.
"""
import torch
import triton
import triton.language as tl

from kernel_fun._common.launch import launch
from kernel_fun.cconv.stages.k001_conv_strip import INTERPRETED, _bias, _channels, _grad, conv_sum_kernel
from kernel_fun.cconv.stages.k001_conv_strip import bwd as strip_bwd
from kernel_fun.cconv.stages.k001_conv_strip import supports as strip_supports

FAMILY = "cconv"

TILE = (64, 64, 8)  # channels and rows of a tile, warps
GROUP = 8           # rows of a thread: 8 or 16
TILES = 4           # tiles of a CTA, one after another down time: one partial sum for all of them
REGS = None         # registers a thread at most
GRID = 65535        # CTAs along the grid's second and third axes

EXACT = tl.constexpr(INTERPRETED)


# ----------------------------------------------------------------------------------------------------- device functions
@triton.jit
def _wide(b):
    """fp32 of bf16, fp16 or fp32. The compiler takes two instructions for a register's upper bf16; one will do."""
    if EXACT or b.dtype != tl.bfloat16:
        return b.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
            "=f,=f,r", [b], dtype=tl.float32, is_pure=True, pack=2,
        )


# A tensor [BD, BG n] as n tensors [BD, BG]: number i holds column n g + i of every group g. A thread has whole groups,
# so that nothing is copied.
@triton.jit
def _quarters(b, BD: tl.constexpr, BG: tl.constexpr):
    even, odd = tl.split(tl.reshape(b, (BD, BG, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _eighths(b, BD: tl.constexpr, BG: tl.constexpr):
    even, odd = tl.split(tl.reshape(b, (BD, BG * 4, 2)))
    e = _quarters(even, BD, BG)
    o = _quarters(odd, BD, BG)
    return e[0], o[0], e[1], o[1], e[2], o[2], e[3], o[3]


@triton.jit
def _parts(b, BD: tl.constexpr, BG: tl.constexpr, G: tl.constexpr):
    if G == 8:
        c = _eighths(b, BD, BG)
    else:
        even, odd = tl.split(tl.reshape(b, (BD, BG * 8, 2)))
        e = _eighths(even, BD, BG)
        o = _eighths(odd, BD, BG)
        c = ()
        for i in tl.static_range(8):
            c += (e[i], o[i])
    return c


@triton.jit
def _whole(c, BD: tl.constexpr, BG: tl.constexpr, G: tl.constexpr):
    """The inverse of `_parts`."""
    n: tl.constexpr = G // 4
    a = ()
    for i in tl.static_range(n):   # columns i, i + n, i + 2 n, i + 3 n
        a += (tl.reshape(tl.join(tl.join(c[i], c[i + 2 * n]), tl.join(c[i + n], c[i + 3 * n])), (BD, BG * 4)),)
    if G == 16:
        a = (tl.reshape(tl.join(a[0], a[2]), (BD, BG * 8)), tl.reshape(tl.join(a[1], a[3]), (BD, BG * 8)))
    return tl.reshape(tl.join(a[0], a[1]), (BD, BG * G))


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
def _grads(xs, dys, ws, b_b, W: tl.constexpr, G: tl.constexpr, SILU: tl.constexpr):
    """Gradients of the pre-activations of every group's G rows and of the W - 1 rows after them."""
    gs = ()
    for i in tl.static_range(G + W - 1):
        gs += (_grad(_wide(dys[i]), _sum(xs, ws, i, b_b, W), SILU),)
    return gs


@triton.jit
def _dx(gs, ws, W: tl.constexpr, G: tl.constexpr, dtype: tl.constexpr):
    """dx of every group's rows: the gradient k rows later meets the weight of lag k."""
    out = ()
    for i in tl.static_range(G):
        d = gs[i] * ws[W - 1]
        for k in tl.static_range(1, W):
            d += gs[i + k] * ws[W - 1 - k]
        out += (d.to(dtype),)
    return out


@triton.jit
def _add(sums, gs, xs, W: tl.constexpr, G: tl.constexpr):
    """Add the groups' rows to the sums [BD, BG]: of the weights, then of the bias."""
    out = ()
    for w in tl.static_range(W):
        s = sums[w]
        for i in tl.static_range(G):
            s += gs[i] * _wide(xs[4 + i - (W - 1 - w)])
        out += (s,)
    s = sums[W]
    for i in tl.static_range(G):
        s += gs[i]
    return out + (s,)  # noqa: RUF005  (Triton has no starred tuples)


@triton.jit
def conv_turned_bwd_kernel(
    x,             # [B, T, D] by strides, rows one after another
    dy,            # [B, T, D] by strides
    dx,            # [B, T, D] contiguous
    partial,       # [CTAs of time and batch, W (+ 1 with a bias), D] fp32: sums by weight column, then the bias
    weight,        # [D, W]
    bias,          # [D] or None
    T, D, sx_n, sx_d, sy_n, sy_t, sy_d,
    W: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr, SILU: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, DY_UNIT: tl.constexpr,
):
    """One CTA: TILES times BT rows of one batch row, BD channels; FULL: all rows of it exist, EVEN: all channels."""
    BG: tl.constexpr = BT // G
    i_b = tl.program_id(2).to(tl.int64)
    i_d = tl.program_id(0) * BD
    o_d = i_d + tl.arange(0, BD)
    m_d = o_d < D
    x += i_b * sx_n
    dy += i_b * sy_n
    dx += i_b * T * D + i_d
    ws = ()
    for w in tl.static_range(W):
        ws += (tl.load(weight + o_d * W + w, mask=m_d, other=0).to(tl.float32)[:, None],)
    b_b = None
    if bias is not None:
        b_b = _bias(bias, o_d, m_d)[:, None]
    sums = ()
    for _w in tl.static_range(W + 1):
        sums += (tl.zeros([BD, BG], tl.float32),)
    o_r = tl.arange(0, BT)
    o_q = tl.arange(0, BG * 4)
    o_q = o_q // 4 * G + o_q % 4   # every group's first four rows
    for i in tl.range(0, TILES, num_stages=1):
        i_t = (tl.program_id(1) * TILES + i) * BT
        o_t = i_t + o_r
        p_x = x + (o_d.to(tl.int64) * sx_d)[:, None] + i_t
        p_dy = dy + i_t.to(tl.int64) * sy_t + _channels(o_d, sy_d, DY_UNIT)[None, :]
        m_q = (i_t + o_q + G < T)   # the rows after a group, G at least from the first row of the tile on
        if FULL and EVEN:
            now = tl.load(p_x + o_r[None, :])
            b_dy = tl.load(p_dy + (o_r * sy_t)[:, None])
        else:
            now = tl.load(p_x + o_r[None, :], mask=m_d[:, None] & (o_t < T)[None, :], other=0)
            b_dy = tl.load(p_dy + (o_r * sy_t)[:, None], mask=(o_t < T)[:, None] & m_d[None, :], other=0)
        before = (i_t + o_q >= 4) & (i_t + o_q < T + 4)
        past = tl.load(p_x + (o_q - 4)[None, :], mask=m_d[:, None] & before[None, :], other=0)
        later = tl.load(p_x + (o_q + G)[None, :], mask=m_d[:, None] & m_q[None, :], other=0)
        b_dq = tl.load(p_dy + ((o_q + G) * sy_t)[:, None], mask=m_q[:, None] & m_d[None, :], other=0)
        dys = _parts(tl.trans(b_dy), BD, BG, G) + _quarters(tl.trans(b_dq), BD, BG)
        xs = _quarters(past, BD, BG) + _parts(now, BD, BG, G) + _quarters(later, BD, BG)
        gs = _grads(xs, dys, ws, b_b, W, G, SILU)
        sums = _add(sums, gs, xs, W, G)
        b_dx = tl.trans(_whole(_dx(gs, ws, W, G, dx.dtype.element_ty), BD, BG, G))
        p_dx = dx + i_t.to(tl.int64) * D + (o_r * D)[:, None] + tl.arange(0, BD)[None, :]
        if FULL and EVEN:
            tl.store(p_dx, b_dx)
        else:
            tl.store(p_dx, b_dx, mask=(o_t < T)[:, None] & m_d[None, :])
    ROWS: tl.constexpr = W if bias is None else W + 1
    p = partial + (i_b * tl.num_programs(1) + tl.program_id(1)) * ROWS * D + o_d
    for w in tl.static_range(ROWS):
        tl.store(p + w * D, tl.sum(sums[w], 1), mask=m_d)


# ----------------------------------------------------------------------------------------------------------------- host
def supports(p) -> tuple[bool, str]:
    return strip_supports(p)


def turned(x) -> bool:
    """Does time come first in memory?"""
    return x.stride(1) == 1 and x.stride(2) != 1


def _fits(x, dy, rows: int) -> bool:
    """Do the grid and the offsets within a tile of `rows` rows hold x [B, T, D] and dy?"""
    B, T, D = x.shape
    return B <= GRID and triton.cdiv(T, rows) <= GRID and (rows + 20) * max(dy.stride(1), D) < 2**31


def bwd(*, x, weight, bias, h0, dy, dht, p, cu_seqlens):
    """-> dx [B,T,D] contiguous in x's dtype; dw, db, dh0 in their inputs' dtypes or None; dresidual is dy itself."""
    stateless = h0 is None and dht is None and cu_seqlens is None
    if not (x.numel() and stateless and turned(x) and _fits(x, dy, TILE[1])):
        return strip_bwd(x=x, weight=weight, bias=bias, h0=h0, dy=dy, dht=dht, p=p, cu_seqlens=cu_seqlens)
    B, T, D = x.shape
    W = weight.shape[1]
    BD, BT, warps = TILE
    CT = triton.cdiv(T, BT * TILES)
    rows = W if bias is None else W + 1
    dx = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    dw, db = torch.empty_like(weight, memory_format=torch.contiguous_format), None
    if bias is not None:
        db = torch.empty_like(bias, memory_format=torch.contiguous_format)
    partial = torch.empty((B * CT, rows, D), dtype=torch.float32, device=x.device)
    launch(
        conv_turned_bwd_kernel, (triton.cdiv(D, BD), CT, B), x, dy, dx, partial, weight.contiguous(), bias,
        T, D, x.stride(0), x.stride(2), *dy.stride(),
        W=W, BD=BD, BT=BT, G=GROUP, TILES=TILES, SILU=p.activation == "silu", EVEN=D % BD == 0,
        FULL=T % (BT * TILES) == 0, DY_UNIT=dy.stride(2) == 1, num_warps=warps, maxnreg=REGS,
    )
    BC = min(32, triton.next_power_of_2(D))
    launch(
        conv_sum_kernel, (triton.cdiv(D, BC), rows), partial, dw, db, B * CT, D, W=W, ROWS=rows, BS=64, BC=BC,
        num_warps=4,
    )
    return {"dx": dx, "dw": dw, "db": db, "dresidual": dy if p.has_residual else None, "dh0": None}


SPANS = {"bwd": bwd}

_STRIDES = dict.fromkeys(("T", "D", "sx_n", "sx_d", "sy_n", "sy_t"), "i32:16")
COMPILE = [
    (
        conv_turned_bwd_kernel,
        _STRIDES | {"x": "*bf16", "dy": "*bf16", "dx": "*bf16", "partial": "*fp32", "weight": "*fp32"},
        {"bias": None, "sy_d": 1, "W": 4, "BD": TILE[0], "BT": TILE[1], "G": GROUP, "TILES": TILES, "SILU": True,
         "EVEN": True, "FULL": True, "DY_UNIT": True},
        TILE[2], 3, {"maxnreg": REGS},
    ),
]
