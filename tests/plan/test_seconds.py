"""Seconds of a step's phases on a CPU: what is counted, the rates that are fitted, and which runs
they are for."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.documents import ROOT
from tests.support.hardware_table import MODELS
from tunesmith.config.commands import (
    DistillConfig,
    DPOConfig,
    KTOConfig,
    OfflineDistillConfig,
    RFTConfig,
    RMConfig,
    SampledDistillConfig,
)
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, RunConfig, SFTConfig
from tunesmith.guide.tune.machine import fit_rates, nonnegative, predictions, shapes
from tunesmith.guide.tune.probes import Probe, made_up
from tunesmith.plan.cost.copies import adapter_numbers
from tunesmith.plan.cost.memory import planned_devices
from tunesmith.plan.cost.seconds import (
    again_seconds,
    cpu_seconds,
    expected_seconds,
    phase_seconds,
    step_seconds,
)
from tunesmith.plan.cost.step_work import step_size, step_work
from tunesmith.plan.cost.work import Work, amounts, parts_of_sample, work_of
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.machines import machine
from tunesmith.plan.facts.measured import rates_file, read_rates
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.resolve import resolve
from tunesmith.run.assembly.planning import plan_run

SMALL = ModelFacts(
    parameters=1536,
    layers=2,
    hidden_size=8,
    intermediate_size=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab_size=32,
    context=256,
    tied=True,
)
WORK = Work(SMALL, 4, prompts=3, group=2, prompt=10, new=5, micro=40)
CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def test_what_a_step_does_by_hand() -> None:
    does = amounts(WORK)
    layer = 8 * (2 * (2 + 1) * 4 + 3 * 16)  # q, o, k, v of 8, 8, 4, 4 outputs; gate, up and down
    tokens = 3 * 10 + 6 * 5
    forward = does["forward and backward"]
    assert forward["products"] == tokens * 2 * layer and forward["head"] == 30 * 32 * 8
    assert forward["passes"] == 2 * 2 and forward["calls"] == 2  # 60 tokens in micro-batches of 40
    assert forward["pairs"] == (3 * 50 + 6 * 5 * 12.5) * 2 * 2
    assert does["decode"]["products"] == 5 * 6 * 2 * layer and does["decode"]["steps"] == 5
    assert does["prefill"]["products"] == 30 * 2 * layer


def test_prompts_that_are_not_shared_and_rows_that_wait() -> None:
    alone = amounts(replace(WORK, share=False, running=4))
    assert alone["scoring"]["products"] == amounts(WORK)["scoring"]["products"] * 90 / 60
    assert alone["decode"]["steps"] == 2 * 5 and amounts(WORK)["decode"]["steps"] == 5


def test_an_engine_with_rounded_weights_reads_less_of_them() -> None:
    usual, rounded = amounts(WORK), amounts(replace(WORK, rounded="int8"))
    assert 4 * rounded["decode"]["weights"] == usual["decode"]["weights"]
    assert 4 * rounded["prefill"]["weights"] == usual["prefill"]["weights"]
    assert {**rounded["decode"], "weights": 0} == {**usual["decode"], "weights": 0}
    assert rounded["forward and backward"] == usual["forward and backward"]


def test_rates_are_found_again() -> None:
    draw = np.random.default_rng(0)
    rows = draw.uniform(0.1, 1.0, (30, 4))
    rates = np.array([0.5, 0.0, 2.0, 0.1])
    rows /= (rows @ rates)[:, None]
    assert nonnegative(rows) == pytest.approx(rates, abs=1e-4)
    assert (nonnegative(draw.normal(size=(30, 4))) >= 0).all()


def test_shapes_are_the_same_every_time_and_others_for_another_seed() -> None:
    first = list(islice(shapes(0), 20))
    assert first == list(islice(shapes(0), 20)) and not {*map(repr, first)} & {
        *map(repr, islice(shapes(1), 20))
    }
    assert {work.bytes_per_number for work in first} == {2, 4}


@pytest.mark.parametrize("number", [2, 4])
def test_real_steps_are_measured_in_every_phase_and_predicted(number: int) -> None:
    probes = [
        Probe(Work(SMALL, number, prompts=2, group=2, prompt=8, new=new, micro=64))
        for new in (2, 4, 6)
    ]
    for probe in probes:
        probe.step()
        assert probe.seconds.keys() == amounts(probe.work).keys() and all(
            s > 0 for s in probe.seconds.values()
        )
    found = predictions(probes, fit_rates(probes))
    assert len(found) == 3 * 7 and all(each.ratio > 0 for each in found)
    whole = [each for each in found if each.phase == "step"]
    assert whole[0].measured == pytest.approx(sum(probes[0].seconds.values()))


def test_what_is_counted_are_the_weights_of_the_model() -> None:
    module = made_up(WORK).module
    matrices = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    assert matrices == WORK.layers + WORK.head


# Which runs the rates are for


RATES = {
    str(number): {
        phase: dict.fromkeys(does, 1e-9 * number) for phase, does in amounts(WORK).items()
    }
    for number in (2, 4)
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without weights, whose parameters are counted from its configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": torch.zeros(100_000)}, tmp_path / "m" / "model.safetensors")


def measured() -> None:
    file, _ = rates_file(read_hardware())
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"rates": RATES}))


def plan(kind: type[RunConfig], *said: str) -> Any:
    base = ["model.path=m", "data.train=org/data", "system.device=cpu", "model.dtype=float32"]
    base += (
        ['reward.functions=["exact_match"]', "rollout.max_new_tokens=32"]
        if kind is RLConfig
        else []
    )
    return plan_run(load_config(kind, None, [*base, *said]), "this")


@pytest.mark.usefixtures("folder")
def test_a_machine_that_was_not_measured_is_told() -> None:
    found = plan(RLConfig)
    assert step_seconds(found) == {}
    assert any("tunesmith check machine" in note for note in found.notes)
    measured()
    found = plan(RLConfig)
    assert not any("tunesmith check machine" in note for note in found.notes)
    seconds = step_seconds(found)
    assert seconds["step"] == pytest.approx(sum(s for name, s in seconds.items() if name != "step"))
    longest = found.training.longest
    assert longest is not None
    assert seconds["decode"] == phase_seconds(work_of(found, longest), RATES["4"])["decode"]


@pytest.mark.parametrize(
    "said",
    [
        "system.trainer_ranks=2",
        "lora.rank=4",
        "system.engine_process=true",
        "algorithm.name=ppo",
        'environment.command="play"',
    ],
)
@pytest.mark.usefixtures("folder")
def test_runs_that_do_something_else_have_no_seconds(said: str) -> None:
    measured()
    found = plan(RLConfig, said)
    assert cpu_seconds(found) == {}
    assert not any("check machine" in note for note in found.notes)


@pytest.mark.usefixtures("folder")
def test_settings_that_cost_time_do_so_here() -> None:
    measured()
    usual = plan(RLConfig)
    whole = cpu_seconds(usual)
    again = plan(RLConfig, "system.gradient_checkpointing=true")
    longest = again.training.longest
    assert longest is not None
    more = cpu_seconds(again)["forward and backward"]
    assert more == pytest.approx(
        whole["forward and backward"] + again_seconds(work_of(again, longest), RATES["4"])
    )
    twice = plan(RLConfig, "train.passes_per_batch=2")
    assert cpu_seconds(twice)["optimizer"] == 2 * whole["optimizer"]
    assert "scoring" not in whole
    reference = plan(RLConfig, "algorithm.kl.coef=0.1")
    assert cpu_seconds(reference)["scoring"] > 0
    rounded = plan(RLConfig, "system.engine_weights=float16")
    assert cpu_seconds(rounded)["decode"] < whole["decode"]
    assert expected_seconds(rounded, 64, 100) < expected_seconds(usual, 64, 100)
    apart = plan(RLConfig, "system.share_prompts=false")
    assert cpu_seconds(apart)["forward and backward"] > whole["forward and backward"]


@pytest.mark.usefixtures("folder")
def test_a_pair_takes_one_optimizer_step() -> None:
    measured()
    said = ("data.max_tokens=64", "train.batch_size=4")
    one, pair = (cpu_seconds(plan(kind, *said)) for kind in (SFTConfig, DPOConfig))
    assert pair["optimizer"] == one["optimizer"]
    beforehand = cpu_seconds(plan(DPOConfig, *said, "dpo.precompute_reference=true"))
    assert "scoring" in pair and "scoring" not in beforehand


@pytest.mark.usefixtures("folder")
def test_supervised_runs_have_no_sampling() -> None:
    measured()
    found = plan(SFTConfig, "data.max_tokens=64", "train.batch_size=4")
    seconds = cpu_seconds(found)
    assert seconds.keys() == {"forward and backward", "optimizer", "step"}


@pytest.mark.parametrize(
    "text", ["{", '{"rates": 3}', '{"rates": {"4": {"decode": {"steps": "x"}}}}', '{"rates": {}}']
)
@pytest.mark.usefixtures("folder")
def test_a_damaged_file_is_as_none(text: str) -> None:
    measured()
    rates_file(read_hardware())[0].write_text(text)
    assert read_rates(read_hardware(), 4) is None


QWEN3 = ModelFacts(
    parameters=596_049_920,
    layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    context=40_960,
    tied=True,
    family="qwen3",
    head_norms=True,
)
MEASURED = {
    case["name"]: case["measured"]
    for case in json.loads(
        (ROOT / "benchmarks" / "results" / "gpu-nvidia-h100-80gb-hbm3.json").read_text()
    )["cases"]
    if "measured" in case
}
"""Of ``benchmarks.gpu``, on one H100."""


def on_an_h100(kind: Any, longest: int, *said: str, **facts: Any) -> AnyPlan:
    known = Facts(machine("H100-80GB"), QWEN3, train_size=32, longest=longest, **facts)
    return resolve(load_config(kind, None, ["model.path=o/m", "data.train=o/d", *said]), known)


def test_planned_seconds_and_bytes_are_about_those_measured_on_a_gpu() -> None:
    """The libraries' memory is planned, and not measured."""
    rollouts = ("rollout.prompts_per_step=32", "rollout.group_size=8", "rollout.max_new_tokens=512")
    steps = on_an_h100(RLConfig, 256, *rollouts, 'reward.functions=["math"]')
    measured = MEASURED["grpo 0.6B, derived engine"]
    planned = step_seconds(steps)
    assert 1 <= planned["sampling"] / measured["seconds/rollout"] < 1.25
    assert 0.9 <= planned["step"] / measured["seconds"] < 1.25
    sft = on_an_h100(SFTConfig, 16384, "train.batch_size=1")
    measured = MEASURED["sft 0.6B, 16k"]
    assert 0.9 <= step_seconds(sft)["step"] / measured["seconds"] < 1.25
    [(_, price, _)] = planned_devices(sft.with_memory(microbatch=16384))
    assert 1 <= (price.peak - price.libraries) / measured["memory/device_peak"] < 1.1


def test_python_handles_the_tokens_of_steps_without_graphs() -> None:
    reward = 'reward.functions=["math"]'
    graphs, none = (
        step_work(plan, QWEN3, plan.training.samples, 768)["sampling"][0]["tokens handled"]
        for plan in (
            on_an_h100(RLConfig, 256, reward, "rollout.max_new_tokens=512", said)
            for said in ("system.compile=default", "system.compile=false")
        )
    )
    assert graphs == 0 < none


def test_a_rollout_batch_is_scored_once_for_all_passes_over_it() -> None:
    said = ('reward.functions=["math"]', "algorithm.kl.coef=0.1", "rollout.max_new_tokens=256")
    once, often = (
        step_work(plan, QWEN3, plan.training.samples, 512)
        for plan in (
            on_an_h100(RLConfig, 256, *said, f"train.passes_per_batch={count}") for count in (1, 4)
        )
    )
    assert often["scoring"][0]["operations"] == pytest.approx(once["scoring"][0]["operations"])
    assert often["training"][0]["operations"] > 3.9 * once["training"][0]["operations"]


def test_only_engines_that_take_turns_send_the_optimizer_away() -> None:
    reward = 'reward.functions=["math"]'
    first = on_an_h100(RFTConfig, 256, reward)  # samples before it trains
    turns = on_an_h100(RLConfig, 256, reward, "system.hybrid=true")
    works = [step_work(plan, QWEN3, plan.training.samples, 512) for plan in (first, turns)]
    assert ["taking turns" in work for work in works] == [False, True]


def test_a_pair_is_two_sequences() -> None:
    """It shares a micro-batch, and neither sequence attends to the other."""
    pairs = on_an_h100(DPOConfig, 1000, together=2000)
    alone = on_an_h100(KTOConfig, 1000, together=1000)
    assert pairs.training.longest == 2 * (alone.training.longest or 0)
    pair, one = (step_work(plan, QWEN3, 8, plan.training.longest or 0) for plan in (pairs, alone))
    assert pair["training"][0]["operations"] == 2 * one["training"][0]["operations"]
    passes = [plan.kind.passes for plan in (pairs, alone)]
    scored = [work["scoring"][0]["operations"] for work in (pair, one)]
    assert scored[0] / passes[0] == pytest.approx(2 * scored[1] / passes[1])


def test_a_score_model_has_no_vocabulary_head() -> None:
    scores = on_an_h100(RMConfig, 1000, together=2000)
    words = on_an_h100(DPOConfig, 1000, together=2000)
    seconds = [step_work(plan, QWEN3, 8, 2000)["training"][0] for plan in (scores, words)]
    head = 6 * QWEN3.vocab_size * QWEN3.hidden_size * 8 * 2000
    assert seconds[1]["operations"] - seconds[0]["operations"] == head


REWARD = 'reward.functions=["math"]'
KL = "algorithm.kl.coef=0.1"
ADAPTER = "lora.rank=8"
AT_ONCE = "system.logprob_chunk=100000"
PARAMETERS = 596_049_920
TEACHER = "teacher.path=o/t"


@pytest.mark.parametrize(
    ("kind", "said", "logprobs", "values", "teacher"),
    [
        (RLConfig, (REWARD,), 0, 0, 0),
        (RLConfig, (REWARD, KL), 1, 0, 0),
        (RLConfig, (REWARD, KL, ADAPTER), 1, 0, 0),
        (RLConfig, (REWARD, KL, "algorithm.decoupled=true"), 2, 0, 0),
        (RLConfig, (REWARD, "algorithm.name=ppo"), 1, 1, 0),
        (RLConfig, (REWARD, "algorithm.name=ppo", "critic.shared_trunk=true"), 1, 1, 0),
        (DPOConfig, (), 1, 0, 0),
        (DPOConfig, (ADAPTER,), 1, 0, 0),
        (DPOConfig, ("dpo.precompute_reference=true",), 0, 0, 0),
        (KTOConfig, (), 3, 0, 0),
        (KTOConfig, ("kto.precompute_reference=true",), 1, 0, 0),
        (DistillConfig, (TEACHER,), 0, 0, 2),
        (DistillConfig, ("teacher.path=policy", "teacher.prompt=hint"), 1, 0, 0),
        (DistillConfig, (TEACHER, 'teacher.url="http://h/v1"'), 0, 0, 0),
    ],
)
def test_every_pass_without_gradients_is_counted(
    kind: Any, said: tuple[str, ...], logprobs: int, values: int, teacher: float
) -> None:
    """Of policy, reference, critic and teacher, here with twice the policy's parameters."""
    facts = {"frozen_parameters": 2 * PARAMETERS} if teacher else {}
    plan = on_an_h100(kind, 500, *said, together=1000, **facts)
    work = step_work(plan, QWEN3, 8, 1000)
    step = step_size(plan, QWEN3, 8, 1000)
    expected = (logprobs + teacher) * (step.body + step.head) + values * step.body
    [scoring] = work.get("scoring", [{"operations": 0.0}])
    assert scoring["operations"] == pytest.approx(expected / 3)


@pytest.mark.parametrize(
    ("kind", "said"), [(SampledDistillConfig, "distill.mode=sampled"), (OfflineDistillConfig, "")]
)
def test_a_teacher_of_whole_distributions_computes_beside_the_student(kind: Any, said: str) -> None:
    more = [said] if said else ["distill.mode=offline"]
    small, large = (
        on_an_h100(kind, 500, TEACHER, *more, frozen_parameters=n * PARAMETERS) for n in (1, 3)
    )
    step = step_size(large, QWEN3, 8, 1000)
    one, three = (
        step_work(plan, QWEN3, 8, 1000)["training"][0]["operations"] for plan in (small, large)
    )
    assert three - one == pytest.approx(2 * (step.body + step.head) / 3)


def test_an_adapter_spares_the_gradients_of_weights_alone() -> None:
    """Attention has the same backward pass, and recomputing is a whole forward pass."""
    whole, adapter = (
        on_an_h100(SFTConfig, 16384, "system.gradient_checkpointing=true", *said)
        for said in ((), (ADAPTER,))
    )
    weights = PARAMETERS - QWEN3.outside_layers
    head = QWEN3.vocab_size * QWEN3.hidden_size
    operations = [
        step_work(plan, QWEN3, 1, 16384)["training"][0]["operations"] for plan in (whole, adapter)
    ]
    assert operations[0] - operations[1] == pytest.approx(2 * (weights + head) * 16384)


@pytest.mark.parametrize(
    ("said", "updated"),
    [
        (("system.zero_stage=0",), 1.0),
        (("system.zero_stage=2",), 1 / 8),
        (("system.zero_stage=3", "system.shard_size=4"), 1 / 4),
        (("system.zero_stage=2", "system.offload_optimizer=true"), 0.0),
    ],
)
@pytest.mark.parametrize("adapter", [(), (ADAPTER,)])
def test_an_optimizer_step_is_as_long_as_what_a_rank_updates(
    said: tuple[str, ...], updated: float, adapter: tuple[str, ...]
) -> None:
    """A rank of a sharded model its rows, and any other rank everything, as of an adapter."""
    known = Facts(machine("8xH100-80GB"), QWEN3, train_size=32, longest=1000)
    fixed = ("system.trainer_ranks=8", "system.gradient_checkpointing=false", AT_ONCE)
    base = ("model.path=o/m", "data.train=o/d", "system.max_tokens_per_microbatch=4096")
    plan = resolve(load_config(SFTConfig, None, [*base, *fixed, *said, *adapter]), known)
    number = adapter_numbers(QWEN3, 8) if adapter else PARAMETERS
    if adapter and updated:
        updated = 1.0
    words = QWEN3.vocab_size * QWEN3.hidden_size
    read = step_work(plan, QWEN3, 32, 1000)["training"][0]["bytes read again"]
    passed = 3 * 2 * PARAMETERS + 8 * number + words * (2 if adapter else 10)
    assert read - passed == pytest.approx(28 * updated * number)


def test_a_critic_reads_and_launches_as_much_as_the_policy_but_for_the_head() -> None:
    said = (REWARD, AT_ONCE, "system.gradient_checkpointing=false")
    said += ("system.max_tokens_per_microbatch=8192",)
    alone, both = (
        step_work(plan, QWEN3, 8, 1000)["training"][0]
        for plan in (
            on_an_h100(RLConfig, 500, *said, f"algorithm.name={name}") for name in ("grpo", "ppo")
        )
    )
    head = 10 * QWEN3.vocab_size * QWEN3.hidden_size
    assert both["passes"] == 2 * alone["passes"]
    assert both["bytes read again"] - head == pytest.approx(2 * (alone["bytes read again"] - head))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_of_a_sharded_model_are_gathered_to_score_too(stage: int) -> None:
    known = Facts(machine("8xH100-80GB"), QWEN3, train_size=32, longest=500)
    said = ["model.path=o/m", "data.train=o/d", REWARD, f"system.zero_stage={stage}"]
    said += ["system.trainer_ranks=8", "system.max_tokens_per_microbatch=2048"]
    said += ["system.sequence_parallel.size=1"]
    without, scored = (
        step_work(plan, QWEN3, 64, 1000)["between GPUs"][0]["bytes between GPUs"]
        for plan in (resolve(load_config(RLConfig, None, [*said, *kl]), known) for kl in ([], [KL]))
    )
    step = step_size(resolve(load_config(RLConfig, None, [*said, KL]), known), QWEN3, 64, 1000)
    assert scored - without == pytest.approx(step.micro * 2 * PARAMETERS * 7 / 8)


def test_episodes_share_their_prompt_alone_and_are_written_in_many_turns() -> None:
    """Turns of 100 tokens, of which there is room for all: the environment answers with as many."""
    said = (REWARD, "rollout.max_new_tokens=100", "rollout.group_size=4")
    turns = ('environment.command="play"', "environment.max_turns=5")
    one = on_an_h100(RLConfig, 200, *said)
    many = on_an_h100(RLConfig, 200, *said, *turns)
    assert parts_of_sample(one, 300) == (200, 100)
    longest = many.training.longest or 0
    assert longest == 200 + 5 * (100 + 128)
    assert parts_of_sample(many, longest) == (200, 500)
    assert parts_of_sample(many, 600) == (200, 400)
    step = step_size(many, QWEN3, 8, longest)
    assert step.tokens == 8 * longest - 6 * 200
    assert step.head == 6 * QWEN3.vocab_size * QWEN3.hidden_size * 8 * 500
    few = on_an_h100(RLConfig, 200, *said, *turns, "environment.concurrency=4")
    single, several, waiting = (
        step_work(plan, QWEN3, 8, plan.training.longest or 0)["sampling"][0]["passes"]
        for plan in (one, many, few)
    )
    assert several == 5 * single and waiting == 2 * several
    assert few.memory.kv_bytes < many.memory.kv_bytes


@pytest.mark.parametrize(("on", "apart"), [("2xH100-80GB", True), ("H100-80GB", False)])
def test_engines_are_ahead_only_on_gpus_of_their_own(on: str, *, apart: bool) -> None:
    known = Facts(machine(on), QWEN3, train_size=32, longest=500)
    said = ["model.path=o/m", "data.train=o/d", REWARD, "rollout.max_staleness=1"]
    said += ["system.engine_process=true"]
    seconds = step_seconds(resolve(load_config(RLConfig, None, said), known))
    whole = sum(each for name, each in seconds.items() if name != "step")
    assert (seconds["step"] < 0.99 * whole) == apart and seconds["step"] <= 1.001 * whole


LLAMA_70B = MODELS["70B (Llama 3)"]


def with_an_engine_over(on: str) -> AnyPlan:
    """A policy of 70B with an adapter, sampled by one engine over all GPUs of a machine."""
    gpus = len(machine(on).gpus)
    said = ["model.path=o/m", "data.train=o/d", 'reward.functions=["math"]', "lora.rank=16"]
    said += ["system.engine=vllm", "system.engines=1", "rollout.prompts_per_step=1"]
    said += [f"system.vllm.tensor_parallel_size={gpus}", f"rollout.group_size={gpus}"]
    facts = Facts(machine(on), LLAMA_70B, train_size=32, longest=512)
    return resolve(load_config(RLConfig, None, said), facts)


@pytest.mark.more
def test_a_split_engine_sums_every_layer_twice_in_each_step() -> None:
    plan = with_an_engine_over("4xB200")
    new = plan.said.rollout.max_new_tokens
    work = step_work(plan, LLAMA_70B, 4, 512 + new)["sampling"][0]
    sums = 2 * LLAMA_70B.layers
    assert work["all-reduces"] == sums * (new + 1)
    # Of each token's 16-bit numbers, a device sends three fourths twice; the prompt is shared.
    sent = sums * (512 + 4 * new) * LLAMA_70B.hidden_size * 2 * 2 * 3 / 4
    assert work["bytes all-reduced"] == pytest.approx(sent)


@pytest.mark.more
def test_a_split_engine_takes_about_as_long_as_was_measured() -> None:
    """Of vLLM's pull request 20759: 12.9 ms for each token of few requests, on four B200."""
    plan = with_an_engine_over("4xB200")
    seconds = step_seconds(plan)["sampling"] / plan.said.rollout.max_new_tokens
    assert 0.9 < seconds / 12.9e-3 < 1.1
