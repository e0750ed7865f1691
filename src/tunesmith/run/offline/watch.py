"""Follows a job of batch inference or RFT: its display, ``metrics.jsonl`` and
``rollouts.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from tunesmith.config.commands import SamplingConfig
from tunesmith.learn.rewards.metrics import reward_metrics
from tunesmith.records.memory import memory_metrics
from tunesmith.records.metrics import MetricsLog, newest_objects
from tunesmith.records.progress import LINE_SECONDS, Progress, open_progress
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.loop.groups import length_metrics
from tunesmith.run.loop.rollout_log import RolloutLog
from tunesmith.run.offline.lines import Json, read_lines
from tunesmith.types import RolloutGroup, Tokenizer

if TYPE_CHECKING:
    from tunesmith.run.offline.unfinished import Unfinished

LOGGED_TOKENS = 20_000
"""Tokens of the rollouts that are logged per line of metrics: about a hundredth of the time."""
_TAIL = 1 << 16


@dataclass(frozen=True, slots=True)
class Judged:
    """How many completions of a line are right, and how many are kept to learn from."""

    right: int
    kept: int


@dataclass(slots=True)
class JobWatch:
    """Watches the answering of one file. Its steps are prompts: those of the run's other files come
    before."""

    run_dir: Path
    title: str
    """What is counted: ``round-1 sampling: completions``."""
    prompts: int
    samples: int = 1
    """Completions per prompt."""
    longest: int = 0
    """Most tokens of a completion; 0 if nothing is sampled."""
    before: int = 0
    """Prompts that were answered in other files of the run."""
    evaluates: bool = False
    """Whether the prompts are held out. Their rewards are then no metric of the sampling."""
    common: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics that every line has."""
    judge: Callable[[Json], Judged] | None = None
    stats: Callable[[], EngineStats] = EngineStats
    live: bool | None = None
    make_rollouts: Callable[[], RolloutLog] | None = None
    """Opens the log of rollouts, which keeps those up to a step."""
    now: Callable[[], float] = time.monotonic
    _progress: Progress = field(init=False)
    _metrics: MetricsLog = field(init=False)
    _rollouts: RolloutLog | None = field(init=False, default=None)
    _unfinished: Unfinished = field(init=False)
    _began: float = field(init=False)
    _row_at: float = field(init=False)
    _counted: EngineStats = field(init=False)
    """The engine's counters at the last line."""
    _before_it: EngineStats = field(init=False)
    """The same when the job began."""
    _finished: int = field(init=False, default=0)
    _lengths: list[int] = field(init=False, default_factory=list[int])
    """Tokens of the completions of this job's finished prompts."""
    _recent: list[tuple[int, RolloutGroup]] = field(
        init=False, default_factory=list["tuple[int, RolloutGroup]"]
    )
    _recent_right: int = field(init=False, default=0)
    _right: int = field(init=False, default=0)
    _kept: int = field(init=False, default=0)
    _total_tokens: float = field(init=False, default=0.0)

    def follow(
        self,
        config: SamplingConfig,
        tokenizer: Tokenizer,
        stats: Callable[[], EngineStats],
        samples: int,
    ) -> None:
        """Set what the sampling is like: an engine's counters, and the number of completions per
        prompt."""
        self.stats = stats
        self.live = config.monitor.progress
        self.samples = samples
        self.longest = config.sampling.max_new_tokens if config.sampling_settings else 0
        file = self.run_dir / "rollouts.jsonl"
        self.make_rollouts = partial(RolloutLog.of, file, config.monitor, tokenizer, 1)

    def begin(self, path: Path, finished: int, unfinished: Unfinished) -> None:
        """``finished`` lines of ``path`` are known, from earlier calls."""
        self._finished = finished
        self._unfinished = unfinished
        step = self.before + finished
        metrics = self.run_dir / "metrics.jsonl"
        self._metrics = MetricsLog(metrics).begin(step)
        if self.make_rollouts:
            all_of_them = self.before + self.prompts
            kept = all_of_them if self.evaluates else step
            self._rollouts = self.make_rollouts().begin(kept)
        lines = newest_objects(metrics, _TAIL)
        last = [line["total_tokens"] for line in lines if "total_tokens" in line]
        self._total_tokens = float(last[-1]) if last else 0.0
        if self.judge:
            for line in chain(read_lines(path), (line for _, line in unfinished.lines())):
                self._count(self.judge(line))
        self._began = self._row_at = self.now()
        self._counted = self._before_it = self.stats()
        total = self.prompts * self.samples
        known = finished * self.samples
        self._progress = open_progress(total, start=known, live=self.live, unit=self.title)
        self._progress.__enter__()
        self._show()

    def add(self, place: int, group: RolloutGroup, line: Json, finished: int) -> None:
        """A prompt is finished; ``finished`` of them are in all."""
        self._recent.append((place, group))
        self._lengths += [rollout.num_sampled for rollout in group.rollouts]
        self._finished = finished
        if self.judge:
            judged = self.judge(line)
            self._recent_right += judged.right
            self._count(judged)

    def tick(self) -> None:
        """Call this often: updates the display, and writes a line now and then."""
        if self.now() - self._row_at >= LINE_SECONDS:
            self._write_row()
        self._show()

    def end(self) -> None:
        if self._recent:
            self._write_row()
        self._show()
        self._progress.__exit__()
        self._metrics.close()
        if self._rollouts:
            self._rollouts.close()

    def _count(self, judged: Judged) -> None:
        self._right += judged.right
        self._kept += judged.kept

    def _write_row(self) -> None:
        now = self.now()
        stats = self.stats()
        seconds = max(now - self._row_at, 1e-9)
        engine = stats.since(self._counted)
        rollouts = [rollout for _, group in self._recent for rollout in group.rollouts]
        row = {
            **self.common,
            "completions": float(len(rollouts)),
            "tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
            **length_metrics(rollouts),
            "seconds": seconds,
            **_speed(engine, seconds),
            **memory_metrics(),
        }
        self._total_tokens += row["tokens"]
        row["total_tokens"] = self._total_tokens
        if not self.evaluates:
            row |= reward_metrics(rollouts)
            if self.judge:
                row["accepted"] = float(self._kept)
                row |= {"right": self._recent_right / len(rollouts)} if rollouts else {}
        if stats.peak_kv_bytes:
            row["kv_peak"] = float(stats.peak_kv_bytes)
        step = self.before + self._finished
        self._metrics.write(step, row)
        self._log_rollouts(step)
        self._counted = stats
        self._row_at = now
        self._recent = []
        self._recent_right = 0

    def _log_rollouts(self, step: int) -> None:
        room = LOGGED_TOKENS
        chosen = list[tuple[int, RolloutGroup]]()
        for place, group in self._recent:
            room -= sum(rollout.num_sampled for rollout in group.rollouts)
            if room > 0 or not chosen:
                chosen.append((place, group))
        if self._rollouts:
            kind = "eval" if self.evaluates else "train"
            # An evaluation is one step.
            step = self.before + self.prompts if self.evaluates else step
            for place, group in chosen:
                self._rollouts.write(step, [group], kind, first=place)

    def _show(self) -> None:
        engine = self.stats().since(self._before_it)
        elapsed = self.now() - self._began
        known = self._finished * self.samples + self._unfinished.completions
        shown: dict[str, float] = {"total_tokens": max(engine.sampled_tokens, sum(self._lengths))}
        if elapsed > 0 and shown["total_tokens"]:
            shown["tokens_per_second"] = shown["total_tokens"] / elapsed
        if self.judge and self._finished:
            shown["right"] = self._right / (self._finished * self.samples)
            if not self.evaluates:
                shown["accepted"] = self._kept
        at_most, left = self._left(known, shown["total_tokens"], elapsed)
        self._progress.update(known, shown, left, at_most=at_most)

    def _left(self, known: int, tokens: float, elapsed: float) -> tuple[bool, float | None]:
        """Seconds left, from tokens where they are counted; whether this is only an upper bound."""
        todo = self.prompts * self.samples - known
        now_finished = len(self._lengths)
        mean = fmean(self._lengths) if self._lengths else self.longest
        if tokens and mean:
            begun = max(0.0, tokens - sum(self._lengths))
            return not self._lengths, max(0.0, todo * mean - begun) * elapsed / tokens
        return False, todo * elapsed / now_finished if now_finished else None


def _speed(engine: EngineStats, seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    tokens = float(engine.sampled_tokens)
    least = engine.attainable_seconds
    if tokens:
        found = {"sampled_tokens": tokens, "tokens_per_second": tokens / seconds}
    if 0 < least <= seconds:
        found |= {"attainable_seconds": least, "limit_share": least / seconds}
    return found
