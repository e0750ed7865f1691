"""What vLLM may be asked for, and what is refused before anything loads. vLLM itself need not be
installed."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from tunesmith.config.commands import GenerateConfig, RFTConfig
from tunesmith.config.load import load_config
from tunesmith.config.resolved import config_text, settings
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import ConfigError
from tunesmith.plan.facts.hardware import Gpu, Hardware
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.checks import check, said_contradictions
from tunesmith.plan.rules.vllm import FIXED_ARGUMENTS, OWN_ARGUMENTS, extra_problem, version_problem
from tunesmith.run.engines.vllm.start import VllmSettings, engine_arguments
from tunesmith.run.specs.engines import VllmSpec
from tunesmith.run.specs.from_plan import engine_spec

MODEL = ModelFacts(
    parameters=10**6,
    layers=4,
    hidden_size=64,
    intermediate_size=128,
    heads=6,
    kv_heads=2,
    head_dim=32,
    vocab_size=300,
    context=512,
)
GPU = Gpu("GPU", memory_total=80 * 10**9, memory_free=70 * 10**9, capability=(9, 0))
CPU = Hardware("CPU", cores=2, memory_total=24 * 10**9, memory_available=20 * 10**9, bf16=False)
FACTS = Facts(CPU, MODEL, train_size=100, longest=40)
ON_GPUS = replace(FACTS, hardware=replace(CPU, gpus=(GPU, GPU)))
BASE = (
    'model.path="org/m"',
    'data.train="org/d"',
    'reward.functions=["exact_match"]',
    "rollout.max_new_tokens=20",
    'system.engine="vllm"',
    "system.engine_process=true",
    f'system.engine_python="{sys.executable}"',
)


def resolved(*overrides: str, facts: Facts = FACTS) -> Any:
    return resolve(load_config(RLConfig, None, [*BASE, *overrides]), facts)


def vllm_settings(config: Any) -> Any:
    spec = engine_spec(config)
    assert isinstance(spec, VllmSpec)
    return spec.settings


def refused(*overrides: str, facts: Facts = FACTS) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides, facts=facts)
    return str(caught.value)


def test_caching_and_compilation_are_derived_with_reasons() -> None:
    found = resolved()
    assert (found.settings["system.vllm.prefix_caching"], found.settings["system.vllm.eager"]) == (
        True,
        True,
    )
    reasons = {d.key: d.reason for d in found.reasons}
    assert "share its prefill" in reasons["system.vllm.prefix_caching"]
    assert "CPU" in reasons["system.vllm.eager"]
    alone = resolved("rollout.group_size=1", 'algorithm.name="reinforce"').vllm
    assert alone.prefix_caching is False
    assert resolved(facts=ON_GPUS).settings["system.vllm.eager"] is False
    said = resolved("system.vllm.eager=false", "system.vllm.prefix_caching=false").vllm
    assert (said.prefix_caching, said.eager) == (False, False)


def test_experts_are_recorded_with_prefix_caching() -> None:
    mixture = replace(MODEL, expert_widths=(128, 64))
    facts = replace(ON_GPUS, model=mixture)
    lone = ("rollout.group_size=1", 'algorithm.name="reinforce"')
    given = vllm_settings(resolved('algorithm.routing_replay="sampler"', *lone, facts=facts))
    assert given["records_experts"] and given["prefix_caching"]
    assert not vllm_settings(resolved(facts=facts))["records_experts"]


@pytest.mark.parametrize(
    ("kind", "samples"), [(GenerateConfig, 1), (GenerateConfig, 4), (RFTConfig, 15)]
)
def test_runs_that_only_sample_have_them_too(kind: Any, samples: int) -> None:
    base = [
        *(word for word in BASE if not word.startswith("rollout")),
        "sampling.max_new_tokens=20",
    ]
    asked = [f"sampling.n={samples}"] if kind is GenerateConfig else ["rft.threshold=1"]
    config = resolve(load_config(kind, None, [*base, *asked]), FACTS)
    assert (
        config.settings["system.vllm.prefix_caching"],
        config.settings["system.vllm.eager"],
    ) == (samples > 1, True)
    given = vllm_settings(config)
    assert given["eager"] and given["prefix_caching"] == (samples > 1)


def test_what_scores_given_answers_starts_no_engine() -> None:
    base = [word for word in BASE if not word.startswith("rollout")]
    found = resolve(load_config(GenerateConfig, None, [*base, 'output.kind="score"']), FACTS)
    assert found.settings["system.vllm.eager"] is None


def test_arguments_of_its_own_reach_vllm_and_ranks_stay_on_their_machine() -> None:
    said = 'system.vllm.extra={max_logprobs = 5, attention_config = {backend = "FLASH_ATTN"}}'
    found = resolved(
        said,
        "system.vllm.cuda_graph_sizes=[1, 8]",
        "system.vllm.tensor_parallel_size=2",
        "system.hybrid=true",
        facts=ON_GPUS,
    )
    assert (
        load_config(RLConfig, None, [*BASE, said]).system.vllm.extra
        == found.settings["system.vllm.extra"]
    )
    assert (
        tomllib.loads(config_text(found.given, found.reasons))["system"]["vllm"]["extra"][
            "max_logprobs"
        ]
        == 5
    )
    given = engine_arguments(VllmSettings(**vllm_settings(found)))
    assert (given["max_logprobs"], given["attention_config"]) == (5, {"backend": "FLASH_ATTN"})
    assert given["cudagraph_capture_sizes"] == [1, 8]
    assert given["distributed_executor_backend"] == "mp"
    one = engine_arguments(VllmSettings("m", "float32"))
    assert not {"distributed_executor_backend", "cudagraph_capture_sizes"} & one.keys()


def test_an_engine_sleeps_that_takes_turns_with_the_trainer() -> None:
    """vLLM then allocates otherwise, of which one process can have one engine only."""

    def sleeps(config: Any) -> bool:
        return engine_arguments(VllmSettings(**vllm_settings(config)))["enable_sleep_mode"]

    assert sleeps(resolved("system.hybrid=true", facts=ON_GPUS))
    assert not sleeps(resolved("system.hybrid=false", facts=ON_GPUS))
    assert not sleeps(resolved("system.hybrid=true"))
    base = [word for word in BASE if not word.startswith("rollout")]
    found = load_config(GenerateConfig, None, [*base, "sampling.max_new_tokens=20"])
    assert not sleeps(resolve(found, ON_GPUS))


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ([], 16384),
        (["system.max_running=20000"], 20000),
        (["system.vllm.max_batched_tokens=512"], 512),
        (["system.vllm.chunked_prefill=false", "system.vllm.max_model_len=500"], 16384),
    ],
)
def test_a_pass_has_room_for_all_that_run(said: list[str], tokens: int) -> None:
    plan = resolved(*said, facts=ON_GPUS)
    given = engine_arguments(VllmSettings(**vllm_settings(plan)))
    assert given["max_num_batched_tokens"] == tokens == plan.vllm.step_tokens
    assert given["max_num_seqs"] <= tokens


def test_without_chunks_a_pass_has_room_for_a_whole_prompt() -> None:
    model = replace(MODEL, context=40000)
    plan = resolved("system.vllm.chunked_prefill=false", facts=replace(ON_GPUS, model=model))
    assert plan.vllm.step_tokens == 40000


def test_vllm_decides_whether_it_schedules_ahead() -> None:
    assert "async_scheduling" not in engine_arguments(VllmSettings("m", "float32"))
    found = resolved("system.vllm.extra={async_scheduling = false}")
    given = engine_arguments(VllmSettings(**vllm_settings(found)))
    assert given["async_scheduling"] is False


def test_weights_may_change_while_tokens_pass_through_stages() -> None:
    assert resolved(
        "system.vllm.pipeline_parallel_size=2", "rollout.partial=true", "rollout.max_staleness=1"
    )


def test_every_argument_that_a_key_sets_is_refused_in_the_table() -> None:
    """Whatever is given to vLLM under these settings has a key or a reason."""
    everything = VllmSettings(
        "m",
        "bfloat16",
        max_model_len=9,
        memory_share=0.5,
        chunked_prefill=True,
        max_batched_tokens=9,
        quantization="fp8_per_block",
        draft_model="d",
        tensor_parallel_size=2,
        cuda_graph_sizes=[1],
        adapter_rank=1,
        adapter_modules=["q_proj"],
        records_experts=True,
    )
    given = {
        **engine_arguments(everything),
        **engine_arguments(VllmSettings("m", "float32", kv_bytes=9)),
    }
    assert given.keys() - {"speculative_config"} <= OWN_ARGUMENTS.keys() | FIXED_ARGUMENTS.keys()
    known = {"system", "model", "lora", "algorithm"}
    assert {key.partition(".")[0] for key in OWN_ARGUMENTS.values()} == known
    keys = settings(load_config(RLConfig, None, [*BASE])).keys()
    assert set(OWN_ARGUMENTS.values()) <= keys


def test_names_that_vllm_does_not_have() -> None:
    assert extra_problem(["max_logprobs"], ["max_logprobs"], "0.32.0") is None
    assert "Did you mean 'max_logprobs'" in (
        extra_problem(["max_logprob"], ["max_logprobs", "x"], "0.32.0") or ""
    )
    assert "no such engine argument" in (extra_problem(["zzz"], ["max_logprobs"], "0.32.0") or "")


def test_the_table_is_spelt_out_and_reads_back() -> None:
    found = resolved("system.vllm.max_model_len=100", "system.vllm.tensor_parallel_size=2")
    text = config_text(found.given, found.reasons)
    assert (
        "[system.vllm]\n" in text and "max_model_len = 100" in text and "# eager = true  # " in text
    )
    said = found.given
    assert said["system.vllm.tensor_parallel_size"] == 2
    assert found.settings["system.vllm.pipeline_parallel_size"] == 1
    assert not any(isinstance(v, dict) for k, v in said.items() if k.startswith("system.vllm"))


def test_a_share_of_a_gpu_takes_the_place_of_kv_memory() -> None:
    found = resolved("system.vllm.memory_share=0.5", facts=ON_GPUS).settings
    assert found["system.vllm.memory_share"] == 0.5 and found["system.kv_memory"] is None
    assert "leave one out" in refused(
        "system.vllm.memory_share=0.5", 'system.kv_memory="1GB"', facts=ON_GPUS
    )
    assert "of a GPU's memory" in refused("system.vllm.memory_share=0.5")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["system.vllm.tensor_parallel_size=4"], "2 cores"),
        (["system.vllm.pipeline_parallel_size=5"], "the model has 4 layers"),
        (["system.vllm.max_model_len=50"], "raise it to at least 60"),
        (["system.vllm.max_model_len=600"], "context of 512"),
        (['system.kv_memory="10KB"'], "does not hold one sequence of 60 tokens"),
        (["system.max_prefill_tokens=64"], "system.vllm.max_batched_tokens"),
        (['system.draft_model="org/d"'], "system.draft_model"),
        (
            ['system.draft_model="org/d"', "rollout.min_p=0.1"],
            "rollout.min_p = 0.1 does not go with",
        ),
        (["rollout.temperature=0.005"], "rollout.temperature = 0.005: vLLM samples with 0.01 to 2"),
        (["eval.temperature=2.5"], "eval.temperature = 2.5: vLLM samples with 0.01 to 2"),
        (['system.vllm.quantization="awq"'], "rounds to while loading"),
        (['system.vllm.quantization="fp8_per_chanel"'], '"fp8_per_channel"'),
        (['system.vllm.quantization="fp8_per_channel"'], 'algorithm.correction = "token_truncate"'),
        (["system.vllm.data_parallel_size=2"], "is called system.engines"),
        (
            ["system.vllm.extra={max_num_seqs = 8}"],
            "system.vllm.extra.max_num_seqs is set with system.max_running",
        ),
        (
            ["system.vllm.extra={gpu_memory_utilization = 0.9}"],
            "is set with system.vllm.memory_share",
        ),
        (
            ["system.vllm.extra={cudagraph_capture_sizes = [1]}"],
            "is set with system.vllm.cuda_graph_sizes",
        ),
        (['system.vllm.extra={logprobs_mode = "raw_logprobs"}'], "system.vllm.extra.logprobs_mode"),
        (["system.vllm.extra=3"], "a table of vLLM's own engine arguments"),
        (["system.vllm.cuda_graph_sizes=[1, 2]"], "for GPUs"),
        (["system.vllm.cuda_graph_sizes=[1, 2]", "system.vllm.eager=true"], "leave one out"),
        (["system.vllm.cuda_graph_sizes=[]"], "is empty"),
        (["system.vllm.cuda_graph_sizes=[0]"], "cuda_graph_sizes"),
        (["system.vllm.eagre=true"], "Did you mean 'eager'"),
        (["system.vllm.eager=1"], "system.vllm.eager is 1; it must be true or false"),
        (
            [
                "system.vllm.tensor_parallel_size=2",
                'system.weight_plane="ipc"',
                "system.trainer_ranks=1",
            ],
            "they take 2, where system.trainer_ranks = 1",
        ),
        (
            ["system.vllm.tensor_parallel_size=2", "system.engine_process=false"],
            "set system.engine_process = true",
        ),
        (
            ['system.engine="local"', "system.vllm.eager=true"],
            'no effect with system.engine = "local"',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(said: list[str], words: str) -> None:
    assert words in refused(*said)


def test_ranks_divide_the_heads_and_have_devices() -> None:
    """Of queries, and of keys and values, of which ranks may have copies."""
    assert "keys and values; use one of [1, 2, 6]" in refused(
        "system.vllm.tensor_parallel_size=3", facts=ON_GPUS
    )
    assert "take 7 GPUs, and this process sees 2" in refused(
        "system.vllm.tensor_parallel_size=6", facts=ON_GPUS
    )
    apart = refused("system.vllm.tensor_parallel_size=2", "system.hybrid=false", facts=ON_GPUS)
    assert "take 3 GPUs, and this process sees 2" in apart
    assert resolved("system.vllm.tensor_parallel_size=2", facts=ON_GPUS).settings["system.hybrid"]
    on_one = replace(FACTS, hardware=replace(CPU, gpus=(GPU,)))
    assert "2 ranks, and this machine has 1 GPUs" in refused(
        "system.vllm.pipeline_parallel_size=2", facts=on_one
    )
    assert resolved("system.vllm.pipeline_parallel_size=2")
    second = 'system.device="cuda:1"'
    assert resolved(second, facts=ON_GPUS)
    # Without system.engine_python this environment is looked at too.
    here = load_config(RLConfig, None, [*BASE[:5], second, "system.engine_process=false"])
    assert ("system.device", "system.engine_process") in [
        problem.keys for problem in said_contradictions(here)
    ]


@pytest.mark.parametrize(
    ("width", "works"), [(8, False), (16, False), (32, True), (40, False), (48, True), (128, True)]
)
def test_heads_that_vllm_has_no_kernel_for_on_a_cpu(width: int, works: bool) -> None:
    model = replace(MODEL, head_dim=width)
    if works:
        assert resolved(facts=replace(FACTS, model=model))
    else:
        assert f"heads have size {width}" in refused(facts=replace(FACTS, model=model))
    assert resolved(facts=replace(ON_GPUS, model=model))


def test_guesses_and_rounding_are_allowed_where_they_are_right() -> None:
    draft = 'system.draft_model="org/d"'
    ngrams = "system.vllm.extra={speculative_config={method='ngram'}}"
    for alone in (draft, ngrams):
        assert resolved(alone, facts=ON_GPUS).settings["system.engine"] == "vllm"
        assert "with vLLM on a CPU" in refused(alone)
    assert "leave one out" in refused(draft, ngrams, facts=ON_GPUS)
    rounding = ('algorithm.correction="token_truncate"', 'model.dtype="bfloat16"')
    assert resolved('system.vllm.quantization="fp8_per_channel"', *rounding).settings[
        "algorithm.decoupled"
    ]
    assert "no kernel for it on a CPU" in refused(
        'system.vllm.quantization="fp8_per_tensor"', *rounding
    )
    assert "in 16 bits" in refused(
        'system.vllm.quantization="fp8_per_channel"', rounding[0], 'model.dtype="float32"'
    )


def test_min_p_does_not_go_with_guesses_in_a_run_that_samples_only_either() -> None:
    said = [
        *(s for s in BASE if not s.startswith("rollout.")),
        'system.draft_model="org/d"',
        "sampling.min_p=0.1",
    ]
    config = load_config(GenerateConfig, None, [*said, 'output.kind="best"', "sampling.n=2"])
    with pytest.raises(
        ConfigError, match=r"sampling\.min_p = 0\.1 does not go with system\.draft_model"
    ):
        check(config)


def test_settings_of_vllm_mean_nothing_without_sampling() -> None:
    said = ['model.path="org/m"', 'data.train="org/d"', "system.vllm.eager=true"]
    with pytest.raises(ConfigError, match=r"system\.vllm\.eager has no effect"):
        check(load_config(SFTConfig, None, said))


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ("0.31.0", True),
        ("0.32.4+cpu", True),
        ("0.33.1", True),
        ("0.30.2", False),
        ("0.34.0", False),
        ("0.9", False),
        ("1.32", False),
        ("dev", False),
    ],
)
def test_versions(found: str, fits: bool) -> None:
    problem = version_problem(found)
    assert (problem is None) == fits
    if problem:
        assert found in problem and "pip install 'vllm>=0.31,<0.34'" in problem


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_sequences_past_the_switch_of_longrope_need_the_embedded_engine(engine: str) -> None:
    """Other engines choose the frequencies for a whole batch, or once for all that comes."""
    facts = replace(FACTS, model=replace(MODEL, switch=60))
    longer = replace(facts, longest=41)
    if engine == "vllm":
        assert resolved(facts=facts).settings["system.vllm.max_model_len"] == 60
        assert "max_model_len = 61" in refused("system.vllm.max_model_len=61", facts=facts)
        assert refused(facts=longer).count("longrope") == 1
    else:
        sglang = (*BASE[:4], 'system.engine="sglang"', 'system.engine_urls=["http://127.0.0.1:1"]')
        resolve(load_config(RLConfig, None, list(sglang)), facts)
        with pytest.raises(ConfigError, match="longrope"):
            resolve(load_config(RLConfig, None, list(sglang)), longer)
    resolve(load_config(RLConfig, None, list(BASE[:4])), longer)
