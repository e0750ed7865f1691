"""The families that llama.cpp reads, and what its files call the sizes and weights that a Hugging
Face configuration names; both ways.

llama.cpp computes part of what a configuration can say without asking the file: a family lists it
in ``fixed``, and a model that says something else is refused.
"""

from __future__ import annotations

import math
import struct
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunesmith.errors import ModelError
from tunesmith.plan.facts.gguf import Header, Value
from tunesmith.plan.facts.layers import Written
from tunesmith.records.plain import JsonObject
from tunesmith.records.toml import table_beside

_TABLES = table_beside(__file__, "llama_cpp.toml")
TOP: Mapping[str, str] = _TABLES["top"]
EXPERTS: Mapping[str, str] = _TABLES["parts"]["experts"]
"""Matrices of a layer's experts, which lie in one weight."""
ROUTER = "ffn_gate_inp"
FREQUENCIES = "rope_freqs.weight"
"""What the frequencies of the rotary embedding are divided by, in Llama 3's scaling."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The same in all published models with Llama 3's scaling; GGUF files do not contain them."""
_LLAMA3_CONTEXT = 8192
_YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}


@dataclass(frozen=True, slots=True)
class CppFamily:
    """A family that llama.cpp reads."""

    architecture: str
    """Its name in llama.cpp."""
    fixed: Mapping[str, object]
    """What llama.cpp computes, whatever the file says."""
    parts: Mapping[str, str]
    """Parts of a layer, as llama.cpp calls them."""
    sizes: Mapping[str, str]
    neighbours: bool = False
    """The rotary embedding turns neighbouring numbers of a head, not those half a head apart."""
    biases: Sequence[str] = ()
    """Parts that may have a bias in llama.cpp, beside queries, keys and values."""
    global_every: int = 0
    """Every n-th layer attends to all tokens, the others within a window; 0: all layers do."""


def _family(said: JsonObject) -> CppFamily:
    usual = {"fixed": {"hidden_act": "silu"}, "parts": ("attention", "mlp"), "sizes": ("plain",)}
    table: JsonObject = {**usual, **said}
    unset: Sequence[str] = table.pop("unset", ())
    table["fixed"] = {**table["fixed"], **dict.fromkeys(unset)}
    for kind in ("parts", "sizes"):
        table[kind] = dict(ChainMap(*(_TABLES[kind][name] for name in reversed(table[kind]))))
    return CppFamily(**table)


FAMILIES: Mapping[str, CppFamily] = {
    name: _family(table) for name, table in _TABLES["family"].items()
}
"""By ``model_type``; of two with one name in llama.cpp, a file is read as the first."""


def cpp_family(config: Written) -> CppFamily:
    """The family of a decoder's configuration.

    Raises:
        ModelError: llama.cpp has none that computes the same.
    """
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise _refused(f"family '{name}'", ", ".join(FAMILIES))
    return FAMILIES[name]


def _refused(what: str, valid: str) -> ModelError:
    return ModelError(f"{what} cannot be written as GGUF; valid: {valid}")


# From a configuration to a file


def values_of(config: Written) -> dict[str, Value]:
    """What a file says of a decoder's sizes, by names without the architecture.

    Args:
        config: as transformers writes it, with all defaults.

    Raises:
        ModelError: llama.cpp would compute something else.
    """
    family = cpp_family(config)
    for name, valid in family.fixed.items():
        if config.get(name, valid) != valid:
            raise _refused(f"{name} = {config[name]!r} of {config['model_type']}", f"{valid!r}")
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values: dict[str, Value] = {
        **{key: config[name] for name, key in family.sizes.items()},
        "vocab_size": config["vocab_size"],
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": width,
    }
    ropes = ropes_of(config)
    values |= _rope_values(ropes[0])
    if family.global_every:
        return values | _window_values(config, family, width, ropes[1])
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise _refused(f"layer_types with windows of {config['model_type']}", "full_attention")
    window = config.get("sliding_window")
    if window and not config.get("layer_types"):  # as far as the window reaches, it is none
        values["context_length"] = min(window, config["max_position_embeddings"])
    return values


def ropes_of(config: Written) -> tuple[Written, Written]:
    """The rotary embedding of layers that attend to all tokens, and of those with a window."""
    both: JsonObject = dict(config.get("rope_parameters") or {})
    return both.get("full_attention", both), both.get("sliding_attention", both)


def _rope_values(rope: Written) -> dict[str, Value]:
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(f"partial_rotary_factor = {rope['partial_rotary_factor']}", "1.0")
    values: dict[str, Value] = {"rope.freq_base": float(rope["rope_theta"])}
    if kind == "default":
        return values
    if kind not in ("linear", "yarn", "llama3"):
        raise _refused(f"rope_type '{kind}'", "default, linear, yarn, llama3")
    if kind != "linear":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "llama3":
        return values  # its factors are a weight: FREQUENCIES
    values["rope.scaling.type"] = kind
    values["rope.scaling.factor"] = float(rope["factor"])
    if kind == "linear":
        return values
    other = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(name)]
    if other or not rope.get("truncate", True):
        raise _refused(f"yarn with {', '.join(other) or 'truncate = false'}", ", ".join(_YARN))
    said = {key: rope.get(name) for name, key in _YARN.items()}
    return values | {key: float(value) for key, value in said.items() if value is not None}


def _window_values(
    config: Written, family: CppFamily, width: int, rope: Written
) -> dict[str, Value]:
    layers = config["num_hidden_layers"]
    kinds = [_kind(layer, family) for layer in range(layers)]
    if config.get("layer_types") != kinds:
        raise _refused(
            f"this order of layer_types of {config['model_type']}",
            f"full_attention in every layer whose number is divisible by {family.global_every}",
        )
    valid = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else width
    if config["query_pre_attn_scalar"] != valid:
        raise _refused(f"query_pre_attn_scalar = {config['query_pre_attn_scalar']}", str(valid))
    if rope.get("rope_type", "default") != "default":
        raise _refused(f"rope_type '{rope['rope_type']}' of layers with a window", "default")
    values: dict[str, Value] = {"rope.freq_base_swa": float(rope["rope_theta"])}
    cap = config.get("final_logit_softcapping")
    return values | ({"final_logit_softcapping": float(cap)} if cap else {})


def _kind(layer: int, family: CppFamily) -> str:
    every = family.global_every
    return "full_attention" if not every or (layer + 1) % every == 0 else "sliding_attention"


def frequency_factors(rope: Written, width: int) -> list[float]:
    """What Llama 3's scaling divides the frequencies of a head of this width by."""
    factor = rope["factor"]
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    factors: list[float] = []
    for index in range(0, width, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / width)
        turns = rope["original_max_position_embeddings"] / wavelength
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - share) / factor + share))
    return factors


# From a file to a configuration


def config_of(header: Header) -> JsonObject:
    """The Hugging Face configuration of a file's model.

    Raises:
        ModelError: its family is not read, or it lacks a size.
    """
    name = family_in(header)
    family = FAMILIES[name]
    width = _whole(header, "attention.key_length", default=0)
    config: JsonObject = {
        "model_type": name,
        **{size: _whole(header, key) for size, key in family.sizes.items()},
    }
    config["head_dim"] = width or config["hidden_size"] // config["num_attention_heads"]
    config |= {
        "vocab_size": header.pieces["token_embd.weight"].shape[0],
        "rms_norm_eps": _short(header.size("attention.layer_norm_rms_epsilon"), 1e-6),
        "tie_word_embeddings": "output.weight" not in header.pieces,
        "rope_parameters": _rope_in(header, config["head_dim"]),
        **family.fixed,
    }
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.pieces
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.pieces
    if not family.global_every:
        return config
    layers = config["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": _short(header.size("rope.freq_base_swa"), 1e4)}
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": local,
    }
    config["layer_types"] = [_kind(layer, family) for layer in range(layers)]
    whole = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = whole if layers == 62 else config["head_dim"]
    cap = header.size("final_logit_softcapping")
    config["final_logit_softcapping"] = _short(cap, 0.0) or None
    return config


def family_in(header: Header) -> str:
    """The ``model_type`` of a file's model.

    Raises:
        ModelError: it is not read.
    """
    architecture = header.architecture
    for name, family in FAMILIES.items():
        takes = "num_local_experts" in family.sizes or not _whole(header, "expert_count", default=0)
        if family.architecture == architecture and takes:
            return name
    valid = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES.values()))
    raise ModelError(
        f"{header.path}: models of llama.cpp's '{architecture}' with these sizes are not read from "
        f"GGUF; valid: {valid}, without experts but in qwen3moe. Name the model it was made from"
    )


def _whole(header: Header, key: str, *, default: int | None = None) -> int:
    value = header.size(key)
    if value is None and key == "attention.head_count_kv":
        value = header.size("attention.head_count")
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        value = value[0]
    if value is None and default is not None:
        return default
    if not isinstance(value, int):
        raise ModelError(f"{header.path}: {header.architecture}.{key} is {value!r}, not a number")
    return value


def _short(value: Value | None, default: float) -> float:
    """A number in float32 as it was written in decimals."""
    return float(f"{value:.7g}") if isinstance(value, int | float) else default


def _rope_in(header: Header, width: int) -> JsonObject:
    rope: JsonObject = {
        "rope_type": "default",
        "rope_theta": _short(header.size("rope.freq_base"), 10_000.0),
    }
    kind = header.size("rope.scaling.type") or "none"
    original = header.size("rope.scaling.original_context_length")
    if FREQUENCIES in header.pieces:
        return _llama3_in(header, rope, width, original or _LLAMA3_CONTEXT)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{header.path}: rope.scaling.type '{kind}' is not read from GGUF; valid: linear, yarn"
        )
    rope |= {"rope_type": kind, "factor": _short(header.size("rope.scaling.factor"), 1.0)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        said = {name: header.size(key) for name, key in _YARN.items()}
        rope |= {name: _short(value, 0.0) for name, value in said.items() if value is not None}
    return rope


def _llama3_in(header: Header, rope: Written, width: int, original: Value) -> JsonObject:
    piece = header.pieces[FREQUENCIES]
    with header.path.open("rb") as file:
        file.seek(piece.start)
        data = file.read(4 * (width // 2))
    factors = struct.unpack(f"<{len(data) // 4}f", data)
    scaled = {
        **rope,
        **_LLAMA3,
        "rope_type": "llama3",
        "factor": _short(max(factors, default=1.0), 1.0),
        "original_max_position_embeddings": original,
    }
    ours = frequency_factors(scaled, width)
    pairs = zip(ours, factors, strict=False)
    alike = all(math.isclose(one, other, rel_tol=1e-4) for one, other in pairs)
    if len(ours) != len(factors) or not alike:
        raise ModelError(f"{header.path}: {FREQUENCIES} are not the factors of Llama 3's scaling")
    return scaled
