"""The numbers in README.md: written from the committed rows between two marks, and nowhere by hand."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from loop import board, cases, contract, registry, rows, sources

BEGIN, END = "<!-- numbers: written by `python -m loop.readme` -->", "<!-- end of numbers -->"


TITLES = {"kda": "Kimi Delta Attention", "cconv": "Short convolution"}
COLUMNS = (
    "case", "problem", "fla, ms", "ours, ms", "ratio", "interval", "forward", "backward", "of floor", "one eager step",
    "peak", "row",
)  # fmt: skip
LEGEND = (
    "A ratio is fla's time divided by ours in the same process; times are of a forward and backward, forward and "
    "backward have ratios of their own. One eager step: ms that somebody waits for one call and nothing else, fla to "
    "ours, the host's work included. Peak: of memory, as a share of fla's."
)


def section(entries: Sequence[dict], callers: dict[str, tuple]) -> str:
    """What ships against fla: a table a family, a line a case, from leaderboard entries of GPUs and, by row id, what a
    caller of the baseline and of the arm waits, ms.

    Where the package has no row of its own yet, a promoted idea speaks for it: its file is the shipped one.
    """
    promoted = {s.idea.split("-")[0]: family for family in registry.FAMILIES for s in sources.shipped(family)}
    shown: dict[tuple, dict] = {}
    for e in entries:
        if e["baseline"] != "000" or e["device"] == "cpu" or e["mode"] not in contract.MODES:
            continue
        if e["arm"] == "ship" or promoted.get(e["arm"]) == e["family"]:
            modes = shown.setdefault((e["device"], e["family"], e["case"]), {})
            if e["mode"] not in modes or e["arm"] == "ship":
                modes[e["mode"]] = e
    if not shown:
        return "The package ships nothing yet that has been timed on a GPU."
    places = sorted(shown, key=lambda at: (at[0], list(TITLES).index(at[1]), _rank(*at[1:])))
    lines = []
    for (device, family), group in itertools.groupby(places, lambda at: at[:2]):
        lines += [f"{TITLES[family]} on one {device}:", "", _cells(COLUMNS), _cells(["---"] * len(COLUMNS))]
        lines += [*(_line(shown[at], *at[1:], callers) for at in group), ""]
    timed = [e for modes in shown.values() for e in modes.values()]
    old, notes = sum(bool(e.get("stale")) for e in timed), [LEGEND]
    if old:
        notes.append(f"{old} of {len(timed)} rows are of an earlier source than the present (`stale` on the board).")
    return "\n".join([*lines, " ".join(notes)])


def _cells(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _rank(family: str, case: str) -> int:
    """Cases come in the order of `loop.cases`."""
    known = list(cases.family_cases(family))
    return known.index(case) if case in known else len(known)


def _line(modes: dict, family: str, name: str, callers: dict) -> str:
    whole = modes.get("fwdbwd")
    known = cases.family_cases(family).get(name)
    problem = f"{known.shape()}: {known.why}" if known else ""
    cells = [""] * 4
    if whole:
        interval = f"{whole['ci_low']:.3f} to {whole['ci_high']:.3f}"
        cells = [f"{whole['baseline_ms']:.2f}", f"{whole['ms']:.2f}", f"**{whole['ratio']:.2f}**", interval]
    alone = [f"{modes[mode]['ratio']:.2f}" if mode in modes else "" for mode in ("fwd", "bwd")]
    last = whole or next(iter(modes.values()))
    waits, peaks = callers.get(last["row_id"], (None, None)), (last["peak_bytes"], last["baseline_peak_bytes"])
    share = f"{100 * last['floor_ms'] / last['ms']:.0f} %" if last["floor_ms"] else ""
    eager = f"{waits[0]:.2f} to {waits[1]:.2f}" if all(waits) else ""
    peak = f"{peaks[0] / peaks[1]:.2f}" if all(peaks) else ""
    return _cells([name, problem, *cells, *alone, share, eager, peak, f"`{last['row_id']}`"])


def rendered(text: str, entries: Sequence[dict], callers: dict[str, tuple]) -> str:
    """README text with the section between the marks replaced. ValueError when the marks are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md: expected one {BEGIN!r} and one {END!r}")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{section(entries, callers)}\n{END}{rest.partition(END)[2]}"


def committed() -> tuple[list[dict], dict[str, tuple]]:
    """The leaderboard's entries of `bench_logs/` alone, and what callers wait."""
    found = rows.read(registry.root() / "bench_logs")
    return board.entries(found), {r.row_id: (r.perf.baseline_caller_ms, r.perf.caller_ms) for r in found if r.perf}


def path() -> Path:
    return registry.root() / "README.md"


if __name__ == "__main__":
    path().write_text(rendered(path().read_text(encoding="utf-8"), *committed()), encoding="utf-8")
