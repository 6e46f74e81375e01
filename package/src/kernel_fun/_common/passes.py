"""What the operators' autograd Functions do alike around a plan: what goes with its tensors, what a forward keeps for
the backward, and how gradients go out."""
import torch

from .once import once


def meta(p, cu_seqlens=None, chunk_indices=None, chunk_offsets=None) -> dict:
    """What a step may ask for beside the chain's tensors."""
    return {"p": p, "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets}


def keep(ctx, plan, facts: dict, inputs: tuple, env: dict, out: torch.Tensor) -> torch.Tensor:
    """Save on `ctx` what the backward of `plan` reads of `env`; returns the output that `once` is told of."""
    token = out.new_empty(0)  # an output that costs nothing: what a second derivative runs into
    packed = (facts["cu_seqlens"], facts["chunk_indices"], facts["chunk_offsets"])
    ctx.save_for_backward(*(env[name] for name in plan.saved), *packed, token)
    ctx.plan, ctx.p = plan, facts["p"]
    ctx.dtypes = tuple(None if x is None else x.dtype for x in inputs)
    ctx.set_materialize_grads(False)
    return token


def recall(ctx) -> tuple[dict, dict, torch.Tensor]:
    """What `keep` saved: the tensors by name, `meta`, and the token."""
    *saved, cu_seqlens, chunk_indices, chunk_offsets, token = ctx.saved_tensors
    env = dict(zip(ctx.plan.saved, saved, strict=True))
    return env, meta(ctx.p, cu_seqlens, chunk_indices, chunk_offsets), token


def hand_out(ctx, name: str, token: torch.Tensor, received: tuple, grads: list) -> tuple | list:
    """`grads`, one an input, each in its input's dtype; operator `name` gives them once."""
    with torch.no_grad():
        grads = [
            g if g is None or dtype is None or g.dtype == dtype else g.to(dtype)
            for g, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
    return once(name, token, received, grads)
