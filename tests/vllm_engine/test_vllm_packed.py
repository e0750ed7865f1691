"""A checkpoint in MXFP4 is read by the real vLLM as bfloat16."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.packed import save_packed
from tunesmith.types import Completion, Sampling

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from tunesmith.run.engines.vllm.engine import VllmEngine
from tunesmith.run.engines.vllm.start import VllmSettings

PROMPT = [5, 6, 7, 8, 9]


def test_sampled_tokens_have_the_probabilities_of_transformers(tmp_path: Path) -> None:
    path = save_packed(tmp_path, head_dim=32, shards=True)
    nothing = dict[str, Any]().items
    engine = VllmEngine(VllmSettings(str(path), "float32", kv_bytes=1 << 26), nothing)

    async def completion() -> Completion:
        try:
            return await engine.generate(PROMPT, Sampling(max_new_tokens=12, ignore_eos=True))
        finally:
            await engine.close()

    done = asyncio.run(completion())
    plain: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float()
    with torch.inference_mode():
        logits = plain(torch.tensor([[*PROMPT, *done.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    chosen = torch.tensor(done.token_ids).unsqueeze(1)
    expected = logits.log_softmax(-1).gather(1, chosen).squeeze(1).tolist()
    assert done.logprobs == pytest.approx(expected, abs=1e-4)
