"""A span by itself: its operands are the chain's, constants can be tried, and nothing is left behind."""

import pytest

from loop import alone, cases, registry
from loop.tests.test_cli import ladder  # noqa: F401  (a fixture)

TINY = cases.get("kda", "tiny_gate")


def test_each_span_is_timed_and_held_against_the_chain():
    (found,) = alone.time_spans("004", TINY)
    assert (found.idea, found.case, found.span) == ("004", "tiny_gate", "fwd.norm..fwd.intra")
    assert found.ms > 0
    assert found.apart["Aqk"] < 5e-3
    assert found.apart["Akk"] < 5e-3
    assert {"q", "k", "gk"} <= set(found.apart)


def test_an_idea_of_both_passes_has_both_spans():
    found = alone.time_spans("001", cases.get("cconv", "tiny"))
    assert len(found) == len(registry.find("001").spans)
    assert all(d < 1e-2 for x in found for d in x.apart.values())


def test_constants_are_tried_without_a_trace():
    assert alone.settings(["REGS=255", "L2='.L2'"]) == {"REGS": 255, "L2": ".L2"}
    tried = alone.module_of("004", {"REGS": 255})
    assert (tried.REGS, registry.load("004").REGS) == (255, 168)


@pytest.mark.parametrize(("pair", "says"), [
    ("REGS", "expected NAME=VALUE"), ("=3", "expected NAME=VALUE"), ("REGS=import os", "a Python literal"),
])  # fmt: skip
def test_what_is_no_setting_is_named(pair, says):
    with pytest.raises(ValueError, match=says):
        alone.settings([pair])


def test_bad_input_is_one_line(ladder):  # noqa: F811
    for words, says in [
        (["004", "--case", "tiny", "--set", "REGSS=3"], "did you mean REGS"),
        (["001", "--case", "tiny_gate"], "tiny_gate"),
        (["099"], "no idea"),
        (["004", "--case", "nothing"], "nothing"),
    ]:
        code, _, err = ladder("span", *words)
        assert code == 2
        assert says in err.strip().splitlines()[-1]


def test_an_idea_that_declines_says_why(ladder):  # noqa: F811
    code, _, err = ladder("span", "010", "--case", "tiny")
    assert code == 1
    assert "does not support tiny" in err
