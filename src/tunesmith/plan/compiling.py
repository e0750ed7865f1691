"""Whether a run compiles functions for this machine (``system.compile``)."""

from __future__ import annotations

from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.hardware import compilers
from tunesmith.plan.memory import on_gpu


def compilable(config: RunConfig, facts: Facts) -> bool:
    """Whether there is something to compile: a decode step of the local engine, or a training step (``native``)."""
    model, dtype = facts.model, known(config.model, "dtype")
    decodes = config.drawing is not None and config.system.engine == "local" and (model is None or model.lean)
    return not on_gpu(config) and (decodes or (config.trains and dtype == "bfloat16" and facts.hardware.tiles))


def derive_compile(filling: Filling, facts: Facts) -> None:
    """On, where there is something to compile and a compiler."""
    key, compiler = "system.compile", facts.hardware.compiler
    if not compilable(filling.config, facts):
        filling.fill(key, False, "nothing that this run computes is compiled")
    elif compiler is None:
        filling.fill(key, False, f"no C++ compiler was found ({compilers()})")
    filling.fill(key, True, f"found: {compiler}")
