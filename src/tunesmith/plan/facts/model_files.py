"""What a model's directory holds: which of its files are the weights, and what they say of
themselves.

Every loader and the planner read a directory through these functions, so they accept and refuse the
same ones.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.errors import ModelError, boundary
from tunesmith.plan.facts.layers import Written
from tunesmith.records.foreign import parse_json

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOWERS = (
    "vision_tower",
    "vision_model",
    "visual",
    "embed_vision",
    "vision_embedder",
    "vision_encoder",
    "vision_projection",
    "multi_modal_projector",
    "merger",
    "connector",
    "image_newline",
    "audio_tower",
    "embed_audio",
    "mtp",  # heads that predict later tokens, which transformers has no module for
)
"""Parts of a multimodal checkpoint beside its text decoder."""
_LFS_POINTER = b"version "
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error)


BLOCKS = "_blocks"
SCALES = "_scales"
"""What follows the name of a weight in MXFP4 in the names of its two parts."""
_PACKED = "mxfp4"
_ADVICE = {
    "fp8": "make a copy in bfloat16: load it with "
    "quantization_config=FineGrainedFP8Config(dequantize=True) and save it with save_pretrained",
    "compressed-tensors": "make a copy in bfloat16: load it with "
    "quantization_config=CompressedTensorsConfig(dequantize=True) and save it with save_pretrained",
}
"""What to do with checkpoints that often have no other form, by the method of their weights."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight in a file, as its header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """In safetensors' spelling, such as ``BF16``."""
    scales: Path | None = None
    """The file of its scales, if the weight is in MXFP4; shape and dtype are then those of the
    numbers that it stands for."""


def check_files(directory: Path) -> None:
    """Refuse a directory that other programs may read as another model, or that is damaged.

    Raises:
        ModelError: names the file.
    """
    adapted = (directory / ADAPTER_CONFIG).is_file()
    if not (directory / "config.json").exists():
        if adapted:
            raise ModelError(
                f"'{directory}' is a LoRA adapter, not a whole model; merge it with its base: "
                "tunesmith merge"
            )
        raise ModelError(
            f"'{directory}' has no config.json: it is not a model in Hugging Face format"
        )
    if adapted:
        raise ModelError(
            f"'{directory}' holds a whole model and an adapter, {ADAPTER_CONFIG}: some programs "
            "apply the adapter and others do not. Move the adapter to a directory of its own (for "
            "lora.path), or delete it"
        )
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            check_method(f"{directory / name}", _method_in(directory / name))
    weights_in(directory)


def quantised_by(config: Written) -> str | None:
    """The method by which a configuration says that weights are quantised."""
    settings: Written = config.get("quantization_config") or {}
    return str(settings.get("quant_method")) if settings else None


def check_method(place: str, method: str | None) -> None:
    """Refuse weights that are quantised in another way than MXFP4, in which they are read exactly.

    Raises:
        ModelError: names the place, the method and what to do.
    """
    if method in (None, _PACKED):
        return
    advice = _ADVICE.get(method, "name the model they were made from")
    raise ModelError(
        f"{place}: quantization_config: the weights are quantised by '{method}'; read are those in "
        f"float32, bfloat16, float16 and MXFP4. To train it, {advice}; model.quantize then keeps "
        "frozen weights in 8 or 4 bits"
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that are the model's weights; empty if there are none.

    A directory may also hold weights of another layout or number format
    (``consolidated.safetensors``, ``model.fp16.safetensors``, ``original/``), which nothing reads.

    Raises:
        ModelError: the index is damaged, or there are two sets of weights.
    """
    one = directory / ONE
    index = directory / INDEX
    if not index.is_file():
        return [one] if one.is_file() else []
    with boundary(ModelError, f"cannot read {index}", _DAMAGED):
        names: dict[str, str] = parse_json(index.read_bytes())["weight_map"]
        files = [directory / name for name in sorted(set(names.values()))]
    if one.is_file() and any(file.is_file() for file in files if file != one):
        raise ModelError(
            f"'{directory}' holds {ONE} and also the shards of {INDEX}: programs read one or the "
            "other. Delete those that are not this model's"
        )
    return [one] if one.is_file() else files


def weights_in(directory: Path) -> dict[str, Stored]:
    """The weights of a model by name, from the headers of its files; those in MXFP4 under one name
    each, with the shape that transformers gives them.

    Raises:
        ModelError: a file is missing, damaged, or does not hold numbers that a model computes with.
    """
    stored = {
        name: weight for file in weight_files(directory) for name, weight in _header(file).items()
    }
    for name in [name for name in stored if name.endswith(BLOCKS)]:
        scaled = name.removesuffix(BLOCKS) + SCALES
        if scaled in stored:
            stored[name.removesuffix(BLOCKS)] = _packed(name, stored.pop(name), stored.pop(scaled))
    return stored


def is_packed(directory: Path) -> bool:
    """Whether weights of a model are in MXFP4, by its configuration."""
    return _method_in(directory / "config.json") == _PACKED


def _method_in(path: Path) -> str | None:
    with boundary(ModelError, f"cannot read {path}", _DAMAGED):
        return quantised_by(parse_json(path.read_bytes()))


def _packed(name: str, blocks: Stored, scales: Stored) -> Stored:
    """The weights of experts whose parts are ``[experts, outputs, groups]``, the blocks with 16
    bytes of two numbers each."""
    if len(scales.shape) != 3 or blocks.shape != (*scales.shape, 16):
        raise ModelError(
            f"{blocks.file}: '{name}' has the shape {list(blocks.shape)}, and its scales have "
            f"{list(scales.shape)}: they are not weights of experts in MXFP4"
        )
    experts, outputs, groups = scales.shape
    return Stored(blocks.file, (experts, 32 * groups, outputs), "BF16", scales.file)


def is_of_tower(name: str) -> bool:
    """Whether a weight of a checkpoint belongs to a tower, and not to the text decoder."""
    return not set(TOWERS).isdisjoint(name.split(".")[:2])


def count_parameters(directory: Path, *, tower: bool = False) -> int | None:
    """Parameters of the decoder, or of the towers beside it, in a model's safetensors files, from
    their headers only; None without such files."""
    weights = weights_in(directory)
    sizes = [math.prod(w.shape) for name, w in weights.items() if is_of_tower(name) == tower]
    return sum(sizes) if weights else None


def _header(path: Path) -> dict[str, Stored]:
    """The weights of a file, which starts with the header's length (8 bytes, little-endian) and the
    header (JSON)."""
    with boundary(ModelError, f"cannot read {path}", _DAMAGED), path.open("rb") as file:
        start = file.read(8)
        size = path.stat().st_size
        if start == _LFS_POINTER:
            raise ValueError(
                "it is a Git LFS pointer instead of weights; fetch them with: git lfs pull"
            )
        (length,) = struct.unpack("<Q", start)
        if length > size:
            raise ValueError("it is damaged, or not a safetensors file")
        header: dict[str, Any] = parse_json(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(
                f"it has {size} bytes and its header describes {8 + length + end}: it is incomplete"
            )
        found = {
            name: Stored(path, tuple(entry["shape"]), entry["dtype"])
            for name, entry in header.items()
        }
    for name, weight in found.items():
        if weight.dtype.startswith(("I", "U", "BOOL")) and name.endswith((".weight", ".bias")):
            raise ModelError(
                f"{path}: '{name}' holds whole numbers ({weight.dtype}); weights are float32, "
                "bfloat16 or float16"
            )
    return found
