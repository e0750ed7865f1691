"""Two ranks whose layers Inductor compiles and FSDP shards give the gradients of plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import training
from tests.support.long import again
from tests.support.sharded_ranks import Ranks
from tests.support.tiny import save_model
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.inductor import CACHE
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend

pytestmark = pytest.mark.xdist_group("compiled layers")
Start = Callable[..., Ranks]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inductor's, which the ranks of all tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    return save_model(folder, "qwen3", head_dim=8, num_hidden_layers=3)


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    started: list[Ranks] = []

    def start(stage: int, **options: Any) -> Ranks:
        started.append(Ranks(model, 2, stage, compiled=False, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def packing() -> Packing:
    return Packing.of(training.weighed(training.samples_of(groups=6)), 60)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        again(1, {}),
        again(2, {"gradient_checkpointing": 0.5}),
        again(3, {"gradient_checkpointing": True, "sequence": 2}),
        again(3, {"adapter": 4, "gradient_checkpointing": True}),
        (3, {"streams": True, "offload": True, "offload_activations": True}),
    ],
    ids=str,
)
def test_gradients_scores_and_steps_are_those_of_plain_layers(
    start: Start, stage: int, options: dict[str, Any]
) -> None:
    batch = packing()
    compiled, plain = (start(stage, mode=mode, **options) for mode in ("default", None))
    [(ours, found), *_], [(theirs, expected), *_] = (
        r("gradient", batch) for r in (compiled, plain)
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert found.keys() == expected.keys() and training.difference(found, expected) < 1e-5
    [(norms, _), *_], [(norms_there, _), *_] = (r("train", batch) for r in (compiled, plain))
    assert norms == pytest.approx(norms_there, rel=1e-4)
    scores, scores_there = (r("score", batch)[0] for r in (compiled, plain))
    assert scores == pytest.approx(scores_there, rel=1e-3, abs=1e-4)


def test_they_are_those_of_one_process_and_a_checkpoint_continues(
    start: Start, model: Path, tmp_path: Path
) -> None:
    batch = packing()
    settings = AdamWSettings(max_grad_norm=1.0, weight_decay=0.1)
    one = TorchBackend(CausalLM.load(model), settings, CausalLM.predict)
    one.forward_backward(batch, SFTObjective())
    expected = {n: m.grad for n, m in one.optimizer.masters.items() if m.grad is not None}
    ranks = start(3, mode="default")
    [(_, found), *_] = ranks("gradient", batch)
    assert training.difference(found, expected) < 1e-5
    ranks("train", batch, 2)
    ranks("backend.save", tmp_path)
    [(_, weights), *_] = ranks("train", batch, 1)
    ranks("backend.load", tmp_path)
    [(_, again), *_] = ranks("train", batch, 1)
    assert all(again[name].equal(weight) for name, weight in weights.items())


def test_activations_in_host_memory_are_no_weights(start: Start) -> None:
    batch = packing()
    compiled, plain = (
        start(3, mode=mode, offload_activations=True)("sent", batch)[0]
        for mode in ("default", None)
    )
    assert compiled <= 1.05 * plain
