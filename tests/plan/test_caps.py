"""Tokens of passes that are not the policy's training: how they are derived, priced and refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.activations import scoring_bytes
from tunesmith.plan.cost.memory import layout_of, planned, planned_roles
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.report import report_of
from tunesmith.plan.resolve import resolve

MODEL = ModelFacts(
    parameters=7_615_000_000,
    context=32768,
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    tied=False,
    family="qwen2",
)
CAPS = ("max_tokens_per_microbatch", "scoring_max_tokens", "critic_max_tokens", "reward_max_tokens")
WITH_REFERENCE = ("algorithm.name=ppo", "algorithm.kl.coef=0.1")


def found(kind: type[RunConfig], on: str, *said: str, **facts: Any) -> Any:
    base = ["model.path=org/m", "data.train=org/d", *said]
    base += ['reward.functions=["exact_match"]'] if kind is RLConfig else []
    known = Facts(machine(on), MODEL, train_size=1000, longest=512, **facts)
    return resolve(load_config(kind, None, base), known)


def caps(resolved: Any) -> dict[str, int | None]:
    return {key: resolved.settings[f"system.{key}"] for key in CAPS}


def test_scoring_has_as_many_tokens_as_fit_the_memory_of_a_micro_batch() -> None:
    resolved = found(SFTConfig, "H200", "data.eval=org/e", "system.max_tokens_per_microbatch=2048")
    tokens = caps(resolved)
    price = planned(resolved)
    assert price is not None and tokens["scoring_max_tokens"] == 32768, "more would be no faster"
    assert price.scored <= price.activations + price.head and price.scoring <= price.training
    again = "system.gradient_checkpointing=true"
    resolved = found(
        SFTConfig, "H200", "data.eval=org/e", "system.max_tokens_per_microbatch=2048", again
    )
    price = planned(resolved)
    layout = layout_of(resolved)
    scoring = resolved.settings["system.scoring_max_tokens"]
    assert price is not None and 2048 < scoring < 32768 and scoring % 256 == 0
    room = price.activations + price.head
    assert scoring_bytes(MODEL, replace(layout, tokens=scoring)) == price.scored <= room
    assert scoring_bytes(MODEL, replace(layout, tokens=scoring + 256)) > room


def test_where_micro_batches_are_large_scoring_has_the_same_layout() -> None:
    resolved = found(SFTConfig, "H200", "data.eval=org/e", "system.max_tokens_per_microbatch=40000")
    assert caps(resolved)["scoring_max_tokens"] == 40000
    assert caps(found(SFTConfig, "H200")) | {CAPS[0]: 0} == dict.fromkeys(CAPS[1:]) | {
        CAPS[0]: 0
    }, "nothing scores"


def test_a_critic_and_reward_models_have_their_own() -> None:
    models = ("lora.rank=16", 'reward.models=[{path = "org/judge"}]')
    given = (
        "rollout.max_new_tokens=512",
        "system.max_tokens_per_microbatch=4096",
        *WITH_REFERENCE,
        *models,
    )
    resolved = found(RLConfig, "H200", *given, frozen_parameters=7_000_000_000)
    tokens = caps(resolved)
    assert all(value is not None and value >= 4096 for value in tokens.values()), tokens
    price = planned(resolved)
    roles = planned_roles(resolved)
    assert (
        price is not None and price.rewarded and roles["reward models"].rewarded == price.rewarded
    )
    assert price.peak <= resolved.facts.hardware.gpus[0].memory_free
    shown = report_of(resolved.said, resolved)
    assert set(shown["memory"][0]["phases"]) == {"training", "scoring", "sampling"}
    assert {f"system.{key}" for key in CAPS} <= set(shown["layout"])
    more = found(
        RLConfig, "H200", *given, "system.critic_max_tokens=32768", frozen_parameters=7_000_000_000
    )
    larger = planned(more)
    assert larger is not None and larger.activations > price.activations, (
        "its own micro-batch counts"
    )


@pytest.mark.parametrize(
    ("kind", "said", "key"),
    [
        (SFTConfig, "system.scoring_max_tokens=4096", "system.scoring_max_tokens has no effect"),
        (RLConfig, "system.scoring_max_tokens=4096", "system.scoring_max_tokens has no effect"),
        (RLConfig, "system.critic_max_tokens=4096", "system.critic_max_tokens has no effect"),
        (RLConfig, "system.reward_max_tokens=4096", "system.reward_max_tokens has no effect"),
        (SFTConfig, "system.reward_max_tokens=4096", "system.reward_max_tokens has no effect"),
    ],
)
def test_a_cap_that_nothing_reads_is_refused(kind: type[RunConfig], said: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        found(kind, "H200", said, "lora.rank=16")


@pytest.mark.parametrize("key", ["scoring_max_tokens", "critic_max_tokens"])
def test_a_cap_below_the_longest_sample_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"system\.{key} = 100 .*at least 257"):
        found(
            RLConfig,
            "H200",
            f"system.{key}=100",
            "rollout.max_new_tokens=256",
            "lora.rank=16",
            *WITH_REFERENCE,
        )


def test_a_tower_is_in_memory_if_the_data_has_images() -> None:
    tower = 600_000_000
    model = replace(MODEL, tower_parameters=tower)
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d"])

    def frozen(images: int) -> int:
        facts = Facts(machine("H200"), model, train_size=1000, longest=512, images=images)
        price = planned(resolve(config, facts))
        assert price is not None
        return price.frozen

    assert frozen(3) - frozen(0) == 2 * tower
