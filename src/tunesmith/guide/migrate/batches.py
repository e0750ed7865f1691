"""Batch sizes, training lengths and devices: several numbers of the source become one number
here."""

from __future__ import annotations

from tunesmith.guide.migrate.given import Given
from tunesmith.guide.migrate.there import OFF, Dropped, Result, There, Value


def _devices(there: There) -> tuple[int, str]:
    """The number of devices that share a batch, and a description of it."""
    count = there.launch.devices
    return (
        (1, "1 device, as none are named (--devices)")
        if count is None
        else (count, f"{count} devices")
    )


def parts(given: Given, there: There) -> Result:
    """Size per device × accumulation × devices; in RL also the number of prompts per step."""
    names = ("per_device_train_batch_size", "train_micro_batch_size_per_gpu")
    if given.value == "auto" or (
        there.framework in ("accelerate", "deepspeed") and not there.given(*names)
    ):
        return Dropped(
            "it is one factor of train.batch_size, and the others are not here", off=True
        )
    each = there.number(*names)
    steps = there.number("gradient_accumulation_steps")
    devices, words = _devices(there)
    batch = each * steps * devices
    how = f"{each} × {steps} × {words}"
    if not there.rl:
        return [Value("train.batch_size", batch, how)]
    if there.given("batch_size", "mini_batch_size") and there.framework == "trl":
        return Dropped("batch_size and mini_batch_size say it", off=True)
    if there.given("num_ppo_epochs") or "PPO" in there.launch.name or "ppo" in there.launch.name:
        minis = there.number("num_mini_batches")
        return [
            Value("rollout.prompts_per_step", batch, how),
            Value("train.batch_size", max(batch // minis, 1), f"{how} / {minis} mini-batches"),
        ]
    group = there.number("num_generations", default=8)
    generated = there.number(
        "generation_batch_size",
        default=each * devices * there.number("steps_per_generation", default=steps),
    )
    if generated % group or generated < group:
        return Dropped(
            f"{how} = {batch} completions are not whole groups of {group}: give the number of devices (--devices), or "
            "set rollout.prompts_per_step and train.batch_size"
        )
    prompts = f"{generated} completions / {group} per prompt"
    return [
        Value("rollout.prompts_per_step", generated // group, prompts),
        Value("train.batch_size", batch, how),
    ]


def mini_batch(given: Given, there: There) -> Result:
    """verl's ``ppo_mini_batch_size`` counts prompts."""
    if "critic" in given.name:
        return Dropped("the critic's batch is the policy's here", off=True)
    group = there.number("rollout.n")
    prompts = there.number("data.train_batch_size", "train_batch_size", default=1024)
    if not given.count:
        return OFF
    used = min(given.count, prompts)
    return [Value("train.batch_size", used * group, f"{used} prompts × {group} completions")]


def prompts(given: Given, there: There) -> Result:
    """verl's ``data.train_batch_size``: prompts in RL, samples in supervised training; 0 in
    asynchronous training."""
    if given.value == 0 and there.rl and there.framework == "verl":
        each = there.number("ppo_mini_batch_size", default=256)
        batches = there.number("async_training.require_batches")
        return [
            Value(
                "rollout.prompts_per_step",
                each * batches,
                f"{each} prompts × {batches} mini-batches",
            )
        ]
    if not given.count:
        return Dropped("prompts are counted by another setting there", off=True)
    return [Value("rollout.prompts_per_step" if there.rl else "train.batch_size", given.value)]


def epochs(given: Given, there: There) -> Result:
    steps = there.number("max_steps", "total_training_steps", default=0)
    if (
        steps
        or there.given("total_episodes")
        or there.number("rollout.total_rollout_steps", default=0)
    ):
        return Dropped("the number of steps is given as well, and wins", off=True)
    return (
        [Value("train.epochs", given.value)]
        if isinstance(given.value, int | float) and given.value > 0
        else OFF
    )


def steps(given: Given, there: There) -> Result:
    """In RL, TRL counts optimizer steps, whereas a run file counts rollout batches."""
    count = given.value
    if not isinstance(count, int | float) or count <= 0:
        return OFF
    if there.rl and there.framework == "trl":
        accumulated = there.number("gradient_accumulation_steps")
        each = max(
            there.number("steps_per_generation", default=accumulated)
            * there.number("num_iterations")
            // accumulated,
            1,
        )
        return [
            Value(
                "train.steps",
                max(int(count) // each, 1),
                f"{count} optimizer steps / {each} per rollout batch",
            )
        ]
    return [Value("train.steps", int(count))]


def ahead_steps(given: Given, there: There) -> Result:
    """verl's ``rollout.total_rollout_steps``, in prompts."""
    each = there.number("ppo_mini_batch_size", default=256) * there.number(
        "async_training.require_batches"
    )
    if not given.count:
        return OFF
    return [
        Value(
            "train.steps", max(given.value // each, 1), f"{given.value} prompts / {each} per step"
        )
    ]


def episodes(given: Given, there: There) -> Result:
    devices, words = _devices(there)
    batch = (
        there.number("per_device_train_batch_size")
        * there.number("gradient_accumulation_steps")
        * devices
    )
    if not given.count:
        return OFF
    return [
        Value(
            "train.steps",
            max(given.value // batch, 1),
            f"{given.value} episodes / {batch} per step ({words})",
        )
    ]


def length(given: Given, there: There) -> Result:
    """OpenRLHF's ``max_len``: in RL, prompt and completion together."""
    if not there.rl:
        return [Value("data.max_tokens", given.value)]
    new = there.number("rollout.max_new_tokens", "generate_max_len", default=0)
    total = given.value
    if not isinstance(total, int) or there.given("prompt_max_len"):
        return Dropped("the prompt's limit is given as well", off=True)
    if new and total > new:
        return [Value("data.max_prompt_tokens", total - new, f"{total} − {new} new tokens")]
    return [
        Value("data.max_prompt_tokens", total // 2, f"half of {total}"),
        Value("rollout.max_new_tokens", total // 2, f"half of {total}"),
    ]


def ranks(given: Given, there: There) -> Result:
    """Trainer processes: for supervised training the launch's devices, on one machine."""
    if there.rl:
        return Dropped(
            f"{given.value} GPUs there; which of yours train and which sample: system.trainer_ranks, system.engines"
        )
    nodes = there.number("trainer.nnodes", "nnodes", "num_machines", "num_nodes")
    if nodes > 1:
        return Dropped(
            f'{nodes} machines: system.cluster = "ray" with system.trainer_ranks = {nodes * given.count}'
        )
    devices = there.launch.devices or given.count
    return (
        [Value("system.trainer_ranks", devices)]
        if devices > 1
        else Dropped("1 is the default here too", off=True)
    )


def zero_stage(given: Given, there: There) -> Result:
    devices = there.launch.devices or 1
    if (
        not isinstance(given.value, int)
        or isinstance(given.value, bool)
        or not 0 <= given.value <= 3
    ):
        return OFF
    if there.rl or devices < 2:
        how = "with" if there.rl else "give the number of devices (--devices), or set"
        return Dropped(
            f"sharding needs several ranks: {how} system.trainer_ranks also system.zero_stage = {given.value}"
        )
    ranks = (
        []
        if there.given("num_processes", "nproc_per_node", "num_gpus")
        else [Value("system.trainer_ranks", devices)]
    )
    return [*ranks, Value("system.zero_stage", given.value)]


def sequence(given: Given, there: There) -> Result:
    """Ranks that share a sequence."""
    size = given.count
    if size < 2:
        return Dropped("each rank has its own sequences here too", off=True)
    if there.rl or (there.launch.devices or 1) % size:
        return Dropped(f"with system.trainer_ranks also system.sequence_parallel.size = {size}")
    return [Value("system.sequence_parallel.size", size)]


def engines(given: Given, there: There) -> Result:
    """OpenRLHF's ``vllm_num_engines``."""
    if not given.count:
        return OFF
    several = [Value("system.engines", given.value), *_process(there)] if given.value > 1 else []
    return [Value("system.engine", "vllm"), *several]


def of_vllm(given: Given, there: There) -> Result:
    """A setting of vLLM, if vLLM samples."""
    name = there.get("rollout.name", "use_vllm", "backend")
    if "reward" in given.name or "teacher" in given.name:
        return Dropped(
            "a reward model and a teacher are scored by the trainer's code, which plans its own memory"
        )
    if given.value is None:
        return OFF
    if name not in ("vllm", True, None) and not there.number(
        "vllm_num_engines", "vllm.num_engines", default=0
    ):
        return Dropped("vLLM does not sample", off=True)
    key = next(
        key
        for meaning in there.meanings(given)
        for key in meaning.keys
        if key.startswith("system.vllm.")
    )
    ranks = key.endswith("tensor_parallel_size") and given.count > 1
    return [Value(key, given.value), *(_process(there) if ranks else [])]


def _process(there: There) -> list[Value]:
    """Engines in processes of their own, which on Ray they always are."""
    return [] if there.given("ray_job_submit") else [Value("system.engine_process", True)]


def ahead(given: Given, there: There) -> Result:
    """Asynchronous training becomes a bound on staleness."""
    if given.value in (False, None, 0, "sync", "synchronous"):
        return OFF
    if given.value is True or not isinstance(given.value, int | float):
        return [Value("rollout.max_staleness", 1), *_process(there)]
    return [Value("rollout.max_staleness", max(int(given.value), 1)), *_process(there)]


def queue(given: Given, there: There) -> Result:
    """Queued batches, in prompts."""
    if not there.get("train.async_enable", "async_enable", "async_train") or not isinstance(
        given.value, int
    ):
        return Dropped("training is synchronous there", off=True)
    size = there.number("rollout.batch_size", "rollout_batch_size", default=1024)
    return [
        Value("rollout.queue_size", given.value * size, f"{given.value} batches × {size} prompts")
    ]


BATCHES = (
    parts, mini_batch, prompts, epochs, steps, episodes, ahead_steps, sequence, length, ranks, zero_stage, engines,
    ahead, queue, of_vllm,
)  # fmt: skip
