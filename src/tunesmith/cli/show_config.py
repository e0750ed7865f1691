"""``tunesmith config``: checks a run file and shows the resolved settings, without running it."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def show_config(run: RunFile, overrides: Overrides = None) -> None:
    """Check a run file as its command does, and print every setting that was given or derived.

    Nothing is loaded. Of the data, it reads each local source's first line. What depends on all of it, such as the
    number of steps, is derived when the run starts.
    """
    from tunesmith.assembly.checking import check_run
    from tunesmith.config.load import load_run
    from tunesmith.config.reading.places import placed
    from tunesmith.config.resolved import print_resolved

    with placed(run, overrides or ()):
        resolved = check_run(load_run(run, overrides or ()), run.parent, hub=False)
    print_resolved(resolved)
