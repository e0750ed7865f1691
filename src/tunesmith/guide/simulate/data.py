"""A dry run's made-up data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tunesmith.config.commands import DPOConfig, KTOConfig, PRMConfig, RMConfig
from tunesmith.config.schema import RunConfig
from tunesmith.learn.data.loader import Part
from tunesmith.learn.data.preference import Comparison, Solution
from tunesmith.learn.data.prepare import Prepared
from tunesmith.learn.data.report import LoadReport
from tunesmith.models.no_tokenizer import NoTokenizer
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.run_dir import RunDir
from tunesmith.run.assembly.opening import FROM_A_COMMAND, OpenRun
from tunesmith.types import Completion, Rollout, RolloutGroup, Sample, Task


def run_with_data(plan: AnyPlan, items: list[Any]) -> OpenRun[Any, Any]:
    """A planned run with these items as its data."""
    nothing: Any = NoTokenizer()
    run = OpenRun(plan.said, Path(), RunDir(Path()), None, nothing, FROM_A_COMMAND)
    run.train = Prepared(items, (Part("made up", 0, len(items)),), LoadReport(), "")
    run.held_out = None
    run.plan = plan
    return run


def items_of(config: RunConfig, longest: int, tokens: int) -> list[Any]:
    """About ``tokens`` tokens, in sequences or pairs of ``longest``; all tokens but the first of
    each are learned."""
    numbers = count(1)
    least = max(1, tokens // longest)

    def samples(length: int, learned: int) -> Iterator[Sample]:
        while True:
            yield Sample([next(numbers)] * length, [False] * (length - learned) + [True] * learned)

    match config:
        case DPOConfig() | RMConfig():
            each = samples(longest // 2, 1 if isinstance(config, RMConfig) else longest // 2 - 1)
            values = {"side": (1.0, -1.0), "margin": (0.0, 0.0)}
            return [Comparison((next(each), next(each)), values) for _ in range(least)]
        case KTOConfig():
            each = samples(longest, longest - 1)
            values = {"side": (1.0, 1.0)}
            return [Comparison((next(each), next(each)), values) for _ in range(least)]
        case PRMConfig():
            ids = [[next(numbers)] * (longest - 2) for _ in range(least)]
            return [Solution(each, (longest - 3,), (1.0,)) for each in ids]
        case _:
            each = samples(longest, longest - 1)
            return [next(each) for _ in range(least)]


def groups_of(plan: AnyPlan, longest: int, tokens: int) -> list[RolloutGroup]:
    """About ``tokens`` tokens, in groups of rollouts of ``longest`` tokens, one of which
    succeeded."""
    size = plan.training.group
    new = min(plan.said.new_tokens, longest - 1)
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
