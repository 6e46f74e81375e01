"""In a process of its own: what is compiled by `warmup`, and by calls of the same configuration after it, as JSON.

    python warm_process.py NAME     the configuration of that name in CONFIGURATIONS
"""
import json
import sys

import pytest
import torch
from gpu_calls import kda_call, untuned
from small_inputs import gradients

from kernel_fun import kda as ours

NORM, SIGMOID = {"use_qk_l2norm_in_kernel": True}, {"use_beta_sigmoid_in_kernel": True}
SAFE = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}
STATES = {"output_final_state": True, "state_v_first": True}
NARROW = {"K": 64, "V": 64, "dtype": torch.float16}
LENGTHS = (130, 1, 64, 200)
# arguments of small_inputs.kda and flags of the call; the same for `warmup`
CONFIGURATIONS = {
    "production": (({"V": 256, "gate": "softplus"}, NORM), {"V": 256, "use_gate_in_kernel": True, **NORM}),
    "kimi_states": (
        ({"gate": "safe", "h0": True}, NORM | SIGMOID | STATES),
        {"initial_state": True, **SAFE, **NORM, **SIGMOID, **STATES},
    ),
    "packed": (
        ({"B": 1, "T": 1, "sequences": LENGTHS, "HV": 8}, {}),
        {"B": 1, "T": sum(LENGTHS), "lengths": LENGTHS, "HV": 8},
    ),
    "long": (({"B": 1, "T": 1600, "gate": "softplus"}, NORM), {"B": 1, "T": 1600, "use_gate_in_kernel": True, **NORM}),
    "narrow": ((NARROW, {}), NARROW),
}


def counted():
    """Counts of what is compiled, or loaded from a cache on disk, from now on; by compiler."""
    from triton.runtime.jit import JITFunction

    counts = {"triton": 0, "cute": 0}

    def count(name, function):
        def counting(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counting

    JITFunction._do_compile = count("triton", JITFunction._do_compile)
    try:
        from cutlass import cute
    except ImportError:
        return counts
    cute.compile = count("cute", cute.compile)
    return counts


def calls(name):
    """As in training and in evaluation, of the configuration's shape."""
    table = {name: CONFIGURATIONS[name][0]}
    tensors, flags = kda_call(name, table)
    with torch.no_grad():
        ours.chunk_kda(**tensors, **flags)
    outputs = ours.chunk_kda(**tensors, **flags)
    for some in (outputs, outputs[:1]) if outputs[1] is not None else (outputs,):
        gradients(some, tensors, retain=True)
    torch.cuda.synchronize()


def main(name):
    untuned(pytest.MonkeyPatch())
    counts = counted()
    ours.warmup(**{"B": 2, "T": 256, "H": 4, "K": 128, "V": 128, "g_dtype": torch.float32, **CONFIGURATIONS[name][1]})
    warmed = dict(counts)
    calls(name)
    print(json.dumps({"warmup": warmed, "after": {of: counts[of] - n for of, n in warmed.items()}}))


if __name__ == "__main__":
    main(sys.argv[1])
