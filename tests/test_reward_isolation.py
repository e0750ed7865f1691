"""One contract for the user's reward functions, in the run's process and in one that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError
from tunesmith.rewards.loading import load_rewards
from tunesmith.rewards.reward_set import RewardSet
from tunesmith.rewards.trainer_state import TrainerState
from tunesmith.types import Completion, Rollout, Status, Task
from tunesmith.usercode.killable import Program, Workers

CODE = r"""
import asyncio, os, re, signal, sys, time
from fractions import Fraction
print("imported")
CALLS = []
FACTOR = 2.0

def lengths(completions, **columns):
    return [float(len(c)) for c in completions]

def counted(completions):
    CALLS.append(1)
    return [float(len(CALLS))] * len(completions)

def shared(completions):
    return [len(CALLS) * FACTOR] * len(completions)

async def judged(completions, answer, **columns):
    await asyncio.sleep(0.01)
    return [float(c == a) for c, a in zip(completions, answer)]

async def together(completions):
    CALLS.append("in")
    while CALLS.count("in") < 2:
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)

def partly(completions):
    return [None, "x", float("nan"), 1e300, 0.25][: len(completions)]

def logs(completions, log_extra, log_metric, trainer_state):
    log_extra("seen", [{1, 2}, Fraction(1, 2), object()][: len(completions)])
    log_metric("step", trainer_state.global_step)
    return [0.5] * len(completions)

def changes(prompts, completions, completion_ids):
    prompts.clear(), completion_ids.clear()
    return [1.0] * len(completions)

def raises(completions):
    raise ValueError("of the user's")

def exits(completions):
    raise SystemExit(3)

def wrong_length(completions):
    return [1.0]

def first(completion):
    return [1.0]

def by_text(completions):
    for text in completions:
        if text == "backtracks":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if text == "exits":
            os._exit(0)
        if text == "crashes":
            signal.raise_signal(signal.SIGSEGV)  # of this thread, which does not go on
        if text == "eats":
            held = bytearray(3 << 30)
        if text == "sleeps":
            time.sleep(60)
        if text == "is killed once" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)

async def by_text_later(completions):
    await asyncio.sleep(0.2)
    return by_text(completions)

async def held(completions):
    if completions[0] == "backtracks":
        re.match(r"(a+)+$", "a" * 60 + "b")
    return [1.0] * len(completions)

def process(completions, log_extra):
    log_extra("process", [os.getpid()] * len(completions))
    print("printed", flush=True)
    return [1.0] * len(completions)
"""

Make = Callable[..., RewardSet]


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    made: list[RewardSet] = []

    def rewards(*names: str, isolation: str = "process", **keys: Any) -> RewardSet:
        section = RewardSection(functions=tuple(f"code.py:{n}" for n in names), isolation=isolation, **keys)  # type: ignore[arg-type]
        made.append(load_rewards(section, tmp_path))
        return made[-1]

    yield rewards
    for one in made:
        one.close()


def rollouts(texts: Sequence[str], **columns: Any) -> list[Rollout]:
    made = [Rollout(Task(f"t{i}", "q", (1, 5), columns)) for i in range(len(texts))]
    for rollout in made:
        rollout.observe((1, 5))
        rollout.act(Completion([7, 2], [0.0, 0.0], [0, 0], "stop"))
    return made


def score(rewards: RewardSet, *calls: Sequence[str], **columns: Any) -> list[Rollout]:
    """All calls at once; each is one of a group."""
    made = [(rollouts(texts, **columns), texts) for texts in calls]

    async def run() -> None:
        await asyncio.gather(*(rewards.score(played, texts) for played, texts in made))

    asyncio.run(run())
    return [r for played, _ in made for r in played]


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
    assert found[0].task.prompt == "q" and found[0].completion_ids == [7, 2] and found[0].reward == 1.0


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


@pytest.mark.parametrize("name", ["by_text", "by_text_later"])
def test_what_would_end_the_run_ends_its_own_call(make: Make, name: str) -> None:
    rewards = make(name, timeout=2.5, memory="1GB")
    expected = {
        "fine": (Status.OK, ""),
        "backtracks": (Status.TIMED_OUT, "2.5 s"),
        "exits": (Status.REWARD_FAILED, "exit code 0"),
        "crashes": (Status.REWARD_FAILED, "SIGSEGV"),
        "eats": (Status.REWARD_FAILED, "MemoryError"),
        "is killed once": (Status.OK, ""),
        "is killed": (Status.REWARD_FAILED, "SIGKILL"),
    }
    found = score(rewards, *([text, "fine"] for text in expected))
    for place, (status, words) in enumerate(expected.values()):
        for rollout in found[2 * place : 2 * place + 2]:
            assert rollout.status is status and words in str(rollout.error), rollout.error


def test_a_file_that_ends_its_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\ndef f(completions): ...\nos._exit(0)\n")
    with pytest.raises(ConfigError, match="exit code 0"):
        load_rewards(RewardSection(functions=("bad.py:f",), isolation="process"), tmp_path)


def test_what_it_prints_is_printed(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = make("process")
    found = score(rewards, ["a"])
    assert found[0].metrics["process"] != os.getpid()
    seen, until = "", time.monotonic() + 20
    while "printed" not in seen and time.monotonic() < until:
        seen += capsys.readouterr().out
    assert "imported" in seen and "printed" in seen


def test_closing_leaves_no_process_behind(make: Make) -> None:
    rewards = make("process", "by_text", timeout=0.5)
    (one, *_) = score(rewards, ["sleeps", "a"], ["b"])
    (one,) = score(rewards, ["a"])
    process = int(one.metrics["process"])
    os.kill(process, 0)
    rewards.close()
    assert not Path(f"/proc/{process}").exists()


def test_a_worker_killed_between_calls_is_replaced(make: Make) -> None:
    rewards = make("process")
    (one,) = score(rewards, ["a"])
    os.kill(int(one.metrics["process"]), signal.SIGKILL)
    (two,) = score(rewards, ["a"])
    assert two.status is Status.OK and two.metrics["process"] != one.metrics["process"]


def test_a_worker_that_reads_nothing_holds_up_nobody(make: Make) -> None:
    rewards = make("held", timeout=1.5)
    found = score(rewards, ["backtracks"], *(["x" * 300_000] for _ in range(4)))
    assert [r.status for r in found] == [Status.TIMED_OUT, *[Status.OK] * 4]


NETWORK = """
import os, threading, torch
imported_in = os.getpid()
assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
torch.set_num_threads(2)
torch.randn(2_000_000).exp().sum()  # starts OpenMP's threads

def judged(completions, log_extra):
    torch.randn(2_000_000).exp().sum()
    log_extra("here", [float(os.getpid() == imported_in)] * len(completions))
    log_extra("threads", [float(torch.get_num_threads())] * len(completions))
    return [1.0] * len(completions)
"""


def test_a_network_that_is_loaded_with_the_file_computes(tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    section = RewardSection(functions=("network.py:judged",), isolation="process", timeout=20)
    rewards = load_rewards(section, tmp_path)
    (one,) = score(rewards, ["a"])
    rewards.close()
    assert one.status is Status.OK, one.error
    assert one.metrics == {"here": 1.0, "threads": 2.0}  # loaded once, and used with all threads


def test_a_fork_computes_without_the_threads_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "program.py").write_text(
        "import sys\nclass Program:\n    def __init__(self, place):\n        sys.path.insert(0, place)\n"
        "        import network\n        self.network = network\n"
        "    def __call__(self):\n        return self.network.judged(['a'], lambda *_: None)\n"
    )
    workers = Workers(Program(tmp_path / "program.py", "Program", arguments=(str(tmp_path),)))
    assert workers.server().forks
    assert workers.take().ask().result(20) == [1.0]
    workers.close()
