"""The embedded engine samples from every family what a pass of transformers over the whole says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import SPECIAL, settings_of
from tests.support.tiny import save_model
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.families import families
from tunesmith.plan.facts.model import facts_of
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.runner import probe
from tunesmith.types import Completion, Sampling

UNGROUPED = ("biogpt", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "persimmon")
"""Whose own configurations have no number of key/value heads, as the tiny ones have."""
PROMPTS = ([5, 6, 7], [8, 9] * 15)


TEXT = [name for name, each in families().items() if not (each.multimodal or each.inner)]


@pytest.mark.parametrize("model_type", TEXT)
def test_sampled_tokens_have_the_probabilities_of_the_whole(
    model_type: str, tmp_path: Path
) -> None:
    """Two prompts, shared and read in chunks, and windows shorter than them; with the bytes per
    token that are planned."""
    path = save_model(tmp_path, model_type, **SPECIAL.get(model_type, {}))
    model = CausalLM.load(path)
    facts = facts_of(model.module.config.to_dict() | settings_of(model_type))
    assert facts is not None
    if model_type not in UNGROUPED:
        assert probe(model, compiled=False)[0].token_bytes == facts.kv_bytes_per_token(4)
    engine = LocalEngine(
        model, kv_bytes=1 << 22, max_running=3, max_prefill_tokens=16, block_size=8
    )

    async def all_of_them() -> list[Completion]:
        samplings = [Sampling(12 + i, ignore_eos=True, seed=i) for i in range(6)]
        asked = [engine.generate(PROMPTS[i % 2], each) for i, each in enumerate(samplings)]
        return await asyncio.gather(*asked)

    completions = asyncio.run(all_of_them())
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for i, done in enumerate(completions):
        prompt = PROMPTS[i % 2]
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *done.token_ids]])
            logits = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(done.token_ids).unsqueeze(1)
        expected = logits.log_softmax(-1).gather(1, chosen).squeeze(1).tolist()
        assert done.logprobs == pytest.approx(expected, abs=1e-4)
