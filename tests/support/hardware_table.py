"""The table of docs/hardware.md: what fits which GPU, by the cost model that refuses runs."""

from __future__ import annotations

from dataclasses import replace

from tunesmith.config.values import format_size
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import HOST_SHARE, LIMIT, LIMIT_OF_SEVERAL
from tunesmith.plan.cost.price import LIBRARIES, LIBRARIES_WITH_NCCL, price
from tunesmith.plan.facts.machines import gpu_kinds
from tunesmith.plan.facts.model import ModelFacts

MODELS = {
    "1B (Llama 3.2)": ModelFacts(
        1_235_814_400, 16, 2048, 8192, 32, 8, 64, 128256, 131072, tied=True
    ),
    "7B (Qwen 2.5)": ModelFacts(7_615_616_512, 28, 3584, 18944, 28, 4, 128, 152064, 32768),
    "13B (Llama 2)": ModelFacts(13_015_864_320, 40, 5120, 13824, 40, 40, 128, 32000, 4096),
    "32B (Qwen 2.5)": ModelFacts(32_763_876_352, 64, 5120, 27648, 40, 8, 128, 152064, 32768),
    "70B (Llama 3)": ModelFacts(70_553_706_496, 80, 8192, 28672, 64, 8, 128, 128256, 131072),
}
TOKENS = 2048
"""Of a micro-batch, with gradient checkpointing; and of each of the 16 sequences that inference
decodes together."""
WAYS = {
    "full": Layout(2, checkpointing=True, tokens=TOKENS),
    "full, optimizer in host memory": Layout(2, offload=True, checkpointing=True, tokens=TOKENS),
    "full, each of 8 GPUs": Layout(2, shards=8, zero_stage=3, checkpointing=True, tokens=TOKENS),
    "full, each of 8 GPUs, optimizer in host memory": Layout(
        2, shards=8, zero_stage=3, offload=True, checkpointing=True, tokens=TOKENS
    ),
    "full, each of 64 GPUs": Layout(2, shards=64, zero_stage=3, checkpointing=True, tokens=TOKENS),
    "LoRA": Layout(2, lora_rank=16, checkpointing=True, tokens=TOKENS),
    "QLoRA (nf4)": Layout(2, lora_rank=16, quantize="nf4", checkpointing=True, tokens=TOKENS),
    "QLoRA (nf4), each of 8 GPUs": Layout(
        2, lora_rank=16, quantize="nf4", shards=8, zero_stage=3, checkpointing=True, tokens=TOKENS
    ),
    "inference": Layout(2, trains=False),
}
GPUS = {
    "T4": 15.6e9,
    "A10G, L4": 23.5e9,
    "A100 40": 42e9,
    "A100 80, H100": 84e9,
    "H200": 149e9,
}
"""Bytes that are free before a run."""
MACHINES = {
    "T4": "T4-16GB",
    "A10G, L4": "A10G-24GB",
    "A100 40": "A100-40GB",
    "A100 80, H100": "A100-80GB",
    "H200": "H200-141GB",
}
"""The kind in ``machines.toml`` with the least host memory for each GPU."""


def needed(model: ModelFacts, layout: Layout) -> int:
    kv = 0 if layout.trains else 16 * TOKENS * model.kv_bytes_per_token(layout.bytes_per_number)
    libraries = LIBRARIES_WITH_NCCL if layout.shards > 1 else LIBRARIES
    return price(model, replace(layout, kv_bytes=kv)).peak + libraries


def rows() -> list[tuple[str, ...]]:
    return [
        (
            name,
            way,
            format_size(needed(model, layout)),
            _on_the_host(model, layout),
            *("yes" if fits(model, layout, gpu) else "–" for gpu in GPUS),
        )
        for name, model in MODELS.items()
        for way, layout in WAYS.items()
    ]


def fits(model: ModelFacts, layout: Layout, gpu: str) -> bool:
    host = gpu_kinds()[MACHINES[gpu]].host_memory
    room = (LIMIT_OF_SEVERAL if layout.shards > 1 else LIMIT) * GPUS[gpu]
    return needed(model, layout) <= room and price(model, layout).host <= HOST_SHARE * host


def _on_the_host(model: ModelFacts, layout: Layout) -> str:
    kept = price(model, layout).host
    return format_size(kept) if kept else "–"
