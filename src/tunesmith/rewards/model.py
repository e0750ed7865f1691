"""A reward model that scores texts and token ids, in forests of at most so many tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tunesmith.config.schema import ModelReward
from tunesmith.data.batch import Batch
from tunesmith.data.chat import ChatTemplate
from tunesmith.data.forest import Packing
from tunesmith.data.tokens import Tokenizer, encode, leading_ids, with_leading
from tunesmith.errors import DataError, ModelError
from tunesmith.models.score_model import ScoreModel, is_trained, whole_sequence
from tunesmith.rewards.batching import Batcher
from tunesmith.rewards.function import ItemFailure, Notes, RewardFunction, Score
from tunesmith.rewards.stats import RewardStats, check_reward_model, read_stats
from tunesmith.types import Message, Prompt, Rollout, Status


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A score model, how texts become its tokens, and how its scores are normalised.

    The reward of a sequence is the score at its last token, as in training.
    """

    model: ScoreModel
    max_tokens: int
    """Of one forest; a sequence that is longer goes alone."""
    template: ChatTemplate | None
    """None: prompt and completion are plain text."""
    stats: RewardStats | None = None

    @classmethod
    def load(
        cls,
        entry: ModelReward,
        *,
        dtype: torch.dtype,
        device: str,
        max_tokens: int,
        chat: bool | None = None,
        trust_remote_code: bool = False,
    ) -> RewardModel:
        """Load a trained reward model.

        Args:
            chat: whether text prompts go through the chat template; None: if the tokenizer has one.

        Raises:
            ConfigError, ModelError: it is no reward model, or statistics or a chat template are missing.
        """
        check_reward_model(entry)
        model = ScoreModel.load(entry.path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        if not is_trained(model.module.config):
            raise ModelError(f"'{entry.path}' is a language model, no reward model: its scores would all be 0")
        tokenizer: Any = model.tokenizer
        wanted = bool(tokenizer.chat_template) if chat is None else chat
        template = ChatTemplate.of(tokenizer) if wanted else None
        return cls(model, max_tokens, template, read_stats(Path(entry.path)) if entry.normalize else None)

    @property
    def context(self) -> int | None:
        """Longest sequence that the model has places for."""
        return getattr(self.model.module.config, "max_position_embeddings", None)

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        """One reward per sequence of token ids; a failure for one that is empty or longer than the context."""
        scores: list[Score] = [_unfit(len(ids), self.context) for ids in sequences]
        usable = [i for i, problem in enumerate(scores) if problem is None]
        batch = Batch.of([whole_sequence(sequences[i]) for i in usable])
        for forest in Packing.of(batch, max(self.max_tokens, int(batch.lengths.max(initial=0)))):
            forest = forest.to(self.model.device)
            if self.context is not None:  # of the token after the last, which nothing reads, there may be no place
                forest = replace(forest, position_ids=forest.position_ids.clamp(max=self.context - 1))
            for place, value in zip(forest.sample_ids, self.model.scores(forest).tolist(), strict=True):
                scores[usable[place]] = self.stats.normalized(value) if self.stats else value
        return scores

    def encode(self, prompt: Prompt, completion: str, *, finished: bool = True) -> list[int]:
        """A prompt and its completion as this model's tokens, ended as a finished answer is in training.

        Raises:
            DataError: the prompt is a conversation that the tokenizer has no template for, or the template refuses.
        """
        tokenizer: Tokenizer = self.model.tokenizer  # pyright: ignore[reportAssignmentType]
        if self.template is not None:
            end = self.template.stop_marker if finished else ""
            return encode(tokenizer, [self.template.whole(_messages(prompt), prompt=True) + completion + end])[0]
        if not isinstance(prompt, str):
            raise DataError("the prompt is a conversation, and the reward model's tokenizer has no chat template")
        ids = with_leading(leading_ids(tokenizer), encode(tokenizer, [prompt + completion])[0])
        eos: int | None = tokenizer.eos_token_id
        return [*ids, eos] if finished and eos is not None and ids[-1:] != [eos] else ids


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
        exact: the model sees the rollout's own tokens; else prompt and text are encoded for it.
        conversation: what is made of a prompt before it is encoded, such as a system message put before it.
        in_thread: leave the event loop to others meanwhile. Then what is scored together depends on the clock.
    """

    async def run(sequences: list[list[int]]) -> list[Score]:
        return await asyncio.to_thread(model.score, sequences) if in_thread else model.score(sequences)

    batcher: Batcher[list[int], Score] = Batcher(run)

    def encoded(rollout: Rollout, text: str) -> list[int] | ItemFailure:
        if exact:
            return rollout.token_ids
        try:
            finished = not rollout.turns or rollout.finish_reason == "stop"
            return model.encode(_before(rollout, conversation), text, finished=finished)
        except DataError as error:
            return ItemFailure(Status.REWARD_FAILED, f"cannot encode this rollout: {error}")

    async def score(rollouts: Sequence[Rollout], texts: Sequence[str], notes: Notes) -> list[Score]:
        del notes
        made = [encoded(r, text) for r, text in zip(rollouts, texts, strict=True)]
        found = iter(await batcher.submit([ids for ids in made if isinstance(ids, list)]))
        return [next(found) if isinstance(ids, list) else ids for ids in made]

    return RewardFunction(name, name, score, builtin=True)


def _before(rollout: Rollout, conversation: Callable[[Prompt], Prompt] | None) -> Prompt:
    """All that was said before the policy's last words."""
    prompt = conversation(rollout.task.prompt) if conversation else rollout.task.prompt
    said = rollout.messages or []
    last = max((i for i, message in enumerate(said) if message["role"] == "assistant"), default=0)
    if last == 0 and len(rollout.turns) > 1:
        raise DataError("it has several turns, and its environment kept no messages")
    return [*_messages(prompt), *said[:last]] if last else prompt


def _messages(prompt: Prompt) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def same_tokens(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether token ids of one mean the same to the other: one vocabulary and one chat template."""
    return a.get_vocab() == b.get_vocab() and a.chat_template == b.chat_template


def _unfit(length: int, context: int | None) -> ItemFailure | None:
    if length == 0:
        return ItemFailure(Status.REWARD_FAILED, "was given no tokens")
    if context is not None and length > context:
        return ItemFailure(Status.REWARD_FAILED, f"was given {length} tokens; the model's context is {context}")
    return None
