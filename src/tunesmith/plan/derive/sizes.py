"""How a device's memory is divided: the KV cache, the tokens of a micro-batch."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil, inf

from tunesmith.config.values import format_size, megabytes
from tunesmith.plan.cost.activations import activation_bytes
from tunesmith.plan.cost.memory import (
    HOST_SHARE,
    bytes_per_token,
    engine_kv,
    host_tokens,
    kv_bytes_per_number,
    layout_of,
    library_bytes,
    limit,
    planned,
    planned_elsewhere,
    request_kv,
)
from tunesmith.plan.cost.passes import pass_tokens
from tunesmith.plan.cost.price import price
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.plan import MOST_RUNNING, USUAL_RUNNING, AnyPlan, C, Plan, Reasons
from tunesmith.plan.replacing import replace

UNKNOWN_MODEL_TOKENS = 4096
SHORT = 128
"""Tokens reserved for a sample of unknown length."""
STEP = 256
"""Tokens of a micro-batch are multiples of this, unless the longest sample or ``MOST_TOKENS``
limits them."""
LEAST_KV_BYTES = 16 * 10**6
RUNNING = (MOST_RUNNING, 512, USUAL_RUNNING)
"""Requests that an engine on a GPU decodes at once: the most that its KV cache holds."""
ALONE = 0.9
"""The share of a GPU's free memory that an engine uses if nothing else is on it."""


def with_sizes(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with what depends on the memory that the model's state leaves; see the module."""
    budget = max(0, plan.trainer_memory - reserved(plan))
    said = plan.said.system
    if _running_open(plan):
        plan = replace(plan, sampling=replace(plan.sampling, running=MOST_RUNNING))
    if plan.kind.samples and not plan.devices.engine.served and said.kv_memory is None:
        kv = _kv_memory(plan, budget)
        if kv is not None:
            plan = plan.with_memory(kv=reasons.add("system.kv_memory", *kv))
    plan = _with_running(plan, reasons)
    if plan.kind.trains and said.max_tokens_per_microbatch is None:
        tokens = reasons.add("system.max_tokens_per_microbatch", *_microbatch(plan, budget))
        plan = plan.with_memory(microbatch=tokens)
    return plan


def reserved(plan: AnyPlan, *, turns: bool | None = None) -> int:
    """Bytes that are not available for activations, keys and values while the policy trains."""
    if plan.facts.model is None:
        return 0
    layout = layout_of(plan)
    tokens = plan.training.longest or SHORT
    turns = layout.turns if turns is None else turns
    planned = price(plan.facts.model, replace(layout, turns=turns, tokens=tokens))
    return planned.training - -(-tokens // layout.sequence) * activation_bytes(
        plan.facts.model, layout
    )


def _running_open(plan: AnyPlan) -> bool:
    """Whether an engine on a GPU decodes as many requests at once as its memory holds."""
    own = plan.kind.samples and not plan.devices.engine.served
    return own and plan.devices.on_gpu and plan.said.system.max_running is None


def _with_running(plan: Plan[C], reasons: Reasons) -> Plan[C]:
    """The plan with the number of requests that are decoded at once, if memory determines it."""
    model = plan.facts.model
    if not _running_open(plan):
        return plan
    running = USUAL_RUNNING
    if model is not None and plan.training.longest is not None:
        kv = engine_kv(plan, model) * plan.devices.ranks_per_engine
        held = kv // request_kv(plan, model)
        running = next((count for count in RUNNING if count <= held), USUAL_RUNNING)
        requests = "1 request" if held <= 1 else f"{held} requests"
        why = f"system.kv_memory holds {requests} of {plan.training.longest} tokens at once"
        most = plan.said.system.vllm.max_batched_tokens or running
        if most < running:
            running = most
            why = "each takes a token of system.vllm.max_batched_tokens"
        reasons.add("system.max_running", running, why)
    return replace(plan, sampling=replace(plan.sampling, running=running))


def _kv_share(plan: AnyPlan, budget: int) -> tuple[int, str]:
    """Bytes for the KV cache of one device's engines, and which part of the free memory that is."""
    model = plan.facts.model
    left = f"what weights and a pass leave of {ALONE:.0%}"
    if plan.engines_elsewhere:
        engine = planned_elsewhere(plan)
        held = engine.sampling - engine.kv if engine else 0
        return _left_alone(plan, held), f"on its own GPU, {left}"
    layout = layout_of(plan)
    here = plan.devices.processes_with_trainer
    if not plan.kind.rl:  # nothing is trained while it samples
        layout = replace(layout, trains=False, holds_model=plan.devices.loads_model)
        held = price(model, layout).sampling if model else 0
        if plan.devices.on_gpu:
            return _left_alone(plan, held), left
        return (plan.free_memory - held) // 2, "half"
    together = planned(plan, least=True)
    if plan.devices.hybrid and together is not None:
        share, part = _in_turn(plan, together.sampling - together.kv, here)
        return share, f"while the policy does not train, {part}"
    if together is None or not plan.devices.on_gpu:
        return budget // 4, "a quarter"
    beside = _room(plan, here) - max(together.training, together.sampling) + together.kv
    return min(budget // 4, max(0, beside)), "a quarter"


def _left_alone(plan: AnyPlan, held: int) -> int:
    """Bytes for keys and values on a GPU that only engines use and whose weights take ``held``."""
    each = library_bytes(plan) + pass_bytes(plan)
    free = int(ALONE * plan.engine_memory)
    return free - held - each * plan.devices.engines_together(plan.gpus)


def pass_bytes(plan: AnyPlan) -> int:
    """Bytes of an engine's largest pass: a layer's activations for many tokens of prompts, and the
    float32 probabilities from which the running requests' next tokens are sampled, three times."""
    model = plan.facts.model
    if model is None:
        return 0
    widths = 2 * model.inner_width + 4 * model.hidden_size
    prompts = pass_tokens(plan) * widths * plan.devices.bytes_per_number
    return prompts + 3 * 4 * plan.sampling.running * model.vocab_size


def _in_turn(plan: AnyPlan, taken: int, processes: int) -> tuple[int, str]:
    """Half of what ``taken`` leaves of a device, or what it and passes leave of most of a GPU if
    that is more, and no more than fits beside it; and which it is."""
    engines = plan.devices.engines_together(plan.gpus)
    rounding = 10**6 * engines  # sizes are whole megabytes
    half = (plan.free_memory - taken) // 2
    room = _room(plan, processes) - taken - rounding
    unused = int((limit(plan) - ALONE) * plan.free_memory) if plan.devices.on_gpu else room
    left = room - max(0, unused) - engines * pass_bytes(plan)
    if left > half:
        return left, f"what weights and a pass leave of {ALONE:.0%}"
    return min(half, room), "half"


def _room(plan: AnyPlan, processes: int) -> int:
    """Bytes of a device that remain beside CUDA's libraries in this many processes."""
    libraries = processes * library_bytes(plan) * plan.devices.on_gpu
    return int(limit(plan) * plan.free_memory) - libraries


def _microbatch(plan: AnyPlan, budget: int) -> tuple[int, str]:
    """Tokens of a micro-batch, and why."""
    model = plan.facts.model
    longest = plan.training.longest or 0
    if model is None:
        return max(UNKNOWN_MODEL_TOKENS, longest), "the model's size is not known"
    per_token = bytes_per_token(model, layout_of(plan))
    most = plan.most_tokens * plan.devices.sequence
    if plan.devices.on_gpu:
        tokens, reason = _fitting(plan, model, longest, most)
    else:
        tokens, reason = _fitting_beside_engines(plan, budget, per_token, most)
    return tokens, f"{reason} ({format_size(per_token)} of activations per token)"


def _fitting_beside_engines(
    plan: AnyPlan, budget: int, per_token: int, most: int
) -> tuple[int, str]:
    """Tokens of a micro-batch on a CPU, and why."""
    longest = plan.training.longest or 0
    needed = planned(plan, least=True)
    beside = needed.kv if needed and not needed.turns else 0
    room, part = min(
        (budget // 2, "half of the free memory"),
        (budget - beside, "what the KV cache of one request leaves free"),
    )
    fitting = max(0, room) // per_token
    if longest >= min(fitting, most):
        return longest, "the longest sample has to fit"
    if fitting >= most:
        return most, "memory allows more, but more would be no faster"
    return max(1, fitting // STEP * STEP or fitting, longest), part


def _fitting(plan: AnyPlan, model: ModelFacts, longest: int, most: int) -> tuple[int, str]:
    """The most tokens, up to ``most``, with which the trainer's GPU is filled to ``limit``, and why
    no more; at least ``longest``."""
    host = host_tokens(plan, model)
    if longest >= most:
        return longest, "the longest sample has to fit"
    layout = layout_of(plan)
    layout = replace(layout, kv_bytes=plan.engines_here * plan.memory.kv_bytes)
    room = _room(plan, plan.devices.processes_with_trainer)

    def needed(tokens: int) -> float:
        passing = price(model, replace(layout, tokens=tokens))
        taught = max(passing.teaching, passing.scoring * bool(passing.teaches))
        return max(passing.training, taught) if tokens <= host else inf

    least = max(longest, min(STEP, most))
    sizes = [*range(least // STEP * STEP + STEP, most, STEP), most]
    if longest < least and needed(least) <= room:
        sizes.insert(0, least)
    count = bisect_right(sizes, room, key=needed)
    if count == len(sizes):
        return most, "memory allows more, but more would be no faster"
    if count == 0:
        return max(1, longest), "the longest sample has to fit"
    if sizes[count] > host:
        return sizes[count - 1], f"what fits in {HOST_SHARE:.0%} of the host's free memory"
    return sizes[count - 1], f"what fits in {limit(plan):.0%} of the free memory"


def _kv_memory(plan: AnyPlan, budget: int) -> tuple[str, str] | None:
    """Each engine's KV memory, and why: enough for its concurrent requests, but no more than its
    part of the free memory; None: nothing is known of it, or vLLM has a share of the memory."""
    share, part = _kv_share(plan, budget)
    model = plan.facts.model
    engines = plan.devices.engines_together(plan.gpus)
    longest = plan.training.longest
    share = max(share // engines, LEAST_KV_BYTES)
    if longest is None or plan.said.system.vllm.memory_share is not None:
        return None
    part = f"{part} of the free memory" + (f", shared by {engines} engines" if engines > 1 else "")
    if model is None:
        return megabytes(min(share, 4 * 10**9)), f"{part}, at most 4GB"
    together, wanted = wanted_kv(plan, model, engines)
    one = ceil(request_kv(plan, model) / plan.devices.ranks_per_engine)
    if one > share:
        share = one
        part = f"what one request of {longest} tokens takes, more than {part}"
    if wanted <= share:
        reason = f"enough for {together} requests of {longest} tokens at once"
    else:
        reason = f"{part}; {together} requests at once would take {format_size(wanted)}"
    wide = kv_bytes_per_number(plan) == 4
    number = "float32" if wide else plan.devices.dtype
    return megabytes(min(wanted, share)), f"{reason}, in {number}"


def wanted_kv(plan: AnyPlan, model: ModelFacts, engines: int) -> tuple[int, int]:
    """Concurrent requests per engine, and the bytes of their KV cache."""
    said = plan.said
    together = plan.sampling.running
    if plan.kind.rl:
        prompts = ceil(plan.training.prompts * said.rollout.over_generation)
        asked = max(
            prompts * said.rollout.group_size, (plan.facts.eval_size or 0) * said.eval.samples
        )
        if said.environment.used:
            asked = min(asked, said.environment.concurrency)
    else:
        asked = (plan.facts.train_size or together) * plan.sampling.n
    together = min(together, ceil(asked / engines))
    return together, max(LEAST_KV_BYTES, ceil(1.1 * together * request_kv(plan, model)))
