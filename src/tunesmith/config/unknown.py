"""Keys that do not exist: what they are called here, where they belong, or what is spelled nearly so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel

from tunesmith.config.describe import is_section, sections_of
from tunesmith.config.places import KeyPath, dotted
from tunesmith.config.problems import Problem
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.synonyms import PREFERENCE, RENAMED, WITHOUT_EQUIVALENT
from tunesmith.errors import nearest


def unknown_keys(kind: type[RunConfig], data: Mapping[str, Any]) -> list[Problem]:
    """A problem for every key of ``data`` that ``kind`` does not have."""
    everywhere = all_keys(kind)
    return [Problem(path, _explain(kind, path, valid, everywhere)) for path, valid in _walk([kind], data, ())]


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a configuration: ``run_dir``, ``model.path``, ..."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = next(sections_of(field.annotation), None) if not prefix or is_section(field.annotation) else None
        keys += all_keys(section, f"{prefix}{name}.") if section else [prefix + name]
    return keys


def _walk(
    sections: list[type[BaseModel]], data: Mapping[str, Any], path: KeyPath
) -> Iterator[tuple[KeyPath, list[str]]]:
    """Unknown keys, each with the valid ones beside it."""
    fields = {name: field for section in sections for name, field in section.model_fields.items()}
    for key, value in data.items():
        if key not in fields:
            yield (*path, key), list(fields)
        elif inner := list(sections_of(fields[key].annotation)):
            yield from _walk_value(inner, value, (*path, key))


def _walk_value(sections: list[type[BaseModel]], value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, list[str]]]:
    if isinstance(value, dict):
        yield from _walk(sections, cast(dict[str, Any], value), path)
    elif isinstance(value, list):
        for index, item in enumerate(cast(list[Any], value)):
            yield from _walk_value(sections, item, (*path, index))


def _explain(kind: type[RunConfig], path: KeyPath, valid: list[str], everywhere: list[str]) -> str:
    name, word = dotted(path), str(path[-1])
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == word]
    if path == ("rollout",) and "sampling" in kind.model_fields:
        return "[rollout] is called [sampling] here, and its group_size n."
    if len(path) == 1 and word in RLConfig.model_fields and word not in kind.model_fields:
        return f"[{word}] has no meaning for supervised training; train with a reward with: tunesmith rl"
    if reason := WITHOUT_EQUIVALENT.get(word):
        return f"there is no {name}: {reason}."
    if renamed := [key for key in (*RENAMED.get(word, ()), *PREFERENCE.get(word, ())) if key in everywhere]:
        return f"{name} is called {' and '.join(renamed)} here."
    if elsewhere:
        return f"unknown key {name}; did you mean {' or '.join(elsewhere)}?"
    close = nearest(word, valid)
    if close.startswith(" Valid") and (other := nearest(name, everywhere)).startswith(" Did"):
        close = other
    return f"unknown key {name}.{close}"
