"""Derived settings of batch inference and of rejection-sampling fine-tuning."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from tunesmith.config.generation import RFTConfig, SamplingConfig
from tunesmith.config.resolved import settings
from tunesmith.plan.capacity import derive_kv_memory
from tunesmith.plan.cost import price
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.memory import engines_elsewhere, free_memory, layout_of, planned_elsewhere
from tunesmith.plan.weights import loads_model

TEMPLATE = "{prompt} <rm_score>: {reward} "
SEPARATOR = "\n\n"

LORA_LR = 2e-4
"""The RFT performance guide's learning rate, which is that of an adapter."""
WARMUP = 50


def profile_values(name: str) -> dict[str, tuple[Any, str]]:
    """The values of an RFT profile, with reasons, by dotted key."""
    profiles = tomllib.loads(Path(__file__).with_name("profiles.toml").read_text(encoding="utf-8"))
    return {key: (value, reason) for key, (value, reason) in profiles[name].items()}


def derive_sampling(filling: Filling[Any]) -> None:
    """Number of samples and temperature; for RFT everything that its profile sets."""
    config: SamplingConfig = filling.config
    if isinstance(config, RFTConfig):
        _derive_profile(filling, config)
        return
    if config.drawing is None:
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
    given, name = settings(config, given_only=True), config.rft.profile
    values = profile_values(name)
    if config.lora.on:
        values = values | {"train.lr": (LORA_LR, "for an adapter")}
    for key, (value, reason) in values.items():
        if key not in given and filling.get(key) != value:
            filling.set(key, value, f"profile {name}: {reason}")
    if config.rft.few_shot is not None:
        filling.fill("rft.few_shot_separator", SEPARATOR, "a blank line")


def derive_rft_warmup(config: RFTConfig, given: Mapping[str, Any], samples: int) -> tuple[int, str] | None:
    """Warm-up steps and the reason, once the number of samples is known; None: as in the run file."""
    train, warmed = config.train, {"train.warmup_steps", "train.warmup_ratio"} & given.keys()
    if config.rft.profile == "conservative" or warmed or "train.schedule" in given:
        return None
    steps = ceil((train.epochs or 1.0) * samples / train.batch_size)
    if steps >= 10 * WARMUP:
        return WARMUP, f"profile {config.rft.profile}"
    return steps // 10, f"profile {config.rft.profile}: {WARMUP}, but no more than a tenth of {steps} steps"


def derive_sampler_memory(filling: Filling[Any], facts: Facts) -> None:
    """KV memory of the sampler: only the weights are in memory with it."""
    config: SamplingConfig = filling.config
    if config.drawing and not config.system.served:
        free, taken = free_memory(config, facts), 0
        if engines_elsewhere(config, facts):
            engine = planned_elsewhere(config, facts)
            taken = engine.engine if engine else 0
        elif facts.model is not None:
            layout = replace(layout_of(config, facts), trains=False, holds_model=loads_model(config))
            taken = price(facts.model, layout).sampling
        derive_kv_memory(filling, facts, (free - taken) // 2, "half")
