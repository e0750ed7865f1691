"""Applies the rules to a run."""

from __future__ import annotations

from dataclasses import replace

from tunesmith.doctor.answers import answer_signs
from tunesmith.doctor.learning import at_the_end
from tunesmith.doctor.record import RunRecord
from tunesmith.doctor.rules import Finding, applied
from tunesmith.doctor.signs import signs

LEARNED = 0.2
"""Rise of the reward, in standard deviations, above which a run has learned something."""


def diagnose(record: RunRecord) -> list[Finding]:
    """A run's findings, the worst first. Findings that another one explains are left out."""
    if record.standing:
        return applied("answers", answer_signs(record))
    values = signs(record)
    rose = values.get("reward.rise_in_stds", 0.0) > LEARNED
    return applied("rule", values, _nothing_learned(record, rose))


def _nothing_learned(record: RunRecord, rose: bool) -> Finding | None:
    """The run's own warning that it learns nothing. If everything is learned already, it is a note.

    Args:
        rose: whether the reward rose.
    """
    problem = record.facts and at_the_end(record.steps, record.facts)
    if problem and (problem.key == "known" or (problem.key == "always_right" and rose)):
        return replace(problem, severity="note", cause="everything is learned")
    return problem
