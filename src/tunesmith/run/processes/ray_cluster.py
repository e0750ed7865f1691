"""The processes of a run on a Ray cluster, which is joined or started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tunesmith.config.system import Role, SystemSection
from tunesmith.errors import (
    ClusterError,
    ConfigError,
    EngineError,
    NoPlaceError,
    about,
    boundary,
    nearest,
)
from tunesmith.learn.usercode.far import PATIENCE, Lost
from tunesmith.plan.cluster import ACCELERATOR, NAMES, Bundle, missing
from tunesmith.plan.facts.hardware import Hardware, read_hardware, usable_cpus
from tunesmith.run.processes.local import Placed, Starter

PLACING = 120.0
"""Seconds to wait for resources that others hold, on a cluster that is large enough."""
REACHING = 10.0
"""Seconds to wait for a cluster's first answer."""
DESCRIBING = 60.0
"""Seconds to wait for machines to describe themselves."""
OBJECT_STORE = 200 << 20
"""Bytes for objects in transit between processes of a cluster started here; more goes to disk."""


class RayCluster(Starter):
    """Places for the processes of one run. A process's place is its bundle; None: it is in no
    bundle."""

    def __init__(
        self, group: Any, bundles: Sequence[Bundle], machines: Mapping[int, str], *, connected: bool
    ) -> None:
        super().__init__()
        self._group = group
        self._bundles = bundles
        self._machines = machines
        self._order = by_machine(machines)
        self._connected = connected
        self._numbers = count(1)
        self._dealt: dict[int, list[str]] = {}
        """The GPUs of bundles whose processes see different numbers of GPUs."""

    @classmethod
    def open(cls, system: SystemSection, bundles: Sequence[Bundle]) -> RayCluster:
        """Reserve ``bundles``, each on one machine.

        Raises:
            ClusterError: there is no cluster at the address, it is too small, or others hold too
                much of it.
            ConfigError: Ray does not know, or refuses, the runtime environment.
        """
        # Ray is first imported in here, since what it reads on import is set before.
        connected = _connect(system, sum(len(bundle.roles) for bundle in bundles))
        try:
            group = _reserve(bundles)
            machines = _machines(group)
            if system.weight_plane == "memory":
                check_machines(bundles, machines)
            return cls(group, bundles, machines, connected=connected)
        except BaseException:
            _disconnect(connected)
            raise

    def __exit__(self, *_: object) -> None:
        import ray
        from ray.exceptions import RayError

        super().__exit__()
        with suppress(RayError, ValueError):
            ray.util.remove_placement_group(self._group)
        _disconnect(self._connected)

    def _start(self, role: Role, lost: Lost, python: Path | None) -> Placed:
        """A new process in a free place of its role, or outside the reservation if all places are
        taken.

        Args:
            python: the interpreter of another environment, with Ray of the same version and
                Tunesmith.

        Raises:
            EngineError: all places are taken and the cluster has no other room.
            NoPlaceError: the machines of an engine's free places are gone.
        """
        import ray

        from tunesmith.run.processes.ray_actor import Actor, RayActor

        named = type(NAMES[role].title().replace(" ", ""), (Actor,), {})  # what `ps` shows
        made: Any = ray.remote(named)
        places = {i: self._bundles[i].roles.count(role) for i in self._order}
        rooms = [i for i, places_there in places.items() if self._taken(i, role) < places_there]
        if role == "rollout" and rooms:
            rooms = self._with_machine(rooms)
        # Each process of a reward model has a different place; consecutive trainer ranks share one.
        if role == "reward":
            rooms.sort(key=lambda i: self._taken(i, role))
        bundle = rooms[0] if rooms else None
        options = self._outside(role) if bundle is None else self._inside(bundle)
        if python is not None:
            # Not resolved: the interpreter of a virtual environment is a link to another one.
            options["runtime_env"] = {"py_executable": str(python.absolute())}
        gpus = None if bundle is None else self._gpus(bundle, role)
        # More requests than an engine runs may queue, and pings have to get through.
        actor = made.options(max_concurrency=1 << 14, **options).remote(os.getcwd(), gpus)
        return RayActor(actor, f"the {NAMES[role]}'s actor ({next(self._numbers)})", lost), bundle

    def _with_machine(self, rooms: Sequence[int]) -> list[int]:
        """The bundles whose machine is there: where it is gone, Ray looks for another one.

        Raises:
            NoPlaceError: there is none.
        """
        machines = _machines(self._group)
        alive = {node["NodeID"] for node in _alive()}
        for i in rooms:
            if machines.get(i) != self._machines[i]:  # its GPUs may have other names
                self._dealt.pop(i, None)
        self._machines = {**self._machines, **machines}
        placed = [i for i in rooms if machines.get(i) in alive]
        if not placed:
            needed = _in_words(self._bundles[rooms[0]].resources)
            raise NoPlaceError(
                f"the engine's machine has left the cluster, and no other one has {needed} free"
            )
        return placed

    def _gpus(self, bundle: int, role: Role) -> list[str] | None:
        """The bundle's GPUs that the next process of a role sees; None: those that Ray assigns."""
        import ray

        place = self._bundles[bundle]
        if not place.dealt:
            return None
        if bundle not in self._dealt:
            options = {**self._inside(bundle), "num_gpus": int(place.gpus)}
            self._dealt[bundle] = ray.get(_asked(_own_gpus, options), timeout=PATIENCE)
        found = self._dealt[bundle]
        return found if role == "rollout" else [found[self._taken(bundle, role) % len(found)]]

    def _taken(self, bundle: int, role: Role) -> int:
        """Places of the bundle that processes of a role take; Ray waits for those that are
        ending."""
        running = list(self._running.items())
        return sum(place == (role, bundle) and not far.lost for far, place in running)

    def _inside(self, bundle: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpus, gpus = self._bundles[bundle].share
        there = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": there}

    def _outside(self, role: Role) -> dict[str, Any]:
        """Resources for a process outside the reservation, of a pool that has grown since the
        start."""
        import ray

        place = next(bundle for bundle in self._bundles if role in bundle.roles)
        cpus = place.share[0]
        gpus = place.gpus if place.dealt else place.share[1]
        free = ray.available_resources()
        wanted = {"CPU": cpus, "GPU": gpus}
        if any(free.get(unit, 0.0) < n for unit, n in wanted.items()):
            raise EngineError(
                f"no room for another {NAMES[role]}: it needs {_in_words(wanted)}; the cluster has "
                f"{_in_words(free)} free"
            )
        return {"num_cpus": cpus, "num_gpus": gpus, "resources": place.kind_of_gpu}


def by_machine(machines: Mapping[int, str]) -> list[int]:
    """The bundles, those of one machine next to each other: consecutive trainer ranks, which
    ``system.shard_size`` groups, are then on one machine where it has room for them.

    Example:
        >>> by_machine({0: "a", 1: "b", 2: "a"})
        [0, 2, 1]
    """
    first = {machine: i for i, machine in sorted(machines.items(), reverse=True)}
    return sorted(machines, key=lambda i: (first[machines[i]], i))


def check_machines(bundles: Sequence[Bundle], machines: Mapping[int, str]) -> None:
    """Refuse engines that cannot read the memory in which the trainer leaves its weights.

    Args:
        machines: the machine of each bundle, by index.

    Raises:
        ClusterError: they are on another machine.
    """
    found: dict[Role, list[str]] = {
        role: [machines[i] for i, bundle in enumerate(bundles) if role in bundle.roles]
        for role in ("actor", "rollout")
    }
    if found["actor"] and set(found["rollout"]) - {found["actor"][0]}:
        raise ClusterError(
            'system.weight_plane = "memory" is for engines on the trainer\'s machine, and the '
            'cluster has places for them on others: set system.weight_plane = "gloo", or "disk" '
            "with a system.engine_directory that all machines see"
        )


def read_machines(system: SystemSection, here: Hardware) -> list[Hardware]:
    """The machines with GPUs of the cluster that ``system.ray_address`` or ``RAY_ADDRESS`` names,
    as each describes itself; empty if neither is set.

    Args:
        here: the machine on which the command runs; one that does not answer is taken to be like
            it.

    Raises:
        ClusterError: there is no cluster at the address.
    """
    if not (system.ray_address or os.environ.get("RAY_ADDRESS")):
        return []
    connected = _connect(system, 0)
    try:
        nodes = [node for node in _alive() if node["Resources"].get("GPU")]
        found: list[Hardware] = []
        for node, seen in zip(nodes, _seen_there([node["NodeID"] for node in nodes]), strict=True):
            machine = seen if seen and seen.gpus else here
            gpus = machine.gpus[: int(node["Resources"]["GPU"])]
            names = [name for name in node["Resources"] if name.startswith(ACCELERATOR)]
            if gpus:
                kind = names[0].removeprefix(ACCELERATOR) if names else gpus[0].name
                found.append(replace(machine, gpus=gpus, nodes=1, accelerator=kind))
        return found
    finally:
        _disconnect(connected)


def _seen_there(nodes: Sequence[str]) -> list[Hardware | None]:
    """What each machine says of itself; None: it cannot."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    options = [{"num_cpus": 0, "scheduling_strategy": place} for place in places]
    asked = [_asked(_own_hardware, option) for option in options]
    ray.wait(asked, num_returns=len(asked), timeout=DESCRIBING)
    found: list[Hardware | None] = []
    for answer in asked:
        found.append(None)
        with suppress(RayError):
            found[-1] = ray.get(answer, timeout=0)
    return found


def _asked(question: Callable[[], object], options: Mapping[str, object]) -> Any:
    """The answer of another process, which is yet to come."""
    import ray

    made: Any = ray.remote(question)
    return made.options(**options).remote()


def _own_hardware() -> Hardware:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)  # Ray sets them for a process without GPUs
    return read_hardware()


def _alive() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _machines(group: Any) -> Mapping[int, str]:
    import ray

    return ray.util.placement_group_table(group)["bundles_to_node_id"]


def _own_gpus() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _connect(system: SystemSection, processes: int) -> bool:
    """Connect to a cluster; returns whether this process was not connected before."""
    address = system.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        return _open(system, processes, address)
    # Otherwise Ray's processes get only what all others leave of a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray reads this on import, and opens no port to other machines. A `ray start` from here may
    # open some later.
    only_here = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    said = os.environ.get(only_here)
    os.environ[only_here] = said or "0"
    try:
        return _open(system, processes, None)
    finally:
        if said is None:
            del os.environ[only_here]


def _open(system: SystemSection, processes: int, address: str | None) -> bool:
    import ray

    environment = _environment(system.ray_runtime_env)
    if ray.is_initialized():
        for key, said in (("ray_runtime_env", environment), ("ray_address", system.ray_address)):
            if said:
                what = "this process uses Ray already, as it was started; leave it out"
                raise ConfigError(f"system.{key}: {what}", keys=(f"system.{key}",))
        return False
    common: dict[str, Any] = {"logging_level": "error", "log_to_driver": True}
    init = partial(ray.init, runtime_env=environment, **common)
    if address is not None:
        missing = (
            f"there is no Ray cluster at {address}. Start it (ray start --head), correct "
            "system.ray_address or RAY_ADDRESS, or leave them out"
        )
        with boundary(ClusterError, missing, Exception):
            _reach(address)
        closed = (
            f"the Ray cluster at {address} does not let this run in. Where it asks for a token "
            "(as `ray start` says), set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN"
        )
        with boundary(ClusterError, closed, Exception):
            init(address=address)
        return True
    # Processes may share cores, so that a small machine is large enough.
    cores = max(usable_cpus(), processes)
    with boundary(ClusterError, "cannot start Ray on this machine", Exception):
        init(
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            _node_ip_address="127.0.0.1",
        )
    return True


def _reach(address: str) -> None:
    """Check that the address answers, because Ray itself tries for more than half a minute."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if "://" in address or not (host and port.isdigit()):
        raise ValueError(
            "an address is written host:port; run the command on a machine of the cluster"
        )
    socket.create_connection((host.strip("[]"), int(port)), REACHING).close()


def _disconnect(connected: bool) -> None:
    import ray

    if connected:
        ray.shutdown()


def _environment(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    from ray.runtime_env import RuntimeEnv

    if not said:
        return None
    unknown = sorted(said.keys() - RuntimeEnv.known_fields)
    if unknown:
        raise ConfigError(
            "system.ray_runtime_env: Ray knows no "
            f"'{unknown[0]}'.{nearest(unknown[0], RuntimeEnv.known_fields)}",
            keys=("system.ray_runtime_env",),
        )
    refused = "system.ray_runtime_env: Ray refuses it"
    with about("system.ray_runtime_env"), boundary(ConfigError, refused, (ValueError, TypeError)):
        return dict(RuntimeEnv(**said))


def _reserve(bundles: Sequence[Bundle]) -> Any:
    """Reserve a placement group, and wait until it is ready."""
    import ray

    problem = missing(bundles, [node["Resources"] for node in _alive()])
    if problem is not None:
        raise ClusterError(problem)
    group = ray.util.placement_group([bundle.resources for bundle in bundles], strategy="PACK")
    if not group.wait(PLACING):
        free = _in_words(ray.available_resources())
        ray.util.remove_placement_group(group)
        wanted = "; ".join(_in_words(bundle.resources) for bundle in bundles)
        raise ClusterError(
            f"the cluster had no room within {PLACING:g} s: wanted, each on one machine, {wanted}; "
            f"free are {free}. Wait for other runs to end, or take less with system.placement"
        )
    return group


def _in_words(resources: Mapping[str, float]) -> str:
    known = {unit: resources.get(unit, 0.0) for unit in ("CPU", "GPU")}
    return " and ".join(f"{n:g} {unit}s" for unit, n in known.items() if n) or "none"
