"""Keeps texts of special tokens in observations from becoming those tokens.

A tool's output may contain ``<|im_start|>assistant``. Tokenized as it is, it would begin a turn of
the assistant that the policy never wrote. Before rendering, each such text in an observation is
replaced by one character of a private-use plane; after rendering, that character is encoded as the
text's ordinary tokens, which decode to the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tunesmith.learn.data.tokens import encode, encode_after
from tunesmith.types import Tokenizer

FIRST = 0xF0000
"""The first character of Unicode's supplementary private use area A."""


@dataclass(frozen=True)
class TokenGuard:
    """Hides the texts of special tokens: text ``i`` becomes the character ``FIRST + i``."""

    texts: tuple[str, ...] = ()
    """The longest first, so that a text is found before its parts."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, turns: str = "") -> TokenGuard:
        """Guards against special tokens, and against other added tokens in ``turns``, a rendered
        conversation."""
        texts = {token for token in tokenizer.all_special_tokens if token}
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
            if token.special or (token.content.strip() and token.content in turns):
                texts.add(token.content)
        return cls(tuple(sorted(texts, key=lambda text: (-len(text), text))))

    @cached_property
    def _hidden(self) -> dict[str, str]:
        return {text: chr(FIRST + number) for number, text in enumerate(self.texts)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile(f"([{chr(FIRST)}-{chr(FIRST + max(0, len(self.texts) - 1))}])")

    def hide(self, text: str) -> str:
        """The text with each special token's text replaced by its character."""
        return self._pattern.sub(lambda match: self._hidden[match[0]], text)

    def reveal(self, text: str) -> str:
        """The original of a hidden text."""
        return text.translate(dict(enumerate(self.texts, FIRST)))

    def tail(self, hidden: str, length: int) -> str:
        """The end of ``hidden`` that ``reveal`` makes ``length`` characters of."""
        start = len(hidden)
        while start and length > 0:
            start -= 1
            length -= len(self.reveal(hidden[start]))
        return hidden[start:]

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Token ids of a hidden text."""
        return self._encode(tokenizer, text, lambda piece: encode(tokenizer, [piece])[0])

    def encode_after(self, tokenizer: Tokenizer, before: str, text: str) -> list[int]:
        """Token ids of a hidden text as a continuation of ``before``."""
        return self._encode(tokenizer, text, lambda piece: encode_after(tokenizer, before, piece))

    def _encode(
        self, tokenizer: Tokenizer, text: str, encode_first: Callable[[str], list[int]]
    ) -> list[int]:
        if not self.texts:
            return encode_first(text) if text else []
        token_ids: list[int] = []
        before = ""
        for number, piece in enumerate(self._marks.split(text)):
            # Two parts of a special token's text, encoded one by one, never form the token.
            original = self.reveal(piece)
            parts = [piece] if number % 2 == 0 else [original[:1], original[1:]]
            for part in filter(None, parts):
                token_ids += encode_after(tokenizer, before, part) if before else encode_first(part)
                before = part
        return token_ids
