"""A GGUF file unpacked to a model's directory, from which everything else loads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_WEIGHTS_FILE_PATTERN
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tunesmith.errors import ModelError, StorageError, boundary
from tunesmith.models.gguf.package import bytes_read, dtype_read, read_weight
from tunesmith.models.gguf.tokenizers import ends_in, tokenizer_of
from tunesmith.models.gguf.weights import CppWeights
from tunesmith.models.parallel.shard_files import FILE_BYTES
from tunesmith.plan.facts.gguf import Header, read_header
from tunesmith.plan.facts.llama_cpp import FREQUENCIES, config_of
from tunesmith.records.storage import cache_folder, replacing


def unpacked(path: Path) -> Path:
    """The directory in the cache that holds a file's model; it is made if it is not there.

    Raises:
        ModelError: the file is damaged, or its model is not read.
        StorageError: the directory cannot be written.
    """
    with boundary(ModelError, f"cannot read {path}", OSError):
        status = path.stat()
    subject = (str(path.resolve()), status.st_size, status.st_mtime_ns, version("tunesmith"))
    digest = hashlib.sha256(repr(subject).encode()).hexdigest()[:12]
    directory = cache_folder() / "gguf" / f"{path.stem}-{digest}"
    if directory.is_dir():
        return directory
    header = read_header(path)  # the whole vocabulary: only where it is needed
    with boundary(StorageError, f"cannot unpack {path} to {directory}", OSError):
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(directory) as unfinished:
                unfinished.mkdir()
                _unpack(header, unfinished)
        except OSError:
            if not directory.is_dir():  # else another process was faster
                raise
    return directory


def _unpack(header: Header, directory: Path) -> None:
    config = config_of(header)
    cpp = CppWeights(config)
    tokenizer = tokenizer_of(header)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    dtype = dtype_read(header.pieces["token_embd.weight"])
    made = AutoConfig.for_model(**config, **special, dtype=dtype)
    made.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[made.model_type]]
    made.save_pretrained(directory)
    ends = ends_in(header)
    GenerationConfig(**{**special, "eos_token_id": ends or None}).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _write_weights(header, cpp, directory)


def _write_weights(header: Header, cpp: CppWeights, directory: Path) -> None:
    """Write all weights, one file's in memory at a time."""
    names: dict[str, list[str]] = {}
    for stored in header.pieces:
        if stored == FREQUENCIES:  # the configuration says them
            continue
        names[stored] = cpp.names_of(stored)
        if not names[stored]:
            raise ModelError(
                f"{header.path}: {stored} is no weight of {header.architecture} that is read"
            )
    missing = sorted(cpp.expected() - names.keys())
    if missing:
        raise ModelError(f"{header.path}: the weights {', '.join(missing[:5])} are missing")
    split = split_state_dict_into_shards_factory(
        {stored: bytes_read(header.pieces[stored]) for stored in names},
        get_storage_size=int,
        filename_pattern=SAFETENSORS_WEIGHTS_FILE_PATTERN,
        max_shard_size=FILE_BYTES,
    )
    index: dict[str, str] = {}
    for file, inside in split.filename_to_tensors.items():
        weights = dict(_weights_of(header, cpp, inside, names))
        save_file(weights, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(weights, file)
    if split.is_sharded:
        text = json.dumps({"metadata": split.metadata, "weight_map": index}, indent=2)
        (directory / SAFETENSORS_INDEX_FILE).write_text(text, encoding="utf-8")


def _weights_of(
    header: Header, cpp: CppWeights, stored: list[str], names: dict[str, list[str]]
) -> Iterator[tuple[str, Tensor]]:
    for each in stored:
        weight = cpp.from_file(each, read_weight(header, each))
        parts = [weight] if len(names[each]) == 1 else weight.unbind()
        yield from zip(names[each], (part.contiguous() for part in parts), strict=True)
