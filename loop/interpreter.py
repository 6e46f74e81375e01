"""Triton without a GPU: an interpreter that is right about bf16, and compilation for sm_90.

Triton's interpreter (3.6 to 3.9) keeps a bf16 value as its 16-bit pattern. Dots, arithmetic, comparisons and reductions
of bf16 blocks then work on the patterns, and a cast from fp32 truncates where the GPU rounds to nearest even. All of it
is silent. `install()` widens bf16 operands to fp32 and rounds results properly; it also lets Triton 3.6's interpreter
run on numpy 2.4 and later. `compile_sm90` compiles kernels for Hopper in a child process and reads their resources.
"""

import base64
import functools
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

_REPO = Path(__file__).resolve().parent.parent


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


# --------------------------------------------------------------------------------------------------- sm_90, no GPU
class Compiled(NamedTuple):
    """What the assembler says of a kernel: registers and spilled bytes a thread, bytes of shared memory a CTA; and the
    kernel's forms: Triton's own, PTX, machine code."""

    regs: int
    spills: int
    smem: int
    ttgir: str
    ptx: str
    sass: str


def compile_sm90(fn, signature: dict, constexprs: dict, num_warps: int = 4, num_stages: int = 1, **options) -> Compiled:
    """Compile a Triton or Gluon function for sm_90 with no GPU, in a child process without TRITON_INTERPRET.

    signature: run-time argument name -> Triton type ("*bf16", "*fp32", "i32", ...); "i32:16" also promises divisibility
        by 16, as a launch does for such a value. Pointers are promised 16-byte alignment, as a launch finds it.
    constexprs: constexpr argument name -> value. Every argument of `fn` must be in one of the two.
    options: further compiler options, such as maxnreg=128.
    Raises ValueError for an argument in neither or both, RuntimeError with the compiler's words when it fails.
    """
    return compile_many([(fn, signature, constexprs, num_warps, num_stages, options)])[0]


def compile_many(jobs) -> list[Compiled]:
    """`compile_sm90` for jobs (fn, signature, constexprs, num_warps, num_stages[, options]), all in one child."""
    packed = []
    for fn, signature, constexprs, num_warps, num_stages, *rest in jobs:
        raw = getattr(fn, "fn", fn)
        given, wanted = [*signature, *constexprs], list(inspect.signature(raw).parameters)
        if sorted(given) != sorted(wanted):
            wrong = sorted(set(given) ^ set(wanted)) or sorted(n for n in set(given) if given.count(n) > 1)
            raise ValueError(f"{raw.__name__}: signature and constexprs must name each argument once, see {wrong}")
        constants = {n: getattr(v, "value", v) for n, v in constexprs.items()}
        options = {"num_warps": num_warps, "num_stages": num_stages, **(rest[0] if rest else {})}
        packed.append((inspect.getsourcefile(raw), raw.__name__, dict(signature), constants, options))
    path = os.pathsep.join([str(_REPO), *filter(None, sys.path)])
    child = subprocess.run(
        # Not `-m loop...`: the package would turn the interpreter on. -P: this folder has a profile.py, as Python has.
        [sys.executable, "-P", __file__],
        input=base64.b64encode(pickle.dumps(packed)),
        capture_output=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )
    if child.returncode:
        raise RuntimeError("compiling for sm_90 failed:\n" + child.stderr.decode(errors="replace")[-4000:])
    return [Compiled(*row) for row in pickle.loads(base64.b64decode(child.stdout.split()[-1]))]


def _load(path: str, name: str):
    import importlib.util

    spec = importlib.util.spec_from_file_location("compiled_" + str(abs(hash(path))), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _compile_here(path, name, signature, constants, options) -> tuple:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    fn = _load(path, name)
    types, attrs = {}, {}
    for i, arg in enumerate(fn.arg_names):
        kind, _, divisor = signature.get(arg, "constexpr").partition(":")
        types[arg] = kind
        if kind.startswith("*") or divisor:
            attrs[(i,)] = [["tt.divisibility", int(divisor or 16)]]
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(fn, types, constexprs=constants, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()

        def tool(*args):
            return subprocess.run(
                [str(tools / "cuobjdump"), *args, cubin.name], capture_output=True, text=True, check=True
            ).stdout

        usage = dict(
            f.split(":", 1) for f in tool("--dump-resource-usage").split() if f.startswith(("REG:", "STACK:", "LOCAL:"))
        )
        sass = tool("-sass")
    # A kernel without local arrays has a stack frame only for what the register allocator spilled.
    return (
        int(usage["REG"]),
        int(usage["STACK"]) + int(usage["LOCAL"]),
        int(built.metadata.shared),
        built.asm["ttgir"],
        built.asm["ptx"],
        sass,
    )


if __name__ == "__main__":
    results = [_compile_here(*job) for job in pickle.loads(base64.b64decode(sys.stdin.buffer.read()))]
    print(base64.b64encode(pickle.dumps(results)).decode())
