"""A reference in host memory: the same scores bit by bit, what it costs, when it is derived."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import training
from tests.support.fake_runs import phases_of
from tests.support.planned_memory import A100, GB, QWEN_7B, SMALL, on, refusal, resolved
from tests.support.tiny import save_model
from tunesmith.config.commands import DPOConfig, OfflineDistillConfig
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import ModuleRunner
from tunesmith.models.parallel.host_weights import HostWeights
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import LIMIT
from tunesmith.plan.cost.price import LIBRARIES, PINNED, price
from tunesmith.plan.cost.seconds import OF_THE_HOST, TO_THE_HOST
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sampling


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", "qwen3", tie_word_embeddings=True)


def backend_of(path: Path, kind: str, *, away: bool) -> TorchBackend[CausalLM]:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model, reference = (CausalLM.load(path, dtype=dtype) for _ in range(2))
    if kind == "hugging face":
        for each in (model, reference):
            each.runner = ModuleRunner(each.module.base_model)
    for parameter in reference.module.parameters():  # memory of a file cannot be given back
        parameter.data = parameter.data.clone()
    reference.runner.bind()
    settings = training.AdamWSettings()
    return TorchBackend(
        model, settings, CausalLM.predict, reference=reference, offload_reference=away
    )


def held(backend: TorchBackend[CausalLM]) -> int:
    assert backend.reference is not None
    return sum(p.untyped_storage().nbytes() for p in backend.reference.model.module.parameters())


@pytest.mark.parametrize("kind", ["lean", "hugging face", "bfloat16"])
@pytest.mark.more
def test_scores_are_the_same_and_the_weights_are_gone_afterwards(
    path: Path, tmp_path: Path, kind: str
) -> None:
    here, there = (backend_of(path, kind, away=flag) for flag in (False, True))
    batch = Packing.of(training.weighed(training.samples_of()), 60)

    def same() -> None:
        ours, theirs = (backend.score(batch, reference=True) for backend in (here, there))
        assert np.array_equal(ours, theirs) and held(there) == 0 < held(here)

    same(), same()
    for backend in (here, there):
        backend.forward_backward(batch, SFTObjective())
        backend.step(1e-2)
    before = here.score(batch, reference=True)
    for backend in (here, there):
        backend.refresh_reference()
    same()
    assert not np.array_equal(before, here.score(batch, reference=True))
    assert np.array_equal(there.score(batch), there.score(batch, reference=True))
    there.save(tmp_path)
    continued = backend_of(path, kind, away=True)
    continued.load(tmp_path)
    assert np.array_equal(continued.score(batch, reference=True), here.score(batch, reference=True))


def test_the_joint_products_are_used_when_the_weights_are_back(path: Path) -> None:
    there = backend_of(path, "lean", away=True)
    assert there.reference is not None and there.reference.model.lean is not None
    with there.reference.here():
        assert there.reference.model.lean.prepares and there.reference.model.lean.bound()


def test_weights_do_not_stay_where_not_all_came(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = backend_of(path, "lean", away=True)
    monkeypatch.setattr(Tensor, "copy_", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        there.score(Packing.of(training.weighed(training.samples_of()), 60), reference=True)
    assert held(there) == 0


async def test_an_engine_gives_its_weights_away_at_level_two_and_takes_new_ones(path: Path) -> None:
    model = CausalLM.load(path)
    for parameter in model.module.parameters():  # memory of a file cannot be given back
        parameter.data = parameter.data.clone()
    state = model.module.state_dict()
    sent = {name: tensor.clone() for name, tensor in state.items()}

    def update() -> None:
        for name, tensor in sent.items():
            state[name].copy_(tensor)

    def held() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in state.values())

    weights = HostWeights(state.values(), kept=False)
    sizes: dict[str, Any] = {"kv_bytes": 10**7, "max_running": 4, "max_prefill_tokens": 512}
    engine = LocalEngine(model, **sizes, update=update, weights=weights)
    sampling = Sampling(8, temperature=0.0, ignore_eos=True)
    whole = held()
    before = await engine.generate([1, 2, 3], sampling)
    for level, left in ((1, whole), (2, 0)):
        await engine.sleep(level)
        assert held() == left
        await engine.load_weights(level)
        assert held() == whole
        await engine.wake()
        assert (await engine.generate([1, 2, 3], sampling)).token_ids == before.token_ids
    await engine.close()


def test_engines_keep_the_base_of_an_adapter_while_the_policy_trains() -> None:
    n = SMALL.parameters or 0
    away, kept = (
        price(SMALL, Layout(2, lora_rank=8, engines=1, turns=True, keeps_base=flag))
        for flag in (False, True)
    )
    assert kept.training == away.training + 2 * n and kept.sampling == away.sampling


def test_its_price_by_hand() -> None:
    n = SMALL.parameters or 0
    away, here = (
        price(SMALL, Layout(2, tokens=10, references=1, offload_frozen=flag))
        for flag in (True, False)
    )
    assert (away.frozen, away.scorer, away.host) == (0, 2 * n, int(PINNED * 2 * n))
    assert (here.frozen, here.scorer) == (2 * n, 0)
    assert away.training == here.training - 2 * n
    assert away.scoring == away.weights + away.optimizer + 2 * n


def test_the_price_of_what_judges_and_teaches_by_hand() -> None:
    """Reward models are there while it samples, a teacher while it scores, with gradients in a
    micro-batch."""
    n = SMALL.parameters or 0
    shape = Layout(2, tokens=10, frozen_parameters=n, checkpointing=1)
    here = price(SMALL, shape)
    away = price(SMALL, replace(shape, offload_frozen=True))
    assert (away.frozen, away.judge, away.scorer, away.host) == (0, 2 * n, 0, int(PINNED * 2 * n))
    assert (away.training, away.sampling) == (here.training - 2 * n, here.sampling)
    for stage in (0, 3):
        teacher = replace(
            shape, offload_frozen=True, teaches="microbatch", zero_stage=stage, shards=2
        )
        own = price(SMALL, teacher)
        before = price(SMALL, replace(teacher, teaches="batch"))
        assert (own.frozen, own.judge, own.scorer, own.host) == (0, 0, 2 * n, int(PINNED * 2 * n))
        assert before.scoring == own.scoring + 2 * n and before.teaching == 0
        assert own.teaching == own.training - own.activations + 2 * n


@pytest.mark.slow
def test_a_step_on_a_fake_device(tmp_path: Path) -> None:
    """The reference is there while it scores only; no micro-batch waits for it."""
    phases = phases_of(tmp_path, "dpo", "system.offload_reference=true")
    assert max(phases["train"].waits.values()) <= 2
    assert phases["train"].peak.get("frozen models", 0) == 0


ROOM = LIMIT * 79 * GB - LIBRARIES
"""What a run may use of the GPU, beside CUDA."""


@pytest.mark.parametrize(("n", "reference_goes"), [(3_800_000_000, True), (7_615_616_512, False)])
def test_a_reference_goes_where_the_optimizer_can_stay(n: int, reference_goes: bool) -> None:
    """By hand: a trained parameter takes 2 bytes of weight, 4 of gradient and 12 of optimizer, and
    2 of reference.

    The optimizer of 7B has to go, and then the reference has room.
    """
    assert 20 * n > ROOM > (18 if reference_goes else 4) * n and (18 * n < ROOM) == reference_goes
    system = resolved(DPOConfig, on(A100, replace(QWEN_7B, parameters=n), memory=512 * GB)).settings
    assert (system["system.offload_reference"], system["system.offload_optimizer"]) == (
        reference_goes,
        not reference_goes,
    )


@pytest.mark.parametrize(("batch", "reward_model_goes"), [(64, False), (8, True)])
def test_what_takes_less_time_goes(batch: int, reward_model_goes: bool) -> None:
    """By hand: a large reward model comes once per step, for which the optimizer makes room and
    returns.

    An optimizer in host memory reads and writes 28 bytes per parameter there in each of its steps,
    and 6 pass the bus.
    """
    n = 2 * GB
    frozen = 25 * GB
    assert 18 * n + 2 * frozen > ROOM > max(18 * n, 2 * n + 2 * frozen)
    coming = (2 * frozen + 2 * 12 * n) / TO_THE_HOST
    steps = 64 // batch * (28 * n / OF_THE_HOST + 6 * n / TO_THE_HOST)
    assert (coming < steps) == reward_model_goes
    said = [
        "algorithm.kl=none",
        "rollout.prompts_per_step=8",
        "rollout.group_size=8",
        f"train.batch_size={batch}",
    ]
    facts = on(
        A100, replace(QWEN_7B, layers=4, parameters=n), memory=512 * GB, frozen_parameters=frozen
    )
    system = resolved(RLConfig, facts, 'reward.models=[{path="org/rm"}]', *said).settings
    assert (system["system.offload_reference"], system["system.offload_optimizer"]) == (
        reward_model_goes,
        not reward_model_goes,
    )


def test_it_is_derived_where_the_gpu_is_short() -> None:
    key = "system.offload_reference"
    host = 512 * GB
    large = on(A100, QWEN_7B, memory=host)
    assert (
        resolved(DPOConfig, large, "dpo.precompute_reference=true").settings[
            "system.offload_reference"
        ]
        is False
    )
    assert resolved(SFTConfig, large).settings["system.offload_reference"] is False
    assert resolved(DPOConfig, on(A100, SMALL)).settings["system.offload_reference"] is False
    assert resolved(DPOConfig, large, "lora.rank=16").settings["system.offload_reference"] is False
    model = 'reward.models=[{path="org/rm"}]'
    assert resolved(RLConfig, on(A100, SMALL), model).settings["system.offload_reference"] is False
    for length, away in ((1000, False), (30_000, True)):
        taught = on(A100, QWEN_7B, memory=host, frozen_parameters=26 * GB, longest=length)
        assert (
            resolved(OfflineDistillConfig, taught, "lora.rank=16").settings[
                "system.offload_reference"
            ]
            is away
        )
    said: list[tuple[Any, Any, list[str], str]] = [
        (DPOConfig, on(None, SMALL), [], "GPUs"),
        (SFTConfig, on(A100, SMALL), [], "no reference"),
        (RLConfig, on(A100, SMALL), ["algorithm.kl=none"], "no reference"),
        (DPOConfig, on(A100, SMALL), ["lora.rank=4"], "no reference"),
    ]
    for kind, facts, more, word in said:
        text = refusal(kind, facts, f"{key}=true", *more)
        assert key in text and word in text
