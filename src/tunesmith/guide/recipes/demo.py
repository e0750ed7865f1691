"""``tunesmith demo``: an untrained model learns to add, first from examples and then from a reward.

Some examples show the working and some only the answer, so the model is then right sometimes.
Reinforcement learning rewards only a correct number at the end, and the model learns to show its
working. Both stages are ordinary commands on run files, which stay in the demo's directory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tunesmith.errors import ConfigError, StorageError, boundary
from tunesmith.guide.recipes.arithmetic import (
    ANSWER,
    make_model,
    problems,
    write_examples,
    write_tasks,
)
from tunesmith.records.progress import time_table
from tunesmith.run.assembly import run_rl, run_sft
from tunesmith.run.assembly.session import RunResult

TRAIN = 6000
HELD_OUT = 200
WORKED_SHARE = 0.45
HIDDEN = 64
LAYERS = 3
SFT_STEPS = 450
RL_STEPS = 24
RL_COST = 7
"""A step of reinforcement learning takes as long as this many supervised ones."""
SECONDS = 130
"""How long the demo may train on cores of its own."""
MOST_SLOWED = 2.0
"""How many times as long it may train beside other programs."""
LEAST = 0.4
"""The least share of the steps: with fewer, nothing is learned."""

_RUN_FILES = Path(__file__).parent / "start"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Greedy accuracy on the held-out problems, and a checkpoint that transformers loads."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    checkpoint: str
    share: float
    """The share of the steps that are taken: fewer on a slow or busy machine."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a supervised step: of computing, and by the clock, which is more on a busy
    machine."""

    computing: float
    clock: float

    def at(self, clock: float) -> Pace:
        """The pace of steps that take so long by the clock on a machine that is as busy."""
        return Pace(clock * self.computing / self.clock, clock)

    def share(self, steps: float, spent: float = 0.0) -> float:
        """How much of this many supervised steps there is time for, between ``LEAST`` and 1.

        Args:
            spent: seconds by the clock that are over.
        """
        clock = max(self.clock, 1e-9)
        slowed = min(MOST_SLOWED, max(1.0, clock / max(self.computing, 1e-9)))
        return max(LEAST, min(1.0, (SECONDS * slowed - spent) / (clock * steps)))


def run_demo(directory: Path, seed: int) -> DemoResult:
    """Create model and data in ``directory``, run both stages, and print the result.

    The machine's speed is measured first, and again by the steps of the first stage; on a slow or
    busy one there are fewer steps, which is printed.

    Raises:
        ConfigError: the directory is not empty.
    """
    started = time.perf_counter()
    with boundary(StorageError, f"cannot write to {directory}", OSError):
        if directory.is_dir() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty: choose another --dir, or delete it")
        directory.mkdir(parents=True, exist_ok=True)
    train, held_out = problems(seed, TRAIN, HELD_OUT)
    make_model(directory / "model", seed, hidden=HIDDEN, layers=LAYERS)
    write_examples(directory / "examples.jsonl", train, WORKED_SHARE, seed)
    write_tasks(directory / "train.jsonl", train)
    write_tasks(directory / "held_out.jsonl", held_out)
    began = time.perf_counter()
    pace = measure(directory / "model")
    planned = SFT_STEPS + RL_COST * RL_STEPS
    sft_steps = _fewer(SFT_STEPS, pace.share(planned), pace)
    values = {
        "directory": directory.resolve(),
        "seed": seed,
        "sft_steps": sft_steps,
        "pattern": ANSWER,
    }
    _write_run_file(directory, "sft", values)
    _title(f"1. By example: {sft_steps} steps of 64 sums, some worked and most not")
    examples = run_sft(directory / "sft.toml")
    # Other programs may have come or gone since.
    pace = measure(directory / "model").at(median(row["seconds"] for row in examples.metrics))
    left = pace.share(RL_COST * RL_STEPS, time.perf_counter() - began)
    rl_steps = _fewer(RL_STEPS, left, pace)
    values |= {"rl_steps": rl_steps, "eval_every": max(1, rl_steps // 2)}
    _write_run_file(directory, "rl", values)
    _title(f"2. By reward: {rl_steps} steps of 32 sums, 8 tries each, told only right or wrong")
    outcome = run_rl(directory / "rl.toml")
    before = outcome.evaluations[0]
    after = outcome.evaluations[-1]
    result = DemoResult(
        before["eval/accuracy"],
        after["eval/accuracy"],
        round(time.perf_counter() - started, 1),
        str(outcome.checkpoint),
        round((sft_steps + RL_COST * rl_steps) / planned, 2),
    )
    _show(result, outcome, directory)
    return result


def _fewer(steps: int, share: float, pace: Pace) -> int:
    """As many as there is time for; says so if they are fewer."""
    fitting = max(1, round(share * steps))
    if fitting < steps:
        print(f"A step takes {pace.clock:.2f} s on this machine, which is slow or busy: the demo")
        print(f"does {fitting} of {steps} steps, and the accuracy rises less than it would.")
    return fitting


def _write_run_file(directory: Path, stage: str, values: Mapping[str, object]) -> None:
    text = (_RUN_FILES / f"demo_{stage}.txt").read_text(encoding="utf-8")
    (directory / f"{stage}.toml").write_text(text.format(**values), "utf-8")


def measure(model_path: Path, steps: int = 5) -> Pace:
    """The pace of supervised steps on 64 random sequences, with transformers' model; takes about a
    second."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path)
    token_ids = torch.randint(model.config.vocab_size, (64, 22))

    def step() -> None:
        model(input_ids=token_ids, labels=token_ids).loss.backward()

    step()  # the first one allocates
    clock = time.perf_counter()
    computing = time.thread_time()
    for _ in range(steps):
        step()
    return Pace((time.thread_time() - computing) / steps, (time.perf_counter() - clock) / steps)


def _title(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


def _show(result: DemoResult, outcome: RunResult, directory: Path) -> None:
    _title(f"Greedy accuracy on {HELD_OUT} problems it never saw")
    print(f"  before RL  {_bar(result.accuracy_before)}")
    print(f"  after RL   {_bar(result.accuracy_after)}")
    print()
    for example in outcome.examples:
        print("\n".join(example.lines()))
    print("\nWhere the time of the second stage went\n")
    for line in time_table(outcome.seconds):
        print(f"  {line}")
    print(f"\ncheckpoint  {outcome.checkpoint}")
    print(f"all of it   {result.seconds:.0f} s")
    command = sys.argv[0] if Path(sys.argv[0]).name == "tunesmith" else "tunesmith"
    settings = "run_dir=rl-dapo algorithm.name=dapo"
    print(f"try next    {command} rl {directory / 'rl.toml'} {settings}", flush=True)


def _bar(share: float) -> str:
    return f"{share:6.1%} {'█' * round(40 * share)}"
