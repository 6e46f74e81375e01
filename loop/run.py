"""Run one idea's notebook through papermill and say truthfully how it went.

papermill's exit code and cell metadata do not tell a dead kernel, a timeout, `sys.exit(0)` or a mistyped parameter from
a success (see TRAPS.md). A run counts as passed only if its kernel lived, every code cell ran without an error, and a
row carrying this run's id was written with status PASSED. Everything else has a status of its own.
"""

import ast
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from loop import env, processes, registry, rows
from loop.rows import Row

CELL_TIMEOUT = 900.0  # seconds per cell; fla's first call alone may tune for 220 s
START_TIMEOUT = 120.0  # seconds for the kernel to answer


@dataclass
class RunResult:
    """One run of one notebook.

    `status` is PASSED, one of the runner's own failures (KERNEL_DIED, TIMEOUT, EXITED, NO_VERDICT, UNKNOWN_PARAMETER,
    IMPORT_ERROR, ERROR), or the status of a row that says the kernel failed. `rows` are those the notebook recorded,
    `seconds` is wall time, `message` is one line.
    """

    idea: str
    run_id: str
    status: str
    message: str
    seconds: float
    notebook: Path | None = None
    html: Path | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == "PASSED"

    @property
    def verdict(self) -> str:
        """The verdicts of this run's timed rows, without repetition, e.g. `FASTER`; empty when it timed nothing."""
        return ", ".join(dict.fromkeys(row.verdict for row in self.rows if row.verdict))


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
    notebook = folder / "bench.ipynb"
    if not notebook.exists():
        raise ValueError(
            f"ideas/{folder.name} has no bench.ipynb; `python -m loop.notebooks` writes it from the template"
        )
    return run_notebook(
        notebook, idea=folder.name.partition("-")[0], parameters=parameters, out=out, timeout=timeout, on_cell=on_cell
    )


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
    nb = nbformat.read(notebook, as_version=4)
    parameters = dict(parameters or {})
    if unknown := sorted(set(parameters) - set(known := parameter_names(nb))):
        text = f"unknown parameter {unknown[0]!r}; the notebook has {', '.join(known) or 'none'}"
        return _recorded(RunResult(idea, run_id, "UNKNOWN_PARAMETER", text, 0.0), parameters)
    folder = make_folder((out or out_folder()) / "runs" / f"{run_id}-{idea}")
    executed = folder / "notebook.ipynb"
    with _environment(run_id):
        try:
            failure = _execute(nb, executed, parameters, timeout, on_cell)
        finally:
            processes.reap(run_id)
    result = RunResult(idea, run_id, "PASSED", "", time.monotonic() - began, executed, rows=rows_of(run_id))
    result.status, result.message = failure or classify(nbformat.read(executed, as_version=4), result.rows)
    result.html = _write_html(executed, result)
    return _recorded(result, parameters)


def rows_of(run_id: str) -> list[Row]:
    """The rows recorded under a run id."""
    base = registry.root()
    return rows.read(
        *(path for logs in ("bench_logs", "out/bench_logs") for path in (base / logs).rglob(f"{run_id}-*.jsonl"))
    )


def parameter_names(nb) -> list[str]:
    """Names assigned in the cell tagged `parameters`."""
    from papermill.inspection import _infer_parameters

    return [p.name for p in _infer_parameters(nb, name="python3", language="python")]


def typed(nb, assignments: Sequence[str]) -> dict[str, object]:
    """`NAME=VALUE` texts as parameters with the types of the notebook's defaults. ValueError in one line.

    Left to itself, papermill would read `12e4567` as infinity and `0012` as 12; here a string parameter stays a string.
    """
    from papermill.inspection import _infer_parameters

    defaults = {p.name: ast.literal_eval(p.default) for p in _infer_parameters(nb, name="python3", language="python")}
    values = {}
    for text in assignments:
        name, sep, value = text.partition("=")
        if not sep or not name:
            raise ValueError(f"parameter {text!r}: write NAME=VALUE")
        kind = type(defaults.get(name, ""))
        try:
            values[name] = value if kind is str else kind(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            raise ValueError(
                f"parameter {name}={value!r}: expected {kind.__name__}, as in {name}={defaults[name]!r}"
            ) from None
    return values


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


def classify(nb, recorded) -> tuple[str, str]:
    """Status and one-line message of an executed notebook whose kernel lived and whose cells did not time out."""
    cells = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    wrong = next((r for r in recorded if r.status != "PASSED"), None)
    for number, cell in enumerate(cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                where = f"code cell {number} ({_tag(cell)}): {output.ename}: {_one_line(output.evalue)}"
                if output.ename == "SystemExit":
                    return "EXITED", f"{where} ended the notebook; {len(cells) - number} cells were skipped"
                if wrong:
                    return wrong.status, _one_line(wrong.reason)
                return "IMPORT_ERROR" if output.ename == "IdeaError" else "ERROR", where
    if idle := [n for n, cell in enumerate(cells, 1) if cell.execution_count is None]:
        return "EXITED", f"code cell {idle[0]} of {len(cells)} did not run"
    if not recorded:
        return "NO_VERDICT", "every cell ran, but no row was recorded in this run"
    if wrong:
        return wrong.status, _one_line(wrong.reason)
    return "PASSED", f"{len(recorded)} row{'s' if len(recorded) > 1 else ''} recorded"


def _execute(nb, executed: Path, parameters, timeout, on_cell) -> tuple[str, str] | None:
    """Run papermill. None when the notebook came to an end, by itself or by an error that its outputs show."""
    import papermill
    from nbclient.exceptions import CellTimeoutError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    progress = _Progress(nb, on_cell)
    papermill.engines.papermill_engines.register("loop", _engine(progress))
    try:
        papermill.execute_notebook(
            nb,
            str(executed).replace("{", "{{").replace("}", "}}"),
            parameters,
            engine_name="loop",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=str(registry.root()),
            execution_timeout=int(timeout) or 1,
            start_timeout=int(START_TIMEOUT),
            autosave_cell_every=0,
            config=_transport(),
        )
    except papermill.PapermillExecutionError:
        return None
    except CellTimeoutError:
        return "TIMEOUT", f"{progress.where()} ran past {timeout:g} s"
    except RuntimeError as e:  # DeadKernelError, or a kernel that died before it answered
        return "KERNEL_DIED", f"{progress.where()}: {_one_line(str(e))}"
    return None


def _transport():
    """Unix sockets, where their paths are short enough: ports collide when several kernels start at once."""
    from jupyter_core.paths import jupyter_runtime_dir
    from traitlets.config import Config

    longest = len(os.path.join(jupyter_runtime_dir(), f"kernel-{'0' * 36}-ipc-5"))
    return Config({"KernelManager": {"transport": "ipc"}} if longest < 100 else {})


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
def _environment(run_id: str) -> Iterator[None]:
    """What the kernel inherits: the run id, and where this checkout's modules are."""
    checkout = Path(__file__).resolve().parents[1]
    path = [str(checkout), str(checkout / "package" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {"LOOP_RUN_ID": run_id, "PYTHONPATH": os.pathsep.join(path), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
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


def _recorded(result: RunResult, parameters) -> RunResult:
    """Write a row for a failure that left none, so that a broken idea is on the page and not merely absent."""
    if result.ok or any(row.status != "PASSED" for row in result.rows):
        return result
    idea, device = registry.find(result.idea), env.device_name()
    family = idea.family or "kda"
    flags = "".join(f" -p {name}={value}" for name, value in parameters.items())
    row = Row(
        run_id=result.run_id,
        utc=rows.utc_now(),
        kind="run",
        family=family,
        arm=result.idea,
        status=result.status,
        reason=result.message,
        device=device,
        env=env.collect(),
        cmd=f"./ladder run {result.idea}{flags}",
        code_sha=registry.source_sha(result.idea) if idea.kernel.exists() else "",
    )
    writer = rows.Writer(rows.default_folder(family, device), f"run-{result.idea}", result.run_id)
    result.rows.append(writer.write(row))
    return result


def _write_html(executed: Path, result: RunResult) -> Path:
    from loop import page

    path = executed.with_suffix(".html")
    path.write_text(page.notebook_html(nbformat.read(executed, as_version=4), result), encoding="utf-8")
    return path


def _tag(cell) -> str:
    return next((t for t in cell.metadata.get("tags", []) if t.startswith("loop:") or t == "parameters"), "untagged")


def _one_line(text: str, width: int = 200) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"
