"""The oracle: two forms that share no code agree, slices are the whole's, and autograd's gradients are finite
differences'."""

import pytest
import torch

from loop import cases, inputs, oracle

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

SHORT = [c for f in cases.FAMILIES for c in cases.select(f, "tiny") if c.T <= oracle.RECURRENT_TOKENS]


def apart(got, want):
    assert set(got) == set(want)
    worst = 0.0
    for name, a in want.items():
        assert (a is None) == (got[name] is None), name
        if a is not None:
            assert a.dtype == torch.float64
            assert a.shape == got[name].shape
            assert torch.isfinite(a).all()
            worst = max(worst, ((a - got[name]).norm() / a.norm().clamp_min(1e-30)).item())
    return worst


@pytest.mark.parametrize("case", SHORT, ids=lambda c: f"{c.family}-{c.id}")
def test_token_by_token_and_chunked_agree_to_1e10(case):
    x = inputs.make(case, 11)
    assert apart(oracle.chunked(x), oracle.recurrent(x)) < 1e-10


FLAGS = st.fixed_dictionaries(
    {
        "gate": st.sampled_from(["log", "softplus", "safe"]),
        "l2norm": st.booleans(),
        "beta_sigmoid": st.booleans(),
        "h0": st.booleans(),
        "ht": st.booleans(),
        "H": st.integers(1, 2),
        "K": st.integers(1, 9),
        "V": st.integers(1, 9),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    FLAGS, st.integers(1, 3), st.lists(st.integers(0, 70), min_size=1, max_size=3), st.booleans(), st.integers(0, 99)
)
def test_the_two_forms_agree_for_any_flags_and_shapes(flags, group, lengths, neg, seed):
    packed = len(lengths) > 1 and sum(lengths) > 0
    shape = {"lengths": tuple(lengths), "T": sum(lengths)} if packed else {"B": 2, "T": lengths[0] + 1}
    case = cases.KdaCase(
        id="any",
        HV=group * flags["H"],
        neg_eigval=neg and flags["beta_sigmoid"],
        why="",
        tags=frozenset(),
        **shape,
        **flags,
    )
    x = inputs.make(case, seed)
    assert apart(oracle.chunked(x), oracle.recurrent(x)) < 1e-9


@pytest.mark.parametrize("name", ["tiny_ragged", "tiny_state", "tiny"])
def test_rows_done_apart_are_the_whole(name):
    x = inputs.make(cases.get("kda", name), 3)
    assert apart(oracle.chunked(x, token_heads=1), oracle.chunked(x)) < 1e-12


@pytest.mark.parametrize(
    ("family", "name"),
    [("kda", "tiny_gva"), ("kda", "tiny_gate"), ("kda", "tiny_varlen"), ("cconv", "tiny_varlen_state")],
)
def test_a_slice_is_the_wholes_own(family, name):
    case = cases.get(family, name)
    x = inputs.make(case, 4)
    part = oracle.choose(case, 1, seed=9)
    assert case.family == "cconv" or len(part.heads) == len(part.groups) * case.HV // case.H
    cut = oracle.take_tensors(case, oracle.chunked(x), part)
    assert apart(oracle.chunked(oracle.take(x, part)), cut) < 1e-12


@pytest.mark.parametrize("name", ["tiny_gva", "tiny_gate", "tiny_varlen", "tiny_state"])
def test_slices_of_heads_put_together_are_the_whole(name):
    case = cases.get("kda", name)
    x, whole = inputs.make(case, 4), case.B * case.T * case.HV
    parts = oracle.head_parts(case, whole // case.H)
    assert len(parts) == case.H
    assert sum((part.heads for part in parts), ()) == tuple(range(case.HV))
    assert len(oracle.head_parts(case, whole)) == 1
    found = oracle.put_together(case, [oracle.chunked(oracle.take(x, part)) for part in parts])
    assert apart(found, oracle.chunked(x)) < 1e-12


def test_slices_are_random_whole_groups_within_bounds():
    case = cases.get("kda", "gva")
    found = {oracle.choose(case, 2, seed).heads for seed in range(20)}
    assert len(found) > 10
    for heads in found:
        assert len(heads) == 4
        assert heads[0] % 2 == 0
        assert heads[1] == heads[0] + 1
        assert max(heads) < 32
    wide = oracle.choose(cases.get("cconv", "prod8192_qk"), 2, 0)
    assert len(wide.heads) == 128
    assert max(wide.heads) < 2048


@pytest.mark.parametrize("name", ["tiny_safe", "tiny_varlen", "tiny_neg"])
def test_gradients_are_finite_differences(name):
    x = oracle.widen(inputs.make(cases.get("kda", name), 2))
    found = oracle.recurrent(x)

    def loss(y):
        o, ht = oracle._kda_recurrent(y)
        return ((o * x["do"]).sum() + (0 if ht is None else (ht * x["dht"]).sum())).item()

    torch.manual_seed(0)
    for leaf, grad in zip(inputs.LEAVES["kda"], inputs.GRADIENTS["kda"], strict=True):
        if x[leaf] is None:
            assert found[grad] is None
            continue
        way, step = torch.randn_like(x[leaf]), 1e-5
        slope = (loss(x.like({**x, leaf: x[leaf] + step * way})) - loss(x.like({**x, leaf: x[leaf] - step * way}))) / (
            2 * step
        )
        assert slope == pytest.approx((found[grad] * way).sum().item(), rel=1e-5, abs=1e-7), leaf


def test_the_recurrence_by_hand():
    """One token: o = scale beta (q.k) v, and the state is beta k v^T."""
    case = cases.KdaCase(id="one", T=1, H=1, K=4, V=3, why="", tags=frozenset(), ht=True)
    x = oracle.widen(inputs.make(case, 0))
    found = oracle.recurrent(x)
    q, k, v, beta = x["q"][0, 0, 0], x["k"][0, 0, 0], x["v"][0, 0, 0], x["beta"][0, 0, 0]
    assert torch.allclose(found["o"][0, 0, 0], 4**-0.5 * beta * (q @ k) * v)
    assert torch.allclose(found["ht"][0, 0], beta * torch.outer(k, v))


def test_the_convolution_against_torchs_own():
    case = cases.get("cconv", "tiny_bias")
    x = oracle.widen(inputs.make(case, 0))
    z = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x["x"].mT, (case.W - 1, 0)), x["weight"][:, None], x["bias"], groups=case.D
    )
    assert torch.allclose(oracle.recurrent(x)["y"], torch.nn.functional.silu(z).mT)


def test_an_empty_sequence_hands_its_state_on():
    x = inputs.make(cases.get("kda", "tiny_varlen"), 0)
    found = oracle.oracle(x)
    assert torch.equal(found["ht"][1], x["initial_state"][1].double())
    assert torch.equal(found["dh0"][1], x["dht"][1].double())


def test_gates_of_minus_infinity_are_a_reset():
    x = inputs.make(cases.get("kda", "tiny_reset"), 0)
    assert (x["g"] == -torch.inf).any()
    for form in (oracle.recurrent, oracle.chunked):
        found = form(x)
        assert all(t is None or torch.isfinite(t).all() for t in found.values()), form.__name__
    assert apart(oracle.chunked(x), oracle.recurrent(x)) < 1e-10


def test_terms_of_a_cancelling_sum():
    """dA_log is the sum of the terms whose root sum of squares `term_sizes` gives: checked on a case with one token
    and one dimension."""
    for gate in ("softplus", "safe"):
        case = cases.KdaCase(id="one", T=2, H=1, K=1, V=2, why="", tags=frozenset(), gate=gate, g_dtype="fp32")
        x = inputs.make(case, 1)
        found = oracle.recurrent(x)
        # o of the first token does not depend on its gate without h0, so the second token's term is the whole sum
        assert torch.allclose(oracle.term_sizes(x, found)["dA_log"], found["dA_log"].abs(), rtol=1e-9)
