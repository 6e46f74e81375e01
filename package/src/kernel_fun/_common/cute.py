"""Whether kernels written in the CuTe DSL can run here, decided before one of them is imported.

The DSL comes as a base package and one build per CUDA major version. A missing or older DSL, the build of the other
CUDA version, or a driver older than that build would surface as an error in mid-step; here each is one line.
"""
from importlib import metadata
from importlib.util import find_spec

import torch

OLDEST = (4, 8, 1)                     # the kernels are written against this release
OLDEST_DRIVER = {12: (12, 9), 13: (13, 0)}  # what each build needs, as the CUDA version that a driver supports
_BUILDS = {major: f"nvidia-cutlass-dsl-libs-cu{major}" for major in OLDEST_DRIVER}


def reason() -> str:
    """Why kernels in the CuTe DSL cannot run in this process, or ""."""
    base = _version("nvidia-cutlass-dsl")
    cuda = int((torch.version.cuda or "0").partition(".")[0])  # 0: a torch for CPUs, where kernels are compiled only
    oldest = ".".join(map(str, OLDEST))
    wanted = f"pip install 'nvidia-cutlass-dsl{'' if cuda == 12 else '[cu13]'}>={oldest}'"
    if base is None:  # a copy on the path without a package's metadata is taken as it is
        return "" if find_spec("cutlass") else f"the CuTe DSL is not installed: {wanted}"
    if _numbers(base) < OLDEST:
        return f"the CuTe DSL is {base}, kernels need {oldest} or later: {wanted}"
    built_for = [major for major, package in _BUILDS.items() if _version(package) is not None]
    if not cuda or not built_for:  # built from source there is one build, under no name of its own
        return ""
    if cuda not in built_for:
        return f"the CuTe DSL is the build for CUDA {built_for[0]}, torch is for CUDA {cuda}: {wanted}"
    driver = _driver()
    if driver and driver < OLDEST_DRIVER[cuda]:
        has, needs = (".".join(map(str, version)) for version in (driver, OLDEST_DRIVER[cuda]))
        return f"the NVIDIA driver supports CUDA {has}, the CuTe DSL needs one for CUDA {needs} or later"
    return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """4.8.1 or 4.8.1.dev0 as (4, 8, 1)."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _driver() -> tuple[int, int] | None:
    """The CUDA version that the driver supports; None where torch cannot say."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = ask() if ask else 0
    return (number // 1000, number % 1000 // 10) if number else None
