"""Weights of layers in host memory, of a process that trains by itself: bitwise the same results,
what it costs, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.support import training
from tests.support.fake_runs import GIVEN, RL, TINY
from tests.support.fake_runs import resolved as resolved_there
from tests.support.planned_memory import (
    A10G,
    A100,
    LLAMA_70B,
    QWEN_7B,
    SMALL,
    on,
    refusal,
    resolved,
)
from tests.support.sharded_ranks import call_one_by_one, short_of_memory
from tests.support.tiny import save_model
from tunesmith.config.schema import LoraSection, RLConfig, SFTConfig
from tunesmith.errors import ConfigError, DeviceMemoryError
from tunesmith.guide.simulate.dry_run import dry_run
from tunesmith.guide.simulate.threads import FIRST
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.parallel.sharding import (
    Sharding,
    whole_weights,
)
from tunesmith.models.score_model import ScoreModel
from tunesmith.plan.cost.copies import layer_copy
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.price import PINNED, price
from tunesmith.plan.cost.seconds import FLOPS_SHARE, TO_THE_HOST, step_seconds
from tunesmith.plan.facts.machines import gpu_kinds, machine
from tunesmith.run.processes.rank_group import join_group_of_one
from tunesmith.run.specs.planes import published
from tunesmith.run.specs.scorers import SequenceScores
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.passes import Passes
from tunesmith.run.trainers.torch import TorchBackend

pytestmark = pytest.mark.usefixtures("sums_of_pytorch")

LAYERS = 4
GB = 10**9
KEY = "system.offload_parameters"
SMALL_GPU = on(A10G, LLAMA_70B, memory=4000 * GB, longest=64)
EIGHT = replace(SMALL_GPU, hardware=replace(SMALL_GPU.hardware, gpus=SMALL_GPU.hardware.gpus * 8))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights that bfloat16 holds: only a sharded one keeps more than that."""
    folder = tmp_path_factory.mktemp("away") / "model"
    file = save_model(folder, "qwen3", num_hidden_layers=LAYERS) / "model.safetensors"
    rounded = {name: t.bfloat16().float() for name, t in load_file(file).items()}
    save_file(rounded, file, {"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def alone() -> Sharding:
    if not dist.is_initialized():
        join_group_of_one("cpu")
    return Sharding.over("cpu", 3, 1, streams=True)


def backend_of(path: Path, kind: str, *, streams: bool, **options: Any) -> TorchBackend[CausalLM]:
    """A backend that calls linear modules one by one, as a sharded model does."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = CausalLM.load(path, dtype=dtype, sharding=alone() if streams else None)
    if kind == "lora":
        adapters.attach(model, LoraSection(rank=4, alpha=8.0, targets="all-linear"))
    call_one_by_one(model)
    settings = AdamWSettings(0.1, max_grad_norm=0.5, offload=streams and kind != "lora")
    return TorchBackend(model, settings, CausalLM.predict, ema_decay=0.9, **options)


def batch(step: int = 0) -> Packing:
    found = Packing.of(training.weighed(training.samples_of(step)), 60)
    assert len(found) >= 2
    return found


def stepped(backend: TorchBackend[CausalLM], steps: int, start: int = 0) -> list[Any]:
    found: list[Any] = []
    for step in range(start, start + steps):
        found.append(backend.forward_backward(batch(step), SFTObjective()))
        found.append(backend.step(1e-2)["grad_norm"])
        found.append(backend.score(batch(step)).tolist())
    return found


KINDS = {
    "float32": (0.5, True),
    "lora": (0, True),
    "bfloat16": (True, False),
}
"""And of each the share of layers that are computed again, and whether activations go too, in the
fast tests."""
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    ("kind", "share", "activations"),
    [
        pytest.param(
            kind, share, away, marks=() if (share, away) == KINDS[kind] else pytest.mark.slow
        )
        for kind, share, away in product(KINDS, (0, 0.5, True), (False, True))
    ],
)
def test_the_same_steps_are_taken(path: Path, kind: str, share: float, activations: bool) -> None:
    """Losses, norms of gradients, scores and weights are the same bit by bit after three steps."""
    options: dict[str, Any] = {"gradient_checkpointing": share, "offload_activations": activations}
    here, there = (backend_of(path, kind, streams=flag, **options) for flag in (False, True))
    assert stepped(here, 3) == stepped(there, 3)
    ours, theirs = (
        dict(whole_weights(each.model.module, each.model.dtype)) for each in (here, there)
    )
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    assert all(
        here.optimizer.average[name].equal(average)
        for name, average in there.optimizer.average.items()
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "float32" else pytest.mark.slow) for k in KINDS]
)
def test_a_checkpoint_continues_either_way(path: Path, tmp_path: Path, kind: str) -> None:
    here, there = (backend_of(path, kind, streams=flag) for flag in (False, True))
    stepped(here, 2), stepped(there, 2)
    there.save(tmp_path)
    expected = stepped(here, 2, 2)
    assert stepped(there, 2, 2) == expected
    for flag in (False, True):
        continued = backend_of(path, kind, streams=flag)
        continued.load(tmp_path)
        assert stepped(continued, 2, 2) == expected


@each_kind
def test_engines_are_given_the_same_weights(path: Path, kind: str) -> None:
    here, there = (backend_of(path, kind, streams=flag) for flag in (False, True))
    stepped(here, 1), stepped(there, 1)
    for merged in (True, False):
        ours, theirs = (dict(published(each.model, merged=merged)()) for each in (here, there))
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_a_score_model_scores_the_same(path: Path) -> None:
    here, there = (
        ScoreModel.load(path, sharding=alone() if flag else None) for flag in (False, True)
    )
    call_one_by_one(here)
    torch.nn.init.ones_(here.head.weight), torch.nn.init.ones_(there.head.weight)
    sequences = [list(range(5, 5 + n)) for n in (3, 9, 4)]
    scores = [
        SequenceScores(Passes(model, ScoreModel.predict), 8)(sequences) for model in (here, there)
    ]
    assert scores[0] == scores[1]


def test_a_pass_that_failed_leaves_nothing_behind(path: Path) -> None:
    here, there = (backend_of(path, "float32", streams=flag) for flag in (False, True))
    with (
        short_of_memory(there.model.module, 25, backward=True),
        pytest.raises(DeviceMemoryError),
    ):
        there.forward_backward(batch(), SFTObjective())
    assert stepped(here, 1) == stepped(there, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("system.gradient_checkpointing=true", "system.offload_activations=true"),
        ("lora.rank=4",),
    ],
)
def test_no_host_waits_for_weights(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Beside the reads at a step's end only for gradients, as with the optimizer in host memory
    alone."""
    said = ("data.max_tokens=64", GIVEN[0], GIVEN[2], f"{KEY}=true", *options)
    config = resolved_there(tmp_path, "sft", TINY | {"num_hidden_layers": 4}, "H100-80GB", *said)
    waits = dry_run(config)[FIRST]["train"].waits
    assert {key.split("/")[-1].split(":")[0] for key in waits} <= {
        "passes.py",
        "optimizer.py",
        "masters.py",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("sft", ("system.gradient_checkpointing=true",)),
        ("sft", ("lora.rank=4", "system.shard_size=2")),
        ("sft", ("system.offload_activations=true", "train.ema_decay=0.9")),
        ("dpo", ("system.sequence_parallel.size=2",)),
        ("rm", ()),
        ("rl", ("algorithm.name=ppo", "system.engine=vllm")),
    ],
)
def test_a_rank_waits_once_for_the_gradients_of_a_backward_pass(
    tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    """FSDP's waits for gradients, all when the pass is over; no copy of one; and those of the
    optimizer there."""
    data = (*RL, *GIVEN[:2]) if command == "rl" else ("data.max_tokens=64", GIVEN[0], GIVEN[2])
    said = (*data, f"{KEY}=true", "system.zero_stage=3", *options)
    config = resolved_there(
        tmp_path, command, TINY | {"num_hidden_layers": 4}, "4xH100-80GB", *said
    )
    train = dry_run(config)[FIRST]["train"]
    places = {(key.split("/")[-1].split(":")[0], key.split()[-1]) for key in train.waits}
    copied = {place for place, operation in places if operation == "_to_copy"}
    assert copied <= {"lock_step.py", "passes.py", "rank_group.py", "torch.py"}
    assert {place for place, _ in places} <= copied | {"passes.py", "optimizer.py", "masters.py"}
    if (
        "lora.rank=4" not in options
    ):  # embedding and last norm, also of the critic; in blocks of 512 bytes
        models = 1 + (command == "rl")
        assert train.peak["weights"] == pytest.approx(models * 4 * (512 * 64 + 64) / 4, rel=0.1)


def sampling_run(tmp_path: Path, *options: str) -> Any:
    said = (*RL, *GIVEN[:2], f"{KEY}=true", *options)
    return resolved_there(tmp_path, "rl", TINY | {"num_hidden_layers": 4}, "H100-80GB", *said)


def test_a_run_that_samples_needs_a_copy_for_its_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine_process = true"):
        sampling_run(tmp_path)


@pytest.mark.slow
def test_an_engine_of_its_own_is_given_the_weights(tmp_path: Path) -> None:
    plan = sampling_run(tmp_path, "system.engine_process=true", "system.hybrid=true")
    phases = dry_run(plan)[FIRST]
    assert phases["publish"].total and phases["train"].total


def test_the_price_of_rows_by_hand() -> None:
    """Rows of layers are masters where they are; torch rounds their gradients up, of this model by
    a sixth."""
    of = partial(Layout, 2, zero_stage=3, shards=4, models=2)
    away, here = (price(SMALL, of(offload=True, offload_parameters=flag)) for flag in (True, False))
    rows = 4 * (layer_copy(SMALL, Layout(4)) // 4 // 4) * SMALL.layers
    assert here.weights - away.weights == 2 * rows and here.gathered == away.gathered
    pieces = 4 * 256 // 4 * (2 * 256 + 2 * 128 + 3 * 768)
    rounded = 4 * 256 // 4 * (2 * 256 + 2 * 128 + 3 * 1024)
    on_the_way = 2 * 4 * 3 * 256 * 768 // 4
    assert away.host - here.host == pytest.approx(
        2 * (rows * rounded / pieces - on_the_way), abs=16
    )
    adapter = price(SMALL, of(lora_rank=8, offload_parameters=True))
    assert adapter.optimizer and adapter.host == pytest.approx(PINNED * 2 * rows / 2, rel=1e-5)


def test_it_is_derived_where_the_weights_do_not_fit_and_the_host_has_room() -> None:
    large, small = (on(A100, LLAMA_70B, memory=n * GB) for n in (4000, 300))
    system = resolved(SFTConfig, large).settings
    assert (system["system.offload_parameters"], system["system.offload_optimizer"]) == (True, True)
    adapter = resolved(SFTConfig, large, "lora.rank=16").settings
    assert (adapter["system.offload_parameters"], adapter["system.offload_optimizer"]) == (
        True,
        False,
    )
    fits = resolved(SFTConfig, on(A100, QWEN_7B, memory=4000 * GB)).settings
    assert (fits["system.offload_parameters"], fits["system.offload_optimizer"]) == (False, True)
    rows = resolved(SFTConfig, EIGHT).settings
    assert (
        rows["system.trainer_ranks"],
        rows["system.zero_stage"],
        rows["system.offload_parameters"],
        rows["system.offload_optimizer"],
    ) == (8, 3, True, True)
    assert resolved(SFTConfig, on(None, SMALL)).settings["system.offload_parameters"] is False
    assert f"{KEY} = true" in refusal(SFTConfig, large, f"{KEY}=false")
    assert "of host memory" in refusal(SFTConfig, small, f"{KEY}=true")


def test_each_micro_batch_brings_the_layers_twice() -> None:
    there = replace(machine("A100-80GB"), memory_total=4000 * GB, memory_available=4000 * GB)
    facts = replace(on(A100, LLAMA_70B), hardware=there, longest=64)
    said = (
        "train.batch_size=64",
        "system.max_tokens_per_microbatch=1024",
        "train.steps=1",
        "data.max_tokens=64",
    )
    seconds = step_seconds(resolved(SFTConfig, facts, *said))
    brought = 4 * 2 * LLAMA_70B.layers * layer_copy(LLAMA_70B, Layout(4))
    assert LLAMA_70B.parameters
    computed = 6 * LLAMA_70B.parameters * 64 * 64 / (FLOPS_SHARE * gpu_kinds()["A100-80GB"].flops)
    assert seconds["training"] == pytest.approx(brought / TO_THE_HOST + computed, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "facts", "said", "words"),
    [
        (SFTConfig, on(None, SMALL), (), "GPUs"),
        (SFTConfig, on(A100, replace(SMALL, layers=2)), (), "two layers"),
        (
            SFTConfig,
            on(A100, SMALL),
            ("system.offload_optimizer=false",),
            "offload_optimizer = false",
        ),
        (SFTConfig, on(A100, SMALL), ("train.optimizer=muon",), "adamw"),
        (SFTConfig, EIGHT, ("system.zero_stage=2",), "system.zero_stage = 3"),
        (SFTConfig, on(A100, SMALL), ("lora.rank=8", "model.quantize=nf4"), "model.quantize"),
        (
            RLConfig,
            on(A100, SMALL),
            ("system.engine_process=true", "system.weight_plane=nccl", "system.weight_copy=gpu"),
            "weight_copy",
        ),
        (RLConfig, on(A100, SMALL), (), "engine_process = true"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    kind: Any, facts: Any, said: tuple[str, ...], words: str
) -> None:
    text = refusal(kind, facts, f"{KEY}=true", *said)
    assert KEY in text and words in text
