"""The command line: exit codes, one-line errors, rows on disk, and what an interruption leaves."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from loop import __main__ as cli
from loop import execute, registry, rows
from loop.tests.test_rows import make_row

COMMANDS = [
    "new", "open", "ideas", "check", "bench", "firstcall", "span", "profile", "stages", "board", "promote", "demote",
    "drift", "run", "nightly", "demo", "test",
]  # fmt: skip


@pytest.fixture
def ladder(monkeypatch, capsys):
    """`ladder("board", "--json")` -> (exit code, stdout, stderr), in this process."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["ladder", *args])
        try:
            code = cli.main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


def test_every_command_has_help_and_is_listed():
    listed = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert listed == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(ladder, command):
    code, out, _ = ladder(command, "--help")
    assert code == 0
    assert "Usage" in out


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "loop", "--help"], cwd=registry.root(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "bench" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("bench kdb --impl 000", "family 'kdb' is unknown (did you mean kda?)"),
        ("bench cconv --impl 00 --case tiny", "no arm '00' in cconv"),
        ("bench cconv --impl 000 --case tinny", "case 'tinny' is unknown in cconv; closest: tiny"),
        ("bench cconv --impl 000 --mode fwdbd", "mode 'fwdbd' is unknown (did you mean fwdbwd"),
        ("bench cconv --impl , --case tiny", "give at least one name"),
        ("bench kda --impl 000 --baseline 007 --case tiny", "007-broken does not import: kernel.py:1: NameError"),
        ("check kda --impl 008", "no arm '008'"),
        ("firstcall cconv --impl 00 --case tiny", "no arm '00'"),
        ("promote 008", "no idea '008'"),
        ("run 008", "no idea '008'"),
        ("nightly --tier all", "tier 'all' is unknown; known: smoke, primary, full"),
        ("nightly --fail-on slow", "fail-on 'slow' is unknown (did you mean slower"),
        ("nightly --executor ssh", "executor 'ssh' is unknown; known: local, submitit"),
        ("nightly --accept b9", "no batch 'b9'"),
        ("nightly --accept=", "no batch ''"),
        ("check kda --impl 005+005 --case tiny", "arm '005+005': 005 would not run"),
        ("profile 008 --case tiny", "no idea '008'"),
        ("profile 005 --case tiny --out /dev/null/x", "cannot write to /dev/null/x: Not a directory; give another"),
        ("span 008 --case tiny", "no idea '008'"),
        ("stages kda --case tinny", "case 'tinny' is unknown in kda"),
        ("stages kda --case tiny --out /dev/null/x", "cannot write to /dev/null/x: Not a directory; give another"),
        ("board --family kdb", "family 'kdb' is unknown"),
        ("board --logs /nonexistent", "--logs /nonexistent: there is no such file or folder"),
        ("board --html --out /dev/null/x", "cannot write to /dev/null/x: Not a directory; give another"),
        ("nonsense", "No such command 'nonsense'; see"),
        ("new -5 x --family kda --span fwd.gate", "No such option: -5; see"),
        ("new 9 --family kda --span fwd.gate", "Missing argument 'slug'; see"),
        ("new 9 x --family kda", "Missing option '--span'; see"),
        ("run 007 --timeout 0", "Invalid value for '--timeout'"),
        ("run 007 --timeout soon", "Invalid value for '--timeout'"),
        ("nightly --timeout -4", "Invalid value for '--timeout'"),
        ("nightly --jobs 0", "jobs=0: at least 1"),
        ("new 9 Bad_Slug --family kda --span bwd.gva", "slug 'Bad_Slug'"),
    ],
)
def test_bad_input_gets_one_line_and_a_code(ladder, add_idea, args, message):
    add_idea()
    add_idea("007", "broken", "boom\n")
    code, out, err = ladder(*args.split())
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_one_seed_is_refused_before_anything_runs(ladder, tmp_path):
    code, out, err = ladder("check", "cconv", "--impl", "000", "--case", "tiny", "--seeds", "1", "--out", str(tmp_path))
    assert (code, out) == (2, "")
    assert "'--seeds'" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_stages_on_a_cpu_say_where_they_are(tmp_path):
    """In a process of its own: the profiler writes to stderr itself."""
    command = [sys.executable, "-m", "loop", "stages", "kda", "--case", "tiny_safe", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=registry.root(), capture_output=True, text=True, check=False)
    steps = r"\s*\d+\.\d s  stages of 000 on tiny_safe\n\s*\d+\.\d s  stages of ship on tiny_safe\n"
    assert done.returncode == 0
    assert torch.cuda.is_available() or re.fullmatch(steps, done.stderr), done.stderr
    assert done.stdout == f"{tmp_path}/stages-kda-tiny_safe.json\n"


def guarded(what: str) -> subprocess.CompletedProcess:
    """A command line that does `what`, in a process of its own."""
    code = f"import os; from loop import console; console.guarded(lambda **_: {what})"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=registry.root(), capture_output=True, text=True, check=False)


def test_code_that_ends_the_process_is_no_success():
    """Whatever exit code it chooses: sys.exit is met above, os._exit skips every handler."""
    done = guarded("os._exit(0)")
    assert done.returncode == 1
    assert done.stderr == "error: something that was run called os._exit(0), so the command did not come to its end\n"


def test_a_scheduler_that_ends_a_command_is_an_interrupt():
    done = guarded("os.kill(os.getpid(), 15)")
    assert "KeyboardInterrupt" in done.stderr, "which commands catch to say what is left"


def test_no_gpu_for_a_gpu_case(ladder, add_idea):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    add_idea()
    for args in (("bench", "cconv", "--impl", "000", "--case", "prod8192_qk"), ("profile", "005", "--case", "small")):
        code, _, err = ladder(*args)
        assert code == 2
        assert "needs a GPU" in err


def test_an_unwritable_output_folder(ladder, tmp_path):
    (tmp_path / "file").write_text("")
    for command in ("bench", "check", "firstcall"):
        code, _, err = ladder(
            command, "cconv", "--impl", "000", "--case", "tiny", "--out", str(tmp_path / "file" / "x")
        )
        assert code == 2
        assert "cannot write rows to" in err
        assert "--out" in err


def test_bench_writes_rows_and_board_reads_them(ladder, tmp_path):
    code, out, err = ladder(
        "bench",
        "cconv",
        "--impl",
        "000",
        "--case",
        "tiny,tiny_w2",
        "--mode",
        "fwd",
        "--blocks",
        "2",
        "--out",
        str(tmp_path),
    )
    assert code == 0, err
    assert "tiny_w2" in out
    assert "check 000" in err
    found = rows.read(tmp_path)
    assert [(r.case, r.mode, r.status) for r in found] == [("tiny", "fwd", "PASSED"), ("tiny_w2", "fwd", "PASSED")]
    assert len({r.run_id for r in found}) == 1
    code, out, _ = ladder("board", "--json", "--logs", str(tmp_path))
    assert code == 0
    assert {e["case"] for e in json.loads(out)} == {"tiny", "tiny_w2"}
    code, out, _ = ladder("board", "--logs", str(tmp_path))
    assert code == 0
    assert "not comparable with a GPU" in out


def test_check_writes_rows(ladder, tmp_path):
    code, out, _ = ladder("check", "cconv", "--impl", "000", "--case", "tiny_w3", "--out", str(tmp_path))
    assert code == 0
    assert "PASSED" in out
    (row,) = rows.read(tmp_path)
    assert (row.kind, row.status, row.perf) == ("check", "PASSED", None)
    assert row.check.proofs


def test_firstcall_in_a_fresh_process(ladder, tmp_path):
    code, out, err = ladder("firstcall", "cconv", "--impl", "000", "--case", "tiny", "--out", str(tmp_path))
    assert code == 0, err
    (row,) = rows.read(tmp_path)
    assert row.firstcall.fwdbwd_s >= row.firstcall.fwd_s > 0
    assert row.firstcall.cached_fwdbwd_s >= row.firstcall.cached_fwd_s > 0
    assert row.check.ok
    assert "tiny" in out


def test_failures_are_rows_and_the_code_is_1(ladder, add_idea, tmp_path):
    from loop.tests.conftest import GOOD_KERNEL

    add_idea(source=GOOD_KERNEL.replace("group).sum(3)}", "group).sum(3) * 1.5}"))
    code, out, _ = ladder(
        "bench", "kda", "--impl", "005", "--case", "tiny", "--mode", "bwd", "--blocks", "1", "--out", str(tmp_path)
    )
    assert code == 1
    assert "WRONG_VALUE" in out
    base, bad = rows.read(tmp_path)
    assert (base.status, bad.status, bad.perf) == ("PASSED", "WRONG_VALUE", None)


def test_a_baseline_that_passes_beside_an_arm_that_declined_is_no_success(ladder, add_idea, tmp_path):
    from loop.tests.conftest import GOOD_KERNEL

    add_idea(source=GOOD_KERNEL.replace("p.K <= 256", "p.K > 256"))
    for impl in ("005", "000,005"):
        flags = ("--case", "tiny", "--mode", "fwd", "--blocks", "1", "--out", str(tmp_path / impl))
        code, out, err = ladder("bench", "kda", "--impl", impl, *flags)
        assert code == 1, err
        assert "UNSUPPORTED" in out
        assert [r.status for r in rows.read(tmp_path / impl)] == ["PASSED", "UNSUPPORTED"]


def test_fla_itself_has_no_span_and_no_profile(ladder, ladder_root):
    (ladder_root / "ideas/000-fla").mkdir()
    for command in ("span", "profile"):
        code, out, err = ladder(command, "000", "--case", "tiny")
        assert (code, out) == (2, "")
        assert err.endswith("error: ideas/000-fla is fla itself and has no kernel\n")


def test_an_unknown_arm_is_answered_without_loading_a_kernel(ladder, add_idea, monkeypatch):
    add_idea()
    monkeypatch.setattr(registry, "load", lambda idea: pytest.fail(f"loaded {idea}"))
    code, _, err = ladder("check", "kda", "--impl", "006", "--case", "tiny")
    assert code == 2
    assert "did you mean 005" in err


def test_a_command_that_takes_long_says_what_it_does(ladder, add_idea, monkeypatch):
    from loop import console

    add_idea()
    assert ladder("ideas")[2] == ""
    monkeypatch.setattr(console, "PATIENCE", 0.0)
    real = registry.all_ideas
    monkeypatch.setattr(registry, "all_ideas", lambda *names: time.sleep(0.2) or real(*names))
    assert ladder("ideas")[2] == "loading every kernel\n"


@pytest.mark.parametrize("command", ["check", "bench", "firstcall"])
def test_a_kernel_that_exits_is_no_success(ladder, add_idea, tmp_path, command):
    from loop.tests.conftest import GOOD_KERNEL

    add_idea(source=GOOD_KERNEL.replace("    group =", "    raise SystemExit(0)\n    group ="))
    flags = ("--mode", "bwd", "--blocks", "1") if command == "bench" else ()
    code, _, err = ladder(command, "kda", "--impl", "005", "--case", "tiny", "--out", str(tmp_path), *flags)
    assert code == 1, err
    (row,) = [r for r in rows.read(tmp_path) if r.arm == "005"]
    assert row.status == ("KERNEL_DIED" if command == "firstcall" else "ERROR")
    assert ("SystemExit: 0" if command != "firstcall" else "ended with code 0") in row.reason


def test_an_exit_from_below_a_command_is_no_success(ladder, monkeypatch):
    from loop import registry

    monkeypatch.setattr(registry, "all_ideas", lambda: sys.exit(0))
    code, _, err = ladder("ideas")
    assert code == 1
    assert err == "error: something that was run called sys.exit(0), so the command did not come to its end\n"


def test_a_reader_that_has_read_enough_is_told_nothing(add_idea, ladder_root):
    rows.Writer(ladder_root / "bench_logs/kda", "x", "r1").write(make_row())
    command = f"{sys.executable} -m loop board | true; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": execute.python_path()}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_without_a_command_the_help_is_shown(ladder):
    code, out, err = ladder()
    assert code == 2
    assert "nightly" in out + err


def test_a_full_disk_is_one_line(ladder, monkeypatch):
    import errno

    from loop import registry

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry, "all_ideas", full)
    assert ladder("ideas") == (2, "", "error: No space left on device; free some, or give another folder with --out\n")


@pytest.mark.parametrize("command", ["check", "bench"])
def test_an_idea_that_does_not_import_is_a_row_and_the_others_run(ladder, add_idea, tmp_path, command):
    add_idea("007", "broken", "boom\n")
    flags = ("--mode", "fwd", "--blocks", "1") if command == "bench" else ()
    args = ("cconv", "--impl", "007,000", "--case", "tiny", "--out", str(tmp_path), *flags)
    code, out, err = ladder(command, *args)
    assert code == 1, err
    assert "NameError" in out
    found = {r.arm: r for r in rows.read(tmp_path)}
    assert {name: r.status for name, r in found.items()} == {"007": "IMPORT_ERROR", "000": "PASSED"}
    assert "007-broken does not import: kernel.py:1: NameError" in found["007"].reason
    assert found["007"].code_sha == registry.source_sha("007")
    assert (found["007"].kind, found["007"].case) == (command, "tiny")


def test_an_interruption_leaves_complete_rows(ladder, tmp_path, monkeypatch):
    from loop import bench

    real, calls = bench.bench, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(bench, "bench", interrupted)
    code, _, err = ladder(
        "bench",
        "cconv",
        "--impl",
        "000",
        "--case",
        "tiny",
        "--mode",
        "fwd,bwd",
        "--blocks",
        "1",
        "--out",
        str(tmp_path),
    )
    assert code == 130
    assert "complete" in err
    assert [r.mode for r in rows.read(tmp_path)] == ["fwd"]


def test_refused_promotion_lists_what_is_missing(ladder, add_idea):
    add_idea()
    code, out, err = ladder("promote", "005")
    assert code == 2
    assert "no row of 005 against 000" in err
    assert "profiles/005-sum-heads*.md is not there" in err
    assert not out


def test_drift_and_ideas(ladder, add_idea):
    add_idea("007", "broken", "boom\n")
    assert ladder("drift")[:2] == (0, "nothing is promoted yet\n")
    code, out, _ = ladder("ideas")
    assert code == 0
    assert "NameError" in out


def test_unreadable_rows_warn_by_name(ladder, tmp_path):
    (tmp_path / "a.jsonl").write_text(rows.seal(make_row()).model_dump_json()[:50])
    with pytest.warns(rows.SkippedRows, match=r"a\.jsonl, line 1: skipped, not JSON"):
        code, _, _ = ladder("board", "--logs", str(tmp_path))
    assert code == 0


def test_the_page_of_the_ladder_is_made_from_the_rows_alone(ladder, add_idea, ladder_root, monkeypatch):
    add_idea()
    monkeypatch.chdir(ladder_root)
    rows.Writer(ladder_root / "bench_logs/kda", "x", "r1").write(make_row())
    code, out, _ = ladder("board", "--html")
    assert (code, out) == (0, "out/board/index.html\n")
    text = (ladder_root / "out/board/index.html").read_text()
    assert "1.500" in text
    assert (ladder_root / "out/board/ideas/005-sum-heads.html").exists()
    assert ladder("board", "--html", "--out", "elsewhere")[1] == "elsewhere/index.html\n"
