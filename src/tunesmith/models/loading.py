"""Loading the weights of a Hugging Face model, with errors that name what is missing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from torch._guards import detect_fake_mode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from tunesmith.errors import ConfigError, ModelError, boundary
from tunesmith.models.kernels.attention import ATTENTION_NAME
from tunesmith.models.kernels.layers import comes_with_model
from tunesmith.models.kernels.quantised import (
    QuantisedLinear,
    Quantize,
    quantise,
    quantised_weights,
)
from tunesmith.models.parallel.shard_files import (
    WeightFiles,
    conversions_of,
    fill,
    is_converted,
    is_finite,
    renamed,
    shapes_of,
    stored_names,
    turned_names,
)
from tunesmith.models.parallel.sharding import Sharding, materialise, whole_dtype
from tunesmith.models.source import ANY_ERROR, directory_of, load_config, readable
from tunesmith.models.towers import Towers
from tunesmith.models.weight_checks import (
    Differences,
    check_names,
    check_shapes,
    check_tie,
    check_values,
)
from tunesmith.plan.facts.experts import ExpertsImplementation, expert_widths, implementation
from tunesmith.plan.facts.families import family
from tunesmith.plan.facts.model_files import is_packed
from tunesmith.types import VisionTower


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a model is loaded."""

    dtype: torch.dtype
    device: str | torch.device
    trust_remote_code: bool = False
    quantize: Quantize | None = None
    """The format of the linear modules' frozen weights."""
    sharding: Sharding | None = None
    """Shard the model; each rank reads only its rows, in float32 if the model ``trains``."""
    trains: bool = True
    experts: ExpertsImplementation | None = None
    """How the experts of a mixture compute; None: in the way that is best for the device."""
    tower: VisionTower = "frozen"
    """What of a multimodal model's tower is trained."""
    like: PreTrainedModel | None = None
    """A module of the same files that is sharded so, whose rows this one takes."""


def load_module(
    path: str | Path,
    how: Loading,
    *,
    auto: Any = AutoModelForCausalLM,
    differences: Differences = ((), ()),
    **settings: Any,
) -> tuple[PreTrainedModel, Towers]:
    """Load a model from safetensors files, with attention through an ``AttentionContext`` and
    without dropout; of a multimodal one, only the text decoder and its head, unless its tower is
    trained.

    Args:
        auto: the transformers ``AutoModel`` class with the desired head.
        differences: name prefixes of weights that the files may lack (a score head's), and that
            only they may have.
        settings: configuration entries to set.

    Raises:
        ModelError: as in ``load_config``, or weights are missing, damaged or unknown to the
            architecture.
        ConfigError: the device cannot be used.
    """
    files = readable(path)
    config = load_config(files, trust_remote_code=how.trust_remote_code)
    dropouts = _set(config, settings)
    if takes_tf32(how.dtype, how.device):
        torch.set_float32_matmul_precision("high")  # Inductor reads this setting
    options: dict[str, Any] = {
        "config": config,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": how.trust_remote_code,
    }
    eager = _experts_of(config, how) == "eager"
    if eager:
        options["experts_implementation"] = "eager"
    kind = auto_class(config, auto)
    if how.trust_remote_code and getattr(config, "auto_map", None):
        _check_own_code(path, partial(kind.from_config, **options))
    module, towers = _with_weights(files, kind, options, how, differences)
    if eager and config.model_type.startswith("llama4"):  # transformers has one way for these
        from tunesmith.models.kernels.llama4 import compute_one_by_one

        compute_one_by_one(module)
    check_tie(files, module)
    module.name_or_path = str(path)  # by which an adapter names its base
    _disable_dropout(module, dropouts)
    return module.eval(), towers


def _with_weights(
    files: str | Path, auto: Any, options: Mapping[str, Any], how: Loading, differences: Differences
) -> tuple[PreTrainedModel, Towers]:
    """A model on its device with its towers: read by transformers, or one weight at a time."""
    make = partial(auto.from_config, **options)
    load = partial(auto.from_pretrained, files, dtype=how.dtype, **options)
    read = partial(_read, files, load, differences)
    trains = how.trains and how.quantize is None
    packed = not detect_fake_mode() and is_packed(directory_of(files))  # transformers keeps it so
    if how.sharding is not None or how.quantize is not None or packed:
        in_float32 = how.sharding and trains and how.dtype.itemsize == 2
        stored = torch.float32 if in_float32 else how.dtype
        with boundary(ModelError, f"cannot make model '{files}' without its weights", ANY_ERROR):
            module = _without_weights(files, partial(make, dtype=stored), trains, None)
        towers = Towers.beside(module, files, how.tower)
        _place(module, how)
        if not detect_fake_mode() and how.like is None:
            read_shards(module, files, read, towers.allowed(differences), how.sharding)
        return module, towers
    if detect_fake_mode():  # a fake device holds no data
        module = _without_weights(files, partial(make, dtype=how.dtype), trains, how.device)
        return module, Towers.beside(module, files, how.tower)
    module = read()
    towers = Towers.beside(module, files, how.tower)
    with _usable(how.device):
        cast(nn.Module, module).to(how.device)
    return module, towers


def _check_own_code(path: str | Path, make: Callable[[], PreTrainedModel]) -> None:
    """Refuse code that comes with a model and does not call the attention function it is given,
    before any weight is read."""
    with boundary(ModelError, f"cannot make model '{path}' without its weights", ANY_ERROR):
        module = _without_weights(path, make, trains=False, device=None)
    for part in module.modules():
        exchanges = getattr(part, "_supports_attention_backend", True)
        if comes_with_model(part) and not exchanges:
            raise ModelError(
                f"{type(part).__name__}, the code that comes with '{path}', does not say that its "
                "attention can be exchanged (_supports_attention_backend): packed sequences would "
                "see each other. Leave model.trust_remote_code out if transformers has this family",
                keys=("model.trust_remote_code",),
            )


def _set(config: PreTrainedConfig, settings: Mapping[str, object]) -> dict[str, float]:
    """Change entries of a configuration, and set its dropouts to zero.

    Returns:
        The dropouts that it had.
    """
    named = {key: value for key, value in config.to_dict().items() if "drop" in key}
    dropouts = {key: p for key, p in named.items() if isinstance(p, float) and p > 0}
    for key, value in {**dict.fromkeys(dropouts, 0.0), **settings}.items():
        setattr(config, key, value)
    return dropouts


def _experts_of(config: PreTrainedConfig, how: Loading) -> ExpertsImplementation:
    """``grouped_mm`` is also what transformers does by itself."""
    widths = expert_widths(config.get_text_config().to_dict())
    if how.experts is not None or not widths:
        return how.experts or "grouped_mm"
    on_gpu = torch.device(how.device).type == "cuda"
    return implementation(widths, how.dtype.itemsize, on_gpu=on_gpu)[0]


def auto_class(config: Any, auto: Any = AutoModelForCausalLM) -> Any:
    """The transformers ``AutoModel`` class that makes a model with this configuration."""
    return AutoModelForImageTextToText if family(config.model_type).multimodal else auto


def _read(path: str | Path, load: Callable[..., Any], differences: Differences) -> PreTrainedModel:
    """A module that transformers loads, if all of it comes from its files and is finite."""
    failed = f"cannot load the weights of model '{path}'"
    with boundary(ModelError, failed, ANY_ERROR), _without_report():
        loaded, info = load(
            use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    module = loaded
    check_shapes(path, info["mismatched_keys"])
    check_names(f"model '{path}'", info["missing_keys"], info["unexpected_keys"], differences)
    check_values(
        path, [name for name, tensor in module.state_dict().items() if not is_finite(tensor)]
    )
    return module


@contextmanager
def _without_report() -> Generator[None]:
    """Keep back transformers' list of missing and unknown weights, which ``_read`` judges itself: a
    new head is no fault. Errors refer to the list of failed conversions."""

    def wanted(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or "CONVERSION" in text

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _place(module: PreTrainedModel, how: Loading) -> None:
    """Allocate the rows of a module without weights, this rank's or all, in the format in which
    they are kept."""
    device = torch.device(how.device)
    if how.quantize is not None:
        quantise(module, how.quantize, how.dtype)
    if how.sharding is not None:
        how.sharding.shard(module, how.dtype, device, how.like)
        return
    with _usable(how.device):
        materialise(module, device)


def _usable(device: str | torch.device) -> AbstractContextManager[object]:
    message = (
        f"system.device = '{device}' cannot hold the model: it needs torch with CUDA and a free "
        "GPU, or use 'cpu'"
    )
    # AssertionError: torch without CUDA
    return boundary(ConfigError, message, (AssertionError, RuntimeError))


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
        module = make()
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(whole_dtype(module, name, tensor.dtype))
    module.tie_weights()
    conversions = conversions_of(module)
    if conversions:  # transformers finds them by the name of the class, which sharding changes
        vars(module)["_weight_conversions"] = conversions
    if not trains:
        module.requires_grad_(False)
    if module.can_generate():
        with suppress(OSError):  # not all models have a file
            module.generation_config = GenerationConfig.from_pretrained(path)
    return module


def cast_weights(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model's weights a dtype, but float32 to those that transformers would load in it."""
    made = type(module)._from_config  # pyright: ignore[reportPrivateUsage]
    make = partial(made, copy.deepcopy(module.config), dtype=dtype)
    like = _without_weights(str(module.name_or_path), make, trains=False, device=None)
    dtypes = {name: tensor.dtype for name, tensor in like.state_dict().items()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtypes.get(name, dtype))


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
    directory = directory_of(path)
    known = module.state_dict().keys()
    wanted = {name for name, _ in (*module.named_parameters(), *module.named_buffers())} & known
    files = WeightFiles(directory)
    turned = turned_names(module)
    if not wanted <= files.names:
        files = WeightFiles(directory, stored_names(module))
    elif is_converted(module) and not turned:  # then they are saved under the names they came with
        vars(module)["_weight_conversions"] = []
    missing = [name for name in wanted - files.names if not name.startswith(differences[0])]
    unexpected = [name for name in files.names - known if not name.startswith(differences[1])]
    if not missing and not unexpected:  # else the module's weights are made of others
        there = files.weights
        own = [(name, shape) for name, shape in shapes_of(module) if name in there]
        shapes = [(name, there[name].shape, shape) for name, shape in own]
        different = [each for each in shapes if each[1] != each[2]]
        missing = [name for name, *_ in different if turned and name.endswith(turned)]
        check_shapes(path, [each for each in different if each[0] not in missing])
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
    check_values(path, wrong if sharding is None else sharding.any_of(wrong))


def quantised_in(
    path: str | Path,
    quantize: Quantize,
    dtype: torch.dtype,
    device: str,
    *,
    trust_remote_code: bool = False,
) -> dict[str, QuantisedLinear]:
    """The modules that ``load_module`` quantises, without their bytes, by the names of their
    weights in the model and in its files; they round weights that are on ``device``."""
    files = readable(path)
    config = load_config(files, trust_remote_code=trust_remote_code)
    make = partial(auto_class(config).from_config, config, trust_remote_code=trust_remote_code)
    with boundary(ModelError, f"cannot make model '{files}' without its weights", ANY_ERROR):
        module = _without_weights(files, make, trains=False, device=None)
    quantise(module, quantize, dtype)
    found = quantised_weights(module)
    for part in found.values():
        for name, levels in list(part.named_buffers()):
            setattr(part, name, levels.to(device))
    return found | {stored: found[name] for name, stored in renamed(module, found).items()}


def takes_tf32(dtype: torch.dtype, device: str | torch.device) -> bool:
    """Whether matrix products use TF32, which rounds inputs to 10 bits of mantissa (bfloat16 has
    7).

    GPUs without TF32 ignore the setting, as do all GPUs with ``NVIDIA_TF32_OVERRIDE=0`` in the
    environment.
    """
    return dtype == torch.float32 and torch.device(device).type == "cuda"
