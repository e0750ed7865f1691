"""Reward models as rewards: encoding texts for a score model, normalising its scores, scoring
rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tunesmith.errors import DataError
from tunesmith.learn.data.chat import ChatTemplate
from tunesmith.learn.data.chat_defaults import own_part
from tunesmith.learn.data.tokens import (
    encode,
    encode_with_offsets,
    leading_ids,
    mask_spans,
    with_leading,
)
from tunesmith.learn.rewards.batching import Batcher
from tunesmith.learn.rewards.function import ItemFailure, Notes, RewardFunction, Score
from tunesmith.learn.rewards.stats import RewardStats
from tunesmith.models.embedding_rows import enough_rows, without_row
from tunesmith.models.openmp import to_thread
from tunesmith.types import Prompt, Rollout, Status, Tokenizer, Tools, as_messages


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A score model with its tokenizer and the normalisation of its scores.

    The reward of a sequence is the score at its last token, as in training.
    """

    score_ids: Callable[[list[list[int]]], list[float]]
    """The model: one score per sequence of token ids, none of which is empty or longer than
    ``context``."""
    tokenizer: Tokenizer
    context: int | None
    """Maximum sequence length of the model."""
    template: ChatTemplate | None
    """None: prompt and completion are plain text."""
    stats: RewardStats | None = None

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        """One reward per sequence of token ids; a failure for one that is empty or longer than the
        context."""
        scores: list[Score] = [_unfit(len(ids), self.context) for ids in sequences]
        usable = [i for i, problem in enumerate(scores) if problem is None]
        values = self.score_ids([list(sequences[i]) for i in usable]) if usable else []
        for i, value in zip(usable, values, strict=True):
            scores[i] = self.stats.normalize(value) if self.stats else value
        return scores

    def encode(
        self, prompt: Prompt, completion: str, *, finished: bool = True, tools: Tools = None
    ) -> list[int]:
        """A prompt and its completion as this model's tokens; a finished completion ends as in
        training. Tools are written where the template has a place for them.

        Raises:
            DataError: the prompt is a conversation that the tokenizer has no template for, the
                template refuses, or a token has no row in the model's embedding.
        """
        ids = self._encode(prompt, completion, finished, tools)
        problem = without_row(self.tokenizer, ids)
        if problem:
            raise DataError(problem)
        return ids

    def _encode(self, prompt: Prompt, completion: str, finished: bool, tools: Tools) -> list[int]:
        if self.template is not None:
            end = self.template.stop_marker if finished else ""
            told = tools if self.template.takes_tools else None
            asked = self.template.whole(as_messages(prompt), told, prompt=True)
            return self._tokens(asked, completion + end)
        if not isinstance(prompt, str):
            lacking = "the reward model's tokenizer has no chat template"
            raise DataError(f"the prompt is a conversation, and {lacking}")
        ids = with_leading(leading_ids(self.tokenizer), self._tokens(prompt, completion))
        eos: int | None = self.tokenizer.eos_token_id
        return [*ids, eos] if finished and eos is not None and ids[-1:] != [eos] else ids

    def _tokens(self, asked: str, answer: str) -> list[int]:
        """As in training: no token crosses the border of the answer, where it can be split."""
        text = asked + answer
        if getattr(self.tokenizer, "is_fast", False):
            joint = next(encode_with_offsets(self.tokenizer, [text]))
            with suppress(DataError):
                return mask_spans(self.tokenizer, text, joint, [(len(asked), len(text))])[0]
        return encode(self.tokenizer, [text])[0]


def model_reward(
    name: str,
    model: RewardModel,
    *,
    exact: bool,
    conversation: Callable[[Prompt], Prompt] | None = None,
    in_thread: bool = False,
) -> RewardFunction:
    """The reward function that scores rollouts with ``model``.

    Args:
        exact: the model scores the rollout's own tokens; otherwise prompt and text are re-encoded
            for it.
        conversation: applied to a prompt before it is encoded, for example to add a system message.
        in_thread: score without blocking the event loop, calls that arrive meanwhile as one batch.
            Which rollouts form a batch then depends on timing, and so do the last bits of their
            scores; otherwise each call is a batch.
    """

    async def score_here(sequences: list[list[int]]) -> list[Score]:
        return model.score(sequences)

    batcher = Batcher[list[int], Score](lambda batch: to_thread(model.score, batch))
    scores_of = batcher.submit if in_thread else score_here

    def ids_of(rollout: Rollout, text: str) -> list[int] | ItemFailure:
        if exact:
            return rollout.token_ids
        try:
            finished = not rollout.turns or rollout.finish_reason == "stop"
            before = _before(rollout, conversation)
            return model.encode(before, text, finished=finished, tools=rollout.task.tools)
        except DataError as error:
            return ItemFailure(Status.REWARD_FAILED, f"cannot encode this rollout: {error}")

    async def score(rollouts: Sequence[Rollout], texts: Sequence[str], _: Notes) -> list[Score]:
        sequences = [ids_of(r, text) for r, text in zip(rollouts, texts, strict=True)]
        scores = iter(await scores_of([ids for ids in sequences if isinstance(ids, list)]))
        return [next(scores) if isinstance(ids, list) else ids for ids in sequences]

    return RewardFunction(name, name, score, builtin=True)


def _before(rollout: Rollout, conversation: Callable[[Prompt], Prompt] | None) -> Prompt:
    """All messages before the policy's last turn."""
    prompt = conversation(rollout.task.prompt) if conversation else rollout.task.prompt
    messages = rollout.messages or []
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    if last == 0 and len(rollout.turns) > 1:
        raise DataError("it has several turns, and its environment kept no messages")
    return [*as_messages(prompt), *messages[:last]] if last else prompt


def same_tokens(a: Any, b: Any) -> bool:
    """Whether two tokenizers produce the same token ids: they have the same vocabulary and chat
    template."""
    same = a.get_vocab() == b.get_vocab() and own_part(a.chat_template) == own_part(b.chat_template)
    return same and enough_rows(a, b)


def _unfit(length: int, context: int | None) -> ItemFailure | None:
    if length == 0:
        return ItemFailure(Status.REWARD_FAILED, "has no tokens")
    if context is not None and length > context:
        reason = f"has {length} tokens; the model's context is {context}"
        return ItemFailure(Status.REWARD_FAILED, reason)
    return None
