"""``data.map``: the user's function that changes each row before its format is detected."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunesmith.config.objects import load_function
from tunesmith.errors import ConfigError, about
from tunesmith.learn.data.sources import BadLine, Rows, SourceRow

MapRow = Callable[[dict[str, Any]], Any]


@about("data.map")
def load_map(reference: str) -> MapRow:
    """The function of ``data.map``.

    Raises:
        ConfigError: there is none, it is a coroutine, or it does not take one row.
    """
    function = load_function(reference, Path.cwd())
    problem = ""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        problem = "is a coroutine or a generator; it must return the row's columns."
    try:
        inspect.signature(function).bind({})
    except TypeError:
        problem = problem or "must take one argument, a row as a dict of its columns."
    if problem:
        raise ConfigError(f"data.map = '{reference}' {problem}", keys=("data.map",))
    return function


def map_rows(rows: Rows, reference: str) -> Iterator[SourceRow | BadLine | None]:
    """The rows with the columns that the function returns; None for a row that it leaves out.

    A returned column is added or replaces the row's; the other columns stay. A call that fails
    makes a bad line.
    """
    function = load_map(reference)
    for row in rows:
        yield row if isinstance(row, BadLine) else _map_row(row, function, reference)


def _map_row(row: SourceRow, function: MapRow, reference: str) -> SourceRow | BadLine | None:
    try:
        result = function(dict(row.columns))
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        return row.bad(f"data.map = '{reference}' raised {type(error).__name__}: {error}{place}")
    if result is None:
        return None
    columns: dict[Any, Any] = dict(result) if isinstance(result, Mapping) else {None: result}
    if not all(isinstance(name, str) for name in columns):
        returned = f"data.map = '{reference}' returned {type(result).__name__}"
        return row.bad(f"{returned}; it must return a dict of columns, or None to drop the row")
    return SourceRow(row.file, row.where, {**row.columns, **columns})
