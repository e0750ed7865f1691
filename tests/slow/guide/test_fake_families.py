"""Dry runs of families with experts and with states: larger than tiny, on a fake GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.fake_runs import GIVEN, resolved
from tests.support.families import SPECIAL
from tests.support.long import again
from tunesmith.guide.simulate.dry_run import dry_run
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.plan.cost.memory import planned

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 40960,
}
MIXERS: dict[str, Any] = {
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_d_ssm": 2048,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "head_dim": 64,
}


LONG = (
    GIVEN[2],
    "system.max_tokens_per_microbatch=4096",
    "system.compile=false",
    "data.max_tokens=4096",
)
"""One sample of 4,096 tokens in a micro-batch."""
FAMILIES = [
    ("bfloat16", "qwen3_next"),
    *(again("bfloat16", family) for family in ("qwen3_moe", "lfm2", "bamba", "falcon_h1", "jamba")),
    again("float32", "qwen3_moe"),
]


def check_within_plan(plan: Any, least: float) -> None:
    """Memory counted in a dry run is at most what is planned, and at least this share of it."""
    price = planned(plan)
    assert price is not None
    counted = dry_run(plan)[FIRST]["train"].total
    room = price.training - price.libraries
    assert least * room < counted <= room, (counted, room, price)


@pytest.mark.parametrize(("number", "family"), FAMILIES)
def test_a_dry_run_takes_no_more_than_is_planned(number: str, family: str, tmp_path: Path) -> None:
    own = SPECIAL[family]
    sizes = {name: size for name, size in MIXERS.items() if name in own}
    config: Any = AutoConfig.for_model(family, **{**SHAPE, **own, **sizes})
    plan = resolved(
        tmp_path, "sft", config.to_dict(), "H100-80GB", *LONG,
        f"model.dtype={number}",
    )  # fmt: skip
    check_within_plan(plan, 0.5)


@pytest.mark.parametrize("settings", [(), ("lora.rank=8",)], ids=["whole", "lora"])
def test_latent_attention_takes_no_more_than_is_planned(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    own = SPECIAL["deepseek_v3"] | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 16,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "moe_intermediate_size": 512,
    }
    config: Any = AutoConfig.for_model("deepseek_v3", **{**SHAPE, **own})
    plan = resolved(
        tmp_path, "sft", config.to_dict(), "H100-80GB", *LONG, "model.dtype=bfloat16", *settings
    )
    check_within_plan(plan, 0.65)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        again("qwen3_moe", ("system.zero_stage=3",)),
        again("qwen3_moe", ("system.zero_stage=1",)),
        again("qwen2_moe", ("system.zero_stage=3", "lora.rank=16")),
    ],
)
def test_ranks_that_divide_experts_take_no_more_than_is_planned(
    family: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Tokens travel evenly. Experts are most of the model, so a rank has little more than its share
    of it."""
    own = SPECIAL[family] | {"num_experts": 128, "moe_intermediate_size": 256}
    config: Any = AutoConfig.for_model(family, **{**SHAPE, **own})
    plan = resolved(
        tmp_path, "sft", config.to_dict(), "4xH100-80GB", *LONG,
        *settings, "system.expert_parallel_size=4",
    )  # fmt: skip
    check_within_plan(plan, 0.5)


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {  # Qwen3-30B-A3B
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gpt_oss": {  # gpt-oss-20b
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "mixtral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("checkpointing", ["true", "false"])
@pytest.mark.parametrize("family", MIXTURES)
def test_copies_of_tokens_for_their_experts_are_planned(
    family: str, checkpointing: str, tmp_path: Path
) -> None:
    """Four layers of published sizes, of which each token's copies are the largest part."""
    shape = {"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {"head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 40960}
    config: Any = AutoConfig.for_model(
        family, num_hidden_layers=4, **shape | MIXTURES[family]
    )  # fmt: skip
    plan = resolved(
        tmp_path, "sft", config.to_dict(), "H200-141GB", *LONG,
        "model.dtype=bfloat16", f"system.gradient_checkpointing={checkpointing}",
    )  # fmt: skip
    check_within_plan(plan, 0.98)
