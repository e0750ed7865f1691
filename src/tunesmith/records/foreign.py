"""JSON that others write: models, programs, services, people."""

from __future__ import annotations

import json
from typing import Any

DEEP = "it is nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, has a number of too many digits, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(DEEP) from None


def first_json(text: str) -> tuple[Any, int]:
    """The JSON value at the start of a text, and the index of the character after it.

    Raises:
        ValueError: as ``parse_json``.
    """
    try:
        return json.JSONDecoder().raw_decode(text)
    except RecursionError:
        raise ValueError(DEEP) from None


def json_or(text: str | bytes, other: object) -> Any:
    """The value of a JSON text; ``other`` if it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return other
