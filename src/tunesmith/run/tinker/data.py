"""Datums as forests, and values of forests as datums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from tunesmith.costs import CostModel
from tunesmith.errors import UserError
from tunesmith.learn.data.batch import Batch, Floats, Ints
from tunesmith.learn.data.micro_batches import Packing, build_forest
from tunesmith.learn.data.packing import pack
from tunesmith.models.forest import Forest
from tunesmith.types import Sample

TARGETS = "target_tokens"

Values = NDArray[np.float32 | np.int64]


@dataclass(frozen=True, slots=True)
class Datum:
    """Tokens that the model reads, and the loss's inputs, by name: ``[L]``, or ``[L, K]`` for ``K``
    targets at each token."""

    token_ids: Sequence[int]
    inputs: Mapping[str, Values]


@dataclass(frozen=True)
class Datums:
    """The datums of a request. Their values are flat, ``[V]``: by datum, token and target."""

    datums: Sequence[Datum]

    def check(self, vocabulary: int, context: int) -> None:
        """Raises UserError: a datum does not fit the model or itself."""
        for number, datum in enumerate(self.datums):
            shape = datum.inputs[TARGETS].shape
            length = len(datum.token_ids)
            place = f"datum {number}"
            if not 0 < length <= context:
                raise UserError(f"{place} has {length} tokens: it must have 1 to {context}")
            if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
                raise UserError(
                    f"{place}: {TARGETS} has the shape {list(shape)}, and model_input {length} "
                    f"tokens: it must be [{length}] or [{length}, K]"
                )
            for name, values in datum.inputs.items():
                if values.shape != shape:
                    raise UserError(
                        f"{place}: {name} has the shape {list(values.shape)}, and {TARGETS} "
                        f"{list(shape)}: they must be equal"
                    )
            for name, ids in (("model_input", datum.token_ids), (TARGETS, datum.inputs[TARGETS])):
                if np.min(ids) < 0 or np.max(ids) >= vocabulary:
                    raise UserError(f"{place}: {name} has a token outside of 0…{vocabulary - 1}")

    @cached_property
    def batch(self) -> Batch:
        """Every token predicts; a copy of the last one stands in for what follows it."""
        every = [d.token_ids for d in self.datums]
        return Batch.of(
            [Sample([*ids, ids[-1]], [False] + [True] * len(ids), stand_ins=1) for ids in every]
        )

    @cached_property
    def widths(self) -> Ints:
        """Targets at each token, ``[N]``."""
        wide = [d.inputs[TARGETS].size // len(d.token_ids) for d in self.datums]
        return np.repeat(np.array(wide, np.int64), self.batch.counts)

    def column(self, name: str) -> Values:
        """An input of the loss, ``[V]``."""
        return np.concatenate([d.inputs[name].reshape(-1) for d in self.datums])

    def split(self, values: Floats) -> list[Floats]:
        """``[V]`` as one array per datum, in the shape of its targets."""
        shapes = [d.inputs[TARGETS].shape for d in self.datums]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        parts = np.split(values, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def packing(self, max_tokens: int, cost: CostModel, ranks: int = 1) -> Packing:
        """The datums as micro-batches of at most ``max_tokens`` tokens, with the loss's inputs as
        columns.

        Args:
            ranks: among which they will be shared.

        Raises:
            UserError: a datum is longer.
        """
        targets = torch.from_numpy(self.column(TARGETS))
        names = [name for name in self.datums[0].inputs if name != TARGETS]
        columns = {name: torch.from_numpy(self.column(name)) for name in names}
        packed = pack(self.batch, max_tokens, cost=cost, multiple_of=ranks)
        forests = (build_forest(self.batch, samples) for samples in packed)
        own = tuple(self._with_values(forest, targets, columns) for forest in forests)
        return Packing(own, len(targets))

    def _with_values(
        self, forest: Forest, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Forest:
        """The forest with the datums' own targets instead of the next tokens."""
        places = forest.predictions.numpy()
        widths = self.widths[places]
        first = np.cumsum(self.widths) - self.widths
        within = np.arange(int(widths.sum())) - np.repeat(np.cumsum(widths) - widths, widths)
        values = torch.from_numpy(np.repeat(first[places], widths) + within)
        times = torch.from_numpy(widths)
        return replace(
            forest,
            source=forest.source.repeat_interleave(times),
            sample=forest.sample.repeat_interleave(times),
            targets=targets[values],
            predictions=values,
            columns={name: column[values] for name, column in columns.items()},
        )
