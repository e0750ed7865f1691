"""Signals: what they cut, what they wait for, and that a run which they end goes on as if nothing
had happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_runs import (
    rl_settings,
    same_tensors,
    sft_settings,
    sums,
    untimed,
    write_lines,
)
from tunesmith.errors import ConfigError
from tunesmith.learn.usercode.far import gather
from tunesmith.records import interrupts
from tunesmith.records.interrupts import Interrupted
from tunesmith.run import assembly
from tunesmith.run.loop.checkpoint import Checkpoints, read_state
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.session import Session
from tunesmith.run.trainers.torch import TorchBackend


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever runs the tests (``nohup``, a script's background job) may have set signals to be
    ignored.

    A step has all the time it needs.
    """
    monkeypatch.setattr(interrupts, "GRACE", 600.0)
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)
    }
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def script(body: str) -> list[str]:
    head = "import os, signal, sys, threading, time\nfrom tunesmith.records import interrupts\n"
    return [sys.executable, "-c", head + body]


def ended(body: str, *signals: int, ignored: bool = False) -> tuple[int, str]:
    """Exit code and standard error of a program that gets signals once it has said that it is
    ready.

    The second comes when it has spoken of the first; its input ends after the last.
    """
    shell = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh"] if ignored else []
    with subprocess.Popen(
        [*shell, *script(body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        said = ""
        for number in signals:
            process.send_signal(number)
            said = said or process.stderr.readline()
        said += process.communicate(timeout=600)[1]
        return process.returncode, said


SAYS_READY = 'print("ready", flush=True)'
GUARDED = """
from tunesmith.cli.guard import guarded
interrupts.own_process()
def command():
    print("ready", flush=True)
    WORK
try:
    guarded(command)()
except BaseException as ended:
    sys.exit(ended.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["int", "term", "hup"],
)
def test_each_signal_ends_a_command_with_its_code(number: int, code: int) -> None:
    found, said = ended(GUARDED.replace("WORK", "time.sleep(60)"), number)
    assert found == code and signal.Signals(number).name in said and "Traceback" not in said


def test_sigterm_ends_a_job_whose_shell_ignores_sigint() -> None:
    assert ended(GUARDED.replace("WORK", "time.sleep(60)"), signal.SIGTERM, ignored=True)[0] == 143


def test_a_second_signal_ends_what_the_first_has_to_wait_for() -> None:
    waiting = GUARDED.replace(SAYS_READY, f"with interrupts.held(): {SAYS_READY}; time.sleep(60)")
    waiting = waiting.replace("    WORK\n", "")
    found, said = ended(waiting, signal.SIGTERM, signal.SIGINT)
    assert found == 143 and "Traceback" not in said


def test_a_closing_terminal_sends_several_that_count_as_one() -> None:
    inside = f"{SAYS_READY}; sys.stdin.read(); print('whole', file=sys.stderr)"
    waiting = GUARDED.replace(SAYS_READY, f"with interrupts.held(): {inside}").replace(
        "    WORK\n", ""
    )
    found, said = ended(waiting, signal.SIGHUP, signal.SIGHUP)
    assert found == 129 and "whole" in said


def test_what_a_busy_main_thread_cannot_keep_is_kept_beside_it() -> None:
    """The signal comes from native code that returns to no Python as long as this process is
    there."""
    native = "exec >/dev/null 2>&1; kill -TERM $PPID; while kill -0 $PPID; do sleep 0.1; done"
    busy = "\n    interrupts.GRACE = 0.2"
    busy += f"\n    with interrupts.keeping(lambda: 'kept'): os.system({native!r})"
    found, said = ended(GUARDED.replace("WORK", busy))
    assert found == 143 and "kept" in said


def test_closing_has_an_end() -> None:
    slow = (
        "\n    interrupts.TEARDOWN = 0.2\n    try:\n"
        "        with interrupts.keeping(lambda: 'kept'): time.sleep(60)"
        "\n    finally: time.sleep(60)"
    )
    assert ended(GUARDED.replace("WORK", slow), signal.SIGTERM)[0] == 143


def raise_signal(number: int = signal.SIGTERM) -> None:
    """From any thread, to the main one, which sees it before it goes on."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    if threading.current_thread() is not threading.main_thread():
        while not interrupts.asked():
            time.sleep(0.001)


def test_sections_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupts.handled():
        with pytest.raises(Interrupted) as raised:
            raise_signal()
        assert raised.value.exit_code == 143 and interrupts.asked()
        with pytest.raises(Interrupted):
            interrupts.check()
    with interrupts.handled():
        assert not interrupts.asked()
        done: list[str] = []
        with pytest.raises(Interrupted), interrupts.held():
            raise_signal()
            done.append("held")
        assert done == ["held"]
    with interrupts.handled():
        interrupts.commit()
        raise_signal()
        interrupts.check()
        with interrupts.held():
            pass
        monkeypatch.setattr(interrupts, "GRACE", 0.0)
        with pytest.raises(Interrupted):
            interrupts.check()
        with pytest.raises(Interrupted):
            interrupts.settle()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs that are cut, beside those that are not."""
    return tmp_path_factory.mktemp("runs")


def at_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, after: bool = False
) -> None:
    """A signal comes at the beginning, or the end, of a method's ``number``-th call."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def method(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number and not after:
            raise_signal()
        found = original(self, *args, **options)
        if len(calls) == number and after:
            raise_signal()
        return found

    monkeypatch.setattr(owner, name, method)


def settings(folder: Path, model: Path, run: str, kind: str) -> list[str]:
    make = sft_settings if kind == "sft" else rl_settings
    make(folder, model)
    lines = sums(5, 40)
    if kind == "sft":
        lines = [{"prompt": s["prompt"], "completion": s["answer"]} for s in lines]
    held_out = str(write_lines(folder / "held_out.jsonl", lines))
    more: dict[str, Any] = {
        "data__eval": held_out,
        "eval__every": 2,
        "train__steps": 4,
        "train__schedule": "cosine",
    }
    if kind != "sft":
        more |= {"train__passes_per_batch": 2, "train__batch_size": 8}
        more |= {"algorithm__kl": "none"} if kind == "lora" else {"algorithm__kl__coef": 0.05}
    if kind == "lora":
        more |= {"lora__rank": 4, "train__ema_decay": 0.5, "eval__use_ema": True}
    if kind == "ahead":
        more |= {"rollout__max_staleness": 1, "system__engine_process": True}
    return make(folder, model, run, **more)


# In RL a step is 4 optimizer steps of a micro-batch each (2 passes, 2 batches), an evaluation is a
# call to collect.
PLACES: list[tuple[str, str, Any, str, int, bool, int | None]] = [
    ("rollouts", "rl", Collector, "collect", 3, False, 1),
    ("backward", "rl", TorchBackend, "forward_backward", 5, True, 1),
    ("between optimizer steps", "rl", TorchBackend, "step", 6, True, 2),
    ("metrics", "rl", Session, "finish_step", 2, False, 2),
    ("evaluation", "rl", Collector, "collect", 4, True, 2),
    ("end of evaluation", "rl", Session, "finish_evaluation", 2, True, 2),
    ("first step", "rl", TorchBackend, "forward_backward", 1, False, None),
    ("checkpoint", "rl", Session, "save", 1, True, 2),
    ("average in place", "lora", Collector, "collect", 4, False, 2),
    ("prepare", "sft", TorchBackend, "forward_backward", 3, False, 2),
    ("evaluate", "sft", Session, "finish_evaluation", 2, False, 2),
    ("playing ahead", "ahead", TorchBackend, "forward_backward", 5, False, 1),
    ("step on its thread", "ahead", TorchBackend, "step", 6, True, 2),
]


FAST = ("rollouts", "between optimizer steps", "end of evaluation", "evaluate")


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, id=p[0], marks=() if p[0] in FAST else pytest.mark.slow) for p in PLACES],
)
def test_a_run_that_a_signal_ends_keeps_its_last_whole_step(
    folder: Path, model: Path, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, kind, owner, name, number, after, kept = place
    run = assembly.run_sft if kind == "sft" else assembly.run_rl
    cut = folder / f"cut {what}"
    said = settings(folder, model, cut.name, kind)
    with monkeypatch.context() as patched, pytest.raises(Interrupted) as raised:
        at_call(patched, owner, name, number, after)
        run(None, said)
    assert any("checkpoint.resume=" in note for note in raised.value.__notes__)
    assert Checkpoints(cut / "checkpoints", 2).steps() == ([] if kept is None else [kept])
    again = run(None, [*said, 'checkpoint.resume="auto"'])
    if kind == "ahead":  # which rollouts train which step depends on the clock there
        assert read_state(again.checkpoint.parent)["step"] == 4
        return
    straight = folder / f"straight {kind}"
    if not straight.exists():
        run(None, settings(folder, model, straight.name, kind))
    same_tensors(straight / "checkpoints/step-000004", again.checkpoint.parent)
    assert read_state(straight / "checkpoints/step-000004") == read_state(again.checkpoint.parent)
    assert untimed(straight / "metrics.jsonl") == untimed(cut / "metrics.jsonl")
    if kind != "sft":
        assert (straight / "rollouts.jsonl").read_bytes() == (cut / "rollouts.jsonl").read_bytes()


def test_a_step_that_does_not_end_in_time_is_lost_and_the_checkpoint_before_stays(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [*settings(tmp_path, model, "cut", "rl"), "checkpoint.every=1"]
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(interrupts, "GRACE", -1.0)
        at_call(patched, TorchBackend, "step", 6, after=True)
        assembly.run_rl(None, said)
    assert Checkpoints(tmp_path / "cut/checkpoints", 2).steps() == [1]
    assert "half done" in capsys.readouterr().out


def test_a_checkpoint_is_due_by_time_and_by_passes_over_the_data(
    tmp_path: Path, model: Path
) -> None:
    outcome = assembly.run_sft(
        None,
        sft_settings(
            tmp_path, model, train__steps=7, checkpoint__every="epoch", checkpoint__keep=9
        ),
    )
    assert Checkpoints(outcome.run_dir / "checkpoints", 9).steps() == [
        3,
        6,
        7,
    ]  # 24 lines, 8 to a step
    timed = sft_settings(tmp_path, model, "timed", checkpoint__minutes=1e-9, checkpoint__keep=9)
    outcome = assembly.run_sft(None, timed)
    assert Checkpoints(outcome.run_dir / "checkpoints", 9).steps() == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_is_due_after_each_pass_also_after_an_interruption(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = sft_settings(tmp_path, model, train__steps=7, eval__every="epoch")
    said.append(f"data.eval={tmp_path / 'examples.jsonl'}")
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        at_call(
            patched, TorchBackend, "step", 3, after=True
        )  # before the evaluation of the first pass
        assembly.run_sft(None, said)
    outcome = assembly.run_sft(None, [*said, "checkpoint.resume=true"])
    lines = map(json.loads, (outcome.run_dir / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "eval/loss" in line] == [
        0,
        3,
        6,
        7,
    ]  # 24 lines, 8 to a step


def test_auto_needs_a_directory_and_begins_where_there_is_nothing_to_continue(
    tmp_path: Path, model: Path
) -> None:
    said = [*sft_settings(tmp_path, model, train__steps=1), "checkpoint.resume=auto"]
    assert assembly.run_sft(None, said).checkpoint.parent.name == "step-000001"
    assert assembly.run_sft(None, [*said, "train.steps=2"]).checkpoint.parent.name == "step-000002"
    with pytest.raises(ConfigError, match="run_dir"):
        assembly.run_sft(None, [word for word in said if not word.startswith("run_dir")])


def test_a_process_that_goes_on_after_a_command_is_not_ended() -> None:
    """A notebook or a test may call a command; only the command's own process may be ended from
    inside."""
    body = """
import typer
from tunesmith.cli.guard import guarded
interrupts.GRACE = interrupts.TEARDOWN = 0.2
print("ready", flush=True)
try:
    guarded(lambda: signal.raise_signal(signal.SIGTERM))()
except typer.Exit:
    time.sleep(1.0)
while [t for t in threading.enumerate() if t.name == "signals"]:
    time.sleep(0.01)
sys.exit(0)
"""
    assert ended(body)[0] == 0


def test_a_signal_waits_until_all_ranks_are_asked() -> None:
    """Those that were asked would wait for the others."""
    asked: list[int] = []

    def ask(rank: int) -> Future[int]:
        if rank == 0:
            signal.raise_signal(signal.SIGTERM)
        asked.append(rank)
        return Future()

    with pytest.raises(Interrupted), interrupts.handled():
        gather(ask(rank) for rank in range(3))
    assert asked == [0, 1, 2]


IN_A_TASK = """
import asyncio, gc, os, signal, sys
from tunesmith.run.assembly.event_loop import event_loop
from tunesmith.learn.usercode.calls import all_or_error
from tunesmith.records.interrupts import Interrupted, handled

async def play(number, depth):
    if depth:
        return await all_or_error([play(4 * number + member, depth - 1) for member in range(4)])
    try:
        await asyncio.sleep(0)
        if number == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)  # as what closes an episode

with handled():
    try:
        with event_loop() as runner:
            runner.run(play(0, 3))
    except Interrupted as interrupt:
        print(interrupt)
gc.collect()
"""


@pytest.mark.parametrize(
    "place", [17, pytest.param(0, marks=pytest.mark.slow), pytest.param(63, marks=pytest.mark.slow)]
)
def test_a_signal_inside_a_task_ends_all_tasks_quietly(place: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TASK, str(place)], capture_output=True, text=True, timeout=60
    )
    told = [line for line in done.stderr.splitlines() if "SIGTERM: stopping" not in line]
    assert (done.returncode, done.stdout, told) == (0, "SIGTERM\n", [])
