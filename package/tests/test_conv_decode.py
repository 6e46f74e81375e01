"""The single-token step: the same as the operator on one more token, in place, and fla's on anything but a CPU."""
import inspect

import pytest
import torch
from small_inputs import conv_definition

from kernel_fun import cconv
from kernel_fun.cconv import causal_conv1d_update, decode


def step(shape=(3, 6), W=4, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=random, dtype=torch.float64).to(dtype)

    return {"x": draw(*shape), "cache": draw(3, 6, W), "residual": draw(*shape), "weight": draw(6, W), "bias": draw(6)}


@pytest.mark.parametrize("shape", [(3, 6), (1, 3, 6), (3, 1, 6), (3, 1, 2, 3), (1, 3, 3, 2)])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_one_token_more(shape, activation):
    made = step(shape)
    x, cache = made["x"], made["cache"].clone()
    y, got = causal_conv1d_update(**made, activation=activation)
    row = {name: made[name].reshape(3, 1, 6) for name in ("x", "residual")}
    want, state = conv_definition(**row, weight=made["weight"], bias=made["bias"], initial_state=cache,
                                  activation=activation)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
    assert torch.allclose(y.reshape(3, 1, 6), want, rtol=1e-12)
    assert got is made["cache"]
    assert torch.equal(got, state)


@pytest.mark.parametrize("W", [1, 2, 3, 5])
def test_widths_without_bias_and_residual(W):
    made = step(W=W)
    made = {name: made[name] for name in ("x", "cache", "weight")}
    cache = made["cache"].clone()
    y, _ = causal_conv1d_update(**made)
    want, state = conv_definition(made["x"][:, None], made["weight"], initial_state=cache)
    assert torch.allclose(y, want[:, 0], rtol=1e-12)
    assert torch.equal(made["cache"], state)


def test_types_and_strides():
    """A slice of a wider projection, bf16, with the cache in fp32 and a weight that wants gradients."""
    made = step(dtype=torch.bfloat16)
    wide = torch.zeros(3, 18, dtype=torch.bfloat16)
    wide[:, 6:12] = made["x"]
    cache = made["cache"].float()
    weight = made["weight"].clone().requires_grad_()
    y, got = causal_conv1d_update(**{**made, "x": wide[:, 6:12], "cache": cache, "weight": weight})
    assert (y.dtype, got.dtype, y.requires_grad) == (torch.bfloat16, torch.float32, False)
    assert torch.equal(y, causal_conv1d_update(**{**made, "cache": made["cache"].float()})[0])


ERRORS = {
    "weight": ({"weight": None}, "weight must be [D, W], got None"),
    "activation": ({"activation": "gelu"}, "activation='gelu': accepted are None, 'silu' and 'swish'"),
    "channels": ({"x": torch.zeros(3, 5)}, "with D = 6 as in weight, got [3, 5]"),
    "tokens": ({"x": torch.zeros(3, 2, 6)}, "x must be [N, D], [1, N, D] or [N, 1, D]"),
    "cache": ({"cache": torch.zeros(3, 6, 3)}, "cache must be [3, 6, 4], got [3, 6, 3]"),
    "no_cache": ({"cache": None}, "cache must be [3, 6, 4], got None"),
    "bias": ({"bias": torch.zeros(5)}, "bias must be [6], got [5]"),
    "residual": ({"residual": torch.zeros(3, 5)}, "residual must hold as many values as x, [3, 6], got [3, 5]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    change, message = ERRORS[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the message is checked below)
        causal_conv1d_update(**{**step(), **change})
    assert message in str(raised.value)


def test_signature_is_flas():
    from fla.modules.convolution import causal_conv1d_update as fla

    mine, theirs = (inspect.signature(f).parameters.values() for f in (cconv.causal_conv1d_update, fla))
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("why", ["device", "switch"])
def test_elsewhere_it_is_flas_with_the_reason(monkeypatch, lines, why):
    calls = []
    monkeypatch.setattr("fla.modules.convolution.causal_conv1d_update", lambda **given: calls.append(given) or "fla")
    made = step()
    reason = "KERNEL_FUN_CCONV_DISABLE is set (fla cannot run on CPU tensors)"
    if why == "device":
        made = {name: t.to("meta") for name, t in made.items()}
        reason = "the single-token step is fla's kernel"
    else:
        monkeypatch.setenv("KERNEL_FUN_CCONV_DISABLE", "1")
    assert causal_conv1d_update(**made) == "fla"
    assert all(calls[0][name] is t for name, t in made.items())
    assert lines() == [("WARNING", f"kernel-fun cconv: falling back to fla: {reason}")]


def test_what_is_no_tensor_is_named():
    for name, change, said in (
        ("x", None, "x=None: must be a torch.Tensor"),
        ("x", [1.0], "x of type list: must be a torch.Tensor"),
        ("residual", [1.0], "residual of type list: must be a torch.Tensor or None"),
    ):
        with pytest.raises(TypeError) as raised:
            causal_conv1d_update(**{**step(), name: change})
        assert str(raised.value) == said
    assert decode.is_supported(None) == (False, "TypeError: x=None: must be a torch.Tensor")
