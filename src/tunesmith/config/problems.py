"""What is wrong with a configuration, and where in the TOML text each key stands; many problems make one error."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from tunesmith.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""A key and its parents; integers are positions in an array of tables."""

_KEY = re.compile(r"""((?:"(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+|[.\t ])+)=""")
_HEADER = re.compile(r"(\[\[?.*?\]\]?)\s*(?:#.*)?")


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
        below = [text for key, text in self.overrides.items() if path not in self.lines and key[: len(path)] == path]
        return next(reversed(inside or below), None)


def raise_problems(problems: Sequence[Problem], source: Source) -> NoReturn:
    """One ``ConfigError`` for all, in the order of the file, overrides last."""
    error = ConfigError(_listed(problems, source))
    error.places_known = True
    raise error


def _listed(problems: Sequence[Problem], source: Source) -> str:
    placed = sorted((*source.place(p.path), p.text) for p in problems)
    name = str(source.file) if source.file else "the configuration"
    if len(placed) == 1:
        order, where, text = placed[0]
        from_file = f"{name}, {where}" if where else name
        return f"{where if order == 10**9 else from_file}: {text}"
    lines = [f"  {where}: {text}" if where else f"  {text}" for _, where, text in placed]
    return "\n".join([f"{name} has {len(placed)} problems:", *lines])


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every key and table header of a valid TOML text, but not of keys in inline tables."""
    lines, found = text.split("\n"), dict[KeyPath, int]()
    arrays: dict[KeyPath, int] = {}
    table: KeyPath = ()
    index = 0
    while index < len(lines):
        line, number = lines[index].strip(), index + 1
        index += 1
        if header := _HEADER.fullmatch(line) if line.startswith("[") else None:
            table = _table(header[1], arrays)
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            index = _statement_end(lines, index - 1)
            found.setdefault(table + _only_path(tomllib.loads(f"{key[1]} = 0")), number)
    return found


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    """Line of a key, or else of the first one inside it, or of the nearest parent that has one."""
    if inside := [line for key, line in lines.items() if key[: len(path)] == path]:
        return min(inside)
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def dotted(path: KeyPath) -> str:
    """``("data", "train", 0, "weight")`` → ``data.train[0].weight``."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return text.removeprefix(".")


def _table(header: str, arrays: dict[KeyPath, int]) -> KeyPath:
    """The path that a ``[table]`` or ``[[array of tables]]`` header opens; counts the arrays' elements."""
    is_array = header.startswith("[[")
    parts = _only_path(tomllib.loads(header))
    path: KeyPath = ()
    for part in parts[:-1] if is_array else parts:
        path = (*path, part)
        if path in arrays:
            path = (*path, arrays[path])
    if is_array:
        path = (*path, parts[-1])
        arrays[path] = arrays.get(path, -1) + 1
        path = (*path, arrays[path])
    return path


def _only_path(tree: dict[str, Any]) -> tuple[str, ...]:
    """The keys down a tree that has one branch only."""
    path: list[str] = []
    node: Any = tree
    while isinstance(node, dict | list) and node:
        if isinstance(node, dict):
            key, node = next(iter(cast(dict[str, Any], node).items()))
            path.append(key)
        else:
            node = cast(list[Any], node)[0]
    return tuple(path)


def _statement_end(lines: list[str], start: int) -> int:
    """Index after the last line of the ``key = value`` that starts at ``start``; values may span lines."""
    for end in range(start + 1, len(lines) + 1):
        try:
            tomllib.loads("\n".join(lines[start:end]))
        except tomllib.TOMLDecodeError:
            continue
        return end
    return start + 1
