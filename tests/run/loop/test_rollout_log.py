"""``rollouts.jsonl``: whole groups, who wrote what, what was learned; bounded, and cut where a run
resumes."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sums, write_lines
from tunesmith.records.metrics import read_metrics, rotated
from tunesmith.run import assembly
from tunesmith.run.loop.rollout_log import RolloutLog, contrast, examples, read_evaluated
from tunesmith.types import Completion, Record, Rollout, RolloutGroup, Status, Task


def text(ids: Sequence[int]) -> str:
    return "".join(chr(96 + i) for i in ids)


def log(path: Path, groups: int = 1, most: int = 10**9) -> RolloutLog:
    return RolloutLog(path, groups, most, text, lambda ids: f"<{text(ids)}>")


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """All lines, oldest first."""
    return [line for file in rotated(path) for line in read_metrics(file)]


def played(task: Task, reward: float | None, *ids: int) -> Rollout:
    rollout = Rollout(task, reward=reward)
    rollout.observe(task.prompt_ids)
    rollout.act(Completion([*ids], [0.0] * len(ids), [3] * len(ids), "stop"))
    return rollout


def group(number: int, *rewards: float | None, **columns: Any) -> RolloutGroup:
    task = Task(f"{Path.cwd()}/data/train.jsonl:{number}", "a", (1,), columns)
    return RolloutGroup(task, [played(task, reward, 2, 3) for reward in rewards])


def test_groups_are_whole_with_what_stood_beside_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    broken = group(8, 0.0, None)
    broken.rollouts[1].fail(Status.REWARD_FAILED, "no")
    made = log(path).begin()
    made.write(
        1, [group(7, 1.0, 0.0, answer="bc", day=datetime.date(2024, 1, 2), long="x" * 9999), broken]
    )
    made.close()
    lines = read_rollouts(path)
    assert [(line["group"], line["reward"], line["status"]) for line in lines] == [
        (0, 1.0, "ok"), (0, 0.0, "ok"), (1, None, "reward_failed"),
    ]  # fmt: skip
    assert lines[0]["columns"]["answer"] == "bc" and len(lines[0]["columns"]["long"]) == 2000
    assert "2024" in lines[0]["columns"]["day"]
    assert lines[0]["task"] == "data/train.jsonl:7" and lines[0]["rendered"] == "<a>"
    assert (
        lines[0]["completion"] == "bc"
        and lines[0]["versions"] == [3, 3]
        and "parts" not in lines[0]
    )
    best_and_worst = contrast(lines)
    assert best_and_worst is not None and [line["reward"] for line in best_and_worst] == [1.0, 0.0]


def test_parts_say_who_wrote_what_and_what_was_trained(tmp_path: Path) -> None:
    """A turn, an answer of the environment, a turn that is paid; then a fork that repeats the first
    turn."""
    one = group(1, 1.0).rollouts[0]
    one.observe([4])
    one.act(Completion([5, 6], [0.0] * 2, [4] * 2, "stop"))
    one.records[-1].pay(0.5)
    one.records.append(Record())
    one.observe([1, 2, 3])
    one.act(Completion([7], [0.0], [4], "stop"))
    one.by_token = {"advantage": [0.0, 0.5, 0.25, 0.25]}
    made = log(tmp_path / "rollouts.jsonl").begin()
    [line] = made.write(1, [RolloutGroup(one.task, [one])])
    made.close()
    assert [(p["record"], p["by"], p["text"], p["trained"]) for p in line["parts"]] == [
        (0, "policy", "<bc>", True), (0, "environment", "<d>", False), (0, "policy", "<ef>", True),
        (1, "policy", "<g>", True),
    ]  # fmt: skip
    assert (
        line["parts"][2]["reward"] == 0.5
        and line["versions"] == [3, 4]
        and line["advantage"] == 0.25
    )


def by_token(
    path: Path, render: Callable[[Sequence[int]], str], *ids: int, **columns: Sequence[float]
) -> dict[str, Any]:
    rollout = played(Task("t", "a", (1,)), 1.0, *ids)
    rollout.by_token = columns
    made = RolloutLog(path / "rollouts.jsonl", 1, 10**9, render, render).begin()
    [line] = made.write(1, [RolloutGroup(rollout.task, [rollout])])
    made.close()
    return line["by_token"]


def test_each_token_has_its_text_and_what_is_known_of_it(tmp_path: Path) -> None:
    def words(ids: Sequence[int]) -> str:
        """As tokenizers do that begin each word with a space and drop the first one."""
        return " ".join("w" * i for i in ids)

    def of_bytes(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    found = by_token(
        tmp_path, words, 1, 2, 2, advantage=[0.5, -0.123456, math.nan], ratio=[1.0, 1.0, 1.0]
    )
    assert (
        found["text"] == [" w", " ww", " ww"] and found["logprob"] == 0.0 and found["version"] == 3
    )
    assert found["advantage"][:2] == [0.5, -0.1235] and found["ratio"] == 1.0
    texts = by_token(tmp_path, of_bytes, 72, *"é🙂".encode(), 0xC3, 33)["text"]
    assert texts == ["H", "é", "", "🙂", "", "", "", "\ufffd", "!"], (
        "a character of several tokens is the first one's"
    )


def test_a_forked_rollout_has_the_tokens_of_all_records_and_none_of_the_environment(
    tmp_path: Path,
) -> None:
    one = group(1, 1.0).rollouts[0]
    one.observe([4])
    one.act(Completion([5], [-1.0], [4], "stop"))
    one.records.append(Record())
    one.observe([1, 2])
    one.act(Completion([7], [-2.0], [5], "stop"))
    made = RolloutLog(tmp_path / "rollouts.jsonl", 1, 10**9, text, text).begin()
    off = RolloutLog(tmp_path / "off.jsonl", 1, 10**9, text, text, tokens=False).begin()
    [line], [without] = (log.write(1, [RolloutGroup(one.task, [one])]) for log in (made, off))
    assert line["by_token"] == {
        "text": ["b", "c", "e", "g"],
        "logprob": [0, 0, -1, -2],
        "version": [3, 3, 4, 5],
    }
    assert (
        sum(part["tokens"] for part in line["parts"] if part["by"] == "policy") == 4
        and "by_token" not in without
    )


def test_the_two_files_stay_below_their_size_and_keep_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    most = 20_000
    made = log(path, most=most).begin()
    for step in range(1, 101):
        made.write(step, [group(step, 1.0, 0.0)])
        assert sum(file.stat().st_size for file in rotated(path) if file.exists()) < most + 2_000
    made.close()
    kept = [line["step"] for line in read_rollouts(path)]
    assert kept == sorted(kept) and kept[-1] == 100 and kept[0] > 1
    log(path, most=most).begin(kept[2]).close()
    assert {line["step"] for line in read_rollouts(path)} == set(kept[:3]), (
        "what came after a checkpoint is dropped"
    )
    log(path).begin().close()
    assert read_rollouts(path) == [], "and a new run begins empty"


def test_examples_are_the_first_and_the_last_answers_to_a_prompt() -> None:
    def line(step: int, task: str, answer: str) -> dict[str, Any]:
        prompt = [{"role": "user", "content": task}]
        return {
            "kind": "eval",
            "step": step,
            "task": task,
            "prompt": prompt,
            "completion": answer,
            "reward": step,
        }

    lines = [
        line(0, "a", "1"),
        line(0, "b", "2"),
        line(5, "a", "3"),
        line(9, "b", "4"),
        line(9, "a", "5"),
    ]
    found = [(e.prompt, e.before, e.after) for e in examples(lines, 5)]
    assert found == [("a", ("1", 0), ("5", 9)), ("b", ("2", 0), ("4", 9))]
    assert examples(lines[:2], 5) == []


@pytest.mark.parametrize(
    "changed",
    [{}, {"rollout__max_staleness": 1, "rollout__partial": True, "rollout__over_generation": 1.5}],
    ids=["in step", "ahead"],
)
def test_a_run_keeps_advantages_that_sum_to_zero_and_shows_answers(
    tmp_path: Path,
    changed: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    held_out = write_lines(tmp_path / "held_out.jsonl", sums(3, 50))
    settings = rl_settings(
        tmp_path, save_model(tmp_path / "model"), data__eval=str(held_out), **changed
    )
    outcome = assembly.run_rl(None, settings)
    lines = [
        json.loads(line) for line in (outcome.run_dir / "rollouts.jsonl").read_text().splitlines()
    ]
    train = [line for line in lines if line["kind"] == "train"]
    assert {(line["step"], line["group"]) for line in train} == {
        (s, g) for s in (1, 2, 3) for g in (0, 1)
    }
    assert len(train) == 3 * 2 * 4 and all(line["columns"]["answer"] for line in train)
    for step in (1, 2, 3):
        same = [line["advantage"] for line in train if (line["step"], line["group"]) == (step, 0)]
        assert sum(same) == pytest.approx(0, abs=1e-3) and any(same)
    assert all(line["task"].startswith("train.jsonl:") for line in train)
    assert json.loads((outcome.run_dir / "plan.json").read_text())["memory"][0]["peak"] > 0
    for line in train:
        told = line["by_token"]
        assert len(told["text"]) == line["tokens"]
        assert told["advantage"] == pytest.approx(line["advantage"], abs=1e-3)
        assert all(-20 < p <= 0 for p in told["logprob"])
    assert list(read_evaluated(outcome.run_dir / "rollouts.jsonl")) == [
        line for line in lines if line["kind"] == "eval"
    ]
    assert all(line["advantage"] is None for line in lines if line["kind"] == "eval")
    assert len(outcome.examples) == 3
    out = capsys.readouterr().out
    assert "sample of step 1, train.jsonl:" in out and "\x1b" not in out
    assert (outcome.run_dir / "model").resolve() == outcome.checkpoint.resolve()
