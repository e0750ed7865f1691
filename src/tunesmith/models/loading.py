"""Reading a Hugging Face model from disk or hub, with errors that say what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion

from tunesmith.config.files import ADAPTER_CONFIG, is_hub_name
from tunesmith.errors import ConfigError, ModelError, boundary
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.families import check_family
from tunesmith.models.quantised import Quantize, let_gradients_pass, quantised_settings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
HUB_SECONDS = 5.0
_FOREIGN = Exception
"""transformers lets what a damaged file or an odd configuration raises through, of any type."""


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model that can be trained here; nothing else is read.

    Raises:
        ModelError: there is no such model, or its family cannot work.
    """
    check_directory(path)
    with boundary(ModelError, f"cannot read the configuration of model '{path}'", _FOREIGN):
        config = cast(Any, AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
        check_family(config)
    return config


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, chat_template: Path | None = None
) -> PreTrainedTokenizerBase:
    """A model's tokenizer, with its chat template replaced by a file where one is given.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
        ConfigError: the chat template cannot be read.
    """
    check_directory(path)
    with boundary(ModelError, f"cannot load the tokenizer of model '{path}'", _FOREIGN):
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    tokenizer = cast(PreTrainedTokenizerBase, found)
    if chat_template is not None:
        with boundary(ConfigError, f"model.chat_template: cannot read {chat_template}", (OSError, ValueError)):
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
    new: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    **settings: Any,
) -> PreTrainedModel:
    """The model, from safetensors only, with its attention asking an ``AttentionContext`` and without dropout.

    Dropout would make the trainer's log-probabilities differ from the sampler's, and from themselves.

    Args:
        auto: the transformers class that chooses the architecture's own, by the head that is wanted.
        quantize: keep the linear modules' weights in so few bits; they cannot be trained.
        new: what the names of weights begin with that the files need not have, such as a score head's.
        without: what those begin with that the files may have beyond the model's.
        settings: entries of the configuration to set.

    Raises:
        ModelError: as ``load_config``, or weights are missing, damaged, or not the model's.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    dropouts = {k: v for k, v in config.to_dict().items() if "drop" in k and isinstance(v, float) and v > 0}
    for key, value in {**dict.fromkeys(dropouts, 0.0), **settings}.items():
        setattr(config, key, value)
    placed = quantised_settings(quantize, dtype, device) if quantize else {}
    if takes_tf32(dtype, device):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    with boundary(ModelError, f"cannot load the weights of model '{path}'", _FOREIGN):
        loaded, info = auto.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **placed,
        )
    module = cast(PreTrainedModel, loaded)
    check_names(f"model '{path}'", info["missing_keys"], info["unexpected_keys"], new, without)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for key, value in dropouts.items():  # a checkpoint keeps what the model came with
        setattr(module.config, key, value)
    if placed:
        let_gradients_pass(module)
        return module.eval()
    named = f"the model cannot be put on system.device = '{device}' (torch with CUDA and a free GPU, or 'cpu', can)"
    with boundary(ConfigError, named, (AssertionError, RuntimeError)):  # the former where torch has no CUDA
        return cast(PreTrainedModel, cast(nn.Module, module).to(device).eval())


def check_names(
    what: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    new: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> None:
    """Refuse weights that would be made up, or left out, without a word.

    Args:
        missing, unexpected: names that the files lack, or have too many; without those that are known to be harmless.

    Raises:
        ModelError: naming some of them.
    """
    lacking = sorted(name for name in missing if not name.startswith(new))
    foreign = sorted(name for name in unexpected if not name.startswith(without))
    for names, problem, remedy in (
        (lacking, "lack weights of its architecture", "they would be random numbers"),
        (foreign, "hold weights that its architecture does not have", "they would be left out"),
    ):
        if names:
            shown = ", ".join(f"'{name}'" for name in names[:3]) + (" ..." if len(names) > 3 else "")
            raise ModelError(
                f"the files of {what} {problem}: {shown} ({len(names)} in all), and {remedy}. "
                "config.json and the files do not belong together, or a file is incomplete: get the model again"
            )


def takes_tf32(dtype: torch.dtype, device: str | torch.device) -> bool:
    """Whether matrix products round their inputs to 10 bits of mantissa (bfloat16 has 7) on GPUs that have TF32.

    Older GPUs compute in float32 all the same, and so do all with ``NVIDIA_TF32_OVERRIDE=0`` in the environment.
    """
    return dtype == torch.float32 and torch.device(device).type == "cuda"


def stored_weights(module: PreTrainedModel, named: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """A module's weights as its files have them, where transformers renames or fuses them when it loads."""
    return cast("dict[str, Tensor]", revert_weight_conversion(module, dict(named))).items()


@cache
def _check_hub(name: str) -> None:
    """Ask the hub once whether it has a model that is not in its cache here: transformers asks for a minute."""
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
    """Say what a local model directory lacks. A name such as ``Qwen/Qwen3-0.6B`` is left to the hub.

    Raises:
        ModelError: the directory is missing, or has no configuration, tokenizer or safetensors weights.
    """
    directory = Path(path).expanduser()
    if not directory.exists():
        if isinstance(path, str) and is_hub_name(path, "models"):
            _check_hub(path)
            return
        raise ModelError(f"there is no model directory '{path}', and on the hub names have an owner: Qwen/Qwen3-0.6B")
    if not directory.is_dir():
        raise ModelError(f"'{path}' is a file; give the directory of a model in Hugging Face format")
    if not (directory / "config.json").exists():
        if (directory / ADAPTER_CONFIG).exists():
            raise ModelError(
                f"'{path}' is a LoRA adapter and no whole model; make one of it and its base: tunesmith merge"
            )
        raise ModelError(f"'{path}' has no config.json: it is no model in Hugging Face format")
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"'{path}' has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): "
            "save the model's tokenizer into it with tokenizer.save_pretrained"
        )
    if not any(directory.glob("*.safetensors")):
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth"))
        found = "only pickled weights, which can run code when loaded" if pickled else "no weights"
        raise ModelError(
            f"'{path}' has {found}; save it as safetensors: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
