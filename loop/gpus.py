"""Which GPUs a batch works on, and the lock that keeps a second batch off them.

A device is named as torch counts the visible ones. The lock is one file a GPU, named by its UUID, so that it holds
whatever each process calls the GPU. Each idea's process inherits it: a batch that is killed still holds its GPU until
the kernel that it left there has ended.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loop import arms

FOLDER = Path("/tmp")  # of the lock files: the same for every user and every TMPDIR of a machine


@dataclass(frozen=True)
class Device:
    """One place to run: `visible` is its CUDA_VISIBLE_DEVICES, empty on a CPU; `lock` an open file, or None."""

    name: str
    visible: str = ""
    lock: int | None = None


def choose(text: str, jobs: int) -> list[Device]:
    """The places of a batch, without locks: the GPUs of `--devices 0,1`, or `jobs` times the CPU.

    ValueError in one line: jobs on a GPU, devices on a CPU, one that is not there or is named twice.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: at least 1")
    if not arms.on_gpu():
        if text:
            raise ValueError(f"devices={text!r}: torch finds no GPU here; on a CPU use --jobs")
        return [Device("cpu")] * jobs
    if jobs > 1:
        raise ValueError(f"jobs={jobs}: 1 on a GPU, where ideas would time each other; --devices takes more GPUs")
    visible = _visible()
    names = [part.strip() for part in (text or "0").split(",")]
    for name in names:
        if not name.isdigit() or int(name) >= len(visible):
            raise ValueError(f"device {name!r} in devices={text!r}: give numbers below {len(visible)}, e.g. 0,1")
    if len(set(names)) < len(names):
        raise ValueError(f"devices={text!r}: each GPU once, since two ideas on one would time each other")
    return [Device(name, visible[int(name)]) for name in names]


@contextlib.contextmanager
def locked(devices: Sequence[Device]) -> Iterator[list[Device]]:
    """The devices with their locks taken. ValueError in one line when another batch holds one."""
    with contextlib.ExitStack() as stack:
        yield [Device(d.name, d.visible, _lock(d, stack) if d.visible else None) for d in devices]


def _lock(device: Device, stack: contextlib.ExitStack) -> int:
    path = FOLDER / f"kernel-fun-gpu-{_uuid(device)}.lock"
    try:
        fd = os.open(path, os.O_RDONLY)  # another user's file in /tmp opens for reading only, and that locks as well
    except FileNotFoundError:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        said = f"GPU {device.name} is in use by another nightly; wait for it, or give other --devices"
        raise ValueError(said) from None
    return fd


def _visible() -> list[str]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def _uuid(device: Device) -> str:
    import torch

    return str(torch.cuda.get_device_properties(int(device.name)).uuid)
