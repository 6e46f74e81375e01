"""causal_conv1d on CPU tensors against torch's own convolution in fp64: outputs and gradients, over every feature."""
import itertools

import pytest
import torch
from small_inputs import conv, conv_definition, gradients, rms

from kernel_fun.cconv import causal_conv1d, is_supported


def check(tensors, flags, tolerance=1e-12):
    assert is_supported(**tensors, **flags) == (True, "plain torch on CPU tensors")
    outputs = causal_conv1d(**tensors, **flags, output_final_state=True)
    expected = conv_definition(**tensors, **flags)
    got, want = gradients(outputs, tensors), gradients(expected, tensors)
    for a, b in zip(outputs, expected, strict=True):
        assert a.dtype == tensors["x"].dtype
        assert rms(a, b) < tolerance
    for name, grad in want.items():
        assert got[name].dtype == tensors[name].dtype
        assert rms(got[name], grad) < tolerance, name


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize(("bias", "residual", "h0"), list(itertools.product([False, True], repeat=3)))
def test_features(activation, bias, residual, h0):
    check(*with_activation(conv(bias=bias, residual=residual, h0=h0), activation))


def with_activation(made, activation):
    tensors, flags = made
    return tensors, {**flags, "activation": activation}


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("T", [1, 2, 40])
def test_widths_and_lengths(W, T):
    check(*with_activation(conv(W=W, T=T, h0=True), "silu"))


@pytest.mark.parametrize("sequences", [(7, 1, 0, 12), (2, 2, 2), (20,)])
def test_packed(sequences):
    check(*with_activation(conv(sequences=sequences, T=24, bias=True, residual=True, h0=True), "silu"))


def test_rows_beyond_the_last_sequence_are_zero_and_inert():
    tensors, flags = conv(sequences=(7, 4), T=24, residual=True)
    with torch.no_grad():
        tensors["x"][:, 11:] = float("nan")
    y, _ = causal_conv1d(**tensors, **flags)
    assert torch.count_nonzero(y[:, 11:]) == 0
    for name, grad in gradients((y,), tensors).items():
        assert grad.isfinite().all(), name
    assert torch.count_nonzero(gradients((causal_conv1d(**tensors, **flags)[0],), tensors)["x"][:, 11:]) == 0


def test_heads_are_flattened():
    tensors, flags = conv(D=6)
    y, state = causal_conv1d(**tensors, **flags, output_final_state=True)
    heads = {**tensors, "x": tensors["x"].detach().view(2, 20, 3, 2).requires_grad_()}
    y4, state4 = causal_conv1d(**heads, **flags, output_final_state=True)
    assert y4.shape == (2, 20, 3, 2)
    assert torch.equal(y4.flatten(2), y)
    assert torch.equal(state, state4)
    for head in (y4.sum(), y4.transpose(1, 3).sum()):  # dy with stride 0, and by another path
        a = torch.autograd.grad(head, heads["x"], retain_graph=True)[0]
        b = torch.autograd.grad(y.sum(), tensors["x"], retain_graph=True)[0]
        assert a.shape == (2, 20, 3, 2)
        assert torch.equal(a.flatten(2), b)
    sliced = torch.randn(2, 20, 3, 5, dtype=torch.float64)
    sliced[..., :2] = tensors["x"].detach().view(2, 20, 3, 2)
    assert torch.equal(causal_conv1d(sliced[..., :2], tensors["weight"])[0], y4)


def test_any_strides_of_x_and_dy():
    tensors, flags = conv(D=6)
    y, _ = causal_conv1d(**tensors, **flags)
    assert y.is_contiguous()
    wide = torch.randn(2, 20, 18, dtype=torch.float64)
    wide[..., 6:12] = tensors["x"].detach()
    by_time = tensors["x"].detach().transpose(1, 2).contiguous().transpose(1, 2)
    for x in (wide[..., 6:12].detach(), by_time):
        strided = {**tensors, "x": x.requires_grad_()}
        y2, _ = causal_conv1d(**strided, **flags)
        assert torch.equal(y, y2)
        a = torch.autograd.grad(y2.sum(), x)[0]
        b = torch.autograd.grad(y.sum(), tensors["x"], retain_graph=True)[0]
        assert torch.equal(a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_half_and_single_precision(dtype, tolerance):
    check(*with_activation(conv(dtype=dtype, bias=True, residual=True, h0=True), "silu"), tolerance)


def test_each_gradient_has_its_inputs_dtype():
    """fp16 x with a weight, a bias, a residual and a state in other types: y and the state are fp16 all the same."""
    dtypes = {"x": torch.float16, "weight": torch.float32, "bias": torch.bfloat16, "residual": torch.float32,
              "initial_state": torch.float32}
    tensors, flags = conv(bias=True, residual=True, h0=True)
    tensors = {name: t.detach().to(dtypes[name]).requires_grad_() for name, t in tensors.items()}
    y, state = causal_conv1d(**tensors, **flags, activation="silu", output_final_state=True)
    assert (y.dtype, state.dtype) == (torch.float16, torch.float16)
    want = conv_definition(**tensors, **flags, activation="silu")
    got, expected = gradients((y, state), tensors), gradients(want, tensors)
    for name, grad in got.items():
        assert grad.dtype == dtypes[name]
        assert rms(grad, expected[name]) < 1e-2, name


def test_sums_over_time_are_fp32():
    """4,096 tokens of 1 in fp16: a sum in fp16 would stop at 2,048."""
    x = torch.ones(1, 4096, 2, dtype=torch.float16, requires_grad=True)
    weight, bias = torch.ones(2, 4, requires_grad=True), torch.ones(2, requires_grad=True)
    y, _ = causal_conv1d(x, weight, bias)
    dw, db = torch.autograd.grad(y, (weight, bias), torch.ones_like(y))
    assert dw[0].tolist() == [4093, 4094, 4095, 4096]
    assert db.tolist() == [4096, 4096]


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("h0", [False, True])
def test_the_final_state_is_the_last_W_inputs(T, h0):
    """All of x where there are so many, and the initial state's or zeros before it; changing it changes no input."""
    tensors, flags = conv(T=T, h0=h0)
    _, state = causal_conv1d(**tensors, **flags, output_final_state=True)
    before = tensors["initial_state"] if h0 else torch.zeros(2, 6, 4, dtype=torch.float64)
    assert torch.equal(state, torch.cat([before, tensors["x"].mT], -1)[..., -4:])
    kept = {name: t.detach().clone() for name, t in tensors.items()}
    state.detach().zero_()
    assert all(torch.equal(kept[name], t) for name, t in tensors.items())


def test_only_the_final_state_is_differentiated():
    tensors, flags = conv(h0=True, T=2)
    _, state = causal_conv1d(**tensors, **flags, output_final_state=True)
    _, want = conv_definition(**tensors, **flags)
    got, expected = gradients((state,), tensors), gradients((want,), tensors)
    assert rms(got["x"], expected["x"]) < 1e-12
    assert rms(got["initial_state"], expected["initial_state"]) < 1e-12
