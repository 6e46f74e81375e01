"""All gradients of a chunk in two plain Triton kernels, for what the Hopper kernels leave to fla: K = 64, and fp16.

Parent: 005 (its pass over V; the key side is new).
Delta: 005's pass also forms do v_new^T, and leaves what the states give to dq and dk in fp16 with a power of two for
    each row (11 bits of any range in two bytes), the gradients of Mqk and Mkk as two bf16. The key side closes
    everything from these: pairs of rows inside the chunk, suffix sums of dg, gate, norm, beta. Rows that decay by at
    most 2^128 together are one two-sided product, in groups as large as the data allow; from there on each doubling is
    one product through the row between its halves, every exponent <= 0. Operands are two bf16 too (16 bits of fp32's
    range), so dg follows from the same sums as dq and dk. A q/k head's value heads are summed in its program.
Why it should be faster: fla moves twice the bytes in seven launches, and takes 7.5 exponentials and 31 scalar pairs an
    element where this takes 4 to 16 exponentials and matrix products; nothing is tuned at the first call (IDEA.md).
Constraints: K 64 or 128, V a multiple of 64, bf16 or fp16, sm_80 to sm_90 and sm_120. Any gate <= 0, any T, packed
    sequences, GVA.
"""

import torch
import triton
import triton.language as tl

from kernel_fun._common.launch import launch
from kernel_fun._common.problem import CHUNK
from kernel_fun._common.tails import zero_tail

FAMILY = "kda"
BV = 32  # value columns of a step
VALUE_WARPS, STAGES = 8, 3
REGS = 128  # two programs of 8 warps fit on a multiprocessor, or one of 16
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
RANGE = tl.constexpr(128.0)  # log2 units that rows of one two-sided product may decay by: factors within 2^+-64
ROW = tl.constexpr(8)  # fp32 values a row that pass between the kernels; five are used


# ====================================================================================================== both kernels
@triton.jit
def _chunk(i_c, cu_seqlens, chunk_indices, T, IS_VARLEN: tl.constexpr):
    """First token of the call's chunk i_c (int64) and how many of its 64 rows exist."""
    if IS_VARLEN:
        i_n, i_t = tl.load(chunk_indices + i_c * 2).to(tl.int64), tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
        row = tl.load(cu_seqlens + i_n).to(tl.int64) + i_t * 64
        n_t = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64) - row, 64).to(tl.int32)
    else:
        NT = tl.cdiv(T, 64)
        row, n_t = i_c // NT * T + i_c % NT * 64, tl.minimum(T - (i_c % NT) * 64, 64).to(tl.int32)
    return row, n_t


@triton.jit
def _tile(x, n_t, STRIDE: tl.constexpr, C: tl.constexpr):
    """The [64, C] tile at x of a matrix with rows of STRIDE, zeros in the rows from n_t on."""
    o_t, o_c = tl.arange(0, 64), tl.arange(0, C)
    return tl.load(x + o_t[:, None] * STRIDE + o_c[None, :], mask=(o_t < n_t)[:, None], other=0.0)


@triton.jit
def _put(x, b_x, n_t, STRIDE: tl.constexpr, C: tl.constexpr):
    o_t, o_c = tl.arange(0, 64), tl.arange(0, C)
    at = x + o_t[:, None] * STRIDE + o_c[None, :]
    tl.store(at, b_x.to(x.dtype.element_ty), mask=(o_t < n_t)[:, None])


@triton.jit
def _split(x):
    """fp32 -> two bf16, the first minus the second: 16 of its bits."""
    hi = x.to(tl.bfloat16)
    return hi, (hi.to(tl.float32) - x).to(tl.bfloat16)


# ======================================================================================== value side: one pass over V
@triton.jit
def _unit(b_top):
    """Power of two for each row, and its inverse: a row whose largest entry is b_top is below 2^14 of them."""
    bits = (tl.maximum(b_top, 2.0**-90).to(tl.int32, bitcast=True) & 0x7F800000) - (13 << 23)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _put_scaled(x, rows, b_x, n_t, STRIDE: tl.constexpr, C: tl.constexpr, STRIDE_ROWS: tl.constexpr):
    """b_x [64, C] to x in fp16, a unit a row, which goes to `rows`."""
    o_t = tl.arange(0, 64)
    b_unit, b_inv = _unit(tl.max(tl.abs(b_x), 1))
    _put(x, b_x * b_inv[:, None], n_t, STRIDE, C)
    tl.store(rows + o_t * STRIDE_ROWS, b_unit, mask=o_t < n_t)


@triton.jit
def _put_pair(x, b_x, n_t, STRIDE: tl.constexpr):
    """A strictly lower matrix [64, 64] plus its transpose to x [64, 2, 64], as two bf16."""
    hi, lo = _split(b_x + tl.trans(b_x))
    _put(x, hi, n_t, STRIDE, 64)
    _put(x + 64, lo, n_t, STRIDE, 64)


@triton.jit(do_not_specialize=["T"])
def value_kernel(
    gk,  # [B, T, HV, K] fp32, chunk-local inclusive cumsum, log2
    beta,  # [B, T, HV]
    Akk,  # [B, T, HV, 64]
    do, v_new, dv, v,  # [B, T, HV, V]
    h, dh,  # [B, NT, HV, K, V] (packed: [1, NT, ...])
    xq, xu, xd,  # [B, T, HV, K] fp16: the states' part of dq, of dk inside beta kb, of dk inside kg
    D, E,  # [B, T, HV, 2, 64] two bf16: gradients of Mqk and of Mkk over beta, strictly lower, plus their transposes
    rows,  # [B, T, HV, 8] fp32: units of xq, xu, xd; diagonal of D; <y, v>
    tail,  # [NT, HV, K] fp32: 2^G (sum over V of h dh)
    dv_out,  # [B, T, HV, V]
    cu_seqlens, chunk_indices,  # [N + 1], [NT, 2] or None
    scale, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, IS_VARLEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one value head."""
    DT: tl.constexpr = do.dtype.element_ty
    i_c, i_hv = (tl.program_id(0) // HV).to(tl.int64), (tl.program_id(0) % HV).to(tl.int64)
    row, n_t = _chunk(i_c, cu_seqlens, chunk_indices, T, IS_VARLEN)
    o_t, o_k, o_v = tl.arange(0, 64), tl.arange(0, K), tl.arange(0, BV)
    m_t = o_t < n_t
    head = row * HV + i_hv  # first token of the chunk at this value head
    p_h = (i_c * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]

    b_beta = tl.load(beta + head + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
    b_At = tl.trans(_tile(Akk + head * 64, n_t, HV * 64, 64))  # no rows from n_t on, so y there is zero
    b_xq = tl.zeros([64, K], tl.float32)  # do h^T
    b_xu = tl.zeros([64, K], tl.float32)  # y h^T
    b_xd = tl.zeros([64, K], tl.float32)  # v_new dh^T
    b_D = tl.zeros([64, 64], tl.float32)  # do v_new^T
    b_E = tl.zeros([64, 64], tl.float32)  # -y v_new^T
    b_hh = tl.zeros([K], tl.float32)
    b_yv = tl.zeros([64], tl.float32)
    # y has no scale, so in fp16 it could overflow. There it takes a unit a row, which grows as larger ones come: what
    # was summed is multiplied by the ratio, a power of two.
    b_top = tl.zeros([64], tl.float32)
    b_unit, b_inv = _unit(b_top)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        p_v = head * V + i_v
        b_dv = _tile(dv + p_v, n_t, HV * V, BV)
        b_h = tl.load(h + p_h + i_v)
        b_do = _tile(do + p_v, n_t, HV * V, BV)
        b_vn = _tile(v_new + p_v, n_t, HV * V, BV)
        b_dh = tl.load(dh + p_h + i_v)
        b_y = tl.dot(b_At, b_dv)  # gradient of the triangular system's right-hand side
        b_xq = tl.dot(b_do, tl.trans(b_h), b_xq)
        b_xd = tl.dot(b_vn, tl.trans(b_dh), b_xd)
        b_D = tl.dot(b_do, tl.trans(b_vn), b_D)
        if DT == tl.float16:  # noqa: SIM300
            b_top = tl.maximum(b_top, tl.max(tl.abs(b_y), 1))
            b_old = b_unit
            b_unit, b_inv = _unit(b_top)
            b_ratio = (b_old * b_inv)[:, None]
            b_yd = (b_y * b_inv[:, None]).to(DT)
            b_xu = tl.dot(b_yd, tl.trans(b_h), b_xu * b_ratio)
            b_E *= b_ratio
        else:
            b_yd = b_y.to(DT)
            b_xu = tl.dot(b_yd, tl.trans(b_h), b_xu)
        b_hh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        # Subtracted, not accumulated: the program then waits here for its products. h and dh also go to registers, and
        # such a load gets no spare buffer from Triton's pipeliner: the next copy would land in one still being read.
        b_E -= tl.dot(b_yd, tl.trans(b_vn))
        b_v = _tile(v + p_v, n_t, HV * V, BV)
        b_yv += tl.sum(b_y * b_v.to(tl.float32), 1)
        _put(dv_out + p_v, b_beta[:, None] * b_y, n_t, HV * V, BV)
    if DT == tl.float16:  # noqa: SIM300
        b_xu *= b_unit[:, None]
        b_E *= b_unit[:, None]

    p_rows = rows + head * ROW
    b_diag = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_D, 0.0), 1) * scale
    m_lower = o_t[:, None] > o_t[None, :]
    tl.store(p_rows + 3 + o_t * (HV * ROW), b_diag, mask=m_t)
    tl.store(p_rows + 4 + o_t * (HV * ROW), b_yv, mask=m_t)
    _put_pair(D + head * 128, tl.where(m_lower, b_D * scale, 0.0), n_t, HV * 128)
    _put_pair(E + head * 128, tl.where(m_lower, b_E, 0.0), n_t, HV * 128)
    p_g = gk + head * K + tl.minimum(o_t, n_t - 1)[:, None] * (HV * K) + o_k[None, :]
    b_gn = tl.load(gk + head * K + (n_t - 1) * (HV * K) + o_k)  # of the last row
    b_g = tl.load(p_g)
    b_up = tl.exp2(b_g)
    _put_scaled(xq + head * K, p_rows, b_xq * (b_up * scale), n_t, HV * K, K, HV * ROW)
    _put_scaled(xu + head * K, p_rows + 1, b_xu * (0.0 - b_up), n_t, HV * K, K, HV * ROW)
    _put_scaled(xd + head * K, p_rows + 2, b_xd * tl.exp2(b_gn[None, :] - b_g), n_t, HV * K, K, HV * ROW)
    tl.store(tail + (i_c * HV + i_hv) * K + o_k, tl.exp2(b_gn) * b_hh)


# ================================================================================ key side: pairs of rows, and the rest
@triton.jit
def _scaled(x, unit, n_t, STRIDE: tl.constexpr, C: tl.constexpr, STRIDE_ROWS: tl.constexpr):
    """[64, C] fp16 at x, times each row's unit."""
    o_t = tl.arange(0, 64)
    b_unit = tl.load(unit + o_t * STRIDE_ROWS, mask=o_t < n_t, other=0.0)
    return _tile(x, n_t, STRIDE, C).to(tl.float32) * b_unit[:, None]


@triton.jit
def _product(x, m, b_x, n_t, HV: tl.constexpr):
    """D or E [64, 64], where m holds, times b_x [64, K], from the three larger products of their halves. They are
    summed by differences: Triton would give a product that begins with another one's sum a layout in which two halves
    of the warps do the same."""
    hi = tl.where(m, _tile(x, n_t, HV * 128, 64), 0.0).to(tl.bfloat16)
    lo = tl.where(m, _tile(x + 64, n_t, HV * 128, 64), 0.0).to(tl.bfloat16)
    x_hi, x_lo = _split(b_x)
    return tl.dot(hi, x_hi) - tl.dot(hi, x_lo) - tl.dot(lo, x_hi)


@triton.jit
def _suffix_sums(x):
    """Sums of x [64, K] over rows >= r: three bf16 hold all 24 bits, and products with 1 are exact."""
    o_t = tl.arange(0, 64)
    ones = tl.where(o_t[:, None] <= o_t[None, :], 1.0, 0.0).to(tl.bfloat16)
    hi = x.to(tl.bfloat16)
    mid, lo = _split(hi.to(tl.float32) - x)
    return tl.dot(ones, hi) - tl.dot(ones, mid) - tl.dot(0.0 - ones, lo)


@triton.jit
def _gate_row(p_g, o_r, n_t, STRIDE: tl.constexpr, K: tl.constexpr):
    """gk of the rows o_r; rows beyond the sequence repeat its last one, as they do not decay."""
    return tl.load(p_g + tl.minimum(o_r, n_t - 1)[:, None] * STRIDE + tl.arange(0, K)[None, :])


@triton.jit
def _doublings(p_g, n_t, STRIDE: tl.constexpr, K: tl.constexpr):
    """The largest i such that no column decays by more than RANGE inside any 2^i rows."""
    i_first = 0
    for i in tl.static_range(1, 7):
        o_r = tl.arange(0, 64 >> i) * (1 << i)
        b_fall = _gate_row(p_g, o_r, n_t, STRIDE, K) - _gate_row(p_g, o_r + ((1 << i) - 1), n_t, STRIDE, K)
        i_first = tl.where(tl.max(tl.max(b_fall, 1), 0) <= RANGE, i, i_first)
    return i_first


@triton.jit
def _pairs(b_dq, b_z, b_u, q, k, gk, beta, D, E, n_t, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr):
    """Adds the pairs r > s of the chunk: to dq, to z (what beta multiplies in dk) of row r, to u (the rest) of row s.

    D and E hold each pair twice, so that one product with an operand that has q (or beta k) in later and k in earlier
    rows gives dq, z in the ones and u in the others: one step for each doubling. Before these come two for groups of
    2^i_first rows, from the middle of what they decay: there every row is first the later one of its pairs, then the
    earlier one. Operands are read again in each step: registers are short.
    """
    o_t = tl.arange(0, 64)
    m_t = o_t < n_t
    o_s = o_t[None, :]
    i_first = _doublings(gk, n_t, HV * K, K)
    for i in range(tl.where(i_first > 0, i_first - 2, 0), 6):
        no = ((i + 2) >> 4) * 64  # 0, but the compiler does not know, and does not keep what is read with it
        group, begin = i < i_first, i == i_first - 2
        n = 1 << tl.where(group, i_first, i)  # rows of a group; of a half
        o_half = (o_t & n) != 0
        m_later = tl.where(group, begin, o_half)[:, None]  # rows that the product's result is for
        m_other = tl.where(group, begin == 0, o_half)[:, None]  # the same of rows that it sums over
        # rows of different halves; or rows of the same group, from o_from on, before o_to
        o_first = tl.where(group, o_t & -n, (o_t & -(2 * n)) + tl.where(o_half, 0, n))
        o_from = tl.where(group & (begin == 0), o_t + 1, o_first)[:, None]
        o_to = tl.where(begin, o_t, o_first + n)[:, None]
        m_pair = (o_s >= o_from) & (o_s < o_to)
        o_m = (o_t | (2 * n - 1)) - n  # the last row of the first half
        b_m = _gate_row(gk, tl.where(group, o_t & -n, o_m), n_t, HV * K, K)
        b_m += _gate_row(gk, tl.where(group, o_t | (n - 1), o_m), n_t, HV * K, K)
        b_e = _gate_row(gk + no, o_t, n_t, HV * K, K) - 0.5 * b_m
        b_fx = tl.exp2(tl.where(m_other, b_e, -b_e))
        b_f = tl.exp2(tl.where(m_later, b_e, -b_e))
        b_x = tl.where(m_other, _tile(q + no, n_t, H * K, K), _tile(k + no, n_t, H * K, K)).to(tl.float32) * b_fx
        b_x = b_f * _product(D + no, m_pair, b_x, n_t, HV)
        b_dq += tl.where(m_later, b_x, 0.0)
        b_u += tl.where(m_later, 0.0, b_x)
        b_beta = tl.load(beta + no + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
        b_x = _tile(k + 2 * no, n_t, H * K, K).to(tl.float32) * (b_fx * tl.where(m_other, b_beta[:, None], 1.0))
        b_x = b_f * _product(E + no, m_pair, b_x, n_t, HV)
        b_z += tl.where(m_later, b_x, 0.0)
        b_u += tl.where(m_later, 0.0, b_x)
    return b_dq, b_z, b_u


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _through_gate(
    b_dg, g_raw, A_log, dt_bias, dA, dbias, lower_bound, head, part, i_hv, n_t,
    HV: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """dg at the raw gate, from dg at its logarithm [64, K]; stores the chunk's part of dA_log and ddt_bias."""
    o_t, o_k = tl.arange(0, 64), tl.arange(0, K)
    b_x = _tile(g_raw + head * K, n_t, HV * K, K).to(tl.float32)
    b_dg = tl.where((o_t < n_t)[:, None], b_dg, 0.0)
    if HAS_BIAS:
        b_x += tl.load(dt_bias + i_hv * K + o_k).to(tl.float32)[None, :]
    b_rate = 1.0
    if HAS_A:
        b_rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
    if GATE == "softplus":
        b_dg *= 0.0 - b_rate
        b_t = tl.exp2(tl.minimum(b_x, 80.0) * LOG2_E)
        b_dA = b_dg * tl.where(b_x > 20.0, b_x, _log2(1.0 + b_t, FAST) * LN_2)
        b_dg *= b_t / (1.0 + b_t)
    else:
        b_s = tl.sigmoid(b_rate * b_x)
        b_dg *= lower_bound * b_rate * (b_s * (1.0 - b_s))
        b_dA = b_dg * b_x
    if HAS_A:
        tl.store(dA + part, tl.sum(tl.sum(b_dA, 1), 0))
    if HAS_BIAS:
        tl.store(dbias + part * K + o_k, tl.sum(b_dg, 0))
    return b_dg


@triton.jit
def _put_normed(dx, b_dy, y, rstd, first, n_t, H: tl.constexpr, K: tl.constexpr, L2NORM: tl.constexpr):
    """dx [64, K] from dy at y = x rstd: rstd (dy - y <y, dy>)."""
    o_t = tl.arange(0, 64)
    if L2NORM:
        b_rstd = tl.load(rstd + first + o_t * H, mask=o_t < n_t, other=0.0)
        b_y = _tile(y + first * K, n_t, H * K, K).to(tl.float32)
        b_dy = b_rstd[:, None] * (b_dy - b_y * tl.sum(b_y * b_dy, 1)[:, None])
    _put(dx + first * K, b_dy, n_t, H * K, K)


@triton.jit(do_not_specialize=["T"])
def key_kernel(
    q, k, gk, beta,  # [B, T, H, K] normalised, [B, T, HV, K], [B, T, HV]
    xq, xu, xd, D, E, rows, tail,  # from value_kernel
    g_raw, A_log, dt_bias, q_rstd, k_rstd,  # [B, T, HV, K], [HV], [HV K], [B, T, H] twice
    dq, dk, dg, dbeta,  # as q, k, g_raw, beta
    dA, dbias,  # [NT, HV], [NT, HV, K] fp32, a chunk's part
    cu_seqlens, chunk_indices, lower_bound, beta_scale, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, IS_VARLEN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one q/k head, its value heads one after the other."""
    G: tl.constexpr = HV // H
    i_c, i_h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    row, n_t = _chunk(i_c, cu_seqlens, chunk_indices, T, IS_VARLEN)
    o_t, o_k = tl.arange(0, 64), tl.arange(0, K)
    m_t = o_t < n_t
    first = row * H + i_h
    p_q, p_k = q + first * K, k + first * K
    b_dq, b_dk = tl.zeros([64, K], tl.float32), tl.zeros([64, K], tl.float32)
    for j in range(G):
        i_hv = i_h * G + j
        head, part = row * HV + i_hv, i_c * HV + i_hv
        p_rows, p_beta = rows + head * ROW, beta + head
        b_aq = _scaled(xq + head * K, p_rows, n_t, HV * K, K, HV * ROW)
        b_z = _scaled(xu + head * K, p_rows + 1, n_t, HV * K, K, HV * ROW)
        b_u = _scaled(xd + head * K, p_rows + 2, n_t, HV * K, K, HV * ROW)
        b_tail = tl.load(tail + part * K + o_k) + tl.sum(_tile(p_k, n_t, H * K, K).to(tl.float32) * b_u, 0)
        b_aq, b_z, b_u = _pairs(
            b_aq, b_z, b_u, p_q, p_k, gk + head * K, p_beta, D + head * 128, E + head * 128, n_t, H, HV, K,
        )  # fmt: skip

        p_rows += o_t * (HV * ROW)
        b_beta = tl.load(p_beta + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
        b_q, b_k = _tile(p_q, n_t, H * K, K).to(tl.float32), _tile(p_k, n_t, H * K, K).to(tl.float32)
        b_db = tl.sum(b_k * b_z, 1) + tl.load(p_rows + 4, mask=m_t, other=0.0)
        if SIGMOID:
            b_db *= b_beta * (1.0 - b_beta / beta_scale)
        tl.store(dbeta + head + o_t * HV, b_db.to(dbeta.dtype.element_ty), mask=m_t)
        b_z *= b_beta[:, None]
        # The pair r = s carries no gate: into dq and dk, not into dg.
        b_dg = _suffix_sums(b_q * b_aq + b_k * (b_z - b_u)) + b_tail[None, :]
        b_diag = tl.load(p_rows + 3, mask=m_t, other=0.0)[:, None]
        b_dq += b_aq + b_diag * b_k
        b_dk += b_z + b_u + b_diag * b_q
        if GATE != "log":
            b_dg = _through_gate(
                b_dg, g_raw, A_log, dt_bias, dA, dbias, lower_bound, head, part, i_hv, n_t,
                HV, K, GATE, HAS_A, HAS_BIAS, FAST,
            )  # fmt: skip
        _put(dg + head * K, b_dg, n_t, HV * K, K)
    _put_normed(dq, b_dq, q, q_rstd, first, n_t, H, K, L2NORM)
    _put_normed(dk, b_dk, k, k_rstd, first, n_t, H, K, L2NORM)


# ========================================================================================================== host code
def supports(p):
    for ok, reason in (
        (p.arch[0] not in (10, 11), f"needs another GPU: Triton does not compile it for {p.arch[0]}.{p.arch[1]}"),
        (p.K in (64, 128), f"needs K=64 or 128, got {p.K}"),
        (p.V % 64 == 0, f"needs V a multiple of 64, got {p.V}"),
        (p.dtype in (torch.bfloat16, torch.float16), f"needs bf16 or fp16 q, k, v, got {p.dtype}"),
    ):
        if not ok:
            return False, reason
    return True, ""


def _value_regs(K):
    """With K = 128 sums alone take 128 registers."""
    return REGS if K == 64 else 255


def run(
    *, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, g_raw, A_log, dt_bias, q_rstd, k_rstd, p, cu_seqlens, chunk_indices
):
    """Tensors as in the chain's contract; returns dq, dk [B,T,H,K], dv, dg, dbeta in the inputs' dtypes, dA_log,
    ddt_bias."""
    tokens, f32 = (p.B, p.T, p.HV), torch.float32
    xq, xu, xd = (gk.new_empty(*tokens, p.K, dtype=torch.float16) for _ in range(3))
    D, E = (gk.new_empty(*tokens, 2, CHUNK, dtype=torch.bfloat16) for _ in range(2))
    rows, tail, dv_out = gk.new_empty(*tokens, ROW.value), gk.new_empty(p.NT, p.HV, p.K), torch.empty_like(v)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dg, dbeta = torch.empty_like(gk, dtype=p.g_dtype), torch.empty_like(beta, dtype=p.beta_dtype)
    dA = None if A_log is None else gk.new_empty(p.NT, p.HV, dtype=f32)
    dbias = None if dt_bias is None else gk.new_empty(p.NT, p.HV, p.K, dtype=f32)
    if p.NT:
        launch(
            value_kernel, (p.NT * p.HV,), gk, beta, Akk, do, v_new, dv, v, h, dh, xq, xu, xd, D, E, rows, tail, dv_out,
            cu_seqlens, chunk_indices, p.scale, p.T,
            HV=p.HV, K=p.K, V=p.V, BV=BV, IS_VARLEN=p.varlen, STAGES=STAGES, num_warps=VALUE_WARPS, num_stages=STAGES,
            maxnreg=_value_regs(p.K),
        )  # fmt: skip
        launch(
            key_kernel, (p.NT * p.H,), q, k, gk, beta, xq, xu, xd, D, E, rows, tail, g_raw, A_log, dt_bias, q_rstd,
            k_rstd, dq, dk, dg, dbeta, dA, dbias, cu_seqlens, chunk_indices, p.lower_bound or 0.0, p.beta_scale, p.T,
            H=p.H, HV=p.HV, K=p.K, GATE=p.gate, HAS_A=A_log is not None, HAS_BIAS=dt_bias is not None, L2NORM=p.l2norm,
            SIGMOID=p.beta_sigmoid, IS_VARLEN=p.varlen, FAST=p.arch != (0, 0), num_warps=p.K // 8, num_stages=1,
            maxnreg=REGS,
        )  # fmt: skip
    if p.varlen:  # tokens after the last sequence belong to none: their gradients are zero
        for x in (dq, dk, dv_out, dg, dbeta):
            zero_tail(x, cu_seqlens)
    dA = None if dA is None else dA.sum(0).view_as(A_log)
    dbias = None if dbias is None else dbias.sum(0).view_as(dt_bias)
    return {"dq": dq, "dk": dk, "dv": dv_out, "dg": dg, "dbeta": dbeta, "dA_log": dA, "ddt_bias": dbias}


def run_log_gate(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, q_rstd, k_rstd, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(**locals(), g_raw=None, A_log=None, dt_bias=None)


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}


def _compile(K, V, dtype, G=1, **constants):
    """Entries of COMPILE for one kind of call."""
    given = dict.fromkeys(("q", "k", "v", "Akk", "do", "v_new", "dv", "h", "dh", "dv_out", "dq", "dk"), f"*{dtype}")
    given |= dict.fromkeys(("g_raw", "dg"), f"*{dtype}") | dict.fromkeys(("xq", "xu", "xd"), "*fp16")
    names = ("gk", "beta", "rows", "tail", "A_log", "dt_bias", "q_rstd", "k_rstd", "dbeta", "dA", "dbias")
    given |= dict.fromkeys(names, "*fp32") | dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
    given |= {"D": "*bf16", "E": "*bf16", "cu_seqlens": "*i64", "chunk_indices": "*i64", "T": "i32"}
    value = {"HV": 16 * G, "K": K, "V": V, "BV": BV, "IS_VARLEN": False, "STAGES": STAGES}
    key = {"H": 16, "HV": 16 * G, "K": K, "GATE": "softplus", "HAS_A": True, "HAS_BIAS": True, "L2NORM": True}
    key |= {"SIGMOID": True, "IS_VARLEN": False, "FAST": True} | constants
    for kernel, fixed, *options, regs in (
        (value_kernel, value, VALUE_WARPS, STAGES, _value_regs(K)),
        (key_kernel, key, K // 8, 1, REGS),
    ):
        types = {n: given[n] for n in kernel.arg_names if n not in fixed}
        yield kernel, types, fixed, *options, {"maxnreg": regs}


COMPILE = [
    *_compile(64, 64, "bf16"),
    *_compile(64, 128, "fp16", G=2),
    *_compile(128, 128, "fp16", GATE="safe"),
    *_compile(128, 256, "fp16"),
]
