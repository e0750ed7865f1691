"""What a step does: how much of each kind of work, by phase. ``seconds.py`` multiplies it by rates.

A run in one process on a CPU is counted as ``Work``, in the kinds whose rates ``tunesmith check
machine`` measures with small models (``tune/machine.py``). All other runs are counted in operations
and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, log2

from tunesmith.config.engines import ROUNDED_BYTES, EngineWeights
from tunesmith.costs import CostModel, chunk_rows
from tunesmith.plan.cost.activations import of_modules, sent_bytes, travelling_bytes
from tunesmith.plan.cost.copies import (
    adapter_numbers,
    away_of_layer,
    copy_bytes,
    rounded_bytes,
    shared_part,
)
from tunesmith.plan.cost.device import Layout
from tunesmith.plan.cost.memory import engine_kv, kept_of_request, kv_bytes_per_token, layout_of
from tunesmith.plan.cost.price import USUAL_RANK, price
from tunesmith.plan.cost.tower import image_operations, tower_in_training
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import AnyPlan

Amounts = Mapping[str, float]
"""Units of each kind of work in a phase."""

HOST_STEP = 28 / 16
HOST_SENT = 6 / 16
"""Bytes that an optimizer step on the CPU reads and writes, and bytes that pass between host and
GPU, per byte kept on the host: of 16, gradients are read, master weights and moments read and
written; gradients and weights pass."""
RECOMPUTED = 1 / 3
"""Additional share of a layer's products if the backward pass recomputes it."""
BETWEEN_PRODUCTS = 1 / 3
"""Kernel launches of a layer's forward pass that are neither products nor attention, as a share."""
PLAIN_MODULES = 1.1
"""Factor on the operations of products if the layers run as Hugging Face modules."""
NARROWER = 1.1
"""Factor on the seconds of reading weights, keys and values for each time that the devices of an
engine double: matrices become narrower. Four B200 take 12.9 ms for each token of 70B (vLLM's pull
request 20759)."""
GRAPH_LAYERS = 8
"""Layers whose kernel launches take as long as those of a decoding step with CUDA graphs,
scheduling included."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step in one process: completions of ``new`` tokens, ``group`` of them for each of
    ``prompts`` prompts."""

    model: ModelFacts
    bytes_per_number: int
    prompts: int
    group: int
    prompt: int
    """Tokens per prompt."""
    new: int
    micro: int
    """Maximum tokens per micro-batch."""
    share: bool = True
    """Whether a group's prompt is computed only once in training."""
    running: int = 256
    """Maximum number of completions decoded together."""
    rounded: EngineWeights = "model"
    """``system.engine_weights``."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def outputs(self) -> int:
        """Elements per token in the outputs of a layer's products."""
        m = self.model
        return 2 * (m.query_width + m.key_width) + 2 * m.hidden_size + 3 * m.intermediate_size

    @property
    def layers(self) -> int:
        """Number of weights in all layers."""
        m = self.model
        return (
            m.layers * m.hidden_size * (2 * (m.query_width + m.key_width) + 3 * m.intermediate_size)
        )

    @property
    def head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def sampled(self) -> float:
        """Bytes that the engine reads of a weight, for each byte that is trained."""
        return 1 if self.rounded == "model" else ROUNDED_BYTES[self.rounded] / self.bytes_per_number


def work_of(plan: AnyPlan, longest: int) -> Work:
    """A run's step in one process, in which every sample has ``longest`` tokens."""
    model = plan.facts.model
    assert model is not None and plan.memory.microbatch is not None, "it was checked"
    number = plan.devices.bytes_per_number
    micro = plan.memory.microbatch
    rollout = plan.said.rollout if plan.kind.rl else None
    if rollout is None:
        each = plan.kind.sequences
        samples = each * plan.training.samples
        new = max(1, longest // each - 1)
        return Work(model, number, samples, 1, 1, new, micro, share=False)
    new = rollout.max_new_tokens
    return Work(
        model,
        number,
        plan.training.prompts,
        rollout.group_size,
        max(1, longest - new),
        new,
        micro,
        plan.said.system.share_prompts,
        _running(plan, model, plan.training.samples, longest),
        plan.said.system.engine_weights,
    )


def _running(plan: AnyPlan, model: ModelFacts, asked: int, tokens: float) -> int:
    """How many of the completions that an engine is ``asked`` for it decodes together."""
    kept = kept_of_request(plan, model, tokens)
    kv = engine_kv(plan, model)
    held = int(kv * plan.devices.ranks_per_engine // kept) if kv else asked
    return max(1, min(asked, plan.sampling.running, held))


def amounts(work: Work) -> dict[str, Amounts]:
    """The work of each phase; matrix products are counted in multiplications, attention in
    query-key pairs."""
    forward = _forward(work)
    return {
        "sync": {"calls": 1},
        "prefill": _prefill(work),
        "decode": _decode(work),
        "scoring": forward,
        "forward and backward": forward,
        "optimizer": {
            "weights": work.model.parameters or 0,
            "tensors": 7 * work.model.layers + 2,
            "calls": 1,
        },
    }


def _forward(work: Work) -> Amounts:
    """The work of a pass over all samples, in micro-batches; a backward pass does the same kinds of
    work."""
    m = work.model
    learned = work.samples * work.new
    prompts = work.prompts if work.share else work.samples
    tokens = prompts * work.prompt + learned
    pairs = prompts * work.prompt**2 / 2 + work.samples * work.new * (work.prompt + work.new / 2)
    micro = ceil(tokens / work.micro)
    return {
        "products": tokens * work.layers,
        "head": learned * work.head,
        "numbers": tokens * m.layers * work.outputs,
        "pairs": pairs * m.layers * m.heads,
        "head weights": micro * work.head,
        "sequences": (work.samples + prompts) * m.layers,
        "passes": micro * m.layers,
        "calls": micro,
    }


def _prefill(work: Work) -> Amounts:
    return {
        "products": work.prompts * work.prompt * work.layers,
        "numbers": work.prompts * work.prompt * work.model.layers * work.outputs,
        "weights": work.sampled * work.layers,
        "head weights": work.sampled * work.head,
        "passes": work.model.layers,
        "samples": work.samples,
        "calls": 1,
    }


def _decode(work: Work) -> Amounts:
    m = work.model
    rows = min(work.samples, work.running)
    steps = ceil(work.samples / rows) * work.new
    return {
        "steps": steps,
        "passes": steps * m.layers,
        "weights": work.sampled * steps * (work.layers + work.head),
        "products": steps * rows * work.layers,
        "head": steps * rows * work.head,
        "numbers": steps * rows * m.layers * work.outputs,
        "pairs": steps * rows * (work.prompt + work.new / 2) * m.layers * m.heads,
        "words": steps * rows * m.vocab_size,
        "prepared": work.layers + work.head,  # once for new weights
    }


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a step of training on GPUs."""

    layout: Layout
    tokens: float
    """Computed in all passes over the batch."""
    body: float
    """Operations of the layers in training."""
    head: float
    batches: int
    """Optimizer steps."""
    micro: int
    """Micro-batches of each rank in an optimizer step."""
    trained: int
    """Trained models."""
    coming: float
    """Bytes of the layers' weights that are copied to the GPU for each micro-batch's forward pass,
    and again for its backward pass."""


def step_work(
    plan: AnyPlan, model: ModelFacts, samples: int, tokens: float
) -> dict[str, list[Amounts]]:
    """What each device does in a step of ``samples`` of ``tokens`` tokens: for each phase, all that
    it does at once."""
    devices = plan.devices
    step = _step(plan, model, samples, tokens)
    layout = step.layout
    lines = samples / plan.said.rollout.group_size if plan.kind.rl else samples
    trained, sampled = image_operations(plan, lines, layout.checkpointing)
    phases = dict[str, list[Amounts]]()
    if plan.kind.rl and not devices.engine.served:
        own = sampling_work(plan, model, samples, tokens)
        seen = sampled / devices.engines / devices.ranks_per_engine
        phases["sampling"] = [{**own, "operations": own["operations"] + seen}]
    passes = plan.kind.reference + plan.kind.critic + plan.kind.decoupled
    if passes:
        away = layout.offload_frozen and plan.kind.reference
        scoring = {
            "operations": passes * step.body / 3 / devices.trainer_ranks,
            "bytes over PCIe": step.coming
            + (copy_bytes(model, layout.bytes_per_number) if away else 0),
        }
        phases["scoring"] = [scoring]
    phases["training"] = _training(plan, model, step)
    if trained:
        phases["images"] = [{"operations": trained / devices.trainer_ranks}]
    phases |= {name: [amount] for name, amount in _beside_training(plan, model, step)}
    if devices.trainer_ranks > 1:
        phases["between GPUs"] = [_between_gpus(plan, model, step)]
    if plan.kind.rl and devices.weights_apart:
        phases["new weights"] = [_new_weights(plan, model)]
    return phases


def _step(plan: AnyPlan, model: ModelFacts, samples: int, tokens: float) -> StepSize:
    cost = cost_of(model)
    new = plan.said.new_tokens
    prompt = max(0.0, tokens - new)
    batches = 1
    again = 0.0
    if plan.kind.rl:
        samples = samples * plan.said.train.passes_per_batch
        batches = samples // (plan.training.batch or samples) or 1
        if plan.said.system.share_prompts:
            again = samples - samples / plan.said.rollout.group_size
    each = plan.kind.sequences
    computed = samples * tokens - again * prompt
    layout = layout_of(plan)
    assert plan.memory.microbatch is not None, "the run trains"
    groups = plan.devices.trainer_ranks / plan.devices.sequence
    micro = max(1, ceil(computed / batches / groups / plan.memory.microbatch))
    return StepSize(
        layout,
        computed,
        body=samples * each * cost.prefix(int(tokens) // each) - again * cost.prefix(int(prompt)),
        head=samples * cost.head * (new or tokens) * (not plan.kind.score_model),
        batches=batches,
        micro=micro,
        trained=1 + plan.kind.critic,
        coming=batches * micro * model.layers * away_of_layer(model, layout),
    )


def _training(plan: AnyPlan, model: ModelFacts, step: StepSize) -> list[Amounts]:
    ranks = plan.devices.trainer_ranks
    recomputed = 1 + RECOMPUTED * plan.memory.share_again
    selective = plan.memory.selective
    products = (
        step.body
        * (2 / 3 if plan.kind.adapter else 1.0)
        * recomputed
        * (PLAIN_MODULES if of_modules(model) else 1.0)
    )
    each = step.tokens / step.batches / ranks
    sent = step.tokens * sent_bytes(model, step.layout) / ranks
    # A layer's weights are waited for: on an H100, a LoRA of 4B parameters whose layers come from
    # the host took the seconds of both (benchmarks/results).
    training = {
        "bytes over PCIe": 2 * step.trained * step.coming,
        "operations": (products * step.trained + step.head) / ranks,
        "bytes read again": step.batches * _read_again(plan, model, step.micro, each)
        + selective * step.trained * step.tokens / ranks * _between_products(model, step.layout),
        "passes": (3 * recomputed + selective * BETWEEN_PRODUCTS)
        * step.batches
        * step.micro
        * model.layers,
    }
    return [training, {"bytes over PCIe": 2 * step.trained * sent}]


def _between_products(model: ModelFacts, layout: Layout) -> float:
    """Bytes per token that PyTorch's operations between products read and write: two norms, which
    compute in float32, the rotation of queries and keys, the gate, and an adapter's casts."""
    size = layout.bytes_per_number
    hidden = model.hidden_size
    inner = model.inner_width
    queries = model.query_width
    turned = queries + model.key_width
    norm = 4 * size + 20 if size == 2 else 5 * size
    passed = norm * (2 * hidden + turned * model.head_norms) + size * (7 * turned + 5 * inner)
    cast = (size + 4) * (5 * hidden + queries + inner) if layout.lora_rank and size == 2 else 0
    return model.layers * (passed + cast)


def _beside_training(
    plan: AnyPlan, model: ModelFacts, step: StepSize
) -> Iterator[tuple[str, Amounts]]:
    """What passes between host and GPU outside the training passes."""
    layout = step.layout
    if plan.memory.offload_optimizer:
        kept = replace(
            layout, offload_frozen=False, offload_parameters=False, tokens=0, reserved_rank=0
        )
        host = step.batches * price(model, kept).host
        yield (
            "optimizer step on the host",
            {"bytes of the host": HOST_STEP * host, "bytes over PCIe": HOST_SENT * host},
        )
    if layout.turns and plan.kind.samples:
        away = price(model, replace(layout, tokens=0)).optimizer
        yield "taking turns", {"bytes over PCIe": 2 * away}
    if layout.offload_frozen and layout.frozen_parameters:
        times = step.batches * step.micro if layout.teaches == "microbatch" else 1
        frozen = layout.frozen_parameters * layout.bytes_per_number
        yield "frozen models from the host", {"bytes over PCIe": times * frozen}


def _between_gpus(plan: AnyPlan, model: ModelFacts, step: StepSize) -> Amounts:
    """What the trainer's ranks send each other."""
    devices = plan.devices
    sent = {
        kind: step.batches * step.trained * number
        for kind, number in _exchanged(plan, model, step.micro).items()
    }
    each = step.trained * step.tokens / devices.trainer_ranks
    sent["bytes between GPUs"] += each * _shared_sequences(plan, model)
    for link, number in _travelling(plan, model).items():
        sent[link] += each * number
    passes = (2 + plan.memory.share_again) * step.batches * step.micro
    exchanges = 4 * model.layers * (devices.sequence > 1)
    exchanges += 2 * model.mixtures.layers * (devices.expert_parallel > 1)
    return {**sent, "exchanges": passes * exchanges}


def _new_weights(plan: AnyPlan, model: ModelFacts) -> Amounts:
    """Bytes of new weights for each engine, by the way that they take."""
    devices = plan.devices
    several = devices.cluster == "ray" or devices.machines > 1
    plane = devices.weight_plane or ("gloo" if several else "memory")
    if not devices.engines_apart:
        plane = "ipc"  # an engine in the trainer's process copies from GPU memory to GPU memory
    copy = copy_bytes(model, devices.bytes_per_number)
    tower = tower_in_training(plan)
    copy += tower.numbers * devices.bytes_per_number if tower else 0
    # A base that engines keep is in host memory while the trainer has the GPU.
    kept = 2 * copy / devices.ranks_per_engine * (devices.hybrid and plan.reserved_rank > 0)
    sent = copy
    if plan.kind.adapter and devices.adapter_sync == "adapter":
        sent = 4 * adapter_numbers(model, plan.adapter_rank or USUAL_RANK)
        sent += tower.trained * devices.bytes_per_number if tower else 0
    through_host = plane == "nccl" and devices.weight_copy != "gpu"
    gathers = devices.zero_stage == 3 or devices.expert_parallel > 1
    spread = devices.shards > (plan.gpus or devices.shards)
    links = "bytes between machines" if spread else "bytes between GPUs"
    return {
        f"bytes by {plane}": sent,
        # Ranks that shard the weights gather them first.
        links: sent * (devices.shards - 1) / devices.shards * gathers,
        "bytes over PCIe": sent / devices.publishing_ranks * through_host + kept,
    }


def _shared_sequences(plan: AnyPlan, model: ModelFacts) -> float:
    """Bytes that a rank sends for each of its tokens if ranks share sequences, in forward and
    backward passes.

    With Ulysses queries, keys, values and the attention's output change ranks in each pass; in a
    ring keys and values visit all other ranks, and in the backward pass their float32 gradients
    too.
    """
    devices = plan.devices
    number = devices.bytes_per_number
    others = devices.sequence - 1
    again = plan.memory.share_again
    if devices.ring:
        return model.layers * 2 * model.key_width * others * (number * (2 + again) + 4)
    widths = 2 * model.query_width + 2 * model.key_width
    return model.layers * widths * number * (2 + again) * others / devices.sequence


def _read_again(plan: AnyPlan, model: ModelFacts, micro: int, tokens: float) -> float:
    """Bytes of weights and gradients that a device reads and writes for an optimizer step on
    ``tokens`` tokens: once per micro-batch, those of the head once per chunk of its rows, and those
    of the optimizer at the end."""
    said = plan.said
    number = plan.devices.bytes_per_number
    trained = (
        adapter_numbers(model, plan.adapter_rank or USUAL_RANK)
        if plan.kind.adapter
        else model.parameters or 0
    )
    device = plan.devices.device.partition(":")[0]
    rows = said.system.logprob_chunk or chunk_rows(model.vocab_size, device)
    head = max(micro, ceil(tokens / rows)) * model.vocab_size * model.hidden_size * (number + 8)
    own = _own_share(plan, model)
    weights = own * (3 * copy_bytes(model, number, said.model.quantize) + 8 * trained)
    return micro * weights + head + 28 * trained / plan.devices.trainer_ranks


def _own_share(plan: AnyPlan, model: ModelFacts) -> float:
    """The share of the weights that a rank computes with: all, but of divided experts its own."""
    divided = model.mixtures.parameters * (plan.devices.expert_parallel > 1)
    return 1 - divided * (1 - 1 / plan.devices.shards) / max(1, model.parameters or 1)


def _travelling(plan: AnyPlan, model: ModelFacts) -> dict[str, float]:
    """Bytes that a rank sends for each of its tokens to other ranks with the token's experts, and
    for the results, in forward and backward passes."""
    devices = plan.devices
    if devices.expert_parallel == 1:
        return {}
    each = 2 * model.mixtures.layers * travelling_bytes(model, devices.bytes_per_number)
    sent = each * (2 + plan.memory.share_again) * (1 - 1 / devices.shards)
    beyond = devices.shards > (plan.gpus or devices.shards)
    return {"bytes between machines" if beyond else "bytes between GPUs": sent}


def _exchanged(plan: AnyPlan, model: ModelFacts, micro: int) -> dict[str, float]:
    """Bytes that each rank sends for one optimizer step of ``micro`` micro-batches, inside its
    machine and beyond.

    Gradients are summed in float32: an all-reduce sends twice their size, a reduce-scatter their
    size. Weights are gathered in 16 bits, or in quantised form. Every rank has a whole adapter.
    Copies of a sharded model sum the gradients of their rows at the end.
    """
    ranks = plan.devices.trainer_ranks
    stage = plan.devices.zero_stage
    shards = plan.devices.shards
    tower = tower_in_training(plan)
    shared = shared_part(model, layout_of(plan))
    seen = tower.trained if tower else 0
    every = 4 * ((model.parameters or 0) + seen)
    summed = 4 * ((shared.parameters or 0) + seen)
    gathered = copy_bytes(shared, 2, plan.said.model.quantize) + (2 * tower.numbers if tower else 0)
    among = 0.0
    within = 0.0
    if plan.kind.adapter:
        among = 8 * adapter_numbers(model, plan.adapter_rank or USUAL_RANK) * (ranks - 1) / ranks
        within = (0, micro, micro, 2 * micro)[stage] * gathered
    elif stage == 0:
        among = 2 * summed * (ranks - 1) / ranks
    else:
        among = 2 * every / shards * (ranks - shards) / ranks
        within = {1: summed + micro * gathered, 2: micro * (summed + gathered)}.get(
            stage, micro * (summed + 2 * gathered)
        )
    found = {"bytes between GPUs": 0.0, "bytes between machines": 0.0}
    each = plan.gpus or ranks
    found["bytes between machines" if ranks > each else "bytes between GPUs"] += among
    found["bytes between machines" if shards > each else "bytes between GPUs"] += (
        within * (shards - 1) / shards
    )
    return found


def sampling_work(plan: AnyPlan, model: ModelFacts, samples: int, tokens: float) -> Amounts:
    """What each device of an engine does to sample its part of a step."""
    system = plan.said.system
    ranks = plan.devices.ranks_per_engine
    engines = plan.devices.engines
    rl = plan.kind.rl
    new = min(plan.said.rollout.max_new_tokens if rl else plan.said.new_tokens, tokens)
    rounded = system.engine_weights
    if rounded == "model":
        weights = copy_bytes(model, plan.devices.bytes_per_number, plan.engine_quantize)
    else:
        weights = rounded_bytes(model.parameters or 0, model.hidden_size, rounded)
    per_token = kv_bytes_per_token(plan, model)
    asked = ceil(samples / engines)
    prompt = tokens - new
    read = (tokens - new / 2) * per_token
    together = _running(plan, model, asked, tokens)
    steps = max(1.0, asked / together) * new  # a request that ends makes room for the next one
    prompts = samples / (plan.said.rollout.group_size if rl else plan.sampling.n) / engines
    prefills = max(1, ceil(prompts * prompt / system.max_prefill_tokens))
    own_graphs = plan.decodes_on_gpu and plan.said.system.compile is not False
    graphs = own_graphs or (plan.devices.engine.spans_devices and not plan.vllm.eager)
    split = plan.devices.tensor
    # Each layer's output is summed after its attention and after its products.
    summed = 2 * model.layers * (split > 1)
    numbers = summed * (steps * together + prompts * prompt) * model.hidden_size
    return {
        "operations": prompts * cost_of(model).prefix(int(prompt)) / 3 / ranks,
        "bytes read": NARROWER ** log2(ranks)
        * steps
        * (weights + together * (read + 2 * model.state_bytes))
        / ranks,
        "operations of decoding": steps * together * 2 * model.active / ranks,
        "bytes read again": prefills * weights / ranks,
        "passes": steps * (GRAPH_LAYERS if graphs else model.layers),
        "all-reduces": summed * (steps + prefills),
        "bytes all-reduced": 2 * numbers * plan.devices.bytes_per_number * (split - 1) / split,
        # They take little beside recorded steps, as measured on a GPU (``benchmarks.gpu``).
        "tokens handled": steps * together * (not own_graphs),
    }


def cost_of(model: ModelFacts) -> CostModel:
    return CostModel.of_decoder(
        parameters=model.active - model.outside_layers,
        layers=model.attention_layers,
        heads=model.heads,
        head_dim=model.head_dim,
        vocabulary=model.vocab_size,
        hidden=model.hidden_size,
    )
