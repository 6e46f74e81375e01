"""The autograd Function behind `chunk_kda`: runs a plan's forward, saves what it names, runs its backward.

Which tensors are saved follows from the plan's names alone, so a promoted kernel that needs less makes the residuals
smaller by itself.
"""

import torch

from .._common import passes
from .chain import BWD_OUTPUTS, INPUTS


class ChunkKDAFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, facts, *inputs):
        env = plan.run_forward(dict(zip(INPUTS, inputs, strict=True)), facts)
        token = passes.keep(ctx, plan, facts, inputs, env, env["o"])
        return env["o"], env["ht"], token

    @staticmethod
    @torch.compiler.disable
    def backward(ctx, do, dht, _):
        p = ctx.p
        env, facts, token = passes.recall(ctx)
        with torch.no_grad():
            if do is None:
                like = dht if dht is not None else env[ctx.plan.saved[0]]
                env["do"] = torch.zeros(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=like.device)
            else:
                env["do"] = do.contiguous()
            env["dht"] = None if dht is None else dht.contiguous()
            env = ctx.plan.run_backward(env, facts)
        grads = [env[name] for name in BWD_OUTPUTS]
        return None, None, *passes.hand_out(ctx, "chunk_kda", token, (do, dht), grads)


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
    facts = passes.meta(p, cu_seqlens, chunk_indices, chunk_offsets)
    o, ht, _ = ChunkKDAFunction.apply(plan, facts, q, k, v, g, beta, A_log, dt_bias, h0)
    return o, ht
