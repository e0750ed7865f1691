"""Sandboxes: programs run with their input, files and limits, and what tries to get out stays in.

The attempts are the same for each kind; kinds whose tools are not installed are skipped with the
reason. Their command lines are checked anyway.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.http_servers import running, unused_url
from tests.support.sandboxes import unavailable
from tunesmith.config.sandboxes import (
    Bubblewrap,
    DockerSandbox,
    HttpSandbox,
    ProcessSandbox,
    Sandbox,
)
from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import ConfigError
from tunesmith.learn.sandboxes import code_program
from tunesmith.learn.sandboxes.base import (
    SandboxError,
    SandboxJob,
    SandboxOutcome,
    SandboxRunner,
    message_of,
)
from tunesmith.learn.sandboxes.making import make_runner
from tunesmith.learn.sandboxes.started import bubblewrap, docker
from tunesmith.learn.usercode.jail import paths_for
from tunesmith.records import http_client

LIMITS: dict[str, Any] = {
    "seconds": 5.0, "memory": "128MB", "processes": 8, "files": "1MB", "output": "10KB",
    "concurrency": 4,
}  # fmt: skip
_RUNNERS: dict[str, SandboxRunner] = {}


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, SandboxRunner]]:
    yield _RUNNERS
    while _RUNNERS:
        _RUNNERS.popitem()[1].close()


@pytest.fixture(params=["process", "bubblewrap", "docker"])
def runner(request: pytest.FixtureRequest, runners: dict[str, SandboxRunner]) -> SandboxRunner:
    kind: str = request.param
    why = unavailable(kind)
    if why:
        pytest.skip(why)
    if kind not in runners:
        runners[kind] = make_runner(Sandbox.chosen({"type": kind, **LIMITS}))
    return runners[kind]


def outcomes(runner: SandboxRunner, *jobs: SandboxJob) -> list[SandboxOutcome]:
    async def together() -> list[SandboxOutcome]:
        return list(await asyncio.gather(*map(runner.run, jobs)))

    return asyncio.run(together())


def run(runner: SandboxRunner, code: str, **job: Any) -> SandboxOutcome:
    return outcomes(runner, SandboxJob(code, **job))[0]


def test_programs_have_input_files_arguments_and_an_exit_code(runner: SandboxRunner) -> None:
    code = "import sys\nprint(input()[::-1], open('a.txt').read())\nsys.exit(3)"
    ended = run(runner, code, stdin="äbc\n", files={"a.txt": "ß"})
    assert (ended.ended, ended.code, ended.stdout) == ("ended", 3, "cbä ß\n")
    (ended,) = outcomes(runner, SandboxJob(command=("cat", "b"), files={"b": "here"}))
    assert ended.ok and ended.stdout == "here"
    ended = run(runner, "print(1, flush=True)\n1 / 0")
    assert ended.stdout == "1\n" and "ZeroDivisionError" in ended.stderr and not ended.ok
    ended = run(runner, "import os\nprint(1, flush=True)\nos._exit(0)")
    assert ended.ok and ended.stdout == "1\n"


def test_each_program_has_a_sandbox_of_its_own(runner: SandboxRunner) -> None:
    write = "import os\nprint(os.listdir())\nopen('kept', 'w').write('x')"
    several = outcomes(runner, *[SandboxJob(write)] * 3)
    assert [each.stdout for each in several] == ["[]\n"] * 3


SECRET = "a-secret-of-the-run"

ESCAPES = {
    "variables of the environment": (
        "import os, glob\n"
        "for file in ['/proc/self/environ', *glob.glob('/proc/[0-9]*/environ')]:\n"
        "    try: print(open(file).read())\n"
        "    except OSError: pass\n"
        "print(dict(os.environ))"
    ),
    "the run directory": (
        "import os\n"
        "for path in ({secret!r}, '/proc/1/root' + {secret!r}, '/proc/self/cwd/..' + {secret!r}):\n"
        "    try: print(open(path).read())\n"
        "    except OSError: pass"
    ),
    "a symlink": "import os\nos.symlink({secret!r}, 'link')\nprint(open('link').read())",
    "a hard link": "import os\nos.link({secret!r}, 'link')\nprint(open('link').read())",
    "files outside": (
        "for path in ({secret!r} + '2', '/tmp/x', '/etc/x', '/usr/x', '/dev/shm/x'):\n"
        "    try: open(path, 'w').write('x')\n"
        "    except OSError: pass\n"
        "    else: print({word!r}) if not path.startswith(('/tmp', '/dev')) else None"
    ),
    "a socket": (
        "import socket\none = socket.create_connection(('127.0.0.1', {port}), 1)\nprint({word!r})"
    ),
    "a socket of this machine": (
        "import socket\n"
        "one = socket.socket(socket.AF_UNIX)\n"
        "one.connect({socket!r})\n"
        "print({word!r})"
    ),
    "a message to a socket of this machine": (
        "import socket\n"
        "one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.sendto(b'x', {socket!r} + '.messages')\n"
        "print({word!r})"
    ),
    "what is said of a file": (
        "import os\n"
        "for change in (lambda: os.chmod({secret!r}, 0o777), lambda: os.utime({secret!r}),\n"
        "        lambda: os.setxattr({secret!r}, 'user.x', b'x'),\n"
        "        lambda: os.truncate({secret!r}, 0)):\n"
        "    try: change()\n"
        "    except OSError: pass\n"
        "    else: print({word!r})"
    ),
    "signals": (
        "import os, signal\n"
        "try: os.kill({pid}, 0); print({word!r} if {pid} > 40 else '')\n"
        "except OSError: pass\n"
        "try: os.killpg(0, signal.SIGWINCH)\n"
        "except OSError: pass"
    ),
    "a debugger": (
        "import ctypes\n"
        "print({word!r} if ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0 and {pid} > 40 else '')"
    ),
}


@pytest.mark.parametrize("attempt", ESCAPES)
def test_nothing_gets_out(
    attempt: str, runner: SandboxRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "runs" / "secret.json"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    app = web.Application()
    with running(app) as url, unix_socket(tmp_path / "socket"):
        values = {
            "secret": str(secret),
            "word": SECRET,
            "pid": os.getpid(),
            "port": int(url.rpartition(":")[2]),
            "socket": str(tmp_path / "socket"),
        }
        code = ESCAPES[attempt]
        for name, value in values.items():
            code = code.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", str(value))
        ended = run(runner, code)
    assert SECRET not in ended.stdout and ended.ended == "ended", ended
    assert secret.read_text() == SECRET and not Path(f"{secret}2").exists()


@contextmanager
def unix_socket(path: Path) -> Iterator[None]:
    import socket

    messages = path.with_name(f"{path.name}.messages")
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reading,
    ):
        for one, place in ((listening, path), (reading, messages)):
            one.bind(str(place))
            place.chmod(0o777)
        listening.listen()
        yield


def test_a_fork_bomb_ends_with_its_sandbox(runner: SandboxRunner) -> None:
    code = (
        "import os, time\n"
        "made = 0\n"
        "for _ in range(200):\n"
        "    try: pid = os.fork()\n"
        "    except OSError: break\n"
        "    if pid == 0: time.sleep(600)\n"
        "    made += 1\n"
        "print(made, flush=True)"
    )
    began = time.monotonic()
    ended = run(runner, code)
    assert 0 < int(ended.stdout) < 8
    assert time.monotonic() - began < 60  # its children sleep ten minutes


def test_memory_files_and_output_are_limited(runner: SandboxRunner) -> None:
    memory, files, flood, quiet = outcomes(
        runner,
        SandboxJob("x = 'a' * 10**9\nprint('all of it')"),
        SandboxJob("open('big', 'wb').write(bytes(10**7))\nprint('all of it')"),
        SandboxJob("print('x' * 50_000)"),
        SandboxJob("import sys\nsys.stderr.write('x' * 50_000)"),
    )
    assert not memory.ok and "all of it" not in memory.stdout
    assert not files.ok and "all of it" not in files.stdout
    assert flood.ended == "flooded" and len(flood.stdout) == 10_000 and quiet.ended == "flooded"


def test_programs_wait_in_threads_of_their_own(runner: SandboxRunner) -> None:
    """Those of the event loop are for others: with all of them taken, engines got no weights, and
    programs that asked the policy waited for ever."""

    async def meanwhile() -> int:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        assert (await runner.run(SandboxJob("print(1)"))).ok
        running = asyncio.create_task(runner.run(SandboxJob("import time\ntime.sleep(2)")))
        await asyncio.sleep(0.5)
        answer = await asyncio.wait_for(asyncio.to_thread(lambda: 7), 1.0)
        assert not running.done() and (await running).ok
        return answer

    assert asyncio.run(meanwhile()) == 7


UNCOUNTED = {
    "a raised limit": (
        "import resource\n"
        "try: resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))\n"
        "except (OSError, ValueError): pass\n"
        "x = 'a' * 3 * 10**8"
    ),
    "shared memory": "import mmap\nx = mmap.mmap(-1, 3 * 10**8)\nx.write(b'a' * 10**7)",
    "files in memory": (
        "import os\nfor _ in range(300): os.write(os.memfd_create('x'), b'a' * 10**6)"
    ),
    "segments of System V": (
        "import ctypes\n"
        "if ctypes.CDLL(None).shmget(0, ctypes.c_size_t(3 * 10**8), 0o1600) < 0: raise MemoryError"
    ),
}


@pytest.mark.parametrize("way", UNCOUNTED)
def test_no_memory_is_beside_the_limit(way: str, runners: dict[str, SandboxRunner]) -> None:
    why = unavailable("process")
    if why:
        pytest.skip(why)
    if "process" not in runners:
        runners["process"] = make_runner(ProcessSandbox(**LIMITS))
    ended = run(runners["process"], f"{UNCOUNTED[way]}\nprint('all of it')")
    assert not ended.ok and "all of it" not in ended.stdout


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(600)"])
def test_time_is_limited(code: str) -> None:
    why = unavailable("process")
    if why:
        pytest.skip(why)
    runner = make_runner(ProcessSandbox(seconds=0.2))
    assert run(runner, code).ended == "timed_out"
    assert run(runner, "print(1)").ok
    runner.close()


def test_programs_run_with_the_python_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another virtual environment than the run's, too."""
    why = unavailable("process")
    if why:
        pytest.skip(why)
    venv.create(tmp_path / "own", symlinks=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/own/bin:{os.environ['PATH']}")
    runner = make_runner(ProcessSandbox())
    command = ("python3", "-c", "import sys; print(sys.prefix)")
    (ended,) = outcomes(runner, SandboxJob(command=command))
    runner.close()
    assert ended.stdout == f"{tmp_path}/own\n", ended


def test_a_machine_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.learn.sandboxes.process.missing", lambda: "no Landlock")
    with pytest.raises(ConfigError, match="no Landlock") as refused:
        make_runner(ProcessSandbox())
    assert refused.value.keys == ("environment.sandbox",)
    monkeypatch.setenv("PATH", "/nonexistent")
    for one in (Bubblewrap(), DockerSandbox()):
        with pytest.raises(ConfigError, match="not installed"):
            make_runner(one)
    with pytest.raises(ConfigError, match="NO_TOKEN"):
        make_runner(HttpSandbox(url="http://h/run_code", token_env="NO_TOKEN"))


def words_after(command: Sequence[str], word: str) -> list[str]:
    return [command[n + 1] for n, each in enumerate(command) if each == word]


def test_the_command_of_bubblewrap() -> None:
    start = bubblewrap(Bubblewrap(**LIMITS, read=("/data",)))
    command = start.command
    assert command[0] == "bwrap" and "--unshare-all" in command and "--share-net" not in command
    assert {"--clearenv", "--die-with-parent", "--new-session"} <= {*command}
    assert words_after(command, "--size") == ["1000000"] and "--bind" not in command
    assert "/data" in words_after(command, "--ro-bind-try")
    assert json.loads(command[-2])["RLIMIT_NPROC"] == 8
    assert start.environment is not None and start.environment.keys() == {"PATH"}
    assert (start.user is not None) == (os.geteuid() == 0)
    assert "--share-net" in bubblewrap(Bubblewrap(network=True)).command


def test_the_command_of_docker() -> None:
    start = docker(DockerSandbox(**LIMITS, image="own:1", runtime="runsc"))
    command = start.command
    for word, value in {
        "--network": "none", "--memory": "128000000", "--memory-swap": "128000000",
        "--pids-limit": "8", "--cap-drop": "ALL", "--security-opt": "no-new-privileges",
        "--runtime": "runsc", "--user": "65534:65534",
    }.items():  # fmt: skip
        assert words_after(command, word) == [value]
    assert {"--rm", "--read-only"} <= {*command} and "own:1" in command
    assert "--volume" not in command and "-v" not in command and "--privileged" not in command
    (name,) = words_after(command, "--name")
    assert start.end == ("docker", "kill", name)
    assert name not in docker(DockerSandbox()).command


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for docker that does nothing."""
    tool = tmp_path / "docker"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tool


def test_started_sandboxes_say_why_they_did_not_start(tool: Path) -> None:
    """A stand-in for docker that fails, and one that runs the program as it is."""
    tool.write_text("#!/bin/sh\n[ $1 = version ] || { echo no such image >&2; exit 125; }\n")
    runner = make_runner(DockerSandbox(**LIMITS))
    with pytest.raises(SandboxError, match="125: no such image"):
        run(runner, "print(1)")
    runner.close()
    tool.write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="docker, which says: no daemon"):
        make_runner(DockerSandbox(**LIMITS))
    tool.write_text(
        '#!/bin/sh\n[ $1 = version ] && exit\nwhile [ "$1" != python3 ]; do shift; done\nexec "$@"\n'
    )
    runner = make_runner(DockerSandbox(**LIMITS))
    assert run(runner, "print(input())", stdin="7").stdout == "7\n"
    runner.close()


@pytest.mark.usefixtures("tool")
def test_a_sandbox_that_the_system_does_not_start_is_no_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner(DockerSandbox(**LIMITS))

    def too_many(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("tunesmith.learn.sandboxes.started.Popen", too_many)
    with pytest.raises(SandboxError, match=r"could not be started.*unavailable"):
        run(runner, "print(1)")


def test_a_container_ends_with_who_started_it(tmp_path: Path) -> None:
    """Its program runs on, and nobody waits for it."""
    program = Path(code_program.__file__).read_text()
    job: Any = message_of(
        SandboxJob("open('began', 'w'); import time; time.sleep(8)"), Bubblewrap()
    )
    with subprocess.Popen(
        ["python3", "-I", "-S", "-c", program, "{}"], stdin=subprocess.PIPE, cwd=tmp_path
    ) as started:
        assert started.stdin is not None
        started.stdin.write(json.dumps({**job, "seconds": 60}).encode() + b"\n")
        started.stdin.flush()
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        started.stdin.close()
        assert started.wait(4) == 1


def test_programs_on_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.001)
    monkeypatch.setenv("SANDBOX_TOKEN", "t-1")
    bodies: list[Any] = []

    async def run_code(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer t-1"
        body = await request.json()
        bodies.append(body)
        if len(bodies) == 1:
            return web.Response(status=503)
        if body["code"] == "hang":
            result = {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}
        elif body["code"] == "html":
            return web.Response(text="<html>")
        else:
            files = {k: base64.b64decode(v).decode() for k, v in body["files"].items()}
            out = f"{body['stdin']}{files.get('a', '')}"
            result = {"status": "Finished", "return_code": 0, "stdout": out, "stderr": ""}
        return web.json_response({"status": "Success", "run_result": result})

    app = web.Application()
    app.add_routes([web.post("/run_code", run_code)])
    with running(app) as url:
        runner = make_runner(
            HttpSandbox(url=f"{url}/run_code", token_env="SANDBOX_TOKEN", **LIMITS)
        )
        assert run(runner, "x", stdin="in", files={"a": "ä"}).stdout == "inä"
        assert bodies[0]["language"] == "python" and bodies[0]["run_timeout"] == 5.0
        assert run(runner, "hang").ended == "timed_out"
        with pytest.raises(SandboxError, match="JSON"):
            run(runner, "html")
        outcomes(runner, SandboxJob(command=("echo", "a b")))
        assert bodies[-1]["language"] == "bash" and bodies[-1]["code"] == "echo 'a b'"
    monkeypatch.setattr("tunesmith.learn.sandboxes.http.PATIENCE_SECONDS", 0.01)
    away = make_runner(HttpSandbox(url=unused_url()))
    with pytest.raises(SandboxError, match="no answer"):
        run(away, "x")


def test_only_python_files_are_open_beside_the_run(tmp_path: Path) -> None:
    for name in ("rewards.py", "train.jsonl", "pack/__init__.py", "runs/model/config.json"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    read, listed = paths_for([str(tmp_path), "/usr/lib"], [str(tmp_path)])
    assert {Path(p).name for p in read} == {"rewards.py", "pack", "lib"}
    assert listed == [str(tmp_path)]


def test_sandboxes_are_chosen_by_name_or_table() -> None:
    assert EnvironmentSection(sandbox="process").sandbox == ProcessSandbox()  # type: ignore[arg-type]
    table: Any = {"type": "docker", "image": "own", "processes": 4}
    chosen = EnvironmentSection(sandbox=table).sandbox
    assert isinstance(chosen, DockerSandbox) and chosen.image == "own"
    with suppress(ValueError):
        EnvironmentSection(sandbox="nothing")  # type: ignore[arg-type]
        pytest.fail("it is no sandbox")
