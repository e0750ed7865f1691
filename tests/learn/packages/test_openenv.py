"""An environment behind the real package's server and client."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.documents import SUPPORT
from tests.support.episodes import made_task, ok, play
from tests.support.packages import need
from tunesmith.config.schema import EnvironmentSection, Source
from tunesmith.errors import ConfigError
from tunesmith.learn.data.sources import SourceRow, read
from tunesmith.learn.environments.loading import load_environments
from tunesmith.learn.packages.openenv import action_in
from tunesmith.types import Rollout, Status

TOKENIZER = byte_level(template("qwen2"))
END = "<|im_end|>"
NAME = "openenv:hot_and_cold:app"
SCHEMA = {"properties": {"number": {"type": "integer"}}, "required": ["number"]}


@pytest.fixture(autouse=True)
def environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(SUPPORT / "tasksets")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))


def played(folder: Path, policy: str | None, *resets: dict[str, int]) -> list[Rollout]:
    source = Source(path=NAME, options={"resets": list(resets)})
    rows = [row.columns for row in read(source) if isinstance(row, SourceRow)]
    tasks = [made_task(TOKENIZER, identity=str(n), **row) for n, row in enumerate(rows)]
    section = EnvironmentSection(path=NAME, max_turns=12)
    environments = load_environments(section, folder)

    def rising(text: str) -> str:
        return f"{len(re.findall('higher', text))}{END}" if policy is None else policy + END

    found, _ = play(environments, TOKENIZER, tasks, rising, max_tokens=300_000)
    return found


@need("openenv")
def test_episodes_are_played_over_the_server_that_the_run_starts(tmp_path: Path) -> None:
    first, second = played(tmp_path, None, {"seed": 13}, {"seed": 2})
    assert ok(first).reward == pytest.approx(1.0 - 3 * 0.1), "3 wrong guesses, then the right one"
    assert ok(second).reward == pytest.approx(1.0 - 2 * 0.1)
    assert [len(rollout.turns) for rollout in (first, second)] == [4, 3]


@need("openenv")
def test_an_action_that_the_server_refuses_is_no_action(tmp_path: Path) -> None:
    (rollout,) = played(tmp_path, "hot", {"seed": 3})
    assert ok(rollout).reward == 0.0 and rollout.metrics["bad_actions"] == len(rollout.turns) == 12


@need("openenv")
def test_a_server_that_dies_fails_its_episode_and_is_started_again(tmp_path: Path) -> None:
    (dead,) = played(tmp_path, '{"number": 99}', {"seed": 3})
    assert dead.status is not Status.OK and dead.reward is None
    (alive,) = played(tmp_path, "3", {"seed": 3})
    assert ok(alive).reward == 1.0


@need("openenv")
def test_an_environment_that_floods_fails_its_episode(tmp_path: Path) -> None:
    (flooded,) = played(tmp_path, "3", {"seed": 3, "flood": 200_000})
    assert flooded.status is not Status.OK and "200" in str(flooded.error)


@need("openenv")
def test_an_environment_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_env"):
        load_environments(EnvironmentSection(path="openenv:no_such_env"), tmp_path)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("5", {"number": 5}),
        ('<think>4?</think> {"number": 5}', {"number": 5}),
        ('```json\n{"number": 5}```', {"number": 5}),
        ('{"numbers": 5}', None),
        ("{}", None),
    ],
)
def test_an_action_is_json_or_its_only_field(text: str, action: object) -> None:
    assert action_in(text, SCHEMA) == action
