"""The parts of a plan: small values that go to those who need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunesmith.config.values import parse_size
from tunesmith.plan.facts.run import NOTHING, Done

Checkpointing = bool | float | Literal["selective"]
"""``system.gradient_checkpointing``, once it is derived."""
Every = int | Literal["epoch"]
"""Steps between two times, or each pass over the data."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What takes or saves memory on the devices; None: the run has no such pass or cache, or its
    size is still open."""

    microbatch: int | None = None
    """Maximum tokens per micro-batch of one rank, or of the ranks that share sequences."""
    scoring: int | None = None
    """Maximum tokens of a pass without gradients."""
    critic: int | None = None
    """Maximum tokens per micro-batch of a critic with its own model."""
    reward: int | None = None
    """Maximum tokens of a reward model's pass."""
    kv: str | None = None
    """Size of an engine's KV cache."""
    checkpointing: Checkpointing = False
    """Whether activations are recomputed, or in which share of the layers, or all but the results
    of products and attention."""
    offload_activations: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_reference: bool = False

    @property
    def selective(self) -> bool:
        """Whether layers keep the results of products and attention alone."""
        return self.checkpointing == "selective"

    @property
    def share_again(self) -> float:
        """The share of layers that are recomputed from their inputs."""
        return 0.0 if self.checkpointing == "selective" else float(self.checkpointing)

    @property
    def kv_bytes(self) -> int:
        return parse_size(self.kv) if self.kv else 0


@dataclass(frozen=True, slots=True)
class Training:
    """The size of a step, the number of steps, and the rates at which they learn."""

    samples: int = 0
    """Samples that a step draws: those of a rollout batch, or of an optimizer step."""
    batch: int | None = None
    """Samples per optimizer step; None: nothing is trained."""
    prompts: int = 0
    """Prompts of a rollout batch."""
    group: int = 1
    """Rollouts of each prompt."""
    longest: int | None = None
    """Tokens of the longest sample, or of samples that must share a micro-batch; None: unknown."""
    steps: int | None = None
    """Rollout batches, or optimizer steps; None: the size of the data is not known."""
    epochs: float | None = None
    """Passes over the data that set the number of steps; None: as many as full steps need."""
    done: Done = NOTHING
    """What a continued run has done, perhaps in steps of another size."""
    warmup: int | None = None
    """Optimizer steps; None as ``steps`` is."""
    lr: float = 0.0
    data_seed: int = 0
    critic: CriticTraining | None = None
    """None: there is no critic."""
    distillation: Distillation | None = None
    """None: no teacher's distribution is compared."""


@dataclass(frozen=True, slots=True)
class CriticTraining:
    lr: float
    """The learning rate of the critic, or of the value head on a shared trunk."""
    value_coef: float
    """Weight of the value loss on a shared trunk."""
    passes: int
    """Passes over a rollout batch."""


@dataclass(frozen=True, slots=True)
class Distillation:
    top_k: int
    """How many of the teacher's most likely tokens are compared individually."""
    alpha: float
    """Weight of the KL to the teacher; given answers have the rest."""


@dataclass(frozen=True, slots=True)
class SamplingChoices:
    """How completions are drawn; without meaning in a run that samples nothing."""

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    seed: int = 0
    running: int = 256
    """Maximum number of requests decoded at once."""
    queue: int = 0
    """Finished prompts that may wait for training while more are played."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Steps between what a run records."""

    checkpoint: Every | None = None
    """None: at the end, and every ``minutes``."""
    minutes: float | None = None
    """Minutes between checkpoints."""
    progress: int = 1
    """Between progress lines and between points in the sinks."""
    evaluation: Every | None = None
    """None: only at the end."""
    pass_at: tuple[int, ...] | None = None
    """Numbers of tries for which an evaluation reports solved prompts; None: all of its tries."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Maximum numbers of tokens; None: no limit is known."""

    prompt: int | None = None
    sample: int | None = None
    """Maximum tokens of a line of supervised data."""
    episode: int | None = None
    """Maximum tokens of an environment's conversation."""


@dataclass(frozen=True, slots=True)
class Vllm:
    eager: bool = False
    """Whether it runs without compilation and CUDA graphs."""
    prefix_caching: bool = False
    max_length: int | None = None
    """Tokens of its longest sequence; None: the model's context, or what fits the KV cache."""
    step_tokens: int | None = None
    """Maximum tokens of one forward pass; None: nothing is sampled."""
    adapter_rank: int = 0
    """The rank that it reserves memory for; 0: it takes whole weights."""
    adapter_modules: tuple[str, ...] = ()
    """The last names of the modules that an adapter changes."""
