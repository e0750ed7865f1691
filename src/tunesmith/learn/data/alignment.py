"""Where the tokens of two tokenizers end at the same place of a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from tunesmith.errors import ModelError
from tunesmith.types import Tokenizer

TAIL = 8
"""Tokens of a prompt after which an answer is decoded: some decoders treat a first token apart."""


class SpanPair(NamedTuple):
    """The same text: tokens ``[start, stop)`` of the one tokenizer, and of the other."""

    ours: tuple[int, int]
    theirs: tuple[int, int]


def decode_ends(
    tokenizer: Tokenizer, before: Sequence[int], token_ids: Sequence[int]
) -> tuple[str, list[int]]:
    """The text of tokens after others, and how much of it each token completes, in characters.

    A token that ends within a character completes as much as the one before it.

    Raises:
        ModelError: the tokenizer cannot decode token by token.
    """
    from tokenizers.decoders import DecodeStream

    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        name = type(tokenizer).__name__
        raise ModelError(f"{name} does not decode token by token; use a fast one (tokenizer.json)")
    stream = DecodeStream(skip_special_tokens=False)
    for token in before[-TAIL:]:
        stream.step(core, token)
    text = ""
    ends: list[int] = []
    for token in token_ids:
        text += stream.step(core, token) or ""
        ends.append(len(text))
    return text, ends


def align(ours: tuple[str, list[int]], theirs: tuple[str, list[int]]) -> list[SpanPair]:
    """The shortest spans whose ends coincide, as far as the texts are the same.

    Example:
        "ab", "c" and "a", "bc", "d" of "abcd" coincide after "abc": ``((0, 2), (0, 2))``.
    """
    pairs = zip(ours[0], theirs[0], strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Of tokens with the same end, the first completes it, and the others begin a character.
    first = [
        {end: place for place, end in reversed([*enumerate(ends, 1)])} for _, ends in (ours, theirs)
    ]
    spans: list[SpanPair] = []
    start = (0, 0)
    for end in sorted(first[0].keys() & first[1].keys()):
        if 0 < end <= same:
            stop = (first[0][end], first[1][end])
            spans.append(SpanPair((start[0], stop[0]), (start[1], stop[1])))
            start = stop
    return spans
