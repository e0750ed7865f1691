"""Speculative decoding in the embedded engine: where it pays, by concurrent completions and right
guesses.

``python -m benchmarks.speculation`` decodes the same completions without guesses and with four
guesses per step, in turn, in one process. Models have random weights, so guesses are made from the
tokens that the run without guesses
sampled: each is that token with probability ``right``, else another one. The n-gram look-up runs as
well, for its time; its guesses are replaced. A user's own share of right guesses is the metric
``draft_acceptance``. A ratio is the time without guesses over the time with them: above 1 guessing
pays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import write_between
from benchmarks.run import machine
from benchmarks.workload import FIRST_WORD, QWEN3, SMALL, S, Shape, build_model
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.requests import LocalRequest
from tunesmith.run.engines.local.speculation import NgramDrafter, Speculation
from tunesmith.types import Sampling

RESULTS = Path(__file__).with_name("results") / "speculation-cpu.json"
PAGE = Path(__file__).parent.parent / "docs" / "tuning-guides.md"
BEGIN = "<!-- results: speculation-cpu.json -->\n"
END = "<!-- end of results -->"
MODELS: dict[str, Shape] = {"S, 5.8M": S, "0.1B": SMALL, "0.6B": QWEN3}
ROWS = (1, 4, 16)
RIGHT = (0.5, 0.7, 0.9)
PROMPT = 128
NEW = 48
GUESSES = 4


class Recorded(NgramDrafter):
    """Guesses what another run sampled, wrong with a chosen probability."""

    def __init__(self, right: float, sampled: Sequence[Sequence[int]], vocabulary: int) -> None:
        self._right = right
        self._sampled = sampled
        self._vocabulary = vocabulary
        self._rng = random.Random(0)

    def propose(self, running: Sequence[LocalRequest], most: Sequence[int]) -> list[list[int]]:
        super().propose(running, most)
        guesses: list[list[int]] = []
        for request, count in zip(running, most, strict=True):
            seed = request.sampling.seed
            start = len(request.token_ids)
            assert seed is not None
            guesses.append(
                [self._guess(token) for token in self._sampled[seed][start : start + max(0, count)]]
            )
        return guesses

    def _guess(self, token: int) -> int:
        return token if self._rng.random() < self._right else (token + 1) % self._vocabulary


def measured(name: str, dtype: str, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """The ratio for each number of completions at once and each share of right guesses."""
    shape = MODELS[name]
    path = folder / MODELS[name].name
    build_model(path, shape)
    return asyncio.run(
        _measured(name, CausalLM.load(path, dtype=getattr(torch, dtype)), shape.vocabulary, rounds)
    )


async def _measured(
    name: str, model: CausalLM, vocabulary: int, rounds: int
) -> list[dict[str, Any]]:
    sizes: dict[str, Any] = {
        "kv_bytes": 2**30,
        "max_running": max(ROWS),
        "max_prefill_tokens": 2048,
    }
    plain = LocalEngine(model, **sizes)
    guessing = LocalEngine(model, **sizes, speculation=Speculation(GUESSES))
    rows = list[dict[str, Any]]()
    for count in ROWS:
        sampled, _ = await _decode(plain, vocabulary, count)
        for right in RIGHT:
            ratios = list[float]()
            before = guessing.stats()
            for _ in range(rounds):
                guessing._drafter = Recorded(right, sampled, vocabulary)  # pyright: ignore[reportPrivateUsage]
                _, without = await _decode(plain, vocabulary, count)
                _, taken = await _decode(guessing, vocabulary, count)
                ratios.append(without / taken)
            counted = guessing.stats().since(before)
            kept = counted.accepted_tokens / counted.drafted_tokens
            rows.append(
                {
                    "model": name,
                    "rows": count,
                    "right": right,
                    "kept": kept,
                    "ratio": median(ratios),
                }
            )
            print(rows[-1], flush=True)
    await plain.close()
    await guessing.close()
    return rows


async def _decode(
    engine: LocalEngine, vocabulary: int, count: int
) -> tuple[list[list[int]], float]:
    """Completions of one prompt, and seconds."""
    rng = random.Random(1)
    prompt = [rng.randrange(FIRST_WORD, vocabulary) for _ in range(PROMPT)]
    await engine.load_weights(0)
    started = time.perf_counter()
    found = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(NEW, temperature=0.0, ignore_eos=True, seed=i))
            for i in range(count)
        )
    )
    return [list(each.token_ids) for each in found], time.perf_counter() - started


def table(results: dict[str, Any]) -> str:
    heads = " | ".join(f"{right:.0%} right" for right in RIGHT)
    lines = [
        f"| model | completions at once | {heads} |",
        "| --- | ---: |" + " ---: |" * len(RIGHT),
    ]
    ratios = {(row["model"], row["rows"], row["right"]): row["ratio"] for row in results["rows"]}
    for name, count in dict.fromkeys((model, rows) for model, rows, _ in ratios):
        lines.append(
            f"| {name} | {count} | "
            + " | ".join(f"{ratios[name, count, right]:.2f}" for right in RIGHT)
            + " |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for name in given.models
            for row in measured(name, given.dtype, given.rounds, Path(folder))
        ]
    sizes = {
        "prompt": PROMPT,
        "new": NEW,
        "guesses": GUESSES,
        "rounds": given.rounds,
        "dtype": given.dtype,
    }
    results = {"machine": machine((given.dtype,)), **sizes, "rows": rows}
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if given.out == RESULTS:
        write_between(PAGE, BEGIN, END, table(results))
    print(table(results))


if __name__ == "__main__":
    main()
