"""Promotion: refused with the reason for each thing that is missing, byte-identical when granted, and drift seen
afterwards.
"""

import ast
import hashlib
import subprocess
from pathlib import Path

import pytest

from loop import drift, env, promote, registry, rows, sources
from loop.tests.conftest import GOOD_KERNEL
from loop.tests.test_rows import make_row, perf


def git(root, *args):
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *args],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def idea(ladder_root, add_idea):
    """A committed idea with its texts, and an empty package around it."""
    add_idea()
    (ladder_root / "profiles").mkdir()
    (ladder_root / "profiles" / "005-sum-heads-prod8192.md").write_text("# p\n\n## Reading\n\nBytes.\n\n## Kernels\n")
    for family in registry.FAMILIES:
        folder = sources.package_family(family)
        (folder / "stages").mkdir(parents=True)
        (folder / "stages" / "__init__.py").write_text("")
        (folder / "_provenance.py").write_text(promote.provenance([]))
    git(ladder_root, "init", "-q")
    git(ladder_root, "add", ".")
    git(ladder_root, "commit", "-q", "-m", "x")
    return ladder_root


@pytest.fixture
def good(idea):
    """A row that speaks for the idea."""
    commit = git(idea, "rev-parse", "HEAD")
    facts = {"git_dirty": False, "git_commit": commit, "versions": env.versions()}

    def make(**change):
        return rows.seal(make_row(**{"code_sha": registry.source_sha("005"), "env": facts, **change}))

    return make


def refusal(found):
    with pytest.raises(promote.Refused) as caught:
        promote.promote("005", found)
    return str(caught.value)


def test_promotes_byte_for_byte_with_its_evidence(idea, good):
    row = good()
    entry = promote.promote("005", [row])
    copy = sources.package_family("kda") / "stages" / "k005_sum_heads.py"
    assert copy.read_bytes() == (idea / "ideas" / "005-sum-heads" / "kernel.py").read_bytes()
    (shipped,) = sources.shipped("kda")
    assert shipped.module == "k005_sum_heads"
    assert shipped.sha256 == hashlib.sha256(copy.read_bytes()).hexdigest() == entry["sha256"]
    assert shipped.rows == (row.row_id,)
    assert shipped.spans == ("bwd.gva",)
    assert shipped.commit == row.env["git_commit"]
    assert shipped.evidence == ("prod8192 fwdbwd on NVIDIA H200: 1.500x 000 (1.490 to 1.510), 2.000 ms",)
    assert registry.front_matter(idea / "ideas" / "005-sum-heads")["status"] == "promoted"
    assert drift.drift([row]) == [{"family": "kda", "idea": "005-sum-heads", "module": "k005_sum_heads", "moved": []}]
    assert not list(idea.rglob(".*.py.*"))  # no temporary file is left


@pytest.fixture
def second(idea, add_idea):
    """Add and commit idea 006, a kernel of its own; returns what its rows say that differs from 005's."""

    def make(kernel=GOOD_KERNEL):
        add_idea("006", "again", kernel + "# 006\n")
        (idea / "profiles" / "006-again.md").write_text("## Reading\n\nBytes.\n")
        git(idea, "add", ".")
        git(idea, "commit", "-q", "-m", "y")
        facts = {"git_dirty": False, "git_commit": git(idea, "rev-parse", "HEAD"), "versions": env.versions()}
        return {"arm": "006", "code_sha": registry.source_sha("006"), "env": facts}

    return make


def test_the_newest_promotion_comes_first_and_a_repeat_replaces(good, second):
    promote.promote("005", [good()])
    about = second()
    both = [good(**about), good(baseline="ship", **about)]
    promote.promote("006", both)
    assert [s.idea for s in sources.shipped("kda")] == ["006-again", "005-sum-heads"]
    promote.promote("006", both)
    assert [s.idea for s in sources.shipped("kda")] == ["006-again", "005-sum-heads"]


def test_what_takes_a_promoted_kernels_place_must_beat_the_package(good, second):
    promote.promote("005", [good()])
    with pytest.raises(promote.Refused, match="no row of 006 against ship"):
        promote.promote("006", [good(**second())])


def test_rows_against_a_package_that_is_no_more_promote_nothing(good, second):
    """They say nothing of the kernel whose place it would take now."""
    mine = [good(), good(baseline="ship")]
    promote.promote("005", mine)
    about = second()
    promote.promote("006", [good(**about), good(baseline="ship", **about)])
    message = refusal(mine)
    assert "was measured before k006_again shipped, whose place it would take; run: ./ladder bench" in message
    assert [s.idea for s in sources.shipped("kda")] == ["006-again", "005-sum-heads"]


@pytest.mark.parametrize(("ci_low", "enough"), [(0.995, True), (0.985, False)])
def test_as_fast_as_the_package_is_enough_with_a_reason(good, second, ci_low, enough):
    promote.promote("005", [good()])
    about = second()
    against = good(**about, baseline="ship", perf=perf(verdict="SAME", ratio=1.0, ci_low=ci_low))
    found = [good(**about), against]
    with pytest.raises(promote.Refused, match="is SAME, not FASTER"):
        promote.promote("006", found)
    if enough:
        assert promote.promote("006", found, as_fast="dq is exact")["evidence"][-1] == "dq is exact"
    else:
        with pytest.raises(promote.Refused, match="is SAME, not FASTER"):
            promote.promote("006", found, as_fast="dq is exact")


def test_what_it_serves_only_beside_is_recorded_and_stays(good, second):
    promote.promote("005", [good()])
    about = second(GOOD_KERNEL.replace("bwd.gva", "bwd.cumsum"))
    assert promote.promote("006", [good(**about)], beside=["005"])["beside"] == ("k005_sum_heads",)
    promote.promote("005", [good()])
    promote.promote("006", [good(**about)])
    assert {s.idea: s.beside for s in sources.shipped("kda")} == {"005-sum-heads": (), "006-again": ("k005_sum_heads",)}
    with pytest.raises(promote.Refused, match="of another family, or itself"):
        promote.promote("005", [good()], beside=["005"])


def test_as_fast_means_nowhere_slower(good, second):
    promote.promote("005", [good()])
    about = second()
    same, slow = ({"verdict": v, "ratio": r, "ci_low": r} for v, r in (("SAME", 0.995), ("SLOWER", 0.8)))
    found = [good(**about), good(**about, baseline="ship", perf=perf(**same))]
    found.append(good(**about, baseline="ship", case="small", perf=perf(**slow)))
    with pytest.raises(promote.Refused, match=r"small.* is SLOWER"):
        promote.promote("006", found, as_fast="dq is exact")


def test_a_reason_is_one_line(good):
    with pytest.raises(promote.Refused, match="has 101 characters, at most 100"):
        promote.promote("005", [good()], as_fast="x" * 101)


def test_a_reason_does_not_stand_in_for_being_faster_than_fla(good):
    same = good(perf=perf(verdict="SAME", ratio=1.0, ci_low=0.995))
    with pytest.raises(promote.Refused, match="is SAME, not FASTER"):
        promote.promote("005", [same], as_fast="dq is exact")


def test_another_stage_need_not_beat_the_package(good, second):
    promote.promote("005", [good()])
    about = second(GOOD_KERNEL.replace("bwd.gva", "bwd.cumsum"))
    promote.promote("006", [good(**about)])
    assert [s.spans for s in sources.shipped("kda")] == [("bwd.cumsum",), ("bwd.gva",)]
    promote.promote("005", [good()])  # the same kernel with newer evidence keeps its place
    assert [s.spans for s in sources.shipped("kda")] == [("bwd.cumsum",), ("bwd.gva",)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no row of 005 against 000 in fwdbwd or bwd"),
        ({"arm": "006"}, "no row of 005 against 000"),
        ({"mode": "fwd"}, "no row of 005 against 000"),
        ({"device": "cpu"}, "a CPU row promotes nothing"),
        ({"status": "WRONG_VALUE", "reason": "dq: 0.1", "perf": None}, "did not pass: WRONG_VALUE: dq: 0.1"),
        ({"perf": perf(verdict="SAME", ratio=1.001)}, "is SAME, not FASTER"),
        ({"perf": perf(verdict="UNCLEAR")}, "is UNCLEAR, not FASTER"),
        (
            {"code_sha": "cd" * 32},
            "hash moved: the rows of 005 against 000 in fwdbwd or bwd are of kernel.py cdcdcdcdcdcd, which is now",
        ),
    ],
)
def test_refuses_and_says_what_is_missing(good, change, message):
    assert message in refusal([] if change is None else [good(**change)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"git_dirty": True}, "dirty tree"),
        ({"git_dirty": None}, "dirty tree"),
        ({"git_commit": "00" * 20}, "this repository finds no ideas/005-sum-heads/kernel.py"),
        ({"git_commit": None}, "this repository finds no"),
    ],
)
def test_refuses_what_git_does_not_confirm(good, change, message):
    assert message in refusal([good(env={**good().env, **change})])


def test_refuses_a_clean_claim_about_another_file(idea, good):
    claimed = good().env
    (idea / "ideas" / "005-sum-heads" / "kernel.py").write_text(GOOD_KERNEL + "# edited, measured, never committed\n")
    assert "whose kernel.py is another one: the tree was dirty" in refusal([good(env=claimed)])


def test_a_newer_failure_at_the_same_hash_counts(good):
    old, bad = good(), good(utc="2026-01-02T00:00:00Z", status="NON_FINITE", reason="o", perf=None)
    assert "did not pass: NON_FINITE" in refusal([old, bad])


@pytest.mark.parametrize("kind", ["check", "bench"])
def test_a_failure_at_another_case_counts_until_it_passes_there(good, kind):
    what = {"kind": kind, "mode": None, "baseline": None} if kind == "check" else {}
    bad = good(case="gva", status="WRONG_VALUE", reason="dg is off", perf=None, **what)
    assert f"row {bad.row_id} is the newest at gva, and did not pass: WRONG_VALUE: dg is off" in refusal([good(), bad])
    of_before = good(case="gva", status="WRONG_VALUE", reason="dg is off", perf=None, code_sha="ab" * 32, **what)
    passed = good(case="gva", kind="check", mode=None, baseline=None, perf=None)
    assert promote.promote("005", [good(), of_before, bad, passed])["rows"]


def test_one_good_case_is_enough_and_only_good_rows_are_cited(good):
    row, slow = good(), good(case="small", perf=perf(verdict="SLOWER", ratio=0.9))
    assert promote.promote("005", [row, slow])["rows"] == (row.row_id,)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("ideas/005-sum-heads/IDEA.md", None, "IDEA.md is not there"),
        ("ideas/005-sum-heads/IDEA.md", "## Hypothesis\n\nx\n", "nothing under '## Outcome'"),
        (
            "ideas/005-sum-heads/IDEA.md",
            "## Hypothesis\n\nWritten before the first timed run\n## Outcome\n\nx\n",
            "nothing under '## Hypothesis'",
        ),
        ("profiles/005-sum-heads-prod8192.md", None, "profiles/005-sum-heads*.md is not there"),
        (
            "profiles/005-sum-heads-prod8192.md",
            "## Reading\n\n<!-- say -->\n\n## Kernels\n",
            "nothing under '## Reading'",
        ),
    ],
)
def test_refuses_without_the_words(idea, good, path, text, message):
    file = idea / path
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert message in refusal([good()])
    assert sources.shipped("kda") == ()


def test_refuses_a_broken_idea_and_the_baseline(idea, good, add_idea):
    row = good()
    add_idea(source="boom\n")
    assert "NameError" in refusal([row])
    (idea / "ideas" / "000-fla").mkdir()
    with pytest.raises(promote.Refused, match="fla itself"):
        promote.promote("000", [])


def test_an_interruption_leaves_the_package_as_it_was(idea, good, monkeypatch):
    real = promote.os.replace

    def fail(src, dst):
        if str(dst).endswith("_provenance.py"):
            raise KeyboardInterrupt
        real(src, dst)

    monkeypatch.setattr(promote.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        promote.promote("005", [good()])
    assert sources.shipped("kda") == ()
    moved = drift.drift([])
    assert moved == [
        {
            "family": "kda",
            "idea": "",
            "module": "k005_sum_heads",
            "moved": ["is in stages/, but _provenance.py does not list it"],
        }
    ]


def test_drift_sees_every_side(idea, good, monkeypatch):
    row = good()
    promote.promote("005", [row])
    copy = sources.package_family("kda") / "stages" / "k005_sum_heads.py"
    copy.write_text(copy.read_text() + "# fixed in place\n")
    (idea / "ideas" / "005-sum-heads" / "kernel.py").write_text(GOOD_KERNEL + "# tried something\n")
    (item,) = drift.drift([])
    assert len(item["moved"]) == 3
    assert "the shipped copy is" in item["moved"][0]
    assert "the idea's kernel.py is" in item["moved"][1]
    assert item["moved"][2] == f"row {row.row_id} is not in bench_logs"
    copy.unlink()
    other = make_row(**{**row.model_dump(), "env": {"versions": {"fla": "0.5.2"}}})
    (item,) = drift.drift([other])
    assert "the shipped copy is gone" in item["moved"]
    assert any("measured with fla 0.5.2" in m for m in item["moved"])


def test_what_this_repository_ships_is_what_was_promoted():
    """The shipped file, the recorded hash and the idea's file agree, and the evidence is in bench_logs."""
    for family in registry.FAMILIES:
        for s in sources.shipped(family):
            copy = sources.package_family(family) / "stages" / f"{s.module}.py"
            for path in (copy, registry.root() / s.source):
                assert hashlib.sha256(path.read_bytes()).hexdigest() == s.sha256, (
                    f"{path} is not what was promoted: fixes go into a new idea"
                )
    recorded = {row.row_id for row in rows.read(registry.root() / "bench_logs")}
    cited = {row_id for family in registry.FAMILIES for s in sources.shipped(family) for row_id in s.rows}
    assert cited <= recorded
    assert not [item for item in drift.drift() if not item["idea"]]


def test_what_an_idea_builds_on_must_be_promoted(idea, good):
    kernel = idea / "ideas" / "005-sum-heads" / "kernel.py"
    nested = "\n\ndef _scan():\n    from kernel_fun.kda.stages.k003_other import scan\n    return scan\n"
    kernel.write_text(kernel.read_text() + nested)
    git(idea, "commit", "-qam", "x")
    assert "kernel.py imports k003_other, which is not promoted" in refusal([good()])


def imported(path, package):
    """The files of `package` that the module at `path` imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = path.parents[node.level - 1] if node.level else package.parent
        base = base.joinpath(*(node.module or "").split("."))
        found = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
        yield from (file for file in found if file.is_relative_to(package) and file.exists())


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_the_hash_of_what_ships_covers_all_that_a_call_runs(family):
    package = Path(sources.__file__).parents[1] / "package" / "src" / "kernel_fun"
    todo = [package / family / "ops.py", *(package / family / "stages").glob("*.py")]
    seen = set()
    while todo:
        if (path := todo.pop()) not in seen:
            seen.add(path)
            todo += imported(path, package)
    left_out = seen - set(sources.ship_files(family))
    assert {path.name for path in left_out} <= {"reference.py", "warming.py", "__init__.py"}  # CPU, and warmup
    assert len(seen) > 15


def test_the_hash_of_what_ships_covers_which_kernel_is_preferred_to_which(ladder_root):
    path = sources.package_family("kda") / "_provenance.py"
    path.parent.mkdir(parents=True)
    facts = {"idea": "", "spans": (), "source": "", "sha256": "", "commit": "", "rows": (), "evidence": ()}
    one, other = {"module": "k001_one", **facts}, {"module": "k002_other", **facts}

    def digest(*entries):
        path.write_bytes(promote.provenance(entries).encode())
        return sources.ship("kda")

    listed = digest(one, other)
    assert digest({**one, "evidence": ("what it was promoted on",)}, other) == listed, "evidence runs nothing"
    assert len({listed, digest(other, one), digest(one), digest(one, {**other, "beside": ("k001_one",)})}) == 4


def test_drift_names_what_a_killed_promotion_left(idea, good):
    promote.promote("005", [good()])
    folder = sources.package_family("kda")
    for path in (folder / "stages" / ".k005_sum_heads.py.ab12", folder / "._provenance.py.cd34"):
        path.write_text("half")
        left = [item for item in drift.drift([good()]) if "killed" in str(item["moved"])]
        assert [item["module"] for item in left] == [path.name]
        path.unlink()
