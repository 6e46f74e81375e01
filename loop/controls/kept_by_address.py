"""The gate's sums kept by the address of g: the next step's gate lies at the same address and is never read."""

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "REUSED_RESULT", "tiny_gate", False
_kept = {}


def supports(p):
    return True, ""


def gate(*, g_raw, A_log, dt_bias, p, cu_seqlens):
    key = g_raw.data_ptr()
    if key not in _kept:
        _kept[key] = reference.gate(g_raw=g_raw, A_log=A_log, dt_bias=dt_bias, p=p, cu_seqlens=cu_seqlens)["gk"]
    return {"gk": _kept[key]}


SPANS = {"fwd.gate": gate, "bwd.regate": gate}
