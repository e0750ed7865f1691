"""What ends a model's completions, as its generation configuration says it; and reading back what
is written."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import WeightConverter

from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.errors import ModelError, boundary
from tunesmith.models.parallel.shard_files import is_converted
from tunesmith.models.source import readable

GENERATION_FILE = "generation_config.json"
_FIRST = ("do_sample", "num_beams", "return_dict_in_generate", "cache_implementation")
"""Keys that decide which other keys are valid."""
_PROBE = "Hello, world!\n  1 + 1 = 2"


def read_generation(directory: str | Path) -> GenerationConfig | None:
    """The generation configuration in a model's or an adapter's files; None if there is none.

    Raises:
        ModelError: it is damaged.
    """
    directory = readable(directory)
    with boundary(ModelError, f"cannot read {Path(directory) / GENERATION_FILE}", Exception):
        try:
            return GenerationConfig.from_pretrained(directory)
        except OSError:  # not all models have a file
            return None


def set_ends(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_of_turn: int | None = None,
    saved: GenerationConfig | None = None,
    token_ids: Iterable[int] = (),
    strings: Iterable[str] = (),
) -> str | None:
    """Make a model's generation configuration hold everything that ends its completions, and valid
    to write.

    The token ids are its own, the tokenizer's EOS, the chat template's ``end_of_turn``, and
    ``token_ids``.

    Args:
        saved: replaces the module's configuration: the one that was saved with an adapter.
        token_ids, strings: what else ends a completion.

    Returns:
        A sentence that says what had to be changed in an invalid configuration; None if nothing.
    """
    if not module.can_generate():
        return None
    config, changes = mended(saved or module.generation_config)
    tokens, texts = _split(tokenizer, [*ends(config)[1], *strings])
    eos = tokenizer.eos_token_id
    own = [token for token in (eos, end_of_turn) if token is not None]
    found = list(dict.fromkeys([*ends(config)[0], *own, *tokens, *token_ids]))
    config.eos_token_id = found[0] if len(found) == 1 else found or None
    config.stop_strings = texts or None
    cast(
        Any, config
    )._from_model_config = False  # else transformers 4 replaces it by config.json's values
    module.generation_config = config
    name = module.name_or_path
    if not changes:
        return changes
    return (
        f"the {GENERATION_FILE} of {name} contradicts itself: in the models that are saved, "
        f"{changes}"
    )


def ends(config: GenerationConfig | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The token ids and the strings that end a completion."""
    ids: Any = getattr(config, "eos_token_id", None)
    strings: Any = getattr(config, "stop_strings", None)
    ids = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    return ids, () if strings is None else (strings,) if isinstance(strings, str) else tuple(
        strings
    )


def _split(tokenizer: Any, strings: Iterable[str]) -> tuple[list[int], list[str]]:
    """Strings that are one token of the tokenizer's own as ids, which every program stops at; and
    the others."""
    added: dict[str, int] = tokenizer.get_added_vocab()
    unique = list(dict.fromkeys(strings))
    return [added[text] for text in unique if text in added], [
        text for text in unique if text not in added
    ]


def mended(config: GenerationConfig) -> tuple[GenerationConfig, str | None]:
    """A copy that transformers agrees to write, and what was changed; None if it is valid as it is.

    transformers reads contradictory settings with a warning and refuses to write them. Sampling
    values without ``do_sample`` say that the model is to be sampled, so it is set. Settings that
    still have no effect are left out.
    """
    if _is_valid(config):
        return copy.deepcopy(config), None
    values = config.to_diff_dict()
    kept = _valid_part(values)
    if values.get("do_sample") is None:
        sampling = _valid_part({**values, "do_sample": True})
        if len(kept) < len(sampling) - 1:
            kept = sampling
    changes = ["do_sample = true is added"] if "do_sample" in kept.keys() - values.keys() else []
    changes += [f"{key} = {values[key]!r} is left out" for key in values if key not in kept]
    return _made(kept), ", ".join(changes)


def _valid_part(values: dict[str, Any]) -> dict[str, Any]:
    """As many of the values as are valid together."""
    kept: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: key not in _FIRST):
        if _is_valid(_made({**kept, key: values[key]})):
            kept[key] = values[key]
    return kept


def _made(values: dict[str, Any]) -> GenerationConfig:
    config = GenerationConfig()
    for key, value in values.items():
        setattr(config, key, value)
    return config


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
        config.to_json_string()
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def first_numbers(module: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first number of each weight, in the weight's own memory, so that shared weights are still
    seen as shared.

    Nothing of a model whose weights are split or joined when they are written, which takes whole
    weights.
    """
    conversions: Any = getattr(module, "_weight_conversions", None)
    loaded = conversions is not None
    if any(isinstance(c, WeightConverter) for c in conversions) if loaded else is_converted(module):
        return {}
    filled = {name: tensor for name, tensor in state.items() if tensor.numel()}
    return {name: tensor[(0,) * tensor.dim()].reshape(1) for name, tensor in filled.items()}


def read_back(
    directory: Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> str | None:
    """Read the files of a model without its weights, or of an adapter, as other programs will.

    Returns:
        How the tokenizer differs from the one that was written; None if it does not.

    Raises:
        ModelError: they cannot be read.
    """
    options = {"trust_remote_code": trust_remote_code}
    with boundary(ModelError, f"what was just written to {directory} cannot be read", Exception):
        if (directory / ADAPTER_CONFIG).is_file():
            from peft import PeftConfig

            PeftConfig.from_pretrained(str(directory))
        else:
            AutoConfig.from_pretrained(directory, **options)
        if (directory / GENERATION_FILE).is_file():
            GenerationConfig.from_pretrained(directory)
        found: Any = AutoTokenizer.from_pretrained(directory, **options)
    ours = tokenizer
    probe = _PROBE + "".join(str(token) for token in tokenizer.all_special_tokens)
    for what, one, other in (
        ("chat template", ours.chat_template, found.chat_template),
        ("special tokens", ours.special_tokens_map, found.special_tokens_map),
        ("vocabulary", ours.get_vocab(), found.get_vocab()),
        ("encoding of a text", ours(probe)["input_ids"], found(probe)["input_ids"]),
    ):
        if one != other:
            return f"its {what} is another one"
    return None
