"""``[system.vllm]``: settings that only ``system.engine = "vllm"`` has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from tunesmith.config.section import Section, derived
from tunesmith.config.values import PositiveInt


class VllmSection(Section):
    tensor_parallel_size: PositiveInt = 1
    """Devices that each layer of one engine is split over."""
    pipeline_parallel_size: PositiveInt = 1
    """Groups of devices that the layers of one engine are dealt out to, one after the other."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each GPU's memory for weights and KV memory together, in the place of ``system.kv_memory``."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and completion together; None: the model's context, or what the KV memory holds."""
    max_batched_tokens: PositiveInt | None = None
    """Tokens of one forward, prompts' and new ones; None: vLLM's choice for the device."""
    chunked_prefill: bool | None = None
    """Compute long prompts in pieces beside the decoding; None: where vLLM can with this model."""
    prefix_caching: bool = derived()
    """Keep what was computed of prompts for others that begin in the same way."""
    eager: bool = derived()
    """Run the model as it is written, without compiling it and without CUDA graphs."""
    cuda_graph_sizes: tuple[PositiveInt, ...] | None = None
    """Numbers of tokens in a step for which CUDA graphs are captured; None: vLLM's choice, up to ``max_running``."""
    quantization: str | None = None
    """Round the weights at each sync: ``fp8_per_tensor``, ``fp8_per_channel`` or ``fp8_per_block``."""
    extra: Annotated[dict[str, Any] | None, Field(description="a table of vLLM's own engine arguments")] = None
    """Further arguments of vLLM's ``EngineArgs`` under its own names, such as ``{max_logprobs = 5}``."""
