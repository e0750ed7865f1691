"""Breaks down the time of a run's steps on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tunesmith.config.load import load_run
from tunesmith.config.reading.places import placed
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.guide.tune.arms import Arm, TrialEnded
from tunesmith.guide.tune.setup import check_tunable, trial_config
from tunesmith.records.children import remove_at_end
from tunesmith.records.costs import largest_costs
from tunesmith.records.metrics import numbers
from tunesmith.records.timeline import OUTSIDE_STEPS

COSTS = 3
"""Number of operations that are named."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Median over steps. ``limit_share`` is the least time in which the hardware could do the same
    work, divided by the phase's time; None if unknown."""

    name: str
    seconds: float
    share: float
    tokens_per_second: float | None
    limit_share: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    steps: int
    seconds: float
    """Median per step."""
    limit_share: float | None
    phases: Sequence[PhaseTime]
    costs: Sequence[tuple[str, float]]
    """The operations with the largest self time in one more step, which the profiler slows down."""


def measure_steps(path: Path, overrides: Sequence[str], steps: int) -> Measured:
    """Take some real steps of a run, in a separate process and directory, after a warm-up step.

    Raises:
        ConfigError: the run cannot be measured, or does not run.
    """
    with placed(path, overrides):
        config = load_run(path, overrides)
        check_tunable(config, "bench")
    trial = trial_config(config)
    profiled = steps + 2
    monitor = trial.monitor.model_copy(update={"profile_steps": (profiled,)})
    with TemporaryDirectory(prefix="tunesmith-bench-", ignore_cleanup_errors=True) as folder:
        remove_at_end(Path(folder))
        arm = Arm(trial.model_copy(update={"monitor": monitor}), path, Path(folder))
        try:
            metrics: list[dict[str, float]] = []
            for _ in range(steps):
                arm.step()
                metrics.append(numbers(arm.metrics))
            arm.step()
            costs = largest_costs(arm.run_dir / "profile" / f"step-{profiled:06d}.json.gz", COSTS)
        except TrialEnded as ended:
            raise ConfigError(f"the run does not work: {ended}") from None
        finally:
            arm.end()
    overlapping = isinstance(config, RLConfig) and config.rollout.max_staleness > 0
    return measured(metrics, overlapping=overlapping, costs=costs)


def measured(
    steps: Sequence[Mapping[str, float]],
    *,
    overlapping: bool,
    costs: Sequence[tuple[str, float]] = (),
) -> Measured:
    """The breakdown of steps from their metrics.

    Args:
        overlapping: rollouts continue while the policy trains; the phases then have no separate
            limits.
    """
    typical = {name: median([step[name] for step in steps if name in step]) for name in steps[0]}
    spent = {
        name.partition("/")[2]: s for name, s in typical.items() if name.startswith("seconds/")
    }
    spent = {name: s for name, s in spent.items() if name not in OUTSIDE_STEPS and s > 0}
    whole = sum(spent.values())
    least = typical.get("attainable_seconds")
    scoring = typical.get("attainable_seconds/scoring", 0.0)
    training = typical.get("attainable_seconds/train", None if least is None else least - scoring)
    limits = {"train": training, "scoring": scoring}
    if least is not None and training is not None and "rollout" in spent:
        limits["rollout"] = least - training - scoring
    scored = typical.get("scoring_seconds", 0.0)
    if scored and not overlapping:
        spent |= {"scoring": scored, "train": spent["train"] - scored}
    tokens = {"rollout": typical.get("sampled_tokens"), "train": typical.get("trained_tokens")}
    phases: list[PhaseTime] = []
    for name, s in sorted(spent.items(), key=lambda item: -item[1]):
        limit = None if overlapping else _over(limits.get(name), s)
        phases.append(PhaseTime(name, s, s / whole, _over(tokens.get(name), s), limit))
    return Measured(len(steps), whole, _over(least, whole), phases, costs)


def _over(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount and seconds else None
