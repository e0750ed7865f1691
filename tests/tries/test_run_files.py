"""Random run files for every command: each is accepted or refused in words, by ``config`` and by
the run alike.

A refusal has exit code 2, names the setting and where it stands, and comes within seconds. What
``config`` accepts goes on through the command itself, up to where its model would be loaded: only
what depends on the data's tokens, or on code of the user's, may still be refused there.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import REWARDS, sums, write_lines
from tunesmith.config.commands import (
    DistillConfig,
    DPOConfig,
    GenerateConfig,
    KTOConfig,
    OfflineDistillConfig,
    PRMConfig,
    RFTConfig,
    RMConfig,
)
from tunesmith.config.load import load_config
from tunesmith.config.reading.describe import choices_at, describe_at
from tunesmith.config.reading.places import placed
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import DataError, TunesmithError
from tunesmith.guide.names.unknown import all_keys
from tunesmith.records.toml import toml_value
from tunesmith.run.assembly import train
from tunesmith.run.assembly.checking import check_run
from tunesmith.run.offline import generate, rft

SEED = int(os.environ.get("TRIES_SEED", "0"))
COUNT = int(os.environ.get("TRIES_COUNT", "2000"))
SLOW = 10.0
"""Seconds that no answer may take."""

RL = {
    "model.path": "model",
    "data.train": "train.jsonl",
    "data.chat": False,
    "reward.functions": ["rewards.py:share"],
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 8,
    "train.steps": 3,
}
SFT = {
    "model.path": "model",
    "data.train": "sft.jsonl",
    "data.chat": False,
    "train.steps": 3,
    "train.batch_size": 8,
}
KINDS: dict[type[RunConfig], tuple[dict[str, Any], Callable[[Path], Any]]] = {
    RLConfig: (RL, train.run_rl),
    SFTConfig: (SFT, train.run_sft),
    DPOConfig: ({**SFT, "data.train": "pairs.jsonl"}, train.run_dpo),
    RMConfig: ({**SFT, "data.train": "pairs.jsonl"}, train.run_rm),
    KTOConfig: ({**SFT, "data.train": "judged.jsonl"}, train.run_kto),
    PRMConfig: ({**SFT, "data.train": "steps.jsonl"}, train.run_prm),
    DistillConfig: ({**RL, "teacher.path": "model"}, train.run_distill),
    OfflineDistillConfig: (
        {**SFT, "teacher.path": "model", "distill.mode": "offline"},
        train.run_distill,
    ),
    GenerateConfig: ({k: RL[k] for k in RL if k[:5] in ("model", "data.")}, generate.run_generate),
    RFTConfig: (
        {k: RL[k] for k in RL if k[:5] in ("model", "data.", "rewar")},
        lambda path: rft.run_rft("run", path),
    ),
}
ODD: list[Any] = [
    0,
    1,
    2,
    -1,
    3,
    7,
    64,
    10**6,
    10**12,
    2**31,
    2**63,
    2**70,
    10**400,
    -(10**30),
    0.0,
    0.5,
    1.5,
    -0.5,
    1e-320,
    1e308,
    1e30,
    -1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    True,
    False,
    "",
    " ",
    "x",
    "math",
    "\0",
    "a\0b",
    "..",
    ".",
    "/",
    "~",
    "~nobody/x",
    "/dev/null",
    "/root/nothing",
    "train.jsonl",
    "sft.jsonl",
    "model",
    "empty",
    "rewards.py",
    "rewards.py:share",
    "rewards.py:none",
    "org/name",
    "cuda",
    "cuda:0",
    "cuda:9",
    "cpu",
    "gpu",
    "mps",
    "auto",
    "***",
    "http://user:pw@host/",
    "http://",
    "4GB",
    "1000000GB",
    "0MB",
    "x" * 5000,
    "é\u202e",
    "[a]",
    "{x}",
    "(",
    [],
    [[]],
    [0],
    [1, 2],
    [""],
    ["x"],
    ["math", "math"],
    ["rewards.py:share", "exact_match"],
    [{}],
    {},
    {"a": 1},
    {"path": "model"},
    [[[[[]]]]],
    {"env_vars": {"A": "b"}},
    ["tensorboard"],
]
LIKELY: dict[str, list[Any]] = {
    "true or false": [True, False],
    "a whole number": [1, 2, 3, 4, 8, 16, 64, 500, 512, 2048],
    "a number": [0.1, 0.5, 0.9, 1, 1.5, 2.0, 30],
    "a list of 2": [[0.5, 0.9], [0, 1], [-1.0, 1.0]],
    "a list": [[], ["x"], [1], [2, 5], ["rewards.py:share"], ["math", "rewards.py:share"]],
    "a size": ["64MB", "1GB"],
    "text": ["prompt", "answer", "x", "model", "train.jsonl", "grpo", "ppo", "gae"],
    "a path": ["model", "rewards.py"],
}
"""By how ``describe_at`` begins."""
BY_DATA = re.compile(
    r"tokens|longest|column|no single|'margin'|template|the run ends after|longer than the "
    r"(run|critic)|run's \d+ steps"
)
"""What only the data's tokens, its other lines or the tokenizer can tell."""


class Reached(Exception):
    """The command would load its model now."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run_files")
    save_model(folder / "model")
    (folder / "empty").mkdir()
    (folder / "rewards.py").write_text(REWARDS)
    lines = sums(12)
    write_lines(folder / "train.jsonl", lines)
    write_lines(
        folder / "sft.jsonl", [{"prompt": s["prompt"], "completion": s["answer"]} for s in lines]
    )
    pair = [{"prompt": s["prompt"], "chosen": s["answer"], "rejected": "x"} for s in lines]
    write_lines(folder / "pairs.jsonl", pair)
    judged = [
        {"prompt": s["prompt"], "completion": s["answer"], "label": i % 2 == 0}
        for i, s in enumerate(lines)
    ]
    write_lines(folder / "judged.jsonl", judged)
    steps = [
        {"prompt": s["prompt"], "completions": ["a", "b"], "labels": [True, False]} for s in lines
    ]
    write_lines(folder / "steps.jsonl", steps)
    return folder


def as_text(said: dict[str, Any]) -> str:
    return "".join(
        f"{key} = {toml_value(value).replace(chr(0), chr(92) + 'u0000')}\n"
        for key, value in said.items()
    )


def mutated(kind: type[RunConfig], base: dict[str, Any], chance: random.Random) -> str:
    """A valid run file with one to four settings changed, left out or invented, or its text
    damaged."""
    said = {**base, "run_dir": "out"}
    keys = all_keys(kind)
    for _ in range(chance.choice([1, 1, 1, 1, 2, 3])):
        key = chance.choice(keys)
        valid = choices_at(kind, tuple(key.split(".")))
        match chance.randrange(12):
            case 0:
                said.pop(chance.choice(list(said)))
            case 1:
                said[
                    chance.choice([f"{key}x", key.upper(), key.rpartition(".")[0] or "x", "a.b.c"])
                ] = chance.choice(ODD)
            case 2 | 3 | 4 | 5 | 6 | 7 | 8 if valid:
                said[key] = chance.choice(valid)
            case 2 | 3 | 4 | 5 | 6 | 7 | 8:
                words = describe_at(kind, tuple(key.split(".")))
                said[key] = chance.choice(
                    next((v for w, v in LIKELY.items() if words.startswith(w)), ODD)
                )
            case _:
                said[key] = chance.choice(ODD)
        if not said:
            break
    text = as_text(said)
    if chance.random() < 0.06:
        at = chance.randrange(len(text) + 1)
        text = chance.choice(
            [text[:at], text[:at] + chance.choice("\"'[]{}=\n\\é#") + text[at:], text + text]
        )
    if chance.random() < 0.02:
        depth = chance.choice([40, 500, 5000])
        text = f"{chance.choice(keys)} = {'[' * depth}{']' * depth}\n" + text
    return text


def refusal_of(act: Callable[[], Any]) -> TunesmithError | None:
    try:
        act()
    except TunesmithError as error:
        return error
    return None


def test_random_run_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(*_: Any, **__: Any) -> Any:
        raise Reached

    monkeypatch.chdir(folder)
    for module, name in (
        (train, "open_placement"), (generate, "answer_tasks"), (generate, "score"),
        (rft._Run, "do"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, reached)
    counts = Counter[str]()
    bad = list[str]()
    chance = random.Random(SEED)
    warnings.simplefilter("ignore")
    for number in range(COUNT):
        kind = chance.choice(list(KINDS))
        base, run = KINDS[kind]
        file = folder / "run.toml"
        text = mutated(kind, base, chance)
        file.write_text(text, encoding="utf-8")
        shutil.rmtree(folder / "out", ignore_errors=True)

        def config(kind: type[RunConfig] = kind, file: Path = file) -> None:
            with placed(file, []):
                check_run(load_config(kind, file), folder, hub=False)

        def fails(
            what: str, text: str = text, kind: type[RunConfig] = kind, number: int = number
        ) -> None:
            bad.append(f"case {number}, {kind.__name__}: {what}\n{text[:600]}")

        started = time.monotonic()
        capsys.readouterr()
        try:
            error = refusal_of(config)
            if error is None:
                counts["accepted"] += 1
                error = refusal_of(lambda run=run, file=file: run(file))
                if error is None:
                    fails("the run neither ended nor reached its model")
                elif not isinstance(error, DataError) and not BY_DATA.search(str(error)):
                    fails(f"config accepts, the run refuses: {error}")
            else:
                counts["refused"] += 1
                told = str(error)
                if error.exit_code != 2:
                    fails(f"exit code {error.exit_code}: {told}")
                named = [
                    key
                    for key in re.findall(r"^(\w+(?:\.\w+)*) = ", text, re.M)
                    if key in told and "." in key
                ]
                if named and not re.search(r"line \d+|run\.toml|jsonl:\d+", told):
                    fails(f"no place: {told}")
        except Reached:
            counts["reached"] += 1
        except Exception as error:
            fails(f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - started
        if seconds > SLOW:
            fails(f"{seconds:.0f} s")
    with capsys.disabled():
        print(f"\n{COUNT} run files: {dict(counts)}, {len(bad)} wrong")
    assert not bad, "\n\n".join(bad[:20])
