"""Valid values of a setting in words, from the types in the schema."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tunesmith.config.choice import Choice
from tunesmith.config.reading.problems import KeyPath
from tunesmith.config.section import OneOf
from tunesmith.errors import shortened
from tunesmith.records.redact import redact_values
from tunesmith.records.toml import toml_value

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Path: "a path in quotes",
}
_BOUNDS = (
    (Gt, "gt", "above"),
    (Ge, "ge", "of at least"),
    (Lt, "lt", "below"),
    (Le, "le", "of at most"),
)


_MEANT: dict[tuple[str, type], str] = {
    ("algorithm", str): "name",
    ("critic", str): "path",
    ("data", str): "train",
    ("dpo", float): "beta",
    ("environment", str): "path",
    ("eval", int): "every",
    ("kto", float): "beta",
    ("lora", int): "rank",
    ("lora", str): "path",
    ("model", str): "path",
    ("monitor", str): "sinks",
    ("reward", str): "functions",
    ("system", str): "profile",
    ("teacher", str): "path",
}
"""The key of a section that a value in the section's place is meant for."""


def describe(annotation: Any, metadata: tuple[object, ...] = ()) -> str:
    """``Annotated[int, Field(gt=0)] | None`` → ``"a whole number above 0"``."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        constraints = [c for note in notes if isinstance(note, FieldInfo) for c in note.metadata]
        return describe(inner, (*notes, *constraints, *metadata))
    text = next(
        (m.description for m in metadata if isinstance(m, FieldInfo) and m.description), None
    )
    if text:
        return text
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [describe(a, metadata) for a in get_args(annotation) if a is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(annotation))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if items[-1] is Ellipsis:
            least = " of one or more" if any(isinstance(m, MinLen) for m in metadata) else ""
            return f"a list{least}, each item {describe(items[0])}"
        return f"a list of {len(items)}, each {describe(items[0])}"
    for name_list in (m for m in metadata if isinstance(m, OneOf)):
        return "one of " + ", ".join(map(repr, name_list.names()))
    names = names_of(annotation)
    if names:
        closed = not annotation.open_to_users or ("none" in names and annotation.usual)
        own = "" if closed else ", 'file.py:Class'"
        return f"one of {', '.join(map(repr, names))}{own}, or a table with type"
    if is_section(annotation):
        return f"a table with the keys {', '.join(annotation.model_fields)}"
    pairs = [(bound, m) for bound in _BOUNDS for m in metadata if isinstance(m, bound[0])]
    bounds = [f"{words} {getattr(m, name)}" for (_, name, words), m in pairs]
    return _WORDS.get(annotation, "something else") + (f" {' and '.join(bounds)}" if bounds else "")


def field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """The field at a path of keys, if any."""
    return next(iter(fields_at(model, path).values()), None)


def fields_at(model: type[BaseModel], path: KeyPath) -> dict[type[BaseModel], FieldInfo]:
    """The fields at a path, by section: several where types of a choice share a key."""
    sections = [model]
    fields = dict[type[BaseModel], FieldInfo]()
    for part in (part for part in path if not isinstance(part, int)):
        having = [section for section in sections if part in section.model_fields]
        fields = {section: section.model_fields[part] for section in having}
        sections = [inner for field in fields.values() for inner in sections_of(field.annotation)]
    return fields


def describe_at(model: type[BaseModel], path: KeyPath) -> str:
    """A description of valid values at a path."""
    field = field_at(model, path)
    if field is None:
        return "something else"
    items = [get_args(a)[0] for a in alternatives(field.annotation) if get_origin(a) is tuple]
    return describe(
        items[0] if items and isinstance(path[-1], int) else Annotated[field.annotation, field]
    )


def meant_at(path: KeyPath, value: object) -> str:
    """The setting that a value in a section's place is meant for, as a run file and a command line
    take it: ``algorithm="grpo"`` → ``algorithm.name="grpo"``; empty if unknown."""
    key = _MEANT.get((str(path[0]), type(value))) if len(path) == 1 else None
    return f"{path[0]}.{key}={toml_value(redact_values(value))}" if key else ""


def choices_at(model: type[BaseModel], path: KeyPath, *, closed: bool = False) -> list[str]:
    """The valid spellings of a value with a fixed set of choices; else empty.

    Args:
        closed: return none if other values are valid as well.
    """
    fields = fields_at(model, path).values()
    lists = [m for field in fields for m in _metadata(field.annotation, field.metadata)]
    if lists:
        return list(lists[0].names())
    types = [a for field in fields for a in alternatives(field.annotation)]
    if closed and any(a in (str, Path, int, float) or get_origin(a) is tuple for a in types):
        return []
    return [
        str(c) for a in types for c in (get_args(a) if get_origin(a) is Literal else names_of(a))
    ]


def _metadata(annotation: object, own: Sequence[object]) -> Iterator[OneOf]:
    """The lists of choices of a field, or of a type in its union."""
    yield from (item for item in own if isinstance(item, OneOf))
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            if get_origin(part) is Annotated:
                yield from _metadata(get_args(part)[0], get_args(part)[1:])


def names_of(annotation: object) -> list[str]:
    """The names of a family of choices, which may be left out; empty for anything else."""
    kinds = [kind for kind in alternatives(annotation) if isinstance(kind, type)]
    return [name for kind in kinds if issubclass(kind, Choice) for name in kind.named()]


def sections_of(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections in an annotation, including those in unions and tuple items."""
    for alternative in alternatives(annotation):
        if is_section(alternative):
            kinds = alternative.named() if issubclass(alternative, Choice) else {}
            yield from kinds.values() or [alternative]
        elif get_origin(alternative) is tuple:
            yield from sections_of(get_args(alternative)[0])


def tables_of(annotation: object) -> list[type[BaseModel]]:
    """Sections whose keys are settings: a section, the types of a choice, or a table that may be
    off (false, None)."""
    parts = [a for a in alternatives(annotation) if a not in (Literal[False], type(None))]
    return list(sections_of(annotation)) if len(parts) == 1 and is_section(parts[0]) else []


def is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def show(value: object) -> str:
    """A value as in a run file, without secrets and shortened if long."""
    return shortened(json.dumps(redact_values(value), ensure_ascii=False, default=str), 60)


def alternatives(annotation: object) -> Iterator[Any]:
    """The types in a union, without annotations; anything else yields itself."""
    if get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from alternatives(part)
    else:
        yield annotation
