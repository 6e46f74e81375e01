"""The decision rule: exact coverage, and how often it is wrong on simulated runs."""

import itertools
import random
import statistics
from collections import Counter

import pytest

from loop import stats


def exact_coverage(n, low):
    """P(the low-th and (n+1-low)-th of n samples bracket the median), by enumerating signs for small n."""
    hits = sum(low <= sum(signs) <= n - low for signs in itertools.product((0, 1), repeat=n))
    return hits / 2**n


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8, 11, 15])
def test_ranks_are_the_narrowest_that_cover(n):
    low, high, coverage = stats.ranks(n)
    assert high == n + 1 - low
    if n > 1:
        assert coverage == pytest.approx(exact_coverage(n, low))
    assert coverage >= stats.CONFIDENCE or low == 1
    if low < n // 2:
        assert exact_coverage(n, low + 1) < stats.CONFIDENCE


@pytest.mark.parametrize(("n", "low", "high", "coverage"), [(21, 6, 16, 0.973), (15, 4, 12, 0.965)])
def test_ranks_of_the_protocol(n, low, high, coverage):
    got = stats.ranks(n)
    assert got[:2] == (low, high)
    assert got[2] == pytest.approx(coverage, abs=5e-4)


def test_interval_reads_order_statistics():
    got = stats.interval(list(range(21, 0, -1)))
    assert (got.median, got.low, got.high) == (11, 6, 16)


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [float("inf")]])
def test_interval_refuses(bad):
    with pytest.raises(ValueError, match=r"sample"):
        stats.interval(bad)


def test_ratios_pair_blocks():
    assert stats.ratios([2.0, 3.0], [1.0, 2.0]) == [2.0, 1.5]
    with pytest.raises(ValueError, match="3 baseline blocks do not pair with 2"):
        stats.ratios([1, 2, 3], [1, 2])


def test_a_noisy_run_does_not_say_same():
    assert stats.verdict(stats.Interval(1.0, 0.98, 1.02, 0.97), 0.03) == "UNCLEAR"


@pytest.mark.parametrize(
    ("low", "high", "cycles", "want"),
    [
        (1.02, 1.04, None, "FASTER"),
        (1.02, 1.04, 1.03, "FASTER"),
        (1.02, 1.04, 0.99, "UNCLEAR"),  # the clock won, not the kernel
        (1.004, 1.04, None, "UNCLEAR"),
        (0.96, 0.98, None, "SLOWER"),
        (0.96, 0.98, 1.01, "UNCLEAR"),
        (0.996, 1.004, None, "SAME"),
        (0.98, 1.02, None, "UNCLEAR"),
    ],
)
def test_verdict(low, high, cycles, want):
    assert stats.verdict(stats.Interval((low + high) / 2, low, high, 0.97), 0.005, cycles) == want


def simulate(rng, speedup, noise, blocks=21):
    """One run: block-wise drift shared by all arms, plus each arm's own noise; returns the verdict."""
    times = {"base": [], "aa": [], "arm": []}
    for _ in range(blocks):
        drift = 1.0 + rng.gauss(0, 0.02)
        for arm, samples in times.items():
            samples.append(drift * (1 + rng.gauss(0, noise)) / (speedup if arm == "arm" else 1.0))
    aa = stats.interval(stats.ratios(times["base"], times["aa"]))
    return stats.verdict(stats.interval(stats.ratios(times["base"], times["arm"])), stats.band(aa))


@pytest.mark.parametrize(
    ("noise", "speedup", "want", "share"),
    [
        (0.005, 1.02, "FASTER", 0.97),
        (0.001, 1.01, "FASTER", 0.97),
        (0.005, 0.98, "SLOWER", 0.97),
        (0.001, 1.0, "SAME", 0.97),
    ],
)
def test_power_on_simulated_runs(noise, speedup, want, share):
    rng = random.Random(7)
    got = Counter(simulate(rng, speedup, noise) for _ in range(400))
    assert got[want] / 400 >= share, got


@pytest.mark.parametrize("noise", [0.001, 0.005, 0.02])
def test_an_equal_arm_is_hardly_ever_called_faster(noise):
    rng = random.Random(11)
    got = Counter(simulate(rng, 1.0, noise) for _ in range(1000))
    assert got["FASTER"] + got["SLOWER"] <= 5, got


def test_interval_covers_the_true_median():
    rng = random.Random(3)
    hits = 0
    for _ in range(1000):
        got = stats.interval([rng.lognormvariate(0, 0.3) for _ in range(15)])
        hits += got.low <= 1.0 <= got.high
    assert hits / 1000 == pytest.approx(stats.ranks(15)[2], abs=0.02)


@pytest.mark.parametrize("arms", [2, 3, 4])
def test_orders_balance_place_and_neighbour(arms):
    orders = stats.block_orders(arms, 2 * arms)
    for place in range(arms):
        assert Counter(order[place] for order in orders) == dict.fromkeys(range(arms), 2)
    if arms > 2:
        pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
        assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)
    assert statistics.mean(len(o) for o in stats.block_orders(arms, 7)) == arms
