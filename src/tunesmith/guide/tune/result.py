"""The results of tuning, for people, for programs and for the next call; and the run file with the
best settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from math import isfinite
from pathlib import Path
from typing import Any

from tunesmith.config.changing import with_values
from tunesmith.config.load import load_run
from tunesmith.config.resolved import config_text, settings
from tunesmith.errors import ConfigError
from tunesmith.guide.tune.intervals import Interval
from tunesmith.guide.tune.knobs import Values
from tunesmith.guide.tune.proof import Proof
from tunesmith.guide.tune.search import TrialOutcome
from tunesmith.guide.tune.setup import without_tuned
from tunesmith.plan.facts.measured import remember, remembered
from tunesmith.records.storage import check_output, write_output
from tunesmith.records.toml import toml_value

FIRST_LINE = "# Written by tunesmith tune"


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings that were compared with the best ones so far, and the outcome."""

    best: Values
    values: Values
    move: Values
    outcome: TrialOutcome

    def as_json(self) -> dict[str, Any]:
        times = self.outcome.interval
        entry: dict[str, Any] = {"settings": dict(self.move), "status": self.outcome.status}
        if self.outcome.reason:
            entry["reason"] = self.outcome.reason
        if times and isfinite(times.low):  # one pair has no interval
            entry["gain"] = _gain(times)
            entry["interval"] = [times.mean, times.low, times.high, times.pairs]
        return {**entry, "best": dict(self.best), "values": dict(self.values)}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of tuning."""

    values: Values
    """The best settings; the derived ones if none were faster."""
    changed: Values
    """The best settings that differ from the derived ones."""
    written: Values
    """Settings that a run file needs so that a run has the best settings."""
    gain: Interval | None
    """The best settings compared with the run file's, remeasured at the end; None if they are the
    same."""
    proof: Proof | None
    trials: tuple[Trial, ...]
    brought: tuple[Trial, ...]
    """The trials that led to the best settings, each with its gain."""
    given: Values
    derived: Values
    subject: Mapping[str, Any]
    seconds: float
    interrupted: bool
    measured: int = 0
    """Trials of this call; the others are known from earlier ones, or were refused."""

    @property
    def better(self) -> bool:
        """Whether tuning found faster settings than the run file's."""
        return self.values != self.given

    @property
    def reason(self) -> str:
        """The reason that a later run gives for these settings."""
        when = f"tuned on {date.today().isoformat()}"
        if self.gain is None:
            return when
        return f"{when}: {self.gain.gain[0]:.2f}× as fast as the run file that was tuned"

    def as_json(self) -> dict[str, Any]:
        gradient = None
        if self.proof:
            gradient = {"distance": self.proof.distance, "tolerance": self.proof.tolerance}
        return {
            **self.subject,
            "given": dict(self.given),
            "derived": dict(self.derived),
            "best": dict(self.values),
            "changed": dict(self.changed),
            "written": dict(self.written),
            "gain": _gain(self.gain) if self.gain and isfinite(self.gain.low) else None,
            "brought": [trial.as_json() for trial in self.brought],
            "gradient": gradient,
            "trials": [trial.as_json() for trial in self.trials],
            "measured": self.measured,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
        }


def _gain(times: Interval) -> dict[str, float]:
    gain, low, high = times.gain
    return {"times_as_fast": gain, "from": low, "to": high, "pairs": times.pairs}


def trial_text(trial: Trial) -> str:
    """``system.threads = 2: 1.84× (1.79–1.90) as fast, 5 pairs``."""
    outcome = trial.outcome
    result: str = outcome.status
    if outcome.interval and result == "measured":
        result = gain_text(outcome.interval)
    reason = f": {outcome.reason.splitlines()[0]}" if outcome.reason else ""
    return f"{move_text(trial.move)}: {result}{reason}"


def move_text(values: Values) -> str:
    """``system.threads = 2, system.compile = true``."""
    texts = {k: "none" if v is None else toml_value(v) for k, v in values.items()}
    return ", ".join(f"{key} = {text}" for key, text in texts.items())


def gain_text(times: Interval) -> str:
    """``1.84× (1.79–1.90) as fast, 5 pairs``."""
    gain, low, high = times.gain
    return f"{gain:.2f}× ({low:.2f}–{high:.2f}) as fast, {times.pairs} pairs"


@dataclass(slots=True)
class Journal:
    """The trials of earlier calls for the same machine, model and shape; they are not repeated."""

    file: Path
    subject: Mapping[str, Any]
    trials: list[Trial]

    @classmethod
    def open(cls, file: Path, subject: Mapping[str, object], *, again: bool) -> Journal:
        known = [] if again else remembered(file).get("trials", [])
        return cls(file, subject, [_trial_of(entry) for entry in known])

    def find(self, best: Values, values: Values) -> TrialOutcome | None:
        """The outcome of an earlier comparison, unless it was cut short."""
        same = (t.outcome for t in self.trials if t.best == best and t.values == values)
        return next((outcome for outcome in same if outcome.final), None)

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.write(remembered(self.file).get("best"))

    def write(self, best: Mapping[str, object] | None) -> None:
        """Write the trials and the best settings.

        Raises:
            StorageError: it cannot be written.
        """
        trials = [trial.as_json() for trial in self.trials]
        remember(self.file, {**self.subject, "trials": trials, **({"best": best} if best else {})})


def _trial_of(entry: Mapping[str, Any]) -> Trial:
    numbers = entry.get("interval")
    times = Interval(*numbers) if numbers else None
    outcome = TrialOutcome(entry["status"], times, entry.get("reason", ""))
    return Trial(entry["best"], entry["values"], entry["settings"], outcome)


def check_files(file: Path, report: Path) -> None:
    """Reject (ConfigError) files that cannot be written, or were not written by ``tunesmith
    tune``."""
    check_output(file, "--output", FIRST_LINE, streams=False)
    check_output(report, "--output, whose report is", "", streams=False)
    full = report.exists() and report.stat().st_size
    if full and not {"trials", "derived"} <= remembered(report).keys():
        why = "is there already, and was not written by tunesmith tune"
        raise ConfigError(f"{report}, for the report, {why}; name another --output")


def write_run_file(result: Result, run: Path, overrides: list[str], file: Path) -> None:
    """Write the run file with its overrides and the best settings; its first lines give the reason.

    Raises:
        StorageError: it cannot be written.
    """
    tuned = with_values(without_tuned(load_run(run, overrides)), result.written)
    given = settings(tuned, given_only=True)
    why = [f"{FIRST_LINE}: {run.name} as it was {result.reason}.", *map(trial_text, result.brought)]
    header = "\n".join(f"# {line}" if not line.startswith("#") else line for line in why)
    text = config_text(given, shown=lambda value: value)
    write_output(file, f"{header}\n{text}".encode(), private=True)
