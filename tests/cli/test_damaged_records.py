"""A damaged file in a run's directory: every command that reads runs says so or leaves it out, and
shows the others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.hand_made_runs import make_run

DEEP = "[" * 100_000
HUGE = "1" * 5_000
RECORDS = [
    ["metrics.jsonl"],
    ["resolved.json", "facts.json", "plan.json", "rollouts.jsonl", "run.lock"],
]
"""The second ones together, because each is read on its own."""


def _written(text: str | bytes) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(text if isinstance(text, bytes) else text.encode()))


def void(_: object) -> None:
    pass


ODD = {"train.steps": [1], "train.lr": {}, "model.path": 3, "algorithm.name": None}
DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": _written(""),
    "binary": _written(bytes(range(256)) * 50),
    "deep": _written(DEEP),
    "deep objects": _written('{"settings": ' * 50_000),
    "deep inside": _written(
        '{"step": 1, "kind": "train", "settings": {"train.lr": {"value": ' + DEEP + "\n"
    ),
    "null": _written("null\n"),
    "number": _written(HUGE + "\n"),
    "list": _written("[]\n"),
    "words": _written(
        '{"settings": "a", "memory": 1, "seconds": [], "step": "x", "threads_per_core": "many"}\n'
    ),
    "lists": _written(
        '{"settings": [], "step": [1], "kind": "train", "reward": [2], "tokens": {}, "reach": []}\n'
    ),
    "no entries": _written(
        '{"settings": {"train.lr": 1, "train.steps": null, "model.path": []}, "notes": 3}\n'
    ),
    "other types": _written(
        json.dumps({"settings": {key: {"value": v} for key, v in ODD.items()}}) + "\n"
    ),
    "out of range": _written(
        f'{{"step": {HUGE[:400]}, "kind": "train", "group": [], "reward": 1e999, "tokens": {HUGE[:400]}, '
        f'"settings": {{"train.steps": {{"value": {HUGE[:400]}, "source": "said"}}}}, "reach": '
        f"{HUGE[:400]}}}\n"
    ),
    "not text": _written(
        '{"step": 1, "time": NaN, "settings": {"model.path": {"value": "\\ud800", "source": ""}}}\n'
    ),
    "rows of others": _written(
        '{"step": 1, "kind": "train", "group": [1], "reward": 1, "tokens": 2, "rewards": 5}\n'
    ),
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.slow
def test_every_reader_bears_every_damage(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    asked: list[list[str]] = []
    for records in RECORDS:
        for name, damage in DAMAGES.items():
            run = make_run(tmp_path / f"{records[0]} {name}")
            for record in records:
                (run / record).unlink(missing_ok=True)
                damage(run / record)
            path = str(run)
            asked += [
                ["doctor", path],
                ["report", path, "--out", str(tmp_path / "out.html")],
                ["runs", "tail", path],
            ]
            asked += [["runs", "compare", path, str(tmp_path / "good")], ["check", path]]
            asked += [["explain", "train.lr", "--run", path], ["explain", "reward", "--run", path]]
    asked += [["runs", "list", str(tmp_path)], ["runs", "list", str(tmp_path), "--json"]]
    ended = commands.tunesmith(tmp_path, asked)
    wrong = [
        (words, done.code, done.told[-200:])
        for words, done in zip(asked, ended, strict=True)
        if "Traceback" in done.told or done.code not in (0, 2)
    ]
    assert not wrong, "\n".join(map(str, wrong))
    listed = ended[-2]
    assert listed.code == 0 and len(listed.shown.splitlines()) > 0.9 * len(RECORDS) * len(DAMAGES)
    assert "good" in listed.shown


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("pipe", "dangling")])
def test_settings_that_cannot_be_compared_refuse_to_continue_with_a_remedy(
    tmp_path: Path, damage: str
) -> None:
    from tunesmith.config.continuing import changes
    from tunesmith.config.load import load_config
    from tunesmith.config.resolved import Listing, settings
    from tunesmith.config.schema import SFTConfig
    from tunesmith.errors import StorageError

    DAMAGES[damage](tmp_path / "resolved.json")
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d"])
    try:
        found = changes(Listing(settings(config), {}, ()), {}, tmp_path)
    except StorageError as error:
        assert "resolved.json" in str(error) and "delete it" in str(error)
    else:
        assert found is not None
