"""Facts about a model: the sizes of a decoder, from its configuration and the headers of its weight
files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tunesmith.errors import ModelError, boundary
from tunesmith.plan.facts.experts import NO_MIXTURES, Mixtures, expert_widths, mixtures_of
from tunesmith.plan.facts.families import DEFAULTS, LEAN_ACTIVATIONS, family
from tunesmith.plan.facts.layers import (
    ATTENDING,
    CARRYING,
    NO_MIXER,
    Mixer,
    Written,
    first,
    layer_kinds,
    mixer_of,
    narrows,
)
from tunesmith.plan.facts.model_files import check_files, count_parameters
from tunesmith.plan.facts.parameters import Sizes, count, global_key_width
from tunesmith.plan.facts.towers import TowerSizes, tower_of
from tunesmith.records.storage import read_json


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder, from its ``config.json`` and the headers of its weight files.

    ``parameters`` is None if there are no safetensors files to count in.
    """

    parameters: int | None
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int | None
    tied: bool = False
    """The head shares the embedding's weight."""
    narrow: bool = False
    """Attention has a window, chunks or a soft cap in some layers."""
    switch: int | None = None
    """Length above which sequences have different rotary frequencies (``longrope``)."""
    head_norms: bool = False
    """Queries and keys have their own norms."""
    family: str | None = None
    """The model's ``model_type``."""
    tower_parameters: int = 0
    """Parameters of a multimodal model beside its text decoder."""
    tower: TowerSizes | None = None
    """The sizes of the one that sees images; None: there is none, or they are not known."""
    own_code: bool = False
    """Its layers are Python code that comes with it."""
    activation: str | None = None
    """The configuration's name of it; None: the family's own."""
    rotates_in_part: bool = False
    """Only part of each head's dimensions is rotated."""
    attending: int | None = None
    """Layers that keep keys and values; None: all do."""
    key_numbers: int | None = None
    """Numbers of the keys of one token in all layers, if their widths differ; None:
    ``key_width`` in each."""
    latent: int = 0
    """The width of a token's latent, from which a layer makes keys and values; 0: there is none."""
    estimated: int = 0
    """Parameters by the formulas of ``facts.parameters``."""
    idle: int = 0
    """Parameters of experts that a token does not pass through."""
    carrying: int = 0
    """Layers that carry a state from token to token."""
    mixer: Mixer = NO_MIXER
    """The sizes of their mixers."""
    expert_widths: tuple[int, ...] = ()
    """The sizes of an expert's matrices; empty: the model has no experts."""
    mixtures: Mixtures = NO_MIXTURES
    widths: int = 0
    """Inputs and outputs of all linear modules within the layers, except of experts among which
    routers choose; 0: those of a Llama-shaped decoder."""

    @cached_property
    def lean(self) -> bool:
        """Whether the model runs as a few large operations (``kernels.lean``)."""
        usual = self.activation in (None, *LEAN_ACTIVATIONS)
        shaped = usual and not self.rotates_in_part and self.head_dim % 2 == 0
        return family(self.family).lean and shaped and not self.own_code

    @property
    def inner_width(self) -> int:
        """The feed-forward width that a token passes through in a layer."""
        return max(self.intermediate_size, self.mixtures.inner)

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads, which is that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def outside_layers(self) -> int:
        """Parameters of embedding and head."""
        return (1 if self.tied else 2) * self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """Bytes of one token's keys and values in all layers, or of the latents of which they are
        made."""
        if self.latent:
            return self.attention_layers * self.latent * bytes_per_number
        keys = self.key_numbers or self.attention_layers * self.key_width
        return 2 * keys * bytes_per_number

    @property
    def active(self) -> int:
        """Parameters that a token passes through, of those that are known."""
        return max(0, (self.parameters or 0) - self.idle)

    @property
    def attention_layers(self) -> int:
        """Layers that attend."""
        return self.layers if self.attending is None else self.attending

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all layers, in float32."""
        return 4 * self.carrying * (self.mixer.window + self.mixer.memory)


def read_model_facts(directory: Path) -> ModelFacts | None:
    """Facts about a local model; None if its configuration uses unknown names for the sizes.

    Raises:
        ModelError: ``config.json`` or a weight file is missing or damaged.
    """
    path = directory / "config.json"
    check_files(directory)
    whole = read_json(path, ModelError)
    with boundary(ModelError, f"cannot read {path}", AttributeError):
        _check_sizes(path, decoder_config(whole))
    facts = facts_of(whole)
    _check_end(directory, facts)
    if facts is None:
        return None
    towers = count_parameters(directory, tower=True) or 0
    return replace(facts, parameters=count_parameters(directory), tower_parameters=towers)


def facts_of(whole: Written) -> ModelFacts | None:
    """Facts from a model's configuration; ``parameters`` is None."""
    config = decoder_config(whole)
    size = {name: first(config, *names) for name, names in _SIZES.items()}
    hidden, heads, layers, vocabulary = (
        size[name] for name in ("hidden_size", "heads", "layers", "vocab_size")
    )
    kinds = layer_kinds(config, layers or 0)
    layers = layers or len(kinds)
    if not (hidden and heads and layers and vocabulary):
        return None
    tied = whole.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    carrying = sum(kind in CARRYING for kind in kinds)
    facts = ModelFacts(
        parameters=None,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=size["intermediate_size"] or 4 * hidden,
        heads=heads,
        kv_heads=size["kv_heads"] or heads,
        head_dim=size["head_dim"] or hidden // heads,
        vocab_size=vocabulary,
        context=size["context"] or None,
        tied=bool(tied),
        narrow=narrows(config, layers)
        or bool(config.get("attn_logit_softcapping", family(config.get("model_type")).softcap)),
        switch=_switch(config),
        family=config.get("model_type"),
        own_code=any(name.startswith("AutoModel") for name in whole.get("auto_map") or ()),
        activation=config.get("hidden_act") or config.get("hidden_activation"),
        rotates_in_part=_rotates_in_part(config),
        attending=sum(kind in ATTENDING for kind in kinds) if carrying else None,
        key_numbers=_key_numbers(config, kinds),
        latent=_latent(config),
        carrying=carrying,
        mixer=mixer_of(config, hidden),
        head_norms=family(config.get("model_type")).head_norms or bool(config.get("use_qk_norm")),
        expert_widths=expert_widths(config),
        tower=tower_of(whole),
    )
    sizes = Sizes(
        kinds,
        hidden,
        facts.intermediate_size,
        facts.query_width,
        facts.key_width,
        facts.mixer,
        facts.outside_layers,
    )
    counted = count(config, sizes, family(facts.family))
    mixtures = mixtures_of(config, counted)
    return replace(
        facts, estimated=counted.total, idle=counted.idle, mixtures=mixtures, widths=counted.widths
    )


def decoder_config(whole: Written) -> Written:
    """The configuration of a model's decoder, with what published ones of its family leave out."""
    config: dict[str, Any] = dict(whole.get("text_config") or whole)
    name = str(config.get("model_type"))
    if family(name).multimodal:  # sizes beside those of the towers
        config["model_type"] = name = f"{name}_text"
    for layer in (config.get("per_layer_config") or {}).values():  # as transformers saves Gemma 4
        config.setdefault("global_head_dim", layer.get("head_dim"))
        config.setdefault("num_global_key_value_heads", layer.get("num_key_value_heads"))
    parts = (first(config, "qk_nope_head_dim"), first(config, "qk_rope_head_dim"))
    if first(config, "kv_lora_rank") and all(parts):  # keys of latent attention
        config["head_dim"] = sum(parts)
    return {**DEFAULTS.get(name, {}), **config}


def _key_numbers(config: Written, kinds: Sequence[str]) -> int | None:
    """``ModelFacts.key_numbers``."""
    own = family(config.get("model_type"))
    if own.doubled_local:
        keys = first(config, "num_key_value_heads") * first(config, "head_dim")
        return sum(2 * keys if kind == "sliding_attention" else keys for kind in kinds)
    if not own.wide_global:
        return None
    narrow = first(config, "num_key_value_heads") * first(config, "head_dim")
    wide = global_key_width(config)
    return sum(wide if kind == "full_attention" else narrow for kind in kinds)


def _latent(config: Written) -> int:
    """``ModelFacts.latent``: with the part of the keys that is rotated."""
    rank = first(config, "kv_lora_rank")
    return rank and rank + first(config, "qk_rope_head_dim")


def _rope(config: Written) -> Written:
    """The rotary embedding's configuration, under its transformers 5 name or the older one."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    return scaling if isinstance(scaling, dict) else {}  # transformers refuses other values itself


def _rotates_in_part(config: Written) -> bool:
    name = "partial_rotary_factor"
    return _rope(config).get(name, config.get(name, 1.0)) != 1.0


def _switch(config: Written) -> int | None:
    """``ModelFacts.switch``, from the rotary embedding."""
    rope = _rope(config)
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    switching = [
        kind for kind in kinds if (kind.get("rope_type") or kind.get("type")) in ("longrope", "su")
    ]
    name = "original_max_position_embeddings"
    return min(
        (n for kind in switching if (n := first(config, name) or first(kind, name))), default=None
    )


_SIZES = {
    "hidden_size": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "layers": ("num_hidden_layers", "n_layer"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("block_ff_dim", "intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "model_max_length"),
}


def _check_sizes(path: Path, config: Written) -> None:
    """Raise ModelError for sizes that no decoder has; transformers divides by some of them
    unchecked."""
    for name in (name for names in _SIZES.values() for name in names):
        value = config.get(name)
        if isinstance(value, str | float) or (isinstance(value, int) and not 0 < value < 2**31):
            raise ModelError(f"{path}: {name} is {value!r}; it must be a whole number above 0")
    hidden, heads, kv_heads = (
        first(config, *_SIZES[name]) for name in ("hidden_size", "heads", "kv_heads")
    )
    if hidden and heads and not config.get("head_dim") and hidden % heads:
        raise ModelError(
            f"{path}: hidden_size = {hidden} is not divisible by {heads} attention heads"
        )
    if heads and kv_heads and heads % kv_heads:
        raise ModelError(
            f"{path}: {heads} attention heads are not divisible by num_key_value_heads = {kv_heads}"
        )


def _check_end(directory: Path, facts: ModelFacts | None) -> None:
    """Raise ModelError for an end-of-sequence token without a row in the embedding: the model could
    never stop."""
    for path in (directory / "config.json", directory / "generation_config.json"):
        if facts is None or not path.is_file():
            continue
        whole = read_json(path, ModelError)
        with boundary(ModelError, f"cannot read {path}", AttributeError):
            ends: Any = whole.get(
                "eos_token_id", (whole.get("text_config") or {}).get("eos_token_id")
            )
        for end in ends if isinstance(ends, list) else [ends]:
            if isinstance(end, int) and not -1 <= end < facts.vocab_size:
                raise ModelError(
                    f"{path}: eos_token_id is {end}, and the embedding has {facts.vocab_size} rows "
                    "(vocab_size), so the model could never stop. Correct the id, or use the file "
                    "that belongs to the model"
                )
