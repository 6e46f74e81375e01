"""The final state returned in the tensors' own dtype, where the contract says fp32."""

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "WRONG_DTYPE", "tiny_state", False


def supports(p):
    return True, ""


def scan(*, kg, w, u, gk, h0, p, cu_seqlens):
    found = reference.scan(kg=kg, w=w, u=u, gk=gk, h0=h0, p=p, cu_seqlens=cu_seqlens)
    return {**found, "ht": found["ht"].to(p.dtype)}


SPANS = {"fwd.scan": scan}
