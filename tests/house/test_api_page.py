"""The page of the Python API: its scripts run, and those of TRL are translated as the tables of
names say."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

import tunesmith
from tests.support.documents import ROOT, blocks_of
from tests.support.tiny import save_model
from tests.support.tiny_runs import sums
from tunesmith.config.commands import KINDS
from tunesmith.guide.names.unknown import find

PAGE = ROOT / "docs" / "python.md"
SCRIPTS = [block.text for block in blocks_of(PAGE) if block.language == "python"]
OURS = [text for text in SCRIPTS if "result = tunesmith." in text]
PAIRS = [(text, SCRIPTS[place + 1]) for place, text in enumerate(SCRIPTS) if "from trl" in text]
ROWS: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [
        {"question": s["prompt"], "answer": f"Adding. #### {s['answer']}"} for s in sums(4)
    ],
    "trl-lib/Capybara": [
        {
            "messages": [
                {"role": "user", "content": s["prompt"]},
                {"role": "assistant", "content": s["answer"]},
            ]
        }
        for s in sums(4)
    ],
    "trl-lib/ultrafeedback_binarized": [
        {
            "chosen": [
                {"role": "user", "content": s["prompt"]},
                {"role": "assistant", "content": s["answer"]},
            ],
            "rejected": [
                {"role": "user", "content": s["prompt"]},
                {"role": "assistant", "content": "?"},
            ],
        }
        for s in sums(4)
    ],
}
SMALL: dict[str, Any] = {
    "train__steps": 1,
    "train__batch_size": 4,
    "model__dtype": "float32",
    "system__threads": 1,
}


def called(script: str) -> dict[str, dict[str, Any]]:
    """The keywords of every call, by the function's name, with literal values."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            found[name] = {
                k.arg: ast.literal_eval(k.value)
                if isinstance(k.value, ast.Constant | ast.Dict)
                else None
                for k in node.keywords
                if k.arg
            }
    return found


@pytest.mark.parametrize("script", OURS, ids=range(len(OURS)))
def test_scripts_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model", max_position_embeddings=1024)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *_, **__: datasets.Dataset.from_list(ROWS[name])
    )

    def smaller(real: Callable[..., Any], **settings: Any) -> Any:
        settings |= SMALL | {"model": model}
        settings.pop("train__epochs", None)
        if "rollout" in settings:
            settings["rollout"] |= {"max_new_tokens": 4, "prompts_per_step": 2, "group_size": 2}
        return real(**settings)

    for name in ("rl", "sft", "dpo"):
        monkeypatch.setattr(
            tunesmith, name, partial(smaller, getattr(tunesmith, name)), raising=False
        )
    names: dict[str, Any] = {}
    exec(compile(script, str(PAGE), "exec"), names)
    assert names["result"].metrics[0]["loss"] is not None


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=["grpo", "sft", "dpo"])
def test_scripts_of_trl_are_translated_as_the_tables_say(theirs: str, ours: str) -> None:
    (command,) = called(ours).keys() & KINDS.keys()
    settings: dict[str, Any] = {}
    for name, value in called(ours)[command].items():
        settings |= (
            {f"{name}.{key}": v for key, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    said = {key.replace("__", "."): value for key, value in settings.items()}
    (config,) = (value for name, value in called(theirs).items() if name.endswith("Config"))
    sizes = [
        value for name, value in config.items() if name.startswith(("per_device", "gradient_acc"))
    ]
    assert said["train.batch_size"] == sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    for name, value in config.items():
        meant = find(KINDS[command], name)
        keys = [key for key in meant.keys if key in said]
        assert keys, f"{name} is {meant.keys} here"
        assert name.startswith(("per_device", "gradient_acc")) or said[keys[0]] == value, name
