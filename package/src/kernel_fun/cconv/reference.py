"""The short causal depthwise convolution in plain torch: every output and gradient written out, in any float dtype.

    z[t] = bias + sum_w weight[:, w] * X[t - (W-1) + w]        X[t] is x[t] for t >= 0 and h0[:, :, t + W] for t < 0
    y[t] = act(z[t]) + residual[t]                             act is the identity or silu
    ht   = X[T-W .. T-1], the last W inputs of each sequence

Sequences are the batch rows, or the runs that `cu_seqlens` marks in one packed row; they may be empty or shorter than
the window. Arithmetic runs in the widest dtype among the operands, at least fp32; results are cast as the kernels cast
theirs. Autograd is not used: this is the definition that kernels are checked against.
"""
import itertools

import torch
from torch import Tensor

from .._common.problem import ConvProblem


def _spans(x: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(batch row, first token, end token) of every sequence, in order."""
    B, T = x.shape[:2]
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    ends = cu_seqlens.tolist()
    return [(0, s, e) for s, e in itertools.pairwise(ends)]


def _wide(*tensors: Tensor | None) -> torch.dtype:
    dtype = torch.float32
    for t in tensors:
        if t is not None:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _with_history(x: Tensor, h0: Tensor | None, n: int, W: int, dtype: torch.dtype) -> Tensor:
    """X[-W .. T-1] of sequence n: [W + T, D]. x is [T, D]."""
    past = x.new_zeros(W, x.shape[1], dtype=dtype) if h0 is None else h0[n].to(dtype).t()
    return torch.cat([past, x.to(dtype)])


def _windows(X: Tensor, W: int) -> list[Tensor]:
    """For w in 0..W-1 the rows X[t - (W-1) + w], t = 0..T-1: each [T, D]."""
    T = X.shape[0] - W
    return [X[1 + w : 1 + w + T] for w in range(W)]


def conv_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    activation: str | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x, residual [B,T,D], weight [D,W], bias [D], h0 [N,D,W] -> y [B,T,D] and ht [N,D,W] or None, in x's dtype."""
    W = weight.shape[1]
    dtype = _wide(x, weight, bias, residual, h0)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = []
    for n, (b, s, e) in enumerate(_spans(x, cu_seqlens)):
        X = _with_history(x[b, s:e], h0, n, W, dtype)
        z = sum(weight[:, w].to(dtype) * Xw for w, Xw in enumerate(_windows(X, W)))
        if bias is not None:
            z = z + bias.to(dtype)
        out = z * torch.sigmoid(z) if activation == "silu" else z
        if residual is not None:
            out = out + residual[b, s:e].to(dtype)
        y[b, s:e] = out.to(y.dtype)
        states.append(X[X.shape[0] - W :].t().to(x.dtype))
    if not output_final_state:
        return y, None
    return y, torch.stack(states) if states else x.new_empty(0, weight.shape[0], W)


def conv_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    dy: Tensor,
    dht: Tensor | None = None,
    *,
    activation: str | None = None,
    has_residual: bool = False,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Gradients of `conv_fwd`, each in its input's dtype, None where there is no input; dresidual is dy itself.

    The sequence's W inputs before its first row are h0's; the first of them reaches ht alone, when the row is empty.
    """
    D, W = weight.shape
    dtype = _wide(x, weight, bias, h0, dy)
    w_wide = weight.to(dtype)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = x.new_zeros(D, W, dtype=dtype)
    db = x.new_zeros(D, dtype=dtype)
    dh0 = None if h0 is None else torch.zeros(h0.shape, dtype=h0.dtype, device=h0.device)
    for n, (b, s, e) in enumerate(_spans(x, cu_seqlens)):
        T = e - s
        X = _with_history(x[b, s:e], h0, n, W, dtype)
        g = dy[b, s:e].to(dtype)
        if activation == "silu":
            z = sum(w_wide[:, w] * Xw for w, Xw in enumerate(_windows(X, W)))
            if bias is not None:
                z = z + bias.to(dtype)
            sig = torch.sigmoid(z)
            g = g * sig * (1 + z * (1 - sig))
        dX = torch.zeros_like(X)
        for w, Xw in enumerate(_windows(X, W)):
            dX[1 + w : 1 + w + T] += w_wide[:, w] * g
            dw[:, w] += (g * Xw).sum(0)
        db += g.sum(0)
        if dht is not None:
            dX[T : T + W] += dht[n].to(dtype).t()
        dx[b, s:e] = dX[W:].to(dx.dtype)
        if dh0 is not None:
            dh0[n] = dX[:W].t().to(dh0.dtype)
    return {
        "dx": dx,
        "dw": dw.to(weight.dtype),
        "db": None if bias is None else db.to(bias.dtype),
        "dresidual": dy if has_residual else None,
        "dh0": dh0,
    }


def _fwd(*, x, weight, bias, residual, h0, p, cu_seqlens):
    y, ht = conv_fwd(
        x, weight, bias, residual, h0,
        activation=p.activation, output_final_state=p.output_final_state, cu_seqlens=cu_seqlens,
    )
    return {"y": y, "ht": ht}


def _bwd(*, x, weight, bias, h0, dy, dht, p, cu_seqlens):
    return conv_bwd(
        x, weight, bias, h0, dy, dht, activation=p.activation, has_residual=p.has_residual, cu_seqlens=cu_seqlens
    )


STAGES = {"fwd": _fwd, "bwd": _bwd}  # stage name -> function of the stage's tensors, as a chain calls it


def spans(p: ConvProblem) -> dict:
    """Span -> function, one per pass."""
    return dict(STAGES)
