"""``tunesmith explain``: everything known about a setting, a metric, or another framework's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.reference import print_setting, wrapped

if TYPE_CHECKING:
    from tunesmith.reference.settings import Setting

_MOST = 8
"""Maximum pieces of advice to print."""


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as train.lr, entropy or --micro_train_batch_size.")],
    run: Annotated[
        Path | None,
        typer.Option(help="The directory of a run: also print the value there, and why.", show_default=False),
    ] = None,
) -> None:
    """Say what a setting, a metric or a name of another framework is, when to touch it and what others call it.

    Example: tunesmith explain clip_ratio
    """
    from tunesmith.reference.explain import explain as find
    from tunesmith.reference.explain import meaning_of, metric_in_run

    found = find(name)
    for line in found.foreign:
        wrapped(line, 0)
    for setting in found.settings:
        _explain_setting(setting, run)
    for metric in found.metrics:
        print(metric.name)
        wrapped(f"a metric, the {metric.form} of a step{f'; in {metric.unit}' if metric.unit else ''}", 4)
        wrapped(meaning_of(metric), 4)
        if metric.aliases:
            wrapped(f"called elsewhere, and in sinks too: {', '.join(metric.aliases)}", 4)
        for line in metric_in_run(run, metric) if run else ():
            wrapped(f"in {run}: {line}", 4)
        _print_advice(metric.name)


def _explain_setting(setting: Setting, run: Path | None) -> None:
    from tunesmith.reference.explain import called_elsewhere, value_in_run, without_effect

    print_setting(setting)
    if run:
        value = value_in_run(run, setting.key)
        wrapped(f"in {run}: {value or 'this run has no such setting'}", 4)
    _print_advice(setting.key)
    for why in without_effect(setting.key):
        wrapped(f"- without effect {why}", 4)
    for framework, names in called_elsewhere(setting.key):
        wrapped(f"{framework}: {names}", 4)


def _print_advice(name: str) -> None:
    """Print the documentation's advice, the guides first."""
    from tunesmith.reference.advice import advice_about

    advice = advice_about(name)
    for one in advice[:_MOST]:
        wrapped(f"- {one.text} ({one.page})", 4)
    if left := sorted({one.page for one in advice[_MOST:]}):
        wrapped(f"- more in {', '.join(left)}", 4)
