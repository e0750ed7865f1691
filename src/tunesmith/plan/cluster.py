"""Placement of a run's processes on a cluster: bundles of CPUs and GPUs, and which resources a
cluster lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import get_args

from tunesmith.config.system import Resources, Role
from tunesmith.errors import ConfigError, Problem
from tunesmith.plan.devices import Devices
from tunesmith.plan.facts.run import Facts

NAMES: dict[Role, str] = {
    "actor": "trainer",
    "ref": "reference",
    "critic": "critic",
    "reward": "reward model",
    "rollout": "engine",
}
ROLES: tuple[Role, ...] = get_args(Role)
_UNITS = ("CPU", "GPU")
ACCELERATOR = "accelerator_type:"
"""Ray gives each machine one of this resource, with the name of its GPUs."""
_PART_OF_ACCELERATOR = 0.001
_COLOCATE = ("system.placement.colocate",)
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Bundle:
    """Processes placed together on one machine, by role, with their total CPUs and GPUs."""

    roles: tuple[Role, ...]
    cpus: float
    gpus: float
    accelerator: str | None = None
    """The kind of GPU; None: any."""

    @property
    def resources(self) -> dict[str, float]:
        amounts = {unit: n for unit, n in zip(_UNITS, (self.cpus, self.gpus), strict=True) if n}
        return {**amounts, **self.kind_of_gpu}

    @property
    def kind_of_gpu(self) -> dict[str, float]:
        """The resource that only machines with its kind of GPU have."""
        name = self.accelerator
        return {} if name is None else {f"{ACCELERATOR}{name}": _PART_OF_ACCELERATOR}

    @property
    def dealt(self) -> bool:
        """Whether its processes see different numbers of its GPUs: an engine with several ranks
        sees all of them, the others see one each, in turn. Ray gives a process a fraction of one
        GPU or whole GPUs, never parts of two."""
        return len(self.roles) > 1 and self.gpus > 1

    @property
    def share(self) -> tuple[float, float]:
        """CPUs and GPUs that Ray, which counts in ten-thousandths, allots to each of its
        processes."""
        count = len(self.roles)
        if self.dealt:
            return int(self.cpus / count * 10_000) / 10_000, 0.0
        return int(self.cpus / count * 10_000) / 10_000, int(self.gpus / count * 10_000) / 10_000


def cluster_problems(devices: Devices, counted: Collection[Role] = ROLES) -> Iterator[Problem]:
    """Problems with Ray and with the placement on it.

    Args:
        counted: the roles whose numbers of processes are known.
    """
    if devices.cluster == "none" or not devices.kind.rl:
        return
    yield from _check_accelerators(devices)
    yield from _check_shared(devices, counted)
    yield from _check_ranks(devices)
    yield from _check_scoring(devices)


def ray_not_installed(devices: Devices) -> Iterator[Problem]:
    if devices.cluster == "ray" and devices.kind.rl and find_spec("ray") is None:
        text = (
            'system.cluster = "ray": Ray is not installed. Install it: pip install "tunesmith[ray]"'
        )
        yield Problem(("system.cluster",), text, "machine")


def _check_ranks(devices: Devices) -> Iterator[Problem]:
    """Problems with several ranks of one group on one GPU, or with requests for GPU fractions on an
    unknown device."""
    if not (devices.device or "cuda").startswith("cuda"):
        return
    groups = devices.placement.colocate
    ranks = devices.trainer_ranks
    said = f"system.trainer_ranks = {ranks}"
    counts: dict[Role, tuple[int, str]] = {"actor": (ranks, said), "critic": (ranks, said)}
    for role in ("ref", "reward"):
        count = devices.scoring_shards(role)
        counts[role] = count, f"{count} processes that share a model"
    for role, (count, words) in counts.items():
        together = next((group for group in groups if role in group), (role,))
        gpus = max(_needs(devices, each, 1.0)[1] for each in together)
        if count > 1 and 0 < gpus <= 0.5:  # with more, each GPU has only one
            yield Problem(
                (f"system.placement.{role}.gpus", "system.trainer_ranks"),
                f"system.placement.{role}.gpus = {gpus:g} with {words} puts two of them on one "
                "GPU, which NCCL refuses; use 1 GPU, or one process",
            )


def _check_accelerators(devices: Devices) -> Iterator[Problem]:
    """Kinds of GPUs for a run on CPUs, and two kinds for roles that share one."""
    placement = devices.placement
    named = {role: getattr(placement, role).accelerator for role in ROLES}
    for role in (role for role, kind in named.items() if kind and devices.device == "cpu"):
        key = f"system.placement.{role}.accelerator"
        yield Problem((key,), f'{key}: system.device = "cpu" uses no GPU; leave it out', "unread")
    for group in placement.colocate:
        kinds = {named[role] or (named["actor"] if role != "rollout" else None) for role in group}
        if len(kinds - {None}) > 1:
            yield Problem(
                _COLOCATE,
                f"system.placement.colocate: {list(group)} share a GPU, and their accelerator is "
                f"{' and '.join(sorted(filter(None, kinds)))}; name one",
            )


def _check_shared(devices: Devices, counted: Collection[Role]) -> Iterator[Problem]:
    placement = devices.placement
    counts = Counter(role for group in placement.colocate for role in group)
    repeated = [role for role, n in counts.items() if n > 1]
    if repeated:
        yield Problem(
            _COLOCATE,
            f"system.placement.colocate names '{repeated[0]}' twice: a role shares one place",
        )
    for group in placement.colocate:
        if len(group) < 2:
            text = (
                f"system.placement.colocate: {list(group)} shares with no other role; name at "
                "least two"
            )
            yield Problem(_COLOCATE, text)
        if any(role not in counted for role in group):
            continue  # derived numbers will agree
        ranks = devices.ranks_per_engine if "rollout" in group else 1
        places = _places(devices, group)
        if any(
            n % places or n > ranks * places
            for n in (_side_by_side(devices, role) for role in group)
        ):
            counts = ", ".join(f"{role} {_side_by_side(devices, role)}" for role in group)
            yield Problem(
                (*_COLOCATE, "system.trainer_ranks", "system.engines"),
                f"system.placement.colocate: {list(group)} have different numbers of processes and "
                f"cannot share places ({counts}: system.trainer_ranks, system.engines, processes "
                "of system.placement.reward and ref); make the numbers equal"
                f"{f', or up to {ranks} for each engine of {ranks} ranks' if ranks > 1 else ''}, "
                "or leave one out",
            )
        if any((getattr(placement, role).gpus or 0) > 1 for role in group):
            text = (
                f"system.placement.colocate: {list(group)} share one GPU; a role with more GPUs "
                "cannot share"
            )
            yield Problem(_COLOCATE, text)


def _check_scoring(devices: Devices) -> Iterator[Problem]:
    """Problems with settings for a reference without its own processes, and with leftover reward
    model processes."""
    said = devices.placement.ref.model_fields_set
    if said and devices.placed_together("actor", "ref"):
        yield Problem(
            (f"system.placement.ref.{min(said)}", *_COLOCATE),
            f"system.placement.ref.{min(said)} has no effect where system.placement.colocate puts "
            "'ref' with 'actor': each trainer rank has the reference, or its share of it; leave "
            "one of the two out",
            "unread",
        )
    count = devices.scoring_processes("reward")
    shards = devices.scoring_shards("reward")
    if count % shards:
        yield Problem(
            ("system.placement.reward.shards", "system.placement.reward.processes"),
            f"system.placement.reward.shards = {shards} with system.placement.reward.processes = "
            f"{count}: each copy of a reward model has {shards} processes, and {count % shards} "
            f"would be left over; make processes a multiple of {shards}, or leave it out",
        )


def _side_by_side(devices: Devices, role: Role) -> int:
    """The number of places that hold a process of this role, or one of each reward model."""
    if role == "rollout":
        return devices.engines
    if role == "reward" or (role == "ref" and not devices.placed_together("actor", "ref")):
        return devices.scoring_processes(role)
    return devices.trainer_ranks


def _places(devices: Devices, group: Sequence[Role]) -> int:
    """The number of places of a group: one per engine if it has engines."""
    return _side_by_side(devices, "rollout" if "rollout" in group else group[0])


def processes(devices: Devices) -> dict[Role, int]:
    """Number of processes of a resolved run, by role.

    With an adapter, the reference is the policy without it; placed with the trainer, it is in the
    trainer's processes.
    """
    count: dict[Role, int] = {
        "actor": devices.trainer_ranks,
        "ref": devices.scoring_processes("ref") * devices.reference_apart,
        "critic": devices.trainer_ranks * devices.kind.critic,
        "reward": devices.scoring_processes("reward") * devices.kind.reward_models,
        "rollout": devices.engines,
    }
    return {role: n for role, n in count.items() if n}


def bundles(devices: Devices) -> list[Bundle]:
    """One bundle per process, or per place of each group in ``system.placement.colocate``.

    Unless ``system.placement`` says otherwise, a process has one CPU and, on a GPU device, one GPU
    (an engine has one per rank).

    Raises:
        ConfigError: ``system.placement`` names a role that the run does not have.
    """
    placement = devices.placement
    default = float(devices.on_gpu)
    count = processes(devices)
    within = devices.kind.reference and not devices.reference_apart
    inside: tuple[Role, ...] = ("ref",) if within else ()
    named = {
        *placement.model_fields_set - {"colocate"},
        *(r for group in placement.colocate for r in group),
    }
    for name in sorted(named - {*inside}):
        if name not in count:
            raise ConfigError(
                f"system.placement names '{name}', and this run has no such role; leave it out",
                keys=("system.placement",),
            )
    shared: list[Bundle] = []
    for group in placement.colocate:
        places = _places(devices, group)
        roles: tuple[Role, ...] = tuple(
            role for role in group for _ in range(count.pop(role, 0) // places)
        )
        cpus, gpus = zip(*(_needs(devices, role, default) for role in roles), strict=True)
        kind = next(filter(None, (_accelerator(devices, role) for role in group)), None)
        shared += [Bundle(roles, sum(cpus), max(gpus), kind)] * places
    alone: list[Role] = [role for role in ROLES for _ in range(count.get(role, 0))]
    needs = {role: (*_needs(devices, role, default), _accelerator(devices, role)) for role in alone}
    return [*shared, *(Bundle((role,), *needs[role]) for role in alone)]


def machines_of(facts: Facts) -> list[dict[str, float]]:
    """The resources of a run's machines, as Ray counts them."""
    found: list[dict[str, float]] = []
    for hardware in filter(None, (facts.hardware, facts.engine_hardware)):
        each = {"CPU": float(hardware.cores), "GPU": float(len(hardware.gpus))}
        if hardware.accelerator:
            each[f"{ACCELERATOR}{hardware.accelerator}"] = 1.0
        found += [each] * hardware.nodes
    return found


def _accelerator(devices: Devices, role: Role) -> str | None:
    """The kind of GPU of a role, if it has one; roles that train or score are with the trainer."""
    placement = devices.placement
    wanted: Resources = getattr(placement, role)
    if not devices.on_gpu or wanted.gpus == 0:
        return None
    return wanted.accelerator or (None if role == "rollout" else placement.actor.accelerator)


def _needs(devices: Devices, role: Role, gpus: float) -> tuple[float, float]:
    wanted: Resources = getattr(devices.placement, role)
    if role == "rollout":
        gpus *= devices.ranks_per_engine
    cpus = 1.0 if wanted.cpus is None else wanted.cpus
    return cpus, gpus if wanted.gpus is None else wanted.gpus


def missing(wanted: Sequence[Bundle], machines: Sequence[Mapping[str, float]]) -> str | None:
    """A message about the resources that a cluster's machines lack for the bundles; None if they
    suffice.

    Args:
        machines: the numbers of ``CPU`` and ``GPU`` of each.
    """
    lacking = [*_lacking(wanted, machines)]
    kinds = {bundle.accelerator for bundle in wanted if bundle.accelerator and not lacking}
    for kind in sorted(kinds):
        own = [machine for machine in machines if machine.get(f"{ACCELERATOR}{kind}")]
        some = [bundle for bundle in wanted if bundle.accelerator == kind]
        lacking += [f"{text} with {kind}" for text in _lacking(some, own)]
    if not lacking:
        return None
    return (
        f"the cluster has too few resources: {'; '.join(lacking)}. Lower system.engines, "
        "system.trainer_ranks or system.placement, let roles share with "
        "system.placement.colocate, or add machines"
    )


def _lacking(wanted: Sequence[Bundle], machines: Sequence[Mapping[str, float]]) -> Iterator[str]:
    for place, unit in enumerate(_UNITS):
        amounts = [(b.cpus, b.gpus)[place] for b in wanted]
        names = [" with ".join(NAMES[role] for role in b.roles) for b in wanted]
        needs = list(zip(names, amounts, strict=True))
        total = sum(n for _, n in needs)
        available = sum(machine.get(unit, 0.0) for machine in machines)
        largest = max((machine.get(unit, 0.0) for machine in machines), default=0.0)
        who, most = max(needs, key=lambda need: need[1])
        if total > available + _EPS:
            listed = ", ".join(
                f"{times} × {who} {n:g}" for (who, n), times in Counter(needs).items() if n
            )
            yield f"{total:g} {unit}s are needed ({listed}), and the cluster has {available:g}"
        elif most > largest + _EPS:
            yield f"{who} needs {most:g} {unit}s on one machine, and the largest has {largest:g}"
