"""Settings that contradict each other and can be refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from math import ceil

from tunesmith.algorithms.filtering import DynamicFilter
from tunesmith.algorithms.kl import ReferenceKL
from tunesmith.algorithms.resolve import Reasons, resolve_algorithm
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.generation import GenerateConfig
from tunesmith.config.preference import DPOConfig, KTOConfig, PRMConfig, ScoreConfig
from tunesmith.config.resolved import given_in, settings, unread
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.config.section import known
from tunesmith.errors import ConfigError
from tunesmith.plan.distillation import distill_problems, teacher_problems
from tunesmith.plan.engine import SAMPLER_KEYS, engine_problems
from tunesmith.plan.evaluation import metric_problems
from tunesmith.plan.generation import generation_problems
from tunesmith.plan.limits import step_size_problems
from tunesmith.plan.unread import unread_problems
from tunesmith.plan.weights import ahead_problems, hybrid_problems
from tunesmith.types import altering


def check(config: RunConfig) -> None:
    """Refuse a configuration that contradicts itself, with all contradictions listed.

    Raises:
        ConfigError: naming the keys, why they do not go together, and what to change.
    """
    problems = [
        *unread_problems(config),
        *_check_train(config),
        *_check_eval(config),
        *metric_problems(config),
        *_check_lora(config),
        *generation_problems(config),
    ]
    problems += [*_check_dtype(config), *_check_lengths(config), *engine_problems(config), *hybrid_problems(config)]
    problems += distill_problems(config)
    if isinstance(config, RLConfig):
        if too_many := [*step_size_problems(config)]:
            raise_all(too_many)
        problems += [*_check_rl(config), *ahead_problems(config), *_check_algorithm(config)]
    if isinstance(config, SFTConfig | ScoreConfig | DPOConfig | KTOConfig):
        problems += [*_check_sft(config), *_check_preference(config)]
    if config.checkpoint.resume in (True, "auto") and config.run_dir is None:
        problems.append("checkpoint.resume needs the run to continue, in the same directory each time: set run_dir")
    raise_all(problems)


def raise_all(problems: list[str]) -> None:
    """One error for all problems; nothing if there are none."""
    if problems:
        raise ConfigError(*problems)


def resolved_algorithm(config: RLConfig, switch: int | None = None) -> tuple[AlgorithmSection, Reasons]:
    """``[algorithm]`` as ``[rollout]`` lets it resolve; see ``resolve_algorithm``.

    Args:
        switch: the length at which the model changes its rotary frequencies, where rollouts may grow past it.
    """
    rollout = config.rollout
    altered_by = [f"rollout.{name}" for name in altering(rollout)]
    if switch is not None:
        # What was sampled before the switch is scored with the frequencies of the whole, longer sequence.
        altered_by.append(f"the change of the model's rotary frequencies at {switch} tokens (longrope)")
    return resolve_algorithm(
        config.algorithm,
        max_new_tokens=rollout.max_new_tokens,
        max_staleness=rollout.max_staleness,
        altered_by=altered_by,
    )


def rollout_samples(config: RLConfig) -> int:
    """Samples of one rollout batch."""
    return config.rollout.prompts_per_step * config.rollout.group_size


def optimizer_steps(config: RunConfig, steps: int) -> int:
    """Optimizer steps in ``steps`` steps of a run."""
    if not isinstance(config, RLConfig):
        return steps
    samples, steps = rollout_samples(config), max(1, steps - config.critic.freeze_actor_steps)
    return steps * config.train.passes_per_batch * ceil(samples / (known(config.train, "batch_size") or samples))


def critic_steps(config: RLConfig, steps: int) -> int:
    """Optimizer steps of a critic with its own model in ``steps`` steps of a run."""
    samples, passes = rollout_samples(config), known(config.critic, "passes_per_batch") or config.train.passes_per_batch
    return steps * passes * ceil(samples / (known(config.train, "batch_size") or samples))


def step_problems(config: RunConfig) -> Iterator[str]:
    """Settings that exceed the run's number of steps, if that is known."""
    steps, warmup = known(config.train, "steps"), known(config.train, "warmup_steps")
    if steps is None:
        return
    if warmup is not None and warmup > (total := optimizer_steps(config, steps)):
        yield (
            f"train.warmup_steps = {warmup} is longer than the run of {total} optimizer steps; "
            f"the learning rate would never be reached. Use at most {total}, or train.warmup_ratio"
        )
    for key in ("trace_steps", "profile_steps"):
        asked: list[int] = list(getattr(config.monitor, key))
        if beyond := [step for step in asked if step > steps]:
            yield f"monitor.{key} = {asked}: the run ends after step {steps}, before {beyond[0]}; name earlier steps"
    if not isinstance(config, RLConfig):
        return
    critic, kl = config.critic, known(config.algorithm, "kl")
    every = kl.reference_every if isinstance(kl, ReferenceKL) else None
    if critic.freeze_actor_steps >= steps:
        yield (
            f"critic.freeze_actor_steps = {critic.freeze_actor_steps} leaves the policy none of the run's {steps} "
            "steps; lower it"
        )
    if critic.warmup_steps > (total := critic_steps(config, steps)):
        yield (
            f"critic.warmup_steps = {critic.warmup_steps} is longer than the critic's {total} optimizer steps; lower it"
        )
    if every is not None and every > steps:
        yield (
            f"algorithm.kl.reference_every = {every} is longer than the run of {steps} "
            "steps, in which the reference would stay the starting model; leave it out"
        )


def _check_train(config: RunConfig) -> Iterator[str]:
    train = config.train
    if known(train, "steps") is not None and train.epochs is not None:
        yield "train.steps and train.epochs both set the length of training; leave one out"
    if known(train, "warmup_steps") is not None and train.warmup_ratio is not None:
        yield "train.warmup_steps and train.warmup_ratio both set the warm-up; leave one out"
    yield from step_problems(config)


def _check_dtype(config: RunConfig) -> Iterator[str]:
    if known(config.model, "dtype") == "float16" and not isinstance(config, GenerateConfig):
        yield (
            'model.dtype = "float16" is for tunesmith generate only: without loss scaling, which is not implemented, '
            'small gradients vanish; train in "bfloat16", or in "float32" on a GPU without bfloat16'
        )


def _check_lora(config: RunConfig) -> Iterator[str]:
    lora, given = config.lora, given_in(config, "lora")
    if not lora.on:
        if idle := [k for k in given if k != "lora.save_merged" or lora.save_merged]:
            yield f"{' and '.join(idle)} without an adapter to train: set lora.rank, such as 16, or lora.path"
        if config.model.quantize and not isinstance(config, GenerateConfig):
            yield (
                f"model.quantize = '{config.model.quantize}' keeps the weights in a form that cannot be trained; "
                "train an adapter on them: set lora.rank, such as 16"
            )
    if lora.targets == ():
        yield "lora.targets names no module; leave it out for all linear ones"
    if isinstance(config, RLConfig) and lora.dropout > 0:
        yield (
            f"lora.dropout = {lora.dropout:g}: in reinforcement learning the trainer's log-probabilities have to be "
            "those the tokens were sampled with, and dropout would change them; leave it out"
        )
    if config.model.quantize and find_spec("bitsandbytes") is None:
        yield (
            f"model.quantize = '{config.model.quantize}' needs bitsandbytes, which is not installed: "
            "pip install 'tunesmith[quantize]', or leave model.quantize out"
        )


def _check_lengths(config: RunConfig) -> Iterator[str]:
    sections = {"rollout": getattr(config, "rollout", None), "sampling": getattr(config, "sampling", None)}
    for name, section in sections.items():
        if section is not None and section.min_new_tokens > section.max_new_tokens:
            yield (
                f"{name}.min_new_tokens = {section.min_new_tokens} is more than {name}.max_new_tokens = "
                f"{section.max_new_tokens}; lower it"
            )


def _check_eval(config: RunConfig) -> Iterator[str]:
    section, given = config.eval, settings(config, given_only=True)
    keys = [key for key in given if key.startswith("eval.") and given[key] not in (None, False)]
    if config.data.eval is None:
        if keys:
            yield f"{' and '.join(keys)} without an eval set: set data.eval, or leave [eval] out"
        return
    if section.use_ema and config.train.ema_decay is None:
        yield "eval.use_ema evaluates an average of the weights: set train.ema_decay, such as 0.999, or leave it out"
    if section.samples > 1 and section.pass_at is not None and max(section.pass_at, default=0) > section.samples:
        yield (
            f"eval.pass_at = {list(section.pass_at)} needs at least {max(section.pass_at)} samples "
            f"per prompt; eval.samples is {section.samples}"
        )


FOR_SAMPLING = (
    *("eval.samples", "eval.temperature", "eval.pass_at", *SAMPLER_KEYS),
    *("monitor.samples", "monitor.rollouts_size", "data.max_prompt_tokens", "train.passes_per_batch"),
)


def _check_sft(config: RunConfig) -> Iterator[str]:
    yield from unread(config, FOR_SAMPLING, "in supervised training, which samples nothing; leave it out")
    longest, cap = config.data.max_tokens, known(config.system, "max_tokens_per_microbatch")
    if longest is not None and cap is not None and longest > cap:
        yield (
            f"system.max_tokens_per_microbatch = {cap} is a hard cap, and data.max_tokens = {longest} "
            f"lets longer samples in; make them equal"
        )


def _check_preference(config: RunConfig) -> Iterator[str]:
    if isinstance(config, KTOConfig) and not config.kto.desirable_weight + config.kto.undesirable_weight:
        yield "kto.desirable_weight and kto.undesirable_weight are both 0, so that nothing would be learned"
    if isinstance(config, PRMConfig) and config.prm.good == config.prm.bad:
        yield f"prm.good and prm.bad are both '{config.prm.good}'; a good step and a bad one need different tokens"


def _check_environment(config: RLConfig) -> Iterator[str]:
    section, given = config.environment, given_in(config, "environment")
    if given and not section.used:
        yield f"{' and '.join(given)} without an environment: set environment.path or environment.tools"
    if "environment.column" in given and not isinstance(section.path, dict):
        yield "environment.column has no effect with one environment, which plays every task; leave it out"
    if "environment.bad_call" in given and not section.tools and section.path is None:
        yield "environment.bad_call has no effect without tools; leave it out"
    if isinstance(section.path, dict) and not section.path:
        yield "environment.path is empty: set path = 'env.py:Game', or a table of name = 'file.py:name'"


def _check_rl(config: RLConfig) -> Iterator[str]:
    yield from _check_environment(config)
    rollout = config.rollout
    if rollout.temperature == 0:
        yield (
            "rollout.temperature = 0 is greedy: all rollouts of a prompt would be equal and nothing could be "
            "learned from them; use 1.0 or a little less"
        )
    size, samples = known(config.train, "batch_size"), rollout_samples(config)
    if size is not None and samples % size:
        fitting = [n for n in range(1, samples + 1) if samples % n == 0]
        below = max((n for n in fitting if n < size), default=1)
        above = min((n for n in fitting if n > size), default=samples)
        near = " or ".join(map(str, dict.fromkeys((below, above))))
        yield (
            f"train.batch_size = {size} does not divide the {samples} samples of a rollout batch "
            f"(rollout.prompts_per_step × rollout.group_size); use {near}, or leave it out for all {samples}"
        )
    cap, longest = known(config.system, "max_tokens_per_microbatch"), rollout.max_new_tokens
    longest += config.data.max_prompt_tokens or 1
    if cap is not None and cap < longest:
        yield (
            f"system.max_tokens_per_microbatch = {cap} is a hard cap, and one rollout may take {longest} "
            f"tokens (prompt and rollout.max_new_tokens); raise it to at least {longest}"
        )


def _check_algorithm(config: RLConfig) -> Iterator[str]:
    limit = config.rollout.max_new_tokens
    try:
        algorithm, _ = resolved_algorithm(config)
    except ConfigError as error:
        yield str(error)
        return
    needs, advantage = algorithm.needs, algorithm.advantage.name
    yield from _check_critic(config, "critic" in needs)
    yield from teacher_problems(config, algorithm)
    if algorithm.reference and algorithm.reference.reference_every is not None:
        if "teacher" in needs:
            yield "algorithm.kl.reference_every would copy the policy over its teacher; leave it out"
        if config.lora.on:
            yield (
                "algorithm.kl.reference_every copies the policy into a second model, and with [lora] the reference is "
                "the policy without its adapter; leave it out"
            )
    if "reward_weights" in needs and not config.reward.given:
        yield (
            f"algorithm.advantage = '{advantage}' standardises each reward by itself, and there is none "
            "but the environment's own; add [reward] functions, or take algorithm.name = 'grpo'"
        )
    if algorithm.dynamic_filter:
        yield from _check_filter(config, algorithm.dynamic_filter)
    elif config.rollout.oversample > 1:
        yield (
            f"rollout.oversample = {config.rollout.oversample:g} tries more prompts than are wanted because some "
            "are filtered out, and algorithm.dynamic_filter is off; leave it out"
        )
    if "group" in needs and config.rollout.group_size == 1:
        yield (
            f"algorithm.advantage = '{advantage}' compares the rollouts of a prompt with each other, "
            "and rollout.group_size = 1 leaves nothing to compare; use 4 or more, "
            "or algorithm.name = 'reinforce'"
        )
    if algorithm.overlong and (buffer := algorithm.overlong.length(limit)) > limit:
        yield (
            f"algorithm.overlong.buffer = {buffer} is longer than rollout.max_new_tokens = {limit}, so that no answer "
            "would be free of it"
        )


def _check_filter(config: RLConfig, dynamic_filter: DynamicFilter) -> Iterator[str]:
    reward = config.reward
    weights = [
        *(reward.weights or (1.0,) * len(reward.functions)),
        *(e.weight for e in (*reward.models, *reward.remote)),
    ]
    if config.environment.path is None and not any(weight > 0 for weight in weights):
        yield (
            "algorithm.dynamic_filter keeps the prompts that are solved sometimes, and no reward with a weight above 0 "
            "says when one is solved: no prompt would be kept. Add such a reward, or set "
            "algorithm.dynamic_filter = false"
        )
    bounded = dynamic_filter.low is not None or dynamic_filter.high is not None
    if not bounded and any(model.weight > 0 for model in config.reward.models):
        yield (
            "algorithm.dynamic_filter replaces groups of equal scores, and a reward model never gives two answers the "
            "same score: every group would be kept. Set algorithm.dynamic_filter.low and high, or "
            "algorithm.dynamic_filter = false"
        )
    if config.rollout.group_size == 1:
        yield (
            "algorithm.dynamic_filter keeps groups whose rollouts differ, and rollout.group_size = 1 has none that "
            "could: no prompt would be kept. Use 4 or more, or set algorithm.dynamic_filter = false"
        )


def _check_critic(config: RLConfig, needed: bool) -> Iterator[str]:
    critic, given = config.critic, given_in(config, "critic")
    own = [key for key in given if key.removeprefix("critic.") not in _OF_A_HEAD]
    if not needed:
        if given:
            yield (
                f"{' and '.join(given)} without a critic: set algorithm.name = 'ppo' or 'vapo', "
                "or an algorithm.advantage that needs one ('gae', 'vapo'), or leave [critic] out"
            )
        return
    if critic.shared_trunk and own:
        yield (
            f"{' and '.join(own)} with critic.shared_trunk: the critic is a head on the policy and is trained in the "
            "policy's own optimizer steps; leave one of the two out"
        )
    if not critic.shared_trunk and "critic.value_coef" in given:
        yield (
            "critic.value_coef weighs the value loss on a shared trunk; leave it out, or set critic.shared_trunk = true"
        )
    if critic.schedule == "constant" and critic.min_lr_ratio > 0:
        yield "critic.min_lr_ratio has no effect on the constant schedule; leave it out, or change critic.schedule"


_OF_A_HEAD = ("shared_trunk", "value_coef", "lr")
"""Keys of a critic that is a head on the policy; all others are of one with its own model and optimizer."""
