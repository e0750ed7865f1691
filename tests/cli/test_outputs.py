"""What stands at a path that a command writes to is written through, replaced whole, or refused and
left alone."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support import commands
from tests.support.hand_made_runs import make_run
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sums, write_lines
from tunesmith.errors import ConfigError
from tunesmith.records.storage import replacing, write_json
from tunesmith.run.assembly import run_rl

SCRIPT = (
    "python -m openrlhf.cli.train_sft --pretrain org/model --dataset train.jsonl --max_len 64\n"
)
RUN = (
    '[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\nchat = false\n[reward]\n'
    'functions = ["math"]\n'
)

WRITERS: dict[str, Callable[[str], list[str]]] = {
    "report": lambda to: ["report", "done", "--out", to],
    "launch": lambda to: ["launch", "slurm", "run.toml", "-o", to],
    "migrate": lambda to: ["migrate", "train.sh", "-o", to],
    "tune": lambda to: ["tune", "run.toml", "-o", to],
    "init": lambda to: ["init", "sft", to],
    "example": lambda to: ["init", "arithmetic", to],
    "demo": lambda to: ["demo", "--dir", to],
    "merge": lambda to: ["merge", "adapter", to],
    "shared": lambda to: ["check", "cluster", "--shared", to],
    "config": lambda to: ["config", "run.toml", "rollout.max_new_tokens=8", f"run_dir={to}"],
    "rl": lambda to: ["rl", "run.toml", "rollout.max_new_tokens=8", f"run_dir={to}"],
    "generate": lambda to: ["generate", "run.toml", "sampling.max_new_tokens=8", f"run_dir={to}"],
}


def _device(path: Path, minor: int) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make devices, and the machine's own are not tried")
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    try:
        path.open("wb").close()
    except PermissionError:
        pytest.skip("devices do not work in this directory")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        above = os.getcwd()
        os.chdir(path.parent)  # the whole path may be too long for an address
        try:
            listening.bind(path.name)
        finally:
            os.chdir(above)


def _file(path: Path) -> None:
    path.write_text("mine")
    path.chmod(0o640)


def _directory(path: Path) -> None:
    path.mkdir()
    _file(path / "mine")


def _linked(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        make(path.with_name("target"))
        path.symlink_to("target")

    return link


PLACES: dict[str, Callable[[Path], None]] = {
    "null": lambda path: _device(path, 3),
    "full": lambda path: _device(path, 7),
    "pipe": os.mkfifo,
    "socket": _socket,
    "file": _file,
    "link to file": _linked(_file),
    "link to null": _linked(lambda path: _device(path, 3)),
    "link to directory": _linked(_directory),
    "loop": lambda path: path.symlink_to(path.name),
    "directory": _directory,
    "long": lambda _: None,
    "under a file": lambda path: _file(path.parent),
}
STREAMS = {"null", "pipe", "link to null"}
DIRECTORIES = {"directory", "link to directory"}
TAKEN = {
    "report": STREAMS,
    "launch": STREAMS,
    "migrate": STREAMS,
    **dict.fromkeys(("init", "shared", "config"), DIRECTORIES),
}
"""The places that a command accepts; all others it refuses."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_run(folder / "done")
    (folder / "train.sh").write_text(SCRIPT)
    (folder / "run.toml").write_text(RUN)
    write_lines(folder / "train.jsonl", sums(4))
    model = AutoModelForCausalLM.from_pretrained(save_model(folder / "model"))
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    return folder


def seen(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything in a directory: kind and mode, device number, owner, and content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        info = path.lstat()
        content = (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if stat.S_ISREG(info.st_mode)
            else None
        )
        found[str(path.relative_to(folder))] = (info.st_mode, info.st_rdev, info.st_uid, content)
    return found


@pytest.mark.slow
def test_no_output_replaces_what_is_not_ours(made: Path, tmp_path: Path) -> None:
    """Every command that writes, at every kind of place."""
    tried: list[tuple[str, str, Path]] = []
    for place, make in PLACES.items():
        for writer in WRITERS:
            if writer in ("rl", "generate") and place in DIRECTORIES:  # they would run there
                continue
            folder = tmp_path / place / writer / "in"
            folder.parent.mkdir(parents=True)
            if place != "under a file":
                folder.mkdir()
            path = folder / ("x" * 300 if place == "long" else "out")
            make(path)
            tried.append((writer, place, path))
    before = seen(tmp_path)
    received: dict[Path, bytes] = {}

    def receive(pipe: Path) -> None:
        received[pipe] = pipe.read_bytes()

    pipes = [
        path
        for writer, place, path in tried
        if place == "pipe" and writer in ("report", "launch", "migrate")
    ]
    readers = [threading.Thread(target=receive, args=(path,), daemon=True) for path in pipes]
    for reader in readers:
        reader.start()
    results = commands.tunesmith(made, [WRITERS[writer](str(path)) for writer, _, path in tried])
    for reader in readers:
        reader.join(60)
    wrong = [
        (writer, place, ended.code, ended.told[-300:])
        for (writer, place, path), ended in zip(tried, results, strict=True)
        if ended.code != (0 if place in TAKEN.get(writer, ()) else 2)
        or (ended.code and not (path.name in ended.told and "Traceback" not in ended.told))
    ]
    assert not wrong, "\n".join(map(str, wrong))
    after = seen(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert (
        len(received) == 3
        and b"<title>Tunesmith" in received[pipes[0]]
        and b"#SBATCH" in received[pipes[1]]
    )


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["report", "launch", "migrate"])
def test_links_stay_and_files_keep_mode_and_owner(made: Path, tmp_path: Path, writer: str) -> None:
    command = WRITERS[writer]
    again = writer != "migrate"  # a migrated run file is not written over
    (tmp_path / "dangling").symlink_to("made")
    (tmp_path / ".empty.unfinished").write_text("mine, not a leftover")
    (tmp_path / "empty").touch()
    (tmp_path / "empty").chmod(0o604)
    first = commands.tunesmith(
        made, [command(str(tmp_path / "dangling")), command(str(tmp_path / "empty"))]
    )
    assert [ended.code for ended in first] == [0, 0], first
    assert os.readlink(tmp_path / "dangling") == "made" and (tmp_path / "made").stat().st_size > 100
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o604
    assert (tmp_path / ".empty.unfinished").read_text() == "mine, not a leftover"
    (tmp_path / "made").write_bytes((tmp_path / "made").read_bytes() + b"\n# older\n")
    (tmp_path / "made").chmod(0o660)
    owner = (1234, 1234) if os.getuid() == 0 else (os.getuid(), os.getgid())
    os.chown(tmp_path / "made", *owner)
    [second] = commands.tunesmith(made, [command(str(tmp_path / "dangling"))])
    now = (tmp_path / "made").stat()
    assert second.code == (0 if again else 2)
    assert (b"# older" in (tmp_path / "made").read_bytes()) == (not again)
    assert (stat.S_IMODE(now.st_mode), now.st_uid, now.st_gid) == (0o660, *owner)


@pytest.mark.slow
def test_standard_output_by_its_name_is_written_through(made: Path, tmp_path: Path) -> None:
    """Where the shell has redirected it to a file, that file keeps what others write to it."""
    program = "from tunesmith.cli.main import main; main()"
    python = commands.sys.executable
    report = f"{python} -c '{program}' report done --out /proc/self/fd/1"
    code = f"cd {made}; echo first; {report}; echo last"
    assert os.system(f"({code}) > {tmp_path}/log 2>&1") == 0
    log = (tmp_path / "log").read_text()
    assert log.startswith("first") and log.endswith("last\n") and "<title>Tunesmith" in log


NOT_OURS = [
    "config.toml",
    "resolved.json",
    "plan.json",
    "metrics.jsonl",
    "rollouts.jsonl",
    "completions.jsonl",
]


@pytest.mark.parametrize("name", NOT_OURS)
@pytest.mark.parametrize("place", ["file", "pipe", "link to file", "directory"])
def test_a_run_directory_with_another_s_files_is_refused(
    made: Path, tmp_path: Path, name: str, place: str
) -> None:
    (tmp_path / "run").mkdir()
    PLACES[place](tmp_path / "run" / name)
    before = seen(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"{name}|already holds a run"):
        run_rl(None, rl_settings(tmp_path, made / "model"))
    assert {n: s for n, s in seen(tmp_path / "run").items() if n != "run.lock"} == before


@pytest.mark.parametrize(
    "place", ["file", "pipe", "link to file", "directory", "socket", "null", "loop"]
)
def test_what_is_not_a_lock_is_not_emptied(made: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "run").mkdir()
    PLACES[place](tmp_path / "run" / "run.lock")
    before = seen(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run\.lock"):
        run_rl(None, rl_settings(tmp_path, made / "model"))
    assert seen(tmp_path / "run") == before


@pytest.mark.parametrize(
    "place", [p for p in PLACES if p not in ("file", "link to file", "long", "under a file")]
)
def test_records_that_must_be_whole_refuse_anything_but_files(tmp_path: Path, place: str) -> None:
    PLACES[place](tmp_path / "x.json")
    before = seen(tmp_path)
    with pytest.raises(OSError):
        write_json(tmp_path / "x.json", {})
    with pytest.raises(OSError), replacing(tmp_path / "x.json") as unfinished:
        unfinished.mkdir()
        (unfinished / "a").touch()
    assert seen(tmp_path) == before


def test_rows_do_not_replace_the_user_s_data(made: Path, tmp_path: Path) -> None:
    from tunesmith import sft

    (tmp_path / "data").mkdir()
    _file(tmp_path / "data" / "train.jsonl")
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        sft(str(made / "model"), [{"prompt": "a", "completion": "b"}], run_dir=tmp_path)
    assert (tmp_path / "data" / "train.jsonl").read_text() == "mine"
