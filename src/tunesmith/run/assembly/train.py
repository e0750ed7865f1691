"""The commands that train, from a run file to a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tunesmith.config.commands import (
    DistillConfig,
    DPOConfig,
    KTOConfig,
    OfflineDistillConfig,
    PRMConfig,
    RMConfig,
)
from tunesmith.config.load import find_kind
from tunesmith.config.reading.overriding import Override
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.run.assembly.environments import load_run_tasks, open_user_code
from tunesmith.run.assembly.opening import FROM_A_COMMAND, Caller, open_run, prepare_training
from tunesmith.run.assembly.restarts import with_restarts
from tunesmith.run.assembly.session import RunResult
from tunesmith.run.assembly.training_data import TRAINING_DATA
from tunesmith.run.placement.choosing import open_placement


def run_rl(
    path: Path | None,
    overrides: Sequence[Override] = (),
    kind: type[RLConfig] = RLConfig,
    caller: Caller = FROM_A_COMMAND,
) -> RunResult:
    """``tunesmith rl``: reinforcement learning."""
    with (
        open_run(kind, path, overrides, caller) as run,
        open_user_code(run.config, run.base_dir) as user_code,
    ):
        rewards, environments = user_code
        prepare_training(
            run,
            partial(load_run_tasks, environments, run.tokenizer),
            lambda task: (len(task.prompt_ids), 0),
            rewards.check_tasks,
        )
        from tunesmith.run.assembly.rl_run import train_policy

        with open_placement(run.plan, run.tokenizer, run.directory.path) as placement:
            train = partial(train_policy, run, rewards, environments, placement)
            return with_restarts(train, run, placement)


def run_supervised(
    kind: type[RunConfig],
    path: Path | None,
    overrides: Sequence[Override] = (),
    caller: Caller = FROM_A_COMMAND,
) -> RunResult:
    """Run a command that trains on given data."""
    data = TRAINING_DATA[kind]
    with open_run(kind, path, overrides, caller) as run:
        prepare_training(
            run, partial(data.load, run.config, run.tokenizer), partial(data.sizes, run.config)
        )
        from tunesmith.run.assembly.supervised_run import train_on_data

        with open_placement(run.plan, run.tokenizer, run.directory.path) as placement:
            return with_restarts(partial(train_on_data, run, placement), run, placement)


run_sft = partial(run_supervised, SFTConfig)
run_rm = partial(run_supervised, RMConfig)
run_dpo = partial(run_supervised, DPOConfig)
run_kto = partial(run_supervised, KTOConfig)
run_prm = partial(run_supervised, PRMConfig)


def run_distill(
    path: Path | None, overrides: Sequence[Override] = (), caller: Caller = FROM_A_COMMAND
) -> RunResult:
    """``tunesmith distill``: reinforcement learning on the student's own samples, or supervised on
    given answers."""
    kind = find_kind(path, overrides)
    if issubclass(kind, OfflineDistillConfig):
        return run_supervised(OfflineDistillConfig, path, overrides, caller)
    return run_rl(
        path, overrides, kind if issubclass(kind, DistillConfig) else DistillConfig, caller
    )
