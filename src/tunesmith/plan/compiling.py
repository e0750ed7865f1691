"""Whether a run compiles functions for this machine (``system.compile``)."""

from __future__ import annotations

from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.gpus import on_gpu
from tunesmith.plan.hardware import compilers


def compilable(config: RunConfig, facts: Facts) -> bool:
    """Whether there is something to compile: a decode step of the local engine, or a training step (``native``)."""
    able = facts.hardware.tiles or facts.hardware.pairs
    trains = config.trains and known(config.model, "dtype") == "bfloat16" and able
    return not on_gpu(config) and (_decodes(config, facts) or trains)


def decodes_compiled(config: RunConfig, facts: Facts) -> bool:
    """Whether the local engine decodes with functions compiled for this CPU."""
    return not on_gpu(config) and _decodes(config, facts) and bool(known(config.system, "compile"))


def _decodes(config: RunConfig, facts: Facts) -> bool:
    """Whether the local engine samples from a model that compiled functions can decode; unknown models count too."""
    samples = config.samples and config.system.engine == "local"
    return samples and (facts.model is None or facts.model.lean)


def derive_compile(filling: Filling, facts: Facts) -> None:
    """Derive ``system.compile``: on if there is something to compile and a compiler."""
    key, compiler = "system.compile", facts.hardware.compiler
    if not compilable(filling.config, facts):
        filling.fill(key, False, "this run has nothing to compile")
    elif compiler is None:
        filling.fill(key, False, f"no C++ compiler was found ({compilers()})")
    filling.fill(key, True, f"found: {compiler}")
