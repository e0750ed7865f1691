"""The commands as Python functions."""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset, DatasetDict

import tunesmith
from tests.support.tiny_preferences import lines_of
from tests.support.tiny_runs import rl_settings, sums, write_lines
from tunesmith.config.load import load_config
from tunesmith.config.objects import load_object
from tunesmith.config.schema import RLConfig
from tunesmith.errors import CheckpointError, ConfigError, DataError, RewardError, UserError
from tunesmith.records.metrics import read_metrics
from tunesmith.records.toml import toml_value
from tunesmith.run import assembly

SMALL: dict[str, Any] = {
    "model__dtype": "float32",
    "data__chat": False,
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
    "train__steps": 3,
    "train__lr": 1e-2,
    "system__threads": 1,
}
ROWS = Dataset.from_list(sums(2))
EXAMPLES = [{"prompt": line["prompt"], "completion": line["answer"]} for line in sums(24)]
SFT = {key: SMALL[key] for key in SMALL if key != "rollout"} | {"train__batch_size": 8}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learned(run_dir: Path) -> list[dict[str, Any]]:
    names = ("reward", "loss", "grad_norm", "lr")
    return [
        {name: row[name] for name in names}
        for row in read_metrics(run_dir / "metrics.jsonl")
        if "loss" in row
    ]


def share(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(c < "N" for c in text) / max(1, len(text)) for text in completions]


def test_a_run_from_python_is_the_commands_run(model: Path, here: Path) -> None:
    weight = 1.0

    def closure(completions: Sequence[str], **columns: Any) -> list[float]:
        assert set(columns) >= {"answer", "prompts"}
        return [weight * value for value in share(completions)]

    def ready(completions: Sequence[str], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    rows = Dataset.from_list(sums(12))
    outcome = tunesmith.rl(
        model, rows, reward=[closure, ready], eval=sums(4), run_dir="run", **SMALL
    )
    assert outcome.run_dir == here / "run"
    assert [
        json.loads(line) for line in (here / "run/data/train.jsonl").read_text().splitlines()
    ] == sums(12)
    command = assembly.run_rl(
        None, rl_settings(here, model, "command", data__eval=write_eval(here))
    )
    assert learned(outcome.run_dir) == learned(command.run_dir)
    assert [row["reward"] for row in outcome.metrics if "loss" in row] == [
        r["reward"] for r in learned(here / "run")
    ]
    assert (
        "reward/closure/mean" in outcome.metrics[-2] and "reward/ready/mean" in outcome.metrics[-2]
    )
    assert len(outcome.to_pandas()) == len(outcome.metrics)
    trained, tokenizer = outcome.load()
    assert (
        trained.config.model_type == "llama"
        and tokenizer.decode(tokenizer("1+1=").input_ids) == "1+1="
    )
    entry = json.loads((here / "run/resolved.json").read_text())["settings"]["reward.isolation"]
    assert entry["value"] == "thread"


def write_eval(folder: Path) -> str:
    return str(write_lines(folder / "eval.jsonl", sums(4)))


@pytest.mark.parametrize("name", ["rollout", "rollout__group_size", "rollout.group_size"])
def test_settings_are_nested_or_dotted(name: str, model: Path) -> None:
    settings = {name: {"group_size": 0} if name == "rollout" else 0}
    with pytest.raises(ConfigError, match=r"rollout\.group_size"):
        tunesmith.rl(model, sums(2), reward="math", **settings)
    assert not any(Path("runs").glob("rl-*"))


@pytest.mark.more
def test_a_run_goes_on_where_it_was_stopped(model: Path, here: Path) -> None:
    """Also from rows, a lambda and inside a running event loop."""
    seen: list[tuple[str, int]] = []

    def on_step(step: int, metrics: dict[str, Any]) -> bool | None:
        seen.append(("step", step))
        assert metrics["reward"] >= 0
        return tunesmith.STOP if step == 2 else None

    def run(**more: Any) -> tunesmith.RunResult:
        reward = lambda completions, **_: share(completions)  # noqa: E731
        train = more.pop("train", iter(sums(12)))
        return tunesmith.rl(str(model), train, reward=reward, run_dir="run", **SMALL, **more)

    async def notebook() -> tunesmith.RunResult:
        outcome = run(
            on_step=on_step,
            on_evaluation=lambda step, metrics: seen.append(("eval" if metrics else "", step)),
            on_checkpoint=lambda step, path: seen.append((path.name, step)),
            eval=sums(2),
        )
        await asyncio.sleep(0)
        return outcome

    first = asyncio.run(notebook())
    assert seen == [("eval", 0), ("step", 1), ("step", 2), ("step-000002", 2)]
    assert first.checkpoint == here / "run/checkpoints/step-000002/model"
    with pytest.raises(ConfigError, match="already holds a run"):
        run()
    second = run(resume=True, eval=sums(2))
    assert second.checkpoint.parent.name == "step-000003"
    assert [row["step"] for row in second.metrics if "loss" in row] == [1, 2, 3]
    with pytest.raises(CheckpointError):
        run(resume=True, train=sums(5))


@pytest.mark.more
def test_evaluations_and_checkpoints_stop_a_run_too(model: Path) -> None:
    steps = SFT | {"train__steps": 6, "checkpoint__every": 2}
    stopped = tunesmith.sft(
        model,
        EXAMPLES,
        on_checkpoint=lambda step, path: path.name != f"step-{max(step, 4):06d}",
        **steps,
    )
    assert stopped.run_dir.name == "sft-1" and stopped.checkpoint.parent.name == "step-000004"
    steps |= {"eval": EXAMPLES[:2], "eval__every": 1}
    stopped = tunesmith.sft(
        model, EXAMPLES, on_evaluation=lambda step, metrics: step < len(metrics) + 2, **steps
    )
    assert stopped.run_dir.name == "sft-2" and stopped.checkpoint.parent.name == "step-000003"
    assert {"eval/loss"} <= stopped.evaluations[-1].keys()

    def fail(step: int, metrics: dict[str, Any]) -> None:
        raise KeyError(step, metrics)

    with pytest.raises(KeyError):
        tunesmith.sft(model, EXAMPLES, on_step=fail, **SFT)


@pytest.mark.parametrize("command", ["rm", "dpo", "kto", "prm"])
def test_preferences_and_steps_from_rows(command: str, model: Path) -> None:
    settings = {
        key: value for key, value in SFT.items() if not (command == "prm" and key == "data__chat")
    }
    more = {"prm": {"good": "+", "bad": "-"}} if command == "prm" else {}
    outcome = getattr(tunesmith, command)(
        model, lines_of(command, 8), **(settings | more | {"train__steps": 1})
    )
    trained, _ = outcome.load()
    assert (command == "rm") == ("SequenceClassification" in type(trained).__name__)


@pytest.mark.more
def test_distillation_and_rejection_sampling(model: Path) -> None:
    distilled = tunesmith.distill(model, sums(6), teacher=model, **{**SMALL, "train__steps": 1})
    assert "teacher_kl" in distilled.metrics[0]

    settings = {key: value for key, value in SFT.items() if key != "train__steps"} | {
        "train__epochs": 1
    }
    # Any of the first bytes ends an answer, so that some answers come to their end.
    settings |= {"sampling": {"n": 4, "max_new_tokens": 8, "stop_token_ids": list(range(5, 100))}}
    done = tunesmith.rft(
        model, sums(12), reward=lambda completions, **_: [1.0] * len(completions), **settings
    )
    assert (
        done.run_dir == Path("runs/rft").absolute() and done.load()[0].config.model_type == "llama"
    )


def test_environments_are_classes_of_the_program(model: Path) -> None:
    made: list[int] = []

    class Game:
        def reset(self, **columns: Any) -> None:
            made.append(len(columns))

        def step(self, action: str) -> tuple[str, float, bool]:
            return "", float(len(action) % 3), True

    outcome = tunesmith.rl(model, sums(6), environment=Game, **{**SMALL, "train__steps": 1})
    assert len(made) == 16 and "reward" in outcome.metrics[0]


PROCESS = {"reward": lambda completions: completions, "reward__isolation": "process"}


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ConfigError, r"reward\.functions: 3 is not a function", {"reward": 3}),
        (ConfigError, "'mth' is not a built-in", {"reward": "mth"}),
        (ConfigError, "reward.functions is empty", {}),
        (ConfigError, "rollout.group_size", {"reward": share, "num_generations": 8}),
        (ConfigError, "train.lr", {"reward": share, "learning_rate": 1e-6}),
        (
            ConfigError,
            "Settings of .train. are written train__lr",
            {"reward": share, "train": {"lr": 1e-6}},
        ),
        (ConfigError, "splits train, test", {"train": DatasetDict(train=ROWS, test=ROWS)}),
        (ConfigError, "of type int; give a path", {"reward": share, "train": 3}),
        (DataError, "train has no rows", {"reward": "math", "train": []}),
        (
            DataError,
            "row 2 of train is of type str",
            {"reward": "math", "train": [{"prompt": "1"}, "2"]},
        ),
        (DataError, "x", {"reward": "math", "train": [{"x": "1"}]}),
        (ConfigError, "train.lr is of type object", {"reward": "math", "train__lr": object()}),
        (ConfigError, "does not exist", {"reward": "math", "train": "nowhere.jsonl"}),
        (ConfigError, "on_step is of type int", {"reward": share, "on_step": 3}),
        (ConfigError, "on_step cannot be called", {"reward": share, "on_step": lambda: None}),
        (ConfigError, "tools.py does not exist", {"reward": share, "tools": "tools.py:add"}),
        (ConfigError, "needs functions that another process can import", PROCESS),
    ],
)
def test_bad_input_is_refused_as_by_the_commands(
    error: type[UserError], words: str, arguments: dict[str, Any], model: Path
) -> None:
    with pytest.raises(error, match=words):
        tunesmith.rl(model, **{"train": sums(2), **SMALL, **arguments})
    assert not any(Path("runs").glob("rl-*")) and not Path("runs/latest").is_symlink()


def test_a_reward_gets_the_values_of_rows_or_their_iso_text(model: Path) -> None:
    midnight = datetime(2020, 1, 1)
    columns: list[tuple[Any, Any]] = [
        (date(2020, 1, 2), "2020-01-02"),
        (midnight, "2020-01-01T00:00:00"),
        (np.datetime64("2020-01-01T00:00", "ns"), "2020-01-01T00:00:00.000000000"),
        ([midnight.time(), None, True, "é"], ["00:00:00", None, True, "é"]),
        (np.int64(1 << 62), 1 << 62),
        (np.float32(0.5), 0.5),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.bool_(True), True),
        (torch.tensor([1, 2]), [1, 2]),
        (Decimal("1.5"), 1.5),
        ((1, {"a": (10**30,)}), [1, {"a": [10**30]}]),
    ]
    row = {f"c{number}": value for number, (value, _) in enumerate(columns)}
    seen: list[list[Any]] = []

    def reward(completions: Sequence[str], **given: Any) -> list[float]:
        seen.append([given[name][0] for name in row])
        return [0.0 for _ in completions]

    tunesmith.rl(
        model, [line | row for line in sums(4)], reward=reward, **{**SMALL, "train__steps": 1}
    )
    assert seen[0] == [value for _, value in columns]
    assert list(map(type, seen[0])) == [type(value) for _, value in columns]


@pytest.mark.parametrize("rows_format", [None, "numpy", "frame"])
def test_rows_of_a_dataset_are_its_values(rows_format: str | None, model: Path) -> None:
    rows = [
        line | {"day": datetime(2020, 1, day + 1), "n": [day, 2], "x": 0.5}
        for day, line in enumerate(sums(4))
    ]
    data: Any = pandas.DataFrame(rows)
    if rows_format != "frame":
        data = Dataset.from_list(rows).with_format(rows_format)

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        return share(completions)

    tunesmith.rl(model, data, reward=reward, run_dir="run", **{**SMALL, "train__steps": 1})
    written = [json.loads(line) for line in Path("run/data/train.jsonl").read_text().splitlines()]
    assert [datetime.fromisoformat(line.pop("day")) for line in written] == [
        row.pop("day") for row in rows
    ]
    assert written == rows


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"x", "b'x' is of type bytes"),
        (object(), "is of type object"),
        ({1, 2}, "is of type set"),
        (timedelta(1), "is of type timedelta"),
        (np.timedelta64(5, "ns"), "is of type timedelta64"),
        (np.datetime64("NaT"), "is of type datetime64"),
        ({"a": [float("nan")]}, "nan is of type float"),
        (np.array([1.0, np.inf]), "inf is of type float"),
        ({"a": {1: 2}}, "the key 1 is of type int"),
        ({None: 2}, "the key None is of type NoneType"),
        (1 << 1100, "int too large"),
        ("\ud800", "surrogates not allowed"),
        (LOOP, "more than 63 levels"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_json_cannot_hold_is_refused_with_row_and_column(
    value: Any, told: str, here: Path
) -> None:
    good, bad = ({**line, "held": held} for line, held in zip(sums(2), (None, value), strict=True))
    with pytest.raises(
        DataError, match=rf"^row 2 of eval, column 'held': .*{told}.*leave the column out"
    ):
        tunesmith.rl("model", sums(2), eval=[good, bad], reward=share, **SMALL)
    assert not any((here / "runs").iterdir())


def test_a_column_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match=r"^row 1 of train, column 3: the key 3 is of type int"):
        tunesmith.rl("model", [{"prompt": "1", 3: "x"}], reward=share, **SMALL)  # pyright: ignore[reportArgumentType]


def test_a_refused_call_leaves_the_link_to_the_newest_run(model: Path) -> None:
    Path("runs/before").mkdir(parents=True)
    Path("runs/latest").symlink_to("before")
    with pytest.raises(ConfigError):
        tunesmith.rl(model, sums(2), reward="math", train__lr=object())
    assert Path("runs/latest").readlink() == Path("before")


def test_a_reward_that_raises_is_told_with_its_traceback(model: Path) -> None:
    def broken(completions: Sequence[str], **_: Any) -> list[float]:
        return [len(completions) / 0]

    with pytest.raises(RewardError, match=r"return \[len\(completions\) / 0\]"):
        tunesmith.rl(model, sums(2), reward=broken, **SMALL)


@pytest.mark.more
def test_importable_functions_keep_a_process_of_their_own(
    here: Path, model: Path, monkeypatch: Any
) -> None:
    (here / "my_rewards.py").write_text(
        "def short(completions, **columns):\n    return [-len(c) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(here)
    import my_rewards  # pyright: ignore[reportMissingImports]

    outcome = tunesmith.rl(model, sums(4), reward=my_rewards.short, **{**SMALL, "train__steps": 1})
    resolved = json.loads((outcome.run_dir / "resolved.json").read_text())["settings"]
    assert resolved["reward.functions"]["value"] == [f"{here}/my_rewards.py:short"]
    assert resolved["reward.isolation"]["value"] == "process"


def test_a_saved_run_file_says_that_its_function_is_gone(model: Path) -> None:
    outcome = tunesmith.rl(
        model, sums(4), reward=lambda completions, **_: share(completions), **SMALL
    )
    config = load_config(RLConfig, outcome.run_dir / "config.toml")
    (reference,) = config.reward.functions
    with pytest.raises(ConfigError, match="object of a Python program"):
        load_object(reference, Path.cwd())


def test_values_of_a_program_become_toml() -> None:
    value = {"a": Path("x"), "b": np.float64(0.5), "c": (np.int64(2), True), "d": None}
    assert toml_value(value) == '{a = "x", b = 0.5, c = [2, true]}'
    with pytest.raises(TypeError):
        toml_value({"a": object()})


def test_results_print_short(model: Path) -> None:
    result = tunesmith.sft(
        model, EXAMPLES, eval=EXAMPLES, **{**SFT, "train__steps": 3, "eval__every": 1}
    )
    assert len(result.evaluations) == 4 and len(repr(result)) < 300 and "run_dir" in repr(result)
    (answer,) = tunesmith.generate(model, ["a" * 50], n=5, max_new_tokens=200, chat=False)
    assert len(repr(answer)) < 500 and "2 more" in repr(answer)


def test_a_notebook_gets_plain_output(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Rich writes every line as an output of its own where it finds the kernel of a notebook."""

    class ZMQInteractiveShell: ...

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("an output beside the text"))
    tunesmith.sft(model, EXAMPLES, **{**SFT, "train__steps": 1})
    assert {"train.steps", "step"} <= {
        line.split(" ")[0] for line in capsys.readouterr().out.splitlines()
    }
