"""Loads of experts, and the loss and the steps that balance them, by hand and as transformers has
them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tunesmith.models.experts.balance import (
    balancing_loss,
    load_metrics,
    loads_of,
    scores_of,
    steps_of_biases,
)
from tunesmith.models.experts.routers import RouterChoice

CHOSEN = torch.tensor([[[0, 1]], [[0, 2]], [[0, 1]]])  # [T, R, k]
COPIES = torch.tensor([2, 1, 0])  # a shared token, one alone, and a filler


def test_a_token_counts_once_for_each_sample_that_has_it() -> None:
    assert loads_of(CHOSEN, COPIES, 4).tolist() == [[3, 2, 1, 0]]


def test_metrics_of_loads() -> None:
    even = load_metrics(torch.tensor([[3, 3, 3, 3]]))
    assert even == {"experts/load_max": 1.0, "experts/entropy": 1.0, "experts/dead": 0.0}
    found = load_metrics(torch.tensor([[2, 2, 0, 0], [4, 0, 0, 0]]))
    assert found["experts/load_max"] == 4.0  # all tokens, of a mean of a quarter
    assert found["experts/entropy"] == pytest.approx(0.5 * math.log(2) / math.log(4))
    assert found["experts/dead"] == 5 / 8


def test_the_loss_of_one_layer_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 4)
    chosen = logits.topk(2).indices
    ones = torch.ones(40, dtype=torch.int64)
    loads = loads_of(chosen[:, None], ones, 4)
    scores = scores_of(RouterChoice(logits, chosen, sigmoid=False), ones)
    want = load_balancing_loss_func((logits,), 4, 2)
    torch.testing.assert_close(balancing_loss(scores[None], loads, 2), want)


def test_parts_of_micro_batches_add_up_and_a_balanced_layer_costs_k() -> None:
    loads = torch.tensor([[4, 4, 4, 4]])
    parts = [torch.tensor([[1.0, 2.0, 0.5, 0.5]]), torch.tensor([[1.0, 0.0, 1.5, 1.5]])]
    assert sum(float(balancing_loss(part, loads, 2)) for part in parts) == pytest.approx(2)


def test_sigmoid_scores_of_a_token_add_up_to_one() -> None:
    logits = torch.tensor([[0.0, math.log(3)]])  # sigmoids 1/2 and 3/4
    found = scores_of(RouterChoice(logits, torch.tensor([[1]]), sigmoid=True), torch.tensor([2]))
    torch.testing.assert_close(found, torch.tensor([0.8, 1.2]))


def test_biases_rise_for_experts_below_the_mean_and_fall_above() -> None:
    assert steps_of_biases(torch.tensor([[5, 1, 3]])).tolist() == [[-1.0, 1.0, 0.0]]
