"""Made-up data of given sizes, for dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tunesmith.assembly.opening import FROM_A_COMMAND, ReadyRun
from tunesmith.config.commands import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.data.loader import Part
from tunesmith.data.preference import Comparison, Solution
from tunesmith.data.prepare import Prepared
from tunesmith.data.report import LoadReport
from tunesmith.fake_device.tokenizer import NoTokenizer
from tunesmith.types import Completion, Rollout, RolloutGroup, Sample, Task


def ready_run(config: RunConfig, items: list[Any]) -> ReadyRun[Any, Any]:
    """A run with these items as its data."""
    train = Prepared(items, (Part("made up", 0, len(items)),), LoadReport(), "")
    nowhere = cast(Any, SimpleNamespace(path=None))
    return ReadyRun(config, Path(), nowhere, None, NoTokenizer(), FROM_A_COMMAND, train, None)


def items_of(config: RunConfig, longest: int, tokens: int) -> list[Any]:
    """About ``tokens`` tokens, in sequences or pairs of ``longest``; all tokens but the first of each are learned."""
    numbers, least = count(1), max(1, tokens // longest)

    def samples(length: int, learned: int) -> Iterator[Sample]:
        while True:
            mask = [False] * (length - learned) + [True] * learned
            yield Sample([next(numbers)] * length, mask)

    match config:
        case DPOConfig() | RMConfig():
            each = samples(longest // 2, 1 if isinstance(config, RMConfig) else longest // 2 - 1)
            values = {"side": (1.0, -1.0), "margin": (0.0, 0.0)}
            return [Comparison((next(each), next(each)), values) for _ in range(least)]
        case KTOConfig():
            each = samples(longest, longest - 1)
            return [Comparison((next(each), next(each)), {"side": (1.0, 1.0)}) for _ in range(least)]
        case PRMConfig():
            return [Solution([next(numbers)] * (longest - 2), (longest - 3,), (1.0,)) for _ in range(least)]
        case _:
            each = samples(longest, longest - 1)
            return [next(each) for _ in range(least)]


def groups_of(config: RLConfig, longest: int, tokens: int) -> list[RolloutGroup]:
    """About ``tokens`` tokens, in groups of rollouts of ``longest`` tokens, one of which succeeded."""
    size, new = config.rollout.group_size, min(config.rollout.max_new_tokens, longest - 1)
    prompt = longest - new
    groups: list[RolloutGroup] = []
    for number in range(-(-tokens // (prompt + size * new))):
        task = Task(str(number), "", (number + 1,) * prompt)
        rollouts = [Rollout(task, reward=float(not member)) for member in range(size)]
        for member, rollout in enumerate(rollouts):
            rollout.observe(task.prompt_ids)
            rollout.act(Completion([member + 1] * new, [0.0] * new, [0] * new, "stop"))
        groups.append(RolloutGroup(task, rollouts))
    return groups
