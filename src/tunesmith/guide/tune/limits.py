"""How far steps of typical sizes are from what this CPU's arithmetic and memory allow, and in which
phases most time is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tunesmith.config.values import format_size
from tunesmith.costs import PeakRates
from tunesmith.guide.tune.machine import BYTES
from tunesmith.guide.tune.probes import Probe
from tunesmith.plan.cost.copies import sampling_weights
from tunesmith.plan.cost.work import Work, amounts
from tunesmith.plan.facts.hardware import Hardware, memory
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.records.progress import share
from tunesmith.run.trainers.limits import measure_limits

SMALL = ModelFacts(5_770_000, 6, 256, 768, 4, 2, 64, 4096, 4096, tied=True)
WIDE = ModelFacts(32_000_000, 8, 384, 1024, 6, 2, 64, 50_000, 4096, tied=True)
REAL = ModelFacts(134_500_000, 30, 576, 1536, 9, 3, 64, 49_152, 8192, tied=True)
"""The shape of SmolLM2-135M."""
WORKLOADS = {
    "5.8M": Work(SMALL, 4, 8, 8, 64, 64, 4096),
    "5.8M, prompts of 512": Work(SMALL, 4, 4, 8, 512, 64, 4096),
    "32M, 50,000 words": Work(WIDE, 4, 3, 5, 200, 48, 4096),
    "SmolLM2-135M's shape": Work(REAL, 4, 2, 4, 96, 24, 4096),
}
STEPS = 2
STEP_BYTES = 28
"""Bytes of a float32 weight's gradient, moments and master copy that an optimizer step reads and
writes."""
GAPS = 3


@dataclass(frozen=True, slots=True)
class LimitShare:
    """A step's seconds by phase, and the least that each could take."""

    seconds: Mapping[str, float]
    least: Mapping[str, float]

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        return sum(self.least.values()) / self.step

    def gaps(self) -> list[tuple[str, float]]:
        """The phases that lose most time, with the seconds that they take beyond the least."""
        lost = {phase: self.seconds[phase] - least for phase, least in self.least.items()}
        return sorted(lost.items(), key=lambda each: -each[1])[:GAPS]


def least_seconds(work: Work, rates: PeakRates) -> dict[str, float]:
    """The least time of each phase: of its operations, or of the bytes that it has to read, if that
    is longer."""
    model = work.model
    does = amounts(work)
    pair = 4 * model.head_dim
    forward = does["forward and backward"]
    trained = 3 * (2 * (forward["products"] + forward["head"]) + pair * forward["pairs"])
    prompts = work.prompts * work.prompt**2 / 2 * model.layers * model.heads
    prefill = 2 * does["prefill"]["products"] + pair * prompts
    decode = does["decode"]
    computed = 2 * (decode["products"] + decode["head"]) + pair * decode["pairs"]
    number = work.bytes_per_number
    held = work.prompts * work.prompt + work.samples * work.new / 2
    read = number * decode["weights"]
    read += decode["steps"] * held * model.kv_bytes_per_token(number)
    flops = rates.flops_per_second
    return {
        "sync": 0.0,
        "prefill": prefill / flops,
        "decode": max(computed / flops, read / rates.bytes_per_second),
        "forward and backward": trained / flops,
        "optimizer": STEP_BYTES * does["optimizer"]["weights"] / rates.bytes_per_second,
    }


def limit_shares(machine: Hardware) -> Iterator[tuple[str, LimitShare | str]]:
    """Each workload as soon as it is measured, or why it is left out."""
    rates = measure_limits("cpu", "bfloat16" if machine.bf16 else "float32")
    for name, work in WORKLOADS.items():
        needed = BYTES * (work.model.parameters or 0)
        if needed > memory()[1] // 2:
            yield name, f"left out: it needs {format_size(needed)} of memory"
            continue
        dtype, number = ("bfloat16", 2) if machine.bf16 else ("float32", 4)
        weights = sampling_weights(work.model.parameters or 0, dtype)
        yield name, measure(replace(work, bytes_per_number=number, rounded=weights), rates)


def measure(work: Work, rates: PeakRates) -> LimitShare:
    """The best of ``STEPS`` steps."""
    probe = Probe(work)
    for _ in range(STEPS):
        probe.step()
    least = least_seconds(work, rates)
    return LimitShare({phase: probe.seconds[phase] for phase in least}, least)


def limit_rows(found: Mapping[str, LimitShare | str]) -> list[list[str]]:
    """A table with a header."""
    rows = [["workload", "step", "of limit", "largest gaps"]]
    for name, result in found.items():
        if isinstance(result, str):
            rows.append([name, result, "", ""])
            continue
        gaps = ", ".join(f"{phase} {lost:.2f} s" for phase, lost in result.gaps())
        rows.append([name, f"{result.step:.2f} s", share(result.share), gaps])
    return rows
