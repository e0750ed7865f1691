"""Data sets in a script that is followed: where their rows come from, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunesmith.learn.data.splits import Cut

Held = Any
"""What a name of the script holds: plain Python, or one of the classes here and in ``values``."""
_SAMPLES = (90, 10_007, 1_000_000)
"""Numbers of rows for which two parts of a split are compared."""
_MANY = 100_000_000
"""More rows than a data set has."""
WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only running the script would give; ``why`` is empty or the reason."""

    text: str
    line: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Rows of a file, a directory or a data set on the hub; ``split`` None: all splits."""

    path: str
    subset: str | None = None
    split: str | None = None
    cuts: tuple[Cut, ...] = ()
    weight: float | None = None

    def cut(self, cut: Cut) -> Origin:
        return self if cut == WHOLE else replace(self, cuts=(*self.cuts, cut))

    def rows(self, count: int) -> range:
        rows = range(count)
        for cut in self.cuts:
            rows = rows[cut.rows(len(rows))]
        return rows

    def overlaps(self, other: Origin) -> bool:
        """Whether both may hold a row."""
        if (self.path, self.subset) != (other.path, other.subset):
            return False
        if None not in (self.split, other.split) and self.split != other.split:
            return False
        pairs = ((self.rows(count), other.rows(count)) for count in _SAMPLES)
        return any(a and b and a[0] <= b[-1] and b[0] <= a[-1] for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Step:
    """A transformation of the rows, by the name of its method. ``function``: the script's, of a
    plain ``map``."""

    name: str
    text: str
    line: int
    function: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """A data set, or several one after the other. ``shuffled``: the order is random, so a part is a
    random one."""

    origins: tuple[Origin, ...]
    line: int
    steps: tuple[Step, ...] = ()
    shuffled: bool = False
    notes: tuple[str, ...] = ()

    def overlaps(self, other: Data) -> bool:
        return any(mine.overlaps(its) for mine in self.origins for its in other.origins)


@dataclass(slots=True)
class Splits:
    """A dictionary of splits: those in ``parts``, and the other ones of ``base``.

    ``single``: it may be one data set without splits.
    """

    base: Data | None = None
    parts: dict[str, Held] = field(default_factory=dict[str, Held])
    single: bool = False

    def get(self, name: str) -> Held:
        if name in self.parts or self.base is None:
            return self.parts.get(name)
        return replace(self.base, origins=tuple(replace(o, split=name) for o in self.base.origins))

    def each(self, change: Callable[[Held], Held]) -> Splits:
        base = None if self.base is None else change(self.base)
        parts = {name: change(part) for name, part in self.parts.items()}
        return Splits(base if isinstance(base, Data) else None, parts, self.single)


def whole(value: Held) -> Held:
    """A data set saved without splits, where it is used as one."""
    return value.get("train") if isinstance(value, Splits) and value.single else value


@dataclass(frozen=True, slots=True)
class Length:
    """A share of the number of rows of a data set, less some rows."""

    share: float = 1.0
    less: int = 0


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A ``range`` over rows with an end that is a share of their number."""

    start: int | Length
    stop: int | Length


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, with its text and line."""

    args: Sequence[Held]
    keywords: Mapping[str, Held]
    text: str
    line: int
    arguments: str = ""
    """The text between its brackets."""

    def get(self, place: int, name: str, default: Held = None) -> Held:
        return self.args[place] if place < len(self.args) else self.keywords.get(name, default)

    def unknown(self, why: str = "") -> Unknown:
        return Unknown(self.text, self.line, why)


def all_data(value: Held) -> list[Data]:
    """Every data set in a value."""
    if isinstance(value, Splits):
        return [*([value.base] if value.base else []), *all_data(list(value.parts.values()))]
    if isinstance(value, list | tuple):
        return [data for item in value for data in all_data(item)]
    return [value] if isinstance(value, Data) else []


def share_text(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def written_split(origin: Origin) -> str | None:
    """The text of ``split``; None if a part of a part cannot be written as one."""
    split = origin.split or "train"
    if not origin.cuts:
        return split
    if len(origin.cuts) == 1:
        return f"{split}{origin.cuts[0]}"
    ends = [end for cut in origin.cuts for end in (cut.start, cut.stop) if end]
    shares = all(end.endswith("%") for end in ends)
    rows = range(_MANY)
    for cut in origin.cuts:
        relative = any(end.startswith("-") or end.endswith("%") for end in (cut.start, cut.stop))
        if relative and rows.stop == _MANY and not shares:
            return None
        rows = rows[cut.rows(len(rows))]
    ends = (rows.start, rows.stop)
    start, stop = (f"{share_text(100 * n / _MANY)}%" if shares else str(n) for n in ends)
    return f"{split}{Cut(start if rows.start else '', stop if rows.stop < _MANY else '')}"
