"""Types of setting values, with the descriptions used in error messages; amounts of memory as text
with a unit."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from math import ceil, inf
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from tunesmith.errors import nearest
from tunesmith.records.redact import redact

_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_UNITS = {**_DECIMAL, "": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


LEAST_MEMORY = 16 * 10**6
"""Of a process with the user's code, beyond its imports."""


def parse_size(text: str) -> int:
    """``"512MB"`` → 512,000,000; ``"1.5GiB"`` → 1,610,612,736; a bare number is bytes.

    Raises:
        ValueError: the text is not a positive size.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= size < inf:
        raise ValueError(
            f"'{text}' is not a size; write a number and a unit, such as '512MB' or '4GB'"
        )
    return int(size)


def megabytes(size: int) -> str:
    """A number of bytes in run-file form, rounded up to megabytes."""
    return f"{max(1, ceil(size / 10**6))}MB"


def format_size(size: float) -> str:
    """A size with about three digits and a decimal unit, readable by ``parse_size``:
    ``"1.61GB"``."""
    for unit, unit_size in _DECIMAL.items():
        if size >= unit_size:
            amount = size / unit_size
            return f"{amount:.0f}{unit}" if amount >= 100 else f"{amount:.3g}{unit}"
    return f"{int(size)}B"


def checked_size(text: str) -> str:
    parse_size(text)
    return text


def checked_memory(text: str) -> str:
    if parse_size(text) < LEAST_MEMORY:
        raise ValueError(
            f"'{text}' is too little for any code; give {format_size(LEAST_MEMORY)} or more"
        )
    return text


_NOT_IN_A_URL = re.compile(r"[\s'\"<>#]")
"""Must be percent-encoded; and what follows a # is not sent."""


def checked_url(text: str) -> str:
    """Return the text unchanged; ValueError if it is not an HTTP URL with a host."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        valid = valid and not _NOT_IN_A_URL.search(text)
    except ValueError:  # a port that is not a number
        valid = False
    if not valid:
        shown = redact(text.partition("#")[0])
        raise ValueError(
            f"{shown!r} is not a URL; write it in full, such as 'http://127.0.0.1:8100/reward', "
            "with spaces and quotes percent-encoded, and without #"
        )
    return text


LARGEST_COUNT = 2**31 - 1


def at_most(largest: float) -> AfterValidator:
    """A very high upper bound, which messages mention only if a value exceeds it."""

    def check(number: float) -> float:
        if number > largest:
            raise ValueError(f"{number} is too large; it can be {largest} at most")
        return number

    return AfterValidator(check)


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty; give a value, or leave it out")
    return text


Text = Annotated[str, AfterValidator(_not_empty)]
PositiveInt = Annotated[int, Field(gt=0), at_most(LARGEST_COUNT)]
Count = Annotated[int, Field(ge=0), at_most(LARGEST_COUNT)]
Seed = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0), at_most(10)]
"""A learning rate."""
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, lt=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[
    str, AfterValidator(checked_size), Field(description="a size such as '512MB' or '4GB'")
]
Memory = Annotated[
    str, AfterValidator(checked_memory), Field(description="a size such as '512MB' or '4GB'")
]
PROMPT = "{prompt}"
"""In a command: the task's prompt."""
_OF_A_SHELL = ("&&", "||", "|", ";", "&", ">", ">>", "<", "2>")


def checked_command(value: object) -> object:
    """A command as words; ValueError if only a shell understands it, or one would run a prompt."""
    words = shlex.split(value) if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return words
    if not words or not words[0]:
        raise ValueError("it is empty; name a program")
    for word in words if isinstance(value, str) else ():
        if word in _OF_A_SHELL or word.endswith(";"):
            raise ValueError(f"no shell runs it, and '{word}' is a shell's; write sh -c '...'")
    for before, word in pairwise(words):
        if before in ("-c", "-lc") and PROMPT in word:
            raise ValueError(
                f"a shell would run {PROMPT}; read the prompt from standard input, as in "
                "sh -c 'agent \"$(cat)\"'"
            )
    return tuple(words)


Command = Annotated[
    tuple[str, ...],
    BeforeValidator(checked_command),
    Field(description="a command as text or as a list of words"),
]
Url = Annotated[
    str,
    AfterValidator(checked_url),
    Field(description="a URL such as 'http://127.0.0.1:8100/reward'"),
]


SINKS = ("tensorboard", "wandb", "trackio", "mlflow")


def checked_sink(text: str) -> str:
    """Return the text unchanged; ValueError if it is neither a sink nor a reference to a class."""
    if text not in SINKS and ":" not in text:
        raise ValueError(
            f"there is no sink '{text}'.{nearest(text, SINKS)} Your own sink is 'file.py:Class'"
        )
    return text


SinkName = Annotated[
    str,
    AfterValidator(checked_sink),
    Field(description=f"one of {', '.join(map(repr, SINKS))}, or 'file.py:Class'"),
]


GradNorm = Annotated[float, Field(ge=0, description="a number above 0, or 0 for no clipping")]
