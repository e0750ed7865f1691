"""Planned memory against what the product's own steps need on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device_memory import (
    CASES,
    DEEP,
    LARGE,
    LORA,
    QWEN2,
    RANKED,
    RANKS,
    STAGE,
    compared,
    extrapolated,
)
from benchmarks.device_memory import resolved as planned_case
from tests.support.fake_runs import resolved
from tests.support.long import again
from tunesmith.errors import CapacityError
from tunesmith.guide.simulate.dry_run import dry_run
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.plan.cost.memory import planned


def once(cases: Iterable[Any]) -> list[Any]:
    """Of two layers of several shapes with the same options, the largest; the others run again."""
    return [again(case) if case.layers == 2 and case.shape != "72B" else case for case in cases]


SOME = [
    *(case for case in CASES if case.layers <= 4),
    *RANKED[3:24:9],
    *RANKED[24:30],
    *RANKED[-3:],
]


@pytest.mark.parametrize("case", once(SOME), ids=lambda case: case.name)
def test_the_plan_is_within_five_percent(tmp_path: Path, case: Any) -> None:
    row = compared(tmp_path, case)
    assert row["measured"] == pytest.approx(row["planned"], rel=0.05), row


SCORED = [
    *(
        case
        for case in CASES
        if case.layers == 2 and not any("checkpointing" in option for option in case.options)
    ),
    next(case for case in RANKED if case.options == (STAGE(1),)),
    *(
        case
        for case in RANKED
        if case.shape == "7B" and case.options in ((STAGE(3),), (STAGE(3), LORA))
    ),
    next(case for case in RANKED if case.options == (STAGE(0), RANKS(2))),
]


@pytest.mark.parametrize("case", once(SCORED), ids=lambda case: case.name)
def test_a_pass_without_gradients_is_planned_within_five_percent(tmp_path: Path, case: Any) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    scoring = f"system.scoring_max_tokens={2 * case.tokens}"
    more = (*case.options, f"data.eval={tmp_path}/eval.jsonl", scoring)
    config = planned_case(tmp_path, replace(case, options=more))
    price = planned(config)
    assert price is not None and price.scored
    expected = price.scoring - price.libraries
    assert dry_run(config)[FIRST]["score"].total == pytest.approx(expected, rel=0.05)


FROZEN: dict[str, tuple[str, ...]] = {
    "distill": ("distill.mode=offline", "data.max_tokens=2048", "train.batch_size=64"),
    "rl": (
        *(
            "data.max_prompt_tokens=1024",
            "rollout.max_new_tokens=1024",
            "rollout.group_size=8",
            "system.hybrid=false",
        ),
        "system.reward_max_tokens=8192",
    ),
}


@pytest.mark.parametrize("command", [again("distill"), "rl"])
def test_frozen_models_in_host_memory_are_within_five_percent(tmp_path: Path, command: str) -> None:
    """A teacher that comes for each micro-batch, when there are gradients; a reward model and a
    reference."""
    shape = QWEN2 | {"num_hidden_layers": 4}
    judge = (
        {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": ""}}
        if command == "rl"
        else {}
    )
    other = f"{tmp_path}/frozen"
    models = (
        ("algorithm.kl.coef=0.1", f'reward.models=[{{path="{other}"}}]')
        if judge
        else (f"teacher.path={other}",)
    )
    said = (
        "system.max_tokens_per_microbatch=8192",
        "system.gradient_checkpointing=true",
        *FROZEN[command],
        *models,
    )
    given = (*said, "system.offload_reference=true")
    config = resolved(
        tmp_path, command, shape, "H200", *given, frozen=shape | judge | {"num_hidden_layers": 8}
    )
    price = planned(config)
    phases = dry_run(config)[FIRST]
    assert (
        price is not None and price.frozen == 0 < price.scorer and bool(price.judge) == bool(judge)
    )
    needed = max(price.training, price.scoring, price.teaching) - price.libraries
    assert phases["train"].total == pytest.approx(needed, rel=0.05), (phases["train"].peak, price)
    if judge:
        assert phases["reward"].total == pytest.approx(
            price.sampling - price.libraries, rel=0.05
        ), price
        assert not phases["train"].peak.get("frozen models")


@pytest.mark.parametrize("number", ["float16", "float32"])
def test_attention_without_a_kernel_is_planned(tmp_path: Path, number: str) -> None:
    """A GPU before Ampere, and numbers of 32 bits: a weight for each pair of a sample's tokens."""
    shape = QWEN2 | {"num_hidden_layers": 2}
    gpu = "T4-16GB" if number == "float16" else "H100-80GB"
    said = ("data.max_tokens=2048", "system.max_tokens_per_microbatch=4096", "system.compile=false")
    plan = resolved(tmp_path, "sft", shape, gpu, f"model.dtype={number}", *said)
    price = planned(plan)
    assert price is not None
    counted = dry_run(plan)[FIRST]["train"].total
    assert counted == pytest.approx(price.training - price.libraries, rel=0.15), price


@pytest.mark.parametrize("case", [again(DEEP[0]), DEEP[1]], ids=lambda case: case.name)
def test_a_large_model_resolves_fits_and_takes_steps(tmp_path: Path, case: Any) -> None:
    """Two depths tell what a layer takes, and so what all take."""
    row = extrapolated(tmp_path, case)
    assert row["measured"] == pytest.approx(row["planned"], rel=0.05), row
    assert max(row["measured"], row["planned"]) < row["free"]


def test_70b_on_one_small_gpu_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs at least 1\.\d+TB .* and 23\.\dGB are free"):
        resolved(
            tmp_path, "sft", LARGE | {"num_hidden_layers": 80}, "A10G-24GB", "data.max_tokens=2048"
        )
