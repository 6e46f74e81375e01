"""What a number depends on besides the code: machine, versions, switches, and the state of the repository.

Collected once per process. Git may be absent on the machine that measures; then whoever runs says what the tree is:
LOOP_GIT_COMMIT (40 hex digits) and LOOP_GIT_DIRTY (0 or 1), and rows say that it came from there.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from loop import nvml
from loop.registry import root

# Every switch of fla 0.6.0 that changes what a baseline is; other FLA_* variables that are set are recorded too.
FLA_SWITCHES = (
    "FLA_DISABLE_BACKEND_DISPATCH",
    "FLA_FLASH_KDA",
    "FLA_TILELANG",
    "FLA_GLUON",
    "FLA_CONV_GLUON",
    "FLA_CONV_BACKEND",
    "FLA_INTRACARD_CP",
    "FLA_INTRACARD_MAX_SPLITS",
    "FLA_CACHE_MODE",
    "FLA_CONFIG_DIR",
    "FLA_CACHE_RESULTS",
    "FLA_USE_FAST_OPS",
    "FLA_USE_TMA",
    "FLA_TRIL_PRECISION",
    "FLA_TENSOR_CACHE_SIZE",
    "FLA_DISABLE_TENSOR_CACHE",
    "FLA_GPU_NAME",
    "FLA_USE_COMPILE",
    "FLA_CI_ENV",
)
OTHER_SWITCHES = ("KERNEL_FUN_", "TRITON_", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF")
SECRET_PATHS = ("TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_HOME")  # where a cache lies does not change a number
SOURCES = ("ideas", "loop", "package")  # a change in their *.py files makes a tree dirty


def collect() -> dict:
    """The `env` of a row."""
    return {**machine(), "versions": versions(), "switches": switches(), **git_state()}


def device_name() -> str:
    """ "cpu", or the name of the current GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@functools.cache
def machine() -> dict:
    """GPU, its memory, SMs and L2 in bytes, driver and power limit; on a CPU only the platform."""
    import torch

    facts = {"platform": f"{platform.system()} {platform.machine()}", "device": device_name()}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties()
        facts |= {
            "capability": f"{gpu.major}.{gpu.minor}",
            "sms": gpu.multi_processor_count,
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": gpu.total_memory,
            "driver": nvml.driver(),
            "power_limit_w": nvml.power_limit_w(),
        }
    return facts


@functools.cache
def versions() -> dict:
    """Versions of what compiles and runs kernels; None for what is not installed."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name, dist in (
        ("triton", "triton"),
        ("cutlass", "nvidia-cutlass-dsl"),
        ("fla", "fla-core"),
        ("numpy", "numpy"),
    ):
        try:
            found[name] = importlib.metadata.version(dist)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def switches() -> dict:
    """Environment variables that change what runs. FLA_CONFIG_DIR is recorded as a hash of the configurations it
    holds.
    """
    found = {name: os.environ.get(name) for name in FLA_SWITCHES}
    for name in sorted(os.environ):
        if name.startswith(("FLA_", *OTHER_SWITCHES)) and name not in SECRET_PATHS:
            found[name] = os.environ[name]
    if found["FLA_CONFIG_DIR"]:
        found["FLA_CONFIG_DIR"] = _config_dir(found["FLA_CONFIG_DIR"])
    return found


@functools.cache
def _config_dir(path: str) -> str:
    folder = Path(path)
    files = sorted(folder.glob("*.json"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{folder.name}: {len(files)} files, sha256 {digest.hexdigest()[:12]}"


def git_state() -> dict:
    """`git_commit`, `git_dirty` and `git_source` ("git", "environment" or "unknown"). Unknown counts as dirty."""
    commit, dirty = os.environ.get("LOOP_GIT_COMMIT"), os.environ.get("LOOP_GIT_DIRTY")
    if commit:
        return {"git_commit": commit, "git_dirty": dirty != "0", "git_source": "environment"}
    head = git("rev-parse", "HEAD")
    if head is None:
        return {"git_commit": None, "git_dirty": None, "git_source": "unknown"}
    return {"git_commit": head.strip(), "git_dirty": bool(dirty_files()), "git_source": "git"}


def dirty_files() -> list[str]:
    """Python sources of ideas, loop and package that differ from HEAD or are not in it."""
    specs = [f":(glob){folder}/**/*.py" for folder in SOURCES]
    text = git("status", "--porcelain", "--untracked-files=all", "--", *specs)
    return [line[3:] for line in (text or "").splitlines()]


def git(*args: str, text: bool = True):
    """Output of a git command in the repository, or None: no git, no repository, or the command failed."""
    if not shutil.which("git") or not (root() / ".git").exists():
        return None
    done = subprocess.run(["git", *args], cwd=root(), capture_output=True, text=text, check=False)
    return done.stdout if done.returncode == 0 else None
