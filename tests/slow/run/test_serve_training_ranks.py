"""``tunesmith serve-training`` on several ranks: the real ``tinker`` package trains as on one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.tinker_clients import (
    KEY,
    SETTINGS,
    command,
    datum,
    frozen_bytes,
    logprobs,
    sample,
    serving,
    supervised,
    tinker,
    trainer,
    weights,
)
from tunesmith.errors import TrainerLostError
from tunesmith.run.assembly.serve_training import ServingOptions, open_base, serve_base
from tunesmith.run.placement.adapters_on_base import FrozenBase
from tunesmith.run.trainers.ranked import Ranks

ROWS = [[5, 6, 7, 8, 9], [5, 6, 20, 21, 22, 23], [30, 31], [40, 41, 42]]
ADAM = {"learning_rate": 0.01, "weight_decay": 0.1, "grad_clip_norm": 40.0}


@pytest.fixture(scope="module")
def one(adaptable: Path, saved: Path) -> Iterator[Any]:
    """A client of a server on one rank."""
    with open_base(str(adaptable), SETTINGS) as base, serving(base, saved) as address:
        yield tinker.ServiceClient(base_url=address, api_key=KEY)


@pytest.fixture(scope="module", params=[0, 3])
def base(adaptable: Path, request: pytest.FixtureRequest) -> Iterator[FrozenBase]:
    """Two ranks, with copies of the model or half of it each."""
    how = ["system.trainer_ranks=2", f"system.zero_stage={request.param}"]
    with open_base(str(adaptable), [*SETTINGS, *how]) as base:
        yield base


@pytest.fixture(scope="module")
def two(base: FrozenBase, saved: Path) -> Iterator[Any]:
    """A client of a server on two ranks."""
    with serving(base, saved) as address:
        yield tinker.ServiceClient(base_url=address, api_key=KEY)


def policy(tokens: list[int]) -> Any:
    count = len(tokens) - 1
    return datum(
        tokens,
        logprobs=np.full(count, -3.0, np.float32),
        advantages=np.linspace(-1, 1, count, dtype=np.float32),
    )


def train(client: Any, steps: int) -> tuple[list[float], list[np.ndarray]]:
    """Two requests' gradients a step, of four datums and of one, by which a rank has none."""
    numbers: list[float] = []
    found: list[np.ndarray] = []
    for _ in range(steps):
        many = client.forward_backward([supervised(row) for row in ROWS], "cross_entropy")
        single = client.forward_backward([policy(ROWS[0])], "ppo")
        step = client.optim_step(tinker.AdamParams(**ADAM)).result()
        numbers += [each.result().metrics["loss:sum"] for each in (many, single)]
        numbers.append(step.metrics["grad_norm"])
        found += [*logprobs(many.result()), *logprobs(single.result())]
    return numbers, found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], weight, atol=2e-6) for name, weight in two.items())


def test_clients_train_as_on_one_rank(one: Any, two: Any, saved: Path) -> None:
    """Several adapters too, and what one server saves the other continues."""
    ours, theirs = (trainer(service) for service in (one, two))
    numbers, found = train(ours, 2)
    small = trainer(two, rank=2, seed=5)
    others, also = train(theirs, 1)
    train(small, 1)
    (more, further) = train(theirs, 1)
    assert others + more == pytest.approx(numbers, rel=1e-5)
    for mine, other in zip(found, also + further, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    assert_same(weights(ours, saved, "a"), weights(theirs, saved, "a"))
    path = theirs.save_state("two").result().path
    on_one, on_two = (
        service.create_training_client_from_state_with_optimizer(path).result()
        for service in (one, two)
    )
    for client in (ours, theirs, on_one, on_two):
        train(client, 1)
    expected = weights(ours, saved, "b")
    for client in (theirs, on_one, on_two):
        assert_same(expected, weights(client, saved, "b"))
    theirs.load_state_with_optimizer(path).result()
    train(theirs, 1)
    assert_same(expected, weights(theirs, saved, "c"))
    drawn = [
        sample(client.save_weights_and_get_sampling_client().result(), how={"seed": 7})
        for client in (ours, theirs)
    ]
    assert drawn[0].sequences[0].tokens == drawn[1].sequences[0].tokens
    assert drawn[0].sequences[0].logprobs == pytest.approx(drawn[1].sequences[0].logprobs, abs=1e-4)


def test_adapters_share_the_ranks_weights(base: FrozenBase, adaptable: Path, two: Any) -> None:
    clients = [trainer(two) for _ in range(3)]
    train(clients[0], 1)
    whole = sum(weight.nbytes for weight in load_file(adaptable / "model.safetensors").values())
    assert isinstance(base.ranks, Ranks)
    for far in base.ranks.replicas:
        held = far.call("run", frozen_bytes)
        sharded = far.get("spec.model.zero_stage") == 3
        assert held == pytest.approx(whole / 2 if sharded else whole, rel=0.1)


def test_a_failed_request_holds_no_rank_up(two: Any, saved: Path) -> None:
    client, untouched = trainer(two), trainer(two)
    narrow = trainer(two, rank=2).save_state("narrow").result().path
    nan = datum(ROWS[0], weights=np.full(4, np.nan, np.float32))
    (saved / client.model_id).write_text("no directory")
    for wrong, match in (
        (lambda: client.forward_backward([supervised([5, 999])], "cross_entropy"), "target"),
        (lambda: client.forward_backward([supervised([5] * 5000)], "cross_entropy"), "tokens"),
        (lambda: client.forward_backward([nan, supervised(ROWS[1])], "cross_entropy"), "nan"),
        (lambda: client.load_state(narrow), "rank"),
        (lambda: client.save_state("state"), "cannot write"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=match):
            wrong().result()
    (saved / client.model_id).unlink()
    assert train(client, 1)[0] == train(untouched, 1)[0]
    assert_same(weights(client, saved, "end"), weights(untouched, saved, "end"))


def test_ranks_of_a_launcher(adaptable: Path, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    launcher = (*torchrun, "-m", "tunesmith")
    with command(adaptable, tmp_path, launcher=launcher) as (address, process):
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        client = service.create_lora_training_client(base_model="org/tiny", rank=4).result()
        assert client.forward([supervised(ROWS[0])], "cross_entropy").result().metrics
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_server_ends_with_its_ranks(adaptable: Path, tmp_path: Path) -> None:
    """What they held is not served as if it were there."""
    options = ServingOptions("127.0.0.1", 0, None, tmp_path, None)
    with open_base(str(adaptable), [*SETTINGS, "system.trainer_ranks=2"]) as base:
        pid = base.ranks.replicas[1].pid()
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        asyncio.run(serve_base(base, options, KEY))
        with pytest.raises(TrainerLostError, match="rank 1 of the trainer"):
            base.ranks.check()
