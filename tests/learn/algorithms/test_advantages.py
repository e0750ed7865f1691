from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.learn.algorithms.advantages import Estimator, compute_advantages
from tunesmith.learn.algorithms.outcomes import Advantages, Outcome, suffix_sums, whiten

GROUP_ESTIMATORS = {name for name, kind in Estimator.types.items() if "group" in kind.needs}
UNWHITENED = ("grpo", "dr_grpo", "rloo", "opo", "gpg")


def group(
    rewards: Sequence[float], lengths: Sequence[int] | None = None, index: int = 0
) -> list[Outcome]:
    return [
        Outcome(index, r, n, {"r": r})
        for r, n in zip(rewards, lengths or [2] * len(rewards), strict=True)
    ]


def computed(name: str, rollouts: Sequence[Outcome], **constants: float) -> Advantages:
    return compute_advantages(Estimator.types[name](**constants), rollouts)


def scalars(name: str, rollouts: Sequence[Outcome]) -> list[float]:
    found = computed(name, rollouts).advantages
    for outcome, advantages in zip(rollouts, found, strict=True):
        assert advantages.shape == (outcome.length,)
        assert np.all(advantages == advantages[0])
    return [float(a[0]) for a in found]


DEVIATION = math.sqrt(2 / 3)  # unbiased, of 0 1 1 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [-1 / (DEVIATION + 1e-6), 0, 0, 1 / (DEVIATION + 1e-6)]),
        ("dr_grpo", [-1, 0, 0, 1]),
        ("rloo", [0 - 4 / 3, 1 - 3 / 3, 1 - 3 / 3, 2 - 2 / 3]),
        ("opo", [0 - 1.1, 1 - 1.1, 1 - 1.1, 2 - 1.1]),
        ("gpg", [-1, 0, 0, 1]),
    ],
)
def test_group_estimators_by_hand(name: str, expected: list[float]) -> None:
    # Lengths 1 3 4 2 weigh the rewards 0 1 1 2 to 11/10.
    assert scalars(name, group([0, 1, 1, 2], [1, 3, 4, 2])) == pytest.approx(expected, abs=1e-12)


def test_gpg_scales_up_for_groups_without_spread() -> None:
    rollouts = [*group([0, 1], index=0), *group([1, 1], index=1), *group([0, 0], index=2)]
    assert scalars("gpg", rollouts) == pytest.approx([-1.5, 1.5, 0, 0, 0, 0])


def test_remax_by_hand() -> None:
    rollouts = [Outcome(0, 1.0, 2, greedy_reward=0.25), Outcome(0, 0.25, 3, greedy_reward=0.25)]
    assert scalars("remax", rollouts) == [0.75, 0.0]
    with pytest.raises(AssertionError, match="greedy"):
        computed("remax", [Outcome(0, 1.0, 2)])


def test_gdpo_standardises_each_reward_by_itself() -> None:
    parts = [
        {"a": 0.0, "b": 0.0},
        {"a": 1.0, "b": 0.0},
        {"a": 0.0, "b": 100.0},
        {"a": 1.0, "b": 100.0},
    ]
    rollouts = [Outcome(0, sum(p.values()), 1, p, {"b": 2.0}) for p in parts]
    unit = 0.5 / math.sqrt(1 / 3)  # each component is standardised to ± this
    raw = np.array([-3 * unit, -1 * unit, 1 * unit, 3 * unit])
    expected = raw / raw.std(ddof=1)
    assert scalars("gdpo", rollouts) == pytest.approx(expected.tolist(), abs=1e-5)


def test_gdpo_leaves_out_a_reward_that_does_not_apply() -> None:
    def rollouts(missing: float | None) -> list[Outcome]:
        parts: list[dict[str, float | None]] = [
            {"a": 0.0, "b": missing},
            {"a": 1.0, "b": 1.0},
            {"a": 2.0, "b": 3.0},
        ]
        return [Outcome(0, 0.0, 1, p) for p in parts]

    a = np.array([-1.0, 0.0, 1.0])
    b = np.array([0.0, -1.0, 1.0]) / math.sqrt(2)
    raw = a + b
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    assert scalars("gdpo", rollouts(None)) == pytest.approx(expected.tolist(), abs=1e-5)


def test_reinforce_is_the_whitened_return_to_go() -> None:
    rollouts = [
        Outcome(0, 1.0, 3, token_rewards=np.array([-0.1, 0.0, -0.2])),
        Outcome(1, 0.0, 2, token_rewards=np.array([0.0, -0.4])),
    ]
    g = 0.5
    first = [-0.1 + g * (0 + g * 0.8), 0 + g * 0.8, 0.8]
    second = [0 + g * -0.4, -0.4]
    flat = np.array(first + second)
    expected = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6)
    found = computed("reinforce", rollouts, gamma=g).advantages
    assert np.concatenate(found) == pytest.approx(expected, abs=1e-12)


def test_reinforce_baseline_centres_the_reward_but_not_the_kl() -> None:
    rollouts = [
        Outcome(0, 1.0, 2, token_rewards=np.array([-0.2, 0.0])),
        Outcome(0, 0.0, 1, token_rewards=np.array([-0.1])),
    ]
    flat = np.array([0.3, 0.5, -0.6])
    found = np.concatenate(computed("reinforce_baseline", rollouts).advantages)
    assert found == pytest.approx((flat - flat.mean()) / (flat.std(ddof=1) + 1e-6), abs=1e-12)


def brute_gae(
    rewards: Sequence[float], values: Sequence[float], final: float, gamma: float, lam: float
) -> list[float]:
    following = [*values, final][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def test_gae_by_hand() -> None:
    # Two tokens, γ 1, λ 0.5: δ = (0 + 0.6 − 0.2, 1 − 0.6), A = (0.4 + 0.5·0.4, 0.4).
    rollout = Outcome(0, 1.0, 2, values=np.array([0.2, 0.6]))
    other = Outcome(1, 0.0, 1, values=np.array([0.3]), final_value=0.5)
    found = computed("gae", [rollout, other], gae_lambda=0.5)
    raw = np.array([0.6, 0.4, 0.2])
    assert np.concatenate(found.advantages) == pytest.approx((raw - 0.4) / (0.2 + 1e-6), abs=1e-9)
    assert found.returns is not None
    assert np.concatenate(found.returns) == pytest.approx([0.8, 1.0, 0.5], abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_gae_against_its_definition(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rollouts = [
        Outcome(i, rng.normal(), n, {}, {}, rng.normal(size=n), rng.normal(size=n), rng.normal())
        for i, n in enumerate(rng.integers(0, 7, 4).tolist())
    ]
    found = computed("gae", rollouts, gamma=gamma, gae_lambda=lam, critic_lambda=0.7)
    assert found.returns is not None
    expected: list[float] = []
    for rollout, returns in zip(rollouts, found.returns, strict=True):
        assert rollout.values is not None and rollout.token_rewards is not None
        rewards = rollout.token_rewards.copy()
        rewards[-1:] += rollout.reward
        args = rewards.tolist(), rollout.values.tolist(), rollout.final_value, gamma
        expected += brute_gae(*args, lam)
        assert returns - rollout.values == pytest.approx(brute_gae(*args, 0.7), abs=1e-9)
    raw = np.array(expected)
    white = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-6) if raw.size > 1 else np.zeros(raw.size)
    assert np.concatenate([np.zeros(0), *found.advantages]) == pytest.approx(white, abs=1e-6)


def test_vapo_lambda_grows_with_length() -> None:
    n = 40
    alpha = 0.05
    values = np.linspace(0.1, 0.5, n)
    found = computed("vapo", [Outcome(0, 1.0, n, values=values)], lambda_alpha=alpha)
    lam = 1 - 1 / (alpha * n + 1)
    assert lam == pytest.approx(2 / 3)
    rewards = [0.0] * (n - 1) + [1.0]
    assert found.advantages[0] == pytest.approx(
        brute_gae(rewards, values.tolist(), 0.0, 1.0, lam), abs=1e-12
    )
    assert found.returns is not None
    assert found.returns[0] == pytest.approx(np.ones(n), abs=1e-12)  # λ 1: the reward itself


@given(
    st.sampled_from(sorted(Estimator.types)),
    st.floats(-1e6, 1e6),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_equal_rewards_give_exactly_zero(name: str, reward: float, lengths: list[int]) -> None:
    rollouts = [
        Outcome(0, reward, n, {"r": reward}, values=np.full(n, reward), greedy_reward=reward)
        for n in lengths
    ]
    found = computed(name, rollouts)
    for n, advantages in zip(lengths, found.advantages, strict=True):
        assert advantages.shape == (n,)
        if name != "vapo":  # the others compare; here every δ is exactly 0 as well, by subtraction
            assert np.all(advantages == 0.0)
        assert np.allclose(advantages, 0.0)


def test_float_residue_does_not_become_an_advantage() -> None:
    """0.1 + 0.2 summed in float leaves a mean that is not quite the value all rewards have."""
    reward = 0.1 + 0.2
    for name in GROUP_ESTIMATORS:
        assert scalars(name, group([reward] * 7)) == [0.0] * 7


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
def test_a_group_that_failure_left_with_one_gives_zero(name: str) -> None:
    rollouts = [*group([1.0], index=0), *group([0.0, 0.0], index=1)]
    assert scalars(name, rollouts) == [0.0, 0.0, 0.0]


def test_group_estimators_are_marked() -> None:
    alone = {"reinforce", "remax", "gae", "vapo", "token_reward"}
    assert set(Estimator.types) - GROUP_ESTIMATORS == alone


@pytest.mark.parametrize("name", sorted(set(GROUP_ESTIMATORS)))
def test_order_and_interleaving_of_groups_change_nothing(name: str) -> None:
    rng = np.random.default_rng(3)
    rollouts = [Outcome(i % 3, r, 1 + i % 4, {"r": r}) for i, r in enumerate(rng.normal(size=9))]
    straight = scalars(name, rollouts)
    order = rng.permutation(9)
    shuffled = scalars(name, [rollouts[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-12)


@pytest.mark.parametrize("name", UNWHITENED)
def test_advantages_of_a_group_sum_to_zero_in_their_own_weights(name: str) -> None:
    rollouts = group([0.3, 0.9, 0.1, 0.7], [5, 1, 2, 4])
    weights = [5, 1, 2, 4] if name == "opo" else [1, 1, 1, 1]
    total = sum(w * a for w, a in zip(weights, scalars(name, rollouts), strict=True))
    assert total == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", UNWHITENED)
def test_a_kl_penalty_counts_in_the_reward_before_the_baseline(name: str) -> None:
    penalised = [
        Outcome(0, 1.0, 2, token_rewards=np.array([-0.1, -0.1])),
        Outcome(0, 0.5, 2, token_rewards=np.array([0.0, -0.3])),
    ]
    assert scalars(name, penalised) == pytest.approx(scalars(name, group([0.8, 0.2])), abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(AssertionError, match="reached the estimator"):
        computed("grpo", group([0.0, bad]))


def test_values_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(AssertionError, match="one value per token"):
        computed("gae", [Outcome(0, 1.0, 3, values=np.zeros(2))])


@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), max_size=5), st.floats(0, 1))
def test_suffix_sums_against_a_loop(parts: list[list[float]], discount: float) -> None:
    found = suffix_sums([np.array(p, dtype=np.float64) for p in parts], [discount] * len(parts))
    assert len(found) == len(parts)
    for part, sums in zip(parts, found, strict=True):
        expected: list[float] = []
        for x in reversed(part):
            expected.append(x + discount * (expected[-1] if expected else 0.0))
        assert sums == pytest.approx(expected[::-1], abs=1e-9)


def test_whiten() -> None:
    white = np.concatenate(whiten([np.array([1.0, 2.0]), np.zeros(0), np.array([6.0])]))
    assert white.mean() == pytest.approx(0, abs=1e-12)
    assert white.std(ddof=1) == pytest.approx(1, abs=1e-5)
    assert whiten([]) == []
    assert [w.tolist() for w in whiten([np.array([3.0]), np.zeros(0)])] == [[0.0], []]


def test_empty_batch_and_rollouts_without_tokens() -> None:
    for name in Estimator.types:
        assert computed(name, []).advantages == []
    found = computed("opo", group([0, 1], [0, 0]))
    assert [a.tolist() for a in found.advantages] == [[], []]
