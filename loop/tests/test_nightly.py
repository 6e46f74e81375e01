"""The batch: an idea that fails, however it fails, is one row and one line of the page; the others go on."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import loop.tests.notebook_tools  # noqa: F401
from loop import batch, execute, fingerprint, gpus, jobs, live, nightly, registry, rows, run, workers
from loop.tests.conftest import GOOD_KERNEL
from loop.tests.test_run import PARAMETERS, PASS

pytestmark = pytest.mark.slow

nbformat = pytest.importorskip("nbformat")

GOOD = (PASS[0].replace("'000'", "'001'"), PASS[1])
CELLS = {
    "001-good": [GOOD],
    "002-crash": ["import os; os.abort()"],
    "003-kills-its-runner": ["import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"],
}
WAITS = "import pathlib, time; pathlib.Path('here').touch(); time.sleep(60)"


def write_notebook(folder: Path, cells) -> None:
    nb = nbformat.v4.new_notebook()
    for number, cell in enumerate((PARAMETERS, *cells)):
        source, tags = (cell, []) if isinstance(cell, str) else cell
        nb.cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{number}", metadata={"tags": tags}))
    nbformat.write(nb, folder / "bench.ipynb")


@pytest.fixture
def tree(ladder_root, add_idea, monkeypatch):
    monkeypatch.delenv("LOOP_RUN_ID", raising=False)
    for name, cells in CELLS.items():
        write_notebook(add_idea(name[:3], name[4:]), cells)
    return ladder_root


def start(root: Path, *args: str) -> subprocess.Popen:
    """The command, once its notebook's cell is running."""
    command = [sys.executable, "-m", "loop", "nightly", *args]
    environment = {**os.environ, "PYTHONPATH": execute.python_path()}
    child = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300  # of a busy machine: loading alone may take a minute there
    while not (root / "here").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (root / "here").exists()
    return child


def left_of(root: Path) -> list[Path]:
    """Processes of the tree, other than this one."""
    mark = f"LOOP_ROOT={root}".encode()
    return [p for p in Path("/proc").glob("[0-9]*") if p.name != str(os.getpid()) and mark in _environ(p)]


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_failures_do_not_stop_the_others(tree, capsys):
    assert nightly.nightly(jobs_at_once=2) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "1 passed, 2 failed"
    assert all("\x1b" not in line for line in said)  # plain lines, since this is no terminal
    assert {line.split("  ")[1] for line in said[:-2]} == {"running", "PASSED", "KERNEL_DIED", "RUNNER_DIED"}
    assert {r.arm: r.status for r in rows.read()} == {"001": "PASSED", "002": "KERNEL_DIED", "003": "RUNNER_DIED"}
    page = Path(said[-1])
    text = page.read_text()
    assert text.index("KERNEL_DIED") < text.index('id="passed"') < text.index(">PASSED<")
    assert 'notebook.html">page</a>' in text


def test_force_redoes_and_a_hanging_idea_is_ended(tree, capsys):
    one = batch.start(tree / "out", "b0")
    page = tree / "out/page.html"
    page.touch()
    result = run.RunResult("001", "r0", "PASSED", "", 1.0, None, page)
    one.add(batch.Done(result, fingerprint.of(registry.find("001"))))
    assert nightly.nightly(only=["001"], timeout=0.5) == 0  # kept
    kernel = tree / "ideas/001-good/kernel.py"
    source = kernel.read_text()
    kernel.write_text(source + "# edited\n")
    assert nightly.nightly(only=["001"], timeout=0.5) == 1  # run again, and ended
    kernel.write_text(source)
    assert nightly.nightly(only=["001"], timeout=0.5, force=True) == 1
    said = capsys.readouterr().out
    assert said.count("001-good  RUNNER_TIMEOUT") == said.count("broken  001  RUNNER_TIMEOUT") == 2
    assert {(r.arm, r.status, r.kind) for r in rows.read()} == {("001", "RUNNER_TIMEOUT", "run")}
    assert len(rows.read()) == 2


def test_selection_and_tiers(tree, add_idea):
    add_idea("004", "broken", "1 / 0")
    assert [i.id for i in jobs.select((), None)] == ["001", "002", "003", "004"]
    assert [i.id for i in jobs.select(("004", "001"), "kda")] == ["001", "004"]
    for only, family, says in (
        (("009",), None, "no idea '009'"),
        ((), "gdn", "family 'gdn'"),
        ((), "cconv", "of family cconv"),
    ):
        with pytest.raises(ValueError, match=says):
            jobs.select(only, family)
    ideas = jobs.select(("001", "004"), None)
    assert [(j.idea.id, j.case) for j in jobs.of(ideas, None)] == [("001", ""), ("004", "")]
    smoke = [("001", "tiny"), ("001", "tiny_gate"), ("004", "")]
    assert [(j.idea.id, j.case) for j in jobs.of(ideas, "smoke")] == smoke
    assert [j.case for j in jobs.of(ideas[:1], "primary")] == ["tiny_gate"]
    assert len(jobs.of(ideas[:1], "full")) > 5
    assert jobs.of(ideas, "smoke")[0].run_id("b") == "b-001-tiny"
    with pytest.raises(ValueError, match="tier 'all' is unknown"):
        jobs.of(ideas, "all")


def test_bad_input_is_refused_before_a_kernel_is_loaded(tree, monkeypatch):
    monkeypatch.setattr(registry, "all_ideas", lambda *names: pytest.fail("loaded"))
    bad = {"tier": "all", "executor": "ssh", "devices": "x", "jobs_at_once": 0, "family": "gdn", "fail_on": "slow"}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=str(value)):
            nightly.nightly(**{name: value})


def test_an_idea_that_does_not_import_is_run_and_fails(tree, add_idea):
    """Its notebook's load cell raises; here only what the runner makes of it, without the seconds of a kernel."""
    add_idea("004", "broken", "1 / 0")
    idea = registry.find("004")
    result = run.RunResult("004", "r", "IMPORT_ERROR", idea.error, 0.0, case="tiny")
    run.record(result, idea, {"case": "tiny"})
    assert "ZeroDivisionError" in result.rows[0].reason
    (row,) = rows.read()
    assert (row.family, row.case, row.cmd) == ("kda", "tiny", "./ladder run 004 -p case=tiny")


def test_ideas_that_end_the_process_that_loads_them_are_rows(tree, add_idea, monkeypatch, capsys):
    """The batch itself looks at every kernel: to list it, to ask which cases of a tier it takes, to write the page."""
    monkeypatch.setattr(registry, "IMPORT_SECONDS", 2.0)
    monkeypatch.setattr(jobs, "SUPPORTS_SECONDS", 2.0)
    asks = GOOD_KERNEL.replace("    return (True", "    BODY\n    return (True")
    sources = {
        "004": GOOD_KERNEL + "import sys; sys.exit(0)",
        "005": GOOD_KERNEL + "import os; os.abort()",
        "006": GOOD_KERNEL + "import time; time.sleep(60)",
        "007": asks.replace("BODY", "raise KeyError(p.K)"),
        "008": asks.replace("BODY", "import os; os._exit(0)"),
        "009": asks.replace("BODY", "import time; time.sleep(60)"),
    }
    for number, source in sources.items():
        add_idea(number, "bad", source)
    todo = jobs.of(jobs.select([*sources], None), "smoke")
    assert [(j.idea.id, j.case) for j in todo] == [(number, "") for number in sources]
    assert [bool(j.idea.error) for j in todo] == [True] * 3 + [False] * 3
    assert nightly.nightly(only=["001"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "1 passed, 0 failed"
    assert "005-bad does not import: kernel.py ended its process by SIGABRT" in Path(said[-1]).read_text()


def test_an_idea_that_disappears_is_a_row(tree):
    gone = registry.find("002")
    shutil.rmtree(gone.folder)
    one = nightly._Run(batch.start(tree / "out", "b1"), [jobs.Job(gone)], workers.Local(), tree / "out", 60.0)
    one.work([], [gpus.Device("cpu")])
    assert [(d.result.idea, d.result.status) for d in one.batch.done] == [("002", "RUNNER_DIED")]
    assert "code 1: loop.rules.IdeaError: no idea '002'" in one.batch.done[0].result.message
    assert "no idea '002'" in (tree / "out" / "runs" / "b1-002.log").read_text()
    assert [(r.arm, r.status, r.code_sha) for r in rows.read()] == [("002", "RUNNER_DIED", "")]


def test_an_interrupt_ends_what_runs_and_keeps_the_page(tree):
    write_notebook(tree / "ideas/002-crash", [WAITS])
    child = start(tree, "--only", "002")
    child.send_signal(signal.SIGTERM)  # as a scheduler; Ctrl-C takes the same way
    said = child.communicate(timeout=60)[0].splitlines()
    assert child.returncode == 130
    assert said[-2] == "interrupted after 0 of 1"
    assert "interrupted" in (tree / said[-1]).read_text()
    assert rows.read() == []
    assert left_of(tree) == []


def test_a_killed_batch_leaves_no_process_and_goes_on_where_it_was(tree, capsys):
    write_notebook(tree / "ideas/002-crash", [WAITS])
    child = start(tree, "--only", "001", "--only", "002")
    child.kill()
    child.wait()
    (one,) = batch.earlier(tree / "out")
    assert one.code is None
    assert [(d.result.idea, d.result.status) for d in one.done] == [("001", "PASSED")]
    assert not fingerprint.differs(fingerprint.of(registry.find("001")), one.done[0].key)
    deadline = time.monotonic() + 20
    while left_of(tree) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_of(tree) == []

    assert nightly.nightly(only=["001"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"001-good  kept  PASSED in {one.id}, nothing moved since"
    assert f"kept from {one.id}" in Path(said[-1]).read_text()
    assert len([r for r in rows.read() if r.arm == "001"]) == 1


def test_a_batch_file_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path):
    one = batch.start(tmp_path, "b2", tier="smoke")
    one.add(batch.Done(run.RunResult("001", "r", "PASSED", "", 1.0), {"code": "x"}))
    one.accept()
    path = one.folder / batch.FILE
    path.write_text(path.read_text() + '{"result": {"idea": "002", "ru')
    (again,) = batch.earlier(tmp_path)
    assert (again.id, again.facts["tier"], again.accepted, again.code) == ("b2", "smoke", True, None)
    assert [d.result.idea for d in again.done] == ["001"]
    with pytest.raises(ValueError, match="no batch 'b9'"):
        batch.read(tmp_path / "nightly" / "b9")


def test_a_terminal_gets_a_live_table(tree):
    todo = jobs.of(jobs.select((), None), None)
    report = live.Report(todo, Console(file=io.StringIO(), force_terminal=True, width=120))
    with report:
        report.started(todo[0], "1")
        report.finished(todo[0], run.RunResult("001", "r", "ERROR", "x[/y] is not [bold]", 3.0))
        report.kept(todo[1], run.RunResult("002", "r", "PASSED", "", 3.0), "b0")
        report.started(todo[2], "cpu")
    text = report.console.file.getvalue()
    assert "2 of 3 done" in text
    assert all(word in text for word in ("001-good", "x[/y] is not [bold]", "kept", "running", "0 s", "\x1b["))


@pytest.mark.parametrize(("tty", "ci", "expected"), [(True, "", True), (True, "true", False), (False, "", False)])
def test_a_pipe_and_ci_get_plain_lines(tree, monkeypatch, tty, ci, expected):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    assert bool(live.Report(jobs.of(jobs.select(["001"], None), None)).live) == expected


def test_fingerprints_move_with_what_they_name(tree, monkeypatch):
    idea = registry.find("001")
    before = fingerprint.of(idea)
    assert fingerprint.differs(before, before) == []
    monkeypatch.setenv("TRITON_SOMETHING", "1")
    assert fingerprint.differs(fingerprint.of(idea), before) == ["environment"]
    monkeypatch.delenv("TRITON_SOMETHING")
    (idea.folder / "kernel.py").write_text("FAMILY = 'kda'")
    assert fingerprint.differs(fingerprint.of(idea), before) == ["code"]
    assert fingerprint.differs(before, {}) == ["code", "contract", "protocol", "environment"]
    assert fingerprint.differs({}, before) == ["code", "contract", "protocol", "environment"]
    assert all((fingerprint.HERE / f"{name}.py").exists() for name in fingerprint.CONTRACT + fingerprint.PROTOCOL)
