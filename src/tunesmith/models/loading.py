"""Loading a Hugging Face model from disk or the hub, with errors that name what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch import nn
from torch._guards import detect_fake_mode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from tunesmith.config.reading.files import ADAPTER_CONFIG, is_hub_name
from tunesmith.errors import ConfigError, ModelError, boundary
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.directory import check_model
from tunesmith.models.families import check_family
from tunesmith.models.kernels.quantised import Quantize, quantise
from tunesmith.models.no_tokenizer import NoTokenizer
from tunesmith.models.parallel.shard_files import WeightFiles, fill, is_finite, shapes_of
from tunesmith.models.parallel.sharding import Sharding, materialise
from tunesmith.plan.facts.model_files import weights_in

HUB_SECONDS = 5.0
ROWS_AT_ONCE = 4096
"""Rows of the vocabulary that are compared at once."""
Differences = tuple[tuple[str, ...], tuple[str, ...]]
ANY_ERROR = Exception
"""A damaged file or an unusual configuration can raise any exception in transformers."""


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model; its family is checked and nothing else is read.

    Raises:
        ModelError: the model does not exist, or its family is not supported.
    """
    check_directory(path)
    with boundary(ModelError, f"cannot read the configuration of model '{path}'", ANY_ERROR):
        config = cast(Any, AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
        check_family(config)
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
    if not (Path(path).expanduser() / ADAPTER_CONFIG).is_file():
        check_directory(path)
    if detect_fake_mode():
        return cast(PreTrainedTokenizerBase, NoTokenizer())
    with boundary(ModelError, f"cannot load the tokenizer of model '{path}'", ANY_ERROR):
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    tokenizer = cast(PreTrainedTokenizerBase, loaded)
    if chat_template is not None:
        with boundary(
            ConfigError, f"model.chat_template: cannot read {chat_template}", (OSError, ValueError)
        ):
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer


def load_module(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    trust_remote_code: bool = False,
    auto: Any = AutoModelForCausalLM,
    quantize: Quantize | None = None,
    differences: Differences = ((), ()),
    sharding: Sharding | None = None,
    trains: bool = True,
    **settings: Any,
) -> PreTrainedModel:
    """Load a model from safetensors files, with attention through an ``AttentionContext`` and
    without dropout.

    Args:
        auto: the transformers ``AutoModel`` class with the desired head.
        quantize: the format of the linear modules' frozen weights.
        differences: name prefixes of weights that the files may lack (a score head's), and that
            only they may have.
        sharding: shard the model; each rank reads only its rows, in float32 if the model
            ``trains``.
        settings: configuration entries to set.

    Raises:
        ModelError: as in ``load_config``, or weights are missing, damaged or unknown to the
            architecture.
        ConfigError: the device cannot be used.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    dropouts = {
        k: v for k, v in config.to_dict().items() if "drop" in k and isinstance(v, float) and v > 0
    }
    for key, value in {**dict.fromkeys(dropouts, 0.0), **settings}.items():
        setattr(config, key, value)
    if takes_tf32(dtype, device):
        torch.set_float32_matmul_precision("high")  # Inductor reads this setting
    options = {
        "config": config,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": trust_remote_code,
    }
    one_by_one = sharding is not None or quantize is not None
    trains = trains and quantize is None

    def made(stored: torch.dtype) -> PreTrainedModel:
        place = None if one_by_one else device
        return _without_weights(
            path, partial(auto.from_config, dtype=stored, **options), trains, place
        )

    def read() -> PreTrainedModel:
        with boundary(ModelError, f"cannot load the weights of model '{path}'", ANY_ERROR):
            files = {
                "use_safetensors": True,
                "output_loading_info": True,
                "ignore_mismatched_sizes": True,
            }
            loaded, info = auto.from_pretrained(path, dtype=dtype, **options, **files)
        return _checked(path, cast(PreTrainedModel, loaded), info, differences)

    if not one_by_one and detect_fake_mode():
        module = made(dtype)  # a fake device holds no data
    elif not one_by_one:
        module = read()
        with _usable(device):
            cast(nn.Module, module).to(device)
    else:
        with boundary(ModelError, f"cannot make model '{path}' without its weights", ANY_ERROR):
            module = made(torch.float32 if sharding and trains and dtype.itemsize == 2 else dtype)
        _place(module, dtype, device, sharding, quantize)
        if not detect_fake_mode():
            read_shards(module, path, read, differences, sharding)
    _check_tie(path, module)
    _disable_dropout(module, dropouts)
    return module.eval()


def _place(
    module: PreTrainedModel,
    dtype: torch.dtype,
    device: str | torch.device,
    sharding: Sharding | None,
    quantize: Quantize | None,
) -> None:
    """Allocate the rows of a module without weights, this rank's or all, in the format in which
    they are kept."""
    if quantize is not None:
        quantise(module, quantize, dtype)
    if sharding is not None:
        sharding.shard(module, dtype, torch.device(device))
        return
    with _usable(device):
        materialise(module, torch.device(device))


def _usable(device: str | torch.device) -> AbstractContextManager[object]:
    message = f"system.device = '{device}' cannot hold the model: it needs torch with CUDA and a free GPU, or use 'cpu'"
    return boundary(
        ConfigError, message, (AssertionError, RuntimeError)
    )  # AssertionError: torch without CUDA


def _without_weights(
    path: str | Path, make: Callable[[], Any], trains: bool, device: str | torch.device | None
) -> PreTrainedModel:
    """A model with uninitialised parameters on a device (None: meta), and with its files'
    generation settings."""
    with ExitStack() as places:
        if device is not None:
            places.enter_context(no_init_weights())
            places.enter_context(torch.device(device))
        else:
            places.enter_context(init_empty_weights(include_buffers=False))
        module = cast(PreTrainedModel, make())
    module.tie_weights()
    if not trains:
        module.requires_grad_(False)
    if module.can_generate():
        with suppress(OSError):  # not all models have a file
            module.generation_config = GenerationConfig.from_pretrained(path)
    return module


def _disable_dropout(module: PreTrainedModel, original: Mapping[str, float]) -> None:
    """Disable dropout, with which two passes over the same tokens would give different
    log-probabilities.

    Args:
        original: the configuration's own dropout entries, which saved checkpoints keep.
    """
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for key, value in original.items():
        setattr(module.config, key, value)


def read_shards(
    module: PreTrainedModel,
    path: str | Path,
    read: Callable[[], PreTrainedModel] | None = None,
    differences: Differences = ((), ()),
    sharding: Sharding | None = None,
) -> None:
    """Read a model, or this rank's rows of a sharded one, from the files of a model, one weight at
    a time.

    Args:
        read: loads the whole model if the names in its files differ from the module's (as for fused
            experts).
        differences, sharding: as ``load_module``.

    Raises:
        ModelError: the files hold another model, or values that are not finite.
    """
    files = WeightFiles(_directory_of(path))
    known = module.state_dict().keys()
    wanted = {name for name, _ in (*module.named_parameters(), *module.named_buffers())} & known
    missing = [name for name in wanted - files.names if not name.startswith(differences[0])]
    unexpected = [name for name in files.names - known if not name.startswith(differences[1])]
    if not missing and not unexpected:  # else the module's weights are made of others
        stored = {
            name: (weight.shape, shape)
            for name, shape in shapes_of(module)
            if (weight := files.weights.get(name))
        }
        _check_shapes(path, [(name, *both) for name, both in stored.items() if both[0] != both[1]])
    with boundary(ModelError, f"cannot read the weights of model '{path}'", ANY_ERROR):
        if missing or unexpected:
            load = read or partial(type(module).from_pretrained, path, dtype=module.config.dtype)
            weights = load().state_dict()
            wrong = fill(
                module,
                lambda name, at, count: weights[name][at : at + count],
                wanted & weights.keys(),
            )
        else:
            wrong = fill(module, files.rows, wanted & files.names)
    _check_values(path, wrong if sharding is None else sharding.any_of(wrong))


def check_stored_values(path: str | Path) -> None:
    """Refuse files with values that are not finite; for an engine that reads them by itself and
    does not look.

    One weight at a time is read.

    Raises:
        ModelError: names the file and the weight.
    """
    files = WeightFiles(_directory_of(path))
    with boundary(ModelError, f"cannot read the weights of model '{path}'", ANY_ERROR):
        wrong = [
            name
            for name, weight in files.weights.items()
            if not is_finite(files.rows(name, 0, weight.shape[0] if weight.shape else 1))
        ]
    _check_values(path, wrong)


def _directory_of(path: str | Path) -> Path:
    """A model's directory; the files of a hub name are downloaded first, if they are not there."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    patterns = ["*.safetensors", "*.json"]
    return Path(
        snapshot_download(str(path), allow_patterns=patterns, ignore_patterns="consolidated*")
    )


def _checked(
    path: str | Path, module: PreTrainedModel, info: Mapping[str, Any], differences: Differences
) -> PreTrainedModel:
    """A module that transformers has loaded, if all of it comes from its files and is finite.

    Args:
        info: transformers' loading info.
    """
    _check_shapes(path, info["mismatched_keys"])
    check_names(f"model '{path}'", info["missing_keys"], info["unexpected_keys"], differences)
    _check_values(
        path, [name for name, tensor in module.state_dict().items() if not is_finite(tensor)]
    )
    return module


def _check_shapes(
    path: str | Path, different: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Refuse weights of other shapes than the configuration describes, each given as name, stored
    and described."""
    for name, stored, described in sorted(different):
        raise ModelError(
            f"{_place_of(path, name)} has the shape {list(stored)}, and config.json describes {list(described)}: "
            "the two do not belong together"
        )


def _check_values(path: str | Path, names: Iterable[str]) -> None:
    """Refuse weights that are not finite: every output would be, and training would be blamed for
    it."""
    for name in sorted(names):
        raise ModelError(
            f"{_place_of(path, name)} holds values that are not finite (nan or infinite): nothing can be computed with "
            "this model. Take a copy, or a checkpoint, from before the weights diverged"
        )


def _check_tie(path: str | Path, module: PreTrainedModel) -> None:
    """Refuse a head of its own in the files of a model whose configuration ties it to the
    embedding."""
    directory = Path(path).expanduser()
    if (
        not module.config.get_text_config().tie_word_embeddings
        or not directory.is_dir()
        or detect_fake_mode()
    ):
        return
    parts = (module.get_input_embeddings(), module.get_output_embeddings())
    ours = [
        f"{name}.weight" for part in parts for name, each in module.named_modules() if each is part
    ]
    files = WeightFiles(directory)
    if len(ours) < 2 or not files.names.issuperset(ours):
        return
    rows = files.weights[ours[0]].shape[0]
    for start in range(0, rows, ROWS_AT_ONCE):
        one, other = (files.rows(name, start, min(ROWS_AT_ONCE, rows - start)) for name in ours)
        if not one.equal(other):
            raise ModelError(
                f"{directory / 'config.json'}: tie_word_embeddings is true, and {_place_of(path, ours[1])} differs "
                f"from '{ours[0]}'. Set it to false if the head is the model's own; otherwise delete that weight"
            )


def _place_of(path: str | Path, name: str) -> str:
    """A weight and, in a local directory, its file."""
    directory = Path(path).expanduser()
    found = weights_in(directory).get(name) if directory.is_dir() else None
    return f"{found.file if found else path}: '{name}'"


def check_names(
    model: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    differences: Differences = ((), ()),
) -> None:
    """Refuse files whose weights do not match the architecture: transformers only logs a warning.

    Args:
        missing: names of the architecture that the files lack.
        unexpected: names that only the files have.
        differences: prefixes of the former and of the latter that are allowed.

    Raises:
        ModelError: with the first names.
    """
    for names, allowed, problem, effect in (
        (
            missing,
            differences[0],
            "lack weights of its architecture",
            "they would be random numbers",
        ),
        (
            unexpected,
            differences[1],
            "hold weights that its architecture does not have",
            "they would be ignored",
        ),
    ):
        wrong = sorted(name for name in names if not name.startswith(allowed))
        if wrong:
            raise ModelError(
                f"the files of {model} {problem}: {listed(wrong)}, and {effect}. "
                "config.json and the files do not belong together, or a file is incomplete: download the model again"
            )


def listed(names: Iterable[str]) -> str:
    """The first names and their number, for a message."""
    ordered = sorted(names)
    first = ", ".join(f"'{name}'" for name in ordered[:3])
    return f"{first}{' ...' if len(ordered) > 3 else ''} ({len(ordered)} in all)"


def takes_tf32(dtype: torch.dtype, device: str | torch.device) -> bool:
    """Whether matrix products use TF32, which rounds inputs to 10 bits of mantissa (bfloat16 has
    7).

    GPUs without TF32 ignore the setting, as do all GPUs with ``NVIDIA_TF32_OVERRIDE=0`` in the
    environment.
    """
    return dtype == torch.float32 and torch.device(device).type == "cuda"


@cache
def _check_hub(name: str) -> None:
    """Ask the hub only once for a model that is not in the local cache: transformers would retry
    for a minute."""
    import huggingface_hub as hub

    if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    message = (
        f"there is no model directory '{name}', and the Hugging Face hub does not give a model of that name "
        "(a private one needs HF_TOKEN)"
    )
    with boundary(ModelError, message, Exception):
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
        raise ModelError(
            f"there is no model directory '{path}', and on the hub names have an owner: Qwen/Qwen3-0.6B"
        )
    check_model(directory, whole=not detect_fake_mode())
