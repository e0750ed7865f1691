"""Settings that exceed what the machine or the model has."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.generation import SamplingConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.sizes import format_size, parse_size
from tunesmith.plan.facts import Facts

MOST_ROLLOUTS = 10**6
"""In one step. The largest published runs have some thousands."""
MOST_THREADS_PER_CORE = 16


def limit_problems(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Settings above the number of cores, the memory, the vocabulary or the context."""
    system, machine = config.system, facts.hardware
    here = system.cluster == "none"
    if (
        here
        and (threads := known(system, "threads")) is not None
        and threads > (most := max(64, MOST_THREADS_PER_CORE * machine.cores))
    ):
        yield f"system.threads = {threads} for {machine.cores} cores; use {machine.cores}, and {most} at most"
    if here and known(system, "kv_memory") is not None:
        device = system.device.partition(":")
        gpu = machine.gpus[int(device[2] or 0)] if device[0] == "cuda" and machine.gpus else None
        total = gpu.memory_total if gpu else machine.memory_total
        if parse_size(system.kv_memory) > total:
            yield f"system.kv_memory = '{system.kv_memory}', and the device has {format_size(total)}; lower it"
    yield from _beyond_model(config, facts)


def step_size_problems(config: RLConfig) -> Iterator[str]:
    """Refuse a step that would practically never end."""
    rollout = config.rollout
    if (samples := rollout.prompts_per_step * rollout.group_size) > MOST_ROLLOUTS:
        yield (
            f"rollout.prompts_per_step × rollout.group_size = {samples} rollouts in a step, and {MOST_ROLLOUTS} are "
            "the most; lower one of them"
        )


def _beyond_model(config: RunConfig, facts: Facts) -> Iterator[str]:
    model = facts.model
    if model is None:
        return
    rl = isinstance(config, RLConfig)
    section = config.rollout if rl else config.sampling if isinstance(config, SamplingConfig) else None
    name = "rollout" if rl else "sampling"
    if section and (beyond := [i for i in section.stop_token_ids if i >= model.vocab_size]):
        yield (f"{name}.stop_token_ids: {beyond[0]} is no token of the model, whose last one is {model.vocab_size - 1}")
    if not (context := model.context):
        return
    new = section.max_new_tokens if section else 0
    prompt, whole = config.data.max_prompt_tokens, config.data.max_tokens
    if section and prompt is not None and new < context < prompt + new:
        yield (
            f"data.max_prompt_tokens = {prompt} and {name}.max_new_tokens = {new} together are longer than the model's "
            f"context of {context}; lower data.max_prompt_tokens to {context - new}, or leave it out"
        )
    if not section and whole is not None and whole > context:
        yield f"data.max_tokens = {whole} is longer than the model's context of {context}; lower it, or leave it out"
