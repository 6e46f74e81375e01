"""The gate applied in the wrong order: a token's decay acts after its own write, not before (an exclusive sum for an
inclusive one)."""

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "WRONG_VALUE", "tiny_gate", False


def supports(p):
    return True, ""


def gate(*, g_raw, A_log, dt_bias, p, cu_seqlens):
    gk = reference.pack(
        reference.gate(g_raw=g_raw, A_log=A_log, dt_bias=dt_bias, p=p, cu_seqlens=cu_seqlens)["gk"], p, cu_seqlens
    )
    late = gk.roll(1, -2)
    late[..., 0, :] = 0
    return {"gk": reference.unpack(late, p, cu_seqlens)}


SPANS = {"fwd.gate": gate}
