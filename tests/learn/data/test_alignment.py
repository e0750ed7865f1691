"""Alignment of two tokenizers: spans by hand, characters that tokens share, texts that differ."""

from __future__ import annotations

import pytest

from tests.support.tiny import tokenizer, tokenizer_with_pairs
from tunesmith.errors import ModelError
from tunesmith.learn.data.alignment import align, decode_ends


@pytest.mark.parametrize(
    ("ours", "theirs", "spans"),
    [
        (("abc", [2, 3]), ("abcd", [1, 3, 4]), [((0, 2), (0, 2))]),
        (("abc", [1, 2, 3]), ("abc", [3]), [((0, 3), (0, 1))]),
        (("ab", [1, 1, 2]), ("ab", [1, 2]), [((0, 1), (0, 1)), ((1, 3), (1, 2))]),
        (("aBc", [1, 2, 3]), ("abc", [1, 2, 3]), [((0, 1), (0, 1))]),
        (("abc", [1, 2, 3]), ("xbc", [1, 2, 3]), []),
        (("", []), ("", []), []),
    ],
)
def test_the_shortest_spans_whose_ends_coincide(
    ours: tuple[str, list[int]], theirs: tuple[str, list[int]], spans: list[object]
) -> None:
    assert align(ours, theirs) == spans


def test_a_token_within_a_character_ends_where_the_one_before_it_did() -> None:
    bytes_ = tokenizer()
    before = bytes_("so ")["input_ids"]
    ids = bytes_("né!")["input_ids"]
    assert decode_ends(bytes_, before, ids) == ("né!", [1, 1, 2, 3])
    pairs = tokenizer_with_pairs("n", "o")
    assert decode_ends(pairs, [], pairs("noé!")["input_ids"]) == ("noé!", [2, 2, 3, 4])
    assert decode_ends(bytes_, before, ids[:2]) == ("n", [1, 1])


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match="token by token"):
        decode_ends(object(), [], [1])
