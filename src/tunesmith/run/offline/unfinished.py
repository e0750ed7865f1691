"""Finished work that an output file cannot have yet, because its lines are in the order of the
data.

It is in a hidden file next to the output: completions of prompts that lack others, and lines that
follow a missing one. After a kill at any moment a continued run takes them from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tunesmith.records.metrics import JsonLines, keep_lines
from tunesmith.run.loop.collect import Complete
from tunesmith.run.offline.lines import Json, read_lines, unfinished_file, write_whole
from tunesmith.types import Completion, Sampling

LEAST_BYTES = 1 << 20
"""The file is rewritten without what is no longer needed when it exceeds this and four times its
size after that."""


class Unfinished:
    """The finished work for places of the data from ``start`` on.

    Args:
        path: the output file, which has the lines before ``start``.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._file = unfinished_file(path)
        self._kept: defaultdict[int, list[Json]] = defaultdict(list)
        keep_lines(self._file, lambda record: record["place"] >= 0)
        for record in read_lines(self._file) if self._file.exists() else ():
            if record["place"] >= start:
                self._kept[record["place"]].append(record)
        self._out = JsonLines(self._file, private=True)
        self._most_bytes = LEAST_BYTES

    def lines(self) -> list[tuple[int, Json]]:
        """The finished lines, each with its place."""
        kept = self._kept.items()
        return [
            (p, record["line"]) for p, records in kept for record in records if "line" in record
        ]

    @property
    def completions(self) -> int:
        """Number of finished completions of prompts whose line is not finished."""
        return sum(len(records) for records in self._kept.values() if "line" not in records[-1])

    def completing(self, place: int, complete: Complete) -> Complete:
        """The engine's method for the prompt at a place; each completion is kept, and known ones
        are not repeated."""

        async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            for record in self._kept.get(place, ()):
                if record.get("seed") == sampling.seed and None not in record["logprobs"]:
                    ids = record["token_ids"]
                    logprobs = record["logprobs"]
                    return Completion(ids, logprobs, [0] * len(ids), record["finish_reason"])
            done = await complete(prompt_ids, sampling)
            sampled = {
                "token_ids": done.token_ids,
                "logprobs": done.logprobs,
                "finish_reason": done.finish_reason,
            }
            self.keep({"place": place, "seed": sampling.seed, **sampled})
            return done

        return generate

    def keep(self, record: Json) -> None:
        self._kept[record["place"]].append(record)
        self._out.write(record)

    def drop(self, place: int) -> None:
        """Call this once the output file has the line."""
        self._kept.pop(place, None)

    def tidy(self) -> None:
        """Keep the file from growing with the data."""
        if self._file.stat().st_size < self._most_bytes:
            return
        self._out.close()
        write_whole(self._file, (record for records in self._kept.values() for record in records))
        self._out = JsonLines(self._file, private=True)
        self._most_bytes = max(LEAST_BYTES, 4 * self._file.stat().st_size)

    def close(self, *, finished: bool) -> None:
        """Close the file of unfinished work.

        Args:
            finished: the output file is complete, so that nothing here is needed.
        """
        self._out.close()
        if finished:
            self._file.unlink(missing_ok=True)
