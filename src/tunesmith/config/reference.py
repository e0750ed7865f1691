"""Every setting with its default, what it may be and what it means: from the tables of the documents, else the schema.

The documents come with the package, in ``tunesmith/docs``.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tunesmith.config.choice import Choice
from tunesmith.config.describe import describe_at, is_section, sections_of
from tunesmith.config.kinds import KINDS, all_keys
from tunesmith.config.section import DERIVED
from tunesmith.config.toml import toml_value

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
    """The same of a key that no table has, with its docstring; of a choice's key, by the types that have it."""
    path = tuple(key.split("."))
    sections: list[type[BaseModel]] = [kind]
    for part in path[:-1]:
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        sections = [inner for field in fields for inner in sections_of(field.annotation)]
    last = path[-1]
    having = [section for section in sections if last in section.model_fields]
    defaults = [(_name(section), _default(section.model_fields[last])) for section in having]
    meanings = [(_name(section), _meaning(section, last)) for section in having]
    kinds = [(_name(section), describe_at(section, (last,))) for section in having]
    return _together(kinds, "{1} ({0})"), _together(defaults, "{1} ({0})"), _together(meanings, "{0}: {1}", always=True)


def _name(section: type[BaseModel]) -> str:
    """Of a choice's type; empty for other sections."""
    return str(getattr(section, "name", "")) if issubclass(section, Choice) else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default is None else "derived" if field.default is DERIVED else toml_value(field.default)


def _meaning(section: type[BaseModel], key: str) -> str:
    texts = (dict(_documented(base)) for base in section.__mro__ if _ours(base))
    return next((found[key] for found in texts if key in found), "").replace("``", "")


def _together(texts: Sequence[tuple[str, str]], form: str, *, always: bool = False) -> str:
    """What several types say of a key: each text once, with the types that it is of."""
    by_text: dict[str, list[str]] = {}
    for name, text in texts:
        by_text.setdefault(text, []).append(name)
    if len(by_text) == 1 and not (always and texts[0][0]):
        return texts[0][1]
    return "; ".join(form.format(", ".join(names), text.rstrip(".")) for text, names in by_text.items()) + always * "."


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
