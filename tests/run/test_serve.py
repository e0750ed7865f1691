"""A served model scores prompts as its engine does, and says what it cannot answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.tiny import save_model
from tunesmith.config.schema import EnvironmentSection
from tunesmith.learn.endpoint.asks import BadRequest
from tunesmith.learn.endpoint.server import Endpoint
from tunesmith.learn.endpoint.text import TextExchange
from tunesmith.learn.environments.conversation import EpisodeSettings, OutOfRoom
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.assembly.serve import ServedModel, ServedPolicy
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Sampling

CONTEXT = 64


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[ServedPolicy, LocalEngine]]:
    model = CausalLM.load(save_model(folder, max_position_embeddings=CONTEXT))
    engine = LocalEngine(model, kv_bytes=1 << 20, max_running=4, max_prefill_tokens=64)
    section = EnvironmentSection()
    setting = EpisodeSettings.of(model.tokenizer, None, lambda _: [], section, CONTEXT)
    yield ServedPolicy(ServedModel("m", engine, setting, Sampling(8))), engine
    await engine.close()


async def answer_of(policy: ServedPolicy, **request: Any) -> Any:
    exchange = TextExchange(request, policy)
    return exchange.whole(await policy.answer(exchange.ask))


async def test_a_prompt_that_fills_the_context_is_scored(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 0}
    whole = [5] * CONTEXT
    async with opened(tmp_path) as (policy, _):
        answer = await answer_of(policy, **asked, prompt=whole, max_tokens=0)
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == CONTEXT
        for prompt, most in ((whole, 1), ([*whole, 5], 0)):
            with pytest.raises(OutOfRoom):
                await answer_of(policy, **asked, prompt=prompt, max_tokens=most)


@pytest.mark.parametrize("prompt", ["hello world", [[5, 9, 30, 7], [8]]], ids=["text", "ids"])
@pytest.mark.parametrize(("most", "logprobs"), [(3, 0), (3, 2), (0, 1), (3, None)])
async def test_a_stream_scores_the_prompt_as_the_whole_answer_does(
    prompt: Any, most: int, logprobs: int | None, tmp_path: Path
) -> None:
    said = {"prompt": prompt, "echo": True, "temperature": 0, "max_tokens": most}
    async with opened(tmp_path) as (policy, _):
        with closing(Endpoint()) as endpoint, endpoint.open(policy) as (url, _):
            async with httpx.AsyncClient() as client:
                asked = {**said, "logprobs": logprobs, "stream": True}
                answer = await client.post(f"{url}/completions", json=asked, timeout=60)
        whole = await answer_of(policy, **said, logprobs=logprobs)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces = [choice for line in lines for choice in json.loads(line)["choices"]]
    for choice in whole["choices"]:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        scored = [piece["logprobs"] for piece in own if piece["logprobs"]]
        if logprobs is None:
            assert not scored
            continue
        (found,) = scored
        expected = choice["logprobs"]
        for name in ("tokens", "text_offset"):
            assert found[name] == expected[name]
        assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
        assert found["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:])
        assert [*map(set, found["top_logprobs"][1:])] == [*map(set, expected["top_logprobs"][1:])]


async def test_a_prompt_is_scored_without_a_token_written(tmp_path: Path) -> None:
    async with opened(tmp_path) as (policy, engine):
        await scored_alone(policy, engine)


async def scored_alone(policy: ServedPolicy, engine: LocalEngine) -> None:
    async def answered(**request: Any) -> Any:
        return await answer_of(policy, **request)

    asked = {"prompt": [[5, 9, 30, 7], [8]], "echo": True, "logprobs": 2, "temperature": 0}
    alone = await answered(**asked, max_tokens=0)
    written = await answered(**asked, max_tokens=1)
    assert engine.stats().sampled_tokens == 2, "of those with max_tokens = 1"
    assert alone["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    for one, more in zip(alone["choices"], written["choices"], strict=True):
        assert (one["text"], one["finish_reason"]) == ("", "length")
        scores, others = one["logprobs"], more["logprobs"]
        assert scores["tokens"] == others["tokens"][:-1]
        assert scores["text_offset"] == others["text_offset"][:-1]
        assert scores["token_logprobs"][0] is None is others["token_logprobs"][0]
        # Another length of the pass rounds otherwise.
        assert scores["token_logprobs"][1:] == pytest.approx(others["token_logprobs"][1:-1])
        for ranked, other in zip(
            scores["top_logprobs"][1:], others["top_logprobs"][1:], strict=False
        ):
            assert ranked == pytest.approx(other)
    text = await answered(prompt="hello", echo=True, max_tokens=0)
    assert text["choices"][0]["text"] == "hello" and text["choices"][0]["logprobs"] is None
    with pytest.raises(BadRequest) as raised:
        await answered(prompt="hello", max_tokens=0)
    assert raised.value.param == "max_tokens"
