"""The tables of docs/algorithms.md, made from the registries: ``python tests/docs_tables.py`` writes them anew.

Each stands between ``<!-- table: name -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tunesmith.algorithms.advantages import ESTIMATORS, Estimator
from tunesmith.algorithms.corrections import CORRECTIONS
from tunesmith.algorithms.losses import POLICY_LOSSES, PolicyLoss
from tunesmith.algorithms.presets import NEEDS, PRESETS

ALGORITHMS = Path(__file__).parent.parent / "docs" / "algorithms.md"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def presets() -> str:
    """Every preset, with what it sets."""
    rows = [
        (f"`{name}`", _settings(preset.settings), preset.description, _source(preset.source))
        for name, preset in PRESETS.items()
    ]
    return _table(("preset", "sets", "what it is", "source"), rows)


def losses() -> str:
    return _registered(POLICY_LOSSES.values())


def estimators() -> str:
    return _registered(ESTIMATORS.values())


def corrections() -> str:
    rows = [
        (f"`{c.name}`", f"`{_cell(c.formula)}`", _source(c.source), _settings(c.keys)) for c in CORRECTIONS.values()
    ]
    return _table(("name", "weight of a token", "source", "keys and defaults"), rows)


TABLES: Mapping[str, Callable[[], str]] = {made.__name__: made for made in (presets, losses, estimators, corrections)}


def with_tables(text: str) -> str:
    """The page with every table as the registries have it now."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def _registered(entries: Iterable[PolicyLoss | Estimator]) -> str:
    rows = [
        (
            f"`{e.name}`",
            f"`{_cell(e.formula)}`",
            _source(e.source),
            _settings(e.keys),
            ", ".join(NEEDS[need] for need in sorted(e.needs)),
        )
        for e in entries
    ]
    return _table(("name", "formula", "source", "keys and defaults", "needs"), rows)


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"`{key}` {_value(value)}" for key, value in settings.items())


def _value(value: object) -> str:
    match value:
        case None:
            return "off"
        case bool():
            return str(value).lower()
        case _:
            return str(value)


def _source(source: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", _cell(source))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    ALGORITHMS.write_text(with_tables(ALGORITHMS.read_text(encoding="utf-8")), encoding="utf-8")
