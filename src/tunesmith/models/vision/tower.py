"""The tower of a vision model: it computes the rows of features of the data's images.

A frozen tower is no part of the module that is trained. The features of an image are computed from
that image alone and then kept, so they are the same whichever images a step has. Those of a tower
that is trained are computed in each pass, once for all of the image's places in a micro-batch, with
their gradients; only engines keep them, until new weights come.

Shape legend: ``T`` tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, Gemma3Config, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from tunesmith.errors import ModelError
from tunesmith.models.forest import Segment
from tunesmith.models.kernels.images import ImageFeatures, SeenImages
from tunesmith.models.towers import Towers
from tunesmith.models.vision.processing import ImageVocabulary
from tunesmith.models.vision.rows import FIRST_ROW, Image

KEPT_BYTES = 1 << 30
"""Features of images that stay in the host's memory."""


class Tower(nn.Module):
    """The parts of a model that see, under their names in it.

    They are made ``of`` its configuration, or are those ``within`` a model's base.
    """

    by_grid: ClassVar[bool]
    """Whether rotary positions are those of rows in the grid of their image (M-RoPE)."""
    both_ways: ClassVar[bool]
    """Whether the rows of an image see each other, and not only those before them."""

    def forward(self, *arguments: Tensor) -> ImageFeatures:
        """The features of one image. Args: arguments: those that ``Pixels.of`` makes."""
        raise NotImplementedError


class PatchTower(Tower):
    """Qwen's."""

    by_grid = True
    both_ways = False

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = visual

    @classmethod
    def of(cls, config: PreTrainedConfig) -> PatchTower:
        """See ``Tower``."""
        if config.model_type == "qwen2_vl":  # AutoModel does not know its tower
            return cls(Qwen2VisionTransformerPretrainedModel(config.vision_config))
        return cls(AutoModel.from_config(config.vision_config))

    @classmethod
    def within(cls, base: nn.Module) -> PatchTower:
        """See ``Tower``."""
        return cls(base.get_submodule("visual"))

    def forward(self, *arguments: Tensor) -> ImageFeatures:
        """See ``Tower``."""
        pixels, grid = arguments
        made = self.visual(pixels, grid_thw=grid, return_dict=True)
        deep = getattr(made, "deepstack_features", None)
        return ImageFeatures(made.pooler_output, tuple(deep or ()))


class SquareTower(Tower):
    """Gemma 3's."""

    by_grid = False
    both_ways = True

    def __init__(self, vision_tower: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.multi_modal_projector = projector

    @classmethod
    def of(cls, config: Gemma3Config) -> SquareTower:
        """See ``Tower``."""
        return cls(AutoModel.from_config(config.vision_config), Gemma3MultiModalProjector(config))

    @classmethod
    def within(cls, base: nn.Module) -> SquareTower:
        """See ``Tower``."""
        return cls(*map(base.get_submodule, ("vision_tower", "multi_modal_projector")))

    def forward(self, *arguments: Tensor) -> ImageFeatures:
        """See ``Tower``."""
        (pixels,) = arguments
        made = self.vision_tower(pixel_values=pixels).last_hidden_state
        return ImageFeatures(self.multi_modal_projector(made)[0])


@dataclass(slots=True)
class Vision:
    """A tower, and the images that it sees."""

    vocabulary: ImageVocabulary
    tower: Tower
    dtype: torch.dtype
    device: torch.device
    changes: bool = False
    """Whether its weights are trained, or come from a trainer."""
    _kept: OrderedDict[int, ImageFeatures] = field(
        default_factory=OrderedDict[int, ImageFeatures], init=False, repr=False
    )
    _kept_bytes: int = field(default=0, init=False, repr=False)

    @classmethod
    def of(
        cls,
        config: Any,
        towers: Towers,
        vocabulary: ImageVocabulary,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Vision:
        """The tower of a checkpoint.

        Args:
            config: the checkpoint's.
            towers: its weights.

        Raises:
            ModelError: the weights are not those that the configuration describes.
        """
        config.vision_config._attn_implementation = "sdpa"
        with no_init_weights(), device:
            tower = _kind_of(config).of(config)
        for parameter in tower.parameters():  # rotary frequencies are buffers, and stay float32
            parameter.data = parameter.data.to(dtype)
        weights = {
            f"{part}.{name.partition(f'{part}.')[2].removeprefix('vision_model.')}": tensor
            for part in towers.modules
            for name, tensor in towers.weights.items()
            if part in name.split(".")
        }
        wrong = sorted(tower.state_dict().keys() ^ weights.keys())
        if wrong:
            raise ModelError(
                f"the tower in '{vocabulary.path}' is not the one that its config.json describes: "
                f"{wrong[0]} is in one of them alone"
            )
        tower.load_state_dict(weights)
        return cls(vocabulary, tower.eval().requires_grad_(False), dtype, device)

    @classmethod
    def within(
        cls,
        module: PreTrainedModel,
        vocabulary: ImageVocabulary,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Vision:
        """The tower that is part of a module (``Towers.keep``)."""
        tower = _kind_of(module.config).within(module.base_model)
        return cls(vocabulary, tower, dtype, device, changes=True)

    def see(self, token_ids: Tensor) -> tuple[Tensor, SeenImages | None]:
        """Tokens ``[T]`` as the embedding takes them, and the rows of images among them."""
        places = (token_ids >= FIRST_ROW).nonzero().squeeze(1)
        if not len(places):
            return token_ids, None
        rows: list[int] = token_ids[places].tolist()
        owners = [self.vocabulary.rows.at(row) for row in rows]
        images = list({image.first: image for image in owners}.values())
        starts = accumulate(map(len, images), initial=0)
        start_of = {image.first: start for image, start in zip(images, starts, strict=False)}
        pairs = zip(rows, owners, strict=True)
        wanted = [start_of[image.first] + row - image.first for row, image in pairs]
        chosen = torch.tensor(wanted, device=token_ids.device)
        every = [self.features(image) for image in images]
        joined = ImageFeatures(
            torch.cat([each.embedded for each in every]),
            tuple(torch.cat(deep) for deep in zip(*(each.deep for each in every), strict=True)),
        )
        known = token_ids.masked_fill(token_ids >= FIRST_ROW, self.vocabulary.placeholder)
        return known, SeenImages(places, joined.map(lambda rows: rows.index_select(0, chosen)))

    def features(self, image: Image) -> ImageFeatures:
        """The features of an image, on the tower's device."""
        if self.changes and not torch.is_inference_mode_enabled():  # no engine's pass
            return self._compute(image)
        features = self._kept.get(image.first)
        if features is None:
            with torch.inference_mode(False), torch.no_grad():
                features = self._compute(image).map(Tensor.cpu)
            self._kept[image.first] = features
            self._kept_bytes += features.nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(image.first)
        return features.map(lambda rows: rows.to(self.device))

    def forget(self) -> None:
        """Forget the features of a tower that has new weights."""
        if self.changes:
            self._kept.clear()
            self._kept_bytes = 0

    def with_zero_gradients(self, states: Tensor) -> Tensor:
        """The same states, in whose backward pass every trained weight of the tower gets a
        gradient.

        A micro-batch without images adds nothing to it, so ranks with and without images sum
        gradients of the same weights.
        """
        if not (self.changes and torch.is_grad_enabled()):
            return states
        trained = [weight for weight in self.tower.parameters() if weight.requires_grad]
        return _ZeroGradients.apply(states, *trained)  # pyright: ignore

    def _compute(self, image: Image) -> ImageFeatures:
        pixels, *rest = self.vocabulary.arguments(image)
        features = self.tower(
            pixels.to(self.device, self.dtype), *(each.to(self.device) for each in rest)
        )
        assert len(features.embedded) == len(image), "the grid was known when the data was read"
        return features

    def blocks(self, token_ids: Tensor) -> Tensor | None:
        """``ImageRows.blocks``, if the rows of an image see each other."""
        if not self.tower.both_ways:
            return None
        blocks = self.vocabulary.rows.blocks(token_ids.cpu().numpy())
        return None if blocks is None else torch.from_numpy(blocks).to(token_ids.device)

    def positions(
        self, token_ids: Tensor, positions: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        """Rotary positions ``[3, T]`` of a forest; see ``ImageRows.positions``."""
        rotary = self.vocabulary.rows.positions(
            token_ids.cpu().numpy(), positions.cpu().numpy(), segments
        )
        return torch.from_numpy(rotary).to(token_ids.device)

    def prompt_positions(self, token_ids: Sequence[int]) -> Tensor:
        """Rotary positions ``[3, T]`` of one sequence, on the host."""
        whole = torch.tensor(token_ids)
        count = len(token_ids)
        return self.positions(whole, torch.arange(count), [Segment(0, count, -1)])


def _kind_of(config: Any) -> type[SquareTower] | type[PatchTower]:
    return SquareTower if config.model_type == "gemma3" else PatchTower


class _ZeroGradients(torch.autograd.Function):
    """The identity of its first operand; the others' gradients are zeros, which take no memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.weights
        )
        return (*gradients, *zeros)
