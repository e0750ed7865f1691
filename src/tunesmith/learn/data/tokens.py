"""Tokenization that maps each span of a text to its exact tokens.

``L`` is the number of tokens of one text. A span is a half-open range of characters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tunesmith.errors import DataError, ModelError
from tunesmith.types import Tokenizer

Span = tuple[int, int]

CHUNK = 1024
"""The number of texts tokenized in one call."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text's tokens; ``offsets[t]`` is the character span of token ``t``."""

    token_ids: list[int]  # [L]
    offsets: list[Span]  # [L]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without added special tokens."""
    return [ids for out in _batches(tokenizer, texts) for ids in out["input_ids"]]


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of tokens, including special tokens."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return tokenizer.decode(list(token_ids), **options)


def encode_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[Encoded]:
    """Each text's tokens and offsets, without added special tokens; ModelError if the tokenizer
    gives no offsets."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{type(tokenizer).__name__} does not map tokens to characters, so losses cannot "
            "be masked exactly. Use a model with a fast tokenizer (a tokenizer.json)."
        )
    for out in _batches(tokenizer, texts, return_offsets_mapping=True):
        yield from map(Encoded, out["input_ids"], out["offset_mapping"])


def _batches(tokenizer: Tokenizer, texts: Sequence[str], **options: bool) -> Iterator[Any]:
    for start in range(0, len(texts), CHUNK):
        yield tokenizer(list(texts[start : start + CHUNK]), add_special_tokens=False, **options)


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Token ids of ``text`` as a continuation of ``before``, without the leading space that some
    tokenizers insert.

    No token crosses the boundary.
    """
    guards = (before, "a", ".", "\n") if getattr(tokenizer, "is_fast", False) else ()
    for guard in filter(None, guards):
        tokens = _continuation(tokenizer, guard, text)
        if tokens is not None:
            return tokens
    return encode(tokenizer, [text])[0]


def leading_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer prepends to a text: BOS or nothing.

    Tokens that it appends are not included: a prompt must not end with EOS.
    """
    bare: list[int] = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full: list[int] = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return full[:1] if full and full[0] == tokenizer.bos_token_id else []


def with_leading(leading: list[int], token_ids: list[int]) -> list[int]:
    """``token_ids`` with ``leading`` prepended; unchanged if they already begin with it, to avoid a
    second BOS."""
    return token_ids if token_ids[: len(leading)] == leading else [*leading, *token_ids]


def mask_spans(
    tokenizer: Tokenizer, text: str, encoded: Encoded, spans: Sequence[Span]
) -> tuple[list[int], list[bool]]:
    """Token ids of ``text``, and whether each is in one of ``spans``.

    Every boundary of a span becomes a token boundary. If a token crosses one (two line breaks, the
    first at the end of the prompt), the text is tokenized in pieces. This matches inference, where
    the policy continues a prompt that was tokenized separately.

    Args:
        spans: in order, not overlapping.

    Returns:
        ``token_ids [L]``, ``mask [L]``.

    Raises:
        DataError: a boundary cannot be made exact with this tokenizer.
    """
    cuts = sorted({place for span in spans for place in span} - {0, len(text)})
    index = {cut: _index_of_cut(encoded.offsets, cut) for cut in cuts}
    index |= {0: 0, len(text): len(encoded.offsets)}
    if None not in index.values():
        mask = [False] * len(encoded.token_ids)
        for start, stop in spans:
            tokens = slice(index[start], index[stop])
            mask[tokens] = [True] * len(mask[tokens])
        return encoded.token_ids, mask
    borders = [0, *cuts, len(text)]
    inside = [any(a <= left and right <= b for a, b in spans) for left, right in pairwise(borders)]
    pieces = _encode_pieces(tokenizer, text, encoded.token_ids, borders)
    token_ids = [token for piece in pieces for token in piece]
    mask = [learn for piece, learn in zip(pieces, inside, strict=True) for _ in piece]
    return token_ids, mask


def _index_of_cut(offsets: list[Span], cut: int) -> int | None:
    """The number of tokens before character ``cut``; None if a token crosses it or the boundary is
    ambiguous.

    It is ambiguous if the neighbouring offsets leave a gap: some tokenizers trim spaces from
    offsets, so the space may belong to either token.
    """
    index = bisect_right(offsets, cut, key=lambda span: span[1])
    clean = 0 < index < len(offsets) and offsets[index - 1][1] == cut == offsets[index][0]
    return index if clean else None


def _encode_pieces(
    tokenizer: Tokenizer, text: str, joint: list[int], borders: list[int]
) -> list[list[int]]:
    """Tokens of each piece of ``text`` between ``borders``; together they decode to the same
    text."""
    pieces = [text[a:b] for a, b in pairwise(borders)]
    wanted = decode(tokenizer, joint)
    for guard in ("", "\n", ".", "a"):
        encoded = [encode(tokenizer, pieces[:1])[0]]
        for piece in pieces[1:]:
            tokens = _continuation(tokenizer, guard, piece)
            if tokens is None:
                break
            encoded.append(tokens)
        else:
            if decode(tokenizer, [token for piece in encoded for token in piece]) == wanted:
                return encoded
    before = text[max(0, borders[1] - 12) : borders[1]]
    after = text[borders[1] : borders[1] + 12]
    raise DataError(
        f"a token crosses the border of what is learned ({before!r} | {after!r}) and cannot be "
        "split there; move blanks from the end of the prompt to the start of the completion"
    )


def _continuation(tokenizer: Tokenizer, guard: str, piece: str) -> list[int] | None:
    """Tokens of ``piece`` after the text ``guard``; None if a token crosses the boundary."""
    out = tokenizer(guard + piece, add_special_tokens=False, return_offsets_mapping=True)
    if not guard:
        return list(out["input_ids"])
    index = _index_of_cut(out["offset_mapping"], len(guard))
    return None if index is None else list(out["input_ids"][index:])
