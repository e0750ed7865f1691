"""``tunesmith serve``: a model over HTTP, in the interfaces of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tunesmith.config.commands import GenerateConfig
from tunesmith.config.load import load_config
from tunesmith.config.reading.files import find_model
from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import EngineLostError, EpisodeError, NoEngineError, UserError, boundary
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.endpoint.asks import Ask, BadRequest
from tunesmith.learn.endpoint.checks import check_schema
from tunesmith.learn.endpoint.episode import reply_of
from tunesmith.learn.endpoint.server import Endpoint
from tunesmith.learn.endpoint.turns import Answer, Follow, Policy, all_replies
from tunesmith.learn.environments.base import Generate, Growing
from tunesmith.learn.environments.conversation import (
    Conversation,
    EpisodeSettings,
    OutOfRoom,
    Reply,
)
from tunesmith.plan.resolve import resolve
from tunesmith.records.addresses import check_address
from tunesmith.records.http_server import url_of
from tunesmith.run.assembly.checking import facts_of_run
from tunesmith.run.assembly.seeing import see_requests
from tunesmith.run.assembly.serve_reward import token_for
from tunesmith.run.engines.base import PromptScorer, RolloutEngine, check_sampling
from tunesmith.run.engines.partial import FOLLOWER
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.placement.choosing import on_this_machine
from tunesmith.run.specs.engines import make_sampling
from tunesmith.run.specs.from_plan import engine_spec, frozen_source, load_tokenizer
from tunesmith.run.specs.models import saved_generation
from tunesmith.types import Completion, Rollout, Sampling, Task

SAMPLED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
}
"""What a request may say about sampling, and our names of it."""
WHOLE = ("top_k", "seed", "min_tokens")
TOKEN_ENV = "TUNESMITH_SERVE_TOKEN"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine, and how conversations become its tokens."""

    name: str
    engine: RolloutEngine
    setting: EpisodeSettings
    sampling: Sampling
    constrains: bool = False
    """Whether the engine keeps to a JSON schema while it writes."""
    names: tuple[str, ...] = ()
    """What requests may call it; empty: anything."""


class ServedPolicy(Policy):
    """Answers requests that have nothing to do with each other, on the engine's event loop."""

    what = "server"

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served.name, served.setting)
        self.names = served.names
        self.ranks = isinstance(served.engine, PromptScorer)
        self.lost: asyncio.Future[NoReturn] = self.loop.create_future()
        """Raises the error with which the last engine was lost for good."""
        self._served = served
        longest = max(map(len, self.renderer.tokenizer.get_vocab()), default=1)
        self._most = served.setting.max_tokens * longest
        """Characters that a prompt can have."""

    @property
    def available(self) -> bool:
        """See ``Policy``. While lost engines are replaced, requests wait."""
        engine = self._served.engine
        runs = not isinstance(engine, EnginePool) or bool(engine.members)
        return runs and not self.lost.done()

    async def answer(self, ask: Ask, follow: Follow | None = None) -> Answer:
        """See ``Policy``. Raises BadRequest: it asks for what a served model does not do."""
        if not ask.prompts and self._served.setting.parse is None:
            raise BadRequest("the model has no chat template: use /v1/completions")
        self._check_size(ask)
        if ask.schema is not None:
            check_schema(ask.schema)
        sampling = self._sampling(ask)
        engine = self._served.engine
        if ask.echo and ask.logprobs is not None and not isinstance(engine, PromptScorer):
            raise BadRequest("this engine gives no log-probabilities of prompts: system.engine")

        async def reply(index: int) -> Reply:
            writes = ask.max_tokens != 0
            generate = _generate(engine, sampling, index % ask.n) if writes else _write_nothing
            conversation = self._conversation(generate)
            replied = await reply_of(conversation, ask, follow, index)
            wanted = ask.logprobs is not None and (ask.echo or ask.logprobs)
            if not wanted or not isinstance(engine, PromptScorer):
                return replied
            ids = conversation.rollout.records[-1].token_ids
            scores = await engine.score(ids, max(1, ask.logprobs or 0))
            start = replied.prompt_tokens
            if ask.logprobs:
                replied = replace(replied, scores=scores[start - 1 :])
            if ask.echo:
                before = scores[: start - 1]
                replied = replace(replied, prompt_ids=ids[:start], prompt_scores=before)
            return replied

        try:
            return await all_replies(ask, reply)
        except (EngineLostError, NoEngineError) as error:
            if not self.lost.done():
                self.lost.set_exception(error)
            raise

    def count(self, ask: Ask) -> int:
        """See ``Policy``."""
        self._check_size(ask)
        conversation = self._conversation(_generate(self._served.engine, self._served.sampling, 0))
        return conversation.prompt_length(ask.messages, ask.tools, ask.options)

    def _check_size(self, ask: Ask) -> None:
        """Refuse what can never fit before it is tokenized, for which all other requests wait.

        Raises:
            OutOfRoom: a prompt has more characters than so many of the longest tokens.
        """
        said = sum(_characters(message.get("content")) for message in ask.messages)
        size = max([said, *map(len, ask.prompts)])
        if size > self._most:
            context = f"the model's context has {self._served.setting.max_tokens} tokens"
            raise OutOfRoom(f"a prompt of {size} characters does not fit: {context}")

    def _conversation(self, generate: Generate) -> Conversation:
        return Conversation(Rollout(Task("served", "", ())), generate, self._served.setting, ())

    def _sampling(self, ask: Ask) -> Sampling:
        asked = dict(ask.sampling)
        known = {name: asked.pop(name) for name in SAMPLED if name in asked}
        if unknown := [name for name, value in asked.items() if value]:
            raise BadRequest(f"'{unknown[0]}' cannot be served; leave it out", unknown[0])
        for name, value in known.items():
            number = int if name in WHOLE else int | float
            if isinstance(value, bool) or not isinstance(value, number):
                raise BadRequest(f"'{name}' = {value!r} is not a number", name)
        said = {SAMPLED[name]: value for name, value in known.items()}
        if said.get("top_k", 0) < 0:  # vLLM's way to say that it is off
            said["top_k"] = 0
        most = ask.max_tokens or self._served.sampling.max_new_tokens
        # With tools a turn may be a call, which no schema of a text allows.
        free = not self._served.constrains or (ask.tools and ask.may_call)
        schema = json.dumps(ask.schema) if ask.schema and not free else None
        sampling = replace(self._served.sampling, max_new_tokens=most, schema=schema, **said)
        try:
            check_sampling(sampling)
        except UserError as error:
            raise BadRequest(str(error)) from None
        return sampling


def _characters(content: object) -> int:
    """Of a message's text, or of its parts that are text."""
    if isinstance(content, str):
        return len(content)
    parts: list[Any] = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return sum(len(text) for text in texts if isinstance(text, str))


def _generate(engine: RolloutEngine, sampling: Sampling, index: int) -> Generate:
    async def generate(
        prompt_ids: Sequence[int],
        /,
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        follow: Callable[[Growing], None] | None = None,
    ) -> Completion:
        FOLLOWER.set(follow)
        seed = None if sampling.seed is None else sampling.seed + index
        asked = replace(sampling.within(max_new_tokens, stop), seed=seed)
        with boundary(EpisodeError, "the model cannot answer", ValueError):
            return await engine.generate(prompt_ids, asked)

    return generate


async def _write_nothing(prompt_ids: Sequence[int], /, **_: object) -> Completion:
    del prompt_ids
    return Completion([], [], [], "length")


def open_model(path: str, overrides: Sequence[str], longest: int | None = None) -> ServedModel:
    """The engine of a model's directory or hub name.

    Args:
        longest: tokens of a prompt for which there has to be room; None: what the model reads.

    Raises:
        UserError: settings, files or the machine do not allow it.
    """
    own = [f"model.path={path}", "data.train=requests", "sampling.n=1"]
    config = load_config(GenerateConfig, None, [*own, *overrides], files=False)
    tokenizer = load_tokenizer(config)
    most = config.sampling.max_new_tokens
    facts = facts_of_run(config)
    context = facts.model.context if facts.model and facts.model.context else 4096
    room = max(1, context - most)
    longest = min(room, longest or room)
    plan = resolve(config, replace(facts, train_size=256, longest=longest))
    see_requests(plan, tokenizer)
    engine = on_this_machine(plan, tokenizer).engine(
        engine_spec(plan), frozen_source(plan, tokenizer), partial(print, flush=True)
    )
    sampling = make_sampling(config.sampling, tokenizer, 1.0, saved_generation(config))
    template = ChatTemplate.of(tokenizer) if tokenizer.chat_template else None
    section = EnvironmentSection()
    setting = EpisodeSettings.of(tokenizer, template, lambda _: [], section, context)
    return ServedModel(Path(path).name, engine, setting, sampling, plan.devices.engine.constrains)


def serve_model(
    model: str, overrides: Sequence[str], host: str, port: int, token_file: Path | None
) -> None:
    """Serve a model's or a run's directory, or a hub name, until SIGTERM or Ctrl-C.

    Raises:
        UserError: as ``open_model``, or the address cannot be used.
        EngineError: the engines cannot start, or all are lost.
    """
    check_address(host, port)
    path = find_model(model, [Path.cwd()], with_adapter=True)
    token = token_for(host, token_file, TOKEN_ENV)
    served = open_model(path, overrides)
    names = dict.fromkeys([served.name, model, path])
    asyncio.run(_serve(replace(served, names=tuple(names)), host, port, token))


async def _serve(served: ServedModel, host: str, port: int, token: str | None) -> None:
    work = asyncio.ensure_future(_answer(served, host, port, token))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await work
    finally:
        await served.engine.close()


async def _answer(served: ServedModel, host: str, port: int, token: str | None) -> None:
    """Raises TunesmithError: the engines cannot start, or all are lost."""
    if isinstance(served.engine, EnginePool):
        await served.engine.roster.opened()
    policy = ServedPolicy(served)
    endpoint = Endpoint(host=host, port=port)
    with endpoint.open(policy, token, for_all=token is None):
        address = f"{url_of(host, endpoint.port)}/v1"
        print(f"serving {served.name} at {address}; Ctrl-C stops it", flush=True)
        try:
            await policy.lost
        finally:  # meanwhile the requests in progress get their answers from this loop
            await asyncio.to_thread(endpoint.close)
