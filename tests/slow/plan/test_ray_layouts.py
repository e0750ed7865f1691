"""What a run on a Ray cluster gets of described machines when nothing was said, and what is left as
it was said."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from tests.support.hardware_table import MODELS
from tests.support.tiny import save_model
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.plan.cluster import bundles, missing, processes
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan, Plan
from tunesmith.plan.report import layout_of_run
from tunesmith.plan.resolve import resolve
from tunesmith.run.assembly.planning import plan_run

SMALL = ModelFacts(500_000_000, 24, 896, 4864, 14, 2, 64, 151936, 32768, tied=True)
QWEN_7B = MODELS["7B (Qwen 2.5)"]
LLAMA_70B = MODELS["70B (Llama 3)"]
PPO = ("algorithm.name=ppo", "algorithm.kl.coef=0.01")
VLLM = ("system.engine=vllm",)
REWARD = ('reward.models=[{path="org/r"}]',)
BASE = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']


def facts(on: str, model: ModelFacts | None, **changes: Any) -> Facts:
    return Facts(machine(on), model, **{"train_size": 1000, "longest": 1000, **changes})


def resolved(
    on: str, model: ModelFacts | None, *said: str, cluster: str = "ray", **changes: Any
) -> Plan[RLConfig]:
    config = load_config(RLConfig, None, [*BASE, f"system.cluster={cluster}", *said])
    return resolve(config, facts(on, model, **changes))


def placed(plan: AnyPlan) -> set[frozenset[str]]:
    """The groups of roles that share GPUs."""
    return {frozenset(group) for group in plan.devices.placement.colocate}


@pytest.mark.parametrize("model", [SMALL, QWEN_7B])
@pytest.mark.parametrize("said", [(), PPO, (*PPO, *VLLM)])
def test_on_one_machine_a_run_gets_the_layout_that_it_gets_without_ray(
    model: ModelFacts, said: tuple[str, ...]
) -> None:
    ray, here = (
        resolved("8xA100-80GB", model, *said, cluster=cluster) for cluster in ("ray", "none")
    )
    for key in ("trainer_ranks", "zero_stage", "engines", "hybrid", "gradient_checkpointing"):
        assert ray.settings[f"system.{key}"] == here.settings[f"system.{key}"], key
    roles = {"actor", "rollout", *(("ref", "critic") if said else ())}
    assert placed(ray) == {frozenset(roles)}
    assert here.settings["system.placement"] is None and "ref" not in processes(ray.devices)


@pytest.mark.parametrize(
    ("on", "model", "said", "frozen"),
    [
        ("2x8xA100-80GB", SMALL, (), 0),
        ("2x8xA100-80GB", QWEN_7B, (*PPO, *VLLM), 0),
        ("2x8xA100-80GB", QWEN_7B, (*PPO, *VLLM, *REWARD), 8 * 10**9),
        ("2x8xA100-80GB", QWEN_7B, (*PPO, "rollout.max_staleness=1"), 0),
        ("6x8xA100-80GB", LLAMA_70B, (*VLLM, "algorithm.kl.coef=0.01"), 0),
        ("4x8xH100-80GB", LLAMA_70B, (*VLLM, "rollout.max_staleness=1"), 0),
    ],
)
def test_what_is_derived_fits_the_machines_and_their_memory(
    on: str, model: ModelFacts, said: tuple[str, ...], frozen: int
) -> None:
    found = resolved(on, model, *said, frozen_parameters=frozen)
    there = facts(on, model, frozen_parameters=frozen)
    each = {"CPU": float(there.hardware.cores), "GPU": 8.0}
    wanted = bundles(found.devices)
    assert missing(wanted, [each] * there.hardware.nodes) is None
    assert sum(bundle.gpus for bundle in wanted) >= 0.75 * 8 * there.hardware.nodes
    for _, planned, free in planned_devices(found):
        assert planned.peak <= free
    assert step_seconds(found)["step"] > 0
    reasons = {d.key: d.reason for d in found.reasons}
    assert {"system.trainer_ranks", "system.zero_stage", "system.hybrid"} <= reasons.keys()
    assert ("system.placement" in reasons) == bool(placed(found))
    assert found.devices.weight_plane == ("ipc" if found.devices.hybrid else "nccl")


def test_an_engine_of_several_gpus_shares_its_places_with_as_many_ranks() -> None:
    said = ("algorithm.kl.coef=0.01", "system.vllm.tensor_parallel_size=4", "system.hybrid=true")
    config = resolved("6x8xA100-80GB", LLAMA_70B, *VLLM, *said)
    assert config.settings["system.zero_stage"] == 3
    counted = Counter((bundle.roles, bundle.gpus) for bundle in bundles(config.devices))
    assert counted == {((*["actor"] * 4, "rollout"), 4.0): 12}
    assert processes(config.devices) == {"actor": 48, "rollout": 12}


def test_a_reward_model_is_on_all_gpus_or_has_its_own() -> None:
    for said in (
        ('system.placement.colocate=[["actor", "critic", "ref", "reward", "rollout"]]',),
        ('system.placement.colocate=[["actor", "critic", "ref", "rollout"]]',),
    ):
        config = resolved(
            "2x8xA100-80GB", QWEN_7B, *PPO, *VLLM, *REWARD, *said, frozen_parameters=8 * 10**9
        )
        count = processes(config.devices)["reward"]
        assert count == (
            config.settings["system.trainer_ranks"]
            if {"reward", "actor"} <= set().union(*placed(config))
            else 1
        )
        left = 16 - sum(bundle.gpus for bundle in bundles(config.devices))
        assert 0 <= left < config.devices.tensor, "too few for another engine"
    own = resolved(
        "2x8xA100-80GB",
        SMALL,
        *PPO,
        *REWARD,
        "system.placement.reward.processes=4",
        frozen_parameters=10**8,
    )
    assert processes(own.devices)["reward"] == 4


@pytest.mark.parametrize(
    ("said", "shards"),
    [
        ((), 3),
        (("system.placement.reward.processes=4",), 4),
        (("system.placement.reward.shards=4",), 4),
        (("system.zero_stage=3", "system.placement.reward.processes=4"), None),
    ],
)
def test_a_reward_model_that_does_not_fit_a_gpu_is_shared(
    said: tuple[str, ...], shards: int | None
) -> None:
    """70B in 16 bits is 140 GB, and a GPU has 80."""
    known = {"frozen_parameters": 70 * 10**9}
    apart = 'system.placement.colocate=[["actor", "rollout"]]'
    config = resolved("2x8xA100-80GB", SMALL, *REWARD, apart, *said, **known)
    reward = config.devices.placement.reward
    count = config.devices.scoring_shards("reward")
    assert reward.shards == shards and count == (shards or 4)
    assert processes(config.devices)["reward"] == max(count, reward.processes or 1)
    planned = {name: (price, free) for name, price, free in planned_devices(config)}
    price, free = planned["reward model"]
    assert price.frozen == 2 * ceil(70 * 10**9 / count) and price.peak <= free
    placement = config.devices.placement
    whole = placement.model_copy(update={"reward": reward.model_copy(update={"shards": 1})})
    there = config.with_devices(placement=whole)
    [alone] = [price for name, price, _ in planned_devices(there) if name == "reward model"]
    assert alone.frozen == 140 * 10**9 and alone.peak > free


def test_what_a_reward_model_leaves_of_few_gpus_is_enough_for_the_other_roles() -> None:
    said = (*REWARD, "system.placement.colocate=[]")
    config = resolved("8xH100-80GB", SMALL, *said, frozen_parameters=120 * 10**9)
    assert config.devices.scoring_shards("reward") == 4
    assert sum(bundle.gpus for bundle in bundles(config.devices)) == 8


def test_reward_models_on_the_trainers_gpus_are_shared_by_those_of_a_machine() -> None:
    """An adapter's base is whole on each GPU, and 35B beside it are not."""
    said = (*REWARD, "lora.rank=16", 'system.placement.colocate=[["actor", "reward", "rollout"]]')
    config = resolved("2x8xA100-80GB", QWEN_7B, *said, frozen_parameters=35 * 10**9)
    assert config.devices.placement.reward.shards == 8
    assert (
        processes(config.devices)["reward"] == config.settings["system.trainer_ranks"] == 16
        and config.settings["system.zero_stage"] == 0
    )
    small = resolved("2x8xA100-80GB", QWEN_7B, *said, frozen_parameters=10**9)
    assert small.devices.scoring_shards("reward") == 1


@pytest.mark.parametrize(("model", "size"), [(QWEN_7B, 8), (LLAMA_70B, 48)])
def test_the_ranks_of_one_machine_share_a_copy_that_fits_them(model: ModelFacts, size: int) -> None:
    said = ("system.zero_stage=3", "system.hybrid=true")
    config = resolved("6x8xA100-80GB", model, *VLLM, *said)
    assert (config.settings["system.trainer_ranks"], config.settings["system.shard_size"]) == (
        48,
        size,
    )


def test_with_rollouts_ahead_engines_have_gpus_of_their_own() -> None:
    config = resolved("2x8xA100-80GB", QWEN_7B, *PPO, "rollout.max_staleness=1")
    assert config.settings["system.hybrid"] is False and not any(
        "rollout" in group for group in placed(config)
    )
    used = config.settings["system.trainer_ranks"] + config.settings["system.engines"]
    assert used <= 16 and config.settings["system.engines"] > 0


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("system.trainer_ranks=4",), {"trainer_ranks": 4, "hybrid": False}),
        (("system.engines=2",), {"engines": 2, "hybrid": False}),
        (("system.hybrid=false",), {"hybrid": False}),
        (
            ("system.hybrid=true", "system.trainer_ranks=4"),
            {"trainer_ranks": 4, "engines": 4, "hybrid": True},
        ),
        (("system.zero_stage=3",), {"zero_stage": 3, "trainer_ranks": 16}),
        (('system.weight_plane="nccl"',), {"hybrid": False}),
        (
            ('system.placement.colocate=[["actor", "rollout"]]', "rollout.max_staleness=1"),
            {"hybrid": False},
        ),
        (('system.device="cpu"',), {"trainer_ranks": 1, "engines": 1, "placement": None}),
    ],
)
def test_what_was_said_stays(said: tuple[str, ...], expected: dict[str, Any]) -> None:
    system = resolved("2x8xA100-80GB", SMALL, *said).settings
    assert {key: system[f"system.{key}"] for key in expected} == expected


def test_what_was_said_of_places_stays_key_by_key() -> None:
    config = resolved("2x8xA100-80GB", SMALL, *PPO, "system.placement.ref.processes=2")
    assert processes(config.devices)["ref"] == 2 and placed(config) == {
        frozenset({"actor", "critic", "rollout"})
    }
    config = resolved("2x8xA100-80GB", SMALL, *PPO, "system.placement.actor.cpus=4")
    assert config.devices.placement.actor.cpus == 4
    assert placed(config) == {frozenset({"actor", "ref", "critic", "rollout"})}
    apart = resolved("2x8xA100-80GB", SMALL, *PPO, "system.placement.colocate=[]")
    assert not placed(apart) and max(len(bundle.roles) for bundle in bundles(apart.devices)) == 1
    assert apart.settings["system.hybrid"] is False and processes(apart.devices)["ref"] == 1


def test_a_reference_that_is_placed_with_the_trainer_has_no_processes() -> None:
    with pytest.raises(ConfigError, match=r"system\.placement\.ref\.processes"):
        resolved(
            "8xH100",
            SMALL,
            *PPO,
            'system.placement={colocate=[["actor", "ref"]], ref={processes=2}}',
        )


def test_the_plan_shows_places_and_their_reason() -> None:
    found = layout_of_run(resolved("2x8xA100-80GB", SMALL, *PPO))
    [entry] = [derived for derived in found.derived if derived.key == "system.placement"]
    assert (
        entry.value == {"colocate": [["actor", "ref", "critic", "rollout"]]}
        and "fastest step" in entry.reason
    )


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_what_does(tmp_path: Path) -> None:
    system = resolved("8xA100-80GB", LLAMA_70B, *VLLM).settings
    assert (system["system.zero_stage"], system["system.offload_optimizer"]) == (3, True)
    with pytest.raises(
        CapacityError, match=r"offload_optimizer = true .* 32 such GPUs with system\.zero_stage = 3"
    ):
        resolved("8xA100-80GB", LLAMA_70B, *VLLM, "system.offload_optimizer=false")
    config = load_config(
        RLConfig,
        None,
        [
            *BASE[1:],
            f"model.path={save_model(tmp_path / 'model')}",
            "system.cluster=ray",
            "system.trainer_ranks=12",
            "system.engines=5",
            "rollout.max_new_tokens=64",
        ],
    )
    with pytest.raises(
        CapacityError, match=r"17 GPUs are needed .* has 16.* What fits: .*trainer_ranks = 16"
    ):
        plan_run(config, "2x8xA100-80GB")


def test_one_gpu_and_a_model_of_unknown_size_are_as_before() -> None:
    for on, model in (("H200", SMALL), ("2x8xH200", None)):
        found = resolved(on, model)
        assert (found.settings["system.trainer_ranks"], found.settings["system.placement"]) == (
            1,
            None,
        )
        assert not {"system.trainer_ranks", "system.placement"} & {d.key for d in found.reasons}
    small = replace(SMALL, heads=16)
    assert resolved("8xH200", small).settings["system.trainer_ranks"] == 8
