"""``tunesmith kto``. From here: ``build.run_kto`` builds, ``loop/supervised.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def kto(run: RunFile, overrides: Overrides = None) -> None:
    """Preference optimisation from answers that are each good or bad (KTO).

    Example: tunesmith kto run.toml kto.desirable_weight=1.5
    """
    from tunesmith.build import run_kto
    from tunesmith.cli.outcome import print_outcome

    print_outcome(run_kto(run, overrides or ()))
