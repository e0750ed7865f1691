"""``[system]``: how fast a run is. Nothing here changes what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tunesmith.config.placement import PlacementSection
from tunesmith.config.section import Section, derived
from tunesmith.config.values import Count, Part, PositiveInt, Size, Text, Url


class SequenceParallelSection(Section):
    """``[system.sequence_parallel]``: groups of trainer ranks that share the tokens of each micro-batch."""

    type: Literal["ulysses", "ring"] = "ulysses"
    """How attention spans the ranks of a group: each computes some heads for all tokens (``ulysses``), or keys and
    values travel around them (``ring``)."""
    size: PositiveInt = 1
    """Ranks that compute a micro-batch together, so that longer sequences fit."""


class VllmSection(Section):
    """``[system.vllm]``: settings of ``engine = "vllm"``."""

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


class SystemSection(Section):
    profile: Literal["stable", "fast", "throughput", "memory"] | None = None
    """Sets several keys of this table that are left out; None: each is derived."""
    tuned: bool = False
    """Set what ``tunesmith tune`` found fastest for such a run on this machine, where keys are left out."""
    device: Text = derived()
    device_memory: Size | None = None
    """How much of the device's memory the run may use, such as ``20GB``; None: what is free when it starts."""
    threads: PositiveInt = derived()
    compile: bool | Literal["default", "max-autotune"] = derived()
    """True: compile on a CPU what decoding computes (``engines.local``), and training in bfloat16 with AMX
    or AVX-512 BF16 (``native``). A mode of ``torch.compile``: the same for decoding, and PyTorch compiles the decoder
    layers of the policy, its critic and its reference for training; ``max-autotune`` also times kernels, without CUDA
    graphs."""
    kernels: Literal["torch", "liger"] = "torch"
    """What computes norms, rotations and SwiGLU of decoder layers in training and scoring: PyTorch's operations, or
    Liger's Triton kernels on GPUs (``models.liger``)."""
    max_tokens_per_microbatch: PositiveInt = derived()
    """Of one rank, or of the ranks of ``sequence_parallel`` together."""
    scoring_max_tokens: PositiveInt = derived()
    """The same of a pass without gradients: by policy, reference or critic."""
    critic_max_tokens: PositiveInt = derived()
    """``max_tokens_per_microbatch`` of a critic with its own model."""
    reward_max_tokens: PositiveInt = derived()
    """Of a pass of reward models."""
    share_prompts: bool = True
    gradient_checkpointing: bool | Part = derived()
    """Whether activations are computed again in the backward pass, or of which share of the layers."""
    offload_activations: bool = derived()
    """Keep in host memory what the backward pass needs of the forward pass."""
    offload_optimizer: bool = derived()
    """Keep master weights, their gradients and the optimizer's moments in host memory, and step on the CPU."""
    offload_parameters: bool = derived()
    """Keep the weights of the layers in host memory, and bring each layer's to the GPU while it computes."""
    offload_reference: bool = derived()
    """Keep frozen models (a reference, a teacher, reward models) in host memory while they do not score."""
    logprob_chunk: PositiveInt | None = None
    """Rows of the head that are computed at once."""
    engine: Literal["local", "vllm", "sglang"] = "local"
    """What samples: Tunesmith's own engine, vLLM, or servers that are already running (SGLang)."""
    engine_urls: tuple[Url, ...] = ()
    """The servers of ``engine = "sglang"``, such as ``["http://127.0.0.1:30000"]``."""
    engine_directory: Path | None = None
    """Shared directory in which engines on other machines find new weights (SGLang, ``weight_plane = "disk"``)."""
    engine_process: bool = False
    """Sample in a separate process with its own copy of the weights; a process that dies is replaced."""
    engine_python: Path | None = None
    """Python interpreter of ``engine_process``, if the engine is installed in another environment."""
    engines: PositiveInt = derived()
    """Number of engine processes, each with ``kv_memory`` and a copy of the weights."""
    engine_restarts: Count = 3
    """How often each engine process may be replaced after it dies."""
    weight_plane: Literal["memory", "disk", "gloo", "nccl", "ipc"] | None = None
    """How new weights reach engine processes: a file in memory or in ``engine_directory``, a broadcast, CUDA IPC."""
    weight_copy: Literal["gpu", "host"] | None = None
    """Where the trainer keeps the copy of its weights that ``weight_plane = "nccl"`` sends."""
    adapter_sync: Literal["adapter", "merged"] | None = None
    """How an adapter reaches engine processes: alone, for the same base, or merged into whole weights."""
    hybrid: bool = derived()
    """Engine and trainer take turns on a device: the engine frees its memory while the policy trains, and what only an
    optimizer step needs is in host memory while the engine samples. None: where they share a GPU."""
    canary: bool = True
    """After each sync, compare a few tokens' log-probabilities of every engine that has its own weights with the
    trainer's."""
    cluster: Literal["none", "ray"] = "none"
    """``ray``: trainer, engines, reference, critic and reward models are actors on a Ray cluster."""
    ray_address: Text | None = None
    """``host:port`` of a running cluster; None: RAY_ADDRESS, or a new cluster on this machine."""
    ray_runtime_env: Annotated[dict[str, Any] | None, Field(description="a table, as Ray has it")] = None
    """Ray's runtime environment of the actors, such as ``{env_vars = {NCCL_DEBUG = "INFO"}}``."""
    trainer_ranks: PositiveInt = derived()
    """Processes that share the micro-batches of each step; a separate critic has the same number. Under ``torchrun``
    they are its processes."""
    zero_stage: Literal[0, 1, 2, 3] = derived()
    """What the trainer's ranks shard: nothing (0), optimizer state (1), gradients too (2), weights too (3)."""
    shard_size: PositiveInt = derived()
    """Ranks that shard one copy of the model; with more ranks there are several copies, as with several machines."""
    trainer_restarts: Count = 3
    """How often the run resumes by itself after a process of its trainer, reference or critic dies."""
    placement: PlacementSection | None = None
    """CPUs and GPUs of each process on a cluster; None: 1 CPU and, where ``device`` is a GPU, 1 of them."""
    kv_memory: Size = derived()
    """Memory of the engine for keys and values, such as ``512MB`` or ``4GB``. They have the model's type; on a CPU
    without ``compile``, and with float16, they are float32."""
    max_running: PositiveInt = 256
    """Most requests decoded at once."""
    max_prefill_tokens: PositiveInt = 8192
    """Prompt tokens prefilled in one forward."""
    speculative: Literal["off", "ngram", "draft"] = "off"
    """Guess tokens ahead while sampling; the output stays the same."""
    speculative_tokens: PositiveInt = 4
    """Most guessed tokens per completion and step."""
    draft_model: Text | None = None
    """A directory or a hub name: a smaller model with the same vocabulary, for ``speculative = "draft"``."""
    sequence_parallel: SequenceParallelSection = SequenceParallelSection()
    vllm: VllmSection = VllmSection()

    @property
    def served(self) -> bool:
        """Whether servers that were started separately sample."""
        return self.engine == "sglang"
