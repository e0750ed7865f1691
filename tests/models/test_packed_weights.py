"""Checkpoints in MXFP4 are read as the bfloat16 that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.families import logprobs, one_at_a_time, samples
from tests.support.hub_of_sizes import serve
from tests.support.packed import quantise, save_packed
from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.errors import ModelError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.mxfp4 import unpacked
from tunesmith.models.parallel.shard_files import WeightFiles
from tunesmith.models.source import load_config
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.model_files import BLOCKS, ONE, SCALES, weights_in

DOWN = "model.layers.1.mlp.experts.down_proj"


def test_numbers_are_those_of_transformers() -> None:
    """All numbers, with the scales from the smallest to the largest with which all are finite."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(8).reshape(2, 64, 1, 16)
    scales = torch.arange(128, dtype=torch.uint8).reshape(2, 64, 1)
    for least in (0, 125):
        want = convert_moe_packed_tensors(blocks, scales + least)
        assert torch.equal(unpacked(blocks, scales + least), want)
    assert unpacked(blocks, torch.full_like(scales, 255)).isnan().all()


@pytest.mark.parametrize("shards", [False, True])
def test_rows_are_read_alone(tmp_path: Path, shards: bool) -> None:
    files = WeightFiles(save_packed(tmp_path, shards=shards))
    weight = files.weights[DOWN]
    assert (weight.shape, weight.dtype) == ((4, 64, 64), "BF16")
    whole = files.rows(DOWN, 0, 4)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(files.rows(DOWN, 2, 1), whole[2:3])


def test_model_is_that_of_transformers_and_is_saved_in_bfloat16(tmp_path: Path) -> None:
    path = save_packed(tmp_path / "m")
    model = CausalLM.load(path, dtype=torch.bfloat16)
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    want = plain.state_dict()
    got = model.module.state_dict()
    assert got.keys() == want.keys()
    assert all(tensor.equal(want[name]) for name, tensor in got.items())
    assert all(parameter.requires_grad for parameter in model.module.parameters())
    model.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())
    assert "quantization_config" not in saved
    assert {weight.dtype for weight in weights_in(tmp_path / "saved").values()} == {"BF16"}
    assert load_file(tmp_path / "saved" / ONE).keys() == got.keys()
    forest = forest_of(samples())
    again = CausalLM.load(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(logprobs(again, forest)[0], logprobs(model, forest)[0])


def test_log_probabilities_are_those_of_transformers(tmp_path: Path) -> None:
    path = save_packed(tmp_path / "m")
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float()
    got, _ = logprobs(CausalLM.load(path), forest_of(samples()))
    want = one_at_a_time(plain, samples(), 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_parameters_are_counted_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_packed(tmp_path / "m")
    facts = read_model_facts(path)
    assert facts is not None
    parameters = CausalLM.load(path).module.parameters()
    assert facts.parameters == sum(parameter.numel() for parameter in parameters)
    serve({"some/oss": json.loads((path / "config.json").read_text())}, tmp_path, monkeypatch)
    on_the_hub = known_model_facts("some/oss")
    assert on_the_hub is not None
    assert on_the_hub.parameters == pytest.approx(facts.parameters, rel=0.02)


@pytest.mark.parametrize(
    ("method", "advice"),
    [("fp8", "FineGrainedFP8Config"), ("awq", "made from"), ("compressed-tensors", "dequantize")],
)
def test_other_formats_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, advice: str
) -> None:
    path = save_model(tmp_path / "m")
    quantise(path, method)
    for read in (CausalLM.load, load_config, read_model_facts):
        with pytest.raises(ModelError, match=rf"{method}.*{advice}"):
            read(path)
    serve({"some/model": json.loads((path / "config.json").read_text())}, tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=rf"some/model.*{method}.*{advice}"):
        known_model_facts("some/model")


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    path = save_packed(tmp_path)
    weights = load_file(path / ONE)
    weights[DOWN + SCALES] = weights[DOWN + SCALES][:, :, :1].clone()
    save_file(weights, path / ONE, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"{ONE}.*{DOWN + BLOCKS}.*\[4, 64, 2, 16\].*\[4, 64, 1\]"
    ):
        weights_in(path)
    del weights[DOWN + SCALES]
    save_file(weights, path / ONE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=DOWN):
        CausalLM.load(path)


def test_scales_that_are_not_numbers(tmp_path: Path) -> None:
    path = save_packed(tmp_path)
    weights = load_file(path / ONE)
    weights[DOWN + SCALES][3, 5, 1] = 255
    save_file(weights, path / ONE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{ONE}.*{DOWN}"):
        CausalLM.load(path)
