"""Resource servers of the real package, as a run starts them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import check_tokens, made_task, ok, play
from tests.support.packages import need
from tunesmith.config.schema import EnvironmentSection, Source
from tunesmith.errors import ConfigError
from tunesmith.learn.data.sources import SourceRow, read
from tunesmith.learn.environments.loading import load_environments
from tunesmith.learn.packages.nemo_gym import rows
from tunesmith.types import Rollout, Status, Task

TOKENIZER: Any = byte_level(template("qwen2"))
END = "<|im_end|>"


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def refuses(_: str) -> str:
    return f"I cannot.{END}"


def described(task: Task) -> Task:
    """With its tools in the prompt, as a run reads it."""
    text = TOKENIZER.apply_chat_template(
        task.prompt, task.columns.get("tools"), add_generation_prompt=True, tokenize=False
    )
    return replace(task, prompt_ids=tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"]))


def played(folder: Path, name: str, policy: Any, first: int = 1) -> Rollout:
    source = Source(path=f"nemo_gym:{name}[example]")
    lines = [row.columns for row in read(source) if isinstance(row, SourceRow)][:first]
    tasks = [described(made_task(TOKENIZER, **row)) for row in lines]
    section = EnvironmentSection(path=f"nemo_gym:{name}", max_turns=12)
    environments = load_environments(section, folder)
    found, engine = play(environments, TOKENIZER, tasks[-1:], policy, max_tokens=300_000)
    if found[0].status is Status.OK:
        check_tokens(found[0], engine)
    return found[0]


def test_tasks_of_a_file_may_hold_any_text(tmp_path: Path) -> None:
    said = "first\u2028second\x85\x0c"
    line = json.dumps({"responses_create_params": {"input": said}}, ensure_ascii=False)
    file = tmp_path / "tasks.jsonl"
    file.write_text(f"{line}\n{line}\n", encoding="utf-8")
    found = list(rows("http://h", "train", {"file": str(file)}))
    assert [row["prompt"] for row in found] == [[{"role": "user", "content": said}]] * 2
    file.write_text(f"\n{line}\n  \n{line}\n\n3\n\n", encoding="utf-8")
    several = rows("http://h", "train", {"file": str(file)})
    assert len([next(several), next(several)]) == 2
    with pytest.raises(ConfigError, match="line 6"):
        next(several)


@need("nemo_gym")
def test_function_calls_go_to_the_server_which_scores_the_response(tmp_path: Path) -> None:
    """A counter that counts in the session of its episode."""
    (row,) = list(rows("example_session_state_mgmt", "example", {}))[:1]
    line = json.loads(str(row["nemo_gym"]))
    missing = line["expected_count"] - line["initial_count"]

    def policy(text: str) -> str:
        if "tool_response" in text.rpartition("user")[2] or text.count("<tool_response>") > 1:
            return f"Done.{END}"
        return call("increment_counter", count=missing) + END

    right = ok(played(tmp_path, "example_session_state_mgmt", policy))
    assert right.reward == 1.0 and right.metrics["tool_calls"] == 1.0
    assert [len(record.turns) for record in right.records if record.turns] == [2]
    wrong = ok(played(tmp_path, "example_session_state_mgmt", refuses))
    assert wrong.reward == 0.0 and wrong.metrics["tool_calls"] == 0.0
    seen: list[str] = []

    def sneaks(text: str) -> str:
        seen.append(text)
        return f"Done.{END}" if "tool_response" in text else call("verify") + END

    ok(played(tmp_path, "example_session_state_mgmt", sneaks))
    assert "There is no tool verify" in seen[-1]


@need("nemo_gym")
def test_a_server_with_several_tools_gives_metrics(tmp_path: Path) -> None:
    (row,) = list(rows("example_multi_step", "example", {}))[:1]
    line = json.loads(str(row["nemo_gym"]))
    values = line["expected_synonym_values"]

    def policy(text: str) -> str:
        answers = len(re.findall("<tool_response>", text))
        if answers:
            return f"Done.{END}"
        two = call("get_synonym_value", synonym="Fat") + "\n"
        return two + call("extract_synonym_values", synonym_values=values) + END

    rollout = ok(played(tmp_path, "example_multi_step", policy))
    assert rollout.reward == 1.0 and rollout.metrics["set_overlap"] == 1.0
    assert rollout.metrics["tool_calls"] == 2.0


@need("nemo_gym")
def test_a_server_answers_each_turn(tmp_path: Path) -> None:
    """One whose episodes begin with what it says, and one that goes on with what it asks next."""
    hand = ok(played(tmp_path, "blackjack", lambda _: f"<action>stand</action>{END}"))
    assert hand.reward in (-1.0, 0.0, 1.0) and 17 <= hand.metrics["dealer_value"] <= 26
    assert [len(record.turns) for record in hand.records if record.turns] == [1]
    asked: list[str] = []

    def knows(text: str) -> str:
        asked.append(text)
        return f"The Eiffel Tower.{END}"

    talk = ok(played(tmp_path, "example_multi_turn_gymnasium", knows))
    assert talk.reward == 1.0 and "famous landmark" in asked[-1]
    assert [len(record.turns) for record in talk.records if record.turns] == [3]


@need("nemo_gym")
def test_a_server_finds_the_modules_beside_it(tmp_path: Path) -> None:
    assert ok(played(tmp_path, "calendar", refuses)).reward == 0.0


@need("nemo_gym")
def test_wrong_names_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="example_multi_step"):
        load_environments(EnvironmentSection(path="nemo_gym:example_multistep"), tmp_path)
    with pytest.raises(ConfigError, match="has no server 'gymnasium'") as refused:  # a library
        load_environments(EnvironmentSection(path="nemo_gym:gymnasium"), tmp_path)
    assert "'gymnasium'?" not in str(refused.value)
    for source in (
        Source(path="nemo_gym:example_multi_step"),
        Source(path="nemo_gym:http://127.0.0.1:9"),
        Source(path="nemo_gym:example_multi_step", options={"size": 3}),
        Source(path="nemo_gym:example_multi_step", options={"file": "nowhere.jsonl"}),
    ):
        with pytest.raises(ConfigError, match="nemo_gym"):
            list(read(source))


def test_tasks_are_read_of_a_file(tmp_path: Path) -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    lines = [
        {"responses_create_params": {"input": "2+3?", "tools": [tool]}, "answer": 5},
        {"responses_create_params": {"input": [{"role": "user", "content": "Hi."}]}},
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = rows("http://127.0.0.1:9", "train", {"file": str(file)})
    assert first["prompt"] == [{"role": "user", "content": "2+3?"}]
    described = {"name": "add", "parameters": {"type": "object"}}
    assert first["tools"] == [{"type": "function", "function": described}]
    assert json.loads(str(first["nemo_gym"])) == lines[0] and "tools" not in second
    file.write_text('{"prompt": "no task of the package"}\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(rows("http://127.0.0.1:9", "train", {"file": str(file)}))
