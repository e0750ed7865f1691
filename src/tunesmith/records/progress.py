"""Displays a run: a live panel in a terminal, one line per step elsewhere, and a table at the
end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Self

from tunesmith.records.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 50
_LONGEST_BAR = 24
LINE_SECONDS = 10.0
"""Seconds between plain lines about sampling."""


def number(value: float) -> str:
    """Three significant digits: ``0.412``, ``1.2e-05``; rounding errors of zero are ``0``."""
    return "0" if abs(value) < 1e-7 else f"{value:.3g}"


def count(value: float) -> str:
    """``12,345``; with one decimal below a hundred: ``83.1``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def share(value: float) -> str:
    """``0.234`` → ``23%``; small shares keep a decimal."""
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def duration(seconds: float) -> str:
    """``4.1s``, ``2m05s``, ``3h07m``."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


Column = tuple[str, Callable[[float], str]]
"""Label and format of a metric."""
COLUMNS: Mapping[str, Column] = {
    "reward": ("reward", number),
    "teacher_kl": ("KL(teacher)", number),
    "ref_kl": ("KL(reference)", number),
    "completion_tokens": ("length", count),
    "tokens_per_second": ("tok/s", count),
    "limit_share": ("of limit", share),
    "loss": ("loss", number),
    "accuracy": ("accuracy", number),
    "margin": ("margin", number),
    "grad_norm": ("grad norm", number),
    "lr": ("lr", number),
}
"""The metrics shown if a step has them."""
SAMPLING: Mapping[str, Column] = {
    "total_tokens": ("tokens", "{:,.0f}".format),
    "tokens_per_second": ("tok/s", count),
    "limit_share": ("of limit", share),
    "reward": ("reward", number),
    "answered": ("answered", share),
    "right": ("right", share),
    "accepted": ("accepted", "{:,.0f}".format),
}
"""The same for batch inference and RFT."""
WATCHED = ("reward", "loss")
"""The sparkline follows the first of these."""


def each_once(values: Mapping[str, str]) -> dict[str, str]:
    """Values by the names that share them: ``{"a": "1", "b": "1", "c": "2"}`` → ``{"a, b": "1",
    "c": "2"}``."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return {", ".join(sharing): value for value, sharing in names.items()}


def _shown(
    metrics: Mapping[str, float], columns: Mapping[str, Column] = COLUMNS
) -> list[tuple[str, str]]:
    """Label and text of every column that the metrics have a value for."""
    known = {name: column for name, column in columns.items() if name in metrics}
    return [(label, show(metrics[name])) for name, (label, show) in known.items()]


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, scaled from the minimum to the maximum: ``▁▃▅█``. Values that are not
    finite are blank."""
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return ""
    low = min(finite)
    high = max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    bars = [round((v - low) * scale) if abs(v) < float("inf") else None for v in values]
    return "".join(" " if bar is None else _BARS[bar] for bar in bars)


def _eta(left: float | None, at_most: bool) -> str:
    return "" if left is None else f"ETA {'at most ' if at_most else ''}{duration(left)}"


class Progress:
    """Shows steps ``start + 1 ... total`` of a run, one line per step. Use it as a context manager.

    Args:
        unit: what is counted.
        every: steps between lines; the first and the last are always shown.
    """

    def __init__(self, total: int, start: int = 0, every: int = 1, unit: str = "step") -> None:
        self.total = total
        self.done = start
        self._unit = unit
        self._first = start + 1
        self._every = every
        self._seconds: deque[float] = deque(maxlen=20)
        self._began = self._reported = time.monotonic()

    @property
    def remaining(self) -> float | None:
        """Seconds left, from the median of the latest steps, so that one slow step has little
        effect; None at first."""
        return median(self._seconds) * max(0, self.total - self.done) if self._seconds else None

    def phase(self, name: str) -> None:
        """The run enters a phase."""

    def step(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """A step has ended; ``seconds`` is its wall time."""
        self.done = step
        self._seconds.append(seconds)
        if step % self._every == 0 or step in (self._first, self.total):
            parts = [f"{label} {text}" for label, text in _shown(metrics)]
            times = [duration(seconds), f"ETA {duration(self.remaining or 0)}"]
            print("  ".join([f"{self._unit} {step}/{self.total}", *parts, *times]), flush=True)

    def update(
        self, done: int, metrics: Mapping[str, float], left: float | None, *, at_most: bool = False
    ) -> None:
        """Show how far sampling has come, in a line every ``LINE_SECONDS`` and at the end.

        Args:
            metrics: those of ``SAMPLING`` are shown.
            left: seconds left, if that is known; ``at_most``: it is only an upper bound.
        """
        now = time.monotonic()
        ended = done == self.total and self.done < done
        self.done = done
        if now - self._reported >= LINE_SECONDS or ended:
            self._reported = now
            parts = [f"{label} {text}" for label, text in _shown(metrics, SAMPLING)]
            times = [duration(now - self._began), "" if ended else _eta(left, at_most)]
            line = "  ".join([f"{self._unit} {done:,}/{self.total:,}", *parts, *times])
            print(line.rstrip(), flush=True)

    def note(self, text: str) -> None:
        """Show a message: an evaluation, a checkpoint, a smaller micro-batch."""
        print(printable(text), flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the display; its content stays visible."""


class LivePanel(Progress):
    """A bar, the latest metrics and the reward's curve, redrawn in place; notes scroll above."""

    def __init__(
        self, total: int, start: int = 0, console: Console | None = None, unit: str = "step"
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(total, start, unit=unit)
        self._metrics: Mapping[str, float] = {}
        self._columns = COLUMNS
        self._eta = ""
        self._watched: str | None = None
        self._phase = "starting"
        self._since = time.monotonic()
        self._course: deque[float] = deque(maxlen=_HISTORY)
        self._console = console or Console()
        self._live = Live(
            console=self._console,
            refresh_per_second=4,
            get_renderable=self.render,
            vertical_overflow="visible",
        )

    def phase(self, name: str) -> None:
        if name != self._phase:
            self._phase = name
            self._since = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        self.done = step
        self._seconds.append(seconds)
        self._metrics = metrics
        self._since = time.monotonic()
        self._watched = next((name for name in WATCHED if name in metrics), None)
        if self._watched:
            self._course.append(metrics[self._watched])

    def update(
        self, done: int, metrics: Mapping[str, float], left: float | None, *, at_most: bool = False
    ) -> None:
        if self._columns is not SAMPLING:
            self._columns = SAMPLING
            self._phase = ""
            self._since = self._began
        self.done = done
        self._metrics = metrics
        self._eta = _eta(left, at_most)

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Table:
        """The current panel."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = self._eta if self.remaining is None else f"{duration(self.remaining)} left"
        busy = f"{self._phase} {duration(time.monotonic() - self._since)}".lstrip()
        top = Table.grid(padding=(0, 1))
        count = Text(f"{self._unit} {self.done:,}/{self.total:,}", style="bold")
        bar = ProgressBar(total=self.total, completed=self.done, width=30)
        top.add_row(count, bar, Text(f"  {left}  "), Text(busy, style="dim"))
        numbers = Text()
        for label, shown in _shown(self._metrics, self._columns):
            numbers.append(f"{label}\xa0", style="dim").append(shown, style="bold")
            numbers.append("   ")  # wraps between two
        course = Text()
        if self._watched is not None and len(self._course) > 1:
            course.append(f"{self._watched} ", style="dim").append(f"{number(self._course[0])} ")
            course.append(sparkline(list(self._course)), style="green")
            course.append(f" {number(self._course[-1])}")
        panel = Table.grid()
        for row in (top, numbers, course):
            panel.add_row(row)
        return panel

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()


def open_progress(
    total: int,
    *,
    start: int = 0,
    live: bool | None = None,
    every: int = 1,
    unit: str = "step",
    console: Console | None = None,
) -> Progress:
    """A display for steps ``start + 1 ... total``, or for as many of another ``unit``.

    Args:
        live: True for a live panel, False for lines, None for a panel in a terminal.
        every: steps between lines.
    """
    if live if live is not None else sys.stdout.isatty():
        return LivePanel(total, start, console, unit)
    return Progress(total, start, every, unit)


def time_table(totals: Mapping[str, float]) -> list[str]:
    """Lines ``phase  seconds  share  bar``, the longest phase first, and the sum.

    Args:
        totals: seconds by phase, as ``Clock.totals`` gives them.
    """
    whole = sum(totals.values())
    longest = sorted(totals.items(), key=lambda row: -row[1])
    rows = {name: s for name, s in longest if s > 0 and s >= 0.0005 * whole}
    width = max(map(len, rows), default=0)
    lines: list[str] = []
    for name, seconds in rows.items():
        part = seconds / whole
        bar = "█" * round(_LONGEST_BAR * part)
        lines.append(f"{name:{width}}  {duration(seconds):>7}  {share(part):>5}  {bar}".rstrip())
    return [*lines, f"{'total':{width}}  {duration(whole):>7}"]


def print_summary(totals: Mapping[str, float], facts: Mapping[str, str]) -> None:
    """Print the time by phase, then one line per fact (``reward``: ``0.12 → 0.87``, ``checkpoint``:
    its path)."""
    print("\nWhere the time went")
    for line in time_table(totals):
        print(f"  {line}")
    room = max((len(name) for name in facts), default=0)
    if facts:
        print()
    for name, text in facts.items():
        print(printable(f"{name:{room}}  {text}"))
