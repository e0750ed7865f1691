"""What ``tunesmith init`` writes is whole, and what ``keys``, ``models`` and ``presets`` list is
all there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.machine_facts import CPU
from tunesmith.cli.main import app
from tunesmith.config.commands import KINDS, all_keys
from tunesmith.config.load import find_kind, load_config
from tunesmith.config.presets import PRESETS
from tunesmith.config.system import VllmSection
from tunesmith.errors import ConfigError
from tunesmith.guide.explain.settings import settings_of
from tunesmith.guide.recipes.start import HELD_OUT, STARTS, TRAIN, make_tiny_model, write_start
from tunesmith.learn.data.prepare import peek
from tunesmith.learn.environments.loading import check_environment
from tunesmith.plan.facts.families import REFUSED, published
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("start") / "model")


def printed(*arguments: str) -> str:
    """Standard output of a command on a terminal of 80 columns."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("task", STARTS)
def test_every_start_is_a_run_file_that_resolves(
    task: str, tmp_path: Path, tiny_model: Path
) -> None:
    write_start(task, tmp_path / "new", str(tiny_model), tiny=False)
    run = tmp_path / "new" / "run.toml"
    kind = KINDS[STARTS[task].command.partition(" ")[0]]
    if task not in ("dpo", "kto"):  # their sections say it
        assert find_kind(run) in (kind, KINDS["sft"])
    config = load_config(kind, run)
    resolve(config, Facts(CPU, read_model_facts(tiny_model)))
    for data, count in ((config.data.train, TRAIN), (config.data.eval, HELD_OUT)):
        if data is not None:
            peek(config.data, data, config.goal)
            assert len(Path(str(data)).read_text().splitlines()) == count
    if hasattr(config, "environment") and config.rl:
        check_environment(config.environment, run.parent)


def test_no_question_is_in_both_sets_and_answers_are_right(tmp_path: Path) -> None:
    write_start("rl", tmp_path, "org/m", tiny=False)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()]
        for n in ("train", "held_out")
    )
    assert not {line["prompt"] for line in train} & {line["prompt"] for line in held_out}
    for line in train + held_out:
        boxes, each, more = map(int, re.findall(r"\d+", line["prompt"]))
        assert line["answer"] == str(boxes * each + more)


def test_the_reward_reads_the_last_number(tmp_path: Path) -> None:
    write_start("rl", tmp_path, "org/m", tiny=False)
    names: dict[str, object] = {}
    exec((tmp_path / "rewards.py").read_text(), names)
    reward = names["right_number"]
    assert callable(reward)
    scores = reward(
        ["so 1,200.", "25", "The answer is 5", "none", "-3"], answer=["1200", "5", "5", "1", "-3"]
    )
    assert scores == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_the_labels_of_kto_say_whether_the_answer_is_right(tmp_path: Path) -> None:
    write_start("kto", tmp_path, "org/m", tiny=False)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert {line["label"] for line in lines} == {True, False}
    assert all(("*" in line["completion"]) == line["label"] for line in lines)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"rewards\.py"):
        write_start("rl", tmp_path, "org/m", tiny=False)
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
    assert (tmp_path / "rewards.py").read_text() == "mine\n"


def test_wrong_tasks_and_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'sft'"):
        write_start("sftt", tmp_path, None, tiny=False)
    with pytest.raises(ConfigError, match="--model"):
        write_start("sft", tmp_path, "org/m", tiny=True)
    assert not list(tmp_path.iterdir())


def test_init_lists_the_tasks_and_says_how_to_go_on(tmp_path: Path) -> None:
    assert all(re.search(rf"^{task} ", printed("init"), re.MULTILINE) for task in STARTS)
    said = printed("init", "sft", str(tmp_path / "my"), "--model", "org/name")
    assert f"tunesmith sft {tmp_path / 'my' / 'run.toml'}" in said
    assert load_config(KINDS["sft"], tmp_path / "my" / "run.toml").model.path == "org/name"


def every_key() -> Iterator[str]:
    for kind in KINDS.values():
        yield from all_keys(kind, tables=True)


def test_every_setting_is_listed_with_its_meaning() -> None:
    settings = settings_of()
    assert {s.key for s in settings} == set(every_key())
    assert not [s.key for s in settings if not (s.kind and s.default and s.meaning)]
    listed = printed("keys")
    assert all(re.search(rf"^{re.escape(s.key)}$", listed, re.MULTILINE) for s in settings)


@pytest.mark.parametrize(
    ("what", "keys"),
    [
        ("rm", set(all_keys(KINDS["rm"], tables=True))),
        (
            "system.vllm",
            {"system.vllm", *(f"system.vllm.{name}" for name in VllmSection.model_fields)},
        ),
        ("train.lr", {"train.lr"}),
        ("learning_rate", {"train.lr"}),
        ("num_generations", {"rollout.group_size", "sampling.n"}),
    ],
)
def test_keys_of_a_command_a_section_or_another_framework(what: str, keys: set[str]) -> None:
    assert set(re.findall(r"^[\w.]+$", printed("keys", what), re.MULTILINE)) == keys


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["keys", "trian"], "train"),
        (["keys", "packing"], "always packed"),
        (["presets", "GRPO"], "grpo"),
    ],
)
def test_what_is_not_there_is_refused_with_a_hint(arguments: list[str], hint: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and hint in done.output


def test_presets_and_models_list_all_of_them() -> None:
    presets = printed("presets")
    for name, preset in PRESETS.items():
        assert re.search(rf"^{name}$", presets, re.MULTILINE) and preset.source in " ".join(
            presets.split()
        ), name
    assert set(published()) | set(REFUSED) <= set(printed("models").split())


@pytest.mark.parametrize(
    "command", [["--help"], ["init", "--help"], ["keys"], ["models"], ["presets"], ["init"]]
)
def test_lists_fit_eighty_columns(command: list[str]) -> None:
    said = printed(*command)
    assert max(map(len, said.splitlines())) <= 80
    assert "..." not in said.replace("[section.key=value]...", "").replace("[ARGS]...", "").replace(
        "[NAME]...", ""
    )
