"""Rules about the trainer's ranks, host memory, and the machine's limits."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.engines import BLOCK_TOKENS
from tunesmith.config.schema import RunConfig
from tunesmith.config.values import format_size, parse_size
from tunesmith.errors import Problem
from tunesmith.plan.cost.memory import kept_of_request
from tunesmith.plan.rules.rule import rule, unread
from tunesmith.plan.rules.situation import Situation, more

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off

RANKS = "system.trainer_ranks"
STAGE = "system.zero_stage"
EXPERTS = "system.expert_parallel_size"
MULTIPLIED_AT_ONCE = ("llama4_text",)
"""Families whose experts transformers has in one module without its interface for experts."""
DEVICE = "system.device"
REFERENCE = "system.offload_reference"
ACTIVATIONS = "system.offload_activations"
OPTIMIZER = "system.offload_optimizer"
PARAMETERS = "system.offload_parameters"
MOST_THREADS_PER_CORE = 16
_COMPUTED_ON_THE_CPU = (
    "updated on the CPU, where the matrix products of Muon would take far longer than the model; "
    'set train.optimizer = "adamw", or leave it out and shard the model with system.zero_stage'
)


@rule(RunConfig)
def sharding(s: Situation[RunConfig]) -> Iterator[Problem]:
    ranks = s.system.trainer_ranks
    size = s.system.shard_size
    if not s.system.zero_stage:
        return
    if ranks == 1:
        yield s.clash(STAGE,
            "shards the model over the trainer's ranks, and there is 1; set system.trainer_ranks = "
            "2 or more",
            RANKS)
    if ranks and size and ranks % size:
        yield s.clash("system.shard_size",
            f"with {s.said(RANKS)}: copies of the model are sharded over equally many ranks, and "
            f"{ranks % size} would be left over; set system.shard_size to a divisor of {ranks}",
            RANKS)
    if more(ranks, 1) and size == 1:
        yield s.clash("system.shard_size",
            ": each rank would have a whole copy; set system.zero_stage = 0 for that, or "
            "system.shard_size = 2 or more",
            STAGE)


@rule(RunConfig)
def expert_parallelism(s: Situation[RunConfig]) -> Iterator[Problem]:
    size = s.devices.expert_parallel
    ranks = s.system.trainer_ranks
    said = s.config.system.shard_size
    if size == 1:
        return
    if not s.config.trains:
        yield s.clash(EXPERTS, ": nothing is trained; leave it out")
    if s.model and s.model.family in MULTIPLIED_AT_ONCE:
        yield s.clash(EXPERTS,
            f': transformers multiplies all experts of "{s.model.family}" at once, and they are '
            "not divided; leave it out")
    elif s.model and not s.model.mixtures.layers:
        yield s.clash(EXPERTS, ": the model has no experts; leave it out")
    elif s.model and s.model.mixtures.experts % size:
        experts = s.model.mixtures.experts
        yield s.clash(EXPERTS,
            f"does not divide the {experts} experts of a layer; use a divisor of {experts}")
    if ranks and ranks % size:
        yield s.clash(EXPERTS,
            f"makes groups of trainer ranks, and {s.said(RANKS)} is not a multiple of it; change "
            "one of the two", RANKS)
    if said and said != size:
        yield s.clash(EXPERTS,
            f"with system.shard_size = {said}: the ranks that divide the experts are those that "
            "share a copy; leave system.shard_size out", "system.shard_size")
    if s.system.zero_stage == 0 and not (ranks and ranks % size):
        yield s.clash(EXPERTS,
            f"with {s.said(STAGE)}: the ranks that divide the experts shard the rest of the model; "
            f"set {STAGE} to 1, 2 or 3", STAGE)


@rule(RunConfig)
def not_with_divided_experts(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.devices.expert_parallel == 1:
        return
    if s.system.offload_parameters:
        yield s.clash(EXPERTS,
            f"with {s.said(PARAMETERS)}: a rank's experts stay on its GPU; leave one of the two "
            "out", PARAMETERS)


@rule(RunConfig)
def sequence_parallelism(s: Situation[RunConfig]) -> Iterator[Problem]:
    together = s.devices.sequence
    ranks = s.system.trainer_ranks
    size = "system.sequence_parallel.size"
    kind = "system.sequence_parallel.type"
    if together > 1 and ranks and ranks % together:
        yield s.clash(size,
            f"makes groups of trainer ranks, and {s.said(RANKS)} is not a multiple of it; change "
            "one of the two",
            RANKS)
    if not s.devices.ring and s.model and s.model.heads % together:
        heads = s.model.heads
        yield s.clash(size,
            f"does not divide the {heads} attention heads that the ranks share; use a divisor of "
            f'{heads}, or set {kind} = "ring"', kind)
    if together > 1 and s.model and s.model.carrying:
        yield s.clash(size,
            f": layers of '{s.model.family}' carry a state from token to token, which ranks that "
            "share a sequence do not hand on; leave it out")
    ring = together > 1 and s.devices.ring
    if ring and s.device_kind == "cuda" and s.dtype == "float32":
        yield s.clash(kind,
            f"with {s.said('model.dtype')}: ring attention on a GPU has 16-bit kernels only; set "
            'model.dtype = "bfloat16", or type = "ulysses"', "model.dtype")
    if ring and s.model and s.model.narrow:
        yield s.clash(kind,
            f": '{s.model.family}' has attention with windows, chunks or a soft cap, for which "
            'ring attention has no kernel; set type = "ulysses"')


@rule(RunConfig)
def ranks_of_this_machine(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.system.cluster != "none" or not more(s.system.trainer_ranks, 1):
        return
    if not s.config.trains:
        yield s.clash(RANKS, ": nothing is trained; leave it out")
    elif s.device_number is not None:
        yield s.clash(RANKS,
            f'with {s.said(DEVICE)}: each rank has its own GPU; use "cuda"', DEVICE)
    if not s.config.rl:
        return
    if s.engine.served:
        yield s.clash(RANKS,
            f"with {s.said('system.engine')}: servers get weights only from a trainer in the run's "
            "own process; leave system.trainer_ranks out", "system.engine")
    if s.engine_process_off:
        why = f"with {s.said(RANKS)}: engines have their own processes then; leave it out"
        yield s.clash("system.engine_process", why, RANKS)


@rule(RunConfig)
def offloading(s: Situation[RunConfig]) -> Iterator[Problem]:
    names = ("offload_optimizer", "offload_activations", "offload_reference", "offload_parameters")
    for name in names:
        if s.device_kind == "cpu" and getattr(s.system, name):
            yield s.clash(f"system.{name}",
                f"is for GPUs: with {s.said(DEVICE)} everything is in host memory; leave it out",
                DEVICE)
    few = s.layers is not None and s.layers < 3
    if few and s.system.offload_activations:
        yield s.clash(ACTIVATIONS,
            f"keeps the last two layers' activations on the GPU, and the model has {s.layers} "
            "layers: nothing would be offloaded; leave it out")
    if few and s.system.offload_parameters:
        yield s.clash(PARAMETERS,
            f"keeps two layers' weights on the GPU, and the model has {s.layers} layers: nothing "
            "would be offloaded; leave it out")
    if s.system.offload_optimizer and s.config.train.optimizer.name == "muon":
        yield s.clash(OPTIMIZER,
            f": master weights would be {_COMPUTED_ON_THE_CPU}", "train.optimizer")


@rule(RunConfig)
def offloaded_reference(s: Situation[RunConfig]) -> Iterator[Problem]:
    if not s.system.offload_reference or s.keeps_frozen is not False:
        return
    if s.config.system.cluster == "ray":
        yield s.clash(REFERENCE,
            'with system.cluster = "ray", where reference and reward models have their own '
            "processes; leave it out",
            "system.cluster")
    elif not s.keeps_reference:
        yield s.clash(REFERENCE,
            ": this run keeps no reference, teacher or reward model next to the policy; leave it "
            "out")
    if s.keeps_reference and s.system.zero_stage:
        yield s.clash(REFERENCE,
            f"with {s.said(STAGE)}: ranks shard the reference too, and each keeps little of it; "
            "leave one of the two out", STAGE)


@rule(RunConfig)
def offloaded_parameters(s: Situation[RunConfig]) -> Iterator[Problem]:
    config = s.config
    one = "leave one of the two out"
    if not s.system.offload_parameters:
        return
    if not config.lora.on and s.system.offload_optimizer is False:
        yield s.clash(OPTIMIZER,
            f"with {s.said(PARAMETERS)}: master weights and moments take six times the GPU memory "
            "of the weights; leave out one of the two", PARAMETERS)
    if config.train.optimizer.name == "muon":
        why = f": weights in host memory are {_COMPUTED_ON_THE_CPU}"
        yield s.clash(PARAMETERS, why, "train.optimizer")
    if s.system.zero_stage in (1, 2):
        yield s.clash(PARAMETERS,
            f"with {s.said(STAGE)}, which gathers the weights of all layers on each GPU for a "
            f"micro-batch, so none would be offloaded; set {STAGE} = 3, or {one}", STAGE)
    if config.model.quantize:
        key = "model.quantize"
        why = (f"with {s.said(key)}: quantised weights stay on the GPU, where they take little; "
               f"{one}")
        yield s.clash(PARAMETERS, why, key)
    if config.samples and config.trains and s.weights_apart is False:
        yield s.clash(PARAMETERS,
            "with an engine that samples from the trainer's weights, all of which would be copied "
            "to the GPU for each token; set system.engine_process = true to give the engine its "
            "own copy, or leave it out", "system.engine_process")
    copy = "system.weight_copy"
    if s.devices.weight_copy == "gpu":
        why = f'which keeps a copy of all weights on the GPU; set {copy} = "host"'
        yield s.clash(PARAMETERS, f"with {s.said(copy)}, {why}", copy)


@rule(RunConfig)
def this_machine(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.machine is None or s.config.system.cluster != "none":
        return
    cores = s.machine.cores
    most = max(64, MOST_THREADS_PER_CORE * cores)
    if more(s.system.threads, most):
        why = f"for {cores} cores; use {cores}, and {most} at most"
        yield s.clash("system.threads", why, kind="machine")
    kv = s.system.kv_memory
    if kv is not None and s.memory is not None and parse_size(kv) > s.memory:
        yield s.clash("system.kv_memory",
            f"is more than the whole memory of the device, {format_size(s.memory)}; lower it",
            kind="memory")


@rule(RunConfig)
def kv_memory(s: Situation[RunConfig]) -> Iterator[Problem]:
    """The longest prompt with its completion, or the longest conversation, in blocks; the last
    token's keys and values are never read."""
    model = s.model
    kv = s.system.kv_memory
    config = s.config
    section = config.sampling_settings
    derived = s.dtype is not None and s.system.compile is not None
    if section is None or s.engine.third_party or not derived:
        return
    if s.facts is None or model is None or kv is None or s.longest is None:
        return
    plan = s.whole(s.facts)
    new = config.new_tokens
    what = f"prompt of {s.longest} tokens with {new} new ones"
    shorter = f"{section.table}.max_new_tokens"
    blocks = sum(-(-count // BLOCK_TOKENS) for count in (s.longest, max(1, new - 1)))
    episode = s.lengths.episode
    if episode is not None:  # its last turn may begin anywhere in a block
        what = f"conversation of {episode} tokens"
        shorter = "environment.max_tokens"
        blocks = -(-(episode - 1) // BLOCK_TOKENS) + 1
    needed = int(kept_of_request(plan, model, blocks * BLOCK_TOKENS))
    if needed > parse_size(kv):
        yield Problem(("system.kv_memory",),
            f"system.kv_memory = {kv} does not hold one {what}, which takes "
            f"{format_size(needed)}; raise it, leave it out, or lower {shorter}",
            "memory")


@rule(RunConfig)
def one_source_of_speed(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.system.profile and s.config.system.tuned:
        yield Problem(("system.profile", "system.tuned"),
            "system.profile and system.tuned both fill in settings missing from [system]; leave "
            "one of the two out")


unread(RunConfig, "system.shard_size", lambda s: s.system.zero_stage == 0,
       "with system.zero_stage = 0, where each rank has a whole copy of the model; leave it out, "
       "or set system.zero_stage = 3")
unread(RunConfig, "system.trainer_restarts",
       lambda s: s.config.system.cluster == "none" and s.system.trainer_ranks == 1,
       "with system.trainer_ranks = 1, where the run's own process trains; leave it out")
unread(RunConfig, "system.sequence_parallel.type",
       lambda s: s.devices.sequence == 1,
       "with system.sequence_parallel.size = 1; set a size, or leave it out")
