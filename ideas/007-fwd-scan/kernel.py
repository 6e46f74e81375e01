"""Triangular solve, state scan and readout in one kernel; the state never leaves its registers.

Parent: 000 (replaces fla's w/u/kg, state scan and output kernels).
Delta: one program per (V tile, value head, sequence) walks the chunks. It carries S^T [BV, K] in fp32 accumulators, so its bf16
    copy is the register operand of the next product, and so are r and v_new. k 2^gk, q 2^gk and k 2^(G - gk) are built from
    the tiles of q, k, gk that the loop has in flight for the next chunk (every exponent is <= 0, so any gate is exact):
        X = S^T [kb; qg]^T     r = beta (v - X_1)^T     vn = r + r (Akk - I)^T
        o^T = scale X_2 + d vn + vn strict(Aqk)^T       S^T <- 2^G S^T + vn kg
    Both unit diagonals act in fp32 on unrounded values. No w, u, kg, h, v_new in memory.
Why it should be faster: fla's three stages move 5.4 KB a token-head at K = V = 128, 7.4 KB at V = 256; this 1.8 and 2.3 KB with one
    read of the K-side tiles by all V tiles (L2 serves the second). 8.4 MFLOP a chunk of V = 128.
Constraints: K 64 or 128, V a multiple of 64, bf16 or fp16. Any gate, any T, packed sequences, GVA.
"""
import torch
import triton
import triton.language as tl
from kernel_fun._common.problem import CHUNK

FAMILY = "kda"
BV, NUM_WARPS, NUM_STAGES, MAXNREG = 128, 8, 2, None


@triton.jit
def _rows(x, o, m):
    """A tile, zero where m is False; m None: every row is real."""
    if m is None:
        return tl.load(x + o)
    else:
        return tl.load(x + o, mask=m, other=0.0)


@triton.jit(do_not_specialize=["T"])
def fwd_scan_kernel(
    q, k, gk, v, beta, Aqk, Akk, h0, o, ht, cu_seqlens, scale, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, FULL: tl.constexpr, HAS_H0: tl.constexpr, HAS_HT: tl.constexpr, STAGES: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    i_v, i_hv = tl.program_id(0) % NV, tl.program_id(0) // NV % HV      # V tiles of a head run together: they share its tiles in L2
    i_n = (tl.program_id(0) // (NV * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    if VARLEN:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        n_t = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        bos = i_n * T
        n_t = T
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, BV)
    strict = o_t[:, None] > o_t[None, :]
    p_qk = o_t[:, None] * (H * K) + o_k[None, :]
    p_gk = o_t[:, None] * (HV * K) + o_k[None, :]
    p_a = o_t[:, None] * (HV * BT) + o_t[None, :]
    p_v = o_t[:, None] * (HV * V) + i_v * BV + o_v[None, :]
    p_h = (i_n * HV + i_hv) * (K * V) + i_v * BV + o_k[None, :] * V + o_v[:, None]

    if HAS_H0:
        b_S = tl.load(h0 + p_h)
    else:
        b_S = tl.zeros([BV, K], tl.float32)
    for i_t in tl.range(0, n_t, BT, num_stages=STAGES):
        m = None
        m1 = None
        if not FULL:
            m1 = o_t < n_t - i_t
            m = m1[:, None]
        row = bos + i_t
        row_h, row_hv = row * H + i_h, row * HV + i_hv
        b_gk = _rows(gk + row_hv * K, p_gk, m)
        b_k = _rows(k + row_h * K, p_qk, m)
        b_q = _rows(q + row_h * K, p_qk, m)
        b_v = _rows(v + row_hv * V, p_v, m)
        b_Akk = _rows(Akk + row_hv * BT, p_a, m)
        b_Aqk = _rows(Aqk + row_hv * BT, p_a, m)
        b_beta = _rows(beta + row_hv, o_t * HV, m1).to(tl.float32)
        b_d = _rows(Aqk + row_hv * BT, o_t * (HV * BT + 1), m1).to(tl.float32)
        last = tl.minimum(n_t - i_t, BT) - 1
        b_G = tl.load(gk + (row_hv + last * HV) * K + o_k)

        # ---- K-side operands, independent of the state
        f = tl.exp2(b_gk)
        b_kb = (b_k * f).to(q.dtype.element_ty)
        b_qg = (b_q * f).to(q.dtype.element_ty)
        b_kg = (b_k * tl.exp2(b_G[None, :] - b_gk)).to(q.dtype.element_ty)
        b_L = tl.where(strict, b_Akk, 0.0)
        b_M = tl.where(strict, b_Aqk, 0.0)          # what lies above Aqk's diagonal is not defined

        # ---- the chain
        b_h = b_S.to(q.dtype.element_ty)
        b_x = tl.dot(b_h, tl.trans(b_kb))
        b_r = b_beta[None, :] * (tl.trans(b_v).to(tl.float32) - b_x)
        b_vn = tl.dot(b_r.to(q.dtype.element_ty), tl.trans(b_L), b_r)
        b_vb = b_vn.to(q.dtype.element_ty)
        b_S = tl.dot(b_vb, b_kg, b_S * tl.exp2(b_G)[None, :])
        # ---- off it
        b_o = tl.dot(b_h, tl.trans(b_qg)) * scale + b_d[None, :] * b_vn
        b_o = tl.dot(b_vb, tl.trans(b_M), b_o)
        b_o = tl.trans(b_o.to(o.dtype.element_ty))
        if FULL:
            tl.store(o + row_hv * V + p_v, b_o)
        else:
            tl.store(o + row_hv * V + p_v, b_o, mask=m)
    if HAS_HT:
        tl.store(ht + p_h, b_S)
    if VARLEN:  # noqa: SIM102  (a compile-time and a run-time condition)
        if i_n == N - 1:                            # tokens after the last sequence belong to none
            for i_t in tl.range(n_t, (T - bos).to(tl.int32), BT):
                p_o = o + ((bos + i_t) * HV + i_hv) * V + p_v
                tl.store(p_o, tl.zeros([BT, BV], o.dtype.element_ty), mask=(bos + i_t + o_t < T)[:, None])


def supports(p):
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 64:
        return False, f"needs V a multiple of 64, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    return True, ""


def run(*, q, k, v, beta, Akk, gk, h0, Aqk, p, cu_seqlens):
    """Tensors as in the chain's contract. Returns o [B,T,HV,V] in the problem's dtype, and ht fp32 [N,HV,K,V] or None."""
    o = torch.empty_like(v)
    ht = v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32) if p.output_final_state else None
    bv = BV if p.V % BV == 0 else 64
    fwd_scan_kernel[(p.V // bv * p.HV * p.N,)](
        q, k, gk, v, beta, Aqk, Akk, h0, o, ht, cu_seqlens, p.scale, p.T, p.N,
        H=p.H, HV=p.HV, K=p.K, V=p.V, BT=CHUNK, BV=bv, VARLEN=p.varlen, FULL=not p.varlen and p.T % CHUNK == 0,
        HAS_H0=h0 is not None, HAS_HT=p.output_final_state, STAGES=NUM_STAGES,
        num_warps=NUM_WARPS if bv > 64 else 4, num_stages=NUM_STAGES, maxnreg=MAXNREG,
    )
    return {"o": o, "ht": ht}


SPANS = {"fwd.wy..fwd.out": run}
