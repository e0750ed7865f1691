"""The words every room speaks: tasks, rollouts and samples. Plain data, no torch.

Shape legend: ``L`` is the number of tokens of one rollout or sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from tunesmith.errors import EpisodeError

Message = dict[str, Any]
"""A chat message: at least ``role`` and ``content``."""


def text_of_content(content: Any) -> str:
    """The text of a message's ``content``: text, nothing, or a list of text parts; else an EpisodeError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise EpisodeError(f"a message's content is {type(content).__name__}; only text can be trained")


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


UNALTERED: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
"""The sampling settings that alter the distribution, each with the value that leaves it alone. (The temperature is
not one of them: training divides by it, too.)"""


_ALTER_GREEDY = ("repetition_penalty", "min_new_tokens")


def altering(settings: object) -> dict[str, float]:
    """Those of ``settings`` (a ``Sampling`` or a section of a run file) that alter the distribution."""
    return {name: value for name, off in UNALTERED.items() if (value := getattr(settings, name)) != off}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine draws tokens. ``temperature=0`` is greedy.

    ``repetition_penalty`` and ``min_new_tokens`` are those of transformers: the logits of tokens in the prompt or in
    what was written are divided by the former (multiplied where negative), and before so many new tokens those that
    end a completion have no probability. Stop strings are looked for behind them.

    The log-probabilities an engine returns are those of the distribution the token was drawn from: after those two,
    the temperature, ``top_k``, ``top_p`` and ``min_p``; for greedy decoding, of the distribution at temperature 1.
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
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    continued: int = 0
    """So many tokens at the prompt's end were written by an interrupted request that goes on here. Stop strings may
    begin in them; the other settings are those of what is left."""

    @property
    def altered(self) -> dict[str, float]:
        """The settings that alter the distribution drawn from, so that it is not the one that training scores."""
        found = altering(self)
        return found if self.temperature > 0 else {k: v for k, v in found.items() if k in _ALTER_GREEDY}


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine wrote after a prompt. All lists have one entry per written token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the policy inside a record: tokens ``[start, stop)`` of it were sampled."""

    start: int
    stop: int
    finish_reason: FinishReason
    reward: float = 0.0
    """What the environment paid for this turn; part of the rollout's ``reward``."""


@dataclass(slots=True)
class Record:
    """An append-only run of token ids: who wrote each, how likely it was, and under which policy.

    ``sampled`` is True where the policy wrote the token in this record; ``logprobs`` and ``versions`` mean
    something only there (0.0 and -1 elsewhere). Text is derived from tokens, never the reverse.
    """

    token_ids: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    turns: list[Turn] = field(default_factory=list[Turn])

    def observe(self, token_ids: list[int] | tuple[int, ...]) -> None:
        """Append tokens that are not learned here: a prompt, a tool's answer, what another record holds already."""
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

    def cut(self, length: int) -> None:
        """Forget what was to be answered after the last turn, and never was."""
        assert not self.turns or length >= self.turns[-1].stop, "what the policy wrote stays"
        for column in (self.token_ids, self.sampled, self.logprobs, self.versions):
            del column[length:]

    def pay(self, reward: float) -> None:
        """Add a reward to the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt: from the first token the policy wrote."""
        return self.token_ids[self.turns[0].start :] if self.turns else []

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def token_rewards(self) -> list[float]:
        """``[num_sampled]``: what each turn was paid, at its last token."""
        paid = [0.0] * self.num_sampled
        written = 0
        for turn in self.turns:
            written += turn.stop - turn.start
            if written:
                paid[written - 1] += turn.reward
        return paid


@dataclass(slots=True)
class Rollout:
    """One try at a task: what was sampled, and what came of it.

    A conversation that only grows is one record. Where its history is edited (thinking dropped, a summary in
    the place of what was said) the record forks: the edited conversation becomes a further record, in which
    only what the policy writes from then on counts as sampled, so that no token is learned twice.
    """

    task: Task
    records: list[Record] = field(default_factory=lambda: [Record()])
    reward: float | None = None
    """The sum of what all turns, the end and the reward functions gave."""
    rewards: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    status: Status = Status.OK
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """What reward functions logged about it that is not a number (TRL's ``log_extra``)."""
    messages: list[Message] | None = None
    """What was said after the prompt, where an environment kept a conversation."""
    advantage: float | None = None
    """The mean over its tokens; None while, or where, nothing is learned from it."""
    by_token: Mapping[str, Iterable[float]] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """What the batch says of each token the policy wrote, record after record; empty where ``advantage`` is None."""
    instance: Any = field(default=None, repr=False, compare=False)
    """The user's environment that played it, from the end of the episode until the rewards are computed, where one of
    them takes it."""

    def observe(self, token_ids: list[int] | tuple[int, ...]) -> None:
        """Append tokens the policy did not write to the last record."""
        self.records[-1].observe(token_ids)

    def act(self, completion: Completion) -> None:
        """Append what the policy wrote to the last record."""
        self.records[-1].act(completion)

    def fail(self, status: Status, error: str) -> None:
        """Mark as failed, keeping what was sampled. A failed rollout never becomes a reward of zero."""
        self.status, self.error, self.reward = status, error, None

    @property
    def token_ids(self) -> list[int]:
        """Of the last record, as ``sampled``, ``turns`` and ``completion_ids`` are."""
        return self.records[-1].token_ids

    @property
    def sampled(self) -> list[bool]:
        return self.records[-1].sampled

    @property
    def turns(self) -> list[Turn]:
        return self.records[-1].turns

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt of the last record."""
        return self.records[-1].completion_ids

    @property
    def answer_ids(self) -> list[int]:
        """What the policy wrote last: its only turn, or its final answer after several."""
        return self.token_ids[self.turns[-1].start : self.turns[-1].stop] if self.turns else []

    @property
    def num_sampled(self) -> int:
        """Over all records."""
        return sum(record.num_sampled for record in self.records)

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it: the length of its last turn, or an episode's turns or tokens (``unfinished``)."""
        return self.finish_reason == "length" or self.metrics.get("unfinished", 0.0) > 0

    @property
    def finish_reason(self) -> FinishReason:
        """Of the last turn; ``abort`` when the policy never wrote."""
        return self.turns[-1].finish_reason if self.turns else "abort"


@dataclass(slots=True)
class RolloutGroup:
    """Siblings: rollouts of one task, compared with each other by group estimators."""

    task: Task
    rollouts: list[Rollout]
    greedy: Rollout | None = None
    """What the policy does greedily, to compare with (ReMax); nothing is learned from it."""

    @property
    def usable(self) -> list[Rollout]:
        """The rollouts that finished with a reward."""
        return [r for r in self.rollouts if r.status is Status.OK and r.reward is not None]


@dataclass(slots=True)
class Sample:
    """One sequence to learn from, as a ``Batch`` takes it.

    ``loss_mask[t]`` says that token ``t`` is predicted in the loss (never true for ``t == 0``, which nothing predicts).

    Example:
        A prompt ``[5, 6]`` and a completion ``[7, 2]``: ``Sample([5, 6, 7, 2], [False, False, True, True])``.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    group: int = -1
    """Index of the sample's group in the batch; -1 where there are no groups."""
    rollout: int = -1
    """Index of the rollout in the batch whose record this is: the records of a forked rollout share one sequence's
    weight. -1: the sample is a sequence by itself."""
    stand_ins: int = 0
    """Tokens at its end that are not part of the sequence, such as one that stands in for a target."""
