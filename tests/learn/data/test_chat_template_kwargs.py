"""``data.chat_template_kwargs`` in every command: set in what is rendered, recorded, refused where
nothing reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tunesmith
from tests.support import tiny
from tests.support.tiny_runs import rl_settings, write_lines
from tunesmith.config.commands import GenerateConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.learn.data.preference import load_judged, load_pairs, load_steps
from tunesmith.learn.data.prepare import load_samples, load_tasks
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.said import open_plan
from tunesmith.run import assembly
from tunesmith.run.offline.sampling import identity
from tunesmith.run.specs.from_plan import load_tokenizer

SHOUTS = "{% if shout is defined and shout %}<bos>{% endif %}" + tiny.CHATML
ANSWERED = {
    "prompt": "1+1=",
    "completion": "2",
    "chosen": "2",
    "rejected": "3",
    "label": True,
    "answer": "2",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save_model(tmp_path_factory.mktemp("model"))
    tiny.tokenizer(SHOUTS).save_pretrained(path)
    return path


@pytest.mark.parametrize("goal", ["rl", "sft", "pairs", "judged", "steps"])
def test_the_variable_is_set_in_all_data(tmp_path: Path, model: Path, goal: str) -> None:
    lines = [{**ANSWERED, "prompt": f"{i}+1="} for i in range(3)]
    if goal == "steps":
        lines = [{"prompt": "1+1=", "completions": ["a", "b"], "labels": [True, False]}]
    elif goal != "pairs":
        lines = [
            {k: v for k, v in line.items() if k not in ("chosen", "rejected")} for line in lines
        ]
    else:
        lines = [{k: line[k] for k in ("prompt", "chosen", "rejected")} for line in lines]
    train = write_lines(tmp_path / "train.jsonl", lines)
    found: dict[bool, Any] = {}
    for on in (False, True):
        config = load_config(
            SFTConfig,
            None,
            [
                f"model.path={model}",
                f"data.train={train}",
                f"data.chat_template_kwargs={{shout={str(on).lower()}}}",
            ],
        )
        tokenizer = load_tokenizer(config)
        section = config.data
        make: Any = {
            "rl": load_tasks,
            "sft": load_samples,
            "pairs": load_pairs,
            "judged": load_judged,
        }.get(goal)
        made = (
            make(section, section.train, tokenizer)
            if make
            else load_steps(section, section.train, tokenizer, "\n")
        )
        found[on] = made
        for item in made.items:
            sequences = [s.token_ids for s in item.samples] if hasattr(item, "samples") else None
            for ids in sequences or [item.prompt_ids if goal == "rl" else item.token_ids]:
                assert (ids[0] == tokenizer.bos_token_id) == on
    assert found[False].fingerprint != found[True].fingerprint


def test_what_was_generated_with_other_variables_is_not_gone_on_with(model: Path) -> None:
    said: list[Any] = []
    for shout in ("true", "false"):
        variables = f"data.chat_template_kwargs.shout={shout}"
        config = load_config(
            GenerateConfig,
            None,
            [
                f"model.path={model}",
                "model.dtype=float32",
                "data.train=x/y",
                variables,
            ],
        )
        plan = open_plan(config, Facts(read_hardware()))
        said.append(identity(plan, "data", load_tokenizer(config)))
    assert said[0] != said[1] and said[0]["data.chat_template_kwargs"] == {"shout": True}


def test_a_run_takes_it_and_refuses_what_nothing_reads(tmp_path: Path, model: Path) -> None:
    def settings(run: str, **changed: Any) -> list[str]:
        return rl_settings(tmp_path, model, run, data__chat=None, train__steps=1, **changed)

    outcome = assembly.run_rl(None, [*settings("run"), "data.chat_template_kwargs={shout=true}"])
    written = load_config(RLConfig, outcome.run_dir / "config.toml", [])
    assert written.data.chat_template_kwargs == {"shout": True}
    with pytest.raises(ConfigError, match=r"'shot'.*shout"):
        assembly.run_rl(None, [*settings("typo"), "data.chat_template_kwargs={shot=true}"])
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs has no effect"):
        assembly.run_rl(
            None, [*settings("plain"), "data.chat=false", "data.chat_template_kwargs={shout=true}"]
        )


def test_the_python_function_takes_it(model: Path) -> None:
    plain, shouted = (
        tunesmith.generate(model, ["7+7="], max_new_tokens=8, chat_template_kwargs=variables)[0]
        for variables in (None, {"shout": True})
    )
    assert plain.logprobs != shouted.logprobs
    with pytest.raises(ConfigError, match=r"'shot'.*shout"):
        tunesmith.generate(model, ["7+7="], chat_template_kwargs={"shot": True})
