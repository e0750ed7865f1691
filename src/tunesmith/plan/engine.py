"""Settings of the sampler that contradict each other or that a server cannot meet."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from tunesmith.config.generation import SamplingConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.system import SystemSection
from tunesmith.config.vllm import VllmSection
from tunesmith.plan.cluster import cluster_problems
from tunesmith.plan.facts import Facts
from tunesmith.plan.memory import longest_sample
from tunesmith.plan.vllm import vllm_problems
from tunesmith.plan.weights import engines_apart, weight_problems
from tunesmith.types import altering

_TRAINER_KEYS = (
    *("device", "device_memory", "threads", "max_tokens_per_microbatch", "share_prompts", "gradient_checkpointing"),
    *("logprob_chunk", "trainer_ranks", "trainer_restarts", "hybrid", "canary", "vllm"),
)
SAMPLER_KEYS = (
    *(f"system.{key}" for key in SystemSection.model_fields if key not in _TRAINER_KEYS),
    *(f"system.vllm.{key}" for key in VllmSection.model_fields),
)
"""Settings that only a run that samples reads. ``hybrid`` and ``canary`` have rules of their own."""

LAUNCH = {
    "sglang": "python -m sglang.launch_server --model-path {path} --port {port} --enable-deterministic-inference",
}
"""The command that starts a server of each engine."""
UNALTERED_ONLY = (
    "SGLang gives log-probabilities of the whole distribution, not of one that is cut, penalises repetitions of what "
    "was written but not of the prompt, and stops at stop strings however early"
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def engine_problems(config: RunConfig) -> Iterator[str]:
    """Problems with the choice of an engine, its weights, speculation, servers and placement."""
    system = config.system
    if system.engine != "vllm" and (system.served or engines_apart(config)) and system.speculative != "off":
        yield f'system.speculative = "{system.speculative}" is for the engine in the trainer\'s process; leave it out'
    if system.speculative == "draft" and system.draft_model is None:
        yield 'system.speculative = "draft" needs system.draft_model; without one use "ngram"'
    for check in (weight_problems, _check_servers, vllm_problems, cluster_problems):
        yield from check(config)


def _check_servers(config: RunConfig) -> Iterator[str]:
    """Problems with servers behind HTTP and with what they are asked for."""
    system = config.system
    if not system.served:
        return
    if not system.engine_urls:
        command = LAUNCH[system.engine].format(path=config.model.path, port=30000)
        yield (
            f'system.engine = "{system.engine}" needs system.engine_urls. Start a server with: {command}, and name it: '
            'system.engine_urls = ["http://127.0.0.1:30000"]'
        )
    if len(set(system.engine_urls)) < len(system.engine_urls):
        yield "system.engine_urls names a server twice; name each server once"
    yield from _check_sglang(config)


def rope_problems(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Refuse sequences that only the local engine computes as the trainer does (``longrope``)."""
    switch, longest = facts.model.switch if facts.model else None, longest_sample(config, facts)
    if switch is None or longest is None or config.system.engine == "local" or longest <= switch:
        return
    if isinstance(config, RLConfig) or (isinstance(config, SamplingConfig) and config.samples):
        section = "rollout" if isinstance(config, RLConfig) else "sampling"
        yield (
            f'system.engine = "{config.system.engine}" does not choose rotary frequencies by the length '
            f"of each sequence, and the model changes them above {switch} tokens (longrope). A prompt and completion "
            f'may take {longest}. Set system.engine = "local", or lower {section}.max_new_tokens'
        )


def _check_sglang(config: RunConfig) -> Iterator[str]:
    system = config.system
    rl = isinstance(config, RLConfig)
    sampling = config.rollout if rl else config.sampling if isinstance(config, SamplingConfig) else None
    for key, value in (altering(sampling) if sampling else {}).items():
        yield (
            f'{"rollout" if rl else "sampling"}.{key} = {value:g} does not go with system.engine = "sglang": '
            f"{UNALTERED_ONLY}; leave it out"
        )
    far = [url for url in system.engine_urls if urlsplit(url).hostname not in _LOOPBACK]
    if far and system.engine_directory is None:
        yield (
            f"weights reach {far[0]} through files: name a directory that this machine and the server's both see under "
            "the same path, system.engine_directory"
        )
    if system.engine_directory is not None and not system.engine_directory.is_dir():
        yield f"system.engine_directory = '{system.engine_directory}' is not a directory"
