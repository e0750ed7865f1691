"""Facts about models on the Hugging Face hub, from their configuration only, never their
weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Thread

from tunesmith.config.reading.files import is_gguf
from tunesmith.errors import ModelError
from tunesmith.plan.facts.families import family
from tunesmith.plan.facts.gguf import read_header
from tunesmith.plan.facts.layers import Written
from tunesmith.plan.facts.llama_cpp import config_of
from tunesmith.plan.facts.model import ModelFacts, facts_of, read_model_facts
from tunesmith.plan.facts.model_files import INDEX, check_method, count_parameters, quantised_by
from tunesmith.plan.facts.model_files import ONE as WEIGHTS
from tunesmith.records.storage import read_json

PATIENCE = 5.0
"""Seconds to wait for the hub, after which the run continues without the model's size."""
CONFIG = "config.json"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def known_model_facts(path: str, *, trust_remote_code: bool = False) -> ModelFacts | None:
    """Facts about a local directory or file, or a hub name; None if neither the cache nor the hub
    has its configuration.

    Without safetensors files in the directory, the number of parameters is estimated by formula.

    Args:
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        ModelError: a local model's files are missing or damaged.
    """
    facts = _known_facts(path)
    if facts is None or not facts.own_code or trust_remote_code:
        return facts
    return replace(facts, own_code=False)


def _known_facts(path: str) -> ModelFacts | None:
    directory = Path(path).expanduser()
    if is_gguf(directory):
        return _gguf_facts(directory)
    if not directory.is_dir():
        return _hub_facts(path)
    facts = read_model_facts(directory)
    if facts is None or facts.parameters is not None:
        return facts
    return replace(facts, parameters=facts.estimated)


def known_parameters(path: str) -> int | None:
    """A model's number of parameters, from the same sources as ``known_model_facts``."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return count_parameters(directory)
    facts = known_model_facts(path)
    return facts.parameters if facts else None


def _gguf_facts(path: Path) -> ModelFacts | None:
    header = read_header(path)
    facts = facts_of(config_of(header))
    return facts and replace(facts, parameters=header.parameters)


@cache
def _hub_facts(name: str) -> ModelFacts | None:
    """Facts about a model on the hub; parameters are counted in a cached safetensors file or read
    from an index."""
    file = _file(name, CONFIG)
    if file is None:
        return None
    config: Written = read_json(file, ModelError)
    method = quantised_by(config)
    check_method(f"'{name}'", method)
    facts = facts_of(config)
    if facts is None:
        return None
    index = None if method else _file(name, INDEX)  # which counts the bytes of what is packed
    parameters: int | None = None
    if index is not None:
        metadata: Written = read_json(index, ModelError).get("metadata") or {}
        size = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")))
        by_size = size and metadata.get("total_size", 0) // size
        parameters = metadata.get("total_parameters") or by_size or None
    elif (file.parent / WEIGHTS).exists():
        parameters = count_parameters(file.parent)
    if parameters is None or not family(config.get("model_type")).multimodal:
        return replace(facts, parameters=parameters or facts.estimated)
    beside = max(0, parameters - facts.estimated)
    return replace(facts, parameters=facts.estimated, tower_parameters=beside)


def _file(name: str, file: str) -> Path | None:
    """A small file of a hub repository, from the cache or, within ``PATIENCE``, from the hub."""
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:  # not a hub name
        return None
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None or constants.HF_HUB_OFFLINE:  # the cache knows that it does not exist
        return None
    downloaded: list[str] = []

    def download() -> None:
        try:
            get_hf_file_metadata(
                hf_hub_url(name, file), timeout=PATIENCE
            )  # unlike the download, it tries only once
            downloaded.append(hf_hub_download(name, file, etag_timeout=PATIENCE))
        except Exception:  # loading the model reports what is wrong
            return

    thread = Thread(target=download, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return Path(downloaded[0]) if downloaded else None
