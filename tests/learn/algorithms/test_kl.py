from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tunesmith.learn.algorithms.kl import KLController, kl_loss, kl_values

LOGPROBS = [-1.0, -2.0, -0.5]
REFERENCE = [-1.5, -1.0, -0.5]
BY_HAND = {
    "k1": [0.5, -1.0, 0.0],
    "k2": [0.125, 0.5, 0.0],
    "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1, 0.0],
}


def as_leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_values_by_hand(estimator: str) -> None:
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    expected = BY_HAND[estimator.rstrip("+")]
    assert kl_loss(as_leaf(LOGPROBS), reference, estimator).tolist() == pytest.approx(
        expected, abs=1e-15
    )
    if not estimator.endswith("+"):
        values = kl_values(np.array(LOGPROBS), np.array(REFERENCE), estimator)
        assert values.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_by_finite_differences(estimator: str) -> None:
    reference = torch.tensor(REFERENCE, dtype=torch.float64) - 0.01
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, reference, estimator), as_leaf(LOGPROBS))


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_straight_through_gradient_is_that_of_k2(estimator: str) -> None:
    logprobs = as_leaf([-1.0, -8.0, -0.5])
    reference = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    kl_loss(logprobs, reference, estimator).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.5, -7.0, 0.0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
@pytest.mark.parametrize("far", [-80.0, 80.0])
def test_values_are_clamped(estimator: str, far: float) -> None:
    value = kl_loss(as_leaf([far]), torch.zeros(1, dtype=torch.float64), estimator).item()
    assert abs(value) == 10.0
    if not estimator.endswith("+"):
        assert kl_values(np.array([far]), np.zeros(1), estimator)[0] == value


def test_every_estimator_is_right_in_expectation() -> None:
    p = torch.tensor([0.5, 0.3, 0.2]).double()
    q = torch.tensor([0.4, 0.4, 0.2]).double()
    true = (p * (p / q).log()).sum().item()
    for estimator in ("k1", "k3"):
        assert (p * kl_loss(p.log(), q.log(), estimator)).sum().item() == pytest.approx(
            true, abs=1e-12
        )


def test_k2_has_the_gradient_of_the_kl_on_policy() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.4, 0.4, 0.2]).double().log()
    p = logits.log_softmax(0)
    (true,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    for estimator in ("k2", "k1+", "k3+"):
        (found,) = torch.autograd.grad(
            (p.exp().detach() * kl_loss(p, q, estimator)).sum(), logits, retain_graph=True
        )
        assert torch.allclose(found, true, atol=1e-12)
    (k1,) = torch.autograd.grad((p.exp().detach() * kl_loss(p, q, "k1")).sum(), logits)
    assert torch.allclose(k1, torch.zeros(3).double(), atol=1e-12)


def test_adaptive_controller_by_hand_and_saved() -> None:
    controller = KLController(0.1, target=6.0, horizon=1000)
    assert controller.update(6.6, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(600.0, 100) == pytest.approx(0.101 * (1 + 0.2 * 0.1))
    assert controller.update(0.0, 100) == pytest.approx(0.10302 * (1 - 0.2 * 0.1))
    assert controller.update(0.0, 10_000) == pytest.approx(0.1009596 * 0.8), "never below 0"
    before = controller.coef
    assert controller.update(math.nan, 100) == before
    fresh = KLController(0.5, 6.0, 1000)
    fresh.load_state_dict(controller.state_dict())
    assert fresh.coef == before


def test_unknown_estimator() -> None:
    with pytest.raises(AssertionError, match="k9"):
        kl_loss(torch.zeros(1), torch.zeros(1), "k9")
