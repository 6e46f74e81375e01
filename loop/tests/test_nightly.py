"""The batch: an idea that fails, however it fails, is one row and one line of the page; the others go on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from loop import arms, execute, nightly, registry, rows, run
from loop.tests.test_run import PARAMETERS, PASS

CELLS = {
    "001-good": [(PASS[0].replace("'000'", "'001'"), PASS[1])],
    "002-crash": ["import os; os.abort()"],
    "003-kills-its-runner": ["import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"],
}


@pytest.fixture
def batch(ladder_root, add_idea, monkeypatch):
    monkeypatch.delenv("LOOP_RUN_ID", raising=False)
    for name, cells in CELLS.items():
        folder = add_idea(name[:3], name[4:])
        nb = nbformat.v4.new_notebook()
        for number, cell in enumerate((PARAMETERS, *cells)):
            source, tags = (cell, []) if isinstance(cell, str) else cell
            nb.cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{number}", metadata={"tags": tags}))
        nbformat.write(nb, folder / "bench.ipynb")
    return ladder_root


def test_failures_do_not_stop_the_others(batch, capsys):
    assert nightly.nightly(jobs=2) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "1 passed, 2 failed"
    assert all("\x1b" not in line for line in said)  # plain lines, since this is no terminal
    assert {line.split("  ")[1] for line in said[:-2]} == {"running", "PASSED", "KERNEL_DIED", "RUNNER_DIED"}
    assert {r.arm: r.status for r in rows.read()} == {"001": "PASSED", "002": "KERNEL_DIED", "003": "RUNNER_DIED"}
    page = Path(said[-1])
    text = page.read_text()
    assert text.index("KERNEL_DIED") < text.index("Passed") < text.index("PASSED")
    assert 'notebook.html">page</a>' in text


def test_one_passing_idea_is_a_success_and_a_hanging_one_is_ended(batch, capsys):
    assert nightly.nightly(only=["002"], timeout=0.5) == 1
    assert "RUNNER_TIMEOUT" in capsys.readouterr().out
    (row,) = rows.read()
    assert (row.arm, row.status, row.kind) == ("002", "RUNNER_TIMEOUT", "run")
    assert nightly.nightly(only=["001-good"], out=batch / "elsewhere") == 0
    assert list((batch / "elsewhere" / "nightly").rglob("index.html"))


def test_selection(batch, add_idea):
    add_idea("004", "broken", "1 / 0")
    assert [i.id for i in nightly.select((), None)] == ["001", "002", "003", "004"]
    assert [i.id for i in nightly.select(("004", "001"), "kda")] == ["001", "004"]
    for only, family, says in (
        (("009",), None, "no idea '009'"),
        ((), "gdn", "family 'gdn'"),
        ((), "cconv", "of family cconv"),
    ):
        with pytest.raises(ValueError, match=says):
            nightly.select(only, family)


def test_an_idea_that_does_not_import_is_run_and_fails(batch, add_idea):
    """Its notebook's load cell raises; here only what the runner makes of it, without the seconds of a kernel."""
    add_idea("004", "broken", "1 / 0")
    idea = registry.find("004")
    result = run.RunResult("004", "r", "IMPORT_ERROR", idea.error, 0.0)
    run.record(result, idea)
    assert "ZeroDivisionError" in result.rows[0].reason
    assert rows.read()[0].family == "kda"


def test_a_gpu_takes_one_idea_at_a_time(batch, monkeypatch):
    monkeypatch.setattr(arms, "on_gpu", lambda: True)
    with pytest.raises(ValueError, match="1 on a GPU"):
        nightly.nightly(jobs=2)
    with pytest.raises(ValueError, match="at least 1"):
        nightly.nightly(jobs=0)


def test_an_idea_that_disappears_is_a_row(batch):
    gone = registry.find("002")
    shutil.rmtree(gone.folder)
    one = nightly._Batch([gone], batch / "out", 60.0)
    one.work(1)
    assert [(r.idea, r.status) for r in one.results] == [("002", "RUNNER_DIED")]
    assert "no idea '002'" in (batch / "out" / "runs" / f"{one.run_id}-002.log").read_text()
    assert [(r.arm, r.status, r.code_sha) for r in rows.read()] == [("002", "RUNNER_DIED", "")]


def test_an_interrupt_ends_what_runs_and_keeps_the_page(batch):
    source = "import pathlib, time; pathlib.Path('here').touch(); time.sleep(60)"
    nb = execute.load(batch / "ideas/002-crash/bench.ipynb")
    nb.cells[1].source = source
    nbformat.write(nb, batch / "ideas/002-crash/bench.ipynb")
    command = [sys.executable, "-m", "loop", "nightly", "--only", "002"]
    environment = {**os.environ, "PYTHONPATH": execute.python_path()}
    child = subprocess.Popen(command, cwd=batch, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (batch / "here").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=60)[0].splitlines()
    assert child.returncode == 130
    assert said[-2] == "interrupted after 0 of 1"
    assert (batch / said[-1]).exists()
    assert rows.read() == []
    mark = f"LOOP_ROOT={batch}".encode()
    left = [p for p in Path("/proc").glob("[0-9]*") if p.name != str(os.getpid()) and mark in _environ(p)]
    assert left == []


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""
