"""Token ids against the rows of the model's embedding: a token that was added without a row cannot
be computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.errors import DataError, ModelError, boundary
from tunesmith.records.storage import read_json
from tunesmith.types import Tokenizer

Origins = Mapping[str, str | None]
"""Texts that are part of every line, by name: they may be where a token comes from."""


def rows_of(tokenizer: Any) -> int | None:
    """The number of rows, which ``set_rows`` has noted; None if it is unknown."""
    return getattr(tokenizer, "embedding_rows", None)


def set_rows(tokenizer: Any, rows: int | None) -> None:
    """Note how many rows the embedding has for which a tokenizer makes token ids."""
    tokenizer.embedding_rows = rows


def without_row(
    tokenizer: Tokenizer, token_ids: Sequence[int], origins: Origins | None = None
) -> str | None:
    """What is wrong with the first token that has no row; None if all have one."""
    rows = rows_of(tokenizer)
    if rows is None or max(token_ids, default=0) < rows:
        return None
    token = next(token for token in token_ids if token >= rows)
    return _without_row(
        tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False),
        token,
        rows,
        _size(tokenizer),
        origins,
    )


def enough_rows(tokenizer: Any, other: Any) -> bool:
    """Whether one of the two models, of one vocabulary, has a row for every token that the other
    may produce.

    Models pad the vocabulary to different sizes; the rows of the padding are never sampled.
    """
    ours = rows_of(tokenizer)
    theirs = rows_of(other)
    return ours is None or theirs is None or min(ours, _size(tokenizer)) <= theirs


def check_end(path: str, tokenizer: Any) -> None:
    """Refuse a tokenizer whose EOS has no row: the model could never stop.

    Raises:
        ModelError: names it.
    """
    rows = rows_of(tokenizer)
    eos = tokenizer.eos_token_id
    if rows is not None and eos is not None and eos >= rows:
        problem = _without_row(str(tokenizer.eos_token), eos, rows, _size(tokenizer))
        raise ModelError(f"the tokenizer of '{path}', eos_token: {problem}")


def unused_note(tokenizer: Any) -> str | None:
    """A sentence about tokens without rows, as long as no text has them; None if there are none."""
    rows = rows_of(tokenizer)
    if rows is None or (size := _size(tokenizer)) <= rows:
        return None
    return (
        f"The tokenizer has {size} tokens and the model's embedding {rows} rows: lines with others "
        "are refused."
    )


def added_without_row(directory: Path, rows: int) -> dict[str, int]:
    """The tokens that were added to a local tokenizer without rows, with their ids; from
    ``tokenizer.json`` alone.

    Raises:
        ModelError: the file is damaged.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return {}
    added: list[dict[str, Any]] = read_json(path, ModelError).get("added_tokens") or []
    with boundary(ModelError, f"cannot read {path}", (ValueError, KeyError, TypeError)):
        return {str(one["content"]): int(one["id"]) for one in added if int(one["id"]) >= rows}


def check_texts(texts: Iterable[str], added: Mapping[str, int], rows: int) -> None:
    """Refuse texts that hold one of the tokens of ``added_without_row``.

    Raises:
        DataError: names the first such token.
    """
    for text in texts:
        for token, number in added.items():
            if token in text:
                raise DataError(_without_row(token, number, rows, max(added.values()) + 1))


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a line's value, such as a list of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def _size(tokenizer: Any) -> int:
    """The number of a tokenizer's ids, from 0 to the highest."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _without_row(
    text: str, token: int, rows: int, size: int, origins: Origins | None = None
) -> str:
    origin = next(
        (f" (in {name})" for name, whole in (origins or {}).items() if whole and text in whole), ""
    )
    return (
        f"the token '{text}'{origin} has id {token}; the tokenizer has {size} tokens and the "
        f"model's embedding {rows} "
        "rows. Use the tokenizer that the model was trained with, or give the new tokens rows: "
        "model.resize_token_embeddings(len(tokenizer)), then save both"
    )
