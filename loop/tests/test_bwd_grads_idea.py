"""Idea 003, refuted and kept: it still loads and is right, so that its measurement can be repeated."""

import pytest
import torch

from loop import cases, registry, spans

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.mark.parametrize("case", ["tiny_gate"])
def test_every_gradient_is_within_its_budget(case):
    found = spans.check_spans(registry.load("003"), cases.get("kda", case))
    assert {e.tensor for e in found} >= {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}
    assert [e for e in found if not e.ok] == []
