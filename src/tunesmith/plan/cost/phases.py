"""Counts of the work in each phase of a step on a CPU, and its duration at rates measured there.

A phase's duration is a sum over kinds of work of count times seconds per unit: operations in matrix products, elements
of elementwise operations, weights read, passes from Python. ``tunesmith check machine`` measures the rates with small
models (``tune/machine.py``) and keeps them per machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from tunesmith.plan.facts.measured import Rates
from tunesmith.plan.facts.model import ModelFacts

Phase = Literal["sync", "prefill", "decode", "scoring", "forward and backward", "optimizer"]
Amounts = Mapping[str, float]
"""Units of each kind of work in a phase."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step in one process: completions of ``new`` tokens, ``group`` of them for each of ``prompts`` prompts."""

    model: ModelFacts
    bytes_per_number: int
    prompts: int
    group: int
    prompt: int
    """Tokens per prompt."""
    new: int
    micro: int
    """Maximum tokens per micro-batch."""
    share: bool = True
    """Whether a group's prompt is computed only once in training."""
    running: int = 256
    """Maximum number of completions decoded together."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def outputs(self) -> int:
        """Elements per token in the outputs of a layer's products."""
        m = self.model
        return 2 * (m.heads + m.kv_heads) * m.head_dim + 2 * m.hidden_size + 3 * m.intermediate_size

    @property
    def layers(self) -> int:
        """Number of weights in all layers."""
        m = self.model
        each = 2 * (m.heads + m.kv_heads) * m.head_dim + 3 * m.intermediate_size
        return m.layers * m.hidden_size * each

    @property
    def head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size


def amounts(work: Work) -> dict[Phase, Amounts]:
    """The work of each phase; matrix products are counted in multiplications, attention in query-key pairs."""
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
    """The work of a pass over all samples, in micro-batches; a backward pass does the same kinds of work."""
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
    """Seconds of each phase with known rates."""
    return {
        phase: sum(rates[phase].get(kind, 0.0) * amount for kind, amount in does.items())
        for phase, does in amounts(work).items()
        if phase in rates
    }


def again_seconds(work: Work, rates: Rates) -> float:
    """Seconds to recompute all layers' activations: a forward pass without the head."""
    does = {kind: amount for kind, amount in _forward(work).items() if not kind.startswith("head")}
    return sum(rates["scoring"].get(kind, 0.0) * amount for kind, amount in does.items())
