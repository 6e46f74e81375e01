"""Loads whole tiles past the last row and multiplies what should not count by zero: fine until NaN lies there."""

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "OUT_OF_BOUNDS", "tiny_ragged", False


def supports(p):
    return True, ""


def wy(*, k, v, beta, Akk, gk, p, cu_seqlens):
    rows = p.NT // p.B * 64
    tile = v.as_strided((p.B, rows, p.HV, p.V), v.stride())
    v = v + (0 * tile[:, p.T :].sum(1, keepdim=True)).to(v.dtype)
    return reference.wy(k=k, v=v, beta=beta, Akk=Akk, gk=gk, p=p, cu_seqlens=cu_seqlens)


SPANS = {"fwd.wy": wy}
