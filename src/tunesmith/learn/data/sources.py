"""Rows from files and Hugging Face data sets, each with its location: file and line, row or item
number.

JSON Lines, JSON and CSV are read here. ``pyarrow`` and ``datasets`` read Parquet, saved data sets
and data sets on the hub; they are imported only for these sources.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tunesmith.config.reading.files import is_hub_name
from tunesmith.config.reading.packages import HUB, PACKAGES, PackageName, package_name
from tunesmith.config.schema import Source
from tunesmith.errors import ConfigError, DataError, boundary, nearest
from tunesmith.learn.data.splits import Cut, parse_split
from tunesmith.learn.packages.adapter import Foreign, adapter
from tunesmith.records.foreign import json_or

Columns = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A line of a text file, a row of a table or an item of a JSON list."""

    file: str
    where: str
    """``file:number``, counted from 1; ``file, item number`` in a JSON list."""
    columns: Columns

    def bad(self, reason: str) -> BadLine:
        return BadLine(self.where, reason)

    def scalar(self, name: str) -> object:
        """The value of a column, None without it. Where a file's values are all text, as in CSV, a
        text that says a number, true or false is read as that, and an empty one as None."""
        value = self.columns.get(name)
        if not isinstance(value, str):
            return value
        text = value.strip().lower()
        return json_or(text, value) if text else None


class BadLine(DataError):
    """An unusable line: its location and the reason. Readers yield it, and the caller may raise
    it."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


Rows = Iterator[SourceRow | BadLine]

SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "eval"),
}
_SPLIT_OF_WORD = {word: name for name, words in SPLITS.items() for word in words}


def read(source: Source) -> Rows:
    """Every line of ``source`` in order: a ``Row``, or a ``BadLine`` with the reason.

    Raises:
        DataError: the source does not exist, cannot be read at all, or is damaged beyond one line.
        ConfigError: a key is set for a source that has no use for it.
    """
    rows = _read(source)
    return rows if source.columns is None else _renamed(rows, source.columns)


def _renamed(rows: Rows, columns: Mapping[str, str]) -> Rows:
    """The rows with columns under new names; a row without one of them is a bad line."""
    for row in rows:
        if isinstance(row, BadLine):
            yield row
            continue
        missing = next((old for old in columns.values() if old not in row.columns), None)
        if missing is not None:
            hint = nearest(missing, row.columns)
            yield row.bad(f"there is no column '{missing}' (columns of the source).{hint}")
            continue
        kept = {name: v for name, v in row.columns.items() if name not in columns.values()}
        renamed = {new: row.columns[old] for new, old in columns.items()}
        yield SourceRow(row.file, row.where, {**kept, **renamed})


def _read(source: Source) -> Rows:
    path = Path(source.path).expanduser()
    named = package_name(source.path) if not path.exists() else None
    at_hub = on_hub(source)
    _check_keys(source, at_hub=at_hub, package=named is not None and not at_hub)
    split, cut = parse_split(named.split if named and named.split else source.split)
    if at_hub:
        yield from _read_hub(source, named.name if named else source.path, split, cut)
    elif named:
        yield from _read_package(source, named, split, cut)
    elif not path.exists():
        raise DataError(f"data file not found: {path}.{_neighbours(path)}")
    elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _read_saved(path, split, cut)
    elif cut is None:
        yield from _read_files(path, split)
    else:
        rows = list(_read_files(path, split))
        yield from rows[cut.rows(len(rows))]


def _check_keys(source: Source, *, at_hub: bool, package: bool) -> None:
    """Refuse keys that a source of another kind has."""
    named = package_name(source.path)
    if named and named.split and source.split != "train":
        raise ConfigError(f"{source.path} names its split; leave 'split' out.")
    hub = {"subset": None, "revision": None, "stream": False}
    wrong = [key for key, off in hub.items() if not at_hub and getattr(source, key) != off]
    if wrong:
        why = f"{source.path}: '{wrong[0]}' is for data sets of the hub; leave it out."
        raise ConfigError(why)
    if source.options is not None and not package:
        why = f"{source.path}: 'options' are for names of packages; leave them out."
        raise ConfigError(why)


def _read_files(path: Path, split: str) -> Rows:
    """The rows of a file, or of a directory's files of a split."""
    if path.is_dir():
        for file in directory_files(path, split):
            yield from READERS[file.suffix.lower()](file)
    elif split != "train":
        raise ConfigError(f"{path}: a plain file has no split '{split}'; leave 'split' out.")
    elif path.suffix.lower() not in READERS:
        valid = ", ".join(READERS)
        raise DataError(f"{path}: unknown kind of file '{path.suffix}'. Valid: {valid}.")
    else:
        yield from READERS[path.suffix.lower()](path)


def on_hub(source: Source) -> bool:
    """Whether a source is a data set on the hub."""
    named = package_name(source.path)
    is_name = is_hub_name(source.path, "datasets") or (named is not None and named.package == HUB)
    return is_name and not Path(source.path).exists()


def directory_files(directory: Path, split: str) -> list[Path]:
    """The data files of a directory that belong to ``split``.

    If files are named after splits (``train.jsonl``, ``data/test-00000-of-00001.parquet``), only
    those of the requested split are read, so a test set in the same directory is never trained on.
    """
    unlisted = f"{directory}: its files cannot be listed; are they written meanwhile?"
    with boundary(DataError, unlisted, OSError):
        paths = sorted(directory.rglob("*"))
        paths = [p for p in paths if p.is_file() and p.suffix.lower() in READERS]
    inner = {path: path.relative_to(directory) for path in paths}
    split_of = {p: _split_of(i) for p, i in inner.items() if not i.parts[0].startswith(".")}
    if not split_of:
        raise DataError(f"{directory}: no data file in it. Valid: {', '.join(READERS)}.")
    if not any(split_of.values()) and split == "train":
        return list(split_of)
    if not any(split_of.values()):
        unnamed = f"{directory}: no file here is named after a split"
        raise DataError(f"{unnamed}, so there is no '{split}'.")
    wanted = _SPLIT_OF_WORD.get(split, split)
    chosen = [p for p, name in split_of.items() if name == wanted]
    if not chosen:
        known = sorted({name for name in split_of.values() if name})
        raise DataError(f"{directory}: no file of the split '{split}'. Found: {', '.join(known)}.")
    return chosen


def _split_of(path: Path) -> str | None:
    parts = reversed((*path.parent.parts, path.stem))
    words = (re.split("[-_.]", part.lower())[0] for part in parts)
    return next((_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD), None)


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The directory {path.parent} does not exist either."
    names = [p.name for p in path.parent.iterdir() if p.suffix.lower() in READERS or p.is_dir()]
    return nearest(path.name, names[:200]) if len(names) < 200 else ""


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; write null or a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> Columns:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key '{key}' stands twice in one object")
    return columns


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_unique_keys)


_WHOLE = "; a .jsonl file has one object per line: name a file with one JSON list .json"


def read_jsonl(path: Path) -> Rows:
    """One JSON object per line, UTF-8. Blank lines are skipped."""
    with boundary(DataError, f"cannot read {path}", OSError), path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            row = SourceRow(str(path), f"{path}:{number}", {})
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield _row_of_object(row, _DECODER.decode(text))
            except UnicodeDecodeError as error:
                byte = f"not UTF-8 at byte {error.start} of the line"
                yield row.bad(f"{byte} ({error.reason}); save the file as UTF-8")
            except json.JSONDecodeError as error:
                start = "not JSON:" if raw.endswith(b"\n") else "the last line is cut off:"
                whole = _WHOLE if number == 1 and raw.strip() in (b"[", b"{") else ""
                what = error.msg.removesuffix(" at")
                yield row.bad(f"{start} {what} at column {error.colno}{whole}")
            except (ValueError, RecursionError) as error:
                yield row.bad(f"not JSON: {error}")


def _row_of_object(row: SourceRow, value: object) -> SourceRow | BadLine:
    if isinstance(value, dict):
        return SourceRow(row.file, row.where, value)
    whole = _WHOLE if isinstance(value, list) and row.where.endswith(":1") else ""
    return row.bad(f"holds {_kind(value)}, needs a JSON object with named columns{whole}")


def _kind(value: object) -> str:
    names = {"NoneType": "null", "list": "a list", "str": "a string", "bool": "a boolean"}
    return names.get(type(value).__name__, "a number")


def _decode_file(path: Path) -> str:
    with boundary(DataError, f"cannot read {path}", OSError):
        raw = path.read_bytes()
    try:
        nul = raw.find(0)
        if nul >= 0:
            raise UnicodeDecodeError("utf-8", raw, nul, nul + 1, "a NUL character")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason}); save it as UTF-8.") from error


def read_json(path: Path) -> Rows:
    """A list of objects, or an object with a list under ``data``; a damaged file is refused as a
    whole."""
    text = _decode_file(path).rstrip()
    if not text:
        return
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            raise DataError(f"{path}: one JSON object per line; name the file .jsonl.") from error
        cut = " (the file may be cut off)" if error.pos >= len(text) else ""
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}{cut}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}.") from error
    items = value
    kind = _kind(value)
    if isinstance(value, dict):
        items = value.get("data")
        kind = f"an object with the keys {', '.join(value) or 'none'}"
    if not isinstance(items, list):
        raise DataError(f'{path}: holds {kind}; needs a list of objects or {{"data": [...]}}.')
    for number, item in enumerate(items, 1):
        yield _row_of_object(SourceRow(str(path), f"{path}, item {number}", {}), item)


def read_csv(path: Path) -> Rows:
    """Comma-separated values with column names on the first line; every value is text. Lines
    without any value are skipped: spreadsheets write commas for empty rows."""
    reader = csv.reader(io.StringIO(_decode_file(path), newline=""), strict=True)
    csv.field_size_limit(1 << 30)
    with boundary(DataError, f"{path}:1: not CSV", csv.Error):
        header = next(filter(None, reader), None)
    if header is None:
        return
    at = f"{path}:{reader.line_num}"
    mark = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), "")
    if mark:
        raise DataError(f"{at}: columns are separated by {mark!r}; save it with commas.")
    ((name, times),) = Counter(header).most_common(1)
    if times > 1:
        raise DataError(f"{at}: the column '{name}' stands twice in the header.")
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"not CSV: {error}"
        else:
            if len(fields) != 1 and not any(map(str.strip, fields)):
                continue
            if len(fields) == len(header):
                columns = dict(zip(header, fields, strict=True))
                yield SourceRow(str(path), f"{path}:{line}", columns)
                continue
            reason = f"{len(fields)} fields where the header has {len(header)}"
        # An unclosed quote swallows the lines after it, so name them all.
        to = f" (lines {line} to {reader.line_num})" if reader.line_num > line else ""
        yield BadLine(f"{path}:{line}", reason + to)


def read_parquet(path: Path) -> Rows:
    """Rows of a Parquet file."""
    import pyarrow.parquet as parquet

    unreadable = boundary(DataError, f"cannot read {path} as Parquet", Exception)
    with unreadable, parquet.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=1024)
        rows = (columns for batch in batches for columns in batch.to_pylist())
        yield from _rows_of_table(str(path), rows)


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def _read_saved(path: Path, split: str, cut: Cut | None) -> Rows:
    import datasets

    with boundary(DataError, f"cannot load the saved data set {path}", Exception):
        loaded: Any = datasets.load_from_disk(str(path))
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DataError(f"{path}: no split '{split}'.{nearest(split, loaded)}")
        loaded = loaded[split]
    elif split != "train":
        raise ConfigError(f"{path}: a single saved data set has no split '{split}'; leave it out.")
    # A damaged table is only noticed while reading.
    with boundary(DataError, f"cannot read {path}", Exception):
        yield from _rows_of_table(str(path), *_part(loaded, cut))


def _read_hub(source: Source, name: str, split: str, cut: Cut | None) -> Rows:
    import datasets

    if source.stream and cut is not None and re.search("[%-]", str(cut)):
        why = f"{name}: a stream has rows from its start, as in train[:1000], and no {cut}."
        raise ConfigError(why)
    what = f"'{name}' is not a file here, and loading it as a data set of the hub failed"
    with boundary(DataError, what, Exception):
        loaded = datasets.load_dataset(
            name, source.subset, split=split, revision=source.revision, streaming=source.stream
        )
        part = _start_of(loaded, cut) if source.stream else _part(loaded, cut)
        yield from _rows_of_table(f"{name}[{split}]", *part)


def _start_of(stream: Foreign, cut: Cut | None) -> tuple[Foreign, int]:
    """The part of a stream, and the number of its first row."""
    if cut is None:
        return stream, 1
    ends = cut.rows(0)
    first = ends.start or 0
    rest = stream.skip(first)
    return (rest if ends.stop is None else rest.take(max(0, ends.stop - first))), first + 1


def _read_package(source: Source, named: PackageName, split: str, cut: Cut | None) -> Rows:
    """The tasks that an installed package brings."""
    numbered = enumerate(adapter(named).rows(named.name, split, source.options or {}), 1)
    if cut is not None:
        every = list(numbered)
        numbered = iter(every[cut.rows(len(every))])
    name = f"{named.plain}[{split}]"
    player = {"environment": named.plain} if PACKAGES[named.package].plays else {}
    for number, columns in numbered:
        yield SourceRow(name, f"{name}:{number}", {**columns, **player})


def _part(table: Any, cut: Cut | None) -> tuple[Any, int]:
    """The part of a table, and the number of its first row."""
    if cut is None:
        return table, 1
    rows = range(len(table))[cut.rows(len(table))]
    return table.select(rows or []), rows.start + 1


def _rows_of_table(name: str, rows: Iterable[Any], first: int = 1) -> Rows:
    """Rows of a table, where keys absent from a message or tool are null: all rows share one
    type."""
    for number, columns in enumerate(rows, first):
        kept = dict(columns)
        for column, value in columns.items():
            if column == "tools" or _is_conversation(value):
                kept[column] = _without_null(value)
        yield SourceRow(name, f"{name}:{number}", kept)


def _is_conversation(value: object) -> bool:
    items = value if isinstance(value, list) else [None]
    return all(isinstance(m, dict) and ("role" in m or "from" in m) for m in items)


def _without_null(value: object) -> Any:
    if isinstance(value, dict):
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list) else value
