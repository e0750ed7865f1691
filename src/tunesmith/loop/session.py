"""What every training loop shares: the step counter, the clock, metrics, progress and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, nearest
from tunesmith.loop.checkpoint import Checkpoints, read_state
from tunesmith.monitor.adjustments import Adjustments
from tunesmith.monitor.clock import Clock
from tunesmith.monitor.metrics import JsonLines, MetricsLog
from tunesmith.monitor.progress import Progress
from tunesmith.monitor.timeline import LOOP, TRAINER, Timeline
from tunesmith.types import Rollout, RolloutGroup

BESIDE_STEPS = ("setup", "eval", "checkpoint")
"""Phases that a step's rates leave out."""
TRAINER_WAITS = {"rollout": "the rollouts", "sync": "the engines to take the weights"}
"""Phases in which the trainer waits, and for what."""


def due(step: int, every: int | None, total: int) -> bool:
    """Whether it is time for what happens every so many steps, and at the end; None is only at the end."""
    return step >= total or (every is not None and step % every == 0)


@dataclass(slots=True)
class Best:
    """The best evaluation so far."""

    metric: str
    higher_is_better: bool
    target: float | None = None
    value: float | None = None
    step: int | None = None

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    @property
    def reached_target(self) -> bool:
        if self.value is None or self.target is None:
            return False
        return self.sign * self.value >= self.sign * self.target

    def update(self, value: float, step: int) -> None:
        """Take in an evaluation; one that is not finite is never the best."""
        if isfinite(value) and (self.value is None or self.sign * value > self.sign * self.value):
            self.value, self.step = value, step


@dataclass(slots=True)
class Session:
    """A run in progress. Loops ask it what is due and tell it what happened."""

    total_steps: int
    evaluate_every: int | None
    checkpoint_every: int | None
    metrics: MetricsLog
    progress: Progress
    checkpoints: Checkpoints
    best: Best
    rollout_log: JsonLines
    clock: Clock
    timeline: Timeline = field(default_factory=Timeline)
    adjustments: Adjustments | None = None
    resume_from: Path | None = None
    step: int = 0
    total_tokens: float = 0.0
    """The metric ``tokens`` of all steps."""

    @property
    def running(self) -> bool:
        """Whether there is a step to take: not at the end, and the evaluation's target not reached."""
        return self.step < self.total_steps and not self.best.reached_target

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time spent inside counts as ``name``."""
        self.progress.phase(name)
        lane = TRAINER if name in ("train", *TRAINER_WAITS) else LOOP
        waits_for = f"{TRAINER_WAITS[name]} of step {self.step + 1}" if name in TRAINER_WAITS else None
        with self.clock.phase(name), self.timeline.span(lane, name, waits_for=waits_for):
            yield

    def note(self, text: str) -> None:
        self.progress.note(text)

    def finish_step(self, metrics: Mapping[str, float]) -> None:
        """Count a step and record its metrics and where its time went."""
        self.step += 1
        seconds = self.clock.lap()
        times = {f"seconds/{name}": value for name, value in seconds.items()}
        wall = sum(seconds.values())
        busy = sum(value for name, value in seconds.items() if name not in BESIDE_STEPS)
        record = {**metrics, **times, **self.timeline.finish_step(self.step), "seconds": wall}
        if "tokens" in metrics:
            self.total_tokens += metrics["tokens"]
            record["total_tokens"] = self.total_tokens
            record["tokens_per_second"] = metrics["tokens"] / busy
        if "attainable_seconds" in metrics:
            record["limit_share"] = metrics["attainable_seconds"] / busy
        self.metrics.write(self.step, record, always=self.step == self.total_steps)
        self.progress.step(self.step, record, wall - seconds.get("setup", 0.0))

    def finish_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record an evaluation; the best one's checkpoint is kept."""
        self.metrics.write(self.step, metrics, always=True)
        if self.best.metric in metrics:
            self.best.update(metrics[self.best.metric], self.step)
        elif "eval/reward" in metrics or "eval/loss" in metrics:
            raise ConfigError(
                f"eval.metric: no evaluation gives '{self.best.metric}'.{nearest(self.best.metric, metrics)}"
            )
        numbers = (f"{name.removeprefix('eval/')} {value:.3g}" for name, value in metrics.items())
        self.note(f"evaluation after step {self.step}: {'  '.join(numbers)}")

    def evaluation_due(self) -> bool:
        return due(self.step, self.evaluate_every, self.total_steps)

    def checkpoint_due(self) -> bool:
        """By the cadence, or because the evaluation just made is the best one."""
        is_best = self.best.step == self.step and self.step > 0
        return is_best or due(self.step, self.checkpoint_every, self.total_steps)

    def save(self, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """Write a checkpoint of this step: what ``write`` puts into the directory, and the loop's state."""
        best = {self.best.metric: [self.best.value, self.best.step]}
        own = {"step": self.step, "best": best, "total_tokens": self.total_tokens}
        with self.phase("checkpoint"):
            return self.checkpoints.save(self.step, {**own, **state}, write, self.best.step)

    def restore(self, load: Callable[[Path], None]) -> dict[str, Any] | None:
        """Load the checkpoint to resume from and return the loop's state; None when starting afresh."""
        if self.resume_from is None:
            return None
        state = read_state(self.resume_from)
        load(self.resume_from)
        self.step, self.total_tokens = state["step"], state["total_tokens"]
        self.best.value, self.best.step = state["best"].get(self.best.metric, (None, None))
        self.note(f"continuing at step {self.step} from {self.resume_from}")
        if self.step >= self.total_steps:
            self.note(f"nothing is left to do: the run has its {self.total_steps} steps (train.steps)")
        return state


def write_rollouts(
    session: Session,
    decode: Callable[[Sequence[int]], str],
    groups: Sequence[RolloutGroup],
    count: int,
    kind: str = "train",
) -> None:
    """Append a rollout of each of the first ``count`` groups, and every failed one, to rollouts.jsonl."""
    chosen = [g.rollouts[0] for g in groups[:count]]
    written = {id(r) for r in chosen}
    failed = [r for g in groups for r in g.rollouts if r.error is not None and id(r) not in written]
    for rollout in [*chosen, *failed]:
        session.rollout_log.write({"step": session.step, "kind": kind, **_record(rollout, decode)})


def _record(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {
        "task": rollout.task.id,
        "prompt": rollout.task.prompt,
        "completion": decode(rollout.completion_ids),
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "status": rollout.status.value,
        "error": rollout.error,
        "tokens": rollout.num_sampled,
        "finish_reason": rollout.finish_reason,
        **({"notes": rollout.notes} if rollout.notes else {}),
    }
