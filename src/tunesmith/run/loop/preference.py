"""Batches and metrics that reward models, DPO, KTO and process reward models add to supervised
training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tunesmith.errors import CheckpointError, boundary
from tunesmith.learn.algorithms.preference import REFERENCE, add_kto_columns, add_reference
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.learn.data.loader import fingerprint_of
from tunesmith.learn.data.preference import Comparison, Solution
from tunesmith.run.loop.learner import Learner
from tunesmith.run.trainers.base import Metrics
from tunesmith.types import Sample

REFERENCE_FILE = "reference.safetensors"
SCORED_AT_ONCE = 1024
"""Comparisons that are scored together beforehand; if memory runs out, only these are scored
again."""


def pair_batch(items: Sequence[Comparison]) -> Batch:
    """The sequences of all comparisons, each comparison a group, with its values per sample."""
    numbered = [(sample, number) for number, item in enumerate(items) for sample in item.samples]
    batch = Batch.of([replace(sample, group=number) for sample, number in numbered])
    for name in items[0].values if items else ():
        batch.add_per_sample(name, [value for item in items for value in item.values[name]])
    return batch


def reference_pairs(learner: Learner, items: Sequence[Comparison]) -> Batch:
    """Pairs for DPO, with the reference's log-probabilities."""
    batch = _with_reference(learner, items)
    add_reference(batch, batch.per_sample[REFERENCE])
    return batch


def judged_answers(learner: Learner, items: Sequence[Comparison]) -> Batch:
    """Answers for KTO, with the columns that ``KTOObjective`` reads. The second sample of each item
    is its mismatch."""
    both = _with_reference(learner, items)
    answers = both.take(np.arange(0, 2 * len(items), 2))
    others = both.take(np.arange(1, 2 * len(items), 2))
    add_kto_columns(answers, sequence_logprobs(learner, others) - others.per_sample[REFERENCE])
    return answers


def _with_reference(learner: Learner, items: Sequence[Comparison]) -> Batch:
    """The items' batch with the reference's ``Σ logπ`` of each sample, scored now if the items have
    none."""
    batch = pair_batch(items)
    if REFERENCE not in batch.per_sample:
        batch.add_per_sample(REFERENCE, sequence_logprobs(learner, batch, reference=True))
    return batch


def sequence_logprobs(learner: Learner, batch: Batch, *, reference: bool = False) -> Floats:
    """``Σ logπ`` of each sample's loss tokens, ``[S]``."""
    return batch.sequence_sums(learner.score(batch, reference=reference))


def step_pairs(items: Sequence[Solution], good: int, bad: int) -> Batch:
    """A pair per step: everything up to its separator, followed by the good or the bad label
    token."""
    steps = [item.token_ids[: mark + 1] for item in items for mark in item.marks]
    labels = [label for item in items for label in item.labels]
    samples = [
        Sample([*before, token], [False] * len(before) + [True], group=number)
        for number, before in enumerate(steps)
        for token in (good, bad)
    ]
    batch = Batch.of(samples)
    batch.add_per_sample("side", [1.0, -1.0] * len(steps))
    batch.add_per_sample("label", np.repeat(labels, 2))
    return batch


def with_reward_std(metrics: Metrics) -> Metrics:
    """``rewards/std`` instead of the mean square."""
    others = dict(metrics)
    variance = others.pop("rewards/square") - others["rewards/mean"] ** 2
    return {**others, "rewards/std": math.sqrt(max(variance, 0.0))}


def with_margin(metrics: Metrics) -> Metrics:
    """Drop the mean reward of a side without answers; add the ``margin`` of the two if both have
    some."""
    kept = dict(metrics)
    sides = ("rewards/chosen", "rewards/rejected")
    absent = [name for name in sides if not kept.pop(f"{name}/seen", 0.0)]
    if not absent:
        return {**kept, "margin": kept["rewards/chosen"] - kept["rewards/rejected"]}
    return {name: value for name, value in kept.items() if name not in absent}


def write_reward_stats(evaluation: Callable[[], Metrics], file: str, checkpoint: Path) -> None:
    """Write mean and deviation of the held-out answers' rewards next to the model, and next to the
    merged one, to normalise by them."""
    metrics = evaluation()
    stats = {"mean": metrics["eval/rewards/mean"], "std": metrics["eval/rewards/std"]}
    for model in filter(Path.is_dir, (checkpoint / "model", checkpoint / "model_merged")):
        (model / file).write_text(json.dumps(stats) + "\n", encoding="utf-8")


@dataclass(slots=True)
class References:
    """Log-probabilities of whole data sets under the model before training, by the name of each
    set.

    Each checkpoint has them: when a run resumes, the model before training is no longer in memory,
    and scores from other micro-batches would differ by rounding.
    """

    learner: Learner
    checkpoint: Path | None
    logprobs: dict[str, Floats] = field(default_factory=dict[str, "Floats"])
    fingerprints: dict[str, str] = field(default_factory=dict[str, str])

    def attach(self, name: str, items: Sequence[Comparison]) -> list[Comparison]:
        """The items with the reference's value for each sequence, from the checkpoint if it has the
        same tokens."""
        samples = [sample for item in items for sample in item.samples]
        fingerprint = fingerprint_of([[s.token_ids, s.loss_mask] for s in samples])
        values = self._saved(name, fingerprint)
        if values is None:
            starts = range(0, len(items), SCORED_AT_ONCE)
            batches = (pair_batch(items[at : at + SCORED_AT_ONCE]) for at in starts)
            values = np.concatenate([sequence_logprobs(self.learner, batch) for batch in batches])
        self.logprobs[name] = values
        self.fingerprints[name] = fingerprint
        left = iter(values.tolist())
        own = ((item, tuple(next(left) for _ in item.samples)) for item in items)
        return [replace(item, values={**item.values, REFERENCE: each}) for item, each in own]

    def _saved(self, name: str, fingerprint: str) -> Floats | None:
        file = self.checkpoint / REFERENCE_FILE if self.checkpoint else None
        if file is None or not file.is_file():
            return None
        unreadable = boundary(CheckpointError, f"cannot read {file}", Exception)
        with unreadable, safe_open(file, framework="numpy") as opened:
            known: dict[str, str] = opened.metadata() or {}
            return opened.get_tensor(name) if known.get(name) == fingerprint else None

    def save(self, checkpoint: Path) -> None:
        save_file(self.logprobs, checkpoint / REFERENCE_FILE, metadata=self.fingerprints)
