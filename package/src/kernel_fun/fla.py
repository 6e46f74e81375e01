"""Registers this package as a backend of flash-linear-attention: fla's own layers then use it with no other change.

    import kernel_fun.fla
    kernel_fun.fla.register()      # once, anywhere; reaches every module that already holds fla's functions
    kernel_fun.fla.unregister()

Whole operators are registered, not stages: `chunk_kda`, the convolution's forward and backward (fla dispatches its
convolution there), and its single-token step, which on a GPU stays fla's. fla asks each backend's verifier in turn;
ours is `is_supported`, and what it declines runs as if this package were not there, with the reason in fla's log.
Priority 4: before fla's default backends (5), after FlashKDA (3), whose domain is inference without gradients.

Needs fla-core 0.6 or later. Before that, fla's dispatch never selects a backend for a whole operator: import
`kernel_fun.kda.chunk_kda`.
"""
import inspect

from . import versions
from ._common import compat
from ._common.support import fell_back, inside_fla_only, inside_flas_backward

PRIORITY = 4
BACKEND_TYPE = "kernel_fun"
INSTEAD = "import kernel_fun.kda.chunk_kda and kernel_fun.cconv.causal_conv1d instead"


def register() -> None:
    """Add this package to fla's registry; calling it again changes nothing. RuntimeError says why when this fla cannot
    dispatch to us.
    """
    backends = _fla_backends()

    class KernelFun(backends.BaseBackend):
        backend_type = BACKEND_TYPE
        package_name = "kernel_fun"
        priority = PRIORITY

        def chunk_kda_verifier(self, *args, **kwargs):
            from . import kda

            return _declined() or _said("kda", kda.is_supported(*args, **kwargs), *args, **kwargs)

        def chunk_kda(self, *args, **kwargs):
            from . import kda

            return kda.chunk_kda(*args, **kwargs)

        def causal_conv1d_fwd_verifier(self, *args, **kwargs):
            from .cconv import stage

            return _declined() or _said("cconv", stage.forward_supported(*args, **kwargs), *args, **kwargs)

        def causal_conv1d_fwd(self, *args, **kwargs):
            from .cconv import stage

            return stage.forward(*args, **kwargs)

        def causal_conv1d_bwd_verifier(self, *args, **kwargs):
            from .cconv import stage

            if inside_flas_backward():
                return False, "the backward of a call that went to fla"
            return _declined() or stage.backward_supported(*args, **kwargs)

        def causal_conv1d_bwd(self, *args, **kwargs):
            from .cconv import stage

            return stage.backward(*args, **kwargs)

        def causal_conv1d_update_verifier(self, *args, **kwargs):
            from .cconv import decode

            return _declined() or decode.is_supported(*args, **kwargs)

        def causal_conv1d_update(self, *args, **kwargs):
            from .cconv import decode

            return decode.causal_conv1d_update(*args, **kwargs)

    for family in ("kda", "cconv"):
        compat.reason(family)  # a verifier that raised it would be taken for a refusal
    for function in (functions := _functions()):
        registered(function)  # RuntimeError before anything has been registered
    for function in functions:
        if not registered(function):
            backends.register(function)(KernelFun)
            if not registered(function):
                raise RuntimeError(f"fla-core {versions()['fla-core']} did not register {function.__name__}")


def unregister() -> None:
    """Take this package out of fla's registry; nothing happens when it is not in there."""
    _fla_backends()
    for function in _functions():
        _registry(function)._backends.pop(BACKEND_TYPE, None)


def registered(function) -> bool:
    """Is this package registered for `function`, one of fla's dispatched operators?"""
    return BACKEND_TYPE in _registry(function)._backends


def _declined():
    """fla's own functions called from inside this package stay fla's."""
    return (False, "called by kernel_fun itself") if inside_fla_only() else None


def _said(family: str, answer: tuple[bool, str], *args, **kwargs) -> tuple[bool, str]:
    """`answer`, with a refusal in our log too: fla's says the first one of an operator only."""
    ok, reason = answer
    if not ok:
        fell_back(family, reason, args[0] if args else kwargs.get("q", kwargs.get("x")))
    return answer


def _fla_backends():
    try:
        from fla import backends
    except ImportError:
        raise RuntimeError(
            f"fla-core {versions()['fla-core']} has no backend dispatch for whole operators (0.6.0 or later has): "
            f"{INSTEAD}"
        ) from None
    if not (hasattr(backends, "BaseBackend") and hasattr(backends, "register")):
        raise RuntimeError(f"fla-core {versions()['fla-core']}: fla.backends has moved, {INSTEAD}")
    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise RuntimeError("fla was imported under FLA_DISABLE_BACKEND_DISPATCH=1: it dispatches to no backend")
    return backends


def _functions() -> tuple:
    from fla.modules.convolution import causal_conv1d_bwd, causal_conv1d_fwd, causal_conv1d_update
    from fla.ops.kda import chunk_kda

    return chunk_kda, causal_conv1d_fwd, causal_conv1d_bwd, causal_conv1d_update


def _registry(function):
    """fla keeps one registry per operator, under the undecorated function; there is no public way to take a backend
    out again.
    """
    from fla import backends

    try:
        return backends._function_registries[inspect.unwrap(function)]
    except (AttributeError, KeyError):
        raise RuntimeError(
            f"fla-core {versions()['fla-core']} keeps no registry for {function.__name__}: its dispatch has moved, "
            "import kernel_fun.kda.chunk_kda and kernel_fun.cconv.causal_conv1d instead"
        ) from None
