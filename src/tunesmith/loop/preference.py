"""What reward models, DPO, KTO and process reward models put before and after an optimizer step.

The step itself, and the loop around it, are those of supervised training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from tunesmith.backends.base import TrainBackend
from tunesmith.data.loader import fingerprint_of
from tunesmith.data.preference import Comparison, Solution
from tunesmith.errors import CheckpointError, boundary
from tunesmith.loop.learner import Learner, Metrics
from tunesmith.types import Sample

T = TypeVar("T")

REFERENCE = "ref_logprob"
REFERENCE_FILE = "reference.safetensors"
SCORED_AT_ONCE = 1024
"""Comparisons that are scored beforehand in one go; what memory cuts short starts again from there."""


def pair_samples(items: Sequence[Comparison]) -> list[Sample]:
    """The sequences of pairs, each with its values and the number of its pair at every token."""
    samples: list[Sample] = []
    for item in items:
        for place, sample in enumerate(item.samples):
            own = {name: values[place] for name, values in item.values.items()}
            samples.append(with_values(sample, own, len(samples) // 2))
    return samples


def with_values(sample: Sample, values: dict[str, float], pair: int = -1) -> Sample:
    """A sample with constant columns; ``pair`` is its group, and a column too where there are pairs."""
    own = {**values, "pair": float(pair)} if pair >= 0 else values
    columns = {name: [value] * len(sample.token_ids) for name, value in own.items()}
    return replace(sample, columns={**sample.columns, **columns}, group=pair)


def reference_pairs(learner: Learner, items: Sequence[Comparison]) -> list[Sample]:
    """Pairs for DPO: with the reference's log-probabilities, scored now where the items do not have them.

    One that is not finite takes the pair with it.
    """
    samples = with_reference(learner, pair_samples(items))
    for at in range(0, len(samples), 2):
        if not all(math.isfinite(s.columns[REFERENCE][0]) for s in samples[at : at + 2]):
            samples[at : at + 2] = [with_values(s, {REFERENCE: math.nan}, s.group) for s in samples[at : at + 2]]
    return samples


def with_reference(learner: Learner, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with ``ref_logprob``; those that have it are left alone."""
    if all(REFERENCE in s.columns for s in samples):
        return list(samples)
    found = sequence_logprobs(learner, samples, reference=True)
    return [with_values(s, {REFERENCE: value}, s.group) for s, value in zip(samples, found, strict=True)]


def sequence_logprobs(learner: Learner, samples: Sequence[Sample], *, reference: bool = False) -> list[float]:
    """``Σ logπ`` of each sample's loss tokens."""
    scored = learner.score(samples, "logprobs", reference=reference)
    return [math.fsum(s.columns["logprobs"]) for s in scored]


def judged_samples(learner: Learner, items: Sequence[Comparison]) -> list[Sample]:
    """Answers for KTO, with the reference's log-probabilities, the batch's KL and each one's share of its side.

    ``KL = max(0, mean of logπ − logπ_ref over the mismatched pairs)``, of the whole batch, without gradient.
    """
    both = with_reference(learner, pair_samples(items))
    answers, others = both[0::2], both[1::2]
    gaps = [
        policy - sample.columns[REFERENCE][0]
        for policy, sample in zip(sequence_logprobs(learner, others), others, strict=True)
    ]
    finite = [gap for gap in gaps if math.isfinite(gap)]
    kl = max(0.0, float(np.mean(finite))) if finite else 0.0
    sides = [sample.columns["side"][0] for sample in answers]
    return [
        with_values(sample, {"kl": kl, "class_share": 1.0 / sides.count(side)})
        for sample, side in zip(answers, sides, strict=True)
    ]


def step_samples(items: Sequence[Solution], good: int, bad: int) -> list[Sample]:
    """A pair for each step: everything up to its separator, then the good label token, or the bad one."""
    samples: list[Sample] = []
    for item in items:
        for place, label in zip(item.marks, item.labels, strict=True):
            before = item.token_ids[: place + 1]
            for token, side in ((good, 1.0), (bad, -1.0)):
                sample = Sample([*before, token], [False] * len(before) + [True])
                samples.append(with_values(sample, {"side": side, "label": label}, len(samples) // 2))
    return samples


def evaluate(
    learner: Learner,
    prepare: Callable[[Sequence[T]], list[Sample]],
    items: Sequence[T],
    summarise: Callable[[Metrics], Metrics] = dict,
) -> Metrics:
    """The objective's metrics over the held-out set as one batch, as ``eval/…``."""
    metrics = summarise(learner.evaluate(prepare(items)))
    return {f"eval/{name}": value for name, value in metrics.items() if not name.startswith("nonfinite")}


def with_reward_std(metrics: Metrics) -> Metrics:
    """``rewards/std`` in the place of the mean square."""
    square, mean = metrics["rewards/square"], metrics["rewards/mean"]
    others = {name: value for name, value in metrics.items() if name != "rewards/square"}
    return {**others, "rewards/std": math.sqrt(max(0.0, square - mean * mean))}


def with_margin(metrics: Metrics) -> Metrics:
    """``margin``: how far the desirable answers' mean reward lies above the others', where there are both."""
    if not {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        return metrics
    return {**metrics, "margin": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


@dataclass(slots=True)
class Latest:
    """An evaluation that is made once for each version of the weights."""

    measure: Callable[[], Metrics]
    backend: TrainBackend
    version: int = -1
    metrics: Metrics = field(default_factory=dict[str, float])

    def __call__(self) -> Metrics:
        if self.version != self.backend.optimizer_steps:
            self.metrics, self.version = self.measure(), self.backend.optimizer_steps
        return self.metrics


def write_reward_stats(evaluation: Callable[[], Metrics], file: str, checkpoint: Path) -> None:
    """Mean and deviation of the held-out answers' rewards beside the model, for who normalises by them."""
    metrics = evaluation()
    stats = {"mean": metrics["eval/rewards/mean"], "std": metrics["eval/rewards/std"]}
    (checkpoint / "model" / file).write_text(json.dumps(stats) + "\n", encoding="utf-8")


@dataclass(slots=True)
class References:
    """Log-probabilities of whole data sets under the model as it is before training, by a name for each set.

    They are saved with every checkpoint: the model they came from is not there any more when a run resumes, and
    scored again in other micro-batches they would differ by rounding.
    """

    learner: Learner
    checkpoint: Path | None
    found: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, "NDArray[np.float64]"])
    fingerprints: dict[str, str] = field(default_factory=dict[str, str])

    def attach(self, name: str, items: Sequence[Comparison]) -> list[Comparison]:
        """The items with ``ref_logprob`` of each sequence: the checkpoint's, if they are of the same tokens."""
        fingerprint = fingerprint_of([[s.token_ids, s.loss_mask] for item in items for s in item.samples])
        values = self._saved(name, fingerprint)
        if values is None:
            values = np.array(
                [
                    value
                    for start in range(0, len(items), SCORED_AT_ONCE)
                    for value in sequence_logprobs(self.learner, pair_samples(items[start : start + SCORED_AT_ONCE]))
                ]
            )
        self.found[name], self.fingerprints[name] = values, fingerprint
        left = iter(values.tolist())
        return [replace(i, values={**i.values, REFERENCE: tuple(next(left) for _ in i.samples)}) for i in items]

    def _saved(self, name: str, fingerprint: str) -> NDArray[np.float64] | None:
        file = self.checkpoint / REFERENCE_FILE if self.checkpoint else None
        if file is None or not file.is_file():
            return None
        with boundary(CheckpointError, f"cannot read {file}", Exception), safe_open(file, framework="numpy") as opened:
            known: dict[str, str] = opened.metadata() or {}
            return opened.get_tensor(name) if known.get(name) == fingerprint else None

    def save(self, checkpoint: Path) -> None:
        save_file(self.found, checkpoint / REFERENCE_FILE, metadata=self.fingerprints)
