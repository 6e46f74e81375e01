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
    batch = rows.new_run_id()
    base = out or run.out_folder()
    folder = run.make_folder(base / "nightly" / batch)
    report = _Report(ideas)
    children: set[subprocess.Popen] = set()
    with report, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_one, idea, batch, base, timeout, report, children) for idea in ideas]
        try:
            results = [future.result() for future in futures]
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            for child in list(children):
                child.terminate()
            results = [f.result() for f in futures if f.done() and not f.cancelled() and not f.exception()]
            _finish(folder, results, report, f"interrupted after {len(results)} of {len(ideas)}")
            return 130
    failed, passed = (sum(getattr(result, name) for result in results) for name in ("failed", "ok"))
    declined = len(results) - failed - passed
    _finish(
        folder,
        results,
        report,
        f"{passed} passed, {failed} failed" + (f", {declined} not for this machine" if declined else ""),
    )
    return int(failed > 0)


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


def _one(
    idea: registry.Idea, batch: str, base: Path, timeout: float, report: "_Report", children: set
) -> run.RunResult:
    """Run one idea in a process of its own; whatever happens to it, a result."""
    run_id = f"{batch}-{idea.id}"
    report.started(idea)
    began = time.monotonic()
    command = [sys.executable, "-m", "loop.run", idea.id, str(base), str(CELL_SHARE * timeout)]
    log = base / "runs" / f"{run_id}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "LOOP_RUN_ID": run_id, "PYTHONPATH": execute.python_path()}
    status, message = "RUNNER_DIED", ""
    with open(log, "wb") as sink:
        child = subprocess.Popen(
            command,
            cwd=registry.root(),
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        children.add(child)
        try:
            code = child.wait(timeout)
            message = f"its process ended with code {code}; see {run.shown(log)}"
        except subprocess.TimeoutExpired:
            status, message = "RUNNER_TIMEOUT", f"ended after {timeout:g} s; see {run.shown(log)}"
        finally:
            processes.reap(run_id)
            child.wait()
            children.discard(child)
    result = _read(base, run_id) if status != "RUNNER_TIMEOUT" else None
    if result is None:
        failed = run.RunResult(idea.id, run_id, status, message, time.monotonic() - began, rows=run.rows_of(run_id))
        result = run.recorded(failed, {})
    report.finished(idea, result)
    return result


def _read(base: Path, run_id: str) -> run.RunResult | None:
    """The result a child left; None when it did not get that far."""
    path = run.folder_of(base, run_id) / "result.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(path.read_text(encoding="utf-8"))
        paths = {name: Path(facts[name]) if facts[name] else None for name in ("notebook", "html")}
        return run.RunResult(**{**facts, **paths}, rows=run.rows_of(run_id))
    return None


def _finish(folder: Path, results: list[run.RunResult], report: "_Report", summary: str) -> None:
    path = page.write_index(folder / "index.html", results, board.entries(), title="kernel-fun nightly")
    report.say(f"{summary}\n{run.shown(path)}")


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

    def say(self, text: str) -> None:
        for line in text.splitlines():
            print(line, flush=True)

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
