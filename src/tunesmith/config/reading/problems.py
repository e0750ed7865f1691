"""Problems in a configuration, the lines of its keys in the TOML text, and one error for all
problems."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tunesmith.errors import ConfigError, Problem, ProblemKind
from tunesmith.records.toml import without_secrets

Tree = dict[str, Any]
"""The values of a run file."""
KeyPath = tuple[str | int, ...]
"""A key and its parents; integers are positions in an array of tables."""

DEEPEST = 32
"""Maximum nesting of lists and tables."""
OVERRIDE = 10**9
"""Sorts overrides after all lines."""
_KEY = re.compile(r"""((?:"(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+|[.\t ])+)=""")
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|"(?:\\.|[^"\\])*"|#[^\n]*|[\[\]{}\n]|'''
    r"""'''.*?'{3,5}|'[^']*'""",
    re.DOTALL,
)
"""The tokens that determine where a TOML statement ends: strings, comments, brackets and line
ends."""


@dataclass(frozen=True, slots=True)
class FileProblem:
    """A problem with the key at ``path``; ``text`` says what is wrong, what is valid and what to
    do."""

    path: KeyPath
    text: str
    kind: ProblemKind = "invalid"


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins of a configuration's keys: lines of a file, or overrides."""

    file: Path | None
    lines: Mapping[KeyPath, int]
    overrides: dict[KeyPath, str]
    problems: list[FileProblem] = field(default_factory=list[FileProblem])
    unset: list[KeyPath] = field(default_factory=list[KeyPath])
    """Keys that overrides leave out."""
    replaced: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"])
    """The file's settings that an override excludes, by the override's key."""

    @property
    def reasons(self) -> dict[str, str]:
        """By key, why an override that excludes settings of the file counts alone."""
        said = {key: " and ".join(others) for key, others in self.replaced.items()}
        return {key: f"as you said, instead of {o} in {self.file}" for key, o in said.items()}

    def is_override(self, path: KeyPath) -> bool:
        return self._override(path) is not None

    def place(self, path: KeyPath) -> tuple[int, str]:
        """A sort key and a description: ``line 4``, ``override 'train.lr=x'`` or nothing."""
        override = self._override(path)
        if override is not None:
            return OVERRIDE, f"override '{without_secrets(override)}'"
        line = line_of(path, self.lines)
        return (0, "") if line is None else (line, f"line {line}")

    def _override(self, path: KeyPath) -> str | None:
        inside = [text for key, text in self.overrides.items() if path[: len(key)] == key]
        below = [
            text
            for key, text in self.overrides.items()
            if path not in self.lines and key[: len(path)] == path
        ]
        return next(reversed(inside or below), None)


def leaves(node: Any, above: KeyPath = ()) -> Iterator[tuple[Any, KeyPath, Any]]:
    """Every value that is no table or list, or is empty or nested too deeply, with its container
    and path."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        path = (*above, key)
        if isinstance(value, dict | list) and value and len(path) < DEEPEST:
            yield from leaves(value, path)
        else:
            yield node, path, value


def raise_problems(problems: Sequence[FileProblem], origins: Origins) -> NoReturn:
    """Raise one ``ConfigError`` for all problems, in file order, overrides last."""
    placed = sorted(
        ((*origins.place(problem.path), problem) for problem in problems), key=lambda each: each[:2]
    )
    name = str(origins.file) if origins.file else "the configuration"
    reasons = [Problem((dotted(p.path),), p.text, p.kind, where) for _, where, p in placed]
    if len(placed) == 1 and placed[0][0] < OVERRIDE:
        reasons = [replace(reasons[0], place=", ".join(filter(None, (name, reasons[0].place))))]
    error = ConfigError(*reasons)
    error.heading = f"{name} has {len(placed)} problems:"
    error.places_known = True
    raise error


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every key and table header in a valid TOML text, except keys in inline
    tables. Neither tomllib nor tomlkit keeps lines."""
    lines: dict[KeyPath, int] = {}
    arrays: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, statement in _statements(text):
        if statement.startswith("["):
            table = _table(statement, arrays)
            lines.setdefault(table, number)
        elif key := _KEY.match(statement):
            lines.setdefault(table + _only_path(tomllib.loads(f"{key[1]} = 0")), number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Every statement with the number of its first line; strings and brackets may span lines."""
    start = 0
    number = 1
    depth = 0
    for token in _TOKEN.finditer(f"{text}\n"):
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        if token[0] == "\n" and depth == 0:
            yield number, text[start : token.start()].strip()
            number += text.count("\n", start, token.end())
            start = token.end()


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    """Line of the first key inside ``path``, which may be its own, or of the nearest parent that
    has a line."""
    inside = [line for key, line in lines.items() if key[: len(path)] == path]
    if inside:
        return min(inside)
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def dotted(path: KeyPath) -> str:
    """``("data", "train", 0, "weight")`` → ``data.train[0].weight``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def _table(header: str, arrays: dict[KeyPath, int]) -> KeyPath:
    """The path that a ``[table]`` or ``[[array of tables]]`` header opens; counts the arrays'
    elements."""
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
    """The keys of a tree that has a single branch."""
    path: list[str] = []
    node: Any = tree
    while isinstance(node, dict | list) and node:
        if isinstance(node, dict):
            key, node = next(iter(node.items()))
            path.append(key)
        else:
            node = node[0]
    return tuple(path)
