"""Gradients that reach a chunk through the boundary states and the triangular solve, each large tensor read once.

Parent: 000 (replaces fla's wy_dqkg backward).
Delta: one program per (chunk, value head) forms all K columns in one pass over V: do h^T, y h^T and v_new dh^T; the
    solve is differentiated as y = Akk^T dv, dMkk = -y v_new^T, d(k 2^gk) = -beta y h^T: no w, no u, no 64^3 product.
Why it should be faster: fla's slabs of the key dimension each read do, v_new and dv again. Read once and written once,
    the tensors are 7.5 KB a token-head at K128 V256 (15.7 GB at B16 T8192 H16, 3.7 ms at 4.2 TB/s), 5 KB at V128.
    Products: 17 MFLOP a chunk (0.55 TFLOP, under 1 ms), so memory decides.
Constraints: K 64 or 128, V a multiple of 64, bf16 or fp16. Any gate (every exponent is <= 0), any T, packed, GVA.
"""
import torch
import triton
import triton.language as tl

from kernel_fun._common.problem import CHUNK

FAMILY = "kda"
BV = 64                   # value columns of a step
NUM_WARPS, STAGES = 8, 3
# y has no scale, so fp16 could overflow: fp16 problems multiply it in tf32 (the same mantissa), bf16 problems in bf16.
Y_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float32}


# ------------------------------------------------------------------------------------------------------ device code
@triton.jit
def _tile(x, row, col, m_rows, STRIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """[R, C] tile at (row, col) of a row-major matrix, zeros in the rows outside m_rows (None: every row is inside)."""
    p_x = x + row * STRIDE + tl.arange(0, R)[:, None] * STRIDE + (col + tl.arange(0, C))[None, :]
    if m_rows is None:
        b_x = tl.load(p_x)
    else:
        b_x = tl.load(p_x, mask=m_rows[:, None], other=0.0)
    return b_x


@triton.jit
def _value_pass(
    do, v_new, dv, v, h, dh, p_dv_out, b_At, b_beta, m_t, row, i_hv, row_h,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, Y: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over V: do h^T, y h^T, v_new dh^T [BT, K], sum_V h dh [K], -y v_new^T [BT, BT] and <y, v> [BT], where
    y = Akk^T dv; the final dv = beta y is stored on the way.
    """
    o_t = tl.arange(0, BT)
    c_v = (i_hv * V).to(tl.int32)                            # first column of this head in [tokens, HV V]
    b_xq = tl.zeros([BT, K], tl.float32)
    b_xk = tl.zeros([BT, K], tl.float32)
    b_xd = tl.zeros([BT, K], tl.float32)
    b_hh = tl.zeros([K], tl.float32)
    b_a = tl.zeros([BT, BT], tl.float32)
    b_yv = tl.zeros([BT], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_dv = _tile(dv, row, c_v + i_v, m_t, HV * V, BT, BV)
        b_h = _tile(h, row_h, i_v, None, V, K, BV)
        b_do = _tile(do, row, c_v + i_v, m_t, HV * V, BT, BV)
        b_vn = _tile(v_new, row, c_v + i_v, m_t, HV * V, BT, BV)
        b_dh = _tile(dh, row_h, i_v, None, V, K, BV)
        b_y = tl.dot(b_At, b_dv)                             # gradient of the triangular system's right-hand side
        b_xq = tl.dot(b_do, tl.trans(b_h), b_xq)
        b_xd = tl.dot(b_vn, tl.trans(b_dh), b_xd)
        b_xk = tl.dot(b_y.to(Y), tl.trans(b_h.to(Y)), b_xk)
        b_hh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        # Subtracted, not accumulated: the program then waits here for its products. h and dh also go to registers, and
        # such a load gets no spare buffer from Triton's pipeliner: the next copy would land in one still being read.
        b_a -= tl.dot(b_y.to(Y), tl.trans(b_vn.to(Y)))
        b_v = _tile(v, row, c_v + i_v, m_t, HV * V, BT, BV)
        b_yv += tl.sum(b_y * b_v.to(tl.float32), 1)
        p_out = p_dv_out + o_t[:, None] * (HV * V) + (i_v + tl.arange(0, BV))[None, :]
        tl.store(p_out, (b_beta[:, None] * b_y).to(p_dv_out.dtype.element_ty), mask=m_t[:, None])
    return b_xq, b_xk, b_xd, b_hh, b_a, b_yv


@triton.jit(do_not_specialize=["T"])
def bwd_wy_kernel(
    q, k,                                # [B, T, H, K]
    gk,                                  # [B, T, HV, K] fp32, chunk-local inclusive cumsum, log2
    beta,                                # [B, T, HV]
    Akk,                                 # [B, T, HV, 64]
    do, v_new, dv, v,                    # [B, T, HV, V]
    h, dh,                               # [B, NT, HV, K, V] (packed: [1, NT, ...])
    dq, dk, dv_out, dg, db, dAkk,        # as dq, dk, dg [B, T, HV, K], dv, db [B, T, HV], dAkk [B, T, HV, 64]
    cu_seqlens, chunk_indices,           # [N + 1], [NT, 2] or None
    scale, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    Y: tl.constexpr, IS_VARLEN: tl.constexpr, STAGES: tl.constexpr,
):
    """One program: one chunk of one value head."""
    i_c, i_hv = (tl.program_id(0) // HV).to(tl.int64), (tl.program_id(0) % HV).to(tl.int64)   # chunk of the call, head
    i_h = i_hv // (HV // H)
    if IS_VARLEN:
        i_n, i_t = tl.load(chunk_indices + i_c * 2).to(tl.int64), tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        row, n_t = bos + i_t * BT, tl.minimum(eos - bos - i_t * BT, BT).to(tl.int32)
    else:
        NT = tl.cdiv(T, BT)
        row, n_t = i_c // NT * T + i_c % NT * BT, tl.minimum(T - (i_c % NT) * BT, BT).to(tl.int32)
    o_t = tl.arange(0, BT)
    m_t = o_t < n_t
    head = row * HV + i_hv                                   # first token of the chunk at this value head

    b_beta = tl.load(beta + head + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
    # transposed (row s of b_At is column s of Akk); zero beyond the sequence, so y there is zero
    b_At = tl.load(Akk + head * BT + o_t[None, :] * (HV * BT) + o_t[:, None], mask=m_t[None, :], other=0.0)
    b_xq, b_xk, b_xd, b_hh, b_a, b_db = _value_pass(
        do, v_new, dv, v, h, dh, dv_out + head * V, b_At, b_beta, m_t, row, i_hv, (i_c * HV + i_hv) * K,
        HV, K, V, BT, BV, Y, STAGES,
    )
    p_a = dAkk + head * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
    tl.store(p_a, tl.where(o_t[:, None] > o_t[None, :], b_a, 0.0), mask=m_t[:, None])

    o_k = tl.arange(0, K)
    o_qk = (row * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    o_gk = head * K + o_t[:, None] * (HV * K) + o_k[None, :]
    # Each operand is loaded where it is used (no load moves above a store), and gk twice: registers are short here.
    o_g = tl.minimum(o_t, n_t - 1)                           # a row beyond the sequence does not decay
    p_g = gk + head * K + o_g[:, None] * (HV * K) + o_k[None, :]
    b_up = tl.exp2(tl.load(p_g))
    b_dq = b_xq * b_up * scale
    tl.store(dq + o_gk, b_dq, mask=m_t[:, None])
    b_dg = b_dq * tl.load(q + o_qk, mask=m_t[:, None], other=0.0)
    b_k = tl.load(k + o_qk, mask=m_t[:, None], other=0.0)
    b_ku = b_xk * b_up                                       # minus the gradient of beta k 2^gk's k, before beta
    b_kku = b_k * b_ku
    b_db -= tl.sum(b_kku, 1)
    b_dg -= b_beta[:, None] * b_kku
    b_gn = tl.load(gk + head * K + (n_t - 1) * (HV * K) + o_k)
    b_kd = b_xd * tl.exp2(b_gn[None, :] - tl.load(p_g))      # gradient of k inside k 2^(G - gk)
    tl.store(dk + o_gk, b_kd - b_beta[:, None] * b_ku, mask=m_t[:, None])
    b_kkd = b_k * b_kd
    b_tail = tl.sum(b_kkd, 0) + tl.exp2(b_gn) * b_hh         # the chunk's whole decay, at its last row
    b_dg += tl.where((o_t == n_t - 1)[:, None], b_tail[None, :], 0.0) - b_kkd
    tl.store(dg + o_gk, b_dg, mask=m_t[:, None])
    tl.store(db + head + o_t * HV, b_db, mask=m_t)


# ------------------------------------------------------------------------------------------------------- host code
def supports(p):
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % BV:
        return False, f"needs V a multiple of {BV}, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    return True, ""


def run(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices):
    """Tensors as in the chain's contract.

    Returns fp32 dq, dk, dg [B,T,HV,K], db [B,T,HV], dAkk [B,T,HV,64], and dv [B,T,HV,V] in the problem's dtype.
    """
    def grad(*shape, dtype=torch.float32):
        x = torch.empty(p.B, p.T, p.HV, *shape, dtype=dtype, device=q.device)
        if p.varlen:                     # tokens after the last sequence belong to none: their gradient is zero
            x[:, cu_seqlens[-1]:] = 0
        return x

    dq, dk, dg = (grad(p.K) for _ in range(3))
    dv_out, db, dAkk = grad(p.V, dtype=p.dtype), grad(), grad(CHUNK)
    if p.NT:
        bwd_wy_kernel[(p.NT * p.HV,)](
            q, k, gk, beta, Akk, do, v_new, dv, v, h, dh, dq, dk, dv_out, dg, db, dAkk, cu_seqlens, chunk_indices,
            p.scale, p.T, H=p.H, HV=p.HV, K=p.K, V=p.V, BT=CHUNK, BV=BV, Y=Y_DTYPE[p.dtype], IS_VARLEN=p.varlen,
            STAGES=STAGES, num_warps=NUM_WARPS, num_stages=STAGES,
        )
    return {"dq": dq, "dk": dk, "dv": dv_out, "db": db, "dg": dg, "dAkk": dAkk}


SPANS = {"bwd.wy": run}

_TYPES = dict.fromkeys(("q", "k", "Akk", "do", "v_new", "dv", "v", "h", "dh", "dv_out"), "*bf16")
_TYPES |= dict.fromkeys(("gk", "beta", "dq", "dk", "dg", "db", "dAkk"), "*fp32")
_TYPES |= {"cu_seqlens": "*i64", "chunk_indices": "*i64", "scale": "fp32", "T": "i32"}
COMPILE = [
    (
        bwd_wy_kernel, _TYPES,
        {"H": 16, "HV": 16, "K": K, "V": V, "BT": CHUNK, "BV": BV, "Y": tl.bfloat16, "IS_VARLEN": False,
         "STAGES": STAGES},
        NUM_WARPS, STAGES,
    )
    for K, V in ((128, 256), (128, 128), (64, 128))
]
