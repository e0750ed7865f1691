"""A served model scores prompts as its engine does, and says what it cannot answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tunesmith.config.schema import EnvironmentSection
from tunesmith.learn.endpoint.asks import BadRequest
from tunesmith.learn.endpoint.text import TextExchange
from tunesmith.learn.environments.conversation import EpisodeSettings
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.assembly.serve import ServedModel, ServedPolicy
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Sampling


async def test_a_prompt_is_scored_without_a_token_written(tmp_path: Path) -> None:
    model = CausalLM.load(save_model(tmp_path))
    engine = LocalEngine(model, kv_bytes=1 << 20, max_running=4, max_prefill_tokens=64)
    setting = EpisodeSettings.of(model.tokenizer, None, lambda _: [], EnvironmentSection(), 64)
    policy = ServedPolicy(ServedModel("m", engine, setting, Sampling(8)))

    async def answered(**request: Any) -> Any:
        exchange = TextExchange(request, policy)
        return exchange.whole(await policy.answer(exchange.ask))

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
    for more in ({}, {"echo": True, "stream": True}):
        with pytest.raises(BadRequest) as raised:
            await answered(prompt="hello", max_tokens=0, **more)
        assert raised.value.param == "max_tokens"
    await engine.close()
