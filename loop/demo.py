"""`./ladder demo`: the main job, once, on whatever this machine has.

Runs an idea's notebook through papermill (tiny cases with interpreted kernels on a CPU, production cases on a GPU) and
ends with its checks, times and verdicts, and where the executed notebook and the page lie.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from loop import board, env, page, registry, rows, run, session
from loop.console import waiting


def demo(idea: str | None = None, out: Path | None = None) -> int:
    """Run it; returns 0 only if the idea passed. ValueError in one line for an unknown idea or an unwritable folder."""
    console = Console()
    with waiting("looking for an idea that runs here"):
        chosen = registry.find(idea) if idea else best()
    device = env.device_name()
    where = (
        "this CPU: tiny cases, interpreted kernels, times that say nothing about a GPU" if device == "cpu" else device
    )
    console.print(f"Idea {chosen.name} through its notebook, on {where}", highlight=False)
    result = run.run(chosen.id, out=out, on_cell=run.say_cell)
    show(console, result)
    base = out or run.out_folder()
    index = page.write(base / "index.html", rows.read(), title="kernel-fun demo", runs=[(result, "")])
    for label, path in (("notebook", result.notebook), ("its page", result.html), ("index", index)):
        if path:
            console.print(f"{label:9} {run.shown(path)}", highlight=False, soft_wrap=True)
    return int(not result.ok)


def best() -> registry.Idea:
    """Of the ideas that run here, the promoted one with the largest recorded ratio; the newest when none is."""
    usable = [i for i in registry.all_ideas() if i.error is None and _runs_here(i)]
    if not usable:
        raise ValueError("no idea with a notebook runs here; ./ladder new makes one")
    ratios = {}
    for entry in board.entries():
        if entry["device"] != "cpu" and entry["baseline"] == registry.BASELINE:
            ratios[entry["arm"]] = max(entry["ratio"], ratios.get(entry["arm"], 0.0))

    def rank(idea: registry.Idea):
        promoted = registry.front_matter(idea.folder).get("status") == "promoted"
        return promoted, ratios.get(idea.id, 0.0), idea.id

    return max(usable, key=rank)


def _runs_here(idea: registry.Idea) -> bool:
    if not (idea.folder / "bench.ipynb").exists():
        return False
    try:
        s = session.open_idea(idea.id)
        return s.arm().supports(s.case)[0]
    except registry.IdeaError:  # its supports() is broken
        return False


def show(console: Console, result: run.RunResult) -> None:
    """The checks, times and verdicts of a run, or why it has none."""
    checks = Table("arm", "case", "output", "error", "limit", "", title="checks", title_justify="left", box=None)
    times = Table(
        "arm",
        "against",
        "mode",
        "ms",
        "its ms",
        "ratio",
        "interval",
        "verdict",
        title="times",
        title_justify="left",
        box=None,
    )
    seen = set()
    for row in result.rows:
        if row.check and row.arm not in seen:
            seen.add(row.arm)
            for name, e in row.check.errors.items():
                within = e.error is not None and e.limit is not None and e.error <= e.limit
                checks.add_row(
                    row.arm, row.case, name, _number(e.error), _number(e.limit), "ok" if within else "[red]too far[/]"
                )
        if row.perf:
            _add_time(times, row)
    if checks.row_count:
        console.print(checks)
    if times.row_count:
        console.print(times)
    color = "green" if result.ok else "red"
    console.print(f"[{color}]{result.status}[/] {result.message}", highlight=False)


def _add_time(times: Table, row: rows.Row) -> None:
    perf = row.perf
    times.add_row(row.arm, row.baseline, row.mode, f"{perf.ms:.3f}", f"{perf.baseline_ms:.3f}", f"{perf.ratio:.3f}",
                  f"{perf.ci_low:.3f} to {perf.ci_high:.3f}", perf.verdict)  # fmt: skip


def _number(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.2e}"
