"""On the GPU: fla's own convolution tests, their shapes and tolerances, against fp64 and against fla."""
import pytest
import torch
from gpu_calls import conv_call, need_kernels
from small_inputs import conv_definition, gradients, rms

from kernel_fun import cconv

pytestmark = pytest.mark.gpu

FLAS = dict.fromkeys(("y", "ht", "x", "weight", "bias", "residual", "initial_state"), 1e-3)
BUDGETS = {
    torch.float32: FLAS,
    torch.float16: FLAS,
    # fla asks nothing of bf16: rounding a number to it is 1.7e-3 already
    torch.bfloat16: {**FLAS, "y": 0.005, "x": 0.008, "residual": 0.005, "initial_state": 0.008, "weight": 0.02,
                     "bias": 0.02},
}
CASES = {
    "swish": {"T": 64, "D": 128, "W": 3, "activation": "swish", "bias": True, "residual": True},
    "no_bias": {"T": 128, "D": 128, "activation": "swish", "residual": True},
    "bias_alone": {"T": 64, "D": 128, "W": 3, "activation": "swish", "bias": True},
    "bare": {"T": 128, "D": 128, "activation": "swish"},
    "linear": {"T": 500, "D": 1024, "W": 3, "bias": True, "residual": True},
    "linear_residual": {"T": 1024, "D": 1024, "residual": True},
    "states": {"T": 500, "D": 256, "activation": "swish", "h0": True, "bias": True},
    "packed": {"T": 1000, "D": 128, "activation": "swish", "sequences": (15, 85, 1, 200, 699), "bias": True},
    "packed_states": {"T": 500, "D": 128, "activation": "swish", "sequences": (4, 7, 40, 449), "h0": True,
                      "residual": True},
    "many_chunks": {"B": 1, "T": 8192, "D": 64, "activation": "swish", "h0": True},
}


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    """fla's kernels with the first of their configurations: trying them all takes minutes and changes no result."""
    from fla.modules.causal_conv1d import ops
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(ops).values():
        while kernel is not None and not isinstance(kernel, Autotuner):
            kernel = getattr(kernel, "fn", None)
        if kernel is not None:
            monkeypatch.setattr(kernel, "configs", kernel.configs[:1])


@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
def test_flas_cases(name, dtype, layout):
    """"sliced": x and the gradient that arrives are parts of wider tensors, as q, k and v of one projection are."""
    need_kernels("cconv")
    made = dict(CASES[name])
    activation = made.pop("activation", None)
    tensors, flags = conv_call(dtype=dtype, **made)
    if layout == "sliced":
        x = tensors["x"].detach()
        tensors["x"] = torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]].requires_grad_()
    call = {**tensors, **flags, "activation": activation}
    ok, what = cconv.is_supported(**call)
    assert ok, what

    def results(operator, **more):
        y, ht = operator(**call, **more)
        y = y.to(dtype)  # fp64's y too, so that each meets the same incoming gradient
        wide = torch.cat([y, torch.zeros_like(y)], -1) if layout == "sliced" else y
        # no gradient at the state's oldest entry, which nothing reads: fla passes none on to x
        return {"y": y, "ht": ht, **gradients((wide[..., : y.shape[-1]], ht[..., 1:]), tensors)}

    from fla.modules.convolution import causal_conv1d as fla

    mine, theirs = (results(operator, output_final_state=True) for operator in (cconv.causal_conv1d, fla))
    exact = results(conv_definition)
    for key, got in mine.items():
        assert rms(got, exact[key]) < BUDGETS[dtype][key], key
        assert rms(got, theirs[key]) < BUDGETS[dtype][key], key
