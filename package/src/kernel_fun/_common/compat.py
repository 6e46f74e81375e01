"""The fla functions this package calls, by module, name and keyword, checked once against the fla that is installed.

A training image moves fla on its own schedule. When a function or keyword has moved, the first call says which one,
by `FlaDriftError`, or under KERNEL_FUN_FALLBACK=1 by the reason of a fallback; it never fails deep inside a step.
"""
import functools
import importlib
import inspect

from . import support

_PACKED = ("cu_seqlens", "chunk_indices")
_SCAN = (*_PACKED, "chunk_size")

# family -> (module, function, keywords we pass)
CALLS = {
    "kda": (
        ("fla.ops.kda", "chunk_kda", ("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state")),
        ("fla.ops.utils.constant", "RCP_LN2", ()),
        ("fla.modules.l2norm", "l2norm_fwd", ("x",)),
        ("fla.modules.l2norm", "l2norm_bwd", ("y", "rstd", "dy")),
        ("fla.ops.common.gate", "fused_beta_sigmoid_fwd", ("x", "scale")),
        ("fla.ops.common.gate", "fused_beta_sigmoid_bwd", ("x", "dy", "scale")),
        ("fla.ops.utils", "chunk_local_cumsum", ("g", "chunk_size", "reverse", "scale", *_PACKED)),
        ("fla.ops.kda.gate", "kda_gate_chunk_cumsum",
         ("g", "A_log", "dt_bias", "scale", "chunk_size", "lower_bound", *_PACKED)),
        ("fla.ops.kda.gate", "kda_gate_bwd", ("g", "A_log", "dt_bias", "dyg", "lower_bound")),
        ("fla.ops.kda.chunk_intra", "chunk_kda_fwd_intra",
         ("q", "k", "v", "gk", "beta", "scale", "chunk_size", "safe_gate", *_PACKED)),
        ("fla.ops.kda.wy_fast", "recompute_w_u_fwd", ("q", "k", "v", "beta", "A", "gk", *_PACKED)),
        ("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_fwd_h",
         ("k", "w", "u", "gk", "initial_state", "output_final_state", *_SCAN)),
        ("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_bwd_dhu",
         ("q", "k", "w", "gk", "h0", "dht", "do", "dv", "scale", *_SCAN)),
        ("fla.ops.gla.chunk", "chunk_gla_fwd_o_gk", ("q", "v", "g", "A", "h", "scale", "chunk_size", *_PACKED)),
        ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd_dAv", ("q", "k", "v", "do", "A", "scale", "chunk_size", *_PACKED)),
        ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd_wy_dqkg_fused",
         ("q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv", "scale", *_SCAN)),
        ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd_intra",
         ("q", "k", "g", "beta", "dAqk", "dAkk", "dq", "dk", "db", "dg", "chunk_size", "safe_gate", *_PACKED)),
    ),
    "cconv": (
        ("fla.modules.convolution", "causal_conv1d",
         ("x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation", "cu_seqlens")),
        ("fla.modules.convolution", "causal_conv1d_fwd",
         ("x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation", *_PACKED)),
        ("fla.modules.convolution", "causal_conv1d_bwd",
         ("x", "dy", "dht", "weight", "bias", "residual", "initial_state", "activation", *_PACKED)),
        ("fla.modules.convolution", "causal_conv1d_update",
         ("x", "cache", "residual", "weight", "bias", "activation")),
    ),
}


def if_taken(fn, **keywords) -> dict:
    """Those of the keywords that `fn` takes: for what one supported fla version wants and another computes itself."""
    taken = _parameters(fn)
    return {name: value for name, value in keywords.items() if name in taken}


@functools.cache
def _parameters(fn) -> frozenset[str]:
    return frozenset(inspect.signature(fn).parameters)


class FlaDriftError(RuntimeError):
    """The installed fla no longer has a function, or a keyword of it, that this package calls."""


def drift(family: str) -> list[str]:
    """What has moved in the installed fla for `family` ("kda" or "cconv"), one line each; empty when nothing has."""
    moved = []
    for module, name, keywords in CALLS[family]:
        try:
            fn = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            moved.append(f"{module}.{name} is gone ({error})")
            continue
        if not keywords:
            continue
        accepted = inspect.signature(fn).parameters
        if all(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in accepted.values()):
            continue
        missing = [keyword for keyword in keywords if keyword not in accepted]
        if missing:
            moved.append(f"{module}.{name} no longer takes {', '.join(missing)}")
    return moved


@functools.cache
def _moved(family: str) -> str:
    return "; ".join(drift(family))


def reason(family: str) -> str:
    """"" when fla is as this package expects it. Otherwise FlaDriftError, or under KERNEL_FUN_FALLBACK the reason to
    go to fla.
    """
    moved = _moved(family)
    if not moved:
        return ""
    from .. import versions

    text = f"fla-core {versions()['fla-core']} has moved: {moved}"
    if support.switch("KERNEL_FUN_FALLBACK"):
        return text
    raise FlaDriftError(f"{text} (KERNEL_FUN_FALLBACK=1 sends calls to fla instead)")
