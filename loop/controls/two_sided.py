"""Factors 2^(gk_r - gk_s) into 2^gk_r and 2^-gk_s over a whole chunk: the second overflows as soon as gates are
strong."""

import torch

from kernel_fun.kda import reference

FAMILY, EXPECTED, CASE, GPU = "kda", "NON_FINITE", "tiny_strong", False


def supports(p):
    return True, ""


def intra(*, q, k, gk, beta, p, cu_seqlens):
    q, k, gk, b = (reference.pack(x, p, cu_seqlens) for x in (q, k, gk, beta[..., None]))
    ahead, behind = torch.exp2(gk), torch.exp2(-gk)
    Mqk, Mkk = (q * ahead) @ (k * behind).mT, (k * ahead) @ (k * behind).mT
    eye = torch.eye(64, dtype=gk.dtype, device=gk.device)
    Akk = torch.linalg.solve_triangular(eye + b * Mkk.tril(-1), eye.expand_as(Mkk), upper=False, unitriangular=True)
    return {
        name: reference.unpack(x, p, cu_seqlens).to(p.dtype)
        for name, x in (("Aqk", p.scale * Mqk.tril()), ("Akk", Akk))
    }


SPANS = {"fwd.intra": intra}
