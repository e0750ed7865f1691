"""Settings that may change while a run goes on: a file in its directory that the run looks at before each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADJUSTABLE = ("rollout.over_generation", "rollout.queue_size", "system.engines")
FILE = "adjust.json"


def write_adjustments(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Ask the run for these values, on top of what was asked before."""
    path = run_dir / FILE
    before = json.loads(path.read_text()) if path.exists() else {}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({**before, **values}))
    unfinished.rename(path)


def forget_adjustments(run_dir: Path) -> None:
    """What was asked of an earlier run in the directory: this one has what its settings say."""
    (run_dir / FILE).unlink(missing_ok=True)


@dataclass(slots=True)
class Adjustments:
    """The run's side."""

    run_dir: Path
    _seen: dict[str, Any] = field(default_factory=dict[str, Any], init=False)

    def new(self) -> dict[str, Any]:
        """What has been asked for since the last look, by dotted key."""
        path = self.run_dir / FILE
        asked = json.loads(path.read_text()) if path.exists() else {}
        changed = {key: value for key, value in asked.items() if self._seen.get(key) != value}
        self._seen = asked
        return changed
