"""Demotion: the file, the entry and the status go back together, or nothing does and one line says why."""

import pytest

from loop import demote, drift, promote, registry, sources
from loop.tests.conftest import GOOD_KERNEL


@pytest.fixture
def ship(ladder_root, add_idea):
    """Make idea `number` and put it into the package, as promotion leaves it."""

    def make(number, slug, kernel=GOOD_KERNEL):
        add_idea(number, slug, kernel)
        idea = registry.glance(number)
        folder, module = sources.package_family("kda"), promote.module_name(idea)
        entry = {"module": module, "idea": idea.name, "spans": ("bwd.gva",), "source": f"ideas/{idea.name}/kernel.py",
                 "sha256": "0" * 64, "commit": "0" * 40, "rows": (), "evidence": ()}  # fmt: skip
        others = [s._asdict() for s in sources.shipped("kda")]
        promote.replace(folder / "stages" / f"{module}.py", idea.kernel.read_bytes())
        promote.replace(folder / "_provenance.py", promote.provenance([entry, *others]).encode())
        promote.set_status(idea, "promoted")
        return folder / "stages" / f"{module}.py"

    return make


def state(root):
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.suffix in (".py", ".md")}


def status(number):
    return registry.front_matter(registry.folder(number))["status"]


def test_file_entry_and_status_go_and_the_rest_stays(ladder_root, ship):
    other, copy = ship("005", "sum-heads"), ship("006", "again")
    assert demote.demote("006") == copy
    assert not copy.exists()
    assert other.exists()
    assert [s.idea for s in sources.shipped("kda")] == ["005-sum-heads"]
    assert (status("005"), status("006")) == ("promoted", "kept")
    assert registry.find("006").error is None
    assert not [item for item in drift.drift([]) if not item["idea"]]
    demote.demote("005")
    assert sources.shipped("kda") == ()


def test_what_is_not_promoted_is_refused_in_one_line(ladder_root, add_idea):
    add_idea()
    before = state(ladder_root)
    with pytest.raises(promote.Refused) as caught:
        demote.demote("005")
    assert str(caught.value) == "005-sum-heads is not promoted: there is nothing to demote"
    assert state(ladder_root) == before


def test_what_another_kernel_imports_is_refused_in_one_line(ladder_root, ship, add_idea):
    ship("005", "sum-heads")
    line = "\n\ndef _run():\n    from kernel_fun.kda.stages.k005_sum_heads import run\n    return run\n"
    user = ship("006", "again", GOOD_KERNEL + line)
    before = state(ladder_root)
    with pytest.raises(promote.Refused) as caught:
        demote.demote("005")
    assert str(caught.value) == "005-sum-heads is not demoted: k005_sum_heads is imported by k006_again, 006-again"
    assert state(ladder_root) == before
    demote.demote("006")
    assert not user.exists()
    with pytest.raises(promote.Refused, match=r"is imported by 006-again$"):  # an idea that is kept has to run as well
        demote.demote("005")


def test_what_an_interruption_left_is_taken_away_by_a_second_call(ladder_root, ship, monkeypatch):
    def interrupted(self, missing_ok):
        raise KeyboardInterrupt

    copy = ship("005", "sum-heads")
    with monkeypatch.context() as patched:
        patched.setattr(type(copy), "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demote.demote("005")
    assert sources.shipped("kda") == ()
    assert copy.exists()
    assert [item["moved"] for item in drift.drift([])] == [["is in stages/, but _provenance.py does not list it"]]
    demote.demote("005")
    assert not copy.exists()
    assert status("005") == "kept"


def test_the_command_says_what_comes_next_and_refuses_in_one_line(ladder_root, ship, capsys):
    from loop.__main__ import app

    ship("005", "sum-heads")
    app(["demote", "005"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("k005_sum_heads.py is out of the package")


def test_refuses_what_another_serves_only_beside(ship):
    """Without it the other would ship, and never serve."""
    ship("005", "sum-heads")
    ship("006", "again")
    entries = [s._asdict() for s in sources.shipped("kda")]
    entries[0]["beside"] = (entries[1]["module"],)
    path = sources.package_family("kda") / "_provenance.py"
    promote.replace(path, promote.provenance(entries).encode())
    with pytest.raises(promote.Refused, match="would not serve without"):
        demote.demote(entries[1]["idea"].split("-")[0])
    promote.replace(path, promote.provenance(entries[:1]).encode())
    assert any("serves only beside" in line for item in drift.drift([]) for line in item["moved"])


@pytest.mark.parametrize("number", ["018", "010"])
def test_refuses_what_nothing_newer_serves(number):
    """In this repository: small is 018's, K = 64 is 010's; nothing is written."""
    before = state(registry.root() / "package")
    with pytest.raises(promote.Refused, match=r"is not demoted: (nothing newer serves|k\d+\w+ is imported by) "):
        demote.demote(number)
    assert state(registry.root() / "package") == before


def test_what_still_serves_a_case_is_named():
    pytest.importorskip("cutlass", reason="018 needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
    assert "small" in demote._serves("kda", "k018_fwd_split_operands")
    assert demote._serves("kda", "k013_fwd_operands") == []
    assert demote._serves("cconv", "k001_conv_strip")
