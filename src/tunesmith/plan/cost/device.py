"""What determines the memory of a run on a device, and its parts in bytes."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "frozen": "frozen models",
    "gathered": "gathered weights",
    "scorer": "reference or teacher, while it scores",
    "judge": "reward models, while they score",
    "scored": "a pass without gradients",
    "rewarded": "a pass that scores",
    "activations": "activations of a micro-batch",
    "head": "temporaries of a micro-batch",
    "published": "weights in transfer to engines",
    "engine": "the engines' weights",
    "kv": "keys and values",
    "libraries": "CUDA and its libraries",
}
"""Names for the parts of a ``Price``."""


@dataclass(frozen=True, slots=True)
class TrainedTower:
    """A tower that is part of the model that trains."""

    numbers: int
    """Its parameters."""
    trained: int
    """The parameters that are trained: all, or the projector's."""
    kept: int
    """Bytes that it saves for the backward pass, per token of a micro-batch."""
    again: int
    """The same if its layers' activations are recomputed."""
    block: int
    """Bytes of one layer's activations, per token of a micro-batch."""

    def saved(self, checkpointing: float) -> int:
        """Bytes that it saves per token of a micro-batch."""
        return self.again if checkpointing else self.kept


@dataclass(frozen=True, slots=True)
class Layout:
    """The settings that determine how much memory a run needs on one device."""

    bytes_per_number: int
    """Bytes per element of weights and activations."""
    device: str = "cuda"
    """``cpu`` or ``cuda``."""
    holds_model: bool = True
    """Whether the model is loaded in addition to the engines' copies."""
    trains: bool = True
    lora_rank: int | None = None
    """Rank of the adapter; None: the whole model is trained."""
    quantize: str | None = None
    engine_quantize: str | None = None
    muon: bool = False
    """Whether Muon trains the layers' matrices, with a single moment."""
    offload: bool = False  # optimizer state and gradients to host memory
    offload_parameters: bool = False
    """Whether the layers' weights are in host memory, and on the device only while the layers
    compute."""
    offload_activations: bool = False
    offload_frozen: bool = False  # whole frozen models to host memory, except while they score
    ema: bool = False
    models: int = 1
    """Trained models of the policy's size: two with a separate critic."""
    references: int = 0
    """Frozen copies of the policy."""
    frozen_parameters: int = 0
    """Parameters of reward models or a teacher."""
    staying: int = 0
    """Bytes of frozen models that never leave the device: a tower, judges, drafts of engines."""
    teaches: str | None = None
    """When a teacher scores: before training on a ``batch``, or in each ``microbatch``; None: the
    frozen models are reward models, which score rollouts."""
    shards: int = 1
    """Ranks that shard the trained models and their references."""
    zero_stage: int = 0
    """The ZeRO stage; 0: nothing is sharded."""
    divides: bool = False
    """Whether these ranks divide the experts of mixtures."""
    has_vocabulary_head: bool = True
    checkpointing: float = 0
    """The share of layers whose activations are recomputed in the backward pass."""
    selective: bool = False
    """Whether the other layers keep the results of products and attention alone."""
    tokens: int = 0
    """Tokens of a micro-batch."""
    tower: TrainedTower | None = None
    """A vision tower that is trained along with the model."""
    attends_to: int = 0
    """Tokens of the longest sample, where attention has no kernel and holds a weight for each pair
    of tokens; 0: a kernel computes it."""
    sequence: int = 1
    """Ranks that share the tokens of a micro-batch."""
    chunk: int | None = None
    """Rows of the head computed at once."""
    engines: int = 0
    """Copies of the weights that engines hold on this device."""
    ranks: int = 1
    """Devices over which each engine is split, or the ranks that share a CPU's memory."""
    prepared: int = 0
    """Bytes of weights that local engines on a CPU prepare for products with few rows."""
    kv_bytes: int = 0
    """Bytes of the KV cache of all engines on this device."""
    published: int = 0
    """Bytes of weights that are kept for engines or in transfer to them."""
    host_copy: int = 0
    """Bytes of weights that are kept for engines in host memory."""
    turns: bool = False
    """Whether engines free their memory while the policy trains, and the optimizer state is not on
    the device while they sample."""
    swaps: bool = False
    """Whether that state is then in host memory."""
    keeps_base: bool = (
        False  # with ``turns``, engines keep their weights: only the adapter's are sent again
    )
    reserved_rank: int = 0
    """The rank of adapters for which engines have room beside their weights, which with ``turns``
    are in host memory while the policy trains; 0: they get whole weights."""


@dataclass(frozen=True, slots=True)
class Price:
    """Bytes on one device."""

    weights: int = 0
    unloaded: int = 0
    """The part of these bytes that is loaded only after the engines have sampled."""
    gradients: int = 0
    optimizer: int = 0
    """Master weights, AdamW's moments, the moving average of the weights."""
    frozen: int = 0
    """Reference, reward models, teacher."""
    gathered: int = 0
    """Weights that arrive for computing a layer: gathered rows of a sharded model, or weights from
    host memory."""
    scorer: int = 0
    """A reference or a teacher that is on the device only while it scores."""
    judge: int = 0
    """Reward models that are on the device only while they score rollouts."""
    scored: int = 0
    """Temporaries of a pass without gradients of policy, reference, critic or teacher."""
    rewarded: int = 0
    """Temporaries of a reward model's pass, alongside the engines."""
    activations: int = 0
    """Activations of a micro-batch saved for the backward pass."""
    head: int = 0
    """Temporaries of the log-probabilities, a layer's backward pass, or gradients being summed over
    ranks."""
    published: int = 0
    """Weights for engines: a copy, or buckets in transfer."""
    engine: int = 0
    """The engines' copies of the weights, including prepared ones."""
    kv: int = 0
    libraries: int = 0
    """CUDA and its libraries."""
    host: int = 0
    """Host memory used in addition to a GPU: optimizer state, gradients, average weights,
    activations, references."""
    turns: bool = False
    keeps_base: bool = False
    teaches: str | None = None

    @property
    def state(self) -> int:
        """Memory that persists between steps, without the engines."""
        return self.weights + self.gradients + self.optimizer + self.frozen + self.published

    @property
    def training(self) -> int:
        beside = self.engine * (self.keeps_base or not self.turns) + self.kv * (not self.turns)
        return self.libraries + self.state + self.gathered + self.activations + self.head + beside

    @property
    def scoring(self) -> int:
        """Memory while policy, reference or critic score, without gradients."""
        scorer = self.scorer * (self.teaches != "microbatch")
        return self.training - self.gradients - self.activations - self.head + scorer + self.scored

    @property
    def teaching(self) -> int:
        """Memory while a teacher scores a micro-batch, between backward passes."""
        beside = self.scorer + max(0, self.scored - self.head)
        return (self.training - self.activations + beside) * (self.teaches == "microbatch")

    @property
    def sampling(self) -> int:
        stays = 0 if self.turns else self.optimizer
        beside = self.engine + self.kv + self.rewarded + self.judge + stays
        loaded = self.weights - self.unloaded
        return self.libraries + loaded + self.frozen + self.published + beside

    @property
    def peak(self) -> int:
        """Memory of the phase that needs the most."""
        return max(self.training, self.sampling, self.scoring, self.teaching)
