"""Each rule refuses a run with the fewest settings that it is about, and leaves the run without any
of them alone.

The runs stand in ``rules.txt``, so that one sees at a glance what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.support.documents import SUPPORT
from tunesmith.config import commands, schema
from tunesmith.config.load import load_config
from tunesmith.errors import ConfigError, Problem
from tunesmith.plan.facts.experts import Mixtures
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.rules.checks import unread_problems
from tunesmith.plan.rules.rule import RULES, UNREAD
from tunesmith.plan.rules.situation import Situation, at_least, more

GB = 10**9
CPU = Hardware("a CPU", cores=4, memory_total=16 * GB, memory_available=8 * GB, bf16=True)
USUAL = ModelFacts(
    parameters=5_000_000,
    layers=6,
    hidden_size=256,
    intermediate_size=768,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab_size=4096,
    context=4096,
    family="llama",
)
ODD = ModelFacts(
    parameters=5_000_000,
    layers=2,
    hidden_size=96,
    intermediate_size=768,
    heads=4,
    kv_heads=2,
    head_dim=24,
    vocab_size=300,
    context=1024,
    switch=64,
    family="llama",
)
STATES = replace(USUAL, family="qwen3_next", attending=2, carrying=4)
SEEING = replace(USUAL, family="qwen3_vl_text", tower_parameters=100)
FIXED = replace(USUAL, family="gpt_oss")
FACTS = {
    "": None,
    "usual": Facts(CPU, USUAL, train_size=1000, longest=100),
    "launched": Facts(replace(CPU, nodes=2), USUAL, longest=100, ranks_here=1),
    "fixed": Facts(CPU, FIXED, train_size=1000, longest=100),
    "lacked": Facts(CPU, replace(USUAL, family="mimo_v2_flash"), train_size=1000, longest=100),
    "states": Facts(CPU, STATES, train_size=1000, longest=100),
    "experts": Facts(
        CPU, replace(USUAL, expert_widths=(256, 20), mixtures=Mixtures(6, 4, 2, 100_000))
    ),
    "keys": Facts(CPU, replace(USUAL, heads=12), longest=100),
    "at once": Facts(CPU, replace(USUAL, family="llama4_text")),
    "windows": Facts(CPU, replace(USUAL, narrow=True), train_size=1000, longest=100),
    "images": Facts(CPU, USUAL, train_size=1000, longest=100, images=3),
    "both": Facts(CPU, replace(SEEING, family="gemma3_text"), longest=100, images=3),
    "seeing": Facts(CPU, SEEING, train_size=1000, longest=100, images=3),
    "unseeing": Facts(CPU, SEEING, train_size=1000, longest=100, images=0),
    "odd": Facts(
        CPU, ODD, train_size=1000, longest=100, instances_for="rewards.py:of_environments"
    ),
}
LINES = [
    line.split(" | ")
    for line in (SUPPORT / "rules.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
NEEDED = {
    "RFTConfig": ['reward.functions=["math"]'],
    "DistillConfig": ["teacher.path=org/t"],
    "SampledDistillConfig": ["teacher.path=org/t", "distill.mode=sampled"],
    "OfflineDistillConfig": ["teacher.path=org/t", "distill.mode=offline"],
}


def problems(rule: str, command: str, overrides: list[str], facts: str) -> Iterator[Problem]:
    kind: Any = getattr(commands, command, None) or getattr(schema, command)
    base = ["model.path=org/m", "data.train=org/d", *NEEDED.get(command, [])]
    config = load_config(kind, None, [*base, *overrides], files=False)
    if rule == "unread":
        yield from unread_problems(config, facts=FACTS[facts])
    for of, judge in RULES:
        if judge.__name__ == rule and isinstance(config, of):
            yield from judge(Situation(config, FACTS[facts]))


def cells(line: list[str]) -> tuple[str, str, list[str], str]:
    return line[0], line[1], line[2].split(" "), "".join(line[4:])


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line[0]}: {line[2]}"[:80])
def test_a_rule_catches_its_case_and_leaves_it_alone_without_any_of_its_settings(
    line: list[str],
) -> None:
    (rule, command, overrides, facts) = cells(line)
    keys = line[3]
    caught = {
        each.text
        for each in problems(rule, command, overrides, facts)
        if each.keys == tuple(keys.split(" "))
    }
    assert caught
    for left_out in overrides:
        fewer = [each for each in overrides if each != left_out]
        with suppress(ConfigError):  # a setting of the one that is left out
            assert not caught <= {each.text for each in problems(rule, command, fewer, facts)}, (
                left_out
            )


def test_every_rule_has_a_case() -> None:
    assert {line[0] for line in LINES} == {judge.__name__ for _, judge in RULES} | {"unread"}
    whys = [each.text for line in LINES if line[0] == "unread" for each in problems(*cells(line))]
    untried = [
        entry
        for entry in UNREAD
        if not any(f"no effect {entry.why.partition('{')[0][:40]}" in why for why in whys)
    ]
    assert not untried


def test_what_is_unknown_is_neither_more_nor_as_much() -> None:
    assert more(2, 1) and not more(1, 1) and at_least(1, 1) and not at_least(1, 2)
    assert not any(
        of(one, other)
        for of in (more, at_least)
        for one, other in ((None, 1), (1, None), (None, None))
    )


def test_a_setting_that_nothing_reads_is_told_once_and_by_its_command() -> None:
    found = [*problems("unread", "GenerateConfig", ["eval.every=5", "lora.save_merged=true"], "")]
    assert sorted(each.keys for each in found) == [("eval.every",), ("lora.save_merged",)]
    assert not [each for each in found if "set data.eval" in each.text]


def test_metrics_are_named_as_evaluations_name_them() -> None:
    def refused(name: str, *functions: str) -> list[str]:
        given = f"reward.functions={json.dumps(functions)}"
        said = ["data.eval=org/e", f"eval.metric=eval/{name}", given]
        return [each.text for each in problems("metric", "RLConfig", said, "")]

    one, other = "/a/rewards.py:share", "/b/rewards.py:share"
    (text,) = refused("x", one)
    assert "eval/reward/share" in text and "/a/" not in text
    assert refused(f"reward/{one}", one) and not refused("reward/share", one)
    assert refused("reward/share", one, other) and not refused(f"reward/{one}", one, other)
