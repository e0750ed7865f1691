"""Vision models: transformers, the trainer's forests and the embedded engine agree."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.support.families import assert_same_gradients, gradients, logprobs
from tests.support.training import forest_of
from tests.support.vision import (
    FAMILIES,
    load_vision_model,
    one_by_one,
    picture,
    samples_with_images,
    save_vision_model,
)
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import ModuleRunner, text_decoder
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Completion, Sample, Sampling


@pytest.mark.parametrize("model_type", FAMILIES)
def test_forest_with_images_equals_one_sequence_at_a_time(tmp_path: Path, model_type: str) -> None:
    path = save_vision_model(tmp_path / "m", model_type)
    model, vocabulary = load_vision_model(path, [picture(0), picture(1), picture(2, 112, 28)])
    batch = samples_with_images(vocabulary)
    module, want = one_by_one(path, vocabulary, batch)
    module.requires_grad_(False)
    module.model.language_model.requires_grad_(True)
    module.lm_head.requires_grad_(True)
    want_gradients = gradients(module, want)
    forest = forest_of(batch)
    assert forest.num_tokens < sum(len(sample.token_ids) for sample in batch)
    for runner in dict.fromkeys((model.runner, ModuleRunner(text_decoder(model.module)))):
        model.runner = runner
        got, _ = logprobs(model, forest)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert_same_gradients(gradients(model, got), want_gradients, 1e-4)
    repeated, _ = logprobs(model, forest_of(batch, share=False))
    torch.testing.assert_close(repeated, want, rtol=1e-5, atol=1e-5)
    for count in (1, 2):
        some, _ = logprobs(model, forest_of(batch[:count]))
        torch.testing.assert_close(some, want[: len(some)], rtol=1e-5, atol=1e-5)


def engine_of(model: CausalLM, tokens: int = 4096, *, compiled: bool = True) -> LocalEngine:
    return LocalEngine(
        model,
        kv_bytes=tokens * 512 + (1 << 20),
        max_running=8,
        max_prefill_tokens=16,
        compiled=compiled,
    )


async def answers(engine: LocalEngine, prompts: list[list[int]]) -> list[Completion]:
    samplings = [Sampling(6 + i, ignore_eos=True, seed=i, repetition_penalty=1.0) for i in range(3)]
    calls = [engine.generate(prompt, sampling) for prompt in prompts for sampling in samplings]
    done = await asyncio.gather(*calls)
    await engine.close()
    return done


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_sampled_has_the_trainers_log_probabilities(
    tmp_path: Path, model_type: str, compiled: bool
) -> None:
    """Prompts in chunks that go through images, shared by a group; positions after an image."""
    path = save_vision_model(tmp_path / "m", model_type)
    model, vocabulary = load_vision_model(path, [picture(0), picture(1), picture(2, 140, 84)])
    a, b, c = ([*image.token_ids] for image in vocabulary.rows.all)
    prompts = [[7, 8, *a, 9], [7, 8, *b, 9], [10, *c, 11, *a, 12, 13], [14, 15, 16]]
    engine = engine_of(model, compiled=compiled)
    done = asyncio.run(answers(engine, prompts))
    assert engine.stats().reused_prompt_tokens == 2 * sum(map(len, prompts))
    asked = [prompt for prompt in prompts for _ in range(3)]
    batch = [
        Sample([*prompt, *answer.token_ids], [False] * len(prompt) + [True] * len(answer.token_ids))
        for prompt, answer in zip(asked, done, strict=True)
    ]
    with torch.no_grad():
        want, _ = logprobs(model, forest_of(batch))
    got = torch.tensor([logprob for answer in done for logprob in answer.logprobs])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
