"""``tunesmith generate``; see ``offline/generate.py``."""

from __future__ import annotations

from tunesmith.cli.arguments import Overrides, RunFile


def generate(run: RunFile, overrides: Overrides = None) -> None:
    """Answer every line of a data file, or score its answers; run again, it continues where its output ends.

    Example: tunesmith generate run.toml sampling.n=4 output.kind=best
    """
    from tunesmith.cli.outcome import print_usage
    from tunesmith.offline.generate import run_generate

    done = run_generate(run, overrides or ())
    counts = {name: f"{count:,.4g}" if count % 1 else f"{count:,.0f}" for name, count in done.counts.items()}
    print_usage(done.usage, done.earlier, counts)
    print(f"{done.lines} lines in {done.output}", flush=True)
