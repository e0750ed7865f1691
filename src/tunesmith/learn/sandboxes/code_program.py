"""Runs programs inside a sandbox, and returns what they printed: a function for workers of
``usercode.killable``, and a script that reads jobs from standard input, one a line, and prints the
results.

Imports only the standard library: it runs in the interpreter of a container.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import tarfile
import tempfile
import traceback
import types
from importlib import import_module
from typing import IO, TypedDict

EARLY = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re")
"""Modules that programs like to import; loaded before a job comes."""
for _name in EARLY:
    import_module(_name)


MOST_FILES = 4096
"""Files that are read after a program."""
ALARMED = 142
"""Exit code after too many seconds."""
_NOT_FOUND = 127
_DUMPABLE = 4


class GivenJob(TypedDict):
    """A job, as it comes from outside. Paths are relative to the sandbox's directory."""

    code: str
    command: list[str]
    stdin: str
    files: dict[str, str]
    archives: dict[str, str]
    """tar files in base64, by the directory into which they are unpacked."""
    folder: str
    """The working directory."""
    environment: dict[str, str]
    """Variables in addition to the sandbox's."""
    places: dict[str, str]
    """Variables that name a path; a directory, which is made, ends with a slash."""
    reads: list[str]
    """Files and directories that are read after the program."""
    output: int


def run(job: GivenJob) -> dict[str, object]:
    """Run a job's ``code`` (Python) or ``command`` with its ``files`` and ``stdin``.

    Returns:
        ``code``, the exit code or less than 0 for a signal; ``stdout`` and ``stderr``, of which
        ``output`` bytes are kept; whether it printed ``more``; and the ``files`` that were read, in
        base64.
    """
    # What a program could open of this process, such as its pipes, it could also write to.
    ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)
    for folder in (job["folder"], *map(os.path.dirname, job["places"].values())):
        os.makedirs(folder or ".", exist_ok=True)
    for folder, packed in job["archives"].items():
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
            archive.extractall(folder)
    for name, text in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(job["stdin"].encode(errors="replace"))
        given.seek(0)
        child = os.fork()
        if child == 0:
            _be(job, given.fileno(), out.fileno(), errors.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _end_others()
        most = job["output"]
        printed, more = _read(out, most)
        complained, much = _read(errors, most)
    return {
        "code": code,
        "stdout": printed,
        "stderr": complained,
        "more": more or much,
        "files": _files(job["reads"]),
    }


def _be(job: GivenJob, given: int, out: int, errors: int) -> None:
    """Become the program: only its own files stay open."""
    try:
        os.setsid()
        for number, kept in enumerate((given, out, errors)):
            os.dup2(kept, number)
        os.closerange(3, 4096)
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace")
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", buffering=1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.environ.update({name: os.path.abspath(path) for name, path in job["places"].items()})
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        if job["command"]:
            os.execvp(job["command"][0], job["command"])
        out_stream = sys.stdout  # the program may replace it
        code = _execute(job["code"])
        out_stream.flush()
        sys.stdout.flush()
    except FileNotFoundError as error:
        print(f"{error.strerror}: {(job['command'] or [error.filename])[0]}", file=sys.stderr)
        code = _NOT_FOUND
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _execute(source: str) -> int:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    try:
        exec(compile(source, "main.py", "exec"), main.__dict__)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _read(file: IO[bytes], most: int) -> tuple[str, bool]:
    file.seek(0)
    data = file.read(most + 1)
    return data[:most].decode(errors="replace"), len(data) > most


def _files(paths: list[str]) -> dict[str, str]:
    """The regular files at ``paths`` and below, in base64, by path."""
    found: dict[str, str] = {}
    for path in paths:
        below = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]
        for name in sorted(below or [path])[: MOST_FILES - len(found)]:
            if os.path.lexists(name) and stat.S_ISREG(os.lstat(name).st_mode):
                with open(name, "rb") as file:
                    found[name] = base64.b64encode(file.read()).decode()
    return found


def _end_others() -> None:
    """End what the program left running, where this process is the first of its own namespace."""
    if os.getpid() != 1:
        return
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _hand_out_listener(address: str) -> None:
    """Listen on a port of the loopback interface, and hand the socket to who listens at
    ``address``, outside of the sandbox."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as outlet,
    ):
        outlet.connect(address)
        socket.send_fds(outlet, [b"."], [listener.fileno()])


def _alarmed(*_: object) -> None:
    os._exit(ALARMED)


def _end_with_asker() -> None:
    """End, with all programs, where who asks for them has ended: containers outlive it."""
    asked = select.poll()
    asked.register(0, select.POLLIN)

    def look(*_: object) -> None:
        if any(event == select.POLLHUP for _, event in asked.poll(0)):
            os._exit(1)

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def main(limits: dict[str, int], outlet: str = "") -> None:
    for name, most in limits.items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGALRM, _alarmed)
    _end_with_asker()
    if outlet:
        _hand_out_listener(outlet)
    for line in sys.stdin.buffer:
        job = json.loads(line)
        signal.alarm(job["seconds"])
        sys.stdout.write(json.dumps(run(job)) + "\n")
        sys.stdout.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
