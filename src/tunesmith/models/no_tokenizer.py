"""A stand-in tokenizer, for when there are no texts and no files but a model's configuration."""

from __future__ import annotations

from collections.abc import Sequence


class NoTokenizer:
    pad_token_id = eos_token_id = 0
    unk_token_id = chat_template = None
    pad_token = ""
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __call__(self, texts: Sequence[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0] for _ in texts]}

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        del token_ids
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}

    get_added_vocab = get_vocab
