"""What is wrong with a run: the findings of all rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

from tunesmith.records.doctor import (
    data,
    gradients,
    held_out,
    imbalance,
    memory,
    nothing_learned,
    policy,
    rewards,
    speed,
    updates,
)
from tunesmith.records.doctor.answers import answer_findings
from tunesmith.records.doctor.columns import span, window
from tunesmith.records.doctor.learning import at_the_end
from tunesmith.records.doctor.record import RunRecord, read_record
from tunesmith.records.doctor.rules import Finding, applied, worst_first
from tunesmith.records.doctor.signs import Signs
from tunesmith.records.plain import Row
from tunesmith.records.toml import toml_value

LEARNED = 0.2
"""Rise of the reward, in standard deviations, above which a run has learned something."""
_TOPICS = (gradients, rewards, updates, data, policy, held_out, speed, imbalance, memory)
RULES = [*chain.from_iterable(topic.RULES for topic in _TOPICS)]
"""In the order in which findings of a severity are listed."""


def diagnose(record: RunRecord) -> list[Finding]:
    """A run's findings, the worst first. Findings that another one explains are left out."""
    if record.standing:
        return answer_findings(record)
    run = Signs(record)
    found = applied(RULES, run, span(record.steps), span(record.steps[-window(run.steps) :]))
    worst = worst_first([*_nothing_learned(run), *found], [*RULES, *nothing_learned.RULES])
    return [_without_what_is_set(finding, record.settings) for finding in worst]


def _without_what_is_set(finding: Finding, settings: Row) -> Finding:
    """The finding without changes to a value that the setting has."""
    plain = {key: v for key, v in settings.items() if isinstance(v, str | int | float)}
    now = {f"{key} = {toml_value(value)}" for key, value in plain.items()}
    return replace(finding, change=tuple(each for each in finding.change if each not in now))


def serious_findings(run_dir: Path) -> list[str]:
    """The keys of a run's findings, without notes."""
    return [f.key for f in diagnose(read_record(run_dir)) if f.severity != "note"]


def _nothing_learned(run: Signs) -> list[Finding]:
    """The run's own warning that it learns nothing. If everything is learned already, it is a
    note."""
    facts = run.record.facts
    problem = facts and at_the_end(run.record.steps, facts)
    if not problem:
        return []
    if problem.key == "known" or (problem.key == "always_right" and run.reward_rise > LEARNED):
        return [replace(problem, severity="note", cause="Everything is learned")]
    return [problem]
