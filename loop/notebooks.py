"""The notebooks' sources: `notebooks/*.py` in py:percent form, and each idea's bench.ipynb made from one template.

A committed bench.ipynb holds no output and differs from the template in its parameters cell alone, so a fix to the
protocol reaches every idea by `sync`, and `problems` can say what in a notebook is not as the template has it.
"""

import re
from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "notebooks" / "template.py"
MAX_CODE_CELLS = 8
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
_KERNEL_MARKS = re.compile(r"@(triton|cute|gluon)\.(jit|kernel)")


def load(source: Path) -> nbformat.NotebookNode:
    """A py:percent file as a notebook, with cell ids that do not change from one call to the next."""
    nb = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    for number, cell in enumerate(nb.cells):
        cell["id"] = f"cell-{number:02d}"
    nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    nb.nbformat, nb.nbformat_minor = 4, 5
    return nb


def bench(idea: str) -> nbformat.NotebookNode:
    """The template with the idea's number in its parameters cell."""
    nb = load(TEMPLATE)
    cell = parameters_cell(nb)
    cell.source = re.sub(r'^idea = "\d{3}"', f'idea = "{idea}"', cell.source, count=1, flags=re.MULTILINE)
    return nb


def parameters_cell(nb):
    """The one cell tagged `parameters`. ValueError when there is none, or more than one."""
    found = [c for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
    if len(found) != 1:
        raise ValueError(f"{len(found)} cells tagged 'parameters', expected 1")
    return found[0]


def write(path: Path, *, idea: str) -> None:
    path.write_text(nbformat.writes(bench(idea)) + "\n", encoding="utf-8")


def sync(root: Path = ROOT) -> list[Path]:
    """Rewrite every idea's bench.ipynb from the template; returns those that changed."""
    changed = []
    for folder in sorted((root / "ideas").glob("[0-9][0-9][0-9]-*")):
        path = folder / "bench.ipynb"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write(path, idea=folder.name[:3])
        if path.read_text(encoding="utf-8") != before:
            changed.append(path)
    return changed


def problems(path: Path) -> list[str]:
    """What is wrong with a committed bench.ipynb, one line each; empty when nothing is."""
    nb, wanted = nbformat.read(path, as_version=4), bench(path.parent.name[:3])
    found = []
    if any(c.get("outputs") or c.get("execution_count") for c in nb.cells if c.cell_type == "code"):
        found.append("holds outputs; clear them before committing")
    ours, theirs = ([c for c in n.cells if c.cell_type == "code"] for n in (nb, wanted))
    if len(ours) > MAX_CODE_CELLS:
        found.append(f"{len(ours)} code cells, at most {MAX_CODE_CELLS}")
    if any(_KERNEL_MARKS.search(c.source) for c in ours):
        found.append("defines a kernel; kernels live in kernel.py")
    if [_key(c) for c in ours] != [_key(c) for c in theirs]:
        found.append("differs from notebooks/template.py; `.venv/bin/python -m loop.notebooks` rewrites it")
    return found


def _key(cell):
    return cell.metadata.get("tags", []), cell.source.strip()


if __name__ == "__main__":
    for notebook in sync():
        print(f"wrote {notebook.relative_to(ROOT)}")
