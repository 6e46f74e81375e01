"""Ideas are found also while broken, loaded as they are now, and refused in one line that says why."""

import inspect
import os
import re

import pytest

from loop import registry
from loop.tests.conftest import GOOD_KERNEL


def test_loads_and_lists(add_idea):
    add_idea()
    module = registry.load("005")
    assert module.FAMILY == "kda"
    assert inspect.getsource(module.run).startswith("def run(")
    (idea,) = registry.all_ideas()
    assert (idea.name, idea.family, idea.spans, idea.error) == ("005-sum-heads", "kda", ("bwd.gva",), None)
    assert registry.load("005-sum-heads") is module
    assert registry.lint("005") == []


def test_an_edit_is_picked_up_even_with_an_unchanged_clock_and_size(add_idea):
    folder = add_idea(source=GOOD_KERNEL + "VALUE = 1\n")
    path = folder / "kernel.py"
    stamp = path.stat().st_mtime_ns
    first, sha = registry.load("005"), registry.source_sha("005")
    assert registry.load("005") is first
    path.write_text(GOOD_KERNEL + "VALUE = 2\n")
    os.utime(path, ns=(stamp, stamp))
    second = registry.load("005")
    assert (first.VALUE, second.VALUE) == (1, 2)
    assert first.__name__ != second.__name__
    assert registry.source_sha("005") != sha
    assert sha[:12] in first.__name__


def test_a_triton_kernel_of_an_edited_file_has_the_new_source(add_idea):
    source = GOOD_KERNEL + "import triton\n\n\n@triton.jit\ndef kernel(x):\n    BODY\n"
    folder = add_idea(source=source.replace("BODY", "return x + 1"))
    assert "x + 1" in inspect.getsource(registry.load("005").kernel.fn)
    (folder / "kernel.py").write_text(source.replace("BODY", "return x + 2"))
    assert "x + 2" in inspect.getsource(registry.load("005").kernel.fn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("import torch\n", "import numpy\n"), r"kernel.py:\d+: imports numpy"),
        (("import torch\n", "from kernel_fun.kda import ops\n"), "imports kernel_fun.kda"),
        (("import torch\n", "from kernel_fun import kda\n"), "imports kernel_fun.kda"),
        (("import torch\n", "from . import x\n"), "imports \\."),
        (("import torch\n", "from __future__ import annotations\n"), "__future__"),
        (("import torch\n", "import triton\n@triton.autotune([], [])\ndef f(): pass\n"), "autotuner"),
        (("import torch\n", "import torch\n1 / 0\n"), r"does not import: kernel.py:\d+: ZeroDivisionError"),
        (("import torch\n", "def\n"), r"kernel.py:\d+: SyntaxError"),
        (('FAMILY = "kda"', 'FAMILY = "gdn"'), "FAMILY='gdn'; accepted are 'kda', 'cconv'"),
        (("def supports", "def support"), r"no supports\(p\)"),
        (('{"bwd.gva": run}', "{}"), "SPANS={}"),
        (('{"bwd.gva": run}', '{"bwd.gvb": run}'), "no stage 'bwd.gvb'"),
        (('{"bwd.gva": run}', '{"fwd.out..bwd.regate": run}'), "crosses from one pass"),
        (('{"bwd.gva": run}', '{"bwd.gva": run, "bwd.intra..bwd.gva": run}'), "both hold bwd.gva"),
        (("run(*, dq,", "run(dq, *,"), "by position"),
        (("run(*, dq, dk, p)", "run(*, dq, dkk, p)"), r"reads 'dkk', which the chain does not have \(did you mean"),
        (
            ('SPANS = {"bwd.gva": run}', 'SPANS = {"bwd.gva": run}\nWRITES = {"bwd.gva": ("dz",)}'),
            "WRITES names tensor 'dz'",
        ),
    ],
)
def test_broken_ideas_are_listed_with_one_line(add_idea, change, message):
    assert change[0] in GOOD_KERNEL
    add_idea(source=GOOD_KERNEL.replace(*change))
    with pytest.raises(registry.IdeaError, match=message):
        registry.load("005")
    (idea,) = registry.all_ideas()
    assert idea.family == "kda"
    assert "\n" not in idea.error


def test_allowed_imports(add_idea):
    add_idea(
        source=GOOD_KERNEL.replace(
            "import torch\n",
            "import math\nimport torch\nimport triton.language as tl\nfrom kernel_fun._common import plan\n",
        )
    )
    assert registry.find("005").error is None


def test_unknown_idea_names_the_closest(add_idea):
    add_idea()
    with pytest.raises(registry.IdeaError, match=r"no idea '006' \(did you mean 005"):
        registry.load("006")


def test_the_baseline_needs_no_kernel(ladder_root):
    (ladder_root / "ideas" / "000-fla").mkdir()
    (idea,) = registry.all_ideas()
    assert idea.error is None
    with pytest.raises(registry.IdeaError, match="is fla itself"):
        registry.load("000")


def test_numbers_are_never_reused(add_idea):
    add_idea("005", "one")
    add_idea("005", "two")
    with pytest.raises(registry.IdeaError, match="share a number"):
        registry.folders()


def test_lint_asks_for_the_headings(add_idea):
    add_idea(source=GOOD_KERNEL.replace("Delta:", "Change:").replace("Parent: 000", "Parent: 000\n" + "x\n" * 30))
    assert registry.lint("005") == [
        "kernel.py's docstring has no heading 'Delta'",
        "kernel.py's docstring has 37 lines; 25 at most",
    ]


def test_every_idea_of_this_repository_reads():
    for idea in registry.all_ideas():
        assert "\n" not in (idea.error or "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import sys; sys.exit(0)", r"006-bad does not import: kernel.py:\d+: SystemExit: 0"),
        ("import os; os._exit(0)", "006-bad does not import: kernel.py ended its process with exit code 0"),
        ("import os; os.abort()", "006-bad does not import: kernel.py ended its process by SIGABRT"),
        ("import time; time.sleep(60)", "006-bad does not import: kernel.py took longer than 1 s"),
    ],
)
def test_what_a_kernel_does_as_it_loads_ends_no_listing(add_idea, monkeypatch, line, message):
    monkeypatch.setattr(registry, "IMPORT_SECONDS", 1.0)
    add_idea()
    add_idea("006", "bad", GOOD_KERNEL + line + "\n")
    for _ in range(2):  # what is known of a source is not tried again
        good, bad = registry.all_ideas()
        assert (good.error, good.spans) == (None, ("bwd.gva",))
        assert re.search(message, bad.error)
        assert (bad.family, bad.spans) == ("kda", ())
    (bad.folder / "kernel.py").write_text(GOOD_KERNEL)
    assert [i.error for i in registry.all_ideas()] == [None, None]


def test_files_that_cannot_be_read_are_an_ideas_error_and_no_more(add_idea):
    folder = add_idea("006", "latin")
    (folder / "kernel.py").write_bytes(GOOD_KERNEL.encode() + b"# \xe9\n")
    (folder / "IDEA.md").write_bytes((folder / "IDEA.md").read_bytes() + b"\xe9")
    (add_idea("007", "folder") / "kernel.py").unlink()
    (registry.folder("007") / "kernel.py").mkdir()
    latin, other = registry.all_ideas()
    line = GOOD_KERNEL.count("\n") + 1
    assert latin.error == f"ideas/006-latin does not import: kernel.py:{line}: not UTF-8"
    assert latin.family == "kda"
    assert other.error == "ideas/007-folder/kernel.py cannot be read: Is a directory"
