"""What a step learns does not depend on how it is computed: micro-batches, order, sharing,
memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.algorithms import algorithm
from tests.support.tiny import save_model
from tests.support.training import backend_of, difference, gradient, learner_of, samples_of, whole
from tunesmith.costs import CostModel
from tunesmith.errors import DeviceMemoryError, StorageError, UserError, is_out_of_memory
from tunesmith.learn.algorithms.losses import Loss
from tunesmith.learn.algorithms.objective import Objective, SFTObjective, policy_objective
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.learn.data.micro_batches import Packing, build_forest
from tunesmith.learn.data.packing import SampleTooLong
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Forest, Predictions
from tunesmith.run.loop.learner import optimizer_batches
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tied = {"qwen3": {"head_dim": 8, "tie_word_embeddings": True}}
    return {
        family: save_model(folder / family, family, **tied.get(family, {}))
        for family in ("llama", "qwen3", "gpt2")
    }


def forked(samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
    """The same rollouts with their last tokens in further records, after what came before as
    context."""
    made: list[Sample] = []
    for number, sample in enumerate(samples):
        first = sample.loss_mask.index(True)
        places = range(len(sample.token_ids))
        cuts = sorted(rng.integers(first, len(places) + 1, int(rng.integers(0, 4))))
        for start, stop in pairwise([first, *cuts, len(places)]):
            mask = [start <= place < stop for place in places][:stop]
            if start < stop:
                made.append(Sample(sample.token_ids[:stop], mask, sample.group, number))
    return made


BY_SEQUENCE = ("gspo", "gspo_token", "gmpo")
"""A record has a ratio of its own, so forks only are the same where it is 1."""


@pytest.mark.parametrize(
    "aggregation",
    [
        pytest.param(each, marks=() if each == "token_mean" else pytest.mark.slow)
        for each in AGGREGATIONS
    ],
)
@pytest.mark.more
def test_a_rollout_teaches_the_same_however_it_is_cut_into_forks(
    models: dict[str, Path], aggregation: str
) -> None:
    rng = np.random.default_rng(0)
    backend = backend_of(models["llama"], torch.float64)
    learner = learner_of(backend, aggregation=aggregation)
    samples = samples_of()
    logprobs = learner.score(Batch.of(samples))
    for loss in Loss.types:
        if loss == "gepo":  # compares the records of a group, of which there are more
            continue
        section = algorithm(loss=loss)
        objective = policy_objective(section)
        moved = 0.0 if loss in BY_SEQUENCE else 0.3
        whole = Batch.of(samples)
        cut = Batch.of(forked(samples, rng))
        assert cut.num_samples > whole.num_samples and cut.num_predictions == whole.num_predictions
        columns = {
            "advantages": rng.normal(size=whole.num_samples)[whole.sample],
            "old_logprobs": logprobs + moved * rng.normal(size=whole.num_predictions),
            "loss.selected": 1.0 * (rng.random(whole.num_predictions) < 0.2),
        }
        for name, column in columns.items():
            whole.add(name, column)
            cut.add(name, column)
        expected, reference = gradient(learner, whole, objective)
        found, metrics = gradient(learner, cut, objective)
        assert difference(found, expected) < 1e-6, loss
        assert metrics["loss"] == pytest.approx(reference["loss"], rel=1e-6, abs=1e-9), loss


def test_an_optimizer_batch_counts_rollouts_and_keeps_their_forks_together() -> None:
    batch = Batch.of(forked(samples_of(groups=4, size=3), np.random.default_rng(1)))
    for size, expected in (
        (12, [12]),
        (20, [12]),
        (6, [6, 6]),
        (3, [3] * 4),
        (4, [4, 4, 4]),
        (5, [5, 5, 2]),
    ):
        parts = [
            part.rollout.tolist()
            for part in optimizer_batches(batch, size, 3, np.random.default_rng(0))
        ]
        assert [len(set(part)) for part in parts] == expected
        assert sorted(r for part in parts for r in part) == sorted(batch.rollout.tolist())
        assert sum(len(set(part)) for part in parts) == 12, "no rollout is in two batches"


CUTS: list[tuple[str, Callable[[list[Sample]], tuple[int, bool, list[Sample]]]]] = [
    ("one micro-batch", lambda s: (4096, True, s)),
    ("some", lambda s: (80, True, s)),
    ("one for each sequence", lambda s: (max(len(x.token_ids) for x in s), False, s)),
    ("not shared", lambda s: (4096, False, s)),
    ("another order", lambda s: (60, True, random.Random(3).sample(s, len(s)))),
]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_is_the_same_however_it_is_cut(
    models: dict[str, Path], family: str, dtype: torch.dtype, bound: float, checkpointing: bool
) -> None:
    samples = samples_of()
    torch.set_default_dtype(dtype)
    try:
        plain = backend_of(models[family], dtype)
        expected, reference = gradient(
            learner_of(plain, share_prompts=False), Batch.of(samples), SFTObjective()
        )
        backend = backend_of(models[family], dtype, gradient_checkpointing=checkpointing)
        counts: list[float] = []
        for name, cut in CUTS:
            cap, share, ordered = cut(samples)
            learner = learner_of(backend, cap, share_prompts=share)
            found, metrics = gradient(learner, Batch.of(ordered), SFTObjective())
            assert difference(found, expected) < bound, name
            assert metrics["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            counts.append(metrics["microbatches"])
        assert counts[0] == 1 and counts[1] > 1 and counts[2] > 7
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("wanted", [1, 2, 7])
def test_gradient_in_1_2_and_7_micro_batches(models: dict[str, Path], wanted: int) -> None:
    batch = Batch.of(samples_of())
    backend = backend_of(models["llama"])
    expected, _ = gradient(learner_of(backend), batch, SFTObjective())
    cap = next(
        cap for cap in (*range(21, 30), *range(30, 400, 6)) if len(Packing.of(batch, cap)) == wanted
    )
    found, metrics = gradient(learner_of(backend, cap), batch, SFTObjective())
    assert metrics["microbatches"] == wanted and difference(found, expected) < 1e-5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_is_the_plain_formula(models: dict[str, Path], aggregation: str) -> None:
    """Against the loss of one sequence at a time, through the Hugging Face model itself, aggregated
    by hand."""
    samples = samples_of(1, 2, 2)
    backend = backend_of(models["llama"])
    module = CausalLM.load(models["llama"]).module
    sums = []
    counts = []
    for s in samples:
        ids = torch.tensor(s.token_ids)
        logits = backend_logits(module, ids)
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        mask = torch.tensor(s.loss_mask[1:])
        sums.append(-(logprobs * mask).sum())
        counts.append(int(mask.sum()))
    total = sum(counts)
    batch = len(samples)
    loss = {
        "token_mean": sum(sums) / total,
        "seq_mean_token_mean": sum(s / c for s, c in zip(sums, counts, strict=True)) / batch,
        "seq_mean_token_sum": sum(sums) / batch,
        "seq_mean_token_sum_norm": sum(sums) / batch / 16,
    }[aggregation]
    loss.backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    learner = learner_of(backend, 30, aggregation=aggregation)
    found, metrics = gradient(learner, Batch.of(samples), SFTObjective())
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert difference(found, expected) < 1e-5


def backend_logits(module: Any, ids: Tensor) -> Tensor:
    module.set_attn_implementation("eager")
    return module(ids[None]).logits[0]


def test_dropout_is_off_in_training(models: dict[str, Path]) -> None:
    batch = Batch.of(samples_of(2, 2, 2))
    backend = backend_of(models["gpt2"])
    assert backend.model.module.config.resid_pdrop > 0
    first, _ = gradient(learner_of(backend), batch, SFTObjective())
    second, _ = gradient(learner_of(backend, 30), batch, SFTObjective())
    assert difference(second, first) < 1e-5


class Recorder:
    """A backend without a model: it notes what it was given."""

    ranks = 1
    cost = CostModel(1.0, 0.01, 0.1)
    limit = 4096

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self.seen: list[int] = []
        self.steps: list[list[int]] = []
        self.rates: list[float] = []

    def score(self, packing: Packing, of: str, *, reference: bool = False) -> Floats:  # noqa: ARG002
        """The target of each prediction, 1000 more by the reference."""
        found = np.zeros(packing.num_predictions)
        for forest in packing.forests:
            found[forest.predictions] = forest.targets + 1000 * reference
        return found

    def forward_backward(self, packing: Packing, objective: Objective) -> dict[str, float]:  # noqa: ARG002
        if any(forest.num_tokens > self.limit for forest in packing):
            raise DeviceMemoryError("a micro-batch did not fit in memory")
        self.seen = sorted({int(t) for forest in packing for t in forest.targets})
        return {"loss": sum(float(forest.columns["weight"].sum()) for forest in packing)}

    def step(self, lr: float) -> dict[str, float]:
        self.steps.append(self.seen)
        self.rates.append(lr)
        self.optimizer_steps += 1
        return {"grad_norm": 1.0}


def grouped(sizes: Sequence[int]) -> Batch:
    """Samples whose one learned token is 10 × group + member."""
    return Batch.of(
        [
            Sample([1, 10 * group + member], [False, True], group)
            for group, size in enumerate(sizes)
            for member in range(size)
        ]
    )


def test_several_steps_per_batch_keep_groups_whole_and_take_each_sample_once_a_pass() -> None:
    backend = Recorder()
    learner = learner_of(backend, learning_rate=lambda step: step + 1.0, group_size=4)
    metrics = learner.update(grouped([4] * 6), SFTObjective(), batch_size=8, passes=2, seed=5)
    assert metrics["optimizer_steps"] == 6 and backend.rates == [1, 2, 3, 4, 5, 6]
    for steps in (backend.steps[:3], backend.steps[3:]):
        assert sorted(t for step in steps for t in step) == [
            10 * g + m for g in range(6) for m in range(4)
        ]
        for step in steps:
            assert len(step) == 8 and len({t // 10 for t in step}) == 2
    assert backend.steps[:3] != backend.steps[3:], "each pass has its own order"
    assert metrics["microbatches"] == 6 and metrics["lr"] == 3.5


def test_groups_that_lost_members_stay_whole_and_steps_stay_as_many() -> None:
    backend = Recorder()
    learner_of(backend, group_size=4).update(
        grouped([4, 1, 3, 4, 4, 2]), SFTObjective(), batch_size=8, seed=5
    )
    assert len(backend.steps) == 3
    assert all(len({t // 10 for t in step}) == 2 for step in backend.steps)


def test_a_batch_smaller_than_a_group_cuts_it() -> None:
    backend = Recorder()
    learner_of(backend, group_size=4).update(grouped([4, 4]), SFTObjective(), batch_size=2)
    assert [len(step) for step in backend.steps] == [2, 2, 2, 2]


def test_the_order_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[list[int]]:
        backend = Recorder()
        learner_of(backend, group_size=2).update(
            grouped([2] * 8), SFTObjective(), batch_size=4, seed=seed
        )
        return backend.steps

    assert order(1) == order(1) != order(2)


def test_scores_come_back_in_the_batchs_order() -> None:
    batch = Batch.of(samples_of(3))
    learner = learner_of(Recorder(), 30)
    targets = batch.token_ids[batch.predicted]
    assert learner.score(batch, reference=True).tolist() == (targets + 1000).tolist()
    with_ends = learner.score(batch, ends=True)
    assert with_ends.tolist() == [*targets, *batch.token_ids[batch.offsets[1:] - 1]]
    assert not learner.score(Batch.of([])).size


def test_scores_are_those_of_one_sequence_at_a_time(models: dict[str, Path]) -> None:
    batch = Batch.of(samples_of(4))
    backend = backend_of(models["qwen3"], predict=partial(CausalLM.predict, temperature=0.7))
    together = batch.split(learner_of(backend, 64).score(batch))
    for i, scored in enumerate(together):
        assert scored == pytest.approx(learner_of(backend).score(batch.take([i])), abs=2e-5)


def test_tokens_that_are_left_out_are_counted_in_each_optimizer_step(
    models: dict[str, Path],
) -> None:
    """One token has no finite input: in each pass, one of two optimizer steps leaves it out."""
    learner = learner_of(backend_of(models["llama"], torch.float64))
    batch = Batch.of(samples_of(groups=2, size=1))
    values = np.zeros(batch.num_predictions)
    values[0] = np.nan
    batch.add("old_logprobs", values)
    metrics = learner.update(batch, SFTObjective(), batch_size=1, passes=2)
    assert (metrics["optimizer_steps"], metrics["nonfinite_tokens"]) == (4, 0.5)


def test_a_batch_is_packed_once_for_scoring_and_for_every_pass(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: list[tuple[int, ...]] = []

    def counted(batch: Batch, samples: Sequence[int], *, share: bool = True) -> Forest:
        layouts.append(tuple(samples))
        return build_forest(batch, samples, share=share)

    monkeypatch.setattr("tunesmith.learn.data.micro_batches.build_forest", counted)
    policy, critic = (learner_of(backend_of(models["llama"]), 60) for _ in range(2))
    batch = Batch.of(samples_of())
    policy.score(batch), critic.score(batch, ends=True)
    critic.update(batch, SFTObjective(), passes=2)
    policy.update(batch, SFTObjective(), passes=3)
    assert len(layouts) > 1 and sorted(i for layout in layouts for i in layout) == list(
        range(batch.num_samples)
    )


def test_scoring_is_timed_beside_its_least_time(models: dict[str, Path]) -> None:
    learner = learner_of(backend_of(models["llama"]), flops_per_second=1e9)
    batch = Batch.of(samples_of())
    learner.score(batch)  # outside: not counted
    with learner.time_scoring() as scored:
        learner.score(batch), learner.score(batch)
    least = learner.update(batch, SFTObjective())["attainable_seconds"]
    assert (
        scored.keys() == {"scoring_seconds", "attainable_seconds/scoring"}
        and scored["scoring_seconds"] > 0
    )
    assert scored["attainable_seconds/scoring"] == pytest.approx(2 * least / 3)
    with learner.time_scoring() as nothing:
        pass
    assert nothing == {}


def test_a_sample_over_the_cap_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"raise system\.max_tokens_per_microbatch") as error:
        learner_of(Recorder(), 4).update(
            Batch.of([Sample([1] * 5, [False] + [True] * 4)]), SFTObjective()
        )
    assert isinstance(error.value, SampleTooLong)


class Failing:
    """A backend that does not fit: at the given micro-batches, or above a size, before or half-way
    through backward."""

    def __init__(
        self, inner: TorchBackend, *, at: Sequence[int] = (), above: int = 4096, where: str
    ) -> None:
        self.inner = inner
        self.at = set(at)
        self.above = above
        self.where = where
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def score(self, packing: Packing, of: Any = "logprobs", *, reference: bool = False) -> Floats:
        if any(forest.num_tokens > self.above for forest in packing.forests):
            raise DeviceMemoryError("scoring did not fit in memory")
        return self.inner.score(packing, of, reference=reference)

    def forward_backward(self, packing: Packing, objective: Objective) -> dict[str, float]:
        handles: list[Any] = []

        def failing(forest: Forest, predictions: Predictions) -> Any:
            self.calls += 1
            if self.calls in self.at or forest.num_tokens > self.above:
                if self.where == "forward":
                    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
                # Gradients arrive from the last layer to the first: when this one fails, the later
                # ones are added.
                layer: Any = self.inner.model.module.base_model.layers[0]
                handles.append(layer.mlp.down_proj.weight.register_hook(_exhaust))
            return objective(forest, predictions)

        try:
            return self.inner.forward_backward(packing, failing)
        finally:
            for handle in handles:
                handle.remove()


def _exhaust(_: Tensor) -> Tensor:
    raise RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_did_not_fit_is_the_step_of_the_lower_cap_bit_by_bit(
    models: dict[str, Path], where: str, call: int, dtype: torch.dtype
) -> None:
    batch = Batch.of(samples_of())
    told = list[str]()
    failing = Failing(backend_of(models["llama"], dtype), at=[call], where=where)
    learner = learner_of(failing, 80, report=told.append)
    lower = learner_of(backend_of(models["llama"], dtype), 40)
    metrics = learner.update(batch, SFTObjective())
    expected = lower.update(batch, SFTObjective())
    assert metrics == expected | {"memory_retries": 1.0}
    assert learner.caps["max_tokens"] == 40
    (line,) = told
    assert "did not fit" in line and "max_tokens_per_microbatch" in line and "80 to 40" in line
    second = learner.update(batch, SFTObjective())
    expected = lower.update(batch, SFTObjective())
    assert second == expected and len(told) == 1, "the lower cap is kept"
    ours = failing.inner.model.module.state_dict()
    theirs = lower.backend.model.module.state_dict()  # type: ignore[attr-defined]
    assert all(ours[n].equal(theirs[n]) for n in theirs)
    ours = failing.inner.optimizer.state()
    theirs = lower.backend.optimizer.state()  # type: ignore[attr-defined]
    assert all(ours[n].equal(theirs[n]) for n in theirs)


def test_failing_backward_half_way_really_leaves_gradients_behind(models: dict[str, Path]) -> None:
    backend = backend_of(models["llama"])
    with pytest.raises(DeviceMemoryError):
        Failing(backend, at=[1], where="backward").forward_backward(
            whole(samples_of()), SFTObjective()
        )
    assert any(p.grad is not None for p in backend.optimizer.parameters.values())


def test_scoring_halves_too(models: dict[str, Path]) -> None:
    batch = Batch.of(samples_of())
    learner = learner_of(Failing(backend_of(models["llama"]), above=70, where="forward"), 240)
    scored = learner.score(batch)
    assert learner.caps["max_tokens"] == 60
    assert scored.tolist() == learner_of(backend_of(models["llama"]), 60).score(batch).tolist()


def test_scoring_has_a_cap_of_its_own(models: dict[str, Path]) -> None:
    """Each cap is lowered by its own passes, and a batch is packed once for each."""
    batch = Batch.of(samples_of())
    backend = Failing(backend_of(models["llama"]), above=70, where="forward")
    learner = learner_of(backend, 60, scoring_max_tokens=240)
    scored = learner.score(batch)
    assert learner.caps == {"max_tokens": 60, "scoring_max_tokens": 60}
    learner = learner_of(backend_of(models["llama"]), 60, scoring_max_tokens=240)
    np.testing.assert_allclose(learner.score(batch), scored, rtol=1e-5)
    learner.update(batch, SFTObjective())
    learner.evaluate(batch, SFTObjective())
    assert {layout[0] for layout in batch.packings} >= {60, 240}
    assert (
        max(
            f.num_tokens
            for layout, p in batch.packings.items()
            if layout[0] == 240
            for f in p.forests
        )
        > 60
    )
    learner.resume({"max_tokens": 80, "scoring_max_tokens": 100})
    assert learner.caps == {"max_tokens": 60, "scoring_max_tokens": 100}


def test_one_sequence_that_does_not_fit_ends_the_run_with_advice(models: dict[str, Path]) -> None:
    learner = learner_of(Failing(backend_of(models["llama"]), above=5, where="forward"), 120)
    longest = max(len(s.token_ids) for s in samples_of())
    with pytest.raises(DeviceMemoryError, match=rf"longest sequence \({longest} tokens\)") as error:
        learner.update(Batch.of(samples_of()), SFTObjective())
    assert "gradient_checkpointing" in str(error.value) and "logprob_chunk" in str(error.value)


def test_a_cap_lowered_for_short_sequences_gives_way_to_a_longer_one() -> None:
    """Memory that ran out among short ones must not forbid a longer one that was allowed at the
    start."""

    def learn(samples: list[Sample]) -> None:
        learner.update(Batch.of(samples), SFTObjective())

    backend = Recorder()
    backend.limit = 8
    learner = learner_of(backend, 64)
    learn([Sample([i, 2, 3, 4], [False, True, True, True]) for i in range(32)])
    assert learner.caps["max_tokens"] == 8
    backend.limit = 64
    learn([Sample([7] * 30, [False] + [True] * 29)])
    assert learner.caps["max_tokens"] == 8
    with pytest.raises(SampleTooLong):
        learn([Sample([7] * 65, [False] + [True] * 64)])


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(DeviceMemoryError("x"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc")) and is_out_of_memory(
        RuntimeError("can't allocate memory: x")
    )
    assert is_out_of_memory(OSError(12, "Cannot allocate memory")) and is_out_of_memory(
        RuntimeError("can't start new thread")
    )
    assert not is_out_of_memory(OSError(2, "No such file")) and not is_out_of_memory(
        StorageError(12, "memory")
    )
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(
        ValueError("bad_alloc")
    )


def test_other_errors_are_not_taken_for_memory(models: dict[str, Path]) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("size mismatch")

    learner = learner_of(backend_of(models["llama"]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        learner.update(Batch.of(samples_of()), broken)
    assert learner.caps["max_tokens"] == 4096


def test_a_checkpoints_lower_cap_is_taken_over_and_told() -> None:
    told: list[str] = []
    learner = learner_of(Recorder(), 100, report=told.append)
    learner.resume({"max_tokens": 200})
    assert learner.caps["max_tokens"] == 100 and not told
    learner.resume({"max_tokens": 50})
    assert learner.caps["max_tokens"] == 50 and "50 tokens" in told[0]
    saved = learner.state()
    assert saved == {"max_tokens": 50, "max_tokens/from": 100}
    more = learner_of(Recorder(), 200)
    more.resume(saved)
    assert more.caps["max_tokens"] == 200, "more memory is planned"
    assert not more.state(), "none ran out"
    same = learner_of(Recorder(), 100)
    same.resume(saved)
    assert same.state() == saved
