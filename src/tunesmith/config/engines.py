"""What each value of ``system.engine`` is: the properties that planning, refusing and deriving
settings depend on.

Apart from the composition root and what is about one engine only, code and rules ask for these
properties and not for an engine's name; in rules they are ``engine.served``, ``engine.third_party``
and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EngineName = Literal["local", "vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class EngineKind:
    title: str
    """Its name in messages."""
    served: bool = False
    """Servers that were started separately: the run allocates no memory for them, and sends them
    files of weights."""
    third_party: bool = False
    """It does not compute with the trainer's model: it always has its own copy of the weights,
    takes them whole and under the names of the model's files (no adapters, no quantised base), and
    uses the same rotary frequencies for all lengths. It also has its own formats of weights and of
    keys and values."""
    spans_devices: bool = False
    """One engine may be several ranks, each with a device of its own (``system.vllm`` has their
    numbers)."""
    speculates_elsewhere: bool = False
    """It also decodes speculatively outside the trainer's process."""
    least_temperature: float = 0.0
    """It raises lower positive temperatures to this, and the log-probabilities would then not
    match."""
    unaltered_only: str = ""
    """Why sampling must not be altered (``top_p``, ``min_new_tokens``, ...); empty if it may be."""
    launch: str = ""
    """The command that starts a server of ``{path}`` on ``{port}``."""


BLOCK_TOKENS = 32
"""Tokens per block of keys and values: of the local engine, and of vLLM on a CPU. Those of other
engines are smaller."""
FASTEST_ENGINE: EngineName = "vllm"
"""What samples fastest on GPUs, where it is installed."""

ENGINES: Mapping[EngineName, EngineKind] = {
    "local": EngineKind("Tunesmith's engine"),
    "vllm": EngineKind(
        "vLLM",
        third_party=True,
        spans_devices=True,
        speculates_elsewhere=True,
        least_temperature=0.01,
    ),
    "sglang": EngineKind(
        "SGLang",
        served=True,
        third_party=True,
        unaltered_only=(
            "SGLang returns log-probabilities of the whole distribution, not of a truncated one, penalises repetition "
            "of the completion but not of the prompt, and may stop at a stop string before min_new_tokens"
        ),
        launch="python -m sglang.launch_server --model-path {path} --port {port} --enable-deterministic-inference",
    ),
}
