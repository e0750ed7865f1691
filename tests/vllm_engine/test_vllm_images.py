"""The real vLLM is shown images, and samples what the trainer computes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.families import logprobs
from tests.support.tiny_runs import rl_settings
from tests.support.training import forest_of
from tests.support.vision import load_vision_model, picture, save_vision_model, write_pictures
from tunesmith.run import placement
from tunesmith.run.engines.vllm.engine import VllmEngine
from tunesmith.run.engines.vllm.images import ImagePrompts
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.run.placement.planes import published
from tunesmith.types import Completion, Sample, Sampling, VisionTower

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("torchvision", reason="vLLM needs it to read images")

ROWS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
WIDE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_parameters": ROWS,
    },
    "qwen3_vl": {"head_dim": 32, "rope_parameters": {**ROWS, "mrope_interleaved": True}},
}
"""Heads that vLLM's kernels for a CPU take."""


@pytest.mark.parametrize("model_type", WIDE)
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_what_is_sampled_has_the_trainers_log_probabilities(
    tmp_path: Path, model_type: str, tower: VisionTower
) -> None:
    """Images in one prompt and in several, before and after new weights."""
    path = save_vision_model(tmp_path / "m", model_type, **WIDE[model_type])
    pictures = [picture(0), picture(1), picture(2, 150, 90)]
    model, vocabulary = load_vision_model(path, pictures, tower)
    a, b, c = ([*image.token_ids] for image in vocabulary.rows.all)
    prompts = [[7, 8, *a, 9], [7, 8, *b, 9], [10, *c, 11, *a, 12, 13], [14, 15, 16]]
    settings = VllmSettings(str(path), "float32", kv_bytes=1 << 26, max_running=8, images=True)
    engine = VllmEngine(settings, published(model, as_stored=True), ImagePrompts(vocabulary))

    async def sampled() -> list[Completion]:
        samplings = [Sampling(6, ignore_eos=True, seed=seed) for seed in range(2)]
        return await asyncio.gather(
            *(engine.generate(prompt, each) for prompt in prompts for each in samplings)
        )

    def check(answers: list[Completion]) -> None:
        asked = [prompt for prompt in prompts for _ in range(2)]
        pairs = zip(asked, answers, strict=True)
        batch = [
            Sample([*p, *a.token_ids], [False] * len(p) + [True] * len(a.token_ids))
            for p, a in pairs
        ]
        with torch.no_grad():
            want, _ = logprobs(model, forest_of(batch))
        got = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    async def run() -> None:
        check(await sampled())
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(1.1)
        await engine.load_weights(1)
        check(await sampled())
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("places", [{}, {"system__engine_process": True}], ids=["here", "process"])
def test_rewards_train_what_vllm_has_seen(tmp_path: Path, places: dict[str, Any]) -> None:
    folder = write_pictures(tmp_path)
    model = save_vision_model(tmp_path / "model", "qwen3_vl", **WIDE["qwen3_vl"])
    settings: dict[str, Any] = {
        "data__chat": None,
        "train__lr": 1e-3,
        "model__vision_tower": "trained",
        "system__engine": "vllm",
        **places,
    }
    outcome = placement.run_rl(None, rl_settings(folder, model, **settings))
    assert all(line["ratio"] == pytest.approx(1, abs=1e-3) for line in outcome.metrics)
    assert all(line["grad_norm"] > 0 for line in outcome.metrics)
