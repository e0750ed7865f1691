"""``train.epochs`` is honoured exactly, also where the data has fewer rows than a step takes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings, sums, untimed, write_lines
from tunesmith.config.commands import KTOConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.learn.data.loader import Loader
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.run import NOTHING, Done, Facts
from tunesmith.plan.length import (
    critic_steps,
    done_before,
    draws,
    optimizer_steps,
    prompts_left,
    prompts_of,
)
from tunesmith.plan.resolve import resolve
from tunesmith.run import assembly
from tunesmith.run.loop.buffer import Buffer
from tunesmith.types import RolloutGroup, Task

CPU = Hardware("a CPU", cores=4, memory_total=16 * 10**9, memory_available=8 * 10**9, bf16=True)


def resolved(kind: type[RunConfig], rows: int, *overrides: str, done: Done = NOTHING) -> Any:
    base = ["model.path=org/m", "data.train=org/d"]
    base += ['reward.functions=["math"]'] if kind is RLConfig else []
    facts = Facts(CPU, train_size=rows, done=done)
    return resolve(load_config(kind, None, [*base, *overrides]), facts)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    size=st.integers(1, 40),
    epochs=st.one_of(st.integers(1, 4).map(float), st.floats(0.1, 4)),
    stopped=st.integers(0, 5),
)
def test_the_batches_of_a_supervised_run_are_its_passes(
    rows: int, size: int, epochs: float, stopped: int
) -> None:
    config = resolved(SFTConfig, rows, f"train.batch_size={size}", f"train.epochs={epochs}")
    assert config.settings["train.batch_size"] == min(size, rows)

    def loader() -> Loader[int]:
        return Loader(
            range(rows),
            config.settings["train.batch_size"],
            seed=1,
            draws=draws(config.training, rows),
        )

    made = loader()
    batches = [made.next_batch() for _ in range(config.settings["train.steps"])]
    assert all(batches) and not made.next_batch(), (
        "every step has rows, and after the last one none are left"
    )
    assert all(len(set(batch)) == len(batch) <= min(size, rows) for batch in batches)
    counts = Counter(row for batch in batches for row in batch)
    assert counts.total() == max(1, round(epochs * rows))
    assert {counts[row] for row in range(rows)} <= {
        int(counts.total() // rows),
        -(-counts.total() // rows),
    }
    again = loader()
    early = min(stopped, len(batches))
    before = loader()
    for _ in range(early):
        before.next_batch()
    again.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [again.next_batch() for _ in batches[early:]] == batches[early:]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    epochs=st.floats(0.1, 4),
    stopped=st.integers(0, 9),
)
@pytest.mark.more
def test_steps_of_another_size_take_what_is_left_of_the_passes(
    rows: int, sizes: tuple[int, int], epochs: float, stopped: int
) -> None:
    """A supervised run is continued with another ``train.batch_size``."""
    said = f"train.epochs={epochs}"
    before = resolved(SFTConfig, rows, said, f"train.batch_size={sizes[0]}")
    total = draws(before.training, rows)
    loader = Loader(range(rows), before.training.batch, draws=total)
    steps = min(stopped, before.steps)
    done = Done(steps, sum(len(loader.next_batch()) for _ in range(steps)))
    after = resolved(SFTConfig, rows, said, f"train.batch_size={sizes[1]}", done=done)
    again = Loader(range(rows), after.training.batch, draws=total)
    again.load_state_dict(loader.state_dict())
    batches = [again.next_batch() for _ in range(after.steps - steps)]
    assert all(batches) and not again.next_batch()
    assert before.training.batch != after.training.batch or after.steps == before.steps


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    prompts=st.integers(1, 40),
    epochs=st.floats(0.1, 4),
    group=st.sampled_from((2, 4)),
)
def test_the_groups_of_an_rl_run_are_its_passes(
    rows: int, prompts: int, epochs: float, group: int
) -> None:
    said = [
        f"rollout.prompts_per_step={prompts}",
        f"rollout.group_size={group}",
        f"train.epochs={epochs}",
    ]
    config = resolved(RLConfig, rows, *said, f"train.batch_size={prompts}")
    steps = [
        prompts_of(config.training, step, rows) for step in range(config.settings["train.steps"])
    ]
    assert sum(steps) == max(1, round(epochs * rows)) and set(steps[:-1]) <= {min(prompts, rows)}
    batches = sum(-(-count * group // config.settings["train.batch_size"]) for count in steps)
    assert optimizer_steps(config.said, config.training, rows) == batches


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    prompts=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    epochs=st.tuples(st.floats(0.1, 4), st.floats(0, 2)),
    batch=st.sampled_from((1, 2)),
    stopped=st.integers(0, 9),
    frozen=st.integers(0, 6),
)
@pytest.mark.more
def test_rl_steps_of_another_size_take_what_is_left_of_the_passes(
    rows: int,
    prompts: tuple[int, int],
    epochs: tuple[float, float],
    batch: int,
    stopped: int,
    frozen: int,
) -> None:
    """A run is continued with another ``rollout.prompts_per_step``, then with the first one, for
    longer."""
    frozen = min(frozen, -(-max(1, round(epochs[0] * rows)) // max(prompts)) - 1)
    said = [f"train.batch_size={batch}", "rollout.group_size=2", "algorithm.name=ppo"]
    said += [f"critic.freeze_actor_steps={frozen}", "train.passes_per_batch=2"]
    done = NOTHING
    updates = list[tuple[int, int]]()
    for size, passes in zip((*prompts, prompts[0]), (*epochs[:1] * 2, sum(epochs)), strict=True):
        more = [f"rollout.prompts_per_step={size}", f"train.epochs={passes}"]
        run = resolved(RLConfig, rows, *said, *more, done=done)
        counts = [prompts_of(run.training, step, rows) for step in range(done.steps, run.steps)]
        left = max(1, round(passes * rows)) - done.items
        assert sum(counts) == left == prompts_left(run.training, done.steps, rows)
        rest = [2 * -(-2 * count // batch) for count in counts]
        planned = [*updates, *enumerate(rest, done.steps)]
        critic, policy = (sum(n for at, n in planned if at >= first) for first in (0, frozen))
        assert critic_steps(run.said, run.training, rows) == critic
        assert optimizer_steps(run.said, run.training, rows) == max(2, policy)
        end = min(run.steps, done.steps + stopped)
        items = done.items + sum(counts[: end - done.steps])
        updates = planned[:end]
        done = done_before(run.said, run.training, end, rows)
        assert (done.steps, done.items) == (end, items)


@pytest.mark.parametrize(
    ("kind", "rows", "said", "key", "value", "reason"),
    [
        (
            SFTConfig,
            5,
            ["train.batch_size=8", "train.epochs=3"],
            "train.batch_size",
            5,
            "lowered from 8",
        ),
        (
            SFTConfig,
            5,
            ["train.batch_size=8", "train.epochs=3"],
            "train.steps",
            3,
            "3 passes over 5 samples, 5 to a",
        ),
        (
            SFTConfig,
            10,
            ["train.batch_size=4", "train.epochs=2"],
            "train.steps",
            6,
            "2 to the last of a pass",
        ),
        (
            SFTConfig,
            10,
            ["train.batch_size=4", "train.epochs=0.5"],
            "train.steps",
            2,
            "1 to the last",
        ),
        (SFTConfig, 64, [], "train.steps", 2, "one pass over 64 samples, 32 to a step"),
        (KTOConfig, 3, ["train.batch_size=8"], "train.batch_size", 3, "lowered from 8"),
        (RLConfig, 5, [], "rollout.prompts_per_step", 5, "lowered from 8: the data has 5 prompts"),
        (RLConfig, 5, [], "train.batch_size", 40, "the whole rollout batch"),
        (
            RLConfig,
            20,
            ["train.epochs=2"],
            "train.steps",
            5,
            "2 passes over 20 prompts, 8 to a step",
        ),
        (RLConfig, 21, ["train.epochs=2"], "train.steps", 6, "2 to the last"),
        (
            RLConfig,
            16,
            ["algorithm.dynamic_filter=true"],
            "train.steps",
            2,
            "filtered prompts do not count",
        ),
    ],
)
def test_the_plan_says_what_steps_have(
    kind: type[RunConfig], rows: int, said: list[str], key: str, value: int, reason: str
) -> None:
    found = [entry for entry in resolved(kind, rows, *said).reasons if entry.key == key]
    assert [entry.value for entry in found] == [value] and reason in found[0].reason


def test_a_mixture_by_weight_has_full_batches_until_the_last() -> None:
    mixed = 'data.train=[{path="org/a",weight=1},{path="org/b",weight=3}]'
    config = resolved(SFTConfig, 10, mixed, "train.batch_size=4", "train.epochs=3")
    assert config.settings["train.steps"] == 8 and draws(config.training, 10) == 30


def test_the_last_batch_of_rollouts_ahead_is_what_is_left() -> None:
    buffer = Buffer(4, 1, max_playing=8, max_waiting=8, enough=4, left=6)
    assert buffer.room(0) == 6
    for number in range(6):
        buffer.put(buffer.start(0), RolloutGroup(Task(str(number), "", (1,), {}), []), keep=True)
    taken = [buffer.take(0), buffer.take(1)]
    assert [len(batch[0]) for batch in taken if batch] == [4, 2]


def run_of(folder: Path, command: str, **changed: Any) -> list[dict[str, Any]]:
    """The steps of a small run."""
    model = save_model(folder / "model")
    if command == "rl":
        write_lines(folder / "train.jsonl", sums(5))
        (folder / "rewards.py").write_text(
            "def share(completions, **_):\n    return [float(len(c)) for c in completions]"
        )
        result = assembly.run_rl(
            None, rl_settings(folder, model, **{"train__steps": None, **changed})
        )
    else:
        write_lines(
            folder / "examples.jsonl",
            [{"prompt": s["prompt"], "completion": s["answer"]} for s in sums(5)],
        )
        result = assembly.run_sft(
            None, sft_settings(folder, model, **{"train__steps": None, **changed})
        )
    return untimed(result.run_dir / "metrics.jsonl")


def test_the_metrics_of_few_rows_have_as_many_samples_as_was_said(tmp_path: Path) -> None:
    changed = {
        "train__epochs": 3,
        "train__batch_size": 8,
        "train__schedule": "linear",
        "train__lr": 1e-3,
    }
    steps = run_of(tmp_path, "sft", **changed)
    assert [step["samples"] for step in steps] == [5, 5, 5]
    assert [step["epoch"] for step in steps] == [1, 2, 3]
    assert [step["lr"] for step in steps] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])


def test_the_last_step_of_an_rl_run_has_the_prompts_that_are_left(tmp_path: Path) -> None:
    changed = {
        "rollout__prompts_per_step": 4,
        "rollout__group_size": 2,
        "train__epochs": 2,
        "train__batch_size": 4,
    }
    steps = run_of(tmp_path, "rl", **changed, train__schedule="linear", train__lr=1e-3)
    assert [step["rollouts"] for step in steps] == [8, 8, 4]
    assert [step["optimizer_steps"] for step in steps] == [2, 2, 1]
    assert steps[-1]["lr"] == pytest.approx(1e-3 / 5), (
        "the schedule ends with the last optimizer step"
    )
    assert steps[-1]["epoch"] == 2


@pytest.mark.parametrize(
    "ahead",
    [
        {},
        {
            "rollout__max_staleness": 1,
            "rollout__partial": True,
            "rollout__over_generation": 1.5,
        },
    ],
)
def test_a_continued_rl_run_ends_with_its_passes(tmp_path: Path, ahead: dict[str, Any]) -> None:
    """In steps of another size; and no prompt is played that no step takes."""
    changed = {"rollout__group_size": 2, "train__schedule": "linear", "train__lr": 1e-3, **ahead}
    run_of(tmp_path, "rl", **changed, rollout__prompts_per_step=4, train__steps=1)
    changed |= {"rollout__prompts_per_step": 3, "train__epochs": 2, "checkpoint__resume": True}
    steps = run_of(tmp_path, "rl", **changed)
    assert [step["rollouts"] for step in steps] == [8, 6, 6]
    assert steps[-1]["lr"] == pytest.approx(1e-3 / 3)
    last = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    state = json.loads((last / "state.json").read_text())
    assert state["tasks"]["unsettled"] == [] and sum(state["tasks"]["taken"]) == 10
    assert state["done"] == {"steps": 3, "items": 10, "optimizer_steps": 3, "critic_steps": 3}
