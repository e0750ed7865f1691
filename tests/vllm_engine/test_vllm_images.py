"""The real vLLM is shown images, and samples what the trainer computes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.families import logprobs
from tests.support.tiny_runs import rl_settings
from tests.support.training import forest_of
from tests.support.vision import (
    load_vision_model,
    picture,
    save_vision_model,
    weights_of,
    write_pictures,
)
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run import assembly
from tunesmith.run.engines.vllm.engine import VllmEngine
from tunesmith.run.engines.vllm.images import ImagePrompts
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.run.specs.planes import published
from tunesmith.types import Completion, Sample, Sampling, VisionTower

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("torchvision", reason="vLLM needs it to read images")

ROWS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
_ONE_HEAD = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rope_parameters": ROWS,
}
_THIRDS = {"head_dim": 32, "rope_parameters": {**ROWS, "mrope_interleaved": True}}
WIDE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _ONE_HEAD,
    "qwen2_vl": _ONE_HEAD,
    "qwen3_5": {
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            **ROWS,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "partial_rotary_factor": 0.25,
        },
    },
    "qwen3_vl": _THIRDS,
    "qwen3_vl_moe": {**_THIRDS, "norm_topk_prob": True, "moe_intermediate_size": 64},
}
"""Heads that vLLM's kernels for a CPU take."""
IN_BFLOAT16 = ("qwen3_5",)
"""Of these vLLM has kernels for a CPU in bfloat16 alone."""


PROCESS = {"system__engine_process": True}


def turn_experts(path: Path) -> None:
    """Exchange rows and columns of the experts, as Qwen3-VL's are published: vLLM reads no other
    form."""
    weights = weights_of(path)
    for name in filter(lambda name: ".experts." in name, weights):
        weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


# vLLM takes no mixture in a process that has had another model.
@pytest.mark.parametrize(
    ("model_type", "tower"),
    [*((name, "trained") for name in WIDE if "moe" not in name), ("qwen3_vl", "frozen")],
)
def test_what_is_sampled_has_the_trainers_log_probabilities(
    tmp_path: Path, model_type: str, tower: VisionTower
) -> None:
    """Images in one prompt and in several, before and after new weights."""
    dtype = torch.bfloat16 if model_type in IN_BFLOAT16 else torch.float32
    near = 0.1 if dtype == torch.bfloat16 else 1e-4
    path = save_vision_model(tmp_path / "m", model_type, dtype, **WIDE[model_type])
    pictures = [picture(0), picture(1), picture(2, 150, 90)]
    model, vocabulary = load_vision_model(path, pictures, tower)
    a, b, c = ([*image.token_ids] for image in vocabulary.rows.all)
    prompts = [[7, 8, *a, 9], [7, 8, *b, 9], [10, *c, 11, *a, 12, 13], [14, 15, 16]]
    settings = VllmSettings(
        str(path), str(dtype).removeprefix("torch."), kv_bytes=1 << 26, max_running=8, images=True
    )
    engine = VllmEngine(settings, published(model, as_stored=True), ImagePrompts(vocabulary))

    async def sampled() -> list[Completion]:
        samplings = [Sampling(6, ignore_eos=True, seed=seed) for seed in range(2)]
        return await asyncio.gather(
            *(engine.generate(prompt, each) for prompt in prompts for each in samplings)
        )

    async def run() -> None:
        asked = [prompt for prompt in prompts for _ in range(2)]
        check(model, asked, await sampled(), near)
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(1.1)
        await engine.load_weights(1)
        check(model, asked, await sampled(), near)
        await engine.close()

    asyncio.run(run())


def check(
    model: CausalLM, prompts: list[list[int]], answers: list[Completion], near: float
) -> None:
    """Compare log-probabilities with the trainer's."""
    batch = [
        Sample([*p, *a.token_ids], [False] * len(p) + [True] * len(a.token_ids))
        for p, a in zip(prompts, answers, strict=True)
    ]
    with torch.no_grad():
        want, _ = logprobs(model, forest_of(batch))
    got = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    torch.testing.assert_close(got, want.float(), rtol=near, atol=near)


def test_a_run_without_images_has_no_tower(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path / "m", "qwen3_vl", **WIDE["qwen3_vl"])
    model = CausalLM.load(path)
    settings = VllmSettings(str(path), "float32", kv_bytes=1 << 26, max_running=4)
    engine: Any = VllmEngine(settings, published(model, as_stored=True))

    async def run() -> None:
        (names,) = await engine._thread.call(lambda: engine._vllm.collective_rpc(_parameters))
        assert names and not any("visual" in name for name in names)
        for version in (1, 2):
            with torch.no_grad():
                for weight in model.module.parameters():
                    weight.mul_(1.1)
            await engine.load_weights(version)
            done = await engine.generate([7, 8, 9], Sampling(6, ignore_eos=True, seed=1))
            check(model, [[7, 8, 9]], [done], 1e-4)
        await engine.close()

    asyncio.run(run())


def _parameters(worker: Any) -> list[str]:
    return [name for name, _ in worker.get_model().named_parameters()]


@pytest.mark.parametrize(
    ("model_type", "places"),
    [("qwen3_vl", {}), ("qwen3_vl", PROCESS), ("qwen3_vl_moe", PROCESS)],
    ids=["here", "process", "experts"],
)
def test_rewards_train_what_vllm_has_seen(
    tmp_path: Path, model_type: str, places: dict[str, Any]
) -> None:
    folder = write_pictures(tmp_path)
    model = save_vision_model(tmp_path / "model", model_type, **WIDE[model_type])
    turn_experts(model)
    settings: dict[str, Any] = {
        "data__chat": None,
        "train__lr": 1e-3,
        "model__vision_tower": "trained",
        "system__engine": "vllm",
        **places,
    }
    outcome = assembly.run_rl(None, rl_settings(folder, model, **settings))
    assert all(line["ratio"] == pytest.approx(1, abs=1e-3) for line in outcome.metrics)
    assert all(line["grad_norm"] > 0 for line in outcome.metrics)
