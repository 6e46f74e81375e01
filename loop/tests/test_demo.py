"""The main job from end to end: the real template through papermill, on a scaffolded idea."""

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import demo, lab, notebooks, registry, rows, run, scaffold

pytestmark = pytest.mark.slow


@pytest.fixture
def idea(ladder_root, monkeypatch):
    monkeypatch.delenv("LOOP_RUN_ID", raising=False)
    return scaffold.new("031", "strip", family="cconv", spans=["fwd"])


def test_the_whole_job(idea, ladder_root, capsys):
    assert demo.demo() == 0
    said = capsys.readouterr()
    for part in ("031-strip", "checks", "times", "PASSED", "y ", "dx", "000", "notebook ", "index "):
        assert part in said.out, part
    assert "cell 8/8 loop:verdict" in said.err
    recorded = [r for r in rows.read() if r.arm == "031"]
    assert {r.status for r in recorded} == {"PASSED"}
    assert "000" in {r.baseline for r in recorded}
    (executed,) = (ladder_root / "out" / "runs").iterdir()
    html = (executed / "notebook.html").read_text()
    assert html.count("<img alt=") == 3
    assert "TOO FAR" not in html
    assert (ladder_root / "out" / "index.html").exists()
    assert notebooks.problems(idea / "bench.ipynb") == []  # the source was not touched


def test_a_kernel_that_is_wrong_fails_the_command_and_keeps_its_page(idea, ladder_root, capsys):
    kernel = idea / "kernel.py"
    kernel.write_text(kernel.read_text().replace('return {"y": y, "ht": ht}', 'return {"y": 1.02 * y, "ht": ht}'))
    assert run.command("031", ["mode=fwd"]) == 1
    said = capsys.readouterr().out
    assert "031: WRONG_VALUE" in said
    assert "notebook.html" in said
    assert {r.status for r in rows.read() if r.arm == "031"} == {"WRONG_VALUE"}


def test_which_idea_is_shown(ladder_root, add_idea):
    with pytest.raises(ValueError, match="no idea with a notebook"):
        demo.best()
    for number in ("003", "004", "005"):
        folder = add_idea(number)
        notebooks.write(folder / "bench.ipynb", idea=number)
    (ladder_root / "ideas" / "005-sum-heads" / "kernel.py").write_text("1 / 0")
    assert demo.best().id == "004"
    broken = ladder_root / "ideas" / "004-sum-heads" / "kernel.py"
    right = broken.read_text()
    broken.write_text(right.replace('return (True, "")', "return True"))
    assert demo.best().id == "003"
    broken.write_text(right)
    front = ladder_root / "ideas" / "003-sum-heads" / "IDEA.md"
    front.write_text(front.read_text().replace("status: running", "status: promoted"))
    assert demo.best().id == "003"


def test_open_starts_jupyterlab_on_the_notebook(ladder_root, add_idea, monkeypatch):
    add_idea("005")
    called = {}
    monkeypatch.setattr(lab.subprocess, "call", lambda command, **kw: called.update(command=command, **kw) or 0)
    with pytest.raises(ValueError, match=r"has no bench.ipynb; `.venv/bin/python -m loop.notebooks` writes it"):
        lab.open_lab("005")
    (ladder_root / "ideas" / "005-sum-heads" / "bench.ipynb").write_text("{}")
    assert lab.open_lab("005") == 0
    assert called["command"][1:3] == ["-m", "jupyterlab"]
    assert str(ladder_root / "ideas" / "005-sum-heads" / "bench.ipynb") in called["command"]
    assert ("--allow-root" in called["command"]) == (lab.os.geteuid() == 0)
    assert str(lab.execute.Path(demo.__file__).parents[1]) in called["env"]["PYTHONPATH"]
    with pytest.raises(registry.IdeaError, match="no idea '099'"):
        lab.open_lab("099")
