"""Multimodal checkpoints as published: the text decoder trains, and all is saved as it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.support.families import MULTIMODAL, logprobs, one_at_a_time, samples, save_multimodal
from tests.support.training import forest_of
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ModelError
from tunesmith.models.adapters import attach, check_targets, merge
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.loading import read_shards
from tunesmith.models.score_model import ScoreModel
from tunesmith.plan.facts.model import facts_of, read_model_facts
from tunesmith.plan.facts.model_files import is_of_tower, weights_in
from tunesmith.run.specs.planes import published

PUBLISHED = {
    "gemma3": ("language_model.model.layers.0.mlp.up_proj.weight", "vision_tower."),
    "mistral3": ("language_model.model.layers.0.mlp.up_proj.weight", "vision_tower."),
    "qwen2_5_vl": ("model.layers.0.mlp.up_proj.weight", "visual."),
    "llama4": ("language_model.model.layers.0.feed_forward.up_proj.weight", "vision_model."),
    "gemma4": ("model.language_model.layers.0.mlp.up_proj.weight", "model.vision_tower."),
    **dict.fromkeys(
        ("internvl", "llava", "llava_next", "llava_onevision"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "vision_tower."),
    ),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        ("model.text_model.layers.0.mlp.up_proj.weight", "model.vision_model."),
    ),
    "lfm2_vl": ("model.language_model.layers.0.feed_forward.w1.weight", "model.vision_tower."),
    "exaone4_5": ("model.language_model.layers.0.mlp.up_proj.weight", "model.visual."),
    "gemma4_unified": ("model.language_model.layers.0.mlp.up_proj.weight", "model.embed_vision."),
    "glm_ocr": ("model.language_model.layers.0.mlp.gate_up_proj.weight", "model.visual."),
    "lighton_ocr": ("model.language_model.layers.0.mlp.up_proj.weight", "model.vision_encoder."),
    "minicpmv4_6": ("model.language_model.layers.0.mlp.up_proj.weight", "model.vision_tower."),
    "glm4v": ("model.language_model.layers.0.mlp.gate_up_proj.weight", "model.visual."),
    "glm4v_moe": ("model.language_model.layers.0.mlp.up_proj.weight", "model.visual."),
    "glm46v": ("model.language_model.layers.0.mlp.gate_up_proj.weight", "model.visual."),
    "qwen2_vl": ("model.layers.0.mlp.up_proj.weight", "visual."),
    "qwen3_vl_moe": ("model.language_model.layers.0.self_attn.q_proj.weight", "model.visual."),
    "qwen3_5": ("model.language_model.layers.0.mlp.up_proj.weight", "model.visual."),
    "qwen3_5_moe": (
        "model.language_model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.visual.",
    ),
    "qwen3_vl": ("model.language_model.layers.0.mlp.up_proj.weight", "model.visual."),
}
"""A decoder's weight and the start of a tower's, by the names in published files."""


def stored(directory: Path) -> dict[str, Tensor]:
    files = {weight.file for weight in weights_in(directory).values()}
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def change(model: CausalLM) -> None:
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def whole(directory: Path) -> torch.nn.Module:
    auto: Any = AutoModelForImageTextToText
    model, info = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    return model.eval()


@pytest.mark.parametrize("model_type", sorted(MULTIMODAL))
def test_trained_decoder_is_saved_with_the_untouched_tower(tmp_path: Path, model_type: str) -> None:
    path = save_multimodal(tmp_path / "m", model_type)
    model = CausalLM.load(path)
    assert not any(is_of_tower(name) for name, _ in model.module.named_modules())
    change(model)
    want, _ = logprobs(model, forest_of(samples()))
    model.rehearse(tmp_path / "rehearsal")
    model.save(tmp_path / "saved")
    before = stored(path)
    after = stored(tmp_path / "saved")
    assert before.keys() == after.keys()
    name, tower = PUBLISHED[model_type]
    assert after[name].dtype == torch.float32
    assert not after[name].equal(before[name].float())
    towers = [name for name in before if is_of_tower(name)]
    assert any(name.startswith(tower) for name in towers)
    assert all(after[name].dtype == torch.bfloat16 for name in towers)
    assert all(after[name].equal(before[name]) for name in towers)
    plain = whole(tmp_path / "saved")
    got = one_at_a_time(plain, samples(), 1.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "saved/preprocessor_config.json").read_text()) == {"size": 28}
    again, _ = logprobs(CausalLM.load(tmp_path / "saved"), forest_of(samples()))
    assert torch.equal(again, want)


@pytest.mark.parametrize("model_type", sorted(MULTIMODAL.keys() - {"qwen3_5_moe", "glm4v_moe"}))
def test_rows_are_read_under_published_names(tmp_path: Path, model_type: str) -> None:
    path = save_multimodal(tmp_path / "m", model_type)
    model = CausalLM.load(path)
    want = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    change(model)
    read_shards(model.module, path, differences=model.towers.allowed(((), ())), read=pytest.fail)
    assert all(tensor.equal(want[name]) for name, tensor in model.module.state_dict().items())
    names = [name for name, _ in published(model, as_stored=True)()]
    assert PUBLISHED[model_type][0] in names
    assert not any(map(is_of_tower, names))


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_adapter_is_the_decoders_in_the_whole_model(tmp_path: Path, model_type: str) -> None:
    path = save_multimodal(tmp_path / "m", model_type)
    check_targets(path, LoraSection(rank=2, targets=("q_proj",)))
    model = CausalLM.load(path)
    adapter = attach(model, LoraSection(rank=2, targets=("q_proj",)))
    with torch.no_grad():
        for _, tensor in adapter.own_weights():
            tensor.normal_(std=0.3)
    want, _ = logprobs(model, forest_of(samples()))
    model.save(tmp_path / "adapter")
    peft = PeftModel.from_pretrained(whole(path), tmp_path / "adapter")
    adapted = [name for name, _ in peft.named_modules() if name.endswith("lora_A")]
    assert adapted
    assert not any(".vi" in name for name in adapted)
    got = one_at_a_time(peft, samples(), 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    merge(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    got = one_at_a_time(whole(tmp_path / "merged"), samples(), 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_merged_weights_have_the_dtype_that_the_text_decoder_says(tmp_path: Path) -> None:
    """As Qwen3-VL is published: config.json has a dtype for the decoder alone."""
    path = save_multimodal(tmp_path / "m", "qwen3_vl")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))
    model = CausalLM.load(path)
    attach(model, LoraSection(rank=2, targets=("q_proj",)))
    model.save(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert {tensor.dtype for tensor in stored(tmp_path / "merged").values()} == {torch.bfloat16}


def test_untied_head_of_a_model_whose_text_decoder_says_it(tmp_path: Path) -> None:
    path = save_multimodal(tmp_path / "m", "mistral3", tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    config.pop("tie_word_embeddings")
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    head = torch.randn(300, 32, dtype=torch.bfloat16)
    save_file(tensors | {"language_model.lm_head.weight": head}, path / "model.safetensors")
    model = CausalLM.load(path)
    assert model.head.weight.equal(head.float())
    model.save(tmp_path / "saved")
    assert stored(tmp_path / "saved")["language_model.lm_head.weight"].equal(head.float())


def test_sizes_are_the_decoders_and_the_towers_are_stated(tmp_path: Path) -> None:
    path = save_multimodal(tmp_path / "m", "gemma3")
    facts = read_model_facts(path)
    assert facts is not None
    model = CausalLM.load(path)
    assert facts.parameters == sum(p.numel() for p in model.module.parameters())
    assert facts.tower_parameters == sum(t.numel() for t in model.towers.weights.values())
    assert facts.lean


@pytest.mark.parametrize(
    ("config", "decoder", "heads"),
    [
        (  # gemma-3-4b-it: its file leaves out what is usual of the family
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "num_hidden_layers": 34,
                },
            },
            3_880_263_168,
            8,
        ),
        (  # Qwen2.5-VL-3B-Instruct: its file has the decoder's sizes beside the tower's
            {
                "model_type": "qwen2_5_vl",
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
                "vision_config": {"hidden_size": 1280, "depth": 32},
            },
            3_085_938_688,
            16,
        ),
    ],
)
def test_sizes_of_published_configurations(
    config: dict[str, object], decoder: int, heads: int
) -> None:
    facts = facts_of(config)
    assert facts is not None
    assert facts.heads == heads
    assert facts.tied
    assert facts.estimated == pytest.approx(decoder, rel=0.005)


def test_a_score_model_stands_on_a_text_decoder(tmp_path: Path) -> None:
    path = save_multimodal(tmp_path / "m", "qwen3_vl")
    with pytest.raises(ModelError, match="score head"):
        ScoreModel.load(path)


def test_experts_that_are_published_turned_are_saved_as_they_came(tmp_path: Path) -> None:
    """Qwen3-VL's experts have inputs before outputs in their files."""
    path = save_multimodal(tmp_path / "m", "qwen3_vl_moe")
    plain = CausalLM.load(path)
    want, _ = logprobs(plain, forest_of(samples()))
    tensors = load_file(path / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(turned, path / "model.safetensors", metadata={"format": "pt"})
    model = CausalLM.load(path)
    assert torch.equal(logprobs(model, forest_of(samples()))[0], want)
    read_shards(model.module, path, differences=model.towers.allowed(((), ())))
    assert torch.equal(logprobs(model, forest_of(samples()))[0], want)
    shapes = {name: tensor.shape for name, tensor in published(model, as_stored=True)()}
    model.save(tmp_path / "saved")
    after = stored(tmp_path / "saved")
    for name, tensor in turned.items():
        assert after[name].shape == tensor.shape
        assert is_of_tower(name) or shapes[name] == tensor.shape
    again = CausalLM.load(tmp_path / "saved")
    assert torch.equal(logprobs(again, forest_of(samples()))[0], want)
