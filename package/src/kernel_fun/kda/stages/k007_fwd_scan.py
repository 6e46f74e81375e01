"""Triangular solve, state scan and readout in one kernel; the state never leaves its registers.

Parent: 000-fla (its w/u/kg, state scan and output kernels).
Delta: one program per (V tile, value head, sequence) walks the chunks. It carries S^T [BV, K] in fp32 accumulators, so
    its bf16 copy is the register operand of the next product, and so are r and v_new:
        X = S^T [kb; qg]^T     r = beta (v^T - X_1)     vn = r + r strict(Akk)^T
        o^T = scale X_2 + d vn + vn strict(Aqk)^T       S^T <- 2^G S^T + vn kg
    with kb = k 2^gk, qg = q 2^gk, kg = k 2^(G - gk): every exponent is <= 0, so any gate is exact, and both unit
    diagonals act in fp32 on unrounded values. While the tensor cores work on chunk c, the same warps build these
    operands for c + 1, in two halves of 64 key columns, from tiles whose copies began during c - 1.
Why it should be faster: fla's stages move 5.4 KB a token-head at K = V = 128 and 7.9 KB at V = 256, this 1.8 and 2.3 KB
    (a head's V tiles share the K-side tiles in L2). No w, u, kg, h, v_new in memory. Per chunk and V = 128: 2048 cycles
    of an SM's tensor cores, 1400 instructions a warp = 2800 cycles of its schedulers (IDEA.md).
Constraints: sm_90 (wgmma), K 64 or 128, V a multiple of 64, bf16 or fp16. Any gate, any T, packed sequences, GVA.
"""
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FAMILY = "kda"
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier     # renamed in Triton 3.7


@gluon.jit
def _load_keys(
    raw_q, raw_k, raw_g, q, k, gk, row_h, row_hv, j: gl.constexpr, live,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, C16: gl.constexpr, C32: gl.constexpr,
):
    """Start the copies of 64 columns of q, k, gk; rows from `live` on are zero."""
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C16))
    o_k = gl.arange(0, 64, gl.SliceLayout(0, C16))
    offs = o_t[:, None] * (H * K) + (64 * j + o_k)[None, :]
    m = (o_t < live)[:, None]
    async_copy.async_copy_global_to_shared(raw_k.index(j), k + row_h * K + offs, mask=m)
    async_copy.async_copy_global_to_shared(raw_q.index(j), q + row_h * K + offs, mask=m)
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C32))
    o_k = gl.arange(0, 64, gl.SliceLayout(0, C32))
    offs = o_t[:, None] * (HV * K) + (64 * j + o_k)[None, :]
    async_copy.async_copy_global_to_shared(raw_g.index(j), gk + row_hv * K + offs, mask=(o_t < live)[:, None])


@gluon.jit
def _load_scores(sL, sM, s, Akk, Aqk, row_hv, live, HV: gl.constexpr, C16: gl.constexpr):
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C16))
    o_s = gl.arange(0, 64, gl.SliceLayout(0, C16))
    offs = o_t[:, None] * (HV * 64) + o_s[None, :]
    m = (o_t < live)[:, None]
    async_copy.async_copy_global_to_shared(sL.index(s), Akk + row_hv * 64 + offs, mask=m)
    async_copy.async_copy_global_to_shared(sM.index(s), Aqk + row_hv * 64 + offs, mask=m)


@gluon.jit
def _load_v(sV, v, row_hv, live, HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, CV: gl.constexpr):
    o_t = gl.arange(0, 64, gl.SliceLayout(1, CV))
    o_v = gl.arange(0, BV, gl.SliceLayout(0, CV))
    offs = o_t[:, None] * (HV * V) + o_v[None, :]
    async_copy.async_copy_global_to_shared(sV, v + row_hv * V + offs, mask=(o_t < live)[:, None])


@gluon.jit
def _last(gk, row_hv, n, j: gl.constexpr, K: gl.constexpr, L: gl.constexpr):
    """gk's row at row_hv (the chunk's last), 64 columns; not read when the sequence is empty."""
    o_k = gl.arange(0, 64, L)
    return gl.load(gk + row_hv * K + 64 * j + o_k, mask=o_k < gl.minimum(n, 1) * 64, other=0.0)


@gluon.jit
def _build(kb, qg, kg, s, raw_q, raw_k, raw_g, b_G, j: gl.constexpr, C32: gl.constexpr):
    """64 columns of k 2^gk, q 2^gk and k 2^(G - gk)."""
    dt: gl.constexpr = raw_q.dtype
    b_g = raw_g.index(j).load(C32)
    b_k = raw_k.index(j).load(C32).to(gl.float32)
    b_q = raw_q.index(j).load(C32).to(gl.float32)
    f = gl.exp2(b_g)
    kb.index(2 * j + s).store((b_k * f).to(dt))
    qg.index(2 * j + s).store((b_q * f).to(dt))
    kg.index(2 * j + s).store((b_k * gl.exp2(b_G[None, :] - b_g)).to(dt))


@gluon.jit
def _mask(sL, sM, s, C16: gl.constexpr):
    """Keep what is strictly below the diagonals of Akk and Aqk."""
    o_t = gl.arange(0, 64, gl.SliceLayout(1, C16))
    o_s = gl.arange(0, 64, gl.SliceLayout(0, C16))
    strict = o_t[:, None] > o_s[None, :]
    b_L = sL.index(s).load(C16)
    b_M = sM.index(s).load(C16)
    sL.index(s).store(gl.where(strict, b_L, gl.zeros_like(b_L)))
    sM.index(s).store(gl.where(strict, b_M, gl.zeros_like(b_M)))


@gluon.jit
def _small(gk, beta, Aqk, row_hv, last, live, n, HV: gl.constexpr, K: gl.constexpr, L1: gl.constexpr):
    """One vector [256]: 2^G (K values), from 128 on beta, from 192 on the diagonal of Aqk."""
    e = gl.arange(0, 256, L1)
    t = e & 63
    b_G = gl.load(gk + last * K + e, mask=(e < K) & (n > 0), other=0.0)
    b_b = gl.load(beta + row_hv + t * HV, mask=(e >= 128) & (e < 192) & (t < live), other=0.0).to(gl.float32)
    b_d = gl.load(Aqk + row_hv * 64 + t * (HV * 64 + 1), mask=(e >= 192) & (t < live), other=0.0).to(gl.float32)
    return gl.where(e < 128, gl.exp2(b_G), b_b + b_d)


@gluon.jit(do_not_specialize=["T", "N"])
def fwd_scan_kernel(
    q, k, gk, v, beta, Aqk, Akk, h0, o, ht, cu_seqlens, scale, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    VARLEN: gl.constexpr, NW: gl.constexpr,
):
    dt: gl.constexpr = q.dtype.element_ty
    NK: gl.constexpr = K // 64
    NV: gl.constexpr = V // BV
    C16: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    C32: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [NW, 1], [1, 0])
    CV: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [NW, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, M)
    SW: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    i_v = gl.program_id(0) % NV
    i_hv = gl.program_id(0) // NV % HV
    i_n = (gl.program_id(0) // (NV * HV)).to(gl.int64)
    i_h = i_hv // (HV // H)
    if VARLEN:
        bos = gl.load(cu_seqlens + i_n).to(gl.int64)
        n_t = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - bos).to(gl.int32)
    else:
        bos = i_n * T
        n_t = T
    v += i_v * BV
    o += i_v * BV

    raw_q = gl.allocate_shared_memory(dt, [NK, 64, 64], FLAT)
    raw_k = gl.allocate_shared_memory(dt, [NK, 64, 64], FLAT)
    raw_g = gl.allocate_shared_memory(gl.float32, [NK, 64, 64], FLAT)
    kb = gl.allocate_shared_memory(dt, [2 * NK, 64, 64], SW)
    qg = gl.allocate_shared_memory(dt, [2 * NK, 64, 64], SW)
    kg = gl.allocate_shared_memory(dt, [2 * NK, 64, 64], SW)
    sL = gl.allocate_shared_memory(dt, [2, 64, 64], SW)
    sM = gl.allocate_shared_memory(dt, [2, 64, 64], SW)
    sV = gl.allocate_shared_memory(dt, [64, BV], SW)
    sO = gl.allocate_shared_memory(dt, [64, BV], SW)
    small = gl.allocate_shared_memory(gl.float32, [2, 256], FLAT1)

    o_m = gl.arange(0, BV, gl.SliceLayout(1, M))
    o_c = gl.arange(0, 64, ROW)
    p_h = (i_n * HV + i_hv) * (K * V) + i_v * BV + (o_m[:, None] + (o_c * V)[None, :])
    zero = gl.zeros([BV, 64], gl.float32, M)
    S0 = zero
    S1 = zero
    if h0 is not None:
        S0 = gl.load(h0 + p_h)
        if NK == 2:
            S1 = gl.load(h0 + p_h + 64 * V)

    # ---- prologue: operands of chunk 0, copies for chunk 1
    row = bos * HV + i_hv
    for j in gl.static_range(NK):
        _load_keys(raw_q, raw_k, raw_g, q, k, gk, bos * H + i_h, row, j, n_t, H, HV, K, C16, C32)
    _load_scores(sL, sM, 0, Akk, Aqk, row, n_t, HV, C16)
    async_copy.commit_group()
    last = (bos + gl.minimum(n_t, 64) - 1) * HV + i_hv
    async_copy.wait_group(0)
    for j in gl.static_range(NK):
        _build(kb, qg, kg, 0, raw_q, raw_k, raw_g, _last(gk, last, n_t, j, K, gl.SliceLayout(0, C32)), j, C32)
    _mask(sL, sM, 0, C16)
    small.index(0).store(_small(gk, beta, Aqk, row, last, n_t, n_t, HV, K, L1))
    fence_async_shared()
    _barrier()
    _load_keys(raw_q, raw_k, raw_g, q, k, gk, (bos + 64) * H + i_h, row + 64 * HV, 0, n_t - 64, H, HV, K, C16, C32)
    _load_v(sV, v, row, n_t, HV, V, BV, CV)
    async_copy.commit_group()
    if NK == 2:
        _load_keys(raw_q, raw_k, raw_g, q, k, gk, (bos + 64) * H + i_h, row + 64 * HV, 1, n_t - 64, H, HV, K, C16, C32)
    _load_scores(sL, sM, 1, Akk, Aqk, row + 64 * HV, n_t - 64, HV, C16)
    async_copy.commit_group()

    o_t = gl.arange(0, 64, gl.SliceLayout(1, CV))
    o_v = gl.arange(0, BV, gl.SliceLayout(0, CV))
    p_o = o_t[:, None] * (HV * V) + o_v[None, :]
    s = 0
    for i_t in range(0, n_t, 64):
        # ---- rows of the next chunk
        live = n_t - i_t - 64                                  # how many are left
        row = (bos + i_t) * HV + i_hv
        row1 = row + 64 * HV
        row2 = row + 128 * HV
        row2h = (bos + i_t + 128) * H + i_h
        last = (bos + gl.minimum(i_t + 128, n_t) - 1) * HV + i_hv
        b_small = _small(gk, beta, Aqk, row1, last, live, n_t, HV, K, L1)
        b_G = _last(gk, last, n_t, 0, K, gl.SliceLayout(0, C32))

        # ---- X = S^T [kb; qg]^T; meanwhile half of the next operands. S is scaled before: ptxas waits for every
        # product in flight before it lets an accumulator of the last iteration be touched
        h_0 = gl.convert_layout(S0.to(dt), A)
        S0 = S0 * small.index(s).slice(0, 64).load(ROW)[None, :]
        if NK == 2:
            h_1 = gl.convert_layout(S1.to(dt), A)
            S1 = S1 * small.index(s).slice(64, 64).load(ROW)[None, :]
        x = warpgroup_mma(h_0, kb.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if NK == 2:
            x = warpgroup_mma(h_1, kb.index(2 + s).permute((1, 0)), x, is_async=True)
        async_copy.wait_group(1)
        _build(kb, qg, kg, 1 - s, raw_q, raw_k, raw_g, b_G, 0, C32)
        b_v = sV.permute((1, 0)).load(M).to(gl.float32)
        b_beta = small.index(s).slice(128, 64).load(ROW)[None, :]
        x = warpgroup_mma_wait(0, deps=[x])

        # ---- vn = r + r (Akk - I)^T
        r = b_beta * (b_v - x)
        vn = warpgroup_mma(gl.convert_layout(r.to(dt), A), sL.index(s).permute((1, 0)), r, is_async=True)
        y = warpgroup_mma(h_0, qg.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if NK == 2:
            y = warpgroup_mma(h_1, qg.index(2 + s).permute((1, 0)), y, is_async=True)
        _barrier()                                             # everybody has read the raw half and v
        _load_keys(raw_q, raw_k, raw_g, q, k, gk, row2h, row2, 0, live - 64, H, HV, K, C16, C32)
        _load_v(sV, v, row1, live, HV, V, BV, CV)
        async_copy.commit_group()
        if NK == 2:
            b_G = _last(gk, last, n_t, 1, K, gl.SliceLayout(0, C32))
        b_d = small.index(s).slice(192, 64).load(ROW)[None, :]
        vn, y = warpgroup_mma_wait(0, deps=[vn, y])

        # ---- S^T <- 2^G S^T + vn kg, o^T = scale X_2 + d vn + vn strict(Aqk)^T; meanwhile the other half
        b_vn = gl.convert_layout(vn.to(dt), A)
        S0 = warpgroup_mma(b_vn, kg.index(s), S0, is_async=True)
        if NK == 2:
            S1 = warpgroup_mma(b_vn, kg.index(2 + s), S1, is_async=True)
        y = warpgroup_mma(b_vn, sM.index(s).permute((1, 0)), y * scale + b_d * vn, is_async=True)
        async_copy.wait_group(1)
        if NK == 2:
            _build(kb, qg, kg, 1 - s, raw_q, raw_k, raw_g, b_G, 1, C32)
        _mask(sL, sM, 1 - s, C16)
        small.index(1 - s).store(b_small)
        if NK == 2:
            S0, S1, y = warpgroup_mma_wait(0, deps=[S0, S1, y])
        else:
            S0, y = warpgroup_mma_wait(0, deps=[S0, y])
        sO.permute((1, 0)).store(y.to(dt))
        fence_async_shared()
        _barrier()                                             # products done, the next chunk's operands are there
        if NK == 2:
            _load_keys(raw_q, raw_k, raw_g, q, k, gk, row2h, row2, 1, live - 64, H, HV, K, C16, C32)
        _load_scores(sL, sM, s, Akk, Aqk, row2, live - 64, HV, C16)
        async_copy.commit_group()
        gl.store(o + row * V + p_o, sO.load(CV), mask=(o_t < live + 64)[:, None])
        s = 1 - s
    async_copy.wait_group(0)

    if ht is not None:
        gl.store(ht + p_h, S0)
        if NK == 2:
            gl.store(ht + p_h + 64 * V, S1)
    if VARLEN:  # noqa: SIM102  (a compile-time and a run-time condition)
        if i_n == N - 1:                                       # tokens after the last sequence belong to none
            b_o = gl.zeros([64, BV], dt, CV)
            for i_t in range(n_t, (T - bos).to(gl.int32), 64):
                gl.store(o + ((bos + i_t) * HV + i_hv) * V + p_o, b_o, mask=(bos + i_t + o_t < T)[:, None])


# ------------------------------------------------------------------------------------------------------- host code
def supports(p):
    if p.arch[0] != 9:
        return False, f"needs compute capability 9.x, got {p.arch[0]}.{p.arch[1]}"
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.V % 64:
        return False, f"needs V a multiple of 64, got {p.V}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q, k, v, got {p.dtype}"
    return True, ""


def run(*, q, k, v, beta, Akk, gk, h0, Aqk, p, cu_seqlens):
    """Tensors as in the chain's contract. Returns o [B,T,HV,V] (p.dtype) and ht, fp32 [N,HV,K,V] or None."""
    o = torch.empty_like(v)
    ht = v.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32) if p.output_final_state else None
    bv = 64 if p.V % 128 else 128                   # one warpgroup per 64 value columns
    if p.N:
        fwd_scan_kernel[(p.V // bv * p.HV * p.N,)](
            q, k, gk, v, beta, Aqk, Akk, h0, o, ht, cu_seqlens, p.scale, p.T, p.N,
            H=p.H, HV=p.HV, K=p.K, V=p.V, BV=bv, VARLEN=p.varlen, NW=bv // 16, num_warps=bv // 16,
        )
    return {"o": o, "ht": ht}


SPANS = {"fwd.wy..fwd.out": run}

_TYPES = {
    "q": "*bf16", "k": "*bf16", "gk": "*fp32", "v": "*bf16", "beta": "*fp32", "Aqk": "*bf16", "Akk": "*bf16",
    "o": "*bf16", "scale": "fp32", "T": "i32", "N": "i32",
}
_DENSE = {"h0": None, "ht": None, "cu_seqlens": None, "H": 16, "HV": 16, "VARLEN": False}
COMPILE = [
    (fwd_scan_kernel, _TYPES, _DENSE | {"K": K, "V": V, "BV": BV, "NW": BV // 16}, BV // 16, 1)
    for K, V, BV in ((128, 256, 128), (64, 128, 128), (128, 64, 64))
]
