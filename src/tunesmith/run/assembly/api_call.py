"""Turns a call of the Python API into settings: objects become references, rows a file in the run
directory."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from inspect import isclass, isfunction
from numbers import Integral, Real
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.config.objects import PROGRAM, handed_over
from tunesmith.config.schema import Source
from tunesmith.errors import ConfigError, DataError, StorageError, UserError, boundary, shortened
from tunesmith.records.garbage import of_a_run
from tunesmith.records.plain import DEEPEST, LARGEST_INTEGER, plain
from tunesmith.records.run_dir import (
    LATEST,
    LOCK,
    check_run_dir,
    holds_run,
    numbered_directory,
    point,
)
from tunesmith.run.assembly.checking import resumes
from tunesmith.run.assembly.opening import Caller
from tunesmith.run.loop.callbacks import Callbacks
from tunesmith.run.offline.lines import write_whole

Rows = Iterable[Mapping[str, Any]]
Data = str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]] | Rows
R = TypeVar("R")

_CODE = {"reward": ("reward.functions",), "environment": ("environment.path", "environment.tools")}
"""The settings that may hold objects, by section."""


class ApiCall:
    """One call of the Python API."""

    def __init__(
        self,
        command: str,
        model: str | Path,
        train: Data,
        held_out: Data | None,
        given: Mapping[str, object],
        settings: Mapping[str, object],
    ) -> None:
        self._command = command
        self._objects: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}
        self._rows: dict[str, Rows] = {}
        self._settings = _flat({"model.path": model, **given, **settings})
        for key, data in (("train", train), ("eval", held_out)):
            if data is not None:
                self._settings[f"data.{key}"] = self._source(key, data)
        if "data.map" in self._settings:
            self._settings["data.map"] = self._reference("data.map", self._settings["data.map"])
        for section, keys in _CODE.items():
            self._refer_to_code(section, keys)

    def run(self, start: Callable[..., R], callbacks: Callbacks) -> R:
        """Start a run with these settings, in its directory."""
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
        with of_a_run(), handed_over(self._objects), self._directory():
            settings = list(self._settings.items())
            return start(None, settings, caller=Caller(self._reasons, callbacks))

    def _source(self, key: str, data: object) -> Any:
        """Data as a setting; rows are written later, into the run's directory."""
        if isinstance(data, str | Path) or _is_source(data):
            return data
        if isinstance(data, dict):
            if type(data).__module__.startswith("datasets"):
                raise ConfigError(
                    f"{key} has the splits {', '.join(data)}; give one of them, as in data['train']"
                )
            raise ConfigError(
                f"the keyword {key} is the data: a path, rows, or a table with a path. Settings of "
                f"[{key}] are written {key}__{next(iter(data), 'key')}=..."
            )
        if isinstance(data, list | tuple) and data and all(map(_is_source, data)):
            return data
        if not isinstance(data, Iterable):
            raise ConfigError(
                f"{key} is of type {type(data).__name__}; give a path, a Dataset or a list of dicts"
            )
        frame = type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns")
        self._rows[key] = methodcaller("to_dict", "records")(data) if frame else data
        return ""

    @contextmanager
    def _directory(self) -> Generator[None]:
        """Create the run's directory with the rows; removed again if the run is refused before it
        begins."""
        if not self._rows:
            yield
            return
        run_dir = self._settings.get("run_dir")
        before = None
        if run_dir is None:
            directory = numbered_directory(Path("runs").absolute(), self._command)
            new = True
            self._settings["run_dir"] = directory
        else:
            directory = Path(run_dir).expanduser().absolute()
            new = not directory.exists()
            resume = self._settings.get("checkpoint.resume", False)
            resume = resume if resume in (True, False, "auto") else Path(resume)
            check_run_dir(directory, resumes(self._command, resume, directory))
        files = {key: directory / "data" / f"{key}.jsonl" for key in self._rows}
        others = (
            []
            if (directory / LOCK).exists()
            else [str(f) for f in files.values() if os.path.lexists(f)]
        )
        if others:
            raise ConfigError(
                f"{', '.join(others)} is there already, and no run wrote it; choose another run_dir"
            )
        try:
            for key, rows in self._rows.items():
                file = files[key]
                with boundary(StorageError, f"cannot write {file}", OSError):
                    file.parent.mkdir(parents=True, exist_ok=True)
                if not write_whole(file, _checked(key, rows)):
                    raise DataError(f"{key} has no rows")
                self._settings[f"data.{key}"] = file
            if run_dir is None:
                latest = directory.parent / LATEST
                before = latest.readlink() if latest.is_symlink() else None
                point(latest, directory)
            yield
        except UserError:
            if not (directory / LOCK).exists():
                for file in files.values():
                    file.unlink(missing_ok=True)
            if new and not holds_run(directory):
                shutil.rmtree(directory, ignore_errors=True)
                if run_dir is None:
                    _point_back(directory.parent / LATEST, before)
            raise

    def _refer_to_code(self, section: str, keys: Sequence[str]) -> None:
        """Replace the functions and classes of a section by references."""
        before = len(self._objects)
        for key in keys:
            if key in self._settings:
                self._settings[key] = self._reference(key, self._settings[key])
        if len(self._objects) == before:
            return
        isolation = f"{section}.isolation"
        if self._settings.get(isolation, "thread") != "thread":
            raise ConfigError(
                f"{isolation} = '{self._settings[isolation]}' needs functions that another process "
                f"can import, and '{list(self._objects)[-1].rpartition(':')[2]}' exists in this "
                f"program only. Move it into a module, or leave {isolation} out"
            )
        if isolation not in self._settings:
            self._settings[isolation] = "thread"
            self._reasons[isolation] = "its functions are objects of this program"

    def _reference(self, key: str, value: object) -> Any:
        """A reference to a function or class, which may be in a list or mapping."""
        if isinstance(value, str):
            return value
        if isinstance(value, Mapping):
            return {name: self._reference(key, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._reference(key, item) for item in value]
        if not callable(value):
            raise ConfigError(
                f"{key}: {value!r} is not a function; give one, 'file.py:function' or a built-in "
                "name"
            )
        name = getattr(value, "__name__", type(value).__name__)
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        # Another process can import it from its module, unless that is the program's script, which
        # would run again.
        defined = (isfunction(value) or isclass(value)) and getattr(module, name, None) is value
        file = getattr(module, "__file__", None)
        if module and file and defined and module.__name__ != "__main__":
            return f"{module.__name__}:{name}" if module.__package__ else f"{file}:{name}"
        name = re.sub(r"\W", "", name) or "function"
        names = [
            f"{PROGRAM}:{name}{f'_{number}' if number > 1 else ''}"
            for number in range(1, len(self._objects) + 2)
        ]
        reference = next(one for one in names if self._objects.get(one, value) is value)
        self._objects[reference] = value
        return reference


def _point_back(link: Path, target: Path | None) -> None:
    """Point ``runs/latest`` to its previous target, if it had one."""
    if target is not None:
        point(link, link.parent / target)
    elif link.is_symlink():
        link.unlink()


def _flat(settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings by dotted key, without those that are None."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        key = name.replace("__", ".")
        if value is None:
            continue
        if isinstance(value, Mapping) and "." not in key:
            flat |= {f"{key}.{inner.replace('__', '.')}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if value is not None}


def _is_source(value: object) -> bool:
    """Whether a value names data: a path, or a table of ``[data]`` with one."""
    if isinstance(value, str | Path):
        return True
    return type(value) is dict and "path" in value and value.keys() <= Source.model_fields.keys()


def _checked(key: str, rows: Iterable[object]) -> Iterator[dict[str, Any]]:
    """Rows as they are stored in a file of JSON lines.

    Raises:
        DataError: one is not a row, or has a value that JSON cannot hold; the message has its
            number and column.
    """
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of {key} is of type {type(row).__name__}; each row is a dict of "
                "columns"
            )
        line: dict[str, Any] = {}
        for column, value in row.items():
            try:
                line |= _json({column: value})
            except (ValueError, OverflowError) as error:
                raise DataError(
                    f"row {number} of {key}, column {column!r}: {error}, which JSON does not keep. "
                    "Write text, finite numbers, True, False, None, dates, lists, or dicts whose "
                    "keys are text; or leave the column out"
                ) from error
        yield line


def _json(value: object, depth: int = 0) -> Any:
    """A value as JSON: dates and times as ISO text, arrays and tensors as lists.

    Raises:
        ValueError, OverflowError: JSON has no such value.
    """
    if value is None or (isinstance(value, int | float) and abs(value) < LARGEST_INTEGER):
        return value
    array: Any = value
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    match value:
        case str():
            value.encode()  # UTF-8 cannot hold half a character (a lone surrogate)
            return str.__str__(value)
        case date() | time() if value == value:  # pandas' NaT does not equal itself
            return value.isoformat()
        case _ if kind == "M" and (array == array).all():
            return array.astype(str).tolist()  # otherwise nanoseconds as whole numbers
        case Integral() if kind != "m" and abs(number := int(value)) < LARGEST_INTEGER:
            return number
        case Real() | Decimal() if kind != "m" and math.isfinite(number := float(value)):
            return number
        case list() | tuple() if depth < DEEPEST:
            return [_json(item, depth + 1) for item in value]
        case Mapping() if depth < DEEPEST:
            others = [name for name in value if not isinstance(name, str)]
            if others:
                raise ValueError(f"the key {others[0]!r} is of type {type(others[0]).__name__}")
            return {_json(name): _json(item, depth + 1) for name, item in value.items()}
        case list() | tuple() | Mapping():
            raise ValueError(f"it has more than {DEEPEST - 1} levels")
        case _ if depth < DEEPEST and kind not in ("M", "m") and hasattr(value, "tolist"):
            return _json(array.tolist(), depth + 1)
        case _:
            raise ValueError(f"{shortened(str(plain(value)))} is of type {type(value).__name__}")
