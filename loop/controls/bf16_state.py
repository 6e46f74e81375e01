"""The state carried in bf16 from chunk to chunk: harmless while it decays, wrong once it has to last."""

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "WRONG_VALUE", "tiny_persist", False


def supports(p):
    return True, ""


def scan(*, kg, w, u, gk, h0, p, cu_seqlens):
    pack = reference.pack
    kg, w, u, gk = (pack(x, p, cu_seqlens) for x in (kg, w, u, gk))
    S, h, v_new = h0.bfloat16().to(kg.dtype), kg.new_zeros(p.NT, p.HV, p.K, p.V), u.clone()
    for c in range(p.NT):  # one dense row: chunks are in order
        h[c] = S[0]
        v_new[c] = u[c] - w[c] @ S[0]
        S[0] = (gk[c, :, -1, :, None].exp2() * S[0] + kg[c].mT @ v_new[c]).bfloat16().to(S.dtype)
    v_new = reference.unpack(v_new, p, cu_seqlens).to(p.dtype)
    return {"h": h.view(p.B, p.NT, p.HV, p.K, p.V).to(p.dtype), "v_new": v_new, "ht": S}


SPANS = {"fwd.scan": scan}
