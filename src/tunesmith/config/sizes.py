"""Amounts of memory as text with a unit."""

from __future__ import annotations

import re
from math import ceil, inf

_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_UNITS = {**_DECIMAL, "": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """``"512MB"`` → 512,000,000; ``"1.5GiB"`` → 1,610,612,736; a bare number is bytes.

    Raises:
        ValueError: the text is not a positive size.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= size < inf:
        raise ValueError(f"'{text}' is not a size; write a number and a unit, such as '512MB' or '4GB'")
    return int(size)


def megabytes(size: int) -> str:
    """A number of bytes in run-file form, rounded up to megabytes."""
    return f"{max(1, ceil(size / 10**6))}MB"


def format_size(size: float) -> str:
    """A size with about three digits and a decimal unit, readable by ``parse_size``: ``"1.61GB"``."""
    for unit, unit_size in _DECIMAL.items():
        if size >= unit_size:
            amount = size / unit_size
            return f"{amount:.0f}{unit}" if amount >= 100 else f"{amount:.3g}{unit}"
    return f"{int(size)}B"


def checked_size(text: str) -> str:
    parse_size(text)
    return text
