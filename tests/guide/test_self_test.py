"""``tunesmith check machine``: a line for each part, and what to do for those that fail."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tunesmith.cli.main import app
from tunesmith.guide import self_test
from tunesmith.guide.self_test import MachineLine, examine, has_code
from tunesmith.plan.facts.hardware import Gpu, Hardware
from tunesmith.plan.rules.vllm import NEWEST

GB = 10**9
CPU = Hardware("Some CPU", 4, 64 * GB, 60 * GB, bf16=True, compiler="/usr/bin/g++")
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, 81000 << 20, (9, 0))
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """No steps are taken; returns the versions that are installed."""
    installed: dict[str, str | None] = {"vllm": f"{NEWEST[0]}.{NEWEST[1]}.1"}
    monkeypatch.setattr(self_test, "_installed", installed.get)
    monkeypatch.setattr(self_test, "_engines", list)
    monkeypatch.setattr(self_test, "_torch_sees_gpus", lambda: False)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(64 << 30, 0, 0))
    return installed


def cures(machine: Hardware) -> dict[str, str]:
    return {line.name: line.cure for line in examine(machine) if line.cure}


def test_a_cpu_in_order(quick: Any) -> None:
    quick["vllm"] = None
    assert cures(CPU) == {}
    assert cures(replace(CPU, compiler=None)).keys() == {"C++ compiler"}


def test_what_hinders_runs_on_gpus_is_said_with_what_to_do(
    quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(CPU, gpus=(H100, replace(H100, memory_free=50 * GB)))
    found = cures(machine)
    assert found.keys() == {"PyTorch and GPUs", "GPU 1"}
    assert "nvidia-smi" in found["GPU 1"] and "pytorch.org" in found["PyTorch and GPUs"]

    quick["vllm"] = None
    assert "pip install 'tunesmith[vllm]'" in cures(machine)["vLLM"]
    quick["vllm"] = "0.1.0"
    assert "vLLM 0.1.0" in cures(machine)["vLLM"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(64 << 20, 0, 0))
    assert "--shm-size" in cures(machine)["shared memory"]
    assert "CUDA_VISIBLE_DEVICES" in cures(replace(CPU, unseen="7"))["GPUs"]
    monkeypatch.setattr(self_test, "_codes", lambda: ["sm_75", "sm_80"])
    assert "has no code for it" in cures(machine)["GPU 0"]


def test_which_gpus_a_build_of_pytorch_has_code_for() -> None:
    codes = ["sm_75", "sm_80", "sm_90a", "sm_100", "compute_100"]
    have = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1)]
    assert all(has_code(each, codes) for each in have)
    assert not any(has_code(each, codes) for each in ((6, 1), (7, 0)))
    assert not has_code((12, 0), codes[:-1]), "another generation, and nothing to translate"


@pytest.mark.parametrize(("limit", "short"), [(-1, False), (8 << 20, True), (64 << 30, False)])
@pytest.mark.usefixtures("quick")
def test_a_network_needs_locked_memory(
    limit: int, short: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(self_test, "FABRIC", tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    assert ("locked memory" in cures(replace(CPU, gpus=(H100,)))) is short


@pytest.mark.usefixtures("quick")
def test_slow_gpus_and_links_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunesmith.costs import PeakRates

    rates = {"cuda:0": PeakRates(700e12, 2.9e12), "cuda:1": PeakRates(300e12, 2.9e12)}
    monkeypatch.setattr(self_test, "_torch_sees_gpus", lambda: True)
    monkeypatch.setattr(
        "tunesmith.run.trainers.limits.measure_limits", lambda device, _: rates[device]
    )
    monkeypatch.setattr(self_test, "_host_rate", lambda _: 50e9)
    monkeypatch.setattr(self_test, "_between", lambda _: 1 / 0)
    found = cures(replace(CPU, gpus=(H100, H100)))
    assert found.keys() == {"GPU 1: speed", "between GPUs"}
    assert "NCCL_P2P_DISABLE" in found["between GPUs"]
    assert "throttling" in found["GPU 1: speed"]


def test_it_is_said_which_attention_hopper_has(
    quick: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "flash_attn_interface is not installed"
    monkeypatch.setattr("tunesmith.models.kernels.flash3.flash3_problem", lambda *_: problem)
    line = self_test._attention((H100,))
    assert problem in line.found and "pip install flash-attn-3" in line.found and not line.cure
    quick["flash-attn-3"] = "3.0.0"
    assert "for this PyTorch" in (self_test._attention((H100,)).cure or "")
    monkeypatch.setattr("tunesmith.models.kernels.flash3.flash3_problem", lambda *_: None)
    assert self_test._attention((H100,)) == MachineLine("attention", "FlashAttention 3")


@pytest.mark.slow
def test_ranks_sum_together_and_gloo_is_slower_than_nvlink() -> None:
    line = self_test._between((H100, H100))
    assert (
        "over 2 GPUs at" in line.found and line.cure is not None and "nvidia-smi topo" in line.cure
    )


def test_the_command_fails_if_a_line_does(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        MachineLine("shared memory", "64MB"),
        MachineLine("vLLM", "not installed", "install it"),
    ]
    monkeypatch.setattr(self_test, "examine", lambda _: iter(lines))
    monkeypatch.setattr(
        "tunesmith.plan.facts.hardware.read_hardware", lambda: replace(CPU, gpus=(H100,))
    )
    failed = CliRunner().invoke(app, ["check", "machine"])
    assert failed.exit_code == 2 and "! vLLM: not installed" in failed.output

    del lines[1]
    assert CliRunner().invoke(app, ["check", "machine"]).exit_code == 0


@pytest.mark.slow
def test_every_engine_takes_a_step_here() -> None:
    steps = [line for line in examine(CPU) if line.name.startswith("a step")]
    assert steps and not [line for line in steps if line.cure]
    assert all("tokens sampled and trained on, on cpu" in line.found for line in steps)
