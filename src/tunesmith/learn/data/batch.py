"""Training samples as arrays. No torch.

Samples are converted to a ``Batch`` once. From then on advantages, corrections, weights, KL
penalties and preference scalars are arrays over its predictions or its samples.

Shape legend: ``T`` tokens, ``N`` predictions (loss tokens), ``S`` samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tunesmith.types import Sample

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Choices = NDArray[np.int16]


@dataclass(eq=False)
class Batch:
    """Sequences, and the tokens in each that the loss predicts.

    Predictions are ordered by sample, then by token. ``add`` and ``add_per_sample`` add columns and
    record where a value is not finite.

    Example:
        ``[5, 6, 7, 2]`` with loss on its last two tokens and ``[5, 8]`` with loss on its last one
        have offsets ``0 4 6``, predicted ``2 3 5`` and sample ``0 0 1``.
    """

    token_ids: Ints  # [T]
    offsets: Ints  # [S + 1], the start of each sample's tokens
    predicted: Ints  # [N], indices of the loss tokens in token_ids
    sample: Ints  # [N]
    group: Ints  # [S], -1 without groups
    rollout: Ints  # [S], the rollout that the sample records; -1 for a sequence without a rollout
    stand_ins: Ints  # [S], tokens at a sample's end that are not part of the sequence
    experts: Choices | None = None  # [T, ...], those chosen again; -1 where routers are free
    finite: Mask = field(init=False)  # [N], whether every column is finite at a prediction
    columns: dict[str, Floats] = field(default_factory=dict[str, Floats], init=False)
    """Each ``[N]``, or ``[N, k]``."""
    per_sample: dict[str, Floats] = field(default_factory=dict[str, Floats], init=False)  # each [S]
    packings: dict[Hashable, Any] = field(
        default_factory=dict[Hashable, Any], init=False, repr=False
    )
    """The ``forest.Packing`` of each layout."""

    def __post_init__(self) -> None:
        self.finite = np.ones(self.num_predictions, np.bool_)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        """A batch of the samples in their order, without columns."""
        for sample in samples:
            assert sample.token_ids, "a sample needs at least one token"
            assert len(sample.loss_mask) == len(sample.token_ids), (
                "loss_mask is not as long as token_ids"
            )
            assert not sample.loss_mask[0], "nothing predicts the first token: it cannot carry loss"
        sizes = [(len(s.token_ids), s.group, s.rollout, s.stand_ins) for s in samples]
        lengths, group, rollout, stand_ins = np.array(sizes, np.int64).reshape(-1, 4).T.copy()
        offsets = _starts(lengths)
        total = int(offsets[-1])
        mask = np.fromiter(chain.from_iterable(s.loss_mask for s in samples), np.bool_, total)
        token_ids = np.fromiter(chain.from_iterable(s.token_ids for s in samples), np.int64, total)
        predicted = np.flatnonzero(mask)
        sample = np.repeat(np.arange(len(samples)), lengths)[predicted]
        experts = _experts(samples, offsets)
        return cls(token_ids, offsets, predicted, sample, group, rollout, stand_ins, experts)

    def add(self, name: str, values: ArrayLike) -> None:
        """Add a column over predictions, ``[N]``, or one with ``k`` values at each, ``[N, k]``."""
        column = np.asarray(values, np.float64)
        assert len(column) == self.num_predictions, f"'{name}' needs one row per prediction"
        self.columns[name] = column
        self.finite &= np.isfinite(column).all(tuple(range(1, column.ndim)))

    def add_per_sample(self, name: str, values: ArrayLike) -> None:
        """Add a column over samples, ``[S]``."""
        column = np.asarray(values, np.float64)
        assert column.shape == self.group.shape, f"'{name}' needs one value per sample"
        self.per_sample[name] = column
        self.finite &= np.isfinite(column)[self.sample]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_samples(self) -> int:
        return len(self.group)

    @property
    def num_predictions(self) -> int:
        return len(self.predicted)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample, ``[S]``."""
        return np.diff(self.offsets)

    @cached_property
    def counts(self) -> Ints:
        """Predictions of each sample, ``[S]``."""
        return np.bincount(self.sample, minlength=self.num_samples)

    @cached_property
    def owners(self) -> Ints:
        """The index of each sample's rollout, ``[S]``, from 0; a sample without a rollout counts as
        one."""
        alone = -1 - np.arange(self.num_samples)
        return np.unique(np.where(self.rollout >= 0, self.rollout, alone), return_inverse=True)[1]

    @property
    def num_rollouts(self) -> int:
        return int(self.owners.max(initial=-1)) + 1

    @cached_property
    def prefix_lengths(self) -> Ints:
        """The number of each sample's leading tokens without loss, ``[S]``."""
        has = self.counts > 0
        first = _starts(self.counts)[:-1]
        lengths = self.lengths.copy()
        lengths[has] = self.predicted[first[has]] - self.offsets[:-1][has]
        return lengths

    @cached_property
    def sortable(self) -> bytes:
        """All tokens, ``stride`` bytes each: comparing slices compares their tokens in order.

        Tokens with different experts are different.
        """
        tokens = self.token_ids.astype(">u4")
        if self.experts is None:
            return tokens.tobytes()
        parts = (tokens.view(np.uint8).reshape(-1, 4), self.experts.view(np.uint8))
        return np.concatenate(parts, 1).tobytes()

    @property
    def stride(self) -> int:
        return 4 + (0 if self.experts is None else 2 * self.experts.shape[1])

    def sequence_sums(self, values: Floats) -> Floats:
        """Sums of ``[N]`` over each sample, ``[S]``."""
        return np.asarray(np.bincount(self.sample, values, minlength=self.num_samples), np.float64)

    def split(self, values: Floats) -> list[Floats]:
        """``[N]`` split into one array per sample."""
        return np.split(values, _starts(self.counts)[1:-1]) if self.num_samples else []

    def predictions_of(self, samples: Ints) -> Ints:
        """The predictions of ``samples``, in their order."""
        return _ranges(_starts(self.counts)[samples], self.counts[samples])

    def take(self, samples: ArrayLike) -> Batch:
        """A batch of these samples, in this order, with their columns; this same batch for all
        samples in order."""
        chosen = np.asarray(samples, np.int64)
        if np.array_equal(chosen, np.arange(self.num_samples)):
            return self
        predictions = self.predictions_of(chosen)
        lengths = self.lengths[chosen]
        counts = self.counts[chosen]
        offsets = _starts(lengths)
        moved = np.repeat(offsets[:-1] - self.offsets[chosen], counts)
        tokens = _ranges(self.offsets[chosen], lengths)
        batch = Batch(
            self.token_ids[tokens],
            offsets,
            self.predicted[predictions] + moved,
            np.repeat(np.arange(len(chosen)), counts),
            self.group[chosen],
            self.rollout[chosen],
            self.stand_ins[chosen],
            None if self.experts is None else self.experts[tokens],
        )
        batch.finite = self.finite[predictions]
        batch.columns = {name: column[predictions] for name, column in self.columns.items()}
        batch.per_sample = {name: column[chosen] for name, column in self.per_sample.items()}
        return batch


def _experts(samples: Sequence[Sample], offsets: Ints) -> Choices | None:
    widths = {sample.experts.width for sample in samples if sample.experts}
    if not widths:
        return None
    assert len(widths) == 1, "all samples are of one model"
    experts = np.full((int(offsets[-1]), widths.pop() // 2), -1, np.int16)
    for sample, start in zip(samples, offsets, strict=False):
        if sample.experts:
            count = min(len(sample.experts), len(sample.token_ids))
            own = np.frombuffer(sample.experts.cut(count).data, np.int16)
            experts[start : start + count] = own.reshape(count, -1)
    return experts


def _starts(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """The concatenated ranges ``[start, start + length)``."""
    return np.repeat(starts - _starts(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))
