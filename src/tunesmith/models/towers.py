"""The towers of a multimodal checkpoint, which usually are no part of the model that is trained.

A text decoder is trained alone, unless a run trains its tower too. The parts beside it (a vision
tower, its projector) are taken out of the module, so that they take no memory on any device, are
never sent to an engine, and are not adapted. Their weights stay in their files, mapped into memory,
and are written beside the decoder's when the model is saved: bit by bit as they came, in their own
dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_WEIGHTS_FILE_PATTERN
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from transformers import PreTrainedModel

from tunesmith.errors import ModelError
from tunesmith.models.source import directory_of
from tunesmith.models.weight_checks import Differences
from tunesmith.plan.facts.families import family, seeing
from tunesmith.plan.facts.model_files import TOWERS, is_of_tower, weight_files, weights_in
from tunesmith.types import VisionTower

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What turns images into the tower's input; other programs refuse the checkpoint without it."""
PROJECTORS = {"multi_modal_projector", "merger", "deepstack_merger_list"}
"""The parts of towers that make a decoder's features of what the others see."""


@dataclass(frozen=True, slots=True)
class Towers:
    """What a checkpoint holds beside the decoder that is trained."""

    modules: tuple[str, ...] = ()
    """Names of the parts that were taken out of the module."""
    weights: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)
    """Under their names in the checkpoint's files."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    kept: tuple[str, ...] = ()
    """Names of the parts that were not taken out, because some of them are trained."""
    trained: tuple[str, ...] = ()
    """Dotted names of the modules that are trained."""

    @classmethod
    def beside(cls, module: PreTrainedModel, path: str | Path, trained: VisionTower) -> Towers:
        """The towers of a module that was built from a model's configuration."""
        if trained == "frozen":
            return cls.take_out(module, path)
        return cls.keep(module, path, trained)

    @classmethod
    def take_out(cls, module: PreTrainedModel, path: str | Path) -> Towers:
        """Take the towers out of a module; their weights come from the model's files."""
        base = module.base_model
        names = _names(module)
        if not names:
            return cls()
        for name in names:
            delattr(base, name)
        if detect_fake_mode():  # a fake device holds no data, and saves none
            return cls(names)
        directory = directory_of(path)
        weights: dict[str, Tensor] = {}
        for name, stored in weights_in(directory).items():
            if is_of_tower(name):
                with safe_open(stored.file, framework="pt") as opened:
                    weights[name] = opened.get_tensor(name)
        return cls(names, weights, _processor_files(directory))

    @classmethod
    def keep(cls, module: PreTrainedModel, path: str | Path, trained: VisionTower) -> Towers:
        """Leave the towers in a module that trains them, or their projector alone.

        Raises:
            ModelError: there are none that see images.
        """
        names = _names(module)
        if not family(module.config.model_type).images:
            raise ModelError(
                f"model.vision_tower = '{trained}': '{path}' is of no family whose models see "
                f"images ({', '.join(seeing())}); leave it out",
                keys=("model.vision_tower",),
            )
        module.config.vision_config._attn_implementation = "sdpa"  # pyright: ignore
        parts = names
        if trained == "projector":
            base = module.base_model
            parts = tuple(part for name in names for part in _projectors(base, name))
            every = {id(p) for name in names for p in base.get_submodule(name).parameters()}
            every -= {id(p) for part in parts for p in base.get_submodule(part).parameters()}
            for parameter in base.parameters():
                if id(parameter) in every:
                    parameter.requires_grad_(False)
        files = {} if detect_fake_mode() else _processor_files(directory_of(path))
        return cls(kept=names, files=files, trained=parts)

    @property
    def pattern(self) -> str | None:
        """Matches the names of the modules inside the towers, some of which are like the
        decoder's."""
        names = (*self.modules, *self.kept)
        return rf"(.*\.)?({'|'.join(names)})\..*" if names else None

    def allowed(self, differences: Differences) -> Differences:
        """The differences between files and module that are allowed, with the towers' weights."""
        return differences[0], (*differences[1], *self.weights)

    def write(self, directory: Path) -> None:
        """Add the weights to a directory that holds the decoder's, as one more file of its
        index."""
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        if not self.weights:
            return
        written = weight_files(directory)
        suffixes = [f"-{at + 1:05d}-of-{len(written) + 1:05d}" for at in range(len(written) + 1)]
        names = [SAFETENSORS_WEIGHTS_FILE_PATTERN.format(suffix=suffix) for suffix in suffixes]
        for file, name in zip(written, names, strict=False):
            file.rename(directory / name)
        weights = {name: tensor.contiguous() for name, tensor in self.weights.items()}
        save_file(weights, directory / names[-1], metadata={"format": "pt"})
        index: dict[str, str] = {}
        for name in names:
            with safe_open(directory / name, framework="pt") as opened:
                index |= dict.fromkeys(opened.keys(), name)
        size = sum((directory / name).stat().st_size for name in names)
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
        (directory / SAFETENSORS_INDEX_FILE).write_text(text, encoding="utf-8")


def _names(module: PreTrainedModel) -> tuple[str, ...]:
    """Names of a module's towers, and of its own weights that belong to them."""
    base = module.base_model
    parts = (*base.named_children(), *base.named_parameters(recurse=False))
    return tuple(name for name, _ in parts if name in TOWERS)


def _projectors(base: nn.Module, tower: str) -> Iterator[str]:
    """The names of the modules that make features of a tower's outputs, each of a list by
    itself."""
    for name, part in base.get_submodule(tower).named_modules(prefix=tower):
        *around, own = name.split(".")
        listed = bool(around) and around[-1] in PROJECTORS and own.isdecimal()
        if listed or (own in PROJECTORS and not isinstance(part, nn.ModuleList)):
            yield name


def _processor_files(directory: Path) -> dict[str, bytes]:
    files = [directory / name for name in PROCESSOR_FILES]
    return {file.name: file.read_bytes() for file in files if file.is_file()}
