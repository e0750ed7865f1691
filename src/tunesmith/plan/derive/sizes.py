"""How a device's memory is divided: turns of engine and trainer, the KV cache, the tokens of a
micro-batch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import ceil, inf
from typing import Any

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size, megabytes, parse_size
from tunesmith.plan.cost.memory import (
    LIMIT,
    bytes_per_token,
    engines_elsewhere,
    free_memory,
    host_tokens,
    kv_bytes_per_number,
    layout_of,
    longest_sample,
    planned,
    planned_elsewhere,
    request_kv,
    trainer_memory,
)
from tunesmith.plan.cost.price import LIBRARIES, activation_bytes, price
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.processes.devices import engines_together, on_gpu, ranks_per_engine
from tunesmith.plan.processes.roles import processes_with_trainer
from tunesmith.plan.processes.weights import engines_apart, loads_model, weights_apart

MOST_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Larger micro-batches are no faster: every matrix product is already large enough."""
UNKNOWN_MODEL_TOKENS = 4096
SHORT = 128
"""Tokens reserved for a sample of unknown length."""
STEP = 256
"""Tokens of a micro-batch are multiples of this, unless the longest sample or ``MOST_TOKENS``
limits them."""
LEAST_KV_BYTES = 16 * 10**6


def most_tokens(config: RunConfig) -> int:
    """Tokens of a pass on one device beyond which more are no faster."""
    return MOST_TOKENS["cuda" if on_gpu(config) else "cpu"]


def derive_sizes(filling: Filling, facts: Facts) -> None:
    """Derive what depends on the memory that the model's state leaves; see the module."""
    if isinstance(filling.config, RLConfig):
        _derive_hybrid(filling)
    config = filling.config
    budget = max(0, trainer_memory(config, facts) - reserved(config, facts))
    if config.samples and not config.system.engine_kind.served:
        _derive_kv_memory(filling, facts, *_kv_share(config, facts, budget))
    if config.trains:
        _derive_microbatch(filling, facts, budget, most_tokens(config))


def reserved(config: RunConfig, facts: Facts, *, turns: bool | None = None) -> int:
    """Bytes that are not available for activations, keys and values while the policy trains."""
    if facts.model is None:
        return 0
    layout = layout_of(config, facts)
    tokens = longest_sample(config, facts) or SHORT
    turns = layout.turns if turns is None else turns
    planned = price(facts.model, replace(layout, turns=turns, tokens=tokens))
    return planned.training - -(-tokens // layout.sequence) * activation_bytes(facts.model, layout)


def _kv_share(config: RunConfig, facts: Facts, budget: int) -> tuple[int, str]:
    """Bytes for the KV cache of one device's engines, and which part of the free memory that is."""
    free = free_memory(config, facts)
    model = facts.model
    if engines_elsewhere(config, facts):
        # The engines' GPUs are assumed to be like the trainer's.
        engine = planned_elsewhere(config, facts)
        return (free - (engine.engine if engine else 0)) // 2, "on its own GPU, half"
    layout = layout_of(config, facts)
    if not isinstance(config, RLConfig):  # nothing is trained while it samples
        layout = replace(layout, trains=False, holds_model=loads_model(config))
        return (free - (price(model, layout).sampling if model else 0)) // 2, "half"
    if known(config.system, "hybrid") and model is not None:
        return (free - price(model, layout).sampling) // 2, "while the policy does not train, half"
    together = planned(config, facts, least=True)
    if together is None or not on_gpu(config):
        return budget // 4, "a quarter"
    beside = (
        int(LIMIT * free)
        - processes_with_trainer(config) * LIBRARIES
        - together.training
        + together.kv
    )
    return min(budget // 4, max(0, beside)), "a quarter"


def may_take_turns(config: RunConfig) -> bool:
    """Whether engine and trainer share a GPU, so that each may free it for the other."""
    apart = engines_apart(config) or config.system.engine_kind.served
    if not isinstance(config, RLConfig) or not on_gpu(config) or apart:
        return False
    return not (config.rollout.max_staleness and weights_apart(config))


def _derive_hybrid(filling: Filling) -> None:
    if may_take_turns(filling.config):
        filling.fill("system.hybrid", True, "engine and trainer share the GPU")
    filling.fill("system.hybrid", False, "engine and trainer do not take turns on a GPU")


def _derive_microbatch(filling: Filling, facts: Facts, budget: int, most: int) -> None:
    key = "system.max_tokens_per_microbatch"
    config = filling.config
    model = facts.model
    longest = longest_sample(config, facts) or 0
    if model is None:
        filling.fill(key, max(UNKNOWN_MODEL_TOKENS, longest), "the model's size is not known")
        return
    per_token = bytes_per_token(model, layout_of(config, facts))
    most *= config.system.sequence_parallel.size
    if on_gpu(config):
        tokens, reason = _fitting(config, facts, model, longest, most)
        filling.fill(key, tokens, f"{reason} ({format_size(per_token)} of activations per token)")
        return
    needed = planned(config, facts, least=True)
    beside = needed.kv if needed and not needed.turns else 0
    room, part = min(
        (budget // 2, "half of the free memory"),
        (budget - beside, "what the KV cache of one request leaves free"),
    )
    fitting = max(0, room) // per_token
    if longest >= min(fitting, most):
        tokens = longest
        reason = "the longest sample has to fit"
    elif fitting >= most:
        tokens = most
        reason = "memory allows more, but more would be no faster"
    else:
        tokens = fitting // 256 * 256 or fitting
        tokens = max(1, tokens, longest)
        reason = part
    filling.fill(key, tokens, f"{reason} ({format_size(per_token)} of activations per token)")


def _fitting(
    config: RunConfig, facts: Facts, model: ModelFacts, longest: int, most: int
) -> tuple[int, str]:
    """The most tokens, up to ``most``, with which the trainer's GPU is filled to ``LIMIT``, and why
    no more; at least ``longest``."""
    host = host_tokens(config, facts, model)
    if longest >= most:
        return longest, "the longest sample has to fit"
    layout = layout_of(config, facts)
    kv = known(config.system, "kv_memory")
    if (
        kv
        and config.samples
        and not config.system.engine_kind.served
        and not engines_elsewhere(config, facts)
    ):
        layout = replace(
            layout, kv_bytes=engines_together(config, len(facts.hardware.gpus)) * parse_size(kv)
        )
    room = int(LIMIT * trainer_memory(config, facts)) - processes_with_trainer(config) * LIBRARIES

    def needed(tokens: int) -> float:
        passing = price(model, replace(layout, tokens=tokens))
        return max(passing.training, passing.teaching) if tokens <= host else inf

    least = max(longest, min(STEP, most))
    sizes = [*range(least // STEP * STEP + STEP, most, STEP), most]
    if longest < least and needed(least) <= room:
        sizes.insert(0, least)
    count = bisect_right(sizes, room, key=needed)
    if count == len(sizes):
        return most, "memory allows more, but more would be no faster"
    if count == 0:
        return max(1, longest), "the longest sample has to fit"
    return sizes[count - 1], f"what fits in {LIMIT:.0%} of the free memory"


def _derive_kv_memory(filling: Filling, facts: Facts, share: int, part: str) -> None:
    """Derive each engine's KV memory: enough for its concurrent requests, but no more than its part
    of ``share``.

    Args:
        share: bytes for all engines of one device together, a ``part`` of the free memory.
    """
    key = "system.kv_memory"
    config = filling.config
    model = facts.model
    engines = engines_together(config, len(facts.hardware.gpus))
    longest = longest_sample(config, facts)
    share = max(share // engines, LEAST_KV_BYTES)
    if longest is None or config.system.vllm.memory_share is not None:
        return
    part = f"{part} of the free memory" + (f", shared by {engines} engines" if engines > 1 else "")
    if model is None:
        filling.fill(key, megabytes(min(share, 4 * 10**9)), f"{part}, at most 4GB")
        return
    together, wanted = _wanted_kv(config, facts, model, engines)
    one = ceil(request_kv(config, facts, model) / ranks_per_engine(config))
    if one > share:
        share = one
        part = f"what one request of {longest} tokens takes, more than {part}"
    if wanted <= share:
        reason = f"enough for {together} requests of {longest} tokens at once"
    else:
        reason = f"{part}; {together} requests at once would take {format_size(wanted)}"
    wide = kv_bytes_per_number(config, facts) == 4
    filling.fill(
        key,
        megabytes(min(wanted, share)),
        f"{reason}, in {'float32' if wide else config.model.dtype}",
    )


def _wanted_kv(config: Any, facts: Facts, model: ModelFacts, engines: int) -> tuple[int, int]:
    """Concurrent requests per engine, and the bytes of their KV cache."""
    together = config.system.max_running
    if isinstance(config, RLConfig):
        prompts = ceil(config.rollout.prompts_per_step * config.rollout.over_generation)
        asked = max(
            prompts * config.rollout.group_size, (facts.eval_size or 0) * config.eval.samples
        )
    else:
        asked = (facts.train_size or together) * (config.sampling.n or 1)
    together = min(together, ceil(asked / engines))
    return together, max(LEAST_KV_BYTES, ceil(1.1 * together * request_kv(config, facts, model)))
