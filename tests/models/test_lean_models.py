"""Models that run as a few large operations: the plan knows which, and code that comes with a model
(``model.trust_remote_code``) computes, whatever family its configuration names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.errors import ModelError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.types import Sample

CODE = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class SquaredMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) ** 2 * self.up_proj(x))


class SquaredForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = SquaredMLP(config)
"""


@pytest.fixture
def squared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose code changes the feed-forward networks of ``llama``."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = save_model(tmp_path / "squared", initializer_range=0.5)
    (path / "modeling_squared.py").write_text(CODE)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_squared.SquaredForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_models_own_code_computes_though_it_says_llama(squared: Path) -> None:
    ids = [[5, 9, 30, 7, 12], [40, 41, 3]]
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_pretrained(squared, trust_remote_code=True)
    assert type(theirs).__name__ == "SquaredForCausalLM"
    scores: list[float] = []
    for each in ids:
        with torch.no_grad():
            logits = theirs(torch.tensor([each])).logits[0].log_softmax(-1)
        scores += [float(logits[at, token]) for at, token in enumerate(each[1:])]
    samples = [Sample(each, [False, *[True] * (len(each) - 1)]) for each in ids]

    def scored(*, trusted: bool) -> torch.Tensor:
        model = CausalLM.load(squared, trust_remote_code=trusted)
        assert (model.lean is None) is trusted
        with torch.no_grad():
            return model.predict(forest_of(samples)).logprobs

    assert scored(trusted=True).tolist() == pytest.approx(scores, abs=1e-4)
    assert scored(trusted=False).tolist() != pytest.approx(scores, abs=1e-1)


def test_own_code_that_may_not_call_our_attention_is_refused(squared: Path) -> None:
    file = squared / "modeling_squared.py"
    head = "class SquaredForCausalLM(LlamaForCausalLM):\n"
    code = file.read_text().replace(head, f"{head}    _supports_attention_backend = False\n")
    file.write_text(code)
    weights = squared / "model.safetensors"  # damaged, which is found where they are read
    save_file({n: w * float("nan") for n, w in load_file(weights).items()}, weights)
    for quantize in (None, "int8"):
        with pytest.raises(ModelError) as raised:
            CausalLM.load(squared, trust_remote_code=True, quantize=quantize)
        assert raised.value.keys == ("model.trust_remote_code",)


def test_the_plan_knows_whose_code_computes(squared: Path) -> None:
    for trusted in (True, False):
        facts = known_model_facts(str(squared), trust_remote_code=trusted)
        assert facts is not None and facts.lean is not trusted


@pytest.mark.parametrize(
    ("family", "changed", "lean"),
    [
        ("llama", {}, True),
        ("llama", {"hidden_act": "gelu"}, True),
        ("llama", {"hidden_act": "relu"}, False),
        ("llama", {"partial_rotary_factor": 0.5}, False),
        ("gemma2", {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}, True),
        ("gpt2", {}, False),
    ],
)
def test_the_plan_knows_which_models_are_lean(
    family: str, changed: dict[str, Any], lean: bool, tmp_path: Path
) -> None:
    path = save_model(tmp_path, family, **changed)
    facts = known_model_facts(str(path))
    model = CausalLM.load(path)
    assert facts is not None and facts.lean is (model.lean is not None) is lean
