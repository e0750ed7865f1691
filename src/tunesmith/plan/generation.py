"""What batch inference and rejection-sampling fine-tuning refuse, and what is derived for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from tunesmith.config.generation import GenerateConfig, RFTConfig, SamplingConfig
from tunesmith.config.resolved import settings, unread
from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.plan.cost import price
from tunesmith.plan.device import derive_kv_memory
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.memory import engines_elsewhere, free_memory, layout_of, planned_elsewhere
from tunesmith.plan.weights import loads_model

TEMPLATE = "{prompt} <rm_score>: {reward} "
SEPARATOR = "\n\n"

_GENERATE_IGNORES = (
    *("train.", "eval.", "checkpoint.", "data.eval", "data.loss_on", "data.max_tokens", "data.shuffle", "data.seed"),
    *("lora.rank", "lora.alpha", "lora.targets", "lora.dropout", "lora.save_merged", "system.share_prompts"),
    *("system.gradient_checkpointing", "system.logprob_chunk"),
)
"""Keys, and what begins them."""
_RFT_IGNORES = (
    *("data.completion", "data.loss_on", "data.max_tokens", "eval.every", "eval.samples", "eval.temperature"),
    *(
        "eval.pass_at",
        "eval.metric",
        "eval.target",
        "eval.use_ema",
        "checkpoint.resume",
        "monitor.samples",
        "monitor.rollouts_size",
    ),
    "train.passes_per_batch",
)

LORA_LR = 2e-4
"""The RFT performance guide's learning rate, which is that of an adapter."""
WARMUP = 50

_USUAL: dict[str, tuple[Any, str]] = {
    "sampling.n": (15, "oversampling"),
    "sampling.temperature": (0.7, "variety among the answers to a question"),
    "train.batch_size": (64, "better gradients; micro-batches are as large as memory allows whatever this is"),
    "train.schedule": ("cosine", "better convergence than a constant rate"),
    "checkpoint.every": ("epoch", "an interrupted training goes on from the last pass"),
    "checkpoint.keep": (1, "only the last one"),
    "checkpoint.model_only": ("last", "a finished round's optimizer state is never read"),
    "train.epochs": (3.0, "three passes over the answers that were kept"),
    "monitor.every": (50, "fewer lines"),
}
_FASTER = ("train.schedule", "checkpoint.keep", "checkpoint.model_only")
PROFILES: dict[str, dict[str, tuple[Any, str]]] = {
    "conservative": {
        **{key: value for key, value in _USUAL.items() if key not in _FASTER},
        "system.gradient_checkpointing": (True, "gradients are recomputed: slower, and the least memory"),
        "train.batch_size": (32, "the usual size"),
    },
    "balanced": _USUAL,
    "aggressive": {
        **_USUAL,
        "sampling.n": (12, "enough where most questions are solved"),
        "sampling.temperature": (0.5, "more right answers, of less variety"),
        "train.epochs": (2.0, "the cosine schedule needs fewer passes"),
    },
}
"""Values and reasons of the RFT performance guide; what is said in the run file comes first."""


def generation_problems(config: RunConfig) -> Iterator[str]:
    """What cannot work or would be ignored."""
    if isinstance(config, GenerateConfig):
        yield from _check_generate(config)
    elif isinstance(config, RFTConfig):
        yield from _check_rft(config)


def _check_generate(config: GenerateConfig) -> Iterator[str]:
    said, sampling, output = settings(config, said_only=True), config.sampling, config.output
    idle = [k for k in said if k.startswith(_GENERATE_IGNORES)]
    idle += [k for k in said if k.startswith("monitor.") and k != "monitor.progress"]
    if output.kind == "score":
        idle += [k for k in said if k.startswith("sampling.") or k == "output.logprobs"]
    elif config.data.completion is not None:
        idle.append("data.completion")
    kinds = {
        "min_margin": ("pairs",),
        "min_reward": ("best", "pairs"),
        "reward_template": ("conditional",),
        "reward_levels": ("conditional",),
    }
    idle += [f"output.{k}" for k, of in kinds.items() if getattr(output, k) is not None and output.kind not in of]
    for key in idle:
        yield f"{key} has no effect when output.kind = '{output.kind}' is generated; leave it out"
    if config.reward is None and output.kind != "completions":
        yield f"output.kind = '{output.kind}' needs a reward: say [reward] functions, models or remote"
    n = known(sampling, "n") or 1
    if known(sampling, "temperature") == 0 and n > 1:
        yield f"sampling.temperature = 0 is greedy, and all {n} completions would be equal; say 1.0, or n = 1"
    if output.kind in ("best", "pairs") and n == 1:
        yield f"output.kind = '{output.kind}' compares completions of a prompt: say sampling.n, such as 4"
    template = output.reward_template
    if template is not None and not ("{prompt}" in template and "{reward}" in template):
        yield "output.reward_template has no {prompt} or no {reward} in it; one such is " + repr(TEMPLATE)


def _check_rft(config: RFTConfig) -> Iterator[str]:
    rft, why = config.rft, "in rejection-sampling fine-tuning; leave it out"
    yield from unread(config, _RFT_IGNORES, why)
    yield from unread(config, ["train.steps"], f"{why} (say train.epochs)")
    if rft.threshold is None and any(model.weight > 0 for model in config.reward.models):
        yield "rft.threshold is missing: a reward model's score has no bounds, so say from which on an answer is right"
    if known(config.sampling, "temperature") == 0:
        yield "sampling.temperature = 0 is greedy: all samples of a question would be equal; say 0.7 or so"
    if rft.few_shot_separator is not None and rft.few_shot is None:
        yield "rft.few_shot_separator has no effect without rft.few_shot; leave it out"
    if rft.few_shot_separator == "":
        yield "rft.few_shot_separator is empty, so that nothing would tell where an answer ends"
    for key in ("sampler", "answers"):
        if getattr(rft, key) is not None and rft.rounds > 1:
            yield f"rft.{key} gives every round the same answers; leave rft.rounds = {rft.rounds} out, or rft.{key}"
    if rft.answers is not None:
        given = [k for k in settings(config, said_only=True) if k.startswith("sampling.") or k == "rft.few_shot"]
        for key in [*given, *(["rft.sampler"] if rft.sampler is not None else [])]:
            if key != "sampling.max_new_tokens":
                yield f"{key} has no effect with rft.answers, which are sampled already; leave it out"
    if rft.start == "last" and rft.rounds == 1:
        yield "rft.start = 'last' has no effect with rft.rounds = 1; leave it out, or say more rounds"


def derive_sampling(filling: Filling[Any]) -> None:
    """Samples and temperature, and for RFT all else that its profile sets."""
    config: SamplingConfig = filling.config
    if isinstance(config, RFTConfig):
        _derive_profile(filling, config)
        return
    if not config.samples:
        return
    filling.fill("sampling.n", 1, "one completion per prompt")
    greedy = filling.get("sampling.n") == 1
    reason = "one completion: greedy" if greedy else "the model's own distribution"
    filling.fill("sampling.temperature", 0.0 if greedy else 1.0, reason)
    if config.output.kind == "conditional":
        filling.fill("output.reward_template", TEMPLATE, "the prompt, then the reward")
    if config.output.kind == "pairs":
        filling.fill("output.min_margin", 0.0, "any difference makes a pair")


def _derive_profile(filling: Filling[Any], config: RFTConfig) -> None:
    said, name = settings(config, said_only=True), config.rft.profile
    values = PROFILES[name]
    if config.lora.on:
        values = values | {"train.lr": (LORA_LR, "for an adapter")}
    for key, (value, reason) in values.items():
        if key not in said and filling.get(key) != value:
            filling.set(key, value, f"profile {name}: {reason}")
    if config.rft.few_shot is not None:
        filling.fill("rft.few_shot_separator", SEPARATOR, "a blank line")


def derive_rft_warmup(config: RFTConfig, said: Mapping[str, Any], samples: int) -> tuple[int, str] | None:
    """Warm-up steps and the reason, once it is known how much there is to learn; None: as the run file says."""
    train, warmed = config.train, {"train.warmup_steps", "train.warmup_ratio"} & said.keys()
    if config.rft.profile == "conservative" or warmed or "train.schedule" in said:
        return None
    steps = ceil((train.epochs or 1.0) * samples / train.batch_size)
    if steps >= 10 * WARMUP:
        return WARMUP, f"profile {config.rft.profile}"
    return steps // 10, f"profile {config.rft.profile}: {WARMUP}, but no more than a tenth of {steps} steps"


def derive_sampler_memory(filling: Filling[Any], facts: Facts) -> None:
    """KV memory of the sampler, beside which only the weights lie in memory."""
    config: SamplingConfig = filling.config
    if config.samples and not config.system.served:
        free, taken = free_memory(config, facts), 0
        if engines_elsewhere(config, facts):
            engine = planned_elsewhere(config, facts)
            taken = engine.engine if engine else 0
        elif facts.model is not None:
            layout = replace(layout_of(config, facts), trains=False, holds_model=loads_model(config))
            taken = price(facts.model, layout).sampling
        derive_kv_memory(filling, facts, (free - taken) // 2, "half")
