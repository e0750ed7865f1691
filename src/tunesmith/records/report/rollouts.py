"""An index of a run's rollouts: each group's position in the files, and the fields for filtering.

Lines are read on demand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tunesmith.records.metrics import numbers, rotated
from tunesmith.records.plain import JsonObject
from tunesmith.records.tail import Identity, ReadPosition, identity, json_object, open_lines

SEARCHED = 256 << 20
"""Bytes that one search reads; it returns the position to continue from."""
_HEAD_ENDS = b', "prompt": '
"""The part of a line before it is enough for the index. It cannot occur in texts, where quotes are
escaped."""


class LineGroup(NamedTuple):
    """Consecutive lines of one step, kind and group. ``reward`` is the mean; ``low`` and ``high``
    are its extremes."""

    start: int
    stop: int
    step: int
    kind: str
    number: int
    task: str
    rollouts: int
    failed: int
    reward: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Query:
    """A search for groups. ``text`` is searched in prompts, answers, errors and data columns,
    ignoring case."""

    kind: str = ""
    first: int | None = None
    last: int | None = None
    status: str = ""
    """``failed``; ``contrast``: unequal rewards; ``equal``: equal rewards."""
    text: str = ""

    def admits(self, group: LineGroup) -> bool:
        """Whether a group matches, apart from its text."""
        scored = group.low is not None
        of_status = {
            "failed": group.failed > 0,
            "contrast": scored and group.low != group.high,
            "equal": scored and group.low == group.high,
        }
        after = self.first is None or group.step >= self.first
        before = self.last is None or group.step <= self.last
        of_kind = self.kind in ("", group.kind)
        return after and before and of_kind and of_status.get(self.status, True)


@dataclass(slots=True)
class _File:
    """The indexed content of one file, regardless of its name."""

    groups: list[LineGroup] = field(default_factory=list[LineGroup])
    place: ReadPosition = field(default_factory=ReadPosition)
    damaged: int = 0


@dataclass(slots=True)
class RolloutIndex:
    """The groups of both files of a log, the older file's first. ``read_on`` adds new lines.

    A group's position is its index among all groups seen of the run; it stays valid when the files
    are rotated.
    """

    path: Path
    dropped: int = 0
    """Number of indexed groups that have been rotated away."""
    _files: dict[Identity, _File] = field(default_factory=dict[Identity, _File])
    _paths: dict[Identity, Path] = field(default_factory=dict[Identity, Path])

    def read_on(self) -> None:
        """Read the lines that were written since the last call.

        Raises:
            StorageError: a file cannot be read.
        """
        files: dict[Identity, _File] = {}
        self._paths = {}
        for path in rotated(self.path):
            with open_lines(path) as file:
                key = identity(file)
                if key is None:
                    continue
                known = self._files.get(key, _File())
                if not known.place.is_in(file):
                    known = _File()  # a resumed run has truncated it
                for start, line in known.place.lines(file):
                    _add(known, start, line)
                files[key] = known
                self._paths[key] = path
        gone = [file for key, file in self._files.items() if key not in files]
        self.dropped += sum(len(file.groups) for file in gone)
        self._files = files

    @property
    def damaged(self) -> int:
        """Number of lines that are not rollouts."""
        return sum(file.damaged for file in self._files.values())

    @property
    def size(self) -> int:
        """Total bytes of both files."""
        return sum(file.place.read for file in self._files.values())

    def groups(self) -> list[LineGroup]:
        return [group for file in self._files.values() for group in file.groups]

    def lines(self, place: int) -> list[JsonObject]:
        """The rollouts of the group at a position; none if the files have changed since."""
        place -= self.dropped
        for key, file in self._files.items():
            if 0 <= place < len(file.groups):
                return _read(self._paths[key], key, file.groups[place])
            place -= len(file.groups)
        return []

    def find(self, query: Query, start: int | None, most: int) -> tuple[list[int], int | None]:
        """Positions of at most ``most`` matching groups, the newest first.

        Args:
            start: the position to begin at; None: the newest.

        Returns:
            The positions, and the position to continue from; None at the end.
        """
        groups = dict(enumerate(self.groups(), self.dropped))
        matching = list[int]()
        left = SEARCHED
        for place in reversed([p for p in groups if start is None or p <= start]):
            group = groups[place]
            if len(matching) == most or left < 0:
                return matching, place
            if query.admits(group):
                left -= group.stop - group.start if query.text else 0
                texts = self.lines(place) if query.text else ()
                if not query.text or any(holds(line, query.text) for line in texts):
                    matching.append(place)
        return matching, None


def _add(file: _File, start: int, line: bytes) -> None:
    """Count a line in its group."""
    stop = start + len(line)
    head = _head(line)
    if head is None:
        file.damaged += 1
        return
    step = head["step"]
    kind = str(head.get("kind", "train"))
    number = head["group"] if isinstance(head.get("group"), int) else 0
    reward = numbers({"reward": head.get("reward")}).get("reward")
    failed = head.get("error") is not None or head.get("status", "ok") != "ok"
    last = file.groups[-1] if file.groups else None
    if last is None or (last.step, last.kind, last.number) != (step, kind, number):
        task = str(head.get("task", ""))[:200]
        counts = (1, int(failed), reward, reward, reward)
        file.groups.append(LineGroup(start, stop, step, kind, number, task, *counts))
        return
    known = [value for value in (last.low, last.high, reward) if value is not None]
    scored = last.rollouts - last.failed
    mean = last.reward if reward is None else reward
    if reward is not None and last.reward is not None:
        mean = last.reward + (reward - last.reward) / (scored + 1)
    file.groups[-1] = last._replace(
        stop=stop,
        rollouts=last.rollouts + 1,
        failed=last.failed + failed,
        reward=mean,
        low=min(known, default=None),
        high=max(known, default=None),
    )


def _head(line: bytes) -> JsonObject | None:
    """The fields of a line that the index needs, if possible without parsing its texts."""
    cut = line.find(_HEAD_ENDS)
    head = json_object(line[:cut] + b"}") if cut > 0 else None
    if head is None or "reward" not in head:
        head = json_object(line)
    return head if head is not None and isinstance(head.get("step"), int) else None


def _read(path: Path, key: Identity, group: LineGroup) -> list[JsonObject]:
    with open_lines(path) as file:
        if identity(file) != key:
            return []
        file.seek(group.start)
        lines = file.read(group.stop - group.start).splitlines()
    read = [line for line in map(json_object, lines) if line is not None]
    return [line for line in read if line.get("step") == group.step]


def holds(line: JsonObject, text: str) -> bool:
    """Whether a rollout's texts contain a text, ignoring case."""
    wanted = text.casefold()
    return any(wanted in part.casefold() for part in texts(line))


def texts(line: JsonObject) -> Iterator[str]:
    """The searchable texts of a rollout."""
    for name in ("task", "prompt", "completion", "error", "status", "columns", "notes"):
        value = line.get(name)
        if value is not None:
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    parts = line.get("parts")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict):
            yield str(part.get("text", ""))


def sample(index: RolloutIndex, most: int) -> list[int]:
    """Positions of groups with at most ``most`` bytes in total: failures, evaluations and others,
    each spread evenly.

    A group that exceeds the remaining bytes for its kind is left out.
    """
    groups = list(enumerate(index.groups(), index.dropped))
    kinds: dict[str, list[tuple[int, LineGroup]]] = {"failed": [], "eval": [], "other": []}
    for place, group in groups:
        kind = "failed" if group.failed else "eval" if group.kind == "eval" else "other"
        kinds[kind].append((place, group))
    chosen = list[int]()
    left = most
    for number, members in enumerate(kinds.values()):
        picked = list(_spread(members, left // (3 - number)))
        left -= sum(group.stop - group.start for _, group in picked)
        chosen += [place for place, _ in picked]
    return sorted(chosen)


def _spread(groups: Sequence[tuple[int, LineGroup]], most: int) -> Iterator[tuple[int, LineGroup]]:
    """Evenly spaced groups, as many as fit."""
    size = sum(group.stop - group.start for _, group in groups)
    count = len(groups) if size <= most else max(1, len(groups) * most // size)
    for number in range(min(count, len(groups))):
        place, group = groups[number * (len(groups) - 1) // max(1, count - 1)]
        if group.stop - group.start <= most:
            most -= group.stop - group.start
            yield place, group
