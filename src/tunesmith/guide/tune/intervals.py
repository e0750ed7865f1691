"""The speedup of one of two runs, from pairs of alternating steps; and when enough pairs have been
measured.

The ratios of two runs' times are compared on a logarithmic scale, where a ratio and its inverse are
equally far from zero. The interval of their mean is valid at any time, so a comparison may end as
soon as it is clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt
from statistics import fmean, variance

CONFIDENCE = 0.95
EFFECT = 5.0
"""Expected difference in standard deviations of the noise (``c`` below): a difference worth finding
is clear."""
SAME = 0.02
"""Ratios nearer to 1 than this are not worth finding."""
MOST_PAIRS = 15
"""Number of pairs after which a comparison ends undecided."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Interval of the mean log-ratio of times: below 0 the second run is faster."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether one run is known to be faster, or both to be equally fast."""
        return self.low > 0 or self.high < 0 or max(-self.low, self.high) < SAME

    @property
    def turned(self) -> Interval:
        """The interval with the two runs swapped."""
        return Interval(-self.mean, -self.high, -self.low, self.pairs)

    @property
    def gain(self) -> tuple[float, float, float]:
        """The speedup of the second run: estimate, lower and upper bound."""
        return exp(-self.mean), exp(-self.high), exp(-self.low)


def interval(log_ratios: Sequence[float]) -> Interval:
    """The confidence sequence of the mean of normal variables with unknown variance: with
    probability ``CONFIDENCE``, it contains the mean for all numbers of pairs at once.

    All means ``m`` for which the t-statistic's Bayes factor with effects ``N(0, c²)``, a test
    martingale, is below ``1/α`` (Wang and Ramdas 2023, "Anytime-valid t-tests and confidence
    sequences for Gaussian means with unknown variance", arXiv:2310.03722, Gaussian mixture):

        K⁻¹ᐟ² · ((1 + t²/ν) / (1 + t²/(νK)))^((ν + 1)/2) < 1/α,
        t² = n (mean − m)²/s²,   ν = n − 1,   K = 1 + n c²
    """
    n = len(log_ratios)
    mean = fmean(log_ratios)
    if n < 2:
        return Interval(mean, -inf, inf, n)
    odds = 1 + n * EFFECT**2
    spread = sqrt(variance(log_ratios))
    bound = (sqrt(odds) / (1 - CONFIDENCE)) ** (2 / n)
    if bound >= odds:
        return Interval(mean, -inf, inf, n)
    width = spread * sqrt((n - 1) / n * (bound - 1) / (1 - bound / odds))
    return Interval(mean, mean - width, mean + width, n)
