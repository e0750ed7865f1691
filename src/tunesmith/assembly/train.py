"""The commands that train, from a run file to a trained model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.assembly.common import outside_event_loop
from tunesmith.assembly.environments import instances_for, load_run_tasks, open_user_code
from tunesmith.assembly.opening import (
    FROM_A_COMMAND,
    Caller,
    ReadyRun,
    RunResult,
    kept_on_interrupt,
    make_ready,
    open_run,
    open_session,
    run_result,
)
from tunesmith.assembly.processes import open_processes, run_with_restarts
from tunesmith.assembly.training_data import TRAINING_DATA
from tunesmith.config.commands import DistillConfig, DPOConfig, KTOConfig, OfflineDistillConfig, PRMConfig, RMConfig
from tunesmith.config.load import find_kind
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.environments.loading import EnvironmentSet
from tunesmith.rewards.reward_set import RewardSet
from tunesmith.types import Task

if TYPE_CHECKING:
    from tunesmith.distributed.local import Processes
    from tunesmith.loop.parts import RLParts
    from tunesmith.loop.rollouts import RolloutSource
    from tunesmith.loop.session import Session


def run_rl(
    path: Path | None,
    overrides: Sequence[str] = (),
    kind: type[RLConfig] = RLConfig,
    caller: Caller = FROM_A_COMMAND,
) -> RunResult:
    """``tunesmith rl``: reinforcement learning."""
    with open_run(kind, path, overrides, caller) as opened, open_user_code(opened.config, opened.base_dir) as user_code:
        rewards, environments = user_code
        run = make_ready(
            opened,
            partial(load_run_tasks, environments, opened.tokenizer),
            lambda task: (len(task.prompt_ids), 0),
            rewards.check_tasks,
            instances_for(opened.config, opened.base_dir),
        )
        with open_processes(run.config) as processes:
            train = partial(_train_policy, run, rewards, environments, processes)
            return run_with_restarts(train, run, processes)


def _train_policy(
    run: ReadyRun[RLConfig, Task],
    rewards: RewardSet,
    environments: EnvironmentSet,
    processes: Processes | None,
    checkpoint: Path | None,
) -> RunResult:
    """The run from ``checkpoint`` on, or from the beginning."""
    from tunesmith.assembly.rl_parts import make_rl_parts

    metric = run.config.eval.metric or "eval/reward"
    with open_session(run, checkpoint, metric) as session, outside_event_loop(), asyncio.Runner() as runner:
        with session.phase("setup"):
            parts, rollouts = runner.run(make_rl_parts(run, session, rewards, environments, processes))
        if run.caller.rollouts is not None:
            rollouts = run.caller.rollouts(rollouts)
        with kept_on_interrupt(run, session.keep):
            runner.run(_run(parts, session, rollouts))
        return run_result(run, session)


async def _run(parts: RLParts, session: Session, rollouts: RolloutSource) -> None:
    from tunesmith.loop import rl

    try:
        await rl.run(parts, session, rollouts)
    finally:
        await parts.engine.close()


def run_supervised(
    kind: type[RunConfig], path: Path | None, overrides: Sequence[str] = (), caller: Caller = FROM_A_COMMAND
) -> RunResult:
    """Run a command that trains on given data."""
    data = TRAINING_DATA[kind]
    with open_run(kind, path, overrides, caller) as opened:
        config, tokenizer = opened.config, opened.tokenizer
        run = make_ready(opened, partial(data.load, config, tokenizer), partial(data.sizes, config))
        with open_processes(run.config) as processes:
            train = partial(_train_on_data, run, processes, run.config.eval.metric or data.metric)
            return run_with_restarts(train, run, processes)


def _train_on_data(
    run: ReadyRun[Any, Any], processes: Processes | None, metric: str, checkpoint: Path | None
) -> RunResult:
    """The run from ``checkpoint`` on, or from the beginning."""
    from tunesmith.assembly.supervised_parts import make_parts
    from tunesmith.loop import supervised

    with open_session(run, checkpoint, metric) as session:
        with session.phase("setup"):
            parts = make_parts(run, session, processes)
            session.start(parts, parts.describe)
        with kept_on_interrupt(run, session.keep):
            supervised.run(parts, session)
        return run_result(run, session)


run_sft = partial(run_supervised, SFTConfig)
run_rm = partial(run_supervised, RMConfig)
run_dpo = partial(run_supervised, DPOConfig)
run_kto = partial(run_supervised, KTOConfig)
run_prm = partial(run_supervised, PRMConfig)


def run_distill(path: Path | None, overrides: Sequence[str] = (), caller: Caller = FROM_A_COMMAND) -> RunResult:
    """``tunesmith distill``: reinforcement learning on the student's own samples, or supervised on given answers."""
    kind = find_kind(path, overrides)
    if issubclass(kind, OfflineDistillConfig):
        return run_supervised(OfflineDistillConfig, path, overrides, caller)
    return run_rl(path, overrides, kind if issubclass(kind, DistillConfig) else DistillConfig, caller)
