"""Checks of a reward model's directory before it is loaded, and the statistics of its scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from tunesmith.config.schema import ModelReward
from tunesmith.errors import ConfigError, boundary
from tunesmith.records.storage import read_json

STATS_FILE = "reward_stats.json"


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Mean and standard deviation of a reward model's scores, measured in its evaluation."""

    mean: FiniteFloat
    std: Annotated[FiniteFloat, Field(gt=0)]

    def normalize(self, score: float) -> float:
        return (score - self.mean) / self.std


def check_reward_model(entry: ModelReward) -> None:
    """Reject (ConfigError) a directory that holds no reward model or lacks statistics. A hub name
    is not looked up."""
    directory = Path(entry.path)
    if directory.is_dir():
        problem = _problem_of_config(read_json(directory / "config.json", ConfigError))
        if problem:
            raise ConfigError(f"reward.models: '{entry.path}' {problem}", keys=("reward.models",))
    if entry.normalize:
        read_stats(directory)


def _problem_of_config(config: dict[str, Any]) -> str | None:
    names: list[str] = config.get("architectures") or []
    if not any("ForSequenceClassification" in name for name in names):
        return (
            f"is not a reward model: its architecture is {' '.join(names) or 'unknown'}; a reward "
            "model is saved as AutoModelForSequenceClassification with one label."
        )
    # transformers writes no id2label for its default of two.
    labels = len(config.get("id2label") or "ab")
    return f"has {labels} labels; a reward model has one." if labels != 1 else None


def read_stats(directory: Path) -> RewardStats:
    """Statistics of the reward model in a directory. ConfigError unless they hold a mean and a
    positive deviation."""
    path = directory / STATS_FILE
    if not path.is_file():
        raise ConfigError(
            f"normalize = true needs {path}, which does not exist: mean and std of the model's "
            'rewards, as in {"mean": 0.5, "std": 2.0}. Training with an eval set (tunesmith rm) '
            "writes it; otherwise write it yourself, or leave normalize out.",
            keys=("reward.models",),
        )
    with boundary(ConfigError, f"cannot read {path}", OSError):
        text = path.read_bytes()
    try:
        return TypeAdapter(RewardStats).validate_json(text)
    except ValidationError:
        raise ConfigError(
            f'{path} must hold a finite mean and a std above 0, as in {{"mean": 0.5, "std": 2.0}}.',
            keys=("reward.models",),
        ) from None
