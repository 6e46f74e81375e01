"""fla's own forward and backward of the convolution, behind the chain's tensor names. Needs a GPU.

Both go through fla's backend dispatch, so a backend the user turned on (`FLA_CONV_GLUON=1`) is the one that runs, but
never come back here.
"""
from .._common.problem import ConvProblem
from .._common.support import fla_only


def fwd(*, x, weight, bias, residual, h0, p, cu_seqlens, chunk_indices):
    from fla.modules.convolution import causal_conv1d_fwd

    with fla_only():
        y, ht = causal_conv1d_fwd(
            x=x, weight=weight, bias=bias, residual=residual, initial_state=h0, output_final_state=p.output_final_state,
            activation=p.activation, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        )
    return {"y": y, "ht": ht}


def bwd(*, x, weight, bias, residual, h0, dy, dht, p, cu_seqlens, chunk_indices):
    from fla.modules.convolution import causal_conv1d_bwd

    with fla_only():
        dx, dw, db, dresidual, dh0 = causal_conv1d_bwd(
            x=x, dy=dy, dht=dht, weight=weight, bias=bias, residual=residual, initial_state=h0, activation=p.activation,
            cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        )
    return {"dx": dx, "dw": dw, "db": db, "dresidual": dresidual, "dh0": dh0}


def spans(p: ConvProblem) -> dict:
    """Span -> function, one per pass."""
    return {"fwd": fwd, "bwd": bwd}
