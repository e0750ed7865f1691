"""The command-line shell as a person meets it: real processes, exit codes, and what is not
imported."""

from __future__ import annotations

import errno
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.main import get_command

from tests.support import commands
from tests.support.one_command import tunesmith
from tunesmith.cli.guard import guarded
from tunesmith.cli.main import app, main
from tunesmith.cli.outcome import print_outcome, print_usage
from tunesmith.errors import (
    ConfigError,
    DeviceMemoryError,
    ModelError,
    RewardError,
    StorageError,
    boundary,
)
from tunesmith.learn.usercode.host import portable
from tunesmith.run.assembly.session import RunResult

RUN = """\
[model]
path = "org/model"

[data]
train = "train.jsonl"

[reward]
functions = ["math"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def test_help_is_light(folder: Path) -> None:
    ended, modules = tunesmith(folder, "--help")
    assert ended.returncode == 0
    assert all(command in ended.stdout for command in ("rl", "sft", "demo", "config"))
    assert not modules & {*commands.HEAVY, "numpy", "pydantic", "rich"}
    for told in commands.tunesmith(
        folder, [[command, "--help"] for command in ("rl", "sft", "demo", "config")]
    ):
        assert told.code == 0 and "Usage" in told.shown and not told.loaded


def test_the_list_of_commands_has_whole_sentences() -> None:
    every = get_command(app).commands.items()  # type: ignore[attr-defined]
    said = {name: command.get_short_help_str() for name, command in every}
    cut = {n: text for n, text in said.items() if not text.endswith(".") or "Example:" in text}
    assert len(said) > 30 and not cut


def test_a_call_that_finds_all_of_its_work_done_says_what_it_took(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_usage({"seconds/setup": 1.0, "kv_used": 0.0}, 0.0, {"completions": "3"})
    said = capsys.readouterr().out
    assert "setup" in said and "completions  3" in said and "KV" not in said


def test_version(folder: Path) -> None:
    ended, _ = tunesmith(folder, "--version")
    assert ended.stdout.startswith("tunesmith ") and ended.returncode == 0


@pytest.mark.slow
def test_a_bad_setting_ends_with_2_and_one_message_before_anything_loads(folder: Path) -> None:
    (folder / "empty.jsonl").touch()
    cases = [
        (
            ["rl", "run.toml", "train.learning_rate=1"],
            "train.learning_rate is called train.lr here",
        ),
        (["rl", "run.toml", "rollout.group_size=1"], "leaves nothing to compare"),
        (
            ["rl", "run.toml", "train.steps=5", "train.warmup_steps=6"],
            "longer than the run of 5 optimizer steps",
        ),
        (["rl", "run.toml", 'reward.functions=["none.py:f"]'], "none.py does not exist"),
        (["rl", "run.toml", "data.train=empty.jsonl"], "empty.jsonl is empty"),
        (["rl", "gone.toml"], "run file gone.toml does not exist"),
        (["sft", "run.toml"], "[reward] has no meaning in a run file of tunesmith sft"),
        (["sft", "run.toml", "--dry-run=H100-80GB"], "[reward] has no meaning"),
        (
            ["config", "run.toml", "train.lr=fast"],
            'train.lr is "fast"; it must be a number above 0',
        ),
    ]
    for (_, words), ended in zip(
        cases, commands.tunesmith(folder, [said for said, _ in cases]), strict=True
    ):
        assert ended.code == 2
        assert ended.told.startswith("error: ") and words in ended.told
        assert "Traceback" not in ended.told and not ended.loaded
    assert not (folder / "runs").exists(), "nothing is left behind"


def test_unknown_commands_and_missing_arguments(folder: Path) -> None:
    said = [["lr", "run.toml"], ["rl"], ["check", "run.toml"], ["check", "gone"]]
    said += [["merge", "gone", "out"], ["export", "./gone", "--gguf", "f16"]]
    unknown, missing, other, *gone = commands.tunesmith(folder, said)
    assert unknown.code == 2 and "No such command" in unknown.told
    assert missing.code == 2 and "RUN.toml" in missing.told
    assert other.code == 2 and "tunesmith config run.toml" in other.told
    assert [ended.code for ended in gone] == [2, 2, 2]
    assert all("gone" in e.told and ("exist" in e.told or "is not a" in e.told) for e in gone)
    assert not any(ended.loaded for ended in (gone[0], gone[2]))


@pytest.mark.slow
def test_config_shows_what_a_run_file_resolves_to(folder: Path) -> None:
    ended, modules = tunesmith(
        folder, "config", "run.toml", "train.steps=40", "train.warmup_ratio=0.1"
    )
    assert ended.returncode == 0, ended.stderr
    assert not modules.intersection(commands.HEAVY)
    rows = {line.split()[0]: line for line in ended.stdout.splitlines() if line.strip()}
    assert "as you said" in rows["train.steps"]
    assert (
        "4" in rows["train.warmup_steps"]
        and "0.1 of 40 optimizer steps" in rows["train.warmup_steps"]
    )
    assert "preset grpo" in rows["algorithm.advantage"] and "algorithm.kl" not in rows
    everything, _ = tunesmith(folder, "config", "-v", "run.toml")
    assert "algorithm.kl" in everything.stdout and "monitor.verbose" in everything.stdout


def ending(error: BaseException | None, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard error of a command that raises."""

    def command() -> None:
        if error is not None:
            raise error

    try:
        guarded(command)()
    except typer.Exit as ended:
        return ended.exit_code, capsys.readouterr().err
    return 0, capsys.readouterr().err


def test_every_ending_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(None, capsys) == (0, "")
    assert ending(ConfigError("bad key"), capsys) == (2, "error: bad key\n")
    assert ending(StorageError("disk full"), capsys)[0] == 2
    assert ending(RewardError("too many failed"), capsys) == (1, "error: too many failed\n")
    assert ending(typer.Exit(7), capsys) == (7, "")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"),
        DeviceMemoryError("weights"),
        MemoryError(),
    ):
        code, told = ending(error, capsys)
        assert code == 3 and told.startswith("error: ") and "Traceback" not in told
    arrived = portable(torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"))
    assert isinstance(arrived, DeviceMemoryError) and "2 GiB" in str(arrived)
    code, told = ending(ZeroDivisionError("ours"), capsys)
    assert code == 1 and "Traceback" in told and "ZeroDivisionError: ours" in told
    interrupt = KeyboardInterrupt()
    interrupt.add_note("Continue with: run_dir=x checkpoint.resume=true")
    assert ending(interrupt, capsys) == (
        130, "interrupted\nContinue with: run_dir=x checkpoint.resume=true\n",
    )  # fmt: skip


def test_a_scheduler_s_signal_is_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended:
        guarded(lambda: signal.raise_signal(signal.SIGTERM))()
    assert ended.value.exit_code == 143 and "interrupted by SIGTERM\n" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_best_checkpoint_is_named_where_it_is_not_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_outcome(
        RunResult(
            Path("run"),
            Path("model"),
            [{"eval/reward": 0.5}],
            {},
            "eval/reward 0.9 at step 2: kept",
        )
    )
    assert "eval/reward 0.9 at step 2: kept" in capsys.readouterr().out


def test_an_evaluation_that_is_not_finite_is_shown_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_outcome(
        RunResult(Path("run"), Path("model"), [{"eval/loss": None}, {"eval/loss": 2.0}], {})
    )
    print_outcome(
        RunResult(Path("run"), Path("model"), [{"eval/loss": 2.0}, {"eval/loss": None}], {})
    )
    told = capsys.readouterr().out
    assert "nan → 2" in told and "2 → nan" in told


def test_guarding_keeps_the_signature_for_the_parser() -> None:
    import inspect

    def command(run: Path, overrides: list[str] | None = None) -> None: ...

    wrapped: Any = guarded(command)
    assert inspect.signature(wrapped) == inspect.signature(command)


@pytest.mark.parametrize(
    "number", ["ENAMETOOLONG", "ELOOP", "ENOSPC", "EROFS", "EMFILE", "EACCES", "EIO", "ENOMEM"]
)
def test_errors_of_the_system_are_said_in_one_line(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(getattr(errno, number), "as the system says", "x" * 5000)

    with pytest.raises(typer.Exit) as ended:
        guarded(fail)()
    told = capsys.readouterr().err
    assert ended.value.exit_code == (3 if number == "ENOMEM" else 2)
    assert "as the system says" in told and "Traceback" not in told


class Panic(BaseException):
    """As Rust code raises it through pyo3: no Exception."""


@pytest.mark.parametrize(
    ("error", "limits", "code", "words"),
    [
        (MemoryError(), {}, 3, "tunesmith plan"),
        (MemoryError(), {"AS": 2**30}, 3, "ulimit -v"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            {"AS": 2**30},
            3,
            "ulimit -v",
        ),
        (DeviceMemoryError("cannot load the weights: os error 12"), {"AS": 2**30}, 3, "ulimit -v"),
        (RuntimeError("can't start new thread"), {"AS": 2**30}, 3, "ulimit -v"),
        (
            RuntimeError("can't start new thread"),
            {"NPROC": 64},
            2,
            "64 processes and threads (ulimit -u)",
        ),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), {}, 2, "pids.max"),
        (OSError(errno.EMFILE, "Too many open files", "x"), {"NOFILE": 64}, 2, "64 (ulimit -n)"),
        (
            Panic("pool has not been initialized.: ThreadPoolBuildError { code: 11 }"),
            {"NPROC": 64},
            2,
            "ulimit -u",
        ),
        (Panic("index out of bounds"), {}, 1, "Traceback"),
    ],
)
def test_what_the_shell_limits_is_said_with_how_to_lift_it(
    error: BaseException,
    limits: dict[str, int],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {getattr(resource, f"RLIMIT_{name}"): most for name, most in limits.items()}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (found.get(kind, resource.RLIM_INFINITY),) * 2
    )
    ended, told = ending(error, capsys)
    assert ended == code and words in told and ("Traceback" in told) == (code == 1)


def test_a_file_is_not_at_fault_where_memory_ran_out() -> None:
    with (
        pytest.raises(DeviceMemoryError, match="cannot load x"),
        boundary(ModelError, "cannot load x", OSError),
    ):
        raise OSError("Cannot allocate memory (os error 12)")


ODD: list[tuple[list[str], str]] = [
    (["doctor", "x" * 300], "x"),
    (["check", "x" * 300], "x"),
    (["explain", "train.lr", "--run", "x" * 300], "x"),
    (["runs", "compare", "x" * 300, "y"], "x"),
    (["merge", "x" * 300, "out"], "x"),
    (["export", "x" * 300, "--gguf", "f16"], "x"),
    (["config", "run.toml", "model.path=" + "x" * 300], "model.path"),
    (["config", "run.toml", "model.path=мод/ель"], "model.path"),
    (["config", "run.toml", "model.path=mo\u200bd/el"], "model.path"),
    (["config", "run.toml", "data.train=да/та"], "data.train"),
    (["config", "run.toml", "reward.memory=1B"], "reward.memory"),
    (["config", "run.toml", "train.passes_per_batch=1000000000"], "passes_per_batch"),
    (["explain", "x" * 100_000], "x"),
    (["config", "run.toml", "x" * 100_000 + ".y=1"], "x"),
    (["init", "x" * 100_000], "x"),
]


def test_odd_words_are_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a time that does not grow with the square of their length, which would take
    minutes."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "140")
    for words, named in ODD:
        monkeypatch.setattr(sys, "argv", ["tunesmith", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert ended.value.code == 2 and named in told and "Traceback" not in told, words
