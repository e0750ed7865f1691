"""Rules about settings, stored as data.

``unread.toml`` describes settings that have no effect; ``refused.toml``, ``refused_system.toml`` and ``vllm.toml``
settings that contradict each other or the facts; ``notes.toml`` remarks.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig
from tunesmith.config.toml import toml_value
from tunesmith.redact import redact_values

Values = Mapping[str, Any]
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


def unread_problems(config: RunConfig, values: Values) -> Iterator[str]:
    """One problem for each given setting that nothing reads; ``values`` come from ``situation``."""
    given = settings(config, given_only=True)
    for rule in rules("unread"):
        if not applies(rule, values):
            continue
        harmless = [repr(value) for value in (None, *rule.get("harmless", []))]  # compared as text, because True == 1
        for key, value in given.items():
            if is_about(rule, key) and repr(value) not in harmless:
                yield f"{key} has no effect {_filled(rule['why'], values)}"


def is_about(rule: Mapping[str, Any], key: str) -> bool:
    """Whether a rule of ``unread.toml`` names a setting or its table, and does not leave it out."""
    keys = rule["keys"].split()
    named = key in keys or key.startswith(tuple(name for name in keys if name.endswith(".")))
    return named and key not in rule.get("except", "").split()


def refused_problems(values: Values) -> Iterator[str]:
    """One problem for each contradiction between values."""
    return told(values, "refused", "refused_system")


def told(values: Values, *files: str) -> Iterator[str]:
    """The texts of the rules that apply."""
    for rule in (rule for file in files for rule in rules(file)):
        if applies(rule, values):
            yield _filled(rule["text"], values)


def rules(file: str) -> list[dict[str, Any]]:
    """The rules in a file next to this one."""
    return read_rules(file)["rule"]


@cache
def read_rules(file: str) -> dict[str, Any]:
    """A file of rules, and of tables for them, next to this one."""
    return tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8"))


def applies(rule: Mapping[str, Any], values: Values) -> bool:
    """Whether all conditions in ``when`` and none in ``unless`` hold."""
    when, unless = rule.get("when", {}), rule.get("unless", {})
    return all(_holds(values, *c) for c in when.items()) and not any(_holds(values, *c) for c in unless.items())


def _holds(values: Values, key: str, wanted: Any) -> bool:
    value = values.get(key)
    if value is None or wanted == "*":
        return value is not None
    sign, _, operand = wanted.partition(" ") if isinstance(wanted, str) else ("", "", "")
    if sign not in _SIGNS:
        return value in wanted if isinstance(wanted, list) else value == wanted
    other = float(operand) if _NUMBER.fullmatch(operand) else values.get(operand)
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    if sign != "==":  # texts are not ordered
        items = [item for item in items if isinstance(item, int | float) and isinstance(other, int | float)]
    return other is not None and any(_SIGNS[sign](item, other) for item in items)


def _filled(text: str, values: Values) -> str:
    """The text with values for ``{key}`` (as TOML) and ``{key:s}`` (as is); other braces stay."""

    def shown(place: re.Match[str]) -> str:
        value = redact_values(values.get(place[1]), place[1])
        return place[0] if value is None else str(value) if place[2] else toml_value(value)

    return re.sub(r"\{([\w.]+)(:s)?\}", shown, text)
