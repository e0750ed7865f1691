"""The program of a worker process: ``python killable_child.py FILE FUNCTION DEADLINE PIPE PARENT``.

Reads JSON lists of arguments from the pipe and answers each with a JSON object: ``{"value": ...}`` or
``{"raised": traceback}``; one comes first of all, when it is ready. Imports nothing of Tunesmith, so that it
starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30
CHILDREN = Path(__file__).parent.parent / "monitor" / "children.py"


def main(file: str, function: str, deadline: float, pipe: int, parent: int) -> None:
    _load(str(CHILDREN), "end_with_parent")(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the asking process gets them too
        signal.signal(number, signal.SIG_IGN)
    _limit_memory()
    call = _load(file, function)
    asking = Connection(pipe)
    answer = json.dumps({"value": None})
    while True:
        asking.send_bytes(answer.encode())
        try:
            arguments: list[Any] = json.loads(asking.recv_bytes())
        except EOFError:
            return
        # The asking process kills at the deadline; this ends the process should that one be gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline + 5)
        try:
            answer = json.dumps({"value": call(*arguments)})
        except Exception:
            answer = json.dumps({"raised": traceback.format_exc(limit=-5)[-4000:]})
        signal.setitimer(signal.ITIMER_REAL, 0)


def _load(file: str, function: str) -> Any:
    spec = importlib.util.spec_from_file_location("worker_program", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_program"] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
