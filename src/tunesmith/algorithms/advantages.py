"""Advantage estimators: how much better each token did than expected. Plain NumPy.

An estimator takes the rollouts of a whole batch and returns one array per rollout with an advantage for
every token the policy wrote, in order. Tokens it did not write are not there: a tool's answer between two
turns is skipped by construction, so nothing bleeds across it.

A new estimator is one function with one ``@estimator`` line. Statistics of a group use the unbiased
deviation plus ``EPSILON``; a group of equal rewards gives exactly zero, found by comparing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tunesmith.algorithms.registry import Registry
from tunesmith.types import RolloutGroup

Floats = NDArray[np.float64]

EPSILON = 1e-6
"""Added to a deviation that is divided by. TRL adds 1e-4, OpenRLHF 1e-9, verl 1e-6."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rollout as an estimator sees it. ``n`` is ``length``, the number of tokens the policy wrote."""

    group: int
    """Rollouts of one task share a number."""
    reward: float
    """After shaping and clipping; paid at the last token."""
    length: int
    components: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Each reward by itself (``gdpo``); None where it does not apply."""
    token_rewards: Floats | None = None
    """``[n]``, paid on tokens beside ``reward``: per-turn rewards, minus the KL penalty."""
    values: Floats | None = None
    """``[n]``, the critic's value of the state each token was written in (``gae``, ``vapo``)."""
    final_value: float = 0.0
    """The critic's value after the last token: 0 where the episode ended there; with ``bootstrap_truncated``, the
    critic's where a limit cut it (arXiv:1712.00378). TRL, verl and OpenRLHF always take 0."""
    greedy_reward: float | None = None
    """Reward of the greedy rollout of the same task (``remax``)."""

    @property
    def total(self) -> float:
        """The reward of the whole rollout, whatever token it was paid on."""
        return self.reward + (0.0 if self.token_rewards is None else float(self.token_rewards.sum()))


@dataclass(frozen=True, slots=True)
class Advantages:
    """One array ``[n]`` per rollout; ``returns`` are what a critic is trained on."""

    advantages: list[Floats]
    returns: list[Floats] | None = None


@dataclass(frozen=True, slots=True)
class AdvantageParams:
    """Constants of the estimators; each reads only its own (``Entry.settings``)."""

    gamma: float = 1.0
    gae_lambda: float = 0.95
    critic_lambda: float | None = None
    """Of the returns the critic learns; None: as for the policy."""
    lambda_alpha: float = 0.05
    component_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of ``gdpo``'s rewards; one that is not named weighs 1."""


EstimatorFn = Callable[[Sequence[Outcome], AdvantageParams], Advantages]
ESTIMATORS: Registry[EstimatorFn] = Registry()
estimator = ESTIMATORS.register

GROUP = frozenset({"group"})
"""The estimator compares siblings, so a group has at least two."""
BOOTSTRAP: Mapping[str, bool] = {"bootstrap_truncated": False}
CRITIC, GREEDY, TEACHER = frozenset({"critic"}), frozenset({"greedy_rollout"}), frozenset({"teacher"})


def compute_advantages(name: str, outcomes: Sequence[Outcome], params: AdvantageParams | None = None) -> Advantages:
    """Advantages of a whole batch. Rewards are finite here: a reward that is not is a failed rollout."""
    for o in outcomes:
        assert np.isfinite(o.total), f"a reward of {o.total} reached the estimator"
        for values in (o.token_rewards, o.values):
            assert values is None or values.shape == (o.length,), "one value per token the policy wrote"
    return ESTIMATORS[name].fn(outcomes, params or AdvantageParams())


def outcomes(groups: Sequence[RolloutGroup]) -> list[Outcome]:
    """The usable rollouts of a batch, group by group, as estimators see them."""
    return [
        Outcome(index, float(r.reward), r.num_sampled, r.rewards)
        for index, group in enumerate(groups)
        for r in group.usable
        if r.reward is not None
    ]


def spread(values: Floats, written: Sequence[bool]) -> list[float]:
    """Per-token values ``[n]`` at the places the policy wrote, zero elsewhere: a column ``[L]``.

    Example:
        >>> spread(np.array([0.5, 0.25]), [False, True, False, True])
        [0.0, 0.5, 0.0, 0.25]
    """
    column = np.zeros(len(written))
    column[np.array(written, dtype=np.bool_)] = values
    return column.tolist()


def whiten(parts: Sequence[Floats]) -> list[Floats]:
    """All values of the batch to mean 0 and deviation 1; exactly 0 where they are all equal.

    Unbiased deviation plus ``EPSILON`` (verl: ``sqrt(var + 1e-8)``, OpenRLHF: the biased deviation).
    """
    flat = _flat(parts)
    if _equal(flat):
        return [np.zeros_like(p) for p in parts]
    mean, deviation = flat.mean(), flat.std(ddof=1)
    return [(p - mean) / (deviation + EPSILON) for p in parts]


def suffix_sums(parts: Sequence[Floats], discounts: Sequence[float]) -> list[Floats]:
    """``s[t] = x[t] + discount · s[t + 1]`` within each part.

    All parts advance together, one token per step from their ends, so the Python loop is as long as the
    longest rollout and not as the batch.
    """
    lengths = np.array([p.size for p in parts], dtype=np.int64)
    ends = np.cumsum(lengths)
    flat = _flat(parts)
    order = np.argsort(-lengths, kind="stable")
    discount = np.array(discounts, dtype=np.float64)[order]
    for step in range(1, int(lengths.max(initial=0))):
        active = int((lengths > step).sum())
        rows = ends[order[:active]] - 1 - step
        flat[rows] += discount[:active] * flat[rows + 1]
    return np.split(flat, ends[:-1]) if len(parts) else []


def _flat(parts: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def _equal(values: Floats) -> bool:
    return bool(np.all(values == values[:1]))


def _by_group(outcomes: Sequence[Outcome]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        groups.setdefault(outcome.group, []).append(place)
    return list(groups.values())


Relative = Callable[[Floats, Floats], Floats]
"""``(rewards, lengths) -> advantages`` of the rollouts of one group, in which not all rewards are equal."""


def _per_group(outcomes: Sequence[Outcome], rewards: Sequence[float | None], relative: Relative) -> Floats:
    """``relative`` within each group; exactly zero for equal rewards (or one rollout), and where there is none."""
    found = np.zeros(len(outcomes))
    for places in _by_group(outcomes):
        given = {i: reward for i in places if (reward := rewards[i]) is not None}
        values = np.array(list(given.values()), dtype=np.float64)
        if not _equal(values):
            found[list(given)] = relative(values, np.array([outcomes[i].length for i in given], dtype=np.float64))
    return found


def _broadcast(outcomes: Sequence[Outcome], scalars: Sequence[float] | Floats) -> list[Floats]:
    return [np.full(o.length, s) for o, s in zip(outcomes, scalars, strict=True)]


def _of_groups(relative: Relative) -> EstimatorFn:
    """The estimator that gives every token of a rollout what ``relative`` makes of its whole reward."""

    @functools.wraps(relative)
    def estimate(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:  # noqa: ARG001
        return Advantages(_broadcast(outcomes, _per_group(outcomes, [o.total for o in outcomes], relative)))

    return estimate


def _paid(outcomes: Sequence[Outcome], final: Sequence[float] | Floats) -> list[Floats]:
    """Reward per token: ``token_rewards``, and ``final`` at the last token."""
    paid: list[Floats] = []
    for o, reward in zip(outcomes, final, strict=True):
        tokens = np.zeros(o.length) if o.token_rewards is None else o.token_rewards.astype(np.float64)
        tokens[-1:] += reward
        paid.append(tokens)
    return paid


def _returns_to_go(outcomes: Sequence[Outcome], final: Sequence[float] | Floats, gamma: float) -> Advantages:
    return Advantages(whiten(suffix_sums(_paid(outcomes, final), [gamma] * len(outcomes))))


def _standardised(rewards: Floats, lengths: Floats) -> Floats:  # noqa: ARG001
    """With the unbiased deviation, as TRL, verl and OpenRLHF compute it."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def _centred(rewards: Floats, lengths: Floats) -> Floats:  # noqa: ARG001
    """Not divided by the deviation, which favours tasks that are nearly always or never solved."""
    return rewards - rewards.mean()


estimator("grpo", "(r − mean) / (std + 1e-6)", "DeepSeekMath, arXiv:2402.03300", needs=GROUP)(_of_groups(_standardised))
estimator("dr_grpo", "r − mean", "Dr. GRPO, arXiv:2503.20783", needs=GROUP)(_of_groups(_centred))


@estimator("rloo", "r − mean of the others", "RLOO, arXiv:2402.14740", needs=GROUP)
@_of_groups
def rloo(rewards: Floats, lengths: Floats) -> Floats:  # noqa: ARG001
    """Leave one out, computed as ``n/(n − 1)·(r − mean)``."""
    return rewards.size / (rewards.size - 1) * (rewards - rewards.mean())


@estimator("opo", "r − Σ|y|r / Σ|y|", "OPO, arXiv:2505.23585", needs=GROUP)
@_of_groups
def opo(rewards: Floats, lengths: Floats) -> Floats:
    """The baseline of least variance: the group's mean reward weighted by length."""
    return rewards - np.average(rewards, weights=lengths if lengths.any() else np.ones_like(lengths))


@estimator("gpg", "(groups / groups with spread) · (r − mean)", "GPG, arXiv:2504.02546", needs=GROUP)
def gpg(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:
    """Centred, and scaled up for the groups that teach nothing because their rewards are equal.

    verl counts rollouts with a non-zero reward where the paper counts groups; this is the paper's.
    """
    groups = _by_group(outcomes)
    spread_out = sum(not _equal(np.array([outcomes[i].total for i in places])) for places in groups)
    scale = len(groups) / max(spread_out, 1)
    return Advantages([scale * a for a in _of_groups(_centred)(outcomes, params).advantages])


@estimator(
    "gdpo",
    "whiten(Σ_k w_k (r_k − mean_k) / (std_k + 1e-6))",
    "GDPO, arXiv:2601.05242",
    needs=GROUP | {"reward_weights"},
)
def gdpo(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:
    """Each reward standardised by itself, then summed and whitened over the batch's policy tokens.

    A component that does not apply (None) adds nothing and stands outside its group's statistics.
    Whitening over tokens as in verl; TRL whitens over sequences.
    """
    assert all(o.components for o in outcomes), "gdpo takes the rewards one by one"
    scalars = np.zeros(len(outcomes))
    for name in dict.fromkeys(name for o in outcomes for name in o.components):
        relative = _per_group(outcomes, [o.components.get(name) for o in outcomes], _standardised)
        scalars += params.component_weights.get(name, 1.0) * relative
    return Advantages(whiten(_broadcast(outcomes, scalars)))


@estimator("reinforce", "whiten(Σ_{k≥t} γ^{k−t} r_k)", "REINFORCE++, arXiv:2501.03262", keys={"gamma": 1.0})
def reinforce(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:
    """Return to go of the final reward and the rewards on tokens, whitened over the batch."""
    return _returns_to_go(outcomes, [o.reward for o in outcomes], params.gamma)


@estimator(
    "reinforce_baseline",
    "whiten(r − mean, minus the KL to go)",
    "REINFORCE++-baseline, arXiv:2501.03262",
    needs=GROUP,
)
def reinforce_baseline(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:  # noqa: ARG001
    """Centred within the group, then whitened over the batch.

    Rewards on tokens (the KL penalty) are added after the baseline, as return to go with γ = 1, as in
    OpenRLHF.
    """
    return _returns_to_go(outcomes, _per_group(outcomes, [o.reward for o in outcomes], _centred), 1.0)


@estimator("remax", "r − r(greedy rollout)", "ReMax, arXiv:2310.10505", needs=GREEDY)
def remax(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:  # noqa: ARG001
    """Against what the same policy earns when it decodes greedily."""
    scalars: list[float] = []
    for o in outcomes:
        assert o.greedy_reward is not None, "remax compares with the reward of a greedy rollout"
        scalars.append(o.total - o.greedy_reward)
    return Advantages(_broadcast(outcomes, scalars))


@estimator(
    "gae",
    "whiten(Σ_k (γλ)^k δ_{t+k}), δ_t = r_t + γV_{t+1} − V_t",
    "GAE, arXiv:1506.02438",
    keys={"gamma": 1.0, "gae_lambda": 0.95, "critic_lambda": None, "value_clip": 0.5, **BOOTSTRAP},
    needs=CRITIC,
)
def gae(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:
    """Generalised advantages, whitened; the critic's returns are not whitened.

    ``critic_lambda`` gives the critic returns of its own (decoupled GAE, VC-PPO, arXiv:2503.01491).
    """
    critic = params.gae_lambda if params.critic_lambda is None else params.critic_lambda
    found = _generalised(outcomes, params.gamma, [params.gae_lambda] * len(outcomes), critic)
    return Advantages(whiten(found.advantages), found.returns)


@estimator(
    "vapo",
    "GAE with λ = 1 − 1/(α|y| + 1) for the policy and 1 for the critic",
    "VAPO, arXiv:2504.05118",
    keys={"gamma": 1.0, "lambda_alpha": 0.05, "value_clip": 0.5, **BOOTSTRAP},
    needs=CRITIC,
)
def vapo(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:
    """Length-adaptive λ: the reward reaches the first token of a long rollout undiminished. Not whitened.

    The paper writes λ = 1 − 1/(α|y|), which is negative for |y| < 20; the one added to the denominator
    keeps it in (0, 1).
    """
    lambdas = [1.0 - 1.0 / (params.lambda_alpha * o.length + 1.0) for o in outcomes]
    return _generalised(outcomes, params.gamma, lambdas, 1.0)


def _generalised(
    outcomes: Sequence[Outcome], gamma: float, lambdas: Sequence[float], critic_lambda: float
) -> Advantages:
    """``Σ_k (γλ)^k δ_{t+k}`` with each rollout's λ; the returns are those with ``critic_lambda`` plus the values."""
    deltas: list[Floats] = []
    values: list[Floats] = []
    for o, paid in zip(outcomes, _paid(outcomes, [o.reward for o in outcomes]), strict=True):
        assert o.values is not None, "generalised advantages need a critic's values"
        following = np.append(o.values, o.final_value)[1:]
        deltas.append(paid + gamma * following - o.values)
        values.append(o.values)
    returns = suffix_sums(deltas, [gamma * critic_lambda] * len(deltas))
    advantages = suffix_sums(deltas, [gamma * lam for lam in lambdas])
    return Advantages(advantages, [a + v for a, v in zip(returns, values, strict=True)])


@estimator("token_reward", "r_t − mean(r)", "on-policy distillation, Thinking Machines 2025", needs=TEACHER)
def token_reward(outcomes: Sequence[Outcome], params: AdvantageParams) -> Advantages:  # noqa: ARG001
    """What is paid on each token, less the batch's mean: with the KL to a teacher in the reward, logπ_T − logπ.

    No return: a token's own difference is the gradient of the reverse KL at that token. The rollout's reward is not
    read. Subtracting the mean leaves the expected gradient unchanged and removes most of its noise.
    """
    paid = _paid(outcomes, [0.0] * len(outcomes))
    every = _flat(paid)
    return Advantages([0.0 * r if _equal(every) else r - every.mean() for r in paid])
