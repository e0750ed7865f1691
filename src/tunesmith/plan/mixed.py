"""Machines with different GPUs: which of them train and score, and which sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations

from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.facts.hardware import Hardware
from tunesmith.plan.facts.machines import kind_of
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace


def kinds_of_machines(found: Sequence[Hardware], usual: int) -> list[Hardware]:
    """One description for all machines of a cluster whose GPUs Ray calls the same, those with the
    most arithmetic first.

    A machine is counted with as many GPUs as most of them have, and with the least memory of them;
    Ray gives a run GPUs that no other run has.

    Args:
        found: each with GPUs, and Ray's name of them.
        usual: GPUs of the machine on which the command runs, whose kind is counted so.
    """
    kinds: dict[str | None, list[Hardware]] = {}
    for each in found:
        kinds.setdefault(each.accelerator, []).append(each)
    described = [_described(alike, usual) for alike in kinds.values()]
    if len(described) == 1:
        return [replace(described[0], accelerator=None)]
    return sorted(described, key=_arithmetic, reverse=True)


def _described(alike: Sequence[Hardware], usual: int) -> Hardware:
    sizes = Counter(len(each.gpus) for each in alike)
    totals = {size: size * sum(n for other, n in sizes.items() if other >= size) for size in sizes}
    count = usual if usual in sizes else max(totals, key=lambda size: (totals[size], size))
    counted = [each for each in alike if len(each.gpus) >= count]
    gpus = [gpu for each in counted for gpu in each.gpus]
    least = min(gpu.memory_total for gpu in gpus)
    gpu = max((g for g in gpus if g.memory_total == least), key=lambda g: g.memory_free)
    return replace(
        counted[0],
        gpus=(gpu,) * count,
        nodes=len(counted),
        cores=min(each.cores for each in counted),
        memory_total=min(each.memory_total for each in counted),
        memory_available=min(each.memory_available for each in counted),
    )


def _arithmetic(machine: Hardware) -> float:
    kind = kind_of(machine.gpus[0])
    return (kind.flops if kind else 0.0) * len(machine.gpus) * machine.nodes


def parts(said: RunConfig, facts: Facts) -> list[Facts]:
    """The parts that kinds of machines may have in a run on Ray: one does everything, or one trains
    and scores and another samples.

    Raises:
        ConfigError: the settings name GPUs that are not there.
    """
    kinds = (facts.hardware, *facts.other_hardware)
    one = replace(facts, other_hardware=())
    if said.system.device == "cpu":
        return [replace(one, hardware=replace(facts.hardware, accelerator=None))]
    found = [replace(one, hardware=kind) for kind in kinds]
    if said.rl and _may_be_apart(said):
        pairs = [(t, s) for t, s in permutations(kinds, 2) if _computes(s, said, t)]
        found += [replace(one, hardware=t, engine_hardware=s) for t, s in pairs]
    agreeing = [each for each in found if _agrees(said, each)]
    if not agreeing:
        named = " and ".join(sorted({str(kind.accelerator) for kind in kinds}))
        raise ConfigError(
            f"system.placement: no machine has the accelerator that it names for actor or rollout "
            f"with the other settings; the machines have {named}",
            keys=("system.placement",),
        )
    return agreeing


def idle_notes(best: AnyPlan, plans: Sequence[AnyPlan], kinds: Sequence[Hardware]) -> Iterator[str]:
    """Remarks on the ``kinds`` of machines that take no part.

    Args:
        plans: all that are possible, which give kinds other parts.
    """
    ours = compared_seconds(best)
    for each in (kind for kind in kinds if not _takes_part(best, kind)):
        others = [compared_seconds(plan) for plan in plans if _takes_part(plan, each)]
        why = "this run cannot use it"
        if others and ours:
            why = f"with it a step takes at least {min(others):.3g} s, instead of {ours:.3g} s"
        yield f"{each.in_words} takes no part: {why}"


def _takes_part(plan: AnyPlan, kind: Hardware) -> bool:
    names = (each.in_words for each in (plan.facts.hardware, plan.facts.engine_hardware) if each)
    return kind.in_words in names


def _may_be_apart(said: RunConfig) -> bool:
    """Whether settings leave engines GPUs of their own."""
    system = said.system
    shared = system.placement and any("rollout" in g for g in system.placement.colocate)
    return not (shared or system.hybrid or system.weight_plane == "ipc")


def _computes(samples: Hardware, said: RunConfig, trains: Hardware) -> bool:
    """Whether engines compute in the trainer's number format."""
    narrow = said.model.dtype or ("bfloat16" if trains.gpus[0].bf16 else "float16")
    return narrow != "bfloat16" or samples.gpus[0].bf16


def _agrees(said: RunConfig, facts: Facts) -> bool:
    """Whether settings name no other kinds of GPUs than these parts have."""
    placement = said.system.placement
    if placement is None:
        return True
    samples = facts.engine_hardware or facts.hardware
    named = (placement.actor.accelerator, placement.rollout.accelerator)
    kinds = (facts.hardware.accelerator, samples.accelerator)
    return all(name in (None, kind) for name, kind in zip(named, kinds, strict=True))
