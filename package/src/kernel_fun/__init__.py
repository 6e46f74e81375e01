"""kernel-fun: faster drop-ins for flash-linear-attention's `chunk_kda` and `causal_conv1d`, forward and backward.

    from kernel_fun.kda import chunk_kda              # same signature and results as fla.ops.kda.chunk_kda
    from kernel_fun.cconv import causal_conv1d        # same as fla.modules.causal_conv1d's causal_conv1d
    import kernel_fun.fla; kernel_fun.fla.register()  # or: let fla's own layers use both

Importing this costs nothing: torch, triton and fla are imported by the families, kernels at the first call that needs
them.
"""
import importlib

__version__ = "0.3.0"
__all__ = ["cconv", "fla", "kda", "versions"]


def versions() -> dict[str, str]:
    """Installed versions of everything that decides which kernels run; "absent" for what is not installed.

    Keys: kernel_fun, python, torch, triton, fla-core, nvidia-cutlass-dsl, cuda (the one torch was built for).
    """
    import platform
    from importlib import metadata

    found = {"kernel_fun": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "fla-core", "nvidia-cutlass-dsl"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    try:
        found["cuda"] = str(importlib.import_module("torch.version").cuda)
    except ImportError:
        found["cuda"] = "absent"
    return found


def __getattr__(name: str):
    if name in ("cconv", "fla", "kda"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
