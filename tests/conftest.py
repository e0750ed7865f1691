"""Fixtures of several modules."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from tests.support import forks, late_compiling

SLOW = Path(__file__).parent / "slow"
SAMPLED = tuple(f"tests/{room}/" for room in ("learn", "models", "plan", "run"))
FAST_CASES = 2
"""Of fast tests that compute, further cases are ``more``, which run with the slow ones."""
gc.disable()  # until all is imported: what modules make is not garbage
late_compiling.install()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports the hub's client
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a background job ignores Ctrl-C, and so would the tested runs
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples everywhere, however slow the machine is.
settings.register_profile(
    "steady",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="the most cases of each slow test")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """What is in ``tests/slow`` is slow, and comes first: short tests at the end keep every worker
    busy."""
    items.sort(key=lambda item: SLOW not in item.path.parents)
    for item in items:
        if SLOW in item.path.parents:
            item.add_marker(pytest.mark.slow)
    fast = [item for item in items if item.get_closest_marker("slow") is None]
    for cases in cases_by_test([item for item in fast if item.nodeid.startswith(SAMPLED)]):
        for item in cases[FAST_CASES:]:
            item.add_marker(pytest.mark.more)
    yield  # those of other marks are left out
    most = config.getoption("cases")
    if most is not None:
        kept = {item for cases in cases_by_test(items) for item in cases[:most]}
        kept |= {item for item in items if item.get_closest_marker("more")}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def cases_by_test(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each test, in an order that has nothing to do with their parameters, which is
    the same everywhere."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [*tests.values()]


def pytest_collection_finish(session: pytest.Session) -> None:
    """The collector need not look through the modules' millions of objects, not even once."""
    gc.freeze()
    gc.enable()
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and grouped:
        assert "@" in grouped[0].nodeid, "this pytest-xdist does not group tests with this pytest"


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws, and its threads, do not depend on which tests ran before it in the same
    process.

    Tiny models gain nothing from more than one thread, and lose much where cores are busy.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # ``torch.manual_seed`` formats the stack for each kind of device that is not in use yet.
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(
            0
        )
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_children() -> Iterator[None]:
    """Children are forks; ``new_children`` are started as always."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tunesmith.learn.usercode.child.start_process", forks.popen)
        yield


@pytest.fixture(scope="module")
def new_children() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tunesmith.learn.usercode.child.start_process", subprocess.Popen)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's directory; modules that need another model have a fixture of their own."""
    from tests.support.tiny import save_model  # imports what many tests do without

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sums_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: compiled functions add gradients without rounding them first."""
    monkeypatch.setattr("tunesmith.models.cpu.functions._allowed", False)


@pytest.fixture(autouse=True)
def not_the_command_s_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that calls the script's entry point does not let a later test's signal end this
    process."""
    monkeypatch.setattr("tunesmith.records.interrupts._own", False)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_disks() -> Iterator[None]:
    """What a test has written need not survive a power cut."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def configs_are_not_written_out() -> Iterator[None]:
    """Transformers composes a line of its log with all of a configuration for each that it loads,
    though nobody reads it: a tenth of the time of tests of models."""
    with pytest.MonkeyPatch.context() as patched:
        if "transformers" in sys.modules:
            config = sys.modules["transformers"].PreTrainedConfig
            patched.setattr(config, "__repr__", object.__repr__)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """A process that runs one command builds all of them once, and so do tests that run many."""
    from typer import main, testing

    with pytest.MonkeyPatch.context() as patched:
        built = cache(main.get_command)
        patched.setattr(main, "get_command", built)
        patched.setattr(testing, "_get_command", built)
        yield


@cache
def in_catalogue(name: str) -> bool:
    from tunesmith.records.catalogue import find

    return find(name) is not None and find(name.removeprefix("critic/")) is not None


@pytest.fixture(scope="session", autouse=True)
def only_known_metrics() -> Iterator[None]:
    """A run that writes a metric which is not in the catalogue fails its test."""
    from tunesmith.records.metrics import MetricsLog

    write = MetricsLog.write

    def checked(
        self: MetricsLog, step: int, metrics: Mapping[str, float], *, always: bool = False
    ) -> None:
        unknown = [name for name in metrics if not in_catalogue(name)]
        assert not unknown, f"records/catalogue.py lacks {unknown}"
        write(self, step, metrics, always=always)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MetricsLog, "write", checked)
        yield


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``LigerInTorch`` in place of Liger's kernels, which need a GPU."""
    from tests.support.liger_in_torch import LigerInTorch
    from tunesmith.models.kernels import liger

    found = LigerInTorch()
    monkeypatch.setattr(liger, "kernels", found)
    return found
