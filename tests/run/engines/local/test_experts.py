"""Completions have the experts that their tokens chose, and training passes choose them again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.families import build
from tests.support.training import backend_of, learner_of
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Completion, Record, Sample, Sampling

DEEP: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
PROMPTS = [list(range(20 + 12 * number, 32 + 12 * number)) for number in range(3)]


def sampled(
    model: CausalLM, groups: int = 3, tokens: int = 24, **options: int
) -> list[list[Completion]]:
    """Three completions of each prompt."""
    settings: dict[str, Any] = {
        "kv_bytes": 8 << 20,
        "max_running": 16,
        "max_prefill_tokens": 512,
        **options,
    }
    engine = LocalEngine(model, records_experts=True, eos_token_ids=(), **settings)

    async def generate() -> list[list[Completion]]:
        try:
            completions = await asyncio.gather(
                *(
                    engine.generate(prompt, Sampling(tokens, seed=seed))
                    for prompt in PROMPTS[:groups]
                    for seed in range(3)
                )
            )
            assert engine.stats().preemptions > 0 or not options
            return [completions[at : at + 3] for at in range(0, 3 * groups, 3)]
        finally:
            await engine.close()

    return asyncio.run(generate())


def batch_of(groups: list[list[Completion]]) -> tuple[Batch, Floats]:
    samples: list[Sample] = []
    logprobs: list[float] = []
    for group, (prompt, completions) in enumerate(zip(PROMPTS, groups, strict=True)):
        for done in completions:
            record = Record()
            record.observe(prompt)
            record.act(done)
            assert record.experts is not None
            assert len(record.experts) == len(record.token_ids) - 1
            samples.append(Sample(record.token_ids, record.sampled, group, experts=record.experts))
            logprobs += done.logprobs
    return Batch.of(samples), np.array(logprobs)


@pytest.mark.more
def test_in_bfloat16_no_route_differs_and_the_gap_to_the_sampler_shrinks(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build("qwen3_moe", **DEEP).save(model)
    backend = backend_of(model, torch.bfloat16, replays_routing=True)
    batch, sampler = batch_of(sampled(backend.model))
    forest = build_forest(batch)
    assert forest.num_tokens < batch.num_tokens and forest.experts is not None  # prompts are shared
    wanted = forest.experts.view(forest.num_tokens, 4, 4)
    recorded = wanted[:, 0, 0] >= 0
    with torch.no_grad():
        backend.model.states(forest)
    assert backend.model.routing is not None
    chosen = backend.model.routing.experts
    assert torch.equal(chosen.sort().values[recorded], wanted.sort().values[recorded])
    gaps: list[float] = []
    for replays in (True, False):
        scored = learner_of(backend_of(model, torch.bfloat16, replays_routing=replays)).score(batch)
        gaps.append(float(np.abs(scored - sampler).mean()))
    assert gaps[0] < 0.7 * gaps[1]


@pytest.mark.more
def test_requests_that_are_preempted_and_prompts_in_chunks_have_all_experts() -> None:
    """In float32 routes are the same however passes are cut."""
    model = build("qwen3_moe")
    model.module.set_attn_implementation(ATTENTION_NAME)
    [whole] = sampled(model, 1, 80)
    [parts] = sampled(model, 1, 80, kv_bytes=56 << 10, max_prefill_tokens=5, block_size=4)
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.experts == theirs.experts
