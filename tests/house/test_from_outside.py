"""What another package adds with one file and one line; user files are in
``tests/learn/algorithms``."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import outside_engine
from tests.support.engine_contract import CHECKS, Subject
from tests.support.fake_engine import numbers
from tests.support.tiny_runs import rl_settings
from tunesmith.config.doors import Door
from tunesmith.config.engines import ENGINES, engine_kinds
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules import checks, rule
from tunesmith.run.assembly import run_rl
from tunesmith.run.specs.base import WeightSource
from tunesmith.run.specs.from_plan import engine_spec

OTHERS = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']


def install(site: Path, group: str, place: str) -> None:
    """As ``pip install`` does with a package that has one entry point."""
    info = site / f"another_{group}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: another-{group}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tunesmith.{group}]\nours = {place}\n")


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with an engine and a rule, which is installed for one test."""
    site = tmp_path / "site"
    install(site, "engines", "tests.support.outside_engine:KIND")
    install(site, "rules", "tests.support.outside_rule:short_runs")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "tests.support.outside_rule", raising=False)
    before = list(rule.RULES)
    doors: list[Door[Any]] = [ENGINES, checks.OTHERS]
    for door in doors:
        vars(door).pop("rooms", None)
    yield
    rule.RULES[:] = before
    for door in doors:
        vars(door).pop("rooms", None)


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.more
async def test_an_engine_of_another_package_fulfils_the_contract(
    check: Callable[[Subject], Awaitable[None]], model: Path, tmp_path: Path
) -> None:
    lm = CausalLM.load(model)
    config = load_config(RLConfig, None, rl_settings(tmp_path, model, system__engine="uniform"))
    plan = resolve(config, Facts(read_hardware()))
    engine = engine_spec(plan).around(WeightSource(lm), print, None)
    await check(Subject(engine, numbers))


@pytest.mark.usefixtures("other_package")
def test_a_run_samples_with_an_engine_of_another_package(model: Path, tmp_path: Path) -> None:
    settings = rl_settings(tmp_path, model, system__engine="uniform", train__steps=1)
    outside_engine.MADE.clear()
    run_rl(None, settings)
    [engine] = outside_engine.MADE
    assert engine.stats().sampled_tokens == 4 * 4 * 8


def test_an_engine_without_a_process_of_its_own_says_so() -> None:
    with pytest.raises(ConfigError) as refused:
        outside_engine.UniformSpec(1).build()
    assert refused.value.problems[0].keys == ("system.engine_process",)


@pytest.mark.usefixtures("other_package")
def test_another_engines_name_is_one_of_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"'vllm'.*'uniform'.*Did you mean 'uniform'"):
        load_config(RLConfig, None, [*OTHERS, "system.engine=unifrm"], files=False)


def test_an_engine_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"system\.engine is \"uniform\"; .*'vllm'"):
        load_config(RLConfig, None, [*OTHERS, "system.engine=uniform"], files=False)


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize(("steps", "keys"), [(101, [("train.steps",)]), (100, [])])
def test_a_rule_of_another_package_judges_runs(steps: int, keys: list[tuple[str, ...]]) -> None:
    config = load_config(RLConfig, None, [*OTHERS, f"train.steps={steps}"], files=False)
    assert [problem.keys for problem in checks.said_contradictions(config)] == keys


def test_two_engines_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    local = engine_kinds()["local"]
    rooms = (*ENGINES.rooms, replace(local, spec="another_package.engine:make"))
    monkeypatch.setitem(vars(ENGINES), "rooms", rooms)
    with pytest.raises(ConfigError, match=r"another_package\.engine:make") as refused:
        engine_kinds()
    assert refused.value.keys == ("system.engine",)
