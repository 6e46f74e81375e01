"""All remaining gradients of a chunk in one kernel, from the boundary states to the raw inputs.

Parent: 000 (replaces fla's wy, intra, head sum, reverse cumsum, gate, norm and beta backward: seven to nine launches).
Delta: one program per (chunk, value head) reads do, v, v_new, dv, h, dh, q, k, gk, Akk once and writes dq, dk, dv, dg,
    dbeta in the inputs' own dtypes. The solve is differentiated without w, u or a 64-cubed chain (y = Akk^T dv,
    dMkk = -y v_new^T), the in-chunk gradients use a dyadic cover of the chunk (six levels, every exponent <= 0 at any
    gate), and norm, gate, cumsum and sigmoid close in registers.
Why it should be faster: at B16 T8192 H16 K128 V256 fla moves about 19 KB a token-head in these stages and recomputes
    exponentials per 16x32 tile (29.7 ms). This kernel moves 6.9 KB (14.4 GB, 3.4 ms at 4.2 TB/s) for 42 MFLOP a chunk
    (1.4 TFLOP, about 3 ms).
Constraints: K 64 or 128, V a multiple of 64, bf16 or fp16. Any T, packed, any gate, GVA (fp32 partials, summed after).
"""
import torch
import triton
import triton.language as tl

from kernel_fun._common.problem import CHUNK

FAMILY = "kda"
BK, BV = 64, 32          # a slab of the key and of the value dimension
NUM_WARPS, NUM_STAGES = 8, 2
# Operands of the in-chunk products. A gradient has no scale, so fp16 could overflow there: fp16 problems take tf32 (the
# same mantissa).
TREE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float32}


# ------------------------------------------------------------------------------------------------------ device code
@triton.jit
def _value_loop(
    p_do, p_vn, p_dv, p_v, p_h, p_dh, p_dv_out, b_At, b_beta, m_t,
    stride_t: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FIRST: tl.constexpr,
):
    """One key slab's products with the boundary states, summed over V in slabs of BV.

    Returns do h^T, y h^T, -v_new dh^T [BT, BK]; sum_V h dh [BK]; and if FIRST (else zeros) do v_new^T, y v_new^T
    [BT, BT] and <y, v> [BT], storing the final dv = beta y as it goes.
    """
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    b_xq = tl.zeros([BT, BK], tl.float32)
    b_xk = tl.zeros([BT, BK], tl.float32)
    b_xd = tl.zeros([BT, BK], tl.float32)
    b_hh = tl.zeros([BK], tl.float32)
    b_aq = tl.zeros([BT, BT], tl.float32)
    b_ak = tl.zeros([BT, BT], tl.float32)
    b_yv = tl.zeros([BT], tl.float32)
    for i_v in range(0, V, BV):
        o_tv = o_t[:, None] * stride_t + (i_v + o_v)[None, :]
        o_kv = o_k[:, None] * V + (i_v + o_v)[None, :]
        b_do = tl.load(p_do + o_tv, mask=m_t[:, None], other=0.0)
        b_vn = tl.load(p_vn + o_tv, mask=m_t[:, None], other=0.0)
        b_dv = tl.load(p_dv + o_tv, mask=m_t[:, None], other=0.0)
        b_h = tl.load(p_h + o_kv)
        b_dh = tl.load(p_dh + o_kv)
        b_y = tl.dot(b_At, b_dv)                       # gradient of the triangular system's right-hand side over beta
        b_yl = b_y.to(b_do.dtype)
        b_hh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        b_xq = tl.dot(b_do, tl.trans(b_h), b_xq)
        b_xk = tl.dot(b_yl, tl.trans(b_h), b_xk)
        if FIRST:
            b_aq = tl.dot(b_do, tl.trans(b_vn), b_aq)
            b_ak = tl.dot(b_yl, tl.trans(b_vn), b_ak)
        # Subtracted, not accumulated: the program then waits here for its products. h and dh also go to registers, and
        # such a load gets no spare buffer from Triton's pipeliner: the next copy would land in one still being read.
        b_xd -= tl.dot(b_vn, tl.trans(b_dh))
        if FIRST:
            b_v = tl.load(p_v + o_tv, mask=m_t[:, None], other=0.0)
            b_yv += tl.sum(b_y * b_v.to(tl.float32), 1)
            tl.store(p_dv_out + o_tv, (b_beta[:, None] * b_y).to(p_dv_out.dtype.element_ty), mask=m_t[:, None])
    return b_xq, b_xk, b_xd, b_hh, b_aq, b_ak, b_yv


@triton.jit
def _key_slab(
    p_q, p_k, p_gk, b_D, b_E, b_diag, b_beta, b_xq, b_xk, b_xd, b_hh, scale, n_t,
    stride_qt: tl.constexpr, stride_gt: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):
    """Row-local part and in-chunk products of one key slab.

    D, E: gradients of Mqk and of diag(beta) Mkk, strictly lower part and its mirror image; b_diag the diagonal of the
    former; b_xd as _value_loop leaves it, negative. Returns dq, dk, dg [BT, BK] (dg already the suffix sum over the
    chunk), the slab's share of dbeta, and of <q, dq> and <k, dk> [BT].
    """
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_t = (o_t < n_t)[:, None]
    o_gt = tl.minimum(o_t, n_t - 1)                    # rows beyond the sequence repeat its last gate: no decay
    b_q = tl.load(p_q + o_t[:, None] * stride_qt + o_k[None, :], mask=m_t, other=0.0)
    b_k = tl.load(p_k + o_t[:, None] * stride_qt + o_k[None, :], mask=m_t, other=0.0)
    b_g = tl.load(p_gk + o_gt[:, None] * stride_gt + o_k[None, :])
    b_gn = tl.load(p_gk + (n_t - 1) * stride_gt + o_k)
    b_up = tl.exp2(b_g)
    b_dq = b_xq * b_up * scale
    b_ku = b_xk * b_up                                 # -gradient of k inside beta kb, before beta
    b_kd = -b_xd * tl.exp2(b_gn[None, :] - b_g)        # gradient of k inside kg
    b_db = -tl.sum(b_ku * b_k, 1)
    b_dk = b_kd - b_beta[:, None] * b_ku
    b_dg = b_q * b_dq - b_k * (b_kd + b_beta[:, None] * b_ku)
    b_tail = tl.sum(b_k * b_kd, 0) + tl.exp2(b_gn) * b_hh
    b_dq += b_diag[:, None] * b_k                      # the pair r = s carries no gate: not in dg
    b_dk += b_diag[:, None] * b_q
    for i in range(0, 6):
        n = 1 << i                                     # half-size: pairs of one 2n-block, second half x first half
        b_target = ((o_t & n) != 0)[:, None]
        o_m = tl.minimum((o_t | (2 * n - 1)) - n, n_t - 1)   # last row of the block's first half
        b_gm = tl.load(p_gk + o_m[:, None] * stride_gt + o_k[None, :])
        b_f = tl.exp2(tl.where(b_target, b_g - b_gm, b_gm - b_g))
        b_level = ((o_t[:, None] ^ o_t[None, :]) >> i) == 1      # same 2n-block, other half
        b_bt = tl.where(b_target, b_beta[:, None], 1.0)
        b_kf = b_k * b_f
        b_qx = (b_q * b_f).to(b_D.dtype)
        b_kx = (b_kf * b_bt).to(b_D.dtype)
        b_x = tl.dot(tl.where(b_level & b_target, b_D, 0.0), b_kx)
        b_z = tl.dot(tl.where(b_level, b_E, 0.0), b_kx)
        b_z = tl.dot(tl.where(b_level & (b_target == 0), b_D, 0.0), b_qx, b_z)
        b_dq += b_f * b_x
        b_dk += b_f * b_bt * b_z
        b_db += tl.sum(tl.where(b_target, b_kf * b_z, 0.0), 1)
        # formed from the rounded factors that entered the products: the pairs' terms then cancel in the suffix sum
        b_kz = b_kx.to(tl.float32) * b_z
        b_dg += b_qx.to(tl.float32) * b_x + tl.where(b_target, b_kz, -b_kz)
    b_dg = tl.cumsum(b_dg, 0, reverse=True) + b_tail[None, :]
    return b_dq, b_dk, b_dg, b_db, tl.sum(b_q * b_dq, 1), tl.sum(b_k * b_dk, 1)


@triton.jit
def _close_gate(
    b_dg, g_raw, o_g, p_dg, A_log, dt_bias, p_dbias, lower_bound, i_h, i_k, m_t,
    stride_gt: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Chain dg through the gate activation, store it, and return this slab's share of dA_log (0 without a gate)."""
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_tk = o_t[:, None] * stride_gt + o_k[None, :]
    b_dA = tl.sum(tl.zeros([BK], tl.float32), 0)
    if GATE != "log":
        b_x = tl.load(g_raw + o_g + o_tk, mask=m_t[:, None], other=0.0).to(tl.float32)
        if HAS_BIAS:
            b_x += tl.load(dt_bias + i_h * K + i_k + o_k).to(tl.float32)[None, :]
        b_rate = 1.0
        if HAS_A:
            b_rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
        b_dg = tl.where(m_t[:, None], b_dg, 0.0)
        if GATE == "softplus":
            b_s = tl.sigmoid(b_x)
            b_softplus = tl.where(b_x > 20.0, b_x, tl.log(1.0 + tl.exp(tl.minimum(b_x, 20.0))))
            b_dA = -b_rate * tl.sum(tl.sum(b_softplus * b_dg, 1), 0)
            b_dg = -b_rate * b_s * b_dg
        else:
            b_s = tl.sigmoid(b_rate * b_x)
            b_dg = lower_bound * b_rate * b_s * (1.0 - b_s) * b_dg
            b_dA = tl.sum(tl.sum(b_dg * b_x, 1), 0)
        if HAS_BIAS:
            tl.store(p_dbias + o_k, tl.sum(b_dg, 0))
    tl.store(p_dg + o_tk, b_dg.to(p_dg.dtype.element_ty), mask=m_t[:, None])
    return b_dA


@triton.jit
def _close_norm(b_dy, p_y, p_dx, rstd, o_rstd, b_dot, m_t, stride_yt: tl.constexpr, stride_xt: tl.constexpr,
                stride_rt: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr):
    """Store dx = rstd (dy - y <y, dy>); the row dot over all of K comes in as b_dot, y is read again."""
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    if L2NORM:
        b_y = tl.load(p_y + o_t[:, None] * stride_yt + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_rstd = tl.load(rstd + o_rstd + o_t * stride_rt, mask=m_t, other=0.0)
        b_dy = b_rstd[:, None] * (b_dy - b_y * b_dot[:, None])
    tl.store(p_dx + o_t[:, None] * stride_xt + o_k[None, :], b_dy.to(p_dx.dtype.element_ty), mask=m_t[:, None])


@triton.jit(do_not_specialize=["T"])
def bwd_grads_kernel(
    q, k, v, gk, beta, Akk, do, v_new, dv, h, dh, g_raw, A_log, dt_bias, q_rstd, k_rstd,   # in
    dq, dk, dv_out, dg, dbeta, dA, dbias,                                                  # out
    cu_seqlens, chunk_indices, scale, lower_bound, beta_scale, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr, IS_VARLEN: tl.constexpr, TREE: tl.constexpr,
):
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
    head, kv = (row * HV + i_hv), (i_c * HV + i_hv) * K * V      # the chunk's first token at this head; its states

    b_beta = tl.load(beta + head + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
    p_A = Akk + head * BT + o_t[None, :] * (HV * BT) + o_t[:, None]
    b_At = tl.load(p_A, mask=m_t[None, :], other=0.0).to(do.dtype.element_ty)     # transposed: rows are columns of Akk
    p_q, p_k, p_g = q + (row * H + i_h) * K, k + (row * H + i_h) * K, gk + head * K

    b_xq, b_xk, b_xd, b_hh, b_aq, b_ak, b_db = _value_loop(
        do + head * V, v_new + head * V, dv + head * V, v + head * V, h + kv, dh + kv, dv_out + head * V, b_At, b_beta,
        m_t, HV * V, V, BT, BK, BV, True,
    )
    b_aq = b_aq * scale
    b_diag = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_aq, 0.0), 1)
    b_lower = o_t[:, None] > o_t[None, :]
    b_aq, b_ak = tl.where(b_lower, b_aq, 0.0), tl.where(b_lower, -b_ak, 0.0)
    b_D, b_E = (b_aq + tl.trans(b_aq)).to(TREE), (b_ak + tl.trans(b_ak)).to(TREE)

    b_dq, b_dk, b_dg, b_s, b_qdot, b_kdot = _key_slab(
        p_q, p_k, p_g, b_D, b_E, b_diag, b_beta, b_xq, b_xk, b_xd, b_hh, scale, n_t, H * K, HV * K, BT, BK,
    )
    b_db += b_s
    b_dA = _close_gate(
        b_dg, g_raw, head * K, dg + head * K, A_log, dt_bias, dbias + (i_c * HV + i_hv) * K, lower_bound, i_hv, 0, m_t,
        HV * K, K, BT, BK, GATE, HAS_A, HAS_BIAS,
    )
    o_rstd = row * H + i_h
    if K > BK:
        b_xq, b_xk, b_xd, b_hh, b_aq, b_ak, b_s = _value_loop(
            do + head * V, v_new + head * V, dv + head * V, v + head * V, h + kv + BK * V, dh + kv + BK * V,
            dv_out + head * V, b_At, b_beta, m_t, HV * V, V, BT, BK, BV, False,
        )
        b_dq2, b_dk2, b_dg, b_s, b_qdot2, b_kdot2 = _key_slab(
            p_q + BK, p_k + BK, p_g + BK, b_D, b_E, b_diag, b_beta, b_xq, b_xk, b_xd, b_hh, scale, n_t, H * K, HV * K,
            BT, BK,
        )
        b_db += b_s
        b_dA += _close_gate(
            b_dg, g_raw, head * K + BK, dg + head * K + BK, A_log, dt_bias, dbias + (i_c * HV + i_hv) * K + BK,
            lower_bound, i_hv, BK, m_t, HV * K, K, BT, BK, GATE, HAS_A, HAS_BIAS,
        )
        b_qdot += b_qdot2
        b_kdot += b_kdot2
        _close_norm(b_dq2, p_q + BK, dq + head * K + BK, q_rstd, o_rstd, b_qdot, m_t, H * K, HV * K, H, BT, BK, L2NORM)
        _close_norm(b_dk2, p_k + BK, dk + head * K + BK, k_rstd, o_rstd, b_kdot, m_t, H * K, HV * K, H, BT, BK, L2NORM)
    _close_norm(b_dq, p_q, dq + head * K, q_rstd, o_rstd, b_qdot, m_t, H * K, HV * K, H, BT, BK, L2NORM)
    _close_norm(b_dk, p_k, dk + head * K, k_rstd, o_rstd, b_kdot, m_t, H * K, HV * K, H, BT, BK, L2NORM)
    if BETA_SIGMOID:
        b_db = b_db * b_beta * (1.0 - b_beta / beta_scale)
    tl.store(dbeta + head + o_t * HV, b_db.to(dbeta.dtype.element_ty), mask=m_t)
    if HAS_A:
        tl.store(dA + i_c * HV + i_hv, b_dA)


# -------------------------------------------------------------------------------------------------------- host code
def supports(p):
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % BV:
        return False, f"needs V a multiple of {BV}, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    return True, ""


def run(
    *, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, g_raw, A_log, dt_bias, q_rstd, k_rstd, p, cu_seqlens, chunk_indices
):
    """Tensors as in the chain's contract; dq, dk [B,T,H,K], dv, dg, dbeta in the inputs' dtypes, dA_log, ddt_bias."""
    def grad(*shape, dtype=torch.float32):
        x = torch.empty(shape, dtype=dtype, device=q.device)
        if p.varlen:                     # tokens after the last sequence belong to none: their gradient is zero
            x[:, cu_seqlens[-1]:] = 0
        return x

    grouped = p.HV != p.H
    dq, dk = (grad(p.B, p.T, p.HV, p.K, dtype=torch.float32 if grouped else p.dtype) for _ in range(2))
    dv_out, dg = grad(p.B, p.T, p.HV, p.V, dtype=p.dtype), grad(p.B, p.T, p.HV, p.K, dtype=p.g_dtype)
    dbeta = grad(p.B, p.T, p.HV, dtype=p.beta_dtype)
    has_A, has_bias = A_log is not None, dt_bias is not None
    dA = q.new_empty(p.NT if has_A else 0, p.HV, dtype=torch.float32)
    dbias = q.new_empty(p.NT if has_bias else 0, p.HV, p.K, dtype=torch.float32)
    bwd_grads_kernel[(p.NT * p.HV,)](
        q, k, v, gk, beta, Akk, do, v_new, dv, h, dh, g_raw, A_log, dt_bias, q_rstd, k_rstd,
        dq, dk, dv_out, dg, dbeta, dA, dbias,
        cu_seqlens, chunk_indices, p.scale, 0.0 if p.lower_bound is None else p.lower_bound, p.beta_scale, p.T,
        H=p.H, HV=p.HV, K=p.K, V=p.V, BT=CHUNK, BK=BK, BV=BV, GATE=p.gate, HAS_A=has_A, HAS_BIAS=has_bias,
        L2NORM=p.l2norm, BETA_SIGMOID=p.beta_sigmoid, IS_VARLEN=p.varlen, TREE=TREE[p.dtype],
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )
    if grouped:
        group = (p.B, p.T, p.H, p.HV // p.H, p.K)
        dq, dk = dq.view(group).sum(3), dk.view(group).sum(3)
    return {
        "dq": dq, "dk": dk, "dv": dv_out, "dg": dg, "dbeta": dbeta,
        "dA_log": dA.sum(0).view_as(A_log) if has_A else None,
        "ddt_bias": dbias.sum(0).view_as(dt_bias) if has_bias else None,
    }


def run_log_gate(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, q_rstd, k_rstd, p, cu_seqlens, chunk_indices):
    """The same for a precomputed gate: the raw gate is then not needed, so not kept for the backward."""
    return run(
        q=q, k=k, v=v, v_new=v_new, gk=gk, beta=beta, Akk=Akk, h=h, do=do, dh=dh, dv=dv, g_raw=None, A_log=None,
        dt_bias=None, q_rstd=q_rstd, k_rstd=k_rstd, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
    )


SPANS = {"bwd.wy..bwd.beta": run}


def spans(p):
    return {"bwd.wy..bwd.beta": run_log_gate if p.gate == "log" else run}

_TYPES = dict.fromkeys(("q", "k", "v", "Akk", "do", "v_new", "dv", "h", "dh", "g_raw"), "*bf16")
_TYPES |= dict.fromkeys(("dq", "dk", "dv_out", "dg", "dbeta"), "*bf16")
_TYPES |= dict.fromkeys(("gk", "beta", "A_log", "dt_bias", "q_rstd", "k_rstd", "dA", "dbias"), "*fp32")
_TYPES |= {"cu_seqlens": "*i64", "chunk_indices": "*i64", "T": "i32"}
_TYPES |= dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
COMPILE = [
    (
        bwd_grads_kernel, _TYPES,
        {"H": 16, "HV": 16, "K": 128, "V": 256, "BT": CHUNK, "BK": BK, "BV": BV, "GATE": "softplus", "HAS_A": True,
         "HAS_BIAS": True, "L2NORM": True, "BETA_SIGMOID": True, "IS_VARLEN": False, "TREE": tl.bfloat16},
        NUM_WARPS, NUM_STAGES,
    )
]
