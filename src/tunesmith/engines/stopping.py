"""Finds stop strings in decoded text, across token boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"


class StopStrings:
    """Watches one completion.

    Text is decoded piece by piece: each piece is what the newest tokens add to the piece before them, so
    that a tokenizer's treatment of spaces is its own. A piece that ends inside a multi-byte character waits
    for the next token, but is searched up to there.

    A stop string that is complete within the first ``least`` tokens is passed over.
    """

    def __init__(self, stop: tuple[str, ...], decode: Decode, least: int = 0) -> None:
        self._stop = stop
        self._decode = decode
        self._least = least
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""  # the end of the settled text, where a stop string may have begun
        self._context = 0  # tokens [context, settled) were the last settled piece
        self._settled = 0

    def completed_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of all tokens so far contains a stop string. Call it after every token."""
        before = self._decode(token_ids[self._context : self._settled])
        text = self._decode(token_ids[self._context :])
        piece = text[len(before) :]
        # A stop string that is complete in the tail was found before; the newest begins at most its length earlier.
        searched = self._tail + piece.rstrip(_INCOMPLETE)
        if len(token_ids) > self._least and any(
            searched.find(s, max(0, len(self._tail) - len(s) + 1)) >= 0 for s in self._stop
        ):
            return True
        if len(text) > len(before) and not text.endswith(_INCOMPLETE):
            self._tail = searched[-self._keep :] if self._keep else ""
            self._context, self._settled = self._settled, len(token_ids)
        return False
