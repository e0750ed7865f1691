"""Derived settings of batch inference and of rejection-sampling fine-tuning."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.config.commands import RFTConfig, SamplingConfig
from tunesmith.config.engines import ENGINES
from tunesmith.config.resolved import settings
from tunesmith.config.section import known
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.length import draws, steps_of_passes

TEMPLATE = "{prompt} <rm_score>: {reward} "
SEPARATOR = "\n\n"

LORA_LR = 2e-4
"""The RFT performance guide's learning rate, which is for an adapter."""
WARMUP = 50
TOGETHER = 64
TOGETHER_LARGE = 32
LARGE = 100e6
"""Completions decoded together on a CPU, also for models of more than ``LARGE`` parameters.
Measured on one core: with 16M and 40M parameters 64 are within 2% of the most tokens per second,
with 134M 32 are 1% faster than 64."""


def profile_values(name: str) -> dict[str, tuple[Any, str]]:
    """The values of an RFT profile, with reasons, by dotted key."""
    profiles = tomllib.loads(Path(__file__).with_name("profiles.toml").read_text(encoding="utf-8"))
    return {key: (value, reason) for key, (value, reason) in profiles[name].items()}


def derive_sampling(filling: Filling, facts: Facts) -> None:
    """Derive number of samples and temperature; for RFT, everything in its profile."""
    config: SamplingConfig = filling.config
    _derive_together(filling, facts)
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


def _derive_together(filling: Filling, facts: Facts) -> None:
    """On a CPU, fewer completions at once, so that the first ones are finished early."""
    system = filling.config.system
    on_cpu = not facts.hardware.gpus or known(system, "device") == "cpu"
    given = "max_running" in system.model_fields_set or ENGINES[system.engine].third_party
    if on_cpu and filling.config.samples and not given:
        parameters = facts.model.parameters if facts.model else None
        together = TOGETHER_LARGE if parameters and parameters > LARGE else TOGETHER
        filling.set(
            "system.max_running", together, "on a CPU more at once are no faster, and end later"
        )


def _derive_profile(filling: Filling, config: RFTConfig) -> None:
    given = settings(config, given_only=True)
    name = config.rft.profile
    values = profile_values(name)
    if config.lora.on:
        values = values | {"train.lr": (LORA_LR, "for an adapter")}
    for key, (value, reason) in values.items():
        if key not in given and filling.get(key) != value:
            filling.set(key, value, f"profile {name}: {reason}")
    if config.rft.few_shot is not None:
        filling.fill("rft.few_shot_separator", SEPARATOR, "a blank line")


def derive_rft_warmup(
    config: RFTConfig, given: Mapping[str, Any], samples: int
) -> tuple[int, str] | None:
    """Warm-up steps and the reason, once the number of samples is known; None: keep the run
    file's."""
    train = config.train
    warmed = {"train.warmup_steps", "train.warmup_ratio"} & given.keys()
    if config.rft.profile == "conservative" or warmed or "train.schedule" in given:
        return None
    steps = steps_of_passes(draws(config, samples) or samples, samples, train.batch_size)
    if steps >= 10 * WARMUP:
        return WARMUP, f"profile {config.rft.profile}"
    return (
        steps // 10,
        f"profile {config.rft.profile}: {WARMUP}, but no more than a tenth of {steps} steps",
    )
