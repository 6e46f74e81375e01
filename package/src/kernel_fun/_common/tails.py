"""Zeros for what a packed call's buffers hold after their last sequence.

`x[:, cu_seqlens[-1]:] = 0` would wait for the device, and so break graph capture; here the device finds the place.
"""

import torch
import triton
import triton.language as tl

from .launch import launch

PROGRAMS = 64


@triton.jit(do_not_specialize=["N", "T"])
def zero_tail_kernel(x, cu_seqlens, N, T, WIDTH: tl.constexpr, PROGRAMS: tl.constexpr):
    first, end = tl.load(cu_seqlens + N).to(tl.int64) * WIDTH, tl.cast(T, tl.int64) * WIDTH
    for i in range(first + tl.program_id(0) * 1024, end, PROGRAMS * 1024):
        at = i + tl.arange(0, 1024)
        tl.store(x + at, tl.zeros([1024], x.dtype.element_ty), mask=at < end)


def zero_tail(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the rows of a contiguous `x` [1,T,...] from cu_seqlens[-1] on; returns `x`.

    cu_seqlens: int64 or int32 [N+1] on x's device.
    """
    tokens = x.shape[1]
    launch(
        zero_tail_kernel, (PROGRAMS,), x, cu_seqlens, len(cu_seqlens) - 1, tokens,
        WIDTH=x.numel() // max(tokens, 1), PROGRAMS=PROGRAMS, num_warps=4,
    )  # fmt: skip
    return x
