"""``tunesmith tune`` against an exhaustive sweep, from bad settings: ``python -m benchmarks.tuning
--help``.

Three small real runs have 72 combinations of settings each. The sweep takes steps with all of them,
and more with the best eight. A time counts relative to a fixed combination timed just before and
after it, so that a slow minute of the machine is not attributed to a setting. The tuner begins with
bad settings, and may change the same keys; all others are pinned, threads to one, since two would
wait for each other while other programs run. Then the tuned settings, the sweep's best and the bad
ones take steps in turn, and the losses of real steps with the bad and the tuned settings are
compared. Each call continues for about ``--seconds`` with the remaining work, and nothing is
measured twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import write_between
from benchmarks.run import machine
from benchmarks.workload import Shape, build_model
from tunesmith.config.load import find_kind, load_config
from tunesmith.config.schema import RLConfig
from tunesmith.guide.tune.setup import trial_config
from tunesmith.guide.tune.tuning import open_tuning
from tunesmith.run.assembly import train
from tunesmith.run.assembly.opening import Caller
from tunesmith.run.loop.callbacks import Callbacks

RESULTS = Path(__file__).with_name("results") / "tuning-cpu-2-core.json"
PAGE = Path(__file__).parent.parent / "docs" / "tune.md"
BEGIN = "<!-- results: tuning-cpu-2-core.json -->\n"
END = "<!-- end of results -->"
MODEL = Shape("T", 4096, 2, 128, 4, 2, 32, 384, "float32")
BEST_AGAIN = 8
TURNS = 5
BESIDE = 4
CKPT, TOKENS, CHUNK, SHARE, RUNNING = (
    *("system.gradient_checkpointing", "system.max_tokens_per_microbatch", "system.logprob_chunk"),
    *("system.share_prompts", "system.max_running"),
)
PINNED: Mapping[str, Any] = {
    "system.threads": 1, "system.trainer_ranks": 1, "system.logprob_chunk": 256, "system.share_prompts": True,
    "system.max_running": 64, "system.max_prefill_tokens": 8192, "system.kv_memory": "64MB",
    "system.engine_process": False, "system.engines": 1,
}  # fmt: skip
SAMPLING = (RUNNING, "system.max_prefill_tokens", "system.kv_memory", "system.engine_process",
            "system.engines")  # fmt: skip
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A run: its settings besides the model, the values of each tuned key, and the bad initial
    ones."""

    said: Values
    grid: Mapping[str, Sequence[Any]]
    bad: Values

    @property
    def pinned(self) -> Values:
        samples = "rollout.group_size" in self.said
        return {
            key: value
            for key, value in PINNED.items()
            if key not in self.grid and (samples or key not in SAMPLING)
        }

    @property
    def fixed(self) -> Values:
        """The point that the sweep's points are compared with: the middle value of each key."""
        return {key: values[len(values) // 2] for key, values in self.grid.items()}

    def points(self) -> list[Values]:
        return [
            dict(zip(self.grid, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]


CASES = {
    "sft": Case(
        {"data.train": "sft.jsonl", "train.batch_size": 16},
        {CKPT: [False, 0.5, True], TOKENS: [128, 256, 512, 2048], CHUNK: [16, 32, 64, 128, 256, 512]},
        {CKPT: True, TOKENS: 128, CHUNK: 16},
    ),
    "dpo": Case(
        {"data.train": "dpo.jsonl", "train.batch_size": 8, "dpo.precompute_reference": False},
        {CKPT: [False, 0.5, True], TOKENS: [256, 512, 1024, 2048], CHUNK: [16, 64, 256], SHARE: [True, False]},
        {CKPT: True, TOKENS: 256, CHUNK: 16, SHARE: False},
    ),
    "rl": Case(
        {
            "data.train": "rl.jsonl", "rollout.prompts_per_step": 4, "rollout.group_size": 8,
            "rollout.max_new_tokens": 32, "reward.functions": ["reward.py:length"],
        },
        {CKPT: [False, True], TOKENS: [256, 1024, 2048], CHUNK: [16, 256], SHARE: [True, False], RUNNING: [4, 16, 64]},
        {CKPT: True, TOKENS: 256, CHUNK: 16, SHARE: False, RUNNING: 4},
    ),
}  # fmt: skip
REWARD = "def length(completions, **columns):\n    return [float(len(text) % 2) for text in completions]\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "tunesmith-tuning"
    )
    parser.add_argument(
        "--seconds", type=float, default=110, help="after which a call begins nothing new"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    ends = time.monotonic() + given.seconds
    os.environ["XDG_CACHE_HOME"] = str(given.folder / "cache")
    make(given.folder)
    for name in given.cases:
        state = State(given.folder / f"{name}.json", name, given.folder)
        for work in (state.sweep, state.sweep_best, state.tune, state.compare, state.learn):
            if not work(ends):
                print(f"{name}: {work.__name__} is not done; call again", flush=True)
                return
    found = {name: _results(given.folder, name) for name in CASES}
    results = {
        "machine": machine(("float32",)),
        "cases": {name: case for name, case in found.items() if case},
    }
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if given.out == RESULTS:
        write_between(PAGE, BEGIN, END, table(results))
    print(table(results))


def make(folder: Path) -> None:
    """Write model, data, reward and run files."""
    if (folder / "rl.toml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    build_model(folder / "model", MODEL)
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(4, MODEL.vocabulary)}" for _ in range(count))

    lines: dict[str, list[dict[str, str]]] = {
        "sft": [
            {"prompt": words(24), "completion": f" {words(draw.randint(40, 72))}"}
            for _ in range(64)
        ],
        "dpo": [
            {"prompt": words(64), "chosen": f" {words(40)}", "rejected": f" {words(40)}"}
            for _ in range(64)
        ],
        "rl": [{"prompt": words(48)} for _ in range(32)],
    }
    (folder / "reward.py").write_text(REWARD)
    for name, case in CASES.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines[name])
        )
        said = {
            "model.path": "model",
            "model.dtype": "float32",
            "data.chat": False,
            "monitor.progress": False,
        }
        (folder / f"{name}.toml").write_text(_toml({**said, **case.said}, name))
        (folder / f"{name}-bad.toml").write_text(_toml({**said, **case.said, **case.bad}, name))


def _toml(values: Values, name: str) -> str:
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, rest = key.partition(".")
        tables.setdefault(section, []).append(f"{rest} = {json.dumps(value)}")
    tables.setdefault("train", []).append(
        "steps = 8" + ("\nlr = 1e-4" if name != "rl" else "\nlr = 1e-5")
    )
    if name == "dpo":
        tables.setdefault("dpo", [])
    return "\n".join(f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items()) + "\n"


class _Enough(Exception):
    pass


@dataclass(slots=True)
class State:
    """The measurements of a case, in a file to which each is added."""

    file: Path
    name: str
    folder: Path

    @property
    def case(self) -> Case:
        return CASES[self.name]

    @property
    def run_file(self) -> Path:
        return self.folder / f"{self.name}.toml"

    def read(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.exists() else {"sweep": {}}

    def keep(self, **more: Any) -> None:
        self.file.write_text(json.dumps(self.read() | more, indent=1))

    def seconds(self, values: Values, steps: int = 3) -> float:
        """The least seconds per token of a few steps after the first."""
        found = [m["busy"] / max(1.0, m["tokens"]) for m in self._steps(values, steps, trial=True)]
        return min(found[1:])

    def _steps(self, values: Values, count: int, *, trial: bool) -> list[dict[str, float]]:
        """The metrics of a run's first steps, in this process."""
        both = {**self.case.pinned, **values}
        said = [f"{key}={json.dumps(value)}" for key, value in both.items() if value is not None]
        kind = find_kind(self.run_file, said)
        config = load_config(kind, self.run_file, said)
        config = trial_config(config) if trial else config
        found: list[dict[str, float]] = []

        def on_step(_: int, metrics: dict[str, Any]) -> None:
            left_out = sum(
                float(metrics.get(f"seconds/{name}", 0.0))
                for name in ("setup", "other", "eval", "checkpoint")
            )
            found.append({**metrics, "busy": metrics["seconds"] - left_out})
            if len(found) == count:
                raise _Enough

        with tempfile.TemporaryDirectory() as scratch:
            config = config.model_copy(update={"run_dir": Path(scratch) / "run"})
            caller = Caller(callbacks=Callbacks(on_step=on_step), config=config)
            with suppress(_Enough), redirect_stdout(StringIO()):
                if issubclass(kind, RLConfig):
                    train.run_rl(self.run_file, kind=kind, caller=caller)
                else:
                    train.run_supervised(kind, self.run_file, caller=caller)
        return found

    def sweep(self, ends: float) -> bool:
        """Measure each point once, in an order drawn once: a few between two measurements of a
        fixed point."""
        points = self.case.points()
        order = random.Random(0).sample(points, len(points))
        while left := [point for point in order if json.dumps(point) not in self.read()["sweep"]]:
            if time.monotonic() > ends:
                return False
            before = self.seconds(self.case.fixed)
            times = {json.dumps(point): self.seconds(point) for point in left[:BESIDE]}
            beside = (before + self.seconds(self.case.fixed)) / 2
            self.keep(
                sweep={
                    **self.read()["sweep"],
                    **{point: [each / beside] for point, each in times.items()},
                }
            )
        return True

    def sweep_best(self, ends: float) -> bool:
        """Measure the best points in turn, with the fixed one."""
        known = self.read()["sweep"]
        best = sorted(known, key=lambda point: known[point][0])[:BEST_AGAIN]
        while (turns := min(len(known[point]) for point in best) - 1) < TURNS:
            if time.monotonic() > ends - 20:
                return False
            fixed = self.seconds(self.case.fixed)
            order = random.Random(turns).sample(best, len(best))
            known |= {
                point: [*known[point], self.seconds(json.loads(point)) / fixed] for point in order
            }
            self.keep(sweep=known)
        return True

    @property
    def best(self) -> Values:
        """The point with the least median among those measured in turn."""
        known = {point: ratios for point, ratios in self.read()["sweep"].items() if len(ratios) > 1}
        return json.loads(min(known, key=lambda point: median(known[point][1:])))

    def tune(self, ends: float) -> bool:
        """Run the tuner repeatedly until a call finds nothing left to try."""
        while not self.read().get("tuned", {}).get("done"):
            if time.monotonic() > ends - 60:
                return False
            said = [f"{key}={json.dumps(value)}" for key, value in self.case.pinned.items()]
            before = self.read().get("tuned", {}).get("trials", 0)
            minutes = min(10.0, (ends - time.monotonic()) / 60)
            with open_tuning(
                self.folder / f"{self.name}-bad.toml",
                said,
                minutes,
                lambda text: print(text, flush=True),
            ) as tuning:
                over = tuning.bench.is_over
                result = tuning.conclude()
            measured = [trial for trial in result.trials if trial.outcome.status != "refused"]
            gain = result.gain.gain if result.gain else None
            self.keep(
                tuned={
                    "values": {key: result.values.get(key) for key in self.case.grid},
                    "trials": len(measured),
                    "calls": self.read().get("tuned", {}).get("calls", 0) + 1,
                    "gain": gain,
                    "done": not over or (len(measured) == before and before > 0),
                }
            )
        return True

    def compare(self, ends: float) -> bool:
        """Measure the tuned settings, the sweep's best and the bad ones, in turn."""
        if "turns" in self.read():
            return True
        if time.monotonic() > ends - 30:
            return False
        arms: dict[str, Values] = {
            "tuned": self.read()["tuned"]["values"],
            "best": self.best,
            "bad": self.case.bad,
        }
        turns = [
            {arm: self.seconds(values, 4) for arm, values in arms.items()} for _ in range(TURNS)
        ]
        self.keep(turns=turns)
        return True

    def learn(self, ends: float) -> bool:
        """Losses of real steps with the bad and the tuned settings; for rollouts, whose losses are
        near 0, rewards."""
        if "losses" in self.read():
            return True
        if time.monotonic() > ends - 15:
            return False
        of = "reward" if self.name == "rl" else "loss"
        losses = {
            arm: [step[of] for step in self._steps(values, 7, trial=False)]
            for arm, values in {
                "bad": self.case.bad,
                "tuned": self.read()["tuned"]["values"],
            }.items()
        }
        self.keep(losses=losses)
        return True


def _results(folder: Path, name: str) -> dict[str, Any]:
    state = State(folder / f"{name}.json", name, folder)
    found = state.read()
    if "losses" not in found:
        return {}
    ratios = {
        arm: median(turn[arm] / turn["tuned"] for turn in found["turns"]) for arm in ("bad", "best")
    }
    pairs = zip(found["losses"]["bad"], found["losses"]["tuned"], strict=True)
    return {
        "points": len(found["sweep"]),
        "trials": found["tuned"]["trials"],
        "calls": found["tuned"]["calls"],
        "bad": dict(state.case.bad),
        "best": dict(state.best),
        "tuned": found["tuned"]["values"],
        "gain_of_the_tuner": found["tuned"]["gain"],
        "times_as_fast_as_bad": ratios["bad"],
        "time_over_that_of_the_best": 1 / ratios["best"],
        "loss_difference": max(abs(a - b) / max(1e-6, abs(a)) for a, b in pairs),
        "losses": found["losses"],
        "turns": found["turns"],
        "sweep": found["sweep"],
    }


def table(results: Mapping[str, Any]) -> str:
    """Markdown."""
    rows = [
        "| run | combinations | trials | times as fast as bad ones | time over the sweep's best | losses differ by |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, each in results["cases"].items():
        rows.append(
            f"| {name} | {each['points']} | {each['trials']} | {each['times_as_fast_as_bad']:.2f} "
            f"| {each['time_over_that_of_the_best']:.2f} | {each['loss_difference']:.1e} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
