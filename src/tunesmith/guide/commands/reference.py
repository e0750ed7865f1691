"""``tunesmith keys``, ``models``, ``presets`` and ``explain``: what a run file may contain, and
what it means."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from tunesmith.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tunesmith.guide.explain.settings import Setting

commands = typer.Typer()

_MOST = 8
"""Maximum pieces of advice to print."""


@commands.command()
def keys(
    what: Annotated[
        str | None,
        Argument(metavar="[COMMAND, SECTION or KEY]", help="Such as rl, train or train.lr."),
    ] = None,
) -> None:
    """List the settings of a run file: each with its default, what it may be and what it means.

    Example: tunesmith keys rollout
    """
    from tunesmith.config.commands import KINDS
    from tunesmith.guide.explain.settings import settings_of
    from tunesmith.guide.names.unknown import find

    wanted = what or ""
    rows = settings_of(wanted)
    if not rows:
        ours = find(None, wanted)
        if ours.why:
            raise ConfigError(f"there is no {wanted}: {ours.why}")
        rows = [row for key in ours.keys or ours.elsewhere for row in settings_of(key)]
    if not rows:
        names = [*KINDS, *dict.fromkeys(row.key.partition(".")[0] for row in settings_of())]
        hint = nearest(wanted, names)
        raise ConfigError(f"there is no command, section or key '{wanted}'.{hint}")
    for row in rows:
        print_setting(row, of_command=what in KINDS)


def print_setting(setting: Setting, *, of_command: bool = False) -> None:
    """Print a setting with its default, type and meaning and, unless ``of_command``, the commands
    that have it."""
    from tunesmith.config.commands import KINDS

    everywhere = of_command or len(setting.commands) == len(KINDS)
    print(setting.key)
    commands = "" if everywhere else f" (tunesmith {', '.join(setting.commands)})"
    wrapped(f"{setting.kind}; default: {setting.default}{commands}", 4)
    wrapped(setting.meaning, 4)


@commands.command()
def models() -> None:
    """List the families of models that can be trained, and why others cannot.

    A family is the ``model_type`` in a model's config.json.
    """
    from tunesmith.plan.facts.families import REFUSED, published

    wrapped(" ".join(published()), 0)
    print("\nThese cannot be trained:")
    for reason in dict.fromkeys(REFUSED.values()):
        print()
        wrapped(" ".join(name for name, why in REFUSED.items() if why == reason), 2)
        wrapped(reason, 4)


@commands.command()
def presets(
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Left out, all of them.")
    ] = None,
) -> None:
    """List the presets of algorithm.name: what each one sets, and where it comes from.

    Example: tunesmith presets grpo dapo
    """
    from tunesmith.config.presets import PRESETS, find_preset
    from tunesmith.records.toml import toml_value

    for name in names or PRESETS:
        preset = find_preset(name)
        print(name)
        wrapped(preset.text, 4)
        values = [f"{key} = {toml_value(value)}" for key, value in preset.settings.items()]
        wrapped(", ".join(values), 4)
        wrapped(f"source: {preset.source}", 4)


def wrapped(text: str, indent: int) -> None:
    """Print a text in lines as wide as the terminal."""
    room = min(shutil.get_terminal_size().columns, 100) - 1 - indent
    lines = textwrap.fill(text, room, break_long_words=False, break_on_hyphens=False)
    print(textwrap.indent(lines, " " * indent))


# --micro_train_batch_size is a name
@commands.command(context_settings={"ignore_unknown_options": True})
def explain(
    name: Annotated[
        str, Argument(metavar="NAME", help="Such as train.lr, entropy or --micro_train_batch_size.")
    ],
    run: Annotated[
        Path | None, Option(help="The directory of a run: also print the value there, and why.")
    ] = None,
    verbose: Annotated[
        bool,
        Option("--verbose", "-v", help="Also print when to touch it, and what others call it."),
    ] = False,
) -> None:
    """Say what a setting, a metric or a name of another framework is.

    Example: tunesmith explain clip_ratio
    """
    from tunesmith.guide.explain.explain import explain as find
    from tunesmith.guide.explain.explain import meaning_of, metric_in_run

    meanings = find(name)
    for line in meanings.foreign:
        wrapped(line, 0)
    for setting in meanings.settings:
        _explain_setting(setting, run, verbose=verbose)
    for metric in meanings.metrics:
        print(metric.name)
        unit = f"; in {metric.unit}" if metric.unit else ""
        wrapped(f"a metric, the {metric.form} of a step{unit}", 4)
        wrapped(meaning_of(metric), 4)
        if metric.aliases:
            wrapped(f"called elsewhere, and in sinks too: {', '.join(metric.aliases)}", 4)
        for line in metric_in_run(run, metric) if run else ():
            wrapped(f"in {run}: {line}", 4)
        if verbose:
            _print_advice(metric.name)
    if not verbose:
        print("-v also prints advice, and the names in other frameworks")


def _explain_setting(setting: Setting, run: Path | None, *, verbose: bool) -> None:
    from tunesmith.guide.explain.explain import called_elsewhere, value_in_run, without_effect

    print_setting(setting)
    if run:
        value = value_in_run(run, setting.key)
        wrapped(f"in {run}: {value or 'this run has no such setting'}", 4)
    if not verbose:
        return
    _print_advice(setting.key)
    for why in without_effect(setting.key):
        wrapped(f"- without effect {why}", 4)
    for framework, names in called_elsewhere(setting.key):
        wrapped(f"{framework}: {names}", 4)


def _print_advice(name: str) -> None:
    """Print the documentation's advice, the guides first."""
    from tunesmith.guide.explain.advice import advice_about

    advice = advice_about(name)
    for one in advice[:_MOST]:
        wrapped(f"- {one.text} ({one.page})", 4)
    left = sorted({one.page for one in advice[_MOST:]})
    if left:
        wrapped(f"- more in {', '.join(left)}", 4)
