"""Holds what an idea's step returns to the contract, so that a slip is named by idea, span and tensor.

Only a check runs steps this way: what is timed has nothing around it."""

import functools
import types
from pathlib import Path

import torch

from . import contract
from .verdict import Rejected, Status


def held(module) -> types.SimpleNamespace:
    """The idea's module with every step held to the contract; for `make_plan`. Such a step raises Rejected."""
    writes = getattr(module, "WRITES", {})

    def spans(p):
        return {
            span: _held(module, span, fn, p, writes.get(span) or contract.span_writes(module.FAMILY, span))
            for span, fn in of(module, p).items()
        }

    facts = {"__name__": module.__name__, "FAMILY": module.FAMILY, "SPANS": module.SPANS, "WRITES": writes}
    return types.SimpleNamespace(**facts, supports=module.supports, spans=spans)


def of(module, p) -> dict:
    """The spans that a module has for problem `p`."""
    return module.spans(p) if hasattr(module, "spans") else module.SPANS


def name(module) -> str:
    """What to call a module in a message: the idea's folder, or the module's own name."""
    path = Path(getattr(module, "__file__", None) or "")
    return path.parent.name if path.name == "kernel.py" else getattr(module, "__name__", "the module")


def _held(module, span: str, fn, p, writes):
    @functools.wraps(fn)  # the plan reads the signature
    def step(**given):
        got = fn(**given)
        require(module, span, p, writes, got, given.get("wanted"))
        return got

    return step


def require(module, span: str, p, writes, got, wanted=None) -> None:
    """Rejected, in one line, unless `got` holds the tensors `writes` (of them `wanted`, where the step was told) with
    the contract's shapes and dtypes, None where it says None, and nothing that the span's stages do not write."""
    where, family, asked = f"{name(module)}: {span}", module.FAMILY, tuple(n for n in writes if n in (wanted or writes))
    expected = f"expected a dict of {', '.join(asked)}"
    if not isinstance(got, dict):
        raise Rejected(Status.WRONG_DTYPE, f"{where} returned {_found(got)}; {expected}")
    names = contract.parse_span(family, span)
    stages = {s.name: s for s in contract.stages(family)}
    for n in asked:
        if n not in got:
            found = f"a dict of {', '.join(map(str, got))}" if got else "an empty dict"
            raise Rejected(Status.WRONG_DTYPE, f"{where} did not return {n}, but {found}; {expected}")
    written = {*writes, *(n for s in names for n in stages[s].writes)}
    for n, t in got.items():
        if n not in written:
            raise Rejected(Status.WRONG_DTYPE, f"{where} returned {n!r}, which its stages do not write; {expected}")
        if t is not None or n in asked:
            _require_tensor(where, family, n, names[-1], p, t)


def _require_tensor(where: str, family: str, n: str, last: str, p, got) -> None:
    t = contract.tensor(family, n, last, written=True)
    if not contract.present(t, p):
        if got is not None:
            raise Rejected(Status.WRONG_DTYPE, f"{where}: {n} is {_found(got)}; expected None for this problem")
        return
    dtypes, shape = [contract.dtype(t, p)], contract.shape(t, p)
    if n in contract.chain(family).OUTPUTS:  # a result may be rounded early: autograd casts what the caller gets
        dtypes.append(contract.outputs(family, p)[n].dtype)
    if not torch.is_tensor(got) or tuple(got.shape) != shape or got.dtype not in dtypes:
        accepted = " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
        raise Rejected(Status.WRONG_DTYPE, f"{where}: {n} is {_found(got)}; expected {accepted} {list(shape)}")


def _found(x) -> str:
    if torch.is_tensor(x):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return "None" if x is None else f"a {type(x).__name__}"
