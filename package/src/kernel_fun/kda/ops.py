"""`chunk_kda`: fla's signature, results and errors, with this package's kernels where they serve the call.

Every argument is either understood here or sends the call to fla, whole and unchanged, with the reason in the log.
`is_supported` takes the same arguments and says which of the two a call will be. On CPU tensors, where fla cannot run,
the chain's plain-torch reference runs.
"""
import inspect
import itertools
import math
import time
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._common import packed, support
from .._common.dispatch import Route, needs_grad, route
from .._common.problem import CHUNK, KdaProblem
from . import autograd, chain

_REQUIRED = ("q", "k", "v", "g", "beta")
_EXTRAS = frozenset({"A_log", "dt_bias", "chunk_size", "transpose_state_layout"})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


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
            if there is one.
        return_intermediate_states, cp_context, use_graph: send the call to fla; max_num_seqs belongs to use_graph.
        disable_recompute: sends the call to fla; without effect on a CPU.
        **kwargs: A_log [HV] and dt_bias [HV*K] of the gate; chunk_size 64, or 32, which sends the call to fla;
            transpose_state_layout, the old name of state_v_first. Any other keyword sends the call to fla.

    Returns:
        (o, final_state): o [B, T, HV, V] in q's dtype; final_state fp32 like initial_state, or None when not asked
        for. Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state, each gradient in its input's dtype.
        Rows beyond cu_seqlens[-1] are 0, their gradients too.

    Raises:
        ValueError, AssertionError: as fla does, and where fla would read out of bounds: mixed dtypes or devices, a
            state, A_log or dt_bias of the wrong shape, a lower_bound that is not negative.
        kernel_fun._common.compat.FlaDriftError: the installed fla lacks a function this package calls.
    """
    arguments = locals()
    call = decide(arguments)
    if isinstance(call, str):
        support.fell_back("kda", call, q)
        return _fla(arguments)
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

    Returns (True, the kernels that will run) or (False, why the call goes to fla). For arguments that `chunk_kda`
    refuses, (False, its error). A packed call on a GPU without `cu_seqlens_cpu` waits for the GPU once per content of
    `cu_seqlens`.
    """
    return explain(locals())


def explain(arguments: dict) -> tuple[bool, str]:
    """`is_supported` on the arguments as a dict, `kwargs` included."""
    try:
        call = decide(arguments)
    except (ValueError, AssertionError) as error:
        return False, f"{type(error).__name__}: {error}"
    return (False, call) if isinstance(call, str) else (True, call.route.what)


def _fla(a: dict):
    """The caller's arguments to fla, unchanged. Those at their default are left out, so an older fla that lacks one
    still takes the call.
    """
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    given = {name: a[name] for name in _REQUIRED}
    given.update((name, a[name]) for name, default in _DEFAULTS.items() if a[name] is not default)
    with support.fla_only():
        return fla_chunk_kda(**given, **a["kwargs"])


def decide(a: dict) -> Call | str:
    """The call to run here, or the reason to go to fla. Raises for arguments that are wrong on either path."""
    q = a["q"]
    reason = support.disabled("kda") or support.device_reason(q) or _fla_features(a, q.is_cpu)
    if reason:
        return reason
    kwargs, cu_seqlens = a["kwargs"], a["cu_seqlens"]
    state_v_first = a["state_v_first"]
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError("transpose_state_layout is the old name of state_v_first=True: pass state_v_first alone")
        state_v_first = kwargs["transpose_state_layout"]
    _check_flags(a)
    pack = None
    if cu_seqlens is not None:
        pack = _pack(q, cu_seqlens, a["cu_seqlens_cpu"])
        if isinstance(pack, str):
            return pack
    p, tensors = _describe(a, pack, state_v_first)
    found = route("kda", chain, p, q)
    reason = found.reason or ("" if found.on_torch else support.below_floor(p.scan_ctas))
    reason = reason or found.capture_reason(q, needs_grad(*tensors))
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


def _check_flags(a: dict) -> None:
    kwargs, lower_bound = a["kwargs"], a["lower_bound"]
    chunk_size = kwargs.get("chunk_size", CHUNK)
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size={chunk_size}: accepted are 32 and 64")
    if a["use_gate_in_kernel"]:
        if lower_bound is None:
            if kwargs.get("A_log") is None:
                raise ValueError("A_log=None: use_gate_in_kernel=True needs A_log [HV], or a lower_bound")
            if a["safe_gate"]:
                raise ValueError("lower_bound=None: safe_gate with use_gate_in_kernel needs -5 <= lower_bound < 0")
        elif a["safe_gate"] and not -5 <= lower_bound < 0:
            raise ValueError(f"lower_bound={lower_bound}: safe_gate=True accepts -5 <= lower_bound < 0")
        elif not -math.inf < lower_bound < 0:
            raise ValueError(f"lower_bound={lower_bound}: must be negative and finite, it bounds a log decay")
    if a["allow_neg_eigval"] and not a["use_beta_sigmoid_in_kernel"]:
        raise ValueError("allow_neg_eigval=True: needs use_beta_sigmoid_in_kernel=True (beta is 2 sigmoid of it)")


def _pack(q, cu_seqlens, cu_seqlens_cpu):
    if q.shape[0] != 1:
        raise ValueError(f"q has B={q.shape[0]}: with cu_seqlens the sequences are packed along T of one row, B=1")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q on {q.device}: they must be on one device")
    if support.capturing(q):
        return "cu_seqlens under CUDA graph capture (its chunk tables would be frozen into the graph)"
    pack = packed.describe(cu_seqlens, cu_seqlens_cpu)
    if pack.total > q.shape[1]:
        raise ValueError(f"cu_seqlens ends at {pack.total}, but q has T={q.shape[1]} tokens")
    return pack if pack.starts_at_zero else "cu_seqlens does not start at 0"


def _describe(a: dict, pack, state_v_first: bool) -> tuple[KdaProblem, tuple]:
    """The problem and its tensors (q k v g beta A_log dt_bias h0), checked."""
    q, k, v, g, beta, h0 = a["q"], a["k"], a["v"], a["g"], a["beta"], a["initial_state"]
    in_kernel, kwargs = a["use_gate_in_kernel"], a["kwargs"]
    A_log, dt_bias = (kwargs.get("A_log"), kwargs.get("dt_bias")) if in_kernel else (None, None)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if pack is None else pack.N
    if q.shape != k.shape:
        raise AssertionError(f"q and k must have one shape, got q={list(q.shape)} and k={list(k.shape)}")
    if K > 256:
        raise AssertionError(f"K={K}: at most 256 are accepted")
    if HV % H:
        raise AssertionError(f"v has HV={HV} heads: must be a multiple of the H={H} heads of q and k")
    for name, t, want in (("v", v, (B, T, HV, V)), ("g", g, (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        if t.shape != want:
            raise AssertionError(f"{name} must be {list(want)} to go with q={list(q.shape)}, got {list(t.shape)}")
    if h0 is not None:
        if h0.shape[0] != N:
            raise ValueError(f"initial_state holds {h0.shape[0]} states: must be one for each of the {N} sequences")
        if h0.dtype != torch.float32 and not h0.dtype == q.dtype == torch.float64:
            raise AssertionError(f"initial_state is {h0.dtype}: must be torch.float32")
        want = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        if h0.shape != want:
            layout = f"with state_v_first={bool(state_v_first)}"
            raise ValueError(f"initial_state must be {list(want)} {layout}, got {list(h0.shape)}")
    if A_log is not None:
        A_log = _gate_parameter("A_log", A_log, HV)
    if dt_bias is not None:
        dt_bias = _gate_parameter("dt_bias", dt_bias, HV * K)
    dtype, device = q.dtype, q.device
    if not dtype == k.dtype == v.dtype or dtype not in _FLOATS:
        raise ValueError(f"q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if g.dtype not in _FLOATS or beta.dtype not in _FLOATS:
        raise ValueError(f"g and beta must be floating point, got {g.dtype}, {beta.dtype}")
    tensors = (q, k, v, g, beta, A_log, dt_bias, h0)
    for name, t in zip(("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"), tensors[1:], strict=True):
        if t is not None and t.device != device:
            raise ValueError(f"{name} is on {t.device}, q on {device}: all tensors must be on one device")
    lower_bound = a["lower_bound"] if in_kernel else None
    scale = a["scale"]
    if pack is not None and pack.total < T:
        T = pack.total
    p = KdaProblem(
        B, T, H, HV, K, V, N,
        NT=B * -(-T // CHUNK) if pack is None else pack.NT,
        dtype=dtype,
        g_dtype=g.dtype,
        beta_dtype=beta.dtype,
        gate="log" if not in_kernel else "softplus" if lower_bound is None else "safe",
        lower_bound=lower_bound,
        safe_gate=bool(a["safe_gate"]),
        scale=K**-0.5 if scale is None else float(scale),
        l2norm=bool(a["use_qk_l2norm_in_kernel"]),
        beta_sigmoid=bool(a["use_beta_sigmoid_in_kernel"]),
        neg_eigval=bool(a["allow_neg_eigval"]),
        has_h0=h0 is not None,
        output_final_state=bool(a["output_final_state"]),
        has_A_log=A_log is not None,
        has_dt_bias=dt_bias is not None,
        varlen=pack is not None,
        arch=support.arch_of(q),
    )
    return p, tensors


def _gate_parameter(name: str, x: torch.Tensor, size: int) -> torch.Tensor:
    """A_log or dt_bias as the chain wants it: flat, contiguous, fp32 (fp64 stays)."""
    if x.numel() != size:
        raise ValueError(f"{name} must hold {size} values, got shape {list(x.shape)}")
    if x.dim() != 1:
        x = x.reshape(-1)
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).contiguous()


def _run(call: Call):
    found, p = call.route, call.p
    q, k, v, g, beta, A_log, dt_bias, h0 = call.tensors
    if h0 is not None and call.state_v_first:
        h0 = h0.transpose(-1, -2)
    with support.device_guard(q):
        support.engaged("kda", found.what, found.missing)
        o, ht = autograd.apply(
            found, p, q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous(), A_log, dt_bias,
            None if h0 is None else h0.contiguous(), *call.packed,
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


def warmup(
    *,
    B: int = 1,
    T: int = 256,
    H: int = 16,
    K: int = 128,
    V: int = 128,
    HV: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] | None = None,
    initial_state: bool = False,
    backward: bool = True,
    device: str | torch.device = "cuda",
    **flags,
) -> float:
    """Compile, before the first training step, every kernel that one configuration of `chunk_kda` launches; returns
    the seconds it took.

    Runs a forward and (with `backward`) a backward on made-up inputs of the given shape: give the run's own B and T
    where memory allows, and `lengths` (of the packed sequences, B = 1) for a packed call. g_dtype None means fp32, or
    `dtype` with use_gate_in_kernel. `flags` are chunk_kda's own (use_gate_in_kernel=True, lower_bound=-5.0, ...);
    A_log and dt_bias are made up. Leaves torch's random state alone.

    Raises RuntimeError with the reason when such a call would go to fla, KERNEL_FUN_KDA_MIN_CTAS included: nothing
    would have been compiled, and step 1 would pay for it.
    """
    start = time.perf_counter()
    HV = H if HV is None else HV
    random = torch.Generator(device=device).manual_seed(0)
    in_kernel = flags.get("use_gate_in_kernel", False)
    total = T if lengths is None else sum(lengths)

    def draw(*shape, dtype=dtype):
        return torch.randn(shape, generator=random, device=device, dtype=torch.float32).to(dtype)

    g = draw(B, total, HV, K)
    call = {
        "q": draw(B, total, H, K),
        "k": draw(B, total, H, K),
        "v": draw(B, total, HV, V),
        "g": g.to(g_dtype or dtype) if in_kernel else F.logsigmoid(g.float()).to(g_dtype or torch.float32),
        "beta": draw(B, total, HV).float().sigmoid().to(beta_dtype),
    }
    if in_kernel:
        call["A_log"], call["dt_bias"] = draw(HV, dtype=torch.float32), draw(HV * K, dtype=torch.float32)
    if lengths is not None:
        call["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    if initial_state:
        state = (V, K) if flags.get("state_v_first") else (K, V)
        call["initial_state"] = draw(B if lengths is None else len(lengths), HV, *state, dtype=torch.float32)
    for x in call.values():
        if backward and x.is_floating_point():
            x.requires_grad_(True)
    ok, what = is_supported(**call, **flags)
    if not ok or call["q"].is_cpu:
        raise RuntimeError(f"warmup compiled nothing: {what}")
    o, ht = chunk_kda(**call, **flags)
    if backward:
        leaves = [x for x in call.values() if x.requires_grad]
        outputs = [x for x in (o, ht) if x is not None]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)
    torch.cuda.synchronize(o.device)
    return time.perf_counter() - start
