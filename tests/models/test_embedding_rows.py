"""Tokens for which the model's embedding has no row, in every command and every place that text
comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.episodes import load, made_task, play
from tests.support.tiny_preferences import lines_of
from tests.support.tiny_runs import REWARDS, sums, write_lines
from tunesmith.config.load import load_config
from tunesmith.config.schema import SFTConfig
from tunesmith.errors import ConfigError, DataError, ModelError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.embedding_rows import set_rows
from tunesmith.models.source import load_tokenizer
from tunesmith.run import assembly
from tunesmith.run.assembly.checking import check_run
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.offline.inference import generate
from tunesmith.run.offline.rft import run_rft
from tunesmith.types import Status

ROWS = 261
NEW = "<NEW1>"
Run = Callable[[None, list[str]], Any]


def base(folder: Path, *added: str, rows: int = ROWS, **names: str) -> Path:
    """A model with exactly the rows of the tiny tokenizer, to which tokens are added."""
    tiny.save_model(folder, vocab_size=rows)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(list(added), special_tokens=True)
    for name, token in names.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("rows") / "model", NEW)


def answered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{s['prompt']}", "completion": s["answer"]} for s in sums(count)]


REWARD = [
    "reward.isolation=thread",
    "rollout.group_size=4",
    "rollout.prompts_per_step=2",
    "rollout.max_new_tokens=4",
]
COMMANDS: dict[str, tuple[Run, Callable[[int], list[dict[str, Any]]], str, list[str]]] = {
    "sft": (assembly.run_sft, answered, "completion", []),
    "dpo": (assembly.run_dpo, lambda n: lines_of("dpo", n), "rejected", []),
    "rm": (assembly.run_rm, lambda n: lines_of("rm", n), "chosen", []),
    "kto": (assembly.run_kto, lambda n: lines_of("kto", n), "completion", []),
    "prm": (assembly.run_prm, lambda n: lines_of("prm", n), "prompt", ['prm.separator="\\n"']),
    "rl": (assembly.run_rl, sums, "prompt", REWARD),
    "distill": (assembly.run_distill, answered, "completion", ["distill.mode=offline"]),
    "distill on samples": (assembly.run_distill, sums, "prompt", REWARD[1:]),
    "rft": (
        lambda _, said: run_rft("run", None, said),
        sums,
        "prompt",
        ["reward.isolation=thread", "rft.threshold=0.5", "sampling.max_new_tokens=4"],
    ),
    "generate": (run_generate, sums, "prompt", ["sampling.max_new_tokens=4"]),
    "score": (
        run_generate,
        answered,
        "completion",
        ["output.kind=score", "reward.isolation=thread"],
    ),
}
REWARDED = ("rl", "rft", "score")


def settings(
    folder: Path, model: Path, name: str, lines: list[dict[str, Any]], *more: str
) -> list[str]:
    write_lines(folder / "train.jsonl", lines)
    (folder / "rewards.py").write_text(REWARDS)
    own = list(COMMANDS[name][3])
    if name in REWARDED:
        own.append(f'reward.functions=["{folder / "rewards.py"}:share"]')
    if name.startswith("distill"):
        own.append(f"teacher.path={model}")
    if name not in ("generate", "score", "rft"):
        own += ["train.steps=1", "train.batch_size=2"]
    common = [
        f"run_dir={folder / 'run'}",
        f"model.path={model}",
        "model.dtype=float32",
        "system.threads=1",
    ]
    return [*common, f"data.train={folder / 'train.jsonl'}", "data.chat=false", *own, *more]


def refusal(run: Callable[[], Any], kind: type[UserError] = DataError) -> str:
    with pytest.raises(kind) as refused:
        run()
    return str(refused.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_with_such_a_token_is_refused_when_data_is_read(
    tmp_path: Path, model: Path, name: str
) -> None:
    run, make, column, _ = COMMANDS[name]
    lines = make(6)
    lines[4][column] += NEW
    message = refusal(lambda: run(None, settings(tmp_path, model, name, lines)))
    assert f"{tmp_path / 'train.jsonl'}:5" in message
    assert all(word in message for word in (NEW, "261", "262", "resize_token_embeddings"))


@pytest.mark.parametrize("name", ["sft", "dpo", "rl", "rft"])
def test_data_for_evaluation_is_read_alike(tmp_path: Path, model: Path, name: str) -> None:
    run, make, column, _ = COMMANDS[name]
    held_out = make(3)
    held_out[2][column] += NEW
    file = write_lines(tmp_path / "held_out.jsonl", held_out)
    message = refusal(
        lambda: run(None, settings(tmp_path, model, name, make(6), f"data.eval={file}"))
    )
    assert f"{file}:3" in message and NEW in message


def test_the_texts_around_every_line_are_named(tmp_path: Path, model: Path) -> None:
    lines = answered(4)
    chat = settings(tmp_path, model, "sft", lines, "data.chat=true")
    prompt = refusal(lambda: assembly.run_sft(None, [*chat, f'data.system_prompt="be {NEW}"']))
    assert NEW in prompt
    template = tmp_path / "own.jinja"
    template.write_text(tiny.CHATML.replace("<|im_start|>", NEW))
    message = refusal(lambda: assembly.run_sft(None, [*chat, f"model.chat_template={template}"]))
    assert "in the chat template" in message and NEW in message and "train.jsonl:1" in message


def test_a_template_file_is_read_as_every_editor_writes_it(tmp_path: Path, model: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(tiny.CHATML, encoding="utf-8-sig")
    assert load_tokenizer(model, chat_template=template).chat_template == tiny.CHATML
    template.write_text("\n")
    with pytest.raises(ConfigError, match=r"own\.jinja is empty") as caught:
        load_tokenizer(model, chat_template=template)
    assert caught.value.keys == ("model.chat_template",)


def test_worked_examples_are_checked_with_their_line(tmp_path: Path, model: Path) -> None:
    shots = write_lines(
        tmp_path / "shots.jsonl", [*answered(1), {"prompt": "1", "completion": NEW}]
    )
    more = [f"rft.few_shot={shots}"]
    message = refusal(
        lambda: COMMANDS["rft"][0](None, settings(tmp_path, model, "rft", sums(6), *more))
    )
    assert f"{shots}:2" in message and NEW in message


def test_such_lines_can_be_skipped_and_are_listed(tmp_path: Path, model: Path) -> None:
    lines = answered(6)
    lines[4]["prompt"] += NEW
    assembly.run_sft(None, settings(tmp_path, model, "sft", lines, "data.skip_bad=true"))
    [skipped] = [
        json.loads(line) for line in (tmp_path / "run/skipped.jsonl").read_text().splitlines()
    ]
    assert skipped["where"].endswith("train.jsonl:5") and NEW in skipped["reason"]


def test_a_check_without_a_run_reads_the_first_line(tmp_path: Path, model: Path) -> None:
    lines = answered(3)
    lines[0]["completion"] += NEW
    said = settings(tmp_path, model, "sft", lines)
    message = refusal(lambda: check_run(load_config(SFTConfig, None, said), tmp_path, hub=False))
    assert "train.jsonl:1" in message and NEW in message


@pytest.mark.parametrize("named", ["config.json", "generation_config.json", "tokenizer"])
def test_an_end_of_sequence_without_a_row_is_refused(tmp_path: Path, named: str) -> None:
    path = base(
        tmp_path / "model", "<end>", **({"eos_token": "<end>"} if named == "tokenizer" else {})
    )
    if named != "tokenizer":
        file = path / named
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [2, ROWS]}))
    message = refusal(
        lambda: assembly.run_sft(None, settings(tmp_path, path, "sft", answered(3))), ModelError
    )
    assert named in message and str(ROWS) in message and "eos_token" in message


@pytest.mark.parametrize(("command", "key"), [("rl", "rollout"), ("generate", "sampling")])
def test_tokens_to_stop_at_are_the_model_s(
    tmp_path: Path, model: Path, command: str, key: str
) -> None:
    for token in (ROWS, 10**6):
        said = settings(tmp_path, model, command, sums(6), f"{key}.stop_token_ids=[5, {token}]")
        message = refusal(lambda said=said: COMMANDS[command][0](None, said), ConfigError)
        assert f"{key}.stop_token_ids has {token}" in message


def test_the_label_of_a_step_has_a_row(tmp_path: Path, model: Path) -> None:
    said = settings(tmp_path, model, "prm", lines_of("prm", 6), f'prm.good="{NEW}"')
    assert "prm.good" in refusal(lambda: assembly.run_prm(None, said), ConfigError)


def test_prompts_from_python_are_checked_by_their_place(model: Path) -> None:
    loaded = CausalLM.load(model)
    for source in (model, loaded):
        message = refusal(
            lambda source=source: generate(source, ["a", f"b{NEW}"], chat=False), UserError
        )
        assert "prompts[1]" in message and NEW in message


def test_rows_beyond_the_tokenizer_are_padding(tmp_path: Path) -> None:
    path = base(tmp_path / "model", NEW, rows=320)
    lines = answered(4)
    lines[3]["completion"] += NEW
    assembly.run_sft(None, settings(tmp_path, path, "sft", lines))


ECHO = """
class Echo:
    def reset(self, how):
        self.how = how

    def step(self, action):
        return self.how, 0.0, False
"""


def test_what_an_environment_writes_fails_its_own_episode_only(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([NEW])  # special ones are ordinary text in an answer
    set_rows(tokenizer, ROWS)
    environments = load(tmp_path, ECHO, path="env.py:Echo", max_turns=2)
    tasks = [made_task(tokenizer, identity=how, how=how) for how in ("fine", f"see {NEW}")]
    rollouts, _ = play(environments, tokenizer, tasks, lambda _: "x<|im_end|>")
    fine, failed = sorted(rollouts, key=lambda rollout: rollout.task.id)
    assert fine.status is Status.OK
    assert (
        failed.status is Status.ENVIRONMENT_FAILED
        and NEW in str(failed.error)
        and failed.reward is None
    )
