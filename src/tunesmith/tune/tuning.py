"""``tunesmith tune``: from a run file to the settings of the system with which its steps are fastest here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tunesmith.assembly.checking import facts_of_run
from tunesmith.config.load import load_run
from tunesmith.config.reading.places import placed
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.monitor.children import remove_at_end
from tunesmith.monitor.interrupts import Interrupted
from tunesmith.plan.expected import expected_seconds
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import with_values
from tunesmith.plan.hardware import read_hardware
from tunesmith.plan.layouts import gpus_of_run, layouts
from tunesmith.plan.memory import planned_devices
from tunesmith.plan.resolve import resolve
from tunesmith.plan.tiles import chunk_rows
from tunesmith.plan.tuned import tuned_file
from tunesmith.tune.arms import Arm, TrialEnded
from tunesmith.tune.bench import Bench
from tunesmith.tune.intervals import Interval
from tunesmith.tune.knobs import KV, LAYOUT, RUNNING, THREADS, TOKENS, TUNED, Shape, Values, layouts_here, neighbours
from tunesmith.tune.proof import Proof, compare_gradients
from tunesmith.tune.result import Journal, Result, Trial, shown, told
from tunesmith.tune.search import Candidate, Outcome, search
from tunesmith.tune.setup import (
    check_tunable,
    pinned_settings,
    proof_config,
    stated,
    trial_config,
    tuned_values,
    without_tuned,
)

ROOM = 0.9
"""Share of the free memory that a second run may need to be kept beside the first."""
LATE = 5
"""Starts of a run for which time is kept at the end: for the proof, and to measure the gain again."""
MEASURED = ("system.gradient_checkpointing", TOKENS, THREADS, KV)
"""Settings that would be derived by the free memory, and that are written as they were measured."""
OF_THE_LAYOUT = (*LAYOUT, TOKENS, THREADS, KV, RUNNING)
"""What is derived anew for another layout."""


@dataclass(slots=True)
class Tuning:
    """A call of ``tunesmith tune``."""

    config: RunConfig
    """What the run file and overrides say, as trials run it, without what is tuned."""
    path: Path
    bench: Bench
    facts: Facts
    journal: Journal
    pinned: frozenset[str]
    """Settings that the command line gave: they stay."""
    shape: Shape
    derived: Values
    usual: Values
    """Those of ``derived`` that are defaults."""
    say: Callable[[str], None]
    began: float
    ends: float
    """When the call is to end (``time.monotonic``)."""
    given: Values = field(init=False)
    """What the run file has; ``derived``, where it says nothing of what is tuned, or does not run."""
    best: Values = field(init=False)
    interrupted: bool = False
    accepted: list[Trial] = field(default_factory=list[Trial])
    _left: Trial | None = None
    """The derived settings in the place of the run file's, where they are faster."""
    _resolved: list[tuple[Values, Any]] = field(default_factory=list[tuple[Values, Any]])
    """What settings resolve to: a configuration, or the outcome where they are refused."""

    def __post_init__(self) -> None:
        self.given = self.best = self.derived
        self.bench.config_of, self.bench.fits = self.config_of, self.fits_beside

    def config_of(self, values: Values) -> RunConfig:
        return with_values(self.config, stated(values, self.usual))

    def resolved(self, values: Values) -> RunConfig | Outcome:
        """The run with these settings; the outcome where they are refused."""
        for known, before in self._resolved:
            if known == values:
                return before
        try:
            found: RunConfig | Outcome = resolve(self.config_of(values), self.facts).config
        except CapacityError as error:
            found = Outcome("memory", None, str(error))
        except ConfigError as error:
            found = Outcome("refused", None, str(error))
        self._resolved.append((values, found))
        return found

    def fits_beside(self, values: Values) -> bool:
        """Whether a run finds enough memory now, beside what is running."""
        config = self.resolved(values)
        if isinstance(config, Outcome):
            return False
        devices = planned_devices(config, replace(self.facts, hardware=read_hardware()))
        return bool(devices) and all(needed.peak <= ROOM * free for _, needed, free in devices)

    def expected(self, values: Values) -> float:
        config = self.resolved(values)
        if isinstance(config, Outcome):
            return inf
        return expected_seconds(config, self.facts, self.shape.samples, self.shape.tokens / self.shape.samples)

    def candidates(self, best: Values) -> Iterator[Candidate]:
        """Settings beside the best ones, with one setting changed or with another layout; refused ones are noted."""
        moves = [({key: value}, {**best, key: value}) for key, value in neighbours(best, self.shape)]
        for move, values in (*moves, *self._layouts(best)):
            if self.pinned.isdisjoint(move):
                found = self.resolved(values)
                if not isinstance(found, Outcome):
                    yield Candidate(move, values)
                elif self.journal.find(best, values) is None:
                    self.journal.add(Trial(best, values, move, found))

    def _layouts(self, best: Values) -> Iterator[tuple[Values, Values]]:
        """Layouts, each with what is derived for it, and with all else as it is."""
        kept = {key: value for key, value in best.items() if key not in OF_THE_LAYOUT and value != self.derived[key]}
        found: Iterator[Values] = iter(()) if self.shape.gpu else layouts_here(self.shape)
        if gpus_of_run(self.config, self.facts) > 1:
            found = layouts(self.config, self.facts)
        for layout in found:
            with suppress(ConfigError):
                there = settings(resolve(with_values(self.config, layout), self.facts).config)
                move = {key: value for key, value in layout.items() if best.get(key) != value}
                if move:
                    yield move, {**{key: there.get(key) for key in best}, **kept}

    def compare(self, best: Values, candidate: Candidate, arm: Arm | None = None) -> Outcome:
        """Measure, or remember, what a candidate brings; ``arm`` is its run, where it runs already."""
        outcome = self.journal.find(best, candidate.values)
        if outcome is None:
            outcome = self.bench.compare(best, candidate.values, arm)
            self.journal.add(Trial(best, candidate.values, candidate.move, outcome))
        trial = Trial(best, candidate.values, candidate.move, outcome)
        if outcome.faster:
            self.accepted.append(trial)
            self.best = candidate.values
        self.say(told(trial))
        return outcome

    def find(self, given: RunConfig | None) -> None:
        """Find better settings until none is left to try, time is over, or a signal says so.

        Args:
            given: the run with what the run file says of the system; None where it says nothing.
        """
        try:
            if given is not None:
                self._take(given)
            search(self.best, self.candidates, self.expected, self.compare, lambda: not self.bench.is_over)
        except Interrupted:
            self.interrupted = True
            self.bench.close()
        except TrialEnded as ended:
            self.say(f"the best settings do not run any more: {ended}")
            self.bench.close()

    def _take(self, config: RunConfig) -> None:
        """Compare the run file's settings with the derived ones."""
        arm = Arm(config, self.path, self.bench.folder)
        self.bench.close()  # what is derived from the free memory is to be what the run has when it is alone
        try:
            try:
                arm.start()
            except TrialEnded as ended:
                said = {key: value for key, value in settings(config, given_only=True).items() if key in TUNED}
                self.journal.add(Trial(self.derived, said, said, Outcome(ended.status, None, str(ended))))
                self.say(told(self.journal.trials[-1]))
                return
            given = tuned_values(arm.resolved())[0]
            move = {key: value for key, value in given.items() if self.derived.get(key) != value}
            if move:
                self.given = given
                outcome = self.compare(self.derived, Candidate(move, given), arm)
                if outcome.interval and outcome.interval.low > 0:
                    back = {key: self.derived.get(key) for key in move}
                    turned = Outcome("measured", outcome.interval.turned)
                    self._left = Trial(given, self.derived, back, turned)
        finally:
            if self.best != self.given or self.given == self.derived:
                arm.end()

    def proven(self) -> Proof | None:
        """Go back to the fastest settings whose gradient is the derived ones'; None where these are the fastest."""
        while self.best != self.derived:
            proof: Proof | None = None
            with suppress(TrialEnded):
                proof = self._prove(self.best)
                if proof.holds:
                    return proof
            last = self.accepted.pop()
            apart = f"by {proof.distance:.2g}" if proof else "as far as can be told"
            self.say(f"given up, since the gradient differs {apart}: {told(last)}")
            self.best = last.best
        return None

    def _prove(self, values: Values) -> Proof:
        rollouts = self.bench.folder / "rollouts.pickle" if isinstance(self.config, RLConfig) else None
        checkpoints: list[Path] = []
        for each in (self.derived, values):
            arm = Arm(proof_config(self.config_of(each)), self.path, self.bench.folder, rollouts)
            try:
                checkpoints.append(arm.finish())
            finally:
                arm.end()
        ours, theirs = checkpoints
        config = self.resolved(self.derived)
        assert not isinstance(config, Outcome), "it runs"
        return compare_gradients(ours, theirs, config.model.dtype)

    def conclude(self) -> Result:
        """Prove the best settings, measure again what they bring, and remember them."""
        self.bench.close()  # the proof needs its memory
        proof = self.proven()
        gain = self._measured_again() if self.best != self.given else None
        changed = {key: value for key, value in self.best.items() if self.derived.get(key) != value}
        said = settings(self.config, given_only=True) | stated(self.best, self.usual)
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
            seconds=time.monotonic() - self.began,
            interrupted=self.interrupted,
        )
        if not self.pinned:  # what is best beside pinned settings need not be without them
            self.journal.write({"values": result.written, "reason": result.reason} if changed else None)
        return result

    def _measured_again(self) -> Interval | None:
        """What the best settings bring; where they are no longer faster than the run file's, go back to these."""
        self.bench.ends, self.bench.concludes = max(self.ends, time.monotonic() + 60), True
        try:
            outcome = self.bench.compare(self.given, self.best)
        except TrialEnded as ended:
            self.say(f"measured again, the run file's settings do not run any more: {ended}")
            return None
        finally:
            self.bench.close()
        if not outcome.faster:
            found = outcome.status if outcome.interval is None else shown(outcome.interval)
            self.say(f"measured again, the best settings are no longer faster than the run file's: {found}")
            self.best, self.accepted, self._left = self.given, [], None
        return outcome.interval


@contextmanager
def open_tuning(
    path: Path, overrides: Sequence[str], minutes: float, say: Callable[[str], None], *, again: bool = False
) -> Generator[Tuning]:
    """Find the fastest settings of a run within some minutes; ``conclude`` is still to be called.

    Args:
        again: measure anew what earlier calls have measured.

    Raises:
        ConfigError: the run cannot be tuned, or does not run even with what is derived for it.
    """
    began = time.monotonic()
    with placed(path, overrides):
        config = load_run(path, overrides)
        check_tunable(config)
    pinned = pinned_settings(config, overrides)
    base, facts = trial_config(without_tuned(config, pinned)), facts_of_run(config)
    with TemporaryDirectory(prefix="tunesmith-tune-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        remove_at_end(Path(folder))
        first = Arm(base, path, Path(folder))
        stack.callback(first.end)
        try:
            first.step()
        except TrialEnded as ended:
            raise ConfigError(f"the run does not work with the settings that are derived for it: {ended}") from None
        shape = shape_of(base, facts, first)
        derived, usual = tuned_values(first.resolved())
        late = min(LATE * first.starting, 30 * minutes)
        bench = Bench(path, Path(folder), began + 60 * minutes - late)
        stack.callback(bench.close)
        bench.hold(first, derived)
        journal = Journal.open(*tuned_file(config, facts.hardware, facts.model), again=again)
        length = {} if isinstance(base, RLConfig) else {"longest": -(-shape.tokens // shape.samples)}
        facts = replace(facts, train_size=shape.samples, **length)
        tuning = Tuning(
            base, path, bench, facts, journal, pinned, shape, derived, usual, say, began, began + 60 * minutes
        )
        said = settings(config, given_only=True).keys() & set(TUNED) - pinned
        tuning.find(trial_config(without_tuned(config, TUNED)) if said else None)
        yield tuning


def shape_of(config: RunConfig, facts: Facts, arm: Arm) -> Shape:
    """What the steps of a run are like that has taken one."""
    metrics, model = arm.metrics, facts.model
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
