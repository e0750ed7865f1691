"""The placement of a run: which of them its settings ask for."""

from __future__ import annotations

from typing import Any

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.plan.cluster import bundles, processes
from tunesmith.plan.plan import devices_of
from tunesmith.records.waits import long_wait
from tunesmith.run.placement.engines import local_gpus
from tunesmith.run.placement.here import Here
from tunesmith.run.placement.launched import Launched
from tunesmith.run.placement.opening import OpenRun
from tunesmith.run.placement.port import Placement
from tunesmith.run.placement.processes import Processes
from tunesmith.run.placement.ray import Ray
from tunesmith.run.processes.local import LocalProcesses
from tunesmith.run.processes.torchrun import LaunchedProcesses, meeting


def open_placement(run: OpenRun[Any, Any]) -> Placement:
    """The placement of a resolved run.

    Raises:
        ClusterError: the cluster cannot be reached or is too small.
        ConfigError: this machine has too few GPUs.
    """
    config = run.config
    if config.system.cluster == "ray":
        return _ray(config)
    met = meeting()
    if met and config.system.trainer_ranks > 1:
        gpus = local_gpus(config)
        starter = LaunchedProcesses(met, gpus)
        return Launched(starter, own_gpus="rollout" in gpus, run_dir=run.directory.path)
    return on_this_machine(config, run.tokenizer, config.system.trainer_ranks)


def on_this_machine(config: RunConfig, tokenizer: Any = None, ranks: int = 1) -> Placement:
    """The placement of a run that neither a launcher nor a cluster shares out.

    Args:
        ranks: of a trainer.
    """
    if ranks == 1 and not (config.samples and config.system.engine_process):
        return Here(tokenizer)
    gpus = local_gpus(config)
    return Processes(LocalProcesses(gpus), own_gpus="rollout" in gpus, tokenizer=tokenizer)


def _ray(config: RunConfig) -> Placement:
    from tunesmith.run.processes.ray_cluster import RayCluster

    assert isinstance(config, RLConfig)
    devices = devices_of(config)
    wanted = bundles(devices)
    print(f"Ray: {', '.join(f'{n} {role}' for role, n in processes(devices).items())}", flush=True)
    with long_wait("starting or joining the Ray cluster"):
        return Ray(RayCluster.open(config.system, wanted))
