"""The progress of a run, under the names of transformers' ``TrainerState``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from tunesmith.errors import nearest
from tunesmith.records.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The reward functions' ``trainer_state``. An unknown attribute is an error that lists the
    known ones."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    logging_steps: int = 1
    eval_steps: int | None = None
    save_steps: int | None = None
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    metrics_file: Path | None = None
    """The run's ``metrics.jsonl``, the source of ``log_history``."""

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The metrics of every step and evaluation so far, oldest first, each with its ``step``."""
        file = self.metrics_file
        if file is None or not file.exists():
            return []
        return list(_records(file, file.stat().st_size))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = [field.name for field in fields(self)] + ["log_history"]
        raise AttributeError(f"trainer_state has no '{name}'.{nearest(name, known)}")


@lru_cache(maxsize=1)
def _records(file: Path, _size: int) -> list[dict[str, Any]]:
    """The file's records; its size invalidates the cache when the file has grown."""
    return read_metrics(file)
