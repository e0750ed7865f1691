"""Rules about batch inference and rejection-sampling fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.commands import GenerateConfig, RFTConfig
from tunesmith.config.schema import DataSection, Source
from tunesmith.errors import Problem
from tunesmith.plan.rules.rule import rule, unread
from tunesmith.plan.rules.situation import Situation, more

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off


@rule(GenerateConfig)
def output(s: Situation[GenerateConfig]) -> Iterator[Problem]:
    yield from _weighed(s.config.data)
    section = s.config.output
    count: int | None = s.config.sampling.n
    if section.kind != "completions" and not s.rewarded:
        why = "needs a reward: set [reward] functions, models or remote"
        yield s.clash("output.kind", why)
    if more(count, 1) and s.config.sampling.temperature == 0:
        yield s.clash("sampling.temperature",
            f"is greedy, and all {count} completions would be equal; use 1.0, or n = 1",
            "sampling.n")
    if section.kind in ("best", "pairs") and not more(count, 1):
        why = "compares completions of a prompt: set sampling.n, such as 4"
        yield s.clash("output.kind", why, "sampling.n")
    template = section.reward_template
    if template is not None and not ("{prompt}" in template and "{reward}" in template):
        yield Problem(("output.reward_template",),
            "output.reward_template needs both {prompt} and {reward}, such as '{prompt} "
            "<rm_score>: {reward} '")


@rule(RFTConfig)
def rejection_sampling(s: Situation[RFTConfig]) -> Iterator[Problem]:
    yield from _weighed(s.config.data)
    section = s.config.rft
    if s.scored_by_model and section.threshold is None:
        yield s.clash("rft.threshold",
            "is missing: a reward model's score has no bounds; set it to the lowest score of a "
            "right answer")
    if s.config.sampling.temperature == 0:
        why = "is greedy: all samples of a question would be equal; use 0.7 or so"
        yield s.clash("sampling.temperature", why)
    if section.few_shot_separator == "":
        yield Problem(("rft.few_shot_separator",),
            "rft.few_shot_separator is empty, so nothing would mark the end of an answer; leave it "
            "out")
    for name, given in (("sampler", section.sampler), ("answers", section.answers)):
        if section.rounds > 1 and given is not None:
            yield Problem((f"rft.{name}", "rft.rounds"),
                f"rft.{name} gives every round the same answers; leave out rft.rounds = "
                f"{section.rounds} or rft.{name}")


def _weighed(data: DataSection) -> Iterator[Problem]:
    sources = data.train if isinstance(data.train, tuple) else (data.train,)
    for source in sources:
        if isinstance(source, Source) and source.weight is not None:
            yield Problem(("data.train",),
                f"data.train weighs '{source.path}', which has no effect: every line is answered "
                "once; leave the weight out", "unread")


unread(GenerateConfig,
       "train. eval. checkpoint. monitor. data.eval data.loss_on data.max_tokens data.shuffle "
       "data.seed lora.rank lora.alpha lora.targets lora.dropout lora.save_merged "
       "system.max_tokens_per_microbatch system.share_prompts system.gradient_checkpointing "
       "system.offload_activations system.offload_reference system.offload_optimizer "
       "system.offload_parameters system.logprob_chunk", lambda _: True,
       "with output.kind = {output.kind}; leave it out", but="monitor.progress")
unread(GenerateConfig, "sampling. output.logprobs", lambda s: s.config.output.kind == "score",
       "with output.kind = 'score'; leave it out")
unread(GenerateConfig, "data.completion", lambda s: s.config.output.kind != "score",
       "with output.kind = {output.kind}; leave it out")
unread(GenerateConfig, "output.min_margin", lambda s: s.config.output.kind != "pairs",
       "with output.kind = {output.kind}; leave it out")
unread(GenerateConfig, "output.min_reward", lambda s: s.config.output.kind not in ("best", "pairs"),
       "with output.kind = {output.kind}; leave it out")
unread(GenerateConfig, "output.reward_template output.reward_levels",
       lambda s: s.config.output.kind != "conditional",
       "with output.kind = {output.kind}; leave it out")
unread(GenerateConfig, "system.tuned", lambda _: True,
       "on a run that does not train, which tunesmith tune does not measure; leave it out",
       harmless=(False,))
unread(RFTConfig,
       "data.completion data.loss_on data.max_tokens eval.every eval.samples eval.temperature "
       "eval.pass_at eval.metric eval.target eval.use_ema checkpoint.resume monitor.samples "
       "monitor.tokens monitor.rollouts_size train.passes_per_batch", lambda _: True,
       "in rejection-sampling fine-tuning; leave it out")
unread(RFTConfig, "train.steps", lambda _: True,
       "in rejection-sampling fine-tuning; leave it out (train.epochs sets the length)")
unread(RFTConfig, "system.tuned", lambda _: True,
       "in rejection-sampling fine-tuning, which tunesmith tune does not measure; leave it out",
       harmless=(False,))
unread(RFTConfig, "rft.few_shot_separator", lambda s: s.config.rft.few_shot is None,
       "without rft.few_shot; leave it out")
unread(RFTConfig, "sampling. rft.few_shot rft.sampler", lambda s: s.config.rft.answers is not None,
       "with rft.answers, which are sampled already; leave it out", but="sampling.max_new_tokens")
unread(RFTConfig, "rft.start", lambda s: s.config.rft.rounds == 1,
       "with rft.rounds = 1; leave it out, or set more rounds", harmless=("base",))
