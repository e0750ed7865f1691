"""The experts that vLLM returns with a completion."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import tiny
from tests.support.families import build
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.vllm.engine import VllmEngine, expert_choices
from tunesmith.run.engines.vllm.start import VllmSettings
from tunesmith.types import Completion, Sampling


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_they_are_kept_as_numbers_of_16_bits_by_token(dtype: Any) -> None:
    """Three tokens, two decoder layers, of each two experts."""
    chosen = np.array([[[0, 5], [1, 200]], [[2, 3], [4, 5]], [[9, 8], [7, 6]]], dtype)
    kept = expert_choices(chosen)
    assert kept is not None and (len(kept), kept.width) == (3, 8)
    assert np.frombuffer(kept.cut(1).data, np.int16).tolist() == [0, 5, 1, 200]
    assert expert_choices(None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
def test_they_are_those_of_the_embedded_engine(tmp_path: Path) -> None:
    """In float32, where both choose the same, in whatever order."""
    built = build("qwen3_moe", hidden_size=64, head_dim=32, num_experts=16, num_experts_per_tok=4)
    built.module.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    settings = VllmSettings(str(tmp_path), "float32", kv_bytes=32 << 20, records_experts=True)
    vllm = VllmEngine(settings, dict[str, Any]().items)
    local = LocalEngine(
        CausalLM.load(tmp_path, device="cuda"),
        kv_bytes=32 << 20,
        max_running=4,
        max_prefill_tokens=512,
        records_experts=True,
    )
    prompt = list(range(20, 60))

    async def complete(
        engine: RolloutEngine, tokens: list[int], count: int, times: int
    ) -> list[Completion]:
        sampling = Sampling(count, temperature=0.0)
        return [await engine.generate(tokens, sampling) for _ in range(times)]

    async def play() -> tuple[list[Completion], list[Completion]]:
        try:
            theirs = await complete(vllm, prompt, 24, 2)  # the second reads cached prefixes
            return theirs, await complete(local, prompt + theirs[0].token_ids, 1, 1)
        finally:
            await vllm.close()
            await local.close()

    theirs, (ours,) = asyncio.run(play())
    for done in theirs:
        assert done.experts is not None and ours.experts is not None
        assert len(done.experts) == len(prompt) + len(done.token_ids) - 1
        got, wanted = (
            np.sort(np.frombuffer(each.data, np.int16).reshape(-1, 4))
            for each in (done.experts, ours.experts.cut(len(done.experts)))
        )
        np.testing.assert_array_equal(got, wanted)
