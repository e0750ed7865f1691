"""The fork server behind ``killable.py``: ``python killable_child.py PIPE PARENT NAME``.

It loads a program once and then only forks, so that a worker starts in milliseconds and shares the memory of imported
modules. Each worker answers through its own connection, as ``distributed/host.py`` describes: plain functions one
after the other on the main thread, coroutines concurrently on an event loop. Imports only the standard library.

Requests are pickled, because the calling process is trusted; answers are JSON, which cannot run code there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent.parent


def main(pipe: int, parent: int) -> None:
    """Load the program that the first message names, then fork a worker for every further message."""
    asking = Connection(pipe)
    setup = pickle.loads(asking.recv_bytes())
    sys.path[:] = setup["path"]
    end_with_parent = _load(_PACKAGE / "monitor" / "children.py", "end_with_parent")
    end_with_parent(parent)
    serve = _load(_PACKAGE / "distributed" / "host.py", "serve")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    # Checking for a GPU would otherwise initialize CUDA here and keep every fork from using it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    call = _load(setup["file"], setup["function"])
    before = _threads()
    if setup["arguments"] is not None:
        call = call(*setup["arguments"])
    sys.stdout.flush()
    # A fork would lack the program's threads, and could not use a GPU that the program holds.
    pool, torch = _threads() > before, sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    forks = threading.active_count() == 1 and not has_gpu and not (pool and setup["alone"])
    _send(asking, {"value": getattr(call, "description", None), "forks": forks})
    ended, child = os.pipe()
    os.set_blocking(child, False)
    signal.set_wakeup_fd(child)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # noqa: ARG005 (the wake-up pipe has it already)
    here = os.getpid()
    while True:
        ready = wait([asking, ended])
        if ended in ready:
            os.read(ended, 1024)
            _reap(asking)
        if asking in ready:
            try:
                order = pickle.loads(asking.recv_bytes())
                handle = recv_handle(asking)
            except (EOFError, OSError):
                os._exit(0)
            number = os.fork() if order["fork"] else 0
            if number == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if order["fork"]:
                    end_with_parent(here)
                    asking.close()
                _settle(one_thread=order["fork"] and pool)
                _limit(order["memory"])
                serve(Connection(handle), call, _encode)
            os.close(handle)
            _send(asking, {"forked": number})


def _reap(asking: Connection) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _send(asking, {"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})


def _encode(answer: tuple[int, bool, Any]) -> bytes:
    number, succeeded, value = answer
    if not succeeded:
        value = "".join(traceback.format_exception(value, limit=-5))[-4000:]
    return json.dumps((number, succeeded, value)).encode()


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def _load(file: str | Path, function: str) -> Any:
    name = f"program_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def _threads() -> int:
    """Number of threads of this process, including native libraries' threads; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 0


def _settle(*, one_thread: bool) -> None:
    """Seed NumPy and PyTorch: Python reseeds only ``random`` in a fork, and workers would draw the same numbers.

    ``one_thread``: a fork lacks PyTorch's OpenMP threads and would wait for them forever.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        if one_thread:
            torch.set_num_threads(1)


def _limit(memory: int) -> None:
    """Limit the worker to ``memory`` bytes beyond the loaded program, and make it the OOM killer's first choice."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(ValueError, OSError):
        before = 0
        with contextlib.suppress(OSError):
            pages = Path("/proc/self/statm").read_text().split()[5]
            before = int(pages) * resource.getpagesize()
        # Limits data, not address space: GPU libraries reserve many times more addresses than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (before + memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
