"""``tunesmith prm``. From here: ``build.run_prm`` builds, ``loop/supervised.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def prm(run: RunFile, overrides: Overrides = None) -> None:
    """A process reward model: a model and a data file of answers whose steps are judged.

    Example: tunesmith prm run.toml train.epochs=1
    """
    from tunesmith.build import run_prm
    from tunesmith.cli.outcome import print_outcome

    print_outcome(run_prm(run, overrides or ()))
