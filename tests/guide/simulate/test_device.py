"""Steps of the product on a GPU that is not there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import HashStore
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from tests.support.fake_runs import GIVEN, RL, TINY, phases_of, resolved
from tests.support.long import again
from tunesmith.cli.main import app
from tunesmith.errors import TrainerLostError
from tunesmith.guide.simulate.device import FakeDevice
from tunesmith.guide.simulate.dry_run import MICROBATCHES, dry_run
from tunesmith.guide.simulate.memory import CACHED
from tunesmith.guide.simulate.processes import FakeProcesses
from tunesmith.guide.simulate.threads import FIRST, Occupant, inside
from tunesmith.learn.usercode.far import gather
from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.models.parallel.host_memory import HostShelf
from tunesmith.plan.cost.memory import planned, planned_devices
from tunesmith.plan.devices import BUCKET
from tunesmith.run.engines.local.attention import attend
from tunesmith.run.processes.checksum import SLAB
from tunesmith.run.processes.rank_group import RankGroup
from tunesmith.run.trainers import passes
from tunesmith.run.weights.files import FILE_BYTES

NF4 = "model.quantize=nf4"
AT_THE_END = {"passes.py", "optimizer.py"}
"""Where a step may read: the sums of its micro-batches, and whether the gradient and the weights
are finite."""
BETWEEN_RANKS = {"lock_step.py", "rank_group.py", "backward_sums.py"}
"""The same where there are several ranks."""


def test_the_cpu_computes_and_the_device_only_says_what_would_come_of_it() -> None:
    with FakeDevice() as device:
        assert (torch.ones(3) + 1).tolist() == [2, 2, 2]
        weight = torch.ones(2, 3, device="cuda", requires_grad=True)
        out = (weight @ torch.ones(3, 4).to("cuda:0")).relu()
        out[0].sum().backward()
        assert (out.shape, out.device.type, out.is_cuda) == ((2, 4), "cuda", True)
        assert weight.grad is not None and weight.grad.shape == weight.shape
        with pytest.raises(RuntimeError, match="two devices"):
            torch.ones(3, device="cuda") + torch.ones(3)
        assert not device.waits.keys() - {key for key in device.waits if "_to_copy" in key}
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(3, device="cuda") if not torch.cuda.is_available() else pytest.skip(
            "there is a GPU"
        )


def test_reading_waits_and_gives_zeros() -> None:
    with FakeDevice() as device:
        x = torch.ones(2, 2, device="cuda")
        assert (x.sum().item(), float(x[0, 0]), bool(x.isfinite().all())) == (0, 0.0, True)
        assert x.tolist() == [[0, 0], [0, 0]] and np.array_equal(x.cpu().numpy(), np.zeros((2, 2)))
        assert sorted(key.split()[-1] for key in device.waits) == [
            "__bool__",
            "__float__",
            "_to_copy",
            "item",
            "tolist",
        ]
        device.waits.clear()
        torch.ones(4).to("cuda:0", non_blocking=True)
        torch.ones(2, 2).copy_(x, non_blocking=True), x.copy_(torch.ones(2, 2), non_blocking=True)
        assert not device.waits
        x.copy_(torch.ones(2, 2))
        assert sum(device.waits.values()) == 1
        with pytest.raises(Exception, match="nonzero"):  # its size depends on numbers
            x[x > 0]


def test_what_the_host_wrote_it_can_read_until_the_device_changes_it() -> None:
    with FakeDevice() as device:
        flags = torch.tensor([1.0, 0.0], device="cuda")
        assert flags.tolist() == [1, 0]
        flags += 1
        assert flags.tolist() == [0, 0]
        pinned = torch.ones(3, pin_memory=True)  # as large as a model, and never allocated
        assert isinstance(pinned, FakeTensor) and pinned.is_cpu and device.memory.total == 512


def test_others_of_a_role_answer_as_the_first_one() -> None:
    processes = FakeProcesses()
    ranks = [processes.spawn("actor", TrainerLostError) for _ in range(3)]
    called: list[int] = []
    assert [far.make(lambda: called).result() for far in ranks] == [None] * 3
    assert [far.call("append", 1) for far in ranks] == [None] * 3 and called == [1]
    assert [answer.result() for answer in [far.submit("index", 1) for far in ranks]] == [0, 0, 0]
    with pytest.raises(ValueError, match="3"):
        gather([far.submit("index", 3) for far in ranks])
    processes.close("actor")
    with pytest.raises(TrainerLostError):
        ranks[0].call("append", 1)


def test_an_address_is_asked_for_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FakeDevice():
            assert nn.Linear(2, 2, device="cuda").weight.data_ptr() == 0


def test_what_a_process_frees_stays_with_it_until_it_empties_its_cache() -> None:
    with FakeDevice() as device:
        memory = device.memory
        with inside(Occupant(FIRST, "rollout")):
            cache = torch.ones(1000, 128, device="cuda")
            del cache
            torch.ones(250, 128, device="cuda")  # reuses what is cached
        kept = torch.ones(1, 128, device="cuda")
        assert (memory.total, memory.peak[CACHED]) == (512, 1000 * 512)
        assert sum(memory.peak.values()) == 1001 * 512

        memory.begin()
        torch.cuda.empty_cache()  # of another process
        del kept
        torch.ones(2, 128, device="cuda")
        assert memory.peak[CACHED] == 1000 * 512
        with inside(Occupant(FIRST, "rollout")):
            torch.cuda.empty_cache()
        memory.begin()
        torch.ones(3, 128, device="cuda")
        assert (sum(memory.peak.values()), memory.peak[CACHED]) == (3 * 512, 0)


def test_tensors_wait_in_the_same_host_memory_every_time() -> None:
    with FakeDevice() as device, torch.no_grad():
        weight = nn.Parameter(torch.ones(4, 128, device="cuda"))
        scalar = torch.ones(())
        shelf = HostShelf()
        places: list[int] = []
        for _ in range(2):
            [away, same] = shelf.put([weight.data, scalar])
            places.append(away.untyped_storage()._cdata)
            assert same is scalar and not away.is_cuda and away.shape == weight.shape
            assert shelf.put([away, scalar])[0] is away, "an evaluation offloads before a sync does"
            weight.data = away
            assert weight.device.type == "cpu" and device.memory.total == 0
            weight.data = torch.empty_like(away, device="cuda").copy_(away, non_blocking=True)
            assert weight.is_cuda and device.memory.total == 4 * 512
        assert places[0] == places[1]
        assert sum(device.waits.values()) == 2, "one wait for all tensors"


def test_every_storage_counts_once_until_it_is_freed() -> None:
    with FakeDevice() as device:
        memory = device.memory
        with device.allocating("weights"):
            linear = nn.Linear(256, 256, bias=False, device="cuda")
        x = torch.ones(128, 256, device="cuda", requires_grad=True)
        assert memory.now == {"weights": 256 * 256 * 4, "activations": 128 * 256 * 4}
        view = x.t()[:10]
        assert memory.total == (256 + 128) * 256 * 4
        y = linear(x)
        del x, view  # the graph keeps them
        assert memory.now["activations"] == 2 * 128 * 256 * 4
        memory.begin()
        y.backward(torch.ones_like(y))
        assert memory.peak["temporaries"] >= 256 * 256 * 4 and linear.weight.grad is not None
        memory.assign("gradients", [linear.weight.grad])
        del y
        assert memory.now["gradients"] == 256 * 256 * 4
        linear.weight.untyped_storage().resize_(0)
        assert memory.now["weights"] == 0
        tiny = torch.ones(1, device="cuda")
        memory.assign("weights", [tiny])
        assert memory.now["weights"] == 512, "the allocator's smallest block"


def test_what_a_stream_uses_keeps_its_memory_until_the_host_has_waited() -> None:
    with FakeDevice() as device:
        stream = torch.cuda.Stream()
        first = torch.cuda.Event()
        second = torch.cuda.Event()
        for event in (first, second):
            torch.ones(512, device="cuda").record_stream(stream)
            event.record(stream)
        assert device.memory.total == 2 * 2048
        first.synchronize()
        assert device.memory.total == 2048
        second.synchronize()
        assert device.memory.total == 0


@pytest.mark.parametrize(
    "options",
    [
        (),
        *(
            pytest.param(("lora.rank=4", *q), marks=pytest.mark.slow)
            for q in ((), (NF4,), ("model.quantize=int8",))
        ),
        ("system.gradient_checkpointing=true",),
    ],
)
@pytest.mark.more
def test_a_step_waits_only_at_its_end(tmp_path: Path, options: tuple[str, ...]) -> None:
    train = phases_of(tmp_path, "sft", *options)["train"]
    assert {key.split("/")[1].split(":")[0] for key in train.waits} == AT_THE_END
    assert max(train.waits.values()) == 1
    numbers = 512 * 64 + 2 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128)
    if "lora.rank=4" not in options:
        expected = {"weights": 2 * numbers, "gradients": 4 * numbers, "optimizer": 12 * numbers}
        assert {name: train.peak[name] for name in expected} == pytest.approx(expected, rel=0.06)


@pytest.mark.more
def test_soft_caps_keep_no_scores_of_pairs(tmp_path: Path) -> None:
    capped = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 32}
    shape = TINY | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **capped}
    tokens = 2048
    given = (f"data.max_tokens={tokens}", f"system.max_tokens_per_microbatch={tokens}", GIVEN[2])
    train = dry_run(resolved(tmp_path, "sft", shape, "H100-80GB", *given))[FIRST]["train"]
    assert {key.split("/")[1].split(":")[0] for key in train.waits} == AT_THE_END
    assert (
        train.peak["activations"] < tokens * tokens * TINY["num_attention_heads"]
    )  # a byte for each score of a layer


STAGE = "system.zero_stage={}".format
SHARED = "system.sequence_parallel={{type = '{}', size = 2}}".format


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("sft", (STAGE(3), "system.gradient_checkpointing=true")),
        *(
            pytest.param(command, options, marks=pytest.mark.slow)
            for command, options in (
                ("sft", (STAGE(0), SHARED("ulysses"))),
                ("sft", (STAGE(0),)),
                ("sft", (STAGE(1), "train.optimizer=muon", "train.ema_decay=0.9")),
                ("sft", (STAGE(2), "lora.rank=4")),
                ("sft", (STAGE(2), "system.shard_size=2", SHARED("ring"))),
                (
                    "sft",
                    (
                        STAGE(3),
                        SHARED("ulysses"),
                        "lora.rank=4",
                        "system.gradient_checkpointing=true",
                    ),
                ),
                ("sft", (STAGE(2), "lora.rank=4", NF4)),
                ("dpo", (STAGE(3), "lora.rank=4", NF4, "system.gradient_checkpointing=true")),
                ("dpo", (STAGE(3),)),
                ("rm", (STAGE(2),)),
            )
        ),
    ],
)
@pytest.mark.more
def test_a_rank_waits_only_at_the_end_of_a_step(
    tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    train = phases_of(tmp_path, command, *options, spec="4xH100-80GB")["train"]
    files = {key.split("/")[1].split(":")[0] for key in train.waits}
    assert files <= AT_THE_END | BETWEEN_RANKS and max(train.waits.values()) <= 2
    numbers = 512 * 64 + 2 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128)
    if options[0] == STAGE(3) and "lora.rank=4" not in options:
        expected = {"weights": 4 * numbers / 4, "optimizer": 8 * numbers / 4}
        assert {name: train.peak[name] for name in expected} == pytest.approx(
            expected, rel=0.12
        )  # blocks of 512 bytes


def test_gradients_in_host_memory_are_summed_between_gpus_and_come_back() -> None:
    with FakeDevice():
        group = RankGroup(HashStore(), 0, 2, "127.0.0.1", "cuda")  # pyright: ignore[reportArgumentType]
        there, fresh = (nn.Parameter(torch.ones(3, pin_memory=True)) for _ in range(2))
        there.grad = kept = torch.ones(3, pin_memory=True)
        group.sum_gradients([there, fresh])
        assert there.grad is kept and kept.is_cpu and fresh.grad is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (STAGE(0),),
        (STAGE(0), "system.offload_parameters=true"),
        (STAGE(0), "system.offload_parameters=true", "lora.rank=4"),
        (STAGE(2), "system.shard_size=2"),
        (STAGE(3), "system.offload_parameters=true", "system.shard_size=2"),
    ],
)
def test_ranks_step_in_host_memory(tmp_path: Path, options: tuple[str, ...]) -> None:
    said = ("data.max_tokens=64", GIVEN[0], GIVEN[2], "system.offload_optimizer=true", *options)
    config = resolved(tmp_path, "sft", TINY | {"num_hidden_layers": 4}, "4xH100-80GB", *said)
    train = dry_run(config)[FIRST]["train"]
    assert not train.peak.get("optimizer") and any(
        key.startswith("trainers/masters.py") for key in train.waits
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_the_plan_of_a_quantised_base_is_what_it_takes(tmp_path: Path, stage: int) -> None:
    """Wide enough that blocks of 512 bytes matter little."""
    pytest.importorskip(
        "bitsandbytes", reason="an optional extra: pip install 'tunesmith[quantize]'"
    )
    shape = TINY | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "head_dim": 256,
    }
    said = (
        "lora.rank=8",
        NF4,
        STAGE(stage),
        "system.trainer_ranks=4",
        "system.gradient_checkpointing=true",
    )
    config = resolved(tmp_path, "sft", shape, "4xH100-80GB", *said, GIVEN[0], GIVEN[2])
    train = dry_run(config)[FIRST]["train"]
    [(_, planned, _)] = planned_devices(config)
    assert train.peak["weights"] == pytest.approx(planned.weights, rel=0.05)
    assert train.total <= planned.peak - planned.libraries <= 1.08 * train.total


@pytest.mark.slow
def test_a_wait_in_a_micro_batch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = passes.run

    def reading(*args: Any) -> Any:
        result = run(*args)
        assert not result[0].sum().item()
        return result

    monkeypatch.setattr(passes, "run", reading)
    waits = phases_of(tmp_path, "sft", STAGE(3), spec="2xH100-80GB")["train"].waits
    found = [key for key in waits if key.startswith("trainers/passes.py") and key.endswith(" item")]
    assert len(found) == 1 and waits[found[0]] == MICROBATCHES


@pytest.mark.slow
def test_activations_in_host_memory_make_nobody_wait(tmp_path: Path) -> None:
    deep = TINY | {"num_hidden_layers": 6}
    said = ("data.max_tokens=64", "train.batch_size=8")
    peaks: list[int] = []
    for away in (False, True):
        more = (
            "system.max_tokens_per_microbatch=16384",
            f"system.offload_activations={str(away).lower()}",
        )
        train = dry_run(resolved(tmp_path, "sft", deep, "H100-80GB", *said, *more))[FIRST]["train"]
        assert {key.split("/")[1].split(":")[0] for key in train.waits} == AT_THE_END
        peaks.append(train.total)
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dpo", "kto", "rm", "prm"])
def test_preferences_wait_only_at_the_end_of_a_step(tmp_path: Path, command: str) -> None:
    waits = phases_of(tmp_path, command)["train"].waits
    assert {key.split("/")[1].split(":")[0] for key in waits} == AT_THE_END
    assert max(waits.values()) <= 2


@pytest.mark.slow
def test_ppo_and_the_engine(tmp_path: Path) -> None:
    phases = phases_of(tmp_path, "rl", "algorithm.name=ppo", "train.ema_decay=0.99")
    assert {key.split("/")[1].split(":")[0] for key in phases["train"].waits} == AT_THE_END
    assert phases["sample"].peak["keys and values"] == pytest.approx(16e6, rel=0.01)
    assert {"weights", "optimizer", "frozen models"} <= phases["sample"].peak.keys()


def test_capped_scores_of_decoding_are_float32() -> None:
    """Rounded to 16 bits they would be off by up to 0.03."""
    kinds: list[torch.dtype] = []

    class Kinds(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = function(*args, **(kwargs or {}))
            kinds.extend([out.dtype] * (function is torch.ops.aten.bmm.default))
            return out

    query = torch.ones(1, 2, 3, 16, dtype=torch.bfloat16)
    with Kinds():
        attend(
            query, query, query, torch.ones(3, 3, dtype=torch.bool), AttentionRule(1.0, None, 30.0)
        )
    assert kinds[0] == torch.float32


HELD = ("keys and values", "engines' weights")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("local", (STAGE(0),)),
        again("vllm", (STAGE(0),)),
        again("local", (STAGE(3), "algorithm.name=ppo", "train.ema_decay=0.9")),
        ("vllm", (STAGE(3), "algorithm.name=ppo", "train.ema_decay=0.9")),
    ],
)
def test_ranks_and_engines_take_turns_on_a_gpu(
    tmp_path: Path, engine: str, options: tuple[str, ...]
) -> None:
    said = (*options, "system.hybrid=true", f"system.engine={engine}")
    phases = phases_of(tmp_path, "rl", *said, spec="4xH100-80GB")
    scored = ["score"] if "algorithm.name=ppo" in options else []
    assert [*phases] == ["load", "publish", "sample", "hand over", "train", *scored]
    sample = phases["sample"].peak
    train = phases["train"].peak
    assert (
        sample["keys and values"] == pytest.approx(16e6, rel=0.01)
        and sample["engines' weights"] > 2 * 512 * 64
    )
    assert not sample.get("optimizer") and train["optimizer"] > 0
    assert all(
        train.get(purpose, 0) < 2**12 for purpose in HELD
    )  # but for buffers that no one sends
    assert {name: phase.peak.get(CACHED, 0) < 2**20 for name, phase in phases.items()} == (
        dict.fromkeys(phases, True)
    )
    files = {key.split("/")[1].split(":")[0] for key in phases["train"].waits}
    assert files <= AT_THE_END | BETWEEN_RANKS


@pytest.mark.slow
def test_an_engine_in_the_trainers_process_takes_turns(tmp_path: Path) -> None:
    phases = phases_of(tmp_path, "rl", "system.hybrid=true")
    assert not phases["sample"].peak.get("optimizer") and phases["train"].peak["optimizer"] > 0
    kept = [phases[name].peak.get("keys and values", 0) for name in ("sample", "train")]
    assert kept[0] == pytest.approx(16e6, rel=0.01) and kept[1] < 2**12


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_engines_have_gpus_of_their_own(tmp_path: Path, engine: str) -> None:
    given = (
        *RL,
        *GIVEN[:2],
        "rollout.max_staleness=1",
        "system.trainer_ranks=2",
        f"system.engine={engine}",
    )
    config = resolved(tmp_path, "rl", TINY, "4xH100-80GB", *given)
    gpus = dry_run(config)
    assert set(gpus) == {FIRST, "engine"} and not {*HELD} & gpus[FIRST]["train"].peak.keys()
    planned = {name: price for name, price, _ in planned_devices(config)}["engine"]
    assert gpus["engine"]["sample"].peak["keys and values"] == pytest.approx(planned.kv, rel=0.01)
    assert gpus["engine"]["sample"].peak["engines' weights"] == pytest.approx(
        planned.engine, rel=0.06
    )  # small blocks


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, again(2), 4])
def test_roles_on_ray_have_gpus_of_their_own(tmp_path: Path, processes: int) -> None:
    """One process has the whole reference and a whole reward model; two share their weights, as the
    trainer's ranks share theirs; and more may share a reward model than train."""
    judge = TINY | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": ""}}
    given = (
        "algorithm.name=ppo",
        "algorithm.kl.coef=0.1",
        STAGE(3),
        f'reward.models=[{{path="{tmp_path}/frozen"}}]',
    )
    given = (
        *RL,
        *GIVEN[:2],
        *given,
        "system.cluster=ray",
        "system.trainer_ranks=2",
        "system.engines=1",
    )
    given = (*given, f"system.placement.ref.processes={min(2, processes)}")
    given = (*given, f"system.placement.reward.processes={processes}")
    config = resolved(tmp_path, "rl", TINY, "2x8xH100-80GB", *given, frozen=judge)
    gpus = dry_run(config)
    assert set(gpus) == {FIRST, "engine", "critic", "reference", "reward model"}
    planned = {name: price for name, price, _ in planned_devices(config)}
    for name in ("trainer", "critic"):
        peak = gpus[name]["train"].peak
        assert peak["weights"] == pytest.approx(planned[name].weights, rel=0.06), (
            name
        )  # small blocks
        assert "optimizer" in peak and "frozen models" not in peak
    frozen = gpus["reference"]["train"].peak["frozen models"]
    assert frozen == pytest.approx(planned["reference"].frozen, rel=0.06)
    frozen = gpus["reward model"]["reward"].peak["frozen models"]
    assert frozen == pytest.approx(
        planned["reward model"].frozen, rel=0.03 * (1 + processes)
    )  # and small shares


@pytest.mark.slow
def test_the_plan_of_a_reward_model_that_two_share_is_what_it_takes(tmp_path: Path) -> None:
    shape = TINY | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "vocab_size": 32000,
    }
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    judge = shape | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": ""}}
    given = (
        f'reward.models=[{{path="{tmp_path}/frozen"}}]',
        "system.cluster=ray",
        "system.placement.reward.shards=2",
    )
    given = (*given, "system.trainer_ranks=1", "system.engines=1", "system.reward_max_tokens=256")
    config = resolved(tmp_path, "rl", shape, "8xH100-80GB", *RL, *GIVEN[:2], *given, frozen=judge)
    phase = dry_run(config)["reward model"]["reward"]
    [planned] = [price for name, price, _ in planned_devices(config) if name == "reward model"]
    assert phase.peak["frozen models"] == pytest.approx(planned.frozen, rel=0.001)
    assert planned.frozen == 2 * config.facts.frozen_parameters // 2
    assert phase.total == pytest.approx(planned.peak - planned.libraries, rel=0.05)


@pytest.mark.slow
def test_weights_are_gathered_in_two_buckets_at_most(tmp_path: Path) -> None:
    shape = TINY | {
        "hidden_size": 4096,
        "vocab_size": 65536,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
    }
    ahead = ("rollout.max_staleness=1", "system.weight_plane=memory")
    config = resolved(tmp_path, "rl", shape, "4xH100-80GB", *RL, *GIVEN[:2], STAGE(3), *ahead)
    peak = dry_run(config)[FIRST]["publish"].peak
    largest = 65536 * 4096 * 2
    assert config.facts.model and 2 * (config.facts.model.parameters or 0) > 1.5 * largest
    assert largest <= peak["gathered weights"] <= 2 * max(largest, FILE_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_for_nccl_are_copied_on_the_gpu_and_nowhere_else(
    tmp_path: Path, ranks: int
) -> None:
    shape = TINY | {"hidden_size": 512, "vocab_size": 16384, "intermediate_size": 1024}
    given = (
        *RL,
        *GIVEN[:2],
        "rollout.max_staleness=1",
        f"system.trainer_ranks={ranks}",
        "system.weight_plane=nccl",
    )
    given += (STAGE(3),) if ranks > 1 else ()
    config = resolved(tmp_path, "rl", shape, "4xH100-80GB", *given)
    price = planned(config)
    publish = dry_run(config)[FIRST]["publish"]
    assert price is not None and config.settings["system.weight_copy"] == "gpu"
    copy = price.published
    measured = publish.peak["weights for engines"]
    if ranks == 1:  # and two slabs, while it is summed
        assert 0.98 * copy < measured <= 1.02 * copy + 2 * 8 * SLAB
    else:  # its share, room for a bucket more, and what is gathered of one tensor
        assert copy - 2 * BUCKET < measured <= copy
    assert {place.split()[-1] for place in publish.waits} <= {"synchronize"}, publish.waits


@pytest.mark.slow
def test_weights_for_ipc_pass_through_a_bucket(tmp_path: Path) -> None:
    said = ("system.engine_process=true", "system.weight_plane=ipc")
    config = resolved(tmp_path, "rl", TINY, "H100-80GB", *RL, *GIVEN[:2], *said)
    price = planned(config)
    assert price is not None and price.published == 3 * BUCKET
    peak = dry_run(config)[FIRST]["publish"].peak["weights for engines"]
    assert BUCKET <= peak < 1.5 * BUCKET, "the engine's bucket and large tensors are not there"


@pytest.mark.slow
def test_threads_stay_those_of_this_machine(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    assert phases_of(tmp_path, "rl", "system.threads=7")["sample"].total
    assert torch.get_num_threads() == before != 7


def test_a_tensor_in_host_memory_comes_back() -> None:
    with FakeDevice() as device:
        tensor = torch.ones(2, device="cuda")
        device.assign("optimizer", [tensor])
        away = tensor.to("cpu")
        assert away.is_cpu and isinstance(away, FakeTensor)
        back = away.to("cuda:0", dtype=torch.bfloat16)
        assert (
            back.is_cuda
            and back.dtype == torch.bfloat16
            and away.to(torch.device("cuda"), torch.float32).is_cuda
        )


@pytest.mark.slow
def test_the_commands_take_steps_on_a_machine_that_is_not_there(tmp_path: Path) -> None:
    resolved(
        tmp_path, "sft", TINY, "H100-80GB", "data.max_tokens=64"
    )  # writes the model and the data
    run = tmp_path / "run.toml"
    run.write_text(
        f'run_dir = "run"\nmodel.path = "{tmp_path}"\ndata.train = "{tmp_path}/data.jsonl"\n'
    )
    given = [str(run), "data.max_tokens=64", GIVEN[0], "--dry-run"]
    done = CliRunner().invoke(app, ["sft", *given, "8xH100-80GB"])
    assert done.exit_code == 0, done.output
    assert re.search(r"system\.trainer_ranks\W+8\b", done.output), done.output
    table = {line.split("  ")[0]: line.split()[-2:] for line in done.output.splitlines() if line}
    assert table["memory"] == ["planned", "train"] and table["optimizer"][0].endswith("KB")
    assert not (tmp_path / "run").exists()
    refused = CliRunner().invoke(app, ["sft", *given, "8xH100-80GB", "system.compile=default"])
    assert refused.exit_code and "system.compile" in refused.output
