"""The autograd Function behind `chunk_kda`: runs a plan's forward, saves what it names, runs its backward.

Which tensors are saved follows from the plan's names alone, so a promoted kernel that needs less makes the residuals
smaller by itself.
"""

import torch

from .._common.once import once
from .chain import INPUTS


class ChunkKDAFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, meta, q, k, v, g, beta, A_log, dt_bias, h0):
        env = dict(zip(INPUTS, (q, k, v, g, beta, A_log, dt_bias, h0), strict=True))
        env = plan.run_forward(env, meta)
        packed = (meta["cu_seqlens"], meta["chunk_indices"], meta["chunk_offsets"])
        token = env["o"].new_empty(0)  # an output that costs nothing: what a second derivative runs into
        ctx.save_for_backward(*(env[name] for name in plan.saved), *packed, token)
        ctx.plan, ctx.p = plan, meta["p"]
        ctx.dtypes = tuple(None if x is None else x.dtype for x in (q, k, v, g, beta, A_log, dt_bias, h0))
        ctx.set_materialize_grads(False)
        return env["o"], env["ht"], token

    @staticmethod
    def backward(ctx, do, dht, _):
        plan, p, received = ctx.plan, ctx.p, (do, dht)
        *saved, cu_seqlens, chunk_indices, chunk_offsets, token = ctx.saved_tensors
        env = dict(zip(plan.saved, saved, strict=True))
        del saved
        with torch.no_grad():
            if do is None:
                like = dht if dht is not None else env[plan.saved[0]]
                do = torch.zeros(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=like.device)
            env["do"], env["dht"] = do.contiguous(), None if dht is None else dht.contiguous()
            meta = {"p": p, "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets}
            env = plan.run_backward(env, meta)
            names = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")
            grads = [
                env[name] if env[name] is None or dtype is None else env[name].to(dtype)
                for name, dtype in zip(names, ctx.dtypes, strict=True)
            ]
        return None, None, *once("chunk_kda", token, received, grads)


def apply(
    plan,
    p,
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    h0=None,
    cu_seqlens=None,
    chunk_indices=None,
    chunk_offsets=None,
):
    """Run `plan` on contiguous inputs shaped as in `KdaProblem`: (o [B,T,HV,V] in q's dtype, ht fp32 or None).

    Differentiable in every tensor, once. `chunk_indices` [NT,2] (sequence, chunk within it) and `chunk_offsets` [N+1]
    go with `cu_seqlens`.
    """
    meta = {"p": p, "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets}
    o, ht, _ = ChunkKDAFunction.apply(plan, meta, q, k, v, g, beta, A_log, dt_bias, h0)
    return o, ht
