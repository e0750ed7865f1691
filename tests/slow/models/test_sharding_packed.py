"""Ranks unpack the rows of experts in MXFP4 that they keep."""

from __future__ import annotations

from pathlib import Path

from tests.support import training
from tests.support.packed import save_packed
from tests.support.sharded_ranks import Ranks
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend


def test_weights_and_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    path = save_packed(tmp_path, shards=True)
    one = TorchBackend(CausalLM.load(path), AdamWSettings(max_grad_norm=1.0), CausalLM.predict)
    batch = Packing.of(training.weighed(training.samples_of(groups=4)), 40)
    ranks = Ranks(path, 2, 3)
    try:
        read = ranks("weights")[0]
        theirs = ranks("gradient", batch)[0][1]
    finally:
        ranks.close()
    for name, weight in one.model.module.state_dict().items():
        assert read[name].float().equal(weight), name
    one.forward_backward(batch, SFTObjective())
    masters = one.optimizer.masters.items()
    ours = {name: master.grad for name, master in masters if master.grad is not None}
    assert training.difference(theirs, ours) < 1e-5
