"""The rewards of a run: scoring rollouts with them.

A call that raises, exceeds ``reward.timeout`` or returns something unusable fails all its rollouts;
an unusable item in a usable list fails only its rollout. A failed rollout has no reward, never a
reward of zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress
from typing import TYPE_CHECKING, Any

from tunesmith.errors import ConfigError, DataError, DeadlineExceeded, closest, nearest
from tunesmith.learn.rewards.foreign import hint
from tunesmith.learn.rewards.function import (
    LARGEST_REWARD,
    ItemFailure,
    Notes,
    RewardFunction,
    Score,
    arguments_for,
    scores_from,
)
from tunesmith.learn.rewards.metrics import mean, reward_metrics
from tunesmith.learn.rewards.trainer_state import TrainerState
from tunesmith.learn.usercode.calls import NotTried, RaisedInCall, UserCalls, kept_default_dtype
from tunesmith.types import Completion, Rollout, Sampling, Status, Task

if TYPE_CHECKING:
    from tunesmith.learn.rewards.isolated import IsolatedRewards

ENVIRONMENT = "environment"
"""The name of the environment's own reward in ``Rollout.rewards``; its weight is 1."""


_ASIDE: ContextVar[dict[str, list[float]] | None] = ContextVar("_ASIDE", default=None)
"""Values logged in this task while ``apart`` keeps them out of the metrics."""


class RewardSet:
    """The reward functions of a run, with the threads and processes they run in."""

    def __init__(
        self,
        weights: dict[str, float],
        timeout: float,
        calls: UserCalls | IsolatedRewards | None = None,
    ) -> None:
        """``weights`` by reward name; each reward is then added with ``add``.

        ``calls`` runs the user's functions; None: threads of this process.
        """
        self.functions: tuple[RewardFunction, ...] = ()
        self.weights = weights
        self.state = TrainerState()
        """The functions' ``trainer_state``; the loop replaces it each step."""
        self.policy: Callable[[Sequence[int], Sampling], Awaitable[Completion]] | None = None
        """Generates with the policy, for judges that are it; a run that restarts replaces it."""
        self.read_by_judges: dict[str, frozenset[str]] = {}
        """Columns that the judges' questions need, by the judges' names."""
        self.hands_instances = False
        """Whether functions get the ``environments`` that played the episodes."""
        self._timeout = timeout
        self._calls = calls or UserCalls()
        self._logged: dict[str, list[float]] = {}

    def add(self, function: RewardFunction) -> None:
        assert function.name in self.weights, f"the reward '{function.name}' has no weight"
        self.functions = (*self.functions, function)

    def check_tasks(self, tasks: Iterable[Task], key: str = "data.train") -> None:
        """Reject data that the functions cannot work with, before training. ``key`` is its key in
        the run file.

        Raises:
            ConfigError: a function needs a column that no task has.
            DataError: a built-in cannot use a task's answer, and no other reward can replace it.
        """
        tasks = list(tasks)
        available = {name for task in tasks for name in task.columns}
        for f in self.functions:
            needs = f"reward.functions: '{f.reference}' needs"
            why = None
            for name in sorted(f.columns - available)[:1]:
                foreign = "" if closest(name, available, 0.9) else hint(name)
                instead = foreign or nearest(name, available)
                why = f"{needs} the column '{name}', which {key} lacks.{instead}"
            if not why and f.one_of and not f.one_of & available:
                names = f"{', '.join(sorted(f.one_of))}, and {key} has none of them"
                why = f"{needs} one of the columns {names}.{nearest(min(f.one_of), available)}"
            if why:
                raise ConfigError(why, keys=("reward.functions",))
            for task in tasks if f.check_gold else ():
                self._check_gold(f, task)
        for judge, columns in self.read_by_judges.items():
            for name in sorted(columns - available)[:1]:
                raise ConfigError(
                    f"reward.judge: '{judge}' needs the column '{name}', which {key} lacks."
                    f"{nearest(name, available)}",
                    keys=("reward.judge",),
                )

    def _check_gold(self, f: RewardFunction, task: Task) -> None:
        assert f.check_gold is not None
        (column,) = f.columns
        gold = task.columns.get(column)
        problem = f.check_gold(gold)
        # A task without an answer may get its reward from another function or its environment.
        alone = len(self.weights) == 1 and task.environment in ("single_turn", "tools")
        if problem is not None and (gold is not None or alone):
            place = f"task {task.id}: the column '{column}'"
            raise DataError(f"{place} {problem}; '{f.name}' compares with it.")

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        """Set ``rewards``, ``reward`` and ``metrics`` of each rollout, or mark it failed.

        ``texts`` are the completions without special tokens. Rollouts that failed before are left
        unchanged. The functions run concurrently; each gets all rollouts of this call as one batch.
        ``reward`` is the weighted sum of the rewards that apply, added to the environment's.
        """
        ok = [rollout.status is Status.OK for rollout in rollouts]
        if not any(ok):
            return
        played = list(compress(rollouts, ok))
        texts = list(compress(texts, ok))
        answers = await asyncio.gather(*(self._call(f, played, texts) for f in self.functions))
        for function, (scores, notes) in zip(self.functions, answers, strict=True):
            for i, (rollout, score) in enumerate(zip(played, scores, strict=True)):
                logged = {column: values[i] for column, values in notes.extras.items()}
                _record(rollout, function, score, logged)
            aside = _ASIDE.get()
            logged = self._logged if aside is None else aside
            for name, value in notes.metrics:
                logged.setdefault(name, []).append(value)
        for rollout in played:
            self._total(rollout)

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """``reward_metrics``, means of the ``log_metric`` values since the last call, the rewards'
        costs, and abandoned threads."""
        logged = self._logged
        self._logged = {}
        metrics = reward_metrics(rollouts)
        metrics |= {f"logged/{name}": mean(values) for name, values in logged.items()}
        for function in self.functions:
            metrics |= function.costs()
        if self._calls.abandoned:
            metrics["reward/abandoned_threads"] = float(self._calls.abandoned)
        return metrics

    @contextmanager
    def apart(self) -> Generator[None]:
        """Keep values logged inside this context out of ``metrics``; values that other tasks log
        meanwhile count."""
        token = _ASIDE.set({})
        try:
            yield
        finally:
            _ASIDE.reset(token)

    def close(self) -> None:
        """End threads and worker processes."""
        self._calls.close()
        for function in self.functions:
            function.close()

    async def _call(
        self, f: RewardFunction, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> tuple[list[Score], Notes]:
        size = len(rollouts)
        notes = Notes(size)
        if f.builtin:
            return scores_from(await f.function(rollouts, texts, notes), size), notes
        arguments = arguments_for(f, rollouts, texts, self.state, notes, self.hands_instances)
        status = Status.REWARD_FAILED
        try:
            with kept_default_dtype():
                output = await self._calls.run(f.function, arguments, self._timeout)
            return scores_from(output, size), notes
        except RaisedInCall as raised:
            why = f"raised on a call of {size} completions:\n{raised.trace}"
        except DeadlineExceeded as error:
            status = Status.NOT_TRIED if isinstance(error, NotTried) else Status.TIMED_OUT
            why = f"{error} (reward.timeout, a call of {size} completions)"
        except ValueError as error:
            why = str(error)
        return [ItemFailure(status, why)] * size, Notes(size)

    def _total(self, rollout: Rollout) -> None:
        if rollout.status is not Status.OK:
            return
        # A reward of weight 0 is only monitored; it cannot replace one that does not apply.
        counted = {name: v for name, v in rollout.rewards.items() if self.weights[name] != 0}
        applied = [self.weights[name] * v for name, v in counted.items() if v is not None]
        own = rollout.reward
        if own is not None:
            rollout.rewards[ENVIRONMENT] = own
            applied.insert(0, own)
        if not applied:
            _fail(rollout, "no reward function applies (all gave None)")
            return
        rollout.reward = sum(applied)
        if not abs(rollout.reward) <= LARGEST_REWARD:
            limit = f"and {LARGEST_REWARD:g} is the limit"
            _fail(rollout, f"the rewards sum to {rollout.reward:g}, {limit}")


def _fail(rollout: Rollout, reason: str, status: Status = Status.REWARD_FAILED) -> None:
    rollout.fail(status, f"task {rollout.task.id}: {reason}")


def _record(
    rollout: Rollout, function: RewardFunction, score: Score, logged: dict[str, Any]
) -> None:
    """Numbers become metrics of the rollout, all else notes; a name in use is prefixed with the
    function's name."""
    if not isinstance(score, ItemFailure):
        rollout.rewards[function.name] = score
    elif rollout.status is Status.OK:
        _fail(rollout, f"the reward '{function.reference}' {score.reason}", score.status)
    for column, value in logged.items():
        if value is None:
            continue
        in_use = column in rollout.metrics or column in rollout.notes
        name = f"{function.name}/{column}" if in_use else column
        if isinstance(value, int | float):
            rollout.metrics[name] = float(value)
        else:
            rollout.notes[name] = value
