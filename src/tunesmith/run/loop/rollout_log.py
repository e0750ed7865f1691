"""``rollouts.jsonl``: whole groups of rollouts as text, one rollout per line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from tunesmith.config.schema import MonitorSection
from tunesmith.config.values import parse_size
from tunesmith.errors import StorageError, boundary, shortened
from tunesmith.learn.rewards.metrics import mean
from tunesmith.records.metrics import JsonLines, drop_after, rotated
from tunesmith.records.tail import json_object
from tunesmith.records.text import EvalExample, first_and_last, last_message, shown_path
from tunesmith.types import Record, Rollout, RolloutGroup, Tokenizer

Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]

EVALUATED = 4
"""Prompts logged per evaluation, for each group logged per step."""
LONGEST_COLUMN = 2000
"""The most characters of a data column that are logged."""
SUMMARY = (
    "kind", "group", "task", "prompt", "columns", "completion", "reward", "advantage", "status",
    "error",
)  # fmt: skip
"""The fields of a line that are sent to sinks."""
OPTIONAL = ("rendered", "messages", "parts", "metrics", "notes", "by_token")
"""Fields that are left out of a line if they are empty."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer's output for a part of a character."""


class RolloutLog:
    """Two files of at most ``most`` bytes in total: when the newer one exceeds half of that, it
    replaces the older one. ``begin`` comes before the first line.

    Args:
        path: the newer file; the name of the older one ends in ``-older``.
        groups: number logged per step; ``EVALUATED`` times as many per evaluation. With 0 only
            failed rollouts are.
        decode: decodes tokens to readable text.
        render: decodes tokens to text with the template's special tokens.
        tokens: also log each token's text and values.
    """

    def __init__(
        self,
        path: Path,
        groups: int,
        most: int,
        decode: Decode,
        render: Decode,
        *,
        tokens: bool = True,
    ) -> None:
        self._path = path
        self._groups = groups
        self._most = most
        self._decode = decode
        self._render = render
        self._tokens = tokens
        self._texts: dict[int, str] = {}
        self._lines: JsonLines | None = None

    @classmethod
    def of(
        cls, path: Path, monitor: MonitorSection, tokenizer: Tokenizer, groups: int
    ) -> RolloutLog:
        """The log of a run."""
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        most = parse_size(monitor.rollouts_size)
        render = tokenizer.decode
        return cls(path, groups, most, decode, render, tokens=monitor.tokens)

    def begin(self, resume_step: int | None = None) -> Self:
        """Open the files without the lines after ``resume_step``; None drops all."""
        for file in rotated(self._path):
            drop_after(file, -1 if resume_step is None else resume_step)
        self._lines = JsonLines(self._path, private=True)
        return self

    def write(
        self, step: int, groups: Sequence[RolloutGroup], kind: str = "train", first: int = 0
    ) -> list[Json]:
        """Append all rollouts of the first groups and the failed ones of the others. Returns the
        lines.

        Args:
            first: the number of the first group among those of the step.

        Raises:
            StorageError: the disk is full.
        """
        assert self._lines is not None, "the log has begun"
        kept = self._groups if kind == "train" else self._groups * EVALUATED
        lines = [
            {"step": step, "kind": kind, "group": first + number, **self._line(rollout, kind)}
            for number, group in enumerate(groups)
            for rollout in group.rollouts
            if number < kept or rollout.error is not None
        ]
        for line in lines:
            self._lines.write(line)
        if self._path.stat().st_size > self._most / 2:
            self._lines.close()
            with boundary(StorageError, f"cannot replace {self._path}", OSError):
                self._path.replace(rotated(self._path)[0])
            self._lines = JsonLines(self._path, private=True)
        return lines

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _line(self, rollout: Rollout, kind: str) -> Json:
        task = rollout.task
        file, colon, number = task.id.rpartition(":")
        rendered = self._render(task.prompt_ids)
        versions = _of_policy(rollout, "versions")
        advantages = rollout.by_token.get("advantage")
        learned = kind == "train" and advantages is not None
        texts = [(n, self._parts(record, learned)) for n, record in enumerate(rollout.records)]
        parts = [{"record": n, **part} for n, own in texts for part in own]
        line = {
            # Fields that readers filter by come before the prompt, so that they need not parse the
            # texts.
            "task": f"{shown_path(file)}:{number}" if colon and file.startswith("/") else task.id,
            "reward": rollout.reward,
            "rewards": rollout.rewards,
            "advantage": None if advantages is None else mean(list(advantages)),
            "status": rollout.status.value,
            "error": rollout.error,
            "tokens": rollout.num_sampled,
            "finish_reason": rollout.finish_reason,
            "versions": [min(versions), max(versions)] if versions else [],
            "prompt": task.prompt,
            "rendered": rendered if rendered != task.prompt else None,
            "columns": {
                name: shortened(value, LONGEST_COLUMN) if isinstance(value, str) else value
                for name, value in task.columns.items()
            },
            "completion": self._decode(rollout.completion_ids),
            "messages": rollout.messages,
            "parts": parts if len(parts) > 1 else None,
            "metrics": rollout.metrics,
            "notes": rollout.notes,
            "by_token": self._by_token(rollout) if self._tokens else None,
        }
        return {name: value for name, value in line.items() if value or name not in OPTIONAL}

    def _parts(self, record: Record, learned: bool) -> Iterator[Json]:
        """The text after the prompt, split by author. Text that a fork repeats does not count as
        the policy's."""
        at = record.turns[0].start if record.turns else len(record.token_ids)
        paid = {turn.stop: turn.reward for turn in record.turns if turn.reward}
        for ours, run in groupby(record.sampled[at:]):
            stop = at + len(list(run))
            yield {
                "by": "policy" if ours else "environment",
                "text": self._render(record.token_ids[at:stop]),
                "tokens": stop - at,
                "trained": ours and learned,
                **({"reward": paid[stop]} if stop in paid else {}),
            }
            at = stop

    def _by_token(self, rollout: Rollout) -> Json:
        """The policy's tokens, record after record: columns of their texts and of all values per
        token."""
        ids = _of_policy(rollout, "token_ids")
        columns = {
            "logprob": _of_policy(rollout, "logprobs"),
            "version": _of_policy(rollout, "versions"),
            **rollout.by_token,
        }
        by_token = {name: _column(values) for name, values in columns.items()} if ids else {}
        return {"text": self._pieces(ids), **by_token} if ids else {}

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. A character that spans several tokens is assigned to the first of
        them."""
        pieces = [self._piece(token) for token in ids]
        for broken, run in groupby(range(len(ids)), key=lambda place: BROKEN in pieces[place]):
            parts: list[int] = []
            for place in run if broken else ():
                parts.append(ids[place])
                whole = self._render(parts)
                pieces[place] = ""
                pieces[place - len(parts) + 1] = whole
                # A character has four bytes at most.
                if not whole.endswith(BROKEN) or len(parts) == 4:
                    parts = []
        return pieces

    def _piece(self, token: int) -> str:
        """A token's text within a longer text: at the start of a text, some tokenizers drop a
        leading space."""
        if token not in self._texts:
            self._texts[token] = self._render([token, token])[len(self._render([token])) :]
        return self._texts[token]


def _of_policy(rollout: Rollout, name: str) -> list[Any]:
    """The values ``name`` of the tokens that the policy wrote, record after record."""
    values = [compress(getattr(r, name), r.sampled) for r in rollout.records]
    return list(chain.from_iterable(values))


def _column(values: Iterable[float]) -> list[float] | float:
    """Values with four digits; a single value if all are equal."""
    short = [value if isinstance(value, int) else float(f"{value:.4g}") for value in values]
    return short[0] if len(set(short)) == 1 else short


def read_evaluated(path: Path) -> Iterator[Json]:
    """The complete lines of evaluations, oldest first."""
    for file in rotated(path):
        if file.exists():
            with boundary(StorageError, f"cannot read {file}", OSError), file.open("rb") as lines:
                for line in lines:
                    record = json_object(line) if b'"kind": "eval"' in line else None
                    if record and record.get("kind") == "eval":
                        yield record


def summary(line: Json) -> Json:
    """The short form of a line."""
    return {name: line[name] for name in SUMMARY if line.get(name) not in (None, {})}


def contrast(lines: Sequence[Json]) -> tuple[Json, Json] | None:
    """The best and the worst rollout of the first group with unequal rewards; None where there is
    none."""
    for _, group in groupby(lines, key=itemgetter("group")):
        scored = [line for line in group if line["reward"] is not None]
        scored.sort(key=itemgetter("reward"))
        if scored and scored[-1]["reward"] > scored[0]["reward"]:
            return scored[-1], scored[0]
    return None


def examples(lines: Iterable[Json], count: int) -> list[EvalExample]:
    """The first prompts of the evaluations, with their answers in the first and in the last
    evaluation."""
    answer = itemgetter("completion", "reward")
    pairs = first_and_last(line for line in lines if line["kind"] == "eval")[:count]
    return [EvalExample(last_message(a["prompt"]), answer(a), answer(b)) for a, b in pairs]
