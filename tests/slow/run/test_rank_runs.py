"""Trainer ranks on one machine without Ray: every command ends as with one rank, and a rank that is
killed is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import GenerationConfig

from tests.support.forks import popen
from tests.support.long import again
from tests.support.rank_commands import COMMANDS
from tests.support.rank_runs import last_step, same, sft_settings, wait_for_step
from tests.support.tiny import CHATML, save_model
from tests.support.tiny_ends import FAMILIES, check_alike, rigged, template_of
from tunesmith.errors import ModelError
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.assembly.session import load_trained

SHARING = {"distill": "ring", "dpo": "ulysses", "rm": "ring", "rl": "ulysses"}
"""Commands that are also run with two ranks that share each sequence: a teacher, a reference,
scores, a critic."""


@pytest.fixture(scope="module")
def alone(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., assembly.RunResult]:
    """What a command's run in one process ends as; many tests compare with it, so it is made
    once."""
    made: dict[str, assembly.RunResult] = {}

    def found(command: str, **changed: Any) -> assembly.RunResult:
        key = repr((command, sorted(changed.items())))
        if key not in made:
            run, settings = COMMANDS[command]
            made[key] = run(None, settings(tmp_path_factory.mktemp("alone"), model, "1", **changed))
        return made[key]

    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_two_ranks_end_as_one(
    command: str, alone: Callable[..., assembly.RunResult], model: Path, tmp_path: Path
) -> None:
    run, settings = COMMANDS[command]
    same(alone(command), run(None, settings(tmp_path, model, "2", system__trainer_ranks=2)))
    if command in SHARING:
        sharing = {
            "system__sequence_parallel__size": 2,
            "system__sequence_parallel__type": SHARING[command],
        }
        same(
            alone(command),
            run(None, settings(tmp_path, model, "shared", system__trainer_ranks=2, **sharing)),
        )


def test_ranks_and_engines_that_take_turns_end_as_one_process(model: Path, tmp_path: Path) -> None:
    """The layout that is derived for a model that fits two GPUs together; each engine reads new
    weights from memory that a rank maps."""
    run, settings = COMMANDS["rl"]
    turns = {
        "system__weight_plane": "ipc",
        "system__trainer_ranks": 2,
        "system__zero_stage": 3,
        "system__engines": 2,
        "system__hybrid": True,
    }
    same(
        run(None, settings(tmp_path, model, "one")),
        run(None, settings(tmp_path, model, "two", **turns)),
    )


def test_a_rank_without_work(model: Path, tmp_path: Path) -> None:
    """Two samples to a step, and three ranks."""
    found = [
        assembly.run_sft(
            None,
            sft_settings(tmp_path, model, f"{n}", train__batch_size=2, system__trainer_ranks=n),
        )
        for n in (1, 3)
    ]
    same(*found)


class Command:
    """``tunesmith`` in a process of its own."""

    def __init__(
        self, folder: Path, settings: Sequence[str], *launcher: str, kind: str = "sft"
    ) -> None:
        (folder / "run.toml").touch()
        arguments = [
            *(launcher or (sys.executable, "-m")),
            "tunesmith",
            kind,
            str(folder / "run.toml"),
            *settings,
        ]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        pipe = subprocess.PIPE
        self.process = popen(arguments, cwd=folder, stdout=pipe, stderr=pipe, env=env, text=True)

    def ranks(self, number: int) -> list[psutil.Process]:
        name = f"rank {number} of the trainer"
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if name in " ".join(child.cmdline())]


def test_a_killed_rank_is_named_and_gone_back_from(model: Path, tmp_path: Path) -> None:
    changed = {
        "train__steps": 10**6,
        "checkpoint__every": 5,
        "system__trainer_ranks": 2,
        "eval__every": 10**6,
    }
    command = Command(
        tmp_path, sft_settings(tmp_path, model, "run", system__trainer_restarts=1, **changed)
    )
    step = 6
    for _ in range(2):
        wait_for_step(tmp_path / "run", step, command.process)
        [rank] = command.ranks(1)
        rank.send_signal(signal.SIGKILL)
        psutil.wait_procs([rank], 600)
        step = last_step(tmp_path / "run") + 3  # the others take no further step without it
    out, err = command.process.communicate(timeout=600)
    assert command.process.returncode == 1
    assert (
        "rank 1 of the trainer" in out
        and "was ended by SIGKILL" in out
        and "checkpoints/step-0000" in out
    )
    assert "rank 1 of the trainer" in err and "once too often (system.trainer_restarts)" in err


@pytest.mark.parametrize(("hangs", "signals"), [(False, 1), (True, 1), (True, 2)])
def test_signals_end_ranks_that_gather_weights(
    hangs: bool, signals: int, model: Path, tmp_path: Path
) -> None:
    """The first one does, after the step and a checkpoint; where a rank hangs, it says in how many
    seconds, which it does not wait for at a second one."""
    changed = {
        "train__steps": 10**6,
        "eval__every": 10**6,
        "system__zero_stage": 3,
        "system__trainer_ranks": 2,
    }
    command = Command(tmp_path, sft_settings(tmp_path, model, "run", **changed))
    wait_for_step(tmp_path / "run", 2, command.process)
    ranks = [*command.ranks(0), *command.ranks(1)]
    if hangs:
        ranks[1].send_signal(signal.SIGSTOP)
    command.process.send_signal(signal.SIGTERM)
    assert command.process.stderr is not None
    while "stopping" not in (line := command.process.stderr.readline()):
        assert line, "it ended without a word"
    if signals == 2:
        command.process.send_signal(signal.SIGTERM)
    _, err = command.process.communicate(timeout=600)
    assert command.process.returncode == 128 + signal.SIGTERM, err
    assert len(ranks) == 2 and not psutil.wait_procs(ranks, 600)[1]
    if hangs:
        left = re.findall(r"rank 1 of the trainer.* does not answer.* (\d+) s", err)
        assert all(int(seconds) < 30 for seconds in left) and bool(left) == (signals == 1)


@pytest.mark.parametrize(
    "sharing", [{"system__zero_stage": 2}, again({"system__sequence_parallel__size": 2})]
)
def test_policy_and_critic_under_a_launcher_end_as_in_one_process(
    sharing: dict[str, Any], alone: Callable[..., assembly.RunResult], model: Path, tmp_path: Path
) -> None:
    """Each has a default process group, and so processes, of its own."""
    _, settings = COMMANDS["rl"]
    options = ("--nproc-per-node", "2", "-m")
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = Command(
        tmp_path, settings(tmp_path, model, "launched", **sharing), torchrun, *options, kind="rl"
    )
    _, err = command.process.communicate(timeout=600)
    assert command.process.returncode == 0, err
    launched = tmp_path / "launched"
    same(
        alone("rl"),
        assembly.RunResult(launched, launched / "checkpoints/step-000003/model", [], {}),
    )


@pytest.mark.parametrize("launcher", [again("torchrun"), "accelerate"])
def test_under_a_launcher(
    launcher: str, alone: Callable[..., assembly.RunResult], model: Path, tmp_path: Path
) -> None:
    folder = Path(sys.executable).parent
    options = {
        "torchrun": ["--nproc-per-node", "2", "-m"],
        "accelerate": ["launch", "--multi_gpu", "--num_processes", "2", "-m"],
    }[launcher]
    if not (folder / launcher).exists():
        pytest.skip(f"there is no {launcher} here")
    settings = sft_settings(tmp_path, model, "launched")
    command = Command(tmp_path, settings, str(folder / launcher), *options)
    out, err = command.process.communicate(timeout=600)
    assert command.process.returncode == 0, err
    assert out.count("run directory") == 1, "rank 0 alone prints"
    assert "the processes" in out or "trainer_ranks" in out
    launched = tmp_path / "launched"
    same(
        alone("sft"),
        assembly.RunResult(launched, launched / "checkpoints/step-000003/model", [], {}),
    )


@pytest.mark.parametrize(
    ("command", "ranks", "stage", "changed"),
    [
        *((command, 2, 3, {}) for command in COMMANDS if command != "kto"),
        ("kto", 4, 3, {}),
        ("sft", 2, 1, {}),
        ("rl", 4, 2, {"train__ema_decay": 0.9}),
        ("sft", 2, 3, {"system__gradient_checkpointing": True}),
        ("dpo", 4, 3, {"lora__rank": 4}),
        ("rl", 2, 3, {"lora__rank": 4}),
        *(
            (command, 2, 3, {"lora__rank": 4, "model__quantize": "nf4"})
            for command in ("dpo", "rm", "rl")
        ),
        ("sft", 4, 2, {"lora__rank": 4, "model__quantize": "nf4", "lora__save_merged": True}),
    ],
)
def test_ranks_that_shard_the_model_end_as_one(
    command: str, ranks: int, stage: int, changed: dict[str, Any],
    alone: Callable[..., assembly.RunResult], model: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Four ranks have two copies of it."""
    run, settings = COMMANDS[command]
    sizes = {"system__trainer_ranks": ranks, "system__zero_stage": stage, "system__shard_size": 2}
    sharded = settings(tmp_path, model, "2", **sizes, **changed)
    same(alone(command, **changed), run(None, sharded))


@pytest.mark.parametrize("name", ["chatml", "two"])
@pytest.mark.parametrize("lora", [False, True])
def test_what_sharded_ranks_write_ends_its_turn_in_transformers(
    tmp_path: Path, name: str, *, lora: bool
) -> None:
    base = rigged(tmp_path / "base", name, "byte_level")
    given = {"temperature": 0.6, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(given))
    (tmp_path / "own.jinja").write_text(template_of(name))
    changed = {
        "model__chat_template": tmp_path / "own.jinja",
        "data__chat": True,
        "system__zero_stage": 3,
    }
    changed |= {"lora__rank": 2, "lora__save_merged": True} if lora else {}
    said = sft_settings(
        tmp_path, base, "run", **changed, system__trainer_ranks=2, train__steps=1, train__lr=1e-12
    )
    path = assembly.run_sft(None, said).checkpoint
    path = path.with_name("model_merged") if lora else path
    check_alike(*load_trained(path), path, "hi", FAMILIES[name])
    assert GenerationConfig.from_pretrained(path).do_sample is True


def test_a_sharded_run_that_could_not_save_takes_no_step(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    file = base / "tokenizer_config.json"
    named = [{"name": name, "template": CHATML} for name in ("default", "../../up")]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    (base / "chat_template.jinja").unlink()
    changed = {"system__zero_stage": 3, "system__trainer_ranks": 2}
    with pytest.raises(ModelError):
        assembly.run_sft(None, sft_settings(tmp_path, base, "run", **changed))
    assert not read_metrics(tmp_path / "run" / "metrics.jsonl")
