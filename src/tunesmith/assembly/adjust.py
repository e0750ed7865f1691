"""``tunesmith adjust``: change a run while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.config.load import find_kind, load_config, parse_override
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, nearest
from tunesmith.loop.adjustments import ADJUSTABLE, write_adjustments
from tunesmith.monitor.run_dir import is_running
from tunesmith.plan.checks import check


def run_adjust(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Ask the run in ``run_dir`` for other values; it takes them before its next step.

    Raises:
        ConfigError: no such run, a key that is fixed for a run, or a value that does not fit the others.
    """
    path = run_dir / "config.toml"
    if not path.exists():
        raise ConfigError(f"{run_dir} is no directory of a run: it has no config.toml")
    keys = [".".join(parse_override(text)[0]) for text in overrides]
    if not keys:
        raise ConfigError(f"say what to change, such as {ADJUSTABLE[0]}=2; adjustable are {', '.join(ADJUSTABLE)}")
    for key in keys:
        if key not in ADJUSTABLE:
            raise ConfigError(f"{key} is fixed while a run goes on.{nearest(key, ADJUSTABLE)}")
    kind = find_kind(path)
    if not issubclass(kind, RLConfig):
        raise ConfigError(f"{run_dir} is no run with rollouts; there is nothing to adjust")
    config = load_config(kind, path, overrides)
    check(config)
    if not config.rollout.max_staleness and any(key.startswith("rollout.") for key in keys):
        raise ConfigError("the run has rollout.max_staleness = 0: every step plays its own rollouts, without a queue")
    values = settings(config)
    found = {key: values[key] for key in keys}
    if not is_running(run_dir):
        raise ConfigError(f"no process works on the run in {run_dir}; say other values when it is resumed")
    write_adjustments(run_dir, found)
    return found
