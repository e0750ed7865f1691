"""Machines that are named instead of read."""

from __future__ import annotations

import pytest

from tunesmith.config.load import load_config
from tunesmith.config.schema import SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.facts.hardware import parse_gpus
from tunesmith.plan.facts.machines import gpu_kinds, kind_of, machine
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve

QWEN_7B = ModelFacts(7_615_616_512, 28, 3584, 18944, 28, 4, 128, 152064, 32768)


@pytest.mark.parametrize(
    ("spec", "name", "gpus", "nodes"),
    [
        ("8xH100-80GB", "H100-80GB", 8, 1),
        ("2x8xA100-80GB", "A100-80GB", 8, 2),
        ("a10g", "A10G-24GB", 1, 1),
        ("  4X rtx4090 ", "RTX4090-24GB", 4, 1),
        ("h100-pcie", "H100-PCIe-80GB", 1, 1),
    ],
)
def test_a_machine_is_what_its_name_says(spec: str, name: str, gpus: int, nodes: int) -> None:
    found = machine(spec)
    assert [gpu.name for gpu in found.gpus] == [name] * gpus and found.nodes == nodes
    kind = gpu_kinds()[name]
    assert found.cores == kind.cores * gpus and found.memory_total == kind.host_memory * gpus
    assert found.gpus[0].memory_free == kind.memory - 512 * 2**20


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("8xH100-90GB", ["H100-80GB"]),
        ("8xA100", ["A100-80GB", "A100-40GB"]),
        ("8xRTX4099", ["RTX4090-24GB"]),
        ("0xH200", ["0 GPUs"]),
        ("9999999999999999999999xH200", ["999999999"]),
        ("8x", ["H100-80GB", "this"]),
        ("", ["this"]),
        ("1x2x3xL4", ["3xL4"]),
        ("8xMI300X", ["MI300X", "B200-180GB"]),
    ],
)
def test_a_machine_that_is_not_known_is_refused(spec: str, told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        machine(spec)
    assert all(word in str(caught.value) for word in told)


def test_this_is_the_machine_that_runs() -> None:
    assert machine("this").cores >= 1 and machine("THIS").nodes == 1


def test_a_listed_gpu_is_found_in_the_table() -> None:
    listing = """\
0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0
1, GPU-2, NVIDIA H100 PCIe, 81559, 81000, 9.0
2, GPU-3, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0
3, GPU-4, NVIDIA L4, 23034, 22500, 8.9
4, GPU-5, Tesla T4, 15360, 15000, 7.5
5, GPU-6, NVIDIA L40S, 46068, 45000, 8.9
6, GPU-7, NVIDIA GeForce RTX 4090, 24564, 24000, 8.9
7, GPU-8, NVIDIA A10G, 23028, 22500, 8.6
8, GPU-9, GeForce GTX 1080, 8192, 8000, 6.1
9, GPU-10, NVIDIA GeForce RTX 3060, 12288, 11800, 8.6
10, GPU-11, NVIDIA RTX 6000 Ada Generation, 49140, 48500, 8.9
11, GPU-12, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887, 97000, 12.0
12, GPU-13, NVIDIA B300 SXM6 AC, 275040, 274000, 10.3
13, GPU-14, NVIDIA GH200 480GB, 97871, 97000, 9.0
14, GPU-15, NVIDIA GeForce RTX 4060, 8188, 7900, 8.9
"""
    names = [kind.name if (kind := kind_of(gpu)) else None for gpu in parse_gpus(listing, None)]
    assert names == [
        "H100-80GB",
        "H100-PCIe-80GB",
        "A100-40GB",
        "L4-24GB",
        "T4-16GB",
        "L40S-48GB",
        "RTX4090-24GB",
        "A10G-24GB",
        None,
        "RTX3060-12GB",
        "RTX6000Ada-48GB",
        "RTXPRO6000-96GB",
        "B300-288GB",
        "GH200-96GB",
        "RTX4060-8GB",
    ]


def test_the_table_is_plausible() -> None:
    for kind in gpu_kinds().values():
        nominal = int(kind.name.rpartition("-")[2].removesuffix("GB")) * 2**30
        assert 0.9 * nominal < kind.memory < 1.1 * nominal and kind.source.startswith("https://")
        assert (
            10e12 < kind.flops < 5000e12
            and 100e9 < kind.bandwidth < 10e12
            and kind.link < kind.bandwidth
        )


def test_a_run_resolves_as_on_that_machine() -> None:
    config = load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", "lora.rank=16"])
    found = resolve(config, Facts(machine("H100-80GB"), QWEN_7B, train_size=1000, longest=1000))
    assert found.settings["system.device"] == "cuda" and found.settings["model.dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match=r"16\.\dGB|free"):
        resolve(config, Facts(machine("T4-16GB"), QWEN_7B, train_size=1000, longest=32000))
