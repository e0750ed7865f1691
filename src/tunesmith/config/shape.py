"""A first pass over a run file's values before the schema: lists of one item, and values that no setting takes."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel

from tunesmith.config.describe import alternatives, choices_at, describe_at, field_at, show
from tunesmith.config.problems import KeyPath, Problem, dotted
from tunesmith.redact import is_redacted

DEEPEST = 32
"""Levels of lists and tables in each other."""
LARGEST_INT = 2**53
LARGEST_FLOAT, LEAST_FLOAT = 1e9, 1e-30
"""Larger numbers overflow once they are multiplied, also as seconds; smaller ones are 0 in float32."""


def shape_problems(kind: type[BaseModel], data: dict[str, Any]) -> list[Problem]:
    """Make a single value a list of one where only a list is meant, in place; a problem for each unusable value."""
    problems: list[Problem] = []
    for holder, path, value in list(_leaves(data)):
        if isinstance(value, dict | list):
            problems.append(Problem(path, f"{dotted(path)} has more than {DEEPEST} levels of lists and tables"))
        elif problem := _odd(kind, path, value):
            problems.append(Problem(path, f"{dotted(path)} {problem}"))
        elif _wants_list(kind, path) and value not in choices_at(kind, path):
            if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
                problems.append(Problem(path, _unquoted_items(dotted(path), value)))
            else:
                holder[path[-1]] = [value]
    return problems


def _leaves(node: Any, above: KeyPath = ()) -> Iterator[tuple[Any, KeyPath, Any]]:
    """Every value that is no list or table, or that is nested too deeply, with what holds it."""
    items = cast(dict[str, Any], node).items() if isinstance(node, dict) else enumerate(cast(list[Any], node))
    for key, value in items:
        path = (*above, key)
        if isinstance(value, dict | list) and len(path) < DEEPEST:
            yield from _leaves(value, path)
        else:
            yield node, path, value


def _odd(kind: type[BaseModel], path: KeyPath, value: Any) -> str:
    """What is wrong with a value in any place."""
    if isinstance(value, str):
        if "\0" in value:
            return f"is {show(value)}, with a NUL character in it; take it out"
        if not value.isprintable() and any("\ud800" <= c <= "\udfff" for c in value):
            return "is not valid UTF-8"
        if is_redacted(value):
            return f"is {show(value)}, with a secret hidden, as run directories have it; write the real one"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        field = field_at(kind, path)
        takes_int = field is not None and any(_is_int(a) for a in alternatives(field.annotation))
        if isinstance(value, int) and takes_int:
            if abs(value) > LARGEST_INT:
                return f"is {show(value)}, which is too large a number; it must be {describe_at(kind, path)}"
        elif LARGEST_FLOAT < abs(value) < inf or 0 < abs(value) < LEAST_FLOAT:
            return f"is {show(value)}, which is too {'large' if abs(value) > 1 else 'small'} a number for any setting"
    return ""


def _is_int(annotation: Any) -> bool:
    if get_origin(annotation) is tuple:
        return any(_is_int(a) for item in get_args(annotation) for a in alternatives(item))
    return annotation is int


def _wants_list(kind: type[BaseModel], path: KeyPath) -> bool:
    """Whether a single value at ``path`` can only be meant as a list of one."""
    field = field_at(kind, path) if path and isinstance(path[-1], str) else None
    found = [a for a in alternatives(field.annotation) if a is not type(None)] if field else []
    lists = [a for a in found if get_origin(a) is tuple and get_args(a)[-1] is Ellipsis]
    return bool(lists) and not any(a is str for a in found) and _scalar_items(lists[0])


def _scalar_items(annotation: Any) -> bool:
    return all(not (isinstance(a, type) and issubclass(a, BaseModel)) for a in alternatives(get_args(annotation)[0]))


def _unquoted_items(key: str, value: str) -> str:
    items = ", ".join(f'"{item.strip()}"' for item in value[1:-1].split(",") if item.strip())
    return f"{key} is {value}; texts in a list stand in quotes, in a shell as: '{key}=[{items}]'"
