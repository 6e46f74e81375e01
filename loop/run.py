"""Run one idea's notebook through papermill and say truthfully how it went.

papermill's exit code and cell metadata do not tell a dead kernel, a timeout, `sys.exit(0)` or a mistyped parameter from
a success (see TRAPS.md). A run counts as passed only if its kernel lived, every code cell ran without an error, and a
row carrying this run's id was written with status PASSED. Everything else has a status of its own.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import nbformat

from loop import env, execute, processes, registry, rows
from loop.environ import environment
from loop.rows import Row

CELL_TIMEOUT = 900.0  # seconds per cell; fla's first call alone may tune for 220 s


@dataclass
class RunResult:
    """One run of one notebook.

    `status` is PASSED, one of the runner's own failures (KERNEL_DIED, TIMEOUT, EXITED, NO_VERDICT, UNKNOWN_PARAMETER,
    IMPORT_ERROR, ERROR), or the status of a row that says the kernel failed. `rows` are those the notebook recorded,
    `seconds` is wall time, `message` is one line, `case` is empty where the notebook chose.
    """

    idea: str
    run_id: str
    status: str
    message: str
    seconds: float
    notebook: Path | None = None
    html: Path | None = None
    case: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == "PASSED"

    @property
    def failed(self) -> bool:
        """Neither passed nor declined: an idea that says it does not serve this machine is no failure of a batch."""
        return self.status not in ("PASSED", "UNSUPPORTED")

    @property
    def verdict(self) -> str:
        """The verdicts of the idea's timed rows, without repetition, e.g. `FASTER`; empty when it timed nothing."""
        return ", ".join(dict.fromkeys(row.verdict for row in self.mine if row.verdict))

    @property
    def mine(self) -> list[Row]:
        """The rows of the idea itself, without those of the arms it was compared with."""
        return [row for row in self.rows if row.arm == self.idea]


def out_folder() -> Path:
    """`out/`, ignored by git: executed notebooks, pages, and the rows of machines without a GPU."""
    return registry.root() / "out"


def run(
    idea: str,
    *,
    parameters: Mapping[str, object] | None = None,
    out: Path | None = None,
    timeout: float = CELL_TIMEOUT,
    on_cell: Callable[[int, int, str], None] | None = None,
) -> RunResult:
    """Execute `ideas/NNN-slug/bench.ipynb`. ValueError: unknown idea, unwritable output."""
    folder = registry.folder(idea)
    notebook = notebook_of(folder)
    return run_notebook(
        notebook, idea=folder.name.partition("-")[0], parameters=parameters, out=out, timeout=timeout, on_cell=on_cell
    )


def notebook_of(folder: Path) -> Path:
    """An idea's notebook. ValueError, with what to do, when there is none."""
    path = folder / "bench.ipynb"
    if not path.exists():
        raise ValueError(f"ideas/{folder.name} has no bench.ipynb; `.venv/bin/python -m loop.notebooks` writes it")
    return path


def run_notebook(
    notebook: Path,
    *,
    idea: str,
    parameters: Mapping[str, object] | None = None,
    out: Path | None = None,
    timeout: float = CELL_TIMEOUT,
    on_cell: Callable[[int, int, str], None] | None = None,
) -> RunResult:
    """Execute a notebook into `out/runs/RUN_ID/`, next to an HTML copy; classify what happened.

    Args:
        notebook: the source; it is not modified. One cell is tagged `parameters`.
        idea: the id that the run is filed under.
        parameters: values for names of the parameters cell; a name it lacks is UNKNOWN_PARAMETER and runs nothing.
        timeout: seconds per cell.
        on_cell: called as (index of the code cell from 1, number of code cells, its tag) before each code cell.
    """
    run_id, began = rows.new_run_id(), time.monotonic()
    nb = execute.load(notebook)
    parameters = dict(parameters or {})
    case = str(parameters.get("case", ""))
    if unknown := sorted(set(parameters) - set(known := execute.defaults(nb))):
        text = f"unknown parameter {unknown[0]!r}; the notebook has {', '.join(known) or 'none'}"
        result = RunResult(idea, run_id, "UNKNOWN_PARAMETER", text, 0.0, case=case)
        record(result, registry.glance(idea), parameters)
        return result
    folder = make_folder(folder_of(out or out_folder(), run_id))
    executed = folder / "notebook.ipynb"
    with environment(**execute.inherited(run_id)):
        try:
            failure = execute.execute(nb, executed, parameters, timeout, on_cell)
        finally:
            processes.reap(run_id)
    result = RunResult(idea, run_id, "PASSED", "", time.monotonic() - began, executed, case=case, rows=rows_of(run_id))
    result.status, result.message = failure or execute.classify(nbformat.read(executed, as_version=4), result.mine)
    result.html = _write_html(executed, result)
    record(result, registry.glance(idea), parameters)
    facts = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "rows"}
    (folder / "result.json").write_text(json.dumps(facts, default=str, indent=1) + "\n", encoding="utf-8")
    return result


def command(idea: str, assignments: Sequence[str] = (), out: Path | None = None, timeout: float = CELL_TIMEOUT) -> int:
    """`./ladder run NNN -p NAME=VALUE`: run, say how it went and where to look; returns 0 only if it passed.

    ValueError in one line for an unknown idea, a malformed parameter or an output folder that cannot be written.
    """
    nb = execute.load(notebook_of(registry.folder(idea)))
    given = execute.typed(nb, assignments)
    try:
        result = run(idea, parameters=given, out=out, timeout=timeout, on_cell=say_cell)
    except KeyboardInterrupt:
        print("interrupted; the rows written so far are complete", file=sys.stderr, flush=True)
        raise
    print(f"{result.idea}: {result.status}  {result.verdict or result.message}  ({result.seconds:.0f} s)")
    if any(row.perf and row.device == "cpu" for row in result.mine):
        print("  (times of a CPU, where kernels are interpreted: they say nothing about a GPU)")
    for row in result.mine:
        if row.perf:
            said = f"{row.perf.verdict} {row.perf.ratio:.3f}, row {row.row_id}"
            print(f"  {row.case} {row.mode} against {row.baseline}: {said}")
    for path in filter(None, (result.notebook, result.html)):
        print(f"  {shown(path)}")
    return int(not result.ok)


def shown(path: Path) -> str:
    """A path as one would type it here: relative where it lies below the current folder."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def say_cell(number: int, total: int, tag: str) -> None:
    """One line per cell on stderr, so that a run of minutes shows where it is."""
    print(f"  cell {number}/{total} {tag}", file=sys.stderr, flush=True)


def folder_of(out: Path, run_id: str) -> Path:
    """Where a run's notebook, page and result.json lie."""
    return out / "runs" / run_id


def left_by(out: Path, run_id: str) -> RunResult | None:
    """The result that a run left in its folder, with its rows; None when it did not get that far."""
    try:
        facts = json.loads((folder_of(out, run_id) / "result.json").read_text(encoding="utf-8"))
        paths = {name: Path(facts[name]) if facts[name] else None for name in ("notebook", "html")}
        return RunResult(**{**facts, **paths}, rows=rows_of(run_id))
    except (OSError, ValueError, KeyError, TypeError):  # absent, cut short, or of another version
        return None


def rows_of(run_id: str) -> list[Row]:
    """The rows recorded under a run id."""
    folders = (registry.root() / logs for logs in ("bench_logs", "out/bench_logs"))
    paths = [path for folder in folders for path in folder.rglob(f"{run_id}-*.jsonl")]
    return rows.read(*paths) if paths else []  # without a path, `read` reads all there is


def make_folder(path: Path) -> Path:
    """The folder, made if need be. ValueError in one line when it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        raise ValueError(f"cannot write to {path}: {e.strerror}; give another folder with --out") from None
    return path


def record(result: RunResult, idea: registry.Idea, parameters: Mapping[str, object] | None = None) -> None:
    """Write a row for a failure that left none, so that a broken idea is on the page and not merely absent."""
    if result.ok or any(row.status != "PASSED" for row in result.mine):
        return
    device = env.device_name()
    family = next((f for f in registry.FAMILIES if f in (idea.family or "")), registry.FAMILIES[0])
    flags = "".join(f" -p {name}={value}" for name, value in (parameters or {}).items())
    row = Row(
        run_id=result.run_id,
        utc=rows.utc_now(),
        kind="run",
        family=family,
        arm=result.idea,
        case=result.case or None,
        status=result.status,
        reason=result.message,
        device=device,
        env=env.collect(),
        cmd=f"./ladder run {result.idea}{flags}",
        code_sha=hashlib.sha256(idea.kernel.read_bytes()).hexdigest() if idea.kernel.is_file() else "",
    )
    writer = rows.Writer(rows.default_folder(family, device), f"run-{result.idea}", result.run_id)
    result.rows.append(writer.write(row))


def _write_html(executed: Path, result: RunResult) -> Path:
    from loop import page

    path = executed.with_suffix(".html")
    path.write_text(page.notebook_html(nbformat.read(executed, as_version=4), result), encoding="utf-8")
    return path


if __name__ == "__main__":  # one job of a nightly: IDEA OUT CELL_TIMEOUT CASE
    _idea, _out, _timeout, _case = sys.argv[1:]
    processes.end_with_parent(os.environ["LOOP_RUN_ID"])
    _given = {"case": _case} if _case else {}
    sys.exit(not run(_idea, parameters=_given, out=Path(_out), timeout=float(_timeout)).ok)
