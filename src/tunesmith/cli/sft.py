"""``tunesmith sft``. From here: ``build.run_sft`` builds, ``loop/supervised.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def sft(run: RunFile, overrides: Overrides = None) -> None:
    """Supervised fine-tuning: a model and a data file of answers to learn.

    Example: tunesmith sft run.toml train.epochs=2
    """
    from tunesmith.build import run_sft
    from tunesmith.cli.outcome import print_outcome

    print_outcome(run_sft(run, overrides or ()))
