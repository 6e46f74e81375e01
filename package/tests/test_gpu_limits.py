"""On the GPU: the convolution beyond 2^31 elements and beyond 65,535 blocks, and calls shorter than the window."""
import pytest
import torch
import torch.nn.functional as F
from gpu_calls import need_kernels
from small_inputs import conv_definition, gradients, rms

from kernel_fun import cconv

pytestmark = pytest.mark.gpu


def random(*shape, dtype=torch.bfloat16):
    made = torch.Generator("cuda").manual_seed(0)
    return torch.randn(shape, generator=made, device="cuda", dtype=torch.float32).to(dtype)


def ours(x, weight, **more):
    need_kernels("cconv")
    ok, what = cconv.is_supported(x, weight, activation="silu", **more)
    assert ok, what
    return cconv.causal_conv1d(x, weight, activation="silu", **more)


@pytest.mark.parametrize("layout", ["rows", "channels"])
def test_more_than_2_to_the_31_elements(layout):
    """x is 0 but for its first and last 64 rows: what they give, and what they add to dw, is known from them alone.
    "channels" is x stored as [B, D, T], so that both strides of a row are large.
    """
    D, ends = 4096, 64
    T = 2**31 // D + 512
    x = torch.zeros((1, T, D) if layout == "rows" else (1, D, T), device="cuda", dtype=torch.bfloat16)
    x = x if layout == "rows" else x.transpose(1, 2)
    first, last = random(2, 1, ends, D)
    x[:, :ends], x[:, -ends:] = first, last
    x.requires_grad_()
    weight = random(D, 4, dtype=torch.float32).requires_grad_()
    assert x.numel() > 2**31
    y, state = ours(x, weight, output_final_state=True)
    assert torch.equal(state, last[0, -4:].T[None])
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))  # dy with stride 0
    want_w = 0
    for begin, rows in ((0, first), (T - ends, last)):
        # three rows of zeros after the first piece: its last row is still in their windows
        piece = F.pad(rows, (0, 0, 0, 3 if begin == 0 else 0)).detach().double().requires_grad_()
        want, _ = conv_definition(piece, weight, activation="silu")
        n = piece.shape[1]
        assert rms(y[:, begin : begin + n], want) < 0.005
        upstream = torch.autograd.grad(want.sum(), (piece, weight))
        assert rms(dx[:, begin : begin + ends], upstream[0][:, :ends]) < 0.008
        want_w = want_w + upstream[1]
    assert rms(dw, want_w) < 0.02
    assert torch.count_nonzero(y[:, ends + 3 : T - ends]) == 0


def test_more_than_65535_batch_rows_and_sequences():
    """Dense and packed: 70,000 sequences of 3 tokens, shorter than the window."""
    N, T, D = 70_000, 3, 64
    x = random(N, T, D).requires_grad_()
    weight = random(D, 4, dtype=torch.float32).requires_grad_()
    z = F.conv1d(F.pad(x.double().mT, (3, 0)), weight.double()[:, None], groups=D)
    want = F.silu(z).mT
    expected = gradients((want,), {"x": x, "weight": weight})
    cu_seqlens = torch.arange(0, N * T + 1, T, device="cuda")
    for given, more in ((x, {}), (x.reshape(1, N * T, D), {"cu_seqlens": cu_seqlens})):
        y = ours(given, weight, **more)[0].view(N, T, D)
        assert rms(y, want) < 0.005
        got = gradients((y,), {"x": x, "weight": weight})
        assert rms(got["x"], expected["x"]) < 0.008
        assert rms(got["weight"], expected["weight"]) < 0.02


def test_one_long_row_of_few_channels_and_one_short_row_of_many():
    for T, D in ((1_000_000, 8), (2, 65_536)):
        x, weight = random(1, T, D).requires_grad_(), random(D, 4, dtype=torch.float32).requires_grad_()
        y, want = ours(x, weight)[0], conv_definition(x, weight, activation="silu")[0]
        assert rms(y, want) < 0.005
        got, expected = (gradients((out,), {"x": x, "weight": weight}) for out in (y, want))
        assert rms(got["x"], expected["x"]) < 0.008
        assert rms(got["weight"], expected["weight"]) < 0.02
