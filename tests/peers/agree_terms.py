"""The other terms: KL, off-policy correction, the critic's loss, log-probabilities, shaping, the
controller."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from openrlhf.trainer.ppo_utils import kl_controller, length_penalty
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from trl.trainer import utils as trl
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.utils import torch_functional as verl

from tests.peers.agree_losses import CLIP, OPENRLHF_CLIP, VERL_CLIP, openrlhf_loss
from tests.peers.cases import (
    MAX_NEW_TOKENS,
    SEEDS,
    Case,
    Graded,
    assert_same,
    differ,
    evaluate,
    grade,
    ours,
    random_case,
    section,
)
from tests.peers.openrlhf_models import loss as openrlhf
from tests.peers.openrlhf_models import utils
from tests.peers.verl_losses import AGGREGATIONS, actor_config, verl_loss
from tunesmith.config.families import OverlongRamp
from tunesmith.learn.algorithms.corrections import Correction, correction_weights
from tunesmith.learn.algorithms.kl import KLController, kl_loss, kl_values
from tunesmith.learn.algorithms.objective import ValueObjective
from tunesmith.learn.algorithms.shaping import overlong_penalty, stop_properly
from tunesmith.models.head import Head, LogitScale, fused_logprobs

seeds = pytest.mark.parametrize("seed", SEEDS)


def our_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Graded:
    leaf = logprobs.clone().requires_grad_()
    value = kl_loss(leaf, reference, estimator)
    return value.detach(), grade(value.sum(), leaf)[1]


def verl_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Graded:
    leaf = logprobs.clone().requires_grad_()
    value = core_algos.kl_penalty(leaf, reference, estimator)
    return value.detach(), grade(value.sum(), leaf)[1]


def openrlhf_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Graded:
    """In float32, as it casts."""
    leaf = logprobs.clone().requires_grad_()
    base = estimator.rstrip("+")
    unbiased = estimator.endswith("+")
    value = utils.compute_approx_kl(leaf, reference, kl_estimator=base, unbiased_gradient=unbiased)
    return value.detach(), grade(value.sum(), leaf)[1]


@seeds
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def agree_kl(seed: int, estimator: str) -> None:
    case = random_case(seed, drift=0.8)
    found = our_kl(case.logprobs, case["ref_logprobs"], estimator)
    assert_same(found, verl_kl(case.logprobs, case["ref_logprobs"], estimator))
    theirs = openrlhf_kl(case.logprobs, case["ref_logprobs"], estimator)
    assert_same((found[0].float(), found[1]), theirs)
    if not estimator.endswith("+"):
        penalty = kl_values(case.logprobs.numpy(), case["ref_logprobs"].numpy(), estimator)
        torch.testing.assert_close(
            torch.tensor(penalty, dtype=torch.float32), theirs[0], rtol=1e-5, atol=1e-5
        )


def differ_kl_far_from_the_reference() -> None:
    """At δ = ±30: values are held within 10 as OpenRLHF's, and k2 still pulls back with its whole
    gradient."""
    logprobs = torch.tensor([-0.5, -30.5]).double()
    reference = torch.tensor([-30.5, -0.5]).double()
    value, gradient = our_kl(logprobs, reference, "k2")
    assert value.tolist() == [10, 10] and gradient.tolist() == [30, -30]
    value, gradient = openrlhf_kl(logprobs, reference, "k2")
    assert value.tolist() == [10, 10] and gradient.tolist() == [0, 0]
    value, gradient = verl_kl(logprobs, reference, "k2")
    assert value.tolist() == [450, 450] and gradient.tolist() == [30, -30]
    assert our_kl(logprobs, reference, "k1")[0].tolist() == [10, -10]
    assert verl_kl(logprobs, reference, "k1")[0].tolist() == [30, -30]


@seeds
def agree_adaptive_controller(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = KLController(coef=0.1, target=0.5, horizon=1000)
    theirs = core_algos.AdaptiveKLController(0.1, target_kl=0.5, horizon=1000)
    openrlhfs = kl_controller.AdaptiveKLController(0.1, 0.5, 1000)
    for kl, samples in zip(rng.exponential(0.6, 20), rng.integers(1, 200, 20), strict=True):
        found.update(float(kl), int(samples))
        theirs.update(kl, samples)
        openrlhfs.update(kl, samples)
        assert found.coef == pytest.approx(theirs.value) == pytest.approx(openrlhfs.value)


def our_weights(case: Case, name: str, low: float, high: float) -> Tensor:
    """``[B, T]``, row by row as each sample is corrected."""
    kind = Correction.types[name]
    correction = kind(
        **{key: value for key, value in (("low", low), ("high", high)) if key in kind.model_fields}
    )
    weights = torch.zeros_like(case.mask)
    for row, keep in enumerate(case.bools):
        old, sampler = (
            case[name][row][keep].numpy() for name in ("old_logprobs", "behaviour_logprobs")
        )
        weights[row, keep] = torch.tensor(correction_weights(correction, old, sampler))
    return weights


def verl_weights(case: Case, level: str, threshold: float | str) -> Tensor:
    weights, _ = compute_rollout_correction_weights(
        case["old_logprobs"] - case["behaviour_logprobs"], case.mask, level, threshold
    )
    return weights * case.mask


def corrected(name: str, **bounds: float) -> dict[str, object]:
    correction = {"type": name, **bounds}
    return {
        "loss": "ppo",
        "aggregation": "token_mean",
        "decoupled": True,
        "correction": correction,
        **CLIP,
    }


@seeds
@pytest.mark.parametrize(
    ("name", "level", "threshold"),
    [
        ("token_truncate", "token", 1.2),
        ("icepop", "token", "0.8_1.3"),
        ("sequence_truncate", "sequence", 1.2),
    ],
)
def agree_correction_verl(seed: int, name: str, level: str, threshold: float | str) -> None:
    """The weights, and the loss they weigh."""
    case = random_case(seed)
    bounds = [float(b) for b in str(threshold).split("_")]
    keys = dict(zip(("low", "high")[-len(bounds) :], bounds, strict=True))
    weights = verl_weights(case, level, threshold)
    torch.testing.assert_close(
        our_weights(case, name, bounds[0], bounds[-1]), weights, rtol=1e-5, atol=1e-5
    )
    theirs = verl_loss("vanilla", case, correction=weights, **VERL_CLIP)
    assert_same(ours(case, section(**corrected(name, **keys))), theirs)


@seeds
@pytest.mark.parametrize(("name", "mode"), [("token_clamp", "clip"), ("icepop", "mask")])
def agree_correction_openrlhf(seed: int, name: str, mode: str) -> None:
    case = random_case(seed)
    correction = {
        "is_correction_level": "token",
        "is_correction_mode": mode,
        "is_correction_threshold": [0.8, 1.3],
    }
    theirs = openrlhf_loss(case, corrected=True, **correction, **OPENRLHF_CLIP)
    assert_same(ours(case, section(**corrected(name, low=0.8, high=1.3))), theirs)


@seeds
def agree_geometric(seed: int) -> None:
    """verl's bounds are on the inverse of the weight (see the differences)."""
    case = random_case(seed)
    log_weights = case["old_logprobs"] - case["behaviour_logprobs"]
    kept, _ = compute_rollout_rejection_mask(
        log_weights, case.mask, "seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}"
    )
    assert 0 < kept.sum() < case.mask.sum()
    torch.testing.assert_close(our_weights(case, "geometric", 0.9, 1.1), kept.to(case.mask.dtype))


@seeds
def differ_bounds_on_the_weight(seed: int) -> None:
    """verl bounds ``−log w``: the same numbers keep other sequences."""
    case = random_case(seed)
    log_weights = case["old_logprobs"] - case["behaviour_logprobs"]
    kept, _ = compute_rollout_rejection_mask(log_weights, case.mask, "seq_mean_k1", "1.0_1.5")
    means = ((log_weights * case.mask).sum(1) / case.mask.sum(1)).exp()
    assert our_weights(case, "geometric", 1.0, 1.5).any(1).equal((means >= 1.0) & (means <= 1.5))
    assert kept.any(1).equal((means <= 1.0) & (means >= 1 / 1.5))


@seeds
def differ_denominator_of_rejected_tokens(seed: int) -> None:
    """verl takes rejected sequences out of the mask and so out of the mean; here they weigh zero in
    it."""
    case = random_case(seed)
    log_weights = case["old_logprobs"] - case["behaviour_logprobs"]
    kept, _ = compute_rollout_rejection_mask(
        log_weights, case.mask, "seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}"
    )
    loss, gradient = verl_loss("vanilla", case, mask=kept, **VERL_CLIP)
    found = ours(case, section(**corrected("geometric", low=0.9, high=1.1)))
    share = kept.sum() / case.mask.sum()
    assert share < 0.9
    assert_same(found, (loss * share, gradient * share))


@seeds
def differ_sequence_mask_clips(seed: int) -> None:
    """OpenRLHF keeps a sequence's weights as they are; ours are clipped to the bounds as well."""
    case = random_case(seed)
    rejecting = {
        "is_correction_level": "seq",
        "is_correction_mode": "mask",
        "is_correction_threshold": [0.9, 1.1],
    }
    theirs = openrlhf_loss(case, corrected=True, **rejecting, **OPENRLHF_CLIP)
    assert differ(ours(case, section(**corrected("sequence_mask", low=0.9, high=1.1))), theirs)
    kept = our_weights(case, "geometric", 0.9, 1.1) * verl_weights(case, "token", 1e9)
    assert_same(verl_loss("vanilla", case, correction=kept, **VERL_CLIP), theirs)
    clipped = kept.clamp(0.9, 1.1) * (kept > 0)
    assert our_weights(case, "sequence_mask", 0.9, 1.1).allclose(clipped)


@seeds
def differ_correction_of_gmpo(seed: int) -> None:
    """verl weighs a sequence by the geometric mean of its tokens' weights, we each token by its
    own."""
    case = random_case(seed, per_token=False)
    weights = verl_weights(case, "token", 1.2)
    theirs = verl_loss(
        "geo_mean", case, correction=weights, clip_ratio_low=0.4, clip_ratio_high=0.4
    )
    keys = {
        **corrected("token_truncate", high=1.2),
        "loss": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
    }
    found = ours(case, section(**{**keys, "aggregation": "seq_mean_token_mean"}))
    assert differ(found, theirs)
    leaf = case.logprobs.clone().requires_grad_()
    rows = [row(leaf, case, i) for i in range(len(case.group))]
    means = (weights * case.mask).sum(1) / case.mask.sum(1)
    assert_same(found, grade((torch.stack(rows) * means).mean(), leaf))


def row(leaf: Tensor, case: Case, index: int) -> Tensor:
    """verl's GMPO loss of one sequence, still in the graph of ``leaf``."""
    loss, _ = core_algos.get_policy_loss_fn("geo_mean")(
        case["old_logprobs"][[index]],
        leaf[[index]],
        case["advantages"][[index]],
        case.mask[[index]],
        config=actor_config(clip_ratio_low=0.4, clip_ratio_high=0.4),
    )
    return loss


def critic_case(seed: int) -> Case:
    """``logprobs`` are the values predicted."""
    case = random_case(seed, drift=0.6, empty=True)
    returns = case["old_logprobs"] + random_case(100 + seed, empty=True)["advantages"]
    return case.with_columns(old_values=case["old_logprobs"], returns=returns)


@seeds
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def agree_value_loss_verl(seed: int, aggregation: str) -> None:
    case = critic_case(seed)
    leaf = case.logprobs.clone().requires_grad_()
    mode = AGGREGATIONS[aggregation]
    loss, _ = core_algos.compute_value_loss(
        leaf,
        case["returns"],
        case["old_values"],
        case.mask,
        0.3,
        mode,
        loss_scale_factor=MAX_NEW_TOKENS,
    )
    assert_same(
        evaluate(case, case.batch(), ValueObjective(0.3), aggregation, values=True),
        grade(loss, leaf),
    )


@seeds
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(
    ("aggregation", "token_level"), [("token_mean", True), ("seq_mean_token_mean", False)]
)
def agree_value_loss_openrlhf(
    seed: int, clip: float | None, aggregation: str, token_level: bool
) -> None:
    case = critic_case(seed)
    leaf = case.logprobs.clone().requires_grad_()
    loss = openrlhf.ValueLoss(clip, token_level)(
        leaf, case["old_values"], case["returns"], action_mask=case.mask
    )
    assert_same(
        evaluate(case, case.batch(), ValueObjective(clip), aggregation, values=True),
        grade(loss, leaf),
    )


@seeds
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def agree_logprobs_and_entropy(seed: int, temperature: float) -> None:
    """From hidden states here, from logits there; in float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (7, 50))
    targets = torch.randint(50, (7,), generator=generator)
    head = Head(weight, scale=LogitScale(temperature=temperature), chunk=3)
    logprobs, entropy = fused_logprobs(hidden, head, targets, entropy=True)
    assert entropy is not None
    logits = hidden @ weight.T
    expected = [
        trl.selective_log_softmax(logits, targets, temperature),
        verl.logprobs_from_logits(logits / temperature, targets),
        utils.log_probs_from_logits(logits.clone(), targets, temperature),
    ]
    for theirs in expected:
        torch.testing.assert_close(logprobs, theirs, rtol=1e-5, atol=1e-5)
    for theirs in (
        trl.entropy_from_logits(logits / temperature),
        verl.entropy_from_logits(logits / temperature),
    ):
        torch.testing.assert_close(entropy, theirs, rtol=1e-5, atol=1e-5)


def experience(rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Experience:
    return Experience(rewards=rewards.clone(), response_length=lengths, truncated=truncated)


@seeds
def agree_overlong_penalty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = torch.tensor(rng.normal(size=20))
    lengths = torch.tensor(rng.integers(1, 101, 20))
    theirs = experience(rewards, lengths, lengths == 100)
    length_penalty.apply_overlong_penalty([theirs], 100, 40, 0.5)
    ramp = OverlongRamp(buffer=40, factor=0.5)
    found = [
        r + overlong_penalty(ramp, n, 100)
        for r, n in zip(rewards.tolist(), lengths.tolist(), strict=True)
    ]
    assert found == pytest.approx(theirs.rewards.tolist())
    assert (theirs.rewards != rewards).any()


@seeds
@pytest.mark.parametrize("coef", [0.0, 0.3, 1.0, -0.5])
def agree_stop_properly(seed: int, coef: float) -> None:
    rng = np.random.default_rng(seed)
    rewards = torch.tensor(rng.normal(size=20))
    truncated = torch.tensor(rng.random(20) < 0.5)
    theirs = experience(rewards, torch.full((20,), 5), truncated)
    length_penalty.apply_stop_properly_penalty([theirs], coef)
    found = [
        stop_properly(r, "length" if cut else "stop", coef)
        for r, cut in zip(rewards.tolist(), truncated.tolist(), strict=True)
    ]
    assert found == pytest.approx(theirs.rewards.tolist())
