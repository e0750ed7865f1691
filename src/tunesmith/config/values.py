"""Kinds of values that settings have, with the words that error messages say them in."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from tunesmith.config.sizes import checked_size
from tunesmith.redact import redact


def checked_url(text: str) -> str:
    """The same text.

    Raises:
        ValueError: it is no http address with a host.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise ValueError(f"{redact(text)!r} is no URL; write it in full, such as 'http://127.0.0.1:8100/reward'")
    return text


Text = Annotated[str, Field(min_length=1, description="text in quotes, not empty")]
PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[str, AfterValidator(checked_size), Field(description="a size such as '512MB' or '4GB'")]
Url = Annotated[str, AfterValidator(checked_url), Field(description="a URL such as 'http://127.0.0.1:8100/reward'")]


def _zero_is_off(value: object) -> object:
    return None if value == 0 and not isinstance(value, bool) else value


def _off_is_zero(value: float | None) -> float:
    return value or 0.0


GradNorm = Annotated[
    Annotated[float, Field(gt=0)] | None,
    BeforeValidator(_zero_is_off),
    PlainSerializer(_off_is_zero),
    Field(description="a number above 0, or 0 for no clipping"),
]
