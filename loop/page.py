"""Pages people look at: a batch's index and the HTML copy of an executed notebook. No script, no network."""

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import jinja2
import nbformat
from markupsafe import Markup

RATIO_RANGE = (0.5, 4.0)  # of the plotted ratio axis, logarithmic; what lies outside is drawn at its end


def write_index(path: Path, runs: Sequence, entries: Sequence[dict], *, title: str = "kernel-fun") -> Path:
    """Write a batch's page: failures first, then every run, then the leaderboard.

    Args:
        path: the .html file; links to notebooks are relative to its folder.
        runs: `loop.run.RunResult` objects of the batch, in any order.
        entries: leaderboard entries as `./ladder board --json` prints them.
    """
    views = [_run_view(r, path.parent) for r in sorted(runs, key=lambda r: (r.ok, r.idea))]
    groups: dict[tuple, list[dict]] = {}
    for entry in entries:
        key = (entry["device"] == "cpu", entry["family"], entry["case"], entry["mode"], entry["device"])  # GPUs first
        groups.setdefault(key, []).append(_entry_view(entry))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        _environment()
        .get_template("index.html.j2")
        .render(
            title=title,
            failures=[v for v in views if v["failed"]],
            passes=[v for v in views if v["ok"]],
            declined=[v for v in views if not v["ok"] and not v["failed"]],
            groups=[
                {"title": " · ".join(key[1:]), "cpu": key[0], "entries": sorted(rows, key=lambda e: -e["ratio"])}
                for key, rows in sorted(groups.items())
            ],
        ),
        encoding="utf-8",
    )
    return path


def notebook_html(nb: nbformat.NotebookNode, result) -> str:
    """An executed notebook as one HTML document, headed by how its run ended."""
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter(template_name="basic").from_notebook_node(nb)
    return (
        _environment()
        .get_template("notebook.html.j2")
        .render(title=f"{result.idea}: {result.status}", result=result, body=Markup(body))
    )


def _run_view(run, folder: Path) -> dict:
    links = [
        (label, _relative(path, folder)) for label, path in (("page", run.html), ("notebook", run.notebook)) if path
    ]
    return {
        "idea": run.idea,
        "status": run.status,
        "ok": run.ok,
        "failed": run.failed,
        "message": run.message,
        "verdict": run.verdict,
        "seconds": run.seconds,
        "links": links,
    }


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _entry_view(entry: dict) -> dict:
    """The entry plus where its interval lies on the plotted axis, in percent."""
    low, mid, high = (_position(entry[name]) for name in ("ci_low", "ratio", "ci_high"))
    share = entry["floor_ms"] / entry["ms"] if entry.get("floor_ms") and entry.get("ms") else None
    return entry | {"low": low, "mid": mid, "width": max(high - low, 0.5), "one": _position(1.0), "share": share}


def _position(ratio: float) -> float:
    lo, hi = map(math.log, RATIO_RANGE)
    return 100 * (math.log(min(max(ratio, RATIO_RANGE[0]), RATIO_RANGE[1])) - lo) / (hi - lo)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
