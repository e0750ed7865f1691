"""Values of ``[system]`` that a profile or an earlier measurement sets instead of derived ones."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.layout.layouts import gpus_of_run, layouts
from tunesmith.plan.layout.search import lack
from tunesmith.plan.processes.devices import on_gpu
from tunesmith.plan.rules.rules import applies
from tunesmith.plan.rules.situation import situation


@cache
def system_profiles() -> dict[str, list[dict[str, Any]]]:
    """The entries of each profile."""
    return tomllib.loads(Path(__file__).with_name("system_profiles.toml").read_text(encoding="utf-8"))


def derive_profile(filling: Filling, facts: Facts) -> None:
    """Set the values of the run's profile, or those measured to be fastest; the run file's values stay."""
    config: RunConfig = filling.config
    given = settings(config, given_only=True)
    if facts.tuned:
        for key, value in facts.tuned.values.items():
            if key not in given:
                filling.set(key, value, facts.tuned.reason)
    if (profile := config.system.profile) is None:
        return
    values = situation(config, facts) | {"gpus": gpus_of_run(config, facts) if on_gpu(config) else 0}
    for entry in system_profiles()[profile]:
        key, value = entry["key"], entry["value"]
        if key not in given and applies(entry, values) and (not entry.get("if_fits") or _fits(filling, facts, entry)):
            filling.set(key, value, f"profile {profile}: {entry['why']}")


def _fits(filling: Filling, facts: Facts, entry: dict[str, Any]) -> bool:
    """Whether a sample fits in some layout with a profile entry's value."""
    config = with_values(filling.config, {entry["key"]: entry["value"]})
    return any(lack(config, facts, layout) <= 1 for layout in layouts(config, facts))
