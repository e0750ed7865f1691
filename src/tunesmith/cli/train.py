"""The commands that train; they call ``run/assembly/train.py``, then ``run/loop/rl.py:run`` or
``run/loop/supervised.py:run``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.cli.arguments import DryRun, Overrides, RunFile
from tunesmith.cli.outcome import print_outcome
from tunesmith.config.doors import Door
from tunesmith.errors import ConfigError

if TYPE_CHECKING:
    from tunesmith.run.assembly import RunResult

DRY_RUNS = Door[Callable[[str, Path, Sequence[str], str], None]](
    "dry_runs", "tunesmith.guide.commands.dry_run:print_dry_run"
)


def rl(run: RunFile, overrides: Overrides = None, dry_run: DryRun = None) -> None:
    """Reinforcement learning: a model, a data file and a reward function.

    Example: tunesmith rl run.toml train.lr=1e-5 rollout.group_size=16
    """
    from tunesmith.run.assembly import run_rl

    _train(run_rl, "rl", run, overrides or (), dry_run)


def distill(run: RunFile, overrides: Overrides = None, dry_run: DryRun = None) -> None:
    """Distillation: a student learns a teacher's probabilities, on its own samples or on given
    answers.

    Example: tunesmith distill run.toml rollout.prompts_per_step=32
    """
    from tunesmith.run.assembly import run_distill

    _train(run_distill, "distill", run, overrides or (), dry_run)


def sft(run: RunFile, overrides: Overrides = None, dry_run: DryRun = None) -> None:
    """Supervised fine-tuning: a model and a data file of answers to learn.

    Example: tunesmith sft run.toml train.epochs=2
    """
    from tunesmith.run.assembly import run_sft

    _train(run_sft, "sft", run, overrides or (), dry_run)


def rm(run: RunFile, overrides: Overrides = None, dry_run: DryRun = None) -> None:
    """A reward model: a model and a data file of pairs, one answer preferred to the other.

    Example: tunesmith rm run.toml train.epochs=1
    """
    from tunesmith.run.assembly import run_rm

    _train(run_rm, "rm", run, overrides or (), dry_run)


def dpo(run: RunFile, overrides: Overrides = None, dry_run: DryRun = None) -> None:
    """Direct preference optimisation: a model and a data file of pairs of answers.

    Example: tunesmith dpo run.toml dpo.beta=0.05
    """
    from tunesmith.run.assembly import run_dpo

    _train(run_dpo, "dpo", run, overrides or (), dry_run)


def kto(run: RunFile, overrides: Overrides = None, dry_run: DryRun = None) -> None:
    """Preference optimisation from answers that are each good or bad (KTO).

    Example: tunesmith kto run.toml kto.desirable_weight=1.5
    """
    from tunesmith.run.assembly import run_kto

    _train(run_kto, "kto", run, overrides or (), dry_run)


def prm(run: RunFile, overrides: Overrides = None, dry_run: DryRun = None) -> None:
    """A process reward model: a model and a data file of answers whose steps are judged.

    Example: tunesmith prm run.toml train.epochs=1
    """
    from tunesmith.run.assembly import run_prm

    _train(run_prm, "prm", run, overrides or (), dry_run)


def _train(
    command: Callable[[Path, Sequence[str]], RunResult],
    name: str,
    run: Path,
    overrides: Sequence[str],
    dry_run: str | None,
) -> None:
    if dry_run is None:
        print_outcome(command(run, overrides))
        return
    if not DRY_RUNS.rooms:
        raise ConfigError("--dry-run: nothing that simulates machines is installed")
    DRY_RUNS.rooms[0](name, run, overrides, dry_run)
