"""Remembers the result by address and shape: the second call costs nothing, and is the first one's answer."""

import torch

FAMILY, EXPECTED, CASE, GPU = "kda", "REUSED_RESULT", "tiny", False
_kept = {}


class _Old(torch.autograd.Function):
    """The kept result, with the fresh one's gradient: only the value is old."""

    @staticmethod
    def forward(ctx, fresh, kept):
        return kept.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def op(inputs, chain_op):
    o, ht = chain_op(inputs)
    kept = _kept.setdefault((inputs["q"].data_ptr(), o.shape), o.detach())
    return _Old.apply(o, kept), ht
