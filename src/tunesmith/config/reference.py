"""Every setting with its default, what it may be and what it means: from the tables of the documents, else the schema.

The documents come with the package, in ``tunesmith/docs``.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from tunesmith.config.describe import describe_at, field_at, is_section, sections_of
from tunesmith.config.kinds import KINDS, all_keys

DOCS = Path(__file__).parent.parent / "docs"
_PAGES = ("configuration", "generate", "rft", "preference")
_HEADINGS = {"Top level": "", "Reward model": "rm.", "DPO": "dpo.", "KTO": "kto.", "Process reward model": "prm."}
"""Sections that are not the heading of their table."""
_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Setting:
    """``commands`` are those whose run files have it; the rest are words."""

    key: str
    kind: str
    default: str
    meaning: str
    commands: tuple[str, ...]


def settings_of(what: str = "") -> list[Setting]:
    """The settings of a command, of a section, or the one of a key; of everything, if ``what`` is empty."""
    rows = _rows()
    commands: dict[str, list[str]] = {}
    for command, kind in KINDS.items():
        for key in all_keys(kind):
            commands.setdefault(key, []).append(command)
    return [
        Setting(key, *(rows.get(key) or _of_schema(KINDS[of[0]], key)), tuple(of))
        for key, of in commands.items()
        if what in ("", key, *of) or key.startswith(f"{what}.")
    ]


@cache
def _rows() -> dict[str, tuple[str, str, str]]:
    """Kind, default and meaning by key, without markup."""
    found: dict[str, tuple[str, str, str]] = {}
    for page in _PAGES:
        parts = re.split(r"^#+ (.+)$", (DOCS / f"{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True):
            section = re.fullmatch(r"\[(.*)\]", heading)
            prefix = f"{section[1]}." if section else _HEADINGS.get(heading)
            if prefix is not None:
                found |= {f"{prefix}{key}": _plain(*cells) for key, *cells in _ROW.findall(body)}
    return found


def _plain(kind: str, default: str, meaning: str) -> tuple[str, str, str]:
    first, second, third = (
        re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "").replace("\\|", "|")
        for text in (kind, default, meaning)
    )
    return first, second, third


def _of_schema(kind: type[BaseModel], key: str) -> tuple[str, str, str]:
    """The same of a key that no table has, with its docstring."""
    *above, last = key.split(".")
    sections: list[type[BaseModel]] = [kind]
    for part in above:
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        sections = [inner for field in fields for inner in sections_of(field.annotation)]
    path = tuple(key.split("."))
    field = field_at(kind, path)
    assert field is not None
    default = "required" if field.is_required() else "none" if field.default is None else str(field.default)
    texts = [dict(_documented(made)) for section in sections for made in section.__mro__ if _ours(made)]
    return describe_at(kind, path), default, next((found[last] for found in texts if last in found), "")


def _ours(made: type) -> bool:
    return is_section(made) and made.__module__.startswith("tunesmith.")


def _documented(made: type) -> Iterator[tuple[str, str]]:
    """Fields of a class, each with the text that stands below it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(made))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())
            case _:
                pass
