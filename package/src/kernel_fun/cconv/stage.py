"""The convolution's passes as fla dispatches them, `causal_conv1d_fwd` and `causal_conv1d_bwd`, and their verifiers.

fla's own autograd Function calls these, one pass at a time and without gradients; each asks for the route that the
whole operator would take, `backward` for the one that has a backward. Signatures are fla's. `chunk_indices` and
`chunk_size` describe fla's own chunk table, `layout_fallback` another backend's limit: none of them changes a result.
"""
import torch
import torch.nn.functional as F

from .._common import passes, support
from . import ops


def _arguments(
    x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens, cu_seqlens_cpu
) -> dict:
    """As the whole operator takes them."""
    return {
        "x": x, "weight": weight, "bias": bias, "residual": residual, "initial_state": initial_state,
        "output_final_state": output_final_state, "activation": activation, "backend": "triton",
        "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "chunk_indices": None, "cp_context": None,
        "kwargs": {},
    }


def forward_supported(
    x, weight, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
) -> tuple[bool, str]:
    """Will `forward` take this call? (True, the kernels) or (False, the reason)."""
    return ops.explain(
        _arguments(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens, cu_seqlens_cpu)
    )


def forward(
    x, weight, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y in x's dtype and shape, and the final state [N, D, W] or None."""
    call = ops.decide(
        _arguments(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens, cu_seqlens_cpu)
    )
    return ops.run(call)


def backward_supported(
    x, dy, dht=None, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
) -> tuple[bool, str]:
    """Will `backward` take this call? (True, the kernels) or (False, the reason)."""
    return ops.explain(
        _arguments(x, weight, bias, residual, initial_state, dht is not None, activation, cu_seqlens, cu_seqlens_cpu),
        backward=True,
    )


def backward(
    x, dy, dht=None, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
) -> tuple[torch.Tensor | None, ...]:
    """(dx in x's shape, dw, db, dresidual, dh0); None for what was not given."""
    call = ops.decide(
        _arguments(x, weight, bias, residual, initial_state, dht is not None, activation, cu_seqlens, cu_seqlens_cpu),
        backward=True,
    )
    p, T = call.p, x.shape[1]
    env = dict(zip(ops.chain.INPUTS, ops.prepared(call), strict=True))
    dy_rows = dy.flatten(2)[:, : p.T]
    env["dy"] = dy_rows
    env["dht"] = None if dht is None else dht.contiguous()
    with support.device_guard(x):
        env = call.route.run_backward(env, passes.meta(p, *call.packed))
    dx, dresidual = env["dx"], None if residual is None else dy_rows
    if p.T < T:  # rows beyond cu_seqlens[-1]
        dx, dresidual = (None if t is None else F.pad(t, (0, 0, 0, T - p.T)) for t in (dx, dresidual))
    dresidual = None if dresidual is None else dresidual.reshape(dy.shape)
    grads = ((env["dw"], weight), (env["db"], bias), (env["dh0"], initial_state))
    dw, db, dh0 = (None if t is None else grad.to(t.dtype) for grad, t in grads)
    return dx.to(x.dtype).reshape(x.shape), dw, db, dresidual, dh0
