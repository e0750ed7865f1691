"""Settings of the sampler that contradict each other, that a server cannot do, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from tunesmith.config.generation import SamplingConfig
from tunesmith.config.resolved import unread
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.system import SystemSection
from tunesmith.plan.cluster import cluster_problems
from tunesmith.plan.facts import Facts
from tunesmith.plan.memory import longest_sample
from tunesmith.plan.vllm import VLLM_KEYS, vllm_problems
from tunesmith.plan.weights import engines_apart, weight_problems
from tunesmith.types import altering

TRAINER_KEYS = (
    *(
        "device",
        "device_memory",
        "threads",
        "max_tokens_per_microbatch",
        "share_prompts",
        "gradient_checkpointing",
        "logprob_chunk",
    ),
    *("hybrid", "canary"),  # which have checks of their own
)
SAMPLER_KEYS = (
    *(f"system.{key}" for key in SystemSection.model_fields if key not in (*TRAINER_KEYS, "vllm")),
    *VLLM_KEYS,
)
"""What only a run that samples reads."""

LAUNCH = {
    "sglang": "python -m sglang.launch_server --model-path {path} --port {port} --enable-deterministic-inference",
}
"""The command that starts such a server."""
UNALTERED_ONLY = (
    "SGLang gives log-probabilities of the whole distribution, not of one that is cut, penalises repetitions of what "
    "was written but not of the prompt, and stops at stop strings however early"
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def engine_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the choice of an engine and with its speculation."""
    for check in (_check_choice, weight_problems, _check_speculation, _check_servers, vllm_problems, cluster_problems):
        yield from check(config)


def _check_speculation(config: RunConfig) -> Iterator[str]:
    system = config.system
    if system.speculative == "off":
        why = 'with system.speculative = "off"; say "ngram" or "draft"'
        yield from unread(config, ["system.speculative_tokens"], why)
    if system.speculative == "draft" and system.draft_model is None:
        yield 'system.speculative = "draft" needs system.draft_model; without one say "ngram"'
    if system.speculative != "draft" and system.draft_model is not None:
        yield f'system.draft_model has no effect with system.speculative = "{system.speculative}"; say "draft"'


def _check_choice(config: RunConfig) -> Iterator[str]:
    system, apart = config.system, config.system.served or engines_apart(config)
    if not engines_apart(config):
        keys = ["system.engine_python", "system.engines", *([] if system.served else ["system.engine_restarts"])]
        yield from unread(config, keys, "with system.engine_process = false; say true, or leave it out")
    if system.engine != "vllm" and apart and system.speculative != "off":
        yield f'system.speculative = "{system.speculative}" is of the engine in the trainer\'s process; leave it out'


def _check_servers(config: RunConfig) -> Iterator[str]:
    """What is wrong with the choice of servers behind HTTP, and with what they are asked."""
    system = config.system
    choice = f'system.engine = "{system.engine}"'
    if not system.served:
        keys = ["system.engine_urls", *(["system.engine_directory"] if system.weight_plane != "disk" else [])]
        yield from unread(config, keys, f'with {choice}; say "sglang", or leave it out')
        return
    keys = ("system.engine_process", "system.kv_memory", "system.max_prefill_tokens")
    yield from unread(config, keys, f"with {choice}, a server that was started on its own; leave it out")
    if not system.engine_urls:
        command = LAUNCH[system.engine].format(path=config.model.path, port=30000)
        yield (
            f"{choice} needs system.engine_urls. Start a server with: {command}, and name it: "
            'system.engine_urls = ["http://127.0.0.1:30000"]'
        )
    if len(set(system.engine_urls)) < len(system.engine_urls):
        yield "system.engine_urls names a server twice; name each one once"
    yield from _check_sglang(config)


def rope_problems(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Sequences that only the embedded engine computes as the trainer does (``longrope``)."""
    switch, longest = facts.model.switch if facts.model else None, longest_sample(config, facts)
    if switch is None or longest is None or config.system.engine == "local" or longest <= switch:
        return
    if isinstance(config, RLConfig) or (isinstance(config, SamplingConfig) and config.samples):
        section = "rollout" if isinstance(config, RLConfig) else "sampling"
        yield (
            f'system.engine = "{config.system.engine}" does not choose the rotary frequencies of a sequence by its own '
            f"length, and the model has others for more than {switch} tokens (longrope): one prompt and completion may "
            f'take {longest}. Say system.engine = "local", or lower {section}.max_new_tokens and data.max_prompt_tokens'
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
        yield f"system.engine_directory = '{system.engine_directory}' is no directory"
