"""What a changed setting, or changed content of a file, does to a run that is continued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    Args:
        kind: ``record``: what is kept or shown; not mentioned. ``speed``: never changes what is
            learned; mentioned. ``content``: the name may change, as files may be moved; what it
            names is compared, see ``CONTENTS``. ``effect``: allowed; what happens from now on is
            told. ``refused``: the state in the checkpoint, or what was learned so far, belongs to
            the old value.
        keys: the settings; one that ends with a dot means all that begin with it and have no
            verdict of their own.
        effect: of the kind ``effect``: completes "from step N on, ...".
    """

    kind: Literal["record", "speed", "content", "effect", "refused"]
    keys: str
    effect: str = ""


SETTINGS = (
    Verdict("record", "run_dir monitor. checkpoint. lora.save_merged model.trust_remote_code"),
    Verdict("speed", "system."),
    Verdict(
        "speed",
        "reward.timeout reward.isolation reward.memory reward.max_failed_share "
        "reward.remote.urls reward.remote.batch_size reward.remote.token_env "
        "reward.remote.timeout reward.remote.retries environment.timeout environment.isolation "
        "environment.memory environment.host "
        "environment.concurrency rollout.timeout rollout.queue_size "
        "sampling.timeout dpo.precompute_reference kto.precompute_reference "
        "reward.remote.protocol reward.judge.url reward.judge.token_env reward.judge.concurrency "
        "reward.judge.requests_per_minute reward.judge.timeout reward.judge.retries "
        "reward.judge.deadline reward.judge.kv_memory",
    ),
    Verdict(
        "content",
        "model.path model.chat_template critic.path data.train data.train.path data.train.split "
        "data.train.subset data.train.options data.train.revision data.train.stream "
        "data.train.columns data.eval data.eval.path data.eval.split data.eval.subset "
        "data.eval.options data.eval.revision data.eval.stream data.eval.columns lora.path "
        "rft.few_shot data.map",
    ),
    Verdict("effect", "model.dtype", "it is computed in another number format"),
    Verdict(
        "effect",
        "model.router_aux_loss_coef model.router_bias_update_rate",
        "experts are balanced by the new setting",
    ),
    Verdict(
        "refused",
        "model.quantize model.vision_tower lora.rank lora.alpha lora.targets train.optimizer "
        "critic.shared_trunk "
        "data.prompt data.completion data.system_prompt data.chat data.chat_template_kwargs "
        "data.loss_on data.shuffle data.seed data.train.weight prm. distill.mode",
    ),
    Verdict(
        "effect",
        "data.max_prompt_tokens data.max_tokens data.too_long data.skip_bad",
        "lines are left out or cut by the new setting; it is refused if the number of lines "
        "differs",
    ),
    Verdict("effect", "data.curriculum", "prompts come up by the new rule"),
    Verdict("effect", "lora.dropout", "the adapter trains with the new dropout"),
    Verdict(
        "effect",
        "train.steps train.epochs",
        "the run goes on to its new end; a learning rate that falls jumps to where the new "
        "length has it",
    ),
    Verdict(
        "effect",
        "train.lr train.schedule train.min_lr_ratio train.warmup_steps train.warmup_ratio "
        "critic.lr critic.schedule critic.min_lr_ratio critic.warmup_steps",
        "the learning rate jumps to where the new settings have it at this step",
    ),
    Verdict(
        "effect",
        "train.batch_size train.passes_per_batch critic.passes_per_batch "
        "rollout.prompts_per_step rollout.group_size",
        "steps have the new size, which the learning rate and the noise of the gradient depend on",
    ),
    Verdict(
        "effect",
        "train.optimizer. train.weight_decay train.betas train.eps train.max_grad_norm "
        "critic.max_grad_norm train.ema_decay",
        "optimizer steps are made with the new value; moments and averages continue",
    ),
    Verdict(
        "effect",
        "train.seed rollout.seed sampling.seed",
        "random numbers differ from those of an uninterrupted run",
    ),
    Verdict(
        "effect",
        "eval.",
        "evaluations are made with the new setting, and may not compare with earlier ones",
    ),
    Verdict("record", "data.eval.weight"),
    Verdict(
        "effect",
        "reward.functions reward.weights reward.models reward.models. reward.remote "
        "reward.remote.name reward.remote.weight reward.judge reward.judge. reward.answer "
        "reward.pattern reward.tests reward.partial_credit",
        "rewards are given by the new setting, and do not compare with earlier ones",
    ),
    Verdict(
        "effect",
        "environment.path environment.column environment.tools environment.max_turns "
        "environment.max_tokens environment.bad_call environment.split_special_tokens "
        "environment.sandbox environment.sandbox. environment.command environment.folder "
        "environment.setup environment.verify",
        "episodes are played with the new setting",
    ),
    Verdict(
        "effect",
        "algorithm.",
        "the policy learns by the new setting; an adaptive KL coefficient (algorithm.kl.target) "
        "continues from its last value",
    ),
    Verdict(
        "effect",
        "critic.value_coef critic.value_clip critic.freeze_actor_steps",
        "the critic learns by the new setting",
    ),
    Verdict(
        "effect",
        "rollout.max_new_tokens rollout.temperature rollout.top_p rollout.top_k rollout.min_p "
        "rollout.repetition_penalty rollout.min_new_tokens rollout.stop rollout.stop_token_ids "
        "sampling.",
        "completions are sampled with the new setting",
    ),
    Verdict(
        "effect",
        "rollout.oversample rollout.max_staleness rollout.partial rollout.over_generation",
        "rollouts are scheduled by the new setting, so other groups reach a step, or older ones",
    ),
    Verdict(
        "effect",
        "rm.loss dpo.beta dpo.loss dpo.label_smoothing dpo.nll_coef kto.beta kto.desirable_weight "
        "kto.undesirable_weight distill.top_k distill.alpha",
        "the loss is the new one, and does not compare with earlier steps",
    ),
    Verdict(
        "effect",
        "teacher.path teacher.model teacher.prompt teacher.column",
        "it learns from the new teacher",
    ),
    Verdict("speed", "teacher.url teacher.token_env teacher.concurrency teacher.deadline"),
    Verdict(
        "effect",
        "output. rft.profile rft.few_shot_separator rft.select rft.threshold rft.rounds "
        "rft.sampler rft.answers rft.start",
        "work that is not done yet is done with the new setting; a file made with another one is "
        "refused by its name",
    ),
)
_BY_KEY = {key: verdict for verdict in SETTINGS for key in verdict.keys.split()}


@dataclass(frozen=True, slots=True)
class ContentVerdict:
    """``text`` completes "since the checkpoint, ..." if the change is refused, and else "from step
    N on, ..."."""

    key: str
    text: str
    refused: bool = False


CONTENTS: Mapping[str, ContentVerdict] = {
    "model": ContentVerdict("model.path", "the weights in {name} have changed", refused=True),
    "tokenizer": ContentVerdict("model.path", "the tokenizer in {name} has changed", refused=True),
    "chat_template": ContentVerdict(
        "model.chat_template", "the chat template has changed", refused=True
    ),
    "critic": ContentVerdict("critic.path", "the weights in {name} have changed", refused=True),
    "adapter": ContentVerdict("lora.path", "the adapter in {name} has changed", refused=True),
    "train": ContentVerdict("data.train", "the data set has changed", refused=True),
    "eval": ContentVerdict(
        "data.eval",
        "evaluations are of other lines, and do not compare with earlier ones: {name} has changed",
    ),
    "teacher": ContentVerdict(
        "teacher.path", "it learns from a teacher whose weights have changed: {name}"
    ),
    "reward": ContentVerdict(
        "reward.functions",
        "rewards are given by the new code, and do not compare with earlier ones: "
        "{name} has changed",
    ),
    "reward_models": ContentVerdict(
        "reward.models",
        "rewards are given by other weights, and do not compare with earlier ones: "
        "{name} has changed",
    ),
    "environment": ContentVerdict(
        "environment.path", "episodes are played by the new code: {name} has changed"
    ),
    "algorithm": ContentVerdict(
        "algorithm", "the policy learns by the new code: {name} has changed"
    ),
}
"""By the names that ``contents_of`` gives to what a run reads from files."""


def verdict_of(key: str) -> Verdict:
    """The verdict on a setting, or on the innermost table around it."""
    names = [key, *(f"{key[:end]}." for end in range(len(key) - 1, 0, -1) if key[end] == ".")]
    return _BY_KEY[next(name for name in names if name in _BY_KEY)]
