"""``system.profile`` and ``system.tuned``: what they set, why, and what stays as the run file
says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunesmith.config.commands import KINDS
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.measured import remember, tuned_file
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.layout.profiles import SYSTEM_PROFILES
from tunesmith.plan.resolve import resolve
from tunesmith.run.assembly.checking import facts_of_run

MODEL = ModelFacts(
    parameters=1_500_000_000,
    layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    heads=12,
    kv_heads=2,
    head_dim=128,
    vocab_size=151936,
    context=32768,
    tied=True,
)
MACHINES = ("this", "A10G", "H100-80GB", "8xH100-80GB")


def said(kind: type[RunConfig], *more: str) -> Any:
    base = ["model.path=org/m", "data.train=org/data", "train.steps=10"]
    base += ['reward.functions=["exact_match"]'] if kind is RLConfig else []
    return load_config(kind, None, [*base, *more])


def found(
    kind: type[RunConfig], on: str, *more: str, longest: int = 512
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and reasons."""
    resolved = resolve(
        said(kind, *more), Facts(machine(on), MODEL, longest=longest, train_size=1000)
    )
    return resolved.settings, {entry.key: entry.reason for entry in resolved.reasons}


@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize("kind", [RLConfig, SFTConfig])
@pytest.mark.parametrize("profile", SYSTEM_PROFILES)
def test_a_profile_only_changes_how_fast_a_run_is(
    profile: str, kind: type[RunConfig], on: str
) -> None:
    usual, _ = found(kind, on, "lora.rank=8")
    values, reasons = found(kind, on, "lora.rank=8", f"system.profile={profile}")
    limits = {
        "data.max_tokens",
        "data.max_prompt_tokens",
    }  # of micro-batches, which no line of the data reaches
    others = {key for key in usual if values[key] != usual[key] and not key.startswith("system.")}
    assert others <= limits and all(values[key] > 512 for key in others)
    of_profile = {key for key, why in reasons.items() if why.startswith(f"profile {profile}: ")}
    assert of_profile <= {entry.key for entry in SYSTEM_PROFILES[profile]}
    assert "system.gradient_checkpointing" in of_profile


def test_each_value_is_set_where_it_can_be() -> None:
    values, reasons = found(RLConfig, "8xH100-80GB", "system.profile=memory")
    assert (
        values["system.zero_stage"] == 3
        and values["system.offload_optimizer"]
        and values["system.hybrid"]
    )
    assert reasons["system.zero_stage"].startswith("profile memory")
    alone, _ = found(RLConfig, "H100-80GB", "system.profile=memory")
    assert (
        alone["system.zero_stage"] == 0
        and alone["system.offload_optimizer"]
        and alone["system.hybrid"]
    )
    here, _ = found(SFTConfig, "this", "system.profile=memory", "system.device=cpu", "lora.rank=8")
    assert not here["system.offload_optimizer"] and not here["system.hybrid"]
    fast, _ = found(RLConfig, "H100-80GB", "system.profile=fast")
    assert fast["system.gradient_checkpointing"] is False
    said = ("system.profile=fast", "lora.rank=8", "system.offload_activations=false")
    long, reasons = found(SFTConfig, "A10G", *said, longest=8192)
    assert (
        long["system.gradient_checkpointing"]
        and "profile" not in reasons["system.gradient_checkpointing"]
    )


def test_what_is_said_stays() -> None:
    values, reasons = found(
        RLConfig,
        "8xH100-80GB",
        "system.profile=memory",
        "system.zero_stage=2",
        "system.max_running=8",
    )
    assert values["system.zero_stage"] == 2 and values["system.max_running"] == 8
    assert not {"system.zero_stage", "system.max_running"} & reasons.keys()


@pytest.mark.parametrize(
    "more",
    [
        "rollout.max_staleness=1 system.engine_process=true",
        "train.optimizer=muon",
        "algorithm.name=ppo",
    ],
)
@pytest.mark.parametrize("profile", SYSTEM_PROFILES)
def test_profiles_agree_with_what_is_learned(profile: str, more: str) -> None:
    for on in ("H100-80GB", "8xH100-80GB"):
        found(RLConfig, on, f"system.profile={profile}", *more.split())


def test_every_command_knows_profiles() -> None:
    for name, kind in KINDS.items():
        assert "profile" in kind.model_fields["system"].annotation.model_fields, name
    with pytest.raises(ConfigError, match=r"system\.tuned"):
        found(SFTConfig, "H100-80GB", "system.profile=fast", "system.tuned=true")


def test_what_was_measured_is_applied_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = said(SFTConfig, "system.tuned=true", "system.device=cpu")
    file, subject = tuned_file(config, read_hardware(), None)
    resolved = resolve(config, facts_of_run(config))
    assert any("tunesmith tune" in note for note in resolved.notes)
    best = {"system.threads": 1, "system.logprob_chunk": 48, "system.share_prompts": False}
    remember(file, {**subject, "best": {"values": best, "reason": "tuned on 2026-01-02"}})
    resolved = resolve(config, facts_of_run(config))
    reasons = {entry.key: entry.reason for entry in resolved.reasons}
    assert (
        resolved.settings["system.logprob_chunk"] == 48
        and reasons["system.logprob_chunk"] == "tuned on 2026-01-02"
    )
    assert not resolved.settings["system.share_prompts"]
    stays = said(SFTConfig, "system.tuned=true", "system.device=cpu", "system.logprob_chunk=32")
    assert resolve(stays, facts_of_run(stays)).settings["system.logprob_chunk"] == 32
    unasked = said(SFTConfig, "system.device=cpu")
    assert resolve(unasked, facts_of_run(unasked)).settings["system.logprob_chunk"] is None
    other = said(SFTConfig, "system.tuned=true", "system.device=cpu", "train.batch_size=4")
    assert facts_of_run(other).tuned is None, "another shape"


def test_what_a_profile_excludes_is_refused_by_its_keys() -> None:
    """The profile keeps the optimizer on the GPU, and weights in host memory are updated there."""
    facts = Facts(machine("A100-40GB"), MODEL, train_size=1000, longest=512)
    with pytest.raises(ConfigError) as error:
        resolve(said(SFTConfig, "system.offload_parameters=true", "system.profile=fast"), facts)
    keys = {"system.offload_optimizer", "system.offload_parameters"}
    assert keys in [{*problem.keys} for problem in error.value.problems]


def test_a_profiles_reason_takes_the_place_of_another() -> None:
    """Of a CPU, which decodes no more requests at once."""
    plan = resolve(
        load_config(
            KINDS["generate"], None, ["model.path=o/m", "data.train=o/d", "system.profile=memory"]
        ),
        Facts(machine("this"), replace(MODEL, parameters=10_000_000), longest=64),
    )
    keys = [entry.key for entry in plan.reasons]
    assert "system.max_running" in keys and len(keys) == len(set(keys))
