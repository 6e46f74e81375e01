"""Where the jobs of a batch run: one on each GPU behind its lock, on a CPU as many as asked, or through submitit."""

import os
import time
import types
from pathlib import Path

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import arms, gpus, nightly, processes, rows, workers
from loop.tests.test_nightly import tree  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


class Recorder:
    """An executor that runs nothing and notes what ran where, and how many at once on each device."""

    here = True

    def __init__(self):
        self.busy, self.orders = set(), []

    def run(self, order, device):
        assert device.name not in self.busy
        self.busy.add(device.name)
        self.orders.append((order.idea, order.visible, device.lock))
        time.sleep(0.05)
        self.busy.discard(device.name)
        return "RUNNER_DIED", "of nothing"

    def stop(self):
        pass


def test_gpus_take_one_idea_each_and_are_locked(tree, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(arms, "on_gpu", lambda: True)
    monkeypatch.setattr(gpus, "FOLDER", tmp_path)
    monkeypatch.setattr(gpus, "_uuid", lambda device: f"uuid-{device.visible}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    for devices, count, says in (
        ("", 2, "1 on a GPU"),
        ("0,3", 1, "device '3' in devices='0,3': give numbers below 3"),
        ("1,1", 1, "each GPU once"),
        ("GPU-1", 1, "device 'GPU-1'"),
        ("", 0, "at least 1"),
    ):
        with pytest.raises(ValueError, match=says):
            nightly.nightly(devices=devices, jobs_at_once=count)
    made = Recorder()
    monkeypatch.setattr(workers, "executor", lambda *a: made)
    assert nightly.nightly(devices="0,2") == 1
    assert {order[1] for order in made.orders} == {"4", "7"}
    assert len(made.orders) == 3
    assert all(lock is not None for _, _, lock in made.orders)
    with gpus.locked(gpus.choose("2", 1)):
        with pytest.raises(ValueError, match="GPU 2 is in use by another nightly") as refused:
            nightly.nightly(devices="0,2")
        assert "\n" not in str(refused.value)
        assert nightly.nightly(devices="0,1", only=["002"]) == 1
    with gpus.locked(gpus.choose("2", 1)):  # free again
        pass


def test_devices_need_a_gpu_and_jobs_a_cpu():
    with pytest.raises(ValueError, match="torch finds no GPU here; on a CPU use --jobs"):
        gpus.choose("0", 1)
    assert len(gpus.choose("", 3)) == 3
    with pytest.raises(ValueError, match="executor 'ssh' is unknown"):
        workers.executor("ssh", Path("x"), 1.0)


def test_submitit_runs_the_same_batch(tree, capsys):  # noqa: F811
    pytest.importorskip("submitit", reason="the optional extra `cluster` is not installed")
    assert nightly.nightly(only=["001"], executor="submitit", jobs_at_once=2) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "1 passed, 0 failed"
    assert {r.arm: r.status for r in rows.read()} == {"001": "PASSED"}
    assert list((Path(said[-1]).parent / "submitit").glob("*_result.pkl"))
    assert nightly.nightly(only=["001"], executor="submitit") == 0  # local jobs ran in this environment: kept
    assert "kept" in capsys.readouterr().out
    assert processes.of_run(Path(said[-1]).parent.name + "-001") == []


def test_on_slurm_each_job_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    """What would be submitted; there is no cluster here to run it."""
    pytest.importorskip("submitit", reason="the optional extra `cluster` is not installed")
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = workers.executor("submitit", tmp_path / "jobs", 3600.0)
    assert (made.executor.cluster, made.here) == ("slurm", False)
    script = made.executor._executor._make_submission_file_text("command", "id")
    assert "--gpus-per-node=1" in script
    assert "--time=65" in script  # its own limit speaks after ours
    sent = []
    monkeypatch.setattr(made.executor, "submit", lambda fn, order: sent.append(order) or types.SimpleNamespace(
        result=lambda: ("RUNNER_DIED", ""), done=lambda: True))  # fmt: skip
    made.run(workers.Order("001", "", "r", "out", 1.0, "GPU-5"), gpus.Device("5", "GPU-5"))
    assert sent[0].visible == ""
