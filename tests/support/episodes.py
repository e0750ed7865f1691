"""Episodes with a scripted policy that writes down what it consumed and produced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from tests.support.fake_engine import FakeEngine
from tunesmith.config.schema import EnvironmentSection
from tunesmith.learn.environments.loading import EnvironmentSet, load_environments
from tunesmith.run.assembly.environments import build_environments
from tunesmith.run.loop.collect import Collector
from tunesmith.types import Completion, Message, Rollout, Sampling, Status, Task

Policy = Callable[[str], str]
"""What to write after a conversation, both as text with special tokens."""


class RecordingEngine(FakeEngine):
    """Writes what the policy says, token by token, and remembers every exchange."""

    def __init__(self, tokenizer: Any, policy: Policy) -> None:
        def script(prompt_ids: Sequence[int], sampling: Sampling) -> list[int]:  # noqa: ARG001
            return list(
                tokenizer(policy(tokenizer.decode(prompt_ids)), add_special_tokens=False)[
                    "input_ids"
                ]
            )

        super().__init__(
            script,
            eos_token_ids=(tokenizer.eos_token_id,),
            context=100_000,
            decode=tokenizer.decode,
        )
        self.exchanges: list[tuple[list[int], list[int]]] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await super().generate(prompt_ids, sampling)
        self.exchanges.append((list(prompt_ids), list(completion.token_ids)))
        self.samplings.append(sampling)
        return completion


class PausingEngine(RecordingEngine):
    """Pauses after the third token of each completion, until ``go_on`` is set."""

    def __init__(self, tokenizer: Any, policy: Policy) -> None:
        super().__init__(tokenizer, policy)
        self.go_on = Event()
        self.running = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.running += 1
        try:
            return await super().generate(prompt_ids, sampling)
        finally:
            self.running -= 1

    async def between(self, written: int) -> None:
        await super().between(written)
        while written == 3 and not self.go_on.is_set():  # it is set in the agent's thread
            await asyncio.sleep(0.002)


class Sum:
    """A scorer that adds nothing: environments give the rewards."""

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None: ...


def load(folder: Path, code: str, **section: Any) -> EnvironmentSet:
    """The environments of a section, whose files are all ``env.py``, on threads where nothing else
    is said."""
    (folder / "env.py").write_text(code)
    return load_environments(EnvironmentSection(**{"isolation": "thread", **section}), folder)


def made_task(
    tokenizer: Any,
    prompt: str | list[Message] = "Go.",
    chat: bool = True,
    identity: str = "t",
    **columns: Any,
) -> Task:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if chat:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        assert isinstance(prompt, str)
        text = prompt
    return Task(
        identity, prompt, tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), columns
    )


def play(
    environments: EnvironmentSet,
    tokenizer: Any,
    tasks: Sequence[Task],
    policy: Policy,
    *,
    group_size: int = 1,
    max_new_tokens: int = 400,
    max_tokens: int = 4000,
    timeout: float = 120.0,
    chat: bool = True,
    end: str = "<|im_end|>",
    concurrency: int | None = None,
    scorer: Any = None,
    kind: type[RecordingEngine] = RecordingEngine,
) -> tuple[list[Rollout], RecordingEngine]:
    """Play tasks out; what the engine saw is with it. A task's column ``engine`` is called with
    it."""
    engine = kind(tokenizer, policy)
    for task in tasks:
        task.columns.get("engine", lambda _: None)(engine)
    ends = tokenizer(end, add_special_tokens=False)["input_ids"] if chat else []

    def prompt_of(task: Task) -> list[Message]:
        return (
            [{"role": "user", "content": task.prompt}]
            if isinstance(task.prompt, str)
            else task.prompt
        )

    def with_tools(task: Task) -> Task:
        tools = environments.tools_of(task)
        if not tools:
            return task
        text = tokenizer.apply_chat_template(
            prompt_of(task), tools, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return replace(task, prompt_ids=tuple(ids), tools=tools)

    async def run() -> list[Rollout]:
        by_name = build_environments(
            environments, tokenizer, prompt_of, chat=chat, max_tokens=max_tokens, model="policy"
        )
        collector = Collector(
            engine.generate, scorer or Sum(), by_name, tokenizer.decode, timeout, concurrency
        )
        prepared = [with_tools(task) for task in environments.route(tasks)]
        sampling = Sampling(max_new_tokens, seed=1, stop_token_ids=tuple(ends))
        groups = await collector.collect(prepared, sampling, group_size, 0)
        return [rollout for group in groups for rollout in group.rollouts]

    try:
        return asyncio.run(run()), engine
    finally:
        environments.close()


def check_tokens(rollout: Rollout, engine: RecordingEngine) -> None:
    """Every turn of every record is bit for bit what the engine consumed and produced, and each is
    trained once."""
    exchanges = list(engine.exchanges)
    for record in rollout.records:
        assert (
            len(record.token_ids)
            == len(record.sampled)
            == len(record.logprobs)
            == len(record.versions)
        )
        written = [False] * len(record.token_ids)
        for turn in record.turns:
            exchange = (record.token_ids[: turn.start], record.token_ids[turn.start : turn.stop])
            assert exchange in exchanges
            exchanges.remove(exchange)
            written[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        assert record.sampled == written, "only what was sampled in this record is learned in it"
    assert not exchanges, "nothing the engine wrote is left out"


def ok(rollout: Rollout) -> Rollout:
    assert rollout.status is Status.OK, rollout.error
    return rollout
