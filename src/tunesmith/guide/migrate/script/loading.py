"""Calls of Hugging Face's ``datasets``, by the names of its functions and of its data sets'
methods.

Each gets the arguments of a call, and returns the data set that the call makes; or an ``Unknown``
with the reason why a run file cannot say it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tunesmith.guide.migrate.script.data import (
    WHOLE,
    Call,
    Data,
    Held,
    Length,
    Origin,
    RowSpan,
    Splits,
    Step,
    Unknown,
    share_text,
    whole,
)
from tunesmith.learn.data.splits import Cut, parse_split

_BUILDERS = ("json", "csv", "parquet")
"""Names for files of a kind that a run file can name."""
_OTHER_BUILDERS = (
    "text", "arrow", "imagefolder", "audiofolder", "webdataset", "pandas", "generator",
)  # fmt: skip


def load_dataset(call: Call) -> Held:
    path = call.get(0, "path")
    subset = call.get(1, "name")
    files = call.get(3, "data_files")
    directory = call.get(2, "data_dir")
    split = call.keywords.get("split", call.get(4, "split"))
    if not isinstance(path, str):
        return _because(call, path, "the name of the data set")
    parts = {"its configuration": subset, "its files": files, "its directory": directory}
    for what, value in parts.items():
        if isinstance(value, Unknown):
            return _because(call, value, what)
    if path in _OTHER_BUILDERS:
        return call.unknown(f"a run file reads no {path} files")
    revision = call.keywords.get("revision")
    notes = (f"revision = {revision!r}",) if revision else ()
    if path in _BUILDERS:
        loaded: Held = _files(call, files, directory)
    elif files is not None or directory is not None:
        return call.unknown("it has files of a data set of the hub: download and name them")
    else:
        origin = Origin(path, subset if isinstance(subset, str) else None)
        loaded = Splits(Data((origin,), call.line, notes=notes))
    return loaded if split is None or isinstance(loaded, Unknown) else _split(call, loaded, split)


def _because(call: Call, value: Held, what: str) -> Unknown:
    text = f" ({value.text})" if isinstance(value, Unknown) else ""
    return call.unknown(getattr(value, "why", "") or f"{what} is not known here{text}")


def _files(call: Call, files: Held, directory: Held) -> Held:
    """A ``Splits`` of files: from text or a list, which are ``train``, or from a dictionary."""
    if isinstance(directory, str) and files is None:
        return Splits(None, {"train": Data((Origin(directory, split="train"),), call.line)})
    parts: dict[str, Held] = {}
    for split, names in (files if isinstance(files, dict) else {"train": files}).items():
        named = list(names) if isinstance(names, list | tuple) else [names]
        if not all(isinstance(name, str) for name in named):
            parts[split] = call.unknown("the names of its files are not known here")
        elif any("://" in name or "*" in name for name in named):
            parts[split] = call.unknown("a run file names files of this machine, without *")
        else:
            folder = f"{directory.rstrip('/')}/" if isinstance(directory, str) else ""
            origins = tuple(Origin(folder + name, split="train") for name in named)
            parts[split] = Data(origins, call.line)
    return Splits(None, parts)


def _split(call: Call, loaded: Splits, split: Held) -> Held:
    if isinstance(split, list | tuple):
        return [_split(call, loaded, one) for one in split]
    if not isinstance(split, str):
        return _because(call, split, "the split")
    if "+" in split:
        parts = [_split(call, loaded, one.strip()) for one in split.split("+")]
        return together(Call([parts], {}, call.text, 0))
    name, cut = parse_split(split)
    if "[" in name:
        return call.unknown(f"{split} is not a slice of rows")
    part = loaded.get(name)
    if part is None:
        return call.unknown(f"there is no split {name}")
    return _cut(call, part, cut or WHOLE)


def load_from_disk(call: Call) -> Held:
    path = call.get(0, "dataset_path")
    if not isinstance(path, str):
        return _because(call, path, "the path")
    return Splits(Data((Origin(path),), call.line), single=True)


def from_file(call: Call) -> Held:
    """``Dataset.from_json``, ``from_csv`` and ``from_parquet``."""
    loaded = _files(call, call.get(0, "path_or_paths"), None)
    return _split(call, loaded, call.keywords.get("split", "train"))


def dataset_dict(call: Call) -> Held:
    parts = call.args[0] if call.args else call.keywords
    return Splits(None, dict(parts)) if isinstance(parts, Mapping) else call.unknown()


def together(call: Call, weights: Held = None) -> Held:
    """Data sets one after the other, or mixed by their weights."""
    named = call.get(0, "dsets", call.get(0, "datasets"))
    parts = [whole(part) for part in named] if isinstance(named, list | tuple) else [named]
    other = [part for part in parts if not isinstance(part, Data)]
    if other or not parts:
        unknown = next((part for part in other if isinstance(part, Unknown)), None)
        return _because(call, unknown, "one of the data sets")
    if len({tuple((step.text, step.function) for step in part.steps) for part in parts}) > 1:
        return call.unknown("its parts are transformed differently; write the rows to files")
    complete = isinstance(weights, list | tuple) and len(weights) == len(parts)
    if weights is not None and not complete:
        return _because(call, weights, "the shares of the data sets")
    origins: list[Origin] = []
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        origins += [replace(o, weight=float(weight)) if weights else o for o in part.origins]
    return Data(tuple(origins), call.line, parts[0].steps, any(part.shuffled for part in parts))


def _cut(call: Call, data: Held, cut: Cut) -> Held:
    if cut == WHOLE or not isinstance(data, Data):
        return data
    origin, *others = data.origins
    if others:
        return call.unknown("it is a part of several data sets; write the rows to a file")
    filtered = next((step for step in data.steps if step.name == "filter"), None)
    if filtered and not all(end.endswith("%") for end in (cut.start, cut.stop) if end):
        what = f"{filtered.text} (line {filtered.line})"
        return call.unknown(f"a part of what {what} leaves; write the rows to a file")
    notes = ("a random part there, these rows here",) if data.shuffled else ()
    return replace(data, origins=(origin.cut(cut),), notes=(*data.notes, *notes))


def method(data: Data | Splits, name: str, call: Call) -> Held:
    """The value of ``data.name(...)``."""
    if isinstance(data, Splits) and data.single and name in ("train_test_split", *_ROWS):
        data = whole(data)
    if isinstance(data, Splits):
        if name in ("pop", "get") and call.args and isinstance(call.args[0], str):
            return data.get(call.args[0])
        if name in ("values", "items", "keys") and data.base is None:
            return list(getattr(data.parts, name)())
        return data.each(lambda part: method(part, name, call) if isinstance(part, Data) else part)
    if name in _SAME:
        return data
    if name in _STEPS:
        step = Step(name, f".{name}({call.arguments})", call.line, _mapped(name, call))
        return replace(data, steps=(*data.steps, step))
    if name == "shuffle":
        return replace(data, shuffled=True)
    if name == "train_test_split":
        return _train_test_split(data, call)
    if name in _ROWS:
        return _rows(data, name, call)
    return call.unknown(f"{name} of a data set is not followed")


def _mapped(name: str, call: Call) -> str:
    """The function of a ``map`` that makes a row of a row."""
    function = getattr(call.get(0, "function"), "reference", "")
    other = ("batched", "with_indices", "fn_kwargs", "with_rank")
    per_row = not any(call.keywords.get(word) for word in other)
    return function if name == "map" and per_row and len(call.args) < 2 else ""


def _train_test_split(data: Data, call: Call) -> Held:
    test = call.get(0, "test_size")
    train = call.get(1, "train_size")
    test = 0.25 if test is None and train is None else test
    first, second = _ends(train, test)
    if first is None or second is None:
        return call.unknown("the size of the held-out part is not known here")
    shuffled = data.shuffled or call.keywords.get("shuffle", True) is not False
    random = replace(data, shuffled=shuffled)
    return Splits(None, {"train": _cut(call, random, first), "test": _cut(call, random, second)})


def _ends(train: Held, test: Held) -> tuple[Cut | None, Cut | None]:
    """The first rows, and the last ones."""
    first, last = (None if size is None else _size(size) for size in (train, test))
    if "" in (first, last):
        return None, None
    if last is None or (isinstance(test, int) and isinstance(train, int)):
        return Cut("", first or ""), Cut(first or "", "" if last is None else str(train + test))
    start = f"{share_text(100 - float(last[:-1]))}%" if last.endswith("%") else f"-{last}"
    return Cut("", first or start), Cut(start, "")


def _size(size: Held) -> str:
    """A size as the end of a cut; empty if it is not known."""
    if isinstance(size, Length):
        return "" if size.less else _end(size)
    if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0:
        return ""
    return str(size) if isinstance(size, int) else f"{share_text(100 * size)}%" if size < 1 else ""


def _rows(data: Data, name: str, call: Call) -> Held:
    """Some consecutive rows: ``data.select(range(10, 20))``, ``take(10)`` or ``skip(10)``."""
    rows = call.get(0, _ROWS[name])
    match rows:
        case int() if name != "select":
            cut = Cut("", str(rows)) if name == "take" else Cut(str(rows), "")
        case range(start=start, step=1) if start >= 0:
            cut = Cut(str(start or ""), str(rows.stop))
        case RowSpan(start, stop):
            cut = Cut(_end(start), _end(stop))
        case [_, *_] if rows == list(range(len(rows))):
            cut = Cut("", str(len(rows)))
        case _:
            return call.unknown("which rows are selected is not known here")
    return _cut(call, data, cut)


def _end(end: int | Length) -> str:
    if end in (0, Length()):
        return ""
    if isinstance(end, int):
        return str(end)
    return f"-{end.less}" if end.less else f"{share_text(100 * end.share)}%"


_ROWS = {"select": "indices", "take": "n", "skip": "n"}
"""Methods that keep some rows, and the name of their argument."""
_STEPS = (
    "map", "filter", "rename_column", "rename_columns", "add_column", "sort", "flatten",
    "class_encode_column",
)  # fmt: skip
_SAME = (
    "remove_columns", "select_columns", "cast", "cast_column", "with_format", "set_format",
    "with_transform", "set_transform", "reset_format", "flatten_indices", "to_iterable_dataset",
    "copy", "unique",
)  # fmt: skip
"""Methods that keep the rows and what they say: a run file reads the columns that its format
needs."""
LOADERS: Mapping[str, Callable[[Call], Held]] = {
    "load_dataset": load_dataset,
    "load_from_disk": load_from_disk,
    "Dataset.from_json": from_file,
    "Dataset.from_csv": from_file,
    "Dataset.from_parquet": from_file,
    "DatasetDict": dataset_dict,
    "IterableDatasetDict": dataset_dict,
    "concatenate_datasets": together,
    "interleave_datasets": lambda call: together(call, call.get(1, "probabilities")),
}
