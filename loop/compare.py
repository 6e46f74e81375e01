"""How far an output is from the oracle, and whether that is close enough.

The measure is relative RMS: rms(got - reference) / rms(reference), in fp64, with no absolute escape. NaN or Inf
anywhere is infinitely far. A reference that is zero, or as good as (a decay may be clamped at 2^-32), has no relative
error: the output must then be negligible too.

The limit of an output is its budget, tightened to 1.25 times fla's error on the same input; where fla itself misses
the budget, fla's error."""

import math
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

import torch

from . import contract

NEGLIGIBLE = 2.0**-30  # an RMS below this is zero: what clamped decays leave behind
FLA_FACTOR = 1.25
PIECE = 1 << 26  # entries widened to fp64 at a time
HANDFUL = 64  # entries: fewer do not make a statistic
FREE_SHARE = 0.01  # of the budget: below it two right kernels differ by the order of their sums alone


@dataclass(frozen=True)
class Difference:
    """One output against its reference. `rel_rms` and `max_abs` are inf where anything is not finite."""

    rel_rms: float
    max_abs: float
    worst: tuple[int, ...]  # position of the largest difference, or of the first non-finite entry
    numbers: int
    error: float  # RMS of the difference
    size: float  # RMS of the reference
    bad: int = 0  # entries that are NaN or Inf
    own: float = 1.0  # RMS of the reference, also where `size` is that of its terms
    fourth: float = 3**0.25  # the root of the mean of its fourth powers

    @property
    def zero_reference(self) -> bool:
        return self.size < NEGLIGIBLE

    @property
    def effective(self) -> float:
        """How many Gaussian numbers scatter as this reference does: gates that leave next to nothing of a gradient but
        at a row's end make a tensor of two million entries a statistic of ten."""
        kurtosis = (self.fourth / self.own) ** 4 if self.own else 3.0  # 3 if Gaussian, `numbers` if one is all there is
        return min(self.numbers, 3 * self.numbers / kurtosis)


@dataclass(frozen=True)
class OutputError:
    """One output's verdict: the error pooled over seeds, what it may be, and what fla's is on the same inputs."""

    name: str
    rel_rms: float
    max_abs: float
    worst: tuple[int, ...]
    budget: float
    limit: float
    fla_rel_rms: float | None
    ok: bool

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        fla = "" if self.fla_rel_rms is None else f", fla {self.fla_rel_rms:.2e}"
        verdict = "ok" if self.ok else f"too far, worst at {list(self.worst)}"
        return f"{self.name} {self.rel_rms:.2e} (limit {self.limit:.2e}, budget {self.budget:.0e}{fla}): {verdict}"


def difference(got: torch.Tensor, reference: torch.Tensor, terms: torch.Tensor | None = None) -> Difference:
    """Compare two tensors of one shape. ValueError when the shapes differ.

    terms: for a sum whose terms cancel, their root sum of squares; the error is relative to it where it is larger
    than the reference."""
    if got.shape != reference.shape:
        raise ValueError(f"shape {list(got.shape)} differs from the reference's {list(reference.shape)}")
    if not got.numel():
        return Difference(0.0, 0.0, (), 0, 0.0, 0.0)
    bad = ~torch.isfinite(got)
    if bad.any():
        where = _position(bad.flatten().int().argmax(), got)
        return Difference(math.inf, math.inf, where, got.numel(), math.inf, math.inf, int(bad.sum()))
    pieces = [_piece(x, y) for x, y in zip(_flat(got), _flat(reference), strict=True)]
    found, worst = pool(pieces), max(range(len(pieces)), key=lambda i: pieces[i].max_abs)
    size = found.size if terms is None else max(found.size, rms(terms.double()))
    where = _position(torch.tensor(worst * PIECE + pieces[worst].worst[0]), got)
    return replace(found, rel_rms=_relative(found.error, size), size=size, max_abs=pieces[worst].max_abs, worst=where)


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.flatten().split(PIECE)


def _piece(got: torch.Tensor, reference: torch.Tensor) -> Difference:
    """`difference` of a stretch of two finite tensors."""
    reference = reference.double()
    delta = got.double() - reference
    error, size = rms(delta), rms(reference)
    fourth = size * (reference / size).pow(4).mean().item() ** 0.25 if size else 0.0
    apart = delta.abs()
    where = apart.argmax().item()
    return Difference(
        _relative(error, size), apart[where].item(), (where,), got.numel(), error, size, own=size, fourth=fourth
    )


def _relative(error: float, size: float) -> float:
    if size < NEGLIGIBLE:
        return 0.0 if error < NEGLIGIBLE else math.inf
    return error / size


def rms(x: torch.Tensor) -> float:
    """Root of the mean square, scaled so that tiny and huge values neither underflow nor overflow."""
    top = x.abs().max().item()
    return top * (x / top).square().mean().sqrt().item() if top else 0.0


def _position(flat, x: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, x.shape))


def pool(differences: list[Difference]) -> Difference:
    """One error for several seeds, as if they were one tensor; the worst position is the worst seed's."""
    worst = max(differences, key=lambda d: d.rel_rms)
    numbers = sum(d.numbers for d in differences)
    error, size, own = (_mean(differences, of, 2) for of in (attrgetter("error"), _size, attrgetter("own")))
    relative, bad = math.inf if math.isinf(error) else _relative(error, size), sum(d.bad for d in differences)
    fourth = _mean(differences, attrgetter("fourth"), 4)
    return Difference(relative, worst.max_abs, worst.worst, numbers, error, size, bad, own, fourth)


def _mean(differences: list[Difference], of, power: int) -> float:
    """The root of the mean of `of`'s powers over all entries, scaled as in `rms`."""
    top, numbers = max(map(of, differences)), max(sum(d.numbers for d in differences), 1)
    if top == 0 or math.isinf(top):
        return top
    return top * (sum(d.numbers * (of(d) / top) ** power for d in differences) / numbers) ** (1 / power)


def _size(d: Difference) -> float:
    return 1.0 if math.isinf(d.size) else d.size


def limit(budget: float, fla: float | None, numbers: int, effective: float | None = None) -> float:
    """The largest error allowed for an output of `numbers` entries, of which `effective` (all, if not given) weigh.

    An error over n numbers scatters by about 1/sqrt(n) of itself, and the logarithm of a quotient of two by about
    1/sqrt(n - 1) (Fisher's z), so both tests are loosened by three times that: the budget for a handful of entries only
    (dA_log has one a head), the comparison with fla always, by the entries that weigh. Those are the oracle's, so what
    an arm does wrong at one place loosens nothing."""
    scatter = 3 / math.sqrt(max(numbers, 1))
    allowed = budget * (1 + scatter) if numbers <= HANDFUL else budget
    if fla is None or not math.isfinite(fla):
        return allowed
    luck = math.exp(3 / math.sqrt(max((numbers if effective is None else effective) - 1, 1)))
    if fla > budget:
        return max(allowed, fla * min(luck, 2.0))  # here no budget bounds what luck may be
    return max(min(allowed, FLA_FACTOR * luck * fla), FREE_SHARE * budget)


def judge(
    family: str, name: str, p, ours: list[Difference], fla: list[Difference] | None = None, slack: float = 1.0
) -> OutputError:
    """The verdict on one output of problem `p`, from its differences over the seeds and fla's over the same.

    slack: above 1, so many budgets are allowed, and fla's error bounds nothing: for other people's implementations."""
    found = pool(ours)
    theirs = pool(fla).rel_rms if fla else None
    budget = contract.budget(family, name, p)
    allowed = slack * budget if slack > 1 else limit(budget, theirs, found.numbers, found.effective)
    ok = found.rel_rms <= allowed
    return OutputError(name, found.rel_rms, found.max_abs, found.worst, budget, allowed, theirs, ok)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal to the bit, NaN included."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)
