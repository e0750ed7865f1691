"""The fork server behind ``killable.py``: ``python killable_child.py PIPE PARENT NAME``.

It loads a program once and then only forks, so that a worker starts in milliseconds and shares the
memory of imported modules. Each worker answers through its own connection, as
``distributed/host.py`` describes: plain functions one after the other on the main thread,
coroutines concurrently on an event loop. Imports only the standard library.

Requests are pickled, because the calling process is trusted; answers are JSON, which cannot run
code there.
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[2]


def main(pipe: int, parent: int) -> None:
    """Load the program that the first message names, then fork a worker for every connection that
    arrives."""
    asking = Connection(pipe)
    setup = pickle.loads(asking.recv_bytes())
    sys.path[:] = setup["path"]
    end_with_parent = _load(_PACKAGE / "records" / "children.py", "end_with_parent")
    end_with_parent(parent)
    serve = _load(_PACKAGE / "learn" / "usercode" / "host.py", "serve")
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
    pool = _threads() > before
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    jail = setup["jail"]
    confine = _confining(jail) if jail else None
    forks = threading.active_count() == 1 and not has_gpu and not (pool and setup["alone"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # with another handler, exit codes might be lost
    _send(asking, {"value": getattr(call, "description", None), "forks": forks})
    here = os.getpid()
    while True:
        try:
            request = pickle.loads(asking.recv_bytes())
            if isinstance(request, int):
                _send(asking, _end(request))
                continue
            handle = recv_handle(asking)
        except (EOFError, OSError):
            os._exit(0)
        number = os.fork() if forks else here
        if number:
            _send(asking, number)
        if number in (0, here):
            if forks:
                end_with_parent(here)
                asking.close()
            _settle(one_thread=forks and pool)
            _limit(setup["memory"], for_good=jail is not None)
            answers = Connection(handle)
            listener = confine(jail) if confine else None
            if listener is not None:
                send_handle(answers, listener, 0)
                os.close(listener)
            serve(answers, call, _encode)
        os.close(handle)


def _confining(jail: dict[str, Any]) -> Callable[..., int | None]:
    """``jail.enter``, for a jail that gets the paths that the loaded program imports from."""
    file = _PACKAGE / "learn" / "usercode" / "jail.py"
    paths = [*sys.path, sys.prefix, sys.base_prefix, str(_PACKAGE)]
    paths += _load(file, "interpreter_paths")()
    read, jail["names"] = _load(file, "paths_for")(paths, jail["hidden"])
    jail["read"] = [*jail["read"], *read]
    return _load(file, "enter")


def _end(worker: int) -> int:
    """Kill a worker, if it has not ended. Returns its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _encode(number: int, value: object, error: BaseException | None) -> bytes:
    trace = None if error is None else "".join(traceback.format_exception(error, limit=-5))[-4000:]
    return json.dumps((number, value, trace)).encode()


def _send(pipe: Connection, message: object) -> None:
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
    """Number of threads of this process, including native libraries' threads; 0 if the system does
    not report it."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 0


def _settle(*, one_thread: bool) -> None:
    """Seed NumPy and PyTorch: Python reseeds only ``random`` in a fork, and workers would draw the
    same numbers.

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


def _limit(memory: int, *, for_good: bool) -> None:
    """Limit the worker to ``memory`` bytes beyond the loaded program, and make it the OOM killer's
    first choice. A worker that is to be confined cannot raise the limit again (``for_good``)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    with contextlib.suppress(ValueError, OSError):
        before = 0
        with contextlib.suppress(OSError):
            pages = Path("/proc/self/statm").read_text("utf-8").split()[5]
            before = int(pages) * resource.getpagesize()
        # Limits data, not address space: GPU libraries reserve many times more addresses than they
        # use.
        limit = before + memory
        most = limit if for_good else resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
