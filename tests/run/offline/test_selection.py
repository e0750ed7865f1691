"""What is chosen among scored completions, and what is counted: hand-computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.errors import ConfigError
from tunesmith.run.offline.rounds import RftRound, select_answers
from tunesmith.run.offline.selection import (
    Yield,
    accuracy,
    best,
    conditional,
    correct_answers,
    interval,
    level,
    level_borders,
    pair,
    reasoning_path,
    select,
)


def completion(
    text: str, reward: float | None = 1.0, tokens: int = 1, reason: str = "stop", **more: Any
) -> Any:
    return {"completion": text, "reward": reward, "tokens": tokens, "finish_reason": reason, **more}


def line(*rewards: float | None, **columns: Any) -> dict[str, Any]:
    return {
        "prompt": "p",
        **columns,
        "completions": [completion(f"c{i}", r) for i, r in enumerate(rewards)],
    }


def test_best_takes_the_first_of_the_highest() -> None:
    assert best(line(0.5, 2.0, None, 2.0, gold="g")) == [
        {"prompt": "p", "gold": "g", **completion("c1", 2.0)}
    ]
    assert best(line(None)) == "without a reward"


def test_pairs_skip_ties_and_lines_without_two_rewards() -> None:
    chosen = {
        "prompt": "p",
        "chosen": "c1",
        "rejected": "c0",
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
    }
    assert pair(line(0.0, 1.0, 0.5), 0.25) == [chosen]
    assert pair(line(1.0, 1.0), 0.25) == pair(line(0.4, 0.6), 0.25) == "tied"
    assert pair(line(None, 1.0), 0.25) == "without two rewards"


def test_the_reward_is_written_into_the_prompt_or_the_last_user_message() -> None:
    template = "{prompt} <rm_score>: {reward} "
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a {reward}"},
    ]
    made = conditional(line(0.126), template, None)
    assert made == [{"prompt": "p <rm_score>: 0.13 ", "completion": "c0", "reward": 0.126}]
    [talked] = conditional({**line(1.0), "prompt": talk}, template, None)
    assert isinstance(talked, dict)
    assert talked["prompt"] == [
        talk[0],
        {"role": "user", "content": "a {reward} <rm_score>: 1.00 "},
    ]
    assert talk[1]["content"] == "a {reward}", "the data is left as it was"
    assert conditional(line(None), template, None) == "without a reward"


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.integers(2, 6))
def test_levels_are_in_the_order_of_the_rewards(rewards: list[float], levels: int) -> None:
    borders = level_borders(rewards, levels)
    made = [level(r, borders) for r in sorted(rewards)]
    assert made == sorted(made) and made[0] == 1 and made[-1] <= levels
    if len(set(rewards)) == len(rewards) and len(rewards) % levels == 0:
        assert all(made.count(k) == len(rewards) // levels for k in range(1, levels + 1))


def test_an_answer_that_was_cut_off_or_failed_is_not_learned() -> None:
    records = [
        completion("a"),
        completion("b", reason="length"),
        completion("c", 0.99),
        completion("d", None),
    ]
    assert [r["completion"] for r in correct_answers({"completions": records}, 1.0)] == ["a"]


def test_selection_rules() -> None:
    records = [
        completion("2+3=5 so 5", tokens=9),
        completion("3+2=5 so 5", tokens=7),
        completion("first 2 + 3 = 5, thus 5", tokens=5),
        completion("2+3=5 so 5", tokens=9),
    ]
    assert select(records, "first") == records[:1]
    assert select(records, "all") == records[:3], "no text twice"
    assert select(records, "shortest") == [records[2]]
    assert select(records, "distinct") == records[:2], (
        "another order of terms is another path, other words are not"
    )
    assert select([], "distinct") == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("He has 3 × 4 = 12 and then 12+1=13 apples.", ("3*4=12", "12+1=13")),
        ("<<48/2=24>>24 clips, so $48 + $24 = $72.", ("48/2=24", "48+24=72")),
        (";8+4=12;7+9+1=17;972", ("8+4=12", "7+9+1=17")),
        ("x = 5", ("x", "=", "5")),
        ("The  ANSWER is 5", ("the", "answer", "is", "5")),
        ("", ()),
    ],
)
def test_reasoning_paths(text: str, path: tuple[str, ...]) -> None:
    assert reasoning_path(text) == path


def test_wilson_intervals() -> None:
    """Values of statsmodels.stats.proportion.proportion_confint(method='wilson')."""
    assert interval(8, 10) == pytest.approx([0.8, 0.4901625, 0.9433178], abs=1e-6)
    assert interval(0, 20) == pytest.approx([0.0, 0.0, 0.1611252], abs=1e-6)
    assert interval(20, 20) == pytest.approx([1.0, 0.8388748, 1.0], abs=1e-6)
    assert interval(0, 0) is None


@given(st.integers(1, 500), st.data())
def test_an_interval_holds_its_share(total: int, data: st.DataObject) -> None:
    share, low, high = interval(data.draw(st.integers(0, total)), total)
    assert 0 <= low <= share <= high <= 1


def test_no_answer_is_not_a_wrong_answer() -> None:
    def one(reward: float | None, answered: float | None, **more: Any) -> dict[str, Any]:
        metrics = {} if answered is None else {"metrics": {"answered": answered}}
        return {"completions": [completion("c", reward, **metrics, **more)]}

    found = accuracy(
        iter([one(1.0, 1.0), one(0.0, 1.0), one(0.0, 0.0), one(None, None, error="slow")]), 1.0
    )
    assert found["accuracy"][0] == 0.25
    assert found["answered"][0] == 0.5, "a failed one has no answer either"
    assert found["accuracy_of_answered"][0] == 0.5
    assert found["failed"] == 1
    assert accuracy(iter([one(1.0, None)]), 1.0)["answered"] is None, "a reward that does not tell"


def write_samples(directory: Path, lines: list[dict[str, Any]]) -> RftRound:
    this = RftRound(directory)
    this.samples.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return this


def test_the_yield_is_counted_by_question(tmp_path: Path) -> None:
    this = write_samples(tmp_path, [line(1.0, 1.0, 0.0), line(0.0, 0.0, None), line(1.0, 0.0, 0.0)])
    found = select_answers(this, "all", 1.0, 3)
    assert (
        found["questions"],
        found["solved"],
        found["samples"],
        found["correct"],
        found["kept"],
    ) == (3, 2, 9, 3, 3)
    assert found["questions_by_correct_samples"] == {"0": 1, "1": 1, "2": 1, "3": 0}
    assert found["solved_share"] == interval(2, 3)
    learned = [json.loads(one) for one in this.train.read_text().splitlines()]
    assert learned[0] == {"task": 0, "prompt": "p", "completion": "c0"}
    assert [one["task"] for one in learned] == [0, 0, 2]
    counted = [json.loads(one) for one in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert counted[1] == {"prompt": "p", "samples": 3, "correct": 0, "kept": 0}


def test_nothing_right_is_refused_with_the_highest_reward(tmp_path: Path) -> None:
    this = write_samples(tmp_path, [line(0.2, 0.75)])
    with pytest.raises(ConfigError, match=r"none of the 2 samples.*at least 1 .*highest is 0\.75"):
        select_answers(this, "all", 1.0, 2)
    assert (tmp_path / "yield.json").exists(), "the report is there to look at"


def test_a_best_answer_that_is_not_good_enough_is_left_out() -> None:
    assert best(line(0.0, 1.0), 1.0) == [{"prompt": "p", **completion("c1", 1.0)}]
    assert best(line(0.0, 0.5), 1.0) == best(line(0.0, 0.0), 1.0) == "below min_reward"
    [chosen] = pair(line(0.0, 1.0), 0.0, 1.0)
    assert isinstance(chosen, dict) and chosen["chosen_reward"] == 1.0
    assert (pair(line(0.0, 0.5), 0.0, 1.0), pair(line(0.0, 0.0), 0.0, 1.0)) == (
        "below min_reward",
        "tied",
    )
    assert isinstance(best(line(0.0, 0.0)), list)


def test_more_correct_answers_than_were_asked_for_are_counted() -> None:
    counts = Yield(2)
    counts.add(line(1.0, 1.0, 1.0, 0.0), 3, 1)
    assert counts.report()["questions_by_correct_samples"] == {"0": 0, "1": 0, "2": 0, "3": 1}
