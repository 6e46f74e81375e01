"""The convolution's single-token decode step, in place: fla's own on a GPU, plain torch on CPU tensors.

Decoding moves a few kilobytes a step and training never calls it, so there is no kernel of ours to prefer. The function
is here so that code which imports `causal_conv1d` from this package finds its companion too, and so that a model's
decode loop runs in a unit test without a GPU.
"""
import torch

from .._common import support

_ACTIVATIONS = (None, "silu", "swish")


@torch.compiler.disable
def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of `causal_conv1d` for one token of each of N sequences; the arguments are those of fla's function.

    Args:
        x: [N, D], [1, N, D] or [N, 1, D], or one of the last two with D as [H, D'].
        cache: [N, D, W], the last W inputs of each sequence. Changed in place: every row moves one back, x comes last.
        residual: as many values as x, or None; added after the activation.
        weight: [D, W]. bias: [D] or None.
        activation: None, "silu" or "swish" (the same function).

    Returns:
        (y, cache): y contiguous, in x's dtype and shape; cache is the tensor that was passed. Not differentiable.

    Raises:
        TypeError: what should be a tensor is none.
        ValueError: on CPU tensors, a shape or activation that does not fit; each names what is accepted.
    """
    if not support.disabled("cconv"):
        support.check_tensors(locals(), ("x",), ("cache", "residual", "weight", "bias"))
    ok, reason = is_supported(x)
    if not ok:
        from fla.modules.convolution import causal_conv1d_update as fla_update

        support.fell_back("cconv", reason, x)
        with support.fla_only(), support.gpu_needed("causal_conv1d_update", reason, x):
            return fla_update(x=x, cache=cache, residual=residual, weight=weight, bias=bias, activation=activation)
    support.engaged("cconv", "plain torch on CPU tensors", kernels=False)
    return _step(x, cache, residual, weight, bias, activation)


def is_supported(x: torch.Tensor, *args, **kwargs) -> tuple[bool, str]:
    """(True, "") where `causal_conv1d_update` runs here, or (False, why it is fla's, or its error)."""
    reason = support.disabled("cconv")
    if reason:
        return False, reason
    try:
        support.check_tensors({"x": x}, ("x",))
    except TypeError as error:
        return False, f"TypeError: {error}"
    return (True, "") if x.is_cpu else (False, "the single-token step is fla's kernel")


@torch.no_grad()
def _step(x, cache, residual, weight, bias, activation) -> tuple[torch.Tensor, torch.Tensor]:
    if weight is None or weight.dim() != 2:
        raise ValueError(f"weight must be [D, W], got {None if weight is None else list(weight.shape)}")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: accepted are None, 'silu' and 'swish'")
    D, W = weight.shape
    rows = x.flatten(2) if x.dim() > 3 else x
    if rows.shape[-1] != D or rows.dim() not in (2, 3) or (rows.dim() == 3 and 1 not in rows.shape[:2]):
        raise ValueError(f"x must be [N, D], [1, N, D] or [N, 1, D] with D = {D} as in weight, got {list(x.shape)}")
    rows = rows.reshape(-1, D)
    N = rows.shape[0]
    for name, t, want in (("cache", cache, (N, D, W)), ("bias", bias, (D,))):
        if (t is None and name == "cache") or (t is not None and t.shape != want):
            raise ValueError(f"{name} must be {list(want)}, got {None if t is None else list(t.shape)}")
    if residual is not None and residual.numel() != rows.numel():
        raise ValueError(f"residual must hold as many values as x, {list(x.shape)}, got {list(residual.shape)}")
    dtype = torch.float32
    for t in (x, cache, weight, bias, residual):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    window = torch.cat([cache[..., 1:].to(dtype), rows[..., None].to(dtype)], -1)
    y = (window * weight.to(dtype)).sum(-1)
    if bias is not None:
        y = y + bias.to(dtype)
    if activation is not None:
        y = y * torch.sigmoid(y)
    if residual is not None:
        y = y + residual.reshape(N, D).to(dtype)
    cache.copy_(window)
    return y.to(x.dtype).view(x.shape), cache
