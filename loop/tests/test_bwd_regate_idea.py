"""Idea 016 in the interpreter: the gate it makes again is that of its stage in fp64, and the forward's to the bit."""

import pytest
import torch

from loop import cases, registry, spans

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.mark.parametrize("name", ["tiny_gate", "tiny_safe", "tiny_ragged", "tiny_varlen", "tiny_raw", "tiny_raw_safe"])
def test_the_gate_is_within_its_budget(name):
    found = spans.check_spans(registry.load("016"), cases.get("kda", name))
    assert [e.tensor for e in found] == ["gk"]
    assert [str(e) for e in found if not e.ok] == []
