"""A record of a thousand rows: it loads and pages quickly, and files that are not rows are named and passed over."""

import json
import re
import time
import warnings

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import page, rows
from loop.tests.test_page import Document
from loop.tests.test_rows import make_row, perf

ARMS = ("000", "ship", *(f"{n:03d}" for n in range(1, 9)))
CASES = [f"case{n}" for n in range(5)]
DAYS = 10
ENV = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "switches": {f"FLA_{n}": None for n in range(20)}}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A thousand rows of ten arms, five cases, two modes and ten days, one file a day and case; and three bad files."""
    folder = tmp_path_factory.mktemp("bench_logs")
    for day in range(DAYS):
        for case in CASES:
            lines = []
            for number, (arm, mode) in enumerate((a, m) for a in ARMS for m in ("fwd", "fwdbwd")):
                ratio = 1.0 + 0.1 * number + 0.01 * day
                times = perf(ratio=ratio, ci_low=ratio - 0.01, ci_high=ratio + 0.01, ms=3.0 / ratio)
                row = make_row(arm=arm, mode=mode, case=case, device="NVIDIA H200", perf=times, env=ENV,
                               utc=f"2026-01-{day + 1:02d}T00:00:00Z", run_id=f"r{day}-{case}")  # fmt: skip
                lines.append(rows.seal(row).model_dump_json())
            (folder / f"r{day}-{case}.jsonl").write_text("\n".join(lines) + "\n")
    whole = (folder / "r0-case0.jsonl").read_text().splitlines()[0]
    (folder / "cut.jsonl").write_text(whole[: len(whole) // 2])
    (folder / "foreign.jsonl").write_text('{"speed": 3}\n')
    (folder / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    newer = json.loads(whole) | {"schema_version": rows.SCHEMA + 1, "mood": "good"}
    (folder / "newer.jsonl").write_text(json.dumps(newer) + "\n")
    return folder


@pytest.fixture(scope="module")
def found(logs):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        began = time.perf_counter()
        listed = rows.read(logs)
        took = time.perf_counter() - began
    return listed, took, [str(w.message) for w in said]


def test_it_loads_in_two_seconds_and_names_what_it_skips(found):
    listed, took, said = found
    assert len(listed) == DAYS * len(CASES) * len(ARMS) * 2 == 1000
    assert took < 2.0
    named = {re.search(r"(\w+)\.jsonl", line)[1]: line for line in said}
    assert set(named) == {"cut", "foreign", "binary", "newer"}
    assert "not JSON (cut short?)" in named["cut"]
    assert "not a row of this harness" in named["foreign"]
    assert "schema 2 is newer than 1" in named["newer"]
    assert all("skipped" in line for line in said)


def test_it_pages_in_five_seconds(found, add_idea, tmp_path):
    for arm in ARMS[2:]:
        add_idea(arm, "idea")
    began = time.perf_counter()
    path = page.write(tmp_path / "index.html", found[0])
    assert time.perf_counter() - began < 5.0
    document = Document(path)
    assert len([t for t in document.all("table") if t.get("class") == "board"]) == len(CASES) * 2
    assert len(list((tmp_path / "ideas").glob("*.html"))) == len(ARMS) - 2
