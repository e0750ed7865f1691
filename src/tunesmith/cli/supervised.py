"""The commands that train on given data. From here: ``assembly/train.py``, ``loop/supervised.py:run`` trains."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile
from tunesmith.cli.outcome import print_outcome


def sft(run: RunFile, overrides: Overrides = None) -> None:
    """Supervised fine-tuning: a model and a data file of answers to learn.

    Example: tunesmith sft run.toml train.epochs=2
    """
    from tunesmith.assembly import run_sft

    print_outcome(run_sft(run, overrides or ()))


def rm(run: RunFile, overrides: Overrides = None) -> None:
    """A reward model: a model and a data file of pairs, one answer preferred to the other.

    Example: tunesmith rm run.toml train.epochs=1
    """
    from tunesmith.assembly import run_rm

    print_outcome(run_rm(run, overrides or ()))


def dpo(run: RunFile, overrides: Overrides = None) -> None:
    """Direct preference optimisation: a model and a data file of pairs of answers.

    Example: tunesmith dpo run.toml dpo.beta=0.05
    """
    from tunesmith.assembly import run_dpo

    print_outcome(run_dpo(run, overrides or ()))


def kto(run: RunFile, overrides: Overrides = None) -> None:
    """Preference optimisation from answers that are each good or bad (KTO).

    Example: tunesmith kto run.toml kto.desirable_weight=1.5
    """
    from tunesmith.assembly import run_kto

    print_outcome(run_kto(run, overrides or ()))


def prm(run: RunFile, overrides: Overrides = None) -> None:
    """A process reward model: a model and a data file of answers whose steps are judged.

    Example: tunesmith prm run.toml train.epochs=1
    """
    from tunesmith.assembly import run_prm

    print_outcome(run_prm(run, overrides or ()))
