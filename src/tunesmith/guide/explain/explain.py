"""Everything known about a setting, a metric, or another framework's name for one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunesmith.config.presets import PRESETS
from tunesmith.errors import ConfigError, StorageError, boundary, closest
from tunesmith.guide.explain.settings import Setting, settings_of
from tunesmith.guide.names.foreign import FRAMEWORKS, Meaning, meanings, meanings_of, spelled
from tunesmith.guide.names.unknown import find, rule_of
from tunesmith.plan.rules.checks import unread_reasons
from tunesmith.records.catalogue import CATALOGUE, Metric
from tunesmith.records.catalogue import find as find_metric
from tunesmith.records.metrics import numbers
from tunesmith.records.runs import last_lines
from tunesmith.records.storage import read_json
from tunesmith.records.toml import toml_value

_SOURCES = {"said": "set by the run file or an override", "default": "the default"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The meanings of a name: our ``settings`` and ``metrics``, and its meaning in other frameworks
    (``foreign``)."""

    settings: tuple[Setting, ...] = ()
    metrics: tuple[Metric, ...] = ()
    foreign: tuple[str, ...] = ()


def explain(name: str) -> Explanation:
    """Explain a setting, a metric or another framework's name.

    Raises:
        ConfigError: nothing has this name; the message suggests the nearest ones.
    """
    ours = find(None, name)
    keys = dict.fromkeys((*ours.keys, *ours.elsewhere))
    spelling, known = meanings_of(name)
    if name in keys:
        known = []
    settings = [setting for key in keys for setting in settings_of(key) if setting.key == key]
    metric = find_metric(name) if name == name.strip() else None
    metric = metric or next((m for m in _all_metrics() if m.name == f"logged/{name}"), None)
    metrics = [metric] if metric else [m for m in _all_metrics() if name in m.aliases]
    foreign = tuple(dict.fromkeys(_meant(spelling, meaning) for meaning in known))
    if not (settings or metrics or foreign):
        known = "setting, metric or name in another framework"
        raise ConfigError(f"no {known} is called '{name}'.{_near(name)}")
    return Explanation(tuple(settings), tuple(metrics), foreign)


def called_elsewhere(key: str) -> Iterator[tuple[str, str]]:
    """Frameworks, each with its names for a setting and, in brackets, how values are converted."""
    about = [meaning for meaning in meanings() if key in meaning.keys]
    for framework, written in FRAMEWORKS.items():
        by_rule: dict[str, list[str]] = {}
        for meaning in about:
            by_rule.setdefault(rule_of(meaning), []).extend(meaning.names.get(framework, ()))
        named = {rule: ", ".join(names) for rule, names in by_rule.items() if names}
        texts = [f"{names} ({rule})" if rule else names for rule, names in named.items()]
        if texts:
            yield written, "; ".join(texts)


def without_effect(key: str) -> Iterator[str]:
    """The conditions in which a setting has no effect and is refused."""
    return (re.sub(r"\{[\w.]+\}", "...", why) for why in unread_reasons(key))


def value_in_run(run_dir: Path, key: str) -> str | None:
    """A setting's value in a run and the reason, from the run's ``resolved.json``; None if the run
    has no such key.

    A key of tables that ``resolved.json`` holds as one value, as a placement or a list, has all of
    that value.

    Raises:
        ConfigError: there is no such file.
        StorageError: it is damaged.
    """
    file = run_dir / "resolved.json"
    if not run_dir.is_dir() or not file.exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no resolved.json")
    damage = (ValueError, KeyError, TypeError, AttributeError)
    with boundary(StorageError, f"cannot read {file}", damage):
        entries = read_json(file)["settings"]
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            above = ".".join(parts[:length])
            entry = entries.get(above)
            if entry and (above == key or isinstance(entry["value"], dict | list)):
                name = "" if above == key else f"{above} = "
                value = "none" if entry["value"] is None else toml_value(entry["value"])
                why = entry.get("reason") or _SOURCES.get(entry["source"], entry["source"])
                return f"{name}{value}: {why}"
    return None


def metric_in_run(run_dir: Path, metric: Metric) -> Iterator[str]:
    """First, last, minimum and maximum value of a metric in a run; one line per name that it has
    there.

    Raises:
        ConfigError: the run has no ``metrics.jsonl``.
    """
    if not (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    points = dict[str, list[tuple[int, float]]]()
    for row in last_lines(run_dir, None):
        for name, value in numbers(row).items():
            if find_metric(name) is metric:
                points.setdefault(name, []).append((row["step"], value))
    for name, each in points.items():
        first, last = (f"{value:.4g} in step {step}" for step, value in (each[0], each[-1]))
        values = [value for _, value in each]
        yield f"{name}: {first}, {last}; from {min(values):.4g} to {max(values):.4g}"
    if not points:
        yield f"no {metric.name}"


def _meant(name: str, meaning: Meaning) -> str:
    """``clip_ratio (verl, StateSet Agents): algorithm.loss.clip_low and
    algorithm.loss.clip_high``."""
    of = [framework for framework, names in meaning.names.items() if name in map(spelled, names)]
    written = ", ".join(FRAMEWORKS[framework] for framework in of if framework in FRAMEWORKS)
    here = " and ".join(meaning.keys) or f"there is no such setting here: {meaning.why}"
    rule = f": {rule_of(meaning)}" if meaning.keys and rule_of(meaning) else ""
    return f"{name} ({written or 'earlier versions'}): {here}{rule}"


def meaning_of(metric: Metric) -> str:
    """A metric's meaning without markup; a meaning such as "its maximum" is preceded by what it
    refers to."""
    metrics = next(metrics for metrics in CATALOGUE.values() if metric in metrics)
    before = [one.meaning for one in metrics[: metrics.index(metric)]]
    relative = ("Its ", "Their ", "The same ")
    text = metric.meaning
    if text.startswith(relative):
        of = next((one for one in reversed(before) if not one.startswith(relative)), "")
        text = f"{of} {text}"
    return text.replace("`", "")


def _all_metrics() -> Iterator[Metric]:
    return (metric for metrics in CATALOGUE.values() for metric in metrics)


def _near(name: str) -> str:
    """The nearest setting, metric and foreign name; for a section or preset, the command that shows
    it."""
    keys = [setting.key for setting in settings_of()]
    if name in {key.partition(".")[0] for key in keys}:
        return f" It is a section: tunesmith keys {name}"
    if name in PRESETS:
        return f" It is a preset of algorithm.name: tunesmith presets {name}"
    words = {key.rpartition(".")[2]: key for key in reversed(keys)}
    metrics = [metric.name for metric in _all_metrics()]
    every = [names for meaning in meanings() for names in meaning.names.values()]
    foreign = [name for names in every for name in names if "*" not in name]
    last = re.split(r"[./]", spelled(name))[-1]
    own = closest(name, keys, 0.75), words.get(closest(last, words, 0.75) or "")
    near = [*own, closest(name, metrics, 0.75), closest(spelled(name), foreign, 0.75)]
    near_names = list(dict.fromkeys(filter(None, near)))
    if near_names:
        return f" Did you mean {' or '.join(near_names)}?"
    return " tunesmith keys lists the settings; docs/observability.md the metrics"
