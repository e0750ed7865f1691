"""What each phase of a step on a CPU has to do, counted, and how long that takes at rates that were measured there.

A phase takes the sum of what it does, each kind of thing times the seconds of one: operations in matrix products,
numbers that elementwise work passes, weights that are read, passes from Python. ``tunesmith check machine`` measures
the rates with small models (``tune/machine.py``), and keeps them per machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any, Literal

from tunesmith.errors import StorageError
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.hardware import Hardware
from tunesmith.storage import measured_file, read_json

Phase = Literal["sync", "prefill", "decode", "scoring", "forward and backward", "optimizer"]
Amounts = Mapping[str, float]
"""How much of each kind of thing a phase does."""
Rates = Mapping[str, Mapping[str, float]]
"""Seconds of one of each kind, by phase."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step in one process: completions of ``new`` tokens each, ``group`` of them to each of ``prompts``."""

    model: ModelFacts
    bytes_per_number: int
    prompts: int
    group: int
    prompt: int
    """Tokens of a prompt."""
    new: int
    micro: int
    """Tokens of a micro-batch at most."""
    share: bool = True
    """Whether a prompt is trained once for its group."""
    running: int = 256
    """Completions that are decoded together at most."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def outputs(self) -> int:
        """Numbers of a token that the products of a layer give."""
        m = self.model
        return 2 * (m.heads + m.kv_heads) * m.head_dim + 2 * m.hidden_size + 3 * m.intermediate_size

    @property
    def layers(self) -> int:
        """Weights of all layers."""
        m = self.model
        each = 2 * (m.heads + m.kv_heads) * m.head_dim + 3 * m.intermediate_size
        return m.layers * m.hidden_size * each

    @property
    def head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size


def amounts(work: Work) -> dict[Phase, Amounts]:
    """What each phase does. Matrix products are counted in multiplications, attention in pairs of query and key."""
    forward = _forward(work)
    return {
        "sync": {"calls": 1},
        "prefill": _prefill(work),
        "decode": _decode(work),
        "scoring": forward,
        "forward and backward": forward,
        "optimizer": {"weights": work.model.parameters or 0, "tensors": 7 * work.model.layers + 2, "calls": 1},
    }


def _forward(work: Work) -> Amounts:
    """Of a pass over all samples, in micro-batches; a backward pass does the same kinds of things."""
    m, learned = work.model, work.samples * work.new
    prompts = work.prompts if work.share else work.samples
    tokens = prompts * work.prompt + learned
    pairs = prompts * work.prompt**2 / 2 + work.samples * work.new * (work.prompt + work.new / 2)
    micro = ceil(tokens / work.micro)
    return {
        "products": tokens * work.layers,
        "head": learned * work.head,
        "numbers": tokens * m.layers * work.outputs,
        "pairs": pairs * m.layers * m.heads,
        "head weights": micro * work.head,
        "sequences": (work.samples + prompts) * m.layers,
        "passes": micro * m.layers,
        "calls": micro,
    }


def _prefill(work: Work) -> Amounts:
    return {
        "products": work.prompts * work.prompt * work.layers,
        "numbers": work.prompts * work.prompt * work.model.layers * work.outputs,
        "weights": work.layers,
        "head weights": work.head,
        "passes": work.model.layers,
        "samples": work.samples,
        "calls": 1,
    }


def _decode(work: Work) -> Amounts:
    m, rows = work.model, min(work.samples, work.running)
    steps = ceil(work.samples / rows) * work.new
    return {
        "steps": steps,
        "passes": steps * m.layers,
        "weights": steps * (work.layers + work.head),
        "products": steps * rows * work.layers,
        "head": steps * rows * work.head,
        "numbers": steps * rows * m.layers * work.outputs,
        "pairs": steps * rows * (work.prompt + work.new / 2) * m.layers * m.heads,
        "words": steps * rows * m.vocab_size,
        "prepared": work.layers + work.head,  # once for new weights
    }


def phase_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of each phase that rates are known for."""
    return {
        phase: sum(rates[phase].get(kind, 0.0) * amount for kind, amount in does.items())
        for phase, does in amounts(work).items()
        if phase in rates
    }


def again_seconds(work: Work, rates: Rates) -> float:
    """Seconds of computing all layers' activations again: a forward pass without the head."""
    does = {kind: amount for kind, amount in _forward(work).items() if not kind.startswith("head")}
    return sum(rates["scoring"].get(kind, 0.0) * amount for kind, amount in does.items())


def rates_file(machine: Hardware) -> tuple[Path, dict[str, Any]]:
    """The file of a machine's rates, and what they depend on."""
    subject = {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "torch": version("torch"),
        "tunesmith": version("tunesmith"),
    }
    return measured_file("machines", subject), subject


def read_rates(machine: Hardware, bytes_per_number: int) -> Rates | None:
    """What was measured for numbers of this size; None if nothing was measured here, or the file is damaged."""
    path = rates_file(machine)[0]
    try:
        found = read_json(path)["rates"][str(bytes_per_number)] if path.exists() else None
        return None if found is None else {p: {k: float(s) for k, s in each.items()} for p, each in found.items()}
    except (StorageError, KeyError, TypeError, ValueError, AttributeError):
        return None
