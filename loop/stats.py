"""From paired block times to a verdict: medians, order-statistic intervals, and the four-way decision.

A block times every arm once, close together, so a drift of the clocks moves all of a block alike and cancels in the
ratio of two arms. The interval is read from the sorted ratios: it assumes no distribution, only that blocks are alike.
Ratios are baseline time / arm time everywhere, so above 1 the arm is faster.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95  # the interval covers the true median at least this often
DEAD_BAND = 0.005  # differences below half a percent decide nothing
SAME_BAND = 0.01  # a run that cannot tell one percent apart cannot call two arms the same
FASTER, SAME, SLOWER, UNCLEAR = ("FASTER", "SAME", "SLOWER", "UNCLEAR")


@dataclass(frozen=True)
class Interval:
    """A median with its order-statistic interval; `coverage` is exact (below CONFIDENCE if n < 6)."""

    median: float
    low: float
    high: float
    coverage: float

    @property
    def spread(self) -> float:
        """How far from 1 the interval reaches: what two arms that are the same arm differ by in this run."""
        return max(abs(self.low - 1.0), abs(self.high - 1.0))


def ranks(n: int, confidence: float = CONFIDENCE) -> tuple[int, int, float]:
    """1-based ranks (low, high) of n sorted samples that bracket the median, and their exact coverage.

    The narrowest symmetric pair with at least `confidence`; the extremes where no pair reaches it (n < 6 at 95 %).
    n = 21 gives ranks 6 and 16 (97.3 %), n = 15 gives 4 and 12 (96.5 %).
    """
    if n < 1:
        raise ValueError(f"n={n}: an interval needs at least one sample")
    best = 1
    below = 0.0  # P(fewer than `low` samples lie under the median)
    coverage = 1.0 - 2.0 * 0.5**n if n > 1 else 0.0
    for low in range(1, n // 2 + 1):
        below += math.comb(n, low - 1) * 0.5**n
        if low > 1 and 1.0 - 2.0 * below < confidence:
            break
        best, coverage = low, 1.0 - 2.0 * below
    return best, n + 1 - best, coverage


def interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Median and order-statistic interval of the samples. ValueError on an empty list or a value that is not finite."""
    values = sorted(samples)
    if not all(map(math.isfinite, values)):
        raise ValueError("samples hold a value that is not finite")
    low, high, coverage = ranks(len(values), confidence)
    return Interval(statistics.median(values), values[low - 1], values[high - 1], coverage)


def ratios(baseline: Sequence[float], arm: Sequence[float]) -> list[float]:
    """Per-block baseline / arm. ValueError when the blocks do not pair up."""
    if len(baseline) != len(arm):
        raise ValueError(f"{len(baseline)} baseline blocks do not pair with {len(arm)} arm blocks")
    return [b / a for b, a in zip(baseline, arm, strict=True)]


def band(aa: Interval | None) -> float:
    """The dead band of a run: half a percent, or what the A/A arm shows the run cannot tell apart, if that is wider."""
    return max(DEAD_BAND, aa.spread if aa else 0.0)


def verdict(ratio: Interval, dead_band: float, cycles_ratio: float | None = None) -> str:
    """FASTER, SAME, SLOWER or UNCLEAR.

    A win or a loss needs the whole interval outside 1 +- dead_band; SAME needs all of it inside, and a band of at most
    one percent. `cycles_ratio` is the same ratio in SM cycles
    (time x clock), where the clocks are known: a difference that vanishes in cycles came from the clock, so UNCLEAR.
    """
    if ratio.low > 1.0 + dead_band:
        return FASTER if cycles_ratio is None or cycles_ratio > 1.0 else UNCLEAR
    if ratio.high < 1.0 - dead_band:
        return SLOWER if cycles_ratio is None or cycles_ratio < 1.0 else UNCLEAR
    inside = ratio.low >= 1.0 - dead_band and ratio.high <= 1.0 + dead_band
    return SAME if inside and dead_band <= SAME_BAND else UNCLEAR


def block_orders(arms: int, blocks: int) -> list[tuple[int, ...]]:
    """The order of the arms in each block: rotated by one each block, and reversed every other full rotation.

    Over 2 x arms blocks each arm stands equally often in each place and follows each neighbour from both sides.
    """
    orders = []
    for block in range(blocks):
        shift = block % arms
        order = (*range(shift, arms), *range(shift))
        orders.append(order[::-1] if (block // arms) % 2 else order)
    return orders
