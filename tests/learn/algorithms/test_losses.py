from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.micro import batch_of, gather, micro_batch, random_batch, random_logprobs
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.learn.algorithms.aggregation import weigh, with_shares
from tunesmith.learn.algorithms.losses import (
    PPO,
    ClipCov,
    KLCov,
    Loss,
    PolicyBatch,
    covariances,
    group_logprob,
    value_loss,
)
from tunesmith.learn.algorithms.objective import (
    SFTObjective,
    ValueObjective,
    policy_objective,
    prepare_columns,
)
from tunesmith.learn.data import micro_batches
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.models.forest import Predictions
from tunesmith.plan.derive.algorithm import resolve_algorithm

LOSSES = sorted(Loss.types)
AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(
    log_ratio: Sequence[float],
    advantages: Sequence[float],
    old: Sequence[float] | None = None,
    sample: Sequence[int] | None = None,
    selected: Sequence[float] | None = None,
    group: float = 0.0,
) -> PolicyBatch:
    n = len(log_ratio)
    before = double(old or [-1.0] * n)
    numbers = torch.tensor(sample or [0] * n)
    return PolicyBatch(
        logprobs=(before + double(log_ratio)).requires_grad_(),
        old_logprobs=before,
        advantages=double(advantages),
        keep=torch.ones(n, dtype=torch.bool),
        sample=numbers,
        num_samples=int(numbers.max()) + 1,
        columns={"selected": double(selected or [0.0] * n), "group_logprob": double([group] * n)},
    )


def loss_of(name: str, **constants: float) -> Loss:
    """With those of the constants that the loss has."""
    kind = Loss.types[name]
    return kind(**{key: value for key, value in constants.items() if key in kind.model_fields})


def values(name: str, micro: PolicyBatch, **constants: float) -> list[float]:
    return loss_of(name, **constants)(micro).loss.tolist()


def log(*ratios: float) -> list[float]:
    return [math.log(r) for r in ratios]


def test_ppo_by_hand() -> None:
    # Inside; above for A>0 (clipped); above for A<0 (not); below for A<0 (clipped); below for A>0
    # (not).
    micro = batch(log(1.1, 1.5, 1.5, 0.5, 0.5), [2.0, 2.0, -2.0, -2.0, 2.0])
    token = loss_of("ppo", clip_low=0.2, clip_high=0.28)(micro)
    assert token.loss.tolist() == pytest.approx([-2.2, -2.56, 3.0, 1.6, -1.0])
    assert token.clipped_low is not None and token.clipped_high is not None
    assert token.clipped_high.tolist() == [False, True, False, False, False]
    assert token.clipped_low.tolist() == [False, False, False, True, False]
    token.loss.sum().backward()
    assert micro.logprobs.grad is not None
    assert micro.logprobs.grad.tolist() == pytest.approx([-2.2, 0.0, 3.0, 0.0, -1.0])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    micro = batch(log(10.0, 10.0, 0.5), [-1.0, 1.0, -1.0])
    assert values("ppo", micro, dual_clip=3.0) == pytest.approx([3.0, -1.2, 0.8])
    token = loss_of("ppo", dual_clip=3.0)(micro)
    (gradient,) = torch.autograd.grad(token.loss.sum(), micro.logprobs)
    assert gradient.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_policy_gradient_by_hand(name: str) -> None:
    assert values(name, batch([0.5, 0.0], [2.0, -1.0], old=[-1.0, -3.0])) == pytest.approx(
        [1.0, -3.0]
    )


def test_gspo_by_hand() -> None:
    # First sequence: mean log-ratio 0.1, A = 1, clipped above. Second: −0.1, A = −1, clipped below.
    micro = batch([0.2, 0.0, -0.1], [1.0, 1.0, -1.0], sample=[0, 0, 1])
    params = {"clip_low": 0.05, "clip_high": 0.06}
    assert values("gspo", micro, **params) == pytest.approx([-1.06, -1.06, 0.95])
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    assert values("gspo", micro, **wide) == pytest.approx([-math.exp(0.1)] * 2 + [math.exp(-0.1)])


def test_gspo_token_has_the_value_and_gradient_of_gspo() -> None:
    for params in ({"clip_low": 0.5, "clip_high": 0.5}, {"clip_low": 0.05, "clip_high": 0.06}):
        gradients: list[Tensor] = []
        losses: list[list[float]] = []
        for name in ("gspo", "gspo_token"):
            micro = batch([0.2, 0.0, -0.1, -0.3], [1.0, 1.0, -1.0, -1.0], sample=[0, 0, 1, 1])
            loss = loss_of(name, **params)(micro).loss
            loss.sum().backward()
            assert micro.logprobs.grad is not None
            gradients.append(micro.logprobs.grad)
            losses.append(loss.tolist())
        assert losses[0] == pytest.approx(losses[1])
        assert gradients[0].tolist() == pytest.approx(gradients[1].tolist())


def test_cispo_by_hand() -> None:
    micro = batch(log(0.5, 3.0, 7.0), [1.0, -2.0, 1.0], old=[-1.0, -2.0, -3.0])
    params = {"clip_low": 1.0, "clip_high": 4.0}
    expected = [
        -0.5 * (-1 + math.log(0.5)),
        6.0 * (-2 + math.log(3.0)),
        -5.0 * (-3 + math.log(7.0)),
    ]
    token = loss_of("cispo", **params)(micro)
    assert token.loss.tolist() == pytest.approx(expected)
    token.loss.sum().backward()
    assert micro.logprobs.grad is not None
    assert micro.logprobs.grad.tolist() == pytest.approx(
        [-0.5, 6.0, -5.0]
    )  # a clipped token still learns


def test_sapo_by_hand() -> None:
    micro = batch(log(1.0, 2.0, 1.0), [3.0, 1.0, -1.0])
    sigmoid = 1 / (1 + math.exp(-1.0))
    assert values("sapo", micro) == pytest.approx([-6.0, -4 * sigmoid, 4 / 1.05 / 2])
    loss_of("sapo")(micro).loss.sum().backward()
    assert micro.logprobs.grad is not None
    assert micro.logprobs.grad[0].item() == pytest.approx(-3.0)  # slope A at ratio 1, as ppo
    assert micro.logprobs.grad[2].item() == pytest.approx(1.0)


def test_gmpo_by_hand() -> None:
    # A > 0: only what is above +0.4 is cut; A < 0: only what is below −0.3.
    params = {"clip_low": 0.3, "clip_high": 0.4}
    up = batch([1.0, -1.0, 0.1], [2.0] * 3)
    assert values("gmpo", up, **params) == pytest.approx([-2 * math.exp((0.4 - 1.0 + 0.1) / 3)] * 3)
    down = batch([1.0, -1.0, 0.1], [-2.0] * 3)
    assert values("gmpo", down, **params) == pytest.approx(
        [2 * math.exp((1.0 - 0.3 + 0.1) / 3)] * 3
    )


def test_gepo_by_hand() -> None:
    # p = exp(−0.9); q̂ = 0.5 → ratio e^{−0.9}/0.5.
    micro = batch([0.2, 0.0], [1.0, 1.0], group=math.log(0.5))
    ratio = math.exp(-0.9) / 0.5
    assert values("gepo", micro) == pytest.approx([-ratio] * 2)
    assert values("gepo", micro, clip_low=0.1, clip_high=0.1) == pytest.approx([-ratio] * 2)
    assert values("gepo", batch([0.0], [1.0], group=-2.0)) == pytest.approx([-1.2])


def test_group_logprob_by_hand_and_when_probabilities_vanish() -> None:
    q = np.array([0.2, 0.5])
    assert group_logprob(np.log(q)) == pytest.approx(math.log((0.04 + 0.25) / 0.7))
    assert group_logprob(np.array([-2000.0, -2000.0])) == pytest.approx(-2000.0)
    assert group_logprob(np.array([-1.5])) == pytest.approx(-1.5)  # a group of one: the plain ratio


def test_dppo_tv_by_hand() -> None:
    # π moves by +0.3, +0.01, −0.3, −0.3 from 0.5, 0.001 (ratio 11), 0.5, 0.5.
    old = [math.log(0.5), math.log(0.001), math.log(0.5), math.log(0.5)]
    new = [math.log(0.8), math.log(0.011), math.log(0.2), math.log(0.2)]
    log_ratio = [n - o for n, o in zip(new, old, strict=True)]
    micro = batch(log_ratio, [1.0, 1.0, -1.0, 1.0], old=old)
    params = {"clip_low": 0.15, "clip_high": 0.15, "ratio_cap": 10.0}
    token = loss_of("dppo_tv", **params)(micro)
    assert token.loss.tolist() == pytest.approx([0.0, -10 * new[1], 0.0, -0.4 * new[3]])
    token.loss.sum().backward()
    assert micro.logprobs.grad is not None
    assert micro.logprobs.grad.tolist() == pytest.approx([0.0, -10.0, 0.0, -0.4])


def test_covariance_losses_by_hand() -> None:
    micro = batch(log(1.1, 1.1, 1.5), [1.0, 1.0, 1.0], selected=[1.0, 0.0, 0.0])
    assert values("clip_cov", micro) == pytest.approx([0.0, -1.1, -1.2])
    kl = values("kl_cov", micro, cov_kl_coef=2.0)
    assert kl == pytest.approx([-1.1 + 2 * math.log(1.1), -1.1, -1.5])


def test_tokens_chosen_by_covariance() -> None:
    logprobs = np.array([0.0, -1.0, -2.0, -5.0])
    advantages = np.array([3.0, 0.0, 0.0, -3.0])
    cov = covariances(logprobs, advantages)
    assert cov.tolist() == pytest.approx([6.0, 0.0, 0.0, 9.0])
    rng = np.random.default_rng(0)
    assert KLCov(cov_share=2e-4).select(cov, rng).tolist() == [3]
    assert KLCov(cov_share=0.5).select(cov, rng).tolist() == [3, 0]
    assert ClipCov(cov_share=0.5, cov_low=1.0, cov_high=8.0).select(cov, rng).tolist() == [0]
    assert ClipCov(cov_share=0.5, cov_low=20.0, cov_high=30.0).select(cov, rng).size == 0
    assert set(ClipCov(cov_share=1.0, cov_low=1.0, cov_high=10.0).select(cov, rng).tolist()) == {
        0,
        3,
    }


def test_value_loss_by_hand_and_gradient() -> None:
    predicted = double([1.0, 2.0, -1.0]).requires_grad_()
    returns = double([0.0, 2.5, 0.0])
    old = double([0.9, 1.0, 1.0])
    token = value_loss(predicted, returns, old, 0.5)
    assert token.loss.tolist() == pytest.approx([0.5, 0.5, 0.5])
    token.loss.sum().backward()
    assert predicted.grad is not None
    assert predicted.grad.tolist() == pytest.approx([1.0, 0.0, -1.0])
    assert value_loss(predicted, returns, old, None).loss.tolist() == pytest.approx(
        [0.5, 0.125, 0.5]
    )
    shift = double([0.01, 0.02, 0.03])
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, returns, old, 0.5).loss,
        (predicted.detach() + shift).requires_grad_(),
    )


def test_no_value_within_the_clip_counts_as_clipped() -> None:
    """There ``old + (V - old)`` is V but for its rounding."""
    old, returns = torch.rand(2, 1000) - 0.5
    token = value_loss(0.01 * torch.rand(1000), returns, old, 0.6)
    assert token.clipped_low is not None and token.clipped_high is not None
    assert not (token.clipped_low | token.clipped_high).any()
    token = value_loss(old + 0.7, old + 0.1, old, 0.5)
    assert (
        token.clipped_high is not None and not token.clipped_high.any()
    )  # the clip acts, but the free loss is more
    token = value_loss(old - 0.7, old - 2.0, old, 0.5)
    assert token.clipped_low is not None and token.clipped_low.all()


# What a loss holds fixed while it is differentiated: everything behind a stop-gradient.
SURROGATES = {
    "cispo": lambda x, b, p: (
        -(b.log_ratio.exp().clamp(1 - p.clip_low, 1 + p.clip_high)) * b.advantages * x
    ),
    "gspo_token": lambda x, b, p: (
        PPO(clip_low=p.clip_low, clip_high=p.clip_high)(
            PolicyBatch(
                b.sequence_mean(b.log_ratio) + x - b.logprobs,
                torch.zeros_like(x),
                b.advantages,
                b.keep,
                b.sample,
                b.num_samples,
            ),
        ).loss
    ),
    "dppo_tv": lambda x, b, p: x * (p(b).loss / b.logprobs),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_by_finite_differences(name: str) -> None:
    rng = np.random.default_rng(7)
    n = 12
    sample = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3]
    advantages = rng.normal(size=4)[sample]
    micro = batch(
        rng.normal(0, 0.3, n).tolist(),
        advantages.tolist(),
        old=rng.uniform(-3, -0.5, n).tolist(),
        sample=sample,
        selected=(rng.random(n) < 0.3).astype(float).tolist(),
        group=-1.7,
    )
    loss = loss_of(name, clip_low=0.21, clip_high=0.17, dual_clip=3.0, ratio_cap=5.0)
    coefficients = double(rng.normal(size=n).tolist())
    frozen = PolicyBatch(
        micro.logprobs.detach(), micro.old_logprobs, micro.advantages, micro.keep, micro.sample, 4,
        micro.columns,
    )  # fmt: skip

    def value(x: Tensor) -> float:
        if name in SURROGATES:
            return float((coefficients * SURROGATES[name](x, frozen, loss)).sum())
        moved = PolicyBatch(
            x, micro.old_logprobs, micro.advantages, micro.keep, micro.sample, 4, micro.columns
        )
        return float((coefficients * loss(moved).loss).sum())

    (gradient,) = torch.autograd.grad((coefficients * loss(micro).loss).sum(), micro.logprobs)
    start = micro.logprobs.detach()
    h = 1e-6
    for k in range(n):
        step = torch.zeros(n, dtype=torch.float64)
        step[k] = h
        numeric = (value(start + step) - value(start - step)) / (2 * h)
        assert gradient[k].item() == pytest.approx(numeric, abs=1e-7), k


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """At ratio 1 the gradient is −A per token (−A/|y| per token of a sequence loss), the right
    sign."""
    # The group's expected probability equals the sequence's own here.
    micro = batch([0.0] * 4, [1.5, 1.5, -0.5, -0.5], sample=[0, 0, 1, 1], group=-1.0)
    loss_of(name)(micro).loss.sum().backward()
    assert micro.logprobs.grad is not None
    assert micro.logprobs.grad.tolist() == pytest.approx([-1.5, -1.5, 0.5, 0.5])


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantages_give_zero_gradient(name: str) -> None:
    micro = batch([0.3, -0.2, 0.1], [0.0] * 3, sample=[0, 0, 1], group=-1.0)
    loss_of(name)(micro).loss.sum().backward()
    assert micro.logprobs.grad is not None
    assert micro.logprobs.grad.tolist() == [0.0] * 3


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    micro = batch([400.0, -400.0], [1.0, -1.0], old=[-401.0, -1.0], sample=[0, 1], group=-300.0)
    loss = loss_of(name)(micro).loss
    loss.sum().backward()
    assert micro.logprobs.grad is not None
    assert loss.isfinite().all() and micro.logprobs.grad.isfinite().all()


# --- the objective: aggregation, KL, entropy, correction, and how batches are cut ---


def resolved(**keys: object) -> AlgorithmSection:
    section = AlgorithmSection.model_validate({"name": "grpo", **keys})
    return resolve_algorithm(section, max_new_tokens=8)[0]


def evaluated(
    ready: Batch,
    logprobs: Sequence[Tensor],
    cuts: Sequence[Sequence[int]],
    section: AlgorithmSection,
) -> tuple[float, list[Tensor], dict[str, float]]:
    """Loss, gradient per sample and metrics of an optimizer step over micro-batches ``cuts``."""
    objective = policy_objective(section)
    total = 0.0
    metrics = dict[str, float]()
    leaves = [x.detach().clone().requires_grad_() for x in logprobs]
    for indices in cuts:
        current = gather(leaves, indices)
        entropy = (current * current.exp()).neg() if section.entropy_coef else None
        scalar, found = objective(micro_batch(ready, indices), Predictions(current, entropy))
        if scalar.requires_grad:
            scalar.backward()
        total += scalar.item()
        for key, value in found.items():
            metrics[key] = metrics.get(key, 0.0) + float(value)
    return total, [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves], metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_and_order_give_the_same_step(name: str, aggregation: str) -> None:
    section = resolved(
        loss=name, aggregation=aggregation, kl={"coef": 0.1}, entropy_coef=0.01,
        correction={"type": "sequence_mask", "low": 0.9, "high": 1.2},
    )  # fmt: skip
    prepared = random_batch(1, lengths=(3, 1, 5, 2, 4, 4))
    prepare_columns(prepared, section, seed=5)
    weigh(prepared, aggregation, 8)
    logprobs = random_logprobs(prepared, 2)
    whole = evaluated(prepared, logprobs, [range(6)], section)
    for cuts in (
        [[5, 3], [0, 1, 4], [2]],
        [[i] for i in range(6)],
        [[4, 2, 0, 5, 3, 1]],
        [[], list(range(6))],
    ):
        loss, gradients, metrics = evaluated(prepared, logprobs, cuts, section)
        assert loss == pytest.approx(whole[0], rel=1e-12)
        for mine, theirs in zip(gradients, whole[1], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-14)
        assert metrics == pytest.approx(whole[2], rel=1e-12, abs=1e-14)


def test_the_scalar_by_hand() -> None:
    """Two sequences of 1 and 2 tokens on policy: −mean(A) plus β·KL minus c·H, weighted by
    correction."""
    columns = {
        "advantages": [0.5, 0.5, 0.5],
        "old_logprobs": [-1.0, -1.0, -2.0],
        "ref_logprobs": [-1.0, -1.0, -3.0],
        "correction": [1.0, 1.0, 0.5],
    }
    ready = batch_of((1, 2), columns)
    weigh(ready, "seq_mean_token_mean")
    section = resolved(kl={"coef": 0.1, "estimator": "k2"}, entropy_coef=0.01)
    logprobs = double([-1.0, -1.0, -2.0]).requires_grad_()
    scalar, metrics = policy_objective(section)(
        micro_batch(ready, [0, 1]), Predictions(logprobs, double([2.0, 1.0, 3.0]))
    )
    policy = -0.5 * (0.5 * 1 + 0.25 * 1 + 0.25 * 0.5)
    kl = 0.25 * 0.5
    entropy = 0.5 * 2.0 + 0.25 * 1.0 + 0.25 * 3.0
    assert scalar.item() == pytest.approx(policy + 0.1 * kl - 0.01 * entropy)
    assert metrics["policy_loss"].item() == pytest.approx(policy)
    assert metrics["entropy"].item() == pytest.approx(2.0)
    assert metrics["ref_kl"].item() == pytest.approx((math.exp(-1.0) - 1 + 1) / 3)
    assert metrics["ratio"].item() == pytest.approx(1.0)
    assert metrics["policy_kl"].item() == pytest.approx(0.0)
    assert metrics["clip_low"].item() == metrics["clip_high"].item() == 0.0
    assert metrics["correction"].item() == pytest.approx(2.5 / 3)
    doubled, _ = policy_objective(section, kl_coef=0.2)(
        micro_batch(ready, [0, 1]), Predictions(logprobs, double([2.0, 1.0, 3.0]))
    )
    assert doubled.item() - scalar.item() == pytest.approx(0.1 * kl)


def test_what_a_correction_rejects_is_reported() -> None:
    """Sequence by sequence: w = 2 is above the bound; tokens with w = 1 and e^-0.1 stay."""
    sampler = [-1.0 - d for d in (math.log(2.0), 0.0, -0.1)]
    old = [-1.0] * 3
    columns = {"advantages": [1.0] * 3, "old_logprobs": old, "behaviour_logprobs": sampler}
    ready = batch_of((1, 2), columns)
    section = resolved(correction={"type": "sequence_mask", "low": 0.5, "high": 1.5})
    prepare_columns(ready, section, seed=0)
    weigh(ready, "token_mean")
    _, _, sums = evaluated(ready, [double(old[:1]), double(old[1:])], [[0], [1]], section)
    found = with_shares(sums)
    assert found["correction_rejected"] == 1 / 3
    assert found["correction"] == pytest.approx((0 + 1 + math.exp(-0.1)) / 3)


def test_shares_of_tokens_are_exact_and_lack_no_token_that_was_dropped_late() -> None:
    """11 tokens, all twice as likely as before: clipped from above, but for one whose
    log-probability is lost."""
    ready = batch_of([11], {"advantages": [1.0] * 11, "old_logprobs": [-2.0] * 11})
    weigh(ready, "token_mean")
    forest = micro_batches.gather(build_forest(ready, [0]), ready)
    objective = policy_objective(resolved(loss="ppo"))
    logprobs = torch.full([11], -1.0)
    for lost, share in (([], 1.0), ([4], 10 / 11)):
        logprobs[lost] = math.nan
        _, metrics = objective(forest, Predictions(logprobs))
        found = with_shares({name: value.item() for name, value in metrics.items()})
        assert (found["clip_high"], found["clip_low"], found["ratio_over_2"]) == (share, 0.0, share)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("column", ["advantages", "old_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_input_is_as_if_the_token_were_not_there(
    name: str, column: str, bad: float
) -> None:
    section = resolved(loss=name, kl={"coef": 0.1})
    clean_columns = random_batch(3, lengths=(3, 4)).columns
    values = clean_columns[column]
    whole = batch_of((3, 4), {**clean_columns, column: [values[0], bad, *values[2:]]})
    shorter = batch_of(
        (2, 4), {name: np.delete(values, 1) for name, values in clean_columns.items()}
    )
    logprobs = random_logprobs(whole, 4)
    without = [torch.cat([logprobs[0][:1], logprobs[0][2:]]), logprobs[1]]

    def step(
        ready: Batch, current: Sequence[Tensor]
    ) -> tuple[float, list[Tensor], dict[str, float]]:
        prepare_columns(ready, section, seed=1)
        weigh(ready, "seq_mean_token_mean")
        return evaluated(ready, current, [[0, 1]], section)

    dirty = step(whole, logprobs)
    clean = step(shorter, without)
    assert dirty[0] == pytest.approx(clean[0], rel=1e-12)
    assert dirty[1][0][1].item() == 0.0
    assert torch.allclose(torch.cat([dirty[1][0][:1], dirty[1][0][2:]]), clean[1][0])
    assert torch.allclose(dirty[1][1], clean[1][1])
    assert dirty[2] == pytest.approx(clean[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_new_logprob_that_is_not_finite_reaches_no_gradient(name: str) -> None:
    section = resolved(loss=name)
    ready = random_batch(3, lengths=(3, 4))
    prepare_columns(ready, section, seed=1)
    weigh(ready, "token_mean")
    logprobs = random_logprobs(ready, 4)
    with torch.no_grad():
        logprobs[0][1] = -math.inf
    loss, gradients, metrics = evaluated(ready, logprobs, [[0, 1]], section)
    assert math.isfinite(loss)
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][1].item() == 0.0
    assert metrics["nonfinite_tokens"] == 1.0


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_loss_tokens_gives_zero(name: str) -> None:
    section = resolved(loss=name)
    ready = random_batch(3, lengths=(2, 2))
    ready.add("advantages", [math.nan] * 4)
    prepare_columns(ready, section, seed=1)
    weigh(ready, "seq_mean_token_mean")
    loss, gradients, metrics = evaluated(ready, random_logprobs(ready, 4), [[0, 1]], section)
    assert loss == 0.0
    assert all(torch.equal(g, torch.zeros(2, dtype=torch.float64)) for g in gradients)
    assert set(metrics.values()) == {0.0}


def test_columns_that_were_not_made_are_named() -> None:
    with pytest.raises(AssertionError, match=r"aggregation\.weigh"):
        policy_objective(resolved())(
            micro_batch(random_batch(0, lengths=(2,)), [0]), Predictions(torch.zeros(2))
        )
    ready = batch_of((1,), {"advantages": [1.0], "old_logprobs": [0.0]})
    weigh(ready, "token_mean")
    with pytest.raises(AssertionError, match="ref_logprobs"):
        policy_objective(resolved(kl={"coef": 0.1}))(
            micro_batch(ready, [0]), Predictions(torch.zeros(1))
        )
    with pytest.raises(AssertionError, match="entropy"):
        policy_objective(resolved(entropy_coef=0.1))(
            micro_batch(ready, [0]), Predictions(torch.zeros(1))
        )


def test_sft_objective_is_the_mean_nll() -> None:
    ready = batch_of((1, 2), {})
    weigh(ready, "token_mean")
    logprobs = double([-1.0, -2.0, -6.0]).requires_grad_()
    scalar, metrics = SFTObjective()(micro_batch(ready, [0, 1]), Predictions(logprobs))
    assert scalar.item() == pytest.approx(3.0) == metrics["nll"].item()
    scalar.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3] * 3)
    dropped, found = SFTObjective()(
        micro_batch(ready, [0, 1]), Predictions(double([-1.0, math.nan, -6.0]))
    )
    assert dropped.item() == pytest.approx(7 / 3)
    assert found["nonfinite_tokens"].item() == 1


def test_value_objective_adds_up_over_micro_batches() -> None:
    ready = random_batch(0, lengths=(2, 3))
    ready.add("returns", ready.columns["advantages"])
    ready.add("old_values", ready.columns["old_logprobs"])
    weigh(ready, "token_mean")
    predicted = [x.detach() for x in random_logprobs(ready, 1)]
    objective = ValueObjective(0.1)
    whole, metrics = objective(
        micro_batch(ready, [0, 1]), Predictions(values=gather(predicted, [0, 1]))
    )
    parts = [objective(micro_batch(ready, [i]), Predictions(values=predicted[i])) for i in (1, 0)]
    assert sum(p[0].item() for p in parts) == pytest.approx(whole.item())
    assert sum(p[1]["value_error"].item() for p in parts) == pytest.approx(
        metrics["value_error"].item()
    )
