"""Adding to an error the origins of the settings it names: lines of the run file or overrides."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunesmith.config.load import read_tree
from tunesmith.config.reading.files import locate_files
from tunesmith.config.reading.problems import KeyPath, Origins, dotted, leaves
from tunesmith.errors import ConfigError, DataError, UserError

_KEY = re.compile(r"[a-z_]\w*(?:\.\w+)*")
_WORD = re.compile(r"\w+")
_QUOTED = re.compile(r"'([^'\n]{3,})'")
_MOST = 4
"""Maximum number of places in one message."""


@contextmanager
def placed(path: Path | None, overrides: Sequence[str]) -> Generator[None]:
    """Prefix each error about settings with the places of the settings it names.

    An error names a setting by its dotted key or by its value in single quotes. The run file is reread only after an
    error.
    """
    try:
        yield
    except UserError as error:
        if not error.places_known and not isinstance(error, DataError):  # a DataError names its line
            _add_places(error, path, overrides)
        raise


def _add_places(error: UserError, path: Path | None, overrides: Sequence[str]) -> None:
    try:
        data, origins = read_tree(path, overrides)
        locate_files(data, path.parent if path else None, origins.is_override)
    except ConfigError:  # the file has been changed or removed since
        return
    given = {path: value for _, path, value in leaves(data)}
    error.args = tuple(_with_places(str(text), given, origins) for text in error.args)
    error.places_known = True


def _with_places(text: str, given: Mapping[KeyPath, Any], origins: Origins) -> str:
    paths = {path[:length] for path in given for length in range(2, len(path) + 1)} | {("run_dir",)}
    keys = {dotted(path): path for path in paths}
    named = [keys[word] for word in _KEY.findall(text) if word in keys]
    values = set(_QUOTED.findall(text))
    unnamed = [] if named else [path for path, value in given.items() if isinstance(value, str) and value in values]
    sections = set(_WORD.findall(text))
    unnamed = [path for path in unnamed if path[0] in sections] or unnamed  # several keys may have the value
    places = dict.fromkeys(place for path in (*named, *unnamed) if (place := origins.place(path))[1])
    if not places:
        return text
    told = [place for _, place in sorted(list(places)[:_MOST])]
    lines = [place.removeprefix("line ") for place in told if place.startswith("line ")]
    if len(lines) > 1:
        told[: len(lines)] = [f"lines {', '.join(lines[:-1])} and {lines[-1]}"]
    where = " and ".join(told)
    if unnamed:
        where += f" ({dotted(unnamed[0])})"
    return f"{f'{origins.file}, ' if origins.file and 'line' in where else ''}{where}: {text}"
