"""``[system]``: how fast a run is. By law nothing here changes what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tunesmith.config.placement import PlacementSection
from tunesmith.config.section import Section, derived
from tunesmith.config.values import Count, PositiveInt, Size, Text, Url
from tunesmith.config.vllm import VllmSection


class SystemSection(Section):
    device: Text = derived()
    device_memory: Size | None = None
    """Memory of the device that the run may take, such as ``20GB``; None: what is free when it starts."""
    threads: PositiveInt = derived()
    max_tokens_per_microbatch: PositiveInt = derived()
    share_prompts: bool = True
    gradient_checkpointing: bool = derived()
    logprob_chunk: PositiveInt | None = None
    """Rows of the head that are computed at a time."""
    engine: Literal["local", "vllm", "sglang"] = "local"
    """What samples: the engine that comes with Tunesmith, vLLM, or servers that run already (SGLang)."""
    engine_urls: tuple[Url, ...] = ()
    """The servers of ``engine = "sglang"``, such as ``["http://127.0.0.1:30000"]``."""
    engine_directory: Path | None = None
    """Where engines on other machines find new weights (SGLang, ``weight_plane = "disk"``): a directory all see."""
    engine_process: bool = False
    """Sample in a process of its own with its own copy of the weights, replaced when it dies."""
    engine_python: Path | None = None
    """Interpreter that ``engine_process`` runs in, where the engine is installed in another environment."""
    engines: PositiveInt = 1
    """Engines of ``engine_process``, each with ``kv_memory`` and a copy of the weights."""
    engine_restarts: Count = 3
    """How often each engine of ``engine_process`` may be replaced when it dies."""
    weight_plane: Literal["memory", "disk", "gloo", "nccl", "ipc"] | None = None
    """How new weights reach engines elsewhere: a file in memory or in ``engine_directory``, a broadcast, CUDA IPC."""
    adapter_sync: Literal["adapter", "merged"] | None = None
    """How an adapter reaches engines elsewhere: alone, onto the same base, or merged into whole weights."""
    hybrid: bool = derived()
    """Engine and trainer take turns on a device: the engine gives its memory back while the policy trains, and what
    only an optimizer step needs is in host memory while it samples. None: where they share a GPU."""
    canary: bool = True
    """After each sync, let every engine with weights of its own write a few tokens, and compare with the trainer."""
    cluster: Literal["none", "ray"] = "none"
    """``ray``: trainer, engines, reference, critic and reward models are actors on a Ray cluster."""
    ray_address: Text | None = None
    """``host:port`` of a running cluster; None: that of RAY_ADDRESS, else one is started on this machine."""
    ray_runtime_env: Annotated[dict[str, Any] | None, Field(description="a table, as Ray has it")] = None
    """Ray's runtime environment of the actors, such as ``{env_vars = {NCCL_DEBUG = "INFO"}}``."""
    trainer_ranks: PositiveInt = 1
    """Processes that share the micro-batches of each step; a separate critic has as many. Under ``torchrun`` they are
    its processes."""
    trainer_restarts: Count = 3
    """How often the run resumes by itself when a process of its trainer, reference or critic ends."""
    placement: PlacementSection | None = None
    """What each process is given on a cluster; None: 1 CPU and, where ``device`` is a GPU, 1 of them."""
    kv_memory: Size = derived()
    """KV memory of the engine, such as ``512MB`` or ``4GB``."""
    max_running: PositiveInt = 256
    """Requests decoded together at most."""
    max_prefill_tokens: PositiveInt = 8192
    """Prompt tokens prefilled in one forward."""
    speculative: Literal["off", "ngram", "draft"] = "off"
    """Guess tokens ahead while sampling; what is written stays the same."""
    speculative_tokens: PositiveInt = 4
    """Guessed at most, per completion and step."""
    draft_model: Text | None = None
    """A directory or a hub name: a smaller model with the same vocabulary, for ``speculative = "draft"``."""
    vllm: VllmSection = VllmSection()

    @property
    def served(self) -> bool:
        """Whether servers sample that were started on their own."""
        return self.engine == "sglang"
