"""A model's directory written as a GGUF file, for llama.cpp and programs that are built on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tunesmith.errors import ModelError, StorageError, boundary
from tunesmith.models.export import ends, read_generation
from tunesmith.models.gguf.package import CppWeight, Form, write_file
from tunesmith.models.gguf.tokenizers import tokenizer_values
from tunesmith.models.gguf.weights import CppWeights, expert_in
from tunesmith.models.parallel.shard_files import WeightFiles
from tunesmith.models.source import directory_of, load_config, load_tokenizer
from tunesmith.plan.facts.gguf import Value
from tunesmith.plan.facts.llama_cpp import (
    FREQUENCIES,
    ROUTER,
    frequency_factors,
    ropes_of,
    values_of,
)
from tunesmith.plan.facts.model_files import is_of_tower
from tunesmith.records.storage import replacing

BLOCK = 32
"""Numbers with one scale in q8_0; matrices with other rows are written in f16, as in llama.cpp."""


def export_gguf(path: str, out: Path, form: Form, *, trust_remote_code: bool = False) -> None:
    """Write a model, of a multimodal one the text decoder, to a new file.

    Args:
        path: a directory or a hub name.
        form: the number format of matrices; vectors are float32.

    Raises:
        ModelError: llama.cpp would compute something else, or the model cannot be read.
        StorageError: ``out`` exists, or cannot be written.
    """
    if os.path.lexists(out):
        raise StorageError(f"{out} exists already; name a new file")
    config = load_config(path, trust_remote_code=trust_remote_code).get_text_config().to_dict()
    cpp = CppWeights(config)
    sizes = values_of(config)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    weights = _weights(path, cpp, form)
    rows = next(weight.shape[0] for weight in weights if weight.name == "token_embd.weight")
    values: dict[str, Value] = {"general.type": "model", "general.name": Path(path).name}
    values |= {f"{cpp.family.architecture}.{name}": value for name, value in sizes.items()}
    values |= tokenizer_values(tokenizer, rows, ends(read_generation(path))[0])
    rope = ropes_of(config)[0]
    if rope.get("rope_type") == "llama3":
        width = sizes["attention.key_length"]
        assert isinstance(width, int)
        factors = torch.tensor(frequency_factors(rope, width))
        weights.append(CppWeight(FREQUENCIES, (len(factors),), "f32", lambda: factors))
    with boundary(StorageError, f"cannot write {out}", OSError), replacing(out) as unfinished:
        write_file(unfinished, cpp.family.architecture, form, values, weights)


def _weights(path: str, cpp: CppWeights, form: Form) -> list[CppWeight]:
    """Raises ModelError: the model has other weights than its family in llama.cpp."""
    files = WeightFiles(directory_of(path))
    tied = cpp.config.get("tie_word_embeddings")
    sources: dict[str, list[str]] = {}
    for name in sorted(files.names, key=lambda name: (expert_in(name), name)):
        stored = cpp.stored_as(name)
        if is_of_tower(name) or (tied and stored == "output.weight"):
            continue
        if stored is None:
            raise ModelError(
                f"{path}: '{name}' cannot be written as GGUF: llama.cpp's "
                f"{cpp.family.architecture} has no such weight"
            )
        sources.setdefault(stored, []).append(name)
    missing = sorted(cpp.expected() - sources.keys())
    if missing:
        raise ModelError(f"{path}: the weights for {', '.join(missing[:5])} are missing")
    made: list[CppWeight] = []
    for stored, names in sources.items():
        shape = files.weights[names[0]].shape
        whole = (len(names), *shape) if len(names) > 1 else shape
        read = partial(_read, files, cpp, stored, names)
        made.append(CppWeight(stored, whole, _form(stored, whole, form), read))
    return made


def _read(files: WeightFiles, cpp: CppWeights, stored: str, names: Sequence[str]) -> Tensor:
    """A weight's numbers, or those of a layer's experts one after the other."""
    parts = [files.rows(name, 0, files.weights[name].shape[0]).float() for name in names]
    return cpp.to_file(stored, torch.stack(parts) if len(parts) > 1 else parts[0])


def _form(stored: str, shape: Sequence[int], wanted: Form) -> Form:
    if len(shape) == 1 or f".{ROUTER}." in stored:
        return "f32"
    return "f16" if wanted == "q8_0" and shape[-1] % BLOCK else wanted
