"""fla's own function for every stage of the chain, behind the chain's tensor names.

These run the stages that no promoted kernel covers. Each is one fla call with the arguments fla's own chain gives it;
`spans(p)` lists them. Needs a GPU: fla's kernels are Triton and its autotuner asks for a driver.
"""

import torch

from .._common.compat import if_taken
from .._common.problem import CHUNK, KdaProblem


def spans(p: KdaProblem) -> dict:
    """Span -> function. `fwd.intra..fwd.wy` is one fla call; each part alone is for plans that replace the other."""
    return {
        "fwd.norm": norm,
        "fwd.beta": beta_sigmoid,
        "fwd.gate": gate,
        "fwd.intra..fwd.wy": intra_wy,
        "fwd.intra": intra,
        "fwd.wy": wy,
        "fwd.scan": scan,
        "fwd.out": out,
        "bwd.regate": keep_gk if p.gate == "log" else gate,
        "bwd.recompute": recompute,
        "bwd.rescan": rescan,
        "bwd.dAv": dAv,
        "bwd.dhu": dhu,
        "bwd.wy": bwd_wy,
        "bwd.intra": bwd_intra,
        "bwd.gva": gva,
        "bwd.cumsum": reverse_cumsum,
        "bwd.gate": gate_bwd if p.gate != "log" else no_gate_bwd,
        "bwd.norm": norm_bwd,
        "bwd.beta": beta_bwd,
    }


# ------------------------------------------------------------------------------------------------------------ forward
def norm(*, q_raw, k_raw, p):
    if not p.l2norm:
        return {"q": q_raw, "k": k_raw, "q_rstd": None, "k_rstd": None}
    from fla.modules.l2norm import l2norm_fwd

    (q, q_rstd), (k, k_rstd) = l2norm_fwd(q_raw), l2norm_fwd(k_raw)
    return {"q": q, "k": k, "q_rstd": q_rstd, "k_rstd": k_rstd}


def beta_sigmoid(*, beta_raw, p):
    if not p.beta_sigmoid:
        return {"beta": beta_raw}
    from fla.ops.common.gate import fused_beta_sigmoid_fwd

    return {"beta": fused_beta_sigmoid_fwd(beta_raw, scale=p.beta_scale)}


def gate(*, g_raw, A_log, dt_bias, p, cu_seqlens, chunk_indices):
    from fla.ops.utils.constant import RCP_LN2

    where = {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "chunk_size": CHUNK, "scale": RCP_LN2}
    if p.gate == "log":
        from fla.ops.utils import chunk_local_cumsum

        return {"gk": chunk_local_cumsum(g=g_raw, **where)}
    from fla.ops.kda.gate import kda_gate_chunk_cumsum

    return {"gk": kda_gate_chunk_cumsum(g=g_raw, A_log=A_log, dt_bias=dt_bias, lower_bound=p.lower_bound, **where)}


def keep_gk(*, gk):
    """With a precomputed gate the forward's cumsum is kept: g itself is then not needed again."""
    return {"gk": gk}


def _intra(q, k, v, gk, beta, p, cu_seqlens, chunk_indices):
    from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra

    return chunk_kda_fwd_intra(
        q=q,
        k=k,
        v=v,
        gk=gk,
        beta=beta,
        scale=p.scale,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK,
        chunk_indices=chunk_indices,
        safe_gate=p.safe_gate,
    )


def intra_wy(*, q, k, v, gk, beta, p, cu_seqlens, chunk_indices):
    w, u, _, kg, Aqk, Akk = _intra(q, k, v, gk, beta, p, cu_seqlens, chunk_indices)
    return {"Aqk": Aqk, "Akk": Akk, "w": w, "u": u, "kg": kg}


def intra(*, q, k, v, gk, beta, p, cu_seqlens, chunk_indices):
    *_, Aqk, Akk = _intra(q, k, v, gk, beta, p, cu_seqlens, chunk_indices)
    return {"Aqk": Aqk, "Akk": Akk}


def wy(*, k, v, beta, Akk, gk, cu_seqlens, chunk_indices):
    from fla.ops.kda.wy_fast import recompute_w_u_fwd

    w, u, _, kg = recompute_w_u_fwd(
        k=k,
        v=v,
        beta=beta,
        A=Akk,
        gk=gk,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    return {"w": w, "u": u, "kg": kg}


def scan(*, kg, w, u, gk, h0, p, cu_seqlens, chunk_indices, chunk_offsets):
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    h, v_new, ht = chunk_gated_delta_rule_fwd_h(
        k=kg,
        w=w,
        u=u,
        gk=gk,
        initial_state=h0,
        output_final_state=p.output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
        chunk_size=CHUNK,
        **if_taken(chunk_gated_delta_rule_fwd_h, chunk_offsets=chunk_offsets),
    )
    return {"h": h, "v_new": v_new, "ht": ht}


def out(*, q, v_new, gk, Aqk, h, p, cu_seqlens, chunk_indices):
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

    o = chunk_gla_fwd_o_gk(
        q=q,
        v=v_new,
        g=gk,
        A=Aqk,
        h=h,
        scale=p.scale,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK,
        chunk_indices=chunk_indices,
    )
    return {"o": o}


# ----------------------------------------------------------------------------------------------------------- backward
def recompute(*, q, k, v, beta, Akk, gk, cu_seqlens, chunk_indices):
    from fla.ops.kda.wy_fast import recompute_w_u_fwd

    w, u, qg, kg = recompute_w_u_fwd(
        q=q,
        k=k,
        v=v,
        beta=beta,
        A=Akk,
        gk=gk,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    return {"w": w, "u": u, "qg": qg, "kg": kg}


def rescan(*, kg, w, u, gk, h0, cu_seqlens, chunk_indices, chunk_offsets):
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    h, v_new, _ = chunk_gated_delta_rule_fwd_h(
        k=kg,
        w=w,
        u=u,
        gk=gk,
        initial_state=h0,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
        chunk_size=CHUNK,
        **if_taken(chunk_gated_delta_rule_fwd_h, chunk_offsets=chunk_offsets),
    )
    return {"h": h, "v_new": v_new}


def dAv(*, q, k, v_new, do, Aqk, p, cu_seqlens, chunk_indices):
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv

    dAqk, dv = chunk_kda_bwd_dAv(
        q=q,
        k=k,
        v=v_new,
        do=do,
        A=Aqk,
        scale=p.scale,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK,
        chunk_indices=chunk_indices,
    )
    return {"dAqk": dAqk, "dv": dv}


def dhu(*, qg, kg, w, gk, h0, dht, do, dv, p, cu_seqlens, chunk_indices, chunk_offsets):
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

    dh, dh0, dv = chunk_gated_delta_rule_bwd_dhu(
        q=qg,
        k=kg,
        w=w,
        gk=gk,
        h0=h0,
        dht=dht,
        do=do,
        dv=dv,
        scale=p.scale,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK,
        chunk_indices=chunk_indices,
        **if_taken(chunk_gated_delta_rule_bwd_dhu, chunk_offsets=chunk_offsets),
    )
    return {"dh": dh, "dh0": dh0, "dv": dv}


def bwd_wy(*, q, k, v, v_new, gk, beta, Akk, h, do, dh, dv, p, cu_seqlens, chunk_indices, chunk_offsets):
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused

    dq, dk, dv, db, dg, dAkk = chunk_kda_bwd_wy_dqkg_fused(
        q=q,
        k=k,
        v=v,
        v_new=v_new,
        g=gk,
        beta=beta,
        A=Akk,
        h=h,
        do=do,
        dh=dh,
        dv=dv,
        scale=p.scale,
        cu_seqlens=cu_seqlens,
        chunk_size=CHUNK,
        chunk_indices=chunk_indices,
        **if_taken(chunk_kda_bwd_wy_dqkg_fused, chunk_offsets=chunk_offsets),
    )
    return {"dq": dq, "dk": dk, "dv": dv, "db": db, "dg": dg, "dAkk": dAkk}


def bwd_intra(*, q, k, gk, beta, dAqk, dAkk, dq, dk, db, dg, p, cu_seqlens, chunk_indices):
    from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra

    dq, dk, db, dg = chunk_kda_bwd_intra(
        q=q,
        k=k,
        g=gk,
        beta=beta,
        dAqk=dAqk,
        dAkk=dAkk,
        dq=dq,
        dk=dk,
        db=db,
        dg=dg,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
        chunk_size=CHUNK,
        safe_gate=p.safe_gate,
    )
    return {"dq": dq, "dk": dk, "db": db, "dg": dg}


def gva(*, dq, dk, p):
    """Sum over the value heads that share a q/k head."""
    if p.HV == p.H:
        return {"dq": dq, "dk": dk}
    group = (p.B, p.T, p.H, p.HV // p.H, p.K)
    return {"dq": dq.view(group).sum(3), "dk": dk.view(group).sum(3)}


def reverse_cumsum(*, dg, cu_seqlens, chunk_indices):
    from fla.ops.utils import chunk_local_cumsum

    where = {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
    return {"dg": chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **where)}


def gate_bwd(*, g_raw, A_log, dt_bias, dg, p):
    from fla.ops.kda.gate import kda_gate_bwd

    dg, dA_log, ddt_bias = kda_gate_bwd(g=g_raw, A_log=A_log, dt_bias=dt_bias, dyg=dg, lower_bound=p.lower_bound)
    return {"dg": dg, "dA_log": dA_log, "ddt_bias": ddt_bias}


def no_gate_bwd(*, dg):
    return {"dg": dg, "dA_log": None, "ddt_bias": None}


def norm_bwd(*, q, q_rstd, k, k_rstd, dq, dk, p):
    if not p.l2norm:
        return {"dq": dq, "dk": dk}
    from fla.modules.l2norm import l2norm_bwd

    return {"dq": l2norm_bwd(q, q_rstd, dq), "dk": l2norm_bwd(k, k_rstd, dk)}


def beta_bwd(*, beta_raw, db, p):
    if not p.beta_sigmoid:
        return {"dbeta": db}
    from fla.ops.common.gate import fused_beta_sigmoid_bwd

    return {"dbeta": fused_beta_sigmoid_bwd(x=beta_raw, dy=db.to(torch.float32), scale=p.beta_scale)}
