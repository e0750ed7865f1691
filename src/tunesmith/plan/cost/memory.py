"""How much memory a run needs on its devices, given its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf, sqrt

from tunesmith.config.commands import DistillConfig, RFTConfig, ScoreConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size, parse_size
from tunesmith.plan.cost.device import Layout, Price
from tunesmith.plan.cost.price import (
    LIBRARIES,
    USUAL_RANK,
    activation_bytes,
    adapter_numbers,
    backward_bytes,
    copy_bytes,
    gathered_bytes,
    prepared_bytes,
    price,
    scoring_bytes,
    sent_bytes,
)
from tunesmith.plan.facts.hardware import Gpu
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.devices import (
    decodes_compiled,
    engines_together,
    has_own_devices,
    on_gpu,
    ranks_per_engine,
)
from tunesmith.plan.processes.roles import (
    has_critic,
    keeps_reference,
    processes_with_trainer,
    scores,
    scoring_shards,
    shares_trainer_device,
    teaches,
)
from tunesmith.plan.processes.weights import BUCKET, loads_model, publishing_ranks, weights_apart

LIMIT = 0.95
"""A run fits a GPU if it needs at most this share of the free memory; the rest is for what no
estimate counts."""
MARGIN = 1.1
"""A run that fits in no layout is refused if it needs more than this multiple of the free
memory."""
HOST_SHARE = 0.95
"""Usable share of the free host memory; the rest is for Python and its libraries."""
BLOCK = 32
"""Engines allocate memory for a prompt or a completion in blocks of at most this many tokens."""
LEAST_TOKENS = 64
"""Assumed length of a sample if neither data nor settings determine it."""


def gpu_of(config: RunConfig, facts: Facts) -> Gpu | None:
    index = int((known(config.system, "device") or "").partition(":")[2] or 0)
    gpus = facts.hardware.gpus
    return gpus[index] if on_gpu(config) and index < len(gpus) else None


def free_memory(config: RunConfig, facts: Facts) -> int:
    """Bytes of the device that the run may use: ``system.device_memory``, or the memory free before
    anything loads."""
    if config.system.device_memory is not None:
        return parse_size(config.system.device_memory)
    gpu = gpu_of(config, facts)
    return gpu.memory_free if gpu else facts.hardware.memory_available


def trainer_memory(config: RunConfig, facts: Facts) -> int:
    """``free_memory`` for each trainer rank; on a CPU the ranks share it."""
    return free_memory(config, facts) // (1 if on_gpu(config) else config.system.trainer_ranks)


def bytes_per_number(config: RunConfig) -> int:
    return 4 if known(config.model, "dtype") == "float32" else 2


def bytes_per_token(model: ModelFacts, layout: Layout) -> int:
    """Bytes per additional token of a micro-batch on each rank that shares it: activations saved
    for the backward pass, and temporaries of a layer's backward pass."""
    return ceil((activation_bytes(model, layout) + backward_bytes(model, layout)) / layout.sequence)


def longest_sample(config: RunConfig, facts: Facts) -> int | None:
    """Tokens in the longest sample, or in samples that must share a micro-batch; None if
    unknown."""
    if config.supervised:
        return facts.together or facts.longest or config.data.max_tokens
    if isinstance(config, RLConfig) and config.environment.max_tokens is not None:
        return config.environment.max_tokens
    prompt = facts.longest or config.data.max_prompt_tokens
    return None if prompt is None else prompt + config.new_tokens


def engines_elsewhere(config: RunConfig, facts: Facts) -> bool:
    """Whether engines have their own GPUs."""
    if config.system.cluster != "none":
        return on_gpu(config) and not shares_trainer_device(config, "rollout")
    return not known(config.system, "hybrid") and has_own_devices(config, len(facts.hardware.gpus))


def layout_of(config: RunConfig, facts: Facts) -> Layout:
    """The layout of the trainer's device, or of the sampler's if nothing is trained."""
    system = config.system
    here = config.samples and not system.engine_kind.served and not engines_elsewhere(config, facts)
    together = engines_together(config, len(facts.hardware.gpus)) if here else 0
    frozen = facts.frozen_parameters
    if not isinstance(config, DistillConfig):
        frozen = ceil(frozen / scoring_shards(config, "reward")) * shares_trainer_device(
            config, "reward"
        )
    lora = config.lora.on
    return Layout(
        bytes_per_number=bytes_per_number(config),
        device="cuda" if on_gpu(config) else "cpu",
        # A run that samples before it trains holds the model in both phases.
        holds_model=config.trains or loads_model(config),
        trains=config.trains,
        lora_rank=(config.lora.rank or USUAL_RANK) if lora else None,
        quantize=config.model.quantize,
        offload=bool(known(system, "offload_optimizer")),
        offload_parameters=bool(known(system, "offload_parameters")),
        offload_frozen=bool(known(system, "offload_reference")),
        teaches=teaches(config),
        offload_activations=bool(known(system, "offload_activations")),
        muon=config.train.optimizer.name == "muon",
        ema=config.train.ema_decay is not None,
        models=1 + (has_critic(config) and shares_trainer_device(config, "critic")),
        references=int(keeps_reference(config) and shares_trainer_device(config, "ref")),
        frozen_parameters=frozen,
        shards=(known(system, "shard_size") or system.trainer_ranks) if system.zero_stage else 1,
        zero_stage=system.zero_stage or 3 * bool(known(system, "offload_parameters")),
        has_vocabulary_head=not isinstance(config, ScoreConfig),
        checkpointing=float(known(system, "gradient_checkpointing") or 0),
        tokens=known(system, "max_tokens_per_microbatch")
        or longest_sample(config, facts)
        or LEAST_TOKENS,
        sequence=system.sequence_parallel.size,
        chunk=system.logprob_chunk,
        engines=together if weights_apart(config) else 0,
        ranks=ranks_per_engine(config),
        prepared=together * _prepared(config, facts),
        turns=bool(known(system, "hybrid")) or isinstance(config, RFTConfig),
        keeps_base=isinstance(config, RLConfig) and lora and not system.engine_kind.third_party,
        published=_bytes_to_send(config, facts.model) if facts.model else 0,
    )


def _bytes_to_send(config: RunConfig, model: ModelFacts) -> int:
    """Bytes that a trainer GPU holds for engines: a copy of the published weights, or a bucket of
    them in transfer.

    Ranks that shard the model divide the copy among them; a rank may keep one bucket more than
    another, and needs room for a bucket that another rank sends.
    """
    system = config.system
    senders = publishing_ranks(config)
    if not on_gpu(config) or system.weight_plane not in ("nccl", "ipc"):
        return 0
    bucket = _bucket_bytes(config, model)
    if system.weight_plane == "nccl" and known(system, "weight_copy") != "gpu":
        return bucket
    whole = copy_bytes(model, bytes_per_number(config))
    if system.adapter_sync == "adapter":
        whole = 4 * adapter_numbers(model, config.lora.rank or USUAL_RANK)
    return whole if senders == 1 else whole // senders + 2 * bucket


def _bucket_bytes(config: RunConfig, model: ModelFacts) -> int:
    """Bytes of the largest bucket: the embedding or a layer's matrix, if larger than the usual
    bucket."""
    if config.system.adapter_sync == "adapter":
        return BUCKET
    return max(
        BUCKET,
        max(model.vocab_size, model.intermediate_size)
        * model.hidden_size
        * bytes_per_number(config),
    )


def _prepared(config: RunConfig, facts: Facts) -> int:
    """Bytes of weights that each engine on a CPU prepares."""
    model = facts.model
    if (
        on_gpu(config)
        or config.system.engine_kind.third_party
        or config.model.quantize is not None
        or model is None
    ):
        return 0
    narrow = known(config.model, "dtype") == "bfloat16"
    whole = model.vocab_size % 16 == model.hidden_size % 32 == 0
    alike = narrow and not config.lora.on and decodes_compiled(config, facts)
    if alike and facts.hardware.tiles and whole:
        return 0  # products of tiles read the weights as they are
    copied = 2 if alike and facts.hardware.pairs and model.hidden_size % 2 == 0 else None
    return prepared_bytes(model.parameters or 0, facts.hardware.memory_total, copied)


def planned(config: RunConfig, facts: Facts, *, least: bool = False) -> Price | None:
    """Memory of a run on the trainer's or sampler's device; None if the model's size is unknown.

    This includes the passes of critic and reward models, and passes without gradients.

    Args:
        least: the minimum, with micro-batches and passes of one sample, and the KV cache of one
            sequence.
    """
    model = facts.model
    system = config.system
    if model is None or model.parameters is None:
        return None
    layout = layout_of(config, facts)
    if least:
        layout = replace(
            layout, tokens=(longest_sample(config, facts) or LEAST_TOKENS) if layout.trains else 0
        )
    if config.samples and not system.engine_kind.served and not engines_elsewhere(config, facts):
        engines = engines_together(config, len(facts.hardware.gpus))
        layout = replace(layout, kv_bytes=engines * engine_kv(config, facts, model, least=least))
    found = price(model, layout)
    critic, scoring, rewarding = (
        layout.tokens if least else known(system, key)
        for key in ("critic_max_tokens", "scoring_max_tokens", "reward_max_tokens")
    )
    if layout.trains and layout.models > 1 and critic:
        own = price(model, replace(layout, tokens=critic, has_vocabulary_head=False))
        if own.training > found.training:
            found = replace(found, activations=own.activations, head=own.head, host=own.host)
    if layout.trains and scores(config) and scoring:
        found = replace(found, scored=scoring_bytes(model, replace(layout, tokens=scoring)))
    reward = getattr(config, "reward", None)
    if rewarding and reward and reward.models and shares_trainer_device(config, "reward"):
        found = replace(found, rewarded=rewarding_bytes(config, facts, rewarding))
    return found


def engine_kv(config: RunConfig, facts: Facts, model: ModelFacts, *, least: bool = False) -> int:
    """Bytes of an engine's keys and values on each of its devices: all, or at ``least`` those of
    the longest sample.

    With ``system.vllm.memory_share`` they take what the weights leave of that share of the whole
    GPU.
    """
    share = config.system.vllm.memory_share
    gpu = gpu_of(config, facts)
    if share is not None and gpu is not None:
        copy = copy_bytes(model, bytes_per_number(config), config.model.quantize)
        left = int(share * gpu.memory_total) - LIBRARIES - copy // ranks_per_engine(config)
        return max(request_kv(config, facts, model) // ranks_per_engine(config), left)
    if least:
        return request_kv(config, facts, model) // ranks_per_engine(config)
    kv = known(config.system, "kv_memory")
    return parse_size(kv) if kv else 0


def rewarding_bytes(config: RunConfig, facts: Facts, tokens: int) -> int:
    """Memory of a reward model's pass besides its weights, with the weights that it gathers if
    processes share it.

    The estimate scales the policy's shape: width with the square root of the number of parameters
    (as if the number of layers stayed the same), and number of layers with the cube root (as if all
    dimensions grew).
    """
    model = facts.model
    if model is None:
        return 0
    device = "cuda" if on_gpu(config) else "cpu"
    stage = 3 if scoring_shards(config, "reward") > 1 else 0
    layout = Layout(
        bytes_per_number(config), device, zero_stage=stage, has_vocabulary_head=False, tokens=tokens
    )
    more = max(1.0, facts.frozen_parameters / (model.parameters or 1))
    widths = {
        key: ceil(sqrt(more) * getattr(model, key))
        for key in ("hidden_size", "intermediate_size", "head_dim")
    }
    numbers = ceil(more * (model.parameters or 0))
    layers = int(model.layers * more ** (1 / 3))
    larger = replace(model, parameters=numbers, layers=layers, tied=True, **widths)
    return scoring_bytes(larger, layout) + (gathered_bytes(larger, layout) if stage else 0)


def fits(config: RunConfig, name: str, needed: Price, free: int) -> bool:
    """Whether a kind of device of ``planned_devices`` has room: for ``LIMIT``, or for the engines'
    share as it was given."""
    exact = name == "engine" and config.trains and config.system.vllm.memory_share is not None
    return needed.peak <= (1.0 if exact else LIMIT) * free


def planned_elsewhere(config: RunConfig, facts: Facts, *, least: bool = False) -> Price | None:
    """Memory of each engine on each of its own GPUs; None if engines have no GPUs of their own. See
    ``planned``."""
    model = facts.model
    if model is None or model.parameters is None or not engines_elsewhere(config, facts):
        return None
    copy = copy_bytes(model, bytes_per_number(config), config.model.quantize)
    # With NCCL, the bucket that is being written and the next one are in transfer.
    arriving = 2 * _bucket_bytes(config, model) if config.system.weight_plane == "nccl" else 0
    kv = engine_kv(config, facts, model, least=least)
    return Price(engine=copy // ranks_per_engine(config), kv=kv, published=arriving)


def planned_devices(
    config: RunConfig, facts: Facts, *, least: bool = False
) -> list[tuple[str, Price, int]]:
    """Planned and free memory per kind of device, named by its processes; empty if the model's size
    is unknown.

    These are the devices of trainer, engines, and roles with their own GPUs; each process on a GPU
    also needs CUDA's memory. See ``planned``.
    """
    own = planned(config, facts, least=least)
    engines = planned_elsewhere(config, facts, least=least)
    if own is None:
        return []
    devices = [("trainer" if config.trains else "engine", own, trainer_memory(config, facts))]
    others = [*([("engine", engines)] if engines else []), *_roles_apart(config, facts)]
    devices += [(name, each, free_memory(config, facts)) for name, each in others]
    if not on_gpu(config):
        return devices
    here = processes_with_trainer(config)
    counts = [here, *[1] * len(devices)]
    return [
        (name, replace(each, libraries=n * LIBRARIES), free)
        for n, (name, each, free) in zip(counts, devices, strict=False)
    ]


def _roles_apart(config: RunConfig, facts: Facts) -> Iterator[tuple[str, Price]]:
    """Models with their own GPUs on a cluster, except engines."""
    if config.system.cluster == "none" or not on_gpu(config) or facts.model is None:
        return
    layout = replace(
        layout_of(config, facts),
        models=1,
        references=0,
        frozen_parameters=0,
        engines=0,
        published=0,
    )
    critic, scoring, rewarding = (
        known(config.system, key) or layout.tokens
        for key in ("critic_max_tokens", "scoring_max_tokens", "reward_max_tokens")
    )
    if has_critic(config) and not shares_trainer_device(config, "critic"):
        yield (
            "critic",
            price(facts.model, replace(layout, has_vocabulary_head=False, tokens=critic)),
        )
    if keeps_reference(config) and not shares_trainer_device(config, "ref"):
        shards = scoring_shards(config, "ref")
        alone = replace(
            layout, zero_stage=3 if shards > 1 else 0, shards=shards, sequence=1, tokens=scoring
        )
        frozen = copy_bytes(facts.model, layout.bytes_per_number) // shards
        gathered = gathered_bytes(facts.model, alone) if shards > 1 else 0
        yield (
            "reference",
            Price(frozen=frozen, gathered=gathered, activations=scoring_bytes(facts.model, alone)),
        )
    if facts.frozen_parameters and not shares_trainer_device(config, "reward"):
        yield "reward model", reward_price(config, facts, rewarding)


def reward_price(config: RunConfig, facts: Facts, tokens: int) -> Price:
    """Memory per GPU of reward models with their own GPUs, without CUDA's; ``tokens`` is the size
    of a pass."""
    weights = ceil(facts.frozen_parameters / scoring_shards(config, "reward")) * bytes_per_number(
        config
    )
    return Price(frozen=weights, activations=rewarding_bytes(config, facts, tokens))


def planned_roles(config: RunConfig, facts: Facts) -> dict[str, Price]:
    """Memory of the trainer's device by role; roles that do not train only hold weights; the sum is
    ``planned``."""
    model = facts.model
    own = planned(config, facts)
    if model is None or own is None:
        return {}
    layout = layout_of(config, facts)
    policy = price(model, replace(layout, models=1, references=0, frozen_parameters=0))
    policy = replace(policy, engine=0, kv=0, scored=own.scored)
    roles = {"policy": policy}
    if layout.models > 1:
        both = price(model, replace(layout, models=2))
        one = price(model, replace(layout, models=1))
        parts = ("weights", "gradients", "optimizer")
        roles["critic"] = Price(
            **{part: getattr(both, part) - getattr(one, part) for part in parts}
        )
    if layout.references:
        alone = price(model, replace(layout, frozen_parameters=0))
        roles["reference"] = Price(frozen=alone.frozen, scorer=alone.scorer)
    frozen, scorer = (
        sum(getattr(role, part) for role in roles.values()) for part in ("frozen", "scorer")
    )
    others = Price(
        frozen=own.frozen - frozen,
        scorer=own.scorer - scorer,
        judge=own.judge,
        rewarded=own.rewarded,
    )
    if others.frozen or others.scorer or others.judge:
        roles["teacher" if teaches(config) else "reward models"] = others
    if own.engine or own.kv:
        roles["engines"] = Price(engine=own.engine, kv=own.kv)
    return roles


def request_kv(config: RunConfig, facts: Facts, model: ModelFacts) -> int:
    """Bytes of the longest sample's keys and values in an engine.

    They are stored in blocks that are only partly full. The local engine allocates one plane in
    addition to those for keys and values.
    """
    per_token = model.kv_bytes_per_token(kv_bytes_per_number(config, facts)) * (
        1 + 1 / (2 * model.layers)
    )
    return ceil(((longest_sample(config, facts) or LEAST_TOKENS) + 2 * BLOCK) * per_token)


def kv_bytes_per_number(config: RunConfig, facts: Facts) -> int:
    """Bytes per element of keys and values: the model's dtype, but float32 for the local engine on
    a CPU if PyTorch decodes (``engines.local.native_decode``)."""
    here = not on_gpu(config) and not config.system.engine_kind.third_party
    exact = here and not (
        decodes_compiled(config, facts) and known(config.model, "dtype") == "bfloat16"
    )
    return 4 if exact else bytes_per_number(config)


def host_tokens(config: RunConfig, facts: Facts, model: ModelFacts) -> float:
    """Tokens of a micro-batch whose activations fit in host memory, with
    ``system.offload_activations``."""
    layout = layout_of(config, facts)
    sent = layout.models * sent_bytes(model, layout) / layout.sequence
    if not sent or _host_unknown(config, facts):
        return inf
    return (_host_memory(config, facts) - price(model, replace(layout, tokens=0)).host) / sent


def _host_memory(config: RunConfig, facts: Facts) -> float:
    """Bytes of its machine's memory that each rank may use."""
    return HOST_SHARE * facts.hardware.memory_available / _ranks_on_a_machine(config, facts)


def _ranks_on_a_machine(config: RunConfig, facts: Facts) -> int:
    """Trainer ranks that share a machine's memory; with Ray each of its GPUs has one."""
    if config.system.cluster != "none":
        return max(1, min(config.system.trainer_ranks, len(facts.hardware.gpus)))
    return facts.ranks_here or config.system.trainer_ranks


def _host_unknown(config: RunConfig, facts: Facts) -> bool:
    """Whether ranks are on machines of a Ray cluster, whose memory is not known here."""
    return config.system.cluster != "none" and not facts.hardware.named


def host_problem(config: RunConfig, needed: Price, facts: Facts) -> str | None:
    """Why offloaded data does not fit in host memory, which the ranks of a machine share; None if
    it fits."""
    ranks = _ranks_on_a_machine(config, facts)
    each = _host_memory(config, facts)
    if needed.host <= each or _host_unknown(config, facts):
        return None
    return f"{format_size(needed.host * ranks)} of host memory, and {format_size(each * ranks)} are free"
