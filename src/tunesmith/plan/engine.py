"""Settings of the sampler that contradict each other, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig

SAMPLER_KEYS = (
    "system.engine",
    "system.engine_process",
    "system.engine_python",
    "system.kv_memory",
    "system.max_running",
    "system.max_prefill_tokens",
    "system.speculative",
    "system.speculative_tokens",
    "system.draft_model",
)
"""What only a run that samples reads."""


def engine_problems(config: RunConfig) -> list[str]:
    """What is wrong with the choice of an engine and with its speculation."""
    return [*_check_choice(config), *_check_speculation(config)]


def _check_speculation(config: RunConfig) -> Iterator[str]:
    system = config.system
    if system.speculative == "off" and "system.speculative_tokens" in settings(config, said_only=True):
        yield 'system.speculative_tokens has no effect with system.speculative = "off"; say "ngram" or "draft"'
    if system.speculative == "draft" and system.draft_model is None:
        yield 'system.speculative = "draft" needs system.draft_model; without one say "ngram"'
    if system.speculative != "draft" and system.draft_model is not None:
        yield f'system.draft_model has no effect with system.speculative = "{system.speculative}"; say "draft"'


def _check_choice(config: RunConfig) -> Iterator[str]:
    system = config.system
    if system.engine_python is not None and not system.engine_process:
        yield "system.engine_python has no effect with system.engine_process = false; say true, or leave it out"
    if system.engine == "vllm" and system.engine_python is None and find_spec("vllm") is None:
        yield (
            'system.engine = "vllm": vLLM is not installed in this environment. Install it, or name the interpreter '
            "of one that has it and Tunesmith: system.engine_process = true, system.engine_python = "
            '".venv-vllm/bin/python"'
        )
    apart = system.engine == "vllm" or system.engine_process
    if apart and system.speculative != "off":
        yield f'system.speculative = "{system.speculative}" is of the engine in the trainer\'s process; leave it out'
    if apart and (config.lora.on or config.model.quantize is not None):
        yield (
            "an adapter or quantised weights are sampled only by the engine in the trainer's process: leave out "
            "system.engine and system.engine_process"
        )
    if system.engine == "vllm" and "system.max_prefill_tokens" in settings(config, said_only=True):
        yield 'system.max_prefill_tokens has no effect with system.engine = "vllm", which chooses it; leave it out'
