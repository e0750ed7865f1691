"""Built-in rewards: gold scores full, junk none, "no answer" apart from "wrong", hangs killed."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tunesmith.config.schema import RewardSection
from tunesmith.errors import DataError, DeadlineExceeded
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.learn.usercode import child
from tunesmith.learn.usercode.killable import Pool, UserProgram, WorkerError
from tunesmith.types import Rollout, Status, Task


def judge(rewards: RewardSet, pairs: Sequence[tuple[Any, str]], prompt: Any = "q") -> list[Rollout]:
    """Rollouts of (gold, completion) pairs, scored in one call."""
    rollouts = [
        Rollout(Task(f"t{i}", prompt, (), {"answer": gold})) for i, (gold, _) in enumerate(pairs)
    ]
    asyncio.run(rewards.score(rollouts, [text for _, text in pairs]))
    return rollouts


def builtin(
    name: str, pairs: Sequence[tuple[Any, str]], prompt: Any = "q", **keys: Any
) -> list[Rollout]:
    rewards = load_rewards(RewardSection(functions=(name,), **keys), Path())
    try:
        return judge(rewards, pairs, prompt)
    finally:
        rewards.close()


def outcome(r: Rollout) -> tuple[float | None, float | None]:
    return r.reward, r.metrics.get("answered")


def test_exact_match_ignores_whitespace_only() -> None:
    rollouts = builtin("exact_match", [("a b", " a\n b "), ("a b", "A b"), ("4", ""), (4, "4")])
    assert [outcome(r) for r in rollouts] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)]


def test_exact_match_extracts_the_last_match() -> None:
    pattern = r"<answer>(.*?)</answer>"
    pairs = [
        ("yes", "<answer>no</answer> wait <answer> yes </answer>"),
        ("yes", "<answer>no</answer>"),
        ("yes", "yes"),
    ]
    rollouts = builtin("exact_match", pairs, pattern=pattern)
    assert [outcome(r) for r in rollouts] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]


def test_numeric_match_tells_no_answer_from_wrong() -> None:
    pairs = [
        ("1,234", "so it is 1234.0"),
        ("72", "71"),
        ("72", "no idea"),
        ("72", ""),
        (0.5, r"$\frac{1}{2}$"),
    ]
    rollouts = builtin("numeric_match", pairs)
    assert [outcome(r) for r in rollouts] == [
        (1.0, 1.0),
        (0.0, 1.0),
        (0.0, 0.0),
        (0.0, 0.0),
        (1.0, 1.0),
    ]
    assert rollouts[2].metrics == {"answered": 0.0, "correct": 0.0}


def test_numeric_match_with_a_pattern() -> None:
    rollouts = builtin(
        "numeric_match", [("7", "#### 7\nI used 3 steps"), ("7", "7")], pattern=r"#### (.+)"
    )
    assert [outcome(r) for r in rollouts] == [(1.0, 1.0), (0.0, 0.0)]


def test_an_unusable_answer_is_a_data_error_and_a_missing_one_does_not_apply() -> None:
    rewards = load_rewards(RewardSection(functions=("numeric_match",)), Path())
    with pytest.raises(DataError, match="task t9: the column 'answer' 'many' holds no number"):
        rewards.check_tasks([Task("t9", "q", (), {"answer": "many"})])
    bad, missing = judge(rewards, [("many", "7"), (None, "7")])
    assert (
        bad.status is Status.REWARD_FAILED
        and "task t0" in str(bad.error)
        and "data error" in str(bad.error)
    )
    assert missing.status is Status.REWARD_FAILED and "no reward function applies" in str(
        missing.error
    )
    rewards.close()


def test_regex_format_matches_the_whole_completion() -> None:
    pattern = r"(?s)<think>.*</think>\s*\d+"
    texts = ["<think>a\nb</think> 7", "<think>a</think> 7!", "7", ""]
    rollouts = builtin("regex_format", [(None, t) for t in texts], pattern=pattern)
    assert [r.reward for r in rollouts] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.more
def test_a_pattern_that_backtracks_without_end_times_out_alone() -> None:
    pairs = [(None, "a" * 40 + "!"), (None, "aaa")]
    hung, fine = builtin("regex_format", pairs, pattern="(a+)+", timeout=2.0)
    assert (hung.status, hung.reward) == (Status.TIMED_OUT, None)
    assert fine.reward == 1.0


def test_conversational_completions() -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    assert builtin("numeric_match", [("4", "It is 4")], prompt)[0].reward == 1.0


@pytest.fixture(scope="module")
def mathematics() -> Generator[RewardSet]:
    rewards = load_rewards(RewardSection(functions=("math",), timeout=60.0), Path())
    yield rewards
    rewards.close()


EQUIVALENT = [
    ("72", "So the answer is 72."),
    (r"\frac{1}{2}", "0.5"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"$\frac12$", r"it is $\frac{2}{4}$"),
    (r"\boxed{7}", r"\boxed{7}"),
    ("The final answer is $7$", r"\boxed{7}"),
    ("1,234", r"\boxed{1234}"),
    ("1e3", r"\boxed{1000}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ("(0, 1]", r"we get $(0,1]$"),
    (r"3\sqrt{2}", r"\boxed{\sqrt{18}}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    ("x=5", r"\boxed{5}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"),
    (-3, r"first $7$, at last \boxed{-3}, done with 9"),
]
WRONG = [
    ("72", "71"),
    (r"3\sqrt{2}", "3"),
    (r"\frac{1}{2}", r"\boxed{2}"),
    ("(0, 1]", r"\boxed{[0,1)}"),
    (r"\{1, 2\}", r"\boxed{\{1, 3\}}"),
    ("7", r"7, no: \boxed{8}"),
]
NO_ANSWER = [("7", "no idea"), ("7", ""), ("7", r"\boxed{}"), ("7", "!!! ??? $$")]


def test_math_gold_equivalents_and_junk(mathematics: RewardSet) -> None:
    rollouts = judge(mathematics, EQUIVALENT + WRONG + NO_ANSWER)
    got = [outcome(r) for r in rollouts]
    want = (
        [(1.0, 1.0)] * len(EQUIVALENT) + [(0.0, 1.0)] * len(WRONG) + [(0.0, 0.0)] * len(NO_ANSWER)
    )
    for pair, g, w in zip(EQUIVALENT + WRONG + NO_ANSWER, got, want, strict=True):
        assert g == w, pair


def test_math_gold_that_does_not_parse_is_a_data_error(mathematics: RewardSet) -> None:
    bad, fine = judge(mathematics, [("??", "7"), ("7", "7")])
    assert (
        bad.status is Status.REWARD_FAILED
        and "task t0" in str(bad.error)
        and "'??'" in str(bad.error)
    )
    assert fine.reward == 1.0


@pytest.mark.slow
def test_math_kills_what_never_ends() -> None:
    rewards = load_rewards(RewardSection(functions=("math",), timeout=3.0), Path())
    hung, fine = judge(rewards, [("7", r"\boxed{9^{9^{9^{9}}}}"), ("7", "7")])
    rewards.close()
    assert (hung.status, hung.reward) == (Status.TIMED_OUT, None)
    assert "answered" not in hung.metrics
    assert fine.reward == 1.0


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(
        "import os, sys, time\n"
        "def work(what, *rest):\n"
        "    print('noise on stdout')\n"
        "    if what == 'hang':\n"
        "        while True: pass\n"
        "    if what == 'die':\n"
        "        print('last words', file=sys.stderr, flush=True); os._exit(3)\n"
        "    if what == 'raise': raise KeyError('inner')\n"
        "    if what == 'memory': return len('x' * (8 << 30))\n"
        "    if what == 'modules': return [m for m in ('torch', 'tunesmith', 'sympy') if m in "
        "sys.modules]\n"
        "    return [os.getpid(), what, *rest]\n"
    )
    return file


async def test_worker_hang_death_and_errors(program: Path) -> None:
    pool = Pool(UserProgram(program, "work"), 1.0)
    first = await pool.run("a", 1, "é\n")
    assert first[1:] == ["a", 1, "é\n"]
    assert await pool.run("modules") == []

    with pytest.raises(WorkerError, match="inner"):
        await pool.run("raise")
    with pytest.raises(WorkerError):
        await pool.run("memory")
    assert (await pool.run("b"))[0] == first[0], "an exception does not cost the worker"

    hung = asyncio.create_task(pool.run("hang"))
    after = asyncio.create_task(pool.run("c"))
    with pytest.raises(DeadlineExceeded):
        await hung
    assert (await after)[0] != first[0], "a killed worker is replaced"

    with pytest.raises(WorkerError, match=r"(?s)code 3.*last words"):
        await pool.run("die")
    assert (await pool.run("d"))[1] == "d"
    pool.close()
    assert (await pool.run("e"))[1] == "e", "a closed pool starts anew"
    pool.close()


async def test_last_words_are_told_before_the_thread_that_forwards_them_has_run(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child.Process, "_forward", lambda *_: None)
    pool = Pool(UserProgram(program, "work"), 60.0)
    with pytest.raises(WorkerError, match=r"(?s)code 3.*last words"):
        await pool.run("die")
    pool.close()


async def test_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module_at_all\n")
    pool = Pool(UserProgram(file, "work"), 1.0)
    with pytest.raises(WorkerError, match="no_such_module_at_all"):
        await pool.run("a")
    pool.close()


async def test_closing_ends_the_processes(program: Path) -> None:
    pool = Pool(UserProgram(program, "work"), 5.0, workers=2)
    pids = {(await pool.run("a"))[0] for _ in range(3)}
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.more
async def test_a_worker_for_which_nobody_waits_any_more_is_used_next(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import os, time\ntime.sleep(0.3)\ndef work(): return os.getpid()\n")
    pool = Pool(UserProgram(file, "work"), 5.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await pool.run()
    server = (await asyncio.to_thread(pool.server)).pid
    children = Path(f"/proc/{server}/task/{server}/children")
    while not children.read_text():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert children.read_text().split() == [str(await pool.run())] == children.read_text().split()
    pool.close()


FORGES = """
import os, stat, struct, time

def work(text):
    data = eval(text)
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, struct.pack("!i", len(data)) + data)
        except OSError:
            pass
    time.sleep(60)
"""


@pytest.mark.more
async def test_a_worker_that_forges_an_answer_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "forges.py"
    file.write_text(FORGES)
    pool = Pool(UserProgram(file, "work"), 30.0)
    for forged in ("b'5'", "b'[[1], 2, null]'", "b'no'", "b'[' * 100_000"):
        with pytest.raises(WorkerError):
            await pool.run(forged)
    pool.close()
