"""Remarks about settings that are allowed but questionable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunesmith.config.values import format_size
from tunesmith.plan.cost.memory import attends_without_kernel
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.rules.situation import Situation

FILLED = 0.75
"""A GPU with less free memory than this share of another one's is used by other programs."""


def notes(s: Situation[Any], *, device_derived: bool) -> Iterator[str]:
    system = s.config.system
    machine = s.machine
    on_cpu = s.system.device == "cpu"
    if on_cpu and s.dtype == "bfloat16" and machine and not machine.bf16:
        yield "this CPU has no instructions for bfloat16: leave model.dtype out, float32 is faster"
    if on_cpu and device_derived and machine and machine.unseen is not None:
        yield (
            f"{machine.unseen}, but nvidia-smi lists no such GPU, so the CPU computes. If torch "
            'sees one, set system.device = "cuda" and system.device_memory, such as "40GB"'
        )
    if device_derived and machine and s.system.device == "cuda" and system.cluster == "none":
        yield from _unused_gpus(machine)
    if system.tuned and s.facts and s.facts.tuned is None:
        yield (
            "system.tuned = true, but no such run was tuned on this machine: run tunesmith tune "
            "first"
        )
    if system.profile == "throughput" and s.config.rl and s.config.rollout.max_staleness == 0:
        yield (
            "system.profile = 'throughput' does not set rollout.max_staleness, which lets engines "
            "sample while the policy trains, because it changes what is learned"
        )
    adapter = s.facts and s.facts.adapter
    if adapter and adapter.other_base(s.config.model.path):
        yield (
            f"the adapter in lora.path was trained on {adapter.base}, and model.path is "
            f"{s.config.model.path}: on other weights it computes something else"
        )
    if s.plan and s.config.trains and attends_without_kernel(s.plan):
        yield (
            "attention has no kernel here (kernels for GPUs take 16-bit numbers, from Ampere on, "
            "and none lets the tokens of an image see each other) and holds a weight for each pair "
            "of a sample's tokens: shorter samples take much less memory (data.max_tokens)"
        )
    if isinstance(s.system.compile, str) and s.config.trains:
        yield (
            f"{s.said('system.compile')}: the first steps compile the layers, which may take "
            "minutes in which no step ends. The functions are kept in ~/.cache/tunesmith/inductor "
            "for the next run"
        )


def filled_gpu(machine: Hardware) -> Iterator[str]:
    """A note that other programs fill the first GPU, whose free memory is planned for all."""
    first = machine.gpus[0]
    alike = [gpu.memory_free for gpu in machine.gpus if gpu.name == first.name]
    if first.memory_free < FILLED * max(alike):
        yield (
            f"the first GPU has {format_size(first.memory_free)} free and another one "
            f"{format_size(max(alike))}: other programs use it, and no more is planned of any GPU. "
            "Leave it out with CUDA_VISIBLE_DEVICES"
        )


def _unused_gpus(machine: Hardware) -> Iterator[str]:
    """Notes on a filled GPU, and that GPUs of other kinds are idle."""
    yield from filled_gpu(machine)
    others = sorted({gpu.name for gpu in machine.gpus} - {machine.gpus[0].name})
    if others:
        yield (
            f"{' and '.join(others)} take no part: a run uses GPUs like the first one, which "
            "CUDA_VISIBLE_DEVICES chooses"
        )
