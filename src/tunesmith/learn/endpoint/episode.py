"""The policy of one episode, as the endpoint asks it."""

from __future__ import annotations

import asyncio
from functools import partial

from tunesmith.learn.endpoint.asks import Ask, BadRequest, Fields
from tunesmith.learn.endpoint.checks import check_schema
from tunesmith.learn.endpoint.turns import Answer, Follow, Policy, all_replies
from tunesmith.learn.environments.conversation import Conversation, Reply


class EpisodePolicy(Policy):
    """Answers one episode's requests, on the event loop of the engine. Each turn is recorded."""

    what = "episode"

    def __init__(self, conversation: Conversation, model: str) -> None:
        super().__init__(model, conversation.setting)
        self._conversation = conversation
        self._running = set[asyncio.Task[object]]()
        self._closed = False

    async def answer(self, ask: Ask, follow: Follow | None = None) -> Answer:
        """See ``Policy``."""
        if self._closed:
            raise BadRequest("this episode is over")
        if ask.max_tokens == 0:
            raise BadRequest("'max_tokens' = 0: an episode scores no prompts", "max_tokens")
        if ask.schema is not None:
            check_schema(ask.schema)
        self._note("overridden", ask.sampling)
        self._note("not_enforced", ask.unenforced)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            answer = await all_replies(ask, partial(reply_of, self._conversation, ask, follow))
        finally:
            self._running.discard(task)
        if answer.problems:
            metrics = self._conversation.rollout.metrics
            unmet = {problem.index for problem in answer.problems}
            metrics["unmet"] = metrics.get("unmet", 0.0) + len(unmet)
        return answer

    def count(self, ask: Ask) -> int:
        """See ``Policy``."""
        return self._conversation.prompt_length(ask.messages, ask.tools, ask.options)

    def close(self) -> None:
        """Answer no further requests, and cancel those in progress."""
        self._closed = True
        for task in self._running:
            task.cancel()

    def _note(self, name: str, values: Fields) -> None:
        """List, in the rollout's notes, the parameters that do not apply."""
        if values:
            self._conversation.rollout.notes.setdefault(name, {}).update(values)


async def reply_of(
    conversation: Conversation, ask: Ask, follow: Follow | None, index: int
) -> Reply:
    """A conversation's next turn, as choice ``index`` of an answer."""
    following = partial(follow, index) if follow else None
    if ask.prompts:
        return await conversation.continue_text(
            ask.prompt(index), max_new_tokens=ask.max_tokens, stop=ask.stop, follow=following
        )
    return await conversation.reply(
        ask.messages,
        ask.tools,
        max_new_tokens=ask.max_tokens,
        stop=ask.stop,
        find_calls=ask.may_call,
        options=ask.options,
        follow=following,
    )
