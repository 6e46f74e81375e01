"""A convolution over packed sequences that ignores their bounds: each sequence sees the end of the one before."""

from kernel_fun.cconv import reference

FAMILY, EXPECTED, CASE, GPU = "cconv", "WRONG_VALUE", "tiny_varlen", False


def supports(p):
    return True, ""


def fwd(*, x, weight, bias, residual, h0, p):
    y, _ = reference.conv_fwd(x, weight, bias, residual, h0, activation=p.activation)
    return {"y": y, "ht": None}


SPANS = {"fwd": fwd}
