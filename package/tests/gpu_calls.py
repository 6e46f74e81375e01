"""Calls that a GPU's tests share, large enough for the kernels, and the names of what those launch."""
import importlib
import inspect
import sys

import pytest
import torch
from small_inputs import conv, kda

from kernel_fun import cconv
from kernel_fun import kda as ours
from kernel_fun._common import promoted

# name -> arguments of inputs.kda and flags of the call
KDA = {
    "log": ({}, {}),
    "production": ({"gate": "softplus", "V": 256}, {"use_qk_l2norm_in_kernel": True}),
    "kimi": ({"gate": "safe"}, {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}),
    "gva_state": ({"HV": 8, "h0": True}, {}),
    "ragged": ({"T": 300, "h0": True}, {}),
    "packed": ({"sequences": (130, 1, 64, 200), "T": 420, "h0": True}, {}),
    "state_v_first": ({"gate": "softplus"}, {"state_v_first": True, "use_qk_l2norm_in_kernel": True}),
    # few sequences of many chunks: the scans are cut into segments
    "long": ({"B": 1, "T": 1600, "gate": "softplus", "h0": True}, {"use_qk_l2norm_in_kernel": True}),
    "packed_long": ({"sequences": (1300, 1, 1900), "T": 3210}, {}),
}


def kda_call(name, table=KDA, **changes):
    made, flags = table[name]
    shape = {"B": 2, "T": 256, "H": 4, "K": 128, "V": 128}
    tensors, more = kda(**{**shape, "dtype": torch.bfloat16, "device": "cuda", **made, **changes})
    return tensors, {**more, **flags}


def conv_call(**made):
    return conv(**{"B": 2, "T": 700, "D": 512, "dtype": torch.bfloat16, "device": "cuda", **made})


FAMILIES = {
    "kda": (lambda **changes: kda_call("production", **changes), ours.chunk_kda, {}),
    "cconv": (conv_call, cconv.causal_conv1d, {"activation": "silu"}),
}


def made(family):
    """(tensors, a call of the family's operator on them that its kernels serve)."""
    need_kernels(family)
    make, operator, flags = FAMILIES[family]
    tensors, more = make()
    ok, what = importlib.import_module(f"kernel_fun.{family}").is_supported(**tensors, **more, **flags)
    assert ok, what
    return tensors, lambda: operator(**tensors, **more, **flags)


def launched(work):
    """Names of the device kernels that `work` launches; it has run once before."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}


def need_kernels(family):
    if not any(module is not None for _, module, _ in promoted.modules(f"kernel_fun.{family}")):
        pytest.skip(f"no promoted {family} kernel that imports here")


def triton_names(family):
    """Names of all Triton kernels in the promoted modules of a family."""
    modules = [module for _, module, _ in promoted.modules(f"kernel_fun.{family}") if module is not None]
    return set().union(*map(jitted, modules))


def jitted(module):
    """Names of the Triton kernels that a module holds, compiled ones and those of Triton's interpreter alike."""
    from triton.runtime.jit import KernelInterface

    return {layers(f)[-1].__name__ for f in vars(module).values() if isinstance(f, KernelInterface)}


def ours_among(names, family="kda"):
    """Those of the `names` of device kernels that are ours: kernels in the CuTe DSL, which fla has none of, go by its
    prefix and their function.
    """
    mine = triton_names(family)
    return {name for name in names if name in mine or name.startswith("kernel_cutlass")}


def of_module(names, module):
    """Those of the `names` of device kernels that the promoted kernel in `module` can have launched."""
    in_cute, mine = promoted._in_cute(module.__name__), jitted(module)
    return {name for name in names if name in mine or (in_cute and name.startswith("kernel_cutlass"))}


def flas_kernels():
    """What stands for each of fla's Triton kernels in its module: its tuner and heuristics around it."""
    for name in ("ops.kda", "ops.common.gate", "modules.l2norm"):
        importlib.import_module(f"fla.{name}")
    from triton.runtime.jit import KernelInterface

    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "fla" and m is not None]
    return [f for module in modules for f in list(vars(module).values()) if isinstance(f, KernelInterface)]


def flas_names():
    return {layers(kernel)[-1].__name__ for kernel in flas_kernels()}


def layers(kernel):
    """What decorates a Triton kernel, outermost first, and last the Python function."""
    found = [kernel]
    while hasattr(found[-1], "fn"):
        found.append(found[-1].fn)
    return found


def untuned(monkeypatch):
    """fla's kernels with the first of their configurations: trying them all takes minutes and changes no result."""
    from triton.runtime.autotuner import Autotuner

    for kernel in flas_kernels():
        for layer in layers(kernel):
            if isinstance(layer, Autotuner):
                monkeypatch.setattr(layer, "configs", layer.configs[:1])


def plan_of(tensors, flags):
    """The plan that a `chunk_kda` call with these arguments follows; it must be one that runs here."""
    from kernel_fun.kda import ops

    bound = inspect.signature(ops.chunk_kda).bind(**tensors, **flags)
    bound.apply_defaults()
    call = ops.decide(bound.arguments)
    assert not isinstance(call, str), call
    return call.route.plan
