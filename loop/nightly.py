"""`./ladder nightly`: every idea's notebook, each in a process of its own, and a page that says how it went.

A crash, a hang or an illegal memory access ends one process and becomes one row; the others go on. On a GPU the ideas
take turns, since two at once would time each other. What passed before, with the same code, contract, protocol and
environment, is kept: so a batch that was interrupted goes on where it was.
"""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loop import batch, changes, console, env, fingerprint, gpus, jobs, page, rows, run, workers
from loop.live import Report

IDEA_TIMEOUT = 3600.0  # seconds for one idea's process


def nightly(
    *,
    only: Sequence[str] = (),
    family: str | None = None,
    tier: str | None = None,
    jobs_at_once: int = 1,
    devices: str = "",
    executor: str = "local",
    force: bool = False,
    fail_on: str = "",
    out: Path | None = None,
    timeout: float = IDEA_TIMEOUT,
) -> int:
    """Run the ideas' notebooks; returns 0 only if none failed. Writes `OUT/nightly/RUN/index.html`.

    Args:
        only: idea numbers or names; empty: all. family: only ideas of this family (and 000).
        tier: smoke, primary or full: that tier's cases of each idea; None: the one that its notebook chooses.
        jobs_at_once: processes, on a CPU. devices: GPUs, e.g. "0,1", one process on each; empty: the first.
        executor: local, or submitit (from a machine like those that it submits to).
        force: run again what would be kept.
        fail_on: kinds of `loop.changes`, separated by commas, that make the exit code 1 too.
        timeout: seconds for one job.

    ValueError in one line for an unknown idea, family, tier, device, executor or kind, or a GPU that is taken.
    """
    refuse = changes.kinds(fail_on)
    jobs.require_tier(tier)
    places, run_id = gpus.choose(devices, jobs_at_once), rows.new_run_id()
    base = (out or run.out_folder()).resolve()
    runs = workers.executor(executor, base / "nightly" / run_id / "submitit", timeout)
    with console.waiting("loading every kernel, to see what there is to run"):
        todo = jobs.of(jobs.select(only, family), tier)
    with gpus.locked(places) as places:
        before = batch.earlier(base)
        facts = {"tier": tier, "device": env.device_name(), "devices": [p.name for p in places], "executor": executor}
        one = _Run(batch.start(base, run_id, **facts), todo, runs, base, timeout)
        code = 0
        try:
            with _ended_by_signals(), one.report:
                one.work([] if force else before, places)
        except KeyboardInterrupt:
            code = 130
    return _finish(one, batch.accepted(before), refuse, code)


def accept(run_id: str, out: Path | None = None) -> int:
    """`--accept RUN`: compare later batches with that one. ValueError in one line for one that is not there."""
    folder = (out or run.out_folder()) / "nightly"
    if run_id in ("", ".", ".."):
        raise ValueError(f"no batch {run_id!r}; give the name of a folder under {run.shown(folder)}")
    found = batch.read(folder / run_id)
    found.accept()
    print(f"{run_id} is accepted: {len(found.done)} results")
    return 0


def _finish(one: "_Run", accepted: dict, refuse: Sequence[str], code: int) -> int:
    """Say how it went, write the page, accept a batch with nothing wrong in it; the exit code."""
    results = [done.result for done in one.batch.done]
    moved = changes.compare(one.batch.done, accepted)
    if code:
        said = f"interrupted after {len(results)} of {len(one.jobs)}"
    else:
        failed, passed = (sum(getattr(r, name) for r in results) for name in ("failed", "ok"))
        declined = len(results) - failed - passed
        said = f"{passed} passed, {failed} failed" + (f", {declined} not for this machine" if declined else "")
        code = int(failed > 0 or any(c.kind in refuse for c in moved))
        if not code and not any(c.kind == "slower" for c in moved):
            one.batch.accept()
    one.batch.end(code)
    path = page.write_batch(one.batch.folder / "index.html", one.batch, moved, bool(accepted))
    for change in moved:
        print(change, flush=True)
    print(f"{said}\n{run.shown(path)}", flush=True)
    return code


class _Run:
    """The jobs of one batch on their way."""

    def __init__(self, record: batch.Batch, todo: Sequence[jobs.Job], executor, base: Path, timeout: float):
        self.batch, self.jobs, self.executor, self.base, self.timeout = record, list(todo), executor, base, timeout
        self.report = Report(self.jobs)
        self.writing, self.stopping = threading.Lock(), threading.Event()

    def work(self, before: Sequence[batch.Batch], places: Sequence[gpus.Device]) -> None:
        """Every job, one at a time on each place. An interrupt ends the running ones, without a row."""
        left = [job for job in self.jobs if not self._keep(job, before)]
        free: queue.Queue = queue.Queue()
        for place in places:
            free.put(place)
        with ThreadPoolExecutor(len(places)) as pool:
            futures = [pool.submit(self._one, job, free) for job in left]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.stopping.set()
                for future in futures:
                    future.cancel()
                self.executor.stop()
                raise

    def _keep(self, job: jobs.Job, before: Sequence[batch.Batch]) -> bool:
        """Take over what passed before, when nothing that it depends on has moved and its notebook is still there."""
        key = fingerprint.of(job.idea)
        for old in reversed(before):
            for done in old.done:
                r = done.result
                same = (r.idea, r.case) == (job.idea.id, job.case) and r.ok
                if same and not fingerprint.differs(key, done.key) and r.html and r.html.exists():
                    r.rows = run.rows_of(r.run_id)
                    kept = done.kept or old.id
                    self.batch.add(batch.Done(r, key, kept))
                    self.report.kept(job, r, kept)
                    return True
        return False

    def _one(self, job: jobs.Job, free: queue.Queue) -> None:
        """Run one job in a process of its own; whatever happens to it, a result."""
        place = free.get()
        try:
            run_id, key, began = job.run_id(self.batch.id), fingerprint.of(job.idea), time.monotonic()
            self.report.started(job, place.name)
            order = workers.Order(job.idea.id, job.case, run_id, str(self.base), self.timeout, place.visible)
            status, message = self.executor.run(order, place)
        finally:
            free.put(place)
        if self.stopping.is_set():
            return
        result = run.left_by(self.base, run_id) if status != "RUNNER_TIMEOUT" else None
        if result is None:
            took = time.monotonic() - began
            result = run.RunResult(job.idea.id, run_id, status, message, took, case=job.case, rows=run.rows_of(run_id))
            run.record(result, job.idea, {"case": job.case} if job.case else {})
        moved = fingerprint.differs(fingerprint.of(job.idea), key)  # an edit while it ran: of which source was it?
        with self.writing:
            self.batch.add(batch.Done(result, {} if moved or not self.executor.here else key))
        self.report.finished(job, result)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM, as a CI system or a scheduler sends it, is an interrupt like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
