"""A tiny gpt-oss as it is published: the weights of its experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.families import SPECIAL
from tests.support.tiny import save_model
from tunesmith.plan.facts.model_files import BLOCKS, INDEX, ONE, SCALES

EXPERTS = (".gate_up_proj", ".down_proj")


def save_packed(path: Path, *, shards: bool = False, **overrides: Any) -> Path:
    """Save a model whose experts have drawn blocks and scales.

    Args:
        shards: blocks and scales are in different files.
    """
    settings = SPECIAL["gpt_oss"] | {"hidden_size": 64} | overrides
    save_model(path, "gpt_oss", **settings)
    torch.manual_seed(1)
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(path / ONE).items():
        if name.endswith(EXPERTS):
            experts, inputs, outputs = tensor.shape
            groups = (experts, outputs, inputs // 32)
            weights[name + BLOCKS] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
            weights[name + SCALES] = torch.randint(121, 125, groups, dtype=torch.uint8)
        else:
            weights[name] = tensor.to(torch.bfloat16)
    if shards:
        (path / ONE).unlink()
        files = {name: f"model-{1 + name.endswith(SCALES)}-of-2.safetensors" for name in weights}
        for file in set(files.values()):
            held = {name: weight for name, weight in weights.items() if files[name] == file}
            save_file(held, path / file, metadata={"format": "pt"})
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        save_file(weights, path / ONE, metadata={"format": "pt"})
    quantise(path, "mxfp4")
    return path


def quantise(path: Path, method: str) -> None:
    """Let a model's configuration say that its weights are quantised."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    config["dtype"] = "bfloat16"
    (path / "config.json").write_text(json.dumps(config))
