"""Processes of a run, found by the run id in their environment: a kernel that holds the GIL outlives its notebook."""

import os
import signal
import threading
import time
from pathlib import Path

PARENT = "LOOP_PARENT"  # the process that a job's process must not outlive
GRACE = 3.0  # seconds between asking a process to end and ending it


def of_run(run_id: str) -> list[int]:
    """Ids of this user's processes, other than this one, that were started with LOOP_RUN_ID=run_id."""
    mark = f"LOOP_RUN_ID={run_id}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


def reap(run_id: str) -> list[int]:
    """End what is left of a run: SIGTERM, a grace period, SIGKILL. Returns the ids that were found."""
    found = of_run(run_id)
    _send(found, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while (left := set(of_run(run_id)) & set(found)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _send(left, signal.SIGKILL)
    return found


def end_with_parent(run_id: str) -> None:
    """From now on, when the process in LOOP_PARENT is gone (killed, say), end this one and the rest of the run."""
    parent = int(os.environ.pop(PARENT, os.getppid()))

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        reap(run_id)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _send(pids, sig):
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue
