"""Tinker's losses by hand, and what they refuse."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
import torch

from tunesmith.errors import UserError
from tunesmith.run.tinker.data import Datum, Datums
from tunesmith.run.tinker.losses import LOSSES, TinkerObjective

NEW = [-1.0, -2.0, -0.5]
OLD = [-1.0, -2.5, -2.5]
ADVANTAGES = [1.0, 2.0, -1.0]
UP = exp(0.5)
FAR = exp(2.0)
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
BY_HAND = {
    "importance_sampling": ({}, [-1.0, -2 * UP, FAR], [-1.0, -2 * UP, FAR]),
    "ppo": (CLIP, [-1.0, -2.4, FAR], [-1.0, 0.0, FAR]),
    "cispo": (CLIP, [1.0, 4.8, -0.6], [-1.0, -2.4, 1.2]),
    "dro": ({"beta": 0.1}, [1.0, 4.0 + 0.05 * 0.25, -0.5 + 0.05 * 4.0], [-1.0, -1.95, 1.2]),
}
"""Settings, the loss of each value, its derivative by the log-probability."""


@pytest.mark.parametrize("name", BY_HAND)
def test_policy_losses_by_hand(name: str) -> None:
    settings, losses, slopes = BY_HAND[name]
    logprobs = torch.tensor(NEW, requires_grad=True)
    columns = {"logprobs": torch.tensor(OLD), "advantages": torch.tensor(ADVANTAGES)}
    loss = LOSSES[name].formula(logprobs, columns, settings)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx(losses, rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-6)


def test_gspo_by_hand() -> None:
    """Two datums in one micro-batch; of the first, two of three values are marked."""
    logprobs = torch.tensor([*NEW, -1.0], requires_grad=True)
    columns = {
        "logprobs": torch.tensor([*OLD, -2.0]),
        "advantages": torch.tensor([1.0, 2.0, -1.0, 1.0]),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "sample": torch.tensor([0, 0, 0, 1]),
    }
    loss = LOSSES["gspo"].formula(logprobs, columns, CLIP)
    loss.sum().backward()
    ratio = exp(0.25)  # the mean of 0 and 0.5, beyond 1.2
    assert loss.tolist() == pytest.approx([-1.2, -2.4, ratio, -1.2])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, ratio, 0.0])


def test_cross_entropy_by_hand() -> None:
    logprobs = torch.tensor(NEW, requires_grad=True)
    columns = {"weights": torch.tensor([1.0, 0.0, 0.5])}
    loss = LOSSES["cross_entropy"].formula(logprobs, columns, {})
    assert loss.tolist() == [1.0, 0.0, 0.25]


def datum(*tokens: int, **inputs: list[float]) -> Datum:
    targets = np.array([*tokens[1:], 1], np.int64)
    return Datum(tokens, {"target_tokens": targets} | {k: np.array(v) for k, v in inputs.items()})


@pytest.mark.parametrize(
    ("name", "config", "inputs", "match"),
    [
        ("ppp", {}, {"weights": [1.0]}, "ppo"),
        ("ppo", {"beta": 1.0}, {"logprobs": [0.0], "advantages": [0.0]}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": "x"}, {"logprobs": [0.0], "advantages": [0.0]}, "'x'"),
        ("cross_entropy", {}, {"weights": [1.0], "mask": [1.0]}, "mask"),
        ("dro", {}, {"weights": [1.0]}, "advantages"),
        ("gspo", {"clip_low_threshold": 0.9}, {"logprobs": [0.0]}, "clip_high_threshold"),
    ],
)
def test_refused(
    name: str, config: dict[str, float | str], inputs: dict[str, list[float]], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        TinkerObjective.of(name, config, Datums([datum(5, **inputs)]))


def test_settings_replace_the_defaults() -> None:
    given = Datums([datum(5, logprobs=[0.0], advantages=[0.0])])
    objective = TinkerObjective.of("ppo", {"clip_high_threshold": 4.0}, given)
    assert objective.settings == {"clip_low_threshold": 0.8, "clip_high_threshold": 4.0}
