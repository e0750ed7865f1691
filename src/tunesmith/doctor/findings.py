"""Applies the rules to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from tunesmith.doctor.learning import at_the_end
from tunesmith.doctor.record import RunRecord
from tunesmith.doctor.rules import Finding, Severity, described, rules
from tunesmith.doctor.signs import signs
from tunesmith.plan.rules.rules import applies

SEVERITIES: Sequence[Severity] = ("problem", "warning", "note")
LEARNED = 0.2
"""Rise of the reward, in standard deviations, above which a run has learned something."""


def diagnose(record: RunRecord) -> list[Finding]:
    """A run's findings, the worst first. Findings that another one explains are left out."""
    values = signs(record)
    rose = values.get("reward.rise_in_stds", 0.0) > LEARNED
    found = {rule["key"]: described(rule, values) for rule in rules()["rule"] if applies(rule, values)}
    if learned := _nothing_learned(record, rose):
        found = {learned.key: learned} | {key: finding for key, finding in found.items() if key != learned.key}
    explained = {key for rule in chain(*rules().values()) if rule["key"] in found for key in rule.get("explains", ())}
    kept = [finding for key, finding in found.items() if key not in explained]
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))


def _nothing_learned(record: RunRecord, rose: bool) -> Finding | None:
    """The run's own warning that it learns nothing. If everything is learned already, it is a note.

    Args:
        rose: whether the reward rose.
    """
    problem = record.facts and at_the_end(record.steps, record.facts)
    if problem and (problem.key == "known" or (problem.key == "always_right" and rose)):
        return replace(problem, severity="note", cause="everything is learned")
    return problem
