"""Idea 003, refuted and kept: it still loads and is right, so that its measurement can be repeated."""

from loop import cases, registry, spans


def test_every_gradient_is_within_its_budget():
    found = spans.check_spans(registry.load("003"), cases.get("kda", "tiny_gate"))
    assert {e.tensor for e in found} >= {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}
    assert [e for e in found if not e.ok] == []
