"""``--dry-run=8xH100-80GB``: two steps of a run on a machine that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.sizes import format_size

if TYPE_CHECKING:
    from tunesmith.assembly.dry_run import Phase
    from tunesmith.plan.cost import Price

ASSUMED_LINES = 1000
"""Of data, which is not read: the learning rate's schedule needs an end."""
PLANNED = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "frozen models": "frozen",
    "gathered weights": "gathered",
    "activations": "activations",
    "temporaries": "head",
    "keys and values": "kv",
}
"""The part of a ``Price`` that plans each purpose."""


def print_dry_run(run: Path, overrides: Sequence[str], on: str) -> None:
    """Print the layout of a run on a machine, and its memory, planned and needed by two steps of the run's own parts.

    Raises:
        ConfigError: the run has parts of which there are no fake ones, or settings contradict each other.
        CapacityError: the run does not fit.
    """
    from rich.console import Console
    from rich.table import Table

    from tunesmith.assembly.dry_run import check_dry_run, dry_run, with_engines_inside
    from tunesmith.assembly.planning import plan_run
    from tunesmith.config.load import find_kind, load_config
    from tunesmith.config.places import placed
    from tunesmith.config.resolved import print_resolved
    from tunesmith.config.toml import toml_value
    from tunesmith.plan.memory import planned
    from tunesmith.plan.report import layout_of_run
    from tunesmith.plan.resolve import resolve

    with placed(run, overrides):
        config, filled = with_engines_inside(load_config(find_kind(run, overrides), run, overrides))
        resolved, facts = plan_run(config, on)
        check_dry_run(resolved.config)
    if filled:
        said = {key: value for key, value in resolved.given.items() if key not in filled}
        words = ", ".join(f"{key} = {toml_value(value)}" for key, value in filled.items())
        resolved = replace(
            resolved, given=said, notes=(f"a dry run of rollouts is of one GPU: {words}", *resolved.notes)
        )
    print_resolved(layout_of_run(resolved))
    price = planned(resolved.config, facts)
    phases = dry_run(resolve(config, replace(facts, train_size=facts.train_size or ASSUMED_LINES)).config, facts)
    del phases["load"]
    table = Table.grid(padding=(0, 2))
    for row in _rows(price, phases):
        table.add_row(*row)
    print()
    Console().print(table)
    waits = [place for phase in phases.values() for place in phase.waits]
    print("the host waits for the device at: " + ", ".join(dict.fromkeys(waits)))


def _rows(price: Price | None, phases: dict[str, Phase]) -> list[list[str]]:
    """Bytes by purpose: planned for training, and needed in each phase."""
    rows = [["memory", "planned", *phases]]
    for purpose, part in PLANNED.items():
        amounts = [getattr(price, part) if price else 0, *(phase.peak.get(purpose, 0) for phase in phases.values())]
        if any(amounts):
            rows.append([purpose, *(format_size(n) if n else "" for n in amounts)])
    total = price.training - price.libraries if price else 0
    return [*rows, ["at most, at once", *(format_size(n) for n in (total, *(p.total for p in phases.values())))]]
