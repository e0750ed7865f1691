"""Records what happens in a run: measures it, writes it to the run's files and the sinks, and shows
it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Protocol

from tunesmith.config.doors import Door
from tunesmith.records.clock import Clock
from tunesmith.records.facts import RunFacts
from tunesmith.records.memory import memory_metrics
from tunesmith.records.metrics import MetricsLog, is_evaluation, numbers, read_metrics
from tunesmith.records.other_programs import OtherPrograms
from tunesmith.records.progress import Progress, each_once
from tunesmith.records.text import answers_shown, shown_path
from tunesmith.records.timeline import LOOP, OUTSIDE_STEPS, TRAINER, TRAINER_WAITS, Timeline
from tunesmith.run.loop.profiling import StepProfiler
from tunesmith.run.loop.rollout_log import RolloutLog, contrast, summary
from tunesmith.types import RolloutGroup


class RunJudge(Protocol):
    """Judges the metrics of a run while it goes on."""

    def step(self, metrics: Mapping[str, float]) -> str | None:
        """Add a step; returns a new warning, if any."""
        ...

    def end(self) -> str | None:
        """Why the run that has ended learned nothing, if so."""
        ...


JUDGES = Door[Callable[[RunFacts], RunJudge]](
    "judges", "tunesmith.records.doctor.learning:LearningWatch"
)


@dataclass(slots=True)
class Recorder:
    """The clocks, files and displays of a run."""

    metrics: MetricsLog
    progress: Progress
    rollout_log: RolloutLog | None = None
    """None in supervised training."""
    clock: Clock = field(default_factory=Clock)
    judges: Sequence[RunJudge] = ()
    timeline: Timeline = field(default_factory=Timeline)
    profiler: StepProfiler | None = None
    others: OtherPrograms = field(default_factory=OtherPrograms)
    total_tokens: float = field(default=0.0, init=False)
    """Sum of the metric ``tokens`` over all steps."""
    limit_is_known: bool = field(default=True, init=False)
    """Whether the measured speed limit of the device can be trusted."""

    def begin(self, resume_step: int | None) -> None:
        """Open the files for what comes after a step, once it is known that the run goes on from
        there; None: from the beginning."""
        self.metrics.begin(resume_step)
        if self.rollout_log:
            self.rollout_log.begin(resume_step)
        # A run that is continued is judged from its first step on.
        for line in filterfalse(is_evaluation, read_metrics(self.metrics.path)):
            for judge in self.judges:
                judge.step(numbers(line))

    @contextmanager
    def phase(self, name: str, step: int) -> Generator[None]:
        """Time spent inside counts towards the phase ``name`` of a step."""
        self.progress.phase(name)
        if self.profiler and name not in OUTSIDE_STEPS:
            self.profiler.begin(step)
        lane = TRAINER if name in ("train", *TRAINER_WAITS) else LOOP
        waits_for = f"{TRAINER_WAITS[name]} of step {step}" if name in TRAINER_WAITS else None
        with self.clock.phase(name), self.timeline.span(lane, name, waits_for=waits_for):
            yield

    def step(self, step: int, metrics: Mapping[str, float], *, last: bool) -> dict[str, float]:
        """Write and show a finished step's metrics; returns them with its time by phase and its
        rates."""
        profile = self.profiler and self.profiler.end(step)
        seconds = self.clock.lap()
        record = step_record(metrics, seconds) | self.timeline.finish_step(step)
        record |= memory_metrics() | self.others.metrics()
        if "tokens" in metrics:
            self.total_tokens += metrics["tokens"]
            record["total_tokens"] = self.total_tokens
        share = record.get("limit_share", 0.0)
        if share > 1 and self.limit_is_known:
            self.limit_is_known = False
            self.progress.note(
                f"step {step} took {1 / share:.0%} of the least time that was measured for its "
                "work at the start: the machine must have been busy then. limit_share is left out "
                "from here on"
            )
        if not self.limit_is_known:
            record.pop("limit_share", None)
        self.metrics.write(step, record, always=last)
        self.progress.step(step, record, record["seconds"] - seconds.get("setup", 0.0))
        if profile:
            self.progress.note(f"profile of step {step}: {shown_path(profile)}")
        for judge in self.judges:
            warning = judge.step({**record, "step": float(step)})
            if warning:
                self.progress.note(warning)
        return record

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show an evaluation's metrics."""
        self.metrics.write(step, metrics, always=True)
        numbers = {name.removeprefix("eval/"): f"{value:.3g}" for name, value in metrics.items()}
        if not metrics.get("eval/failed"):
            numbers.pop("failed", None)
        shown = (f"{names} {value}" for names, value in each_once(numbers).items())
        self.progress.note(f"evaluation after step {step}: {'  '.join(shown)}")

    def rollouts(
        self, step: int, groups: Sequence[RolloutGroup], kind: str = "train", *, last: bool
    ) -> None:
        """Log some rollouts of a step or an evaluation, and show a good and a bad one now and
        then."""
        assert self.rollout_log is not None, "this run has no rollouts"
        lines = self.rollout_log.write(step, groups, kind)
        self.metrics.show(step, [summary(line) for line in lines], always=last)
        # After 1, 2, 4, 8, ... steps: most often at the start, where most can be wrong.
        pair = contrast(lines) if kind == "train" and step.bit_count() == 1 else None
        if pair:
            self.progress.note(answers_shown(*pair))


def step_record(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics with its seconds by phase and its rates, which leave out the phases
    ``OUTSIDE_STEPS``.

    ``attainable_seconds`` in ``metrics`` excludes its parts (``attainable_seconds/<part>``), which
    are added here.
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
        parts = [name for name in metrics if name.partition("/")[0] == "attainable_seconds"]
        least = sum(metrics[name] for name in parts)
        record |= {"attainable_seconds": least, "limit_share": least / busy}
    return record
