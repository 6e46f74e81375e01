"""Intra-chunk backward on tensor cores at any gate, with the group sum and the reverse cumsum of dg folded in.

Parent: 000 (fla: 16-row programs, scalar loops over the diagonal blocks, one exponential per pair and dimension).
Delta: dyadic levels. At half-size n = 1, 2, .. 32 the second half of each 2n-row block are targets, the first half
    sources, factored through the row between them: both exponents are <= 0 at any gate, every pair is a product, and
    each row takes one exponential a level (6, not 7.5 per pair and a lane reduction). With U = (targets q f, sources
    k f), W = k f, and the matrices D = dAqk, E = beta dAkk mirrored and masked to the level, U D and W E hold the row
    side at targets and the column side at sources: two products a level serve both. One program owns half a chunk
    (32 rows) of one head and BK dimensions; U and W go from accumulator layout to wgmma's A operand in registers.
Why it should be faster: bytes. 4.1 KB a token and head are moved once (fla reads most tensors four times); tensor work
    6.3 MFLOP a chunk and head; about 260 instructions a (row, dimension) pair issue in less time than fla's 7.5
    exponentials and 31 scalar pairs do.
Constraints: K 64 or 128; q, k bf16 or fp16 (fp16: tf32 products, because bf16 operands would cost fp16 its precision
    and gradients have no scale that fp16 operands could rely on).
    dg is formed from the very operands the products saw, without the pair r = s, so that its sum over rows cancels;
    db is the row side of dk times k over beta: its error is a product's. |beta| below 2^-40 counts as 2^-40, which is
    invisible and lets beta ride inside E.
"""
import os

import torch
import triton
import triton.language as tl

FAMILY = "kda"

HALF = tl.constexpr(32)               # rows of a program: half a chunk
BETA_FLOOR = tl.constexpr(2.0**-40)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
COMPILED = tl.constexpr(not INTERPRETED)

BK, WARPS = 64, 4                     # dimensions of a program; no cap on registers: 168 spill and lose 28 %


# ----------------------------------------------------------------------------------------------------- device functions
@triton.jit
def _operand(x, OP: tl.constexpr):
    """x rounded to the operand type, and the rounded value again in fp32 (what the product will have seen)."""
    if OP == tl.float32:  # noqa: SIM300
        # tf32: 10 mantissa bits. The hardware would drop the low bits; dropping them here shows the fp32 side the same.
        seen = ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)
        return seen, seen
    else:
        if COMPILED:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 lo, hi;
                cvt.rn.bf16x2.f32 $0, $4, $3;
                shl.b32 lo, $0, 16;
                and.b32 hi, $0, 0xffff0000;
                mov.b32 $1, lo;
                mov.b32 $2, hi;
                }""",
                "=r,=f,=f,f,f", [x], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2,
            )
        else:
            b_x = x.to(tl.bfloat16)
            return b_x, b_x.to(tl.float32)


@triton.jit
def _fresh(x):
    """x through a veil: what is derived from it again is computed again instead of staying in registers."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def _widen(x):
    """bf16 or fp16 -> fp32, each time anew: kept in fp32, q and k would cost twice the registers."""
    if COMPILED and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 lo, hi;
            shl.b32 lo, $2, 16;
            and.b32 hi, $2, 0xffff0000;
            mov.b32 $0, lo;
            mov.b32 $1, hi;
            }""",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=False, pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def _suffix_sums(x):
    """Sums of x [BK, 32] over columns >= r: three bf16 terms hold all 24 bits, and products with 1 are exact."""
    o_r = tl.arange(0, HALF)
    b_L = tl.where(o_r[:, None] >= o_r[None, :], 1.0, 0.0).to(tl.bfloat16)
    b_hi, b_s = _operand(x, tl.bfloat16)
    x -= b_s
    b_mid, b_s = _operand(x, tl.bfloat16)
    b_lo, b_s = _operand(x - b_s, tl.bfloat16)
    return tl.dot(b_hi, b_L, tl.dot(b_mid, b_L, tl.dot(b_lo, b_L)))


@triton.jit
def _spread(x, BK: tl.constexpr, N: tl.constexpr):
    """[BK, N] -> [BK, 32]: each column repeated over its block of rows."""
    if N < HALF:
        return _spread(tl.reshape(tl.broadcast_to(x[:, :, None], [BK, N, 2]), [BK, 2 * N]), BK, 2 * N)
    else:
        return x


@triton.jit
def _accumulate(a_q, a_p, a_n, a_g, u, w, f, b_D, b_E, b_us, b_ws, up):
    """One level, tiles [BK, 32]. a_q, a_p: row sides of dq, dk at targets; a_n: dk's column side; a_g: dg."""
    b_x = tl.dot(u, b_D)
    a_g = tl.where(up, a_g + b_x * b_us, a_g - b_x * b_us)
    b_x *= f
    a_q = tl.where(up, a_q + b_x, a_q)
    a_n = tl.where(up, a_n, a_n + b_x)
    b_y = tl.dot(w, b_E)
    a_g = tl.where(up, a_g + b_y * b_ws, a_g - b_y * b_ws)
    b_y *= f
    a_p = tl.where(up, a_p + b_y, a_p)
    a_n = tl.where(up, a_n, a_n + b_y)
    return a_q, a_p, a_n, a_g


@triton.jit
def _level(a_q, a_p, a_n, a_g, b_q, b_k, b_g, b_m, b_D, b_E, N: tl.constexpr, BK: tl.constexpr, OP: tl.constexpr):
    """Pairs in different halves of a 2N-row block. b_m [BK, 32 // 2N]: gk at the last row of each first half."""
    o_r = tl.arange(0, HALF)
    up = ((o_r & N) != 0)[None, :]
    b_m = _spread(b_m, BK, HALF // (2 * N))
    f = tl.exp2(tl.where(up, b_g - b_m, b_m - b_g))
    o_pair = o_r[:, None] ^ o_r[None, :]
    m_pair = (o_pair >= N) & (o_pair < 2 * N)
    b_kf = _widen(b_k) * f
    u, b_us = _operand(tl.where(up, _widen(b_q) * f, b_kf), OP)
    w, b_ws = _operand(b_kf, OP)
    b_D, b_E = tl.where(m_pair, b_D, 0.0), tl.where(m_pair, b_E, 0.0)
    return _accumulate(a_q, a_p, a_n, a_g, u, w, f, b_D, b_E, b_us, b_ws, up)


@triton.jit
def _pair_ends(x, BK: tl.constexpr, N: tl.constexpr):
    """[BK, N] block ends -> [BK, N // 2], those of first and of second blocks. gk only falls: max and min find them."""
    x = tl.reshape(x, [BK, N // 2, 2])
    return tl.max(x, 2), tl.min(x, 2)


@triton.jit
def _mirror(x, m_lower):
    return tl.where(m_lower, x, tl.trans(x))


@triton.jit
def _beta(p, m):
    b = tl.load(p, mask=m, other=0.0).to(tl.float32)
    return tl.where(tl.abs(b) < BETA_FLOOR, BETA_FLOOR, b)


@triton.jit
def _at(p, row, i_h, i_k, HEADS: tl.constexpr, WIDTH: tl.constexpr, BK):
    """Pointer to head i_h, slab i_k of token `row` of a [tokens, HEADS, WIDTH] tensor."""
    return p + (row.to(tl.int64) * HEADS + i_h) * WIDTH + i_k * BK


@triton.jit(do_not_specialize=["T", "db_slab"])
def bwd_intra_kernel(
    q, k,                       # [B, T, H, K]
    gk,                         # [B, T, HV, K] fp32, chunk-local inclusive cumsum, log2
    beta,                       # [B, T, HV]
    dAqk, dAkk,                 # [B, T, HV, 64] fp32
    dq, dk, dg,                 # [B, T, HV, K] fp32, what earlier stages found
    dq_out, dk_out, dg_out,     # [B, T, HV, K]
    db_out,                     # [K // BK, B, T, HV] fp32, this stage's part
    cu_seqlens, chunk_indices,  # [N + 1], [NT, 2] or None
    T, db_slab,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, OP: tl.constexpr, VARLEN: tl.constexpr,
):
    NK: tl.constexpr = K // BK
    pid = tl.program_id(0)
    i_k = pid % NK
    i_half = (pid // NK) % 2
    i_hv = (pid // (2 * NK)) % HV
    i_c = pid // (2 * NK * HV)
    if VARLEN:
        i_n = tl.load(chunk_indices + i_c * 2).to(tl.int32)
        i_t = tl.load(chunk_indices + i_c * 2 + 1).to(tl.int32)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        n_rows = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32) - i_t * 64
    else:
        n_chunks = tl.cdiv(T, 64)
        i_t = i_c % n_chunks
        bos = (i_c // n_chunks).to(tl.int64) * T
        n_rows = T - i_t * 64
    if i_half * HALF >= n_rows:
        return
    row = (bos + i_t * 64).to(tl.int32)
    p_q, p_k = _at(q, row, i_hv // (HV // H), i_k, H, K, BK), _at(k, row, i_hv // (HV // H), i_k, H, K, BK)
    p_g = _at(gk, row, i_hv, i_k, HV, K, BK)
    p_beta = _at(beta, row, i_hv, 0, HV, 1, 0)
    p_Aqk, p_Akk = _at(dAqk, row, i_hv, 0, HV, 64, 0), _at(dAkk, row, i_hv, 0, HV, 64, 0)

    # Tiles are [dimension, row]: the row index is then the wgmma N, and U, W are A operands straight from registers.
    o_d = tl.arange(0, BK)[:, None]
    o_h = tl.arange(0, HALF)
    o_r = i_half * HALF + o_h
    m_r = o_r < n_rows
    m_t = m_r[None, :]
    o_v = o_r[None, :] * (HV * K) + o_d
    o_q = o_r[None, :] * (H * K) + o_d
    # Rows beyond the end repeat the last row's gk: their factors stay <= 1, and all else they hold is 0.
    b_g = tl.load(p_g + tl.minimum(o_r, n_rows - 1)[None, :] * (HV * K) + o_d)
    b_q = tl.load(p_q + o_q, mask=m_t, other=0.0)
    b_k = tl.load(p_k + o_q, mask=m_t, other=0.0)
    # Adding a product of zeros changes nothing but the layout: everything derived from these now lives where the
    # accumulators do, and no level pays for a conversion through shared memory.
    z_a, z_b = tl.zeros([BK, 16], tl.bfloat16), tl.zeros([16, HALF], tl.bfloat16)
    b_g = tl.dot(z_a, z_b, b_g)
    b_q = tl.dot(z_a, z_b, b_q.to(tl.float32)).to(q.dtype.element_ty)
    b_k = tl.dot(z_a, z_b, b_k.to(tl.float32)).to(k.dtype.element_ty)
    b_b = _beta(p_beta + o_r * HV, m_r)

    # Half-size 32: this half against the other, through the chunk's row 31. The other half is loaded for this alone.
    o_x = (1 - i_half) * HALF + o_h
    m_x = o_x < n_rows
    b_m = tl.load(p_g + tl.minimum(HALF - 1, n_rows - 1) * (HV * K) + o_d)
    b_gx = tl.load(p_g + tl.minimum(o_x, n_rows - 1)[None, :] * (HV * K) + o_d)
    b_kx = tl.load(p_k + o_x[None, :] * (H * K) + o_d, mask=m_x[None, :], other=0.0).to(tl.float32)
    if i_half == 1:
        f = tl.exp2(b_g - b_m)
        fx = tl.exp2(b_m - b_gx)
        o_A = o_r[None, :] * (HV * 64) + o_h[:, None]          # [source, target]
        b_D = tl.load(p_Aqk + o_A, mask=m_t, other=0.0).to(OP)
        b_E = (tl.load(p_Akk + o_A, mask=m_t, other=0.0) * b_b[None, :]).to(OP)
        wx, _ = _operand(b_kx * fx, OP)
        _, b_us = _operand(_widen(b_q) * f, OP)
        _, b_ws = _operand(_widen(b_k) * f, OP)
        a_q = tl.dot(wx, b_D)
        a_g = a_q * b_us
        a_q *= f
        a_p = tl.dot(wx, b_E)
        a_g += a_p * b_ws
        a_p *= f
        a_n = tl.zeros([BK, HALF], tl.float32)
        b_later = tl.zeros([BK], tl.float32)
    else:
        f = tl.exp2(b_m - b_g)
        fx = tl.exp2(b_gx - b_m)
        b_bx = _beta(p_beta + o_x * HV, m_x)
        o_A = o_x[:, None] * (HV * 64) + o_h[None, :]          # [target, source]
        b_D = tl.load(p_Aqk + o_A, mask=m_x[:, None], other=0.0).to(OP)
        b_E = (tl.load(p_Akk + o_A, mask=m_x[:, None], other=0.0) * b_bx[:, None]).to(OP)
        b_qx = tl.load(p_q + o_x[None, :] * (H * K) + o_d, mask=m_x[None, :], other=0.0).to(tl.float32)
        ux, _ = _operand(b_qx * fx, OP)
        wx, _ = _operand(b_kx * fx, OP)
        _, b_ws = _operand(_widen(b_k) * f, OP)
        a_n = tl.dot(wx, b_E, tl.dot(ux, b_D))
        a_g = -a_n * b_ws
        # The later half's dg sums to what it brings in plus this level's row side, which is minus its column side.
        p_x = _at(dg, row, i_hv, i_k, HV, K, BK) + o_x[None, :] * (HV * K) + o_d
        b_gx = tl.load(p_x, mask=m_x[None, :], other=0.0)
        b_later = tl.sum(b_gx, 1) - tl.sum(a_g, 1)
        a_n *= f
        a_q = tl.zeros([BK, HALF], tl.float32)
        a_p = tl.zeros([BK, HALF], tl.float32)

    # Half-sizes 1 .. 16, inside this half.
    m_lower = o_h[:, None] > o_h[None, :]
    m_A = m_r[:, None] & m_lower
    o_A = o_r[:, None] * (HV * 64) + o_r[None, :]
    b_D = _mirror(tl.load(p_Aqk + o_A, mask=m_A, other=0.0).to(OP), m_lower)
    b_E = _mirror((tl.load(p_Akk + o_A, mask=m_A, other=0.0) * b_b[:, None]).to(OP), m_lower)
    b_m, b_e = _pair_ends(b_g, BK, 32)
    a_q, a_p, a_n, a_g = _level(a_q, a_p, a_n, a_g, b_q, b_k, b_g, b_m, b_D, b_E, 1, BK, OP)
    b_m, b_e = _pair_ends(b_e, BK, 16)
    a_q, a_p, a_n, a_g = _level(a_q, a_p, a_n, a_g, b_q, b_k, b_g, b_m, b_D, b_E, 2, BK, OP)
    b_m, b_e = _pair_ends(b_e, BK, 8)
    a_q, a_p, a_n, a_g = _level(a_q, a_p, a_n, a_g, b_q, b_k, b_g, b_m, b_D, b_E, 4, BK, OP)
    b_m, b_e = _pair_ends(b_e, BK, 4)
    a_q, a_p, a_n, a_g = _level(a_q, a_p, a_n, a_g, b_q, b_k, b_g, b_m, b_D, b_E, 8, BK, OP)
    b_m, b_e = _pair_ends(b_e, BK, 2)
    a_q, a_p, a_n, a_g = _level(a_q, a_p, a_n, a_g, b_q, b_k, b_g, b_m, b_D, b_E, 16, BK, OP)

    # The pair r = s carries no gate: into dq and dk, not into dg.
    i_k, i_hv, row, n_rows = _fresh(i_k), _fresh(i_hv), _fresh(row), _fresh(n_rows)
    o_r = _fresh(i_half) * HALF + o_h
    m_r = o_r < n_rows
    m_t = m_r[None, :]
    o_v = _at(o_r[None, :] * (HV * K) + o_d, row, i_hv, i_k, HV, K, BK)
    p_b = _at(db_out, row, i_hv, i_k, HV, 1, db_slab) + o_r * HV
    b_a = tl.load(_at(dAqk, row, i_hv, 0, HV, 64, 0) + o_r * (HV * 64 + 1), mask=m_r, other=0.0)[None, :]
    b_b = _beta(_at(beta, row, i_hv, 0, HV, 1, 0) + o_r * HV, m_r)
    b_q, b_k = _widen(b_q), _widen(b_k)
    tl.store(p_b, tl.sum(a_p * b_k, 0) / b_b, mask=m_r)
    a_q += b_a * b_k + tl.load(dq + o_v, mask=m_t, other=0.0)
    tl.store(dq_out + o_v, a_q.to(dq_out.dtype.element_ty), mask=m_t)
    a_n += a_p + b_a * b_q + tl.load(dk + o_v, mask=m_t, other=0.0)
    tl.store(dk_out + o_v, a_n.to(dk_out.dtype.element_ty), mask=m_t)
    a_g += tl.load(dg + o_v, mask=m_t, other=0.0)
    tl.store(dg_out + o_v, _suffix_sums(a_g) + b_later[:, None], mask=m_t)

    if VARLEN:  # noqa: SIM102  (one is compile time, the other is not)
        # Tokens after the last sequence belong to none: the last chunk's program clears them.
        if (i_half == 0) & (i_c == tl.num_programs(0) // (2 * NK * HV) - 1):
            b_z = tl.zeros([BK, HALF], tl.float32)
            for i_r in range(n_rows, T - row, HALF):
                o_z = i_r + o_h
                m_z = row + o_z < T
                o_v = _at(o_z[None, :] * (HV * K) + o_d, row, i_hv, i_k, HV, K, BK)
                tl.store(dq_out + o_v, b_z.to(dq_out.dtype.element_ty), mask=m_z[None, :])
                tl.store(dk_out + o_v, b_z.to(dk_out.dtype.element_ty), mask=m_z[None, :])
                tl.store(dg_out + o_v, b_z, mask=m_z[None, :])
                p_b = _at(db_out, row, i_hv, i_k, HV, 1, db_slab) + o_z * HV
                tl.store(p_b, tl.zeros([HALF], tl.float32), mask=m_z)


# ------------------------------------------------------------------------------------------------------------ the span
def supports(p):
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q and k, got {p.dtype}"
    return True, ""


def run(*, q, k, gk, beta, dAqk, dAkk, dq, dk, db, dg, p, cu_seqlens, chunk_indices):
    """Tensors as in the chain's contract. Returns dq, dk [B,T,H,K] (p.dtype, fp32 where HV > H), db and dg in fp32."""
    grouped = p.HV != p.H
    dq_out, dk_out = (torch.empty_like(x, dtype=x.dtype if grouped else p.dtype) for x in (dq, dk))
    dg_out = torch.empty_like(dg)
    db_out = db.new_empty(p.K // BK, p.B, p.T, p.HV)
    if p.NT:
        bwd_intra_kernel[(p.NT * p.HV * 2 * (p.K // BK),)](
            q, k, gk, beta, dAqk, dAkk, dq, dk, dg, dq_out, dk_out, dg_out, db_out, cu_seqlens, chunk_indices,
            p.T, p.B * p.T * p.HV,
            H=p.H, HV=p.HV, K=p.K, BK=BK, OP=tl.bfloat16 if p.dtype == torch.bfloat16 else tl.float32, VARLEN=p.varlen,
            num_warps=WARPS, num_stages=1,
        )
    if grouped:
        group = (p.B, p.T, p.H, p.HV // p.H, p.K)
        dq_out, dk_out = dq_out.view(group).sum(3), dk_out.view(group).sum(3)
    return {"dq": dq_out, "dk": dk_out, "db": db_out.sum(0).add_(db), "dg": dg_out}


SPANS = {"bwd.intra..bwd.cumsum": run}

_POINTERS = {
    "q": "*bf16", "k": "*bf16", "gk": "*fp32", "beta": "*fp32", "dAqk": "*fp32", "dAkk": "*fp32", "dq": "*fp32",
    "dk": "*fp32", "dg": "*fp32", "dq_out": "*bf16", "dk_out": "*bf16", "dg_out": "*fp32", "db_out": "*fp32",
    "cu_seqlens": "*i64", "chunk_indices": "*i64", "T": "i32", "db_slab": "i64",
}
COMPILE = [
    (bwd_intra_kernel, _POINTERS, {"H": 16, "HV": 16, "K": K, "BK": BK, "OP": tl.bfloat16, "VARLEN": False}, WARPS, 1)
    for K in (64, 128)
]
