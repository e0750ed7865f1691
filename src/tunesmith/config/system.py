"""``[system]``: how fast a run is. Nothing here changes what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tunesmith.config.engines import OWN_ENGINE, EngineKind, EngineName, EngineWeights, engine_kinds
from tunesmith.config.section import Open, Section
from tunesmith.config.values import Count, Part, PositiveInt, Size, Text, Url

Role = Literal["actor", "ref", "critic", "reward", "rollout"]


class Resources(Section):
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each process; None: 1."""
    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs of each process, or a part of one; None: 1 if ``system.device`` is a GPU, one per rank
    of vLLM."""
    accelerator: Text | None = None
    """The kind of GPU, by Ray's name of it (``accelerator_type``, such as ``H100``); None: derived
    if the cluster's machines have different GPUs. Roles that train or score follow ``actor``."""


class ScoringResources(Resources):
    processes: PositiveInt | None = None
    """Processes that share the scoring work; None: 1, or ``shards`` of a reward model. Each has the
    whole model, except that with ``system.zero_stage = 3`` they shard its weights."""


class RewardResources(ScoringResources):
    shards: PositiveInt | None = None
    """Processes that share one copy of a reward model, each with a part of the weights; None: 1, or
    all ``processes`` with ``system.zero_stage = 3``; derived if the model does not fit a GPU."""


class PlacementSection(Section):
    """Resources per process of each role; None: 1 CPU and, if ``system.device`` is a GPU, 1 GPU."""

    actor: Resources = Resources()
    """The trainer."""
    ref: ScoringResources = ScoringResources()
    """The reference; colocated with ``actor`` it has no separate process: each trainer rank holds
    it, or its share."""
    critic: Resources = Resources()
    """The critic's trainer, if it has a model of its own."""
    reward: RewardResources = RewardResources()
    """Each of ``reward.models``."""
    rollout: Resources = Resources()
    """Each engine."""
    colocate: tuple[tuple[Role, ...], ...] = ()
    """Groups of roles that share one machine and one GPU, such as ``[["actor", "ref"]]``."""


class SequenceParallelSection(Section):
    """``[system.sequence_parallel]``: groups of trainer ranks that share the tokens of each
    micro-batch."""

    type: Literal["ulysses", "ring"] = "ulysses"
    """How attention spans the ranks of a group: each rank computes some heads for all tokens
    (``ulysses``), or keys and values travel around the ranks (``ring``)."""
    size: PositiveInt = 1
    """Ranks that compute a micro-batch together, so that longer sequences fit."""


class VllmSection(Section):
    """``[system.vllm]``: settings of ``engine = "vllm"``."""

    tensor_parallel_size: Open[PositiveInt] = None
    """Devices over which each layer of one engine is split."""
    pipeline_parallel_size: PositiveInt = 1
    """Groups of devices among which the layers of one engine are divided."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each GPU's memory for weights and KV cache together, instead of
    ``system.kv_memory``."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus completion; None: the model's context, or what fits the KV cache."""
    max_batched_tokens: Open[PositiveInt] = None
    """Maximum prompt and new tokens in one forward pass; at least ``system.max_running``."""
    chunked_prefill: bool | None = None
    """Prefill long prompts in chunks while other requests decode; None: if vLLM supports it for
    this model."""
    prefix_caching: Open[bool] = None
    """Keep the KV cache of prompts for other prompts with the same prefix."""
    eager: Open[bool] = None
    """Run the model without compilation and CUDA graphs."""
    cuda_graph_sizes: tuple[PositiveInt, ...] | None = None
    """Token counts per step for which CUDA graphs are captured; None: vLLM's choice, up to
    ``max_running``."""
    quantization: str | None = None
    """Quantize the weights at each sync: ``fp8_per_tensor``, ``fp8_per_channel`` or
    ``fp8_per_block``."""
    extra: Annotated[
        dict[str, Any] | None, Field(description="a table of vLLM's own engine arguments")
    ] = None
    """Further arguments of vLLM's ``EngineArgs`` under its own names, such as ``{max_logprobs =
    5}``."""


class SystemSection(Section):
    profile: Literal["stable", "fast", "throughput", "memory"] | None = None
    """Sets several omitted keys of this table; None: each is derived."""
    tuned: bool = False
    """Fill omitted keys with the fastest values that ``tunesmith tune`` found for this kind of run
    on this machine."""
    device: Open[Text] = None
    device_memory: Size | None = None
    """How much device memory the run may use, such as ``20GB``; None: all that is free at the
    start."""
    threads: Open[PositiveInt] = None
    compile: Open[bool | Literal["default", "max-autotune"]] = None
    """True: on a CPU, compile decoding (``engines.local``) and parts of training steps
    (``kernels``); on a GPU, decode with Triton's kernels and CUDA graphs. A mode of
    ``torch.compile``: the same for decoding, and PyTorch compiles the decoder layers of policy,
    critic and reference for training; ``max-autotune`` also times kernels, without CUDA graphs."""
    kernels: Literal["torch", "liger"] = "torch"
    """Implementation of the decoder layers' norms, rotations and SwiGLU in training and scoring:
    PyTorch's operations, or Liger's Triton kernels on GPUs (``kernels.liger``)."""
    experts_implementation: Open[Literal["grouped_mm", "eager"]] = None
    """How the experts of a mixture compute: all in one grouped product per matrix, or one expert
    after the other."""
    max_tokens_per_microbatch: Open[PositiveInt] = None
    """Maximum tokens per micro-batch of one rank, or of a ``sequence_parallel`` group together."""
    scoring_max_tokens: Open[PositiveInt] = None
    """Maximum tokens of a pass without gradients, by policy, reference or critic."""
    critic_max_tokens: Open[PositiveInt] = None
    """``max_tokens_per_microbatch`` for a critic with its own model."""
    reward_max_tokens: Open[PositiveInt] = None
    """Maximum tokens of a reward model's pass."""
    share_prompts: bool = True
    gradient_checkpointing: Open[bool | Part | Literal["selective"]] = None
    """Whether the backward pass recomputes activations, or in which share of the layers;
    ``selective``: in all layers it keeps the results of matrix products and attention, and
    recomputes the rest (norms, rotations, gates, casts)."""
    offload_activations: Open[bool] = None
    """Keep activations saved for the backward pass in host memory."""
    offload_optimizer: Open[bool] = None
    """Keep master weights, their gradients and the optimizer's moments in host memory, and step on
    the CPU."""
    offload_parameters: Open[bool] = None
    """Keep the layers' weights in host memory, and bring each layer's to the GPU while it
    computes."""
    offload_reference: Open[bool] = None
    """Keep frozen models (a reference, a teacher, reward models) in host memory while they do not
    score."""
    logprob_chunk: PositiveInt | None = None
    """Rows of the vocabulary head computed at once."""
    engine: Open[EngineName] = None
    """The sampling engine: Tunesmith's own, vLLM, or servers that are already running (SGLang).
    None: vLLM on GPUs where it is installed, else Tunesmith's own."""
    engine_urls: tuple[Url, ...] = ()
    """The servers of ``engine = "sglang"``, such as ``["http://127.0.0.1:30000"]``."""
    engine_directory: Path | None = None
    """Shared directory from which engines on other machines load new weights (SGLang,
    ``weight_plane = "disk"``)."""
    engine_process: bool = False
    """Sample in a separate process with its own copy of the weights; a process that dies is
    replaced."""
    engine_python: Path | None = None
    """Python interpreter for ``engine_process``, if the engine is installed in another environment;
    engines then have processes of their own."""
    engines: Open[PositiveInt] = None
    """Number of engine processes, each with ``kv_memory`` and a copy of the weights."""
    engine_weights: Open[EngineWeights] = None
    """Weights with which Tunesmith's own engine samples on a CPU: the model's, or copies rounded to
    ``float16``, or to ``int8`` with a scale for each output. It computes in float32. None:
    ``float16`` where training samples from a float32 model that no cache holds."""
    engine_restarts: Count = 3
    """How often each engine may be replaced after it dies, counted over all together; the others go
    on."""
    weight_plane: Literal["memory", "disk", "gloo", "nccl", "ipc"] | None = None
    """How new weights reach engine processes: a file in memory or in ``engine_directory``, a
    broadcast, or CUDA IPC."""
    weight_copy: Literal["gpu", "host"] | None = None
    """Where the trainer keeps the copy of its weights that ``weight_plane = "nccl"`` sends."""
    adapter_sync: Literal["adapter", "merged"] | None = None
    """How an adapter reaches engines with their own weights: alone, for the same base, or merged
    into full weights."""
    hybrid: Open[bool] = None
    """Engine and trainer take turns on a device: the engine frees its memory while the policy
    trains, and state needed only by the optimizer step is in host memory while the engine samples.
    None: where they share a GPU."""
    canary: bool = True
    """After each sync, compare a few tokens' log-probabilities from every engine with its own copy
    of the weights with the trainer's."""
    cluster: Literal["none", "ray"] = "none"
    """``ray``: trainer, engines, reference, critic and reward models are actors on a Ray
    cluster."""
    ray_address: Text | None = None
    """``host:port`` of a running cluster; None: RAY_ADDRESS, or a new cluster on this machine."""
    ray_runtime_env: Annotated[
        dict[str, Any] | None, Field(description="a table, as Ray has it")
    ] = None
    """Ray's runtime environment for the actors, such as ``{env_vars = {NCCL_DEBUG = "INFO"}}``."""
    trainer_ranks: Open[PositiveInt] = None
    """Processes that share the micro-batches of each step; a separate critic has the same number.
    Under ``torchrun``, its processes are the ranks; with engines on several machines, the first of
    them."""
    zero_stage: Open[Literal[0, 1, 2, 3]] = None
    """What the trainer's ranks shard: nothing (0), optimizer state (1), gradients too (2), weights
    too (3)."""
    shard_size: Open[PositiveInt] = None
    """Ranks that shard one copy of the model; with more ranks there are several copies, as on
    several machines."""
    expert_parallel_size: PositiveInt = 1
    """Trainer ranks that divide the experts of each mixture; they share one copy of the model."""
    trainer_restarts: Count = 3
    """How often the run resumes automatically after a trainer, reference or critic process dies."""
    placement: PlacementSection | None = None
    """CPUs and GPUs of each process on a cluster; None: 1 CPU and, if ``device`` is a GPU, 1
    GPU."""
    kv_memory: Open[Size] = None
    """Size of the engine's KV cache, such as ``512MB`` or ``4GB``. Keys and values have the model's
    dtype, but are float32 on a CPU without ``compile`` or with float16."""
    max_running: Open[PositiveInt] = None
    """Maximum number of requests decoded at once."""
    max_prefill_tokens: PositiveInt = 8192
    """Maximum prompt tokens prefilled in one forward pass."""
    draft_model: Text | None = None
    """A directory or a hub name: a smaller model with the same vocabulary, which guesses tokens
    ahead while sampling; the output stays the same."""
    speculative_tokens: PositiveInt = 4
    """Tokens that ``draft_model`` guesses per completion and step."""
    sequence_parallel: SequenceParallelSection = SequenceParallelSection()
    """Groups of trainer ranks that share the tokens of each micro-batch."""
    vllm: VllmSection = VllmSection()
    """Settings of ``engine = "vllm"``."""

    @property
    def engine_kind(self) -> EngineKind:
        """The engine that was named; Tunesmith's own as long as none is."""
        return engine_kinds()[self.engine or OWN_ENGINE]

    @property
    def ranks_of_a_copy(self) -> int | None:
        """``shard_size``, which follows from ``expert_parallel_size`` if it was left out."""
        divided = self.expert_parallel_size if self.expert_parallel_size > 1 else None
        return self.shard_size or divided

    @property
    def engines_in_processes(self) -> bool:
        """``engine_process``, which follows from ``engine_python`` if nothing else was written."""
        open_yet = "engine_process" not in self.model_fields_set and self.cluster == "none"
        return self.engine_process or (open_yet and self.engine_python is not None)
