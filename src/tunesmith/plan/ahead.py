"""Settings of playing ahead that contradict each other, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.resolved import settings
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.plan.weights import weights_apart


def hybrid_problems(config: RunConfig) -> Iterator[str]:
    if not config.system.hybrid:
        return
    if not isinstance(config, RLConfig):
        yield "system.hybrid is of runs that sample and train in turn; leave it out"
    elif config.system.served:
        yield f'system.hybrid: servers (engine = "{config.system.engine}") do not sleep for a run; leave it out'
    elif config.rollout.max_staleness and weights_apart(config):
        yield (
            "system.hybrid lets engine and trainer take turns, and rollout.max_staleness lets both work at once; "
            "leave one of the two out"
        )


def ahead_problems(config: RLConfig) -> Iterator[str]:
    rollout, said = config.rollout, settings(config, said_only=True)
    if not rollout.max_staleness:
        for key in ("partial", "over_generation", "queue_size"):
            if f"rollout.{key}" in said and getattr(rollout, key) != type(rollout).model_fields[key].default:
                yield (
                    f"rollout.{key} has no effect with rollout.max_staleness = 0, where every step plays its own "
                    "rollouts to the end; say rollout.max_staleness = 1, or leave it out"
                )
        return
    if rollout.oversample > 1:
        yield (
            "rollout.oversample is of steps that play their own rollouts; with rollout.max_staleness others are "
            "tried ahead of time anyway. Leave it out, or say rollout.over_generation"
        )
    if not weights_apart(config) and not rollout.partial:
        yield (
            "rollout.max_staleness with the engine on the trainer's own weights interrupts completions while the "
            "policy trains, and they go on with the new one: say rollout.partial = true and rollout.over_generation "
            "above 1 for that, or system.engine_process = true for an engine with weights of its own"
        )
    elif not weights_apart(config) and rollout.over_generation == 1:
        yield (
            "rollout.max_staleness with the engine on the trainer's own weights gains nothing with "
            "rollout.over_generation = 1: say more, such as 1.5, or system.engine_process = true"
        )
