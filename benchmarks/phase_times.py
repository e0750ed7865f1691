"""Seconds of each phase of a step: predicted against measured, on shapes that the prediction was
not fitted to.

``python -m benchmarks.phase_times`` fits the rates of this machine to ``tune/machine.py``'s shapes,
alternating with other shapes, so that a slow minute of the machine affects all equally. The least
time of each phase counts. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import write_between
from benchmarks.run import machine
from tunesmith.guide.tune.machine import (
    ROUNDS,
    SHAPES,
    Prediction,
    fit_rates,
    predictions,
    probes,
    take_turns,
)
from tunesmith.plan.facts.hardware import read_hardware

RESULTS = Path(__file__).with_name("results") / "phase-times-cpu-2-core.json"
PAGE = Path(__file__).parent.parent / "docs" / "hardware.md"
BEGIN = "<!-- results: phase-times-cpu-2-core.json -->\n"
END = "<!-- end of results -->"
CLAIM = 0.15


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phase_times", description=__doc__)
    parser.add_argument(
        "--fitted", type=int, default=SHAPES, help="shapes that the rates are fitted to"
    )
    parser.add_argument("--checked", type=int, default=20, help="other shapes")
    parser.add_argument("--seed", type=int, default=1, help="of the other shapes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each shape")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(read_hardware().cores)
    known = probes(0, given.fitted)
    other = probes(given.seed, given.checked)
    take_turns([*known, *other], given.rounds, lambda text: print(text, flush=True))
    found = predictions(other, fit_rates(known))
    shapes = {
        "fitted": given.fitted,
        "checked": given.checked,
        "seed": given.seed,
        "rounds": given.rounds,
    }
    results = {
        "machine": machine(("float32", "bfloat16")),
        **shapes,
        "claim": CLAIM,
        **summary(found),
    }
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if given.out == RESULTS:
        write_between(PAGE, BEGIN, END, table(results))
    print(table(results))


def summary(found: Sequence[Prediction]) -> dict[str, Any]:
    """For each phase, the share of shapes within ``CLAIM``, the median and the largest error; and
    every prediction."""
    off: dict[str, list[float]] = {}
    for each in found:
        off.setdefault(each.phase, []).append(abs(each.ratio - 1))
    phases = {
        phase: {
            "within": sum(e <= CLAIM for e in errors),
            "of": len(errors),
            "median": median(errors),
            "most": max(errors),
        }
        for phase, errors in off.items()
    }
    return {"phases": phases, "predictions": [_row(each) for each in found]}


def _row(each: Prediction) -> dict[str, Any]:
    work = each.work
    model = each.work.model
    return {
        "model": f"{model.layers} x {model.hidden_size}, {model.heads}/{model.kv_heads} heads of {model.head_dim}, "
        f"{model.intermediate_size}, {model.vocab_size} words",
        "step": f"{work.prompts} x {work.group}, {work.prompt} + {work.new} tokens, micro-batches of {work.micro}",
        "dtype": "bfloat16" if work.bytes_per_number == 2 else "float32",
        "phase": each.phase,
        "predicted": each.predicted,
        "measured": each.measured,
        "ratio": each.ratio,
    }


def table(results: dict[str, Any]) -> str:
    rows = [
        "| phase | shapes within 15% | median error | largest |",
        "| --- | ---: | ---: | ---: |",
    ]
    for phase, each in results["phases"].items():
        rows.append(
            f"| {phase} | {each['within']} of {each['of']} | {each['median']:.0%} | {each['most']:.0%} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
