"""Launches without the work that Triton repeats on every call.

`kernel[grid](...)` binds, specialises and hashes its arguments anew each time, some 100 us of host time for a kernel
with tensor descriptors: more than the kernels of a short sequence take. Here that happens once for each kind of
arguments; afterwards the compiled kernel, which Triton hands back, is called as it is.
"""

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict = {}  # kind of call -> (the kernel, so that its id stays its own; compiled; constexpr values in order)


def launch(kernel, grid: tuple[int, ...], *args, **constants) -> None:
    """`kernel[grid](*args, **constants)`, on torch's current device and stream.

    `args` are all of the kernel's run-time arguments in order: tensors, None, numbers, tensor descriptors. `constants`
    are its constexpr parameters, which come after them, and compile options (num_warps, ...), all hashable. Raises what
    Triton raises.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[grid](*args, **constants)
        return
    key = (id(kernel), torch.cuda.current_device(), *map(_kind, args), *constants.items())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        if isinstance(compiled, CompiledKernel):  # a hook of Triton's can take the launch over, and then this is None
            rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            _compiled[key] = kernel, compiled, rest
        return
    _, compiled, rest = found
    compiled[(*grid, 1, 1)[:3]](*args, *rest)


def _kind(x):
    """What of a run-time argument Triton may compile for; at least as fine as its own choice."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return x == 1, x % 16 == 0, x.bit_length() > 31
    if x is None or isinstance(x, (bool, float)):
        return type(x)
    return x.base.dtype, *x.block_shape, x.layout  # a tensor descriptor
