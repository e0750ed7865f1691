"""What a vision tower adds to a plan: memory where it is trained, and operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import planned
from tunesmith.plan.cost.price import price
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.cost.tower import TrainedTower, image_operations
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import ModelFacts, facts_of
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.facts.towers import TowerSizes
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve

TOWER = TowerSizes(32, 1280, 3420, 4, gated=True, whole=4, window=64, pixels=1176)
MODEL = ModelFacts(
    parameters=3_085_938_688,
    layers=36,
    hidden_size=2048,
    intermediate_size=11008,
    heads=16,
    kv_heads=2,
    head_dim=128,
    vocab_size=151936,
    context=32768,
    tied=True,
    family="qwen2_5_vl_text",
    tower_parameters=668_683_776,
    tower=TOWER,
)


def found(*overrides: str, rl: bool = False, **facts: float | None) -> AnyPlan:
    base = ["model.path=org/m", "data.train=org/d", *overrides]
    config = load_config(RLConfig if rl else SFTConfig, None, base)
    known = {"images": 100, "image_rows": 300.0, "rows_of_image": 300.0, "image_share": 0.8}
    sizes = Facts(machine("H200"), MODEL, train_size=1000, longest=512)
    return resolve(config, replace(sizes, **{**known, **facts}))


def test_published_tower() -> None:
    facts = facts_of(
        {
            "model_type": "qwen2_5_vl",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "vocab_size": 151936,
            "vision_config": {
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "depth": 32,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        }
    )
    assert facts is not None and facts.tower == TOWER
    numbers = TOWER.layers * TOWER.block + TOWER.projector(2048) + 1280 * TOWER.pixels
    assert numbers == pytest.approx(MODEL.tower_parameters, rel=0.005)


def test_memory_of_a_trained_tower_by_hand() -> None:
    tower = TrainedTower(numbers=1000, trained=100, kept=50, again=20, block=10)
    layout = Layout(2, tokens=8)
    plain = price(MODEL, layout)
    own = price(MODEL, replace(layout, tower=tower))
    assert own.weights - plain.weights == 2 * 1000
    assert own.gradients - plain.gradients == 4 * 100
    assert own.optimizer - plain.optimizer == (4 + 8) * 100
    assert own.activations - plain.activations == 8 * 50
    sharded = replace(layout, zero_stage=3, shards=4)
    plain = price(MODEL, sharded)
    own = price(MODEL, replace(sharded, tower=tower, checkpointing=1))
    assert own.weights - plain.weights == 4 * 1000 // 4
    assert own.gathered - plain.gathered == 2 * 1000
    assert own.gradients - plain.gradients == 4 * 25
    beside = replace(layout, lora_rank=8)  # the original, and what is trained
    plain = price(MODEL, beside)
    own = price(MODEL, replace(beside, tower=tower))
    assert own.weights - plain.weights == 2 * (1000 + 100)
    assert own.optimizer - plain.optimizer == (4 + 8) * 100
    away = replace(layout, offload=True)
    host = price(MODEL, replace(away, tower=tower)).host - price(MODEL, away).host
    assert host == 16 * 100


def test_plans_of_a_frozen_and_of_a_trained_tower() -> None:
    each: dict[str, int] = {}
    for tower in ("frozen", "projector", "trained"):
        memory = planned(
            found(f"model.vision_tower={tower}", "system.max_tokens_per_microbatch=2048")
        )
        assert memory is not None
        each[tower] = memory.state
    assert each["trained"] - each["frozen"] == 16 * MODEL.tower_parameters
    assert each["projector"] - each["frozen"] == 16 * TOWER.projector(2048)


def test_images_take_time() -> None:
    forward = 300 * TOWER.operations(300)
    assert TOWER.operations(300) == 4 * (
        2 * 32 * 1280 * (4 * 1280 + 3 * 3420) + 4 * 1280 * (4 * 1200 + 28 * 64)
    )
    plan = found()
    assert image_operations(plan, 8, again=0) == (8 * forward, 0)
    trained = found("model.vision_tower=trained")
    assert image_operations(trained, 8, again=0) == (24 * forward, 0)
    assert image_operations(trained, 8, again=0.5) == (32 * forward, 0)
    rewarded = found(
        "model.vision_tower=trained", 'reward.functions=["math"]', "algorithm.kl.coef=0.1", rl=True
    )
    assert image_operations(rewarded, 8, again=0) == (32 * forward, 8 * forward)
    seconds = step_seconds(plan)
    assert 0 < seconds["images"] < seconds["training"]
    assert "images" not in step_seconds(found(images=0, image_rows=0.0))


def test_a_tower_is_trained_where_the_data_was_not_read() -> None:
    """As in dry runs and in searches, which know the number of lines."""
    assert planned(found("model.vision_tower=trained", images=None)) is not None
