"""`causal_conv1d`: fla's signature, results and errors, with this package's kernels where they serve the call.

Every argument is either understood here or sends the call to fla, whole and unchanged, with the reason in the log.
`is_supported` takes the same arguments and says which of the two a call will be. On CPU tensors, where fla cannot run,
the plain-torch reference runs.
"""
import inspect
import itertools
import time
from typing import NamedTuple

import torch

from .._common import packed, support, warming
from .._common.dispatch import Route, needs_grad, route
from .._common.problem import ConvProblem
from . import autograd, chain

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


class Call(NamedTuple):
    """A call that runs here: its route, problem and tensors, and the shape its output takes."""

    route: Route
    p: ConvProblem
    tensors: tuple          # x weight bias residual h0
    packed: tuple           # cu_seqlens chunk_indices chunk_offsets, or three Nones
    shape: torch.Size       # of the caller's x


@torch.compiler.disable
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    cp_context=None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution over time; the arguments are those of fla's `causal_conv1d`.

    y[t] = act(bias + sum_w weight[:, w] x[t - (W-1) + w]) + residual[t], with the sequence's initial state before its
    first token.

    Args:
        x: [B, T, D] in any strides, or [B, T, H, D'] with H*D' = D, which is flattened.
        weight: [D, W], any floating dtype.
        bias: [D] or None.
        residual: shaped like x, or None; added after the activation.
        initial_state: [N, D, W], the W inputs before each sequence (the first of them is never read), or None.
        output_final_state: also return the last W inputs of each sequence.
        activation: None, "silu" or "swish" (the same function).
        backend: "triton" runs here; "cuda" and "mix" ask for fla's other kernels and go to fla.
        cu_seqlens: [N+1] integers, sequences packed along T of one batch row; `cu_seqlens_cpu` its copy on the host,
            if there is one.
        chunk_indices: fla's chunk table of cu_seqlens; made here when needed.
        cp_context, **kwargs: go to fla with the call.

    Returns:
        (y, final_state): y contiguous, in x's dtype and shape; final_state [N, D, W] in x's dtype, or None when not
        asked for. Differentiable in x, weight, bias, residual and initial_state, each gradient in its input's dtype.
        Rows beyond cu_seqlens[-1] are 0, their gradients too.

    Raises:
        TypeError: what should be a tensor is none.
        ValueError: an unknown backend or activation, a shape, device or dtype that does not fit; each names what is
            accepted.
        kernel_fun._common.compat.FlaDriftError: the installed fla lacks a function this package calls.
    """
    arguments = locals()
    call = decide(arguments)
    if isinstance(call, str):
        support.fell_back("cconv", call, x)
        return _fla(arguments, call)
    return run(call)


def is_supported(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    cp_context=None,
    **kwargs,
) -> tuple[bool, str]:
    """What `causal_conv1d` will do with these arguments, without doing it.

    Returns (True, the kernels that will run, and fla's own stages between them) or (False, why the call goes to fla).
    For arguments that `causal_conv1d` refuses, (False, its error). A packed call on a GPU without
    `cu_seqlens_cpu` waits for the GPU once per content of `cu_seqlens`.
    """
    return explain(locals())


def explain(arguments: dict, backward: bool = False) -> tuple[bool, str]:
    """`is_supported` on the arguments as a dict, `kwargs` included; `backward`: see `decide`."""
    try:
        call = decide(arguments, backward)
    except Exception as error:  # whatever the call would raise
        return False, f"{type(error).__name__}: {error}"
    return (False, call) if isinstance(call, str) else (True, call.route.what)


def _fla(a: dict, reason: str):
    """The caller's arguments to fla for `reason`, unchanged; those at their default are left out."""
    from fla.modules.convolution import causal_conv1d as fla_causal_conv1d

    given = {name: a[name] for name, default in _DEFAULTS.items() if a[name] is not default}
    with support.fla_only(), support.gpu_needed("causal_conv1d", reason, a["x"]):
        return support.fla_only_backward(fla_causal_conv1d(x=a["x"], **given, **a["kwargs"]))


def decide(a: dict, backward: bool = False) -> Call | str:
    """The call to run here, or the reason to go to fla. Raises TypeError or ValueError for what is wrong on either
    path.

    backward: the caller runs the backward alone; otherwise the tensors say whether one follows the forward.
    """
    x, cu_seqlens = a["x"], a["cu_seqlens"]
    reason = support.disabled("cconv")
    if reason:
        return reason  # whatever the arguments are: they are then fla's to judge
    required = ("x",) if a["weight"] is None else ("x", "weight")  # `_describe` says what a weight must be
    support.check_tensors(a, required, ("bias", "residual", "initial_state", "cu_seqlens"))
    reason = support.device_reason(x) or _fla_features(a)
    if reason:
        return reason
    pack = None
    if cu_seqlens is not None and x.dim() > 2:  # with fewer dimensions `_describe` refuses x
        support.check_tensors(a, (), ("cu_seqlens_cpu",))
        pack = packed.of_call("x", x, cu_seqlens, a["cu_seqlens_cpu"])
        if isinstance(pack, str):
            return pack
    p, tensors = _describe(a, pack)
    grad = backward or needs_grad(*tensors)
    found = route("cconv", chain, p, x, grad)
    reason = found.reason or found.capture_reason(x, grad, forward=not backward)
    if reason:
        return reason
    x, weight, bias, residual, h0 = tensors
    if x.shape[1] > p.T:
        x, residual = x[:, : p.T], None if residual is None else residual[:, : p.T]
    tables = (None, None, None) if pack is None else (pack.cu_seqlens, pack.chunk_indices, pack.chunk_offsets)
    return Call(found, p, (x, weight, bias, residual, h0), tables, a["x"].shape)


def _fla_features(a: dict) -> str:
    """The argument that only fla implements, or ""."""
    backend = a["backend"]
    if a["cp_context"] is not None:
        return f"cp_context={type(a['cp_context']).__name__}"
    if backend != "triton":
        if backend not in ("cuda", "mix"):
            raise ValueError(f"backend={backend!r}: accepted are 'triton', 'cuda' and 'mix'")
        return f"backend={backend!r}"
    return f"argument {next(iter(a['kwargs']))!r} is not known here" if a["kwargs"] else ""


def _describe(a: dict, pack) -> tuple[ConvProblem, tuple]:
    """The problem and its tensors (x weight bias residual h0) with channels flattened, checked."""
    x, weight, bias, residual, h0 = a["x"], a["weight"], a["bias"], a["residual"], a["initial_state"]
    if weight is None or weight.dim() != 2 or not weight.shape[1]:
        raise ValueError(f"weight must be [D, W], got {None if weight is None else list(weight.shape)}")
    if a["activation"] not in _ACTIVATIONS:
        raise ValueError(f"activation={a['activation']!r}: accepted are None, 'silu' and 'swish'")
    D, W = weight.shape
    shape = x.shape
    if x.dim() > 3:
        x = x.flatten(2)
    if x.dim() != 3 or x.shape[-1] != D:
        raise ValueError(f"x must be [B, T, D] or [B, T, H, D'] with D = H*D' = {D} as in weight, got {list(shape)}")
    B, T = x.shape[:2]
    N = B if pack is None else pack.N
    if residual is not None:
        if residual.dim() < 3 or residual.numel() != x.numel() or residual.shape[:2] != (B, T):
            raise ValueError(f"residual must be shaped like x, {list(shape)}, got {list(residual.shape)}")
        residual = residual.flatten(2)
    for name, t, want in (("bias", bias, (D,)), ("initial_state", h0, (N, D, W))):
        if t is not None and t.shape != want:
            raise ValueError(f"{name} must be {list(want)}, got {list(t.shape)}")
    tensors = (x, weight, bias, residual, h0)
    for name, t in zip(("x", "weight", "bias", "residual", "initial_state"), tensors, strict=True):
        if t is not None and (t.device != x.device or t.dtype not in _FLOATS):
            raise ValueError(f"{name} is {t.dtype} on {t.device}: must be floating point, on x's device {x.device}")
    p = ConvProblem(
        B,
        T if pack is None else pack.total,
        D,
        W,
        N,
        dtype=x.dtype,
        w_dtype=weight.dtype,
        activation=_ACTIVATIONS[a["activation"]],
        has_bias=bias is not None,
        has_residual=residual is not None,
        has_h0=h0 is not None,
        output_final_state=bool(a["output_final_state"]),
        varlen=pack is not None,
        arch=support.arch_of(x),
    )
    return p, tensors


def prepared(call: Call) -> tuple[torch.Tensor | None, ...]:
    """x in its own strides, weight, bias, residual and h0 contiguous."""
    x, *others = call.tensors
    return x, *(None if t is None else t.contiguous() for t in others)


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a decided call; differentiable."""
    found, p = call.route, call.p
    with support.device_guard(call.tensors[0]):
        support.engaged("cconv", found.what, found.missing, kernels=not found.on_torch)
        y, ht = autograd.apply(found, p, *prepared(call), *call.packed)
        if call.shape[1] > p.T:
            y = torch.nn.functional.pad(y, (0, 0, 0, call.shape[1] - p.T))
    return y.view(call.shape), ht


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(causal_conv1d).parameters.items()
    if parameter.default is not parameter.empty
}


def warmup(
    *,
    B: int,
    T: int,
    D: int | tuple[int, ...],
    W: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.float32,
    activation: str | None = "silu",
    bias: bool = False,
    residual: bool = False,
    initial_state: bool = False,
    output_final_state: bool = False,
    lengths: tuple[int, ...] | None = None,
    backward: bool = True,
    device: str | torch.device = "cuda",
) -> float:
    """Compile, before the first training step, every kernel that one configuration of `causal_conv1d` launches;
    returns the seconds it took.

    D may list every channel count the model convolves. `lengths` are those of packed sequences (B = 1; T is then
    ignored). Leaves torch's random state alone. Raises RuntimeError with the reason when there is no such device or
    such a call would go to fla: nothing would have been compiled.
    """
    start = time.perf_counter()
    reason = support.absent(device)
    if reason:
        raise RuntimeError(f"warmup compiled nothing: {reason}")
    random = torch.Generator(device=device).manual_seed(0)

    def draw(*shape, dtype=dtype):
        x = torch.randn(shape, generator=random, device=device, dtype=torch.float32).to(dtype)
        return x.requires_grad_(backward)

    cu_seqlens = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    N, T = (B, T) if lengths is None else (len(lengths), sum(lengths))
    for channels in (D,) if isinstance(D, int) else D:
        call = {
            "x": draw(B, T, channels), "weight": draw(channels, W, dtype=weight_dtype),
            "bias": draw(channels, dtype=weight_dtype) if bias else None,
            "residual": draw(B, T, channels) if residual else None,
            "initial_state": draw(N, channels, W) if initial_state else None,
        }
        options = {"activation": activation, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        ok, what = is_supported(**call, **options)
        if not ok or call["x"].is_cpu:
            raise RuntimeError(f"warmup compiled nothing: {what}")
        with torch.no_grad():  # a route of its own, without a backward
            causal_conv1d(**call, **options)
        if backward:
            y, ht = causal_conv1d(**call, **options)
            leaves = [t for t in call.values() if t is not None]
            warming.run_backwards(y, ht, leaves)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
