"""``config``, ``plan``, the command and the Python API refuse the same runs by the same key, and
load no model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tunesmith
from tests.support.tiny import CHATML, save_model, tokenizer
from tests.support.tiny_runs import REWARDS, sums, write_lines
from tunesmith.cli.plan import plan, show_config
from tunesmith.errors import TunesmithError
from tunesmith.records.toml import toml_value
from tunesmith.run import assembly
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.offline.rft import run_rft

CODE = """\
import json

def tool(text: str) -> str:
    "Echo. Args: text: what to say."
    return text

def untyped(text):
    return text

class Game:
    def reset(self, **columns): return ""
    def step(self, action): return "", True

class Needs(Game):
    def __init__(self, size): ...

def needs(completions, solution, **columns):
    return [0.0 for _ in completions]

def broken_row(row):
    return row["gone"]

VALUE = 3
"""
RL: dict[str, Any] = {
    "model.path": "model",
    "data.train": "train.jsonl",
    "data.chat": False,
    "reward.functions": ["rewards.py:share"],
    "rollout.max_new_tokens": 8,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "train.steps": 1,
}
SFT: dict[str, Any] = {
    "model.path": "model",
    "data.train": "examples.jsonl",
    "data.chat": False,
    "train.steps": 1,
}
GENERATE: dict[str, Any] = {"model.path": "model", "data.train": "train.jsonl", "data.chat": False}
RFT: dict[str, Any] = {
    **GENERATE,
    "reward.functions": ["rewards.py:share"],
    "sampling.max_new_tokens": 8,
}
DISTILL: dict[str, Any] = {**SFT, "teacher.path": "model", "distill.mode": "offline"}
BASES = {
    "rl": RL,
    "sft": SFT,
    "dpo": {**SFT, "dpo.beta": 0.1, "data.train": "pairs.jsonl"},
    "rft": RFT,
    "distill": DISTILL,
    "rm": {**SFT, "rm.loss": "sigmoid", "data.train": "pairs.jsonl"},
}
COMMANDS: dict[str, Callable[[Path], Any]] = {
    "rl": assembly.run_rl,
    "sft": assembly.run_sft,
    "dpo": assembly.run_dpo,
    "rm": assembly.run_rm,
    "rft": lambda run: run_rft("run", run),
    "distill": assembly.run_distill,
    "generate": run_generate,
}

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("rl", {"reward.functions": ["imports.py:share"]}, "reward.functions"),
    ("rl", {"reward.functions": ["raises.py:share"]}, "reward.functions"),
    ("rl", {"reward.functions": ["exits.py:share"]}, "reward.functions"),
    ("rl", {"reward.functions": ["syntax.py:share"]}, "reward.functions"),
    ("rl", {"reward.functions": ["code.py:VALUE"]}, "reward.functions"),
    ("rl", {"reward.functions": ["code.py:needs"]}, "reward.functions"),
    ("rl", {"reward.functions": ["rewards.py:gone"]}, "reward.functions"),
    ("rl", {"reward.functions": ["gone.py:share"]}, "reward.functions"),
    ("rl", {"reward.functions": ["no.such.module:share"]}, "reward.functions"),
    (
        "rl",
        {"reward.functions": ["imports.py:share"], "reward.isolation": "thread"},
        "reward.functions",
    ),
    (
        "rl",
        {"environment.tools": ["code.py:tool"], "data.chat": True, "model.path": "no-tools"},
        "environment.tools",
    ),
    ("rl", {"environment.tools": ["code.py:tool"]}, "environment.tools"),
    ("rl", {"environment.tools": ["code.py:untyped"]}, "environment.tools"),
    ("rl", {"environment.path": "code.py:Needs"}, "environment.path"),
    ("rl", {"environment.path": "code.py:VALUE"}, "environment.path"),
    ("rl", {"environment.path": "imports.py:Game"}, "environment.path"),
    ("rl", {"critic.path": "bare", "algorithm.name": "ppo"}, "critic.path"),
    ("rl", {"reward.models": [{"path": "model"}]}, "reward.models"),
    ("rl", {"data.prompt": "question"}, "data.prompt"),
    ("rl", {"monitor.sinks": ["raises.py:Sink"]}, "monitor.sinks"),
    ("rl", {"monitor.sinks": ["code.py:gone"]}, "monitor.sinks"),
    ("sft", {"lora.path": "gone"}, "lora.path"),
    ("sft", {"lora.path": "empty"}, "lora.path"),
    ("sft", {"lora.path": "pickled"}, "lora.path"),
    ("sft", {"model.path": "gone"}, "model.path"),
    ("sft", {"model.path": "empty"}, "model.path"),
    ("sft", {"model.path": "bare"}, "model.path"),
    ("sft", {"model.path": "weightless"}, "model.path"),
    ("sft", {"model.path": "incomplete"}, "model-00002-of-00002.safetensors"),
    ("sft", {"model.path": "adapter"}, "model.path"),
    ("sft", {"model.path": "odd"}, "odd/config.json"),
    ("sft", {"model.path": "plain", "data.chat": True}, "model.chat_template"),
    (
        "sft",
        {"model.path": "plain", "data.chat": None, "data.train": "talk.jsonl"},
        "model.chat_template",
    ),
    ("sft", {"model.chat_template": "gone.jinja"}, "model.chat_template"),
    ("sft", {"data.train": "gone.jsonl"}, "data.train"),
    ("sft", {"data.train": "blank.jsonl"}, "blank.jsonl"),
    ("sft", {"data.train": "broken.jsonl"}, "broken.jsonl:1"),
    ("sft", {"data.eval": "gone.jsonl"}, "data.eval"),
    ("sft", {"data.completion": "reply"}, "data.completion"),
    ("sft", {"data.map": "imports.py:row"}, "data.map"),
    ("sft", {"data.map": "code.py:broken_row"}, "data.map"),
    ("sft", {"eval.every": 3}, "eval.every"),
    ("sft", {"run_dir": "train.jsonl"}, "run_dir"),
    ("dpo", {"data.train": "examples.jsonl"}, "examples.jsonl:1"),
    ("rm", {"model.path": "bare"}, "model.path"),
    ("rft", {"reward.functions": ["imports.py:share"]}, "reward.functions"),
    ("rft", {"rft.sampler": "bare"}, "rft.sampler"),
    ("rft", {"rft.few_shot": "gone.txt"}, "rft.few_shot"),
    ("distill", {"teacher.path": "bare"}, "teacher.path"),
    ("distill", {"teacher.path": "gone"}, "teacher.path"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals")
    model = save_model(folder / "model")
    for name in ("bare", "weightless", "incomplete", "odd", "no-tools", "plain"):
        shutil.copytree(model, folder / name)
    for file in (folder / "bare").glob("tokenizer*"):
        file.unlink()
    (folder / "weightless/model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "incomplete/model.safetensors").unlink()
    (folder / "incomplete/model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "odd/config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    tokenizer(None).save_pretrained(folder / "plain")
    (folder / "plain/chat_template.jinja").unlink(missing_ok=True)
    tokenizer(CHATML).save_pretrained(folder / "no-tools")
    for name in ("empty", "adapter", "pickled"):
        (folder / name).mkdir()
    for name in ("adapter", "pickled"):
        (folder / name / "adapter_config.json").write_text("{}")
    (folder / "pickled/adapter_model.bin").touch()
    write_lines(folder / "train.jsonl", sums(4))
    write_lines(
        folder / "examples.jsonl",
        [{"prompt": s["prompt"], "completion": s["answer"]} for s in sums(4)],
    )
    write_lines(folder / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    write_lines(
        folder / "talk.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    )
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "broken.jsonl").write_text('{"prompt": "a"\n')
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "code.py").write_text(CODE)
    (folder / "imports.py").write_text(
        f"import no_such_package_at_all\n{REWARDS}\nclass Game: ...\n"
    )
    (folder / "raises.py").write_text(f"raise KeyError('x')\n{REWARDS}\nclass Sink: ...\n")
    (folder / "exits.py").write_text(f"import os\nos._exit(3)\n{REWARDS}")
    (folder / "syntax.py").write_text("def share(:\n")
    return folder


def refusals(command: str, settings: dict[str, Any], run: Path) -> dict[str, str]:
    """What each way of starting the run says; empty if it does not refuse it."""
    settings = {key: value for key, value in settings.items() if value is not None}
    run.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in settings.items()))
    others = {
        k.replace(".", "__"): v
        for k, v in settings.items()
        if k not in ("model.path", "data.train")
    }
    call = {"reward": others.pop("reward__functions", None)} if command in ("rl", "rft") else {}
    call |= {"teacher": others.pop("teacher__path")} if command == "distill" else {}
    ways: dict[str, Callable[[], Any]] = {
        "config": lambda: show_config(run, []),
        "plan": lambda: plan(run, []),
        "command": lambda: COMMANDS[command](run),
        "api": lambda: getattr(tunesmith, command)(
            settings["model.path"], settings["data.train"], **call, **others
        ),
    }
    told = dict.fromkeys(ways, "")
    for way, start in ways.items():
        try:
            start()
        except TunesmithError as error:
            assert error.exit_code == 2
            told[way] = str(error)
    return told


FAST = (0, 6, 24, 31, 37)
"""Cases of the fast tests: one of each kind of check. The others start processes for the user's
code, or read more."""


@pytest.mark.parametrize(
    ("command", "changed", "key"),
    [
        pytest.param(*case, marks=() if at in FAST else pytest.mark.slow)
        for at, case in enumerate(CASES)
    ],
)
def test_every_way_refuses_a_broken_run_with_the_same_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, changed: dict[str, Any], key: str
) -> None:
    from tunesmith.models import decoder

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(decoder, "load_module", load)
    monkeypatch.chdir(folder)
    told = refusals(command, {**BASES[command], **changed}, folder / "run.toml")
    assert {way for way, text in told.items() if key in text} == set(told), told


def test_code_that_takes_long_is_left_to_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunesmith.config.load import load_run
    from tunesmith.run.assembly import checking, examining

    monkeypatch.chdir(folder)
    monkeypatch.setattr(examining, "SECONDS", 0.01)
    (folder / "run.toml").write_text(
        "".join(f"{key} = {toml_value(value)}\n" for key, value in RL.items())
    )
    resolved = checking.check_run(
        load_run(folder / "run.toml", []), folder, hub=False, imports=True
    )
    assert any("was not checked" in note for note in resolved.notes)
