"""fwd.norm .. fwd.intra in one kernel: program = (chunk, value head), raw q, k, g read once.

Parent: 000-fla
Delta: fla runs norm (twice), sigmoid, gate + cumsum, per-token diagonal, off-diagonal + solve as six kernels. Here one
program holds its chunk as tiles [4 groups, 8 rows, 2 halves, BK]; a group's rows lie in one thread's registers.
Every score is a tensor-core product of two factored operands, through a row between target and source:
    32, 16, 8   target rows times 2^(decay since that row), source rows times 2^(decay up to it): both exponents <= 0
    inside 8    the same at 4, 2, 1 ("tree"); or one product anchored mid-group ("two-sided", bf16): a step's decay is
                floored at 2^-32, so the factors stay within 2^+-112 at any gate
The pair r = s of Aqk is a plain dot. Norms scale the finished scores, being row and column factors of the products.
(I + L)^-1 is block doubling A21 = -A22 L21 A11, 10-bit operands (fp16 for unit keys, else tf32), never a power series.
Why it should be faster: 2.1 KB per token and head instead of 4.5, 7 exponentials per element instead of 12 (IDEA.md).
Constraints: K 64 or 128; q, k bf16 or fp16; a step's decay is at least 2^-32 (what a mask of -1000 or -inf becomes).
"""
import torch
import triton
import triton.language as tl

from kernel_fun._common.launch import launch

FAMILY = "kda"
BK, WARPS = 64, 4
REGS = 168  # three programs fit on a multiprocessor; the compiler's own 255 leave room for two
LOG2E = tl.constexpr(1.4426950408889634)
# Triton gives threads to a load's axes in order of contiguity; ties go first axis first until 3.6, last axis first from
# 3.7 on. The groups must get theirs before rows and halves, which then lie in one thread's registers: the speed comes
# from there. Results do not depend on it.
_I = 0 if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7) else 2


@triton.jit
def _steps(x, A, lower_bound, GATE: tl.constexpr, HAS_A: tl.constexpr, FAST: tl.constexpr):
    """Raw gate (bias added) -> log2 of the step decay, floored at -32."""
    if GATE == "log":
        y = x * LOG2E
    elif GATE == "softplus":
        x *= LOG2E
        y = -A * tl.where(x > 20.0, x, _log2(1.0 + tl.exp2(x), FAST))
    else:
        if HAS_A:
            x *= A
        y = (lower_bound * LOG2E) / (1.0 + tl.exp2(x * (-LOG2E)))
    return tl.maximum(y, -32.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pick(x, here, axis: tl.constexpr):
    """The one element along `axis` where `here` holds, bit for bit: costs nothing where the axis lies in registers."""
    bits = tl.where(here, x.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(bits, axis, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _blocks(x, N: tl.constexpr, BK: tl.constexpr, I: tl.constexpr):
    """Tile -> [64/N blocks, N rows, BK]."""
    if I == 0:
        x = tl.permute(x, (2, 0, 1, 3))
    else:
        x = tl.permute(x, (0, 2, 1, 3))
    return tl.reshape(x, [64 // N, N, BK])


@triton.jit
def _halves(x, BK: tl.constexpr, I: tl.constexpr):
    """Tile -> rows 0..31 and rows 32..63, each [32, BK]."""
    if I == 0:
        lo, hi = tl.split(tl.permute(x, (0, 1, 3, 2)))
    else:
        lo, hi = tl.split(tl.permute(x, (2, 1, 3, 0)))
    return tl.reshape(lo, [32, BK]), tl.reshape(hi, [32, BK])


@triton.jit
def _along(n: tl.constexpr, axis: tl.constexpr):
    """0 .. n-1 along one axis of a tile."""
    x = tl.arange(0, n)
    if axis == 0:
        return x[:, None, None, None]
    elif axis == 1:
        return x[None, :, None, None]
    else:
        return x[None, None, :, None]


@triton.jit
def _spread(x):
    """[4, 16, 16] diagonal blocks -> [2, 32, 32], each block repeated across its rows."""
    return tl.reshape(tl.broadcast_to(tl.reshape(x, [2, 32, 1, 16]), [2, 32, 2, 16]), [2, 32, 32])


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _mm(a, b, DTYPE: tl.constexpr):
    if DTYPE.is_fp32():
        return tl.dot(a, b, input_precision="tf32")
    else:
        return tl.dot(a.to(DTYPE), b.to(DTYPE))


@triton.jit(do_not_specialize=["T", "NT"])
def _prep(
    q, k, g, A_log, dt_bias, beta,              # raw inputs
    qn, kn, gk, q_rstd, k_rstd, b_out, Aqk, Akk,  # outputs
    cu_seqlens, chunk_indices,
    scale, lower_bound, beta_scale, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr,
    VARLEN: tl.constexpr, FULL: tl.constexpr, TWO_SIDED: tl.constexpr, BK: tl.constexpr, I: tl.constexpr,
    OP: tl.constexpr, INV: tl.constexpr, FAST: tl.constexpr,
):
    pid = tl.program_id(0)
    i_hv, i_c = pid % HV, pid // HV
    i_h = i_hv // (HV // H)
    if VARLEN:
        i_n = tl.load(chunk_indices + 2 * i_c).to(tl.int64)
        i_t = tl.load(chunk_indices + 2 * i_c + 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        rows = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos - i_t * 64
        t0 = bos + i_t * 64
    else:
        i_t = i_c % NT
        rows = T - i_t * 64
        t0 = (i_c // NT).to(tl.int64) * T + i_t * 64
    rows = tl.minimum(rows, 64).to(tl.int32)
    if FULL:
        rows = 64

    p_q = q + (t0 * H + i_h) * K
    p_k = k + (t0 * H + i_h) * K
    p_g = g + (t0 * HV + i_hv) * K
    o_r = t0 * HV + i_hv
    r = tl.arange(0, 64)

    # ---- the raw rows' own dots: squared norms, the diagonal of Aqk
    rd = tl.arange(0, 16)[None, :, None]
    sd = tl.arange(0, 16)[None, None, :]
    r4 = 16 * tl.arange(0, 4)[:, None, None] + rd
    o4 = r4 * (H * K) + tl.arange(0, K)[None, None, :]
    a_q = tl.load(p_q + o4, mask=r4 < rows, other=0.0)
    a_k = tl.load(p_k + o4, mask=r4 < rows, other=0.0)
    a_kt = tl.permute(a_k, (0, 2, 1))
    eye = rd == sd
    qk = tl.sum(tl.where(eye, tl.dot(a_q, a_kt), 0.0), 2)
    if L2NORM:
        rq = tl.rsqrt(tl.sum(tl.where(eye, tl.dot(a_q, tl.permute(a_q, (0, 2, 1))), 0.0), 2) + 1e-6)
        rk = tl.rsqrt(tl.sum(tl.where(eye, tl.dot(a_k, a_kt), 0.0), 2) + 1e-6)
        if i_hv % (HV // H) == 0:  # the first value head of a group writes for all
            y = (a_q.to(tl.float32) * rq[:, :, None]).to(qn.dtype.element_ty)
            tl.store(qn + (t0 * H + i_h) * K + o4, y, mask=r4 < rows)
            y = (a_k.to(tl.float32) * rk[:, :, None]).to(kn.dtype.element_ty)
            tl.store(kn + (t0 * H + i_h) * K + o4, y, mask=r4 < rows)
            tl.store(q_rstd + (t0 + r) * H + i_h, tl.reshape(rq, [64]), mask=r < rows)
            tl.store(k_rstd + (t0 + r) * H + i_h, tl.reshape(rk, [64]), mask=r < rows)
    else:
        rq = tl.full([4, 16], 1.0, tl.float32)
        rk = rq

    # ---- tiles [4 groups, 8 rows, 2 halves, BK], groups on axis I
    h = _along(2, 2 - I)
    i = _along(4, I)
    j = _along(8, 1)
    d = tl.max_contiguous(tl.arange(0, BK), 2)[None, None, None, :]
    m = 32 * h + 8 * i + j < rows
    o_qk = (8 * H * K) * i + d + (32 * H * K) * h + (H * K) * j
    o_g = (8 * HV * K) * i + d + (32 * HV * K) * h + (HV * K) * j
    up = i & 1
    up2 = i & 2
    A = 1.0
    if HAS_A:
        A = tl.exp2(tl.load(A_log + i_hv).to(tl.float32) * LOG2E)

    qk32 = tl.zeros([64, 32], tl.float32)
    q16 = tl.zeros([2, 32, 32], tl.float32)
    k16 = tl.zeros([2, 32, 32], tl.float32)
    q8 = tl.zeros([4, 16, 16], tl.float32)
    k8 = tl.zeros([4, 16, 16], tl.float32)
    for k0 in tl.range(0, K, BK):
        # decays: c inside the group, X before it within its 16 or 32 rows
        past: tl.constexpr = 0.0 if GATE == "log" else float("-inf")  # raw values that mean no decay
        x = tl.load(p_g + k0 + o_g, mask=m, other=past).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(dt_bias + i_hv * K + k0 + d).to(tl.float32)
        c = tl.cumsum(_steps(x, A, lower_bound, GATE, HAS_A, FAST), 1)
        tot = _pick(c, j == 7, 1)
        pair = tl.sum(tl.reshape(tot, [2, 2, 2, BK]), 1 + I // 2, keep_dims=True)
        pair = tl.reshape(tl.broadcast_to(pair, [2, 2, 2, BK]), [4 - I, 1, 2 + I, BK])
        quad = tl.sum(tot, I, keep_dims=True)
        X16 = tl.where(up != 0, pair - tot, 0.0)
        X32 = tl.where(up2 != 0, quad - pair, 0.0) + X16
        X64 = X32 + tl.where(h != 0, tl.sum(quad, 2 - I, keep_dims=True) - quad, 0.0)
        tl.store(gk + o_r * K + k0 + o_g, c + X64, mask=m)

        b_q = tl.load(p_q + k0 + o_qk, mask=m, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + k0 + o_qk, mask=m, other=0.0).to(tl.float32)

        # scores between the halves, between 16-row blocks of a half, between 8-row groups of a block
        f = tl.exp2(tl.where(h != 0, c + X32, quad - X32 - c))
        k_lo, k_hi = _halves((b_k * f).to(OP), BK, I)
        _, q_hi = _halves((b_q * f).to(OP), BK, I)
        qk_hi = tl.reshape(tl.permute(tl.join(q_hi, k_hi), (2, 0, 1)), [64, BK])
        qk32 = tl.dot(qk_hi, k_lo.T, qk32)
        f = tl.exp2(tl.where(up2 != 0, 1.0, -1.0) * c + tl.where(up2 != 0, X16, pair - X16))
        kf = _blocks((b_k * f).to(OP), 32, BK, I)
        kt = tl.permute(kf, (0, 2, 1))
        q16 = tl.dot(_blocks((b_q * f).to(OP), 32, BK, I), kt, q16)
        k16 = tl.dot(kf, kt, k16)
        f = tl.exp2(tl.where(up != 0, 1.0, -1.0) * c + tl.where(up != 0, 0.0, tot))
        kf = _blocks((b_k * f).to(OP), 16, BK, I)
        kt = tl.permute(kf, (0, 2, 1))
        low = (rd >> 3) > (sd >> 3)
        q8 = tl.where(low, tl.dot(_blocks((b_q * f).to(OP), 16, BK, I), kt, q8), q8)
        k8 = tl.where(low, tl.dot(kf, kt, k8), k8)

        # scores inside an 8-row group
        if TWO_SIDED:
            e = c - 0.5 * (_pick(c, j == 3, 1) + _pick(c, j == 4, 1))
            f = tl.exp2(e)
            kt = tl.permute(_blocks((b_k * tl.exp2(-e)).to(OP), 16, BK, I), (0, 2, 1))
            low = ((rd >> 3) == (sd >> 3)) & (rd > sd)
            q8 = tl.where(low, tl.dot(_blocks((b_q * f).to(OP), 16, BK, I), kt, q8), q8)
            k8 = tl.where(low, tl.dot(_blocks((b_k * f).to(OP), 16, BK, I), kt, k8), k8)
        else:
            for lv in tl.static_range(3):
                cl = tl.reshape(c, [4 - I, 4 >> lv, 2 << lv, 2 + I, BK])
                at = tl.arange(0, 2 << lv)[None, None, :, None, None]
                e = cl - _pick(cl, at == (1 << lv) - 1, 2)
                f = tl.exp2(tl.reshape(tl.where(at >= (1 << lv), e, -e), [4 - I, 8, 2 + I, BK]))
                kf = _blocks((b_k * f).to(OP), 16, BK, I)
                kt = tl.permute(kf, (0, 2, 1))
                low = ((rd >> lv) ^ (sd >> lv)) == 1
                q8 = tl.where(low, tl.dot(_blocks((b_q * f).to(OP), 16, BK, I), kt, q8), q8)
                k8 = tl.where(low, tl.dot(kf, kt, k8), k8)

    # ---- L = diag(beta) strict(Mkk), inverse of I + L inside 16-row blocks
    o_b = o_r + HV * r
    b = tl.load(beta + o_b, mask=r < rows, other=0.0).to(tl.float32)
    if SIGMOID:
        b = beta_scale / (1.0 + tl.exp2(b * (-LOG2E)))
        tl.store(b_out + o_b, b, mask=r < rows)
        b = tl.where(r < rows, b, 0.0)
    w = tl.reshape(b, [4, 16]) * rk
    L = tl.where(rd > sd, k8 * w[:, :, None] * rk[:, None, :], 0.0)
    Ad = tl.where(eye, 1.0, 0.0) - tl.where(((rd >> 1) == (sd >> 1)), L, 0.0)
    for lv in tl.static_range(1, 4):
        Ad -= _mm(_mm(Ad, tl.where(((rd >> lv) ^ (sd >> lv)) == 1, L, 0.0), INV), Ad, INV)

    # ---- inside halves
    r3 = tl.arange(0, 32)[None, :, None]
    s3 = tl.arange(0, 32)[None, None, :]
    h3 = 32 * tl.arange(0, 2)[:, None, None]
    same = (r3 >> 4) == (s3 >> 4)
    low = (r3 >> 4) > (s3 >> 4)
    w = tl.reshape(w, [2, 32])
    rk = tl.reshape(rk, [2, 32])
    rq = tl.reshape(rq, [2, 32]) * scale
    A3 = tl.where(same, _spread(Ad), 0.0)
    L = tl.where(low, k16 * w[:, :, None] * rk[:, None, :], 0.0)
    A3 -= _mm(_mm(A3, L, INV), A3, INV)
    q8 = tl.where(eye, qk[:, :, None], q8)
    M3 = tl.where(same, _spread(q8), q16)
    M3 = tl.where(r3 >= s3, M3 * rq[:, :, None] * rk[:, None, :], 0.0)
    o3 = o_r * 64 + (h3 + r3) * (HV * 64) + h3 + s3
    tl.store(Aqk + o3, M3.to(Aqk.dtype.element_ty), mask=h3 + r3 < rows)
    tl.store(Akk + o3, A3.to(Akk.dtype.element_ty), mask=h3 + r3 < rows)

    # ---- between them
    r2 = tl.arange(0, 32)[:, None]
    s2 = tl.arange(0, 32)[None, :]
    q32, k32 = tl.split(tl.permute(tl.reshape(qk32, [2, 32, 32]), (1, 2, 0)))
    A11, A22 = tl.split(tl.permute(A3, (1, 2, 0)))
    _, w_hi = tl.split(tl.permute(w, (1, 0)))
    _, rq_hi = tl.split(tl.permute(rq, (1, 0)))
    rk_lo, _ = tl.split(tl.permute(rk, (1, 0)))
    A21 = -_mm(_mm(A22, k32 * w_hi[:, None] * rk_lo[None, :], INV), A11, INV)
    M21 = q32 * rq_hi[:, None] * rk_lo[None, :]
    o2 = o_r * 64 + r2 * (HV * 64) + s2
    tl.store(Aqk + o2 + HV * 2048, M21.to(Aqk.dtype.element_ty), mask=r2 + 32 < rows)
    tl.store(Akk + o2 + HV * 2048, A21.to(Akk.dtype.element_ty), mask=r2 + 32 < rows)
    zero = tl.zeros([32, 32], Akk.dtype.element_ty)
    tl.store(Aqk + o2 + 32, zero, mask=r2 < rows)
    tl.store(Akk + o2 + 32, zero, mask=r2 < rows)


def supports(p) -> tuple[bool, str]:
    """Every gate, length, packing and head grouping; the widths and types this file was written for."""
    if p.K not in (64, 128):
        return False, f"needs K=64 or 128, got {p.K}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return False, f"needs bf16 or fp16 q and k, got {p.dtype}"
    if p.arch[0] < 9 and p.arch != (0, 0):
        return False, f"needs compute capability 9.0 or later, got {p.arch[0]}.{p.arch[1]}"
    return True, ""


def run(*, q_raw, k_raw, beta_raw, g_raw, A_log, dt_bias, p, cu_seqlens, chunk_indices):
    """The whole span in one launch.

    Writes q, k (p.dtype; the raw ones when nothing is normalised), q_rstd, k_rstd [B,T,H] fp32 or None, beta [B,T,HV]
    (fp32; the raw one when there is no sigmoid), gk [B,T,HV,K] fp32, Aqk and Akk [B,T,HV,64] p.dtype, upper parts zero.
    """
    new, f32 = q_raw.new_empty, {"dtype": torch.float32}
    q, k, q_rstd, k_rstd, beta = q_raw, k_raw, None, None, beta_raw
    if p.l2norm:
        q, k = new(q_raw.shape), new(k_raw.shape)
        q_rstd, k_rstd = new(q_raw.shape[:3], **f32), new(k_raw.shape[:3], **f32)
    if p.beta_sigmoid:
        beta = new(beta_raw.shape, **f32)
    gk = new(g_raw.shape, **f32)
    Aqk, Akk = new((p.B, p.T, p.HV, 64)), new((p.B, p.T, p.HV, 64))
    half = p.dtype == torch.float16
    launch(
        _prep, (p.NT * p.HV,),
        q_raw, k_raw, g_raw, A_log, dt_bias, beta_raw,
        q, k, gk, q_rstd, k_rstd, beta, Aqk, Akk,
        cu_seqlens, chunk_indices,
        p.scale, p.lower_bound or 0.0, p.beta_scale, p.T, p.chunks_per_row,
        H=p.H, HV=p.HV, K=p.K,
        GATE=p.gate, HAS_A=A_log is not None, HAS_BIAS=dt_bias is not None, L2NORM=p.l2norm, SIGMOID=p.beta_sigmoid,
        VARLEN=p.varlen, FULL=not p.varlen and p.T % 64 == 0, TWO_SIDED=not half, BK=BK, I=_I,
        OP=tl.float16 if half else tl.bfloat16, INV=tl.float16 if p.l2norm else tl.float32, FAST=p.arch != (0, 0),
        num_warps=WARPS, num_stages=1, maxnreg=REGS,
    )
    return {"q": q, "k": k, "q_rstd": q_rstd, "k_rstd": k_rstd, "beta": beta, "gk": gk, "Aqk": Aqk, "Akk": Akk}


SPANS = {"fwd.norm..fwd.intra": run}

_TYPES = dict.fromkeys(("q", "k", "g", "beta", "qn", "kn", "Aqk", "Akk"), "*bf16")
_TYPES |= dict.fromkeys(("A_log", "dt_bias", "gk", "q_rstd", "k_rstd", "b_out"), "*fp32")
_TYPES |= {"cu_seqlens": "*i64", "chunk_indices": "*i64", "T": "i32", "NT": "i32"}
_TYPES |= dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
COMPILE = [
    (
        _prep, _TYPES,
        {"H": 16, "HV": 16, "K": K, "GATE": gate, "HAS_A": True, "HAS_BIAS": True, "L2NORM": True, "SIGMOID": True,
         "VARLEN": False, "FULL": True, "TWO_SIDED": True, "BK": BK, "I": _I, "OP": tl.bfloat16, "INV": tl.float16,
         "FAST": True},
        WARPS, 1, {"maxnreg": REGS},
    )
    for K, gate in ((128, "softplus"), (64, "log"))
]
