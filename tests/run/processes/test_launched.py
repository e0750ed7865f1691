"""The processes of a launch over several machines, whose GPUs are not all of this machine."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, cast

import pytest

from tunesmith.errors import (
    ConfigError,
    EngineError,
    EngineLostError,
    ModelError,
    NoPlaceError,
    TrainerLostError,
)
from tunesmith.learn.usercode.far import Far
from tunesmith.plan.devices import EnginePlace
from tunesmith.plan.facts.machines import machine
from tunesmith.run.processes import launched_ranks, machines, meeting
from tunesmith.run.processes.launch import ALIKE, ChildStart, Launch, machine_view
from tunesmith.run.processes.launched_ranks import serve_rank
from tunesmith.run.processes.local import RANKED
from tunesmith.run.processes.machines import Rendezvous, address_towards, own_view
from tunesmith.run.processes.meeting import Meeting, ServedRank
from tunesmith.run.processes.torchrun import LaunchedProcesses


class Gathered:
    """A meeting to which every other rank has come; they are child processes here."""

    launch = Launch(rank=0, world=4, local_world=2)

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []
        self.starts: list[ChildStart] = []
        self.returned = False
        """Whether the processes of a lost machine have come again."""

    def take(self, role: Any, rank: int, lost: Any, start: ChildStart = ALIKE) -> Far:
        self.taken.append((role, rank))
        self.starts.append(start)
        from tunesmith.learn.usercode.child import ChildProcess

        return ChildProcess(f"rank {rank}", lost)

    def take_again(self, ranks: Sequence[int]) -> list[Far]:
        returned = self.returned
        self.returned = False
        return [self.take("actor", rank, TrainerLostError) for rank in ranks if returned]


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


def test_the_first_rank_of_each_machine_starts_its_engines(tmp_path: Path) -> None:
    met = Gathered()
    places = [
        EnginePlace(0, (2,)),
        EnginePlace(1, (2,)),
        EnginePlace(0, (3,)),
        EnginePlace(1, (3,)),
    ]
    gpus: Any = {"rollout": [("6",), ("6",), ("7",), ("7",)]}
    with LaunchedProcesses(cast(Meeting, met), gpus, places) as processes:
        assert met.taken == [("actor", rank) for rank in (1, 2, 3)]
        rank = processes.spawn("actor", TrainerLostError)
        assert rank not in processes.others
        assert processes.spawn("actor", TrainerLostError) is processes.others[0]
        python = tmp_path / "python"
        python.symlink_to(sys.executable)
        engines = [processes.spawn("rollout", EngineLostError) for _ in range(3)]
        engines.append(processes.spawn("rollout", EngineLostError, python))
        assert met.taken[3:] == [("rollout", 2), ("rollout", 2)]
        assert met.starts[3:] == [ChildStart((2,)), ChildStart((3,), python)]
        with pytest.raises(EngineError, match=r"4 .*engine"):
            processes.spawn("rollout", EngineLostError)

        engines[1].close()
        processes.spawn("rollout", EngineLostError)
        assert len(met.taken) == 6, "an engine is replaced on its machine"
        engines[2].close()
        engines[3].close()
        processes.others[1].close()  # the machine is lost
        processes.spawn("rollout", EngineLostError)
        assert len(met.taken) == 6
        with pytest.raises(NoPlaceError, match=r"4 engines .*, 2 of them"):
            processes.spawn("rollout", EngineLostError)

        def refuse(fars: Sequence[Far]) -> None:
            assert [far.name.split(" (")[0] for far in fars] == ["rank 2", "rank 3"]
            raise ModelError("another model")

        met.returned = True
        processes.check_returned = refuse
        with pytest.raises(NoPlaceError, match="another model"):
            processes.spawn("rollout", EngineLostError)
        met.returned = True
        processes.check_returned = lambda _: None
        processes.spawn("rollout", EngineLostError)
        assert met.taken[-1] == ("rollout", 2), "the machine is back"
        assert [far.lost for far in processes.others] == [False] * 3
    assert all(far.lost for far in processes.others)


def test_the_processes_of_a_machine_that_is_back_are_taken_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Launch, "directory", tmp_path / "meeting")
    met = Meeting(Launch(rank=0, world=3, local_world=3))

    def come(rank: int, role: Any, **differing: str) -> Connection:
        connection = Client(str(tmp_path / "meeting" / "ranks"), "AF_UNIX")
        view = own_view() if role in RANKED else machine_view(met.launch)
        connection.send((rank, role, os.getpid(), "there", view | differing))
        return connection

    def take_again() -> list[ServedRank]:
        deadline = time.monotonic() + 60
        while not (fars := met.take_again([1, 2])) and time.monotonic() < deadline:
            time.sleep(0.001)
        return fars

    stale = come(1, "rollout")
    first = [come(rank, "actor") for rank in (1, 2)]
    fars = [met.take("actor", rank, TrainerLostError) for rank in (1, 2)]
    for connection in (stale, *first):
        connection.close()
    for far in fars:
        far.ended.result(60)
    with pytest.raises(TrainerLostError, match="only once"):
        met.take("actor", 1, TrainerLostError)

    again = come(1, "actor")
    assert met.take_again([1, 2]) == []
    other = come(2, "actor", arguments="another command")
    with pytest.raises(NoPlaceError, match="another command"):
        take_again()
    smaller = come(2, "rollout", GPUs="8 of 48 GiB")
    with pytest.raises(ConfigError, match=r"'8 of 48 GiB'.*system\.cluster"):
        met.take("rollout", 2, EngineLostError)
    smaller.close()
    for connection in (again, other):
        with pytest.raises(EOFError):
            connection.recv()

    again = [come(rank, "actor") for rank in (1, 2)]
    offered = come(1, "rollout")
    assert len(take_again()) == 2
    engine = met.take("rollout", 1, EngineLostError)
    assert offered.recv() == ALIKE, "not the engine of the machine that was lost"
    for connection in (*again, offered):
        connection.close()
    engine.ended.result(60)


def test_a_machine_that_disappears_while_it_comes_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Launch, "directory", tmp_path / "meeting")
    gone = [True]

    def watched(connection: Connection) -> Connection:
        if gone and gone.pop():
            raise TimeoutError("the other side does not answer probes")
        return connection

    monkeypatch.setattr(meeting, "watched", watched)
    met = Meeting(Launch(rank=0, world=2, local_world=2))
    address = str(tmp_path / "meeting" / "ranks")
    with Client(address, "AF_UNIX"), Client(address, "AF_UNIX") as connection:
        connection.send((1, "actor", os.getpid(), "there", own_view()))
        far = met.take("actor", 1, TrainerLostError)
    far.ended.result(60)


@pytest.mark.parametrize("several", [False, True])
def test_a_connection_that_says_nothing_keeps_nobody_out_and_ends(
    several: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On one machine, and with a key over a network."""
    monkeypatch.setattr(Launch, "directory", tmp_path / "meeting")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    met = Meeting(Launch(rank=0, world=2, local_world=1 if several else 2))
    address = met._listener.address
    kind = socket.AF_INET if several else socket.AF_UNIX
    come = Rendezvous(1, 60).reach if several else partial(Client, address, "AF_UNIX")
    with socket.socket(kind) as silent:
        silent.connect(address)
        connection = come()
        connection.send((1, "actor", os.getpid(), "there", own_view()))
        far = met.take("actor", 1, TrainerLostError)
        monkeypatch.setattr(meeting, "MEETING", 0.05)
        with socket.socket(kind) as other:
            other.settimeout(60)
            other.connect(address)
            while other.recv(1 << 10):  # the challenge
                pass
    connection.close()
    far.ended.result(60)


def test_a_machine_offers_all_its_gpus_to_engines_though_its_first_rank_sees_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Served(Exception):
        """The process serves."""

    def serve(*_: Any, **__: Any) -> None:
        raise Served

    def visible() -> list[str]:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    offered: list[tuple[Any, ...]] = []

    def offer(*arguments: Any) -> None:
        offered.append(arguments[1:])

    def stand_in(*_: Any) -> str:
        return "nobody is there"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    stand_ins: dict[str, Any] = {
        "ignore_signals": stand_in,
        "Rendezvous": stand_in,
        "_connect": stand_in,
        "_on_thread": offer,
        "serve": serve,
    }
    for name, other in stand_ins.items():
        monkeypatch.setattr(launched_ranks, name, other)
    gpu = machine("H100-80GB").gpus[0]
    monkeypatch.setattr(
        "tunesmith.run.processes.launch.read_gpus", lambda: [gpu for _ in visible()]
    )
    with pytest.raises(Served):
        serve_rank(Launch(rank=3, world=6, local_world=3, local_rank=0))
    assert visible() == ["4"]
    _, _, view, names = offered[0]
    assert (view["GPUs"], view["processes on each machine"]) == ("3 of 80 GiB", "3")
    assert names == "4,5,6"


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
