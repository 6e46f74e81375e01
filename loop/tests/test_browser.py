"""The pages in a real browser: they render, sort by keyboard, link to pages that load, and no console error is seen."""

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop.tests import browser
from loop.tests.test_page import ladder, written  # noqa: F401  (fixtures)

pytestmark = pytest.mark.skipif(browser.found() is None, reason=f"needs one of {', '.join(browser.NAMES)} on PATH")

COLUMN = "[...document.querySelector('table.board').tBodies[0].rows].map(r => r.cells[{}].textContent.trim())"
HEADER = "document.querySelector('table.board th:nth-child({}) button')"


@pytest.fixture(scope="module")
def tab():
    with browser.browser() as page:
        yield page


@pytest.fixture
def index(tab, written):  # noqa: F811
    tab.said.clear()
    tab.size(1200, 900)
    tab.open(written.resolve().as_uri())
    return tab


def test_it_renders_and_says_nothing(index, tmp_path):
    assert index.evaluate("document.title") == "night"
    assert index.evaluate("document.querySelectorAll('svg').length") > 5
    boxes = "[...document.querySelectorAll('svg')].filter(s => !s.closest('details:not([open])'))"
    assert index.evaluate(f"{boxes}.every(s => s.getBoundingClientRect().width > 50)")
    assert index.screenshot(tmp_path / "index.png").stat().st_size > 10_000
    assert index.said == []


def test_it_sorts_without_a_mouse(index):
    assert index.evaluate(COLUMN.format(0)) == ["005", "000 stale", "004 stale"]  # fastest first
    index.evaluate(f"{HEADER.format(3)}.focus()")
    index.key("Enter", "\r")
    assert index.evaluate(COLUMN.format(2)) == ["0.300", "1.000", "1.400"]
    sorts = "[...document.querySelectorAll('table.board th[aria-sort]')].map(t => t.ariaSort)"
    assert index.evaluate(sorts) == ["none", "none", "ascending", "none", "none", "none"]
    index.key("Enter", "\r")
    assert index.evaluate(COLUMN.format(2)) == ["1.400", "1.000", "0.300"]
    assert index.evaluate(sorts) == ["none", "none", "descending", "none", "none", "none"]
    index.click(HEADER.format(1))
    assert index.evaluate(COLUMN.format(0)) == ["000 stale", "004 stale", "005"]
    assert index.said == []


def test_every_link_loads(index):
    seen, left = set(), [index.evaluate("location.href")]
    while left:
        url = left.pop()
        if url in seen or url.endswith(".ipynb"):
            continue
        seen.add(url)
        index.open(url)
        left += index.evaluate("[...document.links].map(a => a.href.split('#')[0])")
    assert len(seen) == 5  # the index, three ideas, an executed notebook
    assert index.said == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable_on_a_phone_and_in_the_dark(index, tmp_path, dark):
    index.size(390, 844, dark)
    for path in (None, "[...document.links].find(a => a.href.includes('005-sum')).href"):
        if path:
            index.open(index.evaluate(path))
        assert index.evaluate("document.documentElement.scrollWidth") <= 390  # nothing sticks out: tables scroll inside
        assert index.evaluate("[...document.querySelectorAll('nav a')].every(a => a.getClientRects().length === 1)")
        ink, paper = (
            index.evaluate(f"getComputedStyle(document.body).{what}.match(/\\d+/g).map(Number)")
            for what in ("color", "backgroundColor")
        )
        assert (sum(paper) < 200) == dark
        assert abs(sum(ink) - sum(paper)) > 450
        assert index.evaluate("Math.min(...[...document.querySelectorAll('svg text, td, p')].map("
                              "e => parseFloat(getComputedStyle(e).fontSize)))") >= 13  # fmt: skip
    index.screenshot(tmp_path / "phone.png")
    assert index.said == []
