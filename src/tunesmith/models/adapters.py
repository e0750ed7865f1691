"""How a model gets its adapter: a new one, a saved one that training continues, or one merged into
its base."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.config.reading.files import ADAPTER_CONFIG, WEIGHTS
from tunesmith.config.schema import LoraSection
from tunesmith.errors import ConfigError, ModelError, boundary, nearest
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.decoder import Decoder
from tunesmith.models.export import read_generation
from tunesmith.models.kernels.layers import text_decoder
from tunesmith.models.kernels.selective import cast_input
from tunesmith.models.loading import auto_class
from tunesmith.models.lora import (
    ANY_OF_PEFT,
    START,
    TRAINED,
    LoraAdapter,
    check_weights,
    read_config,
    stored_embeddings,
)
from tunesmith.models.parallel.sharding import unshard_trained, whole
from tunesmith.models.score_model import ScoreModel
from tunesmith.models.source import load_config
from tunesmith.models.weight_checks import listed

_CONTINUED = frozenset((
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout",
    "fan_in_fan_out", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "init_lora_weights", "base_model_name_or_path", "revision", "task_type",
    "peft_type", "peft_version", "auto_mapping", "inference_mode", "modules_to_save",
    "runtime_config",
))  # fmt: skip
"""peft's settings of plain LoRA: two matrices beside linear modules of the decoder, whatever their
ranks and scales."""
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Initial values of the matrices (``init_lora_weights``) that leave the base's weights as they
are."""
_JOINED = ("gate_proj", "up_proj", "w1", "w3")
"""Modules that peft adapts only in pairs."""
_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "falcon_h1": ("out_proj",),
    "jamba": ("dt_proj", "router"),
    "laguna": ("gate_proj", "up_proj", "down_proj"),
    "nemotron_h": ("out_proj",),
}
"""By family, targets whose weights are read past the module, that peft refuses or does not find
again in an adapter's file, and routers."""


def attach(
    model: Decoder,
    section: LoraSection,
    *,
    path: Path | None = None,
    trust_remote_code: bool = False,
    frozen: bool = False,
) -> LoraAdapter:
    """Insert an adapter into ``model`` and freeze everything else except a new score head, and what
    the run trains of a tower.

    Args:
        section: resolved.
        path: a saved adapter to continue.
        frozen: do not train the adapter either; then no copy of it is kept as the reference.

    Raises:
        ConfigError: the model has no module with a target's name.
        ModelError: the saved adapter is of another kind or for another model.
    """
    kind = "SEQ_CLS" if isinstance(model, ScoreModel) else "CAUSAL_LM"
    own = (model, section, kind)
    peft = _fresh(*own) if path is None else _continued(*own, path, frozen)
    unshard_trained(peft, model.device)
    for part in peft.modules():
        if isinstance(part, LoraLayer):
            setattr(part, "_cast_input_dtype", cast_input)  # noqa: B010
    model.runner.bind()
    model.adapter = LoraAdapter(peft, section.save_merged, trust_remote_code)
    return model.adapter


def _fresh(model: Decoder, section: LoraSection, kind: str) -> PeftModel:
    rank = section.rank
    assert rank is not None, "a new adapter needs a rank"
    linear = linear_modules(text_decoder(model.module))
    config = LoraConfig(
        task_type=kind,
        r=rank,
        lora_alpha=cast(int, section.alpha or 2 * rank),
        lora_dropout=section.dropout,
        target_modules=_targets(model.module, section),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in linear.values()),
        modules_to_save=list(model.towers.trained) or None,
        exclude_modules=model.towers.pattern if model.towers.kept else None,
    )
    with (
        warnings.catch_warnings(),
        boundary(ModelError, "lora: peft cannot adapt this model", ANY_OF_PEFT),
    ):
        warnings.filterwarnings("ignore", "You have passed exclude_modules")  # not all towers match
        peft = get_peft_model(model.module, config)
    # For programs that load the whole model; of a frozen tower nothing is left here to exclude.
    config.exclude_modules = model.towers.pattern
    return peft


def _continued(
    model: Decoder, section: LoraSection, kind: str, path: Path, frozen: bool
) -> PeftModel:
    config = read_config(path)
    if config.task_type not in (kind, None):
        raise ModelError(f"{path} is an adapter for {config.task_type}, and this model is a {kind}")
    extensions = beyond_plain(config, model.towers.trained)
    if extensions:
        raise ModelError(
            f"{path / ADAPTER_CONFIG}: {', '.join(extensions)} changes more than two matrices "
            "beside linear modules of an unchanged base, which is what training continues. "
            f"Merge it with its base: tunesmith merge {path} OUT_DIR"
        )
    if not set(model.towers.trained) <= set(config.modules_to_save or ()):
        raise ModelError(
            f"{path} was trained with another model.vision_tower: it does not hold "
            f"{', '.join(model.towers.trained)}. Set it as the run did that saved the adapter",
            keys=("model.vision_tower", "lora.path"),
        )
    _check_embeddings(path, model)
    config.lora_dropout = section.dropout
    with boundary(ModelError, f"the adapter {path} does not fit the model", ANY_OF_PEFT):
        peft = PeftModel.from_pretrained(
            model.module, path, config=config, adapter_name=TRAINED, is_trainable=not frozen
        )
        check_weights(path, peft)
        _check_adapted(path, peft)
        if frozen:
            return peft
        peft.load_adapter(str(path), START, is_trainable=False)
        peft.set_adapter(TRAINED)
    return peft


def beyond_plain(config: Any, tower: Sequence[str] = ()) -> list[str]:
    """The settings of an adapter that make it more than plain LoRA, and what the run trains of a
    tower beside it."""
    plain = LoraConfig()
    heads = {"score", "classifier", *tower}  # peft adds both to every adapter of a score model
    set_by_user = {
        f.name for f in fields(config) if getattr(config, f.name) != getattr(plain, f.name, None)
    }
    found = sorted(set_by_user - _CONTINUED)
    if config.init_lora_weights not in _PLAIN_STARTS:
        found.append("init_lora_weights")
    if not heads.issuperset(config.modules_to_save or ()):
        found.append("modules_to_save")
    return found


def _check_embeddings(path: Path, model: Decoder) -> None:
    """Refuse an adapter whose file holds another embedding or head than the base: training would
    not save it."""
    for name, key in stored_embeddings(model.module, path).items():
        base = whole(cast(Tensor, model.module.get_submodule(name).weight))
        with safe_open(path / WEIGHTS, framework="pt", device=str(base.device)) as file:
            saved = file.get_tensor(key)
        alike = saved.equal(base.to(saved.dtype)) or saved.to(base.dtype).equal(base)
        if saved.shape != base.shape or not alike:
            raise ModelError(
                f"{path / WEIGHTS}: '{key}' {list(saved.shape)} differs from the base's {name} "
                f"{list(base.shape)}, and an adapter is trained on an unchanged base. Merge the "
                f"two: tunesmith merge {path} OUT_DIR"
            )


def _check_adapted(path: Path, peft: PeftModel) -> None:
    """Refuse an adapter on another module than a linear one of the decoder."""
    module = cast(Any, peft.get_base_model())
    linear = {id(part) for part in linear_modules(text_decoder(module)).values()}
    for name, part in module.named_modules():
        if isinstance(part, LoraLayer) and id(part.get_base_layer()) not in linear:
            raise ModelError(
                f"{path / ADAPTER_CONFIG}: target_modules adapts '{name}', and only the decoder's "
                "linear modules can be trained with an adapter. Merge it with its base: "
                f"tunesmith merge {path} OUT_DIR"
            )


def check_targets(
    base: str | Path, section: LoraSection, *, trust_remote_code: bool = False
) -> None:
    """Check ``lora.targets`` before the model's weights are loaded.

    Raises:
        ConfigError: as ``choose_targets``.
    """
    if isinstance(section.targets, tuple):
        config = load_config(base, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        _targets(module, section)


def _targets(module: PreTrainedModel, section: LoraSection) -> list[str]:
    """``choose_targets``, without those that peft refuses or takes for others.

    Raises:
        ConfigError: as ``choose_targets``, or one was asked for that is taken for another.
    """
    targets = choose_targets(linear_modules(text_decoder(module)), section.targets)
    family = module.config.model_type
    refused = _taken_for_experts(module, targets) | {*_LEFT_OUT.get(family, ())}
    if not isinstance(section.targets, tuple):
        return [target for target in targets if target not in refused]
    asked = refused & {*targets}
    if asked:
        raise ConfigError(
            f"lora.targets: in a model of type '{family}' peft refuses {listed(asked)}, or takes "
            "them for other weights, such as the stacked ones of routed experts; leave them out",
            keys=("lora.targets",),
        )
    return targets


def _taken_for_experts(module: PreTrainedModel, targets: Sequence[str]) -> set[str]:
    """The targets that peft takes for weights of experts, and not for linear modules.

    It does so also when other programs load an adapter, so no file could hold what such linear
    modules have learnt.
    """
    probe = LoraConfig(target_modules=[*targets, *_JOINED])
    convert_peft_config_for_transformers(probe, module, None)
    return {*targets} - {*cast(Sequence[str], probe.target_modules)}


def linear_modules(decoder: nn.Module) -> dict[str, nn.Module]:
    """The linear modules of a decoder, by dotted name, without the vocabulary or score head.

    A router that is one returns more than a product, which peft cannot add to.
    """
    return {
        name: part
        for name, part in decoder.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and not type(part).__name__.endswith("Router")
    }


def choose_targets(linear: Iterable[str], targets: str | Sequence[str] | None) -> list[str]:
    """Names of modules to adapt; each is a module's last name, such as ``q_proj``, or the end of
    its dotted name.

    Raises:
        ConfigError: no module has the name of a target; names the nearest.
    """
    names = list(linear)
    own = sorted({name.rpartition(".")[2] for name in names})
    if targets is None or isinstance(targets, str):
        return own
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"lora.targets: the model has no linear module '{target}'.{nearest(target, own)}",
                keys=("lora.targets",),
            )
    return list(targets)


def merge(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    end_of_turn: Callable[[Any], int | None] = lambda _: None,
    trust_remote_code: bool = False,
) -> str:
    """Merge an adapter into its base, write the whole model, and return the base's path; see
    ``Decoder.merge``.

    Raises:
        ModelError: the adapter or the base does not exist, or they do not fit together.
    """
    config = read_config(adapter)
    base = base or config.base_model_name_or_path
    if not base:
        raise ModelError(f"{adapter} does not say which model it belongs to; name it with --base")
    tokenizer = None
    if (adapter / "tokenizer_config.json").is_file():
        with boundary(ModelError, f"cannot load the tokenizer of {adapter}", ANY_OF_PEFT):
            tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=trust_remote_code)
    kind = ScoreModel if config.task_type == "SEQ_CLS" else CausalLM
    kind.merge(
        base,
        adapter,
        out,
        dtype=dtype,
        tokenizer=tokenizer,
        generation=read_generation(adapter),
        end_of_turn=end_of_turn,
        trust_remote_code=trust_remote_code,
    )
    return base
