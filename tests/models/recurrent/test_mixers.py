"""Mixers with a state in packed sequences: nothing leaks, whatever else is packed, and gradients
return to shared prompts."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.families import (
    assert_same_gradients,
    build,
    gradients,
    logprobs,
    module_of,
    one_at_a_time,
    samples,
)
from tests.support.training import forest_of
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import ModuleRunner


def forest_model(kind: str) -> CausalLM:
    model = build(kind)
    model.module.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
def test_an_adapter_on_all_projections(kind: str) -> None:
    """With weights recomputed in the backward pass."""
    models = [module_of(kind), build(kind).module]
    adapted = []
    for module in models:
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapted.append(get_peft_model(module, config).eval())
    plain, ours = adapted
    model = CausalLM(models[1], build(kind).tokenizer)
    model.module.set_attn_implementation(ATTENTION_NAME)
    model.module.gradient_checkpointing_enable({"use_reentrant": False})
    model.module.train()
    assert isinstance(model.runner, ModuleRunner) and ours.training is False
    want = one_at_a_time(plain, samples(), 1.0)
    got, _ = logprobs(model, forest_of(samples()))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    trained = gradients(model, got)
    assert any("in_proj" in name for name in trained)
    names = {
        name.removeprefix("base_model.model."): g for name, g in gradients(plain, want).items()
    }
    assert_same_gradients(trained, names, 1e-3)
