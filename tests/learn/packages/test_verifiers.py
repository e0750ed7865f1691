"""Tasksets of the real package with their harness, and its older environments, by name."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.documents import SUPPORT
from tests.support.episodes import RecordingEngine, check_tokens, made_task, ok, play
from tests.support.packages import need
from tunesmith.config.schema import EnvironmentSection, Source
from tunesmith.errors import ConfigError
from tunesmith.learn.data.sources import SourceRow, read
from tunesmith.learn.environments.loading import EnvironmentSet, load_environments
from tunesmith.types import Rollout, Status, Task

TOKENIZER = byte_level(template("qwen2"))
END = "<|im_end|>"

OLDER = """
def load_environment(count=2):
    import verifiers
    from datasets import Dataset

    def correct(completion, answer, **_):
        return float(answer in completion[-1]["content"])

    def data(start):
        turns = [[{"role": "user", "content": f"{n}+{n}?"}] for n in range(start, start + count)]
        return Dataset.from_list(
            [{"prompt": t, "answer": str(2 * n)} for n, t in enumerate(turns, start)]
        )

    rubric = verifiers.Rubric(funcs=[correct])
    return verifiers.SingleTurnEnv(dataset=data(0), eval_dataset=data(50), rubric=rubric)
"""

GROUPED = """
import verifiers
from datasets import Dataset


def load_environment():
    def longest(completions, **_):
        sizes = [len(each[-1]["content"]) for each in completions]
        return [float(size == max(sizes)) for size in sizes]

    def brief(completion, **_):
        return float(len(completion[-1]["content"]) < 9)

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}], "answer": ""}])
    rubric = verifiers.Rubric(funcs=[longest, brief], weights=[1.0, 0.5])
    return verifiers.SingleTurnEnv(dataset=data, rubric=rubric)
"""

OLD = find_spec("verifiers") is not None and version("verifiers").startswith("0.3.")
needs_tasksets = pytest.mark.skipif(OLD, reason="verifiers 0.3 has older environments only")
needs_uv = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: pip install uv")
"""The package starts its chat program with it."""


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "older_sums.py").write_text(OLDER)
    monkeypatch.syspath_prepend(str(SUPPORT / "tasksets"))
    monkeypatch.syspath_prepend(str(tmp_path))


def tasks(name: str, **options: object) -> list[Task]:
    rows = list(read(Source(path=f"verifiers:{name}", options=options)))
    columns = [row.columns for row in rows if isinstance(row, SourceRow)]
    return [made_task(TOKENIZER, identity=str(n), **row) for n, row in enumerate(columns)]


def environments(name: str, folder: Path) -> EnvironmentSet:
    return load_environments(EnvironmentSection(path=f"verifiers:{name}"), folder)


def played(name: str, folder: Path, given: list[Task]) -> tuple[list[Rollout], RecordingEngine]:
    return play(
        environments(name, folder), TOKENIZER, given, lambda _: f"2{END}", max_tokens=40_000
    )


@need("verifiers")
@needs_tasksets
def test_a_taskset_brings_its_data_and_its_evaluation_set() -> None:
    assert [task.prompt for task in tasks("tiny_sums")] == ["0+0?", "1+1?", "2+2?"]
    assert [task.prompt for task in tasks("tiny_sums[test]", count=1)] == ["100+100?"]


@need("verifiers")
@needs_tasksets
@needs_uv
@pytest.mark.parametrize("turns", [1, 2])
def test_a_taskset_is_played_with_its_harness(turns: int, tmp_path: Path) -> None:
    given = tasks("tiny_sums", turns=turns)[1:2]
    section = environments("tiny_sums", tmp_path)
    (rollout,), engine = play(
        section, TOKENIZER, given, lambda _: f"2{END}", max_tokens=40_000, timeout=300.0
    )
    check_tokens(ok(rollout), engine)
    assert rollout.reward == 2.0, "the reward function's 1, with its weight"
    assert rollout.metrics["right"] == 1.0 and rollout.metrics["size"] == 1.0
    assert [len(record.turns) for record in rollout.records] == [turns], "one conversation"


@need("verifiers")
@needs_tasksets
@needs_uv
def test_an_environment_that_breaks_fails_its_rollout(tmp_path: Path) -> None:
    given = tasks("tiny_sums", breaks=True)[:1]
    (rollout,), _ = played("tiny_sums", tmp_path, given)
    assert rollout.status is not Status.OK and rollout.reward is None
    assert "the environment broke" in str(rollout.error)


@need("verifiers")
@needs_tasksets
@pytest.mark.parametrize(
    ("name", "options", "key"),
    [("tiny_sum", {}, "tiny_sum"), ("tiny_sums", {"counts": 2}, "counts")],
)
def test_what_is_wrong_is_named(name: str, options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        tasks(name, **options)


@pytest.mark.slow
@need("verifiers")
def test_an_older_environment_is_played_by_name(tmp_path: Path) -> None:
    if not OLD:
        pytest.skip("verifiers 0.4 has no older environments")
    assert len(tasks("older_sums[test]", count=3)) == 3
    (_, rollout), engine = played("older_sums", tmp_path, tasks("older_sums"))
    assert ok(rollout).reward == 1.0 and rollout.metrics["correct"] == 1.0
    assert len(engine.exchanges) == 2


@pytest.mark.slow
@need("verifiers")
def test_an_older_rubric_scores_a_group_together(tmp_path: Path) -> None:
    if not OLD:
        pytest.skip("verifiers 0.4 has no older environments")
    (tmp_path / "grouped.py").write_text(GROUPED)
    answers = iter(["2", "22", "4444444444"])
    rollouts, engine = play(
        environments("grouped", tmp_path), TOKENIZER, tasks("grouped"),
        lambda _: next(answers) + END, group_size=3, max_tokens=40_000,
    )  # fmt: skip
    assert sorted(ok(rollout).reward or 0.0 for rollout in rollouts) == [0.5, 0.5, 1.0]
    assert sum(rollout.metrics["longest"] for rollout in rollouts) == 1.0
    assert len(engine.exchanges) == 3
