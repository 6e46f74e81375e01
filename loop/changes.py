"""What changed between a batch and the last accepted one.

A time is compared by its ratio and by itself. Only where both moved beyond the noise of both runs did the arm move;
where the time moved and the ratio did not, the baseline moved with it (clocks, driver, a busy machine), and where only
the ratio moved, the baseline did. Both are called environment.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loop import board, registry, rows, stats
from loop.batch import Done

KINDS = ("broken", "slower", "stale", "faster", "fixed", "new", "environment")  # as they are listed
CPU_BAND = 0.25  # of a shared CPU's five blocks; a GPU's rows carry the band that their A/A showed


@dataclass(frozen=True)
class Change:
    """One line of what changed. `kind` is one of KINDS, `where` a case or a measurement, `said` how much."""

    kind: str
    idea: str
    where: str
    said: str

    def __str__(self) -> str:
        return "  ".join(filter(None, (self.kind, self.idea, self.where, self.said)))


def compare(now: Sequence[Done], then: Mapping[tuple[str, str], Done]) -> list[Change]:
    """The changes, in the order of KINDS. `then` is what `loop.batch.accepted` gives; none without it."""
    if not then:
        return []
    found = [change for done in now for change in _status(done, then.values())]
    before, after = _times(then.values()), _times(now)
    found += [c for key in after if key in before and (c := moved(before[key], after[key]))]
    broken = {c.idea for c in found if c.kind == "broken"}
    found += _stale(before, after, {d.result.idea for d in now} - broken, broken)
    return sorted(found, key=lambda c: (KINDS.index(c.kind), c.idea, c.where))


def kinds(text: str) -> list[str]:
    """Kinds separated by commas, for --fail-on. ValueError names what is accepted."""
    listed = [part.strip() for part in text.split(",") if part.strip()]
    for kind in listed:
        if kind not in KINDS:
            raise ValueError(f"fail-on {kind!r} is unknown{registry.closest(kind, KINDS)}; known: {', '.join(KINDS)}")
    return listed


def _status(done: Done, then: Iterable[Done]) -> Iterable[Change]:
    """broken, fixed or new. A failure that chose no case is held against every case of the idea."""
    r = done.result
    before = [d.result for d in then if d.result.idea == r.idea]
    same = [b for b in before if b.case == r.case or not b.case or not r.case]
    if not same:
        known = "" if r.ok else f"{r.status}: {r.message}"
        yield Change("new", r.idea, r.case, known)
    elif r.failed and any(b.ok for b in same):
        yield Change("broken", r.idea, r.case, f"{r.status}: {r.message}")
    elif r.ok and not any(b.ok for b in same):
        yield Change("fixed", r.idea, r.case, f"was {same[-1].status}")


def _times(done: Iterable[Done]) -> dict[tuple, rows.Row]:
    """What was measured of the ideas themselves, by what makes two times comparable."""
    found = {}
    for d in done:
        for row in d.result.mine:
            if row.perf:
                found[row.family, row.arm, row.case, row.mode, row.baseline, row.device] = row
    return found


def moved(before: rows.Row, after: rows.Row) -> Change | None:
    """How one time differs from an earlier one of the same arm, case, mode, baseline and device; None within noise."""
    if before.row_id == after.row_id:
        return None
    old, new = before.perf, after.perf
    band = CPU_BAND if after.device == "cpu" else max(old.dead_band, new.dead_band)
    ratio = _direction((old.ci_low, old.ci_high), (new.ci_low, new.ci_high), band)
    spans = [(i.low, i.high) for i in (stats.interval(old.block_ms), stats.interval(new.block_ms))]
    time = _direction(*spans, band)
    where = f"{after.case} {after.mode} against {after.baseline}"
    said = f"ratio {old.ratio:.3f} to {new.ratio:.3f}, {old.ms:.3f} to {new.ms:.3f} ms"
    if ratio == "up" and time == "down":
        return Change("faster", after.arm, where, said)
    if ratio == "down" and time == "up":
        return Change("slower", after.arm, where, said)
    if ratio or time:
        base = f", the baseline {old.baseline_ms:.3f} to {new.baseline_ms:.3f} ms"
        return Change("environment", after.arm, where, said + base)
    return None


def _direction(old: tuple[float, float], new: tuple[float, float], band: float) -> str:
    """Where the new interval lies, wholly and by more than the band, from the old one: up, down, or neither."""
    if new[0] > old[1] * (1 + band):
        return "up"
    return "down" if new[1] < old[0] * (1 - band) else ""


def _stale(before: Mapping, after: Mapping, ran: set[str], broken: set[str]) -> Iterable[Change]:
    """Accepted times that no longer speak of what is there: not measured again, or of a source that has changed."""
    current: dict = {}
    for key, row in before.items():
        where = f"{row.case} {row.mode} against {row.baseline}"
        if key in after or row.arm in broken:
            continue
        if row.arm not in registry.folders():
            yield Change("stale", row.arm, where, "the idea is gone")
        elif board.is_stale(row, current):
            yield Change("stale", row.arm, where, "its source has changed since that time")
        elif row.arm in ran and any(k[1] == row.arm and k[2:4] == key[2:4] for k in after):
            yield Change("stale", row.arm, where, "no longer measured")
