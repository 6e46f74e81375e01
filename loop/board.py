"""The leaderboard: for each family, case, mode, arm, baseline and device, what its newest row says.

A newer failure hides an older time, a failed check of the same source the times of its case: the board says what is so
now. `stale` marks a time whose arm has changed since; it never hides a row of the present source, as one run may time
an older tree beside the present one.
"""

from collections.abc import Iterable, Sequence

from loop import registry, rows, sources

# The keys of `--json`, in order. ratio = baseline_ms / ms: above 1 is faster.
KEYS = (
    "family", "case", "mode", "arm", "baseline", "ratio", "ci_low", "ci_high", "ms", "baseline_ms", "floor_ms",
    "peak_bytes", "baseline_peak_bytes", "device", "row_id", "code_sha", "stale",
)  # fmt: skip


def void(row: rows.Row) -> bool:
    """Does the row time something else than it says? A packed call replayed from a graph is fla's, because the package
    declines to be captured with chunk tables that a graph would freeze; such rows were recorded once.
    """
    return bool(row.perf and row.perf.timer == "graph" and row.axes.get("varlen"))


def newest(found: Iterable[rows.Row], current: dict | None = None) -> list[rows.Row]:
    """The newest bench row of each (family, case, mode, arm, baseline, device), in that order, of the arm's present
    source if there is one; `found` is oldest first, `current` as in `is_stale`.
    """
    last, wrong, current = {}, {}, {} if current is None else current
    for row in found:
        if row.kind == "bench" and not void(row):
            key = row.family, row.case, row.mode, row.arm, row.baseline, row.device
            if key in last and is_stale(row, current) and not is_stale(last[key], current):
                continue
            last[key] = row
        if row.kind in ("bench", "check"):  # a time has been checked in its own process
            wrong.pop(_checked(row), None)
            if row.kind == "check" and row.status not in ("PASSED", "UNSUPPORTED"):
                wrong[_checked(row)] = row
    return [wrong.get(_checked(last[key]), last[key]) for key in sorted(last, key=lambda key: tuple(map(str, key)))]


def _checked(row: rows.Row) -> tuple:
    """What a check speaks for: a source on a case, whatever is timed of it."""
    return row.family, row.case, row.arm, row.device, row.code_sha


def is_stale(row: rows.Row, current: dict | None = None) -> bool:
    """Has the arm's own source changed since the row, or gone? `current` keeps the present hashes between calls."""
    current, arm = {} if current is None else current, (row.family, row.arm)
    if arm not in current:
        try:
            current[arm] = sources.arm(*arm)
        except (registry.IdeaError, LookupError, ModuleNotFoundError):
            current[arm] = None
    return current[arm] != row.code_sha


def tree(row: rows.Row) -> str:
    """Which tree the row is of, and who says so: git itself, or whoever ran it where there is no git (`loop.env`)."""
    commit, source = row.env.get("git_commit"), row.env.get("git_source")
    if not isinstance(commit, str) or not commit:
        return "unknown"
    said = {"git": "", "environment": " (from environment)"}.get(source, " (unknown source)")
    return commit[:7] + (" dirty" if row.env.get("git_dirty") else "") + said


def entry(row: rows.Row, current: dict | None = None) -> dict:
    """One object of `./ladder board --json`, from a row with a time."""
    named = {"family", "case", "mode", "arm", "baseline", "device", "row_id", "code_sha"}
    return {
        key: is_stale(row, current) if key == "stale" else getattr(row if key in named else row.perf, key)
        for key in KEYS
    }


def entries(found: Iterable[rows.Row] | None = None, families: Sequence[str] = registry.FAMILIES) -> list[dict]:
    """The leaderboard of the rows (default: all recorded ones): times only, fastest first within family, case and
    mode.
    """
    current: dict = {}
    last = newest(rows.read() if found is None else found, current)
    listed = [entry(r, current) for r in last if r.perf and r.family in families]
    return sorted(listed, key=lambda e: (e["family"], e["device"], e["case"], e["mode"], e["baseline"], -e["ratio"]))


def failures(found: Iterable[rows.Row], families: Sequence[str] = registry.FAMILIES) -> list[rows.Row]:
    """The newest rows that have no time, supported cases only."""
    listed = [r for r in newest(found) if not r.perf and r.family in families and r.status != "UNSUPPORTED"]
    return list({r.row_id: r for r in listed}.values())  # a failed check stands for several times


COLUMNS = (
    "case", "mode", "arm", "vs", "ratio", "interval", "verdict", "ms", "vs ms", "floor ms", "of floor", "peak GiB",
    "row", "tree",
)  # fmt: skip
NARROW = ("case", "mode", "arm", "vs", "ratio", "verdict", "ms")  # of a terminal below ROOM
ROOM = 150


def tables(found: list[rows.Row], families: Sequence[str] = registry.FAMILIES, width: int = ROOM) -> list:
    """One rich table per family and device, and one of the failures; fewer columns where `width` has no room for all
    of them."""
    from rich.table import Table

    columns = COLUMNS if width >= ROOM else NARROW

    verdicts = {r.row_id: r.verdict for r in found}
    trees = {r.row_id: tree(r) for r in found}
    made: dict[tuple, Table] = {}
    previous = None
    for e in entries(found, families):
        place = (e["family"], e["device"])
        if place not in made:
            note = ": not comparable with a GPU, never promoted" if e["device"] == "cpu" else ""
            made[place] = Table(title=f"{e['family']} on {e['device']}{note}", title_justify="left")
            if columns is NARROW:
                made[place].box, made[place].pad_edge = None, False
            for column in columns:
                words = ("case", "mode", "arm", "vs", "verdict", "row", "tree")
                justify = "left" if column in words else "right"
                made[place].add_column(column, justify=justify, no_wrap=columns is NARROW)
        group = (*place, e["case"], e["mode"])
        if previous and previous != group and previous[:2] == place:
            made[place].add_section()
        first = previous != group
        previous = group
        verdict = verdicts[e["row_id"]] + (" (stale)" if e["stale"] else "")
        share = f"{100 * e['floor_ms'] / e['ms']:.0f} %" if e["floor_ms"] else ""
        peak = "" if e["peak_bytes"] is None else f"{e['peak_bytes'] / 2**30:.2f}"
        cells = (
            e["case"] if first else "", e["mode"] if first else "", e["arm"], e["baseline"], f"{e['ratio']:.3f}",
            f"{e['ci_low']:.3f} to {e['ci_high']:.3f}", verdict, f"{e['ms']:.3f}", f"{e['baseline_ms']:.3f}",
            _number(e["floor_ms"]), share, peak, e["row_id"], trees[e["row_id"]],
        )  # fmt: skip
        shown = [cell for cell, column in zip(cells, COLUMNS, strict=True) if column in columns]
        made[place].add_row(*shown, style="dim" if e["stale"] else None)
    failed = failures(found, families)
    if failed:
        table = Table(
            "family", "case", "mode", "arm", "status", "reason", title="failed at the newest run", title_justify="left"
        )
        for r in failed:
            table.add_row(r.family, r.case, r.mode, r.arm, r.status, r.reason)
        made["failures"] = table
    return list(made.values())


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3f}"
