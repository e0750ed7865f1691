"""This machine's rates: seconds per unit of each kind of work, fitted to timings of small models of
many shapes.

    t(phase, shape) = Σ_kind rate(phase, kind) · amount(phase, kind, shape),    rates ≥ 0

The rates minimize the sum of squared relative errors over all shapes, for each phase and number
format.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import gmtime, strftime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tunesmith.config.values import format_size
from tunesmith.errors import CapacityError
from tunesmith.guide.tune.probes import Probe
from tunesmith.models.openmp import watch_cores
from tunesmith.plan.cost.seconds import phase_seconds
from tunesmith.plan.cost.work import Work, amounts
from tunesmith.plan.facts.hardware import Hardware, memory
from tunesmith.plan.facts.measured import Rates, rates_file, remember
from tunesmith.plan.facts.model import ModelFacts

SHAPES = 40
ROUNDS = 5
LEAST = 2_200_000
MOST = 30_000_000
"""Range of the measured models' parameter counts."""
OPERATIONS = 1.0e9, 4e9
"""Range of parameters times tokens per step."""
BYTES = 18
"""Bytes per parameter while a model trains."""
SWEEPS = 2000


def shapes(seed: int) -> Iterator[Work]:
    """Shapes of models and steps, sampled in a fixed order; every other one in bfloat16."""
    draw = random.Random(seed)
    number = 0
    while True:
        hidden = draw.choice([192, 256, 384, 512, 768])
        dim = draw.choice([32, 64])
        layers = draw.choice([2, 3, 4, 6, 8])
        heads = max(2, hidden // dim)
        wide = draw.choice([2, 3, 4])
        kv = draw.choice([k for k in (1, 2, 4) if heads % k == 0])
        vocabulary = draw.choice([1024, 4096, 8192, 16384, 32000])
        each = hidden * (2 * (heads + kv) * dim + 3 * wide * hidden)
        parameters = layers * each + vocabulary * hidden
        model = ModelFacts(
            parameters, layers, hidden, wide * hidden, heads, kv, dim, vocabulary, 4096, tied=True
        )
        size = 2 + 2 * (number % 2)
        prompts = draw.choice([1, 2, 4, 8])
        group = draw.choice([2, 4, 8])
        prompt = draw.choice([16, 32, 64, 128, 256])
        new = draw.choice([16, 24, 32, 48, 64, 96])
        work = Work(model, size, prompts, group, prompt, new, draw.choice([1024, 2048, 4096]))
        operations = parameters * work.samples * new
        in_range = LEAST < parameters < MOST and OPERATIONS[0] < operations < OPERATIONS[1]
        if in_range and prompts * prompt >= 64:
            number += 1
            yield work


def probes(seed: int, count: int) -> list[Probe]:
    """Probes of ``count`` shapes, drawn with ``seed``.

    Raises:
        CapacityError: memory is too small for their models.
    """
    works = list(islice(shapes(seed), count))
    needed = BYTES * sum(work.model.parameters or 0 for work in works)
    free = memory()[1]
    if needed > free:
        sizes = f"{format_size(needed)} of memory, and {format_size(free)} are free"
        raise CapacityError(f"the {count} measured models need {sizes}; end other programs first")
    return [Probe(work) for work in works]


def take_turns(measured: Sequence[Probe], rounds: int, say: Callable[[str], None]) -> None:
    """Let all take a step per round, in a different order each time, so that a slow minute affects
    all equally."""
    draw = random.Random(0)
    for number in range(1, rounds + 1):
        for probe in draw.sample(measured, len(measured)):
            probe.step()
        say(f"round {number} of {rounds}")


def fit_rates(measured: Sequence[Probe]) -> dict[str, Rates]:
    """Rates by bytes per element."""
    by_size: dict[int, list[Probe]] = {}
    for probe in sorted(measured, key=lambda probe: probe.work.bytes_per_number):
        by_size.setdefault(probe.work.bytes_per_number, []).append(probe)
    return {str(size): _fit(probes) for size, probes in by_size.items()}


def _fit(measured: Sequence[Probe]) -> Rates:
    does = [amounts(probe.work) for probe in measured]
    rates: dict[str, dict[str, float]] = {}
    for phase, first in does[0].items():
        pairs = zip(does, [probe.seconds[phase] for probe in measured], strict=True)
        rows = [[amount[phase][kind] / s for kind in first] for amount, s in pairs]
        rates[phase] = dict(zip(first, nonnegative(np.array(rows)).tolist(), strict=True))
    return rates


def nonnegative(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ``x ≥ 0`` that minimizes ``|rows · x − 1|²``, by coordinate descent."""
    size = np.linalg.norm(rows, axis=0)
    scaled = rows / size
    gram = scaled.T @ scaled
    target = scaled.sum(0)
    x = np.zeros(rows.shape[1])
    for _ in range(SWEEPS):
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + target[i] - gram[i] @ x)
    return x / size


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of one phase of one shape."""

    work: Work
    phase: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def predictions(measured: Sequence[Probe], rates: dict[str, Rates]) -> list[Prediction]:
    """Predictions for every phase of every shape, and for all phases of a step together."""
    made: list[Prediction] = []
    for probe in measured:
        work = probe.work
        seconds = phase_seconds(work, rates[str(work.bytes_per_number)])
        made += [Prediction(work, name, s, probe.seconds[name]) for name, s in seconds.items()]
        made.append(Prediction(work, "step", sum(seconds.values()), sum(probe.seconds.values())))
    return made


def measure_machine(machine: Hardware, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and store this machine's rates; returns them with their median error by phase.

    Raises:
        CapacityError: there is too little memory.
        StorageError: they cannot be stored.
    """
    torch.set_num_threads(machine.cores)
    watch_cores()
    file, subject = rates_file(machine)
    measured = probes(0, SHAPES)
    take_turns(measured, ROUNDS, say)
    rates = fit_rates(measured)
    off: dict[str, list[float]] = {}
    for each in predictions(measured, rates):
        off.setdefault(each.phase, []).append(abs(each.ratio - 1))
    content = {
        **subject,
        "date": strftime("%Y-%m-%d", gmtime()),
        "shapes": SHAPES,
        "rates": rates,
        "median_error": {phase: float(np.median(each)) for phase, each in off.items()},
    }
    remember(file, content)
    return {**content, "file": str(file)}
