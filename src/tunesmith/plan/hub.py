"""Facts about models on the Hugging Face hub, from their configuration and never from their weights."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from tunesmith.errors import ModelError, boundary
from tunesmith.plan.facts import ModelFacts, count_parameters, facts_of, read_model_facts

PATIENCE = 5.0
"""Seconds to wait for the hub; after them the run continues without the model's size."""
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def known_model_facts(path: str) -> ModelFacts | None:
    """Facts of a local directory or a hub name; None if neither the cache nor the hub has its configuration.

    Raises:
        ModelError: a local model's files are missing or damaged.
    """
    directory = Path(path).expanduser()
    return read_model_facts(directory) if directory.is_dir() else _hub_facts(path)


def known_parameters(path: str) -> int | None:
    """The number of a model's parameters, found as in ``known_model_facts``."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return count_parameters(directory)
    found = _hub_facts(path)
    return found.parameters if found else None


@cache
def _hub_facts(name: str) -> ModelFacts | None:
    """Parameters are counted in the safetensors file if it is in the cache, or read from the index of several files."""
    found = _file(name, CONFIG)
    if found is None:
        return None
    with boundary(ModelError, f"cannot read {found}", (OSError, ValueError)):
        config: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    facts = facts_of(config)
    if facts is None:
        return None
    index = _file(name, INDEX)
    whole = found.parent / WEIGHTS
    parameters: int | None = None
    if index is not None:
        with boundary(ModelError, f"cannot read {index}", (OSError, ValueError)):
            told: dict[str, Any] = json.loads(index.read_text(encoding="utf-8")).get("metadata") or {}
        size = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")))
        parameters = told.get("total_parameters") or (size and told.get("total_size", 0) // size) or None
    elif whole.exists():
        parameters = count_parameters(found.parent)
    return replace(facts, parameters=parameters or estimated_parameters(config, facts))


def estimated_parameters(config: dict[str, Any], facts: ModelFacts) -> int:
    """Of a Llama-shaped decoder, with experts where it has some; biases and a router's weights are left out."""
    config = config.get("text_config") or config
    hidden = facts.hidden_size
    attention = 2 * hidden * (facts.heads + facts.kv_heads) * facts.head_dim
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    inner = config.get("moe_intermediate_size") or facts.intermediate_size
    layer = attention + 3 * hidden * inner * experts + 2 * hidden
    embedding = facts.vocab_size * hidden * (1 if facts.tied else 2)
    return facts.layers * layer + embedding + hidden


def _file(name: str, file: str) -> Path | None:
    """A small file of a hub repository, from the cache or, within ``PATIENCE``, from the hub."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:  # no hub name at all
        return None
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None or constants.HF_HUB_OFFLINE:  # known not to be there
        return None
    found: list[str] = []

    def download() -> None:
        try:
            found.append(hf_hub_download(name, file, etag_timeout=PATIENCE))
        except Exception:  # whatever is wrong is told when the model loads
            return

    thread = Thread(target=download, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return Path(found[0]) if found else None
