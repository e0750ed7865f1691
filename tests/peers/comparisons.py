"""What is compared with whom, and every deliberate difference with its reason. No peer is needed to
read it.

``docs/peers.md`` is made from this file: ``python -m tests.peers.comparisons`` writes its tables
anew. Each entry names the test that proves it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "peers.md"
REQUIREMENTS = (Path(__file__).parent / "peers.txt", Path(__file__).parent / "requirements.txt")
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Comparison:
    """``ours`` are names of one kind: ``advantage``, ``loss``, ``aggregation``, ``correction``,
    ``kl`` or another."""

    kind: str
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    """``peer: function``."""
    test: str


@dataclass(frozen=True, slots=True)
class Difference:
    what: str
    peer: str
    theirs: str
    ours: str
    reason: str
    test: str


AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)

COMPARISONS = (
    Comparison(
        "advantage",
        ("grpo",),
        ("verl: compute_grpo_outcome_advantage", "verl: compute_grpo_vectorized_outcome_advantage"),
        "agree_grpo",
    ),
    Comparison(
        "advantage", ("dr_grpo",), ("verl: compute_grpo_outcome_advantage",), "agree_dr_grpo"
    ),
    Comparison(
        "advantage",
        ("rloo",),
        ("verl: compute_rloo_outcome_advantage", "verl: compute_rloo_vectorized_outcome_advantage"),
        "agree_rloo",
    ),
    Comparison("advantage", ("opo",), ("verl: compute_opo_outcome_advantage",), "agree_opo"),
    Comparison("advantage", ("gdpo",), ("verl: compute_gdpo_outcome_advantage",), "agree_gdpo"),
    Comparison(
        "advantage",
        ("reinforce",),
        ("verl: compute_reinforce_plus_plus_outcome_advantage",),
        "agree_reinforce",
    ),
    Comparison(
        "advantage",
        ("reinforce",),
        (
            "OpenRLHF: compute_approx_kl, compute_reward",
            "verl: compute_reinforce_plus_plus_outcome_advantage",
        ),
        "agree_reinforce_with_kl_in_the_reward",
    ),
    Comparison(
        "advantage",
        ("reinforce_baseline",),
        ("verl: compute_reinforce_plus_plus_baseline_outcome_advantage",),
        "agree_reinforce_baseline",
    ),
    Comparison("advantage", ("remax",), ("verl: compute_remax_outcome_advantage",), "agree_remax"),
    Comparison("advantage", ("gae",), ("verl: compute_gae_advantage_return",), "agree_gae"),
    Comparison("advantage", ("vapo",), ("verl: compute_gae_advantage_return",), "agree_vapo"),
    Comparison("advantage", ("gpg",), ("verl: compute_gpg_outcome_advantage",), "differ_gpg_scale"),
    Comparison("aggregation", AGGREGATIONS, ("verl: agg_loss",), "agree_ppo_verl"),
    Comparison(
        "aggregation", AGGREGATIONS[:2], ("OpenRLHF: aggregate_loss",), "agree_ppo_openrlhf"
    ),
    Comparison("loss", ("ppo",), ("verl: compute_policy_loss_vanilla",), "agree_ppo_verl"),
    Comparison(
        "loss", ("ppo, dual clip",), ("verl: compute_policy_loss_vanilla",), "agree_dual_clip_verl"
    ),
    Comparison("loss", ("ppo", "ppo, dual clip"), ("OpenRLHF: PolicyLoss",), "agree_ppo_openrlhf"),
    Comparison(
        "loss",
        ("ppo", "ppo with a KL"),
        ("TRL: GRPOTrainer._compute_loss (grpo, bnpo, dapo, dr_grpo)",),
        "agree_ppo_trl",
    ),
    Comparison(
        "loss",
        ("gspo",),
        (
            "OpenRLHF: PolicyLoss",
            "TRL: GRPOTrainer._compute_loss",
            "verl: compute_policy_loss_gspo",
        ),
        "agree_gspo",
    ),
    Comparison("loss", ("gspo_token",), ("verl: compute_policy_loss_gspo",), "agree_gspo_token"),
    Comparison(
        "loss",
        ("cispo",),
        ("verl: compute_policy_loss_cispo", "TRL: GRPOTrainer._compute_loss"),
        "agree_cispo",
    ),
    Comparison(
        "loss",
        ("sapo",),
        ("verl: compute_policy_loss_sapo", "TRL: GRPOTrainer._compute_loss"),
        "agree_sapo",
    ),
    Comparison("loss", ("gmpo",), ("verl: compute_policy_loss_geo_mean",), "agree_gmpo"),
    Comparison(
        "loss", ("gpg", "reinforce"), ("verl: compute_policy_loss_gpg",), "agree_policy_gradient"
    ),
    Comparison("loss", ("dppo_tv",), ("verl: compute_policy_loss_dppo_tv",), "agree_dppo_tv"),
    Comparison("loss", ("clip_cov",), ("verl: compute_policy_loss_clip_cov",), "agree_clip_cov"),
    Comparison("loss", ("kl_cov",), ("verl: compute_policy_loss_kl_cov",), "agree_kl_cov"),
    Comparison(
        "kl",
        ("k1", "k2", "k3", "k1+", "k3+"),
        ("verl: kl_penalty", "OpenRLHF: compute_approx_kl"),
        "agree_kl",
    ),
    Comparison(
        "kl",
        ("adaptive controller",),
        ("verl: AdaptiveKLController", "OpenRLHF: AdaptiveKLController"),
        "agree_adaptive_controller",
    ),
    Comparison(
        "correction",
        ("token_truncate", "icepop", "sequence_truncate"),
        ("verl: compute_rollout_correction_weights",),
        "agree_correction_verl",
    ),
    Comparison(
        "correction",
        ("token_clamp", "icepop"),
        ("OpenRLHF: PolicyLoss",),
        "agree_correction_openrlhf",
    ),
    Comparison(
        "correction", ("geometric",), ("verl: compute_rollout_rejection_mask",), "agree_geometric"
    ),
    Comparison(
        "correction", ("sequence_mask",), ("OpenRLHF: PolicyLoss",), "differ_sequence_mask_clips"
    ),
    Comparison("critic", ("value loss",), ("verl: compute_value_loss",), "agree_value_loss_verl"),
    Comparison("critic", ("value loss",), ("OpenRLHF: ValueLoss",), "agree_value_loss_openrlhf"),
    Comparison("sft", ("negative log-likelihood",), ("OpenRLHF: SFTLoss",), "agree_sft"),
    Comparison("entropy", ("bonus",), ("TRL: GRPOTrainer._compute_loss",), "agree_entropy_bonus"),
    Comparison(
        "head",
        ("log-probability and entropy",),
        (
            "TRL: selective_log_softmax, entropy_from_logits",
            "verl: logprobs_from_logits, entropy_from_logits",
            "OpenRLHF: log_probs_from_logits",
        ),
        "agree_logprobs_and_entropy",
    ),
    Comparison(
        "dpo", ("sigmoid", "sigmoid, label smoothing"), ("OpenRLHF: DPOLoss",), "agree_dpo_openrlhf"
    ),
    Comparison("dpo", ("ipo",), ("OpenRLHF: DPOLoss",), "agree_ipo_openrlhf"),
    Comparison("dpo", ("sigmoid", "hinge"), ("TRL: DPOTrainer._compute_loss",), "agree_dpo_trl"),
    Comparison("kto", ("kto",), ("TRL: KTOTrainer._compute_loss",), "agree_kto"),
    Comparison(
        "reward model",
        ("sigmoid with a margin",),
        ("TRL: RewardTrainer.compute_loss", "OpenRLHF: PairWiseLoss"),
        "agree_reward_model",
    ),
    Comparison("reward model", ("logexp",), ("OpenRLHF: LogExpLoss",), "agree_reward_model_logexp"),
    Comparison(
        "shaping",
        ("overlong_penalty",),
        ("OpenRLHF: apply_overlong_penalty",),
        "agree_overlong_penalty",
    ),
    Comparison(
        "shaping",
        ("stop_properly",),
        ("OpenRLHF: apply_stop_properly_penalty",),
        "agree_stop_properly",
    ),
)

DIFFERENCES = (
    Difference(
        "equal rewards in a group",
        "verl",
        "subtracts the mean and divides by 1e-6",
        "exactly zero, found by comparing",
        (
            "the mean of equal floats is not their value; the residue divided by 1e-6 becomes an "
            "advantage"
        ),
        "differ_equal_rewards",
    ),
    Difference(
        "a group of one",
        "verl",
        "the reward itself is the advantage",
        "zero, and settings refuse it",
        "without siblings there is nothing to compare with, and a raw reward is on another scale",
        "differ_group_of_one",
    ),
    Difference(
        "whitening",
        "verl",
        "divides by sqrt(var + 1e-8)",
        "divides by std + 1e-6",
        "one constant for every deviation that is divided by; at a deviation near 1 they agree",
        "differ_whitening_of_a_small_spread",
    ),
    Difference(
        "`gpg` scale",
        "verl",
        "rollouts / rollouts with a reward that is not zero",
        "groups / groups with spread",
        "the paper's α; a group that is always right teaches as little as one that is never right",
        "differ_gpg_scale",
    ),
    Difference(
        "`reinforce_baseline` with a KL in the reward",
        "verl",
        "the baseline is taken of the reward with its KL",
        "the baseline is taken of the reward, each token's KL to go is added after it",
        "a sibling's KL is no news about this rollout; so does OpenRLHF",
        "differ_baseline_of_token_rewards",
    ),
    Difference(
        "`remax` with a KL in the reward",
        "verl",
        "what is still to come, token by token, less the baseline",
        "the whole reward less the baseline, the same for all tokens",
        (
            "the baseline is the greedy rollout's whole reward; a part of a reward is not "
            "comparable with it"
        ),
        "differ_remax_of_token_rewards",
    ),
    Difference(
        "`gae`, `vapo` with `bootstrap_truncated`",
        "verl",
        (
            "the value after the last token is 0, wherever it ended; so in TRL and OpenRLHF, and "
            "here without the key"
        ),
        "it is the critic's (`final_value`) where a limit cut",
        "an episode that is paid on its way did not end where its limit cut it",
        "differ_gae_bootstrap",
    ),
    Difference(
        "log-ratio",
        "TRL",
        "is exponentiated as it is",
        "is clamped to ±20 first, as in verl and OpenRLHF",
        "one token whose probability was tiny would make the step infinite",
        "differ_log_ratio_is_clamped",
    ),
    Difference(
        "a token with a non-finite input",
        "verl, TRL",
        "makes the loss NaN",
        "leaves the numerator and the denominators",
        "one bad log-probability should cost one token and be counted, not the run",
        "differ_non_finite_token",
    ),
    Difference(
        "a sequence without loss tokens",
        "TRL",
        "counts in the mean over sequences",
        "does not count, as in verl and OpenRLHF",
        "masking a truncated rollout would otherwise make its siblings' step smaller",
        "differ_rows_without_policy_tokens",
    ),
    Difference(
        "mean over tokens",
        "TRL",
        "`bnpo` is a mean of each micro-batch's own mean",
        "one mean over the optimizer batch",
        "the step must not depend on how the batch was cut",
        "differ_mean_of_micro_batches",
    ),
    Difference(
        "`gspo` with an advantage per token",
        "verl",
        "is the token form",
        "takes the sequence's mean advantage; the token form is `gspo_token`",
        "the paper defines two losses; each has its own name",
        "differ_gspo_of_advantages_per_token",
    ),
    Difference(
        "`gmpo` with an advantage per token",
        "verl",
        "clips each token by the sign of its own advantage",
        "clips by the sign of the sequence's mean advantage",
        (
            "the loss is one ratio and one advantage per sequence; what is clipped has to hold "
            "that product back"
        ),
        "differ_gmpo_of_advantages_per_token",
    ),
    Difference(
        "`gmpo` with a correction",
        "verl",
        "weighs a sequence by the geometric mean of its tokens' weights",
        "weighs each token's share of the loss by its own weight",
        "a correction is a column that multiplies every loss alike; no loss has one of its own",
        "differ_correction_of_gmpo",
    ),
    Difference(
        "`clip_cov`, `kl_cov`: the choice of tokens",
        "verl",
        "from the current log-probabilities of each micro-batch, clipped tokens left out",
        "once, from the old log-probabilities of the whole rollout batch",
        "the step must not depend on how the batch was cut",
        "differ_choice_by_covariance",
    ),
    Difference(
        "KL in the loss",
        "TRL",
        "multiplies k3 by the ratio (`use_bias_correction_kl`, on by default)",
        "no weight; `k3+` has the same value and gradient on policy",
        (
            "the estimator is the one that is named; a weight without bound multiplies what should "
            "hold back"
        ),
        "differ_weight_of_the_kl_in_the_loss",
    ),
    Difference(
        "KL far from the reference",
        "verl, OpenRLHF",
        "verl does not bound k1 and k2; OpenRLHF's bound of ±10 also stops the gradient",
        "values within ±10, the gradient of k2 passes",
        "a token far from the reference is the last one to stop pulling back",
        "differ_kl_far_from_the_reference",
    ),
    Difference(
        "bounds of the rejection by mean",
        "verl",
        "are on exp(−mean log w)",
        "are on exp(mean log w)",
        "the weight is what multiplies the loss; one kind of bound for all corrections",
        "differ_bounds_on_the_weight",
    ),
    Difference(
        "rejected tokens",
        "verl",
        "leave the mask and with it the denominators",
        "weigh zero and stay in the denominators, as in OpenRLHF",
        (
            "rejecting more makes the step smaller, not the rest louder; denominators are known "
            "beforehand"
        ),
        "differ_denominator_of_rejected_tokens",
    ),
    Difference(
        "`sequence_mask`",
        "OpenRLHF",
        "keeps the token weights of a kept sequence as they are",
        "clips them to the bounds as well",
        "a sequence with a mean inside the bounds can hold a token far outside",
        "differ_sequence_mask_clips",
    ),
    Difference(
        "entropy bonus",
        "TRL",
        "is a mean over tokens, whatever the loss's aggregation",
        "is averaged as the loss beside it; the same with `token_mean`",
        "one weight per token for the whole objective, so that micro-batches add up",
        "differ_entropy_bonus",
    ),
    Difference(
        "`ipo`",
        "TRL",
        "divides each sequence's log-ratio by its length",
        "sums of log-probabilities, as in the paper and in OpenRLHF",
        "the regression target 1/(2β) is derived for the log-ratio of whole sequences",
        "differ_ipo_of_means",
    ),
    Difference(
        "likelihood beside DPO",
        "TRL",
        "`sft` is a mean over all chosen tokens",
        "each chosen sequence's own mean, then the mean over pairs (arXiv:2404.19733)",
        "every pair has one weight in the whole loss",
        "differ_likelihood_beside_dpo",
    ),
)

NOT_COMPARED: Mapping[str, str] = {
    "advantage token_reward": "what is paid on a token is its advantage: nothing is computed",
    "loss gepo": "no peer has it",
}
"""What stands in our registries and in no comparison, and why."""


def agreements() -> str:
    rows = [
        (
            c.kind,
            ", ".join(f"`{o}`" if re.fullmatch(r"[\w+]+", o) else o for o in c.ours),
            _peers(c.peers),
            f"`{c.test}`",
        )
        for c in COMPARISONS
    ]
    return _table(("kind", "ours", "compared with", "test"), rows)


def differences() -> str:
    rows = [(d.what, d.peer, d.theirs, d.ours, d.reason, f"`{d.test}`") for d in DIFFERENCES]
    return _table(("what", "peer", "theirs", "ours", "why", "test"), rows)


def not_compared() -> str:
    return _table(("ours", "why"), [(f"`{name}`", why) for name, why in NOT_COMPARED.items()])


TABLES: Mapping[str, Callable[[], str]] = {
    made.__name__: made for made in (agreements, differences, not_compared)
}


def with_tables(text: str) -> str:
    """The page with every table as this file has it now."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def versions() -> dict[str, str]:
    """The version of each peer that is installed, by the name it is installed under."""
    pins = "\n".join(path.read_text(encoding="utf-8") for path in REQUIREMENTS)
    found = dict(re.findall(r"^([\w-]+)==([\w.]+)$", pins, re.MULTILINE))
    return {name: found[name] for name in ("trl", "verl", "openrlhf")}


def _peers(functions: Sequence[str]) -> str:
    parts = (function.partition(": ") for function in functions)
    return "; ".join(f"{peer} `{names}`" for peer, _, names in parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
