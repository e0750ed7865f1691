"""Turns the ``[reward]`` section into a run's rewards: checks it, imports the user's files, names
the rewards.

A user's reward function has TRL's signature::

    def same_text(prompts, completions, answer, **columns) -> list[float | None]:
        return [float(completion.strip() == gold) for completion, gold in zip(completions, answer)]

It may be ``async``, is called with keywords only, and gets every data column as a list with one
entry per completion. None means that the reward does not apply to that completion. The function
runs in its own process or, with ``isolation = "thread"``, in a thread other than the main one.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from urllib.parse import urlsplit

from tunesmith.config import objects as user_code
from tunesmith.config.sandboxes import ProcessSandbox, Sandbox
from tunesmith.config.schema import RemoteReward, RewardSection
from tunesmith.errors import ConfigError, about, nearest
from tunesmith.learn.rewards.builtin import BUILTINS, check_builtins
from tunesmith.learn.rewards.code_tests import CODE_TESTS, code_tests
from tunesmith.learn.rewards.foreign import VERL, VERL_GOLD, from_verl
from tunesmith.learn.rewards.function import INSTANCES, RewardFunction, required_columns
from tunesmith.learn.rewards.judge_questions import JudgeQuestions
from tunesmith.learn.rewards.reward_set import ENVIRONMENT, RewardSet
from tunesmith.learn.rewards.stats import check_reward_model
from tunesmith.learn.usercode.calls import Function

NAMES = (*BUILTINS, CODE_TESTS)
INSTANCES_NEED = (
    "Those are the instances that played the episodes. They need `tunesmith rl`, a class of "
    "TRL's form (public methods as tools, no step) as environment.path, and reward.isolation and "
    "environment.isolation = 'thread'."
)


@about("reward.functions")
def check_rewards(section: RewardSection, base_dir: Path) -> None:
    """Reject (``ConfigError``) a section that cannot work, without running any of the user's code.

    ``base_dir`` is the run file's directory; paths are relative to it, else to the working
    directory.
    """
    if not section.given:
        raise ConfigError(
            "reward.functions is empty; give a function of yours, as in functions = "
            f"['rewards.py:correct'], a built-in ({', '.join(NAMES)}), [[reward.models]], "
            "[[reward.remote]] or [[reward.judge]].",
            keys=("reward.functions",),
        )
    for key, problem in _problems_of_weights(section):
        raise ConfigError(problem, keys=(key,))
    for entry in section.functions:
        if ":" in entry or entry.endswith(".py"):
            user_code.check_reference(entry, base_dir)
        elif entry not in NAMES:
            raise ConfigError(
                f"reward.functions: '{entry}' is not a built-in.{nearest(entry, NAMES)}"
                " A function of yours is written file.py:function.",
                keys=("reward.functions",),
            )
    check_builtins(section)
    if section.memory is not None and section.isolation == "thread":
        raise ConfigError(
            'reward.memory has no effect with reward.isolation = "thread"; a thread has no limit.',
            keys=("reward.memory", "reward.isolation"),
        )
    for entry in section.models:
        check_reward_model(entry)
    for entry in section.remote:
        for problem in _problems_of_remote(entry):
            raise ConfigError(f"reward.remote '{entry.name}': {problem}", keys=("reward.remote",))
    for entry in section.judge:
        for problem in _problems_of_token(entry.token_env, [entry.url] if entry.url else []):
            raise ConfigError(f"reward.judge '{entry.name}': {problem}", keys=("reward.judge",))
        with about("reward.judge"):
            JudgeQuestions(entry)


def _problems_of_remote(entry: RemoteReward) -> Iterator[str]:
    if not entry.urls:
        yield "urls is empty; give the addresses that serve it."
    yield from _problems_of_token(entry.token_env, entry.urls)


def _problems_of_token(variable: str | None, urls: Sequence[str]) -> Iterator[str]:
    if variable is None:
        return
    if any(urlsplit(url).username is not None for url in urls):
        yield (
            "token_env and a user in an address both set the Authorization header; leave one of "
            "them out."
        )
    if not os.environ.get(variable, "").strip():
        yield (
            f"the environment variable {variable} (token_env) is not set; export it with the "
            "token that the server asks for."
        )


def _problems_of_weights(section: RewardSection) -> Iterator[tuple[str, str]]:
    """Each with its key."""
    key = "reward.weights"
    weights = section.weights
    functions = section.functions
    repeated = next((name for name, count in Counter(functions).items() if count > 1), None)
    if repeated:
        why = f"reward.functions names '{repeated}' more than once; use reward.weights."
        yield "reward.functions", why
    if weights is not None and len(weights) != len(functions):
        counts = f"{len(weights)} entries for {len(functions)} functions"
        yield key, f"reward.weights has {counts}; give one for each."
    if weights is not None and not all(map(isfinite, weights)):
        yield key, f"reward.weights must be finite numbers, not {list(weights)}."
    by_name = weights_by_name(section)
    if not any(by_name.values()):
        yield key, "reward.weights are all 0, so that no rollout would have a reward."
    if ENVIRONMENT in by_name:
        why = f"no reward may be called '{ENVIRONMENT}', the name of the environment's own"
        yield "reward.functions", f"{why}; rename it."
    if len(by_name) < len(functions) + len(section.named):
        why = (
            f"two of the rewards {', '.join(by_name)} have the same name; give each of "
            "reward.models, reward.remote and reward.judge its own `name`, which is what it is "
            "called in the metrics."
        )
        yield "reward.models", why


def weights_by_name(section: RewardSection) -> dict[str, float]:
    """The weight of every reward: functions in their order, then models, remote ones and
    judges."""
    names = section.function_names
    weights = dict(zip(names, section.weights or (1.0,) * len(names), strict=True))
    return weights | {entry.name: entry.weight for entry in section.named}


@about("reward.functions")
def load_rewards(
    section: RewardSection,
    base_dir: Path,
    *,
    instances: bool = False,
    sandbox: Sandbox | None = None,
) -> RewardSet:
    """Check the section, import the user's files and prepare the built-ins, whose processes start
    later.

    The set's ``weights`` cover every reward of the section; models and remote rewards are added
    later with ``add``.

    Args:
        instances: the run has environments, and functions may need their instances.
        sandbox: where programs of completions run, and, if it is of this process's kind, the
            user's functions.

    Raises:
        ConfigError: as ``check_rewards``; a file cannot be imported, or a function cannot be
            called.
    """
    check_rewards(section, base_dir)
    weights = weights_by_name(section)
    named = zip(weights, section.functions, strict=False)
    own = [(name, entry) for name, entry in named if entry not in NAMES]
    isolated = None
    if own and section.isolation != "thread":
        from tunesmith.learn.rewards.isolated import IsolatedRewards

        confined = sandbox if isinstance(sandbox, ProcessSandbox) else None
        isolated = IsolatedRewards(own, base_dir, section.memory, confined)
        functions = iter(isolated.functions)
    else:
        loaded = ((name, entry, user_code.load_function(entry, base_dir)) for name, entry in own)
        functions = (user_reward(*each, instances) for each in loaded)
    rewards = RewardSet(weights, section.timeout, isolated)
    rewards.read_by_judges = {entry.name: JudgeQuestions(entry).columns for entry in section.judge}
    for entry in section.functions:
        if entry == CODE_TESTS:
            rewards.add(code_tests(section, sandbox or ProcessSandbox()))
        else:
            rewards.add(BUILTINS[entry](section) if entry in BUILTINS else next(functions))
    return rewards


def user_reward(
    name: str, reference: str, function: Function, instances: bool = False
) -> RewardFunction:
    """A user's function as a reward. ConfigError if it cannot be called as one.

    Args:
        instances: it may need ``environments``, which are in this process.
    """
    columns = required_columns(function, reference)
    parameters = inspect.signature(function).parameters
    if parameters.keys() >= VERL:
        columns -= VERL
        return RewardFunction(name, reference, from_verl(function), columns, one_of=VERL_GOLD)
    parameter = parameters.get(INSTANCES)
    if parameter is None:
        return RewardFunction(name, reference, function, columns)
    needed = parameter.default is parameter.empty
    if needed and not instances:
        raise ConfigError(f"'{reference}' needs '{INSTANCES}'. {INSTANCES_NEED}")
    need = "needed" if needed else "optional"
    return RewardFunction(name, reference, function, columns, instances=need)
