"""A machine with engines leaves a Ray cluster in the middle of a run, and comes back."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from tests.support.held_runs import Run, actors_below

pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.xdist_group("ray")
STORE = 100 << 20


def test_a_lost_machine_of_engines_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three engines go with it; the run takes its steps with the third one, and with all
    three when the machine is back."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # beside other tests
    head: dict[str, Any] = {"num_cpus": 4, "object_store_memory": STORE}
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
            system__placement__actor__cpus=3,  # only the first machine has so many
            system__weight_plane="gloo",
        )
        said: list[str] = []
        output: Any = run.process.stdout
        Thread(target=lambda: said.extend(map(bytes.decode, output)), daemon=True).start()
        with run.held(2):
            # The killed machine's are nobody's children until they end.
            there = actors_below(psutil.Process(), "Engine")
            cluster.remove_node(other, allow_graceful=False)
            run.wait_for(lambda: sum(engine.is_running() for engine in there) == 1)
        with run.held(5):
            cluster.add_node(num_cpus=2, object_store_memory=STORE)
            run.wait_for(lambda: any("3 of 3 engines" in line for line in said))
        assert run.process.wait(600) == 0, said
    finally:
        cluster.shutdown()
    assert [line["step"] for line in run.metrics()] == list(range(1, 8))
    assert all(line["rollouts"] == 16 for line in run.metrics())
    engines_at_end = {line["step"]: line["engines"] for line in run.metrics()}
    assert engines_at_end[5] == 1 and engines_at_end[7] == 3
