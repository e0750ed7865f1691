"""Samples with random columns, and micro-batches cut from them: what the tests of losses share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tunesmith.data.forest import Forest
from tunesmith.types import Sample


def random_samples(seed: int, lengths: Sequence[int] = (3, 1, 5, 2), prompt: int = 2) -> list[Sample]:
    """One sample per length, two to a group, with every column a policy loss may read."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for index, length in enumerate(lengths):

        def column(values: np.ndarray) -> list[float]:
            return [0.0] * prompt + values.tolist()

        old = rng.normal(-1.5, 0.4, length).clip(max=-0.05)
        columns = {
            "advantages": column(np.full(length, rng.normal())),
            "old_logprobs": column(old),
            "behaviour_logprobs": column(old + rng.normal(0, 0.1, length)),
            "ref_logprobs": column(old + rng.normal(0, 0.3, length)),
        }
        total = prompt + length
        samples.append(Sample([1] * total, [False] * prompt + [True] * length, columns, group=index // 2))
    return samples


def random_logprobs(samples: Sequence[Sample], seed: int, scale: float = 0.2) -> list[Tensor]:
    """Per sample, log-probabilities ``[n]`` near the old ones, in float64 with gradient."""
    rng = np.random.default_rng(seed)
    found: list[Tensor] = []
    for s in samples:
        old = np.array(s.columns["old_logprobs"])[np.array(s.loss_mask)]
        near = torch.tensor(np.nan_to_num(old) + rng.normal(0, scale, old.size), dtype=torch.float64)
        found.append(near.requires_grad_())
    return found


def forest_of(samples: Sequence[Sample], indices: Sequence[int]) -> Forest:
    """A micro-batch of the samples at ``indices``: columns in float64, no tokens worth running."""
    rows = [(i, t) for i in indices for t, m in enumerate(samples[i].loss_mask) if m]
    place = {i: k for k, i in enumerate(indices)}
    names = samples[indices[0]].columns if len(indices) else {}
    empty = torch.zeros(len(rows), dtype=torch.int64)
    columns = {n: torch.tensor([samples[i].columns[n][t] for i, t in rows], dtype=torch.float64) for n in names}
    sample = torch.tensor([place[i] for i, _ in rows], dtype=torch.int64)
    return Forest(empty, empty, (), empty, empty, sample, tuple(indices), (), columns)


def gather(logprobs: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    return torch.cat([logprobs[i] for i in indices]) if len(indices) else torch.zeros(0, dtype=torch.float64)
