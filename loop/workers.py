"""The processes of a batch: one for each job, ended with everything it started, here or through submitit.

`attempt` is one job from start to end. An executor runs it where the job shall run: `Local` in this process's own
machine, `Submitit` as a submitit job (submitit's own choice of Slurm or local processes). Both answer the same pair.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loop import execute, gpus, processes, registry, run

CELL_SHARE = 0.8  # of a job's time for one cell, so that the inner limit speaks first
EXECUTORS = ("local", "submitit")
SUBMITIT_SLACK = 5  # minutes that submitit leaves beyond a job's own limit, which speaks first


@dataclass(frozen=True)
class Order:
    """A job as plain values, so that it can be sent to another machine. `timeout` is in seconds."""

    idea: str
    case: str
    run_id: str
    base: str
    timeout: float
    visible: str = ""

    @property
    def log(self) -> Path:
        return Path(self.base) / "runs" / f"{self.run_id}.log"


def attempt(order: Order, lock: int | None = None, started: Callable = lambda child: None) -> tuple[str, str]:
    """Run one job in a process of its own and end what it leaves; (status, message) that hold if it left no result."""
    command = [sys.executable, "-m", "loop.run", order.idea, order.base, str(CELL_SHARE * order.timeout), order.case]
    environment = {**os.environ, "LOOP_RUN_ID": order.run_id, "PYTHONPATH": execute.python_path()}
    environment[processes.PARENT] = str(os.getpid())
    if order.visible:
        environment["CUDA_VISIBLE_DEVICES"] = order.visible
    run.make_folder(order.log.parent)
    with open(order.log, "wb") as sink:
        child = subprocess.Popen(
            command, cwd=registry.root(), env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
        try:
            started(child)
            code = child.wait(order.timeout)
            said = f"its process ended with code {code}{_last_words(order.log)}; see {run.shown(order.log)}"
            return "RUNNER_DIED", said
        except subprocess.TimeoutExpired:
            return "RUNNER_TIMEOUT", f"ended after {order.timeout:g} s; see {run.shown(order.log)}"
        finally:
            processes.reap(order.run_id)
            child.wait()


def _last_words(log: Path) -> str:
    """The last line of a log, which of a traceback says what was wrong; empty where nothing was said."""
    lines = log.read_bytes()[-4096:].decode("utf-8", "replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {said[:300]}" if said else ""


class Local:
    """Runs jobs as child processes of this one."""

    here = True  # on this machine: what this process knows of the environment holds for the jobs

    def __init__(self):
        self.children: set[subprocess.Popen] = set()
        self.lock, self.stopped = threading.Lock(), False

    def run(self, order: Order, device: gpus.Device) -> tuple[str, str]:
        return attempt(order, device.lock, self._started)

    def _started(self, child: subprocess.Popen) -> None:
        with self.lock:
            self.children.add(child)
            if self.stopped:
                child.terminate()

    def stop(self) -> None:
        """End what runs; what starts from now on is ended at once."""
        with self.lock:
            self.stopped = True
            for child in self.children:
                with contextlib.suppress(OSError):
                    child.terminate()


class Submitit:
    """Runs jobs through submitit: Slurm where it is there, else local processes. Results come by the shared `base`."""

    def __init__(self, folder: Path, timeout: float, cluster: str | None = None):
        try:
            import submitit
        except ImportError:
            raise ValueError("executor 'submitit' is not installed: pip install 'kernel-fun-ladder[cluster]'") from None
        self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        self.failure = (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError)
        self.executor.update_parameters(name="kernel-fun", timeout_min=int(timeout / 60) + SUBMITIT_SLACK)
        if self.executor.cluster == "slurm":
            self.executor.update_parameters(gpus_per_node=1, cpus_per_task=4)
        self.here = self.executor.cluster == "local"
        self.jobs, self.lock, self.stopped = [], threading.Lock(), False

    def run(self, order: Order, device: gpus.Device) -> tuple[str, str]:
        with self.lock:
            if self.stopped:
                return "RUNNER_DIED", "stopped before it started"
            # another machine's GPU is the one that Slurm gives the job, whatever it is called here
            job = self.executor.submit(attempt, order if self.here else dataclasses.replace(order, visible=""))
            self.jobs.append(job)
        try:
            return job.result()
        except self.failure as err:
            return "RUNNER_DIED", execute.one_line(f"submitit job {job.job_id}: {err}")

    def stop(self) -> None:
        """Cancel what runs."""
        with self.lock:
            self.stopped = True
            for job in self.jobs:
                if not job.done():
                    job.cancel()


def executor(name: str, folder: Path, timeout: float):
    """The executor called `name`. ValueError in one line for an unknown one, or one that is not installed."""
    if name not in EXECUTORS:
        raise ValueError(f"executor {name!r} is unknown; known: {', '.join(EXECUTORS)}")
    return Local() if name == "local" else Submitit(folder, timeout)
