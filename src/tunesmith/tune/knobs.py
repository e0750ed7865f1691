"""The settings that are tuned, and the values that each may have beside the present one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.config.sizes import megabytes, parse_size

Values = Mapping[str, Any]
"""Values by dotted key."""

TOKENS, CHUNK, THREADS = "system.max_tokens_per_microbatch", "system.logprob_chunk", "system.threads"
RUNNING, PREFILL, KV = "system.max_running", "system.max_prefill_tokens", "system.kv_memory"
RANKS, ENGINES, PROCESS = "system.trainer_ranks", "system.engines", "system.engine_process"
LAYOUT = (
    *(RANKS, ENGINES, PROCESS, "system.zero_stage", "system.shard_size", "system.sequence_parallel.size"),
    *("system.hybrid", "system.offload_parameters", "system.offload_optimizer", "system.offload_activations"),
    "system.vllm.tensor_parallel_size",
)
"""What says which processes there are, and what they hold; tuned together."""
TUNED = (
    *("system.gradient_checkpointing", TOKENS, "system.share_prompts", CHUNK, THREADS),
    *(RUNNING, KV, PREFILL, "system.speculative"),
    *LAYOUT,
)
"""All that is tuned, the settings that usually matter most first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run's steps are like."""

    cores: int
    samples: int
    """Of a step."""
    tokens: int
    """Of a step."""
    chunk: int
    """Rows of the head that are computed at once where no setting says so."""
    samples_itself: bool
    """Whether the run samples with an engine of its own."""
    compares: bool
    """Whether several samples begin with the same prompt."""
    gpu: bool


def neighbours(values: Values, shape: Shape) -> Iterator[tuple[str, Any]]:
    """Each setting with each other value that it may have, without the numbers of processes."""
    ladders = _ladders(values, shape)
    for key in TUNED:
        present = values.get(key) or (shape.chunk if key == CHUNK else values.get(key))
        yield from ((key, value) for value in ladders.get(key, ()) if value != present)


def _ladders(values: Values, shape: Shape) -> dict[str, Sequence[Any]]:
    """The values that each setting may have."""
    ranks = int(values.get(RANKS) or 1)
    threads, sample = max(1, shape.cores // ranks), -(-shape.tokens // shape.samples)
    ladders: dict[str, Sequence[Any]] = {
        "system.gradient_checkpointing": (False, 0.5, True),
        TOKENS: _up_to(-(-shape.tokens // ranks), values[TOKENS], sample),
        CHUNK: _up_to(shape.tokens, values.get(CHUNK) or shape.chunk, 16),
    }
    if shape.compares:
        ladders["system.share_prompts"] = (True, False)
    if shape.gpu:
        ladders |= {f"system.offload_{what}": (False, True) for what in ("optimizer", "activations", "parameters")}
    else:
        ladders[THREADS] = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n < threads} | {threads})
    if shape.samples_itself:
        ladders[RUNNING] = _up_to(shape.samples, values[RUNNING], 4)
        ladders[PREFILL] = _up_to(shape.tokens, values[PREFILL], 256)
        ladders["system.speculative"] = ("off", "ngram")
        if held := values.get(KV):
            ladders[KV] = [megabytes(parse_size(held) * factor) for factor in (2, 4)]
    return ladders


def _up_to(most: int, value: int, least: int) -> list[int]:
    """Fourths, halves, doubles and fourfolds of a number; those above ``most`` are all the same."""
    found = {max(least, int(min(value, most) * factor)) for factor in (1 / 4, 1 / 2, 2, 4)}
    return sorted(n for n in found if n < most or value < most)


def ordered(value: Any) -> float | None:
    """A value's place among others of its setting; None where they have no order."""
    if isinstance(value, str):
        return float(parse_size(value)) if value[:1].isdigit() else None
    return None if value is None else float(value)


def layouts_here(shape: Shape) -> Iterator[Values]:
    """Layouts of processes on a CPU: trainer ranks or, where the run samples, engines in processes of their own."""
    counts = [n for n in (1, 2, 4, 8, 16) if n <= min(shape.cores, shape.samples)]
    yield from ({RANKS: n} for n in counts)
    if shape.samples_itself:
        yield from ({PROCESS: True, ENGINES: n} for n in counts)
