"""The tokens of an engine's largest pass, from which its memory and its passes over prompts
follow."""

from __future__ import annotations

from tunesmith.plan.facts.hardware import Gpu
from tunesmith.plan.plan import AnyPlan

LARGE_GPU = 70 << 30
LARGEST_GPU = 160 << 30
"""Bytes of a GPU from which vLLM takes larger passes; of an A100 only from the second on."""


def vllm_tokens(gpu: Gpu | None, ranks: int = 1, *, on_gpu: bool = True) -> int:
    """vLLM's ``max_num_batched_tokens`` for offline inference (``EngineArgs.get_batch_defaults`` of
    0.32), which only its class ``LLM`` sets; an engine started without it gets 2,048."""
    if not on_gpu:
        return 4096 * ranks
    if gpu is None:
        return 8192
    a100 = "a100" in gpu.name.lower()
    return 16384 if gpu.memory_total >= (LARGEST_GPU if a100 else LARGE_GPU) else 8192


def pass_tokens(plan: AnyPlan) -> int:
    """As set; or vLLM's default, with room for a token of each request that runs and, without
    chunks, for a whole prompt."""
    system = plan.said.system
    devices = plan.devices
    if not devices.engine.spans_devices:
        return system.max_prefill_tokens
    vllm = system.vllm
    if vllm.max_batched_tokens is not None:
        return vllm.max_batched_tokens
    usual = vllm_tokens(plan.engine_gpu, devices.ranks_per_engine, on_gpu=devices.on_gpu)
    context = plan.facts.model.context if plan.facts.model else None
    whole = vllm.max_model_len or context or 0
    running = plan.sampling.running
    return max(running, usual, whole if vllm.chunked_prefill is False else 0)
