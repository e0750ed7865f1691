"""``tunesmith tune``: finds the system settings with which a run file's steps are fastest here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from tunesmith.config.changing import with_values
from tunesmith.config.load import load_run
from tunesmith.config.reading.places import placed
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.costs import chunk_rows
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.guide.tune.arms import START_SECONDS, Arm, TrialEnded
from tunesmith.guide.tune.bench import SLOW, Bench
from tunesmith.guide.tune.intervals import Interval
from tunesmith.guide.tune.knobs import (
    KV,
    LAYOUT,
    RUNNING,
    THREADS,
    TOKENS,
    TUNED,
    Shape,
    Values,
    layouts_here,
    neighbours,
)
from tunesmith.guide.tune.proof import Proof, compare_gradients
from tunesmith.guide.tune.result import Journal, Result, Trial, gain_text, move_text, trial_text
from tunesmith.guide.tune.search import Candidate, TrialOutcome, search
from tunesmith.guide.tune.setup import (
    check_tunable,
    pinned_settings,
    proof_config,
    trial_config,
    tuned_values,
    without_defaults,
    without_tuned,
)
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.cost.seconds import expected_seconds
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.measured import tuned_file
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.layouts import gpus_of_run, layouts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.said import open_plan
from tunesmith.records.children import remove_at_end
from tunesmith.records.interrupts import Interrupted
from tunesmith.records.progress import duration
from tunesmith.records.waits import long_wait
from tunesmith.run.assembly.checking import facts_of_run

ROOM = 0.9
"""Share of the free memory that a second run may need to be kept next to the first."""
LATE = 5
"""Number of run starts to reserve time for at the end: for the proof, and to remeasure the gain."""
MEASURED = ("system.gradient_checkpointing", TOKENS, THREADS, KV)
"""Settings that would be derived from the free memory, but are written as measured."""
OF_THE_LAYOUT = (*LAYOUT, TOKENS, THREADS, KV, RUNNING)
"""Settings that are derived again for another layout."""


@dataclass(slots=True)
class Tuning:
    """A call of ``tunesmith tune``."""

    config: RunConfig
    """The run file with overrides, in a trial's form, without the tuned settings."""
    path: Path
    bench: Bench
    facts: Facts
    journal: Journal
    pinned: frozenset[str]
    """Settings given on the command line, which stay."""
    shape: Shape
    derived: Values
    usual: Values
    """The entries of ``derived`` that are defaults."""
    say: Callable[[str], None]
    began: float
    ends: float
    """When the call should end (``time.monotonic``)."""
    given: Values = field(init=False)
    """The run file's settings; ``derived`` if it sets none of the tuned ones, or does not run."""
    best: Values = field(init=False)
    trial_seconds: float = 0.0
    """About how long a trial takes: starting its run, and its first pair of steps."""
    measured: int = 0
    """Trials of this call."""
    interrupted: bool = False
    accepted: list[Trial] = field(default_factory=list[Trial])
    _left: Trial | None = None
    """The derived settings instead of the run file's, if they are faster."""
    _plans: list[tuple[Values, AnyPlan | TrialOutcome]] = field(
        default_factory=list["tuple[Values, AnyPlan | TrialOutcome]"]
    )
    """Plans of settings, or the outcome if they are refused."""

    def __post_init__(self) -> None:
        self.given = self.best = self.derived
        self.bench.config_of = self.config_of
        self.bench.fits = self.fits_beside

    def _changed(self, values: Values) -> Values:
        """The settings that are not the derived ones."""
        return {key: value for key, value in values.items() if self.derived.get(key) != value}

    def config_of(self, values: Values) -> RunConfig:
        return with_values(self.config, without_defaults(values, self.usual))

    def planned(self, values: Values) -> AnyPlan | TrialOutcome:
        """The run with these settings; the outcome if they are refused."""
        for known, before in self._plans:
            if known == values:
                return before
        try:
            plan: AnyPlan | TrialOutcome = resolve(self.config_of(values), self.facts)
        except (CapacityError, ConfigError) as error:
            status = "memory" if isinstance(error, CapacityError) else "refused"
            plan = TrialOutcome(status, None, str(error))
        self._plans.append((values, plan))
        return plan

    def fits_beside(self, values: Values) -> bool:
        """Whether a run fits into the memory that is free now, next to running processes."""
        plan = self.planned(values)
        if isinstance(plan, TrialOutcome):
            return False
        now = replace(self.facts, hardware=read_hardware())
        devices = planned_devices(replace(plan, facts=now))
        return bool(devices) and all(needed.peak <= ROOM * free for _, needed, free in devices)

    def expected(self, values: Values) -> float:
        plan = self.planned(values)
        if isinstance(plan, TrialOutcome):
            return inf
        shape = self.shape
        return expected_seconds(plan, shape.samples, shape.tokens / shape.samples)

    def candidates(self, best: Values) -> Iterator[Candidate]:
        """Variants of the best settings, with one setting or the layout changed; refused ones are
        recorded."""
        alone = ({key: value} for key, value in neighbours(best, self.shape))
        moves = [(move, {**best, **move}) for move in alone]
        for move, values in (*moves, *self._layouts(best)):
            if self.pinned.isdisjoint(move):
                plan = self.planned(values)
                if not isinstance(plan, TrialOutcome):
                    yield Candidate(move, values)
                elif self.journal.find(best, values) is None:
                    self.journal.add(Trial(best, values, move, plan))

    def _layouts(self, best: Values) -> Iterator[tuple[Values, Values]]:
        """Layouts, each with the settings derived for it; all other settings stay."""
        changed = self._changed(best)
        kept = {key: value for key, value in changed.items() if key not in OF_THE_LAYOUT}
        found: Iterator[Values] = iter(()) if self.shape.gpu else layouts_here(self.shape)
        plan = open_plan(self.config, self.facts)
        if gpus_of_run(plan) > 1:
            found = (each.settings for each in layouts(plan))
        for layout in found:
            with suppress(ConfigError):
                there = resolve(with_values(self.config, layout), self.facts).settings
                move = {key: value for key, value in layout.items() if best.get(key) != value}
                if move:
                    yield move, {**{key: there.get(key) for key in best}, **kept}

    def compare(self, best: Values, candidate: Candidate, arm: Arm | None = None) -> TrialOutcome:
        """Measure a candidate, or look it up in the journal; ``arm`` is its run if it is already
        running."""
        outcome = self.journal.find(best, candidate.values)
        if outcome is None:
            self.measured += 1
            changed = move_text(self._changed(best))
            passed = duration(time.monotonic() - self.began)
            doing = f"trial {self.measured}: {move_text(candidate.move)}"
            self.say(f"{doing}, after {passed}; best so far: {changed or 'the derived settings'}")
            with long_wait(f"measuring {doing}", self.say):
                outcome = self.bench.compare(best, candidate.values, arm)
            self.journal.add(Trial(best, candidate.values, candidate.move, outcome))
        trial = Trial(best, candidate.values, candidate.move, outcome)
        if outcome.faster:
            self.accepted.append(trial)
            self.best = candidate.values
        self.say(trial_text(trial))
        return outcome

    def find(self, given: RunConfig | None) -> None:
        """Search for better settings until no candidate is left, time is up, or a signal arrives.

        Args:
            given: the run with the run file's system settings; None if it has none.
        """
        try:
            if given is not None:
                self._take(given)
            search(self.best, self.candidates, self.expected, self.compare, self._time_is_left)
        except Interrupted:
            self.interrupted = True
            self.bench.close()
        except TrialEnded as ended:
            self.say(f"the best settings do not run any more: {ended}")
            self.bench.close()

    def _time_is_left(self) -> bool:
        """Whether another trial fits into the time limit."""
        left = self.bench.ends - time.monotonic()
        if self.bench.is_over or left < self.trial_seconds:
            needed = f"one takes about {duration(self.trial_seconds)}"
            self.say(
                f"no further trial is begun: {needed}, and {duration(max(0.0, left))} are left"
            )
            return False
        return True

    def _take(self, config: RunConfig) -> None:
        """Compare the run file's settings with the derived ones."""
        bench = self.bench
        limit = bench.start_seconds
        arm = Arm(config, self.path, bench.folder, ends=bench.ends, start_seconds=limit)
        # Settings derived from the free memory must be those of a run alone on the machine.
        self.bench.close()
        try:
            try:
                arm.start()
            except TrialEnded as ended:
                given = settings(config, given_only=True)
                said = {key: value for key, value in given.items() if key in TUNED}
                outcome = TrialOutcome(ended.status, None, str(ended))
                self.journal.add(Trial(self.derived, said, said, outcome))
                self.say(trial_text(self.journal.trials[-1]))
                return
            given = tuned_values(arm.resolved())[0]
            move = self._changed(given)
            if move:
                self.given = given
                outcome = self.compare(self.derived, Candidate(move, given), arm)
                if outcome.interval and outcome.interval.low > 0:
                    back = {key: self.derived.get(key) for key in move}
                    turned = TrialOutcome("measured", outcome.interval.turned)
                    self._left = Trial(given, self.derived, back, turned)
        finally:
            if self.best != self.given or self.given == self.derived:
                arm.end()

    def proven(self) -> Proof | None:
        """Go back to the fastest settings whose gradient matches the derived ones'; None if these
        are the fastest."""
        while self.best != self.derived:
            proof: Proof | None = None
            with suppress(TrialEnded):
                proof = self._prove(self.best)
                if proof.holds:
                    return proof
            last = self.accepted.pop()
            apart = f"by {proof.distance:.2g}" if proof else "as far as can be told"
            self.say(f"given up, since the gradient differs {apart}: {trial_text(last)}")
            self.best = last.best
        return None

    def _prove(self, values: Values) -> Proof:
        file = self.bench.folder / "rollouts.pickle"
        rollouts = file if self.config.rl else None
        checkpoints: list[Path] = []
        for each in (self.derived, values):
            config = proof_config(self.config_of(each))
            limit = self.bench.start_seconds
            arm = Arm(config, self.path, self.bench.folder, rollouts, start_seconds=limit)
            try:
                checkpoints.append(arm.finish())
            finally:
                arm.end()
        ours, theirs = checkpoints
        plan = self.planned(self.derived)
        assert not isinstance(plan, TrialOutcome), "it runs"
        return compare_gradients(ours, theirs, plan.devices.dtype)

    def conclude(self) -> Result:
        """Prove the best settings, remeasure their gain, and store them."""
        self.bench.close()  # the proof needs its memory
        proof = self.proven()
        gain = self._measured_again() if self.best != self.given else None
        changed = self._changed(self.best)
        said = settings(self.config, given_only=True) | without_defaults(self.best, self.usual)
        kept = self.pinned.union(MEASURED)
        result = Result(
            values=self.best,
            changed=changed,
            written={key: said[key] for key in said if key in changed or (changed and key in kept)},
            gain=gain,
            proof=proof,
            trials=tuple(self.journal.trials),
            brought=((self._left,) if self._left else ()) + tuple(self.accepted),
            given=self.given,
            derived=self.derived,
            subject=self.journal.subject,
            measured=self.measured,
            seconds=time.monotonic() - self.began,
            interrupted=self.interrupted,
        )
        if not self.pinned:  # the best settings next to pinned ones may not be the best alone
            best = {"values": result.written, "reason": result.reason}
            self.journal.write(best if changed else None)
        return result

    def _measured_again(self) -> Interval | None:
        """The gain of the best settings; if they are no longer faster than the run file's, go back
        to these."""
        self.bench.ends = max(self.ends, time.monotonic() + 60)
        self.bench.concludes = True
        try:
            outcome = self.bench.compare(self.given, self.best)
        except TrialEnded as ended:
            self.say(f"measured again, the run file's settings do not run any more: {ended}")
            return None
        finally:
            self.bench.close()
        if not outcome.faster:
            gain = outcome.status if outcome.interval is None else gain_text(outcome.interval)
            self.say(
                f"measured again, the best settings are not faster than the run file's: {gain}"
            )
            self.best = self.given
            self.accepted = []
            self._left = None
        return outcome.interval


@contextmanager
def open_tuning(
    path: Path,
    overrides: Sequence[str],
    minutes: float,
    say: Callable[[str], None],
    *,
    again: bool = False,
) -> Generator[Tuning]:
    """Search for the fastest settings of a run for up to ``minutes``; the caller must still call
    ``conclude``.

    Args:
        again: repeat the measurements of earlier calls.

    Raises:
        ConfigError: the run cannot be tuned, or does not run even with the derived settings.
    """
    began = time.monotonic()
    with placed(path, overrides):
        config = load_run(path, overrides)
        check_tunable(config)
    pinned = pinned_settings(config, overrides)
    base = trial_config(without_tuned(config, pinned))
    facts = facts_of_run(config)
    with (
        TemporaryDirectory(prefix="tunesmith-tune-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        remove_at_end(Path(folder))
        ends = began + 60 * minutes
        first = Arm(base, path, Path(folder), ends=ends, start_seconds=60 * minutes)
        stack.callback(first.end)
        step = _first_step(first, minutes, say)
        shape = shape_of(base, facts, first)
        derived, usual = tuned_values(first.resolved())
        late = min(LATE * first.starting, 30 * minutes)
        limit = max(START_SECONDS, SLOW * first.starting)
        bench = Bench(path, Path(folder), ends - late, limit)
        first.ends = bench.ends
        stack.callback(bench.close)
        bench.hold(first, derived)
        journal = Journal.open(*tuned_file(config, facts.hardware, facts.model), again=again)
        facts = replace(facts, train_size=shape.samples)
        if not base.rl:
            facts = replace(facts, longest=-(-shape.tokens // shape.samples))
        tuning = Tuning(
            base, path, bench, facts, journal, pinned, shape, derived, usual, say, began, ends
        )
        tuning.trial_seconds = first.starting + 2 * step
        said = settings(config, given_only=True).keys() & set(TUNED) - pinned
        tuning.find(trial_config(without_tuned(config, TUNED)) if said else None)
        yield tuning


def _first_step(first: Arm, minutes: float, say: Callable[[str], None]) -> float:
    """Start the first run; the seconds of its second step.

    Raises:
        ConfigError: it does not run, or not within the time limit.
    """
    limit = duration(60 * minutes)
    say(f"starting the run with the derived settings, for two steps; the limit is {limit}")
    try:
        with long_wait("starting the run", say):
            first.start()
        began = time.monotonic()
        with long_wait("taking a step", say):
            first.step()
    except TrialEnded as ended:
        problem = f"the run does not work with the settings that are derived for it: {ended}"
        if ended.status == "late":
            late = f"the run's first step did not end within --minutes {minutes:g}"
            problem = f"nothing was measured: {late}. Give it --minutes {10 * minutes:g} or so"
        raise ConfigError(problem) from None
    step = time.monotonic() - began
    say(f"starting takes {duration(first.starting)}, a step {duration(step)}")
    return step


def shape_of(config: RunConfig, facts: Facts, arm: Arm) -> Shape:
    """The properties of a run's steps, after its first step."""
    metrics = arm.metrics
    model = facts.model
    device = str(arm.resolved()["system.device"]["value"]).partition(":")[0]
    rl = isinstance(config, RLConfig)
    return Shape(
        cores=facts.hardware.cores,
        samples=max(1, int(metrics.get("rollouts") or metrics.get("samples") or 1)),
        tokens=max(1, *(int(metrics.get(name) or 0) for name in ("tokens", "trained_tokens"))),
        chunk=chunk_rows(model.vocab_size if model else 32768, device),
        samples_itself=rl,
        compares=(rl and config.rollout.group_size > 1) or config.command == "dpo",
        gpu=device != "cpu",
    )
