"""One contract for the user's reward functions, in the run's process and in one that can be
killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.isolated_rewards import Make, loading, rollouts, score
from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.learn.rewards.trainer_state import TrainerState
from tunesmith.types import Status


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def isolation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with loading(tmp_path) as rewards:
        yield rewards


def test_scores_weights_and_what_does_not_apply(make: Make, isolation: str) -> None:
    rewards = make("lengths", "partly", isolation=isolation, weights=(2.0, 1.0))
    found = score(rewards, ["a", "bb", "c", "d", "e"])
    assert [r.rewards.get("lengths") for r in found] == [1.0, 2.0, 1.0, 1.0, 1.0]
    assert [r.reward for r in found] == [2.0, None, None, None, 2.25]
    assert [r.status for r in found] == [Status.OK, *[Status.REWARD_FAILED] * 3, Status.OK]
    assert "index 1" in str(found[1].error) and "1e+15" in str(found[3].error)


def test_state_is_kept_and_shared_between_functions(make: Make, isolation: str) -> None:
    rewards = make("counted", "shared", isolation=isolation)
    for number in (1, 2, 3):
        (one,) = score(rewards, ["a"])
        assert one.rewards["counted"] == number
    assert one.rewards["shared"] in (4.0, 6.0)


def test_coroutines_run_together(make: Make, isolation: str) -> None:
    found = score(make("judged", isolation=isolation), ["4", "5"], ["4"], answer="4")
    assert [r.reward for r in found] == [1.0, 0.0, 1.0]
    found = score(make("together", isolation=isolation), ["a"], ["b"])
    assert [r.reward for r in found] == [1.0, 1.0]


def test_what_is_logged_and_where_the_run_stands(make: Make, isolation: str) -> None:
    rewards = make("logs", isolation=isolation)
    rewards.state = TrainerState(global_step=7)
    found = score(rewards, ["a", "b", "c"])
    assert [r.metrics.get("seen", r.notes.get("seen")) for r in found][:2] == [[1, 2], 0.5]
    assert str(found[2].notes["seen"]).startswith("<object")
    assert rewards.metrics(found)["logged/step"] == 7.0


def test_arguments_belong_to_the_function(make: Make, isolation: str) -> None:
    found = score(make("changes", isolation=isolation), ["a"])
    assert (
        found[0].task.prompt == "q" and found[0].completion_ids == [7, 2] and found[0].reward == 1.0
    )


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "of the user's"), ("exits", "SystemExit"), ("wrong_length", "2")]
)
def test_what_goes_wrong_fails_the_call(make: Make, isolation: str, name: str, words: str) -> None:
    found = score(make(name, isolation=isolation), ["a", "b"])
    assert [r.status for r in found] == [Status.REWARD_FAILED] * 2 and words in str(found[0].error)
    if name == "raises":
        assert "code.py" in str(found[0].error) and "reward_program" not in str(found[0].error)


def test_a_column_that_is_missing_is_refused(make: Make, isolation: str) -> None:
    for name, word in (("judged", "answer"), ("first", "completions")):
        with pytest.raises(ConfigError, match=word):
            make(name, isolation=isolation).check_tasks([r.task for r in rollouts(["a"])])


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path, isolation: str) -> None:
    (tmp_path / "bad.py").write_text("def f(completions): ...\nimport no_such_module_at_all\n")
    with pytest.raises(ConfigError, match="no_such_module_at_all"):
        load_rewards(RewardSection(functions=("bad.py:f",), isolation=isolation), tmp_path)  # type: ignore[arg-type]


def test_a_file_that_ends_its_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\ndef f(completions): ...\nos._exit(0)\n")
    with pytest.raises(ConfigError, match="exit code 0"):
        load_rewards(RewardSection(functions=("bad.py:f",), isolation="process"), tmp_path)


def test_what_it_prints_is_printed(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = make("process")
    found = score(rewards, ["a"])
    assert found[0].metrics["process"] != os.getpid()
    seen = ""
    until = time.monotonic() + 60
    while not ("imported" in seen and "printed" in seen) and time.monotonic() < until:
        seen += capsys.readouterr().out
        time.sleep(0.01)
    assert "imported" in seen and "printed" in seen


@pytest.mark.slow
def test_closing_leaves_no_process_behind(make: Make) -> None:
    rewards = make("process", "by_text", timeout=0.5)
    (one, *_) = score(rewards, ["sleeps", "a"], ["b"])
    rewards._timeout = 60.0
    (one,) = score(rewards, ["a"])
    process = int(one.metrics["process"])
    os.kill(process, 0)
    rewards.close()
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.slow
def test_a_worker_killed_between_calls_is_replaced(make: Make) -> None:
    rewards = make("process")
    (one,) = score(rewards, ["a"])
    os.kill(int(one.metrics["process"]), signal.SIGKILL)
    (two,) = score(rewards, ["a"])
    assert two.status is Status.OK and two.metrics["process"] != one.metrics["process"]
