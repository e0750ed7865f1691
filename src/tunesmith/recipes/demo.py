"""``tunesmith demo``: an untrained model learns to add, first from examples and then from a reward.

Some examples show the working and some only the answer, so the model is then right sometimes. Reinforcement learning
rewards only a correct number at the end, and the model learns to show its working. Both stages are ordinary commands
on run files, which stay in the demo's directory.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tunesmith.assembly import run_rl, run_sft
from tunesmith.assembly.session import RunResult
from tunesmith.errors import ConfigError, StorageError, boundary
from tunesmith.monitor.progress import time_table
from tunesmith.recipes.arithmetic import ANSWER, make_model, problems, write_examples, write_tasks

TRAIN, HELD_OUT = 20_000, 200
WORKED_SHARE = 0.45

_RUN_FILES = Path(__file__).parent / "start"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Greedy accuracy on the held-out problems, and a checkpoint that transformers loads."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    checkpoint: str


def run_demo(directory: Path, seed: int, sft_steps: int = 500, rl_steps: int = 40) -> DemoResult:
    """Create model and data in ``directory``, run both stages, and print the result.

    Raises:
        ConfigError: the directory is not empty.
    """
    started = time.perf_counter()
    with boundary(StorageError, f"cannot write to {directory}", OSError):
        if directory.is_dir() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty: choose another --dir, or delete it")
        directory.mkdir(parents=True, exist_ok=True)
    train, held_out = problems(seed, TRAIN, HELD_OUT)
    make_model(directory / "model", seed)
    write_examples(directory / "examples.jsonl", train, WORKED_SHARE, seed)
    write_tasks(directory / "train.jsonl", train)
    write_tasks(directory / "held_out.jsonl", held_out)
    values = {
        "directory": directory.resolve(),
        "seed": seed,
        "sft_steps": sft_steps,
        "rl_steps": rl_steps,
        "eval_every": max(1, rl_steps // 4),
        "pattern": ANSWER,
    }
    for stage in ("sft", "rl"):
        text = (_RUN_FILES / f"demo_{stage}.txt").read_text(encoding="utf-8")
        (directory / f"{stage}.toml").write_text(text.format(**values))

    _title(f"1. By example: {sft_steps} steps of 64 sums, some worked and most not")
    run_sft(directory / "sft.toml")
    _title(f"2. By reward: {rl_steps} steps of 32 sums, 8 tries each, told only right or wrong")
    outcome = run_rl(directory / "rl.toml")
    before, after = outcome.evaluations[0], outcome.evaluations[-1]
    result = DemoResult(
        before["eval/accuracy"],
        after["eval/accuracy"],
        round(time.perf_counter() - started, 1),
        str(outcome.checkpoint),
    )
    _show(result, outcome, directory)
    return result


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
    print(f"try next    {command} rl {directory / 'rl.toml'} run_dir=rl-dapo algorithm.name=dapo", flush=True)


def _bar(share: float) -> str:
    return f"{share:6.1%} {'█' * round(40 * share)}"
