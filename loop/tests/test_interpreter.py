"""The repaired interpreter agrees with torch on bf16."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from loop import interpreter

interpreter.install()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a GPU the same tests hold for the compiled kernels


@triton.jit
def dot_kernel(a, b, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_a = tl.load(a + m[:, None] * K + k[None, :])
    b_b = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(o + m[:, None] * N + n[None, :], tl.dot(b_a, b_b, input_precision="ieee"))


@triton.jit
def mixed_kernel(x, y, product, larger, rounded, total, prefix, N: tl.constexpr):
    i = tl.arange(0, N)
    b_x, b_y = tl.load(x + i), tl.load(y + i)
    tl.store(product + i, b_x * b_y)
    tl.store(larger + i, (b_x > b_y).to(tl.int32))
    tl.store(rounded + i, (b_x.to(tl.float32) * 1.01).to(tl.bfloat16))
    tl.store(total, tl.sum(b_x, 0))
    tl.store(prefix + i, tl.cumsum(b_x, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_equals_the_fp32_product(dtype):
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=gen).to(DEVICE, dtype) for s in ((16, 32), (32, 16)))
    o = torch.empty(16, 16, device=DEVICE)
    dot_kernel[(1,)](a, b, o, 16, 16, 32)
    torch.testing.assert_close(o, a.float() @ b.float(), rtol=2e-6, atol=2e-6)


def test_bf16_arithmetic_casts_and_reductions():
    gen = torch.Generator().manual_seed(1)
    x, y = (torch.randn(64, generator=gen).to(DEVICE, torch.bfloat16) for _ in range(2))
    product, rounded, prefix, total = (torch.empty(n, dtype=torch.bfloat16, device=DEVICE) for n in (64, 64, 64, 1))
    larger = torch.empty(64, dtype=torch.int32, device=DEVICE)
    mixed_kernel[(1,)](x, y, product, larger, rounded, total, prefix, 64)
    assert torch.equal(product, x * y)
    assert torch.equal(larger.bool(), x > y)
    assert torch.equal(rounded, (x.float() * 1.01).bfloat16())
    torch.testing.assert_close(total, x.float().sum()[None].bfloat16(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(prefix, x.float().cumsum(0).bfloat16(), rtol=1e-2, atol=1e-2)


def test_bf16_rounding_matches_torch_on_awkward_values():
    inf, nan = float("inf"), float("nan")
    awkward = [0.0, -0.0, 1e-40, -1e-45, 3.4e38, inf, -inf, nan, 1.00390625, 1.01171875, -1.00390625]
    x = torch.cat([torch.tensor(awkward), torch.randn(4096, generator=torch.Generator().manual_seed(2)) * 1e-3])
    bits = interpreter.f32_to_bf16(x.numpy())
    want = x.bfloat16()
    nan = want.isnan().numpy()
    assert np.array_equal(bits[~nan], want.view(torch.uint16).numpy()[~nan])
    assert np.isnan(interpreter.bf16_to_f32(bits)[nan]).all()
    assert np.array_equal(interpreter.bf16_to_f32(bits)[~nan], want.float().numpy()[~nan])
