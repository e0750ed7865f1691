"""Resolved ``[algorithm]`` sections for tests."""

from __future__ import annotations

from typing import Any

from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.plan.derive.algorithm import resolve_algorithm


def section(**keys: Any) -> AlgorithmSection:
    """As a run file would have it; ``__`` stands for the dot: ``loss__clip_high=0.3``."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        table, _, name = key.partition("__")
        if name:
            inner = tree.setdefault(table, {})
            tree[table] = {**(inner if isinstance(inner, dict) else {"type": inner}), name: value}
        else:
            tree[table] = value
    return AlgorithmSection.model_validate(tree)


def algorithm(*, max_new_tokens: int = 8, **keys: Any) -> AlgorithmSection:
    """What ``section`` resolves to."""
    return resolve_algorithm(section(**keys), max_new_tokens=max_new_tokens)[0]
