"""What changed since the accepted batch: an arm that moved, a machine that moved, and what only looks like either."""

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import batch, changes, nightly, registry, rows, run
from loop.batch import Done
from loop.run import RunResult
from loop.tests.test_rows import make_row, perf

GPU = "NVIDIA H200"


def row(ms=2.0, baseline_ms=3.0, spread=0.002, arm="005", device=GPU, **change):
    """A timed row whose blocks lie within `spread` of their medians."""
    ratio = baseline_ms / ms
    blocks = [tuple(x * (1 + spread * (i - 10) / 10) for i in range(21)) for x in (ms, baseline_ms)]
    times = perf(ms=ms, baseline_ms=baseline_ms, ratio=ratio, ci_low=ratio * (1 - spread), ci_high=ratio * (1 + spread),
                 block_ms=blocks[0], baseline_block_ms=blocks[1])  # fmt: skip
    return rows.seal(make_row(arm=arm, device=device, perf=times, **change))


def done(idea="005", status="PASSED", case="", found=(), message="why"):
    return Done(RunResult(idea, "r", status, message, 1.0, case=case, rows=list(found)), {})


def accepted(*results):
    return {(d.result.idea, d.result.case): d for d in results}


@pytest.mark.parametrize(("then", "now", "kind"), [
    pytest.param(row(2.0), row(1.8), "faster", id="the arm"),
    pytest.param(row(2.0), row(2.2), "slower", id="the arm, the other way"),
    pytest.param(row(2.0, 3.0), row(2.2, 3.3), "environment", id="both: a slower machine is no regression"),
    pytest.param(row(2.0, 3.0), row(1.8, 2.7), "environment", id="both: a faster machine is no win"),
    pytest.param(row(2.0, 3.0), row(2.0, 2.5), "environment", id="the baseline alone"),
    pytest.param(row(2.0), row(2.004), None, id="within the dead band"),
    pytest.param(row(2.0, spread=0.15), row(2.2, spread=0.15), None, id="within the noise of both"),
    pytest.param(row(2.0, device="cpu"), row(2.3, device="cpu"), None, id="a CPU's times say little"),
    pytest.param(row(2.0, device="cpu"), row(4.0, device="cpu"), "slower", id="but twice as long is twice as long"),
])  # fmt: skip
def test_a_time_moves_only_against_its_baseline(then, now, kind):
    found = changes.moved(then, now)
    assert (found.kind if found else None) == kind


def test_the_same_row_has_not_moved():
    one = row()
    assert changes.moved(one, one) is None


def test_a_change_says_where_and_how_much():
    found = changes.moved(row(2.0, 3.0), row(2.4, 3.0))
    assert str(found) == "slower  005  prod8192 fwdbwd against 000  ratio 1.500 to 1.250, 2.000 to 2.400 ms"
    assert "the baseline 3.000 to 3.600 ms" in changes.moved(row(2.0, 3.0), row(2.4, 3.6)).said


def test_statuses_that_changed(add_idea):
    then = accepted(done("005"), done("006", "ERROR"), done("007", case="tiny"), done("008", "UNSUPPORTED"))
    now = [done("005", "TIMEOUT"), done("006"), done("007", "IMPORT_ERROR"), done("008", "UNSUPPORTED"),
           done("009"), done("010", "ERROR")]  # fmt: skip
    assert [(c.kind, c.idea) for c in changes.compare(now, then)] == [
        ("broken", "005"), ("broken", "007"), ("fixed", "006"), ("new", "009"), ("new", "010"),
    ]  # fmt: skip
    assert changes.compare(now, {}) == []  # nothing to compare with


def test_stale_times(add_idea):
    folder = add_idea("005")
    add_idea("006", "other")
    sha = {name: registry.source_sha(name) for name in ("005", "006")}
    then = accepted(
        done("005", found=[row(code_sha=sha["005"]), row(code_sha=sha["005"], baseline="ship")]),
        done("006", found=[row(arm="006", code_sha="0" * 64)]),
        done("777", found=[row(arm="777")]),
    )
    found = changes.compare([done("005", found=[row(code_sha=sha["005"])])], then)
    assert [(c.kind, c.idea, c.said) for c in found] == [
        ("stale", "005", "no longer measured"),
        ("stale", "006", "its source has changed since that time"),
        ("stale", "777", "the idea is gone"),
    ]
    (folder / "kernel.py").write_text("boom")
    broken = changes.compare([done("005", "IMPORT_ERROR")], accepted(then["005", ""]))
    assert [(c.kind, c.idea) for c in broken] == [("broken", "005")]  # and not stale besides


def test_kinds_are_checked():
    assert changes.kinds("slower, stale") == ["slower", "stale"]
    assert changes.kinds("") == []
    with pytest.raises(ValueError, match="fail-on 'slow' is unknown \\(did you mean slower"):
        changes.kinds("slow")


@pytest.fixture
def night(add_idea, ladder_root, monkeypatch, capsys):
    """`night(ms, ...)`: a nightly whose one idea leaves a row of that time; (exit code, what was printed)."""
    add_idea("005")
    (ladder_root / "ideas/005-sum-heads/bench.ipynb").write_text("{}")
    monkeypatch.delenv("LOOP_RUN_ID", raising=False)
    monkeypatch.setattr("loop.rows.new_run_id", lambda n=iter(range(9)): f"b{next(n)}")
    left = {}

    def left_by(base, run_id):
        ms, status = left["it"]
        found = []
        if status == "PASSED":
            timed = row(ms, run_id=run_id, code_sha=registry.source_sha("005"))
            found = [rows.Writer(ladder_root / "bench_logs/kda", "x", run_id).write(timed)]
        return RunResult("005", run_id, status, "why", 1.0, rows=found)

    class Nothing:
        here = True

        def run(self, order, device):
            return "RUNNER_DIED", ""

    monkeypatch.setattr(run, "left_by", left_by)
    monkeypatch.setattr("loop.workers.executor", lambda *a: Nothing())

    def go(ms, status="PASSED", **kwargs):
        left["it"] = (ms, status)
        code = nightly.nightly(force=True, **kwargs)
        return code, capsys.readouterr().out

    return go


def test_a_nightly_is_compared_with_what_was_accepted(night, ladder_root):
    assert "slower" not in night(2.0)[1]  # b0: the first is accepted
    code, said = night(2.4)
    assert code == 0
    assert "slower  005  prod8192 fwdbwd against 000" in said
    code, said = night(2.4, fail_on="slower")  # b2: b1 was not accepted, so this is still slower
    assert code == 1
    assert "slower  005" in said
    text = (ladder_root / "out/nightly/b2/index.html").read_text()
    assert text.index("What changed") < text.index(">slower<") < text.index('id="leaderboard"')
    assert nightly.accept("b2") == 0
    assert "slower" not in night(2.4, fail_on="slower")[1]  # b3
    code, said = night(0.0, "TIMEOUT")
    assert code == 1
    assert "broken  005  TIMEOUT: why" in said
    assert [b.accepted for b in batch.earlier(ladder_root / "out")] == [True, False, True, True, False]
    with pytest.raises(ValueError, match="no batch 'b7'"):
        nightly.accept("b7")


def test_a_faster_night_says_so_and_is_accepted(night):
    night(2.0)
    assert "faster  005" in night(1.5, fail_on="slower")[1]
    assert "slower  005" in night(2.0)[1]
