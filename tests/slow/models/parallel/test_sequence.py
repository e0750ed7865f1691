"""Ranks that share the tokens of each micro-batch compute what one rank computes, and keep their
part of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from tests.support import training
from tests.support.families import SPECIAL, settings_of
from tests.support.sequence_ranks import SequenceRanks, gradients
from tests.support.tiny import save_model
from tunesmith.config.schema import LoraSection
from tunesmith.errors import DeviceMemoryError, ModelError
from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.losses import GSPO, PPO
from tunesmith.learn.algorithms.objective import (
    ActorCriticObjective,
    Objective,
    PolicyObjective,
    SFTObjective,
)
from tunesmith.learn.algorithms.preference import AGGREGATION, DPOObjective, RewardObjective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing, build_forest
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import ModuleRunner, text_decoder
from tunesmith.models.parallel.lock_step import LockStep
from tunesmith.models.parallel.ring import check_ring
from tunesmith.models.parallel.sequence import SequenceGroup, SequenceKind
from tunesmith.models.score_model import ScoreModel, whole_sequence
from tunesmith.plan.facts.families import published
from tunesmith.plan.facts.model import facts_of
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

KINDS = pytest.mark.parametrize("kind", ["ulysses", "ring"])
Make = Callable[[SequenceGroup | None], TorchBackend[Any]]


def test_a_part_has_every_second_token_and_the_predictions_from_them() -> None:
    batch = Batch.of(
        [Sample([5, 6, 7, 2], [False, False, True, True]), Sample([5, 6, 8], [False, False, True])]
    )
    forest = build_forest(batch)
    parts = [forest.part(rank, 2) for rank in (0, 1)]
    assert [p.token_ids.tolist() for p in parts] == [[5, 7, 8], [6, 2, 0]]
    assert [p.position_ids.tolist() for p in parts] == [[0, 2, 2], [1, 3, 0]]
    assert [p.source.tolist() for p in parts] == [[1], [0, 0]]
    assert [p.targets.tolist() for p in parts] == [[2], [7, 8]]
    assert [p.predictions.tolist() for p in parts] == [[1], [0, 2]]
    assert all(p.segments == (*forest.segments, (5, 1, -1)) for p in parts)
    whole = build_forest(batch, [0]).part(1, 2)
    assert whole.segments == build_forest(batch, [0]).segments and whole.token_ids.tolist() == [
        6,
        2,
    ]


@dataclass(frozen=True)
class Case:
    """What is trained, on which batch, towards what."""

    objective: Objective
    batch: Callable[[], Batch]
    kind: type[CausalLM] | type[ScoreModel] = CausalLM
    lora: LoraSection | None = None
    shared_trunk: bool = False
    keep_groups: bool = False

    def backend(
        self,
        path: Path,
        sequence: SequenceGroup | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> TorchBackend[Any]:
        model: Any = self.kind.load(path, dtype=dtype)
        model.sequence = sequence
        torch.manual_seed(1)
        predict: Any = self.kind.predict
        head = None
        if self.kind is ScoreModel:
            nn.init.normal_(model.head.weight, std=0.1)
        if self.lora is not None:
            adapters.attach(model, self.lora)
            for (
                name,
                weight,
            ) in model.adapter.own_weights():  # B is 0 at first, and A would have no gradient
                nn.init.normal_(weight, std=0.05) if "lora_B" in name else None
        if self.shared_trunk:
            head = nn.Linear(model.head.in_features, 1, bias=False, dtype=dtype)
            predict = partial(CausalLM.predict, value_head=head, entropy=True, temperature=0.7)
        settings = AdamWSettings(weight_decay=0.1, max_grad_norm=0.5)
        return TorchBackend(model, settings, predict, value_head=head, **options)


def policy_batch() -> Batch:
    """Shared prompts and uneven samples."""
    batch = training.weighed(training.samples_of())
    draw = np.random.default_rng(0)
    for name in ("old_logprobs", "advantages", "returns", "old_values"):
        batch.add(name, draw.normal(size=batch.num_predictions) - 5.0 * (name == "old_logprobs"))
    return batch


def pairs(*, scored: bool = False) -> Batch:
    samples = training.samples_of(groups=5, size=2)
    if scored:
        samples = [replace(whole_sequence(s.token_ids), group=s.group) for s in samples]
    batch = Batch.of(samples)
    batch.add_per_sample("side", [1.0, -1.0] * 5)
    batch.add_per_sample("reference", np.linspace(-60.0, -20.0, 10))
    batch.add_per_sample("margin", np.linspace(0.0, 1.0, 10))
    weigh(batch, AGGREGATION)
    return batch


CASES = {
    "sft": Case(SFTObjective(), policy_batch),
    "gspo": Case(PolicyObjective(GSPO()), policy_batch),
    "lora": Case(SFTObjective(), policy_batch, lora=LoraSection(rank=4)),
    "dpo": Case(DPOObjective("sigmoid", 0.1, nll_coef=0.5), pairs, keep_groups=True),
    "rm": Case(RewardObjective(), partial(pairs, scored=True), ScoreModel, keep_groups=True),
    "critic": Case(
        ActorCriticObjective(PolicyObjective(PPO(), entropy_coef=0.1), 0.2, 0.5),
        policy_batch,
        shared_trunk=True,
    ),
}


def same_steps(
    make: Make,
    packing: Packing,
    objective: Objective,
    *,
    size: int,
    world: int | None = None,
    kind: SequenceKind = "ulysses",
    bound: float = 1e-5,
) -> None:
    """Loss, metrics, gradient, and the weights after two optimizer steps."""
    one = make(None)
    ranks = SequenceRanks(make, size, world, kind)
    for step in range(2):
        expected = one.forward_backward(packing, objective)
        found, grads = ranks.gradient(packing, objective)
        assert found == pytest.approx(expected, rel=bound, abs=bound)
        if not step:
            assert training.difference(grads, gradients(one)) < bound
        assert ranks.step(1e-2)["grad_norm"] == pytest.approx(
            one.step(1e-2)["grad_norm"], rel=bound
        )
    weights = [b.optimizer.parameters for b in (*ranks.backends, one)]
    for name, weight in weights[0].items():
        assert all(other[name].equal(weight) for other in weights[:-1]), name
        # AdamW may move a weight whose gradient is near 0 by more than its rounding.
        assert float((weight - weights[-1][name]).detach().abs().mean()) < bound, name


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(
            case, kind, marks=() if kind == ("ulysses", "ring")[n % 2] else pytest.mark.slow
        )
        for n, case in enumerate(CASES)
        for kind in ("ulysses", "ring")
    ],
)
def test_two_ranks_take_the_steps_of_one(model: Path, case: str, kind: SequenceKind) -> None:
    what = CASES[case]
    packing = Packing.of(what.batch(), 60, keep_groups=what.keep_groups)
    assert len(packing) > 1
    same_steps(partial(what.backend, model), packing, what.objective, size=2, kind=kind)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "sinks": ("gpt_oss", {**SPECIAL["gpt_oss"], "layer_types": ["full_attention"] * 2}),
    "latent keys and values": ("deepseek_v3", SPECIAL["deepseek_v3"]),
    "chunks": ("llama4_text", SPECIAL["llama4_text"]),
    "windows and soft caps": ("gemma2", {"sliding_window": 6, "head_dim": 8}),
    "frequencies by length": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "factor": 8.0,
                "original_max_position_embeddings": 12,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0, 5.0, 7.0, 9.0],
            }
        },
    ),
}


FEW = {
    ("llama", "ulysses", True),
    ("windows and soft caps", "ulysses", False),
    ("frequencies by length", "ring", False),
}


@pytest.mark.parametrize(
    ("family", "kind", "hugging_face"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for family, kind in [
            *product(FAMILIES, ["ulysses"]),
            ("llama", "ring"),
            ("sinks", "ring"),
            ("frequencies by length", "ring"),
        ]
        for case in ((family, kind, False), (family, kind, True))
    ],
)
def test_four_ranks_share_four_heads(
    tmp_path: Path, family: str, kind: SequenceKind, hugging_face: bool
) -> None:
    """There are two key/value heads, which Ulysses repeats.

    Micro-batches of odd sizes, one of fewer tokens than ranks."""
    path = save_model(tmp_path / "model", FAMILIES[family][0], **FAMILIES[family][1])
    samples = [*training.samples_of(), Sample([7, 8, 9], [False, False, True])]
    batch = training.weighed(samples)
    forests = [build_forest(batch, part) for part in ([*range(6)], [*range(6, 12)], [12])]
    assert {forest.num_tokens % 4 for forest in forests} - {0} and forests[-1].num_tokens < 4

    def make(sequence: SequenceGroup | None) -> TorchBackend[Any]:
        backend = CASES["sft"].backend(path, sequence)
        if hugging_face:
            backend.model.runner = ModuleRunner(text_decoder(backend.model.module))
        return backend

    same_steps(
        make,
        Packing(tuple(forests), batch.num_predictions, batch),
        SFTObjective(),
        size=4,
        kind=kind,
    )


@KINDS
def test_two_groups_share_the_micro_batches(model: Path, kind: SequenceKind) -> None:
    """Three of them, so that one group computes padding; one of two layers is computed again in the
    backward pass."""
    packing = Packing.of(policy_batch(), 60)
    assert len(packing) == 3
    same_steps(
        partial(CASES["gspo"].backend, model, gradient_checkpointing=0.5),
        packing,
        CASES["gspo"].objective,
        size=2,
        world=4,
        kind=kind,
    )


@KINDS
def test_products_alone_are_kept(model: Path, kind: SequenceKind) -> None:
    packing = Packing.of(policy_batch(), 60)
    make = partial(CASES["gspo"].backend, model, gradient_checkpointing="selective")
    same_steps(make, packing, CASES["gspo"].objective, size=2, kind=kind)


@KINDS
def test_in_float64_they_agree_to_ten_digits(model: Path, kind: SequenceKind) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        make = partial(CASES["critic"].backend, model, dtype=torch.float64)
        same_steps(
            make,
            Packing.of(policy_batch(), 60),
            CASES["critic"].objective,
            size=2,
            kind=kind,
            bound=1e-10,
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_after_the_last_tokens_and_of_the_reference(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)

    def make(sequence: SequenceGroup | None) -> TorchBackend[CausalLM]:
        reference = CausalLM.load(other)
        reference.sequence = sequence
        return CASES["sft"].backend(model, sequence, reference=reference)

    one = make(None)
    ranks = SequenceRanks(make, 2, 4)
    packing = Packing.of(policy_batch(), 40)
    assert ranks.score(packing.with_ends()) == pytest.approx(
        one.score(packing.with_ends()), abs=1e-5
    )
    theirs = one.score(packing, reference=True)
    assert ranks.score(packing, reference=True) == pytest.approx(theirs, abs=1e-5)
    assert theirs != pytest.approx(one.score(packing), abs=1e-2)


@KINDS
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_rank_that_runs_out_of_memory_stops_all_and_a_smaller_layout_gives_the_same_gradient(
    model: Path, backward: bool, kind: SequenceKind
) -> None:
    make = partial(CASES["sft"].backend, model)
    objective = SFTObjective()
    large = Packing.of(policy_batch(), 200)
    small = Packing.of(policy_batch(), 40)
    one = make(None)
    ranks = SequenceRanks(make, 2, 4, kind)
    most = max(forest.num_tokens for forest in small.forests)
    with short_of_memory(ranks.backends[1].model, -(-most // 2), backward=backward):
        assert ranks.failures(large, objective) == [True] * 4
        _, found = ranks.gradient(small, objective)
    one.forward_backward(large, objective)
    assert training.difference(found, gradients(one)) < 1e-5


@contextmanager
def short_of_memory(model: CausalLM, most_tokens: int, *, backward: bool) -> Generator[None]:
    """The second layer raises what the CPU's allocator raises, if it sees more tokens."""
    assert model.lean is not None
    layer = model.lean.layers[1]

    def fail(_: Any = None) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def limited(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if len(x) > most_tokens:
            x.register_hook(fail) if backward else fail()
        return layer(x, *args, **options)

    limited.around = layer.around  # type: ignore[attr-defined]
    limited.index = layer.index  # type: ignore[attr-defined]
    model.lean.layers[1] = limited  # type: ignore[assignment]
    yield
    model.lean.layers[1] = layer


@pytest.mark.slow
@KINDS
def test_activations_are_a_part_of_those_of_one_rank(model: Path, kind: SequenceKind) -> None:
    batch = training.weighed(training.samples_of(groups=40))
    packing = Packing.of(batch, 1600)
    assert len(packing) == 1

    one = saved_bytes(CASES["sft"].backend(model), packing)
    for size in (2, 4):
        ranks = SequenceRanks(partial(CASES["sft"].backend, model), size, kind=kind)
        assert max(ranks.shares(packing, saved_bytes)) <= 1.05 * one / size


def saved_bytes(backend: TorchBackend[Any], packing: Packing) -> int:
    """Bytes that autograd keeps of a micro-batch for its backward pass, without parameters."""
    known = {p.untyped_storage().data_ptr() for p in backend.model.module.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # its memory is not used again for another one
        return tensor

    for forest in backend.passes.over(packing):
        sizes.clear()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss, _ = SFTObjective()(forest, backend.passes.predict(forest))
        loss.backward()
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("kind", "family", "settings", "words"),
    [
        (
            "ulysses",
            "llama",
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6},
            "6 attention heads.*4 ranks",
        ),
        ("ring", "gemma2", {}, "windows, chunks and soft caps"),
        ("ring", "mistral", {"sliding_window": 8}, "windows, chunks and soft caps"),
    ],
)
def test_attention_that_ranks_cannot_share(
    kind: SequenceKind, family: str, settings: Any, words: str
) -> None:
    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 4

    config = AutoConfig.for_model(family, **settings)
    with pytest.raises(ModelError, match=words) as error:
        SequenceGroup(Group(), kind).check("org/m", config)
    assert "org/m" in str(error.value) and "system.sequence_parallel" in str(error.value)
    SequenceGroup(Group(), kind).check(
        "org/m", AutoConfig.for_model("qwen2")
    )  # its window is switched off


@pytest.mark.parametrize("family", published())
def test_the_plan_knows_whose_attention_the_ring_cannot_compute(family: str) -> None:
    """Of configurations as transformers writes them, and of those that leave out what follows."""
    config = AutoConfig.for_model(family, **settings_of(family)).get_text_config()
    refused = False
    try:
        check_ring("org/m", config)
    except ModelError:
        refused = True
    written = config.to_dict()
    assert getattr(facts_of(written), "narrow", None) == refused
    if family not in ("laguna", "mellum", "dots1"):  # always published with their layers' kinds
        written.pop("layer_types", None)
        if "num_kv_shared_layers" not in written:
            assert getattr(facts_of(written), "narrow", None) == refused


def test_a_pass_that_failed_is_not_recorded_whatever_failed_before() -> None:
    """What is recorded is what a rank issues later in the place of a failed pass."""
    steps = LockStep(cast(PreTrainedModel, nn.Linear(2, 2)), nullcontext)
    assert steps.begin("train")
    steps.record("train")
    assert not steps.begin("train")
    steps.failure = "no memory"
    assert steps.begin("score")
    steps.record("score")
    assert steps.failure == "no memory" and not steps.begin("score")
    assert steps.begin("evaluate")
    steps.failure = "no memory"
    with pytest.raises(DeviceMemoryError):
        steps.record("evaluate")
    assert steps.begin("evaluate")
