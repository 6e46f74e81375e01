"""Rows: a time needs a passed check, files survive interruption, readers skip by name what they cannot read."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
from pydantic import ValidationError

from loop import rows


def perf(**change):
    base = {
        "verdict": "FASTER",
        "ratio": 1.5,
        "ci_low": 1.49,
        "ci_high": 1.51,
        "coverage": 0.973,
        "dead_band": 0.005,
        "aa_ratio": 1.0,
        "aa_low": 0.999,
        "aa_high": 1.001,
        "cycles_ratio": None,
        "ms": 2.0,
        "baseline_ms": 3.0,
        "caller_ms": None,
        "baseline_caller_ms": None,
        "floor_ms": 1.0,
        "floor_share": 0.5,
        "floor_bound": "bytes",
        "peak_bytes": 10,
        "baseline_peak_bytes": 20,
        "saved_bytes": 1,
        "baseline_saved_bytes": 2,
        "block_ms": (2.0,) * 21,
        "baseline_block_ms": (3.0,) * 21,
        "aa_block_ms": (3.0,) * 21,
        "calls_per_sample": 1,
        "input_sets": 2,
        "input_bytes": 100,
        "timer": "graph",
    }
    return rows.Perf(**{**base, **change})


def make_row(**change):
    base = {
        "run_id": "20260101T000000Z-000000",
        "utc": "2026-01-01T00:00:00Z",
        "kind": "bench",
        "family": "kda",
        "arm": "005",
        "baseline": "000",
        "case": "prod8192",
        "mode": "fwdbwd",
        "status": "PASSED",
        "device": "NVIDIA H200",
        "code_sha": "ab" * 32,
        "check": rows.Check(ok=True, seeds=(1, 2), errors={"o": rows.OutputError(error=1e-3, limit=5e-3, budget=5e-3)}),
        "perf": perf(),
        "env": {"git_dirty": False},
        "cmd": "python -m loop bench kda --impl 000,005",
    }
    return rows.Row(**{**base, **change})


def test_round_trip(tmp_path):
    writer = rows.Writer(tmp_path / "kda", "000,005")
    wrote = [writer.write(make_row(arm=arm)) for arm in ("000", "005")]
    assert rows.read(tmp_path) == wrote
    assert len({row.row_id for row in wrote}) == 2


@pytest.mark.parametrize("status", [s for s in rows.Status.__args__ if s != "PASSED"])
def test_no_time_without_passing(status):
    with pytest.raises(ValidationError, match="cannot carry a time"):
        make_row(status=status, reason="x")
    assert make_row(status=status, reason="x", perf=None).perf is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"check": None}, "needs a check"),
        ({"check": rows.Check(ok=False)}, "needs a check"),
        ({"perf": None}, "needs case, mode, baseline and perf"),
        ({"case": None}, "needs case, mode, baseline and perf"),
        ({"status": "OOM", "perf": None}, "needs a reason"),
        ({"status": "FAST"}, "status"),
        ({"mode": "both"}, "mode"),
        ({"extra": 1}, "extra"),
    ],
)
def test_schema_refuses(change, message):
    with pytest.raises(ValidationError, match=message):
        make_row(**change)


def test_a_row_without_git_information_is_dirty():
    assert make_row(env={}).git_dirty
    assert make_row(env={"git_dirty": None}).git_dirty
    assert not make_row().git_dirty


def damaged(text, kind):
    raw = json.loads(text)
    if kind == "truncated":
        return text[: len(text) // 2]
    if kind == "foreign":
        return '{"latency_ms": 3}'
    if kind == "list":
        return "[1, 2]"
    if kind == "deep":
        return "[" * 100_000
    if kind in ("no time", "no number", "half a pair"):
        name, value = {"no time": ("ms", 0.0), "no number": ("ratio", float("nan"))}.get(kind, ("timer_note", "\ud800"))
        raw["perf"][name] = value
        raw["row_id"] = rows.content_id(raw)
    if kind == "newer":
        raw["schema_version"] = rows.SCHEMA + 1
    if kind == "edited":
        raw["perf"]["ms"] = 0.1
    if kind == "other fields":
        raw["surprise"] = 1
        raw["row_id"] = rows.content_id(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "not JSON"),
        ("foreign", "not a row"),
        ("list", "not a row"),
        ("newer", "schema 2 is newer"),
        ("edited", "edited after"),
        ("other fields", "surprise"),
        ("deep", "not JSON"),
        ("no time", r"perf\.ms: .*greater than 0"),
        ("no number", r"perf\.ratio: .*finite"),
        ("half a pair", "hex escape"),
    ],
)
def test_reader_skips_by_name(tmp_path, kind, message):
    good = rows.Writer(tmp_path, "good").write(make_row())
    bad = tmp_path / "bad.jsonl"
    bad.write_text(good.model_dump_json() + "\n" + damaged(good.model_dump_json(), kind) + "\n")
    with pytest.warns(rows.SkippedRows, match=rf"bad\.jsonl, line 2: skipped, .*{message}"):
        assert rows.read(tmp_path) == [good, good]


def test_reader_skips_a_binary_file(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.warns(rows.SkippedRows, match="x.jsonl"):
        assert rows.read(tmp_path) == []


def test_missing_folder_holds_no_rows(tmp_path):
    assert rows.read(tmp_path / "none") == []


def test_unwritable_folder_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        rows.Writer(tmp_path / "file" / "kda", "x")


def test_an_interrupted_writer_leaves_whole_rows(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from loop import rows\nfrom loop.tests.test_rows import make_row\n"
        "w = rows.Writer(sys.argv[1], 'x')\n"
        "while True: w.write(make_row())\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), os.getcwd()], cwd=os.getcwd())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(tmp_path.glob("*.jsonl")):
        time.sleep(0.05)
    time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(rows.read(tmp_path)) > 0


def test_a_thousand_rows_load_quickly(tmp_path):
    line = rows.seal(make_row()).model_dump_json() + "\n"
    for i in range(100):
        (tmp_path / f"{i}.jsonl").write_text(line * 10)
    start = time.perf_counter()
    assert len(rows.read(tmp_path)) == 1000
    assert time.perf_counter() - start < 2.0


def test_fla_beside_what_declined_is_no_success():
    fla, declined = make_row(arm="000"), make_row(arm="021", status="UNSUPPORTED", reason="needs K=128", perf=None)
    assert not rows.all_passed([fla, declined], ["000", "021"])
    assert not rows.all_passed([fla, declined], ["021"])
    assert rows.all_passed([fla], ["000"])
    assert rows.all_passed([fla, make_row(arm="021")], ["000", "021"])
    assert not rows.all_passed([make_row(arm="021"), make_row(arm="022", status="ERROR", reason="x", perf=None)])
