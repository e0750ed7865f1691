"""The layouts that a run can have on a Ray cluster: processes per role, and which of them share
GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from tunesmith.config.system import PlacementSection, Role
from tunesmith.plan.cluster import bundles, cluster_problems, machines_of, missing
from tunesmith.plan.cost.memory import LEAST_TOKENS, library_bytes, limit, reward_price
from tunesmith.plan.layout.process_layout import ProcessLayout, said_shape
from tunesmith.plan.plan import AnyPlan

Groups = tuple[tuple[Role, ...], ...]


def ray_shapes(plan: AnyPlan, gpus: int, tensors: list[int]) -> Iterator[ProcessLayout]:
    """Processes and placements that fit a cluster of ``gpus`` GPUs; among equally fast ones the
    first is best.

    These are engines and trainer in turn on all GPUs, engines separate from the roles that train or
    score, and each role separate; the order is reversed if numbers of processes were set.

    Args:
        tensors: numbers of GPUs over which an engine may be split.
    """
    said = said_shape(plan.said.system)
    counted = said["trainer_ranks"] or said["engines"]
    wanted: bool | None = said["hybrid"]
    if plan.kind.ahead or plan.devices.weight_plane == "nccl":
        wanted = False
    free = "colocate" not in plan.devices.placement.model_fields_set
    found = False
    for groups in _groups(plan, alone_first=bool(counted)):
        if plan.facts.engine_hardware and any("rollout" in group for group in groups):
            continue  # they have no GPU in common
        placed = _with_reward_shards(plan, groups)
        shares = any({"actor", "rollout"} <= set(group) for group in groups)
        other = wanted not in (None, shares)
        if free and (other or (shares and counted and found and wanted is None)):
            continue
        turns = shares if wanted is None else wanted
        for tensor in tensors:
            each = tensor * plan.devices.pipeline
            for ranks, engines in _numbers(placed, groups, gpus, each):
                for placement in _placements(placed, groups, ranks):
                    shape = ProcessLayout(
                        ranks, engines=engines, tensor=tensor, hybrid=turns, placement=placement
                    )
                    if _fits(shape.of(plan)):
                        found = True
                        yield shape


def _roles(plan: AnyPlan) -> dict[Role, bool]:
    return {
        "actor": True,
        "ref": plan.kind.reference,
        "critic": plan.kind.critic,
        "reward": plan.kind.reward_models > 0,
        "rollout": True,
    }


def _groups(plan: AnyPlan, *, alone_first: bool) -> Iterator[Groups]:
    """Which roles share GPUs: as set, or each way in which they can."""
    placement = plan.devices.placement
    if "colocate" in placement.model_fields_set:
        yield placement.colocate
        return
    free = "ref" not in placement.model_fields_set  # otherwise it is set to have its own processes
    able: tuple[Role, ...] = ("actor", "ref", "critic") if free else ("actor", "critic")
    there = _roles(plan)
    training: tuple[Role, ...] = tuple(role for role in able if there[role])
    wanted: list[tuple[Role, ...]] = [training]
    if plan.kind.reward_models:
        wanted = [(*training, "reward"), training]
    ways: list[Groups] = [((*each, "rollout"),) for each in wanted]
    ways += [(each,) if len(each) > 1 else () for each in wanted]
    ways += [()] if len(training) > 1 else []
    yield from reversed(ways) if alone_first else ways


def _numbers(plan: AnyPlan, groups: Groups, gpus: int, each: int) -> Iterator[tuple[int, int]]:
    """Numbers of trainer ranks and of engines with ``each`` GPUs, on all GPUs that no other role
    uses."""
    said = said_shape(plan.said.system)
    together = next((group for group in groups if "actor" in group), ("actor",))
    rest = gpus - _scoring(plan, groups, together)
    ranks: int | None = said["trainer_ranks"]
    engines: int | None = said["engines"]
    size = said["sequence"] or 1
    most = (plan.training.batch or gpus) * size
    if "rollout" in together:
        # A place for each engine, with a rank on each of its GPUs if that many fit.
        places = engines or ((ranks // each or ranks) if ranks else rest // each)
        if places > 0:
            yield ranks or places * max(1, min(each, most // places)), places
        return
    training = 1 + (plan.kind.critic and "critic" not in together)
    others = plan.facts.engine_hardware
    if others is not None:
        count = (ranks or min(rest // training, most)) // size * size
        room = engines or len(others.gpus) // each * others.nodes
        if count > 0 and room > 0:
            yield count, room
        return
    most_shares = range(max(1, rest // 2), rest, max(1, rest // 16))
    shares = [*most_shares, *sorted({rest // 4, rest // 8} - {0, rest // 2})]
    counts = [ranks] if ranks else [share // training for share in shares]
    if engines and not ranks:
        counts = [(rest - engines * each) // training]
    for wanted in counts:
        count = min(wanted, most) // size * size
        others = engines or (rest - count * training) // each
        if count > 0 and others > 0:
            yield count, others


def _scoring(plan: AnyPlan, groups: Groups, together: tuple[Role, ...]) -> int:
    """GPUs of the reference and of reward models that have their own GPUs."""
    devices = plan.devices
    apart = [role for role, has in _roles(plan).items() if has and role not in together]
    ref = devices.scoring_processes("ref") * ("ref" in apart)
    shared = any("reward" in group and "rollout" in group for group in groups)
    alone = "reward" in apart and not shared
    return ref + devices.scoring_processes("reward") * plan.kind.reward_models * alone


def _with_reward_shards(plan: AnyPlan, groups: Groups) -> AnyPlan:
    """Shard reward models that do not fit one of their own GPUs over the fewest GPUs of a machine
    that hold them."""
    reward = plan.devices.placement.reward
    longest = plan.training.longest or LEAST_TOKENS
    together = any("reward" in group for group in groups)
    shares = reward.shards or together or plan.devices.scoring_shards("reward") > 1
    if shares or not plan.facts.frozen_parameters:
        return plan
    found = plan
    for shards in range(1, plan.gpus + 1):
        count = reward.processes or shards
        if count % shards == 0:
            found = plan if shards == 1 else _with_reward(plan, processes=count, shards=shards)
            needed = library_bytes(found) + reward_price(found, longest).peak
            if needed <= limit(found) * plan.free_memory:
                break
    return found


def _with_reward(plan: AnyPlan, **resources: int) -> AnyPlan:
    placement = plan.devices.placement
    reward = placement.reward.model_copy(update=resources)
    return plan.with_devices(placement=placement.model_copy(update={"reward": reward}))


def _placements(plan: AnyPlan, groups: Groups, ranks: int) -> Iterator[PlacementSection]:
    """``system.placement`` as set, with the groups; reward models on the trainer's GPUs are on all
    of them, whole or sharded over a machine's GPUs."""
    placement = plan.devices.placement
    each = plan.gpus
    if groups and "colocate" not in placement.model_fields_set:
        plan = plan.with_devices(placement=placement.model_copy(update={"colocate": groups}))
    beside = ranks > 1 and any({"actor", "reward"} <= set(group) for group in groups)
    if beside and placement.reward.processes is None:
        plan = _with_reward(plan, processes=ranks)
    yield plan.devices.placement
    if beside and placement.reward.shards is None:
        count = plan.devices.scoring_processes("reward")
        yield _with_reward(plan, shards=count if count % each else each).devices.placement


def _fits(plan: AnyPlan) -> bool:
    if any(cluster_problems(plan.devices)):
        return False
    there = machines_of(plan.facts)
    return missing(bundles(plan.devices), [{**each, "CPU": inf} for each in there]) is None
