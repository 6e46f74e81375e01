"""The notebook runner against small notebooks, each failing in a way that papermill alone hides."""

import os
import subprocess
import sys
import time

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import execute, processes, rows, run

nbformat = pytest.importorskip("nbformat")

PARAMETERS = ("idea: str = '000'\nseed: int = 0  # of the inputs", ["parameters"])
RECORD = """
import os
from loop import rows
row = rows.Row(run_id=os.environ['LOOP_RUN_ID'], utc=rows.utc_now(), kind='check', family='kda', arm='000', case='tiny',
               status={status!r}, reason={reason!r}, device='cpu', code_sha='0' * 64, cmd='test')
rows.Writer(rows.default_folder('kda', 'cpu'), 'test').write(row)
"""
WRONG = RECORD.format(status="WRONG_VALUE", reason="dq: error 0.1")
PASS = (RECORD.format(status="PASSED", reason=""), ["loop:record"])


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A tree of its own, with an unusual name, so that rows and outputs stay out of the checkout."""
    root = tmp_path / "a {tree} with spaces"
    (root / "ideas" / "000-fla").mkdir(parents=True)
    monkeypatch.setenv("LOOP_ROOT", str(root))
    monkeypatch.delenv("LOOP_RUN_ID", raising=False)
    return root


def run_cells(root, *cells, **kwargs):
    """Run a notebook of the given cells, each (source, tags) or a source alone."""
    nb = nbformat.v4.new_notebook()
    for number, cell in enumerate((PARAMETERS, *cells)):
        source, tags = (cell, []) if isinstance(cell, str) else cell
        nb.cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{number}", metadata={"tags": tags}))
    path = root / "ideas" / "000-fla" / "bench.ipynb"
    nbformat.write(nb, path)
    return run.run("000", **kwargs)


def test_passes_with_a_row_and_takes_parameters(root):
    seen = []
    result = run_cells(
        root,
        "assert seed == 7 and type(seed) is int\nprint('seed is', seed)",
        PASS,
        parameters={"seed": 7},
        on_cell=lambda *a: seen.append(a),
    )
    assert result.ok, result
    assert len(result.rows) == 1
    assert result.rows[0].run_id == result.run_id
    assert "seed is 7" in result.html.read_text()
    assert seen == [(1, 3, "parameters"), (2, 3, "untagged"), (3, 3, "loop:record")]
    assert processes.of_run(result.run_id) == []
    assert "LOOP_RUN_ID" not in os.environ


@pytest.mark.parametrize(("cells", "status", "says"), [
    pytest.param(["import os; os._exit(0)", PASS], "KERNEL_DIED", "code cell 2", id="dead kernel"),
    pytest.param([PASS, "import sys; sys.exit(0)", "1"], "EXITED", "1 cells were skipped", id="sys.exit(0)"),
    pytest.param(["1 + 1"], "NO_VERDICT", "no row", id="no row"),
    pytest.param(["from loop.registry import IdeaError as E; raise E('kernel.py:3')"], "IMPORT_ERROR",
                 "kernel.py:3", id="kernel does not import"),
    pytest.param([PASS, "raise KeyError('x')"], "ERROR", "KeyError", id="raises after the row"),
    pytest.param([WRONG, "1"], "WRONG_VALUE", "dq: error 0.1", id="a row that fails"),
])  # fmt: skip
def test_failures_have_their_own_status_and_a_row(root, cells, status, says):
    result = run_cells(root, *cells)
    assert (result.status, result.ok) == (status, False)
    assert says in result.message
    assert "\n" not in result.message
    on_disk = rows.read(root / "out")
    assert [r.status for r in on_disk if r.status != "PASSED"] == [status]
    assert not any(r.perf for r in on_disk)


def test_rows_of_other_runs_are_not_its_own(root):
    """A pass and a failure on record, of the same idea: a run that records nothing has neither."""
    for status, reason in (("PASSED", ""), ("ERROR", "old")):
        row = rows.Row(run_id="old", utc=rows.utc_now(), kind="check", family="kda", arm="000", case="tiny",
                       status=status, reason=reason, device="cpu", code_sha="0" * 64, cmd="test")  # fmt: skip
        rows.Writer(rows.default_folder("kda", "cpu"), "test", "old").write(row)
    assert run.rows_of("new") == []
    result = run_cells(root, "1 + 1")
    assert result.status == "NO_VERDICT"
    assert [r.status for r in rows.read() if r.run_id == result.run_id] == ["NO_VERDICT"]


def test_timeout(root):
    result = run_cells(root, "import time; time.sleep(60)", PASS, timeout=2)
    assert result.status == "TIMEOUT"
    assert "code cell 2 (untagged) ran past 2 s" in result.message
    assert result.seconds < 30
    assert processes.of_run(result.run_id) == []


def test_unknown_parameter_runs_nothing(root):
    result = run_cells(root, "raise SystemError", parameters={"sed": 1})
    assert result.status == "UNKNOWN_PARAMETER"
    assert result.message == "unknown parameter 'sed'; the notebook has idea, seed"
    assert result.notebook is None


def test_bad_input_is_one_line(root):
    with pytest.raises(ValueError, match=r"no bench\.ipynb") as error:
        run.run("000")
    assert "\n" not in str(error.value)
    (root / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write to .*--out"):
        run_cells(root, PASS, out=root / "file")


def test_reap_ends_what_outlived_its_run():
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", stubborn], env={**os.environ, "LOOP_RUN_ID": "reap-test"}, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    began = time.monotonic()
    assert processes.reap("reap-test") == [child.pid]
    assert child.wait(timeout=5) == -9
    assert time.monotonic() - began < 10
    assert processes.reap("reap-test") == []


def test_parameters_from_the_command_line_keep_the_types_of_their_defaults(root):
    run_cells(root, PASS)
    nb = execute.load(root / "ideas/000-fla/bench.ipynb")
    assert execute.typed(nb, ["idea=0012345", "seed=3"]) == {"idea": "0012345", "seed": 3}
    assert execute.typed(nb, ["nobody=12e4567"]) == {"nobody": "12e4567"}
    with pytest.raises(ValueError, match=r"seed='x'.*int"):
        execute.typed(nb, ["seed=x"])
    with pytest.raises(ValueError, match="NAME=VALUE"):
        execute.typed(nb, ["seed"])
