"""Rows out of files and Hugging Face data sets, each with the place it came from.

JSON Lines, JSON and CSV are read here, so that an error names the real line. Parquet, saved data sets and
hub names go through ``pyarrow`` and ``datasets``, imported only when such a source is read.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tunesmith.config.files import is_hub_name
from tunesmith.config.schema import Source
from tunesmith.errors import ConfigError, DataError, boundary, nearest

Columns = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of data. ``line`` counts from 1: lines of a text file, rows of a table."""

    file: str
    line: int
    columns: Columns

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def bad(self, reason: str) -> BadLine:
        return BadLine(self.where, reason)


class BadLine(DataError):
    """A line that cannot be used: where it stands and why. Readers yield it, the caller decides."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


Rows = Iterator[Row | BadLine]

SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "eval"),
}


def read(source: Source) -> Rows:
    """Every line of ``source`` in its own order: a ``Row``, or a ``BadLine`` saying what is wrong with it.

    Raises:
        DataError: the source does not exist, cannot be read at all, or is damaged beyond one line.
        ConfigError: ``split`` or ``subset`` is set for a plain file, where it means nothing.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            yield from _read_saved(path, source)
        else:
            _refuse_subset(source)
            for file in directory_files(path, source.split):
                yield from READERS[file.suffix.lower()](file)
    elif path.exists():
        _refuse_subset(source)
        if source.split != "train":
            raise ConfigError(f"{path}: a plain file has no split '{source.split}'; leave 'split' out.")
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            raise DataError(f"{path}: unknown kind of file '{path.suffix}'. Valid: {', '.join(READERS)}.")
        yield from reader(path)
    elif not is_hub_name(source.path, "datasets"):
        raise DataError(f"data file not found: {path}.{_neighbours(path)}")
    else:
        yield from _read_hub(source)


def directory_files(directory: Path, split: str) -> list[Path]:
    """The data files of a directory that belong to ``split``.

    Where files are named after splits (``train.jsonl``, ``data/test-00000-of-00001.parquet``), only those
    of the wanted one are taken: a test set is never trained on because it lies beside the training set.
    """
    files = sorted(
        p
        for p in directory.rglob("*")
        if p.is_file() and p.suffix.lower() in READERS and not p.relative_to(directory).parts[0].startswith(".")
    )
    if not files:
        raise DataError(f"{directory}: no data file in this directory. Valid: {', '.join(READERS)}.")
    named = {p: _split_of(p.relative_to(directory)) for p in files}
    if not any(named.values()):
        if split != "train":
            raise DataError(f"{directory}: no file here is named after a split, so there is no '{split}'.")
        return files
    wanted = next((name for name, words in SPLITS.items() if split in words), split)
    taken = [p for p in files if named[p] == wanted]
    if not taken:
        found = sorted({name for name in named.values() if name})
        raise DataError(f"{directory}: no file of the split '{split}'. Found: {', '.join(found)}.")
    return taken


def _split_of(path: Path) -> str | None:
    for part in reversed((*path.parent.parts, path.stem)):
        word = part.lower().replace("_", "-").replace(".", "-").split("-")[0]
        for name, words in SPLITS.items():
            if word in words:
                return name
    return None


def _refuse_subset(source: Source) -> None:
    if source.subset is not None:
        raise ConfigError(f"{source.path}: 'subset' is for data sets of the hub; leave it out for files.")


def on_hub(source: Source) -> bool:
    """Whether a source is looked for on the hub."""
    return is_hub_name(source.path, "datasets") and not Path(source.path).exists()


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The directory {path.parent} does not exist either."
    names = [p.name for p in path.parent.iterdir() if p.suffix.lower() in READERS or p.is_dir()]
    return nearest(path.name, names[:200]) if len(names) < 200 else ""


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; write null or a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> Columns:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key '{twice}' stands twice in one object")
    return made


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_unique_keys)


def read_jsonl(path: Path) -> Rows:
    """One JSON object per line, UTF-8. Blank lines are bad lines."""
    with boundary(DataError, f"cannot read {path}", OSError), path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            found = _parse_line(raw, first=number == 1)
            if isinstance(found, str):
                yield BadLine(f"{path}:{number}", found)
            else:
                yield Row(str(path), number, found)


def _parse_line(raw: bytes, first: bool) -> Columns | str:
    """The object on one line, or the reason why there is none."""
    try:
        text = raw.decode("utf-8-sig" if first else "utf-8").strip()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start} of the line ({error.reason}); save the file as UTF-8"
    if not text:
        return "blank line"
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if not raw.endswith(b"\n"):
            return f"the last line is cut off at column {error.colno} ({error.msg})"
        return f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"holds {_kind(value)}, needs a JSON object with named columns"
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {"list": "a list", "str": "a string", "int": "a number", "float": "a number", "bool": "a boolean"}
    return names.get(type(value).__name__, type(value).__name__)


def _decode_file(path: Path) -> str:
    with boundary(DataError, f"cannot read {path}", OSError):
        raw = path.read_bytes()
    try:
        if (nul := raw.find(0)) >= 0:
            raise UnicodeDecodeError("utf-8", raw, nul, nul + 1, "a NUL character")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason}); save the file as UTF-8.") from error


@dataclass(slots=True)
class _Scanner:
    """Walks through a JSON text, so that each item of a list keeps its line."""

    path: Path
    text: str
    at: int = 0
    line: int = 1

    def move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def peek(self) -> str:
        end = self.at
        while end < len(self.text) and self.text[end] in " \t\r\n":
            end += 1
        self.move(end)
        return self.text[end : end + 1]

    def take(self, expected: str) -> None:
        if not self.took(expected):
            found = self.peek()
            self.fail(f"expected '{expected}', found " + (f"'{found}'" if found else "the end of the file"))

    def took(self, wanted: str) -> bool:
        """Whether ``wanted`` came next; then it is behind."""
        found = self.peek() == wanted
        self.move(self.at + found)
        return found

    def value(self) -> tuple[Any, int]:
        """The next value, and the line on which it starts."""
        self.peek()
        line = self.line
        try:
            value, end = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            self.move(error.pos)
            cut = " (the file may be cut off)" if error.pos >= len(self.text.rstrip()) else ""
            self.fail(f"not JSON: {error.msg}{cut}")
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}")
        self.move(end)
        return value, line

    def fail(self, reason: str) -> NoReturn:
        raise DataError(f"{self.path}:{self.line}: {reason}.")


def read_json(path: Path) -> Rows:
    """A list of objects, or an object whose ``data`` is one. Damage in a JSON file stops the reading."""
    scan = _Scanner(path, _decode_file(path))
    opening = scan.peek()
    if opening == "":
        return
    if opening == "{":
        _enter_data(scan)
    elif opening != "[":
        scan.fail('holds neither a list of objects nor {"data": [...]}')
    yield from _items(scan)
    if opening == "{":
        while scan.took(","):
            scan.value()
            scan.take(":")
            scan.value()
        scan.take("}")
    if scan.peek():
        scan.fail("something follows the end of the JSON value")


def _enter_data(scan: _Scanner) -> None:
    """Move to the list under ``data`` in an object."""
    scan.take("{")
    keys: list[str] = []
    while not scan.took("}"):
        key, _ = scan.value()
        keys.append(str(key))
        scan.take(":")
        if key == "data" and scan.peek() == "[":
            return
        scan.value()
        scan.took(",")
    if scan.peek() == "{":
        scan.fail("this is one JSON object per line; name the file .jsonl")
    scan.fail(f"an object without a list under 'data' (found: {', '.join(keys) or 'nothing'})")


def _items(scan: _Scanner) -> Rows:
    scan.take("[")
    while not scan.took("]"):
        value, line = scan.value()
        if isinstance(value, dict):
            yield Row(str(scan.path), line, value)
        else:
            yield BadLine(f"{scan.path}:{line}", f"holds {_kind(value)}, needs a JSON object with named columns")
        if scan.peek() != "]":
            scan.take(",")


def read_csv(path: Path) -> Rows:
    """Comma-separated, the column names on the first line. Every value is text."""
    reader = csv.reader(io.StringIO(_decode_file(path), newline=""), strict=True)
    csv.field_size_limit(1 << 30)
    with boundary(DataError, f"{path}:1: not CSV", csv.Error):
        header = next(reader, None)
    if header is None:
        return
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}:1: the column '{repeated[0]}' stands twice in the header.")
    while True:
        line, reason = reader.line_num + 1, "blank line"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            fields, reason = [], f"not CSV: {error}"
        if fields is None:
            return
        if len(fields) == len(header) > 0:
            yield Row(str(path), line, dict(zip(header, fields, strict=True)))
            continue
        if fields:
            reason = f"{len(fields)} fields where the header has {len(header)}"
        # A quote that is not closed takes the lines behind it along: all of them are named.
        to = f" (lines {line} to {reader.line_num})" if reader.line_num > line else ""
        yield BadLine(f"{path}:{line}", reason + to)


def read_parquet(path: Path) -> Rows:
    """Rows of a Parquet file; ``line`` is the row's number from 1."""
    import pyarrow.parquet as parquet

    line = 0
    with boundary(DataError, f"cannot read {path} as Parquet", Exception), parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for columns in batch.to_pylist():
                line += 1
                yield _row_of_table(str(path), line, columns)


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def _read_saved(path: Path, source: Source) -> Rows:
    _refuse_subset(source)
    import datasets

    with boundary(DataError, f"cannot load the saved data set {path}", Exception):
        loaded: Any = datasets.load_from_disk(str(path))
    if isinstance(loaded, dict):
        if source.split not in loaded:
            raise DataError(f"{path}: no split '{source.split}'.{nearest(source.split, loaded)}")
        loaded = loaded[source.split]
    elif source.split != "train":
        raise ConfigError(f"{path}: a single saved data set has no split '{source.split}'; leave it out.")
    yield from _numbered(str(path), loaded)


def _read_hub(source: Source) -> Rows:
    import datasets

    what = f"'{source.path}' is no file here, and loading it as a data set of the hub failed"
    with boundary(DataError, what, Exception):
        loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
    yield from _numbered(f"{source.path}[{source.split}]", loaded)


def _numbered(name: str, loaded: Any) -> Rows:
    with boundary(DataError, f"cannot read {name}", Exception):  # a damaged file of a table is met where it is read
        yield from (_row_of_table(name, line, columns) for line, columns in enumerate(loaded, 1))


def _row_of_table(name: str, line: int, columns: Mapping[str, Any]) -> Row:
    """A table has one type for all of its rows: a key that a message or a tool does not have is null there."""
    made = {k: _without_null(v) if k == "tools" or _is_conversation(v) else v for k, v in columns.items()}
    return Row(name, line, made)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and not m.keys().isdisjoint(("role", "from")) for m in value
    )


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list) else value
