"""Rewards of a run: loading the functions, scoring rollouts with them, and stopping when too many fail.

A reward function has TRL's signature::

    def same_text(prompts, completions, answer, **columns) -> list[float | None]:
        return [float(completion.strip() == gold) for completion, gold in zip(completions, answer)]

It may be ``async``, is called with keywords only, and gets every data column as a list with one entry per
completion. None says that the reward does not apply to that completion. It runs in a process of its own, or with
``isolation = "thread"`` outside the main thread.
A call that raises, overruns ``reward.timeout`` or returns nonsense fails all rollouts of that call; an
unusable item of a good list fails its rollout only. A failed rollout has no reward, never a zero.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError, DataError, DeadlineExceeded, RewardError, nearest
from tunesmith.rewards.base import (
    INSTANCES,
    LARGEST_REWARD,
    ItemFailure,
    Notes,
    RewardFunction,
    Score,
    arguments_for,
    required_columns,
    scores_from,
)
from tunesmith.rewards.builtin import BUILTINS, check_builtins
from tunesmith.rewards.foreign import VERL, VERL_GOLD, from_verl, hint, is_verl
from tunesmith.rewards.stats import check_reward_model
from tunesmith.rewards.trainer_state import TrainerState
from tunesmith.types import Rollout, Status, Task
from tunesmith.usercode import loading as user_code
from tunesmith.usercode.calls import FarFunction, RaisedInCall, UserCalls, kept_default_dtype

if TYPE_CHECKING:
    from tunesmith.rewards.isolated import IsolatedRewards

ENVIRONMENT = "environment"
"""The name under which ``Rollout.rewards`` has what the environment paid, with a weight of 1."""
INSTANCES_NEED = (
    "Those are the instances that played the episodes. They need `tunesmith rl`, an environment.path that is a class "
    'of TRL\'s form (public methods as tools, no step), and reward.isolation and environment.isolation = "thread".'
)


def check_rewards(section: RewardSection, base_dir: Path) -> None:
    """Refuse a section that cannot work (``ConfigError``), without running any of the user's code.

    ``base_dir`` is the run file's directory, which paths are relative to (else the working directory).
    """
    if not section.given:
        raise ConfigError(
            "reward.functions is empty; give a function of yours, as in functions = ['rewards.py:correct'], "
            f"a built-in ({', '.join(BUILTINS)}), [[reward.models]] or [[reward.remote]]."
        )
    repeated = [name for name, count in Counter(section.functions).items() if count > 1]
    if repeated:
        raise ConfigError(f"reward.functions names '{repeated[0]}' more than once; use reward.weights.")
    _check_weights(section)
    for entry in section.functions:
        if ":" in entry or entry.endswith(".py"):
            user_code.check_reference(entry, base_dir)
        elif entry not in BUILTINS:
            raise ConfigError(
                f"reward.functions: '{entry}' is not a built-in.{nearest(entry, BUILTINS)}"
                " A function of yours is written file.py:function."
            )
    check_builtins(section)
    if section.memory is not None and section.isolation == "thread":
        raise ConfigError('reward.memory has no effect with reward.isolation = "thread"; a thread has no limit.')
    for entry in section.models:
        check_reward_model(entry)
    for entry in section.remote:
        if not entry.urls:
            raise ConfigError(f"reward.remote: '{entry.name}' has no urls; give one or more, on which it is served.")
        if entry.token_env is not None and not os.environ.get(entry.token_env, "").strip():
            raise ConfigError(
                f"reward.remote '{entry.name}': the environment variable {entry.token_env} (token_env) is not set; "
                "export it with the token that the server asks for."
            )


def load_rewards(section: RewardSection, base_dir: Path, *, instances: bool = False) -> RewardSet:
    """Check the section, import the user's files and make the built-ins ready (their processes start later).

    ``weights`` has every reward of the section; models and remote ones are to be added with ``add``. ConfigError
    also where a file does not import, or a function cannot be called. With ``instances`` the run has environments,
    and functions may need them.
    """
    check_rewards(section, base_dir)
    made = RewardSet(_weights(section), section.timeout)
    named = list(zip(section.functions, made.weights, strict=False))
    own = [(name, entry) for entry, name in named if entry not in BUILTINS]
    users = made.isolate(own, base_dir, section.memory) if own and section.isolation != "thread" else {}
    for entry, name in named:
        if entry in BUILTINS:
            made.add(BUILTINS[entry](section))
        else:
            made.add(users.get(name) or user_reward(name, entry, user_code.load_function(entry, base_dir), instances))
    return made


def user_reward(name: str, reference: str, function: Callable[..., Any], instances: bool = False) -> RewardFunction:
    """A function of the user's as a reward. ConfigError if it cannot be called as one.

    Args:
        instances: it may need ``environments``, which are in this process.
    """
    columns = required_columns(function, reference)
    if is_verl(function):
        return RewardFunction(name, reference, from_verl(function), columns - VERL, one_of=VERL_GOLD)
    asked = inspect.signature(function).parameters.get(INSTANCES)
    need = None if asked is None else "needed" if asked.default is asked.empty else "optional"
    if need == "needed" and not instances:
        raise ConfigError(f"'{reference}' needs '{INSTANCES}'. {INSTANCES_NEED}")
    return RewardFunction(name, reference, function, columns, instances=need)


def _weights(section: RewardSection) -> dict[str, float]:
    """The weight of every reward by its name: functions in their order, then models, then remote ones.

    Functions of one name, in two files, are told apart by the whole reference.
    """
    short = [reference.rpartition(":")[2] for reference in section.functions]
    names = [s if short.count(s) == 1 else whole for s, whole in zip(short, section.functions, strict=True)]
    given = section.weights or (1.0,) * len(names)
    others = [(entry.name, entry.weight) for entry in (*section.models, *section.remote)]
    return dict([*zip(names, given, strict=True), *others])


def _check_weights(section: RewardSection) -> None:
    weights, functions = section.weights, section.functions
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"reward.weights has {len(weights)} entries for {len(functions)} functions; give one for each."
        )
    if weights is not None and not all(isfinite(w) for w in weights):
        raise ConfigError(f"reward.weights must be finite numbers, not {list(weights)}.")
    all_weights = _weights(section)
    if not any(all_weights.values()):
        raise ConfigError("reward.weights are all 0, so that no rollout would have a reward.")
    if ENVIRONMENT in all_weights:
        raise ConfigError(f"no reward may be called '{ENVIRONMENT}': what the environment pays is; rename it.")
    if len(all_weights) < len(functions) + len(section.models) + len(section.remote):
        raise ConfigError(
            f"two of the rewards {', '.join(all_weights)} have the same name; give each of reward.models and "
            "reward.remote its own `name`, which is what it is called in the metrics."
        )


class RewardSet:
    """The reward functions of a run, with the threads and processes they run in."""

    def __init__(self, weights: dict[str, float], timeout: float) -> None:
        """``weights`` by the names of the rewards, which are to be added with ``add``."""
        self.functions: tuple[RewardFunction, ...] = ()
        self.weights = weights
        self.state = TrainerState()
        """What functions see as ``trainer_state``; the loop replaces it each step."""
        self.hands_instances = False
        """Whether functions get the ``environments`` that played."""
        self._timeout = timeout
        self._calls = UserCalls()
        self._isolated: IsolatedRewards | None = None
        self._logged: dict[str, list[float]] = {}

    def isolate(
        self, references: Sequence[tuple[str, str]], base_dir: Path, memory: str | None
    ) -> dict[str, RewardFunction]:
        """The user's functions, by name and reference, loaded in a worker process."""
        from tunesmith.rewards.isolated import IsolatedRewards

        self._isolated = IsolatedRewards(references, base_dir, memory)
        return {function.name: function for function in self._isolated.functions}

    def add(self, function: RewardFunction) -> None:
        assert function.name in self.weights, f"the reward '{function.name}' has no weight"
        self.functions = (*self.functions, function)

    def check_tasks(self, tasks: Iterable[Task], key: str = "data.train") -> None:
        """Refuse data, of a ``key`` of the run file, that the functions cannot work with: call it before training.

        Raises:
            ConfigError: a function requires a column that no task has.
            DataError: a built-in cannot use a task's answer, and no other reward can stand in for it.
        """
        tasks = list(tasks)
        available = {name for task in tasks for name in task.columns}
        for f in self.functions:
            for name in sorted(f.columns - available):
                raise ConfigError(
                    f"the reward '{f.reference}' needs the column '{name}', which {key} does not have."
                    f"{hint(name) or nearest(name, available)}"
                )
            if f.one_of and not f.one_of & available:
                raise ConfigError(
                    f"the reward '{f.reference}' needs one of the columns {', '.join(sorted(f.one_of))}, and {key} "
                    f"has none of them.{nearest(min(f.one_of), available)}"
                )
        for f in self.functions:
            if f.check_gold is None:
                continue
            (column,) = f.columns
            for task in tasks:
                gold = task.columns.get(column)
                problem = f.check_gold(gold)
                # A task without an answer may be another reward's, or paid by its environment.
                alone = len(self.weights) == 1 and task.environment in ("single_turn", "tools")
                if problem is not None and (gold is not None or alone):
                    raise DataError(f"task {task.id}: the column '{column}' {problem}; '{f.name}' compares with it.")

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        """Fill in ``rewards``, ``reward`` and ``metrics``, or mark the rollout failed.

        ``texts`` are the completions without special tokens. Rollouts that have failed already are left
        alone. The functions run side by side; each sees all rollouts of this call as one batch. ``reward``
        is the weighted sum of the rewards that apply, on top of what an environment may have set.
        """
        pairs = [(r, t) for r, t in zip(rollouts, texts, strict=True) if r.status is Status.OK]
        if not pairs:
            return
        played, said = [r for r, _ in pairs], [t for _, t in pairs]
        answers = await asyncio.gather(*(self._call(f, played, said) for f in self.functions))
        for function, (scores, notes) in zip(self.functions, answers, strict=True):
            for i, (rollout, score) in enumerate(zip(played, scores, strict=True)):
                _record(rollout, function, score)
                _note(rollout, function, {column: values[i] for column, values in notes.extras.items()})
            for name, value in notes.metrics:
                self._logged.setdefault(name, []).append(value)
        for rollout in played:
            self._total(rollout)

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """``reward_metrics``, means of what ``log_metric`` got since the last call, abandoned threads."""
        logged, self._logged = self._logged, {}
        metrics = reward_metrics(rollouts) | {f"logged/{name}": mean(values) for name, values in logged.items()}
        if self._calls.abandoned:
            metrics["reward/abandoned_threads"] = float(self._calls.abandoned)
        return metrics

    @contextmanager
    def apart(self) -> Generator[None]:
        """What is logged inside is not in ``metrics``."""
        logged, self._logged = self._logged, {}
        yield
        self._logged = logged

    def close(self) -> None:
        """End threads and worker processes."""
        self._calls.close()
        if self._isolated is not None:
            self._isolated.close()
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
        try:
            if isinstance(f.function, FarFunction):
                assert self._isolated is not None
                return await self._isolated.run(f.function, arguments, notes, self._timeout), notes
            with kept_default_dtype():
                output = await self._calls.run(f.function, arguments, self._timeout)
            return scores_from(output, size), notes
        except RaisedInCall as raised:
            failure = ItemFailure(Status.REWARD_FAILED, f"raised on a call of {size} completions:\n{raised.trace}")
        except DeadlineExceeded as error:
            failure = ItemFailure(Status.TIMED_OUT, f"{error} (reward.timeout, a call of {size} completions)")
        except ValueError as error:
            failure = ItemFailure(Status.REWARD_FAILED, str(error))
        return [failure] * size, Notes(size)

    def _total(self, rollout: Rollout) -> None:
        if rollout.status is not Status.OK:
            return
        # A reward of weight 0 is only watched; it cannot stand in for one that does not apply.
        applied = [
            self.weights[name] * value
            for name, value in rollout.rewards.items()
            if value is not None and self.weights[name] != 0
        ]
        if (paid := rollout.reward) is not None:
            rollout.rewards[ENVIRONMENT] = paid
        if applied or paid is not None:
            rollout.reward = sum(applied, paid or 0.0)
            if not abs(rollout.reward) <= LARGEST_REWARD:
                reason = f"the rewards sum to {rollout.reward:g}, and {LARGEST_REWARD:g} is the most there may be"
                rollout.fail(Status.REWARD_FAILED, f"task {rollout.task.id}: {reason}")
        else:
            reason = f"task {rollout.task.id}: no reward function applies (all gave None)"
            rollout.fail(Status.REWARD_FAILED, reason)


def check_failed(rollouts: Sequence[Rollout], max_share: float) -> None:
    """Stop the run (``RewardError``) when more than a share of a step's rollouts failed.

    Those that were aborted on purpose do not count.
    """
    counted = [r for r in rollouts if r.status is not Status.ABORTED]
    failed = [r for r in counted if r.status is not Status.OK]
    if not failed or len(failed) <= max_share * len(counted):
        return
    kinds = Counter(r.status.value for r in failed)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    raise RewardError(
        f"{len(failed)} of {len(counted)} rollouts failed ({counts}): "
        f"{len(failed) / len(counted):.0%}, above reward.max_failed_share = {max_share:.0%}. "
        f"The first, of task {failed[0].task.id}:\n{failed[0].error}"
    )


def reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean, deviation and applied share of each reward, the total's, failed shares and logged numbers.

    ``answered`` and ``correct`` are shares of the rollouts they were logged for; ``correct_of_answered`` is
    accuracy among those that answered.
    """
    counted = [r for r in rollouts if r.status is not Status.ABORTED]
    if not counted:
        return {}
    failed = Counter(r.status for r in counted if r.status is not Status.OK)
    metrics = {"rollouts/failed": failed.total() / len(counted)}
    metrics |= {f"rollouts/{status.value}": count / len(counted) for status, count in failed.items()}
    usable = [r for r in counted if r.status is Status.OK]
    totals = [r.reward for r in usable if r.reward is not None]
    if totals:
        metrics |= {"reward": fmean(totals), "reward/std": pstdev(totals)}
    for name in dict.fromkeys(name for r in usable for name in r.rewards):
        values = [v for r in usable if (v := r.rewards.get(name)) is not None]
        metrics[f"reward/{name}/applied"] = len(values) / len(usable)
        if values:
            metrics |= {f"reward/{name}/mean": fmean(values), f"reward/{name}/std": pstdev(values)}
    for name in dict.fromkeys(name for r in usable for name in r.metrics):
        key = name if name in ("answered", "correct") else f"logged/{name}"
        metrics[key] = mean([r.metrics[name] for r in usable if name in r.metrics])
    if metrics.get("answered"):
        metrics["correct_of_answered"] = metrics.get("correct", 0.0) / metrics["answered"]
    return metrics


def mean(values: Sequence[float]) -> float:
    """Of what user code logged, which may be of any size."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):  # a sum beyond floats; infinities of both signs
        return nan


def _record(rollout: Rollout, function: RewardFunction, score: Score) -> None:
    if not isinstance(score, ItemFailure):
        rollout.rewards[function.name] = score
    elif rollout.status is Status.OK:
        rollout.fail(score.status, f"task {rollout.task.id}: the reward '{function.reference}' {score.reason}")


def _note(rollout: Rollout, function: RewardFunction, noted: dict[str, Any]) -> None:
    """Numbers become metrics of the rollout, all else notes; a taken name gets the function's before it."""
    for column, value in noted.items():
        if value is None:
            continue
        taken = column in rollout.metrics or column in rollout.notes
        name = f"{function.name}/{column}" if taken else column
        if isinstance(value, int | float):
            rollout.metrics[name] = float(value)
        else:
            rollout.notes[name] = value
