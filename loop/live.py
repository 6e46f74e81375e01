"""Progress of a batch: a live table in a terminal, one line per event anywhere else."""

import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from loop.console import watched
from loop.jobs import Job
from loop.run import RunResult

STYLES = {"PASSED": "green", "running": "cyan", "waiting": "dim", "kept": "dim green", "UNSUPPORTED": "yellow"}


class Report:
    """Says what starts and how it ends, from any thread. A context manager: the live table stands while it is open."""

    def __init__(self, jobs: Sequence[Job], console: Console | None = None):
        self.console, self.lock = console or Console(force_terminal=watched(sys.stdout)), threading.Lock()
        self.lines = {job.name: ["waiting", "", "", ""] for job in jobs}
        self.began: dict[str, float] = {}
        self.live = None
        if self.console.is_terminal:
            self.live = Live(get_renderable=self.table, console=self.console, refresh_per_second=4)

    def __enter__(self):
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc):
        if self.live:
            self.live.stop()

    def kept(self, job: Job, result: RunResult, batch: str) -> None:
        self._set(job, "kept", "", "", f"{result.status} in {batch}, nothing moved since")

    def started(self, job: Job, device: str) -> None:
        self.began[job.name] = time.monotonic()
        self._set(job, "running", device if device != "cpu" else "", "", "")

    def finished(self, job: Job, result: RunResult) -> None:
        said = result.verdict if result.ok else result.message
        self._set(job, result.status, "", f"{result.seconds:.0f} s", said)

    def _set(self, job: Job, status: str, *cells: str) -> None:
        with self.lock:
            device, took, said = cells
            self.lines[job.name] = [status, device, took, said]
            if not self.live:
                where = f"on GPU {device}" if device else ""
                print("  ".join(filter(None, (job.name, status, where, took, said))), flush=True)

    def table(self) -> Table:
        table = Table("idea", "status", "GPU", "time", "verdict or reason", box=None)
        with self.lock:
            for name, (status, device, took, said) in self.lines.items():
                style = STYLES.get(status, "red")
                if status == "running":
                    took = f"{time.monotonic() - self.began[name]:.0f} s"
                table.add_row(name, f"[{style}]{status}[/]", device, took, escape(said))
            left = sum(line[0] in ("waiting", "running") for line in self.lines.values())
            table.caption = f"{len(self.lines) - left} of {len(self.lines)} done"
        return table
