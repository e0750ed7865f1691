"""Odd models and numbers: each is refused in words before it is trained, or trains."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import sft_settings
from tunesmith.config.load import load_config
from tunesmith.config.schema import SFTConfig
from tunesmith.errors import TunesmithError
from tunesmith.run.assembly import run_sft
from tunesmith.run.assembly.checking import check_run

SEED = int(os.environ.get("TRIES_SEED", "0"))
COUNT = int(os.environ.get("TRIES_COUNT", "160"))
SLOW = 30.0
KEYS = [
    "model_type",
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "attention_dropout",
    "text_config",
]
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    5,
    7,
    64,
    10**12,
    10**400,
    0.5,
    1e308,
    float("nan"),
    "",
    "4",
    "llama",
    "gpt2",
    "bert",
    "t5",
    "mamba",
    "nonsense",
    "\0",
    [],
    [1],
    {},
    {"rope_type": "nonsense"},
    {"hidden_size": 0},
    "bfloat16",
]


def damage(model: Path, chance: random.Random) -> str:
    """One or two changes to a model's directory; what was done."""
    done: list[str] = []
    for _ in range(chance.choice([1, 1, 2])):
        config = model / "config.json"
        file = chance.choice(
            [
                config,
                *(
                    model / n
                    for n in ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
                ),
            ]
        )
        if chance.random() < 0.65 and config.is_file():
            try:
                content = json.loads(config.read_text())
            except ValueError:
                continue
            key = chance.choice(KEYS)
            value = chance.choice(ODD)
            content[key] = value
            config.write_text(json.dumps(content))
            done.append(f"{key} = {value!r:.60}")
            continue
        if not file.is_file():
            continue
        raw = file.read_bytes()
        at = chance.randrange(len(raw) + 1)
        how = chance.choice(["gone", "empty", "cut", "flipped", "json"])
        match how:
            case "gone":
                file.unlink()
            case "empty":
                file.write_bytes(b"")
            case "cut":
                file.write_bytes(raw[:at])
            case "flipped":
                file.write_bytes(raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :])
            case _:
                file.write_bytes(chance.choice([b"{}", b"[]", b"null", b'"x"', b"[" * 5000]))
        done.append(f"{file.name} {how} at {at}")
    return ", ".join(done)


def test_random_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter[str]()
    bad = list[str]()
    chance = random.Random(SEED)
    whole = save_model(tmp_path / "whole")
    for number in range(COUNT):
        model = tmp_path / "model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.rmtree(tmp_path / "sft", ignore_errors=True)
        shutil.copytree(whole, model)
        what = f"case {number}: {damage(model, chance)}"
        said = sft_settings(tmp_path, model, train__steps=1)
        started = time.monotonic()
        config_refused = False
        try:
            try:
                check_run(load_config(SFTConfig, None, said), tmp_path, hub=False)
            except TunesmithError:
                config_refused = True
            run_sft(None, said)
            counts["trained"] += 1
            if config_refused:
                bad.append(f"{what}: config refuses what trains")
        except TunesmithError as error:
            counts["refused"] += 1
            if error.exit_code != 2 or "model" not in str(error):
                bad.append(f"{what}: exit code {error.exit_code}, {error}")
        except Exception as error:
            bad.append(f"{what}: {type(error).__name__}: {error}")
        capsys.readouterr()
        seconds = time.monotonic() - started
        if seconds > SLOW:
            bad.append(f"{what}: {seconds:.0f} s")
    with capsys.disabled():
        print(f"\n{COUNT} models: {dict(counts)}, {len(bad)} wrong")
    assert not bad, "\n\n".join(bad[:30])
