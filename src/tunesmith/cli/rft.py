"""``tunesmith rft``; see ``offline/rft.py``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tunesmith.cli.arguments import Overrides, RunFile


def rft(
    step: Annotated[
        Literal["generate", "train", "evaluate", "run"],
        typer.Argument(help="What to do; run does all of it, in turn.", show_default=False),
    ],
    run: RunFile,
    overrides: Overrides = None,
) -> None:
    """Rejection-sampling fine-tuning: sample answers, keep the right ones, train on them, evaluate.

    Example: tunesmith rft run run.toml sampling.n=8 rft.rounds=2
    """
    from tunesmith.cli.outcome import print_examples, print_usage
    from tunesmith.monitor.text import shown_path
    from tunesmith.offline.rft import run_rft
    from tunesmith.offline.rounds import describe

    done = run_rft(step, run, overrides or ())
    print_examples(done.examples)
    print()
    for name, result in done.evaluations.items():
        print(describe(name, result))
    facts = {"run": shown_path(done.run_dir)} | ({"model": shown_path(done.model)} if done.model else {})
    print_usage(done.usage, done.earlier, facts)
