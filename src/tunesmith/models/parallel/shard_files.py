"""Reading and writing sharded or quantised models as safetensors files, without ever holding the
whole model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_WEIGHTS_FILE_PATTERN
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save

from tunesmith.models.kernels.quantised import quantised_weights
from tunesmith.models.parallel.mxfp4 import unpacked
from tunesmith.models.parallel.sharding import Sharding, first_row, local, whole, whole_dtype
from tunesmith.plan.facts.model_files import BLOCKS, SCALES, weights_in

FILE_BYTES = 2 << 30
"""Size of a weight file; a rank holds one at a time while it writes."""


class WeightFiles:
    """The safetensors files of a model's directory, from which single rows can be read."""

    def __init__(self, directory: Path, stored: Mapping[str, str] | None = None) -> None:
        """Args: stored: names in the files, by the names under which they are read."""
        self._stored = stored or {}
        names = {name: own for own, name in self._stored.items()}
        self.weights = {names.get(n, n): weight for n, weight in weights_in(directory).items()}

    @property
    def names(self) -> set[str]:
        return set(self.weights)

    def rows(self, name: str, start: int, count: int) -> Tensor:
        weight = self.weights[name]
        stored = self._stored.get(name, name)
        if weight.scales is None:
            return _rows(weight.file, stored, start, count)
        blocks = _rows(weight.file, stored + BLOCKS, start, count)
        return unpacked(blocks, _rows(weight.scales, stored + SCALES, start, count))


def _rows(file: Path, name: str, start: int, count: int) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        piece = opened.get_slice(name)
        return piece[start : start + count] if piece.get_shape() else opened.get_tensor(name)


def names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


@torch.no_grad()
def fill(module: nn.Module, rows: Callable[[str, int, int], Tensor], names: set[str]) -> list[str]:
    """Read this rank's rows of each parameter and persistent buffer in ``names``.

    Weights that are to be quantised are read whole, one at a time, because their scales share
    second-level scales. Returns the names of those with values that are not finite.
    """
    wrong: list[str] = []
    quantised = quantised_weights(module)
    for name, tensor in module.state_dict().items():
        if name not in names:
            continue
        own = local(tensor)
        first = first_row(tensor)
        if name in quantised:
            part = quantised[name]
            read = rows(name, 0, part.rows).to(own.device, part.dtype)
            own.copy_(part.quantised(read)[first : first + len(own)])
        else:
            read = own.copy_(rows(name, first, len(own) if own.dim() else 1))
        wrong += [] if is_finite(read) else [name]
        del read  # before the next one is read
    return wrong


def shapes_of(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights of a module with their shapes in a model's files."""
    quantised = quantised_weights(module)
    for name, tensor in module.state_dict().items():
        part = quantised.get(name)
        if part:
            yield name, (part.rows, part.in_features * part.out_features // part.rows)
        else:
            yield name, tuple(tensor.shape)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; read once, and nothing of the tensor's size is allocated."""
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(bound.isfinite() for bound in tensor.aminmax())


def is_converted(module: PreTrainedModel) -> bool:
    """Whether the names or shapes of weights in a module's files are not the module's."""
    nothing: dict[str, Tensor] = {}
    return revert_weight_conversion(module, nothing) is not nothing


def conversions_of(module: PreTrainedModel) -> list[Any]:
    """How transformers makes a module's weights of those in its files: as it was loaded, or as its
    class says."""
    known = getattr(module, "_weight_conversions", None)
    if known is not None:
        return known
    usual = get_model_conversion_mapping(module, add_legacy=False)
    return [each for each in usual if not isinstance(each, PrefixChange)]


def stored_names(module: PreTrainedModel) -> dict[str, str]:
    """The names of a module's weights in its files, if transformers only renames them; else
    nothing."""
    if any(isinstance(conversion, WeightConverter) for conversion in conversions_of(module)):
        return {}
    return renamed(module, module.state_dict())


def renamed(module: PreTrainedModel, own: Iterable[str]) -> dict[str, str]:
    """The names in a module's files of weights that transformers only renames."""
    tags = {name: torch.empty(0) for name in own}
    names = {id(tag): name for name, tag in tags.items()}
    return {names[id(tag)]: name for name, tag in revert_weight_conversion(module, tags).items()}


def stored_weights(
    module: PreTrainedModel, named: Iterable[tuple[str, Tensor]]
) -> Iterable[tuple[str, Tensor]]:
    """A module's weights under the names in its files: transformers may rename or fuse weights when
    it loads them.

    The weights of one decoder layer are converted together and yielded before the next layer's are
    read.
    """
    if not is_converted(module):
        yield from named
        return
    ends = turned_names(module)
    for _, group in groupby(named, lambda item: re.sub(r"(\.\d+\.).*", r"\1", item[0])):
        for name, tensor in revert_weight_conversion(module, dict(group)).items():
            yield name, tensor.transpose(1, 2) if ends and name.endswith(ends) else tensor


def turned_names(module: PreTrainedModel) -> tuple[str, ...]:
    """The ends of the names of weights that are published with rows and columns exchanged (the
    experts of Qwen3-VL): transformers reads both forms, and would write the module's own."""
    own = [each for each in conversions_of(module) if isinstance(each, WeightConverter)]

    def transposes(conversion: WeightConverter) -> bool:
        return any(isinstance(o, Transpose) and o.check_dims for o in conversion.operations)

    return tuple(pattern for each in filter(transposes, own) for pattern in each.source_patterns)


def save_weights(
    module: PreTrainedModel, directory: Path, dtype: torch.dtype, sharding: Sharding
) -> None:
    """Write a model in Hugging Face format; the ranks of one copy call this together, and each
    writes some files.

    One file per rank is gathered at a time; then all ranks write in parallel.
    """
    state = module.state_dict()
    world = sharding.mesh.size()
    parameters = dict(module.named_parameters())  # tied ones once
    buffers = [name for name, _ in module.named_buffers() if name in state]
    split = split_state_dict_into_shards_factory(
        {name: state[name].numel() * dtype.itemsize for name in (*parameters, *buffers)},
        get_storage_size=int,
        filename_pattern=SAFETENSORS_WEIGHTS_FILE_PATTERN,
        max_shard_size=FILE_BYTES,
    )
    files = list(split.filename_to_tensors.items())
    for first in range(0, len(files), world):
        mine: dict[str, Tensor] = {}
        for rank, (_, names) in enumerate(files[first : first + world]):
            for name in names:
                kept = whole_dtype(module, name, dtype) if name in parameters else None
                weight = whole(state[name], kept)
                if rank == sharding.rank:
                    mine[name] = weight.cpu()
        if mine:
            plain = {
                name: tensor.contiguous() for name, tensor in stored_weights(module, mine.items())
            }
            save_file(plain, directory / files[first + sharding.rank][0], metadata={"format": "pt"})
    torch.distributed.barrier(sharding.mesh.get_group())
    if sharding.rank == 0:
        save_settings(module, directory)
        if split.is_sharded:
            index = {name: file for file, _ in files for name in names_in(directory / file)}
            text = json.dumps({"metadata": split.metadata, "weight_map": index}, indent=2)
            (directory / SAFETENSORS_INDEX_FILE).write_text(text, encoding="utf-8")


def save_settings(module: PreTrainedModel, directory: Path) -> None:
    """Write a model's configuration, its generation configuration, and the code that came with
    it."""
    module.config.architectures = [type(module).__name__.removeprefix("FSDP")]
    if module.is_remote_code():
        custom_object_save(module, directory, config=cast(Any, module.config))
    module.config.save_pretrained(directory)
    if module.can_generate():
        module.generation_config.save_pretrained(directory)  # pyright: ignore
