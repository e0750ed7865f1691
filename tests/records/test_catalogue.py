"""The catalogue of metrics: names, patterns and other tools' names. ``conftest.py`` holds every run
to it."""

from __future__ import annotations

import pytest

from tunesmith.records.catalogue import CATALOGUE, aliases, find, with_aliases


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rollouts/failed", "rollouts/failed"),
        ("rollouts/timed_out", "rollouts/<status>"),
        ("reward/std", "reward/std"),
        ("reward/a/b/std", "reward/<name>/std"),
        ("eval/reward/correct", "eval/reward/<name>"),
        ("eval/pass@16", "eval/pass@<k>"),
        ("idle/engine/3", "idle/engine/<number>"),
        ("nonfinite_tokens", "nonfinite_tokens"),
        ("no_such_metric", None),
        ("rewardXstd", None),
    ],
)
def test_a_name_is_found_by_the_most_exact_entry(name: str, entry: str | None) -> None:
    found = find(name)
    assert (found.name if found else None) == entry


def test_sinks_get_both_names_and_an_own_name_wins() -> None:
    assert aliases("reward/my.reward/std") == ("rewards/my.reward/std",)
    given = {"loss": 1.0, "reward/std": 0.5, "ref_kl": 0.25, "kl": 7.0}
    found = with_aliases(given)
    assert found.items() >= {"train/loss": 1.0, "reward_std": 0.5, "kl": 7.0}.items()
    assert found.keys() - given.keys() == {"train/loss", "reward_std"}


def test_no_name_stands_twice() -> None:
    every = [metric for kind in CATALOGUE.values() for metric in kind]
    names = [metric.name for metric in every]
    others = [alias for metric in every for alias in metric.aliases]
    assert len(set(names)) == len(names) and len(set(others)) == len(others)
    assert set(names) & set(others) == {"kl"}, "the one that means the same in KTO"
    assert all(metric.meaning.endswith(".") for metric in every)
