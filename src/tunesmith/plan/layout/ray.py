"""The layouts that a run can have on a Ray cluster: processes per role, and which of them share
GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunesmith.config.schema import RLConfig
from tunesmith.config.section import known
from tunesmith.config.system import PlacementSection, Role
from tunesmith.plan.cost.memory import LEAST_TOKENS, free_memory, longest_sample, reward_price
from tunesmith.plan.cost.price import LIBRARIES
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import with_values
from tunesmith.plan.layout.keys import (
    ENGINES,
    PLACEMENT,
    RANKS,
    SEQUENCE,
    TENSOR,
    TURNS,
    Settings,
    given,
)
from tunesmith.plan.processes.cluster import bundles, cluster_problems, missing
from tunesmith.plan.processes.roles import (
    has_critic,
    keeps_reference,
    placement_of,
    scoring_processes,
    scoring_shards,
)

Groups = tuple[tuple[Role, ...], ...]


def ray_shapes(config: RLConfig, facts: Facts, gpus: int, tensors: list[int]) -> Iterator[Settings]:
    """Processes and placements that fit a cluster of ``gpus`` GPUs; among equally fast ones the
    first is best.

    These are engines and trainer in turn on all GPUs, engines separate from the roles that train or
    score, and each role separate; the order is reversed if numbers of processes were set.

    Args:
        tensors: numbers of GPUs over which ``TENSOR`` may split an engine.
    """
    said = given(config, RANKS) or given(config, ENGINES)
    wanted = given(config, TURNS)
    if config.rollout.max_staleness or config.system.weight_plane == "nccl":
        wanted = False
    free = "colocate" not in placement_of(config).model_fields_set
    found = False
    for groups in _groups(config, alone_first=bool(said)):
        placed = _with_reward_shards(config, facts, groups)
        shares = any({"actor", "rollout"} <= set(group) for group in groups)
        if free and (
            wanted not in (None, shares) or (shares and said and found and wanted is None)
        ):
            continue
        turns = shares if wanted is None else wanted
        for tensor in tensors:
            each = tensor * config.system.vllm.pipeline_parallel_size
            for ranks, engines in _numbers(placed, groups, gpus, each):
                shape: dict[str, Any] = {
                    RANKS: ranks,
                    ENGINES: engines,
                    TENSOR: tensor,
                    TURNS: turns,
                }
                for placement in _placements(placed, facts, groups, ranks):
                    if _fits(config, facts, shape | {PLACEMENT: placement}):
                        found = True
                        yield shape | {PLACEMENT: placement}


def _roles(config: RLConfig) -> dict[Role, bool]:
    return {
        "actor": True,
        "ref": keeps_reference(config),
        "critic": has_critic(config),
        "reward": bool(config.reward.models),
        "rollout": True,
    }


def _groups(config: RLConfig, *, alone_first: bool) -> Iterator[Groups]:
    """Which roles share GPUs: as set, or each way in which they can."""
    placement = placement_of(config)
    if "colocate" in placement.model_fields_set:
        yield placement.colocate
        return
    free = "ref" not in placement.model_fields_set  # otherwise it is set to have its own processes
    able: tuple[Role, ...] = ("actor", "ref", "critic") if free else ("actor", "critic")
    there = _roles(config)
    training: tuple[Role, ...] = tuple(role for role in able if there[role])
    wanted: list[tuple[Role, ...]] = [training]
    if config.reward.models:
        wanted = [(*training, "reward"), training]
    ways: list[Groups] = [((*each, "rollout"),) for each in wanted]
    ways += [(each,) if len(each) > 1 else () for each in wanted]
    ways += [()] if len(training) > 1 else []
    yield from reversed(ways) if alone_first else ways


def _numbers(config: RLConfig, groups: Groups, gpus: int, each: int) -> Iterator[tuple[int, int]]:
    """Numbers of trainer ranks and of engines with ``each`` GPUs, on all GPUs that no other role
    uses."""
    together = next((group for group in groups if "actor" in group), ("actor",))
    rest = gpus - _scoring(config, groups, together)
    ranks = given(config, RANKS)
    engines = given(config, ENGINES)
    size = given(config, SEQUENCE) or 1
    most = (known(config.train, "batch_size") or gpus) * size
    if (
        "rollout" in together
    ):  # a place for each engine, with a rank on each of its GPUs if that many fit
        places = engines or ((ranks // each or ranks) if ranks else rest // each)
        if places > 0:
            yield ranks or places * max(1, min(each, most // places)), places
        return
    training = 1 + (has_critic(config) and "critic" not in together)
    shares = range(max(1, rest // 2), rest, max(1, rest // 16))
    wanted = (rest - engines * each) // training if engines else None
    for count in (
        [ranks]
        if ranks
        else [wanted]
        if wanted is not None
        else [share // training for share in shares]
    ):
        count = min(count, most) // size * size
        others = engines or (rest - count * training) // each
        if count > 0 and others > 0:
            yield count, others


def _scoring(config: RLConfig, groups: Groups, together: tuple[Role, ...]) -> int:
    """GPUs of the reference and of reward models that have their own GPUs."""
    apart = [role for role, has in _roles(config).items() if has and role not in together]
    ref = scoring_processes(config, "ref") * ("ref" in apart)
    shared = any("reward" in group and "rollout" in group for group in groups)
    reward = (
        scoring_processes(config, "reward")
        * len(config.reward.models)
        * ("reward" in apart and not shared)
    )
    return ref + reward


def _with_reward_shards(config: RLConfig, facts: Facts, groups: Groups) -> RLConfig:
    """Shard reward models that do not fit one of their own GPUs over the fewest GPUs of a machine
    that hold them."""
    reward = placement_of(config).reward
    longest = longest_sample(config, facts) or LEAST_TOKENS
    shares = (
        reward.shards
        or scoring_shards(config, "reward") > 1
        or any("reward" in group for group in groups)
    )
    if shares or not facts.frozen_parameters:
        return config
    found = config
    for shards in range(1, len(facts.hardware.gpus) + 1):
        if (reward.processes or shards) % shards == 0:
            found = (
                config
                if shards == 1
                else _with_reward(config, processes=reward.processes or shards, shards=shards)
            )
            if LIBRARIES + reward_price(found, facts, longest).peak <= free_memory(config, facts):
                break
    return found


def _with_reward(config: RLConfig, **said: int) -> RLConfig:
    placement = placement_of(config)
    reward = placement.reward.model_copy(update=said)
    return with_values(config, {PLACEMENT: placement.model_copy(update={"reward": reward})})


def _placements(
    config: RLConfig, facts: Facts, groups: Groups, ranks: int
) -> Iterator[PlacementSection]:
    """``system.placement`` as set, with the groups; reward models on the trainer's GPUs are on all
    of them, whole or sharded over a machine's GPUs."""
    placement = placement_of(config)
    each = len(facts.hardware.gpus)
    if groups and "colocate" not in placement.model_fields_set:
        config = with_values(config, {PLACEMENT: placement.model_copy(update={"colocate": groups})})
    beside = ranks > 1 and any({"actor", "reward"} <= set(group) for group in groups)
    if beside and placement.reward.processes is None:
        config = _with_reward(config, processes=ranks)
    yield placement_of(config)
    if beside and placement.reward.shards is None:
        count = scoring_processes(config, "reward")
        yield placement_of(_with_reward(config, shards=count if count % each else each))


def _fits(config: RLConfig, facts: Facts, shape: Settings) -> bool:
    placed = with_values(config, shape)
    if any(cluster_problems(placed)):
        return False
    each = {"CPU": float("inf"), "GPU": float(len(facts.hardware.gpus))}
    return missing(bundles(placed), [each] * facts.hardware.nodes) is None
