"""Weights & Biases, online or with ``WANDB_MODE=offline``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.records.plain import Row
from tunesmith.records.sinks.base import RunInfo, require


def check_key() -> None:
    """Refuse (ConfigError) a run online without a key, for which wandb would ask."""
    wandb = require("wandb")
    online = os.environ.get("WANDB_MODE", "online") in ("online", "run", "shared")
    if online and not wandb.api.api_key:
        raise ConfigError(
            "monitor.sinks asks for wandb, which has no key: run `wandb login`, set WANDB_API_KEY, "
            "or set WANDB_MODE=offline and send the run later with `wandb sync`",
            keys=("monitor.sinks",),
        )


class WandB:
    """A run of W&B. It is continued under its id; steps are a metric, as W&B drops what comes in
    another order."""

    def __init__(self, run: RunInfo) -> None:
        self._wandb = require("wandb")
        identity = run.known_id("wandb") or uuid.uuid4().hex[:12]
        self._run = self._wandb.init(
            project=run.project_or("WANDB_PROJECT"),
            name=run.name,
            tags=list(run.tags),
            config=dict(run.settings),
            dir=str(run.directory),
            id=identity,
            resume="allow",
            settings=self._wandb.Settings(console="off"),
        )
        run.keep_id("wandb", identity)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def show(self, step: int, rows: Sequence[Row]) -> None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_cell(row.get(name)) for name in columns] for row in rows]
        self._run.log({"rollouts": self._wandb.Table(columns=columns, data=cells), "step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _cell(value: object) -> Any:
    """A column of a table has one type: numbers stay, all else is text."""
    return value if value is None or isinstance(value, int | float) else str(value)
