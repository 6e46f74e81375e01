"""The command line and what its probes do, as far as a CPU shows it."""
import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernel_fun import __main__, __version__, probes, versions
from kernel_fun._common import promoted, support


def test_versions_are_printed(capsys):
    assert __main__.main(["versions"]) == 0
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert printed == versions()
    assert printed["kernel_fun"] == __version__
    assert {"python", "torch", "cuda", "triton", "fla-core", "nvidia-cutlass-dsl"} < {*printed}


def test_kernels_are_printed_with_their_evidence(capsys, monkeypatch):
    shipped = {name: importlib.import_module(f"kernel_fun.{name}._provenance").SHIPPED for name in ("kda", "cconv")}
    monkeypatch.setattr(promoted, "modules", lambda package: tuple(
        (entry.module, None, "no CuTe DSL") for entry in shipped[package.rpartition(".")[2]][:1]
    ))
    assert __main__.main(["kernels"]) == 0
    _, *got = capsys.readouterr().out.splitlines()
    want = []
    for family, entries in shipped.items():
        for n, entry in enumerate(entries):
            want += [" ".join([family, entry.module, *entry.spans]), *(f"    {line}" for line in entry.evidence)]
            want += ["    not usable here: no CuTe DSL"] * (n == 0)
    assert got == want


def test_a_reader_that_has_read_enough_is_told_nothing():
    command = f"{sys.executable} -m kernel_fun kernels | true; exit ${{PIPESTATUS[0]}}"
    source = Path(__main__.__file__).parents[1]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(source)})
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["prodtime", "graphprobe"])
def test_without_a_gpu_one_line_says_so_and_why(command, capsys, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert __main__.main([command]) == 1
    assert capsys.readouterr().err == (
        f"kernel_fun {command}: needs an NVIDIA GPU: fla, which it measures against, runs on nothing else "
        "(The NVIDIA driver on your system is too old (found version 12020).)\n"
    )


def test_wrong_numbers_are_named(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert __main__.main(["prodtime", "--repeats", "0"]) == 1
    assert "repeats=0, batch=None: both must be at least 1" in capsys.readouterr().err


def test_unknown_commands_and_families_are_refused():
    for words in ([], ["benchmark"], ["prodtime", "--family", "gdn"]):
        with pytest.raises(SystemExit) as stopped:
            __main__.main(words)
        assert stopped.value.code == 2


@pytest.mark.parametrize("family", probes.OPERATORS)
def test_a_compiled_block_breaks_once_around_the_operator(family):
    """Two graphs, before and after; a third length must not add more than a change to dynamic shapes does."""
    found = probes.compiled(family, "ours", "cpu")
    assert found["breaks"] == 1
    assert found["graphs"][2] == found["graphs"][1] <= 4


@pytest.mark.parametrize("gate", ["log", "softplus", "safe"])
def test_the_inputs_are_calls_that_run(gate):
    from kernel_fun.kda import chunk_kda

    tensors, flags = probes.inputs("kda", "cpu", **{**probes.SMALL["kda"], "T": 65, "gate": gate})
    out = chunk_kda(**tensors, **flags)[0]
    assert out.isfinite().all()
    assert all(grad is not None for grad in torch.autograd.grad(out.float().sum(), list(tensors.values())))


def test_prodtime_on_a_pretend_gpu(capsys, monkeypatch):
    """Every case and mode has its line; `off` ran with the switch set, `fla` without being dispatched to us."""
    ran = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, other):
            return 2.0

    def operator(family, arm):
        from kernel_fun import cconv, kda

        ours = {"kda": kda.chunk_kda, "cconv": cconv.causal_conv1d}[family]

        def call(**arguments):
            ran.append((arm, support.switch("KERNEL_FUN_DISABLE"), support.inside_fla_only()))
            with monkeypatch.context() as m:
                m.delenv("KERNEL_FUN_DISABLE", raising=False)
                return ours(**arguments)

        return call

    for name, stand_in in (("is_available", lambda: True), ("get_device_name", lambda: "pretend"), ("Event", Event),
                           ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(probes, "operator", operator)
    monkeypatch.setattr(probes.inputs, "__defaults__", ("cpu",))
    small = {name: {"case": {**sizes, "T": 65}} for name, sizes in probes.SMALL.items()}
    monkeypatch.setattr(probes, "PRODUCTION", small)
    assert __main__.main(["prodtime", "--repeats", "1", "--batch", "1"]) == 0
    title, what, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith(f"pretend, kernel_fun {__version__}, python ")
    assert what == "ms, median of 1; off is ours with KERNEL_FUN_DISABLE=1"
    assert [line.split()[:3] for line in lines] == [
        [family, "case", mode] for family in probes.SMALL for mode in ("fwd", "bwd", "fwdbwd")
    ]
    assert all(line.split()[3:7] == ["2.000", "2.000", "2.000", "1.000"] for line in lines)
    assert {*ran} == {("fla", False, True), ("ours", False, False), ("off", True, False)}


def test_too_little_memory_is_one_line_with_the_way_out(capsys, monkeypatch):
    def full(*works):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.\nmore")

    gpu = {"is_available": lambda: True, "get_device_name": lambda: "pretend",
           "get_device_properties": lambda: SimpleNamespace(total_memory=16 << 30)}
    for name, stand_in in gpu.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(probes.inputs, "__defaults__", ("cpu",))
    monkeypatch.setattr(probes, "PRODUCTION", {"cconv": {"case": probes.SMALL["cconv"]}})
    monkeypatch.setattr(probes, "_times", full)
    assert __main__.main(["prodtime", "--family", "cconv"]) == 1
    assert capsys.readouterr().err == (
        "kernel_fun prodtime: case fwd needs more than this GPU's 16 GiB: try --batch 1\n"
    )


def test_arms_leave_the_process_as_it_was(monkeypatch):
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv("KERNEL_FUN_DISABLE", raising=False)
        else:
            monkeypatch.setenv("KERNEL_FUN_DISABLE", before)
        for arm in probes.ARMS:
            with probes.running(arm):
                assert support.switch("KERNEL_FUN_DISABLE") is (arm == "off")
                assert support.inside_fla_only() is (arm == "fla")
            assert os.environ.get("KERNEL_FUN_DISABLE") == before
            assert not support.inside_fla_only()


def test_an_arm_that_fails_is_one_line(capsys, monkeypatch):
    """On a CPU every arm's process fails at its first GPU tensor; the table still has a line for each."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU no arm fails")
    monkeypatch.setattr(probes, "_need_gpu", lambda: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(__import__("sys").path))
    monkeypatch.setattr(probes, "ARMS", ("ours",))
    assert __main__.main(["graphprobe", "--family", "cconv"]) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("cconv   ours   failed: ")
    assert printed.err == "kernel_fun graphprobe: failed: cconv ours\n"


@pytest.fixture
def pretend_capture(monkeypatch):
    """Streams and graphs that do nothing, and inputs on the CPU: a captured step simply runs."""

    class Nothing(contextlib.nullcontext):
        def __init__(self, *args, **kwargs):
            super().__init__(self)

        def wait_stream(self, other):
            assert isinstance(other, Nothing)

        def replay(self):
            pass

    for name in ("Stream", "stream", "CUDAGraph", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(probes.inputs, "__defaults__", ("cpu",))


@pytest.mark.parametrize("warm", [True, False])
def test_what_a_capture_did(monkeypatch, pretend_capture, warm):
    """Equal to the eager run, different from it, or the first line of the error."""
    assert probes.captured("kda", "ours", warm) == "equal"
    ours, noise = probes.operator("kda", "ours"), torch.zeros(())

    def drifting(**arguments):
        out, state = ours(**arguments)
        return out + noise.add_(1), state

    monkeypatch.setattr(probes, "operator", lambda family, arm: drifting)
    assert probes.captured("kda", "ours", warm) == "differs"
    monkeypatch.setattr(probes, "operator", lambda family, arm: failing_under_capture())
    assert probes.captured("kda", "ours", warm) == "ValueError: operation not permitted"


def failing_under_capture():
    """Runs until the step that is captured: the second where the first was the warm one, the only one where not."""
    calls = []

    def call(**arguments):
        calls.append(arguments)
        if len(calls) == 2 or arguments["q"].shape[1] == 576:
            raise ValueError("operation not permitted\nwhen stream is capturing")
        return arguments["v"] * 1 + sum(t.sum() for t in arguments.values() if torch.is_tensor(t)), None

    return call


def test_a_report_is_one_line_of_json(capsys, monkeypatch, pretend_capture):
    monkeypatch.setattr(probes, "compiled", lambda family, arm, device: {"breaks": 1, "graphs": [2, 4, 4]})
    probes.report("cconv", "ours")
    assert json.loads(capsys.readouterr().out) == {"breaks": 1, "graphs": [2, 4, 4], "warm": "equal", "cold": "equal"}


@pytest.mark.gpu
@pytest.mark.slow
def test_graphprobe_on_a_gpu(capsys, monkeypatch):
    """Ours breaks no more often than fla, and what it captures warm replays to the bit."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(__import__("sys").path))
    assert __main__.main(["graphprobe"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[family, arm] for family in probes.OPERATORS for arm in probes.ARMS]
    breaks = {tuple(line.split()[:2]): int(line.split()[2]) for line in lines}
    for family in probes.OPERATORS:
        assert breaks[family, "ours"] <= breaks[family, "fla"]
    assert all("   equal, " in line for line in lines if line.split()[1] == "ours")


@pytest.mark.gpu
def test_prodtime_on_a_gpu(capsys):
    assert __main__.main(["prodtime", "--family", "cconv", "--batch", "1", "--repeats", "1"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    family, case, mode, *times = last.split()[:7]
    assert (family, case, mode) == ("cconv", "prod8192_v", "fwdbwd")
    assert all(float(x) > 0 for x in times)
    assert "k001_conv_strip" in last
