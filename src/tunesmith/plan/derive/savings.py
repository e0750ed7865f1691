"""What saves a GPU's memory at the cost of time: shards, host memory, recomputed activations. Of
all combinations that fit, a run gets the one with the fastest step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size
from tunesmith.plan.cost.device import Price
from tunesmith.plan.cost.memory import (
    LIMIT,
    MARGIN,
    bytes_per_number,
    bytes_per_token,
    fits,
    free_memory,
    host_problem,
    layout_of,
    longest_sample,
    planned,
    planned_devices,
    trainer_memory,
)
from tunesmith.plan.cost.price import copy_bytes
from tunesmith.plan.cost.seconds import compared_seconds
from tunesmith.plan.derive.sizes import derive_sizes, may_take_turns, most_tokens
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.processes.devices import on_gpu, ranks_per_engine
from tunesmith.plan.processes.roles import keeps_frozen
from tunesmith.plan.rules.checks import refused_settings

Values = Mapping[str, Any]

SHARDS = "system.shard_size"
CHECKPOINTING = "system.gradient_checkpointing"
REFERENCE = "system.offload_reference"
ACTIVATIONS = "system.offload_activations"
OPTIMIZER = "system.offload_optimizer"
PARAMETERS = "system.offload_parameters"
TOKENS = "system.max_tokens_per_microbatch"
TURNS = "system.hybrid"
KV = "system.kv_memory"
COPY = "system.weight_copy"
IN_HOST_MEMORY = {
    REFERENCE: "the frozen models",
    ACTIVATIONS: "the layers' activations",
    OPTIMIZER: "master weights and moments",
    PARAMETERS: "the layers' weights",
}
"""What each setting keeps in host memory."""


@dataclass(frozen=True)
class Saving:
    """A run with values for everything that takes or saves memory on its trainer's GPU; costly
    facts are kept."""

    config: RunConfig
    facts: Facts

    @cached_property
    def seconds(self) -> float:
        return compared_seconds(self.config, self.facts)

    @cached_property
    def share(self) -> float:
        """See ``share_of``."""
        return share_of(self.config, self.facts)

    @cached_property
    def refused(self) -> frozenset[tuple[str, ...]]:
        """The settings that contradict each other, by refusal."""
        return frozenset(problem.keys for problem in refused_settings(self.config, self.facts))


def share_of(config: RunConfig, facts: Facts) -> float:
    """The minimum memory, as a share of the free memory, of the device with the least room;
    infinite if the host has too little."""
    devices = planned_devices(config, facts, least=True)
    if any(host_problem(config, needed, facts) for _, needed, _ in devices[:1]):
        return inf
    return max((needed.peak / max(1, free) for _, needed, free in devices), default=0.0)


def _fits(config: RunConfig, facts: Facts) -> bool:
    devices = planned_devices(config, facts, least=True)
    if any(host_problem(config, needed, facts) for _, needed, _ in devices[:1]):
        return False
    return all(fits(config, *device) for device in devices)


def derive_savings(filling: Filling, facts: Facts) -> None:
    """Fill in the fastest choice that fits; see ``best_choice``."""
    config: RunConfig = filling.config
    chosen = best_choice(config, facts).config
    without = with_values(
        chosen, {key: False for key in IN_HOST_MEMORY if _given(config, key) is None}
    )
    price = planned(chosen, facts, least=True)
    other = planned(without, facts, least=True)
    fit = share_of(chosen, facts) <= MARGIN
    shards = known(chosen.system, "shard_size")
    if shards is not None:
        filling.fill(SHARDS, shards, _why_shards(chosen, facts, shards))
    for key, what in IN_HOST_MEMORY.items():
        value = known(chosen.system, key.rpartition(".")[2])
        filling.fill(key, value, _why(config, key, what, value, fit, price, other))
    turns = known(chosen.system, "hybrid")
    if turns is not None:
        short = "short for both at once" if turns else "enough for both at once"
        filling.fill(TURNS, turns, f"engine and trainer share the GPU, whose memory is {short}")
    if _copies(config) != [None]:
        room = "has room for" if chosen.system.weight_copy == "gpu" else "is used better than for"
        filling.fill(
            COPY,
            chosen.system.weight_copy,
            f"the trainer's GPU {room} a copy of the weights to send",
        )
    share = chosen.system.gradient_checkpointing
    filling.fill(CHECKPOINTING, share, _why_recomputed(chosen, facts, float(share)))


def fill_without_savings(filling: Filling) -> None:
    """Keep everything on the device, which is a CPU or has a model of unknown size."""
    config = filling.config
    why = (
        "the model's size is not known"
        if on_gpu(config)
        else "there is no GPU whose memory it would save"
    )
    for key in IN_HOST_MEMORY:
        nothing = key == REFERENCE and not (on_gpu(config) and keeps_frozen(config))
        filling.fill(
            key, False, "the trainer's GPU holds no whole frozen model" if nothing else why
        )


def fill_shards(filling: Filling, facts: Facts) -> None:
    """Let the ranks of one machine share a copy of the model if it fits: communication between
    machines is slower."""
    config = filling.config
    for size in filter(None, _shard_sizes(config, facts)):
        needed = planned(
            with_values(config, {SHARDS: size, CHECKPOINTING: True}), facts, least=True
        )
        if (
            needed is None
            or needed.peak <= trainer_memory(config, facts)
            or size == config.system.trainer_ranks
        ):
            filling.fill(SHARDS, size, _why_shards(config, facts, size))


def best_choice(config: RunConfig, facts: Facts) -> Saving:
    """The fastest choice that agrees with a run's settings and takes at most ``LIMIT`` of the free
    memory.

    Otherwise the one that takes the least, if it may fit (``MARGIN``); else nothing is in host
    memory.
    """
    options = [with_values(config, values) for values in _options(config, facts)]
    allowed = Saving(_recomputed(options[0], 1.0), facts)  # what it contradicts, no choice mends
    bounds = [least_seconds(each, facts) for each in options]
    best: Saving | None = None
    for bound, place in sorted((bound, place) for place, bound in enumerate(bounds)):
        if best is not None and bound >= best.seconds:
            break
        for choice in _with_activations(options[place], facts):
            if (
                best is None or choice.seconds < best.seconds
            ) and choice.refused <= allowed.refused:
                best = choice
    if best is not None:
        return best
    smallest = [Saving(lean, facts) for each in options for lean in _lean(each, facts)]
    fitting = [
        each for each in smallest if each.share <= MARGIN and each.refused <= allowed.refused
    ]
    return min(fitting, key=lambda each: each.share, default=smallest[0])


def fits_somehow(config: RunConfig, facts: Facts) -> bool:
    """Whether some choice takes at most ``LIMIT``; a run without a trainer on a GPU has no choice
    to make."""
    if not config.trains or not on_gpu(config) or planned(config, facts) is None:
        return True
    options = (with_values(config, values) for values in _options(config, facts))
    return any(_fits(lean, facts) for each in options for lean in _lean(each, facts))


def least_share(config: RunConfig, facts: Facts, *, enough: float = LIMIT) -> float:
    """The minimum memory that a run needs, as a share of the free memory, over all choices; above 1
    it does not fit.

    Args:
        enough: a share at which no smaller one is looked for.
    """
    if not config.trains or not on_gpu(config) or planned(config, facts) is None:
        given = _given(config, CHECKPOINTING)
        return share_of(
            config if given is not None or not config.trains else _recomputed(config, 1.0), facts
        )
    options = (with_values(config, values) for values in _options(config, facts))
    choices = [Saving(lean, facts) for each in options for lean in _lean(each, facts)]
    fitting = next((each for each in choices if each.share <= enough), None)
    if fitting is not None and fitting.refused <= choices[0].refused:
        return fitting.share
    allowed = (
        each.share
        for each in sorted(choices, key=lambda each: each.share)
        if each.refused <= choices[0].refused
    )
    return next(allowed, choices[0].share)


def least_seconds(config: RunConfig, facts: Facts) -> float:
    """A lower bound of a step's seconds: nothing is recomputed, and micro-batches are as large as
    is useful."""
    free: dict[str, Any] = dict.fromkeys((CHECKPOINTING, *IN_HOST_MEMORY, TURNS), False)
    free[TOKENS] = most_tokens(config) * config.system.sequence_parallel.size
    if (
        config.samples
        and facts.model
        and on_gpu(config)
        and config.system.vllm.memory_share is None
    ):
        copy = copy_bytes(
            facts.model, bytes_per_number(config), config.model.quantize
        ) // ranks_per_engine(config)
        free[KV] = f"{max(1, free_memory(config, facts) - copy)}B"
    open_yet = {key: value for key, value in free.items() if _given(config, key) is None}
    # Fewer activations travel to the host if more layers are recomputed.
    return compared_seconds(with_values(config, {**open_yet, ACTIVATIONS: False}), facts)


def lacking_on_the_host(config: RunConfig, facts: Facts) -> str | None:
    """The host memory that is missing for a choice with which the GPUs have room, in words; None if
    there is none."""
    if not config.trains or not on_gpu(config) or planned(config, facts) is None:
        return None
    options = (with_values(config, values) for values in _options(config, facts))
    for lean in (each for option in options for each in _lean(option, facts)):
        devices = planned_devices(lean, facts, least=True)
        problem = host_problem(lean, devices[0][1], facts)
        if (
            problem
            and all(fits(lean, *device) for device in devices)
            and not Saving(lean, facts).refused
        ):
            keys = [f"{key} = true" for key in IN_HOST_MEMORY if _given(lean, key)]
            return f"with {' and '.join(keys)} it takes {problem}"
    return None


def _given(config: RunConfig, key: str) -> Any:
    return known(config.system, key.rpartition(".")[2])


def _options(config: RunConfig, facts: Facts) -> Iterator[Values]:
    """Shards and what is in host memory, the least first, as far as ``config`` leaves them open."""
    named = [key for key in IN_HOST_MEMORY if key != REFERENCE or keeps_frozen(config)]
    values = [
        [_given(config, key)] if _given(config, key) is not None else [False, True] for key in named
    ]
    fixed = (
        {REFERENCE: False} if REFERENCE not in named and _given(config, REFERENCE) is None else {}
    )
    for flags in sorted(product(*values), key=sum):  # few flags first
        chosen = dict(zip(named, flags, strict=True))
        if chosen[PARAMETERS] and not (chosen[OPTIMIZER] or config.lora.on):
            continue  # weights in host memory are updated there
        for size, turns, copy in product(
            _shard_sizes(config, facts), _turns(config), _copies(config)
        ):
            more = {SHARDS: size, TURNS: turns, COPY: copy}
            yield fixed | chosen | {key: value for key, value in more.items() if value is not None}


def _turns(config: RunConfig) -> list[bool | None]:
    return [False, True] if _given(config, TURNS) is None and may_take_turns(config) else [None]


def _copies(config: RunConfig) -> list[str | None]:
    """Where the copy of the weights may be that NCCL sends."""
    open_yet = config.system.weight_plane == "nccl" and _given(config, COPY) is None
    return ["gpu", "host"] if open_yet else [None]


def _shard_sizes(config: RunConfig, facts: Facts) -> list[int | None]:
    """Numbers of ranks that may share a copy of the model: those of one machine, or all."""
    if not config.system.zero_stage or _given(config, SHARDS) is not None:
        return [None]
    ranks = config.system.trainer_ranks
    here = facts.ranks_here
    if config.system.cluster != "none" and on_gpu(config):  # Ray fills one machine after another
        here = len(facts.hardware.gpus)
    return [here, ranks] if here is not None and 1 < here < ranks and ranks % here == 0 else [ranks]


def _with_activations(config: RunConfig, facts: Facts) -> Iterator[Saving]:
    """The choices that fit with different numbers of recomputed layers, from the fewest to all."""
    assert facts.model is not None, "it was checked"
    layers = facts.model.layers
    most = most_tokens(config) * config.system.sequence_parallel.size
    if not any(_fits(lean, facts) for lean in _lean(config, facts)):
        return
    counts = [0]
    if _given(config, CHECKPOINTING) is None:
        grid = sorted({ceil(part * layers / 8) for part in range(9)})
        fitting = [
            count for count in grid if _fits(_recomputed(config, count / layers), facts)
        ] or [layers - 1]
        below = max((count for count in grid if count < fitting[0]), default=0)
        between = range(below, fitting[0])
        first = below + bisect_left(
            between, True, key=lambda n: _fits(_recomputed(config, n / layers), facts)
        )
        counts = sorted({first, *fitting})
    for count in counts:
        filling = Filling(_recomputed(config, count / layers))
        derive_sizes(filling, facts)
        yield Saving(filling.config, facts)
        if (
            filling.config.system.max_tokens_per_microbatch >= most
            and not config.system.offload_activations
        ):
            return  # what more layers would save has no use


def _lean(config: RunConfig, facts: Facts) -> list[RunConfig]:
    """The run with those shares of recomputed layers of which one takes the least memory.

    If all are recomputed, a layer's activations come on top of the inputs of all; with activations
    in host memory a layer that is kept takes less than one that is recomputed.
    """
    layers = facts.model.layers if facts.model else 1
    if _given(config, CHECKPOINTING) is not None:
        return [config]
    shares = (
        1.0,
        (layers - 1) / layers,
        *((0.0,) if known(config.system, "offload_activations") else ()),
    )
    return [_recomputed(config, share) for share in shares]


def _recomputed(config: RunConfig, share: float) -> RunConfig:
    """The run with a share of its layers recomputed, unless that was given."""
    if _given(config, CHECKPOINTING) is not None:
        return config
    return with_values(config, {CHECKPOINTING: round(share, 3) if 0 < share < 1 else bool(share)})


def _why(
    config: RunConfig,
    key: str,
    what: str,
    value: bool,
    fit: bool,
    chosen: Price | None,
    without: Price | None,
) -> str:
    if key == REFERENCE and not keeps_frozen(config):
        return "the trainer's GPU holds no whole frozen model"
    if not fit:
        return "the run would still not fit"
    if not value:
        return f"the fastest step that fits has {what} on the GPU"
    size = format_size(max(0, (chosen.host if chosen else 0) - (without.host if without else 0)))
    return f"the fastest step that fits; each rank then keeps {size} in host memory, with {what}"


def _why_shards(config: RunConfig, facts: Facts, size: int) -> str:
    ranks = config.system.trainer_ranks
    if size < ranks:
        return f"the ranks of one machine; the {ranks // size} machines have a copy each"
    sizes = _shard_sizes(with_values(config, {SHARDS: None}), facts)
    if len(sizes) > 1:
        return f"all ranks: the {sizes[0]} of one machine are too few for the model"
    return "all ranks share one copy of the model"


def _why_recomputed(config: RunConfig, facts: Facts, share: float) -> str:
    longest = longest_sample(config, facts)
    model = facts.model
    if model is None or longest is None:
        return "the longest sample's size is not known"
    layout = layout_of(config, facts)
    kept, whole = (
        format_size(longest * bytes_per_token(model, each))
        for each in (layout, layout_of(_plain(config), facts))
    )
    if not share:
        return f"the fastest step that fits keeps all activations: {kept} of the longest sample"
    again = f"{round(share * model.layers)} of {model.layers}" if share < 1 else "all"
    return f"the fastest step that fits; with {again} layers recomputed, the longest sample takes {kept} of {whole}"


def _plain(config: RunConfig) -> RunConfig:
    return with_values(config, {CHECKPOINTING: False})
