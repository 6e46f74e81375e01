"""The leaderboard: the newest row speaks, failures hide older times, stale times say so, and the JSON has exactly its
keys.
"""

import json

import pytest

from loop import board, registry, rows, sources
from loop.tests.test_rows import make_row, perf

# as the interface promises them, in order
PROMISED = [
    "family", "case", "mode", "arm", "baseline", "ratio", "ci_low", "ci_high", "ms", "baseline_ms", "floor_ms",
    "peak_bytes", "baseline_peak_bytes", "device", "row_id", "code_sha", "stale",
]  # fmt: skip


def sealed(**change):
    return rows.seal(make_row(**change))


def test_json_has_exactly_the_promised_keys(add_idea):
    add_idea()
    (entry,) = board.entries([sealed(code_sha=registry.source_sha("005"))])
    assert list(entry) == PROMISED
    assert json.loads(json.dumps(entry)) == entry
    assert entry["stale"] is False
    assert (entry["ratio"], entry["ms"], entry["baseline_ms"]) == (1.5, 2.0, 3.0)


def test_stale_follows_the_source(add_idea):
    folder = add_idea()
    row = sealed(code_sha=registry.source_sha("005"))
    assert not board.is_stale(row)
    with (folder / "kernel.py").open("a") as f:
        f.write("# edited\n")
    assert board.is_stale(row)


def test_a_row_of_a_vanished_idea_is_stale(ladder_root):
    (ladder_root / "ideas").mkdir(exist_ok=True)
    assert board.is_stale(sealed(arm="777"))


def test_the_baselines_sha_is_flas_version():
    assert not board.is_stale(sealed(arm="000", code_sha=sources.arm("kda", "000")))
    assert board.is_stale(sealed(arm="000", code_sha="00"))


def test_the_newest_row_of_each_place_speaks(ladder_root):
    old = sealed(utc="2026-01-01T00:00:00Z", perf=perf(ratio=1.4))
    new = sealed(utc="2026-01-02T00:00:00Z")
    other = [sealed(mode="fwd"), sealed(device="NVIDIA B200"), sealed(baseline="ship"), sealed(case="small")]
    got = board.entries([old, *other, new])
    assert len(got) == 5
    assert old.row_id not in {e["row_id"] for e in got}


def test_a_newer_failure_hides_the_time_and_is_listed(ladder_root):
    old = sealed(utc="2026-01-01T00:00:00Z")
    bad = sealed(utc="2026-01-02T00:00:00Z", status="WRONG_VALUE", reason="dq 0.1", perf=None)
    assert board.entries([old, bad]) == []
    assert board.failures([old, bad]) == [bad]


def test_fastest_first_within_a_case(ladder_root):
    found = [sealed(arm=a, perf=perf(ratio=r)) for a, r in (("000", 1.0), ("007", 2.0), ("005", 1.5))]
    assert [e["arm"] for e in board.entries(found)] == ["007", "005", "000"]


def test_tables_show_the_share_of_the_floor_and_the_failures(add_idea, capsys):
    from rich.console import Console

    add_idea()
    good = sealed(code_sha=registry.source_sha("005"))
    bad = sealed(case="small", status="OOM", reason="out of memory", perf=None)
    console = Console(width=220)
    for table in board.tables([good, bad]):
        console.print(table)
    out = capsys.readouterr().out
    assert "50 %" in out
    assert "1.490 to 1.510" in out
    assert good.row_id in out
    assert "out of memory" in out
    assert "(stale)" not in out


def test_a_row_says_which_tree_it_is_of_and_who_says_so(add_idea, capsys):
    from rich.console import Console

    add_idea()
    commit = "0123456789" * 4
    told = {"git_commit": commit, "git_dirty": False, "git_source": "environment"}
    said = {
        "0123456": told | {"git_source": "git"},
        "0123456 dirty": told | {"git_source": "git", "git_dirty": True},
        "0123456 (from environment)": told,
        "0123456 (unknown source)": {"git_commit": commit},
        "unknown": {"git_commit": None, "git_dirty": None, "git_source": "unknown"},
    }
    assert [board.tree(sealed(env=env)) for env in said.values()] == [*said]
    Console(width=220).print(*board.tables([sealed(env=told)]))
    assert "0123456 (from environment)" in capsys.readouterr().out


def test_checks_and_runs_are_not_on_the_board(ladder_root):
    check = sealed(kind="check", mode=None, baseline=None, perf=None)
    assert board.newest([check]) == []


def test_a_failed_check_of_the_same_source_hides_its_times(add_idea, capsys):
    from rich.console import Console

    add_idea()
    times = [sealed(), sealed(mode="bwd"), sealed(case="small")]
    facts = {"kind": "check", "mode": None, "baseline": None, "perf": None}
    wrong = sealed(**facts, status="WRONG_VALUE", reason="dg is off")
    assert [e["case"] for e in board.entries([*times, wrong])] == ["small"]
    assert board.failures([*times, wrong]) == [wrong]
    Console(width=220).print(*board.tables([*times, wrong]))
    assert capsys.readouterr().out.count("dg is off") == 1
    for cleared in (sealed(**facts), times[0]):
        assert len(board.entries([*times, wrong, cleared])) == 3
    for other in ({"code_sha": "cd" * 32}, {"case": "gva"}, {"arm": "ship"}, {"device": "cpu"}):
        assert len(board.entries([*times, sealed(**facts | other, status="WRONG_VALUE", reason="x")])) == 3


@pytest.mark.parametrize("width", [80, 100, 149])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_numbers(add_idea, capsys, width):
    from rich.console import Console

    add_idea()
    Console(width=width).print(*board.tables([sealed(case="prod8192_gate_b8", arm="kernel_fun-0.2.0")], width=width))
    out = capsys.readouterr().out
    assert "…" not in out
    assert {"prod8192_gate_b8", "FASTER"} <= set(out.split())


def test_a_thousand_places_are_listed_quickly(add_idea):
    import time

    add_idea()
    found = [make_row(case=f"c{i}", arm=a, row_id=f"{i}{a}") for i in range(250) for a in ("000", "ship", "005", "006")]
    start = time.perf_counter()
    assert len(board.entries(found)) == 1000
    assert time.perf_counter() - start < 2.0


def test_a_row_of_the_present_source_is_not_hidden_by_a_stale_one(add_idea):
    add_idea()
    present = sealed(utc="2026-01-01T00:00:00Z", code_sha=registry.source_sha("005"))
    older_tree = sealed(utc="2026-01-02T00:00:00Z", code_sha="ab" * 32)
    assert [e["row_id"] for e in board.entries([present, older_tree])] == [present.row_id]
    assert [e["row_id"] for e in board.entries([older_tree])] == [older_tree.row_id]
