"""Distillation: the divergence and its gradient by hand and by finite differences, the three modes
as whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.tiny import save_model, tokenizer
from tests.support.tiny_runs import rl_settings, same_tensors, sft_settings, untimed
from tests.support.training import forest_of, whole
from tunesmith.errors import ConfigError, ModelError
from tunesmith.learn.algorithms.advantages import TokenReward
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.objective import DistillationObjective
from tunesmith.learn.algorithms.outcomes import Outcome
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing, build_forest, gather
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Predictions
from tunesmith.models.head import Head, LogitScale, fused_logprobs, likeliest
from tunesmith.models.parallel.host_weights import HostWeights
from tunesmith.models.teacher import (
    TEACHER_LOGPROBS,
    TEACHER_TOKENS,
    check_same_vocabulary,
    forward_kl,
    predict_with_said,
    predict_with_teacher,
)
from tunesmith.run import assembly
from tunesmith.types import Sample


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "student"), save_model(
        folder / "teacher", seed=1, initializer_range=0.2
    )


@pytest.fixture(scope="module")
def taught(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A student, and a teacher that has learned something."""
    lesson = sft_settings(tmp_path_factory.mktemp("lesson"), models[0], train__steps=40)
    return models[0], assembly.run_sft(None, lesson).checkpoint


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCALES = [LogitScale(), LogitScale(2.0, None, 0.7), LogitScale(0.5, 3.0, 1.3)]


def logits(hidden: Tensor, head: Head) -> Tensor:
    z = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale.factor
    cap = head.scale.softcap
    return (z if cap is None else cap * torch.tanh(z / cap)) / head.scale.temperature


@pytest.mark.parametrize("scale", SCALES, ids=["plain", "scaled", "capped"])
@pytest.mark.parametrize("bias", [True, False])
def test_log_probabilities_at_tokens_and_their_gradient(scale: LogitScale, bias: bool) -> None:
    hidden = normal(7, 4, seed=1).requires_grad_()
    weight = normal(11, 4, seed=2).requires_grad_()
    added = normal(11, seed=3).requires_grad_() if bias else None
    head = Head(weight, added, scale, chunk=3)
    tokens = torch.randint(11, (7, 3), generator=torch.Generator().manual_seed(4))
    tokens[2] = tokens[2, 0]  # one token several times
    expected = logits(hidden, head).log_softmax(-1).gather(1, tokens)
    found, _ = fused_logprobs(hidden, head, tokens)
    torch.testing.assert_close(found, expected)
    inputs = [t for t in (hidden, weight, added) if t is not None]
    up = normal(7, 3, seed=5)
    for a, b in zip(
        torch.autograd.grad(found, inputs, up),
        torch.autograd.grad(expected, inputs, up),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(
        lambda *t: fused_logprobs(t[0], Head(t[1], added, scale, 3), tokens)[0], inputs[:2]
    )


def test_the_likeliest_tokens() -> None:
    hidden = normal(5, 4)
    head = Head(normal(9, 4, seed=1), chunk=2)
    tokens, logprobs = likeliest(hidden.requires_grad_(), head, 3)
    top = logits(hidden, head).log_softmax(-1).topk(3)
    assert tokens.equal(top.indices) and not logprobs.requires_grad
    torch.testing.assert_close(logprobs, top.values.detach())


def test_the_divergence_by_hand() -> None:
    """Teacher (1/2, 1/4 | 1/4), student (1/4, 1/4 | 1/2): 1/2 log 2 + 0 − 1/4 log 2."""
    teacher, student = (
        torch.tensor([p], dtype=torch.float64).log() for p in ([0.5, 0.25], [0.25, 0.25])
    )
    torch.testing.assert_close(
        forward_kl(teacher, student), torch.tensor([0.25 * np.log(2.0)], dtype=torch.float64)
    )
    torch.testing.assert_close(forward_kl(teacher, teacher), torch.zeros(1, dtype=torch.float64))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 8), sharp=st.floats(0.1, 30.0))
def test_the_divergence_is_between_zero_and_the_whole_one(seed: int, k: int, sharp: float) -> None:
    theirs, ours = ((sharp * normal(4, 8, seed=seed + i)).log_softmax(-1) for i in range(2))
    ours.requires_grad_()
    top = theirs.topk(k)
    found = forward_kl(top.values, ours.gather(1, top.indices))
    whole = (theirs.exp() * (theirs - ours)).sum(-1)
    assert (found > -1e-9).all() and (found <= whole * (1 + 1e-6) + 1e-9).all()
    if k == 8:
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-9)
    (grad,) = torch.autograd.grad(found.sum(), ours)
    assert grad.isfinite().all()


def test_its_gradient_is_that_of_finite_differences() -> None:
    theirs = normal(3, 6).log_softmax(-1).topk(3)

    def kl(z: Tensor) -> Tensor:
        return forward_kl(theirs.values, z.log_softmax(-1).gather(1, theirs.indices))

    assert torch.autograd.gradcheck(kl, [normal(3, 6, seed=1).requires_grad_()])


def objective_of(
    alpha: float, logprobs: list[float], divergence: list[float]
) -> tuple[float, dict[str, float]]:
    [forest] = whole([Sample([1, 2, 3], [False, True, True]), Sample([1, 4], [False, True])])
    found = Predictions(torch.tensor(logprobs), divergence=torch.tensor(divergence))
    loss, metrics = DistillationObjective(alpha)(forest, found)
    return float(loss), {name: float(m) for name, m in metrics.items()}


def test_the_objective_by_hand() -> None:
    loss, metrics = objective_of(0.25, [-1.0, -2.0, -3.0], [0.5, 0.0, 1.0])
    assert loss == pytest.approx(0.75 * 2.0 + 0.25 * 0.5)
    assert metrics == {
        "nll": pytest.approx(2.0),
        "teacher_kl": pytest.approx(0.5),
        "nonfinite_tokens": 0,
    }
    loss, metrics = objective_of(1.0, [-1.0, -2.0, -3.0], [0.6, float("nan"), 0.3])
    assert loss == pytest.approx(0.3) and metrics["nonfinite_tokens"] == 1
    [nothing] = whole([])
    empty = DistillationObjective(0.5)(
        nothing, Predictions(torch.zeros(0), divergence=torch.zeros(0))
    )
    assert float(empty[0]) == 0 and all(float(metric) == 0 for metric in empty[1].values())


SEQUENCES = [
    Sample([5, 9, 30, 8, 20, 6], [False] * 3 + [True] * 3),
    Sample([5, 9, 30, 11], [False] * 3 + [True]),
    Sample([7, 60, 61, 62, 2], [False] + [True] * 4),
]


def loaded(models: tuple[Path, Path]) -> tuple[CausalLM, CausalLM]:
    student, teacher = (CausalLM.load(path, dtype=torch.float64) for path in models)
    return student, teacher


def plain(model: CausalLM, sample: Sample) -> Tensor:
    """Log-probabilities ``[n, V]`` where the sample predicts, by the Hugging Face layers' hidden
    states alone."""
    forest = forest_of([sample])
    from tunesmith.models.attention import ForestAttention

    hidden = model.hidden(forest.token_ids, forest.position_ids, ForestAttention(forest))[
        forest.source
    ]
    return model.head(hidden).log_softmax(-1)


def test_a_teacher_in_host_memory_says_the_same_and_is_gone_afterwards(
    models: tuple[Path, Path],
) -> None:
    student, teacher = loaded(models)
    for parameter in teacher.module.parameters():  # memory of a file cannot be given back
        parameter.data = parameter.data.clone()
    teacher.runner.bind()
    predict = partial(predict_with_teacher, student, forest_of(SEQUENCES), teacher=teacher, top_k=7)
    expected = predict()
    weights = HostWeights.of(teacher.module)
    for _ in range(2):
        found = predict(weights=weights.here)
        assert sum(p.untyped_storage().nbytes() for p in teacher.module.parameters()) == 0
        assert found.divergence is not None and expected.divergence is not None
        assert found.divergence.equal(expected.divergence)


def test_a_student_is_compared_with_its_teacher_token_by_token(models: tuple[Path, Path]) -> None:
    student, teacher = loaded(models)
    predict = partial(predict_with_teacher, teacher=teacher, chunk=2)
    found = predict(student, forest_of(SEQUENCES), top_k=300)
    expected = torch.cat(
        [plain(teacher, s).exp() * (plain(teacher, s) - plain(student, s)) for s in SEQUENCES]
    ).sum(-1)
    assert found.divergence is not None and found.logprobs is not None
    torch.testing.assert_close(found.divergence, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.logprobs, student.predict(forest_of(SEQUENCES)).logprobs)
    few = predict(student, forest_of(SEQUENCES), top_k=5).divergence
    assert few is not None and (few <= expected + 1e-9).all() and (few > 0).all()
    same = predict_with_teacher(teacher, forest_of(SEQUENCES), teacher=teacher, top_k=5).divergence
    torch.testing.assert_close(same, torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9)


def said_of(teacher: CausalLM, top_k: int) -> Batch:
    """The sequences as a batch, with what the teacher says of each prediction."""
    batch = Batch.of(SEQUENCES)
    best = torch.cat([plain(teacher, sample) for sample in SEQUENCES]).topk(top_k)
    batch.add(TEACHER_TOKENS, best.indices.numpy())
    batch.add(TEACHER_LOGPROBS, best.values.detach().numpy())
    weigh(batch, "token_mean")
    return batch


def test_what_a_teacher_said_before_is_compared_as_what_it_says(models: tuple[Path, Path]) -> None:
    student, teacher = loaded(models)
    (forest,) = Packing.of(said_of(teacher, 5), 1000)
    found = predict_with_said(student, forest)
    expected = predict_with_teacher(student, forest, teacher=teacher, top_k=5)
    assert found.divergence is not None and found.logprobs is not None
    torch.testing.assert_close(found.divergence, expected.divergence, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.logprobs, expected.logprobs)
    scored = predict_with_said(student, forest_of(SEQUENCES))
    assert scored.divergence is None and scored.logprobs is not None
    torch.testing.assert_close(scored.logprobs, found.logprobs)
    parts = [forest.part(rank, 2) for rank in range(2)]
    tokens = torch.cat([part.columns[TEACHER_TOKENS] for part in parts])
    rows = torch.cat([part.predictions for part in parts])
    assert tokens.equal(forest.columns[TEACHER_TOKENS][rows]), "ranks have those of their part"


@pytest.mark.parametrize("said", [False, True], ids=["computed", "said"])
def test_the_gradient_does_not_depend_on_the_split(models: tuple[Path, Path], said: bool) -> None:
    student, teacher = loaded(models)
    batch = said_of(teacher, 9)
    predict = predict_with_said
    if not said:
        predict = partial(predict_with_teacher, teacher=teacher, top_k=9)

    def gradient(split: list[list[int]]) -> list[Tensor]:
        student.module.zero_grad()
        for indices in split:
            forest = gather(build_forest(batch, indices), batch)
            loss, _ = DistillationObjective(0.7)(forest, predict(student, forest))
            loss.backward()
        return [p.grad.clone() for p in student.module.parameters() if p.grad is not None]

    for a, b in zip(gradient([[0, 1, 2]]), gradient([[2], [1, 0]]), strict=True):
        torch.testing.assert_close(a, b)
    assert all(p.grad is None for p in teacher.module.parameters())


def test_on_policy_each_token_has_its_own_advantage() -> None:
    def advantages(*paid: list[float]) -> list[list[float]]:
        outcomes = [
            Outcome(0, 5.0 * i, len(p), token_rewards=np.array(p)) for i, p in enumerate(paid)
        ]
        return [a.tolist() for a in TokenReward()(outcomes).advantages]

    assert advantages([0.5, -1.0], [-2.5]) == [[1.5, 0.0], [-1.5]], (
        "the rollout's reward does not count"
    )
    assert advantages([0.1, 0.1], [0.1]) == [[0.0, 0.0], [0.0]], "exactly zero"
    assert advantages([0.7]) == [[0.0]]


def on_samples(
    folder: Path, models: tuple[Path, Path], run: str = "run", **changed: Any
) -> list[str]:
    return rl_settings(
        folder, models[0], run, reward__functions=None, teacher__path=str(models[1]), **changed
    )


def on_data(folder: Path, models: tuple[Path, Path], run: str = "sft", **changed: Any) -> list[str]:
    changed = {"teacher__path": str(models[1]), "distill__mode": "offline", **changed}
    return sft_settings(folder, models[0], run, **changed)


def lines_of(outcome: assembly.RunResult) -> list[dict[str, Any]]:
    return [line for line in untimed(outcome.run_dir / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_policy", "sampled"])
def test_a_run_on_the_students_samples(
    tmp_path: Path, taught: tuple[Path, Path], mode: str
) -> None:
    settings = {"train__steps": 12, "rollout__group_size": 16, "lora__rank": 8}
    outcome = assembly.run_distill(
        None, on_samples(tmp_path, taught, distill__mode=mode, **settings)
    )
    lines = lines_of(outcome)
    assert (
        lines[-1]["teacher_kl"] < 0.9 * lines[0]["teacher_kl"]
        and "reward" not in lines[0]
        and lines[0]["rollouts"] == 64
    )
    assert "ref_kl" not in lines[0]


@pytest.mark.more
def test_a_run_on_given_answers_evaluates_and_resumes(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    sft_settings(tmp_path, models[0])
    data = str(tmp_path / "examples.jsonl")
    settings = {
        "data__eval": data,
        "train__steps": 4,
        "checkpoint__every": 2,
        "distill__alpha": 1.0,
    }
    outcome = assembly.run_distill(None, on_data(tmp_path, models, **settings))
    first = outcome.evaluations[0]
    last = outcome.evaluations[-1]
    assert (
        last["eval/teacher_kl"] < first["eval/teacher_kl"]
        and first["eval/loss"] == first["eval/teacher_kl"]
    )
    assembly.run_distill(None, on_data(tmp_path, models, "half", **{**settings, "train__steps": 2}))
    again = assembly.run_distill(
        None, on_data(tmp_path, models, "half", **settings, checkpoint__resume=True)
    )
    same_tensors(outcome.checkpoint.parent, again.checkpoint.parent)


@pytest.mark.parametrize(
    ("make", "changed", "words"),
    [
        (
            on_samples,
            {"distill__alpha": 0.5},
            'distill.alpha has no effect with mode = "on_policy"',
        ),
        (on_samples, {"distill__top_k": 5}, "distill.top_k has no effect"),
        (on_samples, {"algorithm__name": "grpo"}, "does not use the teacher"),
        (on_samples, {"algorithm__kl": "none"}, "learns from the KL to the teacher in the reward"),
        (on_samples, {"algorithm__kl__target": 0.1}, "would adapt the weight of the teacher"),
        (
            on_samples,
            {"distill__mode": "sampled", "algorithm__entropy_coef": 0.1},
            "entropy_coef has no effect",
        ),
        (on_samples, {"algorithm__dynamic_filter": True}, "no prompt would be kept"),
        (on_samples, {"distill__mode": "offpolicy"}, "'on_policy', 'sampled', 'offline'"),
        (on_data, {"distill__alpha": 0}, "ignores the teacher"),
        (on_data, {"teacher__path": "./nowhere"}, "does not exist"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    tmp_path: Path, models: tuple[Path, Path], make: Any, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        assembly.run_distill(None, make(tmp_path, models, **changed))
    assert words in str(caught.value)


def test_the_preset_needs_the_command(tmp_path: Path, models: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"learns from a teacher: train with tunesmith distill"):
        assembly.run_rl(None, rl_settings(tmp_path, models[0], algorithm__name="distill"))


def test_a_teacher_with_other_tokens_is_refused_by_what_differs(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    other = save_model(tmp_path / "other")
    longer = tokenizer()
    longer.add_tokens(["<think>"])
    longer.save_pretrained(other)
    with pytest.raises(
        ModelError, match=r"other tokens .*: 261 and 262; only the teacher has '<think>'"
    ):
        assembly.run_distill(None, on_data(tmp_path, (models[0], other)))

    class Renumbered:
        def get_vocab(self) -> dict[str, int]:
            return {**tokenizer().get_vocab(), "<bos>": 2, "<eos>": 1}

    with pytest.raises(ModelError, match="'<bos>' has number 2 in the teacher and 1"):
        check_same_vocabulary(tokenizer(), Renumbered(), ("a", "b"))  # pyright: ignore[reportArgumentType]
