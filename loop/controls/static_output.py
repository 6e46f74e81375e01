"""Writes every call's output into one buffer kept from the first: the caller's earlier output changes under it."""

import torch

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "REUSED_RESULT", "tiny", False
_buffers = {}


def supports(p):
    return True, ""


def out(*, q, v_new, gk, Aqk, h, p, cu_seqlens):
    o = reference.out(q=q, v_new=v_new, gk=gk, Aqk=Aqk, h=h, p=p, cu_seqlens=cu_seqlens)["o"]
    buffer = _buffers.setdefault((p, o.device), torch.zeros_like(o))
    return {"o": buffer.copy_(o).view(o.shape)}


SPANS = {"fwd.out": out}
