"""The real vLLM against the engine contract. Runs where vLLM is installed: ``make test-vllm``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_contract import CHECKS, Subject
from tiny import save_model
from tunesmith.engines.vllm import VllmEngine, VllmSettings

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

CONTEXT = 64


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_model(folder, "llama", max_position_embeddings=CONTEXT, vocab_size=261, head_dim=32)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tied"
    return save_model(folder, "qwen3", max_position_embeddings=CONTEXT, head_dim=32, tie_word_embeddings=True)


@cache
def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def subject(directory: Path) -> Subject:
    model = plain(directory)

    @torch.inference_mode()
    def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()

    settings = VllmSettings(str(directory), "float32", max_model_len=CONTEXT, kv_bytes=1 << 26, max_running=8)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    engine = VllmEngine(settings, lambda: model.state_dict().items())
    return Subject(engine, lambda ids: tokenizer.decode(list(ids)), score, CONTEXT)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_contract(check: Callable[[Subject], Awaitable[None]], directory: Path) -> None:
    async def run() -> None:
        made = subject(directory)
        try:
            await check(made)
        finally:
            await made.engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_new_weights_arrive_whole(family: str, request: pytest.FixtureRequest) -> None:
    """Also the head that shares its weights with the embedding, and also where a prefix was cached before."""

    async def run() -> None:
        made_of = request.getfixturevalue("directory" if family == "llama" else "tied")
        made = subject(made_of)
        assert made.score is not None
        try:
            prompt = list(range(20, 56))  # more than a block of the prefix cache
            first = await made.write(prompt=prompt)
            assert first.logprobs == pytest.approx(made.score(prompt, first.token_ids), abs=1e-4)
            with torch.no_grad():
                for parameter in plain(made_of).parameters():
                    parameter.mul_(1.1)
            await made.engine.load_weights(1)
            second = await made.write(prompt=prompt)
            assert second.versions == [1] * 12
            assert second.logprobs == pytest.approx(made.score(prompt, second.token_ids), abs=1e-4)
            assert second.logprobs != pytest.approx(first.logprobs, abs=1e-3)
        finally:
            await made.engine.close()

    asyncio.run(run())


def test_a_prompt_is_prefilled_once_for_its_group(directory: Path) -> None:
    async def run() -> int:
        made = subject(directory)
        try:
            prompt = list(range(20, 56))
            await made.write(prompt=prompt)
            made.engine.stats()
            await asyncio.gather(*(made.write(prompt=prompt) for _ in range(4)))
            return made.engine.stats().reused_prompt_tokens
        finally:
            await made.engine.close()

    assert asyncio.run(run()) == 4 * 32
