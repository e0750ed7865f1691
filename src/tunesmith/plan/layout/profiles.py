"""Values of ``[system]`` that a profile or an earlier measurement sets instead of derived ones.

The profiles are those at the end of OpenRLHF's performance guide: default, high performance,
maximum throughput, memory constrained. What they set besides is derived here (packing, dynamic
batches, the way of new weights), or changes what is learned (asynchronous training:
rollout.max_staleness).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.config.changing import with_values
from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig
from tunesmith.plan.derive.savings import fits_somehow
from tunesmith.plan.layout.layouts import gpus_of_run, layouts
from tunesmith.plan.plan import AnyPlan, C, Plan, Reasons
from tunesmith.plan.rules.situation import Situation
from tunesmith.plan.said import with_said

CHECKPOINTING = "system.gradient_checkpointing"
TURNS = "system.hybrid"
OPTIMIZER = "system.offload_optimizer"
RUNNING = "system.max_running"


@dataclass(frozen=True)
class ProfileValue:
    """A value that a profile sets, unless the run file does, ``when`` a condition holds for the run
    and its GPUs."""

    key: str
    value: Any
    why: str
    when: Callable[[Situation[Any], int], bool]
    where: str = ""
    """The condition in words; empty if it is only that the run trains."""
    if_fits: bool = False
    """Only where a sample fits the memory with it."""


def _trains(s: Situation[Any], _: int) -> bool:
    return s.config.trains


def _samples_on_gpus(s: Situation[Any], gpus: int) -> bool:
    return s.config.samples and gpus > 0


def _takes_turns(s: Situation[Any]) -> bool:
    """Whether engines and trainer may take turns without changing what is learned."""
    synchronous = isinstance(s.config, RLConfig) and s.config.rollout.max_staleness == 0
    return synchronous and not s.engine.served


def _turns_are_faster(s: Situation[Any], gpus: int) -> bool:
    free = not s.engine_process_off and s.config.system.weight_plane not in ("ipc", "nccl")
    return _takes_turns(s) and gpus > 1 and free


def _offloads(s: Situation[Any], gpus: int) -> bool:
    muon = s.config.train.optimizer.name == "muon"
    return s.config.trains and gpus > 0 and s.config.system.cluster == "none" and not muon


def _shards(s: Situation[Any], gpus: int) -> bool:
    launched = s.facts is not None and s.facts.ranks_here is not None
    return s.config.trains and gpus > 1 and s.system.trainer_ranks != 1 and not launched


_WHOLE = "activations are kept: no forward pass is recomputed"
_SAMPLING = "where the policy samples, on GPUs"
# fmt: off
SYSTEM_PROFILES: Mapping[str, tuple[ProfileValue, ...]] = {
    "stable": (
        ProfileValue(CHECKPOINTING, True,
            "activations are recomputed, so samples far longer than usual fit too", _trains),
    ),
    "fast": (
        ProfileValue(CHECKPOINTING, False, _WHOLE, _trains, if_fits=True),
        ProfileValue(OPTIMIZER, False, "the optimizer runs on the GPU",
            lambda s, gpus: s.config.trains and gpus > 0, "on GPUs", if_fits=True),
        ProfileValue(TURNS, True,
            "engines and trainer take turns on all GPUs, so none waits for another",
            _turns_are_faster, "in `rl`, on several GPUs"),
    ),
    "throughput": (
        ProfileValue(CHECKPOINTING, False, _WHOLE, _trains, if_fits=True),
        ProfileValue(RUNNING, 1024,
            "more requests are decoded at once", _samples_on_gpus, _SAMPLING),
        ProfileValue("system.max_prefill_tokens", 32768,
            "more prompts are read in one forward pass",
            lambda s, gpus: _samples_on_gpus(s, gpus) and not s.engine.third_party, _SAMPLING),
    ),
    "memory": (
        ProfileValue(CHECKPOINTING, True,
            "activations are recomputed: the least memory for a sample", _trains),
        ProfileValue(OPTIMIZER, True,
            "master weights and moments are in host memory", _offloads, "on GPUs"),
        ProfileValue("system.zero_stage", 3,
            "the GPUs share one copy of weights, gradients and optimizer", _shards,
            "on several GPUs"),
        ProfileValue(TURNS, True, "the engine frees its memory while the policy trains",
            lambda s, gpus: _takes_turns(s) and gpus > 0, "in `rl`, on GPUs"),
        ProfileValue(RUNNING, 64, "fewer requests at once take KV memory",
            lambda s, _: s.config.samples, "where the policy samples"),
    ),
}
# fmt: on


def with_system_profile(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan, as if the values of the run's profile had been said, or those measured to be
    fastest; the run file's values stay."""
    said = plan.said
    facts = plan.facts
    given = settings(said, given_only=True)
    if facts.tuned:
        measured = {key: v for key, v in facts.tuned.values.items() if key not in given}
        for key, value in measured.items():
            reasons.lower(key, value, facts.tuned.reason)
        plan = with_said(plan, measured)
    profile = said.system.profile
    if profile is None:
        return plan
    s = Situation(with_values(said, {"system.engine": plan.devices.engine.name}), facts)
    gpus = gpus_of_run(plan) if plan.devices.on_gpu else 0
    for entry in SYSTEM_PROFILES[profile]:
        wanted = entry.key not in given and entry.when(s, gpus)
        there = with_said(plan, {entry.key: entry.value})
        if wanted and (not entry.if_fits or _fits(there)):
            plan = there
            reasons.lower(entry.key, entry.value, f"profile {profile}: {entry.why}")
    return plan


def _fits(plan: AnyPlan) -> bool:
    """Whether a sample fits in some layout."""
    return any(fits_somehow(layout.of(plan)) for layout in layouts(plan))
