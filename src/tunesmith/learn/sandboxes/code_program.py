"""Runs one program inside a sandbox, and returns what it printed: a function for workers of
``usercode.killable``, and a script that reads a job from standard input and prints the result.

Imports only the standard library: it runs in the interpreter of a container.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
import types
from importlib import import_module
from typing import IO, TypedDict

EARLY = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re")
"""Modules that programs like to import; loaded before a job comes."""
for _name in EARLY:
    import_module(_name)


class GivenJob(TypedDict):
    """A job, as it comes from outside."""

    code: str
    command: list[str]
    stdin: str
    files: dict[str, str]
    output: int


def run(job: GivenJob) -> dict[str, object]:
    """Run a job's ``code`` (Python) or ``command`` with its ``files`` and ``stdin``.

    Returns:
        ``code``, the exit code or less than 0 for a signal; ``stdout`` and ``stderr``, of which
        ``output`` bytes are kept; and whether it printed ``more``.
    """
    for name, text in job["files"].items():
        with open(os.path.basename(name), "w", encoding="utf-8") as file:
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
    return {"code": code, "stdout": printed, "stderr": complained, "more": more or much}


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
        if job["command"]:
            os.execvp(job["command"][0], job["command"])
        out_stream = sys.stdout  # the program may replace it
        code = _execute(job["code"])
        out_stream.flush()
        sys.stdout.flush()
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


def main(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    job = json.loads(sys.stdin.buffer.read())
    signal.alarm(job["seconds"])
    sys.stdout.write(json.dumps(run(job)))
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
