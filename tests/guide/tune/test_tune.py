"""``tunesmith tune``: when a comparison ends, which settings are measured next, what is refused and
remembered."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from tests.support import tiny
from tests.support.tiny_runs import sft_settings
from tunesmith.cli.main import app
from tunesmith.config.changing import with_values
from tunesmith.config.load import load_config
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import CapacityError, ConfigError
from tunesmith.guide.tune.arms import Arm, TrialEnded
from tunesmith.guide.tune.bench import Bench
from tunesmith.guide.tune.intervals import MOST_PAIRS, Interval, interval
from tunesmith.guide.tune.knobs import Shape, neighbours
from tunesmith.guide.tune.proof import Proof, compare_gradients
from tunesmith.guide.tune.result import Journal, Trial, check_files, trial_text
from tunesmith.guide.tune.search import Candidate, TrialOutcome, search
from tunesmith.guide.tune.setup import (
    MANY,
    check_tunable,
    pinned_settings,
    trial_config,
    tuned_values,
    without_defaults,
    without_tuned,
)
from tunesmith.guide.tune.trial import ended_by
from tunesmith.guide.tune.tuning import Tuning, open_tuning
from tunesmith.plan.cost.seconds import expected_seconds
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.measured import remembered
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.records.progress import duration
from tunesmith.run.trainers.state_files import write_state

MODEL = ModelFacts(
    parameters=2_000_000,
    layers=4,
    hidden_size=128,
    intermediate_size=512,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab_size=512,
    context=2048,
)


def machine(cores: int = 4) -> Hardware:
    return Hardware("CPU", cores, 16 * 10**9, 12 * 10**9, bf16=False)


# When a comparison ends


def compared(draw: random.Random, gap: float, noise: float = 0.1) -> tuple[int, int]:
    """A comparison of two runs whose times differ by a factor: pairs until it ended, and which is
    faster: -1, 0, 1."""
    ratios: list[float] = []
    while len(ratios) < MOST_PAIRS:
        ratios.append(math.log(gap) + draw.gauss(0, noise))
        found = interval(ratios)
        if found.decided:
            return len(ratios), (found.low > 0) - (found.high < 0)
    return len(ratios), 0


@pytest.mark.more
def test_equal_runs_are_seldom_told_apart_however_often_one_looks() -> None:
    draw = random.Random(0)
    told = [compared(draw, 1.0, noise)[1] for noise in (0.02, 0.1, 0.5) for _ in range(300)]
    assert sum(side != 0 for side in told) <= 0.05 * len(told)


def test_a_gap_of_two_is_told_within_a_few_pairs() -> None:
    draw = random.Random(0)
    told = [compared(draw, 2.0) for _ in range(300)]
    assert all(side == 1 for _, side in told)
    assert sorted(pairs for pairs, _ in told)[len(told) // 2] <= 4


def test_the_interval_by_hand() -> None:
    """Where the Bayes factor of the t-statistic is 20: solved here by bisection."""
    ratios = [0.5, 0.7, 0.6, 0.65]
    n = len(ratios)
    mean = sum(ratios) / len(ratios)
    squares = sum((ratio - mean) ** 2 for ratio in ratios)

    def factor(m: float) -> float:
        t2 = n * (mean - m) ** 2 / (squares / (n - 1))
        odds = 1 + 25 * n
        return odds**-0.5 * ((1 + t2 / (n - 1)) / (1 + t2 / (n - 1) / odds)) ** (n / 2)

    near = 0.0
    far = 10.0
    for _ in range(100):
        middle = (near + far) / 2
        near, far = (middle, far) if factor(mean + middle) < 20 else (near, middle)
    found = interval(ratios)
    assert found.high == pytest.approx(mean + near) and found.low == pytest.approx(mean - near)
    assert interval(ratios[:1]).high == math.inf and not interval(ratios[:2]).decided
    assert found.turned.gain == pytest.approx(
        tuple(1 / g for g in (found.gain[0], found.gain[2], found.gain[1]))
    )


# Which settings are measured next

SURFACE: dict[str, list[int]] = {
    "tokens": [1, 2, 4, 8, 16, 32],
    "chunk": [1, 2, 4, 8],
    "ckpt": [0, 1],
    "threads": [1, 2, 4],
}


def surface(seed: int) -> Callable[[Any], float]:
    """Seconds of a step by its settings: with an optimum inside, steps that depend on each other,
    and noise."""
    draw = random.Random(seed)
    best = {key: draw.choice(values) for key, values in SURFACE.items()}
    weight = {key: draw.uniform(0.02, 0.5) for key in SURFACE}

    def seconds(values: Any) -> float:
        apart = {key: abs(math.log2((values[key] + 1) / (best[key] + 1))) for key in SURFACE}
        return math.exp(
            sum(weight[key] * apart[key] for key in SURFACE)
            + 0.05 * apart["tokens"] * apart["threads"]
        )

    return seconds


def moves(best: Any) -> Iterator[Candidate]:
    for key, values in SURFACE.items():
        yield from (Candidate({key: v}, {**best, key: v}) for v in values if v != best[key])


@pytest.mark.parametrize("seed", range(12))
def test_the_search_is_near_the_best_of_a_sweep_in_a_fifth_of_its_trials(seed: int) -> None:
    """The cost model knows the surface only roughly; times are noisy."""
    seconds = surface(seed)
    draw = random.Random(seed)
    trials = 0

    def compare(best: Any, candidate: Candidate) -> TrialOutcome:
        nonlocal trials
        trials += 1
        ratios: list[float] = []
        while len(ratios) < MOST_PAIRS and not (ratios and interval(ratios).decided):
            ratios.append(math.log(seconds(candidate.values) / seconds(best)) + draw.gauss(0, 0.01))
        return TrialOutcome("measured", interval(ratios))

    def expected(values: Any) -> float:
        return seconds(values) * math.exp(0.2 * math.sin(hash(tuple(values.values())) % 1000))

    whole = [
        dict(zip(SURFACE, values, strict=True)) for values in itertools.product(*SURFACE.values())
    ]
    worst = max(whole, key=seconds)
    found = search(worst, moves, expected, compare, lambda: True)
    assert seconds(found) <= 1.05 * min(map(seconds, whole))
    assert trials <= len(whole) / 5


def test_a_trial_that_ends_is_not_tried_again_nor_what_lies_beyond() -> None:
    asked: list[int] = []

    def compare(_: Any, candidate: Candidate) -> TrialOutcome:
        asked.append(candidate.values["tokens"])
        return (
            TrialOutcome("died", None, "was ended by SIGKILL")
            if asked[-1] == 8
            else TrialOutcome("measured", interval([0.1] * 9))
        )

    best = {"tokens": 2}
    order = {8: 1.0, 16: 1.1, 4: 1.2, 1: 1.3, 2: 1.0}
    found = search(
        best, lambda _: (Candidate({"tokens": n}, {"tokens": n}) for n in (1, 4, 8, 16)),
        lambda values: order[values["tokens"]], compare, lambda: True,
    )  # fmt: skip
    assert found == best and asked == [8, 4, 1]


def test_time_that_is_over_ends_the_search() -> None:
    left = iter([True, True, False])
    asked: list[Any] = []

    def compare(_: Any, candidate: Candidate) -> TrialOutcome:
        asked.append(candidate)
        return TrialOutcome("measured", interval([-0.5, -0.51, -0.49, -0.5]))

    start = {key: values[0] for key, values in SURFACE.items()}
    found = search(start, moves, lambda _: 1.0, compare, lambda: next(left))
    assert len(asked) == 2 and found == asked[-1].values


def test_the_cost_model_orders_settings() -> None:
    """What certainly takes longer is expected to: recomputing, prompts computed again, small
    micro-batches, chunks."""
    said = [
        "model.path=org/m",
        "data.train=org/data",
        'reward.functions=["exact_match"]',
        "model.dtype=float32",
    ]
    said += ["rollout.max_new_tokens=64"]
    facts = Facts(machine(), MODEL, longest=256, train_size=100)

    def seconds(*more: str) -> float:
        found = resolve(load_config(RLConfig, None, [*said, *more]), facts)
        return expected_seconds(found, 64, 300)

    usual = seconds()
    for slow in (
        "system.gradient_checkpointing=true",
        "system.share_prompts=false",
        "system.max_tokens_per_microbatch=600",
        "system.logprob_chunk=16",
        "system.threads=1",
        "system.threads=16",
        "system.max_running=4",
    ):
        assert seconds(slow) > usual, slow


def test_neighbours_have_an_effect_and_one_change_each() -> None:
    values = {
        "system.max_tokens_per_microbatch": 2048,
        "system.gradient_checkpointing": False,
        "system.logprob_chunk": None,
        "system.share_prompts": True,
        "system.threads": 2,
        "system.max_running": 256,
        "system.kv_memory": "64MB",
        "system.max_prefill_tokens": 8192,
        "system.trainer_ranks": 1,
    }
    shape = Shape(
        cores=4, samples=64, tokens=1600, chunk=128, samples_itself=True, compares=True, gpu=False
    )
    found = list(neighbours(values, shape))
    assert all(value != values[key] for key, value in found) and len(set(map(str, found))) == len(
        found
    )
    said = {key: [v for k, v in found if k == key] for key, _ in found}
    assert said["system.max_tokens_per_microbatch"] == [
        400,
        800,
    ]  # more than a step's 1600 would change nothing
    assert said["system.max_running"] == [16, 32] and said["system.threads"] == [1, 4]
    assert said["system.gradient_checkpointing"] == [
        "selective",
        0.5,
        True,
    ] and said["system.share_prompts"] == [False]
    assert (
        said["system.kv_memory"] == ["128MB", "256MB"] and 128 not in said["system.logprob_chunk"]
    )
    alone = Shape(
        cores=4, samples=64, tokens=1600, chunk=128, samples_itself=False, compares=False, gpu=True
    )
    keys = {key for key, _ in neighbours(values, alone)}
    offloading = {f"system.offload_{what}" for what in ("optimizer", "activations", "parameters")}
    assert keys - offloading == {
        "system.max_tokens_per_microbatch", "system.gradient_checkpointing", "system.logprob_chunk",
    }  # fmt: skip
    assert keys >= offloading


# The run that is measured, and what is written


def test_a_trial_learns_nothing_and_writes_nothing(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    said = sft_settings(
        tmp_path,
        model,
        data__eval=str(tmp_path / "examples.jsonl"),
        eval__every=2,
        checkpoint__every=1,
    )
    config = load_config(
        SFTConfig, None, [*said, 'monitor.sinks=["wandb"]', "system.logprob_chunk=32"]
    )
    trial = trial_config(without_tuned(config))
    assert trial.data.eval is None and not trial.monitor.sinks and trial.train.lr < 1e-9
    assert trial.checkpoint.every == MANY and trial.train.batch_size == 8
    left = settings(trial, given_only=True)
    assert "system.threads" not in left and "system.logprob_chunk" not in left
    assert without_tuned(config, {"system.threads"}).system.threads == 1
    resolve(trial, Facts(machine(), MODEL, train_size=24))


def test_values_that_are_defaults_are_not_stated() -> None:
    resolved = {
        "system.share_prompts": {"value": True, "source": "default"},
        "system.threads": {"value": 2, "source": "derived"},
        "system.device": {"value": "cpu", "source": "derived"},
    }
    values, usual = tuned_values(resolved)
    assert values == {"system.share_prompts": True, "system.threads": 2}
    assert without_defaults(values, usual) == {"system.threads": 2}
    assert without_defaults({**values, "system.share_prompts": False}, usual) == {
        **values,
        "system.share_prompts": False,
    }


def test_gradients_are_compared_over_all_ranks_and_parts(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    gradient = {f"exp_avg:{name}": torch.randn(6, 4, generator=draw) for name in "ab"}
    other = {"master:a": torch.randn(6, 4, generator=draw), "step:a": torch.ones(1)}
    write_state(_folder(tmp_path / "whole"), gradient | other, {}, 1)
    halves = _folder(tmp_path / "halves")
    for rank, rows in enumerate((slice(0, 3), slice(3, 6))):
        first = dict.fromkeys(gradient, rows.start)
        write_state(halves, {name: g[rows] for name, g in gradient.items()}, first, 1, rank)
    same = compare_gradients(tmp_path / "whole", halves, "float32")
    assert same.holds and same.distance == 0 and same.numbers == 48
    write_state(_folder(tmp_path / "off"), {name: 1.1 * g for name, g in gradient.items()}, {}, 1)
    off = compare_gradients(tmp_path / "whole", tmp_path / "off", "float32")
    assert off.distance == pytest.approx(0.1, rel=1e-5) and not off.holds
    write_state(_folder(tmp_path / "none"), {name: 0 * g for name, g in gradient.items()}, {}, 1)
    assert not compare_gradients(tmp_path / "none", tmp_path / "none", "float32").holds, (
        "nothing was compared"
    )


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_comparison_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "tuned.json", {}, again=False)
    one = {"system.threads": 1}
    two = {"system.threads": 2}
    for ratios in ([-0.5], [0.01, -0.03]):
        journal.add(Trial(one, two, two, TrialOutcome("measured", interval(ratios))))
        text = (tmp_path / "tuned.json").read_text()
        assert "Infinity" not in text and "NaN" not in text
        again = Journal.open(tmp_path / "tuned.json", {}, again=False)
        assert again.find(one, two) is None and len(again.trials) == len(journal.trials)
    journal.add(
        Trial(one, two, two, TrialOutcome("measured", interval([-0.5, -0.51, -0.5, -0.49])))
    )
    found = Journal.open(tmp_path / "tuned.json", {}, again=False).find(one, two)
    assert found is not None and found.faster


class FakeArm:
    """A run of which memory holds only one at a time; its step takes as many seconds as its threads
    say."""

    running: ClassVar[list[FakeArm]] = []
    dead: ClassVar[set[int]] = set()

    def __init__(
        self, config: SFTConfig, *_: Any, ends: float = math.inf, start_seconds: float = 0.0
    ) -> None:
        self.threads = config.system.threads
        self.ends = ends
        self.start_seconds = start_seconds

    def start(self) -> None:
        if self in self.running:
            return
        if self.running:
            raise TrialEnded("memory", "no memory beside another run")
        if self.threads in self.dead:
            raise TrialEnded("died", "was ended by SIGKILL")
        self.running.append(self)

    def step(self, _: float | None = None) -> float:
        assert self.running == [self]
        return self.threads * random.uniform(1, 1.01)

    def resolved(self) -> dict[str, Any]:
        return {"system.threads": {"value": self.threads, "source": "given"}}

    def end(self) -> None:
        if self in self.running:
            self.running.remove(self)


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuning]:
    """Two threads are derived."""
    for room in ("bench", "tuning"):
        monkeypatch.setattr(f"tunesmith.guide.tune.{room}.Arm", FakeArm)
    monkeypatch.setattr(FakeArm, "running", [])
    monkeypatch.setattr(FakeArm, "dead", set())
    config = load_config(
        SFTConfig, None, ["model.path=org/m", "data.train=org/data", "system.threads=2"]
    )
    bench = Bench(tmp_path, tmp_path, math.inf)
    derived = {"system.threads": 2}
    shape = Shape(4, 8, 800, 128, samples_itself=False, compares=False, gpu=False)
    tuning = Tuning(
        without_tuned(config),
        tmp_path,
        bench,
        Facts(machine(), MODEL),
        Journal(tmp_path / "tuned.json", {}, []),
        frozenset(),
        shape,
        derived,
        {},
        lambda _: None,
        0.0,
        math.inf,
    )
    bench.fits = Mock(return_value=True)
    monkeypatch.setattr(Tuning, "candidates", Mock(return_value=()))
    monkeypatch.setattr(Tuning, "_prove", Mock(return_value=Proof(0.0, 1e-3, 1)))
    first = FakeArm(tuning.config_of(derived))  # type: ignore[arg-type]
    first.start()
    bench.hold(first, derived)  # type: ignore[arg-type]
    yield tuning
    bench.close()
    assert not FakeArm.running


@pytest.mark.parametrize("given", [1, 4])
def test_the_run_file_is_compared_where_memory_holds_one_run(given: int, tuning: Tuning) -> None:
    tuning.find(with_values(tuning.config, {"system.threads": given}))
    [found] = tuning.journal.trials
    assert found.outcome.status == "measured" and found.outcome.interval is not None
    assert found.outcome.interval.mean == pytest.approx(math.log(given / 2), abs=0.05)
    assert tuning.given == {"system.threads": given} and tuning.best == {
        "system.threads": min(given, 2)
    }
    result = tuning.conclude()
    assert result.better == (given == 4) and (result.gain is not None) == (given == 4)


def test_what_is_found_stays_where_the_run_file_does_not_run_any_more(tuning: Tuning) -> None:
    tuning.find(with_values(tuning.config, {"system.threads": 4}))
    FakeArm.dead.add(4)
    result = tuning.conclude()
    assert result.better and result.gain is None and result.values == tuning.derived
    FakeArm.dead.add(2)
    tuning.find(with_values(tuning.config, {"system.threads": 1}))
    assert tuning.journal.trials[-1].values == {"system.threads": 4}, (
        "it is no fault of the run file's one thread"
    )


@pytest.fixture
def said(tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said; one candidate is left, and is twice as fast."""
    one = Candidate({"system.threads": 1}, {"system.threads": 1})
    monkeypatch.setattr(Tuning, "candidates", Mock(return_value=[one]))
    lines: list[str] = []
    tuning.say = lines.append
    return lines


@pytest.mark.parametrize(("left", "takes"), [(50.0, 90.0), (-1.0, 0.0)])
def test_no_trial_begins_that_ends_after_the_limit(
    left: float, takes: float, tuning: Tuning, said: list[str]
) -> None:
    tuning.bench.ends = time.monotonic() + left
    tuning.trial_seconds = takes
    tuning.find(None)
    [line] = said
    assert duration(takes) in line
    assert not tuning.journal.trials and tuning.measured == 0 and tuning.best == tuning.derived


@pytest.mark.parametrize("late", [2, 1])
@pytest.mark.usefixtures("said")
def test_a_trial_that_the_limit_cuts_short_is_no_result(
    late: int, tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the best settings' run was late, or the other; and the search ends."""
    tuning.bench.ends = time.monotonic() + 60
    until = tuning.bench.ends
    limits: list[float] = []

    def start(arm: FakeArm) -> None:
        limits.append(arm.ends)
        if arm.threads == late:
            tuning.bench.ends = time.monotonic() - 1
            raise TrialEnded("late", "--minutes are over")

    monkeypatch.setattr(FakeArm, "start", start)
    monkeypatch.setattr(FakeArm, "step", lambda arm, _: float(arm.threads))
    monkeypatch.setattr(Tuning, "expected", Mock(return_value=1.0))
    tuning.find(None)
    [trial] = tuning.journal.trials
    assert trial.outcome.status == "late" and not trial.outcome.final
    assert not trial.outcome.clearly_slower and tuning.best == tuning.derived
    assert limits[-1] == (until if late == 1 else math.inf), "the first run was made before"
    assert tuning.journal.find(trial.best, trial.values) is None


def test_a_process_gets_no_more_time_than_is_left(tmp_path: Path) -> None:
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/data"])
    arm = Arm(config, tmp_path / "run.toml", tmp_path, ends=time.monotonic() - 1)
    with pytest.raises(TrialEnded) as ended:
        arm.start()
    assert ended.value.status == "late"


def test_a_first_step_that_outlasts_the_limit_is_refused_with_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start gets the whole limit, which is said first."""
    limits: list[float] = []

    class Slow(FakeArm):
        def __init__(self, config: Any, *_: Any, ends: float, start_seconds: float) -> None:
            super().__init__(config)
            limits.append(start_seconds)
            assert ends - time.monotonic() <= start_seconds

        def start(self) -> None:
            raise TrialEnded("late", "it took too long")

    monkeypatch.setattr("tunesmith.guide.tune.tuning.Arm", Slow)
    monkeypatch.setattr(
        "tunesmith.guide.tune.tuning.facts_of_run", lambda _: Facts(machine(), MODEL)
    )
    (tmp_path / "run.toml").write_text('[model]\npath = "org/model"\n[data]\ntrain = "org/data"\n')
    lines: list[str] = []
    with (
        pytest.raises(ConfigError, match=r"--minutes 0\.5.*--minutes 5") as refused,
        open_tuning(tmp_path / "run.toml", ["system.threads=2"], 0.5, lines.append),
    ):
        pytest.fail("nothing was measured")
    assert "nothing was measured" in str(refused.value)
    assert limits == [30.0] and "30" in lines[0]


@pytest.mark.parametrize(("starting", "limit"), [(5.0, 900.0), (1200.0, 4800.0)])
def test_trials_may_take_as_long_to_start_as_the_first_run_did(
    starting: float, limit: float, tuning: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model's start takes longer than the usual limit."""
    tuning.bench.close()

    class First(FakeArm):
        metrics: ClassVar[dict[str, Any]] = {}

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.starting = starting

    monkeypatch.setattr("tunesmith.guide.tune.tuning.Arm", First)
    monkeypatch.setattr(
        "tunesmith.guide.tune.tuning.facts_of_run", lambda _: Facts(machine(), MODEL)
    )
    values = ({"system.threads": 2}, {})
    monkeypatch.setattr("tunesmith.guide.tune.tuning.tuned_values", Mock(return_value=values))
    monkeypatch.setattr("tunesmith.guide.tune.tuning.shape_of", Mock(return_value=tuning.shape))
    (tmp_path / "run.toml").write_text('[model]\npath = "org/model"\n[data]\ntrain = "org/data"\n')
    with open_tuning(tmp_path / "run.toml", ["system.threads=2"], 600.0, lambda _: None) as found:
        outcome = found.bench.compare({"system.threads": 2}, {"system.threads": 4})
        other = found.bench._arm({"system.threads": 4})  # pyright: ignore[reportPrivateUsage]
    assert outcome.status == "measured" and other.start_seconds == limit


@pytest.mark.parametrize("pinned", [(), ("system.threads",)])
def test_what_is_best_beside_pinned_settings_is_not_for_runs_without_them(
    pinned: tuple[str, ...], tuning: Tuning
) -> None:
    tuning.pinned = frozenset(pinned)
    tuning.find(None)
    tuning.best = {"system.threads": 1}
    tuning.accepted = [Trial(tuning.derived, tuning.best, tuning.best, TrialOutcome("measured"))]
    written = tuning.conclude().written
    best = remembered(tuning.journal.file).get("best", {"values": {}})["values"]
    assert written == {"system.threads": 1} and best == ({} if pinned else written)


def test_settings_in_an_overriding_table_are_pinned() -> None:
    tables = ["system.sequence_parallel={size=2}", "system.vllm={eager=true}", "train.lr=1e-5"]
    said = ["model.path=org/m", "data.train=org/data", "system.threads=2", *tables]
    assert pinned_settings(load_config(SFTConfig, None, said), tables) == {
        "system.sequence_parallel.size"
    }


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (CapacityError("x"), "memory"),
        (ConfigError("x"), "refused"),
        (RuntimeError("x"), "failed"),
    ],
)
def test_running_out_of_memory_is_told_from_failing(error: Exception, status: str) -> None:
    assert ended_by(error).status == status


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    run = tmp_path / "train.toml"
    report = tmp_path / "train.json"
    check_files(run, report)
    with pytest.raises(ConfigError, match="nowhere"):
        check_files(tmp_path / "nowhere" / "train.toml", tmp_path / "nowhere" / "train.json")
    for text in ("[]", '{"rows": 1}', "not JSON"):
        report.write_text(text)
        with pytest.raises(ConfigError, match=r"train\.json"):
            check_files(run, report)
    report.write_text('{"trials": [], "derived": {}}')
    check_files(run, report)
    run.write_text("[model]")
    with pytest.raises(ConfigError, match=r"train\.toml"):
        check_files(run, report)


def test_trials_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "one.json"
    journal = Journal.open(file, {"machine": "x"}, again=False)
    outcome = TrialOutcome("measured", interval([0.2, 0.21, 0.2, 0.19]))
    journal.add(Trial({"a": 1}, {"a": 2}, {"a": 2}, outcome))
    journal.add(
        Trial({"a": 1}, {"a": 4}, {"a": 4}, TrialOutcome("died", None, "was ended by SIGKILL"))
    )
    found = Journal.open(file, {"machine": "x"}, again=False)
    assert found.find({"a": 1}, {"a": 2}) == outcome
    died = found.find({"a": 1}, {"a": 4})
    assert died is not None and died.status == "died" and died.clearly_slower
    assert found.find({"a": 2}, {"a": 4}) is None
    assert not Journal.open(file, {}, again=True).trials
    file.write_text("{")
    assert not Journal.open(file, {}, again=False).trials, "a damaged file is as none"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (['system.cluster="ray"'], "system.cluster"),
        (['system.engine="sglang"', 'system.engine_urls=["http://127.0.0.1:1"]'], "system.engine"),
        (["--output", "run.toml"], "run.toml"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    said: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        (
            '[model]\npath = "org/model"\n[data]\ntrain = "org/data"\n[reward]\n'
            'functions = ["exact_match"]\n'
        )
    ]
    (tmp_path / "run.toml").write_text("".join(lines))
    done = CliRunner().invoke(app, ["tune", "run.toml", *said])
    assert done.exit_code == 2 and told in done.output


def test_other_commands_and_launchers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[model]\npath = "org/model"\n[data]\ntrain = "org/data"\n')
    done = CliRunner().invoke(app, ["tune", "run.toml", "sampling.n=4"])
    assert done.exit_code == 2 and "tunesmith generate" in done.output
    monkeypatch.setenv("RANK", "0")
    done = CliRunner().invoke(app, ["tune", "run.toml"])
    assert done.exit_code == 2 and "torchrun" in done.output


# What it says


def test_a_trial_is_told_by_its_settings_and_its_gain_or_its_end() -> None:
    times = Interval(-math.log(2), -math.log(2.5), -math.log(1.6), 7)
    move = {"system.threads": 2, "system.kv_memory": None}
    text = trial_text(Trial({}, move, move, TrialOutcome("measured", times)))
    keys, _, gain = text.partition(": ")
    assert re.findall(r"(system\.\w+) = (\w+)", keys) == [
        ("system.threads", "2"),
        ("system.kv_memory", "none"),
    ]
    assert [float(n) for n in re.findall(r"[\d.]+", gain)] == [2.0, 1.6, 2.5, 7]
    refused = trial_text(Trial({}, move, move, TrialOutcome("refused", None, "why\nand more")))
    assert refused == f"{keys}: refused: why"


@pytest.mark.parametrize(
    ("override", "key"),
    [('system.cluster="ray"', "system.cluster"), ('system.engine="sglang"', "system.engine")],
)
def test_what_cannot_be_tuned_names_its_key(override: str, key: str) -> None:
    overrides = ["model.path=org/m", "data.train=org/d", "reward.functions=['math']", override]
    with pytest.raises(ConfigError) as caught:
        check_tunable(load_config(RLConfig, None, overrides, files=False))
    assert [problem.keys for problem in caught.value.problems] == [(key,)]
