"""Launches without the work that Triton repeats on every call.

`kernel[grid](...)` binds, specialises and hashes its arguments anew each time, some 100 us of host time for a kernel
with tensor descriptors: more than the kernels of a short sequence take. Here that happens once for each kind of
arguments; afterwards the compiled kernel, which Triton hands back, is called as it is.
"""

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict = {}  # kind of call -> (the kernel, so that its id stays its own; compiled; start; constexpr values)
_tiles: dict = {}  # what Triton compiles for of a tensor descriptor -> an object that stands for it, quick to compare
_odd: dict = {}  # dtype -> the same for a tensor that does not begin at a multiple of 16 bytes
_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # without asking whether CUDA has begun
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# JITFunction.run of these versions ends in the call of CompiledKernel.run that `launch` makes; a later one's may not.
_knobs = triton.knobs if triton.__version__.startswith(("3.6.", "3.7.")) and _stream is not None else None


def launch(kernel, grid: tuple[int, ...], *args, **constants) -> None:
    """`kernel[grid](*args, **constants)`, on torch's current device and stream.

    `args` are all of the kernel's run-time arguments in order: tensors, None, numbers, tensor descriptors. `constants`
    are its constexpr parameters, which come after them, and compile options (num_warps, ...), all hashable. Raises what
    Triton raises.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[grid](*args, **constants)
        return
    device = _device()
    key = (id(kernel), device, *kinds(args), *constants, *constants.values())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        if isinstance(compiled, CompiledKernel):  # a hook of Triton's can take the launch over, and then this is None
            rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            _compiled[key] = kernel, compiled, None if _knobs is None else compiled.run, rest
        return
    _, compiled, start, rest = found
    if len(grid) < 3:
        grid = (*grid, 1, 1)[:3]
    if start is None or _told():
        compiled[grid](*args, *rest)
    else:  # the same, but that there is nobody to tell of the launch
        start(*grid, _stream(device), compiled.function, compiled.packed_metadata, None, None, None, *args, *rest)


def _told():
    """Does a profiler want to be told of launches? Triton's hooks are chains, mostly empty."""
    runtime = _knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


def kinds(args) -> list:
    """What of each run-time argument Triton may compile for; at least as fine as its own choice."""
    out = []
    for x in args:
        kind = type(x)
        if kind is Tensor or isinstance(x, Tensor):
            kind = x.dtype if x.data_ptr() % 16 == 0 else _odd.setdefault(x.dtype, object())
        elif kind is int:
            kind = 1 if x == 1 else (x % 16 == 0) * 2 + (x.bit_length() > 31) * 4 + (x.bit_length() > 63) * 8
        elif x is not None and not isinstance(x, (bool, float)):
            kind = getattr(x, "launch_kind", None) or tiles_kind(x)
        out.append(kind)
    return out


def tiles_kind(descriptor):
    """The kind of a tensor descriptor, as `kinds` has it: one object for all that Triton does not tell apart. It stays
    with the descriptor, for its next launch."""
    kind = _tiles.setdefault((descriptor.base.dtype, *descriptor.block_shape, descriptor.layout), object())
    getattr(descriptor, "__dict__", {})["launch_kind"] = kind
    return kind
