"""The autograd Function behind `causal_conv1d`: runs a plan's forward, saves what it names, runs its backward."""
import torch

from .._common import passes
from .chain import BWD_OUTPUTS, INPUTS


class CausalConv1dFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, facts, *inputs):
        env = plan.run_forward(dict(zip(INPUTS, inputs, strict=True)), facts)
        token = passes.keep(ctx, plan, facts, inputs, env, env["y"])
        ctx.device = inputs[0].device
        return env["y"], env["ht"], token

    @staticmethod
    @torch.compiler.disable
    def backward(ctx, dy, dht, _):
        p = ctx.p
        env, facts, token = passes.recall(ctx)
        with torch.no_grad():
            # dy keeps its strides, 0 included (what `.sum().backward()` sends)
            env["dy"] = torch.zeros(p.B, p.T, p.D, dtype=p.dtype, device=ctx.device) if dy is None else dy
            env["dht"] = None if dht is None else dht.contiguous()
            env = ctx.plan.run_backward(env, facts)
        grads = [env[name] for name in BWD_OUTPUTS]
        return None, None, *passes.hand_out(ctx, "causal_conv1d", token, (dy, dht), grads)


def apply(
    plan, p, x, weight, bias=None, residual=None, h0=None, cu_seqlens=None, chunk_indices=None, chunk_offsets=None
):
    """Run `plan` on inputs shaped as in `ConvProblem` (all but x contiguous); returns (y [B,T,D], ht [N,D,W] or None),
    both in x's dtype.

    Differentiable in every tensor, once. `chunk_indices` [NT,2] and `chunk_offsets` [N+1] go with `cu_seqlens`, in
    chunks of 64 rows.
    """
    facts = passes.meta(p, cu_seqlens, chunk_indices, chunk_offsets)
    y, ht, _ = CausalConv1dFunction.apply(plan, facts, x, weight, bias, residual, h0)
    return y, ht
