"""Batch sizes, training lengths and devices: several numbers of the source become one number
here."""

from __future__ import annotations

from tunesmith.guide.migrate.given import Given
from tunesmith.guide.migrate.there import OFF, Result, There, Value, by_hand, without


def _devices(there: There) -> tuple[int, str]:
    """The number of devices that share a batch, and a description of it."""
    count = there.launch.devices
    if count is None:
        return 1, "1 device, as none are named (--devices)"
    return count, f"{count} devices"


def parts(given: Given, there: There) -> Result:
    """Size per device × accumulation × devices; in RL also the number of prompts per step."""
    names = ("per_device_train_batch_size", "train_micro_batch_size_per_gpu")
    no_factors = there.framework in ("accelerate", "deepspeed") and not there.given(*names)
    if given.value == "auto" or no_factors:
        return without("it is one factor of train.batch_size, and the others are not here")
    each = there.number(*names)
    steps = there.number("gradient_accumulation_steps")
    devices, words = _devices(there)
    batch = each * steps * devices
    how = f"{each} × {steps} × {words}"
    if not there.rl:
        return Value("train.batch_size", batch, how)
    if there.given("batch_size", "mini_batch_size") and there.framework == "trl":
        return without("batch_size and mini_batch_size say it")
    if there.given("num_ppo_epochs") or "ppo" in there.launch.name.lower():
        minis = there.number("num_mini_batches")
        return [
            Value("rollout.prompts_per_step", batch, how),
            Value("train.batch_size", max(batch // minis, 1), f"{how} / {minis} mini-batches"),
        ]
    group = there.number("num_generations", default=8)
    whole = each * devices * there.number("steps_per_generation", default=steps)
    generated = there.number("generation_batch_size", default=whole)
    if generated % group or generated < group:
        choices = "give --devices, or set rollout.prompts_per_step and train.batch_size"
        return by_hand(f"{how} = {batch} completions are not whole groups of {group}: {choices}")
    prompts = f"{generated} completions / {group} per prompt"
    return [
        Value("rollout.prompts_per_step", generated // group, prompts),
        Value("train.batch_size", batch, how),
    ]


def mini_batch(given: Given, there: There) -> Result:
    """verl's ``ppo_mini_batch_size`` counts prompts."""
    if "critic" in given.name:
        return without("the critic's batch is the policy's here")
    if not given.count:
        return OFF
    group = there.number("rollout.n")
    used = min(given.count, there.number("data.train_batch_size", "train_batch_size", default=1024))
    return Value("train.batch_size", used * group, f"{used} prompts × {group} completions")


def prompts(given: Given, there: There) -> Result:
    """verl's ``data.train_batch_size``: prompts in RL, samples in supervised training; 0 in
    asynchronous training."""
    if given.value == 0 and there.rl and there.framework == "verl":
        each, batches = _ahead(there)
        how = f"{each} prompts × {batches} mini-batches"
        return Value("rollout.prompts_per_step", each * batches, how)
    if not given.count:
        return without("prompts are counted by another setting there")
    return Value("rollout.prompts_per_step" if there.rl else "train.batch_size", given.value)


def _ahead(there: There) -> tuple[int, int]:
    """Prompts per mini-batch, and mini-batches per step, of verl's asynchronous training."""
    each = there.number("ppo_mini_batch_size", default=256)
    return each, there.number("async_training.require_batches")


def ahead_steps(given: Given, there: There) -> Result:
    """verl's ``rollout.total_rollout_steps``, in prompts."""
    each, batches = _ahead(there)
    return _steps(given, each * batches, f"{given.value} prompts / {each * batches} per step")


def episodes(given: Given, there: There) -> Result:
    devices, words = _devices(there)
    accumulated = there.number("gradient_accumulation_steps")
    batch = there.number("per_device_train_batch_size") * accumulated * devices
    return _steps(given, batch, f"{given.value} episodes / {batch} per step ({words})")


def _steps(given: Given, batch: int, how: str) -> Result:
    return Value("train.steps", max(given.count // batch, 1), how) if given.count else OFF


def epochs(given: Given, there: There) -> Result:
    steps = there.number("max_steps", "total_training_steps", default=0)
    ahead = there.number("rollout.total_rollout_steps", default=0)
    if steps or ahead or there.given("total_episodes"):
        return without("the number of steps is given as well, and wins")
    positive = isinstance(given.value, int | float) and given.value > 0
    return Value("train.epochs", given.value) if positive else OFF


def steps(given: Given, there: There) -> Result:
    """In RL, TRL counts optimizer steps, whereas a run file counts rollout batches."""
    count = given.value
    if not isinstance(count, int | float) or count <= 0:
        return OFF
    if not there.rl or there.framework != "trl":
        return Value("train.steps", int(count))
    accumulated = there.number("gradient_accumulation_steps")
    generated = there.number("steps_per_generation", default=accumulated)
    each = max(generated * there.number("num_iterations") // accumulated, 1)
    how = f"{count} optimizer steps / {each} per rollout batch"
    return Value("train.steps", max(int(count) // each, 1), how)


def length(given: Given, there: There) -> Result:
    """OpenRLHF's ``max_len``: in RL, prompt and completion together."""
    if not there.rl:
        return Value("data.max_tokens", given.value)
    new = there.number("rollout.max_new_tokens", "generate_max_len", default=0)
    total = given.value
    if not isinstance(total, int) or there.given("prompt_max_len"):
        return without("the prompt's limit is given as well")
    if new and total > new:
        return Value("data.max_prompt_tokens", total - new, f"{total} − {new} new tokens")
    keys = ("data.max_prompt_tokens", "rollout.max_new_tokens")
    return [Value(key, total // 2, f"half of {total}") for key in keys]


def ranks(given: Given, there: There) -> Result:
    """Trainer processes: for supervised training the launch's devices, on one machine."""
    if there.rl:
        keys = "system.trainer_ranks and system.engines"
        return by_hand(f"{given.value} GPUs there; {keys} say which of yours train and sample")
    nodes = there.number("trainer.nnodes", "nnodes", "num_machines", "num_nodes")
    if nodes > 1:
        count = nodes * given.count
        settings = f'system.cluster = "ray" with system.trainer_ranks = {count}'
        return by_hand(f"{nodes} machines: {settings}")
    devices = there.launch.devices or given.count
    if devices > 1:
        return Value("system.trainer_ranks", devices)
    return without("1 is the default here too")


def zero_stage(given: Given, there: There) -> Result:
    devices = there.launch.devices or 1
    if given.value != 0 and given.count not in (1, 2, 3):
        return OFF
    if there.rl or devices < 2:
        how = "with" if there.rl else "give the number of devices (--devices), or set"
        both = f"system.trainer_ranks also system.zero_stage = {given.value}"
        return by_hand(f"sharding needs several ranks: {how} {both}")
    launched = there.given("num_processes", "nproc_per_node", "num_gpus")
    ranks = [] if launched else [Value("system.trainer_ranks", devices)]
    return [*ranks, Value("system.zero_stage", given.value)]


def sequence(given: Given, there: There) -> Result:
    """Ranks that share a sequence."""
    size = given.count
    if size < 2:
        return without("each rank has its own sequences here too")
    if there.rl or (there.launch.devices or 1) % size:
        return by_hand(f"with system.trainer_ranks also system.sequence_parallel.size = {size}")
    return Value("system.sequence_parallel.size", size)


def engines(given: Given, there: There) -> Result:
    """OpenRLHF's ``vllm_num_engines``."""
    if not given.count:
        return OFF
    several = [Value("system.engines", given.value), *_process(there)] if given.value > 1 else []
    return [Value("system.engine", "vllm"), *several]


def of_vllm(given: Given, there: There) -> Result:
    """A setting of vLLM, if vLLM samples."""
    if "reward" in given.name or "teacher" in given.name:
        return by_hand("the trainer's code scores reward models and teachers, and plans its memory")
    if given.value is None:
        return OFF
    count = there.number("vllm_num_engines", "vllm.num_engines", default=0)
    if not count and there.get("rollout.name", "use_vllm", "backend") not in ("vllm", True, None):
        return without("vLLM does not sample")
    keys = (key for meaning in there.meanings(given) for key in meaning.keys)
    key = next(key for key in keys if key.startswith("system.vllm."))
    ranks = key.endswith("tensor_parallel_size") and given.count > 1
    return [Value(key, given.value), *(_process(there) if ranks else [])]


def _process(there: There) -> list[Value]:
    """Engines in processes of their own, which on Ray they always are."""
    return [] if there.given("ray_job_submit") else [Value("system.engine_process", True)]


def ahead(given: Given, there: There) -> Result:
    """Asynchronous training becomes a bound on staleness."""
    value = given.value
    if value in (False, None, 0, "sync", "synchronous"):
        return OFF
    bound = 1 if value is True or not isinstance(value, int | float) else max(int(value), 1)
    return [Value("rollout.max_staleness", bound), *_process(there)]


def queue(given: Given, there: There) -> Result:
    """Queued batches, in prompts."""
    ahead = there.get("train.async_enable", "async_enable", "async_train")
    if not ahead or not isinstance(given.value, int):
        return without("training is synchronous there")
    size = there.number("rollout.batch_size", "rollout_batch_size", default=1024)
    how = f"{given.value} batches × {size} prompts"
    return Value("rollout.queue_size", given.value * size, how)
