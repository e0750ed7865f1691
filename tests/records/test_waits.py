"""What takes long says so, in one line now and then."""

from __future__ import annotations

import asyncio
import io
import re
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import tunesmith
from tests.support import tiny
from tests.support.tiny_runs import sums, write_lines
from tunesmith.config.objects import load_function
from tunesmith.errors import EngineLostError
from tunesmith.records import waits
from tunesmith.records.waits import long_wait
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.placement.elsewhere import Elsewhere
from tunesmith.run.specs.base import WeightSource
from tunesmith.run.specs.engines import LocalSpec
from tunesmith.run.specs.models import ModelSpec


def test_lines_come_while_it_takes_long_and_none_afterwards() -> None:
    told: list[str] = []
    third = threading.Event()

    def report(line: str) -> None:
        told.append(line)
        if len(told) == 3:
            third.set()

    with long_wait("counting", report, (0.001, 0.002)):
        assert third.wait(60)
    count = len(told)
    assert told[:3] == [
        "still counting: 0.001 s",
        "still counting: 0.002 s",
        "still counting: 0.004 s",
    ]
    assert not [t for t in threading.enumerate() if t.name == "long wait"]
    with pytest.raises(KeyError), long_wait("failing", report):
        raise KeyError
    assert len(told) == count, "what ends in time says nothing"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was waited for, wherever it is."""
    found: list[str] = []

    def noted(doing: str, *more: Any) -> Any:
        found.append(doing)
        return long_wait(doing, *more)

    for name, module in list(sys.modules.items()):
        if name.startswith("tunesmith.") and getattr(module, "long_wait", None) is long_wait:
            monkeypatch.setattr(module, "long_wait", noted)
    return found


class Nowhere:
    def spawn(self, *given: Any) -> Any:
        raise EngineLostError(f"{given} cannot start")


def test_models_data_and_engines_are_waited_for_aloud(tmp_path: Path, seen: list[str]) -> None:
    model = tiny.save_model(tmp_path / "model")
    write_lines(tmp_path / "in.jsonl", sums(2))
    settings = [
        f"run_dir={tmp_path / 'out'}",
        f"model.path={model}",
        f"data.train={tmp_path / 'in.jsonl'}",
        "data.chat=false",
        "sampling.max_new_tokens=2",
        "system.threads=1",
    ]
    run_generate(None, settings)
    nowhere: Any = Nowhere()
    spec = LocalSpec(ModelSpec(str(model), "float32", "cpu"), 1 << 20, 1, 1)
    pool: Any = Elsewhere(nowhere).engine(spec, WeightSource(), print)
    with pytest.raises(EngineLostError):
        asyncio.run(pool.roster._start(0))
    for doing in (
        f"loading the tokenizer of {model}",
        "reading data.train",
        "starting engine 0",
        f"loading {model}",
    ):
        assert doing in seen


def test_a_slow_import_of_user_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line goes where other notes go, and comes while the module is still running."""
    monkeypatch.setattr(waits, "AFTER", (0.01, 1000.0))
    code = "import sys, time\nend = time.monotonic() + 60\n"
    code += (
        "while 'still' not in sys.stdout.getvalue() and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
    )
    (tmp_path / "slow.py").write_text(code + "def f():\n    return 1\n")
    with redirect_stdout(io.StringIO()) as out:
        assert load_function(f"{tmp_path / 'slow.py'}:f", tmp_path)() == 1
    assert out.getvalue() == f"still importing {tmp_path / 'slow.py'}: 0.01 s\n"


DATES = {
    "records/http_client.py",
    "records/metrics.py",
    "records/sinks/mlflow.py",
    "records/sinks/tensorboard.py",
    "learn/endpoint/turns.py",
    "run/tinker/service.py",
    "run/tinker/store.py",
}
"""Where the time of day is recorded, for people and other programs."""


def test_only_dates_are_read_from_the_clock_that_may_be_set() -> None:
    """Durations, deadlines and orders come from ``time.monotonic`` or ``time.perf_counter``."""
    package = Path(tunesmith.__file__).parent
    wall = re.compile(
        r"\btime\.time(_ns)?\b|\bfrom time import .*\btime\b|\bdatetime\.(now|utcnow)\("
    )
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if wall.search(file.read_text("utf-8"))
    }
    assert found == DATES
