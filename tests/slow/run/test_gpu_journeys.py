"""What a person with a GPU runs first, on that GPU: each journey ends, learns numbers, and leaves the
memory that it promised to leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.families import SPECIAL
from tests.support.tiny import save_model
from tests.support.tiny_runs import write_lines
from tunesmith.guide.recipes.arithmetic import make_model
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VLLM = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", seed=0, head_dim=32)


def settings(folder: Path, model: Path, command: str, said: Sequence[str]) -> list[str]:
    rows = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(10, 42)]
    if command == "rl":
        rows = [{"prompt": row["prompt"], "answer": row["completion"]} for row in rows]
    data = write_lines(folder / f"{command}.jsonl", rows)
    common: dict[str, Any] = {
        "model.path": model,
        "data.train": data,
        "data.chat": "false",
        "train.steps": 4,
        "run_dir": folder / "run",
        "monitor.progress": "false",
    }
    if command == "rl":
        common |= {
            "reward.functions": '["exact_match"]',
            "rollout.prompts_per_step": 4,
            "rollout.group_size": 4,
            "rollout.max_new_tokens": 12,
        }
    return [*(f"{key}={value}" for key, value in common.items()), *said]


JOURNEYS = [
    pytest.param("sft", [], id="sft"),
    pytest.param("sft", ["model.dtype=float32"], id="sft-float32"),
    pytest.param("sft", ["model.dtype=float16"], id="sft-float16"),
    pytest.param("sft", ["lora.rank=4"], id="sft-lora"),
    pytest.param("sft", ["lora.rank=4", "model.quantize=nf4"], id="sft-qlora"),
    pytest.param("sft", ["system.gradient_checkpointing=true"], id="sft-checkpointing"),
    pytest.param("sft", ["system.offload_activations=true"], id="sft-activations-away"),
    pytest.param("sft", ["system.offload_optimizer=true"], id="sft-optimizer-away"),
    pytest.param("sft", ["system.kernels=liger"], id="sft-liger"),
    pytest.param("sft", ["system.compile=default"], id="sft-compiled"),
    pytest.param("rl", ["system.engine=local"], id="rl-local"),
    pytest.param("rl", ["system.engine=local", "system.hybrid=true"], id="rl-hybrid"),
    pytest.param(
        "rl",
        ["system.engine=local", "system.engine_process=true", "system.hybrid=true"],
        id="rl-engine-process",
    ),
    pytest.param(
        "rl",
        ["system.engine=local", "system.engine_process=true", "system.weight_plane=ipc"],
        id="rl-ipc",
    ),
    pytest.param("rl", ["algorithm.name=ppo", "system.engine=local"], id="ppo-local"),
    pytest.param("rl", ["system.engine=vllm"], id="rl-vllm", marks=VLLM),
    pytest.param("rl", ["system.engine=vllm", "system.hybrid=true"], id="vllm-hybrid", marks=VLLM),
    pytest.param("rl", ["system.engine=vllm", "lora.rank=4"], id="vllm-adapter", marks=VLLM),
    pytest.param(
        "rl",
        ["system.engine=vllm", "lora.rank=4", "system.engine_process=true", "system.hybrid=true"],
        id="vllm-adapter-ipc",
        marks=VLLM,
    ),
    pytest.param(
        "rl",
        ["system.engine=vllm", "lora.rank=4", "model.quantize=nf4"],
        id="vllm-qlora",
        marks=VLLM,
    ),
    pytest.param("sft", ["system.trainer_ranks=2", "system.zero_stage=3"], id="fsdp", marks=TWO),
    pytest.param("sft", ["system.sequence_parallel.size=2"], id="sequence", marks=TWO),
    pytest.param("rl", ["system.engine=local"], id="rl-derived", marks=TWO),
    pytest.param("rl", ["system.engine=vllm"], id="vllm-derived", marks=[TWO, VLLM]),
    pytest.param(
        "rl",
        ["system.trainer_ranks=1", "system.engines=1", "system.weight_plane=nccl"],
        id="rl-nccl",
        marks=TWO,
    ),
]


@pytest.mark.parametrize(("command", "said"), JOURNEYS)
def test_a_journey_ends(tmp_path: Path, model: Path, command: str, said: list[str]) -> None:
    if "system.kernels=liger" in said:
        pytest.importorskip("liger_kernel")
    if "model.quantize=nf4" in said:
        pytest.importorskip("bitsandbytes")
    ends(tmp_path, model, command, said)


@pytest.mark.parametrize("command", ["sft", "rl"])
@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_next", "granitemoehybrid", "gpt_oss", "deepseek_v3", "qwen3_moe"]
)
def test_a_journey_of_another_family(tmp_path: Path, family: str, command: str) -> None:
    model = save_model(tmp_path / "model", family, **SPECIAL[family])
    ends(tmp_path, model, command, ["system.engine=local"] if command == "rl" else [])


def ends(tmp_path: Path, model: Path, command: str, said: list[str]) -> None:
    run = {"sft": assembly.run_sft, "rl": assembly.run_rl}[command]
    result = run(None, settings(tmp_path, model, command, said))
    steps = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "loss" in row]
    adapter = any(setting.startswith("lora.") for setting in said)
    name = "adapter_config.json" if adapter else "config.json"
    assert len(steps) == 4 and (result.checkpoint / name).exists()
    assert all(row["loss"] == row["loss"] and row["grad_norm"] >= 0 for row in steps)
    total = torch.cuda.get_device_properties(0).total_memory
    assert all(0 < row["memory/device_peak"] < 0.95 * total for row in steps)
    planned = json.loads((result.run_dir / "plan.json").read_text())
    assert planned["memory"]
    assert planned["seconds"] or "model.dtype=float32" in said  # whose rate no table of GPUs has


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0]


def test_an_engine_that_sleeps_in_its_own_process_gives_its_memory_back(model: Path) -> None:
    """By the driver's count, which alone matters to other processes."""
    from functools import partial

    from tunesmith.errors import EngineLostError
    from tunesmith.learn.usercode.child import ChildProcess

    far = ChildProcess("an engine", EngineLostError)
    try:
        torch.cuda.empty_cache()
        far.make(partial(Sleeper, str(model))).result(120)
        awake = free_memory()
        far.call("sleep")
        asleep = free_memory()
        assert asleep - awake >= 0.95 * Sleeper.KV
        far.call("wake")
        assert free_memory() <= asleep - 0.9 * Sleeper.KV
    finally:
        far.close()


class Sleeper:
    """An engine, with blocking methods."""

    KV = 2 << 30

    def __init__(self, path: str) -> None:
        import asyncio

        from tunesmith.models.causal_lm import CausalLM
        from tunesmith.run.engines.local.engine import LocalEngine
        from tunesmith.types import Sampling

        self._run = asyncio.new_event_loop().run_until_complete
        lm = CausalLM.load(path, dtype=torch.bfloat16, device="cuda")
        self._engine = LocalEngine(lm, kv_bytes=self.KV, max_running=8, max_prefill_tokens=64)
        self._run(self._engine.generate([5, 6, 7], Sampling(4, ignore_eos=True)))

    def sleep(self) -> None:
        self._run(self._engine.sleep(2))

    def wake(self) -> None:
        self._run(self._engine.wake())
