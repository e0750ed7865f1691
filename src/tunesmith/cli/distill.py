"""``tunesmith distill``. From here: ``build/distill.py``, then the loop of ``rl`` or of ``sft``."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def distill(run: RunFile, overrides: Overrides = None) -> None:
    """Distillation: a student learns a teacher's probabilities, on its own samples or on given answers.

    Example: tunesmith distill run.toml rollout.prompts_per_step=32
    """
    from tunesmith.build import run_distill
    from tunesmith.cli.outcome import print_outcome

    print_outcome(run_distill(run, overrides or ()))
