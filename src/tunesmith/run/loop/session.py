"""What all training loops share: the step counter, what is due, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tunesmith.config.schema import CheckpointSection, EvalSection
from tunesmith.errors import CheckpointError, ConfigError, boundary, nearest
from tunesmith.learn.data.loader import State
from tunesmith.plan.parts import Intervals
from tunesmith.records import interrupts
from tunesmith.records.run_dir import point
from tunesmith.run.loop.callbacks import STOP, Callbacks
from tunesmith.run.loop.checkpoint import NONE_YET, Checkpoints, read_state
from tunesmith.run.loop.recorder import Recorder
from tunesmith.types import RolloutGroup

if TYPE_CHECKING:
    from tunesmith.run.loop.parts import Parts
    from tunesmith.run.trainers.base import Metrics


class Publisher(Protocol):
    """Writes model cards and uploads models."""

    def describe(self, checkpoint: Path) -> None: ...

    def publish(self, checkpoint: Path, *, last: bool) -> None:
        """Upload a checkpoint's model. A failure is reported, not raised."""


_UNREADABLE = (
    OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError,
    ArithmeticError,
)  # fmt: skip
"""Errors that libraries raise when they read damaged files."""


class Saved(NamedTuple):
    """When the last checkpoint was written, or the run was started."""

    step: int
    evaluated: bool | None
    """None: a signal ended the run, and what else belongs to a checkpoint was left out."""
    epoch: int
    time: float


def due(step: int, every: int | Literal["epoch"] | None, total: int, pass_ended: bool) -> bool:
    """Whether an action is due that happens every ``every`` steps and at the end (None: only at the
    end)."""
    if every == "epoch":
        return step >= total or pass_ended
    return step >= total or (every is not None and step % every == 0)


LOWER_IS_BETTER = ("eval/nll", "eval/teacher_kl", "eval/failed")
"""Metrics of evaluations of which low values are good, besides those with "loss" in the name."""


@dataclass(slots=True)
class Best:
    """The best evaluation so far."""

    metric: str
    target: float | None = None
    value: float | None = None
    step: int | None = None

    @property
    def higher_is_better(self) -> bool:
        return "loss" not in self.metric and self.metric not in LOWER_IS_BETTER

    @property
    def reached_target(self) -> bool:
        if self.value is None or self.target is None:
            return False
        return not self._better(self.target, self.value)

    def update(self, value: float, step: int) -> None:
        """Compare with an evaluation; one that is not finite is never the best."""
        if isfinite(value) and (self.value is None or self._better(value, self.value)):
            self.value = value
            self.step = step

    def _better(self, a: float, b: float) -> bool:
        return a > b if self.higher_is_better else a < b


@dataclass(slots=True)
class Session:
    """A run in progress. Training loops ask it what is due, and tell it what happened."""

    total_steps: int
    intervals: Intervals
    eval: EvalSection
    checkpoint: CheckpointSection
    recorder: Recorder
    checkpoints: Checkpoints
    best: Best
    resume_from: Path | None = None
    publisher: Publisher | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    step: int = field(default=0, init=False)
    evaluated: bool = field(default=False, init=False)
    """Whether this step has been evaluated."""
    stopped: bool = field(default=False, init=False)
    """Whether a callback asked to end the run."""
    _parts: Parts = field(init=False)
    _describe: Callable[[Path], None] | None = field(default=None, init=False)
    _state: State = field(init=False)
    """The parts' state after the last complete step."""
    _epoch: int = field(default=0, init=False)
    _pass_ended: bool = field(default=False, init=False)
    """Whether a pass over the data ended with the last step."""
    _saved: Saved = field(init=False)

    @property
    def running(self) -> bool:
        """Whether there is a step to take: the run is not at its end or stopped, and
        ``eval.target`` is not reached."""
        return self.step < self.total_steps and not self.best.reached_target and not self.stopped

    @property
    def unsaved(self) -> bool:
        """Whether a step was finished since the last checkpoint."""
        return self.step != self._saved.step

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time spent inside counts towards the phase ``name`` of the next step."""
        return self.recorder.phase(name, self.step + 1)

    def note(self, text: str) -> None:
        self.recorder.progress.note(text)

    def start(self, parts: Parts, describe: Callable[[Path], None] | None = None) -> None:
        """Begin to train ``parts``, or continue from the checkpoint ``resume_from``.

        Args:
            describe: writes measurements of the model into a checkpoint; skipped when a signal ends
                the run, as it may take long.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another run.
            ModelError, StorageError: a checkpoint could not be written.
        """
        self._parts = parts
        self._describe = describe
        stopped = False
        if self.resume_from is not None:
            with boundary(CheckpointError, f"cannot continue from {self.resume_from}", _UNREADABLE):
                state = read_state(self.resume_from)
                parts.load(self.resume_from)
                self.step = state["step"]
                self.recorder.total_tokens = state["total_tokens"]
                self.evaluated = state.get("evaluated", True)
                self._pass_ended = state.get("pass_ended", False)
                stopped = state.get("stopped", False)
                self.best.value, self.best.step = state["best"].get(self.best.metric, (None, None))
                parts.take(state)
            self.note(f"continuing at step {self.step} from {self.resume_from}")
            if not self.running:
                value = f"{self.best.metric} has reached {self.best.value} (eval.target)"
                steps = f"the run has its {self.total_steps} steps (train.steps)"
                done = value if self.best.reached_target else steps
                self.note(f"nothing is left to do: {done}")
        self._state = parts.state(self.step)
        self._epoch = parts.epoch
        whole = None if stopped else self.evaluated
        self._saved = Saved(self.step, whole, self._epoch, self.recorder.clock.now())
        if self.running:
            self.checkpoints.rehearse(self._state, self._rehearse)
        # Last, because it drops the lines after the checkpoint.
        self.recorder.begin(None if self.resume_from is None else self.step)

    def _rehearse(self, directory: Path) -> None:
        """Write a checkpoint without weights and optimizer: a run that cannot save must not
        start."""
        for difference in self._parts.rehearse(directory):
            self.note(f"a saved tokenizer does not read back as it is: {difference}")
        if self.publisher:
            self.publisher.describe(directory)

    def finish_step(self, metrics: Metrics, groups: Sequence[RolloutGroup] = ()) -> None:
        """Count a step, record it, and log the rollouts of its groups.

        If a signal ends the run from now on, this step is saved.
        """
        interrupts.commit()
        self.step += 1
        last = self.step == self.total_steps
        record = self.recorder.step(self.step, metrics, last=last)
        if groups:
            self.recorder.rollouts(self.step, groups, last=last)
        self._pass_ended = self._parts.epoch > self._epoch
        self._state = self._parts.state(self.step)
        self._epoch = self._parts.epoch
        self.evaluated = False
        interrupts.settle()
        self._call(self.callbacks.on_step, record)

    def finish_evaluation(self, metrics: Metrics, groups: Sequence[RolloutGroup] = ()) -> None:
        """Record an evaluation, and log its rollouts. The checkpoint of the best one is kept."""
        self.evaluated = True
        if groups:
            self.recorder.rollouts(self.step, groups, "eval", last=True)
        self.recorder.evaluation(self.step, metrics)
        name = self.best.metric
        if name in metrics:
            self.best.update(metrics[name], self.step)
        elif self.best.value is None and ("eval/reward" in metrics or "eval/loss" in metrics):
            why = f"eval.metric: no evaluation gives '{name}'.{nearest(name, metrics)}"
            raise ConfigError(why, keys=("eval.metric",))
        self._call(self.callbacks.on_evaluation, dict(metrics))

    def evaluation_due(self) -> bool:
        """Whether this step still has to be evaluated. After a resume it does if a signal prevented
        it."""
        if self.evaluated:
            return False
        if not self.step:
            return self.eval.at_start
        return due(self.step, self.intervals.evaluation, self.total_steps, self._pass_ended)

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due by steps, epochs or time, because the run stops, or after the
        best evaluation."""
        saved = self._saved
        if not self.step or (self.step, self.evaluated) == (saved.step, saved.evaluated):
            return False
        minutes = self.intervals.minutes
        seconds = self.recorder.clock.now() - saved.time
        late = minutes is not None and seconds >= 60 * minutes
        if late or self.stopped or self.best.step == self.step:
            return True
        pass_ended = self._epoch > saved.epoch
        return due(self.step, self.intervals.checkpoint, self.total_steps, pass_ended)

    def save(self, *, stopping: bool = False) -> Path:
        """Write a checkpoint of the last complete step.

        Args:
            stopping: a signal ends the run. The checkpoint can be resumed even with ``model_only``,
                and is not published.
        """
        wanted = self.checkpoint.model_only
        model_only = not stopping and (wanted is True or (wanted == "last" and not self.running))
        state: State = {
            "step": self.step,
            "best": {self.best.metric: [self.best.value, self.best.step]},
            "evaluated": self.evaluated,
            "pass_ended": self._pass_ended,
            "total_tokens": self.recorder.total_tokens,
        }
        state |= {"model_only": True, "finished": not self.running} if model_only else {}
        state |= {"stopped": True} if stopping else {}

        def write(directory: Path) -> None:
            self._parts.write(directory, model_only=model_only)
            if self._describe and not stopping:
                self._describe(directory)
            if self.publisher:
                self.publisher.describe(directory)

        with self.phase("checkpoint"), interrupts.held():
            path = self.checkpoints.save(self.step, {**state, **self._state}, write, self.best.step)
            self._saved = Saved(self.step, self.evaluated, self._epoch, self.recorder.clock.now())
            point(path.parent.parent / "model", path / "model")
            goes_on = self.running
            if self.publisher and not stopping:
                self.publisher.publish(path, last=not goes_on)
        if not stopping:
            self._call(self.callbacks.on_checkpoint, path)
            if self.publisher and goes_on and not self.running:  # it is the last one after all
                self.publisher.publish(path, last=True)
        return path

    def _call(self, callback: Callable[[int, Any], bool | None] | None, value: object) -> None:
        if callback is not None and callback(self.step, value) is STOP:
            self.stopped = True

    def keep(self) -> str:
        """When the run ends early: save the last complete step. Returns a message that says what
        was kept."""
        newest = self.checkpoints.newest()
        kept = f"the newest checkpoint is {newest}" if newest else NONE_YET
        if interrupts.torn():
            message = f"the step after step {self.step} was half done and is lost; {kept}"
        elif not self.unsaved:
            message = f"no step was finished since; {kept}"
        else:
            try:
                self._parts.give_up()
                path = self.save(stopping=True)
                message = f"stopped after step {self.step} of {self.total_steps}: {path} is written"
            except Exception as error:  # what ended the run may have broken its device
                message = f"step {self.step} could not be saved: {error}; {kept}"
        self.note(message)
        return message
