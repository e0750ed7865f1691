"""The program of a worker process: ``python killable_child.py FILE FUNCTION DEADLINE``.

Reads one JSON list of arguments a line from standard input and answers one JSON object a line:
``{"value": ...}`` or ``{"raised": traceback}``; first of all ``{"ready": true}``. Imports nothing of
Tunesmith, so that it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from typing import Any

MEMORY_BYTES = 4 << 30


def main(file: str, function: str, deadline: float) -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    call = _load(file, function)

    def answer(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply) + "\n")

    answer({"ready": True})
    for line in sys.stdin:
        # The parent kills at the deadline; this ends the process should the parent be gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline + 5)
        try:
            answer({"value": call(*json.loads(line))})
        except Exception:
            answer({"raised": traceback.format_exc(limit=-5)[-4000:]})
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
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
