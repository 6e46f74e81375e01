"""One span by itself: an idea's function against the same stages in fp64, on the operands it meets inside the chain.

The whole-op check says that something is wrong; this says which tensor of which span. Operands are those of the
plain-torch chain in the case's own dtypes; everything the function allocates is poisoned, its operands lie between
guard bands."""

import dataclasses
import importlib
import itertools
from dataclasses import dataclass

import torch

from kernel_fun._common import packed
from kernel_fun._common.plan import make_step
from kernel_fun._common.problem import CHUNK, INTERPRETER

from . import compare, contract, held, inputs, poison
from .cases import Case
from .oracle import fp64_problem
from .tensors import OP_NAMES
from .verdict import CheckError, Rejected, Status


@dataclass(frozen=True)
class SpanError:
    """One tensor that a span writes, against the span's stages in fp64 on the same operands."""

    span: str
    tensor: str
    rel_rms: float
    max_abs: float
    worst: tuple[int, ...]
    budget: float

    @property
    def ok(self) -> bool:
        return self.rel_rms <= self.budget

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"too far, worst at {list(self.worst)}"
        apart = f"{self.tensor} is {self.rel_rms:.2e} from its stages in fp64 (budget {self.budget:.0e})"
        return f"{self.span}: {apart}: {verdict}"


def check_spans(module, case: Case, seed: int = 0, device=None, grad: bool = True) -> list[SpanError]:
    """Errors of every tensor that the idea's spans write, in order of the chain; on the GPU if there is one. Without
    `grad`, of the forward alone.

    Rejected when a span writes out of bounds or breaks the contract's shapes, dtypes or None. CheckError when the
    module is of another family or does not support the case."""
    if case.family != module.FAMILY:
        raise CheckError(f"the module is of family {module.FAMILY}, case {case.id} of {case.family}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    p = case.problem(torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETER)
    ok, reason = module.supports(p)
    if not ok:
        raise CheckError(f"the module does not support {case.id}: {reason}")
    found = []
    for span, fn in held.of(module, p).items():
        names = contract.parse_span(case.family, span)
        if not grad and names[0].startswith("bwd"):
            continue
        env, meta = operands(case, p, names[0], seed, device)
        step = _step(case.family, span, fn, getattr(module, "WRITES", {}).get(span))
        found += _compare(case, p, module, span, names, step, env, meta)
    return found


def operands(case: Case, p, stage: str, seed: int, device) -> tuple[dict, dict]:
    """Every tensor of the chain as it is when `stage` starts, from the plain-torch stages before it; and the meta
    arguments."""
    env, meta = start(case, p, seed, device)
    for s in contract.stages(case.family):
        if s.name == stage:
            break
        env |= _reference_step(case.family, s.name, p)(env, meta)
    return env, meta


def start(case: Case, p, seed: int, device) -> tuple[dict, dict]:
    """The tensors that a chain starts from, by its own names, and the meta arguments."""
    x = inputs.make(case, seed, device)
    env = {OP_NAMES[case.family].get(n, n): t for n, t in x.items() if n != "cu_seqlens"}
    tables = None if x["cu_seqlens"] is None else packed.describe(x["cu_seqlens"])
    meta = {
        "p": p,
        "cu_seqlens": x["cu_seqlens"],
        "chunk_indices": tables and tables.chunk_indices,
        "chunk_offsets": tables and tables.chunk_offsets,
    }
    return env, meta


def _step(family, span, fn, writes=None):
    return make_step(span, fn, contract.stages(family), contract.chain(family).OUTPUTS, span, writes)


def _reference_step(family: str, stage: str, p):
    """The plain-torch function of one stage for `p`, as a step."""
    reference = importlib.import_module(f"kernel_fun.{family}.reference")
    table = reference.spans(p)
    return _step(family, stage, table[stage])


def _compare(case, p, module, span, names, step, env, meta) -> list[SpanError]:
    guards, given = [], dict(env)
    for name in step.reads:
        if env[name] is not None:
            given[name], guard = poison.guarded(env[name], f"operand {name}")
            guards.append(guard)
    with poison.Poison() as poisoned, torch.no_grad():
        got = step(given, meta)
        held.require(module, span, p, step.writes, got)
        if any(t is not None and t.is_cuda for t in got.values()):
            torch.cuda.synchronize()
    trespassed = poisoned.trespassed() + poison.trespassed(guards)
    if trespassed:
        raise Rejected(Status.OUT_OF_BOUNDS, f"{span} wrote outside of {', '.join(trespassed[:3])}")
    truth, p64 = _widen(env), dataclasses.replace(fp64_problem(case), arch=p.arch)
    for stage in names:
        truth |= _reference_step(case.family, stage, p64)(truth, meta | {"p": p64})
    return [
        e for name in step.writes if (e := _error(case, p, span, name, names[-1], got.get(name), truth[name], meta))
    ]


def _widen(env: dict) -> dict:
    return {n: t.double() if t is not None and t.is_floating_point() else t for n, t in env.items()}


def _error(case, p, span, name, last, got, want, meta) -> SpanError | None:
    t = contract.tensor(case.family, name, last, written=True)
    if not contract.present(t, p):
        return None
    if name in _AS_READ:
        got, want = (_AS_READ[name](x, _rows(p, meta, x.device)) for x in (got, want))
    found = compare.difference(got, want)
    limit = compare.limit(contract.budget(case.family, name, p), None, found.numbers)
    return SpanError(span, name, found.rel_rms, found.max_abs, found.worst, limit)


def _rows(p, meta, device) -> torch.Tensor:
    """[B, T]: which row of its chunk each token is."""
    row = torch.arange(p.T, device=device).repeat(p.B, 1)
    if meta["cu_seqlens"] is not None:
        for start, end in itertools.pairwise(meta["cu_seqlens"].tolist()):
            row[0, start:end] -= start
    return row % CHUNK


def _lower(Aqk: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What lies above the diagonal is nobody's."""
    keep = torch.arange(CHUNK, device=Aqk.device) <= rows[..., None]
    return torch.where(keep[:, :, None], Aqk, 0)


def _steps(gk: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Only differences are read, and below a decay of 2^-32 all are alike."""
    before = torch.where((rows == 0)[..., None, None], 0, gk.roll(1, 1))
    return torch.where(gk.isneginf(), -32, gk - before).clamp_min(-32)


_AS_READ = {"Aqk": _lower, "gk": _steps}
