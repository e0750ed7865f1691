"""Converts any value to plain JSON data, so that no value logged by user code can end a run."""

from __future__ import annotations

from collections.abc import Mapping, Set
from decimal import Decimal
from numbers import Real
from typing import Any

from tunesmith.errors import shortened

JsonObject = dict[str, Any]
Row = Mapping[str, Any]
"""A record that is only read."""
DEEPEST = 64
"""Levels of nesting that are converted; deeper values become their ``repr``."""
LONGEST_REPR = 1000
LARGEST_INTEGER = 1 << 1023
"""Larger integers are replaced by a description: JSON readers parse them as infinity."""


def plain(value: object, depth: int = 0) -> Any:
    """The value as None, bool, int, float, str, list and dict with text keys.

    Numbers of other kinds (NumPy, ``Fraction``, ``Decimal``) become floats or ints, arrays and
    tensors lists, sets lists in the order of their texts, and everything else its ``repr``. Text
    keeps all characters but lone surrogates, which UTF-8 cannot encode and which become ``\\udc80``
    and the like.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        large = f"a whole number of {value.bit_length()} bits"
        return int(value) if abs(value) < LARGEST_INTEGER else large
    try:
        if isinstance(value, Real | Decimal):
            return float(value)
        if depth >= DEEPEST:
            return shown(value)
        if isinstance(value, Mapping):
            return {_text(str(key)): plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, Set):
            return [plain(item, depth + 1) for item in sorted(value, key=shown)]
        if isinstance(value, list | tuple):
            return [plain(item, depth + 1) for item in value]
        to_list = getattr(value, "tolist", None)
        if callable(to_list):
            return plain(to_list(), depth + 1)
    except Exception:
        # It only looked like one of these types.
        return shown(value)
    return shown(value)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "backslashreplace").decode()
    return str(value)


def shown(value: object, most: int = LONGEST_REPR) -> str:
    """The ``repr`` of any value, cut to ``most`` characters."""
    try:
        return _text(shortened(repr(value), most))
    except Exception:
        return f"something of type {type(value).__name__} without a repr"
