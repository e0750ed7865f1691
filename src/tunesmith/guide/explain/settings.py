"""Every setting with its default, valid values and meaning, from the documentation's tables or else
the schema.

The documentation comes with the package, in ``tunesmith/docs``.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tunesmith.config.choice import Choice
from tunesmith.config.commands import KINDS, all_keys
from tunesmith.config.reading.describe import describe_at, fields_at, is_section
from tunesmith.config.section import is_open
from tunesmith.records.toml import toml_value

DOCS = Path(__file__).parents[2] / "docs"
_PAGES = ("configuration", "generate", "rft", "preference")
_HEADINGS = {
    "Top level": ("",),
    "A source": ("data.train.", "data.eval."),
    "A reward model": ("reward.models.",),
    "A remote reward": ("reward.remote.",),
    "A judge": ("reward.judge.",),
    "A criterion": ("reward.judge.criteria.",),
    "Reward model": ("rm.",),
    "DPO": ("dpo.",),
    "KTO": ("kto.",),
    "Process reward model": ("prm.",),
}
"""Prefixes of tables whose heading is not their section's name."""
_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting described in words; ``commands`` are those whose run files have it."""

    key: str
    kind: str
    default: str
    meaning: str
    commands: tuple[str, ...]


def settings_of(what: str = "") -> list[Setting]:
    """The settings of a command, section or single key; all settings if ``what`` is empty."""
    rows = _rows()
    commands: dict[str, list[str]] = {}
    for command, kind in KINDS.items():
        for key in all_keys(kind, tables=True):
            commands.setdefault(key, []).append(command)
    chosen: list[Setting] = []
    for key, of in commands.items():
        if what in ("", key, *of) or key.startswith(f"{what}."):
            kind, default, meaning = rows.get(key) or _of_schema(KINDS[of[0]], key)
            chosen.append(Setting(key, kind, default, meaning, tuple(of)))
    return chosen


@cache
def _rows() -> dict[str, tuple[str, ...]]:
    """Kind, default and meaning by key, without markup."""
    rows: dict[str, tuple[str, ...]] = {}
    for page in _PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
        parts = re.split(r"^#+ (.+)$", plain, flags=re.MULTILINE)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True):
            section = re.fullmatch(r"\[(.*)\]", heading)
            for prefix in [f"{section[1]}."] if section else _HEADINGS.get(heading, ()):
                for key, *cells in _ROW.findall(body):
                    unmarked = [cell.replace("`", "").replace("\\|", "|") for cell in cells]
                    rows[prefix + key] = tuple(unmarked)
    return rows


def _of_schema(kind: type[BaseModel], key: str) -> tuple[str, ...]:
    """Kind, default and meaning of a key without a table, from the schema and its docstring; by
    type for choices."""
    fields = fields_at(kind, tuple(key.split(".")))
    last = key.rpartition(".")[2]
    names = [section.name if issubclass(section, Choice) else "" for section in fields]
    kinds = [describe_at(section, (last,)) for section in fields]
    defaults = [_default(field) for field in fields.values()]
    meanings = [_meaning(section, last) for section in fields]
    return (
        _together(names, kinds, "{1} ({0})"),
        _together(names, defaults, "{1} ({0})"),
        _together(names, meanings, "{0}: {1}", always=True),
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default.name if isinstance(field.default, Choice) else field.default
    if isinstance(value, BaseModel):
        return "the defaults of its keys"
    if value is None:
        return "derived" if is_open(field) else "none"
    return toml_value(value)


def _meaning(section: type[BaseModel], key: str) -> str:
    for base in section.__mro__:
        if is_section(base) and base.__module__.startswith("tunesmith."):
            text = _documented(base).get(key)
            if text is not None:
                return text.replace("``", "")
    return ""


def _together(
    names: Sequence[str], texts: Sequence[str], form: str, *, always: bool = False
) -> str:
    """Merge several types' texts for one key: each distinct text once, with the names of its
    types."""
    by_text: dict[str, list[str]] = {}
    for name, text in zip(names, texts, strict=True):
        by_text.setdefault(text, []).append(name)
    if len(by_text) == 1 and not (always and names[0]):
        return texts[0]
    parts = [form.format(", ".join(of), text.rstrip(".")) for text, of in by_text.items()]
    return "; ".join(parts) + always * "."


@cache
def _documented(section: type) -> dict[str, str]:
    """The fields of a class, each with the docstring below it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
            case _:
                pass
    return texts
