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
from tunesmith.types import Sample

KINDS = ("lfm2", "qwen3_next", "bamba", "falcon_h1")


def forest_model(kind: str) -> CausalLM:
    model = build(kind)
    model.module.set_attn_implementation(ATTENTION_NAME)
    return model


def alone(batch: list[Sample]) -> list[Sample]:
    """The same lengths, without any two that share a prompt."""
    return [
        Sample([5 + (i * 31 + t) % 290 for t in range(len(s.token_ids))], s.loss_mask)
        for i, s in enumerate(batch)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_see_nothing_of_each_other(kind: str) -> None:
    """Another token in one sequence changes no bit of the others, in outputs and in gradients of
    their inputs."""
    model = forest_model(kind)
    batch = alone(samples())
    changed = [batch[0], Sample([7, *batch[1].token_ids[1:]], batch[1].loss_mask), *batch[2:]]
    with torch.no_grad():
        before, after = (logprobs(model, forest_of(each))[0] for each in (batch, changed))
    ends = torch.tensor([sum(s.loss_mask) for s in batch]).cumsum(0).tolist()
    same = before == after
    assert not same[ends[0] : ends[1]].all()
    assert same[: ends[0]].all() and same[ends[1] :].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 17])
def test_whatever_else_is_packed(kind: str, count: int) -> None:
    model = forest_model(kind)
    batch = alone(samples() * 3)[:count]
    with torch.no_grad():
        got, _ = logprobs(model, forest_of(batch))
        want = one_at_a_time(module_of(kind), batch, 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prompt_is_a_repeated_one(kind: str) -> None:
    model = forest_model(kind)
    results = []
    for share in (True, False):
        found, _ = logprobs(model, forest_of(samples(), share=share))
        results.append((found, gradients(model, found)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    assert_same_gradients(results[0][1], results[1][1], 1e-4)


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
