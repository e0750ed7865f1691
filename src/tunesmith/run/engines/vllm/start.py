"""Starts vLLM: its arguments, and the checks before it loads weights."""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from pydantic import ValidationError

from tunesmith.config.engines import BLOCK_TOKENS
from tunesmith.errors import EngineError, ModelError, UserError, boundary
from tunesmith.models.kernels.quantised import Quantize
from tunesmith.models.openmp import watch_cores
from tunesmith.models.source import directory_of, readable
from tunesmith.plan.facts.model_files import is_packed
from tunesmith.plan.rules.vllm import extra_problem, version_problem

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer has the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """vLLM's settings; memory is in bytes per rank."""

    model: str
    dtype: str
    max_model_len: int | None = None
    """Most tokens of a prompt plus its completion; None: the model's context, or what the KV memory
    holds."""
    kv_bytes: int | None = None
    memory_share: float | None = None
    """Share of a GPU's memory for weights and KV memory, instead of ``kv_bytes``."""
    max_running: int = 256
    max_batched_tokens: int | None = None
    chunked_prefill: bool | None = None
    prefix_caching: bool = True
    eager: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    cuda_graph_sizes: Sequence[int] | None = None
    quantization: str | None = None
    base: Quantize | None = None
    """The format of the trainer's quantised base, to which weights are rounded as they are read."""
    extra: Mapping[str, Any] | None = None
    """Further arguments of vLLM's ``EngineArgs``, by name."""
    draft_model: str | None = None
    speculative_tokens: int = 4
    trust_remote_code: bool = False
    adapter_rank: int = 0
    """The highest rank of an adapter that it takes instead of whole weights; 0: it takes these."""
    adapter_modules: Sequence[str] = ()
    """The last names of the modules that the adapter changes; empty: of any."""
    records_experts: bool = False
    """Whether completions have the experts that routers chose, which needs a GPU."""
    images: bool = False
    """Whether prompts may have images."""
    sleeps: bool = False
    """Whether it can release its memory between rollouts, which needs a GPU."""


def start(settings: VllmSettings) -> tuple[Any, int]:
    """Start a vLLM ``LLMEngine`` in this process (several ranks get their own); also returns the
    model's context.

    Raises:
        UserError: vLLM is missing, of a version that is not supported, or does not know the model.
        EngineError: it could not start.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    lacking = (
        "vLLM cannot be imported; install it in Tunesmith's environment "
        "(pip install 'tunesmith[vllm]'), or set system.engine=\"local\""
    )
    with boundary(UserError, lacking, ImportError):
        from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if settings.eager and current_platform.is_cpu():
            # Otherwise one comparison in the sampler is compiled, which takes seconds and needs a
            # C++ compiler.
            current_platform.simple_compile_backend = "eager"
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]
        from vllm.version import __version__ as version  # pyright: ignore[reportMissingImports]
    draft = settings.draft_model and str(readable(settings.draft_model))
    settings = replace(settings, model=str(readable(settings.model)), draft_model=draft)
    names = [field.name for field in fields(EngineArgs)]
    problem = version_problem(version) or extra_problem(settings.extra or {}, names, version)
    if problem:
        raise UserError(problem)
    refused = f"vLLM {version} refuses system.vllm.extra"
    own = engine_arguments(settings, on_cpu=current_platform.is_cpu())
    with boundary(UserError, refused, (TypeError, ValueError)) if settings.extra else nullcontext():
        arguments = EngineArgs(**own, **_reading(settings))
    with _random_states():
        # vLLM refuses an unknown architecture here, before it loads any weights.
        try:
            config = arguments.create_engine_config()
        except ValueError as error:
            raise _refusal(error, settings, version) from error
        # before it is shortened to what the KV memory holds
        context: int = config.model_config.max_model_len
        _check_rope(config.model_config.hf_text_config, context)
        with boundary(EngineError, "vLLM could not start", Exception):
            engine = LLMEngine.from_vllm_config(config)
            if settings.pipeline_parallel_size > 1 and current_platform.is_cpu():
                # Allocate the buffers between stages, which the CPU build skips.
                engine.collective_rpc("execute_dummy_batch")
        if current_platform.is_cpu():
            watch_cores()
        return engine, context


def _reading(settings: VllmSettings) -> Mapping[str, object]:
    """Arguments with which vLLM reads weights in MXFP4 as bfloat16, or rounds a base as the trainer
    does; none for other models."""
    if not settings.base and not is_packed(directory_of(settings.model)):
        return {}
    from tunesmith.run.engines.vllm.unpacked import LOADERS, without_method

    return {"load_format": LOADERS[settings.base], "hf_overrides": without_method}


def _refusal(error: ValueError, settings: VllmSettings, version: str) -> UserError:
    """vLLM's refusal of the model, or of a further argument that it names."""
    details = error.errors() if isinstance(error, ValidationError) else []
    text: str = details[0]["msg"] if details else str(error)
    reason = text.removeprefix("Value error, ").partition(" Supported architectures")[0].rstrip(".")
    if settings.extra and any(name in reason for name in settings.extra):
        return UserError(f"vLLM {version} refuses system.vllm.extra: {reason}")
    return ModelError(
        f'vLLM {version} cannot serve {settings.model}: {reason}; set system.engine = "local"',
        keys=("system.engine",),
    )


def _check_rope(config: Any, context: int) -> None:
    """Refuse (UserError) ``longrope`` if vLLM would use the frequencies of long sequences for all
    sequences.

    The trainer chooses them by each sequence's length.
    """
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    long = [kind for kind in kinds if kind.get("rope_type") == "longrope"]
    switches = [kind["original_max_position_embeddings"] for kind in long]
    if switches and context > min(switches):
        raise UserError(
            f"system.vllm.max_model_len: with {context} tokens vLLM would give all sequences the "
            f"rotary frequencies of those of more than {min(switches)} (longrope); set at most "
            f'{min(switches)}, or system.engine = "local"',
            keys=("system.vllm.max_model_len",),
        )


def engine_arguments(settings: VllmSettings, *, on_cpu: bool = False) -> Mapping[str, Any]:
    """The arguments of vLLM's ``EngineArgs``."""
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    optional = {
        "kv_cache_memory_bytes": settings.kv_bytes,
        # With kv_cache_memory_bytes vLLM only checks that this share is free; the trainer may hold
        # the rest.
        "gpu_memory_utilization": settings.memory_share
        or (_LEAST_SHARE if settings.kv_bytes else None),
        "enable_chunked_prefill": settings.chunked_prefill,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "quantization": settings.quantization,
        "speculative_config": settings.draft_model
        and {
            "method": "draft_model",
            "model": settings.draft_model,
            "num_speculative_tokens": settings.speculative_tokens,
        },
        "enable_lora": settings.adapter_rank > 0 or None,
        "max_lora_rank": settings.adapter_rank or None,
        "lora_target_modules": list(settings.adapter_modules) or None,
        "enable_return_routed_experts": settings.records_experts or None,
        "limit_mm_per_prompt": {"video": 0} if settings.images else None,
        # Otherwise it loads the tower, which gets no new weights, and reserves memory for images.
        "language_model_only": None if settings.images else True,
        "cudagraph_capture_sizes": settings.cuda_graph_sizes and list(settings.cuda_graph_sizes),
        # Prefixes are cached in whole blocks: the default of 128 would miss most prompts.
        "block_size": BLOCK_TOKENS if on_cpu else None,
        # In a Ray actor vLLM would ask Ray for further actors for its ranks.
        "distributed_executor_backend": "mp" if ranks > 1 else None,
    }
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len or -1,
        "max_num_seqs": settings.max_running,
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "trust_remote_code": settings.trust_remote_code,
        "enable_sleep_mode": settings.sleeps,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        **{name: value for name, value in optional.items() if value is not None},
        **(settings.extra or {}),
    }


@contextmanager
def _random_states() -> Generator[None]:
    """Restore the random states afterwards: vLLM seeds every generator of the process, which may be
    the trainer's."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    # Reading those of GPUs would initialise CUDA, and vLLM could not fork the processes of ranks.
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with torch.random.fork_rng(range(gpus)):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def kept_settings() -> Generator[None]:
    """Restore what vLLM sets for all of PyTorch when it starts on another thread: on GPUs one
    thread for all work that begins later, and the precision of float32 products; on CPUs that the
    number of threads cannot be set."""
    count = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    set_count = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_count
        torch.set_num_threads(count)
        torch.set_float32_matmul_precision(precision)


def kv_bytes(engine: Any) -> int:
    """KV memory per rank. Several groups of layers share it."""
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    groups = config.kv_cache_groups
    pages = (len(each.layer_names) * each.kv_cache_spec.page_size_bytes for each in groups)
    return config.num_blocks * max(pages)
