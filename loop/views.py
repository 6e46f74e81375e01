"""What the pages show, as plain values: bars, histories and tables from rows, texts and differences from ideas.

Positions on a plot are percent of its width, so that a template can draw it at any width with text of one size.
"""

import base64
import difflib
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import mistune
from markupsafe import Markup

from loop import board, registry, rows
from loop.promote import profiles, section

RATIO_RANGE = (0.5, 8.0)  # of the plotted ratio axis, logarithmic; what lies outside is drawn at its end
HISTORY = 24  # runs shown of one measurement


class _Renderer(mistune.HTMLRenderer):
    def link(self, text: str, url: str, title: str | None = None) -> str:
        """A link to a file is its text: pages do not lie beside what the file's folder holds."""
        return super().link(text, url, title) if url.startswith(("http://", "https://", "#")) else text


_markdown = mistune.create_markdown(renderer=_Renderer(escape=True), plugins=["table"])


def markdown(text: str) -> Markup:
    """Markdown as HTML; HTML inside it stays text."""
    return Markup(_markdown(text))


# ---------------------------------------------------------------------------------------------------------- leaderboard
def leaderboard(found: Sequence[rows.Row]) -> list[dict]:
    """Groups of one family, case, mode and device, GPUs first; in each the newest times, fastest first."""
    verdicts = {row.row_id: row.verdict for row in found}
    trees = {row.row_id: board.tree(row) for row in found}
    past = histories(found)
    groups: dict[tuple, list[dict]] = {}
    for e in board.entries(found):
        key = (e["device"] == "cpu", e["family"], e["case"], e["mode"], e["device"])
        runs = past[e["family"], e["arm"], e["case"], e["mode"], e["baseline"], e["device"]]
        more = {"verdict": verdicts.get(e["row_id"], ""), "tree": trees.get(e["row_id"], "")}
        groups.setdefault(key, []).append(_entry(e) | more | {"history": runs})
    return [
        {"title": " · ".join(key[1:]), "cpu": key[0], "entries": sorted(listed, key=lambda e: -e["ratio"])}
        for key, listed in sorted(groups.items())
    ]


def _entry(e: dict) -> dict:
    """A leaderboard entry, and where its interval lies on the plotted axis."""
    low, mid, high = (position(e[name]) for name in ("ci_low", "ratio", "ci_high"))
    share = e["floor_ms"] / e["ms"] if e.get("floor_ms") and e.get("ms") else None
    return e | {"low": low, "mid": mid, "width": max(high - low, 0.5), "one": position(1.0), "share": share}


def position(ratio: float) -> float:
    """Percent of the ratio axis."""
    lo, hi = map(math.log, RATIO_RANGE)
    return 100 * (math.log(min(max(ratio, RATIO_RANGE[0]), RATIO_RANGE[1])) - lo) / (hi - lo)


# ---------------------------------------------------------------------------------------------------------------- plots
def against_floor(found: Sequence[rows.Row]) -> list[dict]:
    """One plot for each family, case and device: every arm's newest time in each mode, and the floor."""
    plots: dict[tuple, dict] = {}
    for e in board.entries(found):
        if e["baseline"] == registry.BASELINE:
            key = (e["device"] == "cpu", e["family"], e["case"], e["device"])
            plots.setdefault(key, {})[e["mode"], e["ms"], e["arm"]] = e
    return [_bars(key, [listed[k] for k in sorted(listed)]) for key, listed in sorted(plots.items())]


def _bars(key: tuple, listed: list[dict]) -> dict:
    longest = max(e["ms"] for e in listed)
    bars = [
        {
            "label": f"{e['mode']} {e['arm']}: {e['ms']:.3f} ms" + (" (stale)" if e["stale"] else ""),
            "said": f"floor {e['floor_ms']:.3f} ms, {100 * e['floor_ms'] / e['ms']:.0f} %" if e["floor_ms"] else "",
            "width": 100 * e["ms"] / longest,
            "floor": 100 * e["floor_ms"] / longest if e["floor_ms"] else None,
            "base": e["arm"] == registry.BASELINE,
        }
        for e in listed
    ]
    closest = max((e for e in listed if e["floor_ms"]), key=lambda e: e["floor_ms"] / e["ms"], default=None)
    said = f"Closest to its floor: {closest['arm']}, {closest['mode']}." if closest else "No floor is known here."
    text = "; ".join(f"{b['label']}{', ' + b['said'] if b['said'] else ''}" for b in bars)
    return {"title": " · ".join(key[1:]), "bars": bars, "alt": f"Time against the floor. {said} {text}."}


def histories(found: Iterable[rows.Row]) -> dict[tuple, dict]:
    """Every measurement's ratios over its newest runs, oldest first. The key is family, arm, case, mode, baseline,
    device."""
    listed: dict[tuple, list[rows.Row]] = {}
    for row in found:
        if row.kind == "bench":
            listed.setdefault((row.family, row.arm, row.case, row.mode, row.baseline, row.device), []).append(row)
    return {key: _history(runs[-HISTORY:]) for key, runs in listed.items()}


def _history(runs: list[rows.Row]) -> dict:
    step = 100 / (len(runs) + 1)
    points = []
    for number, row in enumerate(runs, 1):
        p = row.perf
        point = {"x": step * number, "utc": row.utc, "status": row.status, "row_id": row.row_id, "perf": p}
        if p:
            point |= {name: 100 - position(v) for name, v in (("y", p.ratio), ("top", p.ci_high), ("bottom", p.ci_low))}
        points.append(point)
    said = ", ".join(f"{r.perf.ratio:.3f}" if r.perf else r.status for r in runs)
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    newest = f"{runs[-1].perf.ratio:.3f}" if runs[-1].perf else runs[-1].status
    alt = f"Ratio over {count}, oldest first: {said}"
    return {"points": points, "newest": newest, "alt": alt, "one": 100 - position(1.0)}


# ---------------------------------------------------------------------------------------------------------------- ideas
def idea(one: registry.Idea, found: Sequence[rows.Row]) -> dict:
    """An idea's page: what it predicts, what came of it, its errors, its difference from its parent, its profiles."""
    text = registry.document(one.folder)
    front = registry.front_matter(one.folder)
    hypothesis, outcome = (section(text, heading) for heading in ("Hypothesis", "Outcome"))
    mine = [row for row in found if row.arm == one.id]
    newest = [row for row in board.newest(mine) if row.perf]
    return {
        "name": one.name, "id": one.id, "family": one.family or ", ".join(registry.FAMILIES),
        "spans": ", ".join(one.spans), "status": front.get("status", ""), "error": one.error,
        "parent": parent(front), "hypothesis": markdown(hypothesis), "outcome": markdown(outcome),
        "predicted": markdown(prediction(hypothesis)), "measured": [_entry(board.entry(r)) for r in newest],
        "verdicts": {row.row_id: row.verdict for row in newest},
        "trees": {row.row_id: board.tree(row) for row in newest}, "errors": errors(mine),
        "history": [
            (f"{case} · {mode} against {baseline} · {device}", h)
            for (_, _, case, mode, baseline, device), h in sorted(histories(mine).items(), key=str)
        ],
        "diff": difference(one, parent(front)), "failures": board.failures(mine),
        "profiles": [(p.stem, profile(p)) for p in profiles(one)],
    }  # fmt: skip


def profile(path: Path) -> Markup:
    """A profile's text, with the plot that lies beside it drawn into the page."""

    def picture(match: re.Match) -> Markup:
        plot = path.with_name(match[2])
        data = base64.b64encode(plot.read_bytes()).decode() if plot.exists() else ""
        return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(match[1], data)

    text = path.read_text(encoding="utf-8")
    parts = re.split(r"(^!\[[^\n]*\]\([\w.-]+\.svg\)$)", text, flags=re.MULTILINE)
    images = [re.fullmatch(r"!\[(.*)\]\(([\w.-]+\.svg)\)", part) for part in parts]
    return Markup("").join(picture(m) if m else markdown(part) for part, m in zip(parts, images, strict=True))


def parent(front: dict) -> str:
    """The id of the parent; 000, fla itself, where none is named."""
    return front.get("parent") or registry.BASELINE


def prediction(hypothesis: str) -> str:
    """The text under a hypothesis's heading for it, else the paragraphs that begin with it, or name it; else the last.
    """
    if under := re.search(r"^#+ *predict[^\n]*\n(.*?)(?=^#|\Z)", hypothesis, re.IGNORECASE | re.MULTILINE | re.DOTALL):
        return under[1].strip()
    paragraphs = [p for p in re.split(r"\n\s*\n", hypothesis) if p.strip()]
    begin = [p for p in paragraphs if re.match(r"\W*(predict|expect)", p, re.IGNORECASE)]
    name = [p for p in paragraphs if "predict" in p.lower()]
    return "\n\n".join(begin or name or paragraphs[-1:])


def errors(mine: Sequence[rows.Row]) -> list[dict]:
    """The newest check of each case and device: the error of every output as a share of its limit."""
    last = {(row.case, row.device): row for row in mine if row.check and row.check.errors}
    tables = []
    for (case, device), row in sorted(last.items()):
        outputs = []
        for name, e in row.check.errors.items():
            share = e.error / e.limit if e.error is not None and e.limit else None
            outputs.append({"name": name, "e": e, "share": share, "bar": 100 * min(share or 0, 1.25) / 1.25})
        tables.append({"title": f"{case} on {device}, {row.utc}: {row.status}", "outputs": outputs})
    return tables


def difference(one: registry.Idea, parent_id: str) -> list[tuple[str, str]] | None:
    """(kind, line) of the kernel's difference from its parent's; None when one of the two has no kernel."""
    folder = registry.folders().get(parent_id)
    if folder is None or not one.kernel.is_file() or not (folder / "kernel.py").is_file():
        return None
    paths = (folder / "kernel.py", one.kernel)
    old, new = (p.read_text(encoding="utf-8", errors="replace").splitlines() for p in paths)
    lines = difflib.unified_diff(old, new, f"{folder.name}/kernel.py", f"{one.name}/kernel.py", n=2, lineterm="")
    return [({"+": "add", "-": "del", "@": "at"}.get(line[:1], ""), line) for line in lines]
