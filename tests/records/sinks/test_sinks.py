"""The contract of sinks: the real ones that are installed here, and a fake. None can end a run or
hold it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.documents import ROOT
from tests.support.filled_sinks import configured, fill
from tests.support.tiny_runs import REWARDS, rl_settings, sft_settings, sums, write_lines
from tunesmith.config.resolved import settings
from tunesmith.errors import ConfigError, StorageError
from tunesmith.records.metrics import read_metrics
from tunesmith.records.run_dir import RunDir
from tunesmith.records.sinks import base
from tunesmith.records.sinks.base import Background, RunInfo, as_markdown
from tunesmith.run import assembly
from tunesmith.run.assembly.sinks import ADAPTERS, check_sinks, open_sinks
from tunesmith.run.offline.rft import run_rft

FAKE = """\
import json
from pathlib import Path

OPENED = []


class Fake:
    def __init__(self, run):
        self.file = Path(run.directory) / "fake.jsonl"
        self.put(kind="open", name=run.name, project=run.project, tags=run.tags, resume=run.resume_step,
                 lr=run.settings["train.lr"], token=run.settings.get("reward.remote"))

    def put(self, **record):
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\\n")

    def write(self, step, metrics):
        self.put(kind="write", step=step, metrics=dict(metrics))

    def show(self, step, rows):
        self.put(kind="show", step=step, rows=[dict(row) for row in rows])

    def close(self, failed):
        self.put(kind="close", failed=failed)


class OnlyWrites:
    def __init__(self, run):
        self.file = Path(run.directory) / "only.jsonl"

    def write(self, step, metrics):
        with self.file.open("a") as file:
            file.write(f"{step}\\n")


class Breaks(OnlyWrites):
    def write(self, step, metrics):
        super().write(step, metrics)
        raise OSError("no route to host")


class DoesNotOpen:
    def __init__(self, run):
        raise OSError("no server")


class NoSink:
    def __init__(self, run):
        pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which every service keeps its files."""
    (tmp_path / "mine.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "600")
    monkeypatch.setattr(base, "CLOSE_SECONDS", 600.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return tmp_path


def of_tensorboard(place: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "run" / "tensorboard"))
    events.Reload()
    tensors = events.Tags()["tensors"]
    text = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in tensors
        if "_hparams" not in tag
    }
    settings = "".join(text.values())
    return {
        "reward": {e.step: e.value for e in events.Scalars("reward")},
        "alias": [e.value for e in events.Scalars("reward_std")],
        "settings": settings,
        "rows": text["rollouts"],
        "name": settings,
        "hparams": "_hparams_/session_start_info" in str(events.summary_metadata),
    }


def of_mlflow(place: Path) -> dict[str, Any]:
    del place
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and {"a", "b"} <= set(run.data.tags)
    history = client.get_metric_history(run.info.run_id, "reward/all")
    text = client.download_artifacts(run.info.run_id, "rollouts/step-000003.md")
    return {
        "reward": {m.step: m.value for m in history},
        "alias": [m.value for m in client.get_metric_history(run.info.run_id, "reward_std")],
        "settings": str(run.data.params),
        "rows": Path(text).read_text(),
        "name": run.info.run_name,
        "at": run.data.metrics["eval/pass_4"],
    }


TRACKIO = """
import json, sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.support.filled_sinks import fill
place = Path({place!r})
fill("trackio", place, None, (0.1, 0.2))
fill("trackio", place, 2, (0.5,))
import trackio
from trackio.sqlite_storage import SQLiteStorage
[name] = [run.name for run in trackio.Api().runs("sums")]
print(json.dumps([name, SQLiteStorage.get_logs("sums", name), SQLiteStorage.get_run_config("sums", name)]))
"""


def of_trackio(place: Path) -> dict[str, Any]:
    """Filled and read in a process of its own, as it reads its directory's name when it is
    imported."""
    code = TRACKIO.format(root=str(ROOT), place=str(place))
    environment = {**os.environ, "TRACKIO_DIR": str(place / "trackio")}
    ended = forks.run([sys.executable, "-c", code], env=environment, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert (place / "trackio").is_dir()
    [found] = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    name, logs, config = json.loads(found)
    rewards = [line for line in logs if "reward" in line]
    return {
        "reward": {line["step"]: line["reward"] for line in rewards},
        "alias": [line["reward_std"] for line in rewards],
        "settings": str(config),
        "rows": str([line["rollouts"] for line in logs if "rollouts" in line][-1]),
        "name": name,
    }


def of_wandb(place: Path) -> dict[str, Any]:
    """What the offline files hold; each part of a run has its own, with one id."""
    from wandb.proto import wandb_internal_pb2

    rewards: dict[int, float] = {}
    others = list[float]()
    texts = list[str]()
    ids = set[str]()
    names = set[str]()
    for file in sorted(
        (place / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime
    ):
        for data in log_records(file.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                names.add(record.run.display_name)
                assert record.run.project == "sums" and list(record.run.tags) == ["a", "b"]
                texts += [
                    f"{item.key or item.nested_key}: {item.value_json}"
                    for item in record.run.config.update
                ]
            line = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if "reward" in line:
                rewards[int(line["step"])] = float(line["reward"])
                others.append(float(line["reward_std"]))
    tables = [path.read_text() for path in place.rglob("*.table.json")]
    assert len(ids) == 1, "a resumed run is the same run"
    return {
        "reward": rewards,
        "alias": others,
        "settings": str(texts),
        "rows": "".join(tables),
        "name": names.pop(),
    }


def log_records(data: bytes) -> Iterator[bytes]:
    """Of LevelDB's log format, in which W&B keeps runs: blocks of 32 KiB, of chunks with checksum,
    length and kind.

    The first block is 7 bytes shorter here, for W&B's header.
    """
    whole = b""
    at = 0
    FULL = 1
    LAST = 4
    while at + 7 <= len(data):
        room = 32768 - (at + 7) % 32768
        if room < 7:
            at += room
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sink", READERS)
def test_the_contract(sink: str, place: Path) -> None:
    """Numbers under both names, rollouts, settings and names arrive; a run that is continued stays
    one run."""
    pytest.importorskip(sink)
    if sink != "trackio":
        check_sinks([sink], place)
        fill(sink, place, None, (0.1, 0.2))
        if sink == "wandb":
            time.sleep(2.1)  # it names a directory by the second
        fill(sink, place, 2, (0.5,))
    found = READERS[sink](place)
    for _ in range(600):  # wandb's own process may still be writing
        if len(found["reward"]) == 3:
            break
        time.sleep(0.2)
        found = READERS[sink](place)
    assert {step: round(value, 3) for step, value in found["reward"].items()} == {
        1: 0.1,
        2: 0.2,
        3: 0.5,
    }
    assert [round(value, 3) for value in found["alias"]] == [0.05, 0.1, 0.25], (
        "another tool's name for it"
    )
    assert (
        "trial" in found["name"] and "train.lr" in found["settings"] and "0.25" in found["settings"]
    )
    assert "1+1=" in found["rows"] and found.get("hparams", True) and found.get("at", 1.0) == 1.0


def test_tensorboard_drops_what_an_interrupted_run_wrote_after_its_checkpoint(place: Path) -> None:
    pytest.importorskip("tensorboard")
    fill("tensorboard", place, None, (0.1, 0.2, 0.3))
    fill("tensorboard", place, 1, (0.5, 0.6))
    found = of_tensorboard(place)["reward"]
    assert {step: round(value, 3) for step, value in found.items()} == {1: 0.1, 2: 0.5, 3: 0.6}


@pytest.mark.slow
def test_a_sink_that_is_not_installed_names_the_extra() -> None:
    code = (
        "import sys\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {list(ADAPTERS)!r}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "from pathlib import Path\n"
        "from tunesmith.run.assembly.sinks import check_sinks\n"
        "from tunesmith.errors import ConfigError\n"
        f"for sink in {list(ADAPTERS)!r}:\n"
        "    try: check_sinks([sink], Path.cwd())\n"
        "    except ConfigError as error: print(error)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0 and all(
        f"pip install 'tunesmith[{sink}]'" in ended.stdout for sink in ADAPTERS
    )


@pytest.mark.more
def test_wandb_without_a_key_is_refused_before_anything_loads(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        assembly.run_sft(None, sft_settings(tmp_path, model, monitor__sinks=["wandb"]))
    assert not (tmp_path / "sft").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorbord", "Did you mean 'tensorboard'"),
        ("mine.py:Fak", "Fak"),
        ("none.py:Fake", "none.py"),
    ],
)
def test_an_unknown_sink_is_refused(place: Path, model: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assembly.run_sft(None, sft_settings(place, model, monitor__sinks=[name]))
    assert not (place / "sft").exists()


@pytest.mark.parametrize(
    ("name", "error"), [("DoesNotOpen", StorageError), ("NoSink", ConfigError)]
)
def test_a_class_that_is_no_sink_is_refused(
    place: Path, model: Path, name: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match="mine.py:" + name):
        assembly.run_sft(None, sft_settings(place, model, monitor__sinks=[f"mine.py:{name}"]))


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_and_its_continuation_fill_a_sink_of_ones_own(place: Path, model: Path) -> None:
    """What the sink got is what metrics.jsonl has, on both sides of the interruption, and rollouts
    beside it."""
    named = {
        "monitor__run_name": "trial one",
        "monitor__tags": ["a"],
        "monitor__sinks": ["mine.py:Fake"],
    }
    settings = rl_settings(
        place, model, data__eval=str(place / "train.jsonl"), eval__max_prompts=2, **named
    )
    assembly.run_rl(None, [*settings, "train.steps=2"])
    assembly.run_rl(None, [*settings, "checkpoint.resume=true"])
    got = records(place / "run" / "fake.jsonl")
    opened = [r for r in got if r["kind"] == "open"]
    assert [(r["name"], r["tags"], r["resume"], r["lr"]) for r in opened] == [
        ("trial one", ["a"], None, 0.01), ("trial one", ["a"], 2, 0.01),
    ]  # fmt: skip
    lines = read_metrics(place / "run" / "metrics.jsonl")
    written = [r for r in got if r["kind"] == "write"]
    steps = [r for r in written if "loss" in r["metrics"]]
    assert [r["step"] for r in steps] == [1, 2, 3]
    for record, line in zip(steps, [line for line in lines if "loss" in line], strict=True):
        assert {k: v for k, v in line.items() if k not in ("step", "time")}.items() <= record[
            "metrics"
        ].items()
        assert record["metrics"]["train/loss"] == line["loss"]
    shown = [r for r in got if r["kind"] == "show"]
    assert {row["kind"] for r in shown for row in r["rows"]} == {"train", "eval"}
    assert all("advantage" in row for r in shown for row in r["rows"] if row["kind"] == "train")
    assert [r["failed"] for r in got if r["kind"] == "close"] == [False, False]


def test_a_sink_that_breaks_is_said_once_and_the_run_goes_on(
    place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = ["mine.py:Breaks", "mine.py:OnlyWrites"]
    outcome = assembly.run_sft(
        None, sft_settings(place, model, monitor__sinks=sinks, train__steps=3)
    )
    out = capsys.readouterr().out
    assert out.count("mine.py:Breaks is no longer written") == 1 and "no route to host" in out
    written = (place / "sft" / "only.jsonl").read_text().split()
    assert sorted(written) == ["1", "1", "2", "3"], "one step, and three, by two threads"
    assert [line["step"] for line in read_metrics(outcome.run_dir / "metrics.jsonl")] == [1, 2, 3]


class Slow(base.Sink):
    """Hangs in its first call until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics
        self.go.wait(60)

    def show(self, step: int, rows: Sequence[base.Row]) -> None: ...

    def close(self, failed: bool) -> None: ...


def test_a_sink_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(base, "WAITING", 10)
    slow = Slow()
    said = list[str]()
    sink = Background("slow", slow, said.append)
    for step in range(30):
        sink.write(step, {})
    sink.close(failed=True)
    slow.go.set()
    assert len(said) == 1 and "slow is no longer written" in said[0]


def test_a_run_that_fails_says_so_to_its_sinks(place: Path, model: Path) -> None:
    rl_settings(place, model)
    (place / "bad.py").write_text("def bad(completions, **_):\n    raise ValueError('no')\n")
    settings = rl_settings(
        place, model, reward__functions=["bad.py:bad"], monitor__sinks=["mine.py:Fake"]
    )
    with pytest.raises(RuntimeError):
        assembly.run_rl(None, settings)
    assert records(place / "run" / "fake.jsonl")[-1] == {"kind": "close", "failed": True}


def test_what_a_service_calls_a_run_is_forgotten_by_a_new_one(tmp_path: Path) -> None:
    RunInfo("a", tmp_path).keep_id("wandb", "abc")
    RunInfo("a", tmp_path).keep_id("mlflow", "def")
    assert RunInfo("a", tmp_path, resume_step=3).known_id("wandb") == "abc"
    assert RunInfo("a", tmp_path).known_id("wandb") is None


def test_text_of_a_model_is_no_markup() -> None:
    text = as_markdown([{"completion": "# big\n<script>", "reward": 1.0}])
    assert "    # big" in text and "    <script>" in text and "**reward**" in text


def test_no_secret_reaches_a_sink(place: Path) -> None:
    config = configured("mine.py:Fake", place / "run")
    secret = config.model_copy(
        update={
            "reward": config.reward.model_validate(
                {"remote": [{"urls": ["http://me:hunter2@host:1/r"]}]}
            )
        }  # type: ignore[attr-defined]
    )
    (place / "run").mkdir()
    [opened] = open_sinks(
        secret.monitor, settings(secret), RunDir(place / "run"), place, None, print
    )
    opened.close(failed=False)
    text = (place / "run" / "fake.jsonl").read_text()
    assert "host:1" in text and "hunter2" not in text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "dpo", "distill", "rft"])
def test_every_command_that_trains_fills_its_sinks(place: Path, model: Path, command: str) -> None:
    from tests.support.tiny_preferences import preference_settings

    named = {"monitor__sinks": ["mine.py:Fake"]}
    if command == "sft":
        run = assembly.run_sft(None, sft_settings(place, model, train__steps=2, **named)).run_dir
    elif command == "dpo":
        run = assembly.run_dpo(
            None, preference_settings("dpo", place, model, train__steps=2, **named)
        ).run_dir
    elif command == "distill":
        more = {
            "teacher__path": str(model),
            "reward__functions": None,
            "train__steps": 2,
            "lora__rank": 4,
        }
        run = assembly.run_distill(None, rl_settings(place, model, **more, **named)).run_dir
    else:
        write_lines(place / "train.jsonl", sums(12))
        (place / "rewards.py").write_text(REWARDS)
        said = [
            f"run_dir={place / 'run'}",
            f"model.path={model}",
            "model.dtype=float32",
            "data.chat=false",
            f"data.train={place / 'train.jsonl'}",
            'reward.functions=["rewards.py:share"]',
            "rft.threshold=0.0",
            "sampling.n=2",
            "sampling.max_new_tokens=4",
            f"sampling.stop_token_ids={list(range(20, 200))}",
            "train.epochs=1",
            "train.lr=1e-3",
            "train.batch_size=12",
            "system.threads=1",
            "data.prompt=prompt",
            'monitor.sinks=["mine.py:Fake"]',
            "monitor.every=1",
        ]
        run = run_rft("run", None, said).run_dir / "round-1" / "sft"
        assert records(run / "fake.jsonl")[0]["name"] == "run-round-1"
    got = records(run / "fake.jsonl")
    assert [r["step"] for r in got if r["kind"] == "write" and "loss" in r["metrics"]] == [1, 2]
    assert bool([r for r in got if r["kind"] == "show"]) == (command == "distill")


def test_the_environment_is_left_alone() -> None:
    """Checking and opening sinks sets no variable that a later run would read."""
    before = dict(os.environ)
    check_sinks(["tensorboard"], Path.cwd())
    assert dict(os.environ) == before
