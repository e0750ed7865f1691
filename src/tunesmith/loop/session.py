"""The parts that all training loops share: step counter, clock, metrics, progress and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tunesmith.config.schema import CheckpointSection, EvalSection
from tunesmith.doctor.learning import LearningWatch
from tunesmith.doctor.record import RunFacts
from tunesmith.errors import CheckpointError, ConfigError, TunesmithError, boundary, nearest
from tunesmith.loop.callbacks import STOP, Callbacks
from tunesmith.loop.checkpoint import Checkpoints, read_state
from tunesmith.loop.profiling import StepProfiler
from tunesmith.loop.rollout_log import RolloutLog, contrast, summary
from tunesmith.monitor import interrupts
from tunesmith.monitor.clock import Clock
from tunesmith.monitor.memory import memory_metrics
from tunesmith.monitor.metrics import MetricsLog
from tunesmith.monitor.progress import Progress, each_once
from tunesmith.monitor.run_dir import point
from tunesmith.monitor.text import answers_shown, shown_path
from tunesmith.monitor.timeline import LOOP, OUTSIDE_STEPS, TRAINER, TRAINER_WAITS, Timeline
from tunesmith.types import RolloutGroup

if TYPE_CHECKING:
    from tunesmith.loop.parts import Parts


class Publisher(Protocol):
    """Writes model cards and uploads models."""

    def describe(self, checkpoint: Path) -> None: ...

    def publish(self, checkpoint: Path, *, last: bool) -> None:
        """Upload a checkpoint's model. A failure is reported, not raised."""
        ...


_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError, ArithmeticError,
)  # fmt: skip
"""Errors that libraries raise when they read damaged files."""


class Saved(NamedTuple):
    """When the last checkpoint was written, or the run was started."""

    step: int
    evaluated: bool
    epoch: int
    time: float


def due(step: int, every: int | None, total: int) -> bool:
    """Whether an action is due that happens every ``every`` steps and at the end (None: only at the end)."""
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
    def reached_target(self) -> bool:
        return self.value is not None and self.target is not None and not self._better(self.target, self.value)

    def update(self, value: float, step: int) -> None:
        """Compare with an evaluation; one that is not finite is never the best."""
        if isfinite(value) and (self.value is None or self._better(value, self.value)):
            self.value, self.step = value, step

    def _better(self, a: float, b: float) -> bool:
        return a > b if self.higher_is_better else a < b


@dataclass(slots=True)
class Session:
    """A run in progress. Training loops ask it what is due, and report to it what happened."""

    total_steps: int
    eval: EvalSection
    checkpoint: CheckpointSection
    metrics: MetricsLog
    progress: Progress
    checkpoints: Checkpoints
    best: Best
    rollout_log: RolloutLog | None
    """None in supervised training."""
    clock: Clock = field(default_factory=Clock)
    learning: LearningWatch = field(default_factory=lambda: LearningWatch(RunFacts()))
    timeline: Timeline = field(default_factory=Timeline)
    resume_from: Path | None = None
    publisher: Publisher | None = None
    profiler: StepProfiler | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    step: int = field(default=0, init=False)
    total_tokens: float = field(default=0.0, init=False)
    """Sum of the metric ``tokens`` over all steps."""
    evaluated: bool = field(default=False, init=False)
    """Whether this step has been evaluated."""
    stopped: bool = field(default=False, init=False)
    """Whether a callback asked to end the run."""
    limit_is_known: bool = field(default=True, init=False)
    """Whether the measured speed limit of the device can be trusted."""
    _parts: Parts = field(init=False)
    _describe: Callable[[Path], None] | None = field(default=None, init=False)
    _state: dict[str, Any] = field(init=False)
    """The parts' state after the last complete step."""
    _epoch: int = field(default=0, init=False)
    _saved: Saved = field(init=False)

    @property
    def running(self) -> bool:
        """Whether there is a step to take: the run is not at its end or stopped, and ``eval.target`` is not reached."""
        return self.step < self.total_steps and not self.best.reached_target and not self.stopped

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time spent inside counts towards the phase ``name``."""
        self.progress.phase(name)
        if self.profiler and name not in OUTSIDE_STEPS:
            self.profiler.begin(self.step + 1)
        lane = TRAINER if name in ("train", *TRAINER_WAITS) else LOOP
        waits_for = f"{TRAINER_WAITS[name]} of step {self.step + 1}" if name in TRAINER_WAITS else None
        with self.clock.phase(name), self.timeline.span(lane, name, waits_for=waits_for):
            yield

    def note(self, text: str) -> None:
        self.progress.note(text)

    def start(self, parts: Parts, describe: Callable[[Path], None] | None = None) -> None:
        """Begin to train ``parts``, or continue from the checkpoint ``resume_from``.

        Args:
            describe: writes measurements of the model into a checkpoint; skipped when a signal ends the run, as it may
                take long.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another run.
        """
        self._parts, self._describe = parts, describe
        if self.resume_from is not None:
            with boundary(CheckpointError, f"cannot continue from {self.resume_from}", _UNREADABLE):
                state = read_state(self.resume_from)
                parts.load(self.resume_from)
                self.step, self.total_tokens = state["step"], state["total_tokens"]
                self.evaluated = state.get("evaluated", True)
                self.best.value, self.best.step = state["best"].get(self.best.metric, (None, None))
                parts.take(state)
            self.note(f"continuing at step {self.step} from {self.resume_from}")
            if self.step >= self.total_steps:
                self.note(f"nothing is left to do: the run has its {self.total_steps} steps (train.steps)")
        self._state, self._epoch = parts.state(), parts.epoch
        self._saved = Saved(self.step, self.evaluated, self._epoch, self.clock.now())

    def finish_step(self, metrics: Mapping[str, float], groups: Sequence[RolloutGroup] = ()) -> None:
        """Count a step, record it, and log the rollouts of its groups.

        If a signal ends the run from now on, this step is saved.
        """
        interrupts.commit()
        self.step += 1
        record = self._record(metrics)
        if groups:
            self.log_rollouts(groups)
        self._state, self._epoch, self.evaluated = self._parts.state(), self._parts.epoch, False
        interrupts.settle()
        self._call(self.callbacks.on_step, record)

    def _record(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write and show the step's metrics, with its time by phase and its rates."""
        profile = self.profiler and self.profiler.end(self.step)
        seconds = self.clock.lap()
        record = step_record(metrics, seconds) | self.timeline.finish_step(self.step) | memory_metrics()
        if "tokens" in metrics:
            self.total_tokens += metrics["tokens"]
            record["total_tokens"] = self.total_tokens
        share = record.get("limit_share", 0.0)
        if share > 1 and self.limit_is_known:
            self.limit_is_known = False
            self.note(
                f"step {self.step} took {1 / share:.0%} of the least time that was measured for its work at the start: "
                "the machine must have been busy then. limit_share is left out from here on"
            )
        if not self.limit_is_known:
            record.pop("limit_share", None)
        self.metrics.write(self.step, record, always=self.step == self.total_steps)
        self.progress.step(self.step, record, record["seconds"] - seconds.get("setup", 0.0))
        if profile:
            self.note(f"profile of step {self.step}: {shown_path(profile)}")
        if warning := self.learning.step({**record, "step": float(self.step)}):
            self.note(warning)
        return record

    def finish_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record an evaluation. The checkpoint of the best one is kept."""
        self.evaluated = True
        self.metrics.write(self.step, metrics, always=True)
        if self.best.metric in metrics:
            self.best.update(metrics[self.best.metric], self.step)
        elif self.best.value is None and ("eval/reward" in metrics or "eval/loss" in metrics):
            raise ConfigError(
                f"eval.metric: no evaluation gives '{self.best.metric}'.{nearest(self.best.metric, metrics)}"
            )
        numbers = {
            name.removeprefix("eval/"): f"{value:.3g}"
            for name, value in metrics.items()
            if value or name != "eval/failed"
        }
        shown = (f"{names} {value}" for names, value in each_once(numbers).items())
        self.note(f"evaluation after step {self.step}: {'  '.join(shown)}")
        self._call(self.callbacks.on_evaluation, dict(metrics))

    def log_rollouts(self, groups: Sequence[RolloutGroup], kind: str = "train") -> None:
        """Log some of a step's rollouts, and show a good and a bad one now and then."""
        assert self.rollout_log is not None, "this run has no rollouts"
        lines = self.rollout_log.write(self.step, groups, kind)
        last = self.step == self.total_steps
        self.metrics.show(self.step, [summary(line) for line in lines], always=last or kind == "eval")
        # After 1, 2, 4, 8, ... steps: most often at the start, where most can be wrong.
        if kind == "train" and self.step.bit_count() == 1 and (pair := contrast(lines)):
            self.note(answers_shown(*pair))

    def evaluation_due(self) -> bool:
        """Whether this step has to be evaluated; after a resume, because a signal prevented it."""
        wanted = due(self.step, self.eval.every, self.total_steps) if self.step else self.eval.at_start
        return wanted and not self.evaluated

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due by steps, epochs or time, because the run stops, or after the best evaluation."""
        saved = self._saved
        if not self.step or (self.step, self.evaluated) == (saved.step, saved.evaluated):
            return False
        is_best, every, minutes = self.best.step == self.step, self.checkpoint.every, self.checkpoint.minutes
        if self.stopped or is_best or (minutes is not None and self.clock.now() - saved.time >= 60 * minutes):
            return True
        if every == "epoch":
            return self.step >= self.total_steps or self._epoch > saved.epoch
        return due(self.step, every, self.total_steps)

    def save(self, *, stopping: bool = False) -> Path:
        """Write a checkpoint of the last complete step.

        Args:
            stopping: a signal ends the run. The checkpoint can be resumed even with ``model_only``, and is not
                published.
        """
        wanted = self.checkpoint.model_only
        model_only = not stopping and (wanted is True or (wanted == "last" and not self.running))
        best = {self.best.metric: [self.best.value, self.best.step]}
        state = {"step": self.step, "best": best, "evaluated": self.evaluated, "total_tokens": self.total_tokens}
        state |= {"model_only": True, "finished": not self.running} if model_only else {}

        def write(directory: Path) -> None:
            self._parts.write(directory, model_only=model_only)
            if self._describe and not stopping:
                self._describe(directory)
            if self.publisher:
                self.publisher.describe(directory)

        with self.phase("checkpoint"), interrupts.held():
            path = self.checkpoints.save(self.step, {**state, **self._state}, write, self.best.step)
            self._saved = Saved(self.step, self.evaluated, self._epoch, self.clock.now())
            if self.publisher and not stopping:
                self.publisher.publish(path, last=not self.running)
        point(path.parent.parent / "model", path / "model")
        if not stopping:
            self._call(self.callbacks.on_checkpoint, path)
        return path

    def _call(self, callback: Callable[[int, Any], bool | None] | None, value: Any) -> None:
        if callback is not None and callback(self.step, value) is STOP:
            self.stopped = True

    def keep(self) -> str:
        """After a signal: save the last complete step. Returns a message that says what was kept."""
        newest = self.checkpoints.newest()
        kept = f"the newest checkpoint is {newest}" if newest else "no checkpoint was written yet"
        if interrupts.torn():
            message = f"the step after step {self.step} was half done and is lost; {kept}"
        elif self._saved.step == self.step:
            message = f"no step was finished since; {kept}"
        else:
            try:
                self._parts.give_up()
                path = self.save(stopping=True)
                message = f"stopped after step {self.step} of {self.total_steps}: {path} is written"
            except TunesmithError as error:
                message = f"step {self.step} could not be saved: {error}; {kept}"
        self.note(message)
        return message


def step_record(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics with its seconds by phase and its rates, which leave out the phases ``OUTSIDE_STEPS``.

    ``attainable_seconds`` in ``metrics`` excludes its parts (``attainable_seconds/<part>``), which are added here.
    """
    busy = sum(value for name, value in seconds.items() if name not in OUTSIDE_STEPS)
    times = {f"seconds/{name}": value for name, value in seconds.items()}
    record = {**metrics, **times, "seconds": sum(seconds.values())}
    if "tokens" in metrics:
        record["tokens_per_second"] = metrics["tokens"] / busy
    samples = metrics.get("rollouts", metrics.get("samples"))
    if samples is not None:
        record["samples_per_second"] = samples / busy
    if "attainable_seconds" in metrics:
        least = sum(value for name, value in metrics.items() if name.partition("/")[0] == "attainable_seconds")
        record |= {"attainable_seconds": least, "limit_share": least / busy}
    return record
