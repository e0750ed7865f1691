"""The workloads: models, prompts and completion lengths. Only torch is needed.

The models have Qwen3's architecture where no other is named, tied embeddings and random parameters.
Completion lengths are forced, so that every system samples exactly the same number of tokens:
lognormal around a median, between a shortest and a longest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

FIRST_WORD = 4
EOS_ID = 2


@dataclass(frozen=True)
class Shape:
    """A model with ``heads`` query heads and ``kv_heads`` key/value heads of ``head_dim``."""

    name: str
    vocabulary: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    dtype: str = "bfloat16"
    """Type of the weights in the files."""
    architecture: str = "qwen3"
    others: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Further keys of the configuration."""


S = Shape("S", 4096, 6, 256, 4, 2, 64, 768, "float32")
S_32K = Shape("S-32k", 32_000, 6, 256, 4, 2, 64, 768, "float32")
S_152K = Shape("S-152k", 151_936, 6, 256, 4, 2, 64, 768, "float32")
S_50K = Shape("32M", 50_000, 8, 384, 6, 2, 64, 1024, "float32")
SMOLLM2 = Shape("135M", 49_152, 30, 576, 9, 3, 64, 1536, "float32", architecture="llama")
SMALL = Shape("0.1B", 32_000, 12, 768, 12, 4, 64, 2048)
QWEN3 = Shape("0.6B", 151_936, 28, 1024, 16, 8, 128, 3072)
QWEN3_1_7B = Shape("1.7B", 151_936, 28, 2048, 16, 8, 128, 6144)
QWEN3_4B = Shape("4B", 151_936, 36, 2560, 32, 8, 128, 9728)
DELTA_NET = Shape(
    "0.8B-delta-net",
    151_936,
    24,
    1024,
    8,
    2,
    256,
    3584,
    architecture="qwen3_5_text",
    others={
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
)
EXPERTS = Shape(
    "1.7B-experts",
    151_936,
    24,
    1024,
    16,
    4,
    128,
    3072,
    architecture="qwen3_moe",
    others={"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
)


@dataclass(frozen=True)
class Workload:
    """``prompts`` prompts of ``prompt_tokens`` tokens, with ``group`` completions each."""

    prompts: int
    group: int
    prompt_tokens: int
    median: int = 64
    sigma: float = 0.8
    shortest: int = 8
    longest: int = 512
    model: Shape = S

    @property
    def size(self) -> int:
        return self.prompts * self.group

    def lengths(self) -> list[int]:
        """Tokens of each completion, group by group."""
        rng = random.Random(0)
        drawn = (math.exp(rng.gauss(math.log(self.median), self.sigma)) for _ in range(self.size))
        return [int(min(self.longest, max(self.shortest, round(length)))) for length in drawn]

    def texts(self) -> list[str]:
        """The prompts; each word is one token."""
        rng = random.Random(1)
        return [self._text(rng, self.prompt_tokens) for _ in range(self.prompts)]

    def examples(self) -> list[tuple[str, str]]:
        """One prompt per completion, each with its completion, whose EOS is counted in
        ``lengths``."""
        rng = random.Random(2)
        return [
            (self._text(rng, self.prompt_tokens), f" {self._text(rng, n - 1)}")
            for n in self.lengths()
        ]

    @property
    def example_tokens(self) -> int:
        """Tokens of all ``examples``."""
        return self.size * self.prompt_tokens + sum(self.lengths())

    def _text(self, rng: random.Random, words: int) -> str:
        return " ".join(
            f"w{rng.randrange(FIRST_WORD, self.model.vocabulary)}" for _ in range(words)
        )


WORKLOADS = {
    "A": Workload(prompts=8, group=8, prompt_tokens=64),
    "B": Workload(prompts=8, group=8, prompt_tokens=512),
    "2k": Workload(prompts=2, group=32, prompt_tokens=2048, model=S_32K),
    "long": Workload(
        prompts=4, group=16, prompt_tokens=256, median=128, sigma=1.0, longest=1024, model=S_32K
    ),
    "152k": Workload(prompts=8, group=4, prompt_tokens=64, model=S_152K),
    "50k": Workload(prompts=6, group=5, prompt_tokens=200, longest=600, model=S_50K),
    "135M": Workload(prompts=3, group=6, prompt_tokens=96, longest=160, model=SMOLLM2),
    "0.1B": Workload(prompts=4, group=8, prompt_tokens=128, longest=256, model=SMALL),
    "0.6B": Workload(prompts=2, group=8, prompt_tokens=128, longest=128, model=QWEN3),
    "tiny": Workload(prompts=2, group=2, prompt_tokens=8, median=4, shortest=2, longest=6),
}


def build_model(
    directory: Path, shape: Shape = S, context: int = 4096, device: str = "cpu"
) -> None:
    """Write a model and its tokenizer in Hugging Face format; its numbers are drawn on
    ``device``."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    tokenizers: Any = import_module("tokenizers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        shape.architecture,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        **shape.others,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, shape.dtype)).save_pretrained(directory)
    words = [
        "<pad>",
        "<bos>",
        "<eos>",
        "<unk>",
        *(f"w{i}" for i in range(FIRST_WORD, shape.vocabulary)),
    ]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(directory)
