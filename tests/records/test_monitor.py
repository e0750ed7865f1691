"""Metrics on disk, run directories and their lock, the clock, and what a person sees."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import save_model
from tests.support.tiny_runs import sft_settings
from tunesmith.errors import CheckpointError, ConfigError, StorageError
from tunesmith.records.clock import Clock
from tunesmith.records.metrics import JsonLines, MetricsLog, drop_after, read_metrics
from tunesmith.records.progress import (
    LivePanel,
    Progress,
    count,
    duration,
    each_once,
    number,
    open_progress,
    print_summary,
    share,
    sparkline,
    time_table,
)
from tunesmith.records.run_dir import (
    check_run_dir,
    how_to_continue,
    is_running,
    newest_checkpoint,
    open_run_dir,
)
from tunesmith.records.sinks.base import Background
from tunesmith.records.text import one_line, printable
from tunesmith.run.assembly.train import run_sft
from tunesmith.run.loop.checkpoint import Checkpoints


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_each_step_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path).begin() as metrics:
        metrics.write(1, {"reward": 0.5})
        assert read_metrics(path)[0]["reward"] == 0.5
        metrics.write(2, {"reward": 0.75, "loss": math.nan, "kl": math.inf})
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["step"], last["reward"], last["loss"], last["kl"]) == (2, 0.75, None, None)
    assert last["time"] > 1.7e9


def test_a_damaged_line_is_no_line_less(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew\n{"step": 3}\n')
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        read_metrics(path)
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert steps(path) == [1], "a torn last line is being written"
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_resuming_drops_later_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path).begin() as metrics:
        for step in (1, 2, 2, 3, 4):
            metrics.write(step, {})
    with path.open("a") as file:
        file.write('{"step": 5, "rew')
    with MetricsLog(path).begin(2) as metrics:
        metrics.write(3, {"reward": 1.0})
    assert steps(path) == [1, 2, 2, 3]
    assert read_metrics(path)[-1]["reward"] == 1.0
    with MetricsLog(path).begin() as metrics:
        assert steps(path) == [], "a new run starts a new file"


@settings(deadline=None)
@given(st.lists(st.integers(0, 20)).map(sorted), st.integers(-1, 21), st.integers(0, 30))
def test_what_stays_is_what_was_complete_and_not_later(
    written: list[int], step: int, torn: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        text = "".join(json.dumps({"step": s, "text": "ü\n"}) + "\n" for s in written).encode()
        path.write_bytes(text + b'{"step": 0, "text": "tttttttttttt"}'[:torn])
        drop_after(path, step)
        assert steps(path) == [s for s in written if s <= step]
        left = path.read_bytes() if path.exists() else b""
        assert not left or left.endswith(b"\n")


def test_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(StorageError, match="No space left"):
        lines.write({"step": 1})
    with pytest.raises(StorageError, match="cannot write"):
        JsonLines(tmp_path / "no" / "metrics.jsonl")


def test_sinks_get_every_nth_step_and_what_must_not_be_missed(tmp_path: Path) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def write(self, step: int, metrics: object) -> None:
            assert metrics == {}
            self.steps.append(step)

        def show(self, step: int, rows: object) -> None:
            assert rows
            self.steps.append(100 * step)

        def close(self, failed: bool) -> None:
            self.steps.append(-2 if failed else -1)

    sink = Recorder()
    with MetricsLog(
        tmp_path / "m.jsonl", [Background("recorder", sink, print)], every=3
    ).begin() as metrics:
        for step in range(1, 8):
            metrics.write(step, {}, always=step == 7)
    assert sink.steps == [3, 6, 7, -1]
    assert steps(tmp_path / "m.jsonl") == list(range(1, 8)), "the file has every step"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_directories_without_a_name_are_numbered(folder: Path) -> None:
    with open_run_dir(None, "sums", False) as first, open_run_dir(None, "sums", False) as second:
        assert first.path == folder / "runs" / "sums-1"
        assert second.path == folder / "runs" / "sums-2"


def test_a_run_is_never_overwritten(folder: Path) -> None:
    path = folder / "out"
    with open_run_dir(path, "", False) as run:
        (run.path / "config.toml").write_text("")
    with open_run_dir(path, "", False) as run:
        MetricsLog(run.metrics).begin().write(1, {})
    with pytest.raises(
        ConfigError, match=r"already holds a run\. Continue it with checkpoint\.resume=true"
    ):
        open_run_dir(path, "", False).__enter__()
    with open_run_dir(path, "", True):
        pass
    with open_run_dir(path, "", path / "checkpoints" / "step-000001"):
        pass
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run_dir(path, "", folder / "other" / "checkpoints" / "step-000001").__enter__()


def test_resuming_needs_a_run(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no run to resume"):
        open_run_dir(folder / "gone", "", True).__enter__()


def test_a_directory_that_cannot_be_made(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(
        ConfigError, match=r"run_dir = '.*run' cannot be a directory: .*file is a file"
    ):
        open_run_dir(folder / "file" / "run", "", False).__enter__()


HOLD = """
import sys, time, multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from tunesmith.records.run_dir import open_run_dir
from tunesmith.records.text import one_line, printable
from tunesmith.records.sinks.base import Background
run = open_run_dir(Path(sys.argv[1]), "", False)
run.__enter__()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_two_processes_cannot_share_a_directory_and_a_dead_one_holds_nothing(folder: Path) -> None:
    path = folder / "out"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid} on "):
            open_run_dir(path, "", False).__enter__()
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid} on "):
            check_run_dir(path, "auto")
        holder.kill()
        holder.wait()
        with open_run_dir(path, "", False) as run:
            assert f"process {os.getpid()}" in (run.path / "run.lock").read_text()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_one_process_cannot_open_a_directory_twice(folder: Path) -> None:
    with (
        open_run_dir(folder / "out", "", False),
        pytest.raises(ConfigError, match="in use by this process"),
    ):
        open_run_dir(folder / "out", "", False).__enter__()
    with open_run_dir(folder / "out", "", False):
        pass


def test_a_lock_outlasts_looks_at_the_directory_under_other_names(folder: Path) -> None:
    """The system drops a lock when its process closes the file, however it was opened."""
    with open_run_dir(folder / "out", "", False) as run:
        link = folder / "latest"
        link.symlink_to(run.path)
        assert is_running(link) and is_running(folder / "." / "out")
        with pytest.raises(ConfigError, match="in use by this process"):
            open_run_dir(link, "", "auto").__enter__()
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), 6)"  # LOCK_EX | LOCK_NB
        tried = subprocess.run(
            [sys.executable, "-S", "-c", other, str(run.path / "run.lock")],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert "BlockingIOError" in tried.stderr


def test_a_checkpoint_that_a_kill_has_cut_from_its_name_is_there_again(folder: Path) -> None:
    with open_run_dir(folder / "out", "", False) as run:
        newest = Checkpoints(run.checkpoints, 1).save(1, {"step": 1}, lambda _: None, None)
    away = newest.rename(newest.with_name(f".{newest.name}.before"))  # its successor is not there
    assert newest_checkpoint(folder / "out") == away
    with open_run_dir(folder / "out", "", resume=True):
        assert newest_checkpoint(folder / "out") == newest


def test_an_interrupted_run_says_how_to_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    with pytest.raises(KeyboardInterrupt) as caught, open_run_dir(folder / "out", "", False) as run:
        Checkpoints(run.checkpoints, 1).save(1, {}, lambda _: None, None)
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [
        f"Continue with the same command and run_dir={folder / 'out'} checkpoint.resume=true"
    ]
    with pytest.raises(KeyboardInterrupt) as caught, open_run_dir(folder / "new", "", False):
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__"), "there is nothing to go on from"


def test_a_stage_of_the_demo_continues_as_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the run file that the demo wrote: ``tunesmith demo`` takes no settings."""
    monkeypatch.setattr(sys, "argv", ["tunesmith", "demo", "--json", "--dir", str(folder)])
    Checkpoints(folder / "sft/checkpoints", 1).save(1, {}, lambda _: None, None)
    assert how_to_continue(folder / "sft") == (
        f"Continue with: tunesmith sft {folder / 'sft.toml'} run_dir={folder / 'sft'} "
        f"checkpoint.resume=true"
    )


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_wall_time() -> None:
    time = FakeTime()
    clock = Clock(time)
    time.now += 1
    with clock.phase("train"):
        time.now += 2
        with clock.phase("checkpoint"):
            assert clock.current == "checkpoint"
            time.now += 4
        time.now += 8
    time.now += 16
    assert clock.lap() == {"train": 10, "checkpoint": 4, "other": 17}
    with clock.phase("rollout"):
        time.now += 1
    assert clock.lap() == {"rollout": 1, "other": 0}
    assert clock.totals == {"rollout": 1, "train": 10, "checkpoint": 4, "other": 17}


def test_a_phase_that_fails_still_counts() -> None:
    time = FakeTime()
    clock = Clock(time)
    with pytest.raises(ValueError, match="x"), clock.phase("train"):
        time.now += 3
        raise ValueError("x")
    time.now += 1
    assert clock.lap() == {"train": 3, "other": 1}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "close", "lap"]), st.floats(0, 10))))
def test_every_second_is_counted_once(events: list[tuple[str, float]]) -> None:
    time = FakeTime()
    clock = Clock(time)
    started = time.now
    laps = 0.0
    stack = []
    for event, seconds in events:
        time.now += seconds
        if event == "open":
            stack.append(clock.phase(f"p{len(stack)}"))
            stack[-1].__enter__()
        elif event == "close" and stack:
            stack.pop().__exit__(None, None, None)
        else:
            laps += sum(clock.lap().values())
    laps += sum(clock.lap().values())
    assert laps == pytest.approx(time.now - started)
    assert sum(clock.totals.values()) == pytest.approx(laps)


def test_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert time_table({"train": 30.0, "rollout": 90.0, "other": 0.0}) == [
        "rollout    1m30s    75%  ██████████████████",
        "train      30.0s    25%  ██████",
        "total      2m00s",
    ]
    print_summary({}, {"checkpoint": "here"})
    assert "checkpoint  here" in capsys.readouterr().out


def test_numbers_as_people_read_them() -> None:
    assert [number(x) for x in (0.41234, 1.2e-05, 12.0)] == ["0.412", "1.2e-05", "12"]
    assert [count(x) for x in (83.14, 12345.6, 0.0)] == ["83.1", "12,346", "0.0"]
    assert [share(x) for x in (0.234, 0.0123, 1.0)] == ["23%", "1.2%", "100%"]
    assert [duration(x) for x in (4.13, 59.94, 59.96, 125, 11220)] == [
        "4.1s",
        "59.9s",
        "1m00s",
        "2m05s",
        "3h07m",
    ]


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 1]) == "▁▁▁"
    assert sparkline([0, math.nan, 1]) == "▁ █"
    assert sparkline([]) == sparkline([math.nan]) == ""


def test_time_left_is_the_median_step_times_what_is_left() -> None:
    eta = Progress(total=10, start=2)
    assert eta.remaining is None
    for step, seconds in ((3, 1.0), (4, 100.0), (5, 2.0)):
        eta.step(step, {}, seconds)
    assert eta.remaining == 2.0 * 5


METRICS = {
    "reward": 0.4123, "ref_kl": 0.0012, "completion_tokens": 83.1, "tokens_per_second": 2312.0,
    "limit_share": 0.23, "loss": 0.0123, "grad_norm": 0.52,
}  # fmt: skip


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress(9, start=1, live=None, every=3) as progress:
        assert type(progress) is Progress, "standard output is no terminal here"
        for step in range(2, 10):
            progress.phase("train")
            progress.step(step, METRICS, 2.0)
        progress.note("a note")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 2/9",
        "step 3/9",
        "step 6/9",
        "step 9/9",
        "a note",
    ]
    assert lines[1] == (
        "step 3/9  reward 0.412  KL(reference) 0.0012  length 83.1  tok/s 2,312  of limit 23%  "
        "loss 0.0123  "
        "grad norm 0.52  2.0s  ETA 12.0s"
    )


def test_supervised_runs_show_what_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(2).step(1, {"loss": 2.5, "lr": 1e-5}, 1.0)
    assert capsys.readouterr().out == "step 1/2  loss 2.5  lr 1e-05  1.0s  ETA 1.0s\n"


def test_the_live_panel_shows_the_rewards_course() -> None:
    import io

    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with open_progress(4, live=True, console=console) as progress:
        assert isinstance(progress, LivePanel)
        progress.phase("rollout")
        for step in range(1, 4):
            progress.step(step, {**METRICS, "reward": step / 4}, 2.0)
        progress.note("[not markup] note")
        console.print(progress.render())
    shown = screen.getvalue().replace("\xa0", " ")
    assert "step 3/4" in shown and "2.0s left" in shown and "rollout" in shown
    assert "reward 0.25 ▁▅█ 0.75" in shown.replace("▄", "▅")
    assert "tok/s 2,312" in shown and "of limit 23%" in shown
    assert "[not markup] note" in shown


@pytest.mark.parametrize(("said", "live"), [([], True), (["monitor.progress=false"], False)])
def test_a_run_in_a_terminal_has_the_panel_unless_it_is_off(
    said: list[str],
    live: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[Progress] = []

    def kept(*args: Any, **options: Any) -> Progress:
        made.append(open_progress(*args, **options))
        return made[-1]

    monkeypatch.setattr("tunesmith.run.assembly.session.open_progress", kept)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    run_sft(None, [*sft_settings(tmp_path, save_model(tmp_path / "model"), train__steps=2), *said])
    [progress] = made
    assert isinstance(progress, LivePanel) == live
    shown = capsys.readouterr().out
    assert "step 2/2" in shown.replace("\xa0", " ")
    assert ("\x1b[?25h" in shown) == live, (
        "the panel hides the cursor, and shows it again at its end"
    )


def test_what_a_model_writes_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\x1b[2J\x9b1mb\rc\u202ed\n\té"
    assert printable(text) == "a\\x1b[2J\\x9b1mb\\rc\\u202ed\n\té"
    Progress(1).note(text)
    print_summary({}, {"answer": text})
    assert not set(capsys.readouterr().out) & set("\x1b\x9b\r\u202e")


@given(st.text(alphabet=st.characters(codec="utf-8")), st.integers(10, 200))
def test_one_line_is_one_line(text: str, most: int) -> None:
    line = one_line(text, most)
    assert len(line) <= most and "\n" not in line and "\x1b" not in line


def test_a_number_that_several_names_share_is_shown_once() -> None:
    assert each_once({"accuracy": "0.9", "reward": "0.9", "failed": "0"}) == {
        "accuracy, reward": "0.9",
        "failed": "0",
    }


def test_the_panel_fits_eighty_columns_and_breaks_between_numbers() -> None:
    import io

    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    panel = LivePanel(1000, console=console)
    for step in range(1, 80):
        panel.step(
            step,
            {**METRICS, "reward": step / 80, "lr": 1.25e-6, "tokens_per_second": 123456.0},
            30.0,
        )
    console.print(panel.render())
    shown = screen.getvalue().splitlines()
    assert all(len(line) <= 80 for line in shown)
    text = screen.getvalue().replace("\xa0", " ")
    for pair in (
        "reward 0.988",
        "KL(reference) 0.0012",
        "grad norm 0.52",
        "lr 1.25e-06",
        "tok/s 123,456",
    ):
        assert any(pair in line for line in text.splitlines()), pair


def test_the_least_seconds_of_a_step_are_summed_and_a_run_faster_than_them_leaves_its_share_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tunesmith.config.schema import CheckpointSection, EvalSection
    from tunesmith.plan.parts import Intervals
    from tunesmith.run.loop.recorder import Recorder
    from tunesmith.run.loop.session import Best, Session

    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        session = Session(
            3,
            Intervals(),
            EvalSection(),
            CheckpointSection(),
            Recorder(metrics, Progress(3)),
            Checkpoints(tmp_path, 1),
            Best("eval/loss"),
        )
        session.start(
            cast("Any", SimpleNamespace(state=lambda _: {}, epoch=0, rehearse=lambda _: []))
        )
        for attainable in (1.0, 1e18, 1.0):
            least = {
                "attainable_seconds": attainable,
                "attainable_seconds/train": 2.0,
                "attainable_seconds/scoring": 1.0,
            }
            session.finish_step(
                {"loss": 1.0, "grad_norm": 1.0, **{k: v * 1e-9 for k, v in least.items()}}
            )
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [line["attainable_seconds"] for line in lines] == pytest.approx([4e-9, 1e9, 4e-9])
    assert ["limit_share" in line for line in lines] == [True, False, False]
    assert capsys.readouterr().out.count("limit_share is left out") == 1


@pytest.mark.parametrize("broken", ["load", "rehearse"])
def test_a_run_that_cannot_go_on_keeps_the_lines_after_its_checkpoint(
    tmp_path: Path, broken: str
) -> None:
    from tunesmith.config.schema import CheckpointSection, EvalSection
    from tunesmith.plan.parts import Intervals
    from tunesmith.run.loop.recorder import Recorder
    from tunesmith.run.loop.rollout_log import RolloutLog
    from tunesmith.run.loop.session import Best, Session

    class Parts(SimpleNamespace):
        epoch = 0
        state = take = load = staticmethod(lambda *_: {})
        rehearse = staticmethod(lambda *_: [])

    def fails(*_: object) -> None:
        raise StorageError("no")

    state = {"step": 2, "total_tokens": 0, "best": {}}
    (tmp_path / "state.json").write_text(json.dumps(state))
    files = [tmp_path / "metrics.jsonl", tmp_path / "rollouts.jsonl"]
    for file in files:
        file.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 5)))

    def start(parts: Parts) -> None:
        with MetricsLog(files[0]) as metrics:
            rollouts = RolloutLog(files[1], 1, 10**9, str, str)
            recorder = Recorder(metrics, Progress(9), rollouts)
            checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
            best = Best("eval/loss")
            settings = Intervals(), EvalSection(), CheckpointSection()
            session = Session(9, *settings, recorder, checkpoints, best, tmp_path)
            session.start(cast("Any", parts))

    with pytest.raises(StorageError):
        start(Parts(**{broken: fails}))
    assert [steps(file) for file in files] == [[1, 2, 3, 4]] * 2
    start(Parts())
    assert [steps(file) for file in files] == [[1, 2]] * 2


def test_the_newest_run_has_a_link_and_a_name_is_no_path(folder: Path) -> None:
    for _ in range(2):
        with open_run_dir(None, "../a b/ü", False) as run:
            assert (
                run.path.parent == folder / "runs"
                and (folder / "runs" / "latest").resolve() == run.path
            )
