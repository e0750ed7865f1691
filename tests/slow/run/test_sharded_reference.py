"""A reference in processes of its own, of which each has a share of the weights."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.sharded_ranks import HERE, short_of_memory
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import DeviceMemoryError, TrainerLostError
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.learn.usercode.child import ChildProcess
from tunesmith.learn.usercode.far import gather
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.sharding import local
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.run.placement.host import PartHost
from tunesmith.run.specs.from_plan import predict_spec, reference_spec
from tunesmith.run.trainers.passes import Passes
from tunesmith.types import Sample

PROCESSES = 2


class Telling(PartHost):
    """Tells what it holds, and may be short of memory."""

    def held(self) -> int:
        return sum(local(p).numel() for p in self.passes.model.module.parameters())

    def exhausted(self, packing: Packing) -> str:
        """What is said where the second process fails in passes over more than 6 tokens."""
        with short_of_memory(self.passes.model.module, 6 if self.rank else None, backward=False):
            try:
                self.passes.score(packing, "logprobs")
            except DeviceMemoryError as error:
                return str(error)
        return ""


def of_three(lengths: tuple[int, ...] = (5, 9, 7)) -> Batch:
    made = [
        Sample([10 + (7 * t + n) % 40 for t in range(n)], [t > 2 for t in range(n)])
        for n in lengths
    ]
    return Batch.of(made)


def test_processes_share_weights_and_score_as_one(tmp_path: Path) -> None:
    """Three micro-batches for two processes; new weights; a checkpoint; a process without memory; a
    killed one."""
    path = save_model(tmp_path / "model")
    other = save_model(tmp_path / "other", seed=1)
    said = rl_settings(
        tmp_path,
        path,
        system__cluster="ray",
        system__trainer_ranks=2,
        system__zero_stage=3,
        algorithm__kl__coef=0.1,
        system__placement__ref__processes=PROCESSES,
        system__device="cpu",
    )
    facts = Facts(read_hardware(), known_model_facts(str(path)), train_size=12, longest=8)
    config = resolve(load_config(RLConfig, None, said), facts)
    packing = Packing.of(of_three(), 9)
    assert len(packing) == 3
    old, new = (
        Passes(CausalLM.load(p, dtype=torch.float32), predict_spec(config).build())
        for p in (path, other)
    )
    with ExitStack() as stack:
        children = [
            ChildProcess("the reference's process", TrainerLostError) for _ in range(PROCESSES)
        ]
        for far in children:
            stack.callback(far.close)
        # HERE is known without asking Ray, which does not run here.
        made = partial(Telling, reference_spec(config), HERE.__str__)
        gather(far.make(made) for far in children)
        place = children[0].call("open_store")
        gather(far.submit("build", rank, PROCESSES, place) for rank, far in enumerate(children))
        parameters = sum(p.numel() for p in old.model.module.parameters())
        assert [far.call("held") for far in children] == [parameters // 2] * 2

        def check(expected: Passes[CausalLM]) -> None:
            parts = gather(
                far.submit(
                    "passes.score", packing.for_rank(rank, PROCESSES, columns=False), "logprobs"
                )
                for rank, far in enumerate(children)
            )
            np.testing.assert_allclose(
                np.sum(parts, axis=0), expected.score(packing, "logprobs"), atol=1e-5
            )

        check(old)
        weights = new.model.module.state_dict()
        gather(far.submit("take", weights) for far in children)
        check(new)
        gather(far.submit("save", tmp_path / "saved") for far in children)
        again = CausalLM.load(tmp_path / "saved", dtype=torch.float32).module.state_dict()
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        gather(far.submit("load", path) for far in children)
        check(old)
        failed = gather(
            far.submit("exhausted", packing.for_rank(rank, PROCESSES, columns=False))
            for rank, far in enumerate(children)
        )
        assert "another rank" in failed[0] and "scoring a micro-batch" in failed[1]
        check(old)
        os.kill(children[1].pid(), signal.SIGKILL)
        with pytest.raises(TrainerLostError):
            check(old)
