"""Every file of checkpoints of every kind is damaged in every way, and the run is resumed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, same_tensors, sft_settings
from tunesmith.errors import TunesmithError
from tunesmith.run import assembly
from tunesmith.run.loop.manifest import MANIFEST_FILE

SEED = int(os.environ.get("TRIES_SEED", "0"))
COUNT = int(os.environ.get("TRIES_COUNT", "240"))

KINDS: dict[str, dict[str, Any]] = {
    "sft": {"train__ema_decay": 0.9},
    "rl": {"algorithm__kl__coef": 0.01, "algorithm__kl__reference_every": 1},
    "ppo": {"algorithm__name": "ppo", "train__ema_decay": 0.9},
    "shared": {"algorithm__name": "ppo", "critic__shared_trunk": True},
    "lora": {"lora__rank": 2, "lora__save_merged": True},
}


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def zero_tail(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    kept = rng.randrange(len(data))
    file.write_bytes(data[:kept] + bytes(len(data) - kept))


def empty(file: Path, _: random.Random) -> None:
    file.write_bytes(b"")


def remove(file: Path, _: random.Random) -> None:
    file.unlink()


def garbage(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(rng.randrange(1, 2000)))


def other_json(file: Path, rng: random.Random) -> None:
    file.write_text(json.dumps(rng.choice([None, 3, [], {}, {"step": "x"}, {"files": {}}, "text"])))


def swap(file: Path, rng: random.Random) -> None:
    others = [p for p in sorted(file.parent.rglob("*")) if p.is_file() and p != file]
    other = rng.choice(others)
    ours = file.read_bytes()
    theirs = other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(ours)


def directory(file: Path, _: random.Random) -> None:
    file.unlink()
    file.mkdir()


def add(file: Path, rng: random.Random) -> None:
    name = rng.choice(
        [
            "more.safetensors",
            "model.safetensors.index.json",
            "notes.txt",
            ".hidden",
            "random-00001.safetensors",
        ]
    )
    if not (file.parent / name).exists():
        shutil.copy(file, file.parent / name)


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    flip, flip, flip, cut, zero_tail, empty, remove, garbage, other_json, swap, directory, add,
]  # fmt: skip


def content(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"/"
        for p in sorted(path.rglob("*"))
    }


class Kind:
    """A run of a kind with a checkpoint of step 1, and what it is after step 2."""

    def __init__(self, folder: Path, model: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.run = assembly.run_sft if name in ("sft", "lora") else assembly.run_rl
        make = sft_settings if name in ("sft", "lora") else rl_settings
        self.said = make(folder, model, "first", train__steps=2, checkpoint__every=1, **KINDS[name])
        self.after = self.run(None, self.said).checkpoint.parent
        self.begun = self.after.with_name("step-000001")

    def resume(self, checkpoint: Path) -> Path:
        """Where the resumed run ends."""
        said = [word for word in self.said if not word.startswith("run_dir=")]
        target = self.folder / "again"
        shutil.rmtree(target, ignore_errors=True)
        return self.run(
            None, [*said, f'run_dir="{target}"', f'checkpoint.resume="{checkpoint}"']
        ).checkpoint.parent


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Kind]:
    model = save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    return [Kind(tmp_path_factory.mktemp(name), model, name) for name in KINDS]


def same(kind: Kind, ended: Path) -> bool:
    try:
        same_tensors(kind.after, ended)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("checked", [True, False], ids=["with checksums", "of an earlier version"])
def test_no_damage_changes_a_run_unnoticed(
    kinds: list[Kind], tmp_path: Path, checked: bool
) -> None:
    """Without checksums no more is asked than an error of ours, or a run."""
    rng = random.Random(f"{SEED}/{checked}")
    count = COUNT if checked else COUNT // 2
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        broken = tmp_path / "step-000001"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(kind.begun, broken)
        if not checked:
            (broken / MANIFEST_FILE).unlink()
        before = content(broken)
        file = rng.choice([p for p in sorted(broken.rglob("*")) if p.is_file()])
        damage = rng.choice(DAMAGES)
        case = f"{kind.name}: {damage.__name__} {file.relative_to(broken)}"
        damage(file, rng)
        try:
            ended = kind.resume(broken)
        except TunesmithError as error:
            found["refused"] += 1
            if checked and str(file.relative_to(broken)) not in str(error) and damage is not add:
                wrong.append(f"{case}: the file is not named: {error}")
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
        else:
            equal = same(kind, ended)
            found["ran and ended equal" if equal else "ran and ended otherwise"] += 1
            if checked and not equal:
                wrong.append(f"{case}: unnoticed, and the end is another")
            if (
                checked
                and content(broken) != before
                and damage is not add
                and file.name != MANIFEST_FILE
            ):
                wrong.append(f"{case}: unnoticed")
    print(
        f"\n"
        f"checkpoints {'with' if checked else 'without'} checksums: {count} tried, "
        f"{dict(found)}, {len(wrong)} wrong"
    )
    assert not wrong, "\n".join(wrong)
