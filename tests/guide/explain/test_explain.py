"""``tunesmith explain``: settings, metrics and names of other frameworks, from what the code and
the documents say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from tunesmith.cli.main import app
from tunesmith.config.choice import Choice
from tunesmith.config.load import load_config
from tunesmith.config.resolved import Derived, Listing, save_resolved, settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import StorageError
from tunesmith.guide.explain.advice import advice_about
from tunesmith.guide.explain.explain import (
    called_elsewhere,
    explain,
    meaning_of,
    metric_in_run,
    value_in_run,
)
from tunesmith.guide.names.foreign import meanings
from tunesmith.records.catalogue import CATALOGUE


def printed(*arguments: str) -> str:
    """What the command prints, with the line ends of the terminal's width taken out."""
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def run_files(kind: type[RunConfig] = RunConfig) -> Iterator[type[RunConfig]]:
    """Every class of run files, those that a command chooses by a mode as well."""
    for inner in kind.__subclasses__():
        yield from (inner, *run_files(inner))


def keys_admitted(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a type admits: a walk over all types within each annotation, lists and
    unions as well."""
    for name, field in section.model_fields.items():
        waiting: list[Any] = [field.annotation]
        inside: list[type[BaseModel]] = []
        while waiting:
            one = waiting.pop()
            if isinstance(one, type) and issubclass(one, Choice):
                one.base()  # from then on its types are complete
                inside += one.types.values()
            elif isinstance(one, type) and issubclass(one, BaseModel):
                inside.append(one)
            waiting += get_args(one)
        if prefix or not inside:
            yield prefix + name
        for table in inside:
            yield from keys_admitted(table, f"{prefix}{name}.")


@pytest.mark.more
def test_every_key_that_the_types_admit_and_every_metric_is_explained() -> None:
    keys = {key for kind in run_files() for key in keys_admitted(kind)}
    assert {
        "system.placement.reward.shards",
        "reward.remote.urls",
        "algorithm.loss.tau_positive",
    } < keys
    for key in keys:
        [setting] = explain(key).settings
        assert setting.key == key and setting.kind and setting.default and setting.meaning, key
    for metric in (metric for metrics in CATALOGUE.values() for metric in metrics):
        assert metric in explain(metric.name).metrics
        assert not meaning_of(metric).startswith(("Its", "The same")), metric.name


def test_every_name_of_another_framework_is_explained() -> None:
    names = {
        n
        for meaning in meanings()
        for names in meaning.names.values()
        for n in names
        if "*" not in n
    }
    for name in sorted(names)[::10]:
        found = explain(name)
        assert found.foreign or found.settings, name


@pytest.mark.parametrize(
    ("name", "keys", "frameworks"),
    [
        ("--n_samples_per_prompt", ["rollout.group_size", "sampling.n"], "OpenRLHF"),
        (
            "actor_rollout_ref.actor.clip_ratio",
            ["algorithm.loss.clip_low", "algorithm.loss.clip_high"],
            "verl",
        ),
        ("num_generations", ["rollout.group_size", "sampling.n"], "TRL, StateSet Agents"),
        ("zero_optimization.stage", ["system.zero_stage"], "DeepSpeed"),
        ("warmup_ratio", ["train.warmup_ratio"], "transformers, StateSet Agents"),
    ],
)
def test_a_name_of_another_framework_leads_to_settings(
    name: str, keys: list[str], frameworks: str
) -> None:
    found = explain(name)
    assert [setting.key for setting in found.settings] == keys
    assert frameworks in found.foreign[0]


def test_a_name_without_a_setting_has_the_reason() -> None:
    found = explain("--packing_samples")
    assert not found.settings
    assert "OpenRLHF" in found.foreign[0] and "packed" in found.foreign[0]


def test_what_others_call_a_setting_has_their_rule_beside_it() -> None:
    names = dict(called_elsewhere("algorithm.loss.clip_high"))
    assert "eps_clip_low_high (the two numbers, one each)" in names["OpenRLHF"]
    assert "epsilon_high" in names["TRL"] and "clip_ratio_high" in names["verl"]


def test_advice_is_what_the_guides_say() -> None:
    pages = [advice.page for advice in advice_about("algorithm.loss.clip_high")]
    assert pages[0] == "docs/troubleshooting.md"
    assert any("collapse" in advice.text for advice in advice_about("algorithm.loss.clip_high"))
    assert any("fall" in advice.text for advice in advice_about("entropy"))
    assert advice_about("train.l") == [], "another name that begins the same is not meant"


def test_both_meanings_of_a_name_are_printed() -> None:
    text = printed("lr", "-v")
    assert "train.lr" in text and "a metric" in text and "halve it when the reward falls" in text
    brief = printed("lr")
    assert "train.lr" in brief and "a metric" in brief and "-v" in brief and "halve" not in brief


def test_a_setting_is_explained_in_a_few_lines() -> None:
    for name in ("rollout.temperature", "train.lr", "temperature", "system.zero_stage"):
        lines = CliRunner().invoke(app, ["explain", name]).output.splitlines()
        assert len(lines) <= 16, lines


PLACED = "system.placement.reward.shards=4"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = load_config(
        RLConfig, None, ["model.path=org/m", "data.train=org/d", "rollout.group_size=16", PLACED]
    )
    save_resolved(
        Listing(
            settings(config), {"rollout.group_size": 16}, (Derived("train.lr", 2e-6, "the size"),)
        ),
        tmp_path,
    )
    rows = [
        {"step": 1, "reward": 0.25},
        {"step": 2, "reward": 0.125},
        {"step": 3, "reward": None, "reward/std": 0.5},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(
        lines + '{"step": 4, "rew'
    )  # as a run that was killed leaves it
    return tmp_path


def test_the_value_in_a_run_comes_with_its_source(run_dir: Path) -> None:
    assert value_in_run(run_dir, "rollout.group_size") == "16: set by the run file or an override"
    assert value_in_run(run_dir, "rollout.prompts_per_step") == "8: the default"
    assert str(value_in_run(run_dir, "train.lr")).endswith("the size")
    assert (
        value_in_run(run_dir, "dpo.beta") is None
        and value_in_run(run_dir, "algorithm.loss.clip_low") is None
    )
    assert str(value_in_run(run_dir, "system.placement.reward.shards")).startswith(
        "system.placement = {reward = {sh"
    )
    assert f"in {run_dir}: 16" in printed("num_generations", "--run", str(run_dir))


def test_the_metric_of_a_run_is_summed_up(run_dir: Path) -> None:
    [reward] = [m for m in CATALOGUE["rollouts"] if m.name == "reward"]
    assert list(metric_in_run(run_dir, reward)) == [
        "reward: 0.25 in step 1, 0.125 in step 2; from 0.125 to 0.25"
    ]


@pytest.mark.parametrize("damage", ["{", "[]", '{"settings": 3}', '{"settings": {"train.lr": 1}}'])
def test_a_damaged_run_is_refused(run_dir: Path, damage: str) -> None:
    (run_dir / "resolved.json").write_text(damage)
    with pytest.raises(StorageError, match=r"resolved\.json"):
        value_in_run(run_dir, "train.lr")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    for name in ("train.lr", "reward"):
        result = CliRunner().invoke(app, ["explain", name, "--run", str(tmp_path / "gone")])
        assert result.exit_code == 2 and "gone" in result.output


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rollout.group_siz", "rollout.group_size"),
        ("group_siz", "rollout.group_size"),
        ("entrop", "entropy"),
        ("packing_sample", "packing_samples"),
        ("rollout", "tunesmith keys rollout"),
        ("dapo", "tunesmith presets dapo"),
        ("", "tunesmith keys"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    result = CliRunner().invoke(app, ["explain", name])
    assert result.exit_code == 2
    assert near in result.output


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from tunesmith.guide.explain.explain import *; from "
        "tunesmith.guide.explain.advice import *; "
        "explain('train.lr'); advice_about('train.lr'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "name", ["--micro_train_batch_size", "--ds.zero_stage", "--train.lr", "--bf16"]
)
def test_a_name_may_have_the_dashes_of_an_option(name: str) -> None:
    result = CliRunner().invoke(app, ["explain", name])
    assert result.exit_code == 0 and "No such option" not in result.output, result.output


@pytest.mark.parametrize(
    "name", ["turns", "forks", "unfinished", "tool_calls", "bad_calls", "accepted", "completions"]
)
def test_what_a_run_prints_is_explained(name: str) -> None:
    [metric] = explain(name).metrics
    assert metric.name.removeprefix("logged/") == name
