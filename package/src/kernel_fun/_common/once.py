"""Gradients that can be taken once: differentiating them again is an error.

torch's own `once_differentiable` marks a backward's results only when the gradient that arrives needs one itself. A
gradient penalty usually starts from `o.sum()`, whose gradient needs none: the penalty would then train on nothing,
silently. Here every result is marked, whenever autograd records the backward (`create_graph=True`) at all.
"""
import torch


class _Refuse(torch.autograd.Function):
    """Hands the gradients on; its own backward is the error."""

    @staticmethod
    def forward(ctx, name, anchor, *grads):
        ctx.name = name
        return tuple(None if grad is None else grad.detach() for grad in grads)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.name} has no second derivative: its backward cannot be differentiated")


def once(name: str, token: torch.Tensor, received: tuple, grads: list) -> tuple | list:
    """The `grads` that a backward returns; a backward through them is a RuntimeError that names `name`.

    `token` is an (empty) output of the same forward, as saved by it: it ties the error to every input, so that
    `torch.autograd.grad` meets it whichever tensor it is asked for. `received` are the gradients that arrived, which
    may need one too. Without `create_graph=True` the list comes back as it is.
    """
    if not torch.is_grad_enabled():
        return grads
    needy = [t for t in received if t is not None and t.requires_grad]
    anchor = token if not needy else torch.cat([token, *(t.reshape(-1)[:0].to(token) for t in needy)])
    return _Refuse.apply(name, anchor, *grads)
