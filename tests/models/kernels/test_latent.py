"""Latent attention by the latents alone gives what the keys and values made of them give."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.families import LATENT, module_of
from tests.support.tiny import save_model
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.latent import Latent, keep_latents
from tunesmith.models.kernels.layers import decoder_layers
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.runner import probe
from tunesmith.types import Completion, Sampling


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "glm4_moe_lite", "minicpm3"])
def test_absorbed_matrices_equal_expanded_latents(model_type: str, adapted: bool) -> None:
    module = module_of(model_type, torch.float64)
    layers = decoder_layers(module)
    if adapted:
        config = LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False)
        get_peft_model(module, config)
    keep_latents(layers)
    latent: Any = next(m.expand_kv for m in layers.modules() if hasattr(m, "expand_kv"))
    assert type(latent) is Latent
    rows = torch.randn(7, latent.width, dtype=torch.float64)
    keys, values = latent.expand(rows)
    query = torch.randn(3, *keys.shape[1:], dtype=torch.float64)
    scores = torch.einsum("qhd,khd->qhk", query, keys)
    absorbed = torch.einsum("qhw,kw->qhk", latent.absorb(query), rows)
    torch.testing.assert_close(absorbed, scores, rtol=0, atol=1e-12)
    weights = scores.softmax(-1)
    outputs = torch.einsum("qhk,khv->qhv", weights, values)[..., : latent.value_size]
    mixed = torch.einsum("qhk,kr->qhr", weights, rows[:, : latent.rank])
    torch.testing.assert_close(latent.values(mixed), outputs, rtol=0, atol=1e-12)


def test_an_engine_keeps_a_latent_per_token(tmp_path: Path) -> None:
    """Completions of a shared prompt, new weights, and a prompt that continues one, in as many
    bytes as the latents take, have the log-probabilities of the whole."""
    settings = LATENT | {"num_hidden_layers": 2, "num_attention_heads": 16}
    settings |= {"num_key_value_heads": 16}
    model = CausalLM.load(save_model(tmp_path, "deepseek_v3", **settings))
    layout, _ = probe(model, compiled=False)
    assert layout.token_bytes == 2 * (16 + 4) * 4  # of 2 * 2 * 16 * 12 * 4 in whole keys and values
    engine = LocalEngine(model, kv_bytes=1 << 16, max_running=4, max_prefill_tokens=8)

    async def all_of(prompt: list[int], version: int) -> list[Completion]:
        await engine.load_weights(version)
        asked = [engine.generate(prompt, Sampling(9, ignore_eos=True, seed=i)) for i in range(3)]
        return await asyncio.gather(*asked)

    prompt = [5, 6, 7, 8] * 5
    for version in range(2):
        for done in (completions := asyncio.run(all_of(prompt, version))):
            scores = asyncio.run(engine.score([*prompt, *done.token_ids], 1))
            expected = [score for score, _ in scores[len(prompt) - 1 :]]
            assert done.logprobs == pytest.approx(expected, abs=1e-5)
        prompt = [*prompt, *completions[0].token_ids, 9]
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(1.1)
