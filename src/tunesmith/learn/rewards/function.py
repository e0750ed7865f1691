"""Reward functions: the arguments of a call, and the values it may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsFloat, SupportsIndex

from tunesmith.errors import ConfigError, boundary
from tunesmith.learn.rewards.trainer_state import TrainerState
from tunesmith.learn.usercode.calls import (
    Function,
    Keywords,
    keywords_for,
    own_copy,
    required_parameters,
)
from tunesmith.records.plain import plain, shown
from tunesmith.types import Message, Rollout, Status, text_of_content

INSTANCES = "environments"
"""TRL's keyword for the environment instances that played the episodes, one per completion."""
LOGS = ("log_extra", "log_metric")
RESERVED = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", *LOGS, INSTANCES}
)
"""The keywords of TRL 1.16 that a call receives in addition to the data's columns."""
NOT_COLUMNS = frozenset({"prompt", "completion"}) | RESERVED

LARGEST_REWARD = 1e15
"""Limit of a reward's absolute value: sums of squares over a large batch still fit into float32 (at
most 3.4e38)."""


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """The reward of one rollout could not be computed."""

    status: Status
    reason: str


Score = float | None | ItemFailure
"""None: the reward does not apply."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One reward of a run: a user's function, called with keywords, or a built-in one.

    Built-in rewards are coroutine functions of rollouts, their texts and ``Notes``, with their own
    deadlines. All rewards return one ``Score`` per rollout.
    """

    name: str
    reference: str
    function: Function
    columns: frozenset[str] = frozenset()
    """Required columns of the data."""
    builtin: bool = False
    close: Callable[[], None] = lambda: None
    costs: Callable[[], dict[str, float]] = dict
    """Metrics of what it did since the last call, such as requests."""
    check_gold: Callable[[object], str | None] | None = None
    """The reason why a value of the answer column cannot be used, or None."""
    one_of: frozenset[str] = frozenset()
    """Columns of which it needs at least one."""
    instances: Literal["needed", "optional"] | None = None
    """Whether it takes ``environments``."""


def required_columns(function: Function, reference: str) -> frozenset[str]:
    """Columns of the data that a function needs. ConfigError if it cannot be called with
    keywords."""
    expected = "expected def f(prompts, completions, **columns) -> list[float | None]"
    unknown = f"the parameters of '{reference}' cannot be determined; {expected}"
    with boundary(ConfigError, unknown, (TypeError, ValueError)):
        required = required_parameters(function)
    for p in required:
        if p.kind is p.POSITIONAL_ONLY:
            raise ConfigError(f"'{reference}' takes '{p.name}' by position only; {expected}.")
    return frozenset(p.name for p in required) - RESERVED


@dataclass(slots=True)
class Notes:
    """Values that one call logged with ``log_extra`` and ``log_metric``."""

    size: int
    """Completions of the call."""
    extras: dict[str, list[Any]] = field(default_factory=dict[str, "list[Any]"])
    metrics: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        if len(values) != self.size:
            raise ValueError(
                f"log_extra('{column}') got {len(values)} values for {self.size} completions"
            )
        self.extras[plain(str(column))] = [plain(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((plain(str(name)), float(value)))


def arguments_for(
    function: RewardFunction,
    rollouts: Sequence[Rollout],
    texts: Sequence[str],
    state: TrainerState,
    notes: Notes,
    instances: bool,
) -> Keywords:
    """Keywords of a call: lists with one entry per rollout, None for a column that a task lacks.

    For conversational prompts, completions are ``[{"role": "assistant", "content": text}]``; for
    text prompts, text. ``instances`` adds ``environments``, with None for episodes without an
    instance of TRL's form.
    """
    keywords: Keywords = {
        "prompts": [own_copy(r.task.prompt) for r in rollouts],  # a function may append to it
        "completions": completions_of(rollouts, texts),
        "completion_ids": [r.completion_ids for r in rollouts],
        "trainer_state": state,
        "log_extra": notes.log_extra,
        "log_metric": notes.log_metric,
        **batch_columns(rollouts, function.columns),
    }
    if instances:
        keywords[INSTANCES] = [r.instance for r in rollouts]
    return keywords_for(function.function, keywords)


def completions_of(rollouts: Sequence[Rollout], texts: Sequence[str]) -> list[Any]:
    """Completions in the form of their prompts: the policy's last text, or all messages after the
    prompt."""
    completions: list[str | list[Message]] = []
    for rollout, text in zip(rollouts, texts, strict=True):
        messages = rollout.messages or [{"role": "assistant", "content": text}]
        is_text = isinstance(rollout.task.prompt, str)
        completions.append(text if is_text else [dict(message) for message in messages])
    return completions


def text_of(completion: Any) -> str:
    """The text of a completion in either form; for a conversation, the text of the policy's last
    turn."""
    if isinstance(completion, str):
        return completion
    own = (m for m in reversed(completion) if m.get("role", "assistant") == "assistant")
    return text_of_content(next(own, {}).get("content"))


def batch_columns(
    rollouts: Sequence[Rollout], needed: frozenset[str] = frozenset()
) -> dict[str, list[Any]]:
    """Copies of the data's and the ``needed`` columns, with one entry per rollout; None where a
    task lacks one."""
    names = {name for r in rollouts for name in r.task.columns if name not in NOT_COLUMNS}
    columns = [r.task.columns for r in rollouts]
    return {name: [own_copy(c.get(name)) for c in columns] for name in sorted(names | needed)}


def scores_from(output: object, size: int) -> list[Score]:
    """A reward function's output as one score per completion.

    The output is a list, or has ``tolist`` (NumPy arrays and tensors, as in TRL). An item that is
    neither a finite number nor None fails only its rollout.

    Raises:
        ValueError: the output as a whole is unusable.
    """
    if inspect.isawaitable(output):
        raise ValueError("returned an awaitable; define the function with `async def`")
    to_list = getattr(output, "tolist", None)
    items = to_list() if callable(to_list) else output
    if not isinstance(items, list | tuple):
        raise ValueError(f"returned {_show(output)}; expected a list of {size} floats (or None)")
    if len(items) != size:
        raise ValueError(f"returned {len(items)} rewards for {size} completions")
    return [_score(value, index) for index, value in enumerate(items)]


def _score(value: object, index: int) -> Score:
    if value is None or isinstance(value, ItemFailure):
        return value
    problem = "; expected a float or None"
    if isinstance(value, SupportsFloat | SupportsIndex) and not isinstance(value, str | bytes):
        most = f"; expected a finite number of at most {LARGEST_REWARD:g}"
        problem = f"{most}, or None if the reward does not apply"
        try:
            number = float(value)
            if abs(number) <= LARGEST_REWARD:
                return number
        except Exception as error:
            problem = f": {error}"
    return ItemFailure(Status.REWARD_FAILED, f"returned {_show(value)} at index {index}{problem}")


def _show(value: object) -> str:
    return f"{shown(value, 80)} (of type {type(value).__name__})"
