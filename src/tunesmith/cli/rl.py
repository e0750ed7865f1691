"""The commands with rollouts. From here: ``assembly.run_rl`` builds, ``loop/rl.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile
from tunesmith.cli.outcome import print_outcome


def rl(run: RunFile, overrides: Overrides = None) -> None:
    """Reinforcement learning: a model, a data file and a reward function.

    Example: tunesmith rl run.toml train.lr=1e-5 rollout.group_size=16
    """
    from tunesmith.assembly import run_rl

    print_outcome(run_rl(run, overrides or ()))


def distill(run: RunFile, overrides: Overrides = None) -> None:
    """Distillation: a student learns a teacher's probabilities, on its own samples or on given answers.

    Example: tunesmith distill run.toml rollout.prompts_per_step=32
    """
    from tunesmith.assembly import run_distill

    print_outcome(run_distill(run, overrides or ()))
