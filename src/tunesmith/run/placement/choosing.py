"""The placement of a run: which of them its settings ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.plan.cluster import bundles, processes
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.waits import long_wait
from tunesmith.run.placement.elsewhere import OnThisMachine
from tunesmith.run.placement.here import Here
from tunesmith.run.placement.launched import Launched
from tunesmith.run.placement.port import Placement
from tunesmith.run.placement.processes import Processes
from tunesmith.run.placement.ray import Ray
from tunesmith.run.processes.local import LocalProcesses
from tunesmith.run.processes.torchrun import LaunchedProcesses, meeting
from tunesmith.run.specs.engines import local_gpus


def open_placement(plan: AnyPlan, tokenizer: object, directory: Path) -> Placement:
    """The placement of a run.

    Args:
        directory: the run's.

    Raises:
        ClusterError: the cluster cannot be reached or is too small.
        ConfigError: this machine has too few GPUs.
    """
    devices = plan.devices
    if devices.cluster == "ray":
        return _ray(plan, tokenizer, directory)
    if max(devices.trainer_ranks, devices.machines) > 1:
        return ranks_without_cluster(plan, tokenizer, directory)
    return on_this_machine(plan, tokenizer)


def ranks_without_cluster(plan: AnyPlan, tokenizer: object, directory: Path) -> OnThisMachine:
    """The placement of several trainer ranks that no cluster shares out, or of several machines.

    Args:
        directory: as for ``Launched``.
    """
    devices = plan.devices
    gpus = local_gpus(devices)
    apart = "rollout" in gpus
    met = meeting()
    if not met:
        return Processes(LocalProcesses(gpus), own_gpus=apart, tokenizer=tokenizer)
    places = devices.engine_places(plan.gpus) if devices.machines > 1 else ()
    starter = LaunchedProcesses(met, gpus, places)
    return Launched(starter, own_gpus=apart, run_dir=directory, tokenizer=tokenizer)


def on_this_machine(plan: AnyPlan, tokenizer: Any = None) -> Placement:
    """The placement of a run with at most one trainer rank, that no cluster shares out."""
    if not (plan.kind.samples and plan.devices.engine_process):
        return Here(tokenizer)
    gpus = local_gpus(plan.devices)
    return Processes(LocalProcesses(gpus), own_gpus="rollout" in gpus, tokenizer=tokenizer)


def _ray(plan: AnyPlan, tokenizer: object, directory: Path) -> Placement:
    from tunesmith.run.processes.ray_cluster import RayCluster

    devices = plan.devices
    wanted = bundles(devices)
    print(f"Ray: {', '.join(f'{n} {role}' for role, n in processes(devices).items())}", flush=True)
    with long_wait("starting or joining the Ray cluster"):
        cluster = RayCluster.open(plan.said.system, wanted)
        return Ray(cluster, tokenizer=tokenizer, run_dir=directory)
