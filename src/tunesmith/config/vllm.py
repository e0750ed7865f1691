"""``[system.vllm]``: settings of ``system.engine = "vllm"``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from tunesmith.config.section import Section, derived
from tunesmith.config.values import PositiveInt


class VllmSection(Section):
    tensor_parallel_size: PositiveInt = derived()
    """Devices that each layer of one engine is split over."""
    pipeline_parallel_size: PositiveInt = 1
    """Groups of devices among which the layers of one engine are divided."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each GPU's memory for weights and KV memory together, instead of ``system.kv_memory``."""
    max_model_len: PositiveInt | None = None
    """Longest prompt with completion; None: the model's context, or what the KV memory holds."""
    max_batched_tokens: PositiveInt | None = None
    """Most tokens of one forward pass, of prompts and new ones; None: vLLM's choice for the device."""
    chunked_prefill: bool | None = None
    """Compute long prompts in pieces while others decode; None: where vLLM can with this model."""
    prefix_caching: bool = derived()
    """Keep what was computed of prompts for other prompts with the same beginning."""
    eager: bool = derived()
    """Run the model without compiling it and without CUDA graphs."""
    cuda_graph_sizes: tuple[PositiveInt, ...] | None = None
    """Token counts of a step for which CUDA graphs are captured; None: vLLM's choice, up to ``max_running``."""
    quantization: str | None = None
    """Round the weights at each sync: ``fp8_per_tensor``, ``fp8_per_channel`` or ``fp8_per_block``."""
    extra: Annotated[dict[str, Any] | None, Field(description="a table of vLLM's own engine arguments")] = None
    """Further arguments of vLLM's ``EngineArgs`` under its own names, such as ``{max_logprobs = 5}``."""
