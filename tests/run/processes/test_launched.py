"""The processes of a launch over several machines, whose GPUs are not all of this machine."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from tunesmith.errors import EngineError, EngineLostError, TrainerLostError
from tunesmith.learn.usercode.far import Far
from tunesmith.run.processes import machines
from tunesmith.run.processes.local import RANKED
from tunesmith.run.processes.machines import address_towards
from tunesmith.run.processes.torchrun import LaunchedProcesses, Meeting


class Gathered:
    """A meeting to which every other rank has come; they are child processes here."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []

    def take(self, role: Any, rank: int, lost: Any) -> Far:
        self.taken.append((role, rank))
        from tunesmith.learn.usercode.child import ChildProcess

        return ChildProcess(f"rank {rank}", lost)


def settings() -> dict[str, str]:
    return dict(os.environ)


def test_ranks_on_other_machines_need_no_gpu_of_this_one() -> None:
    met = Gathered()
    gpus: Any = {role: [("4",), ("5",)] for role in RANKED} | {"rollout": [("6",)]}
    with LaunchedProcesses(cast(Meeting, met), gpus) as processes:
        ranks = [processes.spawn("actor", TrainerLostError) for _ in range(4)]
        assert met.taken == [("actor", rank) for rank in (1, 2, 3)]
        ranks[0].make(settings).result()
        assert ranks[0].call("get", "CUDA_VISIBLE_DEVICES") == "4"
        assert ranks[0].name.startswith("rank 0 of the trainer")

        processes.spawn("rollout", EngineLostError)
        with pytest.raises(EngineError, match=r"1 .*engine"):
            processes.spawn("rollout", EngineLostError)


@pytest.mark.parametrize(
    ("host", "routes", "expected"),
    [
        ("node-0", {"node-0": "127.0.1.1", machines.ANYWHERE: "10.0.0.7"}, "10.0.0.7"),
        ("node-0", {"node-0": "127.0.1.1"}, "127.0.1.1"),
        ("node-1", {"node-1": "10.0.0.8"}, "10.0.0.8"),
        ("127.0.0.1", {"127.0.0.1": "127.0.0.1", machines.ANYWHERE: "10.0.0.7"}, "127.0.0.1"),
        ("localhost", {"localhost": "127.0.0.1", machines.ANYWHERE: "10.0.0.7"}, "127.0.0.1"),
    ],
)
def test_other_machines_are_not_given_a_loopback_address(
    host: str, routes: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def route(host: str, port: int) -> str:
        assert port == 29500
        if host not in routes:
            raise OSError("Network is unreachable")
        return routes[host]

    monkeypatch.setattr(machines, "_route", route)
    assert address_towards(host, 29500) == expected
