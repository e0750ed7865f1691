"""Preference losses: hand-computed values, gradients, what is dropped, and the same result however
a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import training
from tests.support.micro import batch_of, micro_batch
from tests.support.tiny import save_model
from tunesmith.learn.algorithms import preference as p
from tunesmith.learn.algorithms.aggregation import weigh, with_shares
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import build_forest, gather
from tunesmith.learn.data.packing import GroupTooLong, group_tokens, pack
from tunesmith.learn.data.trie import num_forest_tokens
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Predictions
from tunesmith.models.score_model import ScoreModel, whole_sequence
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.preference import with_margin, with_reward_std
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_losses_by_hand() -> None:
    h = t(-1.0, 0.0, 2.0)
    plain = [-math.log(sigma(x)) for x in (-1.0, 0.0, 2.0)]
    assert p.sigmoid_loss(h).tolist() == pytest.approx(plain)
    smooth = [-0.9 * math.log(sigma(x)) - 0.1 * math.log(sigma(-x)) for x in (-1.0, 0.0, 2.0)]
    assert p.dpo_loss(h / 2, "sigmoid", 2.0, 0.1).tolist() == pytest.approx(smooth)
    assert p.dpo_loss(t(0.0, 5.0, 7.0), "ipo", 0.1).tolist() == pytest.approx([25.0, 0.0, 4.0])
    assert p.dpo_loss(h / 2, "hinge", 2.0).tolist() == [2.0, 1.0, 0.0]
    kto = p.kto_loss(t(1.0, 1.0), 0.4, t(1.0, -1.0), beta=0.5, desirable=2.0, undesirable=3.0)
    assert kto.tolist() == pytest.approx([2 * (1 - sigma(0.5 * 0.6)), 3 * (1 - sigma(0.5 * -0.6))])
    step = p.sigmoid_loss(t(1.5, 1.5, 1.5), t(1.0, 0.0, 0.3))
    yes = -math.log(sigma(1.5))
    no = -math.log(sigma(-1.5))
    assert step.tolist() == pytest.approx([yes, no, 0.3 * yes + 0.7 * no])


@given(st.floats(-1e4, 1e4))
@settings(deadline=None)
def test_softplus_neither_overflows_nor_vanishes(x: float) -> None:
    value = p.softplus(t(x)).item()
    assert value == pytest.approx(max(x, 0.0) + math.log1p(math.exp(-abs(x))))


@pytest.mark.parametrize(
    "loss",
    [
        p.sigmoid_loss,
        *(
            partial(p.dpo_loss, kind=kind, beta=0.3, smoothing=0.2)
            for kind in ("sigmoid", "ipo", "hinge")
        ),
        partial(p.kto_loss, kl=0.2, side=t(1.0, -1.0, 1.0), beta=0.4, desirable=1.5),
        partial(p.sigmoid_loss, label=t(1.0, 0.0, 0.25)),
    ],
)
def test_gradients_are_those_of_finite_differences(loss: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradcheck(loss, (t(-1.3, 0.4, 2.2).requires_grad_(),))


LENGTHS = (3, 1, 2, 4, 1, 2)
"""Three pairs."""


def pairs(lengths: Sequence[int] = LENGTHS, **values: Sequence[float]) -> Batch:
    batch = batch_of(lengths, {})
    count = len(lengths)
    columns = {
        "side": [1.0, -1.0] * (count // 2),
        "reference": [0.0] * count,
        "margin": [0.0] * count,
        **values,
    }
    for name, column in columns.items():
        batch.add_per_sample(name, column)
    return batch


def predictions(batch: Batch, seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.normal(-1, 0.5, count)).requires_grad_() for count in batch.counts]


Course = tuple[float, dict[str, float], list[Tensor]]


def course(
    objective: Objective,
    batch: Batch,
    predicted: Sequence[Tensor],
    cut: Sequence[Sequence[int]],
    of: str,
) -> Course:
    """Loss, metrics and gradients of a batch in the micro-batches of ``cut``."""
    weigh(batch, p.AGGREGATION)
    total = 0.0
    metrics = dict[str, float]()
    for x in predicted:
        x.grad = None
    for indices in cut:
        found = (
            torch.cat([predicted[i] for i in indices])
            if indices
            else torch.zeros(0, dtype=torch.float64)
        )
        loss, more = objective(micro_batch(batch, indices), Predictions(**{of: found}))
        if indices:
            loss.backward()
        total += loss.item()
        for name, value in more.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return (
        total,
        with_shares(metrics),
        [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in predicted],
    )


def whole(
    objective: Objective, batch: Batch, predicted: Sequence[Tensor], of: str = "logprobs"
) -> Course:
    return course(objective, batch, predicted, [range(batch.num_samples)], of)


def test_dpo_by_hand() -> None:
    reference = (-3.0, -1.5, -2.0, -4.0, -0.5, -2.5)
    samples = pairs(reference=reference)
    predicted = predictions(samples)
    sums = [x.sum().item() for x in predicted]
    delta = [a - b for a, b in zip(sums, reference, strict=True)]
    beta = 0.3
    h = [beta * (delta[k] - delta[k + 1]) for k in (0, 2, 4)]
    nll = [-sums[k] / LENGTHS[k] for k in (0, 2, 4)]
    expected = np.mean([-math.log(sigma(x)) + 0.2 * n for x, n in zip(h, nll, strict=True)])
    loss, metrics, _ = whole(p.DPOObjective("sigmoid", beta, 0.0, 0.2), samples, predicted)
    assert loss == pytest.approx(expected)
    assert metrics["rewards/chosen"] == pytest.approx(beta * np.mean(delta[0::2]))
    assert metrics["rewards/rejected"] == pytest.approx(beta * np.mean(delta[1::2]))
    assert metrics["margin"] == pytest.approx(np.mean(h)) and metrics["nll"] == pytest.approx(
        np.mean(nll)
    )
    assert (
        metrics["accuracy"] == pytest.approx(np.mean([x > 0 for x in h]))
        and metrics["nonfinite_pairs"] == 0
    )
    for name, each in (
        ("ipo", [(x / beta - 1 / (2 * beta)) ** 2 for x in h]),
        ("hinge", [max(0.0, 1 - x) for x in h]),
    ):
        assert whole(p.DPOObjective(name, beta), samples, predicted)[0] == pytest.approx(
            np.mean(each)
        )
    smoothed = [-0.8 * math.log(sigma(x)) - 0.2 * math.log(sigma(-x)) for x in h]
    assert whole(p.DPOObjective("sigmoid", beta, 0.2), samples, predicted)[0] == pytest.approx(
        np.mean(smoothed)
    )


def test_a_policy_that_is_its_reference_has_even_odds() -> None:
    predicted = predictions(pairs())
    samples = pairs(reference=[x.sum().item() for x in predicted])
    loss, metrics, grads = whole(p.DPOObjective("sigmoid", 0.1), samples, predicted)
    assert loss == pytest.approx(math.log(2)) and metrics["accuracy"] == 0.5
    assert all((g < 0).all() for g in grads[0::2]), "the chosen become likelier"
    assert all((g > 0).all() for g in grads[1::2])


def test_reward_models_by_hand() -> None:
    samples = pairs((1,) * 6, margin=(0.5, 0.5, 0.0, 0.0, 1.0, 1.0))
    values = [t(v).requires_grad_() for v in (1.0, 0.2, -1.0, 0.5, 2.0, 2.0)]
    loss, metrics, _ = whole(p.RewardObjective(), samples, values, "values")
    assert loss == pytest.approx(np.mean([-math.log(sigma(x)) for x in (0.3, -1.5, -1.0)]))
    assert metrics["accuracy"] == pytest.approx(0.5) and metrics["margin"] == pytest.approx(
        -0.7 / 3
    )
    told = with_reward_std(metrics)
    flat = [v.item() for v in values]
    assert told["rewards/mean"] == pytest.approx(np.mean(flat)) and "rewards/square" not in told
    assert told["rewards/std"] == pytest.approx(np.std(flat))
    broken = with_reward_std({"rewards/mean": math.nan, "rewards/square": math.nan})
    assert math.isnan(broken["rewards/std"])
    plain, _, _ = whole(p.RewardObjective(margins=False), samples, values, "values")
    assert plain == pytest.approx(np.mean([math.log(1 + math.exp(-x)) for x in (0.8, -1.5, 0.0)]))


def judged(
    sides: Sequence[float], kl: float, lengths: Sequence[int] = LENGTHS, **values: Sequence[float]
) -> Batch:
    batch = batch_of(lengths, {}, size=1)
    for name, column in {"side": sides, "reference": [0.0] * len(sides), **values}.items():
        batch.add_per_sample(name, column)
    p.add_kto_columns(batch, np.array([kl - 1.0, kl + 1.0, math.nan]))
    return batch


def test_kto_by_hand() -> None:
    sides = (1.0, -1.0, 1.0, 1.0, -1.0, 1.0)
    reference = (-2.0, -1.0, -3.0, -5.0, -1.0, -2.0)
    samples = judged(sides, 0.3, reference=reference)
    predicted = predictions(samples)
    delta = [x.sum().item() - r for x, r in zip(predicted, reference, strict=True)]
    each = [
        (1.2 if s > 0 else 0.7) * (1 - sigma(0.5 * s * (d - 0.3)))
        for s, d in zip(sides, delta, strict=True)
    ]
    loss, metrics, _ = whole(p.KTOObjective(0.5, 1.2, 0.7), samples, predicted)
    assert loss == pytest.approx(np.mean(each)) and metrics["kl"] == pytest.approx(0.3)
    chosen, rejected = (
        [0.5 * d for s, d in zip(sides, delta, strict=True) if s == side] for side in (1, -1)
    )
    assert metrics["rewards/chosen"] == pytest.approx(np.mean(chosen))
    assert metrics["rewards/rejected"] == pytest.approx(np.mean(rejected))
    assert with_margin(metrics)["margin"] == pytest.approx(np.mean(chosen) - np.mean(rejected))
    assert metrics["accuracy"] == pytest.approx(
        np.mean([s * (d - 0.3) > 0 for s, d in zip(sides, delta, strict=True)])
    )
    _, metrics, _ = whole(p.KTOObjective(0.5), judged((1.0,) * 6, -3.0), predicted)
    assert metrics["kl"] == 0.0, "of a negative estimate"
    assert not {"rewards/rejected", "margin"} & with_margin(metrics).keys()


def test_process_rewards_by_hand() -> None:
    samples = pairs((1,) * 6, label=(1.0, 1.0, 0.0, 0.0, 0.3, 0.3))
    logprobs = [t(v).requires_grad_() for v in (-1.0, -2.0, -1.0, -3.0, -2.0, -1.0)]
    loss, metrics, grads = whole(p.StepObjective(), samples, logprobs)
    logits = (1.0, 2.0, -1.0)
    expected = [
        -y * math.log(sigma(x)) - (1 - y) * math.log(sigma(-x))
        for x, y in zip(logits, (1, 0, 0.3), strict=True)
    ]
    assert loss == pytest.approx(np.mean(expected)) and metrics["accuracy"] == pytest.approx(2 / 3)
    assert [g.item() for g in grads[0::2]] == pytest.approx(
        [(sigma(x) - y) / 3 for x, y in zip(logits, (1, 0, 0.3), strict=True)]
    )


CASES: dict[str, tuple[Callable[[], Objective], str]] = {
    "rm": (p.RewardObjective, "values"),
    "dpo": (lambda: p.DPOObjective("sigmoid", 0.3, 0.1, 0.2), "logprobs"),
    "ipo": (lambda: p.DPOObjective("ipo", 0.3), "logprobs"),
    "hinge": (lambda: p.DPOObjective("hinge", 0.3), "logprobs"),
    "kto": (lambda: p.KTOObjective(0.3, 1.2, 0.9), "logprobs"),
    "prm": (p.StepObjective, "logprobs"),
}


def batch(case: str) -> Batch:
    rng = np.random.default_rng(1)
    if case == "kto":
        return judged(
            (1.0, -1.0, -1.0, 1.0, 1.0, -1.0), 0.2, reference=rng.normal(-2, 1, 6).tolist()
        )
    label = np.repeat(rng.random(3), 2).tolist()
    lengths = (1,) * 6 if case in ("rm", "prm") else LENGTHS
    return pairs(
        lengths,
        reference=rng.normal(-2, 1, 6).tolist(),
        margin=np.repeat(rng.random(3), 2),
        label=label,
    )


@pytest.mark.parametrize("case", CASES)
@given(
    order=st.permutations(range(3)),
    flips=st.lists(st.booleans(), min_size=3, max_size=3),
    cut=st.integers(0, 3),
)
@settings(deadline=None, max_examples=20)
def test_any_cut_and_order_of_pairs_gives_the_same(
    case: str, order: list[int], flips: list[bool], cut: int
) -> None:
    make, of = CASES[case]
    samples = batch(case)
    predicted = predictions(samples)
    loss, metrics, grads = whole(make(), samples, predicted, of)
    flat = [i for k in order for i in ((2 * k + 1, 2 * k) if flips[k] else (2 * k, 2 * k + 1))]
    parts = [flat[: 2 * cut], flat[2 * cut :], []]
    again = course(make(), samples, predicted, parts, of)
    assert again[0] == pytest.approx(loss)
    assert again[1] == pytest.approx(metrics)
    for a, b in zip(again[2], grads, strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [3, 7, 11])
def test_no_share_of_a_batch_in_float32_is_above_one(case: str, count: int) -> None:
    """Every pair is right, in one micro-batch and in one each: the weights are thirds, sevenths and
    elevenths."""
    make, of = CASES[case]
    lengths = [1] * 2 * count
    sides = [1.0, -1.0] * count
    samples = (
        judged(sides, 0.0, lengths=lengths)
        if case == "kto"
        else pairs(lengths, label=[1.0] * 2 * count)
    )
    weigh(samples, p.AGGREGATION)
    predicted = torch.tensor(sides) * 2.0
    for cut in ([range(2 * count)], [(2 * k, 2 * k + 1) for k in range(count)]):
        metrics = dict[str, float]()
        for part in cut:
            forest = gather(build_forest(samples, list(part), share=False), samples)
            assert forest.columns["weight"].dtype == torch.float32
            _, found = make()(forest, Predictions(**{of: predicted[list(part)]}))
            metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in found.items()}
        assert with_shares(metrics)["accuracy"] == 1.0


@pytest.mark.parametrize("case", CASES)
def test_objectives_have_the_gradients_of_finite_differences(case: str) -> None:
    make, of = CASES[case]
    weighed = batch(case)
    weigh(weighed, p.AGGREGATION)
    forest = micro_batch(weighed, range(6))
    start = torch.cat([x.detach() for x in predictions(batch(case))]).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: make()(forest, Predictions(**{of: x}))[0], (start,))


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_is_dropped_with_its_partner(case: str) -> None:
    make, of = CASES[case]
    samples = batch(case)
    kept = [0, 1, 4, 5] if case != "kto" else [0, 1, 2, 4, 5]
    predicted = predictions(samples)
    expected = whole(make(), samples.take(kept), [predicted[i] for i in kept], of)
    lost = [i for i in range(6) if i not in kept]
    broken = batch(case)
    reference = samples.per_sample["reference"].copy()
    reference[lost] = math.nan
    broken.add_per_sample("reference", reference)
    loss, metrics, grads = whole(make(), broken, predicted, of)
    assert loss == pytest.approx(expected[0]), "out of the denominator too"
    assert all(not grads[i].any() for i in lost)
    assert sum(v for name, v in metrics.items() if name.startswith("nonfinite")) == 1
    # A prediction is found out after the denominators are known: it only leaves the numerator.
    with torch.no_grad():
        predicted[3][0] = math.nan
    loss, _, grads = whole(make(), samples, predicted, of)
    count, left = (6, 5) if case == "kto" else (3, 2)
    few = samples.take(kept)
    assert loss == pytest.approx(
        whole(make(), few, [predicted[i] for i in kept], of)[0] * left / count
    )
    assert all(g.isfinite().all() for g in grads) and not grads[3].any()


def test_a_pair_in_two_micro_batches_is_a_fault_of_ours() -> None:
    samples = pairs()
    with pytest.raises(AssertionError, match="a pair was split"):
        course(
            p.DPOObjective("sigmoid", 0.1),
            samples,
            predictions(samples),
            [[0, 2, 3], [1, 4, 5]],
            "logprobs",
        )


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12
    ),
    st.integers(0, 25),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_groups_stay_whole_under_a_hard_cap(
    given: list[tuple[int, int, int]], room: int, share: bool
) -> None:
    """Prompts come several times, so that groups interleave in the order of their prefixes."""
    samples: list[Sample] = []
    for group, (prompt, first, second) in enumerate(given):
        head = [[5, 6, 7], [5, 6], [5], [8, 9]][prompt]
        for length in (first, second):
            mask = [False] * len(head) + [True] * length
            samples.append(Sample(head + [group + 10] * length, mask, group))
    packed = Batch.of(samples)
    cap = group_tokens(packed, share=share) + room
    bins = pack(packed, cap, share=share, keep_groups=True)
    assert sorted(i for b in bins for i in b) == list(range(len(samples)))
    for b in bins:
        assert num_forest_tokens(packed, b, share=share) <= cap
        assert sorted(b) == sorted(
            i for i, s in enumerate(samples) if s.group in {samples[k].group for k in b}
        )
    pair = [replace(s, group=0) for s in (samples[0], Sample([99] * cap, [False] * cap))]
    with pytest.raises(GroupTooLong, match=f"more than a micro-batch may hold .{cap}."):
        pack(Batch.of(pair), cap, share=share, keep_groups=True)


def test_a_pair_shares_its_prompt() -> None:
    prompt = list(range(10, 30))
    two = [
        Sample([*prompt, *tail], [False] * 20 + [True] * len(tail), 0)
        for tail in ([3, 4], [5, 6, 7])
    ]
    assert group_tokens(Batch.of(two)) == 25 and group_tokens(Batch.of(two), share=False) == 45
    scored = [replace(whole_sequence(s.token_ids), group=0) for s in two]
    assert group_tokens(Batch.of(scored)) == 27, (
        "a reward model's two also share it, with one more token each"
    )


def learner_of(backend: Any, cap: int, **options: Any) -> Learner:
    return training.learner_of(backend, cap, aggregation=p.AGGREGATION, keep_groups=True, **options)


@pytest.mark.parametrize("kind", ["rm", "dpo"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_gradient_is_the_same_however_pairs_are_packed(
    tmp_path: Path, kind: str, dtype: torch.dtype, bound: float
) -> None:
    torch.set_default_dtype(dtype)
    try:
        path = save_model(tmp_path / "model")
        if kind == "rm":
            model: Any = ScoreModel.load(path, dtype=dtype)
            torch.manual_seed(0)
            torch.nn.init.normal_(model.head.weight)
            backend: Any = TorchBackend(model, AdamWSettings(), ScoreModel.predict)
            objective = p.RewardObjective()
        else:
            backend = TorchBackend(
                CausalLM.load(path, dtype=dtype), AdamWSettings(), CausalLM.predict
            )
            objective = p.DPOObjective("sigmoid", 0.1, 0.1, 0.2)
        rng = np.random.default_rng(0)
        samples: list[Sample] = []
        for number in range(5):
            prompt = rng.integers(5, 260, 3 + number).tolist()
            for _ in range(2):
                ids = prompt + rng.integers(5, 260, rng.integers(1, 6)).tolist()
                mask = [k >= len(prompt) for k in range(len(ids))]
                sample = whole_sequence(ids) if kind == "rm" else Sample(ids, mask)
                samples.append(replace(sample, group=number))
        batch = Batch.of(samples)
        for name, column in (
            ("side", [1.0, -1.0] * 5),
            ("margin", np.repeat(0.2 * np.arange(5), 2)),
            ("reference", np.repeat(-20.0 - np.arange(5), 2)),
        ):
            batch.add_per_sample(name, column)
        found: list[tuple[dict[str, Tensor], dict[str, float]]] = []
        smallest = group_tokens(batch, share=False)
        for cap, share, order in (
            (4096, True, range(10)),
            (smallest, True, range(10)),
            (smallest, False, range(10)),
            (40, True, [9, 2, 4, 0, 7, 1, 3, 8, 5, 6]),
        ):
            learner = learner_of(backend, cap, share_prompts=share)
            found.append(training.gradient(learner, batch.take(order), objective))
        expected, reference = found[0]
        for grads, metrics in found[1:]:
            assert metrics["microbatches"] > reference["microbatches"] == 1
            assert metrics["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            assert training.difference(grads, expected) < bound
        evaluated = learner_of(backend, smallest).evaluate(batch, objective)
        ours = ("microbatches", "trained_tokens", "optimizer_steps", "grad_norm", "lr")
        same = {n: v for n, v in reference.items() if n not in ours}
        assert evaluated == pytest.approx(same, rel=1e-4, abs=1e-6)
        with torch.no_grad():
            next(iter(backend.optimizer.parameters.values())).fill_(math.nan)
        assert all(
            math.isnan(v) for v in learner_of(backend, 4096).evaluate(batch, objective).values()
        )
    finally:
        torch.set_default_dtype(torch.float32)
