"""Every stage of the KDA chain in plain torch: the definition that kernels are checked against, and the path CPU
tensors take.

Each function stands for one stage, under the chain's tensor names. It computes in float64 when the problem's dtype is
float64 and in float32 otherwise, and returns each tensor in its contract's dtype (so a bf16 problem is rounded where
the kernels round). Any gate is exact: every exponent is a difference gk[r] - gk[s] with r >= s, one column s at a
time, and nothing is factored.

Layout inside: `pack` gathers the rows of every chunk to [NT, HV, 64, D], zero beyond a sequence's end, so dense,
ragged and packed calls are one path; `unpack` scatters back to [B, T, HV, D].
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from .._common.problem import CHUNK, KdaProblem

LOG2_E = 1.4426950408889634
MIN_STEP = -1000.0  # log2 units: a step decay below 2^-1000 is 0 in every precision; keeps -inf out of differences


def spans(p: KdaProblem) -> dict:
    """Span -> function, one per stage."""
    return dict(STAGES, **({"bwd.regate": keep_gk, "bwd.gate": no_gate_bwd} if p.gate == "log" else {}))


# ------------------------------------------------------------------------------------------------------------- layout
def acc_dtype(p: KdaProblem) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def chunk_table(p: KdaProblem, cu_seqlens) -> tuple[torch.Tensor, tuple[int, ...]]:
    """([NT, 64] flat token index of each chunk row, -1 beyond the sequence; first chunk of each sequence, plus NT)."""
    bounds = tuple(cu_seqlens.tolist()) if p.varlen else tuple(b * p.T for b in range(p.B + 1))
    starts, ends, first = _chunks(bounds)
    starts, ends = (torch.tensor(x, dtype=torch.int64, device="cpu")[:, None] for x in (starts, ends))
    rows = starts + torch.arange(CHUNK, device="cpu")
    return torch.where(rows < ends, rows, -1), first


@functools.lru_cache(maxsize=64)
def _chunks(bounds: tuple[int, ...]) -> tuple[list[int], list[int], tuple[int, ...]]:
    """(first token of each chunk, end of its sequence, first chunk of each sequence plus the number of chunks).

    Every stage asks for it, so it is kept: as numbers, because a tensor would carry its call's mode (inference, fake)
    into the next.
    """
    starts, ends, first = [], [], [0]
    for start, end in itertools.pairwise(bounds):
        starts += range(start, end, CHUNK)
        ends += [end] * (len(starts) - len(ends))
        first.append(len(starts))
    return starts, ends, tuple(first)


def pack(x: torch.Tensor, p: KdaProblem, cu_seqlens) -> torch.Tensor:
    """[B, T, H or HV, D] -> [NT, HV, 64, D] in the accumulation dtype; q/k heads are repeated for their value heads."""
    rows = chunk_table(p, cu_seqlens)[0].to(x.device)
    flat = x.reshape(p.B * p.T, *x.shape[2:]).to(acc_dtype(p))
    x = flat[rows.clamp_min(0)] * (rows >= 0)[..., None, None].to(flat.dtype)
    return x.transpose(1, 2).repeat_interleave(p.HV // x.shape[2], 1)


def unpack(x: torch.Tensor, p: KdaProblem, cu_seqlens) -> torch.Tensor:
    """[NT, HV, 64, D] -> [B, T, HV, D]; tokens outside every sequence are 0."""
    rows = chunk_table(p, cu_seqlens)[0].to(x.device)
    out = x.new_zeros(p.B, p.T, x.shape[1], x.shape[-1])  # no view of anything: a caller may change o in place
    out.view(p.B * p.T, *out.shape[2:])[rows[rows >= 0]] = x.transpose(1, 2)[rows >= 0]
    return out


def _scan(p, cu_seqlens, reverse):
    """Per serial step: (sequences that still have a chunk, the chunk of each)."""
    first = chunk_table(p, cu_seqlens)[1]
    counts = [b - a for a, b in zip(first, first[1:], strict=False)]
    for c in range(max(counts, default=0)):
        seqs = [n for n, count in enumerate(counts) if count > c]
        yield seqs, [first[n + 1] - 1 - c if reverse else first[n] + c for n in seqs]


def _states(x, p):
    """[NT, HV, K, V] -> the contract's h: [B, chunks per row, HV, K, V] in the problem's dtype."""
    return x.view(p.B, p.chunks_per_row, *x.shape[1:]).to(p.dtype)


def _flat_states(h, p):
    return h.reshape(p.NT, *h.shape[2:]).to(acc_dtype(p))


def _beta(beta, p, cu_seqlens):
    return pack(beta[..., None], p, cu_seqlens)


def _last(gk):
    return gk[..., -1:, :]


# ------------------------------------------------------------------------------------------------------------ forward
def norm(*, q_raw, k_raw, p):
    if not p.l2norm:
        return {"q": q_raw, "k": k_raw, "q_rstd": None, "k_rstd": None}
    q, k = q_raw.to(acc_dtype(p)), k_raw.to(acc_dtype(p))
    q_rstd, k_rstd = (torch.rsqrt((x * x).sum(-1) + 1e-6) for x in (q, k))
    return {
        "q": (q * q_rstd[..., None]).to(p.dtype),
        "k": (k * k_rstd[..., None]).to(p.dtype),
        "q_rstd": q_rstd,
        "k_rstd": k_rstd,
    }


def beta_sigmoid(*, beta_raw, p):
    return {"beta": p.beta_scale * torch.sigmoid(beta_raw.to(acc_dtype(p))) if p.beta_sigmoid else beta_raw}


def log_gate(g_raw, A_log, dt_bias, p):
    """The natural-log decay of each step, [B, T, HV, K], in the accumulation dtype; always <= 0."""
    x = g_raw.to(acc_dtype(p))
    if p.gate == "log":
        return x
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).view(p.HV, p.K)
    rate = 1.0 if A_log is None else A_log.to(x.dtype).view(p.HV, 1).exp()
    return -rate * F.softplus(x) if p.gate == "softplus" else p.lower_bound * torch.sigmoid(rate * x)


def gate(*, g_raw, A_log, dt_bias, p, cu_seqlens):
    step = (log_gate(g_raw, A_log, dt_bias, p) * LOG2_E).clamp_min(MIN_STEP)
    return {"gk": unpack(pack(step, p, cu_seqlens).cumsum(-2), p, cu_seqlens)}


def keep_gk(*, gk):
    return {"gk": gk}


def _packed_gk(gk, p, cu_seqlens):
    """gk per chunk, with the last real row's value carried through the padding: a padded step does not decay."""
    return pack(gk, p, cu_seqlens).cummin(-2).values


def scores(q, k, gk):
    """Mqk[r,s] = sum_d q_r k_s 2^(gk_r - gk_s) for r >= s, and Mkk with k for q and r > s; both [NT, HV, 64, 64]."""
    Mqk, Mkk = q.new_zeros(*q.shape[:-1], CHUNK), q.new_zeros(*q.shape[:-1], CHUNK)
    for s in range(CHUNK):
        col = k[..., s : s + 1, :] * torch.exp2(gk[..., s:, :] - gk[..., s : s + 1, :])
        Mqk[..., s:, s] = (q[..., s:, :] * col).sum(-1)
        Mkk[..., s + 1 :, s] = (k[..., s + 1 :, :] * col[..., 1:, :]).sum(-1)
    return Mqk, Mkk


def intra(*, q, k, gk, beta, p, cu_seqlens):
    gk, b = _packed_gk(gk, p, cu_seqlens), _beta(beta, p, cu_seqlens)
    Mqk, Mkk = scores(pack(q, p, cu_seqlens), pack(k, p, cu_seqlens), gk)
    eye = torch.eye(CHUNK, dtype=Mkk.dtype, device=Mkk.device)
    Akk = torch.linalg.solve_triangular(eye + b * Mkk, eye.expand_as(Mkk), upper=False, unitriangular=True)
    return {"Aqk": unpack(p.scale * Mqk, p, cu_seqlens).to(p.dtype), "Akk": unpack(Akk, p, cu_seqlens).to(p.dtype)}


def wy(*, k, v, beta, Akk, gk, p, cu_seqlens):
    k, v, A, gk = (pack(x, p, cu_seqlens) for x in (k, v, Akk, gk))
    gk, b = gk.cummin(-2).values, _beta(beta, p, cu_seqlens)
    out = {"w": A @ (b * torch.exp2(gk) * k), "u": A @ (b * v), "kg": k * torch.exp2(_last(gk) - gk)}
    return {name: unpack(x, p, cu_seqlens).to(p.dtype) for name, x in out.items()}


def scan(*, kg, w, u, gk, h0, p, cu_seqlens):
    kg, w, u = (pack(x, p, cu_seqlens) for x in (kg, w, u))
    decay = torch.exp2(_last(_packed_gk(gk, p, cu_seqlens))).mT
    S = kg.new_zeros(p.N, p.HV, p.K, p.V) if h0 is None else h0.to(kg.dtype, copy=True)
    h, v_new = kg.new_empty(p.NT, p.HV, p.K, p.V), torch.empty_like(u)
    for seqs, chunks in _scan(p, cu_seqlens, reverse=False):
        h[chunks] = S[seqs]
        v_new[chunks] = u[chunks] - w[chunks] @ S[seqs]
        S[seqs] = decay[chunks] * S[seqs] + kg[chunks].mT @ v_new[chunks]
    v_new = unpack(v_new, p, cu_seqlens).to(p.dtype)
    return {"h": _states(h, p), "v_new": v_new, "ht": S if p.output_final_state else None}


def out(*, q, v_new, gk, Aqk, h, p, cu_seqlens):
    q, vn, A = (pack(x, p, cu_seqlens) for x in (q, v_new, Aqk))
    qg = q * torch.exp2(_packed_gk(gk, p, cu_seqlens))
    return {"o": unpack(p.scale * qg @ _flat_states(h, p) + A.tril() @ vn, p, cu_seqlens).to(p.dtype)}


# ----------------------------------------------------------------------------------------------------------- backward
def recompute(*, q, k, v, beta, Akk, gk, p, cu_seqlens):
    qg = pack(q, p, cu_seqlens) * torch.exp2(_packed_gk(gk, p, cu_seqlens))
    out = wy(k=k, v=v, beta=beta, Akk=Akk, gk=gk, p=p, cu_seqlens=cu_seqlens)
    return {**out, "qg": unpack(qg, p, cu_seqlens).to(p.dtype)}


def rescan(*, kg, w, u, gk, h0, p, cu_seqlens):
    states = scan(kg=kg, w=w, u=u, gk=gk, h0=h0, p=p, cu_seqlens=cu_seqlens)
    return {"h": states["h"], "v_new": states["v_new"]}


def dAv(*, v_new, do, Aqk, p, cu_seqlens):
    vn, do, A = (pack(x, p, cu_seqlens) for x in (v_new, do, Aqk))
    return {
        "dAqk": unpack((p.scale * do @ vn.mT).tril(), p, cu_seqlens),
        "dv": unpack(A.tril().mT @ do, p, cu_seqlens).to(p.dtype),
    }


def dhu(*, qg, kg, w, gk, h0, dht, do, dv, p, cu_seqlens):
    qg, kg, w, do, dv = (pack(x, p, cu_seqlens) for x in (qg, kg, w, do, dv))
    decay = torch.exp2(_last(_packed_gk(gk, p, cu_seqlens))).mT
    dS = kg.new_zeros(p.N, p.HV, p.K, p.V) if dht is None else dht.to(kg.dtype, copy=True)
    dh, dv2 = kg.new_empty(p.NT, p.HV, p.K, p.V), torch.empty_like(dv)
    for seqs, chunks in _scan(p, cu_seqlens, reverse=True):
        dh[chunks] = dS[seqs]
        dv2[chunks] = dv[chunks] + kg[chunks] @ dS[seqs]
        dS[seqs] = decay[chunks] * dS[seqs] + p.scale * qg[chunks].mT @ do[chunks] - w[chunks].mT @ dv2[chunks]
    dv2 = unpack(dv2, p, cu_seqlens).to(p.dtype)
    return {"dh": _states(dh, p), "dh0": None if h0 is None else dS, "dv": dv2}


def bwd_wy(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens):
    q, k, v, vn, A, do, dv = (pack(x, p, cu_seqlens) for x in (q, k, v, v_new, Akk, do, dv))
    gk, b = _packed_gk(gk, p, cu_seqlens), _beta(beta, p, cu_seqlens)
    h, dh = _flat_states(h, p), _flat_states(dh, p)
    grow, shrink = torch.exp2(gk), torch.exp2(_last(gk) - gk)  # 2^gk, 2^(G - gk)
    dw = -dv @ h.mT
    dkb, dvb = A.mT @ dw, A.mT @ dv  # gradients of beta*kb and of beta*v
    dq = p.scale * grow * (do @ h.mT)
    dk_up, dk_down = b * grow * dkb, shrink * (vn @ dh.mT)  # k inside w, k inside kg
    db = (dkb * grow * k).sum(-1, keepdim=True) + (dvb * v).sum(-1, keepdim=True)
    dA = dw @ (b * grow * k).mT + dv @ (b * v).mT
    dAkk = -(A.mT @ dA @ A.mT).tril(-1)
    dg = q * dq + k * dk_up - k * dk_down
    dg[..., -1, :] += (k * dk_down).sum(-2) + torch.exp2(gk[..., -1, :]) * (h * dh).sum(-1)
    # the last row of the chunk is its last real token: padded rows hand their share to it
    dg = _fold_tail(dg, p, cu_seqlens)
    out = {"dq": dq, "dk": dk_up + dk_down, "dg": dg, "dAkk": dAkk, "db": db}
    out = {name: unpack(x, p, cu_seqlens) for name, x in out.items()}
    return {**out, "db": out["db"][..., 0], "dv": unpack(b * dvb, p, cu_seqlens).to(p.dtype)}


def _fold_tail(dg, p, cu_seqlens):
    inside = (chunk_table(p, cu_seqlens)[0] >= 0).to(dg.device)
    tail = torch.where(inside[:, None, :, None], 0, dg).sum(-2)
    dg[torch.arange(p.NT, device=dg.device), :, inside.sum(-1) - 1] += tail
    return dg


def bwd_intra(*, q, k, gk, beta, dAqk, dAkk, dq, dk, db, dg, p, cu_seqlens):
    q, k, da, dl = (pack(x, p, cu_seqlens) for x in (q, k, dAqk, dAkk))
    gk, b = _packed_gk(gk, p, cu_seqlens), _beta(beta, p, cu_seqlens)
    dq2, z, dk2, dg2 = (torch.zeros_like(q) for _ in range(4))
    diag = torch.diagonal(da, dim1=-2, dim2=-1)[..., None]  # the pair r = s carries no gate and stays out of dg
    for s in range(CHUNK - 1):
        r = slice(s + 1, CHUNK)
        decay = torch.exp2(gk[..., r, :] - gk[..., s : s + 1, :])
        ks = k[..., s : s + 1, :] * decay
        a, m = da[..., r, s : s + 1], dl[..., r, s : s + 1]
        dq2[..., r, :] += a * ks
        z[..., r, :] += m * ks
        col = (a * q[..., r, :] + b[..., r, :] * m * k[..., r, :]) * decay
        dk2[..., s, :] += col.sum(-2)
        pair = col * k[..., s : s + 1, :]
        dg2[..., r, :] += pair
        dg2[..., s, :] -= pair.sum(-2)
    db2 = (z * k).sum(-1, keepdim=True)
    dq2, dk2 = dq2 + diag * k, dk2 + b * z + diag * q
    add = {"dq": (dq, dq2), "dk": (dk, dk2), "dg": (dg, dg2), "db": (db[..., None], db2)}
    out = {name: x + unpack(y, p, cu_seqlens).to(x.dtype) for name, (x, y) in add.items()}
    return {**out, "db": out["db"][..., 0]}


def gva(*, dq, dk, p):
    group = (p.B, p.T, p.H, p.HV // p.H, p.K)
    return {"dq": dq.reshape(group).sum(3), "dk": dk.reshape(group).sum(3)}


def reverse_cumsum(*, dg, p, cu_seqlens):
    return {"dg": unpack(pack(dg, p, cu_seqlens).flip(-2).cumsum(-2).flip(-2), p, cu_seqlens)}


def gate_bwd(*, g_raw, A_log, dt_bias, dg, p):
    x = g_raw.to(acc_dtype(p))
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).view(p.HV, p.K)
    rate = x.new_ones(p.HV, 1) if A_log is None else A_log.to(x.dtype).view(p.HV, 1).exp()
    if p.gate == "softplus":
        dx, dA = -rate * torch.sigmoid(x) * dg, -rate * F.softplus(x) * dg
    else:
        s = torch.sigmoid(rate * x)
        dx = p.lower_bound * rate * s * (1 - s) * dg
        dA = dx * x
    return {
        "dg": dx,
        "dA_log": None if A_log is None else dA.sum((0, 1, 3)).view_as(A_log),
        "ddt_bias": None if dt_bias is None else dx.sum((0, 1)).view_as(dt_bias),
    }


def no_gate_bwd(*, dg):
    return {"dg": dg, "dA_log": None, "ddt_bias": None}


def norm_bwd(*, q, q_rstd, k, k_rstd, dq, dk, p):
    if not p.l2norm:
        return {"dq": dq, "dk": dk}
    out = {}
    for name, y, rstd, dy in (("dq", q, q_rstd, dq), ("dk", k, k_rstd, dk)):
        y, dy = y.to(acc_dtype(p)), dy.to(acc_dtype(p))
        out[name] = rstd[..., None] * (dy - y * (y * dy).sum(-1, keepdim=True))
    return out


def beta_bwd(*, beta_raw, beta, db, p):
    return {"dbeta": db * beta * (1 - beta / p.beta_scale) if p.beta_sigmoid else db}


STAGES = {
    "fwd.norm": norm,
    "fwd.beta": beta_sigmoid,
    "fwd.gate": gate,
    "fwd.intra": intra,
    "fwd.wy": wy,
    "fwd.scan": scan,
    "fwd.out": out,
    "bwd.regate": gate,
    "bwd.recompute": recompute,
    "bwd.rescan": rescan,
    "bwd.dAv": dAv,
    "bwd.dhu": dhu,
    "bwd.wy": bwd_wy,
    "bwd.intra": bwd_intra,
    "bwd.gva": gva,
    "bwd.cumsum": reverse_cumsum,
    "bwd.gate": gate_bwd,
    "bwd.norm": norm_bwd,
    "bwd.beta": beta_bwd,
}
