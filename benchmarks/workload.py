"""What is measured: the model, the prompts and how long each completion is. No more than torch is needed.

Model S has Qwen3's shape with d=256, 6 layers, 4 heads and 2 key-value heads of 64, feed-forward 768 and a
tied vocabulary of 4096: 5.77M random parameters. Completion lengths are forced, so that every system samples
exactly the same number of tokens: lognormal around 64 with sigma 0.8, from 8 to 512.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

VOCABULARY = 4096
FIRST_WORD = 4
EOS_ID = 2


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
        return [
            " ".join(f"w{rng.randrange(FIRST_WORD, VOCABULARY)}" for _ in range(self.prompt_tokens))
            for _ in range(self.prompts)
        ]


WORKLOADS = {
    "A": Workload(prompts=8, group=8, prompt_tokens=64),
    "B": Workload(prompts=8, group=8, prompt_tokens=512),
    "tiny": Workload(prompts=2, group=2, prompt_tokens=8, median=4, shortest=2, longest=6),
}


def build_model(directory: Path) -> None:
    """Write model S and its tokenizer in Hugging Face format."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    tokenizers: Any = import_module("tokenizers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=0,
    )
    transformers.Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(FIRST_WORD, VOCABULARY))]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)
