"""Named peers: other people's implementations, as arms of a run.

    fla-gluon         cconv: fla's own Gluon kernels, an option that is off by default
    kernel_fun-0.2.0  the earlier package of our name; PEER_KERNEL_FUN is the folder that holds its `kernel_fun`
    cudnn-1.32        kda: the cuDNN front end's Hopper kernels, with fla's for what they lack (gate, norm, sigmoid)

A peer that is not installed, or does not take a case, says so in `supports`. A peer that falls back to fla must never
be timed under its own name, so each one's own predicate is asked first.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from loop.environ import environment
from loop.inputs import LEAVES

PEERS = {"kda": ("kernel_fun-0.2.0", "cudnn-1.32"), "cconv": ("fla-gluon", "kernel_fun-0.2.0")}
CUDNN_PLAN = "kda_hopper_cuda"  # the only one with a backward on sm_90
GATE_LIMIT = -5.0  # below this, per step, cuDNN's kernels overflow


def names(family: str) -> tuple[str, ...]:
    return PEERS[family]


def installed(name: str) -> bool:
    """Is the peer's code on this machine? Whether it takes a case is its arm's `supports` to say."""
    if name == "kernel_fun-0.2.0":
        return _kernel_fun_init() is not None
    if name == "cudnn-1.32":
        return importlib.util.find_spec("cudnn") is not None
    return True  # fla's own


def make(family: str, name: str):
    """The peer's arm."""
    from loop import arms, sources

    run, supports, what = {
        ("cconv", "fla-gluon"): (gluon_cconv, _gluon_supports, "fla's Gluon convolution"),
        (family, "kernel_fun-0.2.0"): (
            functools.partial(_kernel_fun, family), functools.partial(_kernel_fun_supports, family), "kernel_fun 0.2.0",
        ),
        ("kda", "cudnn-1.32"): (cudnn_kda, _cudnn_supports, "cuDNN front end, Hopper kernels"),
    }[family, name]  # fmt: skip
    return arms.Arm(
        name, family, what, sources.arm(family, name), None, run, _needs_gpu(supports), lambda case: (name,)
    )


def _needs_gpu(supports: Callable) -> Callable:
    def ask(case):
        return supports(case) if torch.cuda.is_available() else (False, "needs a GPU")

    return ask


# ---------------------------------------------------------------------------------------------------------- fla's Gluon
@functools.cache
def _gluon_function():
    """fla's autograd Function with the switch on in both passes: the backward runs later, in autograd's own thread."""
    from fla.modules.causal_conv1d.ops import CausalConv1dFunction

    class GluonConv1d(CausalConv1dFunction):
        @staticmethod
        def forward(ctx, *args):
            with environment(FLA_CONV_GLUON="1"):
                return CausalConv1dFunction.forward(ctx, *args)

        @staticmethod
        def backward(ctx, *grads):
            with environment(FLA_CONV_GLUON="1"):
                return CausalConv1dFunction.backward(ctx, *grads)

    return GluonConv1d


def _gluon_supports(case) -> tuple[bool, str]:
    if case.h0 or case.ht:
        return False, "fla's Gluon backward takes no state"
    if case.layout == "transposed":
        return False, "fla's Gluon kernels need contiguous channels"
    return (True, "") if 2 <= case.W <= 4 else (False, f"fla's Gluon kernels need W 2 to 4, got {case.W}")


def gluon_cconv(inputs):
    """`causal_conv1d` of fla with FLA_CONV_GLUON=1 around both passes, whatever the process has it set to."""
    from fla.modules.causal_conv1d import ops

    kept = ops.CausalConv1dFunction
    ops.CausalConv1dFunction = _gluon_function()
    try:
        from loop.arms import fla_cconv

        return fla_cconv(inputs)
    finally:
        ops.CausalConv1dFunction = kept


# ---------------------------------------------------------------------------------------------------- kernel_fun 0.2.0
def _kernel_fun_init() -> Path | None:
    folder = os.environ.get("PEER_KERNEL_FUN")
    init = Path(folder or ".") / "kernel_fun" / "__init__.py"
    return init if folder and init.exists() else None


@functools.cache
def _kernel_fun_package():
    """The earlier package under a name of its own: it imports itself relatively throughout. None when it is not
    there.
    """
    init = _kernel_fun_init()
    if init is None:
        return None
    name = "peer_kernel_fun"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(init.parent)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _kernel_fun_op(family: str):
    package = _kernel_fun_package()
    return importlib.import_module(f"{package.__name__}.{family}") if package else None


def _kernel_fun_supports(family: str, case) -> tuple[bool, str]:
    op = _kernel_fun_op(family)
    if op is None:
        return False, "PEER_KERNEL_FUN does not name a folder that holds kernel_fun 0.2.0"
    from loop import inputs as making

    if getattr(case, "layout", "contiguous") != "contiguous":
        return False, "its answer depends on strides; only contiguous cases are asked"
    one = making.make(case, 0, "cuda")
    given = {name: one[name] for name in LEAVES[family]}
    options = {k: v for k, v in case.op_kwargs().items() if k != "scale"}
    if family == "cconv":
        x, weight = given.pop("x"), given.pop("weight")
        ok, reason = op.is_supported(
            x, weight, **{k: v for k, v in given.items() if v is not None}, **options, cu_seqlens=one["cu_seqlens"]
        )
    else:
        ok, reason = op.is_supported(
            given["q"], given["v"], initial_state=given["initial_state"], cu_seqlens=one["cu_seqlens"], **options
        )
    return ok, reason or ""


def _kernel_fun(family: str, inputs):
    op = _kernel_fun_op(family)
    function = {"kda": "chunk_kda", "cconv": "causal_conv1d"}[family]
    tensors = {name: inputs[name] for name in LEAVES[family] if inputs[name] is not None}
    packed = {} if inputs["cu_seqlens"] is None else {"cu_seqlens": inputs["cu_seqlens"]}
    return getattr(op, function)(**tensors, **inputs.case.op_kwargs(), **packed)


# --------------------------------------------------------------------------------------------------------------- cuDNN
@functools.cache
def _cudnn_op():
    """cuDNN's op, or the reason there is none."""
    try:
        from cudnn.linear_attention.ops import kimi_delta_attention
    except ImportError as err:
        return f"the cuDNN front end is not installed: {err}"
    return kimi_delta_attention


def _cudnn_supports(case) -> tuple[bool, str]:
    p = case.problem()
    if isinstance(_cudnn_op(), str):
        return False, _cudnn_op()
    if torch.cuda.get_device_capability() != (9, 0):
        return False, "its plan is for sm_90"
    if (p.K, p.V) != (128, 128) or p.H != p.HV:
        return False, f"needs K=V=128 and H=HV, got K={p.K} V={p.V} H={p.H} HV={p.HV}"
    if p.dtype != torch.bfloat16 or p.neg_eigval:
        return False, "needs bf16 and beta in (0, 1)"
    if p.gate != "safe":
        return False, f"needs gates of at least {GATE_LIMIT:g} a step; a {p.gate} gate is not bounded"
    return True, ""


def cudnn_kda(inputs):
    """cuDNN's forward and backward between fla's gate, norm and sigmoid, which its backward does not have."""
    from fla.modules.l2norm import l2norm
    from fla.ops.common.gate import fused_beta_sigmoid
    from fla.ops.kda.gate import fused_kda_gate

    case = inputs.case
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    B, T = q.shape[:2]
    if case.l2norm:
        q, k = l2norm(q), l2norm(k)
    if case.gate != "log":
        g = fused_kda_gate(g, inputs["A_log"], inputs["dt_bias"], lower_bound=case.lower_bound)
    beta = fused_beta_sigmoid(beta) if case.beta_sigmoid else beta.float()
    h0 = inputs["initial_state"]
    out = _cudnn_op()(
        *(t.reshape(B * T, *t.shape[2:]) for t in (q, k, v, g.float(), beta)),
        _cudnn_bounds(inputs, B, T),
        scale=case.K**-0.5,
        initial_state=None if h0 is None else h0.transpose(-1, -2).contiguous(),
        output_final_state=case.ht,
        plan_name=CUDNN_PLAN,
    )
    o, ht = (out[0], out[1]) if isinstance(out, tuple) else (out, None)
    return o.reshape(B, T, *o.shape[1:]), ht.transpose(-1, -2) if case.ht else None


_bounds: dict[tuple, torch.Tensor] = {}


def _cudnn_bounds(inputs, B: int, T: int) -> torch.Tensor:
    """cu_seqlens int32 as cuDNN wants it, kept per shape so that a graph capture meets no copy from the host."""
    given = inputs["cu_seqlens"]
    key = (B, T, inputs.case.lengths)
    if key not in _bounds:
        dense = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=inputs["q"].device)
        _bounds[key] = dense if given is None else given.to(torch.int32)
    return _bounds[key]
