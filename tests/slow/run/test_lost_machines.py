"""A machine with engines leaves a Ray cluster in the middle of a run, and comes back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.slow.run.test_ray_runs import Run

pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.xdist_group("ray")
STORE = 100 << 20


def engines() -> int:
    """Processes of engines on the cluster's machines, which this process has started."""
    count = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            count += "".join(child.cmdline()).startswith("ray::Engine")
    return count


def test_a_lost_machine_of_engines_does_not_end_the_run(tmp_path: Path) -> None:
    """Two of three engines go with it; the run takes its steps with the third one, and with all
    three when the machine is back."""
    head: dict[str, Any] = {"num_cpus": 2, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        other = cluster.add_node(num_cpus=2, object_store_memory=STORE)
        run = Run(
            tmp_path,
            "run",
            holds=(2, 5),
            train__steps=7,
            system__cluster="ray",
            system__ray_address=cluster.address,
            system__engines=3,
            system__weight_plane="gloo",
        )
        with run.held(2):
            cluster.remove_node(other, allow_graceful=False)
            run.wait_for(lambda: engines() == 1)
        with run.held(5):
            cluster.add_node(num_cpus=2, object_store_memory=STORE)
            run.wait_for(lambda: engines() == 3)
        printed = run.finish()
    finally:
        cluster.shutdown()
    assert [line["step"] for line in run.metrics()] == list(range(1, 8))
    assert all(line["rollouts"] == 16 for line in run.metrics())
    assert "1 of 3 engines" in printed and "3 of 3 engines" in printed
