"""verl's policy losses as a loss and a gradient."""

from __future__ import annotations

from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from tests.peers.cases import MAX_NEW_TOKENS, Case, Graded, grade

AGGREGATIONS = {
    "token_mean": "token-mean",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
"""Our name of an aggregation and verl's."""

NO_DUAL_CLIP = 1e9


def actor_config(*, policy_loss: dict[str, float] | None = None, **settings: float) -> ActorConfig:
    """verl's settings of the actor; its dual clip is on by default and off here."""
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        global_batch_info={"loss_scale_factor": MAX_NEW_TOKENS},
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **{"clip_ratio_c": NO_DUAL_CLIP, **settings},
    )


def verl_loss(
    name: str,
    case: Case,
    aggregation: str = "token_mean",
    *,
    correction: Tensor | None = None,
    mask: Tensor | None = None,
    policy_loss: dict[str, float] | None = None,
    **settings: float,
) -> Graded:
    """The registered loss of that name over the whole batch."""
    leaf = case.logprobs.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=case["old_logprobs"],
        log_prob=leaf,
        advantages=case["advantages"],
        response_mask=case.mask if mask is None else mask,
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=actor_config(policy_loss=policy_loss, **settings),
        rollout_is_weights=correction,
    )
    return grade(loss, leaf)
