"""Triton and Gluon kernels compiled for Hopper where there is no GPU: registers, spills and code.

A child process compiles, one kernel after the other, for as long as this process lives: here Triton may be its
interpreter, and starting Triton takes longer than most kernels do. This file is also that child's program.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

_REPO = Path(__file__).resolve().parent.parent
_child = None  # (process, file that its stderr goes to), once there is one


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel: registers and spilled bytes a thread, bytes of shared memory a CTA; and the
    kernel's forms: Triton's own, PTX, the binary and, when asked for, its machine code as text."""

    regs: int
    spills: int
    smem: int
    ttgir: str
    ptx: str
    cubin: bytes

    @functools.cached_property
    def sass(self) -> str:
        return _dump(self.cubin, "-sass")


def compile_one(fn, signature: dict, constexprs: dict, num_warps: int = 4, num_stages: int = 1, **options) -> Compiled:
    """Compile a Triton or Gluon function for sm_90.

    signature: run-time argument name -> Triton type ("*bf16", "*fp32", "i32", ...); "i32:16" also promises divisibility
        by 16, as a launch does for such a value. Pointers are promised 16-byte alignment, as a launch finds it.
    constexprs: constexpr argument name -> value. Every argument of `fn` must be in one of the two.
    options: further compiler options, such as maxnreg=128.
    Raises ValueError for an argument in neither or both, RuntimeError with the compiler's words when it fails.
    """
    raw = getattr(fn, "fn", fn)
    given, wanted = [*signature, *constexprs], list(inspect.signature(raw).parameters)
    if sorted(given) != sorted(wanted):
        wrong = sorted(set(given) ^ set(wanted)) or sorted(n for n in set(given) if given.count(n) > 1)
        raise ValueError(f"{raw.__name__}: signature and constexprs must name each argument once, see {wrong}")
    constants = {n: getattr(v, "value", v) for n, v in constexprs.items()}
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    return Compiled(*_ask((inspect.getsourcefile(raw), raw.__name__, dict(signature), constants, options)))


def compile_each(jobs) -> list[Compiled]:
    """`compile_one` for each (fn, signature, constexprs, num_warps, num_stages[, options]), an idea's COMPILE, say."""
    return [compile_one(*job[:5], **(job[5] if len(job) > 5 else {})) for job in jobs]


# ------------------------------------------------------------------------------------------------------ this process
def _start():
    path = os.pathsep.join([str(_REPO), *filter(None, sys.path)])
    said = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the child lives)
    process = subprocess.Popen(
        # Not `-m loop...`: the package would turn the interpreter on. -P: this folder has a profile.py, as Python has.
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )
    return process, said


def _ask(job) -> tuple:
    global _child
    if _child is None or _child[0].poll() is not None:
        _child = _start()
    process, said = _child
    before = said.seek(0, os.SEEK_END)
    try:
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        error, result = pickle.load(process.stdout)
    except (OSError, EOFError):  # the compiler took the process with it
        error, result = f"its process ended with exit code {process.wait()}", None
    except BaseException:  # interrupted: what it answers next would be taken for the next job's
        process.kill()
        raise
    if error:
        said.seek(before)
        words = said.read().decode(errors="replace") + error
        raise RuntimeError(f"compiling {job[1]} for sm_90 failed:\n" + words[-4000:])
    return result


def _dump(cubin: bytes, what: str) -> str:
    """What Triton's own cuobjdump says of a binary."""
    tool = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True).stdout


# --------------------------------------------------------------------------------------------------------- the child
def _serve():
    """Answer each job on stdin with (error, result) on what was stdout, until there are no more."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    with contextlib.suppress(EOFError):
        while True:
            job = pickle.load(jobs)
            try:
                answer = "", _compile(*job)
            except BaseException:
                answer = traceback.format_exc(), None
            sys.stderr.flush()
            pickle.dump(answer, answers)
            answers.flush()


def _load(path: str, name: str):
    spec = importlib.util.spec_from_file_location("compiled_" + str(abs(hash(path))), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _compile(path, name, signature, constants, options) -> tuple:
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
    usage = _dump(built.asm["cubin"], "--dump-resource-usage").split()
    usage = dict(f.split(":", 1) for f in usage if f.startswith(("REG:", "STACK:", "LOCAL:")))
    # A kernel without local arrays has a stack frame only for what the register allocator spilled.
    return (
        int(usage["REG"]),
        int(usage["STACK"]) + int(usage["LOCAL"]),
        int(built.metadata.shared),
        built.asm["ttgir"],
        built.asm["ptx"],
        built.asm["cubin"],
    )


if __name__ == "__main__":
    _serve()
