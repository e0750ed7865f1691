"""What becomes of every setting in the scripts and configurations of other frameworks:
``python -m tests.support.foreign_sources FOLDER...`` reads all below each folder, such as the examples of
a checkout of TRL.

A file that starts and configures no training is counted, and left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tunesmith.errors import ConfigError
from tunesmith.guide.migrate.convert import convert
from tunesmith.guide.migrate.read import read_source
from tunesmith.guide.migrate.settle import settle

SUFFIXES = (".sh", ".slurm", ".py", ".ipynb", ".yaml", ".yml", ".json")


def count(folder: Path) -> Counter[str]:
    """Of each kind, how many settings there are; ``launches``, of them those ``refused`` and those
    whose run file is ``invalid``; other ``files``.
    """
    found: Counter[str] = Counter()
    for path in sorted(
        path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()
    ):
        try:
            launches = read_source(path, {})
        except ConfigError:
            found["files without training"] += 1
            continue
        found["files"] += 1
        for launch in launches:
            found["launches"] += 1
            try:
                migration = convert(launch)
            except ConfigError as error:  # it trains on what it evaluates on
                found["refused"] += 1
                print(f"  {path}: {error}")
                continue
            found.update(row.kind for row in migration.rows)
            for row in migration.rows:
                if row.kind == "unknown":
                    print(f"  {path}, line {row.given.line}: {row.given.name}")
            found["invalid"] += any(problem.kind != "machine" for problem in settle(migration))
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, dict(count(Path(argument))))
