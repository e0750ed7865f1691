"""Problems with engines that are servers, and the settings that only sampling runs read."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from tunesmith.config.schema import RunConfig
from tunesmith.config.system import SystemSection, VllmSection
from tunesmith.types import altering

_TRAINER_KEYS = (
    *("profile", "tuned", "device", "device_memory", "threads", "compile", "kernels", "max_tokens_per_microbatch"),
    *("scoring_max_tokens", "share_prompts", "gradient_checkpointing", "logprob_chunk", "trainer_ranks", "zero_stage"),
    *("shard_size", "sequence_parallel", "trainer_restarts", "offload_activations", "offload_reference"),
    *("offload_optimizer", "offload_parameters", "hybrid", "canary", "vllm"),
)
SAMPLER_KEYS = (
    *(f"system.{key}" for key in SystemSection.model_fields if key not in _TRAINER_KEYS),
    *(f"system.vllm.{key}" for key in VllmSection.model_fields),
)
"""Settings that only sampling runs read; ``hybrid`` and ``canary`` have their own rules."""
LAUNCH = "python -m sglang.launch_server --model-path {path} --port {port} --enable-deterministic-inference"
"""The command that starts an SGLang server."""
UNALTERED_ONLY = (
    "SGLang returns log-probabilities of the whole distribution, not of a truncated one, penalises repetition of the "
    "completion but not of the prompt, and may stop at a stop string before min_new_tokens"
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def server_problems(config: RunConfig) -> Iterator[str]:
    """Problems with HTTP servers and with the sampling settings they would have to support."""
    system, sampling = config.system, config.sampling_settings
    if not system.served:
        return
    if len(set(system.engine_urls)) < len(system.engine_urls):
        yield "system.engine_urls names a server twice; name each server once"
    for key in (
        [f"{sampling.table}.{name} = {value:g}" for name, value in altering(sampling).items()] if sampling else ()
    ):
        yield (f'{key} does not go with system.engine = "sglang": {UNALTERED_ONLY}; leave it out')
    far = [url for url in system.engine_urls if urlsplit(url).hostname not in _LOOPBACK]
    if far and system.engine_directory is None:
        yield (
            f"weights reach {far[0]} through files: set system.engine_directory to a directory that this machine and "
            "the server's see under the same path"
        )
    if system.engine_directory is not None and not system.engine_directory.is_dir():
        yield f"system.engine_directory = '{system.engine_directory}' is not a directory"
