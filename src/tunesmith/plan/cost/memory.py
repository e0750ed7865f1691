"""How much memory a run needs on its devices, given its settings."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf

from tunesmith.config.engines import BLOCK_TOKENS
from tunesmith.config.values import format_size
from tunesmith.plan.cost.activations import (
    activation_bytes,
    backward_bytes,
    enlarged,
    scoring_bytes,
    sent_bytes,
    taught_bytes,
)
from tunesmith.plan.cost.copies import (
    adapter_numbers,
    copy_bytes,
    engine_copy_bytes,
    gathered_bytes,
    merges_adapter,
    prepared_bytes,
    rounded_bytes,
)
from tunesmith.plan.cost.device import Layout, Price
from tunesmith.plan.cost.price import LIBRARIES, LIBRARIES_WITH_NCCL, USUAL_RANK, price
from tunesmith.plan.cost.published import bucket_bytes, bytes_to_send, published_bytes
from tunesmith.plan.cost.tower import tower_for, tower_in_training, trains_on_images
from tunesmith.plan.facts.families import family_around
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import AnyPlan
from tunesmith.plan.replacing import replace

LIMIT = 0.95
"""A run fits a GPU if it needs at most this share of the free memory; the rest is for what no
estimate counts."""
LIMIT_OF_SEVERAL = 0.9
"""The same share where processes communicate between GPUs: buffers grow with their number, and one
process that runs out of memory stops all."""
CPU_MARGIN = 1.1
"""A run on a CPU is refused if it needs more than this multiple of the free memory, which other
programs may still give back."""
HOST_SHARE = 0.95
"""Usable share of the free host memory; the rest is for Python and its libraries."""
LEAST_TOKENS = 64
"""Assumed length of a sample if neither data nor settings determine it."""


def bytes_per_token(model: ModelFacts, layout: Layout) -> int:
    """Bytes per additional token of a micro-batch on each rank that shares it: activations saved
    for the backward pass, and temporaries of a layer's backward pass."""
    return ceil((activation_bytes(model, layout) + backward_bytes(model, layout)) / layout.sequence)


def layout_of(plan: AnyPlan, tokens: int | None = None, kv_bytes: int = 0) -> Layout:
    """The layout of the trainer's device, or of the sampler's if nothing is trained.

    Args:
        tokens: of a micro-batch; None: as the plan has them.
        kv_bytes: the size of the engines' KV caches.
    """
    said = plan.said
    kind = plan.kind
    devices = plan.devices
    memory = plan.memory
    longest = plan.training.longest or LEAST_TOKENS
    frozen = plan.facts.frozen_parameters
    if not (kind.rl and kind.teacher):
        here = devices.shares_trainer_device("reward")
        frozen = ceil(frozen / devices.scoring_shards("reward")) * here
    return Layout(
        bytes_per_number=devices.bytes_per_number,
        device="cuda" if devices.on_gpu else "cpu",
        holds_model=kind.trains or devices.loads_model,
        trains=kind.trains,
        lora_rank=(plan.adapter_rank or USUAL_RANK) if kind.adapter else None,
        quantize=said.model.quantize,
        engine_quantize=plan.engine_quantize,
        offload=memory.offload_optimizer,
        offload_parameters=memory.offload_parameters,
        offload_frozen=memory.offload_reference,
        teaches=kind.teacher,
        offload_activations=memory.offload_activations,
        muon=said.train.optimizer.name == "muon",
        ema=said.train.ema_decay is not None,
        models=1 + (kind.critic and devices.shares_trainer_device("critic")),
        references=int(kind.reference and devices.shares_trainer_device("ref")),
        frozen_parameters=frozen,
        staying=_staying(plan),
        shards=devices.shards,
        zero_stage=devices.zero_stage or 3 * memory.offload_parameters,
        divides=devices.expert_parallel > 1,
        has_vocabulary_head=not kind.score_model,
        checkpointing=memory.share_again,
        selective=memory.selective,
        tower=tower_in_training(plan),
        tokens=memory.microbatch or longest if tokens is None else tokens,
        attends_to=longest if attends_without_kernel(plan) else 0,
        sequence=devices.sequence,
        chunk=said.system.logprob_chunk,
        engines=plan.engines_here if devices.weights_apart else 0,
        ranks=devices.ranks_per_engine if devices.on_gpu else plan.ranks_here,
        prepared=plan.engines_here * _prepared(plan) // plan.ranks_here,
        kv_bytes=kv_bytes,
        turns=devices.hybrid or kind.in_turn,
        keeps_base=kind.rl and kind.adapter and not devices.engine.third_party,
        reserved_rank=plan.reserved_rank,
        published=bytes_to_send(plan, plan.facts.model) if plan.facts.model else 0,
        host_copy=_host_copy(plan, plan.facts.model) if plan.facts.model else 0,
        swaps=devices.hybrid and devices.on_gpu,
    )


def attends_without_kernel(plan: AnyPlan) -> bool:
    """Whether training and scoring attend in plain PyTorch (``models.attention``): kernels for GPUs
    take 16-bit numbers, from Ampere on, and no kernel lets the tokens of an image see each
    other."""
    model = plan.facts.model
    if model and family_around(model.family).both_ways and trains_on_images(plan):
        return True
    gpu = plan.gpu
    narrow = plan.devices.bytes_per_number == 2 and (gpu is None or gpu.bf16)
    return plan.devices.on_gpu and not narrow


def _host_copy(plan: AnyPlan, model: ModelFacts) -> int:
    """Each rank's part of the copy in host memory from which NCCL sends, which the first rank
    keeps."""
    devices = plan.devices
    sent = devices.on_gpu and devices.weight_plane == "nccl" and devices.weight_copy == "host"
    return published_bytes(plan, model) // _ranks_on_a_machine(plan) if sent else 0


def _prepared(plan: AnyPlan) -> int:
    """Bytes of weights that each engine on a CPU prepares."""
    model = plan.facts.model
    elsewhere = plan.devices.on_gpu or plan.devices.engine.third_party
    if elsewhere or plan.said.model.quantize is not None or model is None:
        return 0
    numbers = model.parameters or 0
    merges = plan.kind.adapter and merges_adapter(numbers)
    rounded = plan.devices.engine_weights
    if rounded != "model":
        merged = 4 * numbers * merges
        return merged + rounded_bytes(numbers, model.hidden_size, rounded)
    narrow = plan.devices.dtype == "bfloat16"
    whole = model.vocab_size % 16 == model.hidden_size % 32 == 0
    alike = narrow and not merges and plan.decodes_compiled
    if alike and plan.facts.hardware.tiles and whole:
        # Products of tiles read the weights as they are, but beside an adapter they are joined.
        return 2 * numbers * plan.kind.adapter
    copied = 2 if alike and plan.facts.hardware.pairs and model.hidden_size % 2 == 0 else None
    return prepared_bytes(numbers, plan.facts.hardware.memory_total, copied)


def planned(plan: AnyPlan, *, least: bool = False) -> Price | None:
    """Memory of a run on the trainer's or sampler's device; None if the model's size is unknown.

    This includes the passes of critic and reward models, and passes without gradients.

    Args:
        least: the minimum, with micro-batches and passes of one sample, and the KV cache of one
            sequence.
    """
    model = plan.facts.model
    memory = plan.memory
    if model is None or model.parameters is None:
        return None
    tokens = (plan.training.longest or LEAST_TOKENS) * plan.kind.trains if least else None
    kv = _kv_here(plan, model, least=least) if plan.engines_here else 0
    layout = layout_of(plan, tokens, kv)
    found = price(model, layout)
    if plan.kind.in_turn and not plan.devices.loads_model:
        found = replace(found, unloaded=found.weights)
    critic = layout.tokens if least else memory.critic
    scoring = layout.tokens if least else memory.scoring
    rewarding = layout.tokens if least else memory.reward
    if layout.trains and layout.models > 1 and critic:
        own = price(model, replace(layout, tokens=critic, has_vocabulary_head=False))
        if own.training > found.training:
            found = replace(found, activations=own.activations, head=own.head, host=own.host)
    passes: dict[str, int] = {}
    if layout.trains and plan.kind.scores and scoring:
        taught = found.scored
        if layout.teaches == "batch":
            taught = taught_bytes(model, replace(layout, tokens=scoring))
        passes["scored"] = max(taught, scoring_bytes(model, layout, scoring))
    if rewarding and plan.kind.reward_models and plan.devices.shares_trainer_device("reward"):
        passes["rewarded"] = rewarding_bytes(plan, rewarding)
    return replace(found, **passes) if passes else found


def _staying(plan: AnyPlan) -> int:
    """Bytes of frozen models that never leave the device: a tower, judges that the run loads with
    their keys and values, and drafts. On a CPU an engine also prepares weights for products with
    few rows."""
    facts = plan.facts
    size = plan.devices.bytes_per_number
    tower = size * tower_for(facts.model, plan) if facts.model else 0
    numbers = facts.judge_parameters + plan.engines_here * _draft(plan)
    if plan.devices.on_gpu:
        return tower + size * numbers + facts.judge_kv
    return tower + (2 * size * numbers + facts.judge_kv) // plan.ranks_here


def _draft(plan: AnyPlan) -> int:
    """Parameters of an engine's draft on each of its devices; a CPU holds all of it."""
    draft = plan.facts.draft
    devices = plan.devices.ranks_per_engine if plan.devices.on_gpu else 1
    return ((draft and draft.parameters) or 0) // devices


def _kv_here(plan: AnyPlan, model: ModelFacts, *, least: bool) -> int:
    """Bytes of keys and values on the trainer's device; on a CPU they are spread over the trainer's
    ranks, each of which has a part of the memory."""
    each = plan.engines_here * engine_kv(plan, model, least=least)
    if plan.devices.on_gpu:
        return each
    return each * plan.devices.ranks_per_engine // plan.ranks_here


def engine_kv(plan: AnyPlan, model: ModelFacts, *, least: bool = False) -> int:
    """Bytes of an engine's keys and values on each of its devices: all, or at ``least`` those of
    the longest sample, unless a GPU's were said, which an engine allocates at once.

    With ``system.vllm.memory_share`` they take what the weights leave of that share of the whole
    GPU.
    """
    share = plan.said.system.vllm.memory_share
    gpu = plan.engine_gpu
    if share is not None and gpu is not None:
        copy = engine_copy_bytes(model, plan.devices.bytes_per_number, plan.engine_quantize)
        taken = library_bytes(plan) + copy // plan.devices.ranks_per_engine
        left = int(share * gpu.memory_total) - taken
        return max(request_kv(plan, model) // plan.devices.ranks_per_engine, left)
    said = plan.devices.on_gpu and plan.said.system.kv_memory is not None
    if least and not said:
        return request_kv(plan, model) // plan.devices.ranks_per_engine
    return plan.memory.kv_bytes


def rewarding_bytes(plan: AnyPlan, tokens: int) -> int:
    """Memory of a reward model's pass besides its weights, with the weights that it gathers if
    processes share it."""
    model = plan.facts.model
    if model is None:
        return 0
    device = "cuda" if plan.devices.on_gpu else "cpu"
    stage = 3 if plan.devices.scoring_shards("reward") > 1 else 0
    layout = Layout(
        plan.devices.bytes_per_number,
        device,
        zero_stage=stage,
        has_vocabulary_head=False,
        tokens=tokens,
    )
    larger = enlarged(model, plan.facts.frozen_parameters)
    return scoring_bytes(larger, layout) + (gathered_bytes(larger, layout) if stage else 0)


def limit(plan: AnyPlan) -> float:
    """The share of a device's free memory that the run may be planned to need."""
    return LIMIT_OF_SEVERAL if plan.communicates else LIMIT


def library_bytes(plan: AnyPlan) -> int:
    """Bytes of a GPU that CUDA and its libraries take in each of the run's processes."""
    return LIBRARIES_WITH_NCCL if plan.communicates else LIBRARIES


def fits(plan: AnyPlan, name: str, needed: Price, free: int) -> bool:
    """Whether a kind of device of ``planned_devices`` has room: for ``limit``, or for the engines'
    share as it was given."""
    exact = name == "engine" and plan.kind.trains and plan.said.system.vllm.memory_share is not None
    return needed.peak <= (1.0 if exact else limit(plan)) * free


def may_fit(plan: AnyPlan, name: str, needed: Price, free: int) -> bool:
    """Whether a run is not refused: it fits, or exceeds a CPU's memory only a little."""
    little = not plan.devices.on_gpu and needed.peak <= CPU_MARGIN * free
    return little or fits(plan, name, needed, free)


def planned_elsewhere(plan: AnyPlan, *, least: bool = False) -> Price | None:
    """Memory of each engine on each of its own GPUs; None if engines have no GPUs of their own. See
    ``planned``."""
    model = plan.facts.model
    if model is None or model.parameters is None or not plan.engines_elsewhere:
        return None
    copy = engine_copy_bytes(model, plan.devices.bytes_per_number, plan.engine_quantize)
    # With NCCL: the bucket that is being written, the next one on its way, and the last tensor of
    # the one before.
    arriving = 3 * bucket_bytes(plan, model) if plan.devices.weight_plane == "nccl" else 0
    number = plan.devices.bytes_per_number
    room = adapter_numbers(model, plan.reserved_rank) + _draft(plan)
    held = copy // plan.devices.ranks_per_engine + number * room
    return Price(engine=held, kv=engine_kv(plan, model, least=least), published=arriving)


def planned_devices(plan: AnyPlan, *, least: bool = False) -> list[tuple[str, Price, int]]:
    """Planned and free memory per kind of device, named by its processes; empty if the model's size
    is unknown.

    These are the devices of trainer, engines, and roles with their own GPUs; each process on a GPU
    also needs CUDA's memory. See ``planned``.
    """
    first = planned_first(plan, least=least)
    if first is None:
        return []
    engines = planned_elsewhere(plan, least=least)
    others = [(name, each, plan.free_memory) for name, each in _roles_apart(plan)]
    if engines:
        others.insert(0, ("engine", engines, plan.engine_memory))
    if plan.devices.on_gpu:
        taken = library_bytes(plan)
        others = [(name, replace(each, libraries=taken), free) for name, each, free in others]
    _, own, _ = first
    if engines and own.peak == own.libraries:  # engines in processes of their own hold everything
        return others
    return [first, *others]


def planned_first(plan: AnyPlan, *, least: bool) -> tuple[str, Price, int] | None:
    """The first of ``planned_devices``: the trainer's, or the sampler's if nothing is trained."""
    own = planned(plan, least=least)
    if own is None:
        return None
    if plan.devices.on_gpu:
        own = replace(own, libraries=plan.devices.processes_with_trainer * library_bytes(plan))
    return "trainer" if plan.kind.trains else "engine", own, plan.trainer_memory


def _roles_apart(plan: AnyPlan) -> Iterator[tuple[str, Price]]:
    """Models with their own GPUs on a cluster, except engines."""
    if plan.devices.cluster == "none" or not plan.devices.on_gpu or plan.facts.model is None:
        return
    layout = replace(
        layout_of(plan),
        models=1,
        references=0,
        frozen_parameters=0,
        staying=0,
        engines=0,
        published=0,
        host_copy=0,
    )
    critic = plan.memory.critic or layout.tokens
    scoring = plan.memory.scoring or layout.tokens
    rewarding = plan.memory.reward or layout.tokens
    if plan.kind.critic and not plan.devices.shares_trainer_device("critic"):
        its_own = replace(layout, has_vocabulary_head=False, tokens=critic)
        yield "critic", price(plan.facts.model, its_own)
    if plan.kind.reference and not plan.devices.shares_trainer_device("ref"):
        shards = plan.devices.scoring_shards("ref")
        alone = replace(
            layout,
            zero_stage=3 if shards > 1 else 0,
            shards=shards,
            divides=False,
            sequence=1,
            tokens=scoring,
        )
        frozen = copy_bytes(plan.facts.model, layout.bytes_per_number) // shards
        gathered = gathered_bytes(plan.facts.model, alone) if shards > 1 else 0
        passing = scoring_bytes(plan.facts.model, alone)
        yield "reference", Price(frozen=frozen, gathered=gathered, activations=passing)
    if plan.facts.frozen_parameters and not plan.devices.shares_trainer_device("reward"):
        yield "reward model", reward_price(plan, rewarding)


def reward_price(plan: AnyPlan, tokens: int) -> Price:
    """Memory per GPU of reward models with their own GPUs, without CUDA's; ``tokens`` is the size
    of a pass."""
    devices = plan.devices
    numbers = ceil(plan.facts.frozen_parameters / devices.scoring_shards("reward"))
    weights = numbers * devices.bytes_per_number
    return Price(frozen=weights, activations=rewarding_bytes(plan, tokens))


def planned_roles(plan: AnyPlan) -> dict[str, Price]:
    """Memory of the trainer's device by role; roles that do not train only hold weights; the sum is
    ``planned``."""
    model = plan.facts.model
    own = planned(plan)
    if model is None or own is None:
        return {}
    layout = layout_of(plan)
    policy = replace(layout, models=1, references=0, frozen_parameters=0, staying=0)
    policy = price(model, policy)
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
        alone = price(model, replace(layout, frozen_parameters=0, staying=0))
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
        roles["teacher" if plan.kind.teacher else "reward models"] = others
    if own.engine or own.kv:
        roles["engines"] = Price(engine=own.engine, kv=own.kv)
    return roles


def request_kv(plan: AnyPlan, model: ModelFacts) -> int:
    """Bytes of the longest sample in an engine.

    Keys and values are stored in blocks, of which those of the prompt and of the completion are
    only partly full.
    """
    tokens = (plan.training.longest or LEAST_TOKENS) + 2 * BLOCK_TOKENS
    return ceil(kept_of_request(plan, model, tokens))


def kept_of_request(plan: AnyPlan, model: ModelFacts, tokens: float) -> float:
    """Bytes of a request's keys and values, and of the states after its prompt and after its last
    token."""
    return tokens * kv_bytes_per_token(plan, model) + 2 * model.state_bytes


def kv_bytes_per_token(plan: AnyPlan, model: ModelFacts) -> int:
    """Bytes that an engine keeps of a token in all layers, its draft's too, on all of its ranks: of
    those that divide heads, each keeps all of a latent, and one head of keys where there are
    fewer."""
    kept = 0
    for each in filter(None, (model, plan.facts.draft)):
        copies = max(1, plan.devices.tensor // (1 if each.latent else each.kv_heads))
        kept += copies * each.kv_bytes_per_token(kv_bytes_per_number(plan))
    return kept


def kv_bytes_per_number(plan: AnyPlan) -> int:
    """Bytes per element of keys and values: the model's dtype, but float32 for the local engine on
    a CPU if PyTorch decodes (``engines.local.runner.kv_dtype``)."""
    here = not plan.devices.on_gpu and not plan.devices.engine.third_party
    exact = here and not (plan.decodes_compiled and plan.devices.dtype == "bfloat16")
    return 4 if exact else plan.devices.bytes_per_number


def host_tokens(plan: AnyPlan, model: ModelFacts) -> float:
    """Tokens of a micro-batch whose activations fit in host memory, with
    ``system.offload_activations``."""
    layout = layout_of(plan)
    sent = layout.models * sent_bytes(model, layout) / layout.sequence
    if not sent or _host_unknown(plan):
        return inf
    return (_host_memory(plan) - price(model, replace(layout, tokens=0)).host) / sent


def _host_memory(plan: AnyPlan) -> float:
    """Bytes of its machine's memory that each rank may use."""
    return HOST_SHARE * plan.facts.hardware.memory_available / _ranks_on_a_machine(plan)


def _ranks_on_a_machine(plan: AnyPlan) -> int:
    """Trainer ranks that share a machine's memory; with Ray each of its GPUs has one."""
    if plan.devices.cluster != "none":
        return max(1, min(plan.devices.trainer_ranks, plan.gpus))
    return plan.ranks_here


def _host_unknown(plan: AnyPlan) -> bool:
    """Whether ranks are on machines of a Ray cluster, whose memory is not known here."""
    return plan.devices.cluster != "none" and not plan.facts.hardware.named


def host_problem(plan: AnyPlan, needed: Price) -> str | None:
    """Why offloaded data does not fit in host memory, which the ranks of a machine share; None if
    it fits."""
    ranks = _ranks_on_a_machine(plan)
    each = _host_memory(plan)
    if needed.host <= each or _host_unknown(plan):
        return None
    wanted = format_size(needed.host * ranks)
    return f"{wanted} of host memory, and {format_size(each * ranks)} are free"
