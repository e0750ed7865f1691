"""Reward functions that do everything code can do wrong, loaded on threads or in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RewardSection
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.types import Completion, Rollout, Task

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


@contextmanager
def loading(folder: Path) -> Iterator[Make]:
    """Loads rewards of the file by the names of its functions; closes them at the end."""
    (folder / "code.py").write_text(CODE)
    made: list[RewardSet] = []

    def rewards(*names: str, isolation: str = "process", **keys: Any) -> RewardSet:
        section = RewardSection(
            functions=tuple(f"code.py:{n}" for n in names), isolation=isolation, **keys
        )  # type: ignore[arg-type]
        made.append(load_rewards(section, folder))
        return made[-1]

    with chdir(folder):
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
