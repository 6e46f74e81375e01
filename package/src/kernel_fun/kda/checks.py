"""What a `chunk_kda` call must satisfy, and the problem it is. Every error names the argument, its value and what is
accepted, in the exception type that fla raises for it.
"""
import contextlib
import functools
import math

import torch

from .._common import support
from .._common.problem import CHUNK, KdaProblem

_problem = functools.lru_cache(maxsize=4096)(KdaProblem)  # two dozen fields; what is kept by problem is found sooner
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def check_tensors(a: dict) -> None:
    """TypeError for what should be a tensor and is not; ValueError unless q has four dimensions. Where
    use_gate_in_kernel does not ask for A_log and dt_bias they are not looked at, as in fla.
    """
    support.check_tensors(a, ("q", "k", "v", "g", "beta"), ("initial_state", "cu_seqlens"))
    if a["cu_seqlens"] is not None:
        support.check_tensors(a, (), ("cu_seqlens_cpu",))
    if a["use_gate_in_kernel"]:
        support.check_tensors(a["kwargs"], (), ("A_log", "dt_bias"))
    if a["q"].dim() != 4:
        raise ValueError(f"q must be [B, T, H, K], got {list(a['q'].shape)}")


def check_flags(a: dict) -> None:
    """Raise ValueError for a flag that is wrong by itself or beside another. `a` holds the call's arguments by name."""
    kwargs, lower_bound = a["kwargs"], a["lower_bound"]
    chunk_size = kwargs.get("chunk_size", CHUNK)
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size={chunk_size}: accepted are 32 and 64")
    _check_number("scale", a["scale"])
    if a["use_gate_in_kernel"]:
        _check_number("lower_bound", lower_bound)
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


def _check_number(name: str, value) -> None:
    """TypeError unless it is None or a number, which a tensor of one element is too."""
    if value is None:
        return
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, str):
            float(value)
            return
    raise TypeError(f"{name}={' '.join(repr(value).split())[:60]}: must be a number or None")


def describe(a: dict, pack, state_v_first: bool) -> tuple[KdaProblem, tuple]:
    """The problem and its tensors (q k v g beta A_log dt_bias h0), checked."""
    q, k, v, g, beta, h0 = a["q"], a["k"], a["v"], a["g"], a["beta"], a["initial_state"]
    in_kernel, kwargs = a["use_gate_in_kernel"], a["kwargs"]
    A_log, dt_bias = (kwargs.get("A_log"), kwargs.get("dt_bias")) if in_kernel else (None, None)
    B, T, H, K = q.shape
    if v.dim() != 4:
        raise ValueError(f"v must be [B, T, HV, V], got {list(v.shape)}")
    HV, V = v.shape[2:]
    N = B if pack is None else pack.N
    if q.shape != k.shape:
        raise AssertionError(f"q and k must have one shape, got q={list(q.shape)} and k={list(k.shape)}")
    if not 0 < K <= 256:
        raise AssertionError(f"K={K}: 1 to 256 are accepted")
    if not HV or not V:
        raise ValueError(f"v must have heads and channels, got {list(v.shape)}")
    if not H or HV % H:
        raise AssertionError(f"v has HV={HV} heads: must be a multiple of the H={H} heads of q and k")
    for name, t, want in (("v", v, (B, T, HV, V)), ("g", g, (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        if t.shape != want:
            raise AssertionError(f"{name} must be {list(want)} to go with q={list(q.shape)}, got {list(t.shape)}")
    if h0 is not None:
        if h0.dim() and h0.shape[0] != N:
            raise ValueError(f"initial_state holds {h0.shape[0]} states: must be one for each of the {N} sequences")
        if h0.dtype != torch.float32 and not h0.dtype == q.dtype == torch.float64:
            raise AssertionError(f"initial_state is {h0.dtype}: must be torch.float32")
        want = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        if h0.shape != want:
            layout = f"with state_v_first={bool(state_v_first)}"
            raise ValueError(f"initial_state must be {list(want)} {layout}, got {list(h0.shape)}")
    if A_log is not None:
        A_log = _gate_parameter("A_log", A_log, HV, q.dtype)
    if dt_bias is not None:
        dt_bias = _gate_parameter("dt_bias", dt_bias, HV * K, q.dtype)
    dtype, device = q.dtype, q.device
    if not dtype == k.dtype == v.dtype or dtype not in _FLOATS:
        raise ValueError(f"q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if g.dtype not in _FLOATS or beta.dtype not in _FLOATS:
        raise ValueError(f"g and beta must be floating point, got {g.dtype}, {beta.dtype}")
    tensors = (q, k, v, g, beta, A_log, dt_bias, h0)
    for name, t in zip(("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"), tensors[1:], strict=True):
        if t is not None and t.device != device:
            raise ValueError(f"{name} is on {t.device}, q on {device}: all tensors must be on one device")
    lower_bound = float(a["lower_bound"]) if in_kernel and a["lower_bound"] is not None else None
    scale = a["scale"]
    if pack is not None and pack.total < T:
        T = pack.total
    p = _problem(
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


def _gate_parameter(name: str, x: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A_log or dt_bias as the chain wants it: flat, contiguous, fp32 (fp64 where q's `dtype` is)."""
    if x.numel() != size:
        raise ValueError(f"{name} must hold {size} values, got shape {list(x.shape)}")
    if x.dim() != 1:
        x = x.reshape(-1)
    return (x if x.dtype == dtype == torch.float64 else x.float()).contiguous()
