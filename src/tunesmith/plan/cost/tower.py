"""What a vision tower costs in a run on images: memory where it is trained, and operations."""

from __future__ import annotations

from typing import Any

from tunesmith.plan.cost.device import Layout, Price, TrainedTower
from tunesmith.plan.facts.families import family_around
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.towers import TowerSizes
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace
from tunesmith.types import VisionTower


def trains_on_images(plan: AnyPlan) -> bool:
    """Whether the data has images, or agents may send some to a model that sees them."""
    model = plan.facts.model
    agents = plan.kind.rl and plan.said.environment.used and model
    return bool(plan.facts.images or (agents and family_around(agents.family).images))


def tower_in_training(plan: AnyPlan) -> TrainedTower | None:
    """The tower that a run trains; None: it is frozen, or its sizes are not known."""
    model = plan.facts.model
    said = plan.said.model.vision_tower
    if said == "frozen" or model is None or model.tower is None:
        return None
    share = plan.facts.image_share or 1.0
    return trained_tower(model, model.tower, plan.devices.bytes_per_number, said, share)


def trained_tower(
    model: ModelFacts, sizes: TowerSizes, size: int, said: VisionTower, share: float = 1.0
) -> TrainedTower:
    """A tower that is trained.

    Each image is seen once in a micro-batch, so at most as many rows of features are computed as it
    has tokens of images.

    Args:
        size: bytes per number.
        said: what is trained of it.
        share: of a micro-batch's tokens, how many are rows of images.
    """
    numbers = model.tower_parameters
    hidden = sizes.hidden_size
    inner = sizes.intermediate_size
    patches = share * sizes.patches
    # Inputs and outputs of both norms and of attention, queries, keys and values before and after
    # rotation; the feed-forward network's vectors; norms and rotations in float32.
    vectors = 10 * hidden + (4 if sizes.gated else 2 + sizes.quick) * inner
    wide = sizes.joins * 4 * hidden * (4 if size == 2 else 5 if sizes.gated else 2)
    block = patches * (size * vectors + wide)
    joined = patches * size * (4 * hidden * sizes.projectors + sizes.pixels)
    if said == "projector":  # the rest has no gradients, and saves nothing
        trained = min(numbers, sizes.projector(model.hidden_size))
        return TrainedTower(numbers, trained, int(joined), int(joined), 0)
    again = patches * size * hidden * (sizes.layers + 3) + joined
    kept = sizes.layers * block + joined
    return TrainedTower(numbers, numbers, int(kept), int(again), int(block))


def with_tower(found: Price, layout: Layout) -> Price:
    """A model's memory with that of the tower which trains along with it, but its activations.

    Ranks that shard the model gather the tower with the embedding, and sum its gradients after
    everything else. Beside an adapter the original stays, and each rank has whole what is trained.
    """
    tower = layout.tower
    if tower is None:
        return found
    size = layout.bytes_per_number
    copy = size * tower.numbers
    others = layout.references * copy // layout.shards
    away = layout.offload_frozen
    found = replace(found, frozen=found.frozen + others * (not away))
    found = replace(found, scorer=found.scorer + others * away, host=found.host + others * away)
    if not layout.trains:
        return replace(found, weights=found.weights + copy * layout.holds_model)
    shards = layout.shards if layout.zero_stage else 1
    adapter = layout.lora_rank is not None
    rows = tower.trained if adapter else tower.trained // shards
    ema = 4 if layout.ema else 0
    state: dict[str, Any] = {"gradients": 4 * (tower.trained if layout.zero_stage == 1 else rows)}
    if adapter:
        original = copy // shards if layout.zero_stage else copy * layout.holds_model
        state |= {"weights": original + size * rows, "gathered": copy * (layout.zero_stage > 0)}
        state |= {"optimizer": ((8 if size == 4 else 12) + ema) * rows}
    elif layout.zero_stage:
        state |= {"weights": 4 * tower.numbers // shards, "gathered": copy}
        state |= {"head": (4 + size) * tower.trained, "optimizer": (8 + ema) * rows}
    else:
        kept = (8 if size == 4 else 12) + ema
        state |= {"weights": copy * layout.holds_model, "optimizer": kept * rows}
    if layout.offload:
        state |= {"host": (16 + ema) * rows, "optimizer": 0}
        state["gradients"] *= layout.zero_stage == 1 and not adapter
    return replace(found, **{part: getattr(found, part) + more for part, more in state.items()})


def image_operations(plan: AnyPlan, lines: float, again: float) -> tuple[float, float]:
    """Operations of the tower for a step on ``lines`` of the data: in training and scoring
    together, and in sampling.

    A frozen tower computes an image once in training, for all models. One that is trained computes
    it in every pass: three times as much with the backward pass, and four times where ``again``
    says that activations are recomputed.
    """
    model = plan.facts.model
    sizes = model and model.tower
    if sizes is None or not plan.facts.image_rows:
        return 0.0, 0.0
    forward = lines * plan.facts.image_rows * sizes.operations(plan.facts.rows_of_image)
    passes = 1.0
    said = plan.said.model.vision_tower
    if said != "frozen":
        passes = 3.0 + (again > 0) if said == "trained" else 1.0
        passes *= plan.said.train.passes_per_batch if plan.kind.rl else 1
        passes += plan.kind.passes
    return passes * forward, forward * plan.kind.rl


def tower_for(model: ModelFacts, plan: AnyPlan) -> int:
    """Parameters of the tower that a run has beside the models which it loads: a frozen one, which
    the policy and its reference share."""
    frozen = plan.said.model.vision_tower == "frozen" and trains_on_images(plan)
    return model.tower_parameters if frozen else 0
