"""Checkpoints are there whole or not at all, the right ones stay, and a resumed run is the run it
was."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import save_model
from tests.support.tiny_runs import (
    rl_settings,
    same_tensors,
    sft_settings,
    sums,
    tensors,
    untimed,
    write_lines,
)
from tunesmith.config.reading.files import find_model
from tunesmith.errors import (
    CheckpointError,
    DeviceMemoryError,
    StorageError,
    TrainerLostError,
)
from tunesmith.records.run_dir import newest_checkpoint
from tunesmith.run import assembly
from tunesmith.run.assembly.opening import Caller
from tunesmith.run.loop.callbacks import Callbacks
from tunesmith.run.loop.checkpoint import Checkpoints, check_same_model, read_state
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.recorder import JUDGES
from tunesmith.run.loop.session import Best, due
from tunesmith.run.trainers.torch import TorchBackend

FILES = ("model/config.json", "model/model.safetensors", "optimizer.safetensors")


def write(directory: Path) -> None:
    for name in FILES:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)


def content(checkpoint: Path) -> dict[str, str]:
    return {
        str(p.relative_to(checkpoint)): p.read_text() for p in checkpoint.rglob("*") if p.is_file()
    }


def test_a_checkpoint_holds_what_was_written_and_its_state(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "c", 2)
    assert kept.newest() is None and kept.steps() == []
    path = kept.save(12, {"step": 12, "x": [1, None]}, write, None)
    assert path == tmp_path / "c" / "step-000012" == kept.newest()
    assert read_state(path) == {"step": 12, "x": [1, None]}
    assert content(path).keys() == {*FILES, "state.json", "manifest.json"}
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-000012"]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (
            RuntimeError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            StorageError,
        ),
        (KeyError("ours"), KeyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_write_that_fails_half_way_leaves_the_one_before(
    tmp_path: Path,
    at: int,
    error: BaseException,
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Checkpoints(tmp_path, 1)
    before = content(kept.save(1, {"step": 1}, write, None))

    def failing(directory: Path) -> None:
        for place, name in enumerate(FILES):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(name[: len(name) // 2])
            if place == at:
                raise error

    def full(self: Path, text: str, *_: Any, **__: Any) -> int:
        with self.open("w") as file:
            file.write(text[:3])
        raise error

    with monkeypatch.context() as patched, pytest.raises(kind) as raised:
        if at == 3:
            patched.setattr(Path, "write_text", full)
        kept.save(2, {"step": 2}, write if at == 3 else failing, None)
    if kind is StorageError:
        assert f"the last good checkpoint is {tmp_path / 'step-000001'}" in str(raised.value)
        assert raised.value.exit_code == 2  # type: ignore[attr-defined]
    assert kept.steps() == [1] and content(tmp_path / "step-000001") == before
    kept.save(3, {"step": 3}, write, None)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"], (
        "and what was left over is cleaned up"
    )


def test_without_any_checkpoint_a_full_disk_says_so(tmp_path: Path) -> None:
    def full(directory: Path) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match=r"no checkpoint was written yet.*start again"):
        Checkpoints(tmp_path, 1).save(1, {}, full, None)


@pytest.mark.parametrize("step", [1, 2])
def test_a_failing_flush_is_a_failing_write(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a step that was saved before, whose checkpoint is the only one."""
    kept = Checkpoints(tmp_path, 1)
    kept.save(1, {}, write, None)
    with monkeypatch.context() as patched:
        patched.setattr(
            os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
        )
        with pytest.raises(StorageError):
            kept.save(step, {}, write, None)
    assert kept.steps() == [1]


def test_leftovers_of_a_kill_are_no_checkpoints(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 3)
    kept.save(1, {"step": 1}, write, None)
    for leftover in (".step-000002.unfinished", ".step-000001.removed"):
        (tmp_path / leftover).mkdir()
        write(tmp_path / leftover)
        (tmp_path / leftover / "state.json").write_text("{}")
    (tmp_path / "step-000003").mkdir()
    write(tmp_path / "step-000003")  # somebody's copy, without state
    assert kept.steps() == [1] and kept.newest() == tmp_path / "step-000001"
    kept.save(2, {"step": 2}, write, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-000001",
        "step-000002",
        "step-000003",
    ]


@pytest.mark.parametrize("rehearsal", [False, True])
def test_what_a_kill_left_is_gone_before_anything_is_written(
    tmp_path: Path, rehearsal: bool
) -> None:
    """It may fill the disk. In a container the process that left it had the same number."""
    kept = Checkpoints(tmp_path, 3)
    kept.save(1, {"step": 1}, write, None)
    for leftover in (f".step-000002.{os.getpid()}-01234567.unfinished", ".step-000003.removed"):
        (tmp_path / leftover).mkdir()
        write(tmp_path / leftover)

    def written(directory: Path) -> None:
        assert {p.name for p in tmp_path.iterdir()} == {"step-000001", directory.name}
        write(directory)

    if rehearsal:
        kept.rehearse({}, written)
    else:
        kept.save(4, {"step": 4}, written, None)


def test_a_lost_rank_is_no_full_disk(tmp_path: Path) -> None:
    """The run may then go on from the checkpoint before."""

    def lost(_: Path) -> None:
        raise TrainerLostError("rank 1 is lost: I/O timeout")

    with pytest.raises(TrainerLostError):
        Checkpoints(tmp_path, 1).save(1, {}, lost, None)


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 2)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        kept.save(step, {}, write, best)
    assert kept.steps() == [2, 4, 5]
    kept.save(6, {}, write, 6)
    assert kept.steps() == [5, 6], "what was best until now goes"


def test_everybody_finds_the_same_newest_checkpoint_beside_what_a_person_put_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    kept = Checkpoints(folder, 9)
    for step in (999_999, 1_000_000):
        kept.save(step, {}, write, None)
    for name in ("step-1000000-good", "step-2000000 (copy)", "best", ".step-3000000.unfinished"):
        shutil.copytree(folder / "step-999999", folder / name)
    shutil.copytree(folder / "step-999999", folder / "step-4000000")
    (folder / "step-4000000/state.json").unlink()
    (folder / "zz notes.txt").touch()
    newest = folder / "step-1000000"
    assert kept.newest() == newest == newest_checkpoint(tmp_path)
    assert find_model(str(tmp_path), [tmp_path]) == str(newest / "model")


def test_a_checkpoint_is_removed_in_one_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while one is deleted must not leave half of it under its name."""
    kept = Checkpoints(tmp_path, 1)
    kept.save(1, {}, write, None)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    kept.save(2, {}, write, None)
    assert kept.steps() == [2] and (tmp_path / ".step-000001.removed").is_dir()


def test_going_back_to_an_earlier_one_drops_the_later_course(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 2)
    for step in (2, 4, 6):
        kept.save(step, {}, write, None)
    kept.save(5, {}, write, None)  # resumed from 4
    assert kept.steps() == [4, 5] and kept.newest() == tmp_path / "step-000005"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 2)
    kept.save(1, {"step": 1, "n": 1}, write, None)
    kept.save(1, {"step": 1, "n": 2}, write, None)
    assert (
        read_state(tmp_path / "step-000001") == {"step": 1, "n": 2}
        and len(list(tmp_path.iterdir())) == 1
    )


def test_reading_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no complete checkpoint: it has no state\.json"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"step": 1')
    with pytest.raises(CheckpointError, match=r"cannot read .*state\.json"):
        read_state(tmp_path)


def test_best_and_due() -> None:
    best = Best("eval/loss", target=0.5)
    for step, value in enumerate((float("nan"), 2.0, 3.0, float("nan"), 1.0, 1.0)):
        best.update(value, step)
    assert (best.value, best.step) == (1.0, 4) and not best.reached_target
    best.update(0.5, 9)
    assert best.reached_target
    for metric in ("eval/loss", "eval/nll", "eval/teacher_kl", "eval/failed"):
        assert not Best(metric).higher_is_better, metric
    for metric in ("eval/reward", "eval/reward/nll", "eval/pass@1", "eval/rewards/chosen"):
        assert Best(metric).higher_is_better, metric
    assert [due(s, 2, 5, True) for s in range(1, 6)] == [False, True, False, True, True]
    assert [due(s, None, 5, True) for s in range(1, 6)] == [False] * 4 + [True]
    assert [due(s, "epoch", 5, s == 3) for s in range(1, 6)] == [False, False, True, False, True]


class Cut(BaseException):
    """Stands for a kill."""


def cut_after(monkeypatch: pytest.MonkeyPatch, step: int, where: str = "finish_step") -> None:
    """The process ends in the middle of the step after ``step``."""
    from tunesmith.run.loop.session import Session

    original = getattr(Session, where)

    def method(self: Session, *args: Any, **options: Any) -> Any:
        if self.step == step:
            raise Cut
        return original(self, *args, **options)

    monkeypatch.setattr(Session, where, method)


Make = Callable[..., list[str]]
CASES: list[tuple[str, Make, dict[str, Any]]] = [
    ("sft", sft_settings, {"data__eval": "EVAL", "eval__every": 2, "train__schedule": "cosine"}),
    (
        "rl",
        rl_settings,
        {
            "algorithm__kl__coef": 0.05,
            "algorithm__kl": "reward",
            "algorithm__kl__target": 0.01,
            "algorithm__kl__horizon": 50,
            "train__batch_size": 8,
            "train__passes_per_batch": 2,
            "eval__every": 2,
            "data__eval": "EVAL",
            "train__warmup_steps": 4,
            "train__schedule": "linear",
        },
    ),
    (
        "filtered",
        rl_settings,
        {
            "algorithm__name": "dapo",
            "reward__functions": ["REWARDS:sometimes"],
            "rollout__prompts_per_step": 3,
            "algorithm__overlong__buffer": 2,
        },
    ),
]


def settings_of(
    case: tuple[str, Make, dict[str, Any]], folder: Path, model: Path, run: str, **more: Any
) -> list[str]:
    _, make, changed = case
    found = dict(changed)
    make(folder, model)  # writes the files
    if "data__eval" in found:
        lines = sums(5, 40) if make is rl_settings else [
            {"prompt": s["prompt"], "completion": s["answer"]} for s in sums(5, 40)
        ]  # fmt: skip
        found["data__eval"] = str(write_lines(folder / "held_out.jsonl", lines))
    if "reward__functions" in found:
        found["reward__functions"] = [f"{folder / 'rewards.py'}:sometimes"]
    return make(folder, model, run, **{"train__steps": 5, "checkpoint__every": 2, **found, **more})


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float32") for case in CASES),
        *(pytest.param(case, "bfloat16", marks=pytest.mark.slow) for case in CASES[:2]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_cut_off_and_resumed_it_ends_bit_by_bit_as_if_it_had_run_through(
    tmp_path: Path,
    model: Path,
    case: tuple[str, Make, dict[str, Any]],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = assembly.run_sft if case[1] is sft_settings else assembly.run_rl
    straight = run(None, settings_of(case, tmp_path, model, "straight", model__dtype=dtype))
    again = settings_of(case, tmp_path, model, "again", model__dtype=dtype)
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 3)
        run(None, again)
    assert Checkpoints(tmp_path / "again/checkpoints", 2).steps() == [2]
    resumed = run(None, [*again, "checkpoint.resume=true"])
    same_tensors(straight.checkpoint.parent, resumed.checkpoint.parent)
    assert read_state(straight.checkpoint.parent) == read_state(resumed.checkpoint.parent)
    lines = untimed(tmp_path / "straight/metrics.jsonl")
    assert lines == untimed(tmp_path / "again/metrics.jsonl")
    assert {line["step"] for line in lines} >= {1, 2, 3, 4, 5}
    if case[1] is rl_settings:
        texts = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("straight", "again")]
        assert texts[0] == texts[1] and texts[0]


class Broken(Exception):
    """An error of the user's code, or of ours."""


def fails_from(
    patched: pytest.MonkeyPatch, owner: Any, name: str, number: int, error: Exception
) -> None:
    """The calls of a method fail from a number on."""
    original = getattr(owner, name)
    calls = count(1)

    def method(*args: Any, **options: Any) -> Any:
        if next(calls) >= number:
            raise error
        return original(*args, **options)

    patched.setattr(owner, name, method)


SHORT = DeviceMemoryError("a micro-batch did not fit in memory")
Failure = tuple[tuple[str, Make, dict[str, Any]], Any, str, int, Exception, int]
FAILURES: dict[str, Failure] = {
    "memory": (CASES[0], TorchBackend, "forward_backward", 4, SHORT, 3),
    "evaluation": (CASES[0], TorchBackend, "evaluate", 3, Broken(), 4),  # after steps 0, 2 and 4
    "rollouts": (CASES[1], Collector, "collect", 6, Broken(), 3),
    "callback": (CASES[0], None, "", 0, Broken(), 3),
}


@pytest.mark.parametrize("place", FAILURES)
def test_an_error_that_ends_a_run_costs_no_whole_step(
    tmp_path: Path, model: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, owner, name, number, error, kept = FAILURES[place]
    run = assembly.run_sft if case[1] is sft_settings else assembly.run_rl
    rare = {"checkpoint__every": 5, "checkpoint__keep": 9}
    straight = run(None, settings_of(case, tmp_path, model, "straight", **rare))
    again = settings_of(case, tmp_path, model, "again", **rare)

    def on_step(step: int, _: object) -> None:
        if place == "callback" and step == kept:
            raise error

    with monkeypatch.context() as patched, pytest.raises(type(error)) as raised:
        if owner is not None:
            fails_from(patched, owner, name, number, error)
        run(None, again, caller=Caller(callbacks=Callbacks(on_step=on_step)))
    assert any("checkpoint.resume=true" in note for note in raised.value.__notes__)
    assert Checkpoints(tmp_path / "again/checkpoints", 9).steps()[-1] == kept
    resumed = run(None, [*again, "checkpoint.resume=true"])
    same_tensors(straight.checkpoint.parent, resumed.checkpoint.parent)
    assert read_state(straight.checkpoint.parent) == read_state(resumed.checkpoint.parent)
    lines = untimed(tmp_path / "straight/metrics.jsonl")
    assert lines == untimed(tmp_path / "again/metrics.jsonl")


def test_a_half_done_step_is_not_saved(tmp_path: Path, model: Path) -> None:
    """Its weights are neither those before nor those after."""
    settings = settings_of(CASES[1], tmp_path, model, "run", checkpoint__every=5, eval__every=5)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Broken):
        fails_from(patched, TorchBackend, "step", 6, Broken())  # of 4 in each step
        assembly.run_rl(None, settings)
    assert Checkpoints(tmp_path / "run/checkpoints", 2).steps() == []


def test_a_continued_run_is_judged_from_its_first_step_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that has fallen long ago need not fall any more."""
    judged: list[list[float]] = []

    class Judge:
        def __init__(self, _: object) -> None:
            judged.append([])

        def step(self, metrics: dict[str, float]) -> None:
            judged[-1].append(metrics["step"])
            assert metrics["loss"] > 0

        def end(self) -> None: ...

    monkeypatch.setattr(JUDGES, "rooms", (Judge,))
    settings = settings_of(CASES[0], tmp_path, model, "run")
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 3)
        assembly.run_sft(None, settings)
    assembly.run_sft(None, [*settings, "checkpoint.resume=true"])
    assert judged == [[1, 2, 3], [1, 2, 3, 4, 5]]


def test_the_learned_cap_the_kl_controller_the_best_and_the_position_survive(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TorchBackend.forward_backward
    failed = list[int]()

    def once(self: TorchBackend, *args: Any) -> Any:
        if not failed:
            failed.append(1)
            raise DeviceMemoryError("a micro-batch did not fit in memory")
        return original(self, *args)

    settings = settings_of(CASES[1], tmp_path, model, "run", system__max_tokens_per_microbatch=200)
    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(TorchBackend, "forward_backward", once)
        cut_after(patched, 3)
        assembly.run_rl(None, settings)
    first = read_state(tmp_path / "run/checkpoints/step-000002")
    assert first["max_tokens"] == 100 and first["kl"]["coef"] != 0.05
    assert first["tasks"]["taken"] == [8] and first["best"]["eval/reward"][0] is not None
    assembly.run_rl(None, [*settings, "checkpoint.resume=true"])
    last = read_state(tmp_path / "run/checkpoints/step-000005")
    assert last["max_tokens"] == 100 and last["tasks"]["taken"] == [20] and last["step"] == 5
    first_lines = untimed(tmp_path / "run/metrics.jsonl")
    assert max(line.get("microbatches", 0) for line in first_lines) > 1


def test_another_metric_resumed_with_has_no_best_yet(tmp_path: Path, model: Path) -> None:
    assembly.run_rl(None, settings_of(CASES[1], tmp_path, model, "run", train__steps=2))
    more = {
        "eval__metric": "eval/length",
        "eval__target": 0.0,
        "eval__at_start": False,
        "train__steps": 3,
    }
    outcome = assembly.run_rl(
        None, [*settings_of(CASES[1], tmp_path, model, "run", **more), "checkpoint.resume=true"]
    )
    state = read_state(outcome.checkpoint.parent)
    assert state["step"] == 3 and state["best"] == {
        "eval/length": [outcome.evaluations[-1]["eval/length"], 3]
    }


def test_changed_data_is_refused_on_resume(tmp_path: Path, model: Path) -> None:
    settings = rl_settings(tmp_path, model, train__steps=1)
    assembly.run_rl(None, settings)
    write_lines(tmp_path / "train.jsonl", sums(13))
    with pytest.raises(CheckpointError, match="the data set has changed"):
        assembly.run_rl(None, [*settings, "checkpoint.resume=true", "train.steps=2"])


def test_another_model_is_refused_before_anything_is_loaded(tmp_path: Path, model: Path) -> None:
    settings = sft_settings(tmp_path, model, train__steps=1)
    assembly.run_sft(None, settings)
    other = save_model(tmp_path / "other", hidden_size=64)
    with pytest.raises(
        CheckpointError, match=r"another model: its hidden_size is 32, that of .* is 64"
    ):
        assembly.run_sft(None, [*settings, "checkpoint.resume=true", f'model.path="{other}"'])
    check_same_model(tmp_path / "sft/checkpoints/step-000001", str(model))
    check_same_model(tmp_path / "sft/checkpoints/step-000001", "hub/name")


def test_a_finished_run_resumed_changes_nothing_and_more_steps_go_on(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = sft_settings(tmp_path, model, train__steps=2)
    outcome = assembly.run_sft(None, settings)
    before = tensors(outcome.checkpoint)
    again = assembly.run_sft(None, [*settings, "checkpoint.resume=true"])
    assert "nothing is left to do: the run has its 2 steps" in capsys.readouterr().out
    assert (
        again.checkpoint == outcome.checkpoint and tensors(again.checkpoint).keys() == before.keys()
    )
    more = assembly.run_sft(None, [*settings, "checkpoint.resume=true", "train.steps=4"])
    assert more.checkpoint.parent.name == "step-000004"
    assert [line["step"] for line in untimed(more.run_dir / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_continues_from_a_checkpoint_that_it_was_replacing_when_it_was_killed(
    tmp_path: Path, model: Path
) -> None:
    settings = sft_settings(tmp_path, model, train__steps=2)
    only = assembly.run_sft(None, settings).checkpoint.parent
    only.rename(only.with_name(f".{only.name}.before"))
    outcome = assembly.run_sft(None, [*settings, "checkpoint.resume=true", "train.steps=3"])
    assert [line["step"] for line in untimed(outcome.run_dir / "metrics.jsonl")] == [1, 2, 3]
    assert Checkpoints(only.parent, 2).newest_first() == [outcome.checkpoint.parent, only]


def test_a_path_resumes_from_that_checkpoint_also_into_another_run(
    tmp_path: Path, model: Path
) -> None:
    settings = sft_settings(tmp_path, model, checkpoint__every=2, checkpoint__keep=5)
    straight = assembly.run_sft(None, settings)
    second = tmp_path / "sft/checkpoints/step-000002"
    elsewhere = assembly.run_sft(
        None, [*sft_settings(tmp_path, model, "fork"), f'checkpoint.resume="{second}"']
    )
    same_tensors(straight.checkpoint.parent, elsewhere.checkpoint.parent)
    back = assembly.run_sft(None, [*settings, f'checkpoint.resume="{second}"', "train.steps=3"])
    assert Checkpoints(tmp_path / "sft/checkpoints", 5).steps() == [2, 3]
    assert back.checkpoint.parent.name == "step-000003"


@pytest.mark.parametrize(("size", "more"), [(4, [4] * 4), (12, [12, 4]), (8, [8, 8])])
def test_steps_of_another_size_train_on_the_rest_of_the_data(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
    more: list[int],
) -> None:
    """Of 24 lines, one step of 8 has been taken."""
    pass_over_data = {"train__steps": None, "train__epochs": 1, "train__schedule": "linear"}
    settings = sft_settings(tmp_path, model, checkpoint__every=1, **pass_over_data)
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 1)
        assembly.run_sft(None, settings)
    outcome = assembly.run_sft(
        None, [*settings, "checkpoint.resume=true", f"train.batch_size={size}"]
    )
    lines = untimed(outcome.run_dir / "metrics.jsonl")
    assert [line["samples"] for line in lines] == [8, *more]
    assert all(line["lr"] > 0 for line in lines)
    assert outcome.checkpoint.parent.name == f"step-{1 + len(more):06d}"
    assert ("train.steps: 3" in capsys.readouterr().out) is (len(more) != 2)


def test_a_checkpoint_has_no_pickles_and_a_readable_state(tmp_path: Path, model: Path) -> None:
    outcome = assembly.run_rl(None, rl_settings(tmp_path, model, train__steps=1))
    files = [p for p in outcome.run_dir.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {
        ".json",
        ".jsonl",
        ".safetensors",
        ".toml",
        ".jinja",
        ".lock",
    }
    assert json.loads((outcome.checkpoint.parent / "state.json").read_text())["step"] == 1
