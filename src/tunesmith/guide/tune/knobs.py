"""The tuned settings, and the alternative values of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.config.values import megabytes, parse_size

Values = Mapping[str, Any]
"""Values by dotted key."""

TOKENS = "system.max_tokens_per_microbatch"
CHUNK = "system.logprob_chunk"
THREADS = "system.threads"
RUNNING = "system.max_running"
PREFILL = "system.max_prefill_tokens"
KV = "system.kv_memory"
RANKS = "system.trainer_ranks"
ENGINES = "system.engines"
PROCESS = "system.engine_process"
LAYOUT = (
    RANKS, ENGINES, PROCESS, "system.zero_stage", "system.shard_size",
    "system.sequence_parallel.size", "system.hybrid", "system.offload_parameters",
    "system.offload_optimizer", "system.offload_activations", "system.vllm.tensor_parallel_size",
)  # fmt: skip
"""Settings that determine the processes and their contents; tuned together."""
TUNED = (
    "system.gradient_checkpointing", TOKENS, "system.share_prompts", CHUNK, THREADS, RUNNING, KV,
    PREFILL, *LAYOUT,
)  # fmt: skip
"""All tuned settings, usually the most important first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of a run's steps."""

    cores: int
    samples: int
    """Per step."""
    tokens: int
    """Per step."""
    chunk: int
    """Default number of the head's rows that are computed at once."""
    samples_itself: bool
    """Whether the run samples with its own engine."""
    compares: bool
    """Whether several samples share a prompt."""
    gpu: bool


def neighbours(values: Values, shape: Shape) -> Iterator[tuple[str, Any]]:
    """Each setting with each alternative value, except the numbers of processes."""
    ladders = _ladders(values, shape)
    for key in TUNED:
        present = values.get(key) or (shape.chunk if key == CHUNK else values.get(key))
        yield from ((key, value) for value in ladders.get(key, ()) if value != present)


def _ladders(values: Values, shape: Shape) -> dict[str, Sequence[Any]]:
    """The possible values of each setting."""
    ranks = int(values.get(RANKS) or 1)
    threads = max(1, shape.cores // ranks)
    sample = -(-shape.tokens // shape.samples)
    ladders: dict[str, Sequence[Any]] = {
        "system.gradient_checkpointing": (False, "selective", 0.5, True),
        TOKENS: _up_to(-(-shape.tokens // ranks), values[TOKENS], sample),
        CHUNK: _up_to(shape.tokens, values.get(CHUNK) or shape.chunk, 16),
    }
    if shape.compares:
        ladders["system.share_prompts"] = (True, False)
    if shape.gpu:
        for what in ("optimizer", "activations", "parameters"):
            ladders[f"system.offload_{what}"] = (False, True)
    else:
        ladders[THREADS] = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n < threads} | {threads})
    if shape.samples_itself:
        ladders[RUNNING] = _up_to(shape.samples, values[RUNNING], 4)
        ladders[PREFILL] = _up_to(shape.tokens, values[PREFILL], 256)
        held = values.get(KV)
        if held:
            ladders[KV] = [megabytes(parse_size(held) * factor) for factor in (2, 4)]
    return ladders


def _up_to(most: int, value: int, least: int) -> list[int]:
    """A quarter, half, double and quadruple of ``value``; all values above ``most`` are
    equivalent."""
    found = {max(least, int(min(value, most) * factor)) for factor in (1 / 4, 1 / 2, 2, 4)}
    return sorted(n for n in found if n < most or value < most)


def ordered(value: Any) -> float | None:
    """A value's sort key among the values of its setting; None if they have no order."""
    if isinstance(value, str):
        return float(parse_size(value)) if value[:1].isdigit() else None
    return None if value is None else float(value)


def layouts_here(shape: Shape) -> Iterator[Values]:
    """Layouts of processes on a CPU: trainer ranks or, if the run samples, engines in separate
    processes."""
    counts = [n for n in (1, 2, 4, 8, 16) if n <= min(shape.cores, shape.samples)]
    yield from ({RANKS: n} for n in counts)
    if shape.samples_itself:
        yield from ({PROCESS: True, ENGINES: n} for n in counts)
