"""Keys that do not exist: what they are called here, where they belong, or what is spelled nearly so."""

from __future__ import annotations

from pydantic import BaseModel

from tunesmith.config.describe import field_at, is_section, sections_of
from tunesmith.config.problems import KeyPath, dotted
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.synonyms import RENAMED, WITHOUT_EQUIVALENT
from tunesmith.errors import nearest


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a configuration: ``run_dir``, ``model.path``, ..."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = next(sections_of(field.annotation), None) if not prefix or is_section(field.annotation) else None
        keys += all_keys(section, f"{prefix}{name}.") if section else [prefix + name]
    return keys


def explain_unknown(kind: type[RunConfig], path: KeyPath) -> str:
    """What is wrong with a key that ``kind`` does not have, and what there is instead."""
    above = field_at(kind, path[:-1])
    sections = [kind] if above is None else list(sections_of(above.annotation))
    valid, everywhere = [name for section in sections for name in section.model_fields], all_keys(kind)
    name, word = dotted(path), str(path[-1])
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == word]
    if path == ("rollout",) and "sampling" in kind.model_fields:
        return "[rollout] is called [sampling] here, and its group_size n."
    if len(path) == 1 and word in RLConfig.model_fields and word not in kind.model_fields:
        where = "beside [sampling]" if "sampling" in kind.model_fields else "for supervised training"
        return f"[{word}] has no meaning {where}; train with a reward with: tunesmith rl"
    if reason := WITHOUT_EQUIVALENT.get(word):
        return f"there is no {name}: {reason}."
    if renamed := [key for key in RENAMED.get(word, ()) if key in everywhere]:
        return f"{name} is called {' and '.join(renamed)} here."
    if elsewhere:
        return f"unknown key {name}; did you mean {' or '.join(elsewhere)}?"
    close = nearest(word, valid)
    if close.startswith(" Valid") and (other := nearest(name, everywhere)).startswith(" Did"):
        close = other
    return f"unknown key {name}.{close}"
