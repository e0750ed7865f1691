"""What balancing the costs of micro-batches saves, in the cost model's operations: no clock, the
same on each machine.

``python -m benchmarks.packing`` packs samples for several ranks, with the moves and swaps of
``data/packing.py`` and without them. Ranks stay in step: each round of micro-batches takes as long
as its costliest one.
"""

from __future__ import annotations

import math
import random
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.workload import QWEN3
from tunesmith.costs import CostModel
from tunesmith.learn.data import packing
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest
from tunesmith.models.forest import forest_cost
from tunesmith.types import Sample

CAP = 4096
BATCHES = 5
COST = CostModel.of_decoder(
    parameters=440_000_000, layers=QWEN3.layers, heads=QWEN3.heads, head_dim=QWEN3.head_dim,
    vocabulary=QWEN3.vocabulary, hidden=QWEN3.hidden,
)  # fmt: skip


def mixes(rng: random.Random) -> dict[str, Batch]:
    """Batches of 128 completions with lognormal lengths, with the prompts that different users
    have."""

    def tokens(median: int, most: int) -> list[int]:
        count = min(most, max(8, round(math.exp(rng.gauss(math.log(median), 0.8)))))
        return [rng.randrange(100_000) for _ in range(count)]

    def batch(prompts: list[list[int]], each: int) -> Batch:
        groups = [
            (group, prompt, tokens(128, 1024))
            for group, prompt in enumerate(prompts)
            for _ in range(each)
        ]
        return Batch.of(
            [
                Sample([*p, *c], [False] * len(p) + [True] * len(c), group, i)
                for i, (group, p, c) in enumerate(groups)
            ]
        )

    systems = [tokens(1500, 2000) for _ in range(5)]
    return {
        "one completion per prompt": batch([tokens(128, 1024) for _ in range(128)], 1),
        "pairs of answers": batch([tokens(128, 1024) for _ in range(64)], 2),
        "groups of 8": batch([tokens(128, 1024) for _ in range(16)], 8),
        "one of five long system prompts": batch(
            [[*rng.choice(systems), *tokens(64, 256)] for _ in range(128)], 1
        ),
    }


def lock_step_cost(batch: Batch, ranks: int) -> float:
    """Operations of an optimizer batch, counting each round of micro-batches as its costliest."""
    bins = packing.pack(batch, CAP, cost=COST, multiple_of=ranks)
    costs = [forest_cost(build_forest(batch, samples), COST) for samples in bins]
    return sum(max(costs[first : first + ranks]) for first in range(0, len(costs), ranks))


def saved(ranks: int) -> dict[str, float]:
    """For each mix, the share of the operations that balancing saves; the mean of some batches."""
    shares: dict[str, list[float]] = {}
    for seed in range(BATCHES):
        for name, batch in mixes(random.Random(seed)).items():
            balanced = lock_step_cost(batch, ranks)
            with mock.patch.object(packing, "_equalise"):
                shares.setdefault(name, []).append(1 - balanced / lock_step_cost(batch, ranks))
    return {name: sum(found) / len(found) for name, found in shares.items()}


def main() -> None:
    columns = {ranks: saved(ranks) for ranks in (1, 2, 4, 8)}
    table = Table(
        "samples", *(f"{ranks} {'rank' if ranks == 1 else 'ranks'}" for ranks in columns), box=None
    )
    for name in columns[1]:
        table.add_row(name, *(f"{found[name]:.1%}" for found in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
