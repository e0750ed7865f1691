"""A first pass over a run file's values, before the schema: one-item lists, and values that no
setting accepts."""

from __future__ import annotations

from math import inf
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from tunesmith.config.reading.describe import (
    alternatives,
    choices_at,
    describe_at,
    field_at,
    sections_of,
    show,
)
from tunesmith.config.reading.problems import DEEPEST, FileProblem, KeyPath, dotted, leaves
from tunesmith.config.values import Command
from tunesmith.records.redact import is_redacted

LARGEST_INT = 2**53
LARGEST_FLOAT = 1e9
LEAST_FLOAT = 1e-30
"""Larger numbers overflow when multiplied, or as seconds; smaller ones are 0 in float32."""


def shape_problems(kind: type[BaseModel], data: dict[str, Any]) -> list[FileProblem]:
    """Wrap a single value in a list, in place, where only a list is valid; return a problem for
    each unusable value."""
    problems: list[FileProblem] = []
    for holder, path, value in list(leaves(data)):
        if isinstance(value, dict | list):
            if len(path) == DEEPEST:
                problems.append(
                    FileProblem(
                        path, f"{dotted(path)} has more than {DEEPEST} levels of lists and tables"
                    )
                )
            continue
        problem = _odd(kind, path, value) or _as_list(kind, path, holder, value)
        if problem:
            problems.append(FileProblem(path, f"{dotted(path)} {problem}"))
    return problems


def _odd(kind: type[BaseModel], path: KeyPath, value: object) -> str:
    """The problem with a value that no setting accepts; empty if there is none."""
    if isinstance(value, str):
        if "\0" in value:
            return f"is {show(value)}, with a NUL character in it; take it out"
        if not value.isprintable() and any("\ud800" <= c <= "\udfff" for c in value):
            return "is not valid UTF-8"
        if is_redacted(value):
            hidden = "with a secret hidden, as run directories have it"
            return f"is {show(value)}, {hidden}; write the real one"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        field = field_at(kind, path)
        takes_int = field is not None and any(_is_int(a) for a in alternatives(field.annotation))
        if isinstance(value, int) and takes_int:
            if abs(value) > LARGEST_INT:
                wanted = describe_at(kind, path)
                return f"is {show(value)}, which is too large a number; it must be {wanted}"
        elif LARGEST_FLOAT < abs(value) < inf or 0 < abs(value) < LEAST_FLOAT:
            size = "large" if abs(value) > 1 else "small"
            return f"is {show(value)}, which is too {size} a number for any setting"
    return ""


def _is_int(annotation: object) -> bool:
    if get_origin(annotation) is tuple:
        return any(_is_int(a) for item in get_args(annotation) for a in alternatives(item))
    return annotation is int


def _as_list(kind: type[BaseModel], path: KeyPath, holder: Any, value: object) -> str:
    """Make a single value a one-item list in ``holder`` where it can only be meant as one; return
    the problem with a text that was meant as a list."""
    field = field_at(kind, path) if isinstance(path[-1], str) else None
    if field is None or Command in get_args(field.annotation) or value in choices_at(kind, path):
        return ""  # the text of a command is split into words
    types = list(alternatives(field.annotation))
    lists = [a for a in types if get_origin(a) is tuple and get_args(a)[-1] is Ellipsis]
    if lists and isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        items = ", ".join(f'"{item.strip()}"' for item in value[1:-1].split(",") if item.strip())
        return f"is {value}; texts in a list need quotes, in a shell: '{dotted(path)}=[{items}]'"
    if lists and str not in types and not list(sections_of(lists[0])):
        holder[path[-1]] = [value]
    return ""
