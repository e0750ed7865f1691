"""Settings that were given and that nothing in the run reads. Each is an error; ``unread.toml`` holds the rules."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.toml import toml_value
from tunesmith.plan.weights import engines_apart, weights_apart


def unread_problems(config: RunConfig) -> Iterator[str]:
    """One problem for each setting that was given without effect."""
    kinds = {kind.__name__ for kind in type(config).__mro__}
    given, values = settings(config, given_only=True), settings(config)
    values |= {
        "engines_apart": engines_apart(config),
        "weights_apart": weights_apart(config),
        "served": config.system.served,
        "lora": config.lora.on,
        "rl": isinstance(config, RLConfig),
    }
    for rule in _rules():
        if "of" in rule and rule["of"] not in kinds:
            continue
        when, unless = rule.get("when", {}), rule.get("unless", {})
        if not all(_holds(values, *c) for c in when.items()) or any(_holds(values, *c) for c in unless.items()):
            continue
        for key in _matching(given, rule):
            why = re.sub(r"\{([\w.]+)\}", lambda name: toml_value(values[name[1]]), rule["why"])
            yield f"{key} has no effect {why}"


def _holds(values: Mapping[str, Any], key: str, wanted: Any) -> bool:
    if wanted == "*":
        return values.get(key) is not None
    return key in values and values[key] in (wanted if isinstance(wanted, list) else [wanted])


def _matching(given: Mapping[str, Any], rule: Mapping[str, Any]) -> Iterable[str]:
    # By their text, because True == 1.
    keys, harmless = rule["keys"].split(), [repr(value) for value in (None, *rule.get("harmless", []))]
    prefixes = tuple(key for key in keys if key.endswith("."))
    return [
        key
        for key, value in given.items()
        if (key in keys or key.startswith(prefixes)) and repr(value) not in harmless and key != rule.get("except")
    ]


@cache
def _rules() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["rule"]
