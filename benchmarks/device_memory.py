"""Planned memory of a training step against the memory of the real step's code, on a simulated GPU.

``python -m benchmarks.device_memory`` prints a row for each case and writes
``results/device-memory.json``.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.config.commands import KINDS
from tunesmith.config.load import load_config
from tunesmith.guide.simulate.dry_run import dry_run
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.plan.cost.memory import planned, planned_devices
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.model import facts_of
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960,
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
LARGE = QWEN2 | {
    "hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
SHAPES = {"0.6B": QWEN3, "7B": QWEN2, "72B": LARGE}
PARTS = ("weights", "gradients", "optimizer", "frozen", "gathered", "activations", "head", "host")
LORA = "lora.rank=16"
CHECKPOINTING = "system.gradient_checkpointing=true"
HALF = "system.gradient_checkpointing=0.5"
SELECTIVE = 'system.gradient_checkpointing="selective"'
QUARTER = "system.gradient_checkpointing=0.25"
AWAY = "system.offload_activations=true"
HOST = "system.offload_optimizer=true"
STREAMED = "system.offload_parameters=true"


@dataclass(frozen=True, slots=True)
class Case:
    """A step of supervised training with ``tokens`` in a micro-batch."""

    shape: str
    layers: int
    tokens: int
    options: tuple[str, ...] = ()
    machine: str = "H200"

    @property
    def name(self) -> str:
        return " ".join(
            (
                self.machine,
                self.shape,
                f"{self.layers} layers",
                f"{self.tokens} tokens",
                *self.options,
            )
        )


CASES = [
    *(
        Case(shape, 2, tokens, options)
        for shape, tokens in (("0.6B", 32768), ("7B", 16384), ("72B", 8192))
        for options in ((), (CHECKPOINTING,), (LORA,), (LORA, CHECKPOINTING))
    ),
    Case("0.6B", 4, 32768, (HALF,)),
    Case("7B", 4, 16384, (QUARTER,)),
    Case("7B", 4, 16384, (LORA, HALF)),
    Case("0.6B", 4, 32768, (SELECTIVE,)),
    Case("7B", 4, 16384, (LORA, SELECTIVE)),
    Case("7B", 4, 16384, (AWAY, SELECTIVE)),
    Case("7B", 4, 16384, (AWAY,)),
    Case("7B", 4, 16384, (AWAY, CHECKPOINTING)),
    Case("7B", 4, 16384, (AWAY, HALF)),
    Case("0.6B", 4, 32768, (AWAY, LORA)),
    Case("7B", 4, 8192, (HOST,)),
    Case("7B", 4, 8192, (HOST, CHECKPOINTING)),
    Case("7B", 4, 8192, (STREAMED,)),
    Case("7B", 4, 8192, (STREAMED, CHECKPOINTING)),
    Case("7B", 4, 8192, (STREAMED, CHECKPOINTING, LORA)),
    Case("0.6B", 28, 16384),
    Case("7B", 28, 16384, (LORA, CHECKPOINTING)),
]
STAGE = "system.zero_stage={}".format
RANKS = "system.sequence_parallel.size={}".format
RING = "system.sequence_parallel.type=ring"
RANKED = [
    *(
        Case(shape, 4, tokens, (STAGE(stage), *options), "8xH200")
        for stage in (1, 2, 3)
        for shape, tokens in (("0.6B", 16384), ("7B", 8192))
        for options in ((), (CHECKPOINTING,), (LORA,), (LORA, CHECKPOINTING))
    ),
    Case("7B", 4, 8192, (STAGE(3), SELECTIVE), "8xH200"),
    Case("7B", 4, 8192, (STAGE(3), LORA, SELECTIVE), "8xH200"),
    Case("0.6B", 4, 32768, (STAGE(3), RANKS(2), SELECTIVE), "8xH200"),
    Case("7B", 4, 8192, (STAGE(1), HOST), "8xH200"),
    Case("7B", 4, 8192, (STAGE(3), HOST), "8xH200"),
    Case("7B", 4, 8192, (STAGE(3), HOST, CHECKPOINTING), "8xH200"),
    Case("7B", 4, 8192, (STAGE(3), STREAMED), "8xH200"),
    Case("7B", 4, 8192, (STAGE(3), STREAMED, CHECKPOINTING), "8xH200"),
    Case("7B", 4, 8192, (STAGE(3), STREAMED, CHECKPOINTING, LORA), "8xH200"),
    Case("7B", 4, 16384, (STAGE(0), RANKS(2)), "8xH200"),
    Case("7B", 4, 32768, (STAGE(3), RANKS(2)), "4xH200"),
    Case("7B", 4, 32768, (STAGE(3), RANKS(4), CHECKPOINTING), "8xH200"),
    Case("7B", 4, 32768, (STAGE(3), RANKS(2), RING), "4xH200"),
]
"""Cases on several ranks, of which the first is measured."""
DEEP = [
    Case("7B", 28, 4096, (STAGE(3), CHECKPOINTING), "8xH100-80GB"),
    Case("72B", 80, 4096, (STAGE(3), CHECKPOINTING), "8x8xH100-80GB"),
]
"""Whole models, of which only a few layers are run."""
DEPTHS = (4, 6)
"""Numbers of layers whose difference gives the memory of a layer. With only two, a sharded model
peaks at another point than with more: there is no third layer whose weights are gathered ahead."""


def resolved(directory: Path, case: Case) -> AnyPlan:
    shape = SHAPES[case.shape] | {"num_hidden_layers": case.layers}
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    own = (
        f"model.path={directory}",
        f"data.train={directory}/data.jsonl",
        f"run_dir={directory}/run",
    )
    sizes = ("data.max_tokens=2048", f"system.max_tokens_per_microbatch={case.tokens}")
    chosen = any(option.startswith("system.gradient_checkpointing") for option in case.options)
    given = (
        ("train.batch_size=128",)
        if chosen
        else ("train.batch_size=128", "system.gradient_checkpointing=false")
    )
    model = facts_of(shape)
    there = machine(case.machine)
    assert model is not None
    model = replace(model, parameters=model.estimated)
    facts = Facts(
        there, model, train_size=1000, ranks_here=len(there.gpus) if there.nodes > 1 else None
    )
    config = load_config(KINDS["sft"], None, [*own, *sizes, *given, *case.options])
    return resolve(config, facts)


def compared(directory: Path, case: Case) -> dict[str, Any]:
    """Bytes of a step, planned and measured, in total and by purpose."""
    plan = resolved(directory, case)
    price = planned(plan)
    assert price is not None
    measured = dry_run(plan)[FIRST]["train"]
    parts = {part: getattr(price, part) for part in PARTS}
    total = price.training - price.libraries
    return _row(case, total, measured.total) | {
        "planned_parts": parts,
        "measured_parts": measured.peak,
    }


def extrapolated(directory: Path, case: Case) -> dict[str, Any]:
    """Bytes of a whole model's step, planned, and extrapolated from a few layers; ``free``: memory
    of the GPU."""
    plan = resolved(directory, case)
    [(_, price, free)] = planned_devices(plan)
    split = (*case.options, f"system.shard_size={plan.devices.shard_size}")
    some = [compared(directory, replace(case, layers=n, options=split))["measured"] for n in DEPTHS]
    whole = some[0] + (some[1] - some[0]) // (DEPTHS[1] - DEPTHS[0]) * (case.layers - DEPTHS[0])
    measured = {f"measured_of_{n}_layers": size for n, size in zip(DEPTHS, some, strict=True)}
    return (
        _row(case, price.training - price.libraries, whole)
        | measured
        | {"free": free - price.libraries}
    )


def _row(case: Case, total: int, measured: int) -> dict[str, Any]:
    return {
        "case": case.name,
        "planned": total,
        "measured": measured,
        "ratio": round(measured / total, 3),
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for case in [*CASES, *RANKED, *DEEP]:
        with tempfile.TemporaryDirectory() as directory:
            rows.append((extrapolated if case in DEEP else compared)(Path(directory), case))
        print(f"{rows[-1]['ratio']:.3f}  {case.name}", flush=True)
    prediction = (
        "measured within 5% of planned; before the cost model was mended the ratios were 0.79 to 1.30 on one GPU, and "
        "0.68 to 1.52 of sharded models"
    )
    result = {
        "command": "python -m benchmarks.device_memory",
        "prediction": prediction,
        "rows": rows,
    }
    Path(__file__).with_name("results").joinpath("device-memory.json").write_text(
        json.dumps(result, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
