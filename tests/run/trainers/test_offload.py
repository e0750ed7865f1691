"""What is kept in host memory: bitwise the same results, where it is, what it costs, when it is
derived and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import training
from tests.support.planned_memory import A100, LLAMA_70B, QWEN_7B, SMALL, on, refusal, resolved
from tests.support.tiny import save_model
from tunesmith.config.load import load_config
from tunesmith.config.schema import LoraSection, RLConfig, SFTConfig
from tunesmith.errors import CapacityError, DeviceMemoryError
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.host_memory import packed
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import LIMIT, planned_devices
from tunesmith.plan.cost.price import PINNED, price
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve
from tunesmith.run.trainers import optimizer
from tunesmith.run.trainers.optimizer import AdamWSettings, MasterOptimizer
from tunesmith.run.trainers.torch import TorchBackend

pytestmark = pytest.mark.usefixtures("sums_of_pytorch")

GB = 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("offload") / "model", "qwen3")


def packing(max_tokens: int = 40) -> Packing:
    return Packing.of(training.weighed(training.samples_of()), max_tokens)


def backend_of(
    path: Path, *, offload: bool, dtype: torch.dtype, lora: bool = False, head: bool = False
) -> Any:
    loaded = CausalLM.load(path, dtype=dtype)
    if lora:
        torch.manual_seed(0)
        adapters.attach(loaded, LoraSection(rank=4, alpha=8.0, targets="all-linear"))
    settings = AdamWSettings(0.1, max_grad_norm=0.5, offload=offload)
    value_head = nn.Linear(32, 1, bias=False) if head else None
    if value_head is not None:
        nn.init.ones_(value_head.weight)
    return TorchBackend(loaded, settings, CausalLM.predict, value_head=value_head, ema_decay=0.9)


def stepped(backend: Any, batches: int, start: int = 0) -> list[float]:
    norms: list[float] = []
    for step in range(start, start + batches):
        backend.forward_backward(
            Packing.of(training.weighed(training.samples_of(step)), 40), SFTObjective()
        )
        norms.append(backend.step(1e-2)["grad_norm"])
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora", "value head"])
def test_the_optimizer_in_host_memory_takes_the_same_steps_and_continues(
    model: Path, tmp_path: Path, kind: str
) -> None:
    """Bit by bit, over several micro-batches, with clipping, decay and an average; through a
    checkpoint either way."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "lora": kind == "lora", "head": kind == "value head"}
    here, there = (backend_of(model, offload=flag, **options) for flag in (False, True))
    assert stepped(here, 2) == stepped(there, 2)
    there.save(tmp_path)
    expected = stepped(here, 2, 2)
    assert stepped(there, 2, 2) == expected
    for flag in (False, True):
        continued = backend_of(model, offload=flag, **options)
        continued.load(tmp_path)
        assert stepped(continued, 2, 2) == expected
    ours = here.model.module.state_dict()
    theirs = there.model.module.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert all(
        here.optimizer.average[name].equal(average)
        for name, average in there.optimizer.average.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_but_the_weights_is_in_host_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter is on the meta device, in the place of a GPU, where a step would have no
    numbers."""
    monkeypatch.setattr(
        optimizer, "host_copies", lambda rows, **_: [torch.ones(t.shape) for t in rows]
    )
    there = nn.Parameter(torch.empty(4, 3, dtype=dtype, device="meta"))
    module = nn.Module()
    module.register_parameter("matrix", there)
    made = MasterOptimizer(module, AdamWSettings(offload=True))
    master = made.masters["matrix"]
    master.grad = torch.full((4, 3), 0.5)
    made.step(0.1)
    assert master.device.type == "cpu" and master.dtype == torch.float32
    assert {t.device.type for t in made.slot("matrix").values()} == {"cpu"}
    torch.testing.assert_close(
        master.detach(), torch.full((4, 3), 0.9)
    )  # AdamW's first step is lr · sign(g)


def test_gradients_of_a_pass_that_failed_are_dropped(model: Path) -> None:
    here, there = (backend_of(model, offload=flag, dtype=torch.bfloat16) for flag in (False, True))

    def fail(_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    handle = next(there.model.module.parameters()).register_hook(
        fail
    )  # the embedding's: the last one
    with pytest.raises(DeviceMemoryError):
        there.forward_backward(packing(), SFTObjective())
    handle.remove()
    assert stepped(here, 1) == stepped(there, 1)


def test_hybrid_leaves_what_is_in_host_memory_where_it_is(model: Path) -> None:
    there = backend_of(model, offload=True, dtype=torch.bfloat16)
    stepped(there, 1)
    before = {
        name: t.data_ptr()
        for name, t in {**there.optimizer.state(), **there.optimizer.average}.items()
    }
    there.offload(), there.reload()
    assert {
        name: t.data_ptr()
        for name, t in {**there.optimizer.state(), **there.optimizer.average}.items()
    } == before


def test_pinned_memory_is_taken_in_powers_of_two_with_little_lost() -> None:
    """Of 7B, whose matrices take nearly twice their size one by one, of a rank's rows, and of
    nothing."""
    layer = [3584 * 3584, 3584 * 512, 3584 * 512, 3584 * 3584, 3584, 3584, *[18944 * 3584] * 3]
    numbers = [152064 * 3584, *28 * layer, 152064 * 3584]
    for sizes in ([4 * n for n in numbers], [n // 4 for n in numbers], [4 * 1000, 0, 4], []):
        places, pieces = packed(sizes)
        assert all(size.bit_count() == 1 for size in pieces)
        ends = [0] * len(pieces)
        for (piece, start), size in sorted(zip(places, sizes, strict=True)):
            assert start % 64 == 0 and start >= ends[piece], "nothing overlaps"
            ends[piece] = start + size
        assert all(end <= size for end, size in zip(ends, pieces, strict=True))
        if len(sizes) > 3:
            assert sum(pieces) <= PINNED * sum(sizes)


def resolve_sft(facts: Facts, *said: str) -> Plan[SFTConfig]:
    return resolve(
        load_config(SFTConfig, None, ["model.path=org/m", "data.train=org/d", *said]), facts
    )


def test_its_price_by_hand() -> None:
    n = SMALL.parameters or 0
    embedding = 4096 * 256
    for size in (2, 4):
        of, here = (
            price(SMALL, Layout(size, offload=flag, ema=True, models=2)) for flag in (True, False)
        )
        on_the_way = size * (embedding + 3 * 256 * SMALL.intermediate_size)
        assert (of.weights, of.gradients, of.optimizer) == (2 * size * n, 0, 0)
        assert of.host == 2 * (20 * n + int((PINNED - 1) * 4 * n) + 2 * on_the_way)
        assert here.head + size * embedding <= of.head <= here.head + on_the_way
    sharded, plain = (
        price(SMALL, Layout(2, zero_stage=3, shards=4, offload=flag)) for flag in (True, False)
    )
    rows = n // 4
    sent = 2 * 4 * (embedding + 3 * 256 * SMALL.intermediate_size) // 4
    assert (sharded.optimizer, sharded.host, plain.host) == (
        0,
        16 * rows + int((PINNED - 1) * 4 * rows) + sent,
        0,
    )
    assert sharded.weights == plain.weights and (sharded.gradients, plain.gradients) == (
        0,
        4 * (n // 4),
    )
    summed = price(SMALL, Layout(2, zero_stage=1, shards=4, offload=True))
    assert summed.gradients == 4 * n  # until the last micro-batch


def test_70b_is_trained_on_eight_gpus_of_80gb_with_it() -> None:
    """As torchtune's full_finetune_distributed recipe of it does: weights and gradients pass,
    float32 rows stay."""
    facts = replace(on(A100, LLAMA_70B, memory=2000 * GB), longest=2048)
    eight = replace(facts, hardware=replace(facts.hardware, gpus=facts.hardware.gpus * 8))
    config = resolved(SFTConfig, eight)
    assert (
        config.settings["system.trainer_ranks"],
        config.settings["system.zero_stage"],
        config.settings["system.offload_optimizer"],
    ) == (8, 3, True)
    assert "32 such GPUs" in refusal(
        SFTConfig, replace(eight, hardware=replace(eight.hardware, memory_available=GB))
    )


def test_it_is_derived_where_a_gpu_needs_it_and_the_host_has_room() -> None:
    big = on(A100, QWEN_7B, memory=512 * GB)
    small = on(A100, QWEN_7B, memory=64 * GB)
    assert resolved(SFTConfig, big).settings["system.offload_optimizer"] is True
    assert resolved(RLConfig, big, "algorithm.kl=none").settings["system.offload_optimizer"] is True
    assert resolved(SFTConfig, big, "lora.rank=16").settings["system.offload_optimizer"] is False
    assert resolved(SFTConfig, on(None, SMALL)).settings["system.offload_optimizer"] is False
    assert "lora.rank" in refusal(SFTConfig, small)
    assert "system.offload_optimizer = true" in refusal(
        SFTConfig, big, "system.offload_optimizer=false"
    )
    assert "128GB of host memory" in refusal(SFTConfig, small, "system.offload_optimizer=true")
    assert "lora.rank" in refusal(
        SFTConfig, on(A100, LLAMA_70B, memory=4000 * GB), "model.quantize=nf4"
    )


def test_it_is_derived_only_for_a_run_that_does_not_fit_without_it() -> None:
    """Nothing above the limit is chosen: if the host has too little memory, the run is refused."""
    host = 512 * GB
    config = resolved(SFTConfig, on(replace(A100, memory_free=400 * GB), QWEN_7B, memory=host))
    whole = config.with_memory(checkpointing=True)
    peak = planned_devices(whole, least=True)[0][1].peak
    roomy = replace(A100, memory_total=200 * GB, memory_free=int(1.01 * peak / LIMIT))
    short = replace(roomy, memory_free=int(0.99 * peak / LIMIT))
    on_the_gpu = resolve_sft(on(roomy, QWEN_7B, memory=8 * GB)).settings
    assert on_the_gpu["system.offload_optimizer"] is False
    on_the_host = resolve_sft(on(short, QWEN_7B, memory=host))
    assert on_the_host.settings["system.offload_optimizer"] and not on_the_host.notes
    with pytest.raises(CapacityError):
        resolve_sft(on(short, QWEN_7B, memory=8 * GB))


def test_the_ranks_of_a_machine_share_its_memory_and_leave_some() -> None:
    said = ("system.offload_optimizer=true", "system.offload_activations=false", "train.steps=1")
    config = resolved(SFTConfig, on(A100, QWEN_7B, memory=512 * GB), *said)
    kept = planned_devices(config, least=True)[0][1].host
    assert "128GB" in refusal(SFTConfig, on(A100, QWEN_7B, memory=int(1.02 * kept)), *said)
    assert resolved(SFTConfig, on(A100, QWEN_7B, memory=int(1.06 * kept)), *said).settings[
        "system.offload_optimizer"
    ]
    ray = (
        "system.cluster=ray",
        "system.placement.actor.gpus=1",
        "system.placement.rollout.gpus=1",
        "algorithm.kl=none",
    )
    head = on(A100, QWEN_7B, memory=32 * GB)
    assert resolved(RLConfig, head, *ray, *said[:1], "system.trainer_ranks=8").settings[
        "system.offload_optimizer"
    ]


def test_the_reason_is_given() -> None:
    found = resolve_sft(on(A100, QWEN_7B, memory=512 * GB), "system.offload_activations=false")
    [derived] = [d for d in found.reasons if d.key == "system.offload_optimizer"]
    assert derived.value is True and "128GB" in derived.reason


@pytest.mark.parametrize(
    ("facts", "said", "word"),
    [
        (on(None, SMALL), ["system.offload_optimizer=true"], "GPUs"),
        (on(A100, SMALL), ["system.offload_optimizer=true", "train.optimizer=muon"], "Muon"),
    ],
)
def test_what_makes_no_sense_is_refused(facts: Any, said: list[str], word: str) -> None:
    text = refusal(SFTConfig, facts, *said)
    assert "system.offload_optimizer" in text and word in text
