"""`chunk_kda`: fla's signature, results and errors, with this package's kernels where they serve the call.

Every argument is either understood here or sends the call to fla, whole and unchanged, with the reason in the log.
`is_supported` takes the same arguments and says which of the two a call will be. On CPU tensors, where fla cannot run,
the chain's plain-torch reference runs.
"""
import inspect
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._common import packed, support
from .._common.dispatch import Route, needs_grad, route
from .._common.problem import KdaProblem
from . import autograd, chain, checks

_REQUIRED = ("q", "k", "v", "g", "beta")
_EXTRAS = frozenset({"A_log", "dt_bias", "chunk_size", "transpose_state_layout"})


class Call(NamedTuple):
    """A call that runs here: its route, problem and tensors, and how to put its results into the caller's layout."""

    route: Route
    p: KdaProblem
    tensors: tuple                  # q k v g beta A_log dt_bias h0
    packed: tuple                   # cu_seqlens chunk_indices chunk_offsets, or three Nones
    state_v_first: bool
    T: int                          # tokens in the caller's buffers; more than p.T when cu_seqlens ends early


@torch.compiler.disable
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context=None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs,
):
    """Kimi Delta Attention over whole sequences; the arguments are those of `fla.ops.kda.chunk_kda`.

    Args:
        q, k: [B, T, H, K], one floating dtype, K <= 256.
        v: [B, T, HV, V] in the same dtype, HV a multiple of H.
        g: [B, T, HV, K], any floating dtype: the natural-log decay of each step (<= 0), or, with `use_gate_in_kernel`,
            the raw gate input.
        beta: [B, T, HV], any floating dtype; logits with `use_beta_sigmoid_in_kernel`.
        scale: of the read-out; K ** -0.5 when None.
        initial_state: fp32 [N, HV, K, V] ([N, HV, V, K] with `state_v_first`) or None. N is B, or the number of packed
            sequences.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: normalise q and k over K first (epsilon 1e-6 inside the root).
        use_gate_in_kernel: g becomes -exp(A_log) softplus(g + dt_bias), or, with `lower_bound`,
            lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta becomes sigmoid(beta), or 2 sigmoid(beta).
        safe_gate: the caller promises gates of at least -5 a step. With `use_gate_in_kernel` it needs
            -5 <= lower_bound < 0.
        lower_bound: see `use_gate_in_kernel`.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N+1] integers, sequences packed along T of one batch row; `cu_seqlens_cpu` its copy on the host,
            if there is one. The two are compared in shape, and in value where both are on the CPU.
        return_intermediate_states, cp_context, use_graph: send the call to fla; max_num_seqs belongs to use_graph.
        disable_recompute: sends the call to fla; without effect on a CPU.
        **kwargs: A_log [HV] and dt_bias [HV*K] of the gate, which without `use_gate_in_kernel` are ignored, as fla
            ignores them; chunk_size 64, or 32, which sends the call to fla;
            transpose_state_layout, the old name of state_v_first. Any other keyword sends the call to fla.

    Returns:
        (o, final_state): o [B, T, HV, V] in q's dtype; final_state fp32 like initial_state, or None when not asked
        for. Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state, each gradient in its input's dtype.
        Rows beyond cu_seqlens[-1] are 0, their gradients too.

    Raises:
        TypeError: what should be a tensor is none.
        ValueError, AssertionError: as fla does, and where fla would read out of bounds: mixed dtypes or devices, a
            state, A_log or dt_bias of the wrong shape, a lower_bound that is not negative.
        kernel_fun._common.compat.FlaDriftError: the installed fla lacks a function this package calls.
    """
    arguments = locals()
    call = decide(arguments)
    if isinstance(call, str):
        support.fell_back("kda", call, q)
        return _fla(arguments, call)
    if "transpose_state_layout" in kwargs:
        warnings.warn("transpose_state_layout is deprecated: use state_v_first", DeprecationWarning, stacklevel=3)
    return _run(call)


def is_supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context=None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs,
) -> tuple[bool, str]:
    """What `chunk_kda` will do with these arguments, without doing it.

    Returns (True, the kernels that will run, and fla's own stages between them) or (False, why the call goes to fla).
    For arguments that `chunk_kda` refuses, (False, its error). A packed call on a GPU without `cu_seqlens_cpu` waits
    for the GPU once per content of `cu_seqlens`.
    """
    return explain(locals())


def explain(arguments: dict) -> tuple[bool, str]:
    """`is_supported` on the arguments as a dict, `kwargs` included."""
    try:
        call = decide(arguments)
    except Exception as error:  # whatever the call would raise
        return False, f"{type(error).__name__}: {error}"
    return (False, call) if isinstance(call, str) else (True, call.route.what)


def _fla(a: dict, reason: str):
    """The caller's arguments to fla for `reason`, unchanged. Those at their default are left out, so an older fla
    that lacks one still takes the call.
    """
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    given = {name: a[name] for name in _REQUIRED}
    given.update((name, a[name]) for name, default in _DEFAULTS.items() if a[name] is not default)
    with support.fla_only(), support.gpu_needed("chunk_kda", reason, a["q"]):
        return fla_chunk_kda(**given, **a["kwargs"])


def decide(a: dict) -> Call | str:
    """The call to run here, or the reason to go to fla. Raises for arguments that are wrong on either path."""
    q = a["q"]
    reason = support.disabled("kda")
    if reason:
        return reason  # whatever the arguments are: they are then fla's to judge
    checks.check_tensors(a)
    reason = support.device_reason(q) or _fla_features(a, q.is_cpu)
    if reason:
        return reason
    kwargs, cu_seqlens = a["kwargs"], a["cu_seqlens"]
    state_v_first = a["state_v_first"]
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError("transpose_state_layout is the old name of state_v_first=True: pass state_v_first alone")
        state_v_first = kwargs["transpose_state_layout"]
    checks.check_flags(a)
    pack = None
    if cu_seqlens is not None:
        pack = packed.of_call("q", q, cu_seqlens, a["cu_seqlens_cpu"])
        if isinstance(pack, str):
            return pack
    p, tensors = checks.describe(a, pack, state_v_first)
    grad = needs_grad(*tensors)
    found = route("kda", chain, p, q, grad)
    reason = found.reason or ("" if found.on_torch else support.below_floor(p.scan_ctas))
    reason = reason or found.capture_reason(q, grad)
    if reason:
        return reason
    T = q.shape[1]
    if p.T < T:
        tensors = tuple(t[:, : p.T] for t in tensors[:5]) + tensors[5:]
    tables = (None, None, None) if pack is None else (pack.cu_seqlens, pack.chunk_indices, pack.chunk_offsets)
    return Call(found, p, tensors, tables, state_v_first, T)


def _fla_features(a: dict, on_cpu: bool) -> str:
    """The argument that only fla implements, or ""."""
    for name in ("cp_context", "use_graph", "return_intermediate_states"):
        if a[name] is not None and a[name] is not False:
            return f"{name}={a[name] if a[name] is True else type(a[name]).__name__}"
    kwargs = a["kwargs"]
    for name in kwargs:
        if name not in _EXTRAS:
            return f"argument {name!r} is not known here"
    if on_cpu:
        return ""  # the reference has nothing to recompute, and its chunk size shows in no result
    if a["disable_recompute"]:
        return "disable_recompute=True"
    return "chunk_size=32" if kwargs.get("chunk_size") == 32 else ""


def _run(call: Call):
    found, p = call.route, call.p
    q, k, v, g, beta, A_log, dt_bias, h0 = call.tensors
    if h0 is not None and call.state_v_first:
        h0 = h0.transpose(-1, -2)
    with support.device_guard(q):
        support.engaged("kda", found.what, found.missing, kernels=not found.on_torch)
        o, ht = autograd.apply(
            found, p, *(support.dense(x) for x in (q, k, v, g, beta, A_log, dt_bias, h0)), *call.packed
        )
        if ht is not None and call.state_v_first:
            ht = ht.transpose(-1, -2).contiguous()
        if p.T < call.T:
            o = F.pad(o, (0, 0, 0, 0, 0, call.T - p.T))
    return o, ht


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(chunk_kda).parameters.items()
    if parameter.default is not parameter.empty
}
