"""``tunesmith doctor``: diagnoses a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import tunesmith.records.doctor  # noqa: F401  (no command without its room)

commands = typer.Typer()

UNHEALTHY = 3
"""Exit code if there is more than a note."""


@commands.command()
def doctor(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="A run's directory, such as runs/latest.", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is wrong with a run, which may be going on: the numbers, the cause, and the settings
    to change.

    Exit code 3 if there is a problem or a warning, 0 if there are at most notes.
    """
    from tunesmith.records.doctor.findings import diagnose
    from tunesmith.records.doctor.record import read_record

    record = read_record(run)
    findings = diagnose(record)
    if as_json:
        print(
            json.dumps(
                {
                    "run": str(run),
                    "steps": len(record.steps),
                    "findings": [asdict(f) for f in findings],
                }
            )
        )
    else:
        from rich.console import Console
        from rich.text import Text

        from tunesmith.records.text import printable

        console = Console()
        for finding in findings:
            style = {"problem": "bold red", "warning": "bold yellow"}.get(finding.severity, "bold")
            text = Text.assemble(
                (finding.severity, style), f": {finding.key} (steps {finding.steps})\n"
            )
            lines = [finding.numbers, finding.cause, *finding.change, finding.effect]
            console.print(
                text.append("\n".join(f"  {printable(line)}" for line in lines if line)),
                soft_wrap=True,
            )
        if not findings:
            console.print(f"nothing is wrong in {len(record.steps)} steps")
    if any(finding.severity != "note" for finding in findings):
        raise typer.Exit(UNHEALTHY)
