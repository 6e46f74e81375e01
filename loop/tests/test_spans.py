"""One span by itself: right stages are within their budgets, and a wrong one is named by tensor."""

import types

import pytest
import torch

from kernel_fun.kda import reference
from loop import cases, contract, controls, spans
from loop.verdict import CheckError, Rejected, Status


def module(family="kda", **named):
    return types.SimpleNamespace(FAMILY=family, SPANS=named.pop("SPANS"), supports=lambda p: (True, ""), **named)


@pytest.mark.parametrize("name", ["tiny_gate", "tiny_safe", "tiny_varlen", "tiny_state", "tiny_gva"])
def test_every_reference_stage_is_within_its_budgets(name):
    case = cases.get("kda", name)
    whole = module(SPANS=reference.spans(case.problem()))
    found = spans.check_spans(whole, case, seed=3)
    assert {e.span for e in found} >= {s.name for s in contract.stages("kda") if s.name not in ("bwd.gate", "bwd.beta")}
    assert not [e for e in found if not e.ok]


def test_the_convolutions_stages():
    from kernel_fun.cconv import reference as conv

    found = spans.check_spans(module("cconv", SPANS=conv.STAGES), cases.get("cconv", "tiny_varlen_state"))
    assert {e.tensor for e in found} == {"y", "ht", "dx", "dw", "db", "dresidual", "dh0"}
    assert all(e.ok for e in found)


@pytest.mark.parametrize(
    ("name", "tensor"), [("gate_order", "gk"), ("two_sided", "Aqk"), ("unwritten_tail", "o"), ("leaks_across", "y")]
)
def test_a_wrong_span_is_named_by_its_tensor(name, tensor):
    control = controls.load(name)
    wrong = [e for e in spans.check_spans(control, cases.get(control.FAMILY, control.CASE)) if not e.ok]
    assert tensor in {e.tensor for e in wrong}


def test_what_lies_above_the_diagonal_of_Aqk_is_nobodys():
    def intra(*, q, k, gk, beta, p, cu_seqlens):
        found = reference.intra(q=q, k=k, gk=gk, beta=beta, p=p, cu_seqlens=cu_seqlens)
        upper = torch.ones(64, 64, device=q.device).triu(1).bool().repeat(p.T // 64, 1)[None, :, None]
        return {**found, "Aqk": torch.where(upper, torch.nan, found["Aqk"])}

    assert all(e.ok for e in spans.check_spans(module(SPANS={"fwd.intra": intra}), cases.get("kda", "tiny_gate")))


def test_broken_contracts_and_wrong_questions():
    case = cases.get("kda", "tiny_gate")
    control = controls.load("writes_past_end")
    with pytest.raises(Rejected, match=r"fwd.out wrote outside of controls/writes_past_end.py"):
        spans.check_spans(control, cases.get("kda", control.CASE))
    with pytest.raises(Rejected, match="o is None, not as written") as info:
        spans.check_spans(module(SPANS={"fwd.out": lambda *, q: {"o": None}}), case)
    assert info.value.status is Status.WRONG_DTYPE
    with pytest.raises(Rejected, match=r"o is \[1\], not \[1, 128, 2, 64\]"):
        spans.check_spans(module(SPANS={"fwd.out": lambda *, q: {"o": torch.zeros(1)}}), case)
    with pytest.raises(CheckError, match="of family cconv, case tiny_gate of kda"):
        spans.check_spans(module("cconv", SPANS={}), case)
    no = module(SPANS={})
    no.supports = lambda p: (False, "needs K=128, got 64")
    with pytest.raises(CheckError, match="does not support tiny_gate: needs K=128, got 64"):
        spans.check_spans(no, case)
