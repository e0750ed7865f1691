"""``tunesmith generate`` and ``rft``; see ``offline/generate.py`` and ``offline/rft.py``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tunesmith.cli.arguments import Overrides, RunFile


def generate(run: RunFile, overrides: Overrides = None) -> None:
    """Answer every line of a data file, or score its answers; run again, it continues where its
    output ends.

    Example: tunesmith generate run.toml sampling.n=4 output.kind=best
    """
    from tunesmith.cli.outcome import print_usage
    from tunesmith.run.offline.generate import run_generate

    done = run_generate(run, overrides or ())
    given = done.counts.items()
    counts = {name: f"{n:,.4g}" if n % 1 else f"{n:,.0f}" for name, n in given}
    print_usage(done.usage, done.earlier, counts)
    print(f"{done.lines} lines in {done.output}", flush=True)


def rft(
    step: Annotated[
        Literal["generate", "train", "evaluate", "run"],
        typer.Argument(help="What to do; run does all of it, in turn."),
    ],
    run: RunFile,
    overrides: Overrides = None,
) -> None:
    """Rejection-sampling fine-tuning: sample answers, keep the right ones, train on them, evaluate.

    Example: tunesmith rft run run.toml sampling.n=8 rft.rounds=2
    """
    from tunesmith.cli.outcome import print_examples, print_usage
    from tunesmith.records.text import shown_path
    from tunesmith.run.offline.rft import run_rft
    from tunesmith.run.offline.rounds import describe

    done = run_rft(step, run, overrides or ())
    print_examples(done.examples)
    print()
    for name, result in done.evaluations.items():
        print(describe(name, result))
    facts = {"run": shown_path(done.run_dir)} | (
        {"model": shown_path(done.model)} if done.model else {}
    )
    print_usage(done.usage, done.earlier, facts)
