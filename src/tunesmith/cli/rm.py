"""``tunesmith rm``. From here: ``build.run_rm`` builds, ``loop/supervised.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def rm(run: RunFile, overrides: Overrides = None) -> None:
    """A reward model: a model and a data file of pairs, one answer preferred to the other.

    Example: tunesmith rm run.toml train.epochs=1
    """
    from tunesmith.build import run_rm
    from tunesmith.cli.outcome import print_outcome

    print_outcome(run_rm(run, overrides or ()))
