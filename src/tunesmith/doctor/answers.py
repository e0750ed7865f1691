"""The numbers that the rules about batch inference and RFT use, and the judgement of a round's yield."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import ceil
from typing import Any

from tunesmith.doctor.record import RunRecord
from tunesmith.doctor.rules import Finding, applied
from tunesmith.doctor.signs import signs
from tunesmith.monitor.wilson import wilson

Json = Mapping[str, Any]
MOST_SAMPLES = 32
"""Samples per question up to which more of them are advised."""


def yield_signs(counts: Json, samples_per_question: int, batch_size: int) -> dict[str, Any]:
    """The numbers of a round's sampling.

    Args:
        counts: a round's ``yield.json``.
        batch_size: samples of a training batch. An epoch over fewer answers is one step, so they are only repeated.
    """
    right, samples = counts["correct"], counts["samples"]
    share = right / samples
    low, high = wilson(share, samples)
    found = {name: counts[name] for name in ("questions", "solved", "kept", "samples")}
    found |= {"right": right, "share": share, "low": low, "high": high, "batch": batch_size}
    found["one_per_question"] = 1 / samples_per_question
    if answered := counts.get("answered_share"):
        found |= {"answered": answered[0], "answered_high": answered[2]}
    for name, wanted in (("for_batch", batch_size), ("for_each", counts["questions"])):
        needed = ceil(wanted / share / counts["questions"]) if right else MOST_SAMPLES + 1
        if samples_per_question < needed <= MOST_SAMPLES:
            found[name] = needed
    return found


def yield_findings(counts: Json, samples_per_question: int, batch_size: int, name: str) -> list[Finding]:
    """What is wrong with a round's yield, while it runs."""
    values = yield_signs(counts, samples_per_question, batch_size)
    values |= {"round": name, "first_step": 1, "last_step": counts["questions"]}
    return [finding for finding in applied("answers", values) if finding.severity != "note"]


def answer_signs(record: RunRecord) -> dict[str, Any]:
    """The state of the run, its last round's yield, and its evaluations before and after training."""
    assert record.standing is not None
    settings, standing = record.settings, record.standing
    values: dict[str, Any] = signs(record) if record.steps else {"first_step": 0, "last_step": 0}
    values |= asdict(standing)
    yields = {name: parts["yield"] for name, parts in record.rounds.items() if "yield" in parts}
    n, batch = settings.get("sampling.n"), settings.get("train.batch_size")
    if yields and isinstance(n, int) and isinstance(batch, int):
        name, counts = list(yields.items())[-1]
        values |= yield_signs(counts, n, batch) | {"round": name}
    shares = {name: parts["evaluation"]["accuracy"] for name, parts in record.rounds.items() if "evaluation" in parts}
    if "base" in shares:
        values |= dict(zip(("before", "before_low", "before_high"), shares["base"], strict=True))
    if len(shares) > 1 and "base" in shares:
        values |= dict(zip(("after", "after_low", "after_high"), list(shares.values())[-1], strict=True))
    if "before" in values and "round-1" in yields:
        first = yields["round-1"]["correct_share"][0]
        values |= {"sampled": first, "greedy_gap": values["before"] - first}
    return values
