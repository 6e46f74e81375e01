"""The measure and the limit: relative RMS by hand, no escapes, and what fla's own error allows."""

import math

import pytest
import torch

from loop import cases, compare
from loop.compare import Difference, difference, limit

P = cases.get("kda", "tiny").problem()


def test_relative_rms_by_hand():
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    got = torch.tensor([[3.0, 4.0], [0.5, 0.0]])
    found = difference(got, want)
    assert math.isclose(found.rel_rms, 0.1)
    assert math.isclose(found.max_abs, 0.5)
    assert found.worst == (1, 0)


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1.0, 1e8])
def test_small_errors_on_small_tensors_do_not_escape(scale):
    """A tolerance with an absolute part passes anything that is small enough; this one does not."""
    want = scale * torch.randn(100, dtype=torch.float64)
    assert math.isclose(difference(1.02 * want, want).rel_rms, 0.02, rel_tol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_entry_is_infinitely_far(value):
    want, got = torch.zeros(5, 5), torch.zeros(5, 5)
    got[3, 2] = value
    found = difference(got, want)
    assert math.isinf(found.rel_rms)
    assert found.bad == 1
    assert found.worst == (3, 2)
    assert not compare.judge("kda", "o", P, [found]).ok


def test_a_zero_reference_wants_zero():
    zero = torch.zeros(4)
    assert difference(zero, zero).rel_rms == 0
    assert difference(zero, zero).zero_reference
    assert difference(zero + 2**-31, zero).rel_rms == 0, "what a decay clamped at 2^-32 may leave"
    assert math.isinf(difference(zero + 1e-6, zero).rel_rms)
    assert math.isinf(difference(torch.full((4,), 1e-3), torch.full((4,), 1e-40)).rel_rms)


def test_an_empty_output_is_right_and_shapes_must_agree():
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3)).rel_rms == 0
    with pytest.raises(ValueError, match=r"shape \[2\] differs from the reference's \[3\]"):
        difference(torch.zeros(2), torch.zeros(3))


def test_huge_and_tiny_values_keep_their_errors():
    want = torch.tensor([1e300, 2e300], dtype=torch.float64)
    assert math.isclose(difference(want * (1 + 1e-6), want).rel_rms, 1e-6, rel_tol=1e-3)
    assert compare.rms(torch.tensor([3e-300, 4e-300], dtype=torch.float64)) == pytest.approx(5e-300 / 2**0.5)


def test_a_cancelling_sum_is_measured_against_its_terms():
    got, want, terms = torch.tensor([0.02]), torch.tensor([0.01]), torch.tensor([1.0])
    assert math.isclose(difference(got, want).rel_rms, 1.0, rel_tol=1e-6)
    assert math.isclose(difference(got, want, terms).rel_rms, 0.01, rel_tol=1e-6)
    assert math.isclose(difference(10 * got, 10 * want, 0 * terms).rel_rms, 1.0, rel_tol=1e-6)


def test_pooling_is_one_long_tensor():
    want, got = torch.randn(2, 50, dtype=torch.float64), torch.randn(2, 50, dtype=torch.float64)
    pooled = compare.pool([difference(g, w) for g, w in zip(got, want, strict=True)])
    assert math.isclose(pooled.rel_rms, difference(got, want).rel_rms, rel_tol=1e-9)
    assert pooled.numbers == 100
    bad = difference(torch.tensor([math.nan]), torch.zeros(1))
    assert math.isinf(compare.pool([bad, difference(want, want)]).rel_rms)


@pytest.mark.parametrize("bump", [0, 7, 19, 41])
def test_a_long_tensor_is_compared_a_stretch_at_a_time(monkeypatch, bump):
    want = torch.randn(6, 7, dtype=torch.float64)
    got = want + 1e-3 * torch.randn(6, 7)
    got.view(-1)[bump] += 1
    whole, terms = difference(got, want), torch.full((2,), 3.0)
    bounded = difference(got, want, terms)
    monkeypatch.setattr(compare, "PIECE", 8)
    for a, b in ((difference(got, want), whole), (difference(got, want, terms), bounded)):
        assert (a.worst, a.max_abs, a.numbers, a.bad) == (b.worst, b.max_abs, b.numbers, b.bad)
        for name in ("rel_rms", "error", "size", "own", "fourth"):
            assert math.isclose(getattr(a, name), getattr(b, name), rel_tol=1e-12), name
    assert whole.worst == (bump // 7, bump % 7)


MANY = 10**8


@pytest.mark.parametrize(
    ("budget", "fla", "allowed"),
    [
        (0.005, None, 0.005),
        (0.005, 0.0045, 0.005),       # 1.25 times fla's is more than the budget
        (0.005, 0.002, 0.0025),       # fla is good: at most 1.25 times as far
        (0.005, 0.009, 0.009),        # fla misses the budget: at most fla's error
        (0.005, 1e-7, 0.00005),       # below a hundredth of the budget the order of sums decides
        (0.005, math.inf, 0.005),     # fla's own result is not finite: the budget stands alone
        (0.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_limits(budget, fla, allowed):
    assert limit(budget, fla, MANY) == pytest.approx(allowed, rel=1e-3)


def test_few_numbers_scatter():
    assert limit(0.02, None, 1) == pytest.approx(0.08)
    assert limit(0.02, None, 65) == 0.02
    assert limit(0.02, 0.002, 10) == pytest.approx(1.25 * math.e * 0.002)


@pytest.mark.parametrize("size", [1e-160, 1e-100, 1e-82, 1e-30, 1.0, 1e90, 1e150])
def test_pooling_takes_references_of_any_size(size):
    reference = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() * size
    found = compare.pool([difference(reference * 1.001, reference), difference(reference, reference)])
    assert found.effective == pytest.approx(2000, rel=0.2)
    assert compare.pool([difference(reference * 0, reference * 0)] * 2).effective == 2000


def test_luck_is_bounded_where_fla_misses_the_budget():
    """Nothing else would bound it."""
    assert limit(0.02, 0.03, MANY, MANY) == pytest.approx(0.03, rel=1e-2)
    assert limit(0.02, 0.03, MANY, 3) == 0.06


def test_a_few_entries_that_weigh_scatter_as_few_do():
    """With gates that leave a gradient next to nothing but at a row's end, two right kernels' errors are far apart."""
    reference = torch.full((100_000,), 1e-9, dtype=torch.float64)
    reference[-8:] = torch.tensor([1.0, -0.3, 0.5, -1.2, 0.2, 0.7, -0.1, 0.4], dtype=torch.float64)
    one = difference(reference * 1.001, reference)
    assert 8 < one.effective < 15
    even = difference(reference * 1.001, torch.randn(100_000, generator=torch.Generator().manual_seed(0)).double())
    assert even.effective > 0.95 * even.numbers
    assert difference(torch.ones(1), torch.ones(1).double()).effective == 1
    assert compare.pool([one, one]).effective == pytest.approx(2 * one.effective)
    small = difference(reference * 1e-3, reference * 1e-3)
    assert compare.pool([one, small]).effective == pytest.approx(one.effective, rel=1e-3), "small: no weight"
    with_terms = [difference(reference * 1.001, reference, torch.full((2,), x)) for x in (100.0, 0.1)]
    assert compare.pool(with_terms).effective == pytest.approx(2 * one.effective), "of the reference, not of its terms"
    broken = reference.clone()
    broken[5] = 1.0  # an error at one place is the arm's, not the case's
    assert difference(broken, reference).effective == one.effective
    fla = difference(reference * 1.001, reference)
    allowed = compare.judge("kda", "dg", P, [difference(reference * 1.0018, reference)], [fla])
    assert allowed.ok
    assert allowed.limit < 0.00125 * math.exp(3 / math.sqrt(7))


def test_verdicts():
    right = Difference(0.004, 0.1, (0,), MANY, 0.004, 1.0)
    wrong = Difference(0.006, 0.1, (7,), MANY, 0.006, 1.0)
    assert compare.judge("kda", "o", P, [right]).ok
    assert not compare.judge("kda", "o", P, [wrong]).ok
    assert compare.judge("kda", "dg", P, [wrong]).ok
    close = Difference(0.003, 0.1, (0,), MANY, 0.003, 1.0)
    assert not compare.judge("kda", "o", P, [right], [close]).ok, "within the budget, but farther than 1.25 times fla"
    text = str(compare.judge("kda", "o", P, [wrong]))
    assert "too far, worst at [7]" in text
    assert "\n" not in text


def test_bits():
    nan = torch.tensor([math.nan, 0.0])
    assert compare.same_bits(nan, nan.clone())
    assert compare.same_bits(None, None)
    assert not compare.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not compare.same_bits(nan, None)
    assert not compare.same_bits(nan, nan.double())
    turned = torch.arange(6).view(2, 3).t()
    assert compare.same_bits(turned, turned.contiguous())
