"""Random batches in two layouts: padded ``[B, T]`` tensors for the peers, samples for us; and what
we make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tests.support import micro
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.learn.algorithms.advantages import Estimator, compute_advantages
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.losses import Loss
from tunesmith.learn.algorithms.objective import Objective, policy_objective, prepare_columns
from tunesmith.learn.algorithms.outcomes import Floats, Outcome
from tunesmith.learn.data.batch import Batch
from tunesmith.models.forest import Predictions
from tunesmith.plan.derive.algorithm import resolve_algorithm
from tunesmith.types import Sample

MAX_NEW_TOKENS = 12
SEEDS = (0, 1, 2)

Graded = tuple[Tensor, Tensor]
"""A loss and its gradient ``[B, T]`` with respect to what the model predicted."""


@dataclass(frozen=True, slots=True)
class Case:
    """Columns are ``[B, T]`` float64, or ``[B]`` where they are of whole sequences.

    ``mask`` is 1 on policy tokens, with gaps (a tool's answer) inside a row.
    """

    mask: Tensor
    logprobs: Tensor
    columns: dict[str, Tensor]
    group: tuple[int, ...]

    @property
    def bools(self) -> Tensor:
        return self.mask.bool()

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    def with_columns(self, **columns: Tensor) -> Case:
        return replace(self, columns={**self.columns, **columns})

    def batch(self) -> Batch:
        """One prompt token before each row: nothing predicts the first token of a sequence."""
        rows = zip(self.bools.tolist(), self.group, strict=True)
        batch = Batch.of(
            [Sample([1] * (1 + len(row)), [False, *row], group) for row, group in rows]
        )
        for name, values in self.columns.items():
            if values.ndim == 2:
                batch.add(name, values[self.bools].numpy())
            else:
                batch.add_per_sample(name, values.numpy())
        return batch


def random_case(
    seed: int,
    *,
    rows: int = 6,
    width: int = 9,
    drift: float = 0.4,
    per_token: bool = True,
    empty: bool = False,
) -> Case:
    """``drift`` is the deviation of ``logπ − logπ_old``; ``empty`` adds a row without policy
    tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, width + 1, rows)
    mask = np.arange(width) < lengths[:, None]
    mask &= (rng.random((rows, width)) > 0.2) | (np.arange(width) < 2)
    if empty:
        mask[rows // 2] = False
    old = rng.normal(-1.5, 0.4, (rows, width)).clip(max=-0.05)
    columns = {
        "advantages": rng.normal(size=(rows, width if per_token else 1)) * np.ones((rows, width)),
        "old_logprobs": old,
        "behaviour_logprobs": old + rng.normal(0, 0.3, old.shape),
        "ref_logprobs": old + rng.normal(0, 0.5, old.shape),
    }
    return Case(
        mask=torch.tensor(mask, dtype=torch.float64),
        logprobs=torch.tensor(old + rng.normal(0, drift, old.shape)),
        columns={name: torch.tensor(values) for name, values in columns.items()},
        group=tuple(i // 3 for i in range(rows)),
    )


def section(**keys: object) -> AlgorithmSection:
    """What ``[algorithm]`` with these keys resolves to; those of the loss may stand beside its
    name."""
    kind = Loss.types[str(keys["loss"])]
    loss = {
        "type": kind.name,
        **{key: keys.pop(key) for key in kind.model_fields if keys.get(key) is not None},
    }
    given = {key: value for key, value in keys.items() if key not in kind.model_fields}
    return resolve_algorithm(
        AlgorithmSection.model_validate({**given, "loss": loss}), max_new_tokens=MAX_NEW_TOKENS
    )[0]


def ours(case: Case, algorithm: AlgorithmSection, entropy: Tensor | None = None) -> Graded:
    """Our policy objective, columns and weights included, over two micro-batches."""
    batch = case.batch()
    prepare_columns(batch, algorithm, seed=0)
    assert algorithm.aggregation is not None
    return evaluate(case, batch, policy_objective(algorithm), algorithm.aggregation, entropy)


def evaluate(
    case: Case,
    batch: Batch,
    objective: Objective,
    aggregation: str,
    entropy: Tensor | None = None,
    *,
    values: bool = False,
) -> Graded:
    """An objective over two micro-batches; ``values`` passes the predictions as a critic's."""
    leaf = case.logprobs.clone().requires_grad_()
    weigh(batch, aggregation, MAX_NEW_TOKENS)
    total = leaf.new_zeros(())
    half = batch.num_samples // 2
    for indices in (range(half), range(half, batch.num_samples)):
        rows = list(indices)
        keep = case.bools[indices.start : indices.stop]
        predicted = leaf[rows][keep]
        given = entropy[rows][keep] if entropy is not None else None
        predictions = Predictions(values=predicted) if values else Predictions(predicted, given)
        total = total + objective(micro.micro_batch(batch, rows), predictions)[0]
    return grade(total, leaf)


def grade(loss: Tensor, leaf: Tensor) -> Graded:
    """The loss and its gradient; zero where nothing of ``leaf`` is in it."""
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return loss.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def assert_same(found: Graded, expected: Graded, tolerance: float = 1e-5) -> None:
    """Loss and gradient agree, and say something: a gradient of zero everywhere would agree with
    much."""
    assert expected[1].abs().max() > 1e-3, "the case does not exercise the loss"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)


def differ(found: Graded, expected: Graded) -> bool:
    return any((a - b).abs().max() > 1e-3 for a, b in zip(found, expected, strict=True))


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of a batch of groups: ``reward [B]`` at the last policy token, ``tokens [B, T]``
    beside it."""

    mask: Tensor
    reward: Tensor
    tokens: Tensor
    values: Tensor
    group: tuple[int, ...]

    @property
    def paid(self) -> Tensor:
        """Reward per token ``[B, T]``, the final one at the last policy token."""
        last = self.mask.shape[1] - 1 - self.mask.flip(1).argmax(1)
        return (self.tokens * self.mask).scatter_add(1, last[:, None], self.reward[:, None])

    def outcomes(self, **changes: Sequence[object]) -> list[Outcome]:
        """As an estimator sees them; ``changes`` are fields of ``Outcome``, one value per
        rollout."""
        keep = self.mask.bool()
        made = [
            Outcome(
                group=g,
                reward=float(self.reward[i]),
                length=int(keep[i].sum()),
                token_rewards=self.tokens[i][keep[i]].numpy(),
                values=self.values[i][keep[i]].numpy(),
            )
            for i, g in enumerate(self.group)
        ]
        named = [
            dict(zip(changes, row, strict=True)) for row in zip(*changes.values(), strict=True)
        ]
        return (
            [replace(o, **fields) for o, fields in zip(made, named, strict=True)]
            if changes
            else made
        )


def random_rewards(
    seed: int, *, groups: int = 3, size: int = 4, width: int = 8, token_rewards: bool = False
) -> Rewards:
    rng = np.random.default_rng(seed)
    rows = groups * size
    mask = random_case(seed, rows=rows, width=width).mask
    tokens = rng.normal(0, 0.1, (rows, width)) if token_rewards else np.zeros((rows, width))
    return Rewards(
        mask=mask,
        reward=torch.tensor(rng.normal(size=rows)),
        tokens=torch.tensor(tokens) * mask,
        values=torch.tensor(rng.normal(size=(rows, width))),
        group=tuple(i // size for i in range(rows)),
    )


def padded(parts: Sequence[Floats], mask: Tensor) -> Tensor:
    """One array per rollout, put where the policy wrote: ``[B, T]``."""
    out = torch.zeros_like(mask, dtype=torch.float64)
    out[mask.bool()] = torch.tensor(np.concatenate(parts))
    return out


def our_advantages(
    name: str, rewards: Rewards, outcomes: Sequence[Outcome] | None = None, **params: float
) -> Tensor:
    found = compute_advantages(Estimator.types[name](**params), outcomes or rewards.outcomes())
    return padded(found.advantages, rewards.mask)
