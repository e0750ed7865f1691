"""Converts a directory with a GGUF file to a model that loads anywhere: ``python
tests/real/convert_gguf.py DIR OUT``.

It needs the package ``gguf``. Weights are dequantised and saved in bfloat16, with the tokenizer and
its chat template.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def convert(directory: Path, out: Path) -> None:
    (file,) = directory.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=file.name)
    config = AutoConfig.for_model(
        **{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    # A model that was read from quantised weights cannot be saved itself.
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.load_state_dict(model.state_dict())
    whole.generation_config = model.generation_config
    whole.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
