"""Executes a notebook with papermill and classifies what happened, without believing papermill's metadata.

papermill marks every cell completed when the kernel dies or a cell times out, exits 0 on `sys.exit(0)`, and accepts a
parameter that the notebook does not have (TRAPS.md). What is trusted here: the exception that reaches us, the execution
counts and error outputs of the cells, and the rows on disk.
"""

import ast
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loop import registry

LONGEST_SOCKET_PATH = 95  # of the 107 bytes that the system allows, less the number that is appended
START_TIMEOUT = 120  # seconds for the kernel to answer
KERNEL_LOG = "kernel.log"  # beside the executed notebook, if there is anything in it


def load(path: Path):
    """A notebook as papermill wants it: upgraded, with a list of tags on every cell."""
    from papermill.iorw import load_notebook_node

    return load_notebook_node(str(path))


def defaults(nb) -> dict[str, object]:
    """Name -> default of every parameter in the cell tagged `parameters`."""
    from papermill.inspection import _infer_parameters

    return {p.name: ast.literal_eval(p.default) for p in _infer_parameters(nb, name="python3", language="python")}


def typed(nb, assignments: Sequence[str]) -> dict[str, object]:
    """`NAME=VALUE` texts as parameters with the types of the notebook's defaults. ValueError in one line.

    Left to itself, papermill would read `12e4567` as infinity and `0012` as 12; here a string parameter stays a string.
    """
    known = defaults(nb)
    values = {}
    for text in assignments:
        name, sep, value = text.partition("=")
        if not sep or not name:
            raise ValueError(f"parameter {text!r}: write NAME=VALUE")
        kind = type(known.get(name, ""))
        try:
            values[name] = value if kind is str else kind(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            raise ValueError(
                f"parameter {name}={value!r}: expected {kind.__name__}, as in {name}={known[name]!r}"
            ) from None
    return values


def classify(nb, mine) -> tuple[str, str]:
    """Status and one-line message of an executed notebook whose kernel lived and whose cells did not time out.

    `mine` are the rows of the idea itself in this run; a failure of another arm is not the idea's.
    """
    cells = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    wrong = next((r for r in mine if r.status != "PASSED"), None)
    for number, cell in enumerate(cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                where = f"code cell {number} ({_tag(cell)}): {output.ename}: {one_line(output.evalue)}"
                if output.ename == "SystemExit":
                    return "EXITED", f"{where} ended the notebook; {len(cells) - number} cells were skipped"
                if wrong:
                    return wrong.status, one_line(wrong.reason)
                return "IMPORT_ERROR" if output.ename == "IdeaError" else "ERROR", where
    if idle := [n for n, cell in enumerate(cells, 1) if cell.execution_count is None]:
        return "EXITED", f"code cell {idle[0]} of {len(cells)} did not run"
    if not mine:
        return "NO_VERDICT", "every cell ran, but no row was recorded in this run"
    if wrong:
        return wrong.status, one_line(wrong.reason)
    return "PASSED", f"{len(mine)} row{'s' if len(mine) > 1 else ''} recorded"


def execute(nb, executed: Path, parameters, timeout, on_cell) -> tuple[str, str] | None:
    """Run papermill. None when the notebook came to an end, by itself or by an error that its outputs show."""
    import papermill
    from nbclient.exceptions import CellTimeoutError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    progress, log = _Progress(nb, on_cell), executed.with_name(KERNEL_LOG)
    try:
        with log.open("wb") as said, tempfile.TemporaryDirectory(prefix="loop-") as sockets:
            papermill.engines.papermill_engines.register("loop", _engine(progress, said))
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
                start_timeout=START_TIMEOUT,
                autosave_cell_every=0,
                config=_transport(sockets),
            )
    except papermill.PapermillExecutionError:
        return None
    except CellTimeoutError:
        return "TIMEOUT", f"{progress.where()} ran past {timeout:g} s"
    except RuntimeError as e:  # DeadKernelError, or a kernel that died before it answered
        return "KERNEL_DIED", f"{progress.where()}: {one_line(str(e))}"
    finally:
        if log.exists() and not log.stat().st_size:
            log.unlink()
    return None


def _transport(sockets: str):
    """Unix sockets in a folder of this run's own, where its path is short enough for them.

    Ports of kernels that start at once collide, and so do the socket names that jupyter_client uses unless told others.
    """
    from traitlets.config import Config

    path = os.path.join(sockets, "kernel")
    return Config({"KernelManager": {"transport": "ipc", "ip": path}} if len(path) < LONGEST_SOCKET_PATH else {})


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


def _engine(progress: _Progress, said):
    """papermill's own engine, telling `progress` about every cell before it starts. What the kernel's process writes to
    its stderr, above all as it is interrupted, goes to the file `said`."""
    from jupyter_client.manager import AsyncKernelManager
    from papermill.engines import NBClientEngine

    class Logged(AsyncKernelManager):
        async def _async_start_kernel(self, **kwargs):
            await super()._async_start_kernel(**{"stderr": said, **kwargs})

        start_kernel = _async_start_kernel

    class Watched(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **kwargs):
            start = nb_man.cell_start

            def cell_start(cell, cell_index=None, **kw):
                progress.started(cell)
                return start(cell, cell_index, **kw)

            nb_man.cell_start = cell_start
            super().execute_managed_notebook(nb_man, kernel_name, kernel_manager_class=Logged, **kwargs)

    return Watched


def python_path() -> str:
    """PYTHONPATH for child processes: this checkout first, installed or not."""
    checkout = Path(__file__).resolve().parents[1]
    ours = [str(checkout), str(checkout / "package" / "src")]
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part not in ours]
    return os.pathsep.join([*ours, *given])


def inherited(run_id: str) -> dict[str, str]:
    """What the kernel inherits: the run id, and where this checkout's modules are."""
    return {"LOOP_RUN_ID": run_id, "PYTHONPATH": python_path(), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def _tag(cell) -> str:
    return next((t for t in cell.metadata.get("tags", []) if t.startswith("loop:") or t == "parameters"), "untagged")


def one_line(text: str, width: int = 200) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"
