"""How much faster one of two runs is, from pairs of steps that they took in turn; and when enough pairs are known.

The ratios of two runs' times are compared on a logarithmic scale, where a ratio and its inverse are equally far from
none. The interval of their mean holds at every moment, so that a comparison may end as soon as it is clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt
from statistics import fmean, variance

CONFIDENCE = 0.95
EFFECT = 5.0
"""Expected size of a difference, in deviations of the noise (``c`` below): one that is worth finding is clear."""
SAME = 0.02
"""Ratios nearer to 1 than this are not worth finding."""
MOST_PAIRS = 15
"""After which a comparison ends undecided."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Of the mean log-ratio of times: below 0 the second run is faster."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether one is faster, or both are the same."""
        return self.low > 0 or self.high < 0 or max(-self.low, self.high) < SAME

    @property
    def turned(self) -> Interval:
        """Of the first run beside the second."""
        return Interval(-self.mean, -self.high, -self.low, self.pairs)

    @property
    def gain(self) -> tuple[float, float, float]:
        """How many times as fast the second run is, from, to."""
        return exp(-self.mean), exp(-self.high), exp(-self.low)


def interval(log_ratios: Sequence[float]) -> Interval:
    """The confidence sequence of a mean of normal numbers with unknown variance: with probability ``CONFIDENCE`` the
    mean is inside after every number of pairs at once.

    All means ``m`` for which the t-statistic's Bayes factor with effects ``N(0, c²)``, a test martingale, is below
    ``1/α`` (Wang and Ramdas 2023, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
    variance", arXiv:2310.03722, Gaussian mixture):

        K⁻¹ᐟ² · ((1 + t²/ν) / (1 + t²/(νK)))^((ν + 1)/2) < 1/α,   t² = n (mean − m)²/s²,   ν = n − 1,   K = 1 + n c²
    """
    n = len(log_ratios)
    mean = fmean(log_ratios)
    if n < 2:
        return Interval(mean, -inf, inf, n)
    odds, spread = 1 + n * EFFECT**2, sqrt(variance(log_ratios))
    bound = (sqrt(odds) / (1 - CONFIDENCE)) ** (2 / n)
    if bound >= odds:
        return Interval(mean, -inf, inf, n)
    width = spread * sqrt((n - 1) / n * (bound - 1) / (1 - bound / odds))
    return Interval(mean, mean - width, mean + width, n)
