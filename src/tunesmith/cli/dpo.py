"""``tunesmith dpo``. From here: ``build.run_dpo`` builds, ``loop/supervised.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def dpo(run: RunFile, overrides: Overrides = None) -> None:
    """Direct preference optimisation: a model and a data file of pairs of answers.

    Example: tunesmith dpo run.toml dpo.beta=0.05
    """
    from tunesmith.build import run_dpo
    from tunesmith.cli.outcome import print_outcome

    print_outcome(run_dpo(run, overrides or ()))
