"""Adding to an error the origins of the settings at fault: lines of the run file or overrides."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tunesmith.config.load import read_tree
from tunesmith.config.reading.overriding import Override
from tunesmith.config.reading.problems import OVERRIDE, KeyPath, Origins, dotted, leaves
from tunesmith.errors import ConfigError, DataError, Problem, UserError

_MOST = 4
"""Maximum number of places in one message."""


@contextmanager
def placed(path: Path | None, overrides: Sequence[Override]) -> Generator[None]:
    """Prefix each error about settings with the places of its keys.

    The run file is reread only after an error.
    """
    try:
        yield
    except UserError as error:
        if not error.places_known and not isinstance(
            error, DataError
        ):  # a DataError names its line
            _add_places(error, path, overrides)
        raise


def _add_places(error: UserError, path: Path | None, overrides: Sequence[Override]) -> None:
    try:
        data, origins = read_tree(path, overrides)
    except ConfigError:  # the file has been changed or removed since
        return
    given = [path for _, path, _ in leaves(data)]
    paths = {
        dotted(path[:length]): path[:length] for path in given for length in range(1, len(path) + 1)
    }
    error.args = tuple(
        _with_places(problem, error.key_around, paths, origins) for problem in error.problems
    )
    error.places_known = True


def _with_places(
    problem: Problem, around: str, paths: Mapping[str, KeyPath], origins: Origins
) -> Problem:
    keys = problem.keys or ((around,) if around else ())
    places = {origins.place(paths[key]) for key in keys if key in paths}
    told = sorted(place for place in places if place[1])[:_MOST]
    if not told:
        return problem
    lines = [text.removeprefix("line ") for number, text in told if number < OVERRIDE]
    listed = [f"line {n}" for n in lines]
    if len(lines) > 1:
        listed = [f"lines {', '.join(lines[:-1])} and {lines[-1]}"]
    listed += [text for number, text in told if number == OVERRIDE]
    where = " and ".join(listed) + ("" if problem.keys else f" ({around})")
    file = f"{origins.file}, " if origins.file and lines else ""
    return replace(problem, keys=keys, place=f"{file}{where}")
