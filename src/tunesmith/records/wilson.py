"""Confidence interval of a share."""

from __future__ import annotations

from math import sqrt

Z95 = 1.959963984540054
"""95% of the standard normal distribution lies within this distance of 0."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% confidence interval of a share of ``count`` trials (Wilson 1927, JASA 22).

    Example:
        >>> low, high = wilson(0.5, 100)
        >>> round(low, 3), round(high, 3)
        (0.404, 0.596)
    """
    z2 = Z95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 * sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    # Exact at the ends of the range, despite rounding.
    return centre - half if share else 0.0, centre + half if share < 1 else 1.0
