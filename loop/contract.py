"""The contract of each family: what every stage reads and writes, what it costs, how exact it must be.

Stages and their tensors come from the package's chain, tensor facts from `loop.tensors`, references from the package;
this module joins them and derives spans, shapes, floors and the documentation tables. Nothing in it is written
anywhere else."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_fun._common import plan
from kernel_fun._common.problem import CHUNK

from . import costs, tensors
from .cases import FAMILIES
from .tensors import Tensor

HBM_BYTES_PER_S = 4.2e12  # what a device-to-device copy reaches on an H200
TENSOR_FLOPS_PER_S = 700e12  # what a large bf16 matrix product sustains there
MODES = ("fwd", "bwd", "fwdbwd")

# Relative RMS. An op's outputs: against the fp64 oracle. What a stage leaves to the next: against the stage in fp64
# on the same operands, so one stage's share only (`loop.spans`).
BUDGETS = {
    "kda": {
        "o": 5e-3, "ht": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dh0": 8e-3,
        "dg": 2e-2, "dbeta": 2e-2, "dA_log": 2e-2, "ddt_bias": 2e-2,
        # sums and roots in fp32; the others are rounded to q's dtype or come from products of rounded operands
        "q_rstd": 1e-4, "k_rstd": 1e-4, "beta": 1e-4, "gk": 1e-3, "q": 5e-3, "k": 5e-3, "Aqk": 5e-3, "Akk": 5e-3,
        "w": 5e-3, "u": 5e-3, "qg": 5e-3, "kg": 5e-3, "h": 5e-3, "v_new": 5e-3,
        "dAqk": 8e-3, "dAkk": 8e-3, "dh": 8e-3, "db": 2e-2,
    },
    # ht and dresidual are copies: they are exact or wrong
    "cconv": {"y": 5e-3, "ht": 0.0, "dx": 8e-3, "dw": 2e-2, "db": 2e-2, "dresidual": 0.0, "dh0": 8e-3},
}  # fmt: skip
CCONV_FINE = 1e-3  # every rounded cconv output, where x is fp16 or fp32

SAME_AS_INPUT = {"kda": (), "cconv": ("dresidual",)}  # outputs that may be one of the incoming gradients itself

_DTYPES = {"fp32": torch.float32}
_DTYPE_FIELDS = {"p": "dtype", "g": "g_dtype", "beta": "beta_dtype", "w": "w_dtype"}


@dataclass(frozen=True)
class Floor:
    """The least time of a pass: `bytes` at the copy rate or `flops` at the tensor rate, whichever is longer."""

    bytes: int
    flops: int
    ms: float
    bound: str  # "hbm" or "tensor"


def chain(family: str):
    """The family's chain module of the package. ValueError names the families."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(FAMILIES)}")
    return importlib.import_module(f"kernel_fun.{family}.chain")


def stages(family: str) -> tuple[plan.Stage, ...]:
    return chain(family).STAGES


def reference(family: str, stage: str) -> Callable:
    """The plain-torch function that defines one stage."""
    return importlib.import_module(f"kernel_fun.{family}.reference").STAGES[stage]


def parse_span(family: str, text: str) -> tuple[str, ...]:
    """`"bwd.intra..bwd.cumsum"` -> its stages, in order. ValueError, in one line, says what is accepted."""
    return plan.parse_span(text, stages(family))


def span_reads(family: str, span: str | tuple[str, ...]) -> tuple[str, ...]:
    """Tensors the span takes from outside."""
    return plan.span_reads(_span(family, span), stages(family))


def span_writes(family: str, span: str | tuple[str, ...]) -> tuple[str, ...]:
    """Tensors of the span that a later stage or the caller reads."""
    return plan.span_writes(_span(family, span), stages(family), chain(family).OUTPUTS)


def _span(family, span):
    return parse_span(family, span) if isinstance(span, str) else tuple(span)


# ------------------------------------------------------------------------------------------------------------ tensors
def tensor(family: str, name: str, stage: str | None = None, written: bool = False) -> Tensor:
    """The tensor `name` as `stage` finds it, or as it leaves it when `written`; without a stage, as the caller gets
    it."""
    table = tensors.TABLES[family]
    names = [s.name for s in stages(family)]
    end = len(names) if stage is None else names.index(stage) + written
    found = table.get(name)
    for passed in names[:end]:
        found = table.get(f"{name}@{passed}", found)
    if found is None:
        raise ValueError(
            f"tensor {name!r} is unknown in {family}; known: {', '.join(n for n in table if '@' not in n)}"
        )
    return found


def sizes(p) -> dict[str, int]:
    """The letters of the symbolic shapes, for a problem."""
    found = {n: getattr(p, n) for n in ("B", "T", "H", "HV", "K", "V", "N", "NT", "D", "W") if hasattr(p, n)}
    if "K" in found:
        found |= {"HV*K": p.HV * p.K, "C": CHUNK, "NTb": p.chunks_per_row}
    return found


def shape(t: Tensor, p) -> tuple[int, ...]:
    letters = sizes(p)
    return tuple(letters[x] for x in t.shape)


def dtype(t: Tensor, p) -> torch.dtype:
    if t.dtype == "beta_act":  # the sigmoid's result is fp32; a beta given ready stays as it is
        return torch.float32 if p.beta_sigmoid else p.beta_dtype
    return getattr(p, _DTYPE_FIELDS[t.dtype]) if t.dtype in _DTYPE_FIELDS else _DTYPES[t.dtype]


def present(t: Tensor, p) -> bool:
    """False where the contract says None for this problem."""
    return not t.when or bool(getattr(p, t.when))


def nbytes(t: Tensor, p) -> int:
    return math.prod(shape(t, p)) * dtype(t, p).itemsize if present(t, p) else 0


@dataclass(frozen=True)
class Expected:
    """What the caller must find in one output: None, or a shape and a dtype."""

    present: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


def outputs(family: str, p) -> dict[str, Expected]:
    """Every output of the op, results first: gradients have the dtype of the input they belong to."""
    found = {}
    for name in chain(family).OUTPUTS:
        t = tensor(family, name)
        source = tensors.GRADIENT_OF[family].get(name)
        kind = dtype(tensor(family, source, stages(family)[0].name), p) if source else dtype(t, p)
        found[name] = Expected(present(t, p), shape(t, p), kind)
    return found


def budget(family: str, name: str, p) -> float:
    """The largest relative RMS error of an output, or of what a stage writes."""
    value = BUDGETS[family][name]
    fine = family == "cconv" and p.dtype != torch.bfloat16 and p.w_dtype != torch.bfloat16
    return min(value, CCONV_FINE) if fine else value


# -------------------------------------------------------------------------------------------------------------- costs
def stage_bytes(family: str, stage: str, p) -> int:
    """Bytes if the stage reads and writes each of its tensors once."""
    found = next(s for s in stages(family) if s.name == stage)
    reads = sum(nbytes(tensor(family, n, stage), p) for n in found.reads)
    return reads + sum(nbytes(tensor(family, n, stage, written=True), p) for n in found.writes)


def stage_flops(family: str, stage: str, p) -> int:
    """Matrix-product operations of the stage, triangular products counted whole."""
    return costs.FLOPS[family].get(stage, lambda p: 0)(p)


def span_floor(family: str, span: str | tuple[str, ...], p) -> Floor:
    """Floor of one kernel that does the whole span: its outside tensors once, all its products."""
    names = _span(family, span)
    first, last = names[0], names[-1]
    read = sum(nbytes(tensor(family, n, first), p) for n in span_reads(family, names))
    written = sum(nbytes(tensor(family, n, last, written=True), p) for n in span_writes(family, names))
    return _floor(read + written, sum(stage_flops(family, s, p) for s in names))


def floor(family: str, mode: str, p) -> Floor:
    """Floor of a whole pass: inputs read once, outputs written once, the chain's products once. "fwdbwd" is the sum
    of the two."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; known: {', '.join(MODES)}")
    if mode == "fwdbwd":
        fwd, bwd = floor(family, "fwd", p), floor(family, "bwd", p)
        bound = fwd.bound if fwd.ms > bwd.ms else bwd.bound
        return Floor(fwd.bytes + bwd.bytes, fwd.flops + bwd.flops, fwd.ms + bwd.ms, bound)
    c, first = chain(family), stages(family)[0].name
    total = sum(nbytes(tensor(family, n, first), p) for n in c.INPUTS)
    if mode == "bwd":
        total += sum(nbytes(tensor(family, n, first), p) for n in c.BWD_INPUTS)
    wanted = c.FWD_OUTPUTS if mode == "fwd" else c.BWD_OUTPUTS
    for name, e in outputs(family, p).items():
        if name in wanted and e.present:
            total += math.prod(e.shape) * e.dtype.itemsize
    return _floor(total, sum(stage_flops(family, s.name, p) for s in stages(family) if s.name.startswith(mode)))


def floor_ms(family: str, mode: str, p) -> float:
    return floor(family, mode, p).ms


def _floor(total: int, flops: int) -> Floor:
    hbm, tensor_ms = 1e3 * total / HBM_BYTES_PER_S, 1e3 * flops / TENSOR_FLOPS_PER_S
    return Floor(total, flops, max(hbm, tensor_ms), "hbm" if hbm >= tensor_ms else "tensor")


# ------------------------------------------------------------------------------------------------------- documentation
def table(family: str, span: str | None = None) -> list[dict]:
    """Documentation rows of a span (or the whole chain): one per stage and tensor, reads before writes."""
    wanted = _span(family, span) if span else tuple(s.name for s in stages(family))
    rows = []
    for s in stages(family):
        if s.name not in wanted:
            continue
        for side, names in (("reads", s.reads), ("writes", s.writes)):
            for name in names:
                t = tensor(family, name, s.name, written=side == "writes")
                rows.append(
                    {
                        "stage": s.name, "side": side, "tensor": name, "shape": f"[{', '.join(t.shape)}]",
                        "dtype": _rule(t), "unit": t.unit, "meaning": t.meaning, "none_unless": t.when,
                        "budget": BUDGETS[family][name] if side == "writes" else None,
                    }
                )  # fmt: skip
    return rows


def cost_table(family: str, p, span: str | None = None) -> list[dict]:
    """One row per stage of a problem: bytes, flops and the floor they give."""
    wanted = _span(family, span) if span else tuple(s.name for s in stages(family))
    rows = []
    for name in wanted:
        f = _floor(stage_bytes(family, name, p), stage_flops(family, name, p))
        rows.append({"stage": name, "bytes": f.bytes, "flops": f.flops, "floor_ms": f.ms, "bound": f.bound})
    return rows


def _rule(t: Tensor) -> str:
    words = {
        "p": "as q",
        "g": "as g",
        "beta": "as beta",
        "w": "as weight",
        "beta_act": "fp32 after a sigmoid, else as beta",
    }
    return words.get(t.dtype, t.dtype) if "K" in t.shape or t.dtype != "p" else "as the op's dtype"
