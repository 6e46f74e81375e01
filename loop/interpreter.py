"""Triton's interpreter, made right about bf16.

Triton's interpreter (3.6 to 3.9) keeps a bf16 value as its 16-bit pattern. Dots, arithmetic, comparisons and reductions
of bf16 blocks then work on the patterns, and a cast from fp32 truncates where the GPU rounds to nearest even. All of it
is silent. `install()` widens bf16 operands to fp32 and rounds results properly; it also lets Triton 3.6's interpreter
run on numpy 2.4 and later.
"""

import functools

import numpy as np


# ------------------------------------------------------------------------------------------------ interpreter repairs
def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """The fp32 values of bf16 bit patterns (uint16), exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) of fp32 values, rounded to nearest even as the GPU does; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(x))


@functools.cache
def install() -> None:
    """Repair the interpreter of the installed Triton, once per process. Does nothing to compiled kernels."""
    import triton.language as tl
    from triton.runtime import interpreter as tri

    handle, builder = tri.TensorHandle, tri.InterpreterBuilder

    def is_bf16(x) -> bool:
        # A comparison's result carries its operands' type with boolean data, so the data is asked too.
        return isinstance(x, handle) and x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16

    def widen(x):
        return handle(bf16_to_f32(x.data), tl.float32) if is_bf16(x) else x

    def narrow(x):
        return handle(f32_to_bf16(x.data), tl.bfloat16) if x.data.dtype == np.float32 else x

    def arithmetic(method):
        """Run `method(self, *operands, ...)` in fp32 when an operand is bf16, and round its float result to bf16."""

        @functools.wraps(method)
        def call(self, *args, **kwargs):
            if not any(map(is_bf16, args)):
                return method(self, *args, **kwargs)
            return narrow(method(self, *map(widen, args), **kwargs))

        return call

    dot, cast, fp_to_fp = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def create_dot(self, a, b, d, *args, **kwargs):
        return dot(self, widen(a), widen(b), d, *args, **kwargs)

    def cast_impl(self, src, dst_type):
        if is_bf16(src):
            wide = widen(src)
            return wide if dst_type.scalar == tl.float32 else cast(self, wide, dst_type)
        if dst_type.scalar == tl.bfloat16:
            return narrow(handle(src.data.astype(np.float32), tl.float32))
        return cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        nearest = rounding_mode in (None, tri._ir.ROUNDING_MODE.RTNE)
        if is_bf16(src) or (dst_type.scalar == tl.bfloat16 and nearest and src.dtype.primitive_bitwidth >= 16):
            return cast_impl(self, src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    for name in ("binary_op", "unary_op", "create_fma", "create_clampf"):
        setattr(builder, name, arithmetic(getattr(builder, name)))

    def widen_tensor(t):
        if not (isinstance(t, tl.core.tensor) and is_bf16(t.handle)):
            return t
        shape = list(t.handle.data.shape)
        return tl.core.tensor(widen(t.handle), tl.block_type(tl.float32, shape) if t.type.is_block() else tl.float32)

    def narrow_tensor(ops, t):
        bits = f32_to_bf16(t.handle.data)
        return ops.to_tensor(bits if t.type.is_block() else bits.item(), tl.bfloat16)

    def reduction(method):
        @functools.wraps(method)
        def apply(self, operand):
            if not isinstance(operand, tuple):
                return apply(self, (operand,))[0]
            wide = tuple(map(widen_tensor, operand))
            out = method(self, wide)
            return tuple(
                narrow_tensor(self, o) if w is not x and o.dtype == tl.float32 else o
                for x, w, o in zip(operand, wide, out, strict=False)
            )

        return apply

    tri.ReduceScanOpInterface.apply = reduction(tri.ReduceScanOpInterface.apply)

    patch_tensor = tri._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        # numpy 2.4 refuses int() of a one-element array, which Triton 3.6 relies on.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    tri._patch_lang_tensor = patch_lang_tensor
