"""Run one idea's notebook through papermill and say truthfully how it went.

papermill's exit code and cell metadata do not tell a dead kernel, a timeout, `sys.exit(0)` or a mistyped parameter from
a success (see TRAPS.md). A run counts as passed only if its kernel lived, every code cell ran without an error, and a
row carrying this run's id was written with status PASSED. Everything else has a status of its own.
"""
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import nbformat

from loop import processes

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out"            # ignored by git: executed notebooks, pages, and rows of machines without a GPU
CELL_TIMEOUT = 900.0          # seconds per cell; fla's first call alone may tune for 220 s
START_TIMEOUT = 120.0         # seconds for the kernel to answer


class Status(StrEnum):
    """How a run ended. A closed list: the page and the exit code of every command are functions of it."""

    PASSED = "PASSED"
    CHECK_FAILED = "CHECK_FAILED"            # a row of this run says the kernel is wrong
    IMPORT_FAILED = "IMPORT_FAILED"          # kernel.py does not import
    ERROR = "ERROR"                          # a cell raised
    KERNEL_DIED = "KERNEL_DIED"              # a crash, os._exit, or the memory killer
    TIMEOUT = "TIMEOUT"                      # a cell ran past the limit
    EXITED = "EXITED"                        # sys.exit in a cell: what follows it was skipped
    NOT_ALL_RAN = "NOT_ALL_RAN"              # a code cell has no execution count
    NO_VERDICT = "NO_VERDICT"                # every cell ran, no row was written
    UNKNOWN_PARAMETER = "UNKNOWN_PARAMETER"  # a name that the parameters cell does not have; nothing ran
    RUNNER_TIMEOUT = "RUNNER_TIMEOUT"        # the process that runs the notebook had to be ended
    RUNNER_DIED = "RUNNER_DIED"              # that process ended without a result


@dataclass
class RunResult:
    """One run of one notebook. `rows` are those it recorded; `seconds` is wall time; `message` is one line."""

    idea: str
    run_id: str
    status: Status
    message: str
    seconds: float
    notebook: Path | None = None
    html: Path | None = None
    rows: list = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status is Status.PASSED

    @property
    def verdict(self) -> str:
        """The verdicts of this run's timed rows, without repetition, e.g. `FASTER`; empty when it timed nothing."""
        return ", ".join(dict.fromkeys(str(row.verdict) for row in self.rows if row.verdict))


def new_run_id(idea: str) -> str:
    """`20261130T181500-002-1a2b3c`: sorts by time, names the idea, does not repeat."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{idea}-{uuid.uuid4().hex[:6]}"


def run(idea: str, *, parameters: Mapping[str, object] | None = None, out: Path | None = None,
        timeout: float = CELL_TIMEOUT, on_cell: Callable[[int, int, str], None] | None = None) -> RunResult:
    """Execute `ideas/NNN-slug/bench.ipynb`. ValueError for an unknown idea or an output folder that cannot be written."""
    from loop import registry

    folder = registry.folder(idea)
    notebook = folder / "bench.ipynb"
    if not notebook.exists():
        raise ValueError(f"idea {idea}: {notebook.relative_to(ROOT)} is missing; ./ladder new writes one")
    return run_notebook(notebook, idea=folder.name.partition("-")[0], parameters=parameters, out=out, timeout=timeout,
                        on_cell=on_cell)


def run_notebook(notebook: Path, *, idea: str, parameters: Mapping[str, object] | None = None, out: Path | None = None,
                 timeout: float = CELL_TIMEOUT, on_cell: Callable[[int, int, str], None] | None = None) -> RunResult:
    """Execute a notebook into `out/runs/RUN_ID/`, next to an HTML copy; classify what happened.

    Args:
        notebook: the source; it is not modified. One cell is tagged `parameters`.
        idea: the id that the run is filed under.
        parameters: values for names of the parameters cell; a name it lacks is UNKNOWN_PARAMETER and runs nothing.
        timeout: seconds per cell.
        on_cell: called as (index of the code cell from 1, number of code cells, its tag) before each code cell.
    """
    run_id = os.environ.get("LOOP_RUN_ID") or new_run_id(idea)
    nb = nbformat.read(notebook, as_version=4)
    parameters = dict(parameters or {})
    known = parameter_names(nb)
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        text = f"unknown parameter {unknown[0]!r}; the notebook has {', '.join(known) or 'no parameters'}"
        return RunResult(idea, run_id, Status.UNKNOWN_PARAMETER, text, 0.0)
    folder = make_folder((out or OUT) / "runs" / run_id)
    executed = folder / "notebook.ipynb"
    began = time.monotonic()
    with _environment(run_id, folder):
        try:
            failure = _execute(nb, executed, parameters, timeout, on_cell)
        finally:
            processes.reap(run_id)
        rows = _rows_of(run_id)
    result = RunResult(idea, run_id, Status.PASSED, "", time.monotonic() - began, executed, rows=rows)
    result.status, result.message = failure or classify(nbformat.read(executed, as_version=4), rows)
    result.html = _write_html(executed, idea, result)
    return result


def parameter_names(nb) -> list[str]:
    """Names assigned in the cell tagged `parameters`."""
    from papermill.inspection import _infer_parameters

    return [p.name for p in _infer_parameters(nb, name="python3", language="python")]


def make_folder(path: Path) -> Path:
    """The folder, made if need be. ValueError in one line when it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise ValueError(f"cannot write to {path}: {e.strerror}; give another folder with --out") from None
    return path


def classify(nb, rows) -> tuple[Status, str]:
    """Status and one-line message of an executed notebook whose kernel lived and whose cells did not time out."""
    cells = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    for number, cell in enumerate(cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                where = f"code cell {number} ({_tag(cell)}): {output.ename}: {_one_line(output.evalue)}"
                if output.ename == "SystemExit":
                    return Status.EXITED, f"{where} ended the notebook; {len(cells) - number} cells were skipped"
                if _tag(cell) == "loop:load":
                    return Status.IMPORT_FAILED, where
                wrong = _wrong(rows)
                return (Status.CHECK_FAILED, wrong) if wrong else (Status.ERROR, where)
    if idle := [n for n, cell in enumerate(cells, 1) if cell.execution_count is None]:
        return Status.NOT_ALL_RAN, f"code cell {idle[0]} of {len(cells)} did not run"
    if not rows:
        return Status.NO_VERDICT, "every cell ran, but no row was recorded in this run"
    if wrong := _wrong(rows):
        return Status.CHECK_FAILED, wrong
    return Status.PASSED, f"{len(rows)} row{'s' if len(rows) > 1 else ''} recorded"


def _wrong(rows) -> str:
    bad = [row for row in rows if str(row.status) != "PASSED"]
    return f"{bad[0].status}: arm {bad[0].arm}, case {bad[0].case}" if bad else ""


def _execute(nb, executed: Path, parameters, timeout, on_cell) -> tuple[Status, str] | None:
    """Run papermill. None when the notebook came to an end, by itself or by an error that its outputs show."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    progress = _Progress(nb, on_cell)
    papermill.engines.papermill_engines.register("loop", _engine(progress))
    try:
        papermill.execute_notebook(
            nb, str(executed).replace("{", "{{").replace("}", "}}"), parameters, engine_name="loop", kernel_name="python3",
            language="python", progress_bar=False, cwd=str(ROOT), execution_timeout=int(timeout) or 1,
            start_timeout=int(START_TIMEOUT), autosave_cell_every=0)
    except papermill.PapermillExecutionError:
        return None
    except CellTimeoutError:
        return Status.TIMEOUT, f"{progress.where()} ran past {timeout:g} s"
    except (DeadKernelError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not isinstance(e, DeadKernelError) and "Kernel" not in str(e):
            raise
        return Status.KERNEL_DIED, f"{progress.where()}: {_one_line(str(e))}"
    return None


class _Progress:
    """Which code cell runs now."""

    def __init__(self, nb, on_cell):
        self.total = sum(c.cell_type == "code" for c in nb.cells)
        self.number, self.tag, self.on_cell = 0, "start", on_cell

    def started(self, cell):
        if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", []):
            self.number, self.tag = self.number + 1, _tag(cell)
            if self.on_cell:
                self.on_cell(self.number, self.total, self.tag)

    def where(self) -> str:
        return f"code cell {self.number} ({self.tag})"


def _engine(progress: _Progress):
    """papermill's own engine, telling `progress` about every cell before it starts."""
    from papermill.engines import NBClientEngine

    class Watched(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **kwargs):
            start = nb_man.cell_start

            def cell_start(cell, cell_index=None, **kw):
                progress.started(cell)
                return start(cell, cell_index, **kw)

            nb_man.cell_start = cell_start
            super().execute_managed_notebook(nb_man, kernel_name, **kwargs)

    return Watched


@contextlib.contextmanager
def _environment(run_id: str, folder: Path) -> Iterator[None]:
    """What the kernel inherits: the run id, where this checkout's modules are, where rows go, no window for plots."""
    from loop import rows

    changes = {"LOOP_RUN_ID": run_id, "MPLBACKEND": "module://matplotlib_inline.backend_inline",
               "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "package" / "src"),
                                              *filter(None, [os.environ.get("PYTHONPATH")])])}
    del rows, folder
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _rows_of(run_id: str) -> list:
    from loop import rows

    return [row for row in rows.read() if row.run_id == run_id]


def _write_html(executed: Path, idea: str, result: RunResult) -> Path:
    from loop import page

    path = executed.with_suffix(".html")
    path.write_text(page.notebook_html(nbformat.read(executed, as_version=4), idea, result), encoding="utf-8")
    return path


def _tag(cell) -> str:
    return next((t for t in cell.metadata.get("tags", []) if t.startswith("loop:") or t == "parameters"), "untagged")


def _one_line(text: str, width: int = 200) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"
