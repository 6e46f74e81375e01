"""Compiling and calling CuTe kernels on flat torch tensors, for the host side of kernels written in the DSL."""

import functools
import threading

import cutlass
import cutlass.cute as cute
import torch

_TYPES = {
    torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32,
    torch.int64: cutlass.Int64,
}
_compiling = threading.Lock()  # the DSL traces into state of its own, one function at a time


def compile_for(start, dtypes, numbers, options="--enable-tvm-ffi"):
    """`start`, a cute.jit function of one-dimensional tensors, numbers and a stream, for tensors of `dtypes` and
    numbers of the types of `numbers`. The result takes those, and runs on torch's current stream."""
    tensors = [cute.runtime.make_fake_compact_tensor(_TYPES[d], (cute.sym_int64(),), assumed_align=16) for d in dtypes]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    with _compiling:
        return cute.compile(start, *tensors, *numbers, stream, options=options)


@functools.cache
def absent(device, dtype):
    """Stands in for a tensor the call does not have; never read or written."""
    return torch.zeros(4, dtype=dtype, device=device)


def flat(x):
    """One dimension, 16-byte aligned: a view of a parameter may begin anywhere."""
    if x.data_ptr() % 16:
        x = x.clone()
    return x if x.dim() == 1 else x.view(-1)
