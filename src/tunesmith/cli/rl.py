"""``tunesmith rl``. From here: ``build.run_rl`` builds, ``loop/rl.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def rl(run: RunFile, overrides: Overrides = None) -> None:
    """Reinforcement learning: a model, a data file and a reward function.

    Example: tunesmith rl run.toml train.lr=1e-5 rollout.group_size=16
    """
    from tunesmith.build import run_rl
    from tunesmith.cli.outcome import print_outcome

    print_outcome(run_rl(run, overrides or ()))
