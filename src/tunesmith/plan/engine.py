"""Settings of the sampler that contradict each other, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RunConfig
from tunesmith.plan.cluster import CLUSTER_KEYS, cluster_problems
from tunesmith.plan.http_engine import http_problems
from tunesmith.plan.vllm import VLLM_KEYS, vllm_problems
from tunesmith.plan.weights import engines_apart, weight_problems

SAMPLER_KEYS = (
    "system.engine",
    "system.engine_urls",
    "system.engine_directory",
    "system.engine_process",
    "system.engine_python",
    "system.engines",
    "system.engine_restarts",
    "system.weight_plane",
    "system.adapter_sync",
    "system.cluster",
    *(f"system.{key}" for key in CLUSTER_KEYS),
    "system.kv_memory",
    "system.max_running",
    "system.max_prefill_tokens",
    "system.speculative",
    "system.speculative_tokens",
    "system.draft_model",
    *VLLM_KEYS,
)
"""What only a run that samples reads."""


def engine_problems(config: RunConfig) -> list[str]:
    """What is wrong with the choice of an engine and with its speculation."""
    return [
        *_check_choice(config),
        *weight_problems(config),
        *_check_speculation(config),
        *http_problems(config),
        *vllm_problems(config),
        *cluster_problems(config),
    ]


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
    said = settings(config, said_only=True)
    for key in ("system.engine_python", "system.engines", "system.engine_restarts"):
        if key in said and not engines_apart(config):
            yield f"{key} has no effect with system.engine_process = false; say true, or leave it out"
    apart = system.served or engines_apart(config)
    if system.engine != "vllm" and apart and system.speculative != "off":
        yield f'system.speculative = "{system.speculative}" is of the engine in the trainer\'s process; leave it out'
