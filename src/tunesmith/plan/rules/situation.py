"""The values available to rules about settings: the settings, values that follow from them, and facts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tunesmith.algorithms.kl import KLInReward
from tunesmith.algorithms.resolve import Reasons, resolve_algorithm
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.commands import GenerateConfig
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size, parse_size
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.memory import gpu_of, longest_sample
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.length import critic_steps, optimizer_steps
from tunesmith.plan.processes.devices import compilable, ranks_per_engine
from tunesmith.plan.processes.roles import has_critic, keeps_frozen, keeps_reference, placed_together, scores
from tunesmith.plan.processes.weights import engines_apart, weights_apart
from tunesmith.types import altering

MOST_THREADS_PER_CORE = 16
_LEAST_HEAD = 32
"""vLLM on a CPU supports attention heads of this width and, in steps of 16, wider ones."""


def resolved_algorithm(config: RLConfig, switch: int | None = None) -> tuple[AlgorithmSection, Reasons]:
    """``[algorithm]`` as it resolves with this ``[rollout]``; see ``resolve_algorithm``.

    Args:
        switch: the length at which the model changes its rotary frequencies, if rollouts may exceed it.
    """
    rollout = config.rollout
    altered_by = [f"rollout.{name}" for name in altering(rollout)]
    if switch is not None:
        # Tokens sampled before the switch are scored with the frequencies of the whole, longer sequence.
        altered_by.append(f"the change of the model's rotary frequencies at {switch} tokens (longrope)")
    return resolve_algorithm(
        config.algorithm,
        max_new_tokens=rollout.max_new_tokens,
        max_staleness=rollout.max_staleness,
        altered_by=altered_by,
    )


def situation(config: RunConfig, facts: Facts | None) -> dict[str, Any]:
    """Values by dotted key, and everything else that a rule may name; unknown values are omitted or None."""
    system, engine, whole = config.system, config.system.engine_kind, _with_algorithm(config)
    kind, _, number = (known(system, "device") or "").partition(":")
    reward, size, ranks = getattr(config, "reward", None), known(system, "shard_size"), known(system, "trainer_ranks")
    # If no setting determines where engines run, the machine does.
    open_yet = facts is None and system.cluster == "none" and "engine_process" not in system.model_fields_set
    apart = None if open_yet and not engine.served and not engines_apart(config) else engines_apart(config)
    colocated = placed_together(config, "actor", "rollout")
    values = settings(whole or config) | {
        "command": config.command,
        "rl": isinstance(config, RLConfig),
        "supervised": config.supervised,
        "trains": config.trains,
        "epochs_given": config.train.epochs is not None and "epochs" in config.train.model_fields_set,
        "samples": config.samples,
        "lora": config.lora.on,
        "device_kind": kind or None,
        "device_number": int(number) if number.isdigit() else None,
        **{f"engine.{name}": value for name, value in asdict(engine).items()},
        "launch": engine.launch.format(path=config.model.path, port=30000),
        "engines_apart": apart,
        "engines_elsewhere": apart or engine.served or None,
        "engine_process_off": "engine_process" in system.model_fields_set and not system.engine_process,
        "weights_apart": weights_apart(config) or (None if apart is None else False),
        "whole_weights": engine.third_party or system.adapter_sync == "merged",
        "colocated": colocated,
        "one_of_each_together": colocated and {known(system, "engines"), ranks} <= {None, 1},
        "ranks_per_engine": ranks_per_engine(config),
        "left_over_ranks": ranks % size if ranks and size else None,
        "ungrouped_ranks": ranks % system.sequence_parallel.size if ranks else None,
        "rewarded": bool(reward and reward.given),
        "reward_models": bool(reward and reward.models),
        "scored_by_model": any(model.weight > 0 for model in (reward.models if reward else ())),
    }
    if whole:
        passes = {"keeps_reference": keeps_reference, "keeps_frozen": keeps_frozen}
        passes |= {"scores": scores, "has_critic": has_critic}
        values |= {name: of(whole) for name, of in passes.items()}
    if isinstance(whole, RLConfig):
        algorithm = whole.algorithm
        for need in ("critic", "group", "teacher", "reward_weights"):
            values[f"needs_{need}"] = need in algorithm.needs
        values["kl_in_reward"] = algorithm.kl.estimator if isinstance(algorithm.kl, KLInReward) else None
    if config.sampling_settings:
        values |= config.sampling_settings.model_dump(mode="json") | {"table": config.sampling_settings.table}
    if known(config.train, "steps") is not None:
        values["optimizer_steps"] = optimizer_steps(config, facts.train_size if facts else None)
    if isinstance(config, GenerateConfig):
        template = config.output.reward_template or ""
        values["whole_template"] = "{prompt}" in template and "{reward}" in template
    if isinstance(config, RLConfig):
        values |= _of_rl(config, facts)
    return values | (_of_facts(config, facts) if facts else {})


def _with_algorithm(config: RunConfig) -> RunConfig | None:
    """The run with its algorithm resolved; None if that is impossible, which ``checks`` reports."""
    if not isinstance(config, RLConfig):
        return config
    with suppress(ConfigError):
        return config.model_copy(update={"algorithm": resolved_algorithm(config)[0]})
    return None


def _of_rl(config: RLConfig, facts: Facts | None) -> dict[str, Any]:
    reward, environment = config.reward, config.environment
    weights = [
        *(reward.weights or (1.0,) * len(reward.functions)),
        *(e.weight for e in (*reward.models, *reward.remote)),
    ]
    values: dict[str, Any] = {
        **_longest_rollout(config, None),
        "tools": bool(environment.tools),
        "several_environments": isinstance(environment.path, dict),
        "solvable": environment.path is not None or any(weight > 0 for weight in weights),
    }
    if known(config.train, "steps") is not None:
        values["critic_steps"] = critic_steps(config, facts.train_size if facts else None)
    return values


def _longest_rollout(config: RLConfig, prompt: int | None) -> dict[str, Any]:
    """Args: prompt: tokens of the data's longest prompt, if known; it may be shorter than allowed."""
    tokens = (prompt or config.data.max_prompt_tokens or 1) + config.rollout.max_new_tokens
    if (conversation := config.environment.max_tokens or 0) > tokens:
        return {"sample": conversation, "sample_kind": "rollout", "sample_parts": " (environment.max_tokens)"}
    return {"sample": tokens, "sample_kind": "rollout", "sample_parts": " (prompt and rollout.max_new_tokens)"}


def _of_facts(config: RunConfig, facts: Facts) -> dict[str, Any]:
    system, machine, model = config.system, facts.hardware, facts.model
    gpu = gpu_of(config, facts)
    memory = gpu.memory_total if gpu else machine.memory_total
    prompt, longest = config.data.max_prompt_tokens, longest_sample(config, facts)
    values: dict[str, Any] = {
        "cores": machine.cores,
        "most_threads": max(64, MOST_THREADS_PER_CORE * machine.cores),
        "kv_bytes": parse_size(system.kv_memory) if known(system, "kv_memory") else None,
        "device_bytes": memory,
        "device_memory": format_size(memory),
        "native_bf16": machine.bf16,
        "unseen_gpus": machine.unseen,
        "measured": facts.tuned is not None,
        "train_size": facts.train_size,
        "longest": facts.longest,
        "longest_sample": longest,
        "sample": facts.together or facts.longest,
        "sample_kind": "sample",
        "sample_parts": "",
        "instances_for": facts.instances_for,
        "launched": facts.ranks_here is not None,
        "compilable": compilable(config, facts),
        "compiles": machine.compiler is not None,
    }
    if isinstance(config, RLConfig):
        values |= _longest_rollout(config, facts.longest)
    if config.sampling_settings and prompt is not None:
        values["prompt_and_new"] = prompt + config.new_tokens
    if model:
        odd = model.head_dim < _LEAST_HEAD or model.head_dim % 16
        values |= {
            "context": model.context or None,
            "room": (model.context or 0) - config.new_tokens,
            "switch": model.switch,
            "vocab_size": model.vocab_size,
            "layers": model.layers,
            "family": model.family,
            "lean": model.lean,
            "widest": max(model.hidden_size, model.intermediate_size),
            "heads": model.heads,
            "unshared_heads": model.heads % system.sequence_parallel.size,
            "odd_heads": model.head_dim if odd else None,
        }
    return values
