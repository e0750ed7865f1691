"""The experts of a mixture: the sizes of their matrices, and how a device computes them fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tunesmith.plan.facts.layers import Written, first
from tunesmith.plan.facts.parameters import EXPERTS, Counts, chosen_experts

ExpertsImplementation = Literal["grouped_mm", "eager"]
"""The values of ``system.experts_implementation``."""
ROW_BYTES = 16
"""Rows of a grouped product on a GPU need a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class Mixtures:
    """The experts of a decoder."""

    layers: int = 0
    """Layers that have experts; 0: none."""
    experts: int = 0
    """Experts of each among which a router chooses."""
    chosen: int = 0
    """How many of these experts a token passes through."""
    parameters: int = 0
    """The parameters of all these experts."""
    inner: int = 0
    """The feed-forward width that a token passes through, with that of experts that all share."""


NO_MIXTURES = Mixtures()


def mixtures_of(config: Written, counted: Counts) -> Mixtures:
    experts = first(config, *EXPERTS)
    chosen = chosen_experts(config)
    return Mixtures(counted.mixtures, experts, chosen, counted.routed, counted.inner)


def expert_widths(config: Written) -> tuple[int, ...]:
    """The sizes of an expert's matrices; empty for a decoder without experts."""
    if first(config, *EXPERTS) < 2:
        return ()
    outer = first(config, "moe_latent_size") or first(config, "hidden_size")
    return outer, first(config, "moe_intermediate_size") or first(config, "intermediate_size")


def implementation(
    widths: Sequence[int], bytes_per_number: int, *, on_gpu: bool
) -> tuple[ExpertsImplementation, str]:
    """How experts of these sizes compute, and why.

    One expert after the other fills a gradient of all experts for each of them in the backward
    pass, so a grouped product is faster wherever it runs: docs/models.md has the figures.
    """
    odd = [width for width in widths if width * bytes_per_number % ROW_BYTES]
    if on_gpu and odd:
        multiple = ROW_BYTES // bytes_per_number
        return "eager", f"grouped products on GPUs need multiples of {multiple}, unlike {odd[0]}"
    return "grouped_mm", "one product for all experts; a loop fills their gradients once for each"
