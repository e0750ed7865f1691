"""Judging a mathematical answer with math-verify. Runs in a worker process; imported nowhere
else."""

from __future__ import annotations

import functools
import logging
import re
from itertools import product
from typing import Any

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

# It warns that its timeouts are off; here the worker is killed instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_math_verify: Any = math_verify  # partly untyped
EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}|####|:\s")
_SCIENTIFIC = re.compile(r"(?<![\w\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)\b")


def judge(gold: str, text: str) -> dict[str, bool]:
    """Whether the gold answer parses, whether the text holds an answer, and whether the two are
    equal.

    A comparison that math-verify cannot make (a set with a matrix) counts as "not equal", as in
    math-verify.
    """
    expected = _parse_gold(gold)
    answers = _parse(text)
    correct = any(_equal(e, a) for e, a in product(expected, answers))
    return {"gold": bool(expected), "answered": bool(answers), "correct": correct}


def _equal(gold: object, answer: object) -> bool:
    try:
        return bool(_math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False


@functools.lru_cache(maxsize=1024)
def _parse_gold(gold: str) -> list[Any]:
    # A bare "\frac{1}{2}" or "\{1, 2\}" is only read as LaTeX inside delimiters.
    bare = not _DELIMITED.search(gold) and not _PROSE.search(_COMMAND.sub(" ", gold))
    if bare:
        gold = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", gold)
    return _parse(f"\\boxed{{{gold}}}" if bare else gold)


def _parse(text: str) -> list[Any]:
    return _math_verify.parse(text, EXTRACTION, fallback_mode="no_fallback", parsing_timeout=0)
