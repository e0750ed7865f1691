"""Losses of pairs and of judged sequences: ours over two micro-batches, rows chosen, rejected,
chosen, …"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.peers.cases import SEEDS, Case, Graded, assert_same, differ, evaluate, grade, random_case
from tests.peers.openrlhf_models import loss as openrlhf
from tests.peers.trl_trainers import dpo_loss, kto_loss, reward_loss
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.algorithms.preference import (
    AGGREGATION,
    DPOObjective,
    KTOObjective,
    RewardObjective,
)

seeds = pytest.mark.parametrize("seed", SEEDS)
PAIRS = 4


def pair_case(seed: int) -> Case:
    """Four pairs, with the reference's log-probability of each sequence."""
    case = random_case(seed, rows=2 * PAIRS, drift=0.5)
    reference = (case["ref_logprobs"] * case.mask).sum(1)
    return replace(
        case,
        columns={
            "side": 1.0 - 2.0 * (torch.arange(2 * PAIRS) % 2).double(),
            "reference": reference,
        },
        group=tuple(i // 2 for i in range(2 * PAIRS)),
    )


def reward_case(seed: int) -> tuple[Case, Tensor]:
    """One value per row, at its second token, and a margin for each pair."""
    case = pair_case(seed)
    mask = torch.zeros_like(case.mask)
    mask[:, 1] = 1.0
    margin = torch.tensor(np.random.default_rng(seed).uniform(0, 1, PAIRS))
    return replace(case, mask=mask).with_columns(margin=margin.repeat_interleave(2)), margin


def ours(case: Case, objective: Objective, *, values: bool = False) -> Graded:
    return evaluate(case, case.batch(), objective, AGGREGATION, values=values)


def by_sequence(case: Case, compute: Callable[[Tensor, Tensor], Tensor]) -> Graded:
    """A loss of the sums of each sequence's log-probabilities ``[B]`` and the reference's."""
    leaf = case.logprobs.clone().requires_grad_()
    return grade(compute((leaf * case.mask).sum(1), case["reference"]), leaf)


def openrlhf_dpo(case: Case, **settings: object) -> Graded:
    def compute(scores: Tensor, reference: Tensor) -> Tensor:
        loss, *_ = openrlhf.DPOLoss(**settings)(
            scores[0::2], scores[1::2], reference[0::2], reference[1::2]
        )
        return loss

    return by_sequence(case, compute)


@seeds
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def agree_dpo_openrlhf(seed: int, smoothing: float) -> None:
    case = pair_case(seed)
    theirs = openrlhf_dpo(case, beta=0.3, label_smoothing=smoothing)
    assert_same(ours(case, DPOObjective("sigmoid", 0.3, smoothing)), theirs)


@seeds
def agree_ipo_openrlhf(seed: int) -> None:
    case = pair_case(seed)
    assert_same(ours(case, DPOObjective("ipo", 0.3)), openrlhf_dpo(case, beta=0.3, ipo=True))


@seeds
@pytest.mark.parametrize("loss", ["sigmoid", "hinge"])
def agree_dpo_trl(seed: int, loss: str) -> None:
    case = pair_case(seed)
    assert_same(ours(case, DPOObjective(loss, 0.3)), dpo_loss(case, 0.3, {loss: 1.0}))


@seeds
def differ_ipo_of_means(seed: int) -> None:
    """TRL divides each sequence's log-ratio by its length: the same only where nothing but the
    length is in it."""
    case = pair_case(seed)
    theirs = dpo_loss(case, 0.3, {"ipo": 1.0})
    assert differ(ours(case, DPOObjective("ipo", 0.3)), theirs)
    length = case.mask.sum(1)

    def of_means(scores: Tensor, reference: Tensor) -> Tensor:
        delta = (scores - reference) / length
        return ((delta[0::2] - delta[1::2] - 1 / 0.6) ** 2).mean()

    assert_same(by_sequence(case, of_means), theirs)


@seeds
def differ_likelihood_beside_dpo(seed: int) -> None:
    """TRL averages over all chosen tokens, we over each chosen sequence first."""
    case = pair_case(seed)
    found = ours(case, DPOObjective("sigmoid", 0.3, nll_coef=0.5))
    assert differ(found, dpo_loss(case, 0.3, {"sigmoid": 1.0, "sft": 0.5}))
    same = replace(case, mask=torch.ones_like(case.mask))
    theirs = dpo_loss(same, 0.3, {"sigmoid": 1.0, "sft": 0.5})
    assert_same(ours(same, DPOObjective("sigmoid", 0.3, nll_coef=0.5)), theirs)


@seeds
@pytest.mark.parametrize("sign", [1, -1])
def agree_kto(seed: int, sign: int) -> None:
    """Of a negative estimate of the KL, both make zero."""
    case = pair_case(seed)
    mismatched = torch.tensor(np.random.default_rng(seed).normal(sign, 0.3, 2 * PAIRS))
    estimate = mismatched.mean().clamp(min=0.0)
    weights = {"beta": 0.3, "desirable": 1.2, "undesirable": 0.8}
    theirs = kto_loss(case, mismatched, beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)
    columns = {"kl": estimate.expand(2 * PAIRS), "class_share": torch.full((2 * PAIRS,), 1 / PAIRS)}
    assert_same(ours(case.with_columns(**columns), KTOObjective(**weights)), theirs)


@seeds
def agree_reward_model(seed: int) -> None:
    case, margin = reward_case(seed)
    found = ours(case, RewardObjective(), values=True)
    assert_same(found, reward_loss(case, margin))
    assert_same(
        found, by_sequence(case, lambda r, _: openrlhf.PairWiseLoss()(r[0::2], r[1::2], margin))
    )


@seeds
def agree_reward_model_logexp(seed: int) -> None:
    case, _ = reward_case(seed)
    theirs = by_sequence(case, lambda r, _: openrlhf.LogExpLoss()(r[0::2], r[1::2]))
    assert_same(ours(case, RewardObjective(margins=False), values=True), theirs)
