"""Batches with random columns, and micro-batches cut from them: what the tests of losses share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.models.forest import Forest
from tunesmith.types import Sample


def batch_of(
    lengths: Sequence[int], columns: Mapping[str, Sequence[float]], prompt: int = 2, size: int = 2
) -> Batch:
    """Samples with so many loss tokens, ``size`` to a group, and columns over all of those."""
    masks = [[False] * prompt + [True] * length for length in lengths]
    batch = Batch.of([Sample([1] * len(mask), mask, i // size) for i, mask in enumerate(masks)])
    for name, values in columns.items():
        batch.add(name, values)
    return batch


def random_batch(seed: int, lengths: Sequence[int] = (3, 1, 5, 2), prompt: int = 2) -> Batch:
    """One sample per length, two to a group, with every column a policy loss may read."""
    rng = np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray]] = {}
    for length in lengths:
        old = rng.normal(-1.5, 0.4, length).clip(max=-0.05)
        values = {
            "advantages": np.full(length, rng.normal()),
            "old_logprobs": old,
            "behaviour_logprobs": old + rng.normal(0, 0.1, length),
            "ref_logprobs": old + rng.normal(0, 0.3, length),
        }
        for name, own in values.items():
            parts.setdefault(name, []).append(own)
    return batch_of(lengths, {name: np.concatenate(own) for name, own in parts.items()}, prompt)


def random_logprobs(batch: Batch, seed: int, scale: float = 0.2) -> list[Tensor]:
    """Per sample, log-probabilities ``[n]`` near the old ones, in float64 with gradient."""
    rng = np.random.default_rng(seed)
    olds = batch.split(batch.columns["old_logprobs"])
    near = [
        torch.tensor(np.nan_to_num(old) + rng.normal(0, scale, old.size), dtype=torch.float64)
        for old in olds
    ]
    return [values.requires_grad_() for values in near]


def micro_batch(batch: Batch, samples: Sequence[int]) -> Forest:
    """A forest of some samples with their columns in float64."""
    forest = build_forest(batch, samples, share=False)
    rows = forest.predictions.numpy()
    chosen = list(samples)
    columns = {name: torch.from_numpy(column[rows]) for name, column in batch.columns.items()}
    per_sample = {
        name: torch.from_numpy(column[chosen]) for name, column in batch.per_sample.items()
    }
    return replace(forest, columns=columns, per_sample=per_sample)


def gather(logprobs: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    return (
        torch.cat([logprobs[i] for i in samples])
        if len(samples)
        else torch.zeros(0, dtype=torch.float64)
    )
