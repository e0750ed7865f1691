"""The values of a script that is followed: what its names hold, as far as that is known without
running it."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunesmith.errors import shortened
from tunesmith.guide.migrate.script.data import Data, Held, Length, RowSpan, Splits, Unknown
from tunesmith.guide.names.foreign import spelled

Scope = ChainMap[str, Held]


@dataclass(frozen=True, slots=True)
class Named:
    """An imported name, or one that the script does not define; with its full dotted name."""

    dotted: str


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function, lambda or class (``ScriptClass``) of the script."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    scope: Scope
    file: str

    @property
    def reference(self) -> str:
        """``file.py:name``; empty for a lambda."""
        return "" if isinstance(self.node, ast.Lambda) else f"{self.file}:{self.node.name}"


@dataclass(frozen=True, slots=True, eq=False)
class ScriptClass(Function):
    node: ast.ClassDef


@dataclass(slots=True, eq=False)
class Object:
    """What a class or a library's function returned, with the arguments of its call as fields."""

    kind: str
    line: int
    text: str = ""
    fields: dict[str, Held] = field(default_factory=dict[str, Held])
    texts: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """By field, ``name=expression`` and its line."""
    args: Sequence[Held] = ()
    arg_texts: Sequence[tuple[str, int]] = ()
    of: ScriptClass | None = None
    parsed: bool = False
    """Whether the command line sets other fields."""

    @property
    def name(self) -> str:
        """The last part of its kind."""
        return self.kind.rpartition(".")[2]

    @property
    def is_model(self) -> bool:
        return self.kind.endswith("from_pretrained")


_DEFAULTS: Mapping[str, Mapping[str, Held]] = {
    "ScriptArguments": {
        "dataset_name": None, "dataset_config": None, "dataset_train_split": "train",
        "dataset_test_split": "test", "dataset_streaming": False,
    },
    "DatasetMixtureConfig": {"datasets": []},
}  # fmt: skip
"""The defaults of TRL's classes that describe data, by class."""


def field_of(holder: Object, name: str, options: Mapping[str, Held], unknown: Held) -> Held:
    """A field that the script does not set: from the command line, or the library's default."""
    if holder.parsed and spelled(name) in options:
        return options[spelled(name)]
    is_strategy = name in ("eval_strategy", "evaluation_strategy")
    default = "no" if is_strategy and holder.name.endswith(("Config", "Arguments")) else unknown
    return _DEFAULTS.get(holder.name, {}).get(name, default)


def truth(value: Held) -> bool | None:
    """Whether a condition holds; None if only running the script would tell."""
    if isinstance(value, Unknown | Named | Length | RowSpan):
        return None
    return True if isinstance(value, Object | Function | Data | Splits) else bool(value)


def items_of(value: Held) -> list[Held] | None:
    if isinstance(value, list | tuple | range):
        items = value
        return list(items) if len(items) < 1000 else None
    return list(value) if isinstance(value, dict) else None


def is_known(value: Held) -> bool:
    """Whether a value is plain Python, all of it known."""
    if isinstance(value, list | tuple):
        return all(map(is_known, value))
    if isinstance(value, dict):
        return all(map(is_known, value.values()))
    return value is None or isinstance(value, str | int | float | range)


def is_small(value: Held) -> bool:
    """Whether a computed value is small enough to compute on with."""
    if isinstance(value, str | list):
        return len(value) < 10_000
    return not isinstance(value, int) or value.bit_length() < 100


def short(node: ast.AST) -> str:
    return shortened(" ".join(ast.unparse(node).split()), 100)
