"""A running sum that starts from uninitialised memory, with NaN taken for zero: right whenever the memory happens to
be clean."""

import torch

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "UNWRITTEN", "tiny", False


def supports(p):
    return True, ""


def out(*, q, v_new, gk, Aqk, h, p, cu_seqlens):
    o = torch.nan_to_num(torch.empty_like(v_new))
    return {"o": o + reference.out(q=q, v_new=v_new, gk=gk, Aqk=Aqk, h=h, p=p, cu_seqlens=cu_seqlens)["o"]}


SPANS = {"fwd.out": out}
