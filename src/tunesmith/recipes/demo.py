"""``tunesmith demo``: a model made from nothing learns to add, first by example and then by reward.

The examples answer at once or worked digit by digit, and do not say which is better: after them the model is
right sometimes. Reinforcement learning, told only whether the number at the end is right, finds that working
pays. Both stages are the ordinary commands on ordinary run files, which stay in the demo's directory to look
at and to run again.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tunesmith.assembly import run_rl, run_sft
from tunesmith.assembly.opening import RunResult
from tunesmith.errors import ConfigError
from tunesmith.monitor.progress import time_table
from tunesmith.recipes.arithmetic import ANSWER, make_model, problems, write_examples, write_tasks

TRAIN, HELD_OUT = 20_000, 200
WORKED_SHARE = 0.45

SFT = """\
run_dir = "{directory}/sft"

[model]
path = "model"
dtype = "float32"

[data]
train = "examples.jsonl"
chat = false

[train]
steps = {sft_steps}
batch_size = 64
lr = 2e-3
schedule = "cosine"
min_lr_ratio = 0.1
warmup_steps = 20
seed = {seed}

[monitor]
every = 50
"""

RL = """\
run_dir = "{directory}/rl"

[model]
path = "{directory}/sft/checkpoints/step-{sft_steps:06d}/model"
dtype = "float32"

[data]
train = "train.jsonl"
eval = "held_out.jsonl"
chat = false

[reward]
functions = ["exact_match"]
pattern = '{pattern}'

[algorithm]
name = "grpo"

[rollout]
prompts_per_step = 32
group_size = 8
max_new_tokens = 40

[train]
steps = {rl_steps}
lr = 5e-5
schedule = "linear"
min_lr_ratio = 0.1
warmup_steps = 5
seed = {seed}

[eval]
every = {eval_every}

[monitor]
every = 10
"""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """``accuracy_*`` are greedy, on the held-out problems; ``checkpoint`` loads in transformers."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    checkpoint: str


def run_demo(directory: Path, seed: int, sft_steps: int = 500, rl_steps: int = 40) -> DemoResult:
    """Make model and data in ``directory``, run both stages, and show what came of it.

    Raises:
        ConfigError: the directory is not empty.
    """
    started = time.perf_counter()
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: choose another --dir, or delete it")
    directory.mkdir(parents=True, exist_ok=True)
    train, held_out = problems(seed, TRAIN, HELD_OUT)
    make_model(directory / "model", seed)
    write_examples(directory / "examples.jsonl", train, WORKED_SHARE, seed)
    write_tasks(directory / "train.jsonl", train)
    write_tasks(directory / "held_out.jsonl", held_out)
    numbers = {
        "directory": directory.resolve(),
        "seed": seed,
        "sft_steps": sft_steps,
        "rl_steps": rl_steps,
        "eval_every": max(1, rl_steps // 4),
        "pattern": ANSWER,
    }
    for name, text in (("sft.toml", SFT), ("rl.toml", RL)):
        (directory / name).write_text(text.format(**numbers))

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


def as_json(result: DemoResult) -> str:
    """The result as one line of JSON."""
    return json.dumps(asdict(result))


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
