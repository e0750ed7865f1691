"""What a reward function is, what it is called with, and what it may answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsFloat, SupportsIndex

from tunesmith.errors import ConfigError, shortened
from tunesmith.monitor.plain import plain
from tunesmith.rewards.trainer_state import TrainerState
from tunesmith.types import Rollout, Status, text_of_content
from tunesmith.usercode.calls import taken

INSTANCES = "environments"
"""TRL's keyword for the environments that played, one instance per completion."""
RESERVED = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", INSTANCES}
)
"""What a call can be given besides the data's columns: TRL 1.16's keywords."""
NOT_COLUMNS = frozenset({"prompt", "completion"}) | RESERVED

LARGEST_REWARD = 1e15
"""In size: sums of squares over a large batch still fit into float32, which ends at 3.4e38."""


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """A reward that could not be computed for one rollout, in the place of its value."""

    status: Status
    reason: str


Score = float | None | ItemFailure


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One reward of a run: a function of the user's, called with keywords, or one of our own.

    Our own (``builtin``) are coroutine functions of rollouts, their texts and ``Notes``; they keep their own
    deadlines. All give one ``Score`` per rollout.
    """

    name: str
    reference: str
    function: Callable[..., Any]
    columns: frozenset[str] = frozenset()
    """The data's columns it cannot do without."""
    builtin: bool = False
    close: Callable[[], None] = lambda: None
    check_gold: Callable[[Any], str | None] | None = None
    """Why a value of the answer column cannot be used, if it cannot."""
    one_of: frozenset[str] = frozenset()
    """Columns of which it needs one."""
    instances: Literal["needed", "optional"] | None = None
    """Whether it takes ``environments``."""


def required_columns(function: Callable[..., Any], reference: str) -> frozenset[str]:
    """Data columns the function requires. ConfigError if it cannot be called with keywords, as reward functions are."""
    expected = "expected def f(prompts, completions, **columns) -> list[float | None]"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"'{reference}' has no signature to go by; {expected}.") from error
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in required:
        if p.kind is p.POSITIONAL_ONLY:
            raise ConfigError(f"'{reference}' takes '{p.name}' by position only; {expected}.")
    return frozenset(p.name for p in required) - RESERVED


@dataclass(slots=True)
class Notes:
    """What one call said through ``log_extra`` and ``log_metric``. One value per completion of the call."""

    size: int
    extras: dict[str, list[Any]] = field(default_factory=dict[str, "list[Any]"])
    metrics: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self.size:
            raise ValueError(f"log_extra('{column}') got {len(values)} values for {self.size} completions")
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
) -> dict[str, Any]:
    """Keywords of a call: lists with one entry per rollout, a column that a task lacks as None.

    Conversational prompts give completions as ``[{"role": "assistant", "content": text}]``, text prompts as
    the text. With ``instances`` there are ``environments``, None where no class of TRL's form played.
    """
    given: dict[str, Any] = {
        "prompts": [deepcopy(r.task.prompt) for r in rollouts],  # a function may put something behind it
        "completions": completions_of(rollouts, texts),
        "completion_ids": [r.completion_ids for r in rollouts],
        "trainer_state": state,
        "log_extra": notes.log_extra,
        "log_metric": notes.log_metric,
        **batch_columns(rollouts, function.columns),
        **({INSTANCES: [r.instance for r in rollouts]} if instances else {}),
    }
    return taken(function.function, given)


def completions_of(rollouts: Sequence[Rollout], texts: Sequence[str]) -> list[Any]:
    """Texts in the shape of their prompts: what the policy wrote last, or all that was said after the prompt."""
    return [
        text
        if isinstance(r.task.prompt, str)
        else [dict(m) for m in r.messages or [{"role": "assistant", "content": text}]]
        for r, text in zip(rollouts, texts, strict=True)
    ]


def text_of(completion: Any) -> str:
    """The text of a completion in either of its forms; of a conversation, the policy's last turn."""
    if isinstance(completion, str):
        return completion
    answers = (m.get("content") for m in reversed(completion) if m.get("role", "assistant") == "assistant")
    return text_of_content(next(answers, None))


def batch_columns(rollouts: Sequence[Rollout], needed: frozenset[str] = frozenset()) -> dict[str, list[Any]]:
    """The data's columns and those that are ``needed``, one entry per rollout; None where a task lacks one."""
    names = dict.fromkeys(name for r in rollouts for name in r.task.columns if name not in NOT_COLUMNS)
    return {name: [r.task.columns.get(name) for r in rollouts] for name in (*names, *(needed - names.keys()))}


def scores_from(output: object, size: int) -> list[Score]:
    """The output of a reward function as one score per completion.

    A list, or what turns into one (NumPy arrays and tensors, as in TRL). An item that is no finite number
    and not None fails its rollout only.

    Raises:
        ValueError: the output as a whole is unusable.
    """
    if inspect.isawaitable(output):
        raise ValueError("returned an awaitable; define the function with `async def`")
    to_list = getattr(output, "tolist", None)
    items = to_list() if callable(to_list) else output
    if not isinstance(items, list | tuple):
        raise ValueError(f"returned {_shown(output)}; expected a list of {size} floats (or None)")
    if len(items) != size:
        raise ValueError(f"returned {len(items)} rewards for {size} completions")
    return [_score(value, index) for index, value in enumerate(items)]


def _score(value: object, index: int) -> Score:
    if value is None or isinstance(value, ItemFailure):
        return value
    wrong = "; expected a float or None"
    if isinstance(value, SupportsFloat | SupportsIndex) and not isinstance(value, str | bytes):
        try:
            number = float(value)
        except Exception as error:
            wrong = f": {error}"
        else:
            if abs(number) <= LARGEST_REWARD:
                return number
            wrong = f"; expected a finite number of at most {LARGEST_REWARD:g}, or None where the reward does not apply"
    return ItemFailure(Status.REWARD_FAILED, f"returned {_shown(value)} at index {index}{wrong}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "something without a repr"
    return f"{shortened(text)} (of type {type(value).__name__})"
