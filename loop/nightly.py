"""`./ladder nightly`: every idea's notebook, each in a process of its own, and a page that says how it went.

A crash, a hang or an illegal memory access ends one process and becomes one row; the others go on. On a GPU the ideas
take turns, since two at once would time each other.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from loop import arms, board, execute, page, processes, registry, rows, run

IDEA_TIMEOUT = 3600.0  # seconds for one idea's process
CELL_SHARE = 0.8  # of it for one cell, so that the inner limit speaks first


def nightly(
    *,
    only: Sequence[str] = (),
    family: str | None = None,
    jobs: int = 1,
    out: Path | None = None,
    timeout: float = IDEA_TIMEOUT,
) -> int:
    """Run the ideas' notebooks; returns 0 only if none failed. Writes `OUT/nightly/RUN/index.html`.

    Args:
        only: idea numbers or names; empty: all. family: only ideas of this family (and 000).
        jobs: processes at once, on a CPU; a GPU takes one.
        timeout: seconds for one idea.

    ValueError in one line for an unknown idea or family, or more than one job on a GPU.
    """
    ideas = select(only, family)
    if jobs < 1 or (jobs > 1 and arms.on_gpu()):
        raise ValueError(
            f"jobs={jobs}: {'1 on a GPU, where ideas would time each other' if jobs > 1 else 'at least 1'}"
        )
    batch = _Batch(ideas, out or run.out_folder(), timeout)
    folder = run.make_folder(batch.base / "nightly" / batch.run_id)
    try:
        with batch.report:
            batch.work(jobs)
    except KeyboardInterrupt:
        said, code = f"interrupted after {len(batch.results)} of {len(ideas)}", 130
    else:
        failed, passed = (sum(getattr(r, name) for r in batch.results) for name in ("failed", "ok"))
        declined = len(ideas) - failed - passed
        said = f"{passed} passed, {failed} failed" + (f", {declined} not for this machine" if declined else "")
        code = int(failed > 0)
    path = page.write_index(folder / "index.html", batch.results, board.entries(), title="kernel-fun nightly")
    print(f"{said}\n{run.shown(path)}", flush=True)
    return code


def select(only: Sequence[str], family: str | None) -> list[registry.Idea]:
    """The ideas of a batch, in order. ValueError in one line for an unknown idea or family, or none left."""
    if family is not None and family not in registry.FAMILIES:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(registry.FAMILIES)}")
    wanted = {registry.folder(name).name for name in only}
    ideas = [i for i in registry.all_ideas() if not wanted or i.name in wanted]
    ideas = [i for i in ideas if family is None or i.family is None or family in i.family]
    if not ideas:
        raise ValueError(f"no idea of family {family}" if family else "no ideas yet; ./ladder new makes one")
    return ideas


class _Batch:
    """The processes of one batch and what they left, in the order they ended."""

    def __init__(self, ideas: Sequence[registry.Idea], base: Path, timeout: float):
        self.ideas, self.base, self.timeout = ideas, base, timeout
        self.run_id = rows.new_run_id()
        self.report = _Report(ideas)
        self.results: list[run.RunResult] = []
        self.children: set[subprocess.Popen] = set()
        self.stopping = threading.Event()

    def work(self, jobs: int) -> None:
        """Every idea, `jobs` at a time. An interrupt ends the running ones, without a row."""
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self._one, idea) for idea in self.ideas]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.stopping.set()
                for future in futures:
                    future.cancel()
                for child in list(self.children):
                    child.terminate()
                raise

    def _one(self, idea: registry.Idea) -> None:
        """Run one idea in a process of its own; whatever happens to it, a result."""
        run_id = f"{self.run_id}-{idea.id}"
        self.report.started(idea)
        began = time.monotonic()
        status, message = self._process(idea, run_id)
        if self.stopping.is_set():
            return
        result = self._read(run_id) if status != "RUNNER_TIMEOUT" else None
        if result is None:
            result = run.RunResult(idea.id, run_id, status, message, time.monotonic() - began, rows=run.rows_of(run_id))
            run.record(result, idea)
        self.results.append(result)
        self.report.finished(idea, result)

    def _process(self, idea: registry.Idea, run_id: str) -> tuple[str, str]:
        """Start the process and wait for it; the status and message that hold if it left no result."""
        command = [sys.executable, "-m", "loop.run", idea.id, str(self.base), str(CELL_SHARE * self.timeout)]
        log = run.make_folder(self.base / "runs") / f"{run_id}.log"
        environment = {**os.environ, "LOOP_RUN_ID": run_id, "PYTHONPATH": execute.python_path()}
        with open(log, "wb") as sink:
            child = subprocess.Popen(
                command, cwd=registry.root(), env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
            self.children.add(child)
            try:
                code = child.wait(self.timeout)
                return "RUNNER_DIED", f"its process ended with code {code}; see {run.shown(log)}"
            except subprocess.TimeoutExpired:
                return "RUNNER_TIMEOUT", f"ended after {self.timeout:g} s; see {run.shown(log)}"
            finally:
                processes.reap(run_id)
                child.wait()
                self.children.discard(child)

    def _read(self, run_id: str) -> run.RunResult | None:
        """The result a process left; None when it did not get that far."""
        path = run.folder_of(self.base, run_id) / "result.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            paths = {name: Path(facts[name]) if facts[name] else None for name in ("notebook", "html")}
            return run.RunResult(**{**facts, **paths}, rows=run.rows_of(run_id))
        return None


class _Report:
    """Progress: a live table in a terminal, one line per event anywhere else."""

    def __init__(self, ideas: Sequence[registry.Idea]):
        self.console, self.lock = Console(), threading.Lock()
        self.lines = {idea.id: [idea.name, "waiting", "", ""] for idea in ideas}
        self.live = (
            Live(get_renderable=self._table, console=self.console, refresh_per_second=4)
            if self.console.is_terminal
            else None
        )

    def __enter__(self):
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc):
        if self.live:
            self.live.stop()

    def started(self, idea: registry.Idea) -> None:
        self._set(idea, "running", "", "")

    def finished(self, idea: registry.Idea, result: run.RunResult) -> None:
        self._set(idea, result.status, f"{result.seconds:.0f} s", result.verdict if result.ok else result.message)

    def _set(self, idea, *cells: str) -> None:
        with self.lock:
            self.lines[idea.id] = [idea.name, *cells]
            if not self.live:
                print("  ".join(cell for cell in self.lines[idea.id] if cell), flush=True)

    def _table(self) -> Table:
        table = Table("idea", "status", "time", "verdict or reason", box=None)
        with self.lock:
            for name, status, took, said in self.lines.values():
                style = {"PASSED": "green", "running": "cyan", "waiting": "dim"}.get(status, "red")
                table.add_row(name, f"[{style}]{status}[/]", took, said)
        return table
