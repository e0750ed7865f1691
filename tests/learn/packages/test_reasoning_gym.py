"""Data and scores of the real package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from tests.support import tiny
from tests.support.packages import need
from tests.support.tiny_runs import rl_settings
from tunesmith.config.schema import RewardSection, Source
from tunesmith.errors import ConfigError
from tunesmith.learn.data.sources import SourceRow, read
from tunesmith.learn.packages.reasoning_gym import answer_in, score
from tunesmith.learn.rewards.loading import check_rewards
from tunesmith.run.assembly import run_rl
from tunesmith.types import Prompt

Row = Mapping[str, object]


def rows(name: str, **options: object) -> list[Row]:
    source = Source(path=f"reasoning_gym:{name}", options=options)
    return [row.columns for row in read(source) if isinstance(row, SourceRow)]


def place(row: Row) -> Row:
    return cast(Row, row["reasoning_gym"])


@need("reasoning_gym")
@pytest.mark.parametrize(
    "name",
    [
        "chain_sum",
        "basic_arithmetic",
        "complex_arithmetic",
        "gsm_symbolic",
        "countdown",
        "letter_counting",
        "spell_backward",
        "number_sorting",
        "maze",
        "knights_knaves",
        "polynomial_equations",
        "word_ladder",
    ],
)
def test_the_right_answer_scores_one_and_another_less(name: str) -> None:
    found = rows(name, size=3, seed=5)
    assert found == rows(name, size=3, seed=5) and len(found) == 3
    for row in found:
        given = [f"<think>no</think> So <answer>{row['answer']}</answer>", "<answer>?!</answer>"]
        right, wrong = score(given, [place(row)] * 2)
        assert right == 1.0 and wrong is not None and wrong < 1.0


SEVERAL_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their tasks have many right answers, of which the package names none."""
ANY_TEXT = "game_of_life_halting"
"""The package's score of it takes every text for the answer ``True``."""


@need("reasoning_gym")
def test_all_generators_score_their_answer_and_no_other() -> None:
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS.keys() - {"composite"}):
        (row,) = rows(name, size=1, seed=5)
        right, *wrong = score(
            [f"<answer>{row['answer']}</answer>", "<answer>?!</answer>", ""], [place(row)] * 3
        )
        assert (right == 1.0) == (name not in SEVERAL_ANSWERS), name
        assert name == ANY_TEXT or all(each is not None and each < 1.0 for each in wrong), name


@need("reasoning_gym")
def test_several_generators_are_one() -> None:
    parts = [{"name": name, "weight": 1} for name in ("chain_sum", "letter_counting")]
    for row in rows("composite", datasets=parts, size=4):
        assert score([str(row["answer"]), "?!"], [place(row)] * 2) == [1.0, 0.0]


@need("reasoning_gym")
def test_splits_share_no_question() -> None:
    """One-digit sums of two terms: a small space, which seeds alone would not keep apart."""
    options = {"max_terms": 2, "max_digits": 1, "size": 100}
    parts = [
        {str(row["prompt"]) for row in rows(f"chain_sum[{split}]", **options)}
        for split in ("train", "validation", "test")
    ]
    assert all(parts) and sum(map(len, parts)) == len(set.union(*parts))
    other = {str(row["prompt"]) for row in rows("chain_sum[test]", **{**options, "seed": 9})}
    assert other.isdisjoint(parts[0])


@need("reasoning_gym")
@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("chain_some", {}, "chain_sum"),
        ("chain_sum", {"max_term": 3}, "max_terms"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "max_terms"),
        ("chain_sum", {"size": 0}, "size"),
        ("chain_sum[tset]", {}, "test"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_valid(name: str, options: Row, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        rows(name, **options)


@need("reasoning_gym")
def test_the_score_is_a_reward_by_name(tmp_path: Path) -> None:
    check_rewards(RewardSection(functions=("reasoning_gym:score",)), tmp_path)
    with pytest.raises(ConfigError, match="score"):
        check_rewards(RewardSection(functions=("reasoning_gym:scores",)), tmp_path)


@need("reasoning_gym")
def test_a_model_trains_on_it(tmp_path: Path) -> None:
    changed = {
        "data__train": "reasoning_gym:letter_counting[train[:12]]",
        "data__eval": "reasoning_gym:letter_counting[test[:4]]",
        "reward__functions": ["reasoning_gym:score"],
        "reward__isolation": "process",
        "train__steps": 1,
    }
    outcome = run_rl(None, rl_settings(tmp_path, tiny.save_model(tmp_path / "model"), **changed))
    text = (outcome.run_dir / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert any(line.get("reward/score/applied") == 1.0 for line in found)
    assert any("eval/reward" in line for line in found)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("4", "4"),
        ("<think>5</think> 4 ", "4"),
        ("<answer>3</answer> no: <answer>\n4 </answer>", "4"),
        ([{"role": "assistant", "content": "<answer>4</answer>"}], "4"),
    ],
)
def test_the_answer_is_the_last_one_in_its_tags(said: Prompt, answer: str) -> None:
    assert answer_in(said) == answer
