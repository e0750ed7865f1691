"""Advantage estimators beside verl's, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from tests.peers.cases import SEEDS, Rewards, our_advantages, padded, random_rewards
from tests.peers.openrlhf_models import utils
from tunesmith.learn.algorithms.advantages import GAE, GDPO, VAPO, compute_advantages
from tunesmith.learn.algorithms.kl import kl_values

seeds = pytest.mark.parametrize("seed", SEEDS)


def index(rewards: Rewards) -> np.ndarray:
    return np.array(rewards.group)


def group_relative(name: str, rewards: Rewards, **settings: object) -> Tensor:
    """verl's estimator of that name where it compares siblings: ``[B, T]``."""
    estimate = core_algos.get_adv_estimator_fn(name)
    given = {
        "token_level_rewards": rewards.paid,
        "response_mask": rewards.mask,
        "index": index(rewards),
    }
    return estimate(**given, **settings)[0] * rewards.mask


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)


@seeds
@pytest.mark.parametrize("theirs", ["grpo", "grpo_vectorized"])
def agree_grpo(seed: int, theirs: str) -> None:
    rewards = random_rewards(seed, token_rewards=True)
    assert_close(our_advantages("grpo", rewards), group_relative(theirs, rewards))


@seeds
def agree_dr_grpo(seed: int) -> None:
    rewards = random_rewards(seed, token_rewards=True)
    assert_close(
        our_advantages("dr_grpo", rewards),
        group_relative("grpo", rewards, norm_adv_by_std_in_grpo=False),
    )


@seeds
@pytest.mark.parametrize("theirs", ["rloo", "rloo_vectorized"])
def agree_rloo(seed: int, theirs: str) -> None:
    rewards = random_rewards(seed, token_rewards=True)
    assert_close(our_advantages("rloo", rewards), group_relative(theirs, rewards))


@seeds
def agree_opo(seed: int) -> None:
    rewards = random_rewards(seed, token_rewards=True)
    assert_close(our_advantages("opo", rewards), group_relative("opo", rewards))


@seeds
def agree_gdpo(seed: int) -> None:
    rewards = random_rewards(seed)
    parts = {
        "right": rewards.reward.numpy(),
        "short": np.random.default_rng(100 + seed).normal(size=len(rewards.group)),
    }
    weights = {"right": 1.0, "short": 0.5}
    config = AlgoConfig(gdpo_reward_keys=list(weights), gdpo_reward_weights=list(weights.values()))
    batch = {
        "prompts": torch.ones(len(rewards.group), 1, dtype=torch.int64),
        # verl pays each reward at the last attended token, whether or not the policy wrote it.
        "attention_mask": torch.ones(
            len(rewards.group), 1 + rewards.mask.shape[1], dtype=torch.int64
        ),
    }
    theirs = group_relative("gdpo", rewards, config=config, non_tensor_batch=parts, batch=batch)
    components = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    outcomes = rewards.outcomes(components=components)
    found = compute_advantages(GDPO(), [replace(o, weights=weights) for o in outcomes])
    assert_close(padded(found.advantages, rewards.mask), theirs)


@seeds
def agree_reinforce(seed: int) -> None:
    rewards = random_rewards(seed, token_rewards=True)
    estimate = core_algos.compute_reinforce_plus_plus_outcome_advantage
    theirs, _ = estimate(rewards.paid, rewards.mask, AlgoConfig(gamma=0.9))
    assert_close(our_advantages("reinforce", rewards, gamma=0.9), theirs)


@seeds
def agree_reinforce_with_kl_in_the_reward(seed: int) -> None:
    """From log-probabilities to advantages: OpenRLHF pays the penalty on tokens, verl sums it to
    go."""
    rewards = random_rewards(seed)
    rng = np.random.default_rng(100 + seed)
    old, reference = (torch.tensor(rng.normal(-1.5, 0.4, rewards.mask.shape)) for _ in range(2))
    kl = utils.compute_approx_kl(old, reference, kl_estimator="k1") * rewards.mask
    paid = utils.compute_reward(rewards.reward, 0.1, kl, action_mask=rewards.mask)
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        paid, rewards.mask, AlgoConfig()
    )
    penalty = torch.tensor(-0.1 * kl_values(old.numpy(), reference.numpy(), "k1"))
    assert_close(our_advantages("reinforce", replace(rewards, tokens=penalty)), theirs)


@seeds
def agree_reinforce_baseline(seed: int) -> None:
    rewards = random_rewards(seed)
    assert_close(
        our_advantages("reinforce_baseline", rewards),
        group_relative("reinforce_plus_plus_baseline", rewards),
    )


@seeds
def agree_remax(seed: int) -> None:
    rewards = random_rewards(seed)
    greedy = torch.tensor(np.random.default_rng(100 + seed).normal(size=len(rewards.group)))
    theirs, _ = core_algos.compute_remax_outcome_advantage(rewards.paid, greedy, rewards.mask)
    outcomes = rewards.outcomes(greedy_reward=greedy.tolist())
    assert_close(our_advantages("remax", rewards, outcomes), theirs * rewards.mask)


@seeds
def agree_gae(seed: int) -> None:
    """Both skip the tokens between turns that the policy did not write."""
    rewards = random_rewards(seed, token_rewards=True)
    advantages, returns = core_algos.compute_gae_advantage_return(
        rewards.paid, rewards.values, rewards.mask, gamma=0.98, lam=0.9
    )
    found = compute_advantages(GAE(gamma=0.98, gae_lambda=0.9), rewards.outcomes())
    assert found.returns is not None
    assert_close(padded(found.advantages, rewards.mask), advantages * rewards.mask)
    assert_close(padded(found.returns, rewards.mask), returns * rewards.mask)


@seeds
def agree_vapo(seed: int) -> None:
    """verl has one λ for all, so it is called row by row with the row's; its returns are not
    whitened."""
    rewards = random_rewards(seed, token_rewards=True)
    rows: list[Tensor] = []
    for paid, values, mask in zip(rewards.paid, rewards.values, rewards.mask, strict=True):
        lam = 1.0 - 1.0 / (0.05 * float(mask.sum()) + 1.0)
        _, returns = core_algos.compute_gae_advantage_return(
            paid[None], values[None], mask[None], 0.99, lam
        )
        rows.append((returns[0] - values) * mask)
    assert_close(our_advantages("vapo", rewards, gamma=0.99, lambda_alpha=0.05), torch.stack(rows))
    _, returns = core_algos.compute_gae_advantage_return(
        rewards.paid, rewards.values, rewards.mask, 0.99, 1.0
    )
    found = compute_advantages(VAPO(gamma=0.99), rewards.outcomes())
    assert found.returns is not None
    assert_close(padded(found.returns, rewards.mask), returns * rewards.mask)


@seeds
def differ_gae_bootstrap(seed: int) -> None:
    """What verl would give if the bootstrap were paid as a reward."""
    rewards = random_rewards(seed)
    final = np.random.default_rng(100 + seed).normal(size=len(rewards.group))
    theirs, _ = core_algos.compute_gae_advantage_return(
        rewards.paid, rewards.values, rewards.mask, 0.9, 0.95
    )
    found = our_advantages("gae", rewards, rewards.outcomes(final_value=final.tolist()), gamma=0.9)
    assert (found - theirs * rewards.mask).abs().max() > 0.1
    with_bootstrap = replace(rewards, reward=rewards.reward + 0.9 * torch.tensor(final))
    theirs, _ = core_algos.compute_gae_advantage_return(
        with_bootstrap.paid, rewards.values, rewards.mask, 0.9, 0.95
    )
    assert_close(found, theirs * rewards.mask)


@seeds
def differ_gpg_scale(seed: int) -> None:
    """One group of three without spread, one rollout of twelve with a reward of zero."""
    rewards = random_rewards(seed)
    reward = rewards.reward.clone()
    reward[:4] = 1.0
    reward[5] = 0.0
    rewards = replace(rewards, reward=reward)
    theirs = group_relative("gpg", rewards)
    found = our_advantages("gpg", rewards)
    assert_close(found / (3 / 2), theirs / (12 / 11))


def differ_equal_rewards() -> None:
    """The mean of equal float32 rewards is not their value: divided by 1e-6 the residue is an
    advantage."""
    reward = torch.full((7,), 0.1)
    mask = torch.ones(7, 2)
    rewards = Rewards(mask, reward, torch.zeros(7, 2), torch.zeros(7, 2), (0,) * 7)
    assert group_relative("grpo", rewards).abs().max() > 1e-3
    assert not our_advantages("grpo", rewards).any()


@pytest.mark.parametrize("theirs", ["grpo", "rloo", "opo", "gpg"])
def differ_group_of_one(theirs: str) -> None:
    rewards = random_rewards(0, groups=2, size=1)
    assert group_relative(theirs, rewards).abs().max() > 0.1
    assert not our_advantages(theirs, rewards).any()


@seeds
def differ_whitening_of_a_small_spread(seed: int) -> None:
    """``1/(std + 1e-6)`` and ``1/sqrt(var + 1e-8)``: the same to 1e-5 at a deviation of 1, not at
    one of 1e-4."""
    rewards = random_rewards(seed)
    small = replace(rewards, reward=1e-4 * rewards.reward)
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        small.paid, small.mask, AlgoConfig()
    )
    found = our_advantages("reinforce", small)
    scale = theirs[small.mask.bool()] / found[small.mask.bool()]
    assert scale.max() < 0.9
    torch.testing.assert_close(scale, scale[0].expand_as(scale))


@seeds
def differ_baseline_of_token_rewards(seed: int) -> None:
    """verl's baseline is taken of the reward with its KL penalty, ours of the reward; the penalty
    goes to its own."""
    rewards = random_rewards(seed, token_rewards=True)
    theirs = group_relative("reinforce_plus_plus_baseline", rewards)
    found = our_advantages("reinforce_baseline", rewards)
    assert (found - theirs).abs().max() > 1e-2
    groups = rewards.reward.view(-1, 4)
    centred = replace(rewards, reward=(groups - groups.mean(1, keepdim=True)).flatten())
    to_go, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        centred.paid, rewards.mask, AlgoConfig()
    )
    assert_close(found, to_go)


@seeds
def differ_remax_of_token_rewards(seed: int) -> None:
    """verl sums what is still to come at each token; ours is one advantage per rollout, its whole
    reward."""
    rewards = random_rewards(seed, token_rewards=True)
    greedy = torch.tensor(np.random.default_rng(100 + seed).normal(size=len(rewards.group)))
    theirs, _ = core_algos.compute_remax_outcome_advantage(rewards.paid, greedy, rewards.mask)
    found = our_advantages("remax", rewards, rewards.outcomes(greedy_reward=greedy.tolist()))
    first = rewards.mask.argmax(1, keepdim=True)
    assert (found - theirs * rewards.mask).abs().max() > 1e-2
    assert_close(found.gather(1, first), theirs.gather(1, first))
