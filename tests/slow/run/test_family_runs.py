"""Models of kinds beyond plain decoders learn in whole runs, with the embedded engine."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from tests.support.families import MULTIMODAL, SPECIAL, save_multimodal
from tests.support.long import again
from tests.support.tiny import save_model
from tests.support.tiny_preferences import preference_settings
from tests.support.tiny_runs import rl_settings, sft_settings
from tunesmith.plan.facts.model_files import is_of_tower, weights_in
from tunesmith.run import assembly

LORA = {"lora__rank": 4}


def learn(folder: Path, model: Path, **changed: Any) -> Path:
    """The checkpoint of a few steps by reward, after which the same model learned by example."""
    outcome = assembly.run_rl(None, rl_settings(folder, model, train__steps=6, **changed))
    # The engine samples with the log-probabilities that the trainer computes.
    assert all(line["ratio"] == pytest.approx(1, abs=1e-4) for line in outcome.metrics)
    assert all(line["grad_norm"] > 0 for line in outcome.metrics)
    tuned = assembly.run_sft(None, sft_settings(folder, model, **changed))
    losses = [line["loss"] for line in tuned.metrics]
    assert losses[-1] < losses[0]
    return outcome.checkpoint


@pytest.mark.parametrize("changed", [{}, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "model_type", ["gemma3", "gemma4", "qwen3_vl", again("qwen3_vl_moe"), again("smolvlm")]
)
def test_multimodal_models_learn_and_are_loaded_whole(
    tmp_path: Path, model_type: str, changed: dict[str, Any]
) -> None:
    path = save_multimodal(tmp_path / "model", model_type)
    saved = learn(tmp_path, path, **changed)
    if changed:
        PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(path), saved)
        return
    names = weights_in(saved).keys()
    assert names == weights_in(path).keys()
    assert any(map(is_of_tower, names))
    AutoModelForImageTextToText.from_pretrained(saved)


@pytest.mark.parametrize("changed", [{}, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "model_type",
    [
        again("gemma3"),
        again("qwen3_vl"),
        again("llama4"),
        "gpt_oss",
        again("deepseek_v3"),
        again("llama4_text"),
        again("kimi_linear"),
    ],
)
def test_pairs_are_told_apart(tmp_path: Path, model_type: str, changed: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    if model_type in MULTIMODAL:
        path = save_multimodal(folder, model_type)
    else:
        path = save_model(folder, model_type, **SPECIAL[model_type])
    settings = preference_settings("dpo", tmp_path, path, "run", **changed)
    outcome = assembly.run_dpo(None, settings)
    losses = [line["loss"] for line in outcome.metrics if "grad_norm" in line]
    assert losses[0] == pytest.approx(log(2), abs=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("changed", [{}, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "model_type", ["gpt_oss", "deepseek_v3", again("llama4_text"), again("kimi_linear")]
)
def test_attention_of_other_kinds_learns(
    tmp_path: Path, model_type: str, changed: dict[str, Any]
) -> None:
    path = save_model(tmp_path / "model", model_type, **SPECIAL[model_type])
    saved = learn(tmp_path, path, **changed)
    if not changed:
        assert weights_in(saved).keys() == weights_in(path).keys()
