"""``tunesmith doctor``: diagnoses a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from tunesmith.records.doctor.rules import Finding

# No command without its room.
import tunesmith.records.doctor  # noqa: F401  # pyright: ignore[reportUnusedImport]

commands = typer.Typer()

UNHEALTHY = 3
"""Exit code if there is more than a note."""


@commands.command()
def doctor(
    run: Annotated[
        Path, Argument(metavar="RUN_DIR", help="A run's directory, such as runs/latest.")
    ],
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
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
        judged = {"run": str(run), "steps": len(record.steps)}
        print(json.dumps({**judged, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print_findings(findings, len(record.steps))
    if any(finding.severity != "note" for finding in findings):
        raise typer.Exit(UNHEALTHY)


def _print_findings(findings: Sequence[Finding], steps: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from tunesmith.records.text import printable

    console = Console()
    for finding in findings:
        style = {"problem": "bold red", "warning": "bold yellow"}.get(finding.severity, "bold")
        text = Text.assemble((finding.severity, style), f": {finding.key} (steps {finding.steps})")
        for line in filter(None, (finding.numbers, finding.cause, *finding.change, finding.effect)):
            text.append(f"\n  {printable(line)}")
        console.print(text, soft_wrap=True)
    if not findings:
        console.print(f"nothing is wrong in {steps} steps")
