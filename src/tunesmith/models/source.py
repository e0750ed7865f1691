"""Where a model comes from: its directory or the hub, its configuration and its tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

from huggingface_hub import snapshot_download
from torch._guards import detect_fake_mode
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from tunesmith.config.reading.files import ADAPTER_CONFIG, is_gguf, is_hub_name
from tunesmith.errors import ConfigError, ModelError, boundary
from tunesmith.models.directory import check_model
from tunesmith.models.gguf.reading import unpacked
from tunesmith.models.kernels.layers import KINDS
from tunesmith.models.no_tokenizer import NoTokenizer
from tunesmith.plan.facts.families import check_family
from tunesmith.plan.facts.model_files import check_method, quantised_by

HUB_SECONDS = 5.0
ANY_ERROR = Exception
"""A damaged file or an unusual configuration can raise any exception in transformers."""


def readable(path: str | Path) -> str | Path:
    """From where transformers reads a model: a GGUF file is unpacked, anything else is as it is.

    Raises:
        ModelError: the file is damaged, or its model is not read.
    """
    return unpacked(Path(path).expanduser()) if is_gguf(path) else path


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model; its family is checked and nothing else is read.

    Raises:
        ModelError: the model does not exist, or its family is not supported.
    """
    path = readable(path)
    check_directory(path)
    with boundary(ModelError, f"cannot read the configuration of model '{path}'", ANY_ERROR):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        check_family(config, [name for kind in KINDS.rooms for name in kind.layer_types])
        text = config.get_text_config()
        written = {} if text is config else PreTrainedConfig.get_config_dict(path)[0]
    check_method(f"'{path}'", quantised_by(vars(config)))
    vars(config).pop("quantization_config", None)  # weights are unpacked as they are read
    if text is not config and "tie_word_embeddings" not in written:
        # The configuration shows a default; engines read it of the text decoder.
        config.tie_word_embeddings = getattr(
            text, "tie_word_embeddings", config.tie_word_embeddings
        )
    return config


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, chat_template: Path | None = None
) -> PreTrainedTokenizerBase:
    """A model's tokenizer, or the one that was saved with an adapter.

    Args:
        chat_template: a file that replaces the tokenizer's own template.

    Raises:
        ModelError: the tokenizer does not exist or cannot be read.
        ConfigError: the chat template cannot be read.
    """
    path = readable(path)
    if not (Path(path).expanduser() / ADAPTER_CONFIG).is_file():
        check_directory(path)
    if detect_fake_mode():
        return cast(PreTrainedTokenizerBase, NoTokenizer())
    with boundary(ModelError, f"cannot load the tokenizer of model '{path}'", ANY_ERROR):
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    tokenizer = loaded
    if chat_template is not None:
        with boundary(
            ConfigError, f"model.chat_template: cannot read {chat_template}", (OSError, ValueError)
        ):
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8-sig")
        if not tokenizer.chat_template.strip():
            empty = f"{chat_template} is empty; leave the key out for the tokenizer's own template"
            raise ConfigError(empty, keys=("model.chat_template",))
    return tokenizer


def directory_of(path: str | Path) -> Path:
    """A model's directory; the files of a hub name are downloaded first, if they are not there."""
    directory = Path(readable(path)).expanduser()
    if directory.is_dir():
        return directory
    patterns = ["*.safetensors", "*.json"]
    others = ["consolidated*", "*/*"]  # other layouts of the same weights
    return Path(snapshot_download(str(path), allow_patterns=patterns, ignore_patterns=others))


@cache
def _check_hub(name: str) -> None:
    """Ask the hub only once for a model that is not in the local cache: transformers would retry
    for a minute."""
    import huggingface_hub as hub

    if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    nowhere = f"there is no model directory '{name}', and the Hugging Face hub"
    missing = f"{nowhere} does not give a model of that name (a private one needs HF_TOKEN)"
    away = (
        f"{nowhere} cannot be reached. Run hf download {name} --local-dir DIR where it can, and "
        "give DIR instead"
    )
    with (
        boundary(ModelError, away, Exception),
        boundary(ModelError, missing, hub.errors.HfHubHTTPError),
    ):
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)


def check_directory(path: str | Path) -> None:
    """Check that a local model directory is complete; a name such as ``Qwen/Qwen3-0.6B`` is looked
    up on the hub.

    Raises:
        ModelError: the directory is missing, or has no configuration, tokenizer or safetensors
            weights.
    """
    directory = Path(path).expanduser()
    if not directory.exists():
        if isinstance(path, str) and is_hub_name(path, "models"):
            _check_hub(path)
            return
        why = ", and on the hub names have an owner: Qwen/Qwen3-0.6B"
        if directory.parent.parent.name == "checkpoints":
            why = "; a run removes its older checkpoints (checkpoint.keep)"
        raise ModelError(f"there is no model directory '{path}'{why}")
    check_model(directory, whole=not detect_fake_mode())
