"""Policy losses and aggregations: loss and gradient of a whole batch, ours over two
micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.peers.cases import (
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
from tests.peers.trl_trainers import grpo_loss
from tests.peers.verl_losses import AGGREGATIONS, verl_loss
from tunesmith.learn.algorithms.objective import SFTObjective, prepare_columns

seeds = pytest.mark.parametrize("seed", SEEDS)
aggregations = pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
VERL_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
OPENRLHF_CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
TRL_CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}

TRL_TYPES = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}
"""TRL's types of PPO's loss are ways to average it."""


def openrlhf_loss(case: Case, *, corrected: bool = False, **settings: object) -> Graded:
    leaf = case.logprobs.clone().requires_grad_()
    loss, *_ = openrlhf.PolicyLoss(**settings)(
        leaf,
        case["old_logprobs"],
        case["advantages"],
        action_mask=case.mask,
        rollout_log_probs=case["behaviour_logprobs"] if corrected else None,
    )
    return grade(loss, leaf)


@seeds
@aggregations
@pytest.mark.parametrize("empty", [False, True])
def agree_ppo_verl(seed: int, aggregation: str, empty: bool) -> None:
    case = random_case(seed, drift=0.8, empty=empty)
    theirs = verl_loss("vanilla", case, aggregation, **VERL_CLIP)
    assert_same(ours(case, section(loss="ppo", aggregation=aggregation, **CLIP)), theirs)


@seeds
def agree_dual_clip_verl(seed: int) -> None:
    case = random_case(seed, drift=1.5)
    theirs = verl_loss("vanilla", case, clip_ratio_c=3.0, **VERL_CLIP)
    assert_same(
        ours(case, section(loss="ppo", aggregation="token_mean", dual_clip=3.0, **CLIP)), theirs
    )


@seeds
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize(
    ("aggregation", "token_level"), [("token_mean", True), ("seq_mean_token_mean", False)]
)
def agree_ppo_openrlhf(
    seed: int, dual_clip: float | None, aggregation: str, token_level: bool
) -> None:
    case = random_case(seed, drift=1.2, empty=True)
    theirs = openrlhf_loss(case, dual_clip=dual_clip, token_level_loss=token_level, **OPENRLHF_CLIP)
    assert_same(
        ours(case, section(loss="ppo", aggregation=aggregation, dual_clip=dual_clip, **CLIP)),
        theirs,
    )


@seeds
@pytest.mark.parametrize("loss_type", sorted(TRL_TYPES))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def agree_ppo_trl(seed: int, loss_type: str, beta: float) -> None:
    """With the KL in the loss too: TRL's estimator is k3, here without its weight by the ratio."""
    case = random_case(seed, drift=0.8)
    kl = {"kl": {"type": "loss", "coef": beta, "estimator": "k3"}} if beta else {}
    found = ours(case, section(loss="ppo", aggregation=TRL_TYPES[loss_type], **CLIP, **kl))
    assert_same(
        found,
        grpo_loss(case, loss_type=loss_type, beta=beta, use_bias_correction_kl=False, **TRL_CLIP),
    )


@seeds
def agree_gspo(seed: int) -> None:
    """OpenRLHF and TRL take the gradient of the sequence's ratio itself; so do we."""
    case = random_case(seed, drift=0.3, per_token=False)
    found = ours(case, section(loss="gspo", aggregation="seq_mean_token_mean", **CLIP))
    assert_same(found, openrlhf_loss(case, policy_loss_type="gspo", **OPENRLHF_CLIP))
    assert_same(
        found, grpo_loss(case, loss_type="grpo", importance_sampling_level="sequence", **TRL_CLIP)
    )
    assert_same(found, verl_loss("gspo", case, "seq_mean_token_mean", **VERL_CLIP))


@seeds
@aggregations
def agree_gspo_token(seed: int, aggregation: str) -> None:
    case = random_case(seed, drift=0.3)
    found = ours(case, section(loss="gspo_token", aggregation=aggregation, **CLIP))
    assert_same(found, verl_loss("gspo", case, aggregation, **VERL_CLIP))


@seeds
def agree_cispo(seed: int) -> None:
    """TRL's ``epsilon_high`` is the bound itself, and there is no lower one: 1 + clip_high and
    clip_low = 1."""
    case = random_case(seed, drift=0.8)
    found = ours(case, section(loss="cispo", aggregation="token_mean", clip_low=0.3, clip_high=0.5))
    assert_same(found, verl_loss("cispo", case, clip_ratio_low=0.3, clip_ratio_high=0.5))
    found = ours(case, section(loss="cispo", aggregation="token_mean", clip_low=1.0, clip_high=0.5))
    assert_same(found, grpo_loss(case, loss_type="cispo", epsilon_high=1.5))


@seeds
def agree_sapo(seed: int) -> None:
    case = random_case(seed, drift=0.8)
    found = ours(
        case,
        section(loss="sapo", aggregation="seq_mean_token_mean", tau_positive=1.2, tau_negative=1.5),
    )
    assert_same(found, verl_loss("sapo", case, tau_pos=1.2, tau_neg=1.5))
    assert_same(
        found, grpo_loss(case, loss_type="sapo", sapo_temperature_pos=1.2, sapo_temperature_neg=1.5)
    )


@seeds
def agree_gmpo(seed: int) -> None:
    case = random_case(seed, drift=0.8, per_token=False)
    found = ours(
        case, section(loss="gmpo", aggregation="seq_mean_token_mean", clip_low=0.4, clip_high=0.4)
    )
    assert_same(found, verl_loss("geo_mean", case, clip_ratio_low=0.4, clip_ratio_high=0.4))


@seeds
@aggregations
@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def agree_policy_gradient(seed: int, aggregation: str, name: str) -> None:
    case = random_case(seed)
    assert_same(
        ours(case, section(loss=name, aggregation=aggregation)), verl_loss("gpg", case, aggregation)
    )


@seeds
def agree_dppo_tv(seed: int) -> None:
    case = random_case(seed, drift=0.8)
    bounds = {"clip_low": 0.05, "clip_high": 0.1, "ratio_cap": 2.0}
    found = ours(case, section(loss="dppo_tv", aggregation="token_mean", **bounds))
    assert_same(
        found,
        verl_loss("dppo_tv", case, clip_ratio_low=0.05, clip_ratio_high=0.1, clip_ratio_c=2.0),
    )


def shifted(case: Case, amount: float) -> Case:
    """Every log-probability moved alike, which leaves each token's share of the covariance where it
    was."""
    return Case(case.mask, case["old_logprobs"] + amount, case.columns, case.group)


CLIP_COV = {"cov_share": 1.0, "cov_low": 0.05, "cov_high": 0.5}
VERL_CLIP_COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.5}


@seeds
@pytest.mark.parametrize("amount", [0.1, -0.1])
def agree_clip_cov(seed: int, amount: float) -> None:
    """With a share of 1 all candidates are taken, so that nothing depends on which are drawn."""
    case = shifted(random_case(seed), amount)
    algorithm = section(loss="clip_cov", aggregation="token_mean", **CLIP, **CLIP_COV)
    assert 0 < chosen(case, "clip_cov", **CLIP_COV).sum() < case.mask.sum()
    assert_same(
        ours(case, algorithm), verl_loss("clip_cov", case, policy_loss=VERL_CLIP_COV, **VERL_CLIP)
    )


@seeds
@pytest.mark.parametrize("amount", [0.1, -0.1])
def agree_kl_cov(seed: int, amount: float) -> None:
    case = shifted(random_case(seed), amount)
    algorithm = section(loss="kl_cov", aggregation="token_mean", cov_share=0.3, cov_kl_coef=0.7)
    theirs = verl_loss("kl_cov", case, policy_loss={"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7})
    assert_same(ours(case, algorithm), theirs)


def chosen(case: Case, name: str, **keys: float) -> Tensor:
    """The tokens ``[B, T]`` that a covariance loss of ours holds back."""
    batch = case.batch()
    selected = torch.zeros_like(case.mask)
    prepare_columns(batch, section(loss=name, aggregation="token_mean", **keys), seed=0)
    selected[case.bools] = torch.tensor(batch.columns["loss.selected"])
    return selected


@seeds
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def differ_choice_by_covariance(seed: int, name: str) -> None:
    """Ours looks at the old log-probabilities of the whole batch, verl at the current ones of the
    micro-batch."""
    drifted = random_case(seed, drift=0.8)
    keys = CLIP_COV if name == "clip_cov" else {"cov_share": 0.3}
    theirs = VERL_CLIP_COV if name == "clip_cov" else {"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0}
    assert differ(
        ours(drifted, section(loss=name, aggregation="token_mean", **keys)),
        verl_loss(name, drifted, policy_loss=theirs),
    )
    assert chosen(drifted, name, **keys).equal(chosen(shifted(drifted, 0.0), name, **keys))


@seeds
@pytest.mark.parametrize(
    ("aggregation", "token_level"), [("token_mean", True), ("seq_mean_token_mean", False)]
)
def agree_sft(seed: int, aggregation: str, token_level: bool) -> None:
    case = random_case(seed, empty=True)
    leaf = case.logprobs.clone().requires_grad_()
    theirs = grade(openrlhf.SFTLoss(token_level_loss=token_level)(leaf, case.mask), leaf)
    assert_same(evaluate(case, case.batch(), SFTObjective(), aggregation), theirs)


@seeds
def agree_entropy_bonus(seed: int) -> None:
    case = random_case(seed)
    entropy = random_case(100 + seed).logprobs.abs()
    found = ours(
        case, section(loss="ppo", aggregation="token_mean", entropy_coef=0.1, **CLIP), entropy
    )
    assert_same(
        found, grpo_loss(case, entropies=entropy, loss_type="bnpo", entropy_coef=0.1, **TRL_CLIP)
    )


@seeds
def differ_entropy_bonus(seed: int) -> None:
    """TRL's bonus is always a mean over tokens; ours is averaged as the loss beside it."""
    case = random_case(seed)
    entropy = random_case(100 + seed).logprobs.abs()
    plain, bonus = (
        {"loss": "ppo", "aggregation": "seq_mean_token_mean", **CLIP, "entropy_coef": c}
        for c in (0.0, 1.0)
    )
    gain = ours(case, section(**plain), entropy)[0] - ours(case, section(**bonus), entropy)[0]
    by_row = (entropy * case.mask).sum(1) / case.mask.sum(1)
    assert gain.item() == pytest.approx(by_row.mean().item())
    theirs = [
        grpo_loss(case, entropies=entropy, loss_type="grpo", entropy_coef=c, **TRL_CLIP)[0]
        for c in (0.0, 1.0)
    ]
    assert (theirs[0] - theirs[1]).item() == pytest.approx(
        ((entropy * case.mask).sum() / case.mask.sum()).item()
    )


@seeds
def differ_weight_of_the_kl_in_the_loss(seed: int) -> None:
    """TRL multiplies k3 by the ratio, gradient and all: on policy that is our ``k3+``, off policy
    it is not."""
    kl = {"kl": {"type": "loss", "coef": 0.5, "estimator": "k3+"}}
    algorithm = section(loss="ppo", aggregation="token_mean", **CLIP, **kl)
    drifted = random_case(seed)
    assert differ(
        ours(drifted, algorithm), grpo_loss(drifted, loss_type="bnpo", beta=0.5, **TRL_CLIP)
    )
    on_policy = shifted(drifted, 0.0)
    assert_same(
        ours(on_policy, algorithm), grpo_loss(on_policy, loss_type="bnpo", beta=0.5, **TRL_CLIP)
    )


@seeds
def differ_gmpo_of_advantages_per_token(seed: int) -> None:
    """The side to clip is that of the sequence's mean advantage in ours, of each token's own in
    verl's."""
    case = random_case(seed, drift=0.8)
    theirs = verl_loss("geo_mean", case, clip_ratio_low=0.4, clip_ratio_high=0.4)
    assert differ(ours(case, section(loss="gmpo", aggregation="seq_mean_token_mean")), theirs)


@seeds
def differ_gspo_of_advantages_per_token(seed: int) -> None:
    """Ours takes a sequence's mean advantage for ``gspo``; verl's is the token form, our
    ``gspo_token``."""
    case = random_case(seed, drift=0.3)
    theirs = verl_loss("gspo", case, "seq_mean_token_mean", **VERL_CLIP)
    assert differ(
        ours(case, section(loss="gspo", aggregation="seq_mean_token_mean", **CLIP)), theirs
    )
    mean = (case["advantages"] * case.mask).sum(1, keepdim=True) / case.mask.sum(1, keepdim=True)
    level = case.with_columns(advantages=mean.expand_as(case.mask).contiguous())
    found = ours(case, section(loss="gspo", aggregation="seq_mean_token_mean", **CLIP))
    assert_same(found, verl_loss("gspo", level, "seq_mean_token_mean", **VERL_CLIP))


def differ_log_ratio_is_clamped() -> None:
    """A token that became possible: exp(1000) is no loss to take a gradient of."""
    case = random_case(0)
    old = case["old_logprobs"].clone()
    old[0, 0] = -1000.0
    case["advantages"][0, 0] = -1.0
    case = case.with_columns(old_logprobs=old)
    found = ours(case, section(loss="ppo", aggregation="token_mean"))
    assert found[0].isfinite() and found[1].isfinite().all()
    assert not grpo_loss(case, loss_type="bnpo")[0].isfinite()


def differ_non_finite_token() -> None:
    """Ours is as if the token were not there; verl's and TRL's loss is NaN."""
    case = random_case(0)
    old = case["old_logprobs"].clone()
    mask = case.mask.clone()
    old[0, 0] = float("nan")
    mask[0, 0] = 0.0
    algorithm = section(loss="ppo", aggregation="token_mean")
    spoiled = case.with_columns(old_logprobs=old)
    without = verl_loss("vanilla", Case(mask, case.logprobs, case.columns, case.group))
    assert_same(ours(spoiled, algorithm), without)
    assert (
        verl_loss("vanilla", spoiled)[0].isnan() and grpo_loss(spoiled, loss_type="bnpo")[0].isnan()
    )


@seeds
def differ_rows_without_policy_tokens(seed: int) -> None:
    """TRL counts them in the mean over sequences; verl, OpenRLHF and we do not. One row of six is
    empty."""
    case = random_case(seed, empty=True)
    found = ours(case, section(loss="ppo", aggregation="seq_mean_token_mean", **CLIP))
    loss, gradient = grpo_loss(case, loss_type="grpo", **TRL_CLIP)
    assert_same(found, (loss * 6 / 5, gradient * 6 / 5))


@seeds
def differ_mean_of_micro_batches(seed: int) -> None:
    """TRL's ``bnpo`` averages each micro-batch by itself, so its step depends on how the batch is
    cut."""
    case = random_case(seed, rows=6)
    halves = [
        Case(
            case.mask[s],
            case.logprobs[s],
            {k: v[s] for k, v in case.columns.items()},
            case.group[s],
        )
        for s in (slice(0, 2), slice(2, 6))
    ]
    loss = sum(grpo_loss(half, loss_type="bnpo", **TRL_CLIP)[0] for half in halves) / 2
    found = ours(case, section(loss="ppo", aggregation="token_mean", **CLIP))
    assert_same(found, grpo_loss(case, loss_type="bnpo", **TRL_CLIP))
    assert abs(float(loss - found[0])) > 1e-4
