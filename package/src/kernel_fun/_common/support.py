"""Which calls this package may take at all: switches, hardware, CUDA graph capture; and the log lines that say what happened.

Switches are environment variables read at every call, so that one process can compare with and without:

    KERNEL_FUN_DISABLE=1         every call goes to fla
    KERNEL_FUN_KDA_DISABLE=1     chunk_kda goes to fla
    KERNEL_FUN_CCONV_DISABLE=1   causal_conv1d goes to fla
    KERNEL_FUN_FALLBACK=1        an fla whose functions have moved is a warning and fla, not an error
    KERNEL_FUN_DEBUG=1           log every call's decision, not only the first of each kind, at WARNING so that it shows unconfigured
"""
import functools
import logging
import os

import torch

from .problem import INTERPRETER

log = logging.getLogger("kernel_fun")
_ON, _OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})
_said: set[str] = set()


def switch(name: str) -> bool:
    """Is the environment variable `name` on? A value that is neither on nor off warns once and counts as unset."""
    value = os.environ.get(name)
    if value is None:
        return False
    lowered = value.strip().lower()
    if lowered in _ON:
        return True
    if lowered not in _OFF:
        log_once(f"{name}={value!r} is ignored: accepted are {sorted(_ON)} and {sorted(_OFF - {''})}", logging.WARNING)
    return False


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message the first time it is given in this process; every time under KERNEL_FUN_DEBUG."""
    if message in _said:
        if os.environ.get("KERNEL_FUN_DEBUG") is None or not switch("KERNEL_FUN_DEBUG"):
            return
    elif len(_said) > 4096:  # reasons carry shapes; a run that varies them must not grow without bound
        _said.clear()
    _said.add(message)
    if level < logging.WARNING and os.environ.get("KERNEL_FUN_DEBUG") is not None and switch("KERNEL_FUN_DEBUG"):
        level = logging.WARNING
    log.log(level, message)


def disabled(family: str) -> str:
    """The reason when a switch sends `family` ("kda" or "cconv") to fla, else ""."""
    if switch("KERNEL_FUN_DISABLE"):
        return "KERNEL_FUN_DISABLE is set"
    name = f"KERNEL_FUN_{family.upper()}_DISABLE"
    return f"{name} is set" if switch(name) else ""


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return tuple(torch.cuda.get_device_capability(index))


def arch_of(x: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the GPU that holds `x`; (0, 0) for a CPU tensor."""
    return _capability(x.device.index) if x.is_cuda else INTERPRETER


@functools.cache
def device_reason(device_type: str) -> str:
    """Why this package's GPU kernels cannot run on that kind of device, or ""."""
    if device_type != "cuda":
        return f"device type {device_type!r} (kernels are for NVIDIA GPUs)"
    return "an AMD GPU (kernels are for NVIDIA GPUs)" if torch.version.hip else ""


def capturing(x: torch.Tensor) -> bool:
    """Is the current stream recording a CUDA graph?"""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
