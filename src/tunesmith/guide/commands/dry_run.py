"""``--dry-run=8xH100-80GB``: two steps of a run on a machine that need not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunesmith.guide.simulate.dry_run import DryPhase
    from tunesmith.plan.cost.device import Price

ASSUMED_LINES = 1000
"""Assumed lines of data, which is not read: the learning rate schedule needs an end."""
PLANNED = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "frozen models": "frozen",
    "gathered weights": "gathered",
    "activations": "activations",
    "temporaries": "head",
    "weights for engines": "published",
    "engines' weights": "engine",
    "keys and values": "kv",
}
"""The part of a ``Price`` that plans each purpose."""


def print_dry_run(command: str, run: Path, overrides: Sequence[str], on: str) -> None:
    """Print a run's layout on a machine, and its memory: planned, and needed by two steps with the
    run's own parts.

    Raises:
        ConfigError: the run file is another command's, parts of the run have no fake version, or
            settings contradict each other.
        CapacityError: the run does not fit.
    """
    from tunesmith.config.commands import KINDS
    from tunesmith.config.load import find_kind, load_config
    from tunesmith.config.reading.places import placed

    with placed(run, overrides):
        kind = find_kind(run, overrides)
        kind = kind if kind.command == command else KINDS[command]
        config = load_config(kind, run, overrides)

    from rich.console import Console
    from rich.table import Table

    from tunesmith.config.resolved import print_resolved
    from tunesmith.guide.simulate.dry_run import check_dry_run, dry_run
    from tunesmith.plan.cost.memory import planned_devices
    from tunesmith.plan.report import layout_of_run
    from tunesmith.plan.resolve import resolve
    from tunesmith.run.assembly.planning import plan_run

    with placed(run, overrides):
        plan = plan_run(config, on)
        check_dry_run(plan)
    print_resolved(layout_of_run(plan), all_of_it=True)
    prices = {name: price for name, price, _ in planned_devices(plan)}
    lines = plan.facts.train_size or ASSUMED_LINES
    gpus = dry_run(resolve(config, replace(plan.facts, train_size=lines)))
    waits: dict[str, None] = {}
    for gpu, phases in gpus.items():
        phases.pop("load", None)
        table = Table.grid(padding=(0, 2))
        for row in _rows(gpu, prices.get(gpu), phases):
            table.add_row(*row)
        print()
        Console().print(table)
        waits |= dict.fromkeys(place for phase in phases.values() for place in phase.waits)
    print("the host waits for the device at: " + ", ".join(waits))


def _rows(gpu: str, price: Price | None, phases: dict[str, DryPhase]) -> list[list[str]]:
    """Bytes by purpose on a GPU: planned (for training on a trainer's GPU), and needed in each
    phase."""
    from tunesmith.config.values import format_size
    from tunesmith.guide.simulate.memory import CACHED

    rows = [["memory" if gpu == "trainer" else f"the {gpu}'s GPU", "planned", *phases]]
    for purpose, part in (*PLANNED.items(), (CACHED, None)):
        needed = [phase.peak.get(purpose, 0) for phase in phases.values()]
        amounts = [getattr(price, part) if price and part else 0, *needed]
        if any(amounts):
            rows.append([purpose, *(format_size(n) if n else "" for n in amounts)])
    total = (price.training if gpu == "trainer" else price.peak) - price.libraries if price else 0
    at_once = [total, *(phase.total for phase in phases.values())]
    return [*rows, ["at most, at once", *map(format_size, at_once)]]
