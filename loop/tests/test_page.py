"""The pages: failures first, links that resolve, nothing from the network, everything escaped."""

import base64
import dataclasses
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import arms, batch, board, budget, calls, changes, page, plots, registry, rows, views
from loop.run import RunResult
from loop.tests.conftest import GOOD_KERNEL
from loop.tests.test_rows import make_row, perf

nbformat = pytest.importorskip("nbformat")

ENTRY = {
    "family": "kda", "case": "prod8192_gate", "mode": "fwdbwd", "arm": "002", "baseline": "000", "ratio": 1.25,
    "ci_low": 1.24, "ci_high": 1.26, "ms": 40.0, "baseline_ms": 50.0, "floor_ms": 4.0, "peak_bytes": None,
    "baseline_peak_bytes": None, "device": "a <GPU>", "row_id": "0123456789abcdef", "code_sha": "0", "stale": False,
}  # fmt: skip
IDEA = """---
id: "005"
slug: sum-heads
family: kda
spans: [bwd.gva]
parent: "004"
status: running
---

## Hypothesis

Bytes: 3 <b>GB</b>.

Prediction: 1.4 times.

## Outcome

| form | ms |
|---|---|
| one | 2.0 |
"""
ERRORS = {
    "o": rows.OutputError(error=1e-3, limit=5e-3, budget=5e-3, baseline_error=2e-3),
    "dq": rows.OutputError(error=None, limit=8e-3, budget=8e-3),
}


class Document(HTMLParser):
    """Tags with their attributes, and the text, of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += " " + data

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


def timed(arm: str, ratio: float, day: int = 1, **change) -> rows.Row:
    row = make_row(arm=arm, utc=f"2026-01-0{day}T00:00:00Z", device="a <GPU>", case="prod8192_gate", **change)
    ms = 60.0 / ratio
    return rows.seal(row.model_copy(update={"perf": perf(ratio=ratio, ci_low=0.99 * ratio, ci_high=1.01 * ratio, ms=ms,
                                                         floor_ms=6.0, floor_share=6.0 / ms)}))  # fmt: skip


@pytest.fixture
def ladder(add_idea, ladder_root):
    """Three ideas: 005, whose parent is 004, and one that does not import; with rows of several days."""
    add_idea("004", "parent")
    folder = add_idea("005", "sum-heads", GOOD_KERNEL.replace("in torch", "in a <kernel>"))
    (folder / "IDEA.md").write_text(IDEA)
    add_idea("006", "broken", "1 / 0")
    (ladder_root / "profiles").mkdir()
    plot = "![kernels: 2 <ms>](005-sum-heads-prod.svg)"
    text = f"# 005\n\n## Reading\n\nBytes bound it.\n\n{plot}\n\n| a |\n|---|\n| b |\n"
    (ladder_root / "profiles/005-sum-heads-prod.md").write_text(text)
    (ladder_root / "profiles/005-sum-heads-prod.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    sha = registry.source_sha("005")
    found = [timed("005", 1.1 + 0.1 * day, day, code_sha=sha) for day in (1, 2, 3)]
    found += [timed("000", 1.0, 3), timed("004", 0.3, 3)]
    check = {"kind": "check", "mode": None, "baseline": None, "perf": None, "case": "tiny"}
    found.append(rows.seal(make_row(arm="005", check=rows.Check(ok=True, errors=ERRORS), **check)))
    bad = {"status": "WRONG_VALUE", "reason": "dq: error 0.1 <b>", "perf": None, "case": "small"}
    found.append(rows.seal(make_row(arm="005", **bad)))
    return sorted(found, key=lambda r: r.utc)


@pytest.fixture
def written(ladder, tmp_path):
    """A batch's page, in a folder with a space in its name."""
    notebook = tmp_path / "runs" / "r 1" / "notebook.ipynb"
    notebook.parent.mkdir(parents=True)
    notebook.touch()
    notebook.with_suffix(".html").touch()
    runs = [
        RunResult("005", "r 1", "PASSED", "2 rows recorded", 12.0, notebook, notebook.with_suffix(".html")),
        RunResult("004", "r2", "KERNEL_DIED", "code cell 4 <b>&", 3.0),
        RunResult("006", "r3", "UNSUPPORTED", "needs compute capability 9.x", 3.0),
    ]
    one = batch.Batch(tmp_path / "b 1", {"tier": "smoke", "device": "cpu"}, [batch.Done(r, {}) for r in runs])
    moved = [changes.Change("broken", "004", "tiny", "KERNEL_DIED: x"), changes.Change("stale", "009", "", "gone")]
    facts = {"batch": one.facts | {"id": one.id, "accepted": False, "interrupted": False}}
    listed = [(done.result, "b0" if done.result.ok else "") for done in one.done]
    path = tmp_path / "nightly" / "b 1" / "index.html"
    return page.write(path, ladder, title="night", runs=listed, moved=moved, compared=True, **facts)


def test_failures_come_first_and_everything_is_there(written):
    document = Document(written)
    body = document.text[document.text.index("1 passed,") :]
    order = ["KERNEL_DIED", "WRONG_VALUE", "broken", "UNSUPPORTED", "kept from b0", "interval, 0.5", "fwd.norm"]
    assert [body.index(word) for word in order] == sorted(body.index(word) for word in order)
    assert "1 failed" in document.text
    assert "1 not for this machine" in document.text
    assert "code cell 4 <b>&" in document.text
    assert not document.all("b")
    assert "a <GPU>" in document.text
    assert "14 %" in document.text  # 6 ms of 60 / 1.4
    assert "stale" in document.text  # 004's row is of another source


def test_links_resolve_and_nothing_comes_from_the_network(written):
    pages = [written, *(written.parent / "ideas").glob("*.html")]
    assert len(pages) == 4
    for path in pages:
        document = Document(path)
        for link in document.all("a"):
            target, _, anchor = link["href"].partition("#")
            assert not target or (path.parent / unquote(target)).exists(), (path.name, link)
            assert not anchor or any(attrs.get("id") == anchor for _, attrs in document.tags), (path.name, link)
        assert "http" not in path.read_text(encoding="utf-8")
        assert all(attrs.get("src", "data:").startswith("data:") for _, attrs in document.tags)
        assert document.all("html") == [{"lang": "en"}]
        assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in document.all("meta")
        assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8")
    links = {a["href"] for a in Document(written).all("a")}
    assert {"../../runs/r%201/notebook.html", "../../runs/r%201/notebook.ipynb"} < links


def test_plots_have_a_text_and_stay_on_their_axis(written):
    for path in (written, written.parent / "ideas/005-sum-heads.html"):
        document = Document(path)
        plots_ = document.all("svg")
        assert plots_
        assert all(svg.get("role") == "img" and svg.get("aria-label") for svg in plots_)
        for tag in ("rect", "circle", "line"):
            for attrs in document.all(tag):
                for name in ("x", "cx", "x1", "x2", "width", "y1", "y2"):
                    if attrs.get(name, "").endswith("%"):
                        assert -0.1 <= float(attrs[name].rstrip("%")) <= 100.1, (tag, attrs)
    labels = [svg["aria-label"] for svg in Document(written).all("svg")]
    assert "ratio 1.400, interval 1.386 to 1.414" in labels
    assert "Ratio over 3 runs, oldest first: 1.200, 1.300, 1.400" in labels
    assert any(label.startswith("Time against the floor. Closest to its floor: 005, fwdbwd.") for label in labels)
    assert any(label.startswith("Stage budget of kda") for label in labels)


def test_an_ideas_page(written):
    document = Document(written.parent / "ideas/005-sum-heads.html")
    text = document.text
    for said in (
        "Prediction: 1.4 times.", "3 <b>GB</b>", "1.400", "Bytes bound it.", "20 % of its limit", "WRONG_VALUE",
        '+"""Sum the value heads that share a q/k head, in a <kernel>.', "kept from b0", "1.00e-03",
    ):  # fmt: skip
        assert said in text + " ".join(svg["aria-label"] for svg in document.all("svg")), said
    assert not document.all("b")
    (image,) = document.all("img")
    assert image["alt"] == "kernels: 2 <ms>"
    assert base64.b64decode(image["src"].partition(",")[2]).startswith(b"<svg")
    broken = Document(written.parent / "ideas/006-broken.html").text
    assert "ZeroDivisionError" in broken
    assert "The parent is fla itself" in Document(written.parent / "ideas/004-parent.html").text


def test_predictions_are_found():
    assert views.prediction("Why.\n\nPredicted ratio: 2.\n\nMore.") == "Predicted ratio: 2."
    assert views.prediction("Why.\n\nSo 1.3.") == "So 1.3."
    assert views.prediction("Why.\n\n| ms | predicted |\n\nBytes: 3.") == "| ms | predicted |"
    assert views.prediction("Why.\n\n### Prediction\n\n2 ms.\n\n| a |\n\n### Cost\n\nMore.") == "2 ms.\n\n| a |"
    assert views.prediction("") == ""


def test_an_empty_page_says_what_to_do(tmp_path, ladder_root):
    document = Document(page.write(tmp_path / "index.html", []))
    assert "No timed rows yet" in document.text
    assert "Failures" not in document.text


def test_the_stage_budget_is_measured_and_drawn(ladder_root):
    path = budget.measure("cconv", "tiny")
    assert path == ladder_root / "out/profiles/stages-cconv-tiny.json"
    (facts,) = budget.readings()
    assert [step["span"] for step in facts["arms"]["000"]] == ["fwd", "bwd"]
    assert all(step["ms"] > 0 for step in facts["arms"]["000"])
    path.with_name("stages-kda-cut.json").write_text('{"family": "kda", "ca')
    path.with_name("stages-kda-gone.json").write_text('{"family": "kda", "case": "gone", "arms": {}}')
    drawn = {plot["title"]: plot for plot in budget.plots()}
    mine = drawn["cconv · tiny · cpu"]
    assert [bar["label"] for bar in mine["bars"]][:2] == ["plain torch", "shipped"]
    assert sum(part["width"] for part in mine["bars"][0]["parts"]) <= 100.01
    assert [row["stage"] for row in mine["table"]] == ["fwd", "bwd"]
    assert any(title.startswith("kda · prod8192_gate") for title in drawn)  # floors alone, of a family not measured


def test_the_stage_budget_shows_a_peers_kernels_apart(ladder_root, monkeypatch):
    """What a peer needs besides its own kernels is a part of its own of its bar."""
    seen = {"void k_bwd<false>(__nv_bfloat16 const*, float)": (2.0, 1), "l2norm_fwd_kernel": (0.5, 2),
            "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float> >(int)": (0.25, 2)}  # fmt: skip
    arm = dataclasses.replace(arms.make("cconv", "000"), supports=lambda case: (True, ""))
    real = arms.make
    monkeypatch.setattr(arms, "make", lambda family, name: arm if name == "fla-gluon" else real(family, name))
    monkeypatch.setattr(calls, "kernels", lambda call, times: seen)
    budget.measure("cconv", "tiny")
    (facts,) = budget.readings()
    listed = [("k_bwd", 2.0), ("l2norm_fwd_kernel", 0.5), ("torch's reduce_kernel", 0.25)]
    assert facts["peers"] == {"fla-gluon": listed}
    (plot,) = [plot for plot in budget.plots() if plot["title"] == "cconv · tiny · cpu"]
    assert {bar["label"]: bar["ms"] for bar in plot["bars"]}["fla-gluon"] == 2.75
    assert "fla-gluon 2.75 ms" in plot["alt"]
    document = Document(page.write(ladder_root / "index.html", []))
    text = " ".join(document.text.split())
    assert "fla-gluon, kernel by kernel:" in text
    assert all(f"{kernel} {ms:.3f}" in text for kernel, ms in listed)


def test_notebook_page_is_self_contained(tmp_path):
    picture = plots.against_floor([ENTRY])
    data = {"text/html": picture._repr_html_(), "text/plain": repr(picture)}
    cell = nbformat.v4.new_code_cell("s.plots()", outputs=[nbformat.v4.new_output("display_data", data)])
    result = RunResult("002", "r", "PASSED", "1 row <recorded>", 3.0)
    path = tmp_path / "n.html"
    path.write_text(page.notebook_html(nbformat.v4.new_notebook(cells=[cell]), result))
    document = Document(path)
    assert "1 row <recorded>" in document.text
    (image,) = document.all("img")
    assert image["alt"] == "Time against the floor: 1 times; closest to its floor: 002 on prod8192_gate, fwdbwd."
    assert image["src"].startswith("data:image/svg+xml;base64,")
    assert not document.all("script")


def test_the_page_uses_the_boards_entries(ladder):
    (group,) = [g for g in views.leaderboard(ladder) if "fwdbwd" in g["title"]]
    assert [e["arm"] for e in group["entries"]] == ["005", "000", "004"]
    assert {e["row_id"] for e in group["entries"]} == {e["row_id"] for e in board.entries(ladder)}


def test_markdown_links_lead_somewhere_or_are_text():
    """A profile's link to its idea's text is relative to the folder of profiles, where no page lies."""
    text = "[IDEA.md](../ideas/001-x/IDEA.md), [there](https://x.org/a), [here](#reading), `k[g](x)`"
    html = str(views.markdown(text))
    assert html.count("<a ") == 2
    assert "IDEA.md, <a" in html
    assert "k[g](x)" in html
