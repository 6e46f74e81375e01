"""Notebooks as they are committed: stripped, as the template has them, and running on a CPU."""

import math

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import notebooks, registry

nbformat = pytest.importorskip("nbformat")

SHARED = ("tour", "leaderboard", "stage_budget", "numerics")
COMMITTED = sorted(notebooks.ROOT.glob("ideas/*/bench.ipynb"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.parent.name)
def test_committed_notebooks_are_the_template(path):
    assert notebooks.problems(path) == []


def test_every_idea_has_its_notebook():
    assert [p.parent for p in COMMITTED] == sorted(f for f in registry.folders().values())


def test_the_template_is_thin_and_valid():
    nb = notebooks.bench("007")
    nbformat.validate(nb)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert len(code) == notebooks.MAX_CODE_CELLS
    assert all(len(c.source.splitlines()) <= 5 for c in code)
    assert 'idea = "007"' in notebooks.parameters_cell(nb).source
    assert nbformat.writes(nb) == nbformat.writes(notebooks.bench("007"))  # cell ids do not change


@pytest.mark.parametrize(("change", "says"), [
    (lambda cells: cells[2].update(outputs=[nbformat.v4.new_output("stream", text="x")]), "holds outputs"),
    (lambda cells: cells[2].update(execution_count=3), "holds outputs"),
    (lambda cells: cells[3].update(source="s.check(seeds=1)"), "differs from notebooks/template.py"),
    (lambda cells: cells[3].metadata.update(tags=[]), "differs"),
    (lambda cells: cells[2].update(source="@triton.jit\ndef f(): ..."), "kernels live in kernel.py"),
    (lambda cells: cells.append(nbformat.v4.new_code_cell("1")), "9 code cells, at most 8"),
])  # fmt: skip
def test_what_a_notebook_must_not_be(tmp_path, change, says):
    nb = notebooks.bench("005")
    code = [c for c in nb.cells if c.cell_type == "code"]
    change(code)
    nb.cells = [*(c for c in nb.cells if c.cell_type != "code"), *code]
    path = tmp_path / "005-x" / "bench.ipynb"
    path.parent.mkdir()
    nbformat.write(nb, path)
    assert any(says in line for line in notebooks.problems(path))


def test_sync_rewrites_only_what_differs(tmp_path):
    for name in ("001-a", "002-b"):
        (tmp_path / "ideas" / name).mkdir(parents=True)
    assert [p.parent.name for p in notebooks.sync(tmp_path)] == ["001-a", "002-b"]
    (tmp_path / "ideas/001-a/bench.ipynb").write_text("{}")
    assert [p.parent.name for p in notebooks.sync(tmp_path)] == ["001-a"]
    assert notebooks.problems(tmp_path / "ideas/001-a/bench.ipynb") == []


@pytest.mark.parametrize("name", SHARED)
def test_shared_notebooks_run_on_a_cpu(name):
    names = {"__name__": name}
    for cell in notebooks.load(notebooks.ROOT / "notebooks" / f"{name}.py").cells:
        if "parameters" in cell.metadata.get("tags", []):
            exec(cell.source, names)
            names |= {"strengths": "1 64", "T": 64}  # the notebook's own sweep is longer
        elif cell.cell_type == "code":
            exec(compile(cell.source, f"{name}.py", "exec"), names)


def test_the_numerics_notebook_shows_what_it_claims():
    """Within budget at the case's own gates, finite at the strongest, worse where the state outlives the sequence."""
    names = {}
    for cell in notebooks.load(notebooks.ROOT / "notebooks" / "numerics.py").cells:
        if "parameters" in cell.metadata.get("tags", []):
            exec(cell.source, names)
            names["strengths"] = "0.01 1 64"
        elif cell.cell_type == "code":
            exec(cell.source, names)
    weak, own, strong = (names["found"][x] for x in (0.01, 1.0, 64.0))
    assert all(error <= names["budgets"][name] for name, error in own.items())
    assert all(math.isfinite(error) for error in strong.values())
    assert weak["o"] > own["o"]
