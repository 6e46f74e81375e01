"""The backward's serial part in one launch: the states again, forwards, and their gradients, backwards, side by side.

Parent: 000 (replaces fla's recompute, re-scan, dAv and dhu).
Delta: neither scan needs w, u, qg or kg from memory: each builds k 2^gk, k 2^(G - gk), q 2^gk from q, k, gk (every exponent
    is <= 0) and applies Akk itself. Both carry the transposed state [V, K] in fp32 registers, whose bf16 copy is the first
    operand of the next product. Forwards r = beta (v - kb S), v_new = r + (Akk - I) r, S = 2^G S + kg^T v_new; backwards
    dv = Aqk^T do + kg dS, y = Akk^T dv, dS = 2^G dS + scale qg^T do - kb^T (beta y): three dependent products each.
Why it should be faster: 6.3 KB a token-head at K128 V256 and 4.2 KB at V128 instead of fla's 11 and 8.5 KB; the two scans
    need nothing of each other, so half as many serial steps are left for a small batch. dAqk needs all of V at once and
    has its own kernel (do, v_new in, fp32 out: 1.3 KB or 0.8 KB).
Constraints: K 64 or 128, V a multiple of 64, bf16 or fp16. Any gate, any T, packed sequences, GVA.
"""
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_fun._common.problem import CHUNK

FAMILY = "kda"
BV = 128                   # value columns a program carries (64 where V is no multiple of it); 16 a warp
FWD_STAGES, BWD_STAGES = 2, 2
TMA = True                 # token tiles by descriptor where every chunk is full
STATE_TMA = True           # states by descriptor
MAXNREG = None
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
A_BV, A_STAGES, A_WARPS = 64, 3, 4   # the dAqk kernel's value columns per step


# ------------------------------------------------------------------------------------------------------ device code
@triton.jit
def _rows(x, row, col, n_t, stride: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr, FULL: tl.constexpr):
    """The [64, C] tile of a token tensor at (row, col); rows from n_t on are zero."""
    if TMA:
        b_x = x.load([row.to(tl.int32), col.to(tl.int32)])
    else:
        o_t = tl.arange(0, 64)
        p_x = x + row * stride + col + o_t[:, None] * stride + tl.arange(0, C)[None, :]
        if FULL:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_t < n_t)[:, None], other=0.0)
    return b_x


@triton.jit
def _columns(x, row, col, n_t, stride: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr, FULL: tl.constexpr):
    """The same tile transposed, [C, 64]."""
    if TMA:
        b_x = tl.trans(x.load([row.to(tl.int32), col.to(tl.int32)]))
    else:
        o_t = tl.arange(0, 64)
        p_x = x + row * stride + col + o_t[None, :] * stride + tl.arange(0, C)[:, None]
        if FULL:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_t < n_t)[None, :], other=0.0)
    return b_x


@triton.jit
def _put_columns(x, row, col, n_t, b_x, stride: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr, FULL: tl.constexpr):
    """Store a transposed tile [C, 64] into a token tensor at (row, col), rows below n_t only."""
    if TMA:
        x.store([row.to(tl.int32), col.to(tl.int32)], tl.trans(b_x))
    else:
        o_t = tl.arange(0, 64)
        p_x = x + row * stride + col + o_t[None, :] * stride + tl.arange(0, C)[:, None]
        if FULL:
            tl.store(p_x, b_x)
        else:
            tl.store(p_x, b_x, mask=(o_t < n_t)[None, :])


@triton.jit
def _put_state(x, row, col, b_S, V: tl.constexpr, K: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Store a transposed state [C, K] as rows row .. row + K, columns col .. col + C of the states [.., V]."""
    if TMA:
        x.store([row.to(tl.int32), col.to(tl.int32)], tl.trans(b_S))
    else:
        tl.store(x + row * V + col + tl.arange(0, K)[None, :] * V + tl.arange(0, C)[:, None], b_S)


@triton.jit
def _gates(gk, row, i_hv, n_t, HV: tl.constexpr, K: tl.constexpr, TMA: tl.constexpr, FULL: tl.constexpr):
    """gk of the chunk, [64, K]; a row beyond the sequence does not decay: it repeats the last one."""
    if TMA or FULL:
        b_g = _rows(gk, row, i_hv * K, n_t, HV * K, K, TMA, FULL)
    else:
        o_t = tl.minimum(tl.arange(0, 64), n_t - 1)
        b_g = tl.load(gk + (row * HV + i_hv) * K + o_t[:, None] * (HV * K) + tl.arange(0, K)[None, :])
    return b_g


@triton.jit
def _rescan(
    k, v, gk, g_last, beta, Akk, h, v_new, b_S, bos, n_tok, i_c, i_h, i_hv, i_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr,
    TMA: tl.constexpr, STATE_TMA: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):
    """The states before each chunk and v_new, forwards from b_S [BV, K]."""
    o_t, o_k = tl.arange(0, 64), tl.arange(0, K)
    for i_t in tl.range(0, tl.cdiv(n_tok, 64), num_stages=STAGES):
        row, n_t = bos + i_t * 64, tl.minimum(n_tok - i_t * 64, 64)
        b_k = _rows(k, row, i_h * K, n_t, H * K, K, TMA, FULL)
        b_g = _gates(gk, row, i_hv, n_t, HV, K, TMA, FULL)
        b_A = _rows(Akk, row, i_hv * 64, n_t, HV * 64, 64, TMA, FULL)
        b_v = _columns(v, row, i_hv * V + i_v, n_t, HV * V, BV, TMA, FULL)
        b_gn = tl.load(g_last + ((row + n_t - 1) * HV + i_hv) * K + o_k)
        b_beta = tl.load(beta + row * HV + i_hv + o_t * HV, mask=o_t < n_t, other=0.0).to(tl.float32)
        b_kb = (b_k * tl.exp2(b_g)).to(DT)
        b_kg = (b_k * tl.exp2(b_gn[None, :] - b_g)).to(DT)
        b_Sb = b_S.to(DT)
        b_r = b_beta[None, :] * (b_v.to(tl.float32) - tl.dot(b_Sb, tl.trans(b_kb)))
        b_rb = b_r.to(DT)
        b_vn = tl.dot(b_rb, tl.trans(b_A), b_r - b_rb.to(tl.float32)).to(DT)       # the unit diagonal meets an unrounded r
        b_S = tl.dot(b_vn, b_kg, b_S * tl.exp2(b_gn)[None, :])
        _put_state(h, ((i_c + i_t) * HV + i_hv) * K, i_v, b_Sb, V, K, BV, STATE_TMA)
        _put_columns(v_new, row, i_hv * V + i_v, n_t, b_vn, HV * V, BV, TMA, FULL)


@triton.jit
def _reverse(
    q, k, gk, g_last, beta, Aqk, Akk, do, dh, dv, b_dS, scale, bos, n_tok, i_c, i_h, i_hv, i_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr,
    TMA: tl.constexpr, STATE_TMA: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):
    """The gradients of the states after each chunk and of v_new, backwards from b_dS [BV, K]. Returns that of the first state."""
    o_t, o_k = tl.arange(0, 64), tl.arange(0, K)
    NT = tl.cdiv(n_tok, 64)
    for i in tl.range(0, NT, num_stages=STAGES):
        i_t = NT - 1 - i
        row, n_t = bos + i_t * 64, tl.minimum(n_tok - i_t * 64, 64)
        b_k = _rows(k, row, i_h * K, n_t, H * K, K, TMA, FULL)
        b_g = _gates(gk, row, i_hv, n_t, HV, K, TMA, FULL)
        b_q = _rows(q, row, i_h * K, n_t, H * K, K, TMA, FULL)
        b_Aq = _rows(Aqk, row, i_hv * 64, n_t, HV * 64, 64, TMA, FULL)
        b_A = _rows(Akk, row, i_hv * 64, n_t, HV * 64, 64, TMA, FULL)
        b_do = _columns(do, row, i_hv * V + i_v, n_t, HV * V, BV, TMA, FULL)
        b_gn = tl.load(g_last + ((row + n_t - 1) * HV + i_hv) * K + o_k)
        b_beta = tl.load(beta + row * HV + i_hv + o_t * HV, mask=o_t < n_t, other=0.0).to(tl.float32)
        b_Aq = tl.where(o_t[:, None] >= o_t[None, :], b_Aq, 0.0).to(DT)            # nobody has written above the diagonal
        b_up = tl.exp2(b_g)
        b_kb = (b_k * b_up).to(DT)
        b_qg = (b_q * (b_up * scale)).to(DT)
        b_kg = (b_k * tl.exp2(b_gn[None, :] - b_g)).to(DT)
        b_dSb = b_dS.to(DT)
        b_dvn = tl.dot(b_do, b_Aq)
        b_dvn = tl.dot(b_dSb, tl.trans(b_kg), b_dvn)
        b_dvb = b_dvn.to(DT)
        b_y = tl.dot(b_dvb, b_A, b_dvn - b_dvb.to(tl.float32))                     # the unit diagonal meets an unrounded dvn
        b_dS = tl.dot(b_do, b_qg, b_dS * tl.exp2(b_gn)[None, :])
        b_dS = tl.dot((b_y * -b_beta[None, :]).to(DT), b_kb, b_dS)
        _put_state(dh, ((i_c + i_t) * HV + i_hv) * K, i_v, b_dSb, V, K, BV, STATE_TMA)
        _put_columns(dv, row, i_hv * V + i_v, n_t, b_dvb, HV * V, BV, TMA, FULL)
    return b_dS


@triton.jit(do_not_specialize=["T", "N"])
def bwd_scan_kernel(
    q, k, v, gk, Aqk, Akk, do, h, v_new, dh, dv,             # descriptors: all if TMA, h and dh if STATE_TMA
    g_last, beta, h0, dht, dh0, cu_seqlens, chunk_offsets,   # pointers; g_last is gk again
    scale, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DT: tl.constexpr,
    HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr, IS_VARLEN: tl.constexpr, TMA: tl.constexpr, STATE_TMA: tl.constexpr,
    FULL: tl.constexpr, FWD_STAGES: tl.constexpr, BWD_STAGES: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    i_v, i_hv = tl.program_id(0) % NV * BV, (tl.program_id(0) // NV % HV).to(tl.int64)
    i_h = i_hv // (HV // H)
    i_n = tl.program_id(0) // (NV * HV)
    backwards = i_n < N                                      # the longer programs first
    i_n = (i_n % N).to(tl.int64)
    if IS_VARLEN:
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        i_c, n_tok = tl.load(chunk_offsets + i_n).to(tl.int64), (eos - bos).to(tl.int32)
    else:
        bos, n_tok = i_n * T, T
        i_c = i_n * tl.cdiv(T, 64)
    o_state = (i_n * HV + i_hv) * K * V + i_v + tl.arange(0, K)[None, :] * V + tl.arange(0, BV)[:, None]
    b_S = tl.zeros([BV, K], tl.float32)
    if backwards:
        if HAS_DHT:
            b_S += tl.load(dht + o_state)
        b_S = _reverse(
            q, k, gk, g_last, beta, Aqk, Akk, do, dh, dv, b_S, scale, bos, n_tok, i_c, i_h, i_hv, i_v,
            H, HV, K, V, BV, DT, TMA, STATE_TMA, FULL, BWD_STAGES,
        )
        if HAS_H0:
            tl.store(dh0 + o_state, b_S)
    else:
        if HAS_H0:
            b_S += tl.load(h0 + o_state)
        _rescan(
            k, v, gk, g_last, beta, Akk, h, v_new, b_S, bos, n_tok, i_c, i_h, i_hv, i_v,
            H, HV, K, V, BV, DT, TMA, STATE_TMA, FULL, FWD_STAGES,
        )


@triton.jit(do_not_specialize=["T"])
def dAqk_kernel(
    do, v_new, dAqk, cu_seqlens, chunk_indices, scale, T,
    HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, IS_VARLEN: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):
    i_c, i_hv = (tl.program_id(0) // HV).to(tl.int64), (tl.program_id(0) % HV).to(tl.int64)
    if IS_VARLEN:
        i_n, i_t = tl.load(chunk_indices + i_c * 2).to(tl.int64), tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        row, n_t = bos + i_t * 64, tl.minimum(eos - bos - i_t * 64, 64).to(tl.int32)
    else:
        NT = tl.cdiv(T, 64)
        row, n_t = i_c // NT * T + i_c % NT * 64, tl.minimum(T - (i_c % NT) * 64, 64).to(tl.int32)
    o_t = tl.arange(0, 64)
    b_a = tl.zeros([64, 64], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_do = _rows(do, row, i_hv * V + i_v, n_t, HV * V, BV, False, FULL)
        b_vn = _rows(v_new, row, i_hv * V + i_v, n_t, HV * V, BV, False, FULL)
        b_a = tl.dot(b_do, tl.trans(b_vn), b_a)
    b_a = tl.where(o_t[:, None] >= o_t[None, :], b_a * scale, 0.0)
    p_a = dAqk + (row * HV + i_hv) * 64 + o_t[:, None] * (HV * 64) + o_t[None, :]
    tl.store(p_a, b_a, mask=(o_t < n_t)[:, None])


# ------------------------------------------------------------------------------------------------------- host code
def supports(p):
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 64:
        return False, f"needs V a multiple of 64, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    return True, ""


def _token(like, p, cu_seqlens, columns, dtype):
    x = torch.empty(p.B, p.T, p.HV, columns, dtype=dtype, device=like.device)
    if p.varlen:                         # tokens after the last sequence belong to none
        x[:, cu_seqlens[-1]:] = 0
    return x


def _full(p):
    return not p.varlen and p.T % CHUNK == 0


def _tiles(x, columns, rows=CHUNK):
    """A descriptor of [rows, columns] tiles of x, seen as a matrix of its tokens (or of state rows)."""
    return TensorDescriptor.from_tensor(x, [rows, columns])


def dAqk(*, do, v_new, p, cu_seqlens, chunk_indices):
    """scale tril(do v_new^T) per chunk: [B,T,HV,64] fp32, zeros above the diagonal."""
    out = _token(do, p, cu_seqlens, CHUNK, torch.float32)
    dAqk_kernel[(p.NT * p.HV,)](
        do, v_new, out, cu_seqlens, chunk_indices, p.scale, p.T, HV=p.HV, V=p.V, BV=A_BV, IS_VARLEN=p.varlen, FULL=_full(p),
        STAGES=A_STAGES, num_warps=A_WARPS, num_stages=A_STAGES,
    )
    return out


def run(*, q, k, v, gk, beta, Akk, Aqk, h0, dht, do, p, cu_seqlens, chunk_indices, chunk_offsets):
    """Tensors as in the chain's contract.

    Returns h, dh [B,NT,HV,K,V] and v_new, dv [B,T,HV,V] in the problem's dtype, dAqk [B,T,HV,64] fp32, and dh0 [N,HV,K,V] fp32
    (None without h0). dv is the gradient of v_new; fla's next stage applies Akk and beta to it.
    """
    h, dh = (torch.empty(p.B, p.chunks_per_row, p.HV, p.K, p.V, dtype=p.dtype, device=q.device) for _ in range(2))
    v_new, dv = (_token(q, p, cu_seqlens, p.V, p.dtype) for _ in range(2))
    dh0 = None if h0 is None else torch.empty_like(h0)
    bv = min(BV, 64 if p.V % BV else BV)
    full = _full(p)
    narrow = max(p.B * p.T, p.NT * p.HV * p.K) < 2**31      # a descriptor's coordinates are 32-bit
    tma, state_tma = TMA and full and narrow, STATE_TMA and narrow
    tokens, states = (q, k, v, gk, Aqk, Akk, do, v_new, dv), (h, dh)
    if tma:
        widths = (p.K, p.K, bv, p.K, CHUNK, CHUNK, bv, bv, bv)
        tokens = [_tiles(x.view(p.B * p.T, -1), width) for x, width in zip(tokens, widths, strict=True)]
    if state_tma:
        states = [_tiles(x.view(-1, p.V), bv, rows=p.K) for x in states]
    xq, xk, xv, xg, xAq, xA, xdo, xvn, xdv = tokens
    xh, xdh = states
    bwd_scan_kernel[(2 * p.N * p.HV * (p.V // bv),)](
        xq, xk, xv, xg, xAq, xA, xdo, xh, xvn, xdh, xdv, gk, beta, h0, dht, dh0, cu_seqlens, chunk_offsets, p.scale, p.T, p.N,
        H=p.H, HV=p.HV, K=p.K, V=p.V, BV=bv, DT=DTYPES[p.dtype], HAS_H0=h0 is not None, HAS_DHT=dht is not None,
        IS_VARLEN=p.varlen, TMA=tma, STATE_TMA=state_tma, FULL=full, FWD_STAGES=FWD_STAGES, BWD_STAGES=BWD_STAGES,
        num_warps=bv // 16, num_stages=2, maxnreg=MAXNREG,
    )
    da = dAqk(do=do, v_new=v_new, p=p, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    return {"h": h, "v_new": v_new, "dAqk": da, "dh": dh, "dh0": dh0, "dv": dv}


SPANS = {"bwd.recompute..bwd.dhu": run}
