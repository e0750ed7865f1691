"""What the rules read of a run: its settings, its metrics, and numbers that several rules need."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from statistics import StatisticsError, correlation, fmean

from tunesmith.records.doctor.columns import UNKNOWN, Column, Columns, Figure, ratio
from tunesmith.records.doctor.record import RunRecord
from tunesmith.records.doctor.rules import Change
from tunesmith.records.facts import RunFacts
from tunesmith.records.metrics import numbers
from tunesmith.records.timeline import OUTSIDE_STEPS

LEAST_PAIRS = 32
"""Minimum number of rollouts for a meaningful correlation of length and reward."""


class Signs(Columns):
    """``signs["reward"].last`` is a metric's mean over the last fifth of the steps, or its last
    evaluation."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__((record.evaluations, 1), (record.steps, None))
        self.record = record
        self.settings = record.settings
        self.facts = record.facts or RunFacts()
        self.steps = len(record.steps)
        self.last_step = int(record.steps[-1]["step"]) if record.steps else 0
        self.rl = "rollout.group_size" in record.settings
        self.on_gpu = str(record.settings.get("system.device")).startswith("cuda")

    def number(self, key: str) -> Figure:
        """A setting; unknown if it is None or not a number, because another version or a person may
        have written it."""
        return Figure(numbers(self.settings).get(key, UNKNOWN))

    def shown(self, key: str) -> str:
        value = self.settings.get(key)
        return "?" if value is None else str(value)

    def waited(self, name: str) -> Figure:
        """Seconds in which engines and trainer waited for rewards or environments."""
        outside = (self[f"seconds/{phase}"] for phase in OUTSIDE_STEPS)
        counted = self["seconds"].sum - sum(phase.sum for phase in outside if phase.count)
        return Figure(self[f"waiting/{name}"].mean * counted)

    @property
    def dropped(self) -> Figure:
        """Share of the optimizer steps whose gradient was not finite."""
        return ratio(self["skipped_steps"].sum, self["optimizer_steps"].sum)

    @property
    def on_policy(self) -> bool:
        """Whether the sampler's log-probabilities are those of the trained policy over all
        tokens."""
        settings = self.settings
        decoupled = settings.get("algorithm.decoupled") or self.number("rollout.max_staleness") > 0
        by_p = settings.get("rollout.top_p") not in (None, 1.0) or self.number("rollout.min_p") > 0
        cut = by_p or settings.get("rollout.top_k") not in (None, 0, -1)
        return self["optimizer_steps"].max == 1 and not decoupled and not cut

    @cached_property
    def right(self) -> Column:
        """The share of right answers; where answers are not right or wrong, of the full reward."""
        correct = self["correct"]
        reward = self["reward"]
        full = self.facts.full_reward
        if correct.count or not full:
            return correct
        return Column([(value / full, step) for value, step in reward.pairs], reward.width)

    @property
    def reward_rise(self) -> Figure:
        """In standard deviations over rollouts."""
        return ratio(self["reward"].rise, self["reward/std"].first)

    @property
    def failures(self) -> str:
        """Kinds of failed rollouts, the most frequent first."""
        sums = {kind: self[f"rollouts/{kind}"].sum for kind in self.names("rollouts/(.+)")}
        failed = [kind for kind in sums if sums[kind] > 0 and kind != "failed"]
        return ", ".join(sorted(failed, key=lambda kind: -sums[kind]))

    def constant_rewards(self, *, zero: bool) -> str:
        """Those among several rewards in which rollouts never differ: the ones that are always 0,
        or the others."""
        names = self.names("reward/(.+)/std")
        constant = [name for name in names if not any(self[f"reward/{name}/std"].values)]
        those = [name for name in constant if zero != any(self[f"reward/{name}/mean"].values)]
        return ", ".join(those) if len(names) > 1 else ""

    @property
    def length_correlation(self) -> Figure:
        """Correlation of length and reward within groups; unknown if there is too little to
        tell."""
        groups: defaultdict[tuple[float, float], list[tuple[float, float]]] = defaultdict(list)
        for row in self.record.rollouts:
            known = numbers(row)
            if known.keys() >= {"tokens", "reward", "step", "group"}:
                groups[known["step"], known["group"]].append((known["tokens"], known["reward"]))
        lengths: list[float] = []
        rewards: list[float] = []
        for pairs in groups.values():
            length, reward = (fmean(values) for values in zip(*pairs, strict=True))
            lengths += [pair[0] - length for pair in pairs]
            rewards += [pair[1] - reward for pair in pairs]
        try:
            return Figure(correlation(lengths, rewards)) if len(lengths) >= LEAST_PAIRS else UNKNOWN
        except StatisticsError:  # all lengths or all rewards are equal
            return UNKNOWN


def times(key: str, factor: float, of: str | None = None) -> Change[Signs]:
    """A change to a setting's value, or to that of another one, times a factor; rounded if it is an
    integer."""

    def value(run: Signs) -> str | None:
        now = run.settings.get(of or key)
        if isinstance(now, int | float):
            return str(round(now * factor)) if isinstance(now, int) else f"{now * factor:.3g}"
        return None

    return Change(key, value)


def at_least(setting: str) -> Change[Signs]:
    """A change to a value, written ``key = value``; to twice the present one where that is as
    large."""
    key, _, least = setting.partition(" = ")

    def value(run: Signs) -> str:
        now = run.number(key)
        return f"{now * 2:g}" if now >= float(least) else least

    return Change(key, value)


ahead = Change[Signs](
    "rollout.max_staleness", lambda run: None if run.number("rollout.max_staleness") >= 1 else "1"
)
"""Rollouts ahead of the policy, unless the run has them already."""
quarter_for_overlong = times("algorithm.overlong.buffer", 0.25, of="rollout.max_new_tokens")
