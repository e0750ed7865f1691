"""What a step learns does not depend on how it is computed: micro-batches, order, sharing, memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny import save_model
from tunesmith.algorithms.losses import POLICY_LOSSES
from tunesmith.algorithms.objective import policy_objective, sft_objective
from tunesmith.algorithms.presets import resolve_algorithm
from tunesmith.backends.base import LossFn, OneDevice
from tunesmith.backends.memory import is_out_of_memory
from tunesmith.backends.optimizer import AdamWSettings
from tunesmith.backends.torch import TorchBackend
from tunesmith.config.schema import AlgorithmSection
from tunesmith.data.forest import Forest, Predictions
from tunesmith.data.packing import SampleTooLong
from tunesmith.errors import DeviceMemoryError, UserError
from tunesmith.loop.learner import Learner
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.cost import CostModel
from tunesmith.types import Sample

Grads = dict[str, Tensor]
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tied = {"qwen3": {"head_dim": 8, "tie_word_embeddings": True}}
    return {
        family: save_model(folder / family, family, **tied.get(family, {})) for family in ("llama", "qwen3", "gpt2")
    }


def backend_of(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> TorchBackend[CausalLM]:
    settings = AdamWSettings(max_grad_norm=None)
    return TorchBackend(CausalLM.load(path, dtype=dtype), settings, **{"predict": CausalLM.predict, **options})


def learner_of(backend: Any, max_tokens: int = 4096, **options: Any) -> Learner:
    settings: dict[str, Any] = {
        "objective": sft_objective(),
        "aggregation": "seq_mean_token_mean",
        "max_new_tokens": 16,
        "learning_rate": lambda step: 1e-2,  # noqa: ARG005
        "cost": CostModel(1.0, 0.01, 0.1),
        "report": lambda text: None,  # noqa: ARG005
    }
    return Learner(backend=backend, max_tokens=max_tokens, **{**settings, **options})


def samples_of(seed: int = 0, groups: int = 4, size: int = 3) -> list[Sample]:
    """Groups of completions (1 to 12 tokens) after prompts (2 to 9 tokens)."""
    rng = np.random.default_rng(seed)
    found: list[Sample] = []
    for group in range(groups):
        prompt = rng.integers(5, 260, rng.integers(2, 10)).tolist()
        for _ in range(size):
            answer = rng.integers(5, 260, rng.integers(1, 13)).tolist()
            found.append(Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer), {}, group))
    return found


def gradient(learner: Learner, samples: Sequence[Sample]) -> tuple[Grads, dict[str, float]]:
    """Of one step, before the optimizer takes it."""
    metrics = learner._accumulate(_weighed(learner, samples))  # pyright: ignore[reportPrivateUsage]
    masters = learner.backend.optimizer.masters  # type: ignore[attr-defined]
    grads = {name: m.grad.clone() for name, m in masters.items() if m.grad is not None}
    learner.backend.zero_grad()
    return grads, metrics


def _weighed(learner: Learner, samples: Sequence[Sample]) -> list[Sample]:
    from tunesmith.algorithms.aggregation import weigh

    return weigh(samples, learner.aggregation, learner.max_new_tokens)


def difference(a: Grads, b: Grads) -> float:
    assert a.keys() == b.keys() and a
    delta = sum(float((a[n] - b[n]).double().square().sum()) for n in a) ** 0.5
    return delta / sum(float(b[n].double().square().sum()) for n in b) ** 0.5


def forked(samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
    """The same rollouts with their last tokens in further records, after what came before as context."""
    made: list[Sample] = []
    for number, sample in enumerate(samples):
        first, places = sample.loss_mask.index(True), range(len(sample.token_ids))
        cuts = sorted(rng.integers(first, len(places) + 1, int(rng.integers(0, 4))))
        for start, stop in pairwise([first, *cuts, len(places)]):
            mask = [start <= place < stop for place in places][:stop]
            columns = {name: column[:stop] for name, column in sample.columns.items()}
            if start < stop:
                made.append(Sample(sample.token_ids[:stop], mask, columns, sample.group, number))
    return made


BY_SEQUENCE = ("gspo", "gspo_token", "gmpo")
"""A record has a ratio of its own, so forks only are the same where it is 1."""


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rollout_teaches_the_same_however_it_is_cut_into_forks(models: dict[str, Path], aggregation: str) -> None:
    rng, backend = np.random.default_rng(0), backend_of(models["llama"], torch.float64)
    learner = learner_of(backend, aggregation=aggregation)
    plain = learner.score(samples_of(), "old_logprobs")
    for loss in POLICY_LOSSES:
        if loss == "gepo":  # compares the records of a group, of which there are more
            continue
        section, _ = resolve_algorithm(AlgorithmSection(loss=loss), max_new_tokens=16)
        learner.objective = policy_objective(section)
        moved = 0.0 if loss in BY_SEQUENCE else 0.3
        samples: list[Sample] = []
        for s in plain:
            advantages = rng.normal() * np.array(s.loss_mask)
            old = np.array(s.columns["old_logprobs"]) + moved * rng.normal(size=len(s.loss_mask))
            selected = 1.0 * (rng.random(len(s.loss_mask)) < 0.2)
            columns = {"advantages": advantages, "old_logprobs": old, "selected": selected}
            samples.append(replace(s, columns={name: c.tolist() for name, c in columns.items()}))
        expected, reference = gradient(learner, samples)
        cut = forked(samples, rng)
        assert len(cut) > len(samples)
        found, metrics = gradient(learner, cut)
        assert difference(found, expected) < 1e-6, loss
        assert metrics["loss"] == pytest.approx(reference["loss"], rel=1e-6, abs=1e-9), loss


def test_an_optimizer_batch_counts_rollouts_and_keeps_their_forks_together(models: dict[str, Path]) -> None:
    samples = forked(samples_of(groups=4, size=3), np.random.default_rng(1))
    sizes: list[list[int]] = []

    class Seen(Learner):
        def step(self, samples: Sequence[Sample]) -> dict[str, float]:
            sizes[-1] += [s.rollout for s in samples]
            sizes.append([])
            return {}

    learner = Seen(
        **{f.name: getattr(learner_of(backend_of(models["llama"])), f.name) for f in fields(Learner) if f.init}
    )
    for size, expected in ((12, [12]), (20, [12]), (6, [6, 6]), (3, [3] * 4), (4, [4, 4, 4]), (5, [5, 5, 2])):
        sizes[:] = [[]]
        learner.update(samples, size, 1, seed=0, group_size=3)
        batches = sizes[:-1]
        assert [len(set(batch)) for batch in batches] == expected
        assert sorted(r for batch in batches for r in batch) == sorted(s.rollout for s in samples)
        assert sum(len(set(batch)) for batch in batches) == 12, "no rollout is in two batches"


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
        expected, reference = gradient(learner_of(plain, share_prompts=False), samples)
        backend = backend_of(models[family], dtype, gradient_checkpointing=checkpointing)
        counts: list[float] = []
        for name, cut in CUTS:
            cap, share, ordered = cut(samples)
            found, metrics = gradient(learner_of(backend, cap, share_prompts=share), ordered)
            assert difference(found, expected) < bound, name
            assert metrics["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            counts.append(metrics["microbatches"])
        assert counts[0] == 1 and counts[1] > 1 and counts[2] > 7
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("wanted", [1, 2, 7])
def test_gradient_in_1_2_and_7_micro_batches(models: dict[str, Path], wanted: int) -> None:
    samples = samples_of()
    backend = backend_of(models["llama"])
    expected, _ = gradient(learner_of(backend), samples)
    caps = range(21, 400)
    for cap in caps:
        found, metrics = gradient(learner_of(backend, cap), samples) if cap % 6 == 0 or cap < 30 else ({}, {})
        if metrics.get("microbatches") == wanted:
            assert difference(found, expected) < 1e-5
            return
    raise AssertionError(f"no cap gives {wanted} micro-batches")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_is_the_plain_formula(models: dict[str, Path], aggregation: str) -> None:
    """Against the loss of one sequence at a time, through the Hugging Face model itself, aggregated by hand."""
    samples = samples_of(1, 2, 2)
    backend = backend_of(models["llama"])
    module = CausalLM.load(models["llama"]).module
    sums, counts = [], []
    for s in samples:
        ids = torch.tensor(s.token_ids)
        logits = backend_logits(module, ids)
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        mask = torch.tensor(s.loss_mask[1:])
        sums.append(-(logprobs * mask).sum())
        counts.append(int(mask.sum()))
    total, batch = sum(counts), len(samples)
    loss = {
        "token_mean": sum(sums) / total,
        "seq_mean_token_mean": sum(s / c for s, c in zip(sums, counts, strict=True)) / batch,
        "seq_mean_token_sum": sum(sums) / batch,
        "seq_mean_token_sum_norm": sum(sums) / batch / 16,
    }[aggregation]
    loss.backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found, metrics = gradient(learner_of(backend, 30, aggregation=aggregation), samples)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert difference(found, expected) < 1e-5


def backend_logits(module: Any, ids: Tensor) -> Tensor:
    module.set_attn_implementation("eager")
    return module(ids[None]).logits[0]


def test_dropout_is_off_in_training(models: dict[str, Path]) -> None:
    samples = samples_of(2, 2, 2)
    backend = backend_of(models["gpt2"])
    assert backend.model.module.config.resid_pdrop > 0
    first, _ = gradient(learner_of(backend), samples)
    second, _ = gradient(learner_of(backend, 30), samples)
    assert difference(second, first) < 1e-5


class Recorder(OneDevice):
    """A backend without a model: it notes what it was given."""

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self.seen: list[list[int]] = []
        self.steps: list[list[int]] = []
        self.rates: list[float] = []

    def score(self, forest: Forest, *, reference: bool = False) -> Predictions:
        return Predictions(torch.arange(forest.targets.numel(), dtype=torch.float32) + 100 * reference)

    def forward_backward(self, forest: Forest, loss: LossFn) -> dict[str, float]:  # noqa: ARG002
        self.seen.append(sorted({int(t) for t in forest.targets}))
        return {"loss": float(forest.columns["weight"].sum())}

    def zero_grad(self) -> None:
        self.seen = []

    def step(self, lr: float) -> dict[str, float]:
        self.steps.append(sorted(t for seen in self.seen for t in seen))
        self.rates.append(lr)
        self.optimizer_steps += 1
        return {"grad_norm": 1.0}


def grouped(sizes: Sequence[int]) -> list[Sample]:
    """Samples whose one learned token is 10 × group + member."""
    return [
        Sample([1, 10 * group + member], [False, True], {}, group)
        for group, size in enumerate(sizes)
        for member in range(size)
    ]


def test_several_steps_per_batch_keep_groups_whole_and_take_each_sample_once_a_pass() -> None:
    backend = Recorder()
    learner = learner_of(backend, learning_rate=lambda step: step + 1.0)
    metrics = learner.update(grouped([4] * 6), 8, passes=2, seed=5, group_size=4)
    assert metrics["optimizer_steps"] == 6 and backend.rates == [1, 2, 3, 4, 5, 6]
    for steps in (backend.steps[:3], backend.steps[3:]):
        assert sorted(t for step in steps for t in step) == [10 * g + m for g in range(6) for m in range(4)]
        for step in steps:
            assert len(step) == 8 and len({t // 10 for t in step}) == 2
    assert backend.steps[:3] != backend.steps[3:], "each pass has its own order"
    assert metrics["microbatches"] == 6 and metrics["lr"] == 3.5


def test_groups_that_lost_members_stay_whole_and_steps_stay_as_many() -> None:
    backend = Recorder()
    learner_of(backend).update(grouped([4, 1, 3, 4, 4, 2]), 8, passes=1, seed=5, group_size=4)
    assert len(backend.steps) == 3
    assert all(len({t // 10 for t in step}) == 2 for step in backend.steps)


def test_a_batch_smaller_than_a_group_cuts_it() -> None:
    backend = Recorder()
    learner_of(backend).update(grouped([4, 4]), 2, passes=1, seed=0, group_size=4)
    assert [len(step) for step in backend.steps] == [2, 2, 2, 2]


def test_the_order_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[list[int]]:
        backend = Recorder()
        learner_of(backend).update(grouped([2] * 8), 4, passes=1, seed=seed, group_size=2)
        return backend.steps

    assert order(1) == order(1) != order(2)


def test_scores_come_back_in_the_samples_order() -> None:
    samples = samples_of(3)
    scored = learner_of(Recorder(), 30).score(samples, "ref_logprobs", reference=True)
    for before, after in zip(samples, scored, strict=True):
        column = after.columns["ref_logprobs"]
        assert [c > 0 for c in column] == before.loss_mask
        assert after.token_ids == before.token_ids
    assert learner_of(Recorder()).score([], "x", reference=False) == []


def test_scores_are_those_of_one_sequence_at_a_time(models: dict[str, Path]) -> None:
    samples = samples_of(4)
    backend = backend_of(models["qwen3"], predict=partial(CausalLM.predict, temperature=0.7))
    together = learner_of(backend, 64).score(samples, "x", reference=False)
    for i, s in enumerate(samples):
        alone = learner_of(backend).score([s], "x", reference=False)
        assert together[i].columns["x"] == pytest.approx(alone[0].columns["x"], abs=2e-5)


def test_a_sample_over_the_cap_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"raise system\.max_tokens_per_microbatch") as error:
        learner_of(Recorder(), 4).step([Sample([1] * 5, [False] + [True] * 4)])
    assert isinstance(error.value, SampleTooLong)


class Failing(OneDevice):
    """A backend that does not fit: at the given calls, or above a size, before or half-way through backward."""

    def __init__(self, inner: TorchBackend, *, at: Sequence[int] = (), above: int | None = None, where: str) -> None:
        self.inner, self.at, self.above, self.where = inner, set(at), above, where
        self.calls = self.score_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _fails(self, forest: Forest, call: int) -> bool:
        return call in self.at or (self.above is not None and forest.num_tokens > self.above)

    def score(self, forest: Forest, *, reference: bool = False) -> Predictions:
        self.score_calls += 1
        if self._fails(forest, self.score_calls):
            raise DeviceMemoryError("scoring did not fit in memory")
        return self.inner.score(forest, reference=reference)

    def forward_backward(self, forest: Forest, loss: LossFn) -> dict[str, float]:
        self.calls += 1
        if not self._fails(forest, self.calls):
            return self.inner.forward_backward(forest, loss)
        if self.where == "forward":

            def exhausted(*_: Any) -> Any:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

            return self.inner.forward_backward(forest, exhausted)
        layer = self.inner.model.module.base_model.layers[0]
        weight: torch.nn.Parameter = layer.mlp.down_proj.weight
        # Gradients arrive from the last layer to the first: when this one fails, the later ones are added.
        handle = weight.register_hook(_exhaust)
        try:
            return self.inner.forward_backward(forest, loss)
        finally:
            handle.remove()


def _exhaust(_: Tensor) -> Tensor:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_did_not_fit_is_the_step_of_the_lower_cap_bit_by_bit(
    models: dict[str, Path], where: str, call: int, dtype: torch.dtype
) -> None:
    samples, told = samples_of(), list[str]()
    failing = Failing(backend_of(models["llama"], dtype), at=[call], where=where)
    learner = learner_of(failing, 80, report=told.append)
    lower = learner_of(backend_of(models["llama"], dtype), 40)
    metrics, expected = learner.step(samples), lower.step(samples)
    assert metrics == expected
    assert learner.max_tokens == 40
    (line,) = told
    assert "did not fit" in line and "max_tokens_per_microbatch" in line and "80 to 40" in line
    second, expected = learner.step(samples), lower.step(samples)
    assert second == expected and len(told) == 1, "the lower cap is kept"
    ours, theirs = failing.inner.model.module.state_dict(), lower.backend.model.module.state_dict()  # type: ignore[attr-defined]
    assert all(ours[n].equal(theirs[n]) for n in theirs)
    ours, theirs = failing.inner.optimizer.state(), lower.backend.optimizer.state()  # type: ignore[attr-defined]
    assert all(ours[n].equal(theirs[n]) for n in theirs)


def test_failing_backward_half_way_really_leaves_gradients_behind(models: dict[str, Path]) -> None:
    backend = backend_of(models["llama"])
    failing = Failing(backend, at=[1], where="backward")
    learner = learner_of(failing)
    samples = _weighed(learner, samples_of())
    with pytest.raises(DeviceMemoryError):
        failing.forward_backward(next(learner._forests(samples)), learner.objective)  # pyright: ignore[reportPrivateUsage]
    assert any(p.grad is not None for p in backend.optimizer.parameters.values())


def test_scoring_halves_too(models: dict[str, Path]) -> None:
    samples = samples_of()
    failing = Failing(backend_of(models["llama"]), above=70, where="forward")
    learner = learner_of(failing, 240)
    scored = learner.score(samples, "x", reference=False)
    expected = learner_of(backend_of(models["llama"]), 60).score(samples, "x", reference=False)
    assert learner.max_tokens == 60
    assert [s.columns for s in scored] == [s.columns for s in expected]


def test_one_sequence_that_does_not_fit_ends_the_run_with_advice(models: dict[str, Path]) -> None:
    failing = Failing(backend_of(models["llama"]), above=5, where="forward")
    learner = learner_of(failing, 120)
    longest = max(len(s.token_ids) for s in samples_of())
    with pytest.raises(DeviceMemoryError, match=rf"longest sequence \({longest} tokens\)") as error:
        learner.step(samples_of())
    assert "gradient_checkpointing" in str(error.value) and "logprob_chunk" in str(error.value)


def test_a_cap_lowered_for_short_sequences_gives_way_to_a_longer_one() -> None:
    """Memory that ran out among short ones must not forbid a longer one that was allowed at the start."""

    class Narrow(Recorder):
        limit = 8

        def forward_backward(self, forest: Forest, loss: LossFn) -> dict[str, float]:
            if forest.num_tokens > self.limit:
                raise DeviceMemoryError("a micro-batch did not fit in memory")
            return super().forward_backward(forest, loss)

    backend = Narrow()
    learner = learner_of(backend, 64)
    learner.step([Sample([i, 2, 3, 4], [False, True, True, True]) for i in range(32)])
    assert learner.max_tokens == 8
    backend.limit = 64
    learner.step([Sample([7] * 30, [False] + [True] * 29)])
    assert learner.max_tokens == 8
    with pytest.raises(SampleTooLong):
        learner.step([Sample([7] * 65, [False] + [True] * 64)])


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(DeviceMemoryError("x"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc")) and is_out_of_memory(
        RuntimeError("can't allocate memory: x")
    )
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(ValueError("bad_alloc"))


def test_other_errors_are_not_taken_for_memory(models: dict[str, Path]) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("size mismatch")

    learner = learner_of(backend_of(models["llama"]), objective=broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        learner.step(samples_of())
    assert learner.max_tokens == 4096


def test_a_checkpoints_lower_cap_is_taken_over_and_told() -> None:
    told: list[str] = []
    learner = learner_of(Recorder(), 100, report=told.append)
    learner.resume(200)
    assert learner.max_tokens == 100 and not told
    learner.resume(50)
    assert learner.max_tokens == 50 and "50 tokens" in told[0]
