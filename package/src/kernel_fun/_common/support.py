"""Which calls this package may take at all (switches, hardware), and the log lines that say what happened.

Switches are environment variables read at every call, so that one process can compare with and without:

    KERNEL_FUN_DISABLE=1         every call goes to fla
    KERNEL_FUN_KDA_DISABLE=1     chunk_kda goes to fla
    KERNEL_FUN_CCONV_DISABLE=1   causal_conv1d goes to fla
    KERNEL_FUN_FALLBACK=1        an fla whose functions have moved means a warning and fla, instead of an error
    KERNEL_FUN_KDA_MIN_CTAS=N    chunk_kda calls whose scan has a grid of fewer than N CTAs go to fla
    KERNEL_FUN_DEBUG=1           every call logs its decision at WARNING, so that it shows without any logging set-up
"""
import contextlib
import functools
import logging
import os
import re
import threading
import weakref

import torch

from .problem import INTERPRETER

log = logging.getLogger("kernel_fun")
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_said: set[str] = set()
_local = threading.local()


def switch(name: str) -> bool:
    """Is the environment variable `name` on? A value that is neither on nor off warns once and counts as unset."""
    value = os.environ.get(name)
    if not value:
        return False
    if value.lower() in _ON:
        return True
    if value.lower() not in _OFF:
        _say(f"{name}={value!r} is ignored: accepted are {', '.join(_ON + _OFF)}", logging.WARNING, every_time=False)
    return False


def below_floor(ctas: int) -> str:
    """The reason when a `chunk_kda` whose scan launches `ctas` CTAs is below the floor that KERNEL_FUN_KDA_MIN_CTAS
    sets, else "". Unset there is none. The log says once that there is one.
    """
    name = "KERNEL_FUN_KDA_MIN_CTAS"
    value = os.environ.get(name)
    if not value:
        return ""
    if not re.fullmatch("[0-9]{1,9}", value):
        _say(f"{name}={value!r} is ignored: accepted is a number of CTAs, 0 or more", logging.WARNING, every_time=False)
        return ""
    floor = int(value)
    _say(f"kernel-fun kda: calls with a scan grid below {floor} CTAs go to fla ({name}; without it none do)",
         logging.INFO, every_time=False)
    return f"a grid of {ctas} CTAs, below the {floor} of {name}" if ctas < floor else ""


def disabled(family: str) -> str:
    """The reason when a switch sends `family` ("kda" or "cconv") to fla, else ""."""
    if switch("KERNEL_FUN_DISABLE"):
        return "KERNEL_FUN_DISABLE is set"
    name = f"KERNEL_FUN_{family.upper()}_DISABLE"
    return f"{name} is set" if switch(name) else ""


# ---------------------------------------------------------------------------------------------------------- arguments
def check_tensors(given: dict, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """TypeError for the first of the named arguments that is not a tensor; the `optional` ones may be None or missing.
    """
    for name in required + optional:
        t = given.get(name)
        if isinstance(t, torch.Tensor) or (t is None and name in optional):
            continue
        kind = f"{type(t).__module__}.{type(t).__qualname__}".removeprefix("builtins.")
        got = f"{name}=None" if t is None else f"{name} of type {kind}"
        raise TypeError(f"{got}: must be a torch.Tensor{' or None' if name in optional else ''}")


def dense(x: torch.Tensor | None) -> torch.Tensor | None:
    """`x` contiguous and, on a GPU, at a multiple of 16 bytes, copied if it is not: the copy engine takes no other
    address, and a kernel compiled for one must not meet another. What torch allocates is; a view need not be.
    """
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


# ----------------------------------------------------------------------------------------------------------- hardware
@functools.cache
def _capability(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def arch_of(x: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the GPU that holds `x`; (0, 0) for a CPU tensor."""
    return _capability(x.device.index) if x.is_cuda else INTERPRETER


def device_reason(x: torch.Tensor) -> str:
    """Why this package cannot run on the device of `x` at all, or ""."""
    if x.is_cpu:
        return ""
    if not x.is_cuda or torch.version.hip:
        return f"device {x.device.type!r}{' (AMD)' if x.is_cuda else ''}: kernels are for NVIDIA GPUs"
    major, minor = arch_of(x)
    return "" if major >= 9 else f"a GPU of compute capability {major}.{minor}: kernels are for 9.0 (Hopper) and later"


def absent(device) -> str:
    """Why nothing can run on `device` (what torch.device accepts) in this process, or ""."""
    device = torch.device(device)
    if device.type != "cuda":
        return ""
    if not torch.cuda.is_available():
        return f"device={str(device)!r}, but torch {torch.__version__} finds no GPU here"
    count = torch.cuda.device_count()
    return "" if (device.index or 0) < count else f"device={str(device)!r}, but the GPUs here are 0 to {count - 1}"


def device_guard(x: torch.Tensor):
    """Make the GPU of `x` the current one, as fla does before its launches."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def capturing(x: torch.Tensor) -> bool:
    """Is the current stream recording a CUDA graph?"""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# ----------------------------------------------------------------------------------------- calls that must stay fla's
@contextlib.contextmanager
def fla_only():
    """Inside, this thread's calls into fla are never given back to us by fla's backend dispatch."""
    before = inside_fla_only()
    _local.fla_only = True
    try:
        yield
    finally:
        _local.fla_only = before


_flas = weakref.WeakSet()  # autograd nodes whose backward is fla's


def fla_only_backward(outputs):
    """`fla_only` for the backward of what an operator of fla's returned, which autograd runs later and elsewhere. fla
    dispatches its convolution's passes one by one, so the forward's guard does not cover it. The node itself is
    remembered, not a flag around it: what else runs inside it (a recomputed forward) is not fla's, and an error in it
    leaves nothing behind."""
    for t in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(t, torch.Tensor) and t.grad_fn is not None:
            with contextlib.suppress(TypeError):  # a node of torch's own: a view of what fla's Function returned
                _flas.add(t.grad_fn)
    return outputs


def inside_flas_backward() -> bool:
    """Does this thread run the backward of an operator that went to fla?"""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = current() if _flas and current else None
    return node is not None and node in _flas


@contextlib.contextmanager
def gpu_needed(operator: str, reason: str, x):
    """Around a call of `operator` that goes to fla for `reason`, with the first tensor `x`: what Triton says of CPU
    tensors becomes one line that says how they came there. Any other error passes through.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if getattr(x, "is_cpu", False) and ("active drivers" in text or "accessed from Triton" in text):
            raise RuntimeError(
                f"{operator} on CPU tensors went to fla, whose kernels need a GPU, because: {reason}"
            ) from error
        raise


def inside_fla_only() -> bool:
    return getattr(_local, "fla_only", False)


# ---------------------------------------------------------------------------------------------------------- log lines
def engaged(family: str, what: str, missing: tuple[str, ...] = (), kernels: bool = True) -> None:
    """One INFO line per distinct `what`, after one line with the installed versions; one WARNING line per kernel that
    is `missing` here, since another or fla's then runs in its place. Without `kernels`, `what` is plain torch, and the
    line does not say that anything engaged.
    """
    if "versions" not in _said:
        from .. import versions

        _said.add("versions")
        log.info("kernel-fun versions: %s", ", ".join(f"{name} {version}" for name, version in versions().items()))
    _say(f"kernel-fun {family}: {'engaged' if kernels else 'no kernel runs'} ({what})", logging.INFO)
    for line in missing:
        _say(f"kernel-fun {family}: runs without {line}", logging.WARNING, every_time=False)


def fell_back(family: str, reason: str, x: torch.Tensor) -> None:
    """One WARNING line per kind of reason: two that differ only in their numbers are one kind. `x` is an input."""
    hopeless = " (fla cannot run on CPU tensors)" if getattr(x, "is_cpu", False) else ""
    _say(f"kernel-fun {family}: falling back to fla: {reason}{hopeless}", logging.WARNING)


def _say(line: str, level: int, every_time: bool = True) -> None:
    kind = re.sub(r"\d+", "#", line) if level >= logging.WARNING else line
    debug = every_time and switch("KERNEL_FUN_DEBUG")
    if kind in _said and not debug:
        return
    _said.add(kind)
    log.log(logging.WARNING if debug else level, line)
