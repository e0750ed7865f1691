"""What is known about a run before it starts: the input of every derivation."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.plan.facts.adapter import SavedAdapter
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.measured import Tuned
from tunesmith.plan.facts.model import ModelFacts


@dataclass(frozen=True, slots=True)
class FastEngine:
    """The engine that samples fastest on GPUs (``EngineKind.fastest_on_gpus``), and what was found
    of it where the run samples."""

    name: str
    where: str
    """Where the engine is installed, or what is missing."""
    usable: bool = True


@dataclass(frozen=True, slots=True)
class Done:
    """What a run that is continued has done."""

    steps: int = 0
    items: int = 0
    """Drawn from the data in these steps. In reinforcement learning filtered ones do not count."""
    optimizer_steps: int = 0
    """Those of the policy, and of a critic with its own model, as they were planned."""
    critic_steps: int = 0


NOTHING = Done()


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a run; an unknown fact is None, and settings that depend on it are not derived.

    ``train_size`` counts tasks or examples; ``longest`` is the data's longest prompt (reinforcement
    learning) or sequence (supervised) in tokens; ``together`` is the largest number of tokens that
    must share a micro-batch, if the loss compares sequences.
    """

    hardware: Hardware
    """The machines; of several kinds those that train and score."""
    model: ModelFacts | None = None
    adapter: SavedAdapter | None = None
    """The one that the run continues, if it is on this machine."""
    train_size: int | None = None
    eval_size: int | None = None
    done: Done = NOTHING
    """What a run that trains on has done."""
    longest: int | None = None
    together: int | None = None
    images: int | None = None
    """The number of distinct images in the data; None: the data was not read."""
    image_rows: float = 0.0
    """Rows of images' features in a line of the data, on average."""
    rows_of_image: float = 0.0
    """Rows of features of one image, on average."""
    image_share: float = 0.0
    """The largest share of a line's tokens that are rows of images."""
    frozen_parameters: int = 0
    """Total parameters of the run's reward models and teacher."""
    judge_parameters: int = 0
    """Parameters of the judges that the run loads."""
    judge_kv: int = 0
    """Bytes of their keys and values."""
    draft: ModelFacts | None = None
    """The model that guesses tokens ahead (``system.draft_model``)."""
    ranks_here: int | None = None
    """Trainer ranks that a launcher started on this machine; None without a launcher."""
    instances_for: str | None = None
    """The reward function that takes the environments' instances."""
    fast_engine: FastEngine | None = None
    """None: the run has no use for it, or nothing is known of it."""
    tuned: Tuned | None = None
    """Measured settings for this kind of run, if it asks for them (``system.tuned``)."""
    engine_hardware: Hardware | None = None
    """The machines of engines, if they have other GPUs than those that train."""
    other_hardware: tuple[Hardware, ...] = ()
    """Machines with other GPUs, as long as it is open what each kind does (``plan.mixed``)."""
    idle: tuple[str, ...] = ()
    """Remarks on machines that take no part."""
