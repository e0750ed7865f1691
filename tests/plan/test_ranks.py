"""Trainer ranks on one machine: what is derived for them, and what is refused with numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunesmith.config.commands import GenerateConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.errors import CapacityError, ConfigError, TunesmithError
from tunesmith.plan.cost.copies import adapter_numbers
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import layout_of
from tunesmith.plan.cost.price import price
from tunesmith.plan.devices import device_problems
from tunesmith.plan.facts.hardware import Gpu, Hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import check
from tunesmith.run.assembly.checking import with_launched_ranks
from tunesmith.run.placement.machines import Machine, check_machines
from tunesmith.run.placement.ray import Ray
from tunesmith.run.processes.launch import Launch
from tunesmith.run.processes.machines import differences, own_view

MODEL = ModelFacts(10**9, 24, 2048, 8192, 16, 16, 128, 32000, 10**5)
CPU = Hardware("CPU", cores=8, memory_total=256 * 10**9, memory_available=240 * 10**9, bf16=True)
RING_IN_FLOAT32 = (
    "system.sequence_parallel.type=ring",
    "system.device=cuda",
    "model.dtype=float32",
)
GPU = Gpu("GPU", 80 * 10**9, 60 * 10**9, (9, 0))
KINDS: dict[type[RunConfig], tuple[str, ...]] = {
    RLConfig: ('data.train="org/d"', 'reward.functions=["exact_match"]'),
    SFTConfig: ('data.train="org/d"',),
    GenerateConfig: ('data.train="org/d"',),
}


def config(kind: type[RunConfig], *said: str) -> Any:
    return load_config(kind, None, ['model.path="org/m"', *KINDS[kind], *said])


def resolved(kind: type[RunConfig], *said: str, gpus: int = 0) -> Any:
    facts = Facts(replace(CPU, gpus=(GPU,) * gpus), MODEL, train_size=100, longest=40)
    return resolve(config(kind, *said), facts)


def test_ranks_share_the_cores_and_engines_have_processes() -> None:
    found = resolved(RLConfig, "system.trainer_ranks=4")
    assert (
        found.settings["system.threads"] == 2
        and found.settings["system.engine_process"]
        and found.settings["system.weight_plane"] == "memory"
    )
    found = resolved(SFTConfig, "system.trainer_ranks=2")
    assert found.settings["system.threads"] == 4 and not found.settings["system.engine_process"]


def test_each_rank_has_a_gpu_and_engines_have_the_others() -> None:
    found = resolved(RLConfig, "system.trainer_ranks=2", "system.engines=2", gpus=4)
    assert found.devices.own_gpus(4) == [(2,), (3,)]
    [problem] = device_problems(found.devices, 3)
    assert (
        problem.kind == "machine" and "take 4 GPUs" in problem.text and "room for 1" in problem.text
    )


@pytest.mark.parametrize("kind", [RLConfig, SFTConfig])
def test_more_ranks_than_gpus(kind: type[RunConfig]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"system\.trainer_ranks = 3 takes 3 GPUs.* has 2.*system\.trainer_ranks = 2",
    ):
        resolved(kind, "system.trainer_ranks=3", gpus=2)


@pytest.mark.parametrize(
    ("kind", "said", "words"),
    [
        (
            RLConfig,
            ("system.engine_process=false",),
            "system.engine_process = false with system.trainer_ranks = 2",
        ),
        (
            SFTConfig,
            ('system.device="cuda:1"',),
            'system.device = "cuda:1": each rank has its own GPU',
        ),
        (GenerateConfig, (), "nothing is trained"),
    ],
)
def test_what_cannot_work_with_ranks(
    kind: type[RunConfig], said: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        check(config(kind, "system.trainer_ranks=2", *said))


def test_restarts_are_of_ranks() -> None:
    with pytest.raises(
        ConfigError, match=r"system\.trainer_restarts has no effect with system\.trainer_ranks = 1"
    ):
        resolved(SFTConfig, "system.trainer_restarts=1")
    assert (
        resolved(SFTConfig, "system.trainer_restarts=1", gpus=2).settings["system.trainer_restarts"]
        == 1
    )


def launched(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(key, value)


def test_a_launchers_processes_are_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_launched_ranks(config(SFTConfig)).system.trainer_ranks is None
    launched(monkeypatch)
    assert with_launched_ranks(config(SFTConfig)).system.trainer_ranks == 2
    assert (
        with_launched_ranks(config(SFTConfig, "system.trainer_ranks=2")).system.trainer_ranks == 2
    )
    assert with_launched_ranks(config(GenerateConfig)).system.trainer_ranks is None


@pytest.mark.parametrize(
    ("said", "environment", "words"),
    [
        (
            "system.trainer_ranks=3",
            {},
            r"system\.trainer_ranks = 3, and the launcher started 2 processes",
        ),
        ('system.cluster="ray"', {}, r'2 processes .*, and system\.cluster = "ray" starts its own'),
        (
            "system.trainer_ranks=17",
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            r"system\.trainer_ranks = 17, .* 16 processes",
        ),
        (
            "train.lr=1",
            {"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"},
            "12 processes .*, 8 of them on this machine",
        ),
    ],
)
def test_settings_that_contradict_the_launcher(
    monkeypatch: pytest.MonkeyPatch, said: str, environment: dict[str, str], words: str
) -> None:
    launched(monkeypatch, **environment)
    with pytest.raises(ConfigError, match=words):
        with_launched_ranks(config(RLConfig, said))


@pytest.mark.parametrize("name", ["GPU", "A100-80GB"])
def test_ranks_on_several_machines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine has its cores and GPUs for its own ranks, which share a copy of the model,
    whatever GPUs they are: inside a machine they reach each other sooner."""
    launched(monkeypatch, WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", RANK="9", LOCAL_RANK="1")
    launch = Launch.of()
    assert launch and launch.several_machines and launch.local_rank == 1
    said = with_launched_ranks(config(SFTConfig, "system.zero_stage=2"))
    gpu = replace(GPU, name=name)
    facts = Facts(replace(CPU, gpus=(gpu,) * 8), MODEL, train_size=100, longest=40, ranks_here=8)
    found = resolve(said, replace(facts, hardware=replace(facts.hardware, cores=96)))
    assert found.settings["system.shard_size"] == 8
    assert found.settings["system.threads"] == 12, "each rank has its share of the cores"
    assert resolve(said, replace(facts, hardware=CPU)).settings["system.threads"] == 1


@pytest.mark.parametrize("setting", ["system.zero_stage=3", "system.sequence_parallel.size=2"])
def test_a_launcher_shards_a_separate_critic(setting: str) -> None:
    said = config(RLConfig, setting, "system.trainer_ranks=2", 'algorithm.name="ppo"')
    facts = Facts(CPU, MODEL, train_size=100, longest=40)
    alone, launched = (resolve(said, replace(facts, ranks_here=n)).devices for n in (None, 2))
    assert (launched.trainer_ranks, launched.zero_stage) == (alone.trainer_ranks, alone.zero_stage)


def test_views_of_machines_are_compared_with_both_values() -> None:
    ours = {
        "python": "3.11.7",
        "torch": "2.13.0",
        "run file run.toml": "a = 1\nb = 2\n",
        "arguments": "sft",
    }
    assert differences(ours, dict(ours)) == []
    theirs = {
        **ours,
        "torch": "2.12.1",
        "run file run.toml": "a = 1\nb = 3\nc = 4\n",
        "peft": "0.21",
    }
    assert differences(ours, theirs) == [
        "torch: '2.13.0' and '2.12.1'",
        "run file run.toml line 2: 'b = 2' and 'b = 3'",
        "peft: 'none' and '0.21'",
    ]
    assert differences({"text": "a\n"}, {"text": "a\nb\n"}) == ["text line 2: 'nothing' and 'b'"]


def test_the_own_view_has_the_run_files_text(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\n")
    view = own_view(["tunesmith", "sft", str(file), "train.lr=1", "data.train=a.toml"])
    assert (
        view["arguments"] == "sft train.lr=1 data.train=a.toml"
        and view["run file run.toml"] == "[train]\n"
    )
    assert view["torch"] and view["tunesmith"]


class There:
    """A rank on another machine, with something else than there is here (``differs``)."""

    def __init__(self, host: str, differs: str | None = None) -> None:
        self.host = host
        self.differs = differs

    def submit(self, method: str, work: Callable[[], Machine]) -> Future[Machine]:
        assert method == "run"
        found = replace(work(), host=self.host)
        if self.differs == "probe":
            found = replace(found, probe=None)
        if self.differs == "model":
            found = replace(found, files={**found.files, "config.json": "3 bytes, x"})
        done = Future[Machine]()
        done.set_result(found)
        return done


@pytest.mark.parametrize(
    ("left", "words"), [("probe", "not the same directory"), ("model", "not the same model")]
)
def test_machines_without_the_same_files(tmp_path: Path, left: str, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    ranks: list[Any] = [There("a"), There("a"), There("b", left)]
    check_machines(ranks[:2], str(tmp_path), tmp_path)
    with pytest.raises(TunesmithError, match=words) as error:
        check_machines(ranks, str(tmp_path), tmp_path)
    assert "rank 2" in str(error.value) and " b" in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_a_cluster_whose_ranks_do_not_see_the_run_s_directory_is_refused(
    tmp_path: Path, role: str
) -> None:
    """Checkpoints would lack their models: also where all ranks are on one other machine."""

    class Far(There):
        def make(self, _: object) -> Future[None]:
            done = Future[None]()
            done.set_result(None)
            return done

    class Cluster:
        def spawn(self, *_: object) -> Far:
            return Far("b", "probe")

    cluster: Any = Cluster()
    placement = Ray(cluster, lambda: "", run_dir=tmp_path)
    spec: Any = SimpleNamespace(
        role=role, model=SimpleNamespace(path=str(tmp_path)), copies=1, shards=1
    )
    with pytest.raises(ConfigError) as error:
        placement.ranks(spec, 1) if role == "actor" else placement._references(spec)
    assert error.value.keys == ("run_dir",)


@pytest.mark.parametrize(
    ("said", "place"),
    [
        (("system.zero_stage=3",), "system.trainer_ranks = 2"),
        (("system.zero_stage=4", "system.trainer_ranks=2"), "system.zero_stage"),
        (
            ("system.zero_stage=3", "system.trainer_ranks=4", "system.shard_size=3"),
            "a divisor of 4",
        ),
        (
            ("system.zero_stage=3", "system.trainer_ranks=4", "system.shard_size=8"),
            "a divisor of 4",
        ),
        (
            ("system.zero_stage=3", "system.trainer_ranks=4", "system.shard_size=1"),
            "system.shard_size = 1",
        ),
        (("system.trainer_ranks=4", "system.shard_size=2"), "system.shard_size has no effect"),
    ],
)
def test_what_cannot_be_sharded(said: tuple[str, ...], place: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(SFTConfig, *said)
    assert "system." in str(error.value) and place in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "here", "billions", "size"),
    [(8, None, 1, 8), (8, 8, 1, 8), (16, 8, 1, 8), (16, 8, 70, 16), (12, 8, 1, 12), (2, 1, 1, 2)],
    ids=[
        "no launcher",
        "one machine",
        "two machines",
        "too large for one",
        "uneven machines",
        "one rank each",
    ],
)
def test_ranks_of_a_machine_share_a_copy(
    ranks: int, here: int | None, billions: int, size: int
) -> None:
    model = replace(MODEL, parameters=billions * 10**9)
    large = replace(GPU, memory_total=141 * 10**9, memory_free=140 * 10**9)
    facts = Facts(
        replace(CPU, gpus=(large,) * (here or ranks)),
        model,
        train_size=100,
        longest=40,
        ranks_here=here,
    )
    sharded = config(SFTConfig, f"system.trainer_ranks={ranks}", "system.zero_stage=3")
    found = resolve(sharded, facts)
    assert found.settings["system.shard_size"] == size
    assert layout_of(found).shards == size


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (("system.trainer_ranks=3",), ("size = 2", "system.trainer_ranks = 3")),
        ((), ("size = 2", "system.trainer_ranks = 1")),
        (
            ("system.trainer_ranks=6", "system.sequence_parallel.size=3"),
            ("size = 3", "16 attention heads", "ring"),
        ),
        (("system.trainer_ranks=2", *RING_IN_FLOAT32), ("ring", "model.dtype")),
        (("system.sequence_parallel.size=0",), ("size", "above 0")),
        (
            ("system.sequence_parallel.size=1", 'system.sequence_parallel.type="ulysses"'),
            ("type", "size = 1"),
        ),
        (("system.trainer_ranks=2", 'system.sequence_parallel.type="rings"'), ("type", "ulysses")),
    ],
)
def test_groups_that_cannot_share_a_sequence(said: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(SFTConfig, "system.sequence_parallel.size=2", *said)
    assert all(word in str(error.value) for word in ("system.sequence_parallel", *words))


def test_a_group_computes_longer_micro_batches() -> None:
    said = ("system.trainer_ranks=4", "system.gradient_checkpointing=false")
    alone, together = (
        resolved(SFTConfig, *said, *more, gpus=4)
        for more in ((), ("system.sequence_parallel.size=4",))
    )
    ratio = together.memory.microbatch / alone.memory.microbatch
    assert ratio == pytest.approx(4, rel=0.03)  # less the temporaries of the log-probabilities


def test_a_sequence_that_fits_no_gpu_fits_several_that_share_it() -> None:
    facts = Facts(replace(CPU, gpus=(GPU,) * 8), MODEL, train_size=100, longest=90_000)
    here = ("system.offload_optimizer=false", "system.offload_activations=false")
    said = ('system.device_memory="17GB"', *here)
    with pytest.raises(CapacityError, match="does not fit") as error:
        resolve(config(SFTConfig, *said, "system.sequence_parallel.size=1"), facts)
    changes = dict(re.findall(r"(system\.[\w.]+) = (\d)", str(error.value)))
    derived = resolve(config(SFTConfig, *said), facts)
    for found in (
        derived,
        resolve(config(SFTConfig, *said, *map("=".join, changes.items())), facts),
    ):
        assert found.devices.sequence == int(changes["system.sequence_parallel.size"]) > 1
        assert found.memory.microbatch and found.memory.microbatch >= 90_000
        assert found.memory.checkpointing


def test_a_model_that_fits_no_gpu_fits_several_that_shard_it() -> None:
    large = replace(MODEL, parameters=7 * 10**9)
    facts = Facts(replace(CPU, gpus=(GPU,) * 8), large, train_size=100, longest=40)
    with pytest.raises(
        CapacityError, match=r"does not fit.*system\.zero_stage = 2.*, or 16 such GPUs"
    ):
        resolve(config(SFTConfig, "system.zero_stage=0"), facts)
    found = resolve(config(SFTConfig, "system.trainer_ranks=4", "system.zero_stage=3"), facts)
    assert found.settings["system.max_tokens_per_microbatch"] >= 40


def test_a_quantised_base_is_sharded_where_a_whole_one_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", lambda _: object())
    large = replace(MODEL, parameters=200 * 10**9)  # 104 GB in 4 bits, and 60 GB are free
    facts = Facts(replace(CPU, gpus=(GPU,) * 8), large, train_size=100, longest=40)
    said = ("lora.rank=8", "model.quantize=nf4")
    found = resolve(config(SFTConfig, *said), facts)
    assert found.settings["system.trainer_ranks"] == 8 and found.settings["system.zero_stage"] == 3
    with pytest.raises(CapacityError, match=r"does not fit.*system\.zero_stage = 3"):
        resolve(config(SFTConfig, *said, "system.zero_stage=0"), facts)
    kept = price(large, layout_of(found))
    embeddings = 2 * 32000 * 2048
    quantised = int(0.516 * (200 * 10**9 - embeddings))
    assert kept.weights == (2 * embeddings + quantised) // 8 + 4 * adapter_numbers(large, 8)
    assert kept.gathered == pytest.approx(2 * embeddings + quantised / 24, rel=1e-6)


def test_a_change_to_a_quantised_base_keeps_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.plan.rules.checks.find_spec", lambda _: object())
    large = replace(MODEL, parameters=400 * 10**9)
    facts = Facts(replace(CPU, gpus=(GPU,) * 8), large, train_size=100, longest=40)
    said = ("lora.rank=8", "system.trainer_ranks=8", "system.zero_stage=3")
    with pytest.raises(CapacityError, match=r'does not fit.*model\.quantize = "nf4"') as error:
        resolve(config(SFTConfig, *said), facts)
    assert "zero_stage = 0" not in str(error.value)
    assert (
        resolve(config(SFTConfig, *said, "model.quantize=nf4"), facts).settings["system.zero_stage"]
        == 3
    )


def test_each_stage_keeps_less() -> None:
    layouts = [Layout(2, shards=8, zero_stage=stage) for stage in (1, 2, 3)]
    whole, *found = [price(MODEL, layout) for layout in (Layout(2), *layouts)]
    assert whole.peak > found[0].peak > found[1].peak > found[2].peak
    assert found[2].optimizer == 8 * 10**9 // 8 and found[2].weights < 0.7 * 10**9 + 4 * 10**9 // 8
