"""The promoted kernels of a family: imported once, and for a problem, which serve it and why the others do not."""
import functools
import importlib
from types import ModuleType

from .plan import Step, make_step


@functools.cache
def modules(package: str) -> tuple[tuple[str, ModuleType | None, str], ...]:
    """(name, module, "") of every promoted kernel of the family `package`, newest first.

    A kernel whose imports are not installed (the CuTe DSL, or its build for another CUDA version) is (name, None, why).
    """
    found = []
    for entry in importlib.import_module(f"{package}._provenance").SHIPPED:
        try:
            found.append((entry.module, importlib.import_module(f"{package}.stages.{entry.module}"), ""))
        except ImportError as error:
            why = str(error).strip().partition("\n")[0]
            cute = (error.name or "").startswith("cutlass")
            hint = "; kernel-fun[cu13] or [cu12] brings the CuTe DSL" if cute else ""
            found.append((entry.module, None, f"does not import: {why}{hint}"))
    return tuple(found)


def module_steps(module: ModuleType, p, source: str, stages, outputs) -> list[Step]:
    """The steps a kernel module offers for `p`: one per entry of its SPANS, or of its spans(p) where it has that."""
    writes = getattr(module, "WRITES", {})
    spans = module.spans(p) if hasattr(module, "spans") else module.SPANS
    return [make_step(span, fn, stages, outputs, source, writes.get(span)) for span, fn in spans.items()]


def steps_for(package: str, p, stages, outputs) -> tuple[list[Step], list[str]]:
    """The steps of the promoted kernels that serve `p`, newest first, and for each other kernel its reason."""
    steps, reasons = [], []
    for name, module, why in modules(package):
        ok, reason = module.supports(p) if module is not None else (False, why)
        if ok:
            steps += module_steps(module, p, name, stages, outputs)
        else:
            reasons.append(f"{name}: {reason}")
    return steps, reasons
