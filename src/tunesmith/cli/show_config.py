"""``tunesmith config``: check a run file and show what it resolves to, without running it."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def show_config(run: RunFile, overrides: Overrides = None) -> None:
    """Check a run file and print every setting that was said or derived, without loading anything.

    What depends on the data, such as the number of steps, is derived when the run starts.
    """
    from tunesmith.config.load import find_kind, load_config
    from tunesmith.config.resolved import print_resolved
    from tunesmith.plan.facts import Facts, known_model_facts
    from tunesmith.plan.hardware import read_hardware
    from tunesmith.plan.resolve import resolve

    config = load_config(find_kind(run, overrides or ()), run, overrides or ())
    facts = Facts(read_hardware(), known_model_facts(config.model.path))
    print_resolved(resolve(config, facts))
