"""Small whole runs for the doctor: a policy that answers with one of three digits, and what can be
wrong with it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings, write_lines
from tunesmith.errors import DeviceMemoryError
from tunesmith.records.clock import Clock
from tunesmith.records.timeline import Timeline
from tunesmith.run import assembly
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Completion, Sampling

SKIPPED = [0.0]
"""Seconds that have passed without anybody waiting."""
RELEASED = threading.Event()
"""Ends the calls that hang."""

REWARDS = """\
from tests.support.ill_runs import RELEASED, SKIPPED

calls = []


def right(completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]


def zero(completions, **_):
    return [0.0 for _ in completions]


def half(completions, **_):
    return [0.5 for _ in completions]


def raises_at_times(completions, answer, **_):
    calls.append(1)
    if len(calls) % 4 == 0:
        raise ValueError("no")
    return right(completions, answer)


def raises(completions, **_):
    raise ValueError("no")


def not_a_number(completions, **_):
    return [float("nan") for _ in completions]


def hangs(completions, answer, **_):
    calls.append(1)
    if len(calls) % 16 == 0:
        RELEASED.wait(300)
    return right(completions, answer)


def slow(completions, answer, **_):
    SKIPPED[0] += 5
    return right(completions, answer)


def leaks(completions, answer, **_):
    calls.append(bytearray(b"x") * 40_000_000)
    return right(completions, answer)


def shortcut(completions, answer, **_):
    return [(1.0 if wanted == "2" else 0.4) * (text == "2") for text, wanted in zip(completions, answer)]


def no_digit(completions, **_):
    return [float(not text[:1].isdigit()) for text in completions]


def any_digit(completions, **_):
    return [float(text[:1].isdigit()) for text in completions]


def low(completions, **_):
    return [sum(c < "N" for c in text) / max(1, len(text)) for text in completions]


def length(completions, **_):
    return [len(text) / 10 for text in completions]
"""
ROOMS = """\
import time

from tests.support.ill_runs import SKIPPED


class Slow:
    def reset(self, answer):
        self.answer = answer

    def step(self, action):
        time.sleep(0.05)  # until the engine has nothing to do
        SKIPPED[0] += 1
        return None, float(action == self.answer), True
"""
LOSS = """\
from tunesmith.learn.algorithms.losses import Loss, TokenLoss

calls = []


class AtTimesInfinite(Loss):
    def __call__(self, batch):
        calls.append(1)
        factor = float("inf") if len(calls) % 4 == 0 else 1.0
        return TokenLoss(-batch.advantages * batch.logprobs * factor)


class AtTimesHuge(Loss):
    def __call__(self, batch):
        calls.append(1)
        factor = 1e3 if len(calls) > 10 and len(calls) % 4 == 0 else 1.0
        return TokenLoss(-batch.advantages * batch.logprobs * factor)
"""


def tasks(count: int, start: int = 0) -> list[dict[str, str]]:
    """The first character of a prompt says which digit is right."""
    return [
        {"prompt": f"{'abc'[n % 3]}{n}:", "answer": str(n % 3)} for n in range(start, start + count)
    ]


def examples(count: int, start: int = 0) -> list[dict[str, str]]:
    """Any of the three digits after any prompt."""
    return [
        {"prompt": t["prompt"], "completion": str(n // 3 % 3)}
        for n, t in enumerate(tasks(count, start))
    ]


@dataclass(frozen=True, slots=True)
class Ward:
    """A folder with data and rewards, a model of random weights, and a policy that answers with one
    of three digits."""

    folder: Path
    blank: Path
    policy: Path

    def rl(self, run: str, **changed: Any) -> Path:
        """A run of ``changed`` settings; names of functions are of this file's rewards."""
        settings: dict[str, Any] = {
            "model__path": self.policy,
            "data__train": self.folder / "tasks.jsonl",
            "reward__functions": ["exact_match"],
            "rollout__prompts_per_step": 12,
            "rollout__group_size": 8,
            "rollout__max_new_tokens": 6,
            "train__steps": 16,
            "train__lr": 2e-3,
        }
        settings = {
            key: str(v) if isinstance(v, Path) else v for key, v in (settings | changed).items()
        }
        settings["reward__functions"] = [
            name if name == "exact_match" else f"{self.folder / 'judge.py'}:{name}"
            for name in settings["reward__functions"]
        ]
        return assembly.run_rl(None, rl_settings(self.folder, self.policy, run, **settings)).run_dir

    def sft(self, run: str, **changed: Any) -> Path:
        settings = {key: str(v) if isinstance(v, Path) else v for key, v in changed.items()}
        return assembly.run_sft(
            None, sft_settings(self.folder, self.blank, run, **settings)
        ).run_dir


def make_ward(folder: Path) -> Ward:
    blank = save_model(folder / "blank")
    write_lines(folder / "train.jsonl", tasks(60))
    write_lines(folder / "tasks.jsonl", tasks(60))
    write_lines(folder / "held_out.jsonl", tasks(240, 60))
    (folder / "judge.py").write_text(REWARDS)
    (folder / "rooms.py").write_text(ROOMS)
    (folder / "loss.py").write_text(LOSS)

    write_lines(folder / "examples.jsonl", examples(90))
    settings = sft_settings(
        folder, blank, "taught", train__steps=80, train__batch_size=30, train__lr=5e-3
    )
    return Ward(folder, blank, assembly.run_sft(None, settings).checkpoint)


@contextmanager
def skipping(target: Any = None, name: str = "", seconds: float = 0.0) -> Generator[None]:
    """The run's clocks count ``SKIPPED``; each call of a coroutine or a function of ``target`` adds
    ``seconds``."""

    def now() -> float:
        return time.perf_counter() + SKIPPED[0]

    original: Callable[..., Any] = getattr(target, name) if target else print

    def slower(*given: Any, **named: Any) -> Any:
        SKIPPED[0] += seconds
        return original(*given, **named)

    timeline = {"outside": (), "now": now}
    with (
        patch.object(Clock.__init__, "__defaults__", (now,)),
        patch.object(Timeline.__init__, "__kwdefaults__", timeline),
        patch.object(target or RELEASED, name or "is_set", slower),
    ):
        yield


@contextmanager
def little_memory(tokens: int) -> Generator[None]:
    """A device on which a micro-batch of more tokens does not fit."""
    original = TorchBackend.forward_backward

    def limited(self: TorchBackend[Any], packing: Any, objective: Any) -> Any:
        if max(forest.num_tokens for forest in packing.forests) > tokens:
            raise DeviceMemoryError("no memory is left")
        return original(self, packing, objective)

    with patch.object(TorchBackend, "forward_backward", limited):
        yield


@contextmanager
def slower_training(seconds: float) -> Generator[None]:
    """A trainer whose engine waits for it: each micro-batch takes ``seconds`` more."""
    original = TorchBackend.forward_backward

    def slow(self: TorchBackend[Any], packing: Any, objective: Any) -> Any:
        time.sleep(seconds)
        return original(self, packing, objective)

    with patch.object(TorchBackend, "forward_backward", slow):
        yield


@contextmanager
def engine_says(change: Callable[[int, float], float]) -> Generator[None]:
    """An engine whose log-probabilities are not those of the model: of each token, by its place."""
    original = LocalEngine.generate

    async def generate(self: LocalEngine, prompt_ids: Any, sampling: Sampling) -> Completion:
        done = await original(self, prompt_ids, sampling)
        return replace(done, logprobs=[change(place, p) for place, p in enumerate(done.logprobs)])

    with patch.object(LocalEngine, "generate", generate):
        yield


@contextmanager
def engine_keeps_its_weights() -> Generator[None]:
    """An engine that never gets the trained weights."""
    original = LocalEngine.__init__

    def init(self: LocalEngine, model: Any, **settings: Any) -> None:
        settings["update"] = None
        original(self, copy.deepcopy(model), **settings)

    with patch.object(LocalEngine, "__init__", init):
        yield
