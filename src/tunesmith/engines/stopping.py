"""Finds stop strings in decoded text, across token boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"


class StopStrings:
    """Watches one completion.

    Text is decoded piece by piece: each piece is the text that the newest tokens add to the previous piece, which
    preserves the tokenizer's treatment of spaces. A piece that ends inside a multi-byte character waits for the next
    token, but is searched up to that character.

    Args:
        least: a stop string that is complete within this many tokens is ignored.
        earlier: tokens before the completion, in which a stop string may begin.
    """

    def __init__(self, stop: tuple[str, ...], decode: Decode, least: int = 0, earlier: Sequence[int] = ()) -> None:
        self._stop = stop
        self._decode = decode
        self._least = least
        self._keep = max(len(s) for s in stop) - 1
        self.reach = max(len(s.encode()) for s in stop)
        """The most tokens that a stop string can have: each has at least one byte."""
        self._tail = ""  # the end of the settled text, where a stop string may have begun
        self._context = 0  # tokens [context, settled) were the last settled piece; counted from ``earlier[0]``
        self._settled = 0
        self._earlier: list[int] = []
        for token in earlier[-self.reach :]:
            self._earlier.append(token)
            self.completed_by(())

    def completed_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of all tokens so far contains a stop string. Call it after every token."""
        count = len(self._earlier)
        newest = [*self._earlier[self._context :], *token_ids[max(0, self._context - count) :]]
        before, text = self._decode(newest[: self._settled - self._context]), self._decode(newest)
        piece = text[len(before) :]
        # A stop string within the tail was found before; a new one begins less than its length before the piece.
        searched = self._tail + piece.rstrip(_INCOMPLETE)
        if len(token_ids) > self._least and any(
            searched.find(s, max(0, len(self._tail) - len(s) + 1)) >= 0 for s in self._stop
        ):
            return True
        if len(text) > len(before) and not text.endswith(_INCOMPLETE):
            self._tail = searched[-self._keep :] if self._keep else ""
            self._context, self._settled = self._settled, count + len(token_ids)
        return False
