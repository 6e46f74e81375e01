"""The autograd Function behind `causal_conv1d`: runs a plan's forward, saves what it names, runs its backward."""
import torch

from .._common.once import once
from .chain import BWD_OUTPUTS, INPUTS


def meta(p, cu_seqlens, chunk_indices, chunk_offsets) -> dict:
    """What a step may ask for beside the chain's tensors."""
    return {"p": p, "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets}


class CausalConv1dFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, facts, x, weight, bias, residual, h0):
        inputs = (x, weight, bias, residual, h0)
        env = plan.run_forward(dict(zip(INPUTS, inputs, strict=True)), facts)
        packed = (facts["cu_seqlens"], facts["chunk_indices"], facts["chunk_offsets"])
        token = env["y"].new_empty(0)  # an output that costs nothing: what a second derivative runs into
        ctx.save_for_backward(*(env[name] for name in plan.saved), *packed, token)
        ctx.plan, ctx.p, ctx.device = plan, facts["p"], x.device
        ctx.dtypes = tuple(None if t is None else t.dtype for t in inputs)
        ctx.set_materialize_grads(False)
        return env["y"], env["ht"], token

    @staticmethod
    def backward(ctx, dy, dht, _):
        plan, p, received = ctx.plan, ctx.p, (dy, dht)
        *saved, cu_seqlens, chunk_indices, chunk_offsets, token = ctx.saved_tensors
        env = dict(zip(plan.saved, saved, strict=True))
        del saved
        with torch.no_grad():
            # dy keeps its strides, 0 included (what `.sum().backward()` sends)
            env["dy"] = torch.zeros(p.B, p.T, p.D, dtype=p.dtype, device=ctx.device) if dy is None else dy
            env["dht"] = None if dht is None else dht.contiguous()
            env = plan.run_backward(env, meta(p, cu_seqlens, chunk_indices, chunk_offsets))
            grads = [env[name] if env[name] is None or dtype is None else env[name].to(dtype)
                     for name, dtype in zip(BWD_OUTPUTS, ctx.dtypes, strict=True)]
        return None, None, *once("causal_conv1d", token, received, grads)


def apply(
    plan, p, x, weight, bias=None, residual=None, h0=None, cu_seqlens=None, chunk_indices=None, chunk_offsets=None
):
    """Run `plan` on inputs shaped as in `ConvProblem` (all but x contiguous); returns (y [B,T,D], ht [N,D,W] or None),
    both in x's dtype.

    Differentiable in every tensor, once. `chunk_indices` [NT,2] and `chunk_offsets` [N+1] go with `cu_seqlens`, in
    chunks of 64 rows.
    """
    facts = meta(p, cu_seqlens, chunk_indices, chunk_offsets)
    y, ht, _ = CausalConv1dFunction.apply(plan, facts, x, weight, bias, residual, h0)
    return y, ht
