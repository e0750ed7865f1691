"""Engines behind HTTP: the contract, servers that fail, and weights that arrive."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from tests.support.engine_contract import CHECKS, FREE, PROMPT, Subject
from tests.support.http_engine_servers import Sglang, serving
from tests.support.http_servers import unused_url
from tests.support.tiny import save_model
from tunesmith.errors import EngineError, EngineLostError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.engines.http.engine import SglangEngine
from tunesmith.run.specs.http_engines import make_served, weight_files
from tunesmith.run.weights.base import Offer
from tunesmith.types import Completion, Sampling

CONTEXT = 64
NEVER = 10**6
"""An end-of-sequence token that no tokenizer has."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("served"), "llama", max_position_embeddings=CONTEXT, vocab_size=261
    )


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM.load(path)


@pytest.fixture
def sglang(path: Path) -> Iterator[Sglang]:
    with serving(Sglang(path)) as server:
        yield server


class Alone(SglangEngine):
    """Gives itself the weights that a pool would give it."""

    def __init__(self, url: str, model: CausalLM, **options: Any) -> None:
        super().__init__(url, make_served(model), **options)
        self.plane = weight_files(model, None)
        self.first = asyncio.Lock()
        self.loaded = False

    async def offered(self, version: int) -> Offer:
        await self.plane.publish(version)
        [offer] = await self.plane.offer(1)
        return offer

    async def load_weights(self, version: int) -> None:
        self.loaded = True
        await self.take(version, await self.offered(version))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        async with self.first:
            if not self.loaded:
                await self.load_weights(0)
        return await super().generate(prompt_ids, sampling)

    async def close(self) -> None:
        await super().close()
        await self.plane.close()


def sglang_engine(url: str, model: CausalLM, **options: Any) -> Alone:
    return Alone(url, model, **{"patience": 300.0, "report": lambda _: None, **options})


@torch.inference_mode()
def logits_of(model: CausalLM, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """``[completion, vocabulary]``, by transformers alone, with the trainer's weights as they are
    now."""
    plain = AutoModelForCausalLM.from_pretrained(
        model.module.config.name_or_path, dtype=torch.float32
    )
    plain.load_state_dict(model.module.state_dict())
    return plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]


def scorer(model: CausalLM) -> Callable[[Sequence[int], Sequence[int]], list[float]]:
    def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        logits = logits_of(model, prompt, completion)
        return (
            logits.log_softmax(-1)
            .gather(1, torch.tensor(completion).unsqueeze(1))
            .squeeze(1)
            .tolist()
        )

    return score


def decoder(model: CausalLM) -> Callable[[Sequence[int]], str]:
    return lambda ids: model.tokenizer.decode(list(ids))


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
async def test_sglang_fulfils_the_contract(
    check: Callable[[Subject], Awaitable[None]], sglang: Sglang, model: CausalLM
) -> None:
    engine = sglang_engine(sglang.url, model)
    try:
        await engine.load_weights(0)
        await check(Subject(engine, decoder(model), scorer(model), CONTEXT))
    finally:
        await engine.close()


@pytest.mark.more
def test_new_weights_arrive_and_each_token_is_of_the_weights_that_drew_it(
    sglang: Sglang, path: Path
) -> None:
    own = CausalLM.load(path)
    score = scorer(own)

    async def run() -> None:
        engine = sglang_engine(sglang.url, own)
        await engine.load_weights(1)
        before = await engine.generate(PROMPT, replace(FREE, max_new_tokens=55))
        assert before.logprobs == pytest.approx(score(PROMPT, before.token_ids), abs=1e-4)
        with torch.no_grad():
            for parameter in own.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        sglang.holds_at = 5
        running = asyncio.create_task(engine.generate(PROMPT, replace(FREE, max_new_tokens=55)))
        while not any(r.output_ids for r in list(sglang.requests.values())):
            await asyncio.sleep(0.001)
        await engine.load_weights(2)
        done = await running
        after = await engine.generate(PROMPT, FREE)
        assert after.logprobs == pytest.approx(score(PROMPT, after.token_ids), abs=1e-4)
        assert after.logprobs != pytest.approx(before.logprobs[:12], abs=1e-2)
        assert (set(after.versions), engine.version) == ({2}, 2)
        # The tokens before the update are the old weights', those after it the new ones'.
        old = done.versions.count(1)
        assert done.versions == [1] * old + [2] * (55 - old) and 0 < old < 55
        assert done.token_ids[:old] == before.token_ids[:old]
        assert done.logprobs[:old] == pytest.approx(before.logprobs[:old], abs=1e-4)
        assert done.logprobs[old:] == pytest.approx(score(PROMPT, done.token_ids)[old:], abs=1e-4)
        await engine.close()

    torch.manual_seed(0)
    asyncio.run(run())


async def test_the_last_weights_alone_stay_on_disk(sglang: Sglang, model: CausalLM) -> None:
    engine = sglang_engine(sglang.url, model)
    for version in (1, 2, 3):
        await engine.load_weights(version)
    folder = Path(
        next(body["model_path"] for name, body in sglang.asked if name.startswith("update"))
    )
    assert [file.name for file in folder.glob("*.safetensors")] == ["3-version-3-00000.safetensors"]
    await engine.close()
    assert not folder.exists()


def test_a_server_that_restarted_is_given_its_weights_again(sglang: Sglang, path: Path) -> None:
    own = CausalLM.load(path)
    told = list[str]()
    with torch.no_grad():
        own.head.weight.mul_(2.0)

    async def trouble(request: web.Request, _: Any) -> web.StreamResponse | None:
        sglang.trouble = None
        sglang.restart()
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def run() -> None:
        engine = sglang_engine(sglang.url, own, report=told.append)
        await engine.load_weights(4)
        sglang.trouble = trouble
        done = await engine.generate(PROMPT, FREE)
        assert done.logprobs == pytest.approx(scorer(own)(PROMPT, done.token_ids), abs=1e-4)
        assert set(done.versions) == {4}
        await engine.close()

    asyncio.run(run())
    assert any("lost its weights (it has 'default')" in line for line in told)


async def test_a_server_that_somebody_else_uses_too_is_refused(
    sglang: Sglang, model: CausalLM
) -> None:
    async def trouble(request: web.Request, _: Any) -> web.StreamResponse | None:
        sglang.weight_version = "theirs" if request.path == "/generate" else sglang.weight_version
        return None

    engine = sglang_engine(sglang.url, model)
    await engine.load_weights(1)
    sglang.trouble = trouble
    with pytest.raises(EngineError, match=r"it has 'theirs'.*one run at a time"):
        await engine.generate(PROMPT, FREE)
    await engine.close()


async def test_a_server_that_was_left_paused_goes_on(sglang: Sglang, model: CausalLM) -> None:
    sglang.may_run.clear()

    engine = sglang_engine(sglang.url, model)
    assert len((await asyncio.wait_for(engine.generate(PROMPT, FREE), 300)).token_ids) == 12
    await engine.close()


async def test_a_command_that_only_samples_gives_the_server_its_model_first(
    sglang: Sglang, path: Path
) -> None:
    own = CausalLM.load(path)
    with torch.no_grad():
        own.head.weight.mul_(2.0)

    engine = sglang_engine(sglang.url, own)
    done = await engine.generate(PROMPT, FREE)
    assert done.logprobs == pytest.approx(scorer(own)(PROMPT, done.token_ids), abs=1e-4)
    await engine.close()


def test_cancelling_aborts_at_the_server(sglang: Sglang, model: CausalLM) -> None:
    async def run() -> None:
        engine = sglang_engine(sglang.url, model)
        await engine.load_weights(0)
        sglang.holds_at = 5
        running = asyncio.create_task(engine.generate(PROMPT, replace(FREE, max_new_tokens=55)))
        while not sglang.requests:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.close()

    asyncio.run(run())
    assert sglang.aborts == [sglang.asked_for("generate")[-1]["rid"]]


def test_an_error_that_passes_is_outlived(sglang: Sglang, model: CausalLM) -> None:
    left = [500, 503]

    async def trouble(request: web.Request, _: Any) -> web.StreamResponse | None:
        return web.Response(status=left.pop()) if left and request.path == "/generate" else None

    async def run() -> None:
        engine = sglang_engine(sglang.url, model)
        await engine.load_weights(0)
        sglang.trouble = trouble
        assert len((await engine.generate(PROMPT, FREE)).token_ids) == 12
        await engine.close()

    asyncio.run(run())
    assert not left


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (
            lambda: web.Response(status=500, text="out of memory"),
            EngineLostError,
            "answered 500: out of memory",
        ),
        (
            lambda: web.Response(status=400, text="no such thing"),
            EngineError,
            "answered 400: no such thing",
        ),
        (lambda: web.Response(text="<html>"), EngineError, "did not answer with JSON: <html>"),
        (lambda: web.json_response({"text": "hello"}), EngineError, "SGLang 0.5.23 does not"),
        (lambda: web.json_response([]), EngineError, "SGLang 0.5.23 does not"),
        (
            lambda: web.json_response(
                {
                    "output_ids": [3],
                    "meta_info": {
                        "finish_reason": {"type": "stop"},
                        "output_token_logprobs": [[None, 3, None]],
                        "weight_version": "TAG",
                    },
                }
            ),
            EngineError,
            "the token 3 with the log-probability None",
        ),
    ],
    ids=["failing", "refusing", "no-json", "other-json", "list", "no-logprob"],
)
async def test_what_cannot_be_used_is_an_engine_error_with_the_address(
    answer: Callable[[], web.Response],
    kind: type[EngineError],
    reason: str,
    sglang: Sglang,
    model: CausalLM,
) -> None:
    async def trouble(request: web.Request, _: Any) -> web.StreamResponse | None:
        if request.path != "/generate":
            return None
        made = answer()
        if made.text and "TAG" in made.text:
            made.text = made.text.replace("TAG", sglang.weight_version)
        return made

    engine = sglang_engine(sglang.url, model, patience=0.3)
    await engine.load_weights(0)
    sglang.trouble = trouble
    with pytest.raises(kind, match=reason) as raised:
        await engine.generate(PROMPT, FREE)
    assert sglang.url in str(raised.value)
    await engine.close()


def test_a_server_that_dies_in_the_middle_is_a_lost_engine(path: Path, model: CausalLM) -> None:
    async def run(server: Sglang) -> Alone:
        engine = sglang_engine(server.url, model, patience=0.3)
        await engine.load_weights(0)

        async def die(request: web.Request, _: Any) -> web.StreamResponse | None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()

        server.trouble = die
        with pytest.raises(EngineLostError, match=f"{server.url} cannot be used"):
            await engine.generate(PROMPT, FREE)
        await engine.close()
        return engine

    with serving(Sglang(path)) as server:
        asyncio.run(run(server))


@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_falls_silent_is_a_lost_engine(
    path: Path, model: CausalLM, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """One that works for long and answers other questions meanwhile is not."""
    monkeypatch.setattr("tunesmith.run.engines.http.server.SILENCE", 0.2)
    monkeypatch.setattr("tunesmith.run.engines.http.server.PROBE", 0.02)

    async def run(server: Sglang) -> None:
        engine = sglang_engine(server.url, model)
        await engine.load_weights(0)

        async def hang(request: web.Request, _: Any) -> web.StreamResponse | None:
            if request.path == "/generate":
                await asyncio.sleep(0.6)
            elif not answers:
                await asyncio.sleep(60)
            return None

        server.trouble = hang
        if answers:
            assert (await engine.generate(PROMPT, FREE)).token_ids
        else:
            with pytest.raises(EngineLostError, match=f"{server.url} has been silent"):
                await engine.generate(PROMPT, FREE)
        await engine.close()

    with serving(Sglang(path)) as server:
        asyncio.run(run(server))


async def loads_nothing(request: web.Request, body: Any) -> web.StreamResponse | None:
    """Trouble of a server that cannot read new weights."""
    if request.path == "/update_weights_from_disk":
        body["model_path"] = "/nowhere"
    return None


async def test_weights_that_the_server_cannot_load_leave_it_going(
    sglang: Sglang, model: CausalLM
) -> None:
    engine = sglang_engine(sglang.url, model)
    await engine.load_weights(1)
    sglang.trouble = loads_nothing
    with pytest.raises(EngineError, match="Failed to update weights"):
        await engine.load_weights(2)
    assert set((await engine.generate(PROMPT, FREE)).versions) == {1}
    await engine.close()


@pytest.mark.parametrize("before", [[], [1]], ids=["at first", "later"])
async def test_weights_given_again_keep_their_version(
    sglang: Sglang, model: CausalLM, before: list[int]
) -> None:
    engine = sglang_engine(sglang.url, model)
    for version in before:
        await engine.load_weights(version)
    sglang.trouble = loads_nothing
    with pytest.raises(EngineError, match="Failed to update weights"):
        await engine.load_weights(2)
    sglang.trouble = None
    sglang.restart()
    assert set((await engine.generate(PROMPT, FREE)).versions) == {2}
    await engine.close()


async def test_a_server_that_does_not_answer_is_refused_with_how_to_start_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.run.engines.http.engine.START_PATIENCE", 0.2)
    url = unused_url().removesuffix("/reward")

    engine = sglang_engine(url, model)
    for _ in range(2):  # the second request does not wait again
        with pytest.raises(
            UserError, match=re.escape("python -m sglang.launch_server --model-path")
        ) as raised:
            await engine.generate(PROMPT, FREE)
        assert f"{url} cannot be used" in str(raised.value)
    await engine.close()


async def test_another_model_is_refused(sglang: Sglang, model: CausalLM, tmp_path: Path) -> None:
    larger = CausalLM.load(
        save_model(tmp_path, "llama", max_position_embeddings=CONTEXT, vocab_size=400)
    )

    async def refused(engine: Any, reason: str) -> None:
        with pytest.raises(UserError, match=reason):
            await engine.generate(PROMPT, replace(FREE, ignore_eos=False))
        await engine.close()

    wanted = f"{-math.log(400):.2f}"
    await refused(sglang_engine(sglang.url, larger), f"of 400 has the log-probability {wanted}")
    sglang.model_type = "qwen2"
    await refused(sglang_engine(sglang.url, model), "serves a 'qwen2'")


async def test_what_sglang_has_no_log_probabilities_of_is_refused(
    sglang: Sglang, model: CausalLM
) -> None:
    engine = sglang_engine(sglang.url, model)
    for name, value in (
        ("top_p", 0.9),
        ("top_k", 3),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("min_new_tokens", 2),
    ):
        with pytest.raises(UserError, match=f"sampling: {name} = {value}"):
            await engine.generate(PROMPT, replace(FREE, **{name: value}))
    await engine.close()


def test_a_server_without_seeds_says_so(path: Path, model: CausalLM) -> None:
    told: list[str] = []

    async def run(url: str) -> None:
        engine = sglang_engine(url, model, report=told.append)
        await engine.generate(PROMPT, FREE)
        await engine.close()

    with serving(Sglang(path, deterministic=False)) as server:
        asyncio.run(run(server.url))
    assert "--enable-deterministic-inference" in told[0]
