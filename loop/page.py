"""Pages people look at: a batch's index, the ladder's, each idea's, and the HTML copy of an executed notebook.

Every page is one file: styles, plots and the few lines that sort a table are in it, and nothing comes from a network.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import jinja2
import nbformat
from markupsafe import Markup

from loop import board, budget, registry, rows, views
from loop.changes import Change


def write_batch(path: Path, batch, moved: Sequence[Change], compared: bool) -> Path:
    """Write a batch's page, and each idea's beside it: failures first, what changed, then the whole ladder.

    Args:
        path: the index.html; links are relative to its folder.
        batch: a `loop.batch.Batch`. moved: its changes. compared: False when there was no accepted batch.
    """
    runs = [(done.result, done.kept) for done in batch.done]
    facts = {
        "moved": moved,
        "compared": compared,
        "batch": batch.facts | {"id": batch.id, "accepted": batch.accepted, "interrupted": batch.code == 130},
    }
    return write(path, rows.read(), title="kernel-fun nightly", runs=runs, **facts)


def write(path: Path, found: Sequence[rows.Row], *, title: str = "kernel-fun", runs: Sequence = (), **facts) -> Path:
    """Write the page of the rows, and each idea's beside it in `ideas/`.

    Args:
        path: the .html file. found: rows, oldest first.
        runs: (`loop.run.RunResult`, the batch it was kept from or an empty string) of the runs that it is about.
    """
    seen = [_run_view(r, kept, path.parent) for r, kept in sorted(runs, key=lambda x: (x[0].ok, x[0].idea, x[0].case))]
    ideas = [views.idea(one, found) for one in registry.all_ideas()]
    pages = {view["id"]: f"ideas/{view['name']}.html" for view in ideas}
    context = {
        "title": title, "utc": rows.utc_now(), "groups": views.leaderboard(found), "plots": views.against_floor(found),
        "budgets": budget.plots(), "broken": board.failures(found), "ideas": ideas, "pages": pages,
        "failures": [v for v in seen if v["failed"]], "passes": [v for v in seen if v["ok"]],
        "declined": [v for v in seen if not v["ok"] and not v["failed"]], "ran": bool(runs),
        "moved": (), "compared": False, "batch": None,
    }  # fmt: skip
    (path.parent / "ideas").mkdir(parents=True, exist_ok=True)
    path.write_text(_render("index.html.j2", context | facts), encoding="utf-8")
    for view in ideas:
        here = path.parent / pages[view["id"]]
        mine = [_run_view(r, kept, here.parent) for r, kept in runs if r.idea == view["id"]]
        known = {
            "title": view["name"],
            "v": view,
            "runs": mine or _last_run(view, found, here),
            "home": path.name,
            "parents": pages,
        }
        here.write_text(_render("idea.html.j2", known), encoding="utf-8")
    return path


def notebook_html(nb: nbformat.NotebookNode, result) -> str:
    """An executed notebook as one HTML document, headed by how its run ended."""
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter(template_name="basic").from_notebook_node(nb)
    return _render(
        "notebook.html.j2", {"title": f"{result.idea}: {result.status}", "result": result, "body": Markup(body)}
    )


def _last_run(view: dict, found: Sequence[rows.Row], here: Path) -> list[dict]:
    """The newest executed notebook that is still there, of the runs that left rows of an idea."""
    from loop import run

    for run_id in dict.fromkeys(row.run_id for row in reversed(found) if row.arm == view["id"]):
        last = run.left_by(run.out_folder(), run_id)
        if last and last.html and last.html.exists():
            return [_run_view(last, "", here.parent)]
    return []


def _run_view(run, kept: str, folder: Path) -> dict:
    links = [
        (label, _relative(path, folder))
        for label, path in (("page", run.html), ("notebook", run.notebook))
        if path and path.exists()
    ]
    return {
        "idea": run.idea,
        "case": run.case or next((row.case for row in run.mine if row.case), ""),
        "run_id": run.run_id,
        "status": run.status,
        "ok": run.ok,
        "failed": run.failed,
        "message": f"kept from {kept}" if kept else run.message,
        "verdict": run.verdict,
        "seconds": run.seconds,
        "links": links,
    }


def _relative(path: Path, folder: Path) -> str:
    return quote(Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix())


def _render(template: str, context: dict) -> str:
    return _environment().get_template(template).render(**context)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
