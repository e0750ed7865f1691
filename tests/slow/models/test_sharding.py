"""Ranks that shard a model compute what one process computes, and keep only their part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.support import training
from tests.support.families import SPECIAL, save_multimodal
from tests.support.odd_models import ONE, UP, change
from tests.support.sharded_ranks import Ranks, limited_activations, sent_by
from tests.support.tiny import save_model
from tunesmith.config.optimizer import Muon
from tunesmith.errors import DeviceMemoryError, ModelError
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

Start = Callable[..., Ranks]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", "qwen3", tie_word_embeddings=True)


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    started: list[Ranks] = []

    def start(world: int, stage: int, path: Path = model, **options: Any) -> Ranks:
        started.append(Ranks(path, world, stage, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


@pytest.mark.parametrize("row", [0, 63])
def test_a_value_that_is_not_finite_in_one_rank_s_rows_is_refused(
    tmp_path: Path, start: Start, row: int
) -> None:
    path = save_model(tmp_path / "model")
    change(path, lambda weights: weights[UP][row].fill_(float("nan")))
    with pytest.raises(ModelError, match=rf"{ONE}.*{UP}"):
        start(2, 3, path)


def packing(max_tokens: int = 40, groups: int = 4) -> Packing:
    """Shared prompts, samples of uneven length."""
    return Packing.of(training.weighed(training.samples_of(groups=groups)), max_tokens)


def alone(
    path: Path, dtype: torch.dtype = torch.float32, muon: Muon | None = None, **options: Any
) -> TorchBackend[CausalLM]:
    """One process."""
    settings = AdamWSettings(max_grad_norm=1.0, weight_decay=0.1, muon=muon)
    model = CausalLM.load(path, dtype=dtype)
    return TorchBackend(model, settings, CausalLM.predict, **options)


def gradients(backend: TorchBackend[CausalLM], batch: Packing) -> training.Grads:
    backend.forward_backward(batch, SFTObjective())
    return {name: m.grad for name, m in backend.optimizer.masters.items() if m.grad is not None}


@pytest.mark.parametrize(
    ("world", "size", "sequence", "stage", "groups"),
    [
        *((2, 2, 1, 1, 4), (2, 2, 1, 2, 4), (2, 2, 1, 3, 4), (3, 3, 1, 3, 1)),
        *((4, 2, 1, 1, 4), (4, 2, 1, 2, 4), (4, 2, 1, 3, 1), (4, 4, 2, 3, 5), (4, 2, 2, 2, 5)),
    ],
    ids=[
        *(
            "1",
            "2",
            "3",
            "a rank idles",
            "1, two copies",
            "2, two copies",
            "3, two copies, a rank idles",
        ),
        *("3, two groups share sequences", "2, two copies, two groups share sequences"),
    ],
)
def test_gradients_and_weights_are_those_of_one_process(
    start: Start, model: Path, world: int, size: int, sequence: int, stage: int, groups: int
) -> None:
    batch = packing(groups=groups)
    one = alone(model)
    ranks = start(world, stage, size=size, sequence=sequence)
    [(_, theirs), *_] = found = ranks("gradient", batch)
    ours = gradients(one, batch)
    assert training.difference(theirs, ours) < 1e-5
    assert sum(metrics["loss"] for metrics, _ in found[::sequence]) == pytest.approx(
        one.forward_backward(batch, SFTObjective())["loss"], rel=1e-5
    )
    (norms, weights), *_ = ranks("train", batch)
    expected: list[float] = []
    for _ in range(3):
        one.forward_backward(batch, SFTObjective())
        expected.append(one.step(1e-2)["grad_norm"])
    assert norms == pytest.approx(expected, rel=1e-4)
    same_weights(weights, one)


def same_weights(found: training.Grads, one: TorchBackend[CausalLM]) -> None:
    """AdamW may move a weight whose gradient is near 0 by more than its rounding."""
    for name, weight in one.model.module.state_dict().items():
        assert float((found[name].float() - weight).abs().mean()) < 2e-6, name


def test_four_ranks_train_a_sequence_that_is_too_long_for_one(start: Start, tmp_path: Path) -> None:
    """32,768 tokens, where each process may keep a third of the activations. One head, around which
    keys travel."""
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    path = save_model(
        tmp_path / "long", num_hidden_layers=1, max_position_embeddings=32768, **one_head
    )
    tokens = np.random.default_rng(0).integers(5, 260, 32768).tolist()
    sample = Sample(tokens, [False] * 32000 + [True] * 768)
    batch = Packing.of(training.weighed([sample]), 32768)
    one = alone(path)
    with limited_activations(one.model.module, 10**12) as kept:
        expected = gradients(one, batch)
    with (
        limited_activations(one.model.module, kept[0] // 3),
        pytest.raises(DeviceMemoryError, match="32768 tokens"),
    ):
        one.forward_backward(batch, SFTObjective())
    [found, *_] = start(4, 3, path, sequence=4, sequence_kind="ring")(
        "gradient_within", batch, kept[0] // 3
    )
    assert training.difference(found, expected) < 1e-5


@pytest.mark.parametrize("world", [2, 4])
def test_in_float64_they_agree_to_ten_digits(start: Start, model: Path, world: int) -> None:
    batch = packing()
    [(_, theirs), *_] = start(world, 3, size=2, dtype=torch.float64)("gradient", batch)
    assert training.difference(theirs, gradients(alone(model, torch.float64), batch)) < 1e-10


def test_bfloat16_trains_float32_weights(start: Start, model: Path) -> None:
    batch = packing()
    [(_, theirs), *_] = start(2, 3, dtype=torch.bfloat16)("gradient", batch)
    assert all(grad.dtype == torch.float32 for grad in theirs.values())
    assert training.difference(theirs, gradients(alone(model, torch.bfloat16), batch)) < 0.02


def test_weights_that_stay_in_float32_are_gathered_as_they_are(
    start: Start, tmp_path: Path
) -> None:
    """Those of routers: in 16 bits they would choose other experts than in one process."""
    path = save_model(tmp_path / "model", "ernie4_5_moe", **SPECIAL["ernie4_5_moe"])
    batch = packing()
    one = alone(path, torch.bfloat16)
    ranks = start(2, 3, path, dtype=torch.bfloat16)
    assert np.sum(ranks("score", batch), 0) == pytest.approx(one.score(batch), abs=1e-6)
    [(_, theirs), *_] = ranks("gradient", batch)
    assert any(name.endswith("gate.weight") for name in theirs)
    assert training.difference(theirs, gradients(one, batch)) < 0.02


def test_a_rank_keeps_its_part(start: Start, model: Path) -> None:
    ranks = start(4, 3)
    ranks("train", packing(), 1)
    parameters = sum(p.numel() for p in CausalLM.load(model).module.parameters())
    weights, state = zip(*ranks("numbers"), strict=True)
    assert sum(weights) == parameters and max(weights) <= 1.05 * parameters / 4
    assert sum(state) - 2 * parameters == 4 * len(
        list(CausalLM.load(model).module.parameters())
    )  # step counters
    assert max(state) <= 2.1 * parameters / 4


def test_scores_and_a_sharded_reference(start: Start, model: Path) -> None:
    batch = packing()
    one = alone(model, reference=CausalLM.load(model))
    ranks = start(2, 3, reference=True)
    assert np.sum(ranks("score", batch), 0) == pytest.approx(one.score(batch), abs=1e-5)
    ranks("train", batch)
    assert np.sum(ranks("score", batch, reference=True), 0) == pytest.approx(
        one.score(batch), abs=1e-5
    )
    ranks("backend.refresh_reference")
    ours, theirs = (np.sum(ranks("score", batch, reference=flag), 0) for flag in (False, True))
    assert theirs == pytest.approx(ours, abs=1e-6) and theirs != pytest.approx(
        one.score(batch), abs=1e-3
    )


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 goes on after a failed pass"
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("world", "sequence", "stage"), [(2, 1, 1), (2, 1, 3), (4, 1, 2), (2, 2, 3)]
)
def test_a_rank_that_runs_out_of_memory_stops_all_and_a_smaller_layout_gives_the_same_gradient(
    start: Start, model: Path, world: int, sequence: int, stage: int, backward: bool
) -> None:
    large = packing(200)
    small = packing(24)
    ranks = start(world, stage, size=2, sequence=sequence)
    uneven = packing(60)
    share = uneven.for_rank(1 // sequence, world // sequence)
    most = (
        max(forest.num_tokens for forest in share.forests) // sequence - 1
    )  # the largest of rank 1 fails
    found = ranks("after_failures", uneven, max(most, 25 // sequence), small, backward=backward)
    assert [failed for failed, _ in found] == world * [True]
    assert training.difference(found[0][1], gradients(alone(model), large)) < 1e-5


def test_a_torch_that_cannot_go_on_after_a_failed_pass_ends_the_run_on_all_ranks(
    start: Start,
) -> None:
    ranks = start(2, 3, size=2)
    uneven = packing(60)
    most = max(forest.num_tokens for forest in uneven.for_rank(1, 2).forests) - 1
    keys = ranks("refused_after_failure", uneven, max(most, 25))
    assert keys == [("system.max_tokens_per_microbatch",)] * 2


@pytest.mark.parametrize(
    ("world", "dtype"), [(4, torch.float32), (2, torch.bfloat16)], ids=["float32", "bfloat16"]
)
def test_a_checkpoint_continues_with_any_number_of_ranks(
    start: Start, model: Path, tmp_path: Path, world: int, dtype: torch.dtype
) -> None:
    batch = packing()
    ranks = start(world, 3, size=2, dtype=dtype, ema_decay=0.5)
    ranks("train", batch, 2)
    ranks("backend.save", tmp_path)
    assert len([*tmp_path.glob("optimizer*")]) == 2, "one copy of the optimizer state"
    (_, expected), *_ = ranks("train", batch, 1)
    ranks("backend.load", tmp_path)
    (_, again), *_ = ranks("train", batch, 1)
    assert all(again[name].equal(weight) for name, weight in expected.items())
    three = start(3, 2, dtype=dtype, ema_decay=0.5)
    three("backend.load", tmp_path)
    (_, found), *_ = three("train", batch, 1)
    one = alone(model, dtype, ema_decay=0.5)
    one.load(tmp_path)
    one.forward_backward(batch, SFTObjective())
    one.step(1e-2)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for name, weight in one.model.module.state_dict().items():
        torch.testing.assert_close(found[name].float(), expected[name].float(), **close)
        torch.testing.assert_close(found[name].to(dtype), weight, **close)
    for part in ("model", "ema"):  # Hugging Face loads both
        assert CausalLM.load(tmp_path / part, dtype=dtype).module.num_parameters() > 0


def test_ranks_continue_what_one_process_saved(start: Start, model: Path, tmp_path: Path) -> None:
    batch = packing()
    one = alone(model)
    one.forward_backward(batch, SFTObjective())
    one.step(1e-2)
    one.save(tmp_path)
    one.forward_backward(batch, SFTObjective())
    one.step(1e-2)
    ranks = start(2, 3)
    ranks("backend.load", tmp_path)
    (_, found), *_ = ranks("train", batch, 1)
    same_weights(found, one)


@pytest.mark.parametrize(("world", "size", "stage"), [(2, 2, 1), (3, 3, 3), (4, 2, 2)])
def test_muon_makes_the_same_steps_of_sharded_matrices(
    start: Start, model: Path, world: int, size: int, stage: int
) -> None:
    """Up to bfloat16's rounding of gradients that differ in their last digits. Three ranks have
    uneven rows."""
    batch = packing()
    one = alone(model, muon=Muon())
    before = {name: w.clone() for name, w in one.model.module.state_dict().items()}
    (norms, weights), *_ = start(world, stage, size=size, muon=Muon())("train", batch)
    expected: list[float] = []
    for _ in range(3):
        one.forward_backward(batch, SFTObjective())
        expected.append(one.step(1e-2)["grad_norm"])
    assert norms == pytest.approx(expected, rel=2e-3)
    for name, weight in one.model.module.state_dict().items():
        moved = float((weight - before[name]).norm())
        assert float((weights[name].float() - weight).norm()) < 0.02 * moved, name


def test_muons_momentum_is_sharded_and_continues_with_any_number_of_ranks(
    start: Start, model: Path, tmp_path: Path
) -> None:
    batch = packing()
    ranks = start(2, 3, muon=Muon())
    ranks("train", batch, 2)
    parameters = dict(CausalLM.load(model).module.named_parameters())
    hidden = sum(p.numel() for name, p in parameters.items() if ".layers." in name and p.ndim == 2)
    plain = [p.numel() for name, p in parameters.items() if ".layers." not in name or p.ndim < 2]
    _, state = zip(*ranks("numbers"), strict=True)
    assert sum(state) == hidden + 2 * sum(plain) + 2 * len(
        plain
    )  # with the step counter of each on both ranks
    ranks("backend.save", tmp_path)
    (_, expected), *_ = ranks("train", batch, 1)
    ranks("backend.load", tmp_path)
    (_, again), *_ = ranks("train", batch, 1)
    assert all(again[name].equal(weight) for name, weight in expected.items())
    three = start(3, 2, muon=Muon())
    one = alone(model, muon=Muon())
    three("backend.load", tmp_path), one.load(tmp_path)
    (_, found), *_ = three("train", batch, 1)
    one.forward_backward(batch, SFTObjective())
    one.step(1e-2)
    for name, weight in one.model.module.state_dict().items():
        for other in (found[name], weight):
            torch.testing.assert_close(other.float(), expected[name].float(), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, torch.bfloat16), (1, torch.float32), (3, torch.bfloat16)]
)
def test_the_optimizer_in_host_memory_takes_the_same_steps(
    start: Start, stage: int, dtype: torch.dtype
) -> None:
    batch = packing()
    [(norms, ours), *_], [(expected, theirs), *_] = (
        start(2, stage, dtype=dtype, ema_decay=0.5, offload=offload, compiled=False)("train", batch)
        for offload in (True, False)
    )
    assert norms == expected
    assert all(ours[name].equal(weight) for name, weight in theirs.items())


@pytest.mark.parametrize("options", [{}, {"sequence": 2}, {"reference": True}, {"adapter": 4}])
def test_weights_in_host_memory_take_the_same_steps_in_copies_of_the_model(
    start: Start, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Bit by bit; also where ranks share each sequence, and where an adapter trains. Layers in one
    piece multiply by gate and up at once, and round otherwise."""
    path = save_model(tmp_path / "deep", "qwen3", num_hidden_layers=4)
    batch = packing()
    full = "adapter" not in options
    more = {"compiled": False, **options}
    away = start(2, 3, path, size=1, streams=True, offload=full, **more)
    here = start(2, 3, path, size=1, **more)
    plain_norms = start(2, 0, path, **more)("train", batch)[0][0]
    [(norms, ours), *_], [(expected, theirs), *_] = (
        ranks("train", batch) for ranks in (away, here)
    )
    assert norms == expected == pytest.approx(plain_norms, rel=1e-4)
    assert all(ours[name].equal(weight) for name, weight in theirs.items())


def test_a_family_without_a_lean_form_runs_its_modules(start: Start, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "gpt2")
    batch = packing()
    one = alone(path)
    assert one.model.lean is None
    [(_, found), *_] = start(2, 3, path, gradient_checkpointing=True)("gradient", batch)
    assert training.difference(found, gradients(one, batch)) < 1e-5


def test_layers_that_are_computed_again_give_the_same_gradient(start: Start) -> None:
    """Bit by bit: the same operations on the same numbers."""
    batch = packing()
    shares = (0, 0.5)
    expected, found = (
        start(2, 3, gradient_checkpointing=share)("gradient", batch)[0][1] for share in shares
    )
    assert all(found[name].equal(grad) for name, grad in expected.items())


def test_activations_in_host_memory_are_no_weights_and_give_the_same_gradient(
    start: Start, tmp_path: Path
) -> None:
    """A rank sends as much as one process that is not sharded, and its values once more: they
    change ranks."""
    path = save_model(tmp_path / "deep", "qwen3", num_hidden_layers=4)
    batch = packing(300)
    one = alone(path, offload_activations=True)
    ranks = start(2, 3, path, sequence=2, offload_activations=True)
    expected = gradients(alone(path), batch)
    assert training.difference(ranks("gradient", batch)[0][1], expected) < 1e-5
    sent_by_one = sent_by(one, batch)
    assert (
        ranks("sent", batch)[0] == pytest.approx(sent_by_one / 2, rel=0.3) and sent_by_one > 10**6
    )


def test_a_multimodal_model_is_saved_with_its_tower(start: Start, tmp_path: Path) -> None:
    path = save_multimodal(tmp_path / "model", "gemma3")
    batch = packing()
    ranks = start(2, 3, path)
    (_, weights), *_ = ranks("train", batch)
    ranks("backend.save", tmp_path / "saved")
    one = alone(path)
    for _ in range(3):
        one.forward_backward(batch, SFTObjective())
        one.step(1e-2)
    same_weights(weights, one)
    saved = CausalLM.load(tmp_path / "saved/model")
    want = CausalLM.load(path).towers.weights
    assert saved.towers.weights.keys() == want.keys()
    assert all(tensor.equal(want[name]) for name, tensor in saved.towers.weights.items())
    same_weights(dict(saved.module.state_dict()), one)
