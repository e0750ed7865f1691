"""How much memory of its devices a run needs, by its settings; a run that cannot fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from tunesmith.config.distillation import DistillConfig
from tunesmith.config.generation import RFTConfig, SamplingConfig
from tunesmith.config.placement import PlacementSection, Role
from tunesmith.config.preference import DPOConfig, KTOConfig, ScoreConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.sizes import format_size, parse_size
from tunesmith.config.toml import toml_value
from tunesmith.plan.cost import USUAL_RANK, Layout, Price, activation_bytes, copy_bytes, price
from tunesmith.plan.facts import Facts, ModelFacts
from tunesmith.plan.filling import with_values
from tunesmith.plan.gpus import engines_together, has_own_devices, ranks_per_engine
from tunesmith.plan.hardware import Gpu
from tunesmith.plan.weights import loads_model, weights_apart

MARGIN = 1.1
"""A run is refused if it needs more than this many times the free memory; both numbers are estimates."""
LEAST_TOKENS = 64
"""Assumed length of a sample if neither data nor settings tell it."""


def on_gpu(config: RunConfig) -> bool:
    return (known(config.system, "device") or "cpu").startswith("cuda")


def gpu_of(config: RunConfig, facts: Facts) -> Gpu | None:
    index = int((known(config.system, "device") or "").partition(":")[2] or 0)
    gpus = facts.hardware.gpus
    return gpus[index] if on_gpu(config) and index < len(gpus) else None


def free_memory(config: RunConfig, facts: Facts) -> int:
    """Bytes of the device that the run may use: ``system.device_memory``, or what is free before anything loads."""
    if config.system.device_memory is not None:
        return parse_size(config.system.device_memory)
    gpu = gpu_of(config, facts)
    return gpu.memory_free if gpu else facts.hardware.memory_available


def trainer_memory(config: RunConfig, facts: Facts) -> int:
    """``free_memory`` for each trainer rank; on a CPU the ranks share it."""
    return free_memory(config, facts) // (1 if on_gpu(config) else config.system.trainer_ranks)


def bytes_per_number(config: RunConfig) -> int:
    return 4 if known(config.model, "dtype") == "float32" else 2


def bytes_per_token(config: RunConfig, model: ModelFacts, *, checkpointing: bool) -> int:
    """What backward keeps of a micro-batch's token on each of the ranks that share it."""
    return ceil(activation_bytes(model, bytes_per_number(config), checkpointing) / config.system.sequence_parallel.size)


def has_critic(config: RunConfig) -> bool:
    """Whether there is a critic with a separate model."""
    if not isinstance(config, RLConfig):
        return False
    return "critic" in config.algorithm.needs and not config.critic.shared_trunk


def keeps_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the model is kept for a KL or a preference loss; with an adapter none is needed."""
    if config.lora.on or isinstance(config, DistillConfig):
        return False
    if isinstance(config, RLConfig):
        return config.algorithm.reference is not None
    section = config.dpo if isinstance(config, DPOConfig) else config.kto if isinstance(config, KTOConfig) else None
    return section is not None and not section.precompute_reference


def longest_sample(config: RunConfig, facts: Facts) -> int | None:
    """Tokens of the longest sample, or of samples that must share a micro-batch; None if unknown."""
    if config.supervised:
        return facts.together or facts.longest or config.data.max_tokens
    if isinstance(config, RLConfig) and config.environment.max_tokens is not None:
        return config.environment.max_tokens
    prompt = facts.longest or config.data.max_prompt_tokens
    return None if prompt is None else prompt + config.new_tokens


def engines_elsewhere(config: RunConfig, facts: Facts) -> bool:
    """Whether engines have their own GPUs."""
    if config.system.cluster != "none":
        return on_gpu(config) and not _shares_trainer_device(config, "rollout")
    return not known(config.system, "hybrid") and has_own_devices(config, len(facts.hardware.gpus))


def _shares_trainer_device(config: RunConfig, role: Role) -> bool:
    """Whether a role's processes share the trainer's device."""
    if config.system.cluster == "none" or not on_gpu(config):
        return True
    groups = (config.system.placement or PlacementSection()).colocate
    return any({"actor", role} <= set(group) for group in groups)


def layout_of(config: RunConfig, facts: Facts) -> Layout:
    """The layout of the trainer's device, or of the sampler's if nothing is trained."""
    system = config.system
    here = config.drawing is not None and not system.served and not engines_elsewhere(config, facts)
    together = engines_together(config, len(facts.hardware.gpus)) if here else 0
    frozen = facts.frozen_parameters
    if not isinstance(config, DistillConfig) and not _shares_trainer_device(config, "reward"):
        frozen = 0
    lora = config.lora.on
    return Layout(
        bytes_per_number=bytes_per_number(config),
        device="cuda" if on_gpu(config) else "cpu",
        # A run that samples first and trains afterwards holds the model in both phases.
        holds_model=config.trains or loads_model(config),
        trains=config.trains,
        lora_rank=(config.lora.rank or USUAL_RANK) if lora else None,
        quantize=config.model.quantize,
        muon=config.train.optimizer.name == "muon",
        ema=config.train.ema_decay is not None,
        models=1 + (has_critic(config) and _shares_trainer_device(config, "critic")),
        references=int(keeps_reference(config) and _shares_trainer_device(config, "ref")),
        frozen_parameters=frozen,
        shards=(known(system, "shard_size") or system.trainer_ranks) if system.zero_stage else 1,
        zero_stage=system.zero_stage,
        has_vocabulary_head=not isinstance(config, ScoreConfig),
        checkpointing=bool(known(system, "gradient_checkpointing")),
        sequence=system.sequence_parallel.size,
        chunk=system.logprob_chunk,
        engines=together if weights_apart(config) else 0,
        ranks=ranks_per_engine(config),
        turns=bool(known(system, "hybrid")) or isinstance(config, RFTConfig),
    )


def planned(config: RunConfig, facts: Facts) -> Price | None:
    """Memory of a resolved run on the trainer's or sampler's device; None if the model's size is unknown."""
    if facts.model is None or facts.model.parameters is None:
        return None
    kv = known(config.system, "kv_memory")
    here = not engines_elsewhere(config, facts)
    engines = engines_together(config, len(facts.hardware.gpus))
    kv_bytes = parse_size(kv) * engines if kv is not None and here else 0
    return price(facts.model, replace(_with_tokens(config, facts, layout_of(config, facts)), kv_bytes=kv_bytes))


def _with_tokens(config: RunConfig, facts: Facts, layout: Layout) -> Layout:
    """The layout with the tokens of a micro-batch, as far as they are known."""
    tokens = known(config.system, "max_tokens_per_microbatch") or longest_sample(config, facts) or LEAST_TOKENS
    return replace(layout, tokens=tokens)


def planned_elsewhere(config: RunConfig, facts: Facts) -> Price | None:
    """Memory of each engine on each of its own GPUs; None if engines have none."""
    model = facts.model
    if model is None or model.parameters is None or config.system.served or not engines_elsewhere(config, facts):
        return None
    kv = parse_size(kv) if (kv := known(config.system, "kv_memory")) else 0
    copy = copy_bytes(model, bytes_per_number(config), config.model.quantize)
    return Price(engine=copy // ranks_per_engine(config), kv=kv)


def planned_devices(config: RunConfig, facts: Facts) -> list[tuple[str, Price, int]]:
    """Each kind of device that the run uses, by the processes on it: planned and free memory; none if the model's size
    is unknown."""
    own = planned(config, facts)
    if own is None or facts.model is None:
        return []
    here = "trainer" if config.trains else "engine"
    devices = [(here, own, trainer_memory(config, facts))]
    if (engines := planned_elsewhere(config, facts)) is not None:
        devices.append(("engine", engines, free_memory(config, facts)))
    return [*devices, *((role, each, free_memory(config, facts)) for role, each in _roles_apart(config, facts))]


def _roles_apart(config: RunConfig, facts: Facts) -> Iterator[tuple[str, Price]]:
    """Models that have GPUs of their own on a cluster, without the engines."""
    if config.system.cluster == "none" or not on_gpu(config) or facts.model is None:
        return
    layout = replace(layout_of(config, facts), models=1, references=0, frozen_parameters=0, engines=0)
    tokens = known(config.system, "max_tokens_per_microbatch") or longest_sample(config, facts) or LEAST_TOKENS
    scored = tokens * activation_bytes(facts.model, layout.bytes_per_number, checkpointing=True) // facts.model.layers
    if has_critic(config) and not _shares_trainer_device(config, "critic"):
        yield "critic", price(facts.model, replace(layout, tokens=tokens, has_vocabulary_head=False))
    if keeps_reference(config) and not _shares_trainer_device(config, "ref"):
        yield "reference", Price(frozen=copy_bytes(facts.model, layout.bytes_per_number), activations=scored)
    if facts.frozen_parameters and not _shares_trainer_device(config, "reward"):
        weights = facts.frozen_parameters * layout.bytes_per_number
        yield "reward model", Price(frozen=weights, activations=scored)


def planned_roles(config: RunConfig, facts: Facts) -> dict[str, Price]:
    """The trainer's device by role. What does not train only holds its weights; the sum is ``planned``."""
    model, own = facts.model, planned(config, facts)
    if model is None or own is None:
        return {}
    layout = layout_of(config, facts)
    policy = price(model, replace(_with_tokens(config, facts, layout), models=1, references=0, frozen_parameters=0))
    policy = replace(policy, engine=0, kv=0)
    roles = {"policy": policy}
    if layout.models > 1:
        both = price(model, replace(layout, models=2))
        one = price(model, replace(layout, models=1))
        parts = ("weights", "gradients", "optimizer")
        roles["critic"] = Price(**{part: getattr(both, part) - getattr(one, part) for part in parts})
    if layout.references:
        roles["reference"] = Price(frozen=price(model, replace(layout, frozen_parameters=0)).frozen)
    if others := own.frozen - sum(role.frozen for role in roles.values()):
        roles["teacher" if isinstance(config, DistillConfig) else "reward models"] = Price(frozen=others)
    if own.engine or own.kv:
        roles["engines"] = Price(engine=own.engine, kv=own.kv)
    return roles


PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "frozen": "frozen models",
    "activations": "activations of a micro-batch",
    "head": "log-probabilities of a chunk",
    "engine": "the engines' weights",
    "kv": "keys and values",
}
"""The parts of a ``Price`` in words."""


def least(config: RunConfig, facts: Facts) -> Price | None:
    """The least memory a run needs: micro-batches of one sample, keys and values of one sequence."""
    model = facts.model
    if model is None or model.parameters is None:
        return None
    layout, longest = layout_of(config, facts), longest_sample(config, facts) or LEAST_TOKENS
    sequence = longest * model.kv_bytes_per_token(layout.bytes_per_number) // layout.ranks
    samples = config.drawing is not None and not engines_elsewhere(config, facts)
    engines = engines_together(config, len(facts.hardware.gpus))
    kv = sequence * engines if samples and not config.system.served else 0
    return price(model, replace(layout, tokens=longest if layout.trains else 0, kv_bytes=kv))


def memory_problems(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Problems with what does not fit, with the numbers and the nearest change that fits."""
    needed, free = least(config, facts), trainer_memory(config, facts)
    if needed is not None and needed.peak > MARGIN * free:
        yield _does_not_fit(config, needed, free, _remedy(config, facts, free))
    elsewhere, model = planned_elsewhere(config, facts), facts.model
    if elsewhere is not None and model is not None:
        sequence = (longest_sample(config, facts) or LEAST_TOKENS) * model.kv_bytes_per_token(bytes_per_number(config))
        needed, free = replace(elsewhere, kv=sequence // ranks_per_engine(config)), free_memory(config, facts)
        if needed.peak > MARGIN * free:
            cure = "split each engine over more GPUs with system.vllm.tensor_parallel_size"
            yield _does_not_fit(config, needed, free, cure, "each engine's GPU")


def memory_notes(config: RunConfig, facts: Facts) -> Iterator[str]:
    needed, free = least(config, facts), trainer_memory(config, facts)
    if needed is not None and free < needed.peak <= MARGIN * free:
        yield f"the run may not fit: it needs about {format_size(needed.peak)}, and {format_size(free)} are free"


def _does_not_fit(config: RunConfig, needed: Price, free: int, cure: str, where: str | None = None) -> str:
    listed = ", ".join(f"{words} {format_size(n)}" for part, words in PARTS.items() if (n := getattr(needed, part)))
    return (
        f"{config.model.path} does not fit on {where or config.system.device}: it needs at least "
        f"{format_size(needed.peak)} ({listed}), and {format_size(free)} are free. {cure[0].upper()}{cure[1:]}. If "
        f'more can be used than was found, set system.device_memory = "{ceil(needed.peak / 10**9)}GB"'
    )


def _remedy(config: RunConfig, facts: Facts, free: int) -> str:
    """The nearest change after which the run fits, or else the largest run that fits."""
    always: dict[str, Any] = {"system.gradient_checkpointing": True} if config.trains else {}
    peaks: list[int] = []
    for changes in _changes(config, facts):
        changed = least(with_values(config, always | changes), facts)
        if changed is None:
            continue
        if changed.peak <= free:
            words = " and ".join(f"{key} = {toml_value(value)}" for key, value in changes.items())
            return f"what fits: {words} ({format_size(changed.peak)})"
        peaks.append(changed.peak)
    if shorter := _longest_that_fits(config, facts, free):
        return f"what fits: samples of at most {shorter} tokens"
    parameters = (facts.model and facts.model.parameters) or 0
    largest = parameters * free / min(peaks, default=1)
    return f"a model of this shape may have {largest / 1e9:.2g}B parameters at most, with the least memory there is"


def _changes(config: RunConfig, facts: Facts) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, the nearest first."""
    if config.trains:
        if not config.system.gradient_checkpointing:
            yield {"system.gradient_checkpointing": True}
        if has_critic(config):
            yield {"critic.shared_trunk": True}
        if isinstance(config, DPOConfig | KTOConfig):
            yield {f"{config.command}.precompute_reference": True}
        if not config.lora.on:
            for ranks in (n for n in (2, 4, 8) if n <= len(facts.hardware.gpus)):
                yield {"system.trainer_ranks": ranks, "system.zero_stage": 3}
                if facts.model is not None and facts.model.heads % ranks == 0:
                    together = {"system.zero_stage": 3, "system.sequence_parallel.size": ranks}
                    yield {"system.trainer_ranks": ranks, **together}
            yield {"lora.rank": USUAL_RANK}
    engine = config.system.engine
    if config.model.quantize is None and engine == "local" and not isinstance(config, ScoreConfig):
        lora = {} if not config.trains or config.lora.on else {"lora.rank": USUAL_RANK}
        yield from ({**lora, "model.quantize": name} for name in ("int8", "nf4"))
    if engine == "vllm" and isinstance(config, SamplingConfig):
        for ranks in (n for n in (2, 4, 8) if n <= len(facts.hardware.gpus)):
            yield {"system.vllm.tensor_parallel_size": ranks, "system.engine_process": True}


def _longest_that_fits(config: RunConfig, facts: Facts, free: int) -> int | None:
    """The longest sample, divided by a power of two, with which the run fits."""
    tokens, layout = longest_sample(config, facts), replace(layout_of(config, facts), checkpointing=True)
    if tokens is None or facts.model is None:
        return None
    while (tokens := tokens // 2) >= LEAST_TOKENS:
        kv = tokens * facts.model.kv_bytes_per_token(layout.bytes_per_number)
        if price(facts.model, replace(layout, tokens=tokens, kv_bytes=kv)).peak <= free:
            return tokens
    return None
