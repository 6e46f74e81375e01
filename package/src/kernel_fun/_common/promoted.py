"""What can stand in a family's chain: its promoted kernels, imported once, which of them serve a problem and why the
others do not; the modules of ideas; and under all of them fla's stages, or those of the plain-torch reference.
"""
import functools
import importlib
import importlib.util
import re
from types import ModuleType

from . import cute
from .plan import Step, make_step


@functools.cache
def modules(package: str) -> tuple[tuple[str, ModuleType | None, str], ...]:
    """(name, module, "") of every promoted kernel of the family `package`, newest first.

    A kernel that cannot be used here (the CuTe DSL is missing or is not the build for this CUDA; anything else that its
    import raises) is (name, None, why).
    """
    found = []
    for entry in importlib.import_module(f"{package}._provenance").SHIPPED:
        name = f"{package}.stages.{entry.module}"
        why, module = cute.reason() if _in_cute(name) else "", None
        if not why:
            try:
                module = importlib.import_module(name)
            except Exception as error:  # the CuTe DSL raises RuntimeError: no kernel may take the training run with it
                why = f"does not import: {str(error).strip().partition(chr(10))[0]}"
        found.append((entry.module, module, why))
    return tuple(found)


def missing(package: str) -> tuple[str, ...]:
    """The promoted kernels that cannot be used here, each with why."""
    return tuple(f"{name}: {why}" for name, module, why in modules(package) if module is None)


def _in_cute(name: str) -> bool:
    """Does the source of module `name`, or of a promoted kernel that it imports, import the CuTe DSL?"""
    spec = importlib.util.find_spec(name)
    source = spec.loader.get_source(name) if spec else ""
    if re.search(r"^\s*(import|from) cutlass\b", source, re.MULTILINE):
        return True
    parents = re.findall(r"^\s*(?:import|from) ([\w.]+\.stages\.\w+)", source, re.MULTILINE)
    return any(_in_cute(parent) for parent in parents)


def module_steps(module: ModuleType, p, source: str, stages, outputs) -> list[Step]:
    """The steps a kernel module offers for `p`: one per entry of its SPANS, or of its spans(p) where it has that."""
    writes = getattr(module, "WRITES", {})
    spans = module.spans(p) if hasattr(module, "spans") else module.SPANS
    return [make_step(span, fn, stages, outputs, source, writes.get(span)) for span, fn in spans.items()]


def required_steps(ideas, p, stages, outputs) -> list[Step]:
    """The steps of `ideas`, kernel modules (FAMILY, SPANS, supports) that have to serve `p`.

    NotImplementedError: one does not support `p`; its reason.
    """
    steps = []
    for module in ideas:
        ok, reason = module.supports(p)
        if not ok:
            raise NotImplementedError(f"{module.__name__}: {reason}")
        steps += module_steps(module, p, module.__name__, stages, outputs)
    return steps


def steps_for(package: str, p, stages, outputs) -> tuple[list[Step], list[str]]:
    """The steps of the promoted kernels that serve `p`, newest first, and for each other kernel its reason.

    A kernel may read what nobody else needs kept unless another serves too: it then serves only `beside` that one.
    """
    said = {
        name: module.supports(p) if module is not None else (False, why) for name, module, why in modules(package)
    }
    shipped = importlib.import_module(f"{package}._provenance").SHIPPED
    beside = {entry.module: getattr(entry, "beside", ()) for entry in shipped}
    serving = {name for name, (ok, _) in said.items() if ok}
    while lost := {name for name in serving if not serving.issuperset(beside.get(name, ()))}:
        serving -= lost
    steps, reasons = [], []
    for name, module, _ in modules(package):
        ok, reason = said[name]
        if name in serving:
            steps += module_steps(module, p, name, stages, outputs)
        else:
            reasons.append(f"{name}: {f'serves only beside {beside[name][0]}' if ok else reason}")
    return steps, reasons


BASES = {"fla": "fla_stages", "reference": "reference"}


def base_steps(package: str, base: str, p, stages, outputs) -> list[Step]:
    """One step per stage of the family `package`, from fla or from the plain-torch reference.

    ValueError: `base` is neither "fla" nor "reference".
    """
    if base not in BASES:
        raise ValueError(f"base={base!r}: accepted are {' and '.join(map(repr, BASES))}")
    spans = importlib.import_module(f"{package}.{BASES[base]}").spans(p)
    return [make_step(span, fn, stages, outputs, f"{base}:{span}") for span, fn in spans.items()]
