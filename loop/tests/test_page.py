"""The batch page: failures first, links that resolve, nothing from the network, everything escaped."""

from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from loop import page, plots
from loop.run import RunResult

ENTRY = {
    "family": "kda", "case": "prod8192_gate", "mode": "fwdbwd", "arm": "002", "baseline": "000", "ratio": 1.25,
    "ci_low": 1.24, "ci_high": 1.26, "ms": 40.0, "baseline_ms": 50.0, "floor_ms": 4.0, "peak_bytes": None,
    "baseline_peak_bytes": None, "device": "a <GPU>", "row_id": "0123456789abcdef", "code_sha": "0", "stale": False,
}  # fmt: skip


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


@pytest.fixture
def written(tmp_path):
    notebook = tmp_path / "runs" / "r 1" / "notebook.ipynb"
    notebook.parent.mkdir(parents=True)
    notebook.touch()
    runs = [
        RunResult("001", "r 1", "PASSED", "2 rows recorded", 12.0, notebook, None),
        RunResult("002", "r2", "KERNEL_DIED", "code cell 4 <b>&", 3.0),
        RunResult("006", "r3", "UNSUPPORTED", "needs compute capability 9.x", 3.0),
    ]
    entries = [
        ENTRY,
        ENTRY | {"arm": "005", "ratio": 0.2, "ci_low": 0.1, "ci_high": 9.0, "stale": True, "floor_ms": None},
    ]
    return page.write_index(tmp_path / "nightly" / "b" / "index.html", runs, entries)


def test_failures_come_first_and_everything_is_there(written):
    document = Document(written)
    order = ["Failures", "KERNEL_DIED", "Not for this machine", "UNSUPPORTED", "Passed", "PASSED", "Leaderboard"]
    assert [document.text.index(word) for word in order] == sorted(document.text.index(word) for word in order)
    assert "1 failed" in document.text
    assert "code cell 4 <b>&" in document.text
    assert not document.all("b")
    assert "1 passed," in document.text
    assert "a <GPU>" in document.text
    assert document.text.index("002") < document.text.rindex("005")  # fastest first
    assert "stale" in document.text
    assert "10 %" in document.text  # 4 of 40 ms


def test_links_resolve_and_nothing_comes_from_the_network(written):
    document = Document(written)
    (link,) = document.all("a")
    assert (written.parent / link["href"]).resolve().name == "notebook.ipynb"
    assert (written.parent / link["href"]).exists()
    assert not document.all("script")
    assert "http" not in written.read_text(encoding="utf-8")
    assert document.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in document.all("meta")
    assert "prefers-color-scheme: dark" in written.read_text(encoding="utf-8")


def test_bars_have_a_text_and_stay_on_their_axis(written):
    bars = [d for d in Document(written).all("div") if d.get("role") == "img"]
    assert bars[0]["aria-label"] == "ratio 1.250, interval 1.240 to 1.260"
    for mark in Document(written).all("i"):
        left, *width = [float(part.partition(":")[2].rstrip("%")) for part in mark["style"].split(";")]
        assert 0 <= left <= left + sum(width) <= 100.5


def test_an_empty_page_says_what_to_do(tmp_path):
    document = Document(page.write_index(tmp_path / "index.html", [], []))
    assert "No timed rows yet" in document.text
    assert "Failures" not in document.text


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
