"""Names and numbers of a model's weights in llama.cpp's files; both ways."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from tunesmith.plan.facts.families import family
from tunesmith.plan.facts.layers import Written
from tunesmith.plan.facts.llama_cpp import EXPERTS, TOP, CppFamily, cpp_family

_BESIDE_TOWERS = re.compile(r"(model\.)?language_model\.(model\.)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class CppWeights:
    """The weights of a decoder with a given configuration."""

    config: Written

    @property
    def family(self) -> CppFamily:
        return cpp_family(self.config)

    def stored_as(self, name: str) -> str | None:
        """A weight's name in llama.cpp; the matrices of a layer's experts share one. None: it has
        none."""
        base, _, kind = _BESIDE_TOWERS.sub("model.", name, count=1).rpartition(".")
        layer = _LAYER.fullmatch(base)
        if layer is None:
            return f"{TOP[base]}.{kind}" if base in TOP else None
        part = self.family.parts.get(_EXPERT.sub("{}", layer[2]))
        biased = ("attn_q", "attn_k", "attn_v", *self.family.biases)
        if part is None or (kind == "bias" and part not in biased):
            return None
        return f"blk.{layer[1]}.{part}.{kind}"

    def names_of(self, stored: str) -> list[str]:
        """The weights that lie in one of llama.cpp's, by their names in Hugging Face's; empty if
        the family has no such weight."""
        base, _, kind = stored.rpartition(".")
        block = _BLOCK.fullmatch(base)
        named = {own: theirs for theirs, own in (self.family.parts if block else TOP).items()}
        part = block[2] if block else base
        if part not in named or kind not in ("weight", "bias"):
            return []
        prefix = f"model.layers.{block[1]}." if block else ""
        if part in EXPERTS.values():
            count: int = self.config["num_local_experts"]
            return [f"{prefix}{named[part].format(number)}.{kind}" for number in range(count)]
        return [f"{prefix}{named[part]}.{kind}"]

    def expected(self) -> set[str]:
        """llama.cpp's names of the weights that a model has at least."""
        layers = range(self.config["num_hidden_layers"])
        tied = bool(self.config.get("tie_word_embeddings"))
        top = {f"{own}.weight" for name, own in TOP.items() if name != "lm_head" or not tied}
        parts = self.family.parts.values()
        return top | {f"blk.{layer}.{part}.weight" for layer in layers for part in parts}

    def to_file(self, stored: str, weight: Tensor) -> Tensor:
        """A weight's numbers, float32, as llama.cpp's file has them."""
        heads = self._rotated_heads(stored)
        if heads:
            return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        offset = self._offset(stored)
        return weight + offset if offset else weight

    def from_file(self, stored: str, weight: Tensor) -> Tensor:
        """The reverse of ``to_file``."""
        heads = self._rotated_heads(stored)
        if heads:
            return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
        offset = self._offset(stored)
        return weight - offset if offset else weight

    def _rotated_heads(self, stored: str) -> int:
        """The heads of a weight whose rows llama.cpp has in another order; 0 for others."""
        owner = stored.split(".")[-2]
        counts = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        return self.config[counts[owner]] if self.family.neighbours and owner in counts else 0

    def _offset(self, stored: str) -> float:
        """llama.cpp's norms multiply by their weights and not by one more."""
        is_norm = stored.endswith("norm.weight")
        return float(is_norm and family(self.config["model_type"]).norm_offset)


def expert_in(name: str) -> int:
    """The number of the expert that a weight belongs to; 0 for others."""
    found = _EXPERT.search(name)
    return int(found[0]) if found else 0
