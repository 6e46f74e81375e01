"""The notebook's session: an edit counts without a restart, and nothing that has not passed is ever timed."""

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import registry, rows, scaffold, session


@pytest.fixture
def idea(ladder_root, monkeypatch):
    """A convolution idea that passes: the scaffold's own starting kernel. Nothing ships: it would be timed too."""
    monkeypatch.setattr("kernel_fun.cconv.chain.shipped_for", lambda p: ([], ["a test ships nothing"]))
    return scaffold.new("031", "strip", family="cconv", spans=["fwd"])


def edit(folder, old, new):
    path = folder / "kernel.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_from_contract_to_verdict(idea, monkeypatch):
    monkeypatch.setenv("LOOP_RUN_ID", "r7")
    s = session.open_idea("031")
    assert s.case.id == "tiny"
    assert "| fwd" not in repr(s.contract())
    assert "the span in one kernel" in repr(s.contract())
    assert "PASSED" in repr(s.check())
    assert "031" in repr(s.bench(blocks=3))
    assert "out/bench_logs/cconv/r7-notebook-031-strip.jsonl" in s.record()
    recorded = [r for r in rows.read() if r.arm == "031" and r.baseline == "000"]
    assert [(r.run_id, r.status, r.baseline, r.code_sha) for r in recorded] == [
        ("r7", "PASSED", "000", registry.source_sha("031"))
    ]
    assert recorded[0].row_id in repr(s.verdict())
    shown = s.plots()._repr_html_()
    assert shown.count("<img alt='031-strip, tiny") == 3


def test_an_edit_is_picked_up_and_never_timed_on_an_old_check(idea):
    s = session.open_idea("031")
    s.check()
    before = registry.source_sha("031")
    edit(idea, '    return {"y": y, "ht": ht}\n\n\ndef run', '    return {"y": 1.02 * y, "ht": ht}\n\n\ndef run')
    assert registry.source_sha("031") != before
    assert "WRONG_VALUE" in repr(s.bench(blocks=3))  # it was checked anew, and found wrong
    assert [(r.status, r.perf) for r in s.rows if r.arm == "031"] == [("WRONG_VALUE", None)]
    with pytest.raises(session.NotPassed, match="WRONG_VALUE"):
        s.verdict()
    assert "WRONG_VALUE" in repr(s.check())
    edit(idea, "1.02 * y", "y")
    assert "PASSED" in repr(s.check())
    s.bench(blocks=3)
    s.verdict()
    edit(idea, 'return {"y": y, "ht": ht}', 'return {"y": y, "ht": ht}  # edited')
    with pytest.raises(session.NotPassed, match=r"kernel\.py changed since the bench"):
        s.verdict()


def test_a_rejected_kernel_is_recorded_without_a_time(idea, monkeypatch):
    monkeypatch.setenv("LOOP_RUN_ID", "r8")
    edit(
        idea, '    return {"y": y, "ht": ht}\n\n\ndef run', '    return {"y": y * float("nan"), "ht": ht}\n\n\ndef run'
    )
    s = session.open_idea("031")
    s.bench(blocks=3)
    s.record()
    (mine,) = [r for r in rows.read() if r.arm == "031"]
    assert (mine.status, mine.perf) == ("NON_FINITE", None)
    assert "no times" not in repr(s.plots())  # the baseline has one


def test_the_cells_can_be_run_in_any_order(idea):
    s = session.open_idea("031")
    for cell in (s.record, s.verdict):
        with pytest.raises(session.NotPassed, match="run the bench cell first"):
            cell()
    assert "no errors to show" in repr(s.plots())


@pytest.mark.parametrize(("kwargs", "says"), [
    ({"idea": "099"}, "no idea '099'"), ({"case": "tinny"}, "case 'tinny' is unknown"),
    ({"mode": "both"}, "mode 'both' is unknown"),
    ({"family": "kda"}, "family='kda': idea 031-strip is of family cconv"),
])  # fmt: skip
def test_bad_input_is_one_line(idea, kwargs, says):
    with pytest.raises(ValueError, match=".") as error:  # noqa: RUF043
        session.open_idea(**{"idea": "031"} | kwargs)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_kernel_that_does_not_import_says_so(idea):
    (idea / "kernel.py").write_text("import torch\n1 / 0\n")
    with pytest.raises(registry.IdeaError, match=r"does not import: kernel\.py:2: ZeroDivisionError"):
        session.open_idea("031")
