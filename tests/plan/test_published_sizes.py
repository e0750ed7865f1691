"""Published checkpoints, by their configurations: parameters, keys, and a plan for each."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import SUPPORT
from tests.support.hub_of_sizes import serve
from tunesmith.config.load import load_config
from tunesmith.config.schema import SFTConfig
from tunesmith.plan.facts.families import families
from tunesmith.plan.facts.model import facts_of
from tunesmith.run.assembly.planning import plan_run

CHECKPOINTS: dict[str, dict[str, Any]] = tomllib.loads((SUPPORT / "checkpoints.toml").read_text())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parameters_are_those_that_are_published(name: str) -> None:
    published = CHECKPOINTS[name]
    facts = facts_of(published["config"])
    assert facts is not None
    assert facts.estimated / 1e9 == pytest.approx(published["billions"], rel=0.005)
    assert facts.family in families()
    if "active" in published:
        active = facts.estimated - facts.idle - facts.vocab_size * facts.hidden_size
        assert active / 1e9 == pytest.approx(published["active"], rel=0.005)


def test_keys_of_latent_attention_have_a_part_with_and_one_without_positions() -> None:
    facts = facts_of(CHECKPOINTS["deepseek-ai/DeepSeek-V2-Lite"]["config"])
    assert facts is not None
    assert facts.head_dim == 192
    # Engines keep the latent and the rotated part alone.
    assert facts.kv_bytes_per_token(2) == 27 * (512 + 64) * 2


def test_keys_of_two_widths() -> None:
    """Gemma 4 31B: 50 layers with a window have 16 heads of 256, ten have 4 of 512."""
    published = CHECKPOINTS["google/gemma-4-31B-it"]["config"]
    text: dict[str, Any] = published["text_config"]
    wide = {"head_dim": text["global_head_dim"], "num_key_value_heads": 4}
    saved = {key: value for key, value in text.items() if "global" not in key}
    for each in (published, {**saved, "per_layer_config": {"5": wide, "11": wide}}):
        facts = facts_of(each)
        assert facts is not None
        assert facts.kv_bytes_per_token(2) == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
        assert facts.estimated == pytest.approx(30.7e9, rel=0.005)


@pytest.mark.more
def test_each_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = {name: published["config"] for name, published in CHECKPOINTS.items()}
    serve(served, tmp_path, monkeypatch)
    for name in served:
        said = [f"model.path={name}", "model.dtype=bfloat16", "data.train=some/data"]
        config = load_config(SFTConfig, None, [*said, "data.max_tokens=2048", "lora.rank=8"])
        plan = plan_run(config, "8x8xH200")
        assert plan.facts.model is not None
        assert plan.facts.model.family in families()
