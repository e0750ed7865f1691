"""What a server behind HTTP cannot do as an engine, refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from tunesmith.config.generation import GenerateConfig, SamplingConfig
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig

LAUNCH = {
    "sglang": "python -m sglang.launch_server --model-path {} --port 30000 --enable-deterministic-inference",
    "tgi": "text-generation-launcher --model-id {} --port 30000",
}
LONGEST_OF_TGI = 1024
"""Tokens after which TGI's router tokenises its own text anew."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def http_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the choice of servers, and with what they are asked."""
    system, said = config.system, settings(config, said_only=True)
    if not system.served:
        for key in ("system.engine_urls", "system.engine_directory"):
            if key in said and not (key == "system.engine_directory" and system.weight_plane == "disk"):
                yield f'{key} has no effect with system.engine = "{system.engine}"; say "sglang", or leave it out'
        return
    choice = f'system.engine = "{system.engine}"'
    for key in ("system.engine_process", "system.kv_memory", "system.max_prefill_tokens"):
        if key in said:
            yield f"{key} has no effect with {choice}, a server that was started on its own; leave it out"
    if not system.engine_urls:
        yield (
            f"{choice} needs system.engine_urls. Start a server with: {LAUNCH[system.engine].format(config.model.path)}"
            ', and name it: system.engine_urls = ["http://127.0.0.1:30000"]'
        )
    if len(set(system.engine_urls)) < len(system.engine_urls):
        yield "system.engine_urls names a server twice; name each one once"
    yield from _check_tgi(config) if system.engine == "tgi" else _check_sglang(config)


def _check_sglang(config: RunConfig) -> Iterator[str]:
    system = config.system
    for key, value, off in _cuts(config):
        if value != off:
            yield (
                f'{key} = {value:g} does not go with system.engine = "sglang", which gives log-probabilities of the '
                "whole distribution, not of the cut one; leave it out"
            )
    far = [url for url in system.engine_urls if urlsplit(url).hostname not in _LOOPBACK]
    if far and system.engine_directory is None:
        yield (
            f"weights reach {far[0]} through files: name a directory that this machine and the server's both see under "
            "the same path, system.engine_directory"
        )
    if system.engine_directory is not None and not system.engine_directory.is_dir():
        yield f"system.engine_directory = '{system.engine_directory}' is no directory"


def _check_tgi(config: RunConfig) -> Iterator[str]:
    if not isinstance(config, GenerateConfig):
        yield (
            'system.engine = "tgi" serves tunesmith generate only: TGI cannot take new weights. Say "sglang" or "vllm"'
            ", or leave it out"
        )
        return
    if config.system.engine_directory is not None:
        yield 'system.engine_directory has no effect with system.engine = "tgi", which takes no weights; leave it out'
    if config.sampling.min_p > 0:
        yield f'sampling.min_p = {config.sampling.min_p:g}: system.engine = "tgi" knows no min_p; leave it out'
    if config.sampling.max_new_tokens > LONGEST_OF_TGI:
        yield (
            f'sampling.max_new_tokens = {config.sampling.max_new_tokens}: system.engine = "tgi" tokenises its own text '
            f"anew after {LONGEST_OF_TGI} tokens, which may change them; ask for at most as many"
        )


def _cuts(config: RunConfig) -> Iterator[tuple[str, float, float]]:
    """Settings that cut the distribution: key, value, and the value that does not."""
    if isinstance(config, RLConfig):
        name, section = "rollout", config.rollout
    elif isinstance(config, SamplingConfig):
        name, section = "sampling", config.sampling
    else:
        return
    yield f"{name}.top_p", section.top_p, 1.0
    yield f"{name}.top_k", section.top_k, 0
    yield f"{name}.min_p", section.min_p, 0.0
