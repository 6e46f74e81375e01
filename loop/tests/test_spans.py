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
    with pytest.raises(CheckError, match="of family cconv, case tiny_gate of kda"):
        spans.check_spans(module("cconv", SPANS={}), case)
    no = module(SPANS={})
    no.supports = lambda p: (False, "needs K=128, got 64")
    with pytest.raises(CheckError, match="does not support tiny_gate: needs K=128, got 64"):
        spans.check_spans(no, case)


O = {"o": torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)}
EXPECTED = "expected bfloat16 [1, 128, 2, 64]"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, "fwd.out did not return o, but an empty dict; expected a dict of o"),
        ({"out": O["o"]}, "fwd.out did not return o, but a dict of out; expected a dict of o"),
        (O["o"], "fwd.out returned bfloat16 [1, 128, 2, 64]; expected a dict of o"),
        (None, "fwd.out returned None; expected a dict of o"),
        (O | {"extra": O["o"]}, "fwd.out returned 'extra', which its stages do not write; expected a dict of o"),
        ({"o": None}, f"fwd.out: o is None; {EXPECTED}"),
        ({"o": 1.0}, f"fwd.out: o is a float; {EXPECTED}"),
        ({"o": torch.zeros(1)}, f"fwd.out: o is float32 [1]; {EXPECTED}"),
        ({"o": O["o"].float()}, f"fwd.out: o is float32 [1, 128, 2, 64]; {EXPECTED}"),
    ],
)
def test_what_a_step_returns_is_held_to_the_contract(returned, message):
    with pytest.raises(Rejected) as info:
        spans.check_spans(module(SPANS={"fwd.out": lambda *, q: returned}), cases.get("kda", "tiny_gate"))
    assert info.value.message.endswith(message)
    assert info.value.status is Status.WRONG_DTYPE


def test_a_tensor_that_the_problem_does_not_have_must_be_None():
    def scan(*, kg, w, u, gk, h0, p):
        found = reference.scan(kg=kg, w=w, u=u, gk=gk, h0=h0, p=p, cu_seqlens=None)
        return {**found, "ht": torch.zeros(1)}

    with pytest.raises(Rejected, match=r"fwd.scan: ht is float32 \[1\]; expected None for this problem"):
        spans.check_spans(module(SPANS={"fwd.scan": scan}), cases.get("kda", "tiny_gate"))


def test_the_forward_alone():
    whole = module(SPANS=reference.spans(cases.get("kda", "tiny_gate").problem()))
    found = spans.check_spans(whole, cases.get("kda", "tiny_gate"), grad=False)
    assert {e.span.partition(".")[0] for e in found} == {"fwd"}
