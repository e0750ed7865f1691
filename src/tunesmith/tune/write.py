"""The run file with the best settings."""

from __future__ import annotations

import os
from pathlib import Path

from tunesmith.config.load import load_run
from tunesmith.config.resolved import Resolved, config_text, settings
from tunesmith.errors import ConfigError, StorageError, boundary
from tunesmith.plan.facts.measured import remembered
from tunesmith.plan.filling import with_values
from tunesmith.redact import open_private
from tunesmith.tune.result import Result, told
from tunesmith.tune.setup import without_tuned

FIRST_LINE = "# Written by tunesmith tune"


def check_output(file: Path, report: Path) -> None:
    """Reject (ConfigError) files that cannot be written, or were not written by ``tunesmith tune``."""
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {file}: {file.parent} is not a writable directory; name another one")
    if file.is_dir():
        raise ConfigError(f"--output {file} is a directory; name a file")
    if file.exists() and not file.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE):
        raise ConfigError(f"{file} is there already, and was not written by tunesmith tune; name another --output")
    if report.exists() and not {"trials", "derived"} <= remembered(report).keys():
        raise ConfigError(
            f"{report}, where the report would go, is there already, and was not written by tunesmith tune; "
            "name another --output"
        )


def write_run_file(result: Result, run: Path, overrides: list[str], file: Path) -> None:
    """Write the run file with its overrides and the best settings; its first lines give the reason.

    Raises:
        StorageError: it cannot be written.
    """
    config = load_run(run, overrides)
    tuned = with_values(without_tuned(config), result.written)
    given = settings(tuned, given_only=True)
    why = [f"{FIRST_LINE}: {run.name} as it was {result.reason}.", *map(told, result.brought)]
    header = "\n".join(f"# {line}" if not line.startswith("#") else line for line in why)
    text = config_text(Resolved(tuned, given, ()), lambda value: value)
    with (
        boundary(StorageError, f"cannot write {file}", OSError),
        open(file, "w", encoding="utf-8", opener=open_private) as out,
    ):
        out.write(f"{header}\n{text}")
