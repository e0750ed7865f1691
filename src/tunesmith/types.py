"""The words every room speaks: tasks, rollouts and samples. Plain data, no torch.

Shape legend: ``L`` is the number of tokens of one rollout or sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Message = dict[str, Any]
"""A chat message: at least ``role`` and ``content``."""

Prompt = str | list[Message]
"""Text, or a conversation, in the shape that it has in the data. What the policy sees is ``prompt_ids``."""

FinishReason = Literal["stop", "length", "abort"]


class Status(StrEnum):
    """What became of a rollout. Only ``OK`` rollouts reach the loss."""

    OK = "ok"
    REWARD_FAILED = "reward_failed"
    ENVIRONMENT_FAILED = "environment_failed"
    ENGINE_FAILED = "engine_failed"
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the training data: a prompt and whatever else stood beside it.

    ``prompt_ids`` is the prompt as the policy sees it, tokenized once (after the chat template).
    """

    id: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: str = "single_turn"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine draws tokens. ``temperature=0`` is greedy.

    The log-probabilities an engine returns are those of the distribution the token was drawn from:
    after the temperature and after ``top_k``, ``top_p`` and ``min_p``; for greedy decoding, of the
    distribution at temperature 1.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def cuts(self) -> bool:
        """Whether the distribution is cut, so that training scores another one than was sampled."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine wrote after a prompt. All lists have one entry per written token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the policy inside a rollout: tokens ``[start, stop)`` of it were sampled."""

    start: int
    stop: int
    finish_reason: FinishReason


@dataclass(slots=True)
class Rollout:
    """An append-only record of token ids: who wrote each, how likely it was, and under which policy.

    ``sampled`` is True where the policy wrote the token; ``logprobs`` and ``versions`` mean something
    only there (0.0 and -1 elsewhere). Text is derived from tokens, never the reverse.
    """

    task: Task
    token_ids: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    turns: list[Turn] = field(default_factory=list[Turn])
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    status: Status = Status.OK
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """What reward functions logged about it that is not a number (TRL's ``log_extra``)."""

    def observe(self, token_ids: list[int] | tuple[int, ...]) -> None:
        """Append tokens the policy did not write: a prompt, a tool's answer."""
        self.token_ids.extend(token_ids)
        self.sampled.extend([False] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))
        self.versions.extend([-1] * len(token_ids))

    def act(self, completion: Completion) -> None:
        """Append what the policy wrote."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids)
        self.sampled.extend([True] * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        self.versions.extend(completion.versions)
        self.turns.append(Turn(start, len(self.token_ids), completion.finish_reason))

    def fail(self, status: Status, error: str) -> None:
        """Mark as failed, keeping what was sampled. A failed rollout never becomes a reward of zero."""
        self.status, self.error, self.reward = status, error, None

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt."""
        return self.token_ids[len(self.task.prompt_ids) :]

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def finish_reason(self) -> FinishReason:
        """Of the last turn; ``abort`` when the policy never wrote."""
        return self.turns[-1].finish_reason if self.turns else "abort"


@dataclass(slots=True)
class RolloutGroup:
    """Siblings: rollouts of one task, compared with each other by group estimators."""

    task: Task
    rollouts: list[Rollout]

    @property
    def usable(self) -> list[Rollout]:
        """The rollouts that finished with a reward."""
        return [r for r in self.rollouts if r.status is Status.OK and r.reward is not None]


@dataclass(slots=True)
class Sample:
    """One sequence as the learner sees it.

    ``loss_mask[t]`` says that token ``t`` is predicted in the loss (never true for ``t == 0``, which
    nothing predicts). ``columns`` holds further per-token values of length ``L`` that the loss needs,
    such as ``advantages``, ``old_logprobs``, ``behaviour_logprobs``, ``ref_logprobs``.

    Example:
        A prompt ``[5, 6]`` and a completion ``[7, 2]`` whose advantage is 0.5::

            Sample([5, 6, 7, 2], [False, False, True, True], {"advantages": [0, 0, 0.5, 0.5]})
    """

    token_ids: list[int]
    loss_mask: list[bool]
    columns: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    group: int = -1
    """Index of the sample's group in the batch; -1 where there are no groups."""

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)
