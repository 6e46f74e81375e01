"""Calls that a GPU's tests share, large enough for the kernels, and the names of what those launch."""
import importlib

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


def kda_call(name):
    made, flags = KDA[name]
    shape = {"B": 2, "T": 256, "H": 4, "K": 128, "V": 128}
    tensors, more = kda(**{**shape, "dtype": torch.bfloat16, "device": "cuda", **made})
    return tensors, {**more, **flags}


def conv_call(**made):
    return conv(**{"B": 2, "T": 700, "D": 512, "dtype": torch.bfloat16, "device": "cuda", **made})


FAMILIES = {
    "kda": (lambda: kda_call("production"), ours.chunk_kda, {}),
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
    from triton.runtime.jit import JITFunction

    modules = [module for _, module, _ in promoted.modules(f"kernel_fun.{family}") if module is not None]
    functions = [f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)]
    return {f.fn.__name__ for f in functions}
