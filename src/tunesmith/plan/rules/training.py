"""Rules about the length of training, the model, lengths of sequences, evaluation and
preferences."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.commands import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.rules.rule import rule, unread
from tunesmith.plan.rules.situation import Situation, at_least, more

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off

ROUTER_BIAS = "model.router_bias_update_rate"
ROUTERS = f"model.router_aux_loss_coef {ROUTER_BIAS}"


@rule(RunConfig)
def length_of_training(s: Situation[RunConfig]) -> Iterator[Problem]:
    train = s.config.train
    if train.steps is not None and train.epochs is not None:
        yield Problem(("train.steps", "train.epochs"),
            "train.steps and train.epochs both set the length of training; leave one out")
    if train.warmup_steps is not None and train.warmup_ratio is not None:
        yield Problem(("train.warmup_steps", "train.warmup_ratio"),
            "train.warmup_steps and train.warmup_ratio both set the warm-up; leave one out")
    if more(s.training.warmup, s.optimizer_steps):
        yield s.clash("train.warmup_steps",
            f"is longer than the run of {s.optimizer_steps} optimizer steps, so train.lr would "
            f"never be reached. Use at most {s.optimizer_steps}, or train.warmup_ratio",
            "train.steps")


@rule(RunConfig)
def recorded_steps(s: Situation[RunConfig]) -> Iterator[Problem]:
    monitor = s.config.monitor
    for name, steps in (("trace", monitor.trace_steps), ("profile", monitor.profile_steps)):
        if more(max(steps, default=0), s.steps):
            yield s.clash(f"monitor.{name}_steps",
                f": the run ends after step {s.steps}; name earlier steps", "train.steps")


@rule(RunConfig)
def run_to_resume(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.checkpoint.resume in (True, "auto") and s.config.run_dir is None:
        why = "needs to know which run to continue: set run_dir, the same each time"
        yield s.clash("checkpoint.resume", why)


@rule(RunConfig)
def balanced_experts(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.model.router_bias_update_rate and s.config.lora.on:
        yield s.clash(ROUTER_BIAS,
            "moves biases of the base, which are not part of an adapter's files; use "
            "model.router_aux_loss_coef", "lora.rank", "lora.path")


@rule(RunConfig)
def adapter(s: Situation[RunConfig]) -> Iterator[Problem]:
    config = s.config
    if config.model.quantize and config.trains and not config.lora.on:
        yield s.clash("model.quantize",
            "keeps the weights in a form that cannot be trained; train an adapter on them: set "
            "lora.rank, such as 16")
    if config.train.optimizer.name == "muon" and config.lora.on:
        yield s.clash("train.optimizer",
            "orthogonalises the updates of whole weight matrices, and an adapter has only their "
            "factors; leave one of the two out", "lora.rank", "lora.path")
    if config.lora.targets == ():
        yield Problem(("lora.targets",),
            "lora.targets is empty; leave it out to adapt all linear modules")
    if config.lora.dropout and config.rl:
        yield s.clash("lora.dropout",
            ": reinforcement learning needs the log-probabilities that the tokens were sampled "
            "with, and dropout would change them; leave it out")


@rule(RunConfig)
def length_of_completions(s: Situation[RunConfig]) -> Iterator[Problem]:
    sampling = s.config.sampling_settings
    if sampling is None:
        return
    key = f"{sampling.table}.max_new_tokens"
    new = sampling.max_new_tokens
    context = s.context
    prompt = s.lengths.prompt
    if sampling.min_new_tokens > new:
        least = f"{sampling.table}.min_new_tokens"
        yield s.clash(least, f"is more than {s.said(key)}; lower it", key)
    if at_least(new, context):
        yield s.clash(key, f"leaves no room in the model's context of {context}; lower it")
    elif context and prompt and prompt + new > context:
        yield s.clash("data.max_prompt_tokens",
            f"and {s.said(key)} together are longer than the model's context of {context}; lower "
            f"data.max_prompt_tokens to {context - new}, or leave it out", key)


@rule(RLConfig)
def longest_prompt(s: Situation[RLConfig]) -> Iterator[Problem]:
    new = s.config.rollout.max_new_tokens
    limit = s.lengths.prompt
    if more(s.longest, limit) and not at_least(new, s.context):
        yield Problem(("data.max_prompt_tokens", "rollout.max_new_tokens", "data.too_long"),
            f"the longest prompt has {s.longest} tokens, and {limit} are allowed "
            "(data.max_prompt_tokens); shorten it, lower rollout.max_new_tokens, or choose what "
            "happens with data.too_long")


@rule(RunConfig)
def length_of_samples(s: Situation[RunConfig]) -> Iterator[Problem]:
    limit = s.lengths.sample
    cap = s.system.max_tokens_per_microbatch
    if more(s.longest, limit) and not s.config.rl:
        yield Problem(("data.max_tokens", "data.too_long"),
            f"the longest sample has {s.longest} tokens, and {limit} are allowed "
            "(data.max_tokens); choose what happens with data.too_long")
    if more(limit, s.context) and not s.config.samples:
        yield s.clash("data.max_tokens",
            f"is longer than the model's context of {s.context}; lower it, or leave it out")
    if s.config.supervised and more(limit, cap) and not at_least(cap, s.longest):
        yield s.clash("system.max_tokens_per_microbatch",
            f"is a hard cap, and {s.said('data.max_tokens')} lets longer samples in; make them "
            "equal",
            "data.max_tokens")


@rule(RunConfig)
def samples_fit_each_pass(s: Situation[RunConfig]) -> Iterator[Problem]:
    tokens, what = s.together
    for name, cap in (
        ("max_tokens_per_microbatch", s.system.max_tokens_per_microbatch),
        ("scoring_max_tokens", s.system.scoring_max_tokens),
        ("critic_max_tokens", s.system.critic_max_tokens),
    ):
        if more(tokens, cap):
            yield s.clash(f"system.{name}",
                f"is a hard cap, and {what}; raise it to at least {tokens}")


@rule(RunConfig)
def evaluation(s: Situation[RunConfig]) -> Iterator[Problem]:
    section = s.config.eval
    if s.config.data.eval is None:
        return
    if section.use_ema and s.config.train.ema_decay is None:
        yield s.clash("eval.use_ema",
            "evaluates an average of the weights: set train.ema_decay, such as 0.999, or leave it "
            "out")
    if 1 < section.samples < max(section.pass_at or (), default=0):
        yield s.clash("eval.pass_at",
            f"needs more samples per prompt than {s.said('eval.samples')}", "eval.samples")


@rule(KTOConfig)
def weights_of_judgements(s: Situation[KTOConfig]) -> Iterator[Problem]:
    if s.config.kto.desirable_weight == s.config.kto.undesirable_weight == 0:
        yield Problem(("kto.desirable_weight", "kto.undesirable_weight"),
            "kto.desirable_weight and kto.undesirable_weight are both 0, so nothing would be "
            "learned; raise one")


@rule(PRMConfig)
def labels_of_steps(s: Situation[PRMConfig]) -> Iterator[Problem]:
    if s.config.prm.good == s.config.prm.bad:
        why = "and prm.bad are equal; good and bad steps need different tokens"
        yield s.clash("prm.good", why, "prm.bad")


unread(RunConfig, "train.min_lr_ratio",
       lambda s: s.config.trains and s.config.train.schedule == "constant",
       "on the constant schedule; leave it out, or set train.schedule = 'cosine' or 'linear'",
       harmless=(0.0,))
unread(RunConfig, "model.vision_lr_ratio", lambda s: s.config.model.vision_tower == "frozen",
       "with a frozen tower; leave it out, or set model.vision_tower", harmless=(1.0,))
unread(RunConfig, "lora.rank lora.alpha lora.targets", lambda s: s.config.lora.path is not None,
       "with lora.path: the saved adapter has its own; leave it out")
unread(RunConfig, "lora.", lambda s: s.config.trains and not s.config.lora.on,
       "without an adapter to train: set lora.rank, such as 16, or lora.path", harmless=(False,))
unread(RunConfig, "eval.", lambda s: s.config.trains and s.config.data.eval is None,
       "without an eval set: set data.eval, or leave [eval] out (on the command line: eval=none)",
       harmless=(False,))
unread(RunConfig, "eval.temperature eval.pass_at",
       lambda s: s.config.data.eval is not None and s.config.eval.samples == 1,
       "with eval.samples = 1, which is greedy; raise eval.samples")
unread(RunConfig,
       "eval.samples eval.temperature eval.pass_at monitor.samples monitor.tokens "
       "monitor.rollouts_size data.max_prompt_tokens train.passes_per_batch",
       lambda s: s.config.supervised,
       "in supervised training, which samples nothing; leave it out")
unread(RMConfig, "system.logprob_chunk", lambda _: True,
       "on a reward model, whose head has one row; leave it out")
unread(DPOConfig, "dpo.label_smoothing", lambda s: s.config.dpo.loss != "sigmoid",
       "on dpo.loss = {dpo.loss}; leave it out, or set dpo.loss = 'sigmoid'", harmless=(0.0,))
unread(RunConfig, "system.scoring_max_tokens", lambda s: s.kind and not s.kind.scores,
       "in a run without a reference, a critic, recomputed old log-probabilities, or an eval set; "
       "leave it out")
unread(RunConfig, ROUTERS, lambda s: not s.config.trains,
       "where nothing is trained; leave it out", harmless=(0.0,))
unread(RunConfig, ROUTERS, lambda s: s.config.trains and s.model and not s.model.expert_widths,
       "on a model without experts; leave it out", harmless=(0.0,))
