"""Derived settings of batch inference and of rejection-sampling fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunesmith.config.changing import with_values
from tunesmith.config.commands import GenerateConfig, RFTConfig, SamplingConfig
from tunesmith.config.resolved import Derived, settings
from tunesmith.config.schema import RunConfig
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.length import draws, steps_of_passes
from tunesmith.plan.plan import MOST_RUNNING, USUAL_RUNNING, C, Plan, Reasons
from tunesmith.plan.replacing import replace
from tunesmith.records.toml import table_beside

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
    values = table_beside(__file__, "profiles.toml")[name]
    return {key: (value, reason) for key, (value, reason) in values.items()}


def with_profile(said: C, reasons: Reasons) -> C:
    """What was said, with the profile of rejection-sampling fine-tuning."""
    if isinstance(said, RFTConfig):
        entries = [*_of_profile(said)]
        said = with_values(said, {entry.key: entry.value for entry in entries})
        for entry in entries:
            reasons.add(entry.key, entry.value, entry.reason)
    return said


def with_sampling(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the number of completions and their temperature."""
    said = plan.said
    if not isinstance(said, GenerateConfig) or not said.samples:
        return plan
    section = said.sampling
    count = reasons.fill("sampling.n", section.n, 1, "one completion per prompt")
    greedy = count == 1
    why = "one completion: greedy" if greedy else "the model's own distribution"
    usual = 0.0 if greedy else 1.0
    temperature = reasons.fill("sampling.temperature", section.temperature, usual, why)
    output = said.output
    if output.kind == "conditional":
        why = "the prompt, then the reward"
        reasons.fill("output.reward_template", output.reward_template, TEMPLATE, why)
    if output.kind == "pairs":
        why = "any difference makes a pair"
        reasons.fill("output.min_margin", output.min_margin, 0.0, why)
    return replace(plan, sampling=replace(plan.sampling, n=count, temperature=temperature))


def most_running(said: RunConfig, facts: Facts, reasons: Reasons) -> int:
    """How many completions are decoded at once at most: on a GPU as many as its memory may hold
    (``derive.sizes``), on a CPU fewer, so that the first ones are finished early."""
    system = said.system
    if system.max_running is not None:
        return system.max_running
    if said.samples:
        reasons.assumed["system.max_running"] = USUAL_RUNNING
    on_cpu = not facts.hardware.gpus or system.device == "cpu"
    if not on_cpu and not system.engine_kind.served:
        return MOST_RUNNING
    answers = isinstance(said, SamplingConfig) and said.samples
    if not on_cpu or not answers or system.engine_kind.third_party:
        return USUAL_RUNNING
    parameters = facts.model.parameters if facts.model else None
    together = TOGETHER_LARGE if parameters and parameters > LARGE else TOGETHER
    why = "on a CPU more at once are no faster, and end later"
    return reasons.add("system.max_running", together, why)


def _of_profile(said: RFTConfig) -> Iterator[Derived]:
    given = settings(said, given_only=True)
    now = settings(said)
    name = said.rft.profile
    values = profile_values(name)
    if said.lora.on:
        values = values | {"train.lr": (LORA_LR, "for an adapter")}
    for key, (value, reason) in values.items():
        if key not in given and now.get(key) != value:
            yield Derived(key, value, f"profile {name}: {reason}")
    if said.rft.few_shot is not None and said.rft.few_shot_separator is None:
        yield Derived("rft.few_shot_separator", SEPARATOR, "a blank line")


def rft_warmup(plan: Plan[RFTConfig], samples: int) -> tuple[int, str] | None:
    """Warm-up steps and the reason, once the number of samples is known; None: keep the run
    file's."""
    profile = plan.said.rft.profile
    settled = {"train.warmup_steps", "train.warmup_ratio", "train.schedule"} & plan.given.keys()
    if profile == "conservative" or settled:
        return None
    training = plan.training
    assert training.batch is not None, "it trains"
    steps = steps_of_passes(draws(training, samples) or samples, samples, training.batch)
    if steps >= 10 * WARMUP:
        return WARMUP, f"profile {profile}"
    return steps // 10, f"profile {profile}: {WARMUP}, but no more than a tenth of {steps} steps"
