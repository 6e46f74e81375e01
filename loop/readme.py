"""The numbers in README.md: written from the committed rows between two marks, and nowhere by hand."""

from collections.abc import Sequence
from pathlib import Path

from loop import board, calls, registry, rows, sources

BEGIN, END = "<!-- numbers: written by `python -m loop.readme` -->", "<!-- end of numbers -->"


def section(entries: Sequence[dict], callers: dict[str, tuple]) -> str:
    """The table of what ships against fla, one line per case and mode, from leaderboard entries of GPUs and, by row id,
    what a caller of the baseline and of the arm waits, ms.

    Where the package has no row of its own yet, a promoted idea speaks for it: its file is the shipped one.
    """
    promoted = {s.idea.split("-")[0]: family for family in registry.FAMILIES for s in sources.shipped(family)}
    shown: dict[tuple, dict] = {}
    for e in entries:
        if e["baseline"] != "000" or e["device"] == "cpu":
            continue
        if e["arm"] == "ship" or promoted.get(e["arm"]) == e["family"]:
            key = (e["family"], e["case"], e["mode"], e["device"])
            if key not in shown or e["arm"] == "ship":
                shown[key] = e
    if not shown:
        return "The package ships nothing yet that has been timed on a GPU."
    lines = [
        "| case | pass | fla, ms | kernel-fun, ms | ratio | interval | of floor | eager call | peak | arm | row |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for e in shown.values():
        share = f"{100 * e['floor_ms'] / e['ms']:.0f} %" if e["floor_ms"] else ""
        waits, peaks = callers.get(e["row_id"], (None, None)), (e["peak_bytes"], e["baseline_peak_bytes"])
        eager = f"{waits[0]:.2f} to {waits[1]:.2f}" if all(waits) else ""
        peak = f"{peaks[0] / peaks[1]:.2f}" if all(peaks) else ""
        lines.append(
            f"| {e['family']} {e['case']} | {e['mode']} | {e['baseline_ms']:.2f} | {e['ms']:.2f} | {e['ratio']:.2f} "
            f"| {e['ci_low']:.3f} to {e['ci_high']:.3f} | {share} | {eager} | {peak} | {e['arm']} | `{e['row_id']}` |"
        )
    loops = any(e["mode"].endswith(calls.LOOP) for e in shown.values())
    devices = ", ".join(dict.fromkeys(e["device"] for e in shown.values()))
    notes = [
        f"Measured on {devices}. A ratio is fla's time divided by ours in the same process. Eager call: ms that "
        "somebody waits for one call and nothing else, fla to ours, the host's work included. Peak: of memory, as a "
        "share of fla's."
    ]
    if loops:
        notes.append("A pass that ends in -loop is of eager calls one after another, not of a graph.")
    old = sum(bool(e.get("stale")) for e in shown.values())
    if old:
        notes.append(f"{old} of {len(shown)} rows are of an earlier source than the present (`stale` on the board).")
    return "\n".join([*lines, "", " ".join(notes)])


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
