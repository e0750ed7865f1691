"""Files to start from: a run file per task, with a reward or tools, example data and a tiny
model."""

from __future__ import annotations

import json
import os
import random
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError, StorageError, boundary, nearest
from tunesmith.guide.recipes.arithmetic import make_model
from tunesmith.records.toml import toml_value

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""A small model whose chat template supports tools."""
TRAIN = 200
HELD_OUT = 20
_FILES = Path(__file__).parent / "start"
_EXAMPLES = Path(__file__).parents[2] / "examples"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """A task's run file ``<task>.toml`` and the other files it needs."""

    text: str
    command: str
    columns: Sequence[str]
    """Columns of the data."""
    code: Mapping[str, str]
    """File name → its template in ``start``."""


_REWARD = {"rewards.py": "rewards.txt"}
STARTS: Mapping[str, Start] = {
    "rl": Start("learn from a reward: word problems", "rl", ("prompt", "answer"), _REWARD),
    "agent": Start(
        "learn to use tools", "rl", ("prompt", "answer"), {**_REWARD, "tools.py": "tools.txt"}
    ),
    "sft": Start("learn given answers", "sft", ("prompt", "completion"), {}),
    "dpo": Start("prefer one answer to another", "dpo", ("prompt", "chosen", "rejected"), {}),
    "kto": Start("learn from good and bad answers", "kto", ("prompt", "completion", "label"), {}),
    "rm": Start("a reward model from pairs", "rm", ("prompt", "chosen", "rejected"), {}),
    "rft": Start("learn one's own right answers", "rft run", ("prompt", "answer"), _REWARD),
    "distill": Start("learn from a larger model", "distill", ("prompt",), {}),
}
"""Task → its files."""


def write_start(task: str, directory: Path, model: str | None, tiny: bool) -> list[Path]:
    """Write the files of a task and return their paths.

    Args:
        task: a key of ``STARTS``.
        directory: new or existing; it must not contain any of the files.
        model: the value of ``model.path``; None: ``MODEL``, or the tiny model.
        tiny: also write an untrained model to ``directory/model``.

    Raises:
        ConfigError: the task is unknown, or a file exists already.
        StorageError: a file cannot be written.
    """
    if task not in STARTS:
        raise ConfigError(f"there is no task '{task}'.{nearest(task, [*STARTS, *examples()])}")
    if tiny and model:
        raise ConfigError("--tiny-model makes a model, and --model names one: give one of them")
    start = STARTS[task]
    path = model or ("model" if tiny else MODEL)
    sources = {"run.toml": f"{task}.toml", **start.code}
    texts = {name: (_FILES / file).read_text(encoding="utf-8") for name, file in sources.items()}
    texts["run.toml"] = texts["run.toml"].replace('"MODEL"', toml_value(path))
    texts |= _data(start.columns)
    wanted = [*(directory / name for name in texts), *([directory / "model"] if tiny else [])]
    existing = [str(file) for file in wanted if os.path.lexists(file)]
    if existing:
        raise ConfigError(f"already there: {', '.join(existing)}; choose another directory")
    with boundary(StorageError, f"cannot write to {directory}", OSError):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
    if tiny:
        make_tiny_model(directory / "model")
    return wanted


def examples() -> dict[str, str]:
    """The names and titles of the examples in the package."""
    readmes = sorted(_EXAMPLES.glob("*/README.md"))
    titles = [file.read_text(encoding="utf-8").partition("\n")[0] for file in readmes]
    return {f.parent.name: title.lstrip("# ") for f, title in zip(readmes, titles, strict=True)}


def copy_example(name: str, directory: Path) -> list[Path]:
    """Copy an example's files into a new or empty directory and return their paths.

    Raises:
        ConfigError: the directory is not empty.
        StorageError: a file cannot be written.
    """
    files = {file: directory / file.relative_to(_EXAMPLES / name) for file in files_of(name)}
    with boundary(StorageError, f"cannot write to {directory}", OSError):
        if directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty; choose another directory")
        for file, copy in files.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    return list(files.values())


def files_of(example: str) -> list[Path]:
    """An example's files, without what its ``prepare.py`` and its runs have made."""
    folder = _EXAMPLES / example
    kinds = [".py", ".toml", ".md", ".jinja"]
    if not (folder / "prepare.py").exists():
        kinds.append(".jsonl")
    found = [*folder.iterdir(), *folder.glob("agent/*")]
    return sorted(file for file in found if file.suffix in kinds)


def make_tiny_model(directory: Path) -> Path:
    """An untrained Llama of 0.1 million parameters with a token per ASCII character and a chat
    template."""
    template = (_FILES / "chat.jinja").read_text(encoding="utf-8")
    alphabet = string.printable
    sizes = {"hidden": 64, "layers": 2, "context": 2048}
    return make_model(directory, 0, **sizes, alphabet=alphabet, chat_template=template)


def _data(columns: Sequence[str]) -> dict[str, str]:
    """``train.jsonl`` and ``held_out.jsonl``, which share no question."""
    rng = random.Random(0)
    questions: dict[str, Line] = {}
    while len(questions) < TRAIN + HELD_OUT:
        line = _line(rng)
        if "label" in columns and not line["label"]:
            line["completion"] = line["rejected"]
        questions[line["prompt"]] = {name: line[name] for name in columns}
    lines = [json.dumps(line) + "\n" for line in questions.values()]
    return {"train.jsonl": "".join(lines[HELD_OUT:]), "held_out.jsonl": "".join(lines[:HELD_OUT])}


def _line(rng: random.Random) -> Line:
    """A word problem with the columns of every task."""
    boxes = rng.randint(2, 9)
    each = rng.randint(3, 12)
    more = rng.randint(2, 30)
    who = rng.choice(("Ann", "Ben", "Mia", "Tom"))
    what = rng.choice(("apples", "cards", "pens", "shells"))
    has = f"{who} has {boxes} boxes of {each} {what} and {more} more {what}."
    inside = boxes * each
    total = inside + more
    wrong = boxes + each + more
    good = f"{boxes} * {each} = {inside}, and {inside} + {more} = {total}. The answer is {total}"
    bad = f"{boxes} + {each} + {more} = {wrong}. The answer is {wrong}"
    return {
        "prompt": f"{has} How many {what} are there? End with the number.",
        "answer": str(total),
        "completion": good,
        "chosen": good,
        "rejected": bad,
        "label": rng.random() < 0.5,
    }
