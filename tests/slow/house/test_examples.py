"""The examples as a person runs them, and the page of the README that leads to one's own model.

The runs are shortened on the reinforcement side; the warm start is the real one. Two examples are
long tests, because the slow ones have runs much like theirs: the arithmetic of ``tunesmith demo``
(``test_demo.py``), and the unit conversion that learns by rejection sampling
(``test_rft_learns.py``).
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.documents import ROOT, blocks_of
from tests.support.example_runs import mean, metrics, python, tunesmith
from tests.support.long import again


@pytest.mark.parametrize(
    ("example", "steps", "rise", "held_out_rise"),
    [
        again("arithmetic", 24, 0.1, 0.15),
        again("unit_conversion", 24, 0.12, 0.12),
        ("reverse_text", 24, 0.15, 0.12),
        again("shapes", 60, 0.08, 0.08),
    ],
)
def test_an_example_learns(
    example: str, steps: int, rise: float, held_out_rise: float, tmp_path: Path
) -> None:
    """The sampled reward, and the accuracy on 200 held-out problems, rise by at least half of what
    they usually do."""
    here = tmp_path / example
    shutil.copytree(
        ROOT / "examples" / example, here, ignore=shutil.ignore_patterns("runs", "model", "*.jsonl")
    )
    python(here, "prepare.py")
    tunesmith(here, "sft", "sft.toml")
    tunesmith(here, "rl", "rl.toml", f"train.steps={steps}", f"eval.every={steps}")
    reward = metrics(here / "runs" / "rl", "reward")
    assert mean(reward[-4:]) - mean(reward[:2]) > rise, reward
    before, *_, after = metrics(here / "runs" / "rl", "eval/accuracy")
    assert after - before > held_out_rise, (before, after)


def test_the_page_to_ones_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and command of the README's page, in order, on a tiny model in the place of the
    named one."""
    tiny.save_model(tmp_path / "tiny", max_position_embeddings=1024)
    line = {"prompt": "What is 17 times 23?", "completion": "391"}
    (tmp_path / "examples.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "sft.toml").write_text('[model]\npath = "tiny"\n[data]\ntrain = "examples.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    files = {
        "toml": ["run.toml"],
        "json": ["train.jsonl", "held_out.jsonl"],
        "python": ["rewards.py"],
    }
    loaded: dict[str, Any] = {}
    for block in blocks_of(ROOT / "README.md"):
        if block.language == "sh":
            follow(block.text, tmp_path)
        elif "from_pretrained" in block.text:
            exec(block.text, loaded)
        else:
            for name in files.get(block.language, ()):
                (tmp_path / name).write_text(block.text)
    assert loaded["model"].num_parameters() and loaded["tokenizer"]("7*6=").input_ids
    assert (tmp_path / "runs" / "run-1" / "checkpoints" / "step-000100" / "model").is_dir()


def follow(commands: str, folder: Path) -> None:
    """Run a block's ``tunesmith`` commands, made small."""
    small = [
        "model.path=tiny",
        "rollout.max_new_tokens=4",
        "rollout.prompts_per_step=2",
        "eval.every=50",
    ]
    for line in commands.splitlines():
        if line.startswith("tunesmith "):
            command = shlex.split(line, comments=True)[1:]
            tunesmith(folder, *command, *([] if command[0] == "sft" else small))
