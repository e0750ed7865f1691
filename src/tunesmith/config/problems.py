"""What is wrong with a configuration, and where; many at once make one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tunesmith.config.places import KeyPath, line_of
from tunesmith.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """``text`` says what is wrong with the key at ``path``, what is valid and what to do."""

    path: KeyPath
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where the keys of a configuration were said: lines of a file, overrides."""

    file: Path | None
    lines: Mapping[KeyPath, int]
    overrides: Mapping[KeyPath, str]
    problems: list[Problem] = field(default_factory=list[Problem])

    def is_override(self, path: KeyPath) -> bool:
        return self._override(path) is not None

    def place(self, path: KeyPath) -> tuple[int, str]:
        """A sort key and words: ``line 4``, ``override 'train.lr=x'`` or nothing."""
        if (override := self._override(path)) is not None:
            return 10**9, f"override '{override}'"
        line = line_of(path, self.lines)
        return (0, "") if line is None else (line, f"line {line}")

    def _override(self, path: KeyPath) -> str | None:
        inside = [text for key, text in self.overrides.items() if path[: len(key)] == key]
        return inside[-1] if inside else None


def raise_problems(problems: Sequence[Problem], source: Source) -> NoReturn:
    """One ``ConfigError`` for all, in the order of the file, overrides last."""
    placed = sorted((*source.place(p.path), p.text) for p in problems)
    name = str(source.file) if source.file else "the configuration"
    if len(placed) == 1:
        order, where, text = placed[0]
        from_file = f"{name}, {where}" if where else name
        raise ConfigError(f"{where if order == 10**9 else from_file}: {text}")
    lines = [f"  {where}: {text}" if where else f"  {text}" for _, where, text in placed]
    raise ConfigError("\n".join([f"{name} has {len(placed)} problems:", *lines]))
