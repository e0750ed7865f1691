"""What a request to ``tunesmith serve`` asks of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.fake_engine import FakeEngine
from tunesmith.config.schema import EnvironmentSection
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.endpoint.asks import BadRequest, ChatRequest, parse
from tunesmith.learn.environments.conversation import EpisodeSettings, OutOfRoom
from tunesmith.learn.environments.rendering import ChatRenderer
from tunesmith.run.assembly.serve import ServedModel, ServedPolicy
from tunesmith.types import Completion, Sampling

MESSAGES = [{"role": "user", "content": "Go."}]


class Asked(FakeEngine):
    """Notes how it is asked to sample."""

    def __init__(self) -> None:
        super().__init__(eos_token_ids=())
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.samplings.append(sampling)
        return await super().generate(prompt_ids, sampling)


async def asked(**said: Any) -> list[Sampling]:
    tokenizer = byte_level(template("qwen2"))
    made = ChatTemplate.of(tokenizer)
    setting = EpisodeSettings.of(tokenizer, made, lambda _: [], EnvironmentSection(), 512)
    engine = Asked()
    policy = ServedPolicy(ServedModel("m", engine, setting, Sampling(8)))
    request = {"messages": MESSAGES, **said}
    await policy.answer(parse(ChatRequest, request).as_ask(request))
    return engine.samplings


@pytest.mark.parametrize(
    "content", ["a" * 10**6, [{"type": "text", "text": "a" * 10**6}]], ids=["text", "parts"]
)
async def test_what_can_never_fit_is_not_tokenized(
    content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes long, and all other requests wait for it."""
    monkeypatch.setattr(ChatRenderer, "whole", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(OutOfRoom, match="1000000 characters"):
        await asked(messages=[{"role": "user", "content": content}])


async def test_what_it_says_about_sampling_applies() -> None:
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
    found = await asked(**said, repetition_penalty=1.2, min_tokens=3, seed=7, n=2, max_tokens=4)
    expected = Sampling(4, **said, repetition_penalty=1.2, min_new_tokens=3)
    assert found == [replace(expected, seed=seed) for seed in (7, 8)]


async def test_what_changes_nothing_may_be_said() -> None:
    found = await asked(
        top_k=-1,
        repetition_penalty=1.0,
        min_tokens=0,
        ignore_eos=False,
        stop_token_ids=[],
        frequency_penalty=0.0,
        continue_final_message=False,
        add_generation_prompt=True,
    )
    assert found == [Sampling(8)]


@pytest.mark.parametrize(
    "said",
    [
        {"ignore_eos": True},
        {"stop_token_ids": [1]},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"logit_bias": {"1": 5}},
        {"min_tokens": 1.5},
        {"min_tokens": 9},
        {"repetition_penalty": "1"},
        {"repetition_penalty": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 10**400},
        {"temperature": float("nan")},
        {"structured_outputs": {"regex": "a"}},
        {"truncate_prompt_tokens": 5},
    ],
)
async def test_what_does_not_apply_is_refused_by_name(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(BadRequest) as caught:
        await asked(**said)
    named = {"min_tokens": "min_new_tokens"}.get(name, name)
    assert name == caught.value.param or named in str(caught.value)
