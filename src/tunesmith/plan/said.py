"""The plan of what was said, before anything is derived."""

from __future__ import annotations

from collections.abc import Mapping

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.changing import with_values
from tunesmith.config.commands import SamplingConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.system import PlacementSection, SystemSection
from tunesmith.plan.devices import Devices
from tunesmith.plan.facts.run import NOTHING, Facts
from tunesmith.plan.kind import RunKind, kind_of
from tunesmith.plan.parts import Intervals, Lengths, Memory, SamplingChoices, Training, Vllm
from tunesmith.plan.plan import MOST_RUNNING, OF_DEVICES, OF_MEMORY, USUAL_RUNNING, C, Plan
from tunesmith.plan.replacing import replace


def open_plan(said: C, facts: Facts, algorithm: Algorithm | None = None) -> Plan[C]:
    """The plan of what was said, with one process and nothing in host memory where that is open."""
    return Plan(
        said,
        facts,
        devices_said(kind_of(said, algorithm), said, facts),
        memory_said(said.system),
        training_said(said, facts),
        sampling_said(said),
        intervals_said(said),
        lengths_said(said),
        vllm_said(said.system),
        algorithm,
    )


def reopened(plan: Plan[C], system: SystemSection) -> Plan[C]:
    """The plan on its device and with its engine, with another ``[system]``, which leaves its
    processes and their memory open."""
    said = plan.said.model_copy(update={"system": system})
    devices = devices_said(plan.kind, said, plan.facts)
    here = plan.devices
    devices = replace(devices, engine=here.engine, device=here.device, dtype=here.dtype)
    memory = memory_said(system)
    running = system.max_running or (MOST_RUNNING if here.on_gpu else plan.sampling.running)
    sampling = replace(plan.sampling, running=running)
    return replace(
        plan, said=said, devices=devices, memory=memory, sampling=sampling, vllm=vllm_said(system)
    )


def with_said(plan: Plan[C], values: Mapping[str, object]) -> Plan[C]:
    """The plan, if more had been said about its processes, their memory, and what it trains; by
    dotted key."""
    said = with_values(plan.said, values)
    own = {key.removeprefix("system."): value for key, value in values.items()}
    devices = {name: own[key] for name, key in OF_DEVICES.items() if key in own}
    memory = {name: own[key] for name, key in OF_MEMORY.items() if key in own}
    devices["kind"] = kind_of(said, plan.algorithm)
    plan = replace(plan, said=said).with_devices(**devices).with_memory(**memory)
    running = replace(plan.sampling, running=own.get("max_running", plan.sampling.running))
    return replace(plan, sampling=running)


def devices_said(kind: RunKind, said: RunConfig, facts: Facts | None = None) -> Devices:
    """The processes and devices that were said, with one process where that is open.

    Args:
        facts: what a launcher started; None: nothing.
    """
    system = said.system
    machines = 1
    each = 1
    if facts and facts.ranks_here and kind.rl and system.cluster == "none":
        machines = facts.hardware.nodes
        each = facts.ranks_here
    return Devices(
        kind=kind,
        engine=system.engine_kind,
        cluster=system.cluster,
        device=system.device or "",
        dtype=said.model.dtype or "",
        threads=system.threads or 1,
        compile=system.compile or False,
        experts=system.experts_implementation or "grouped_mm",
        machines=machines,
        ranks_per_machine=each,
        trainer_ranks=system.trainer_ranks or 1,
        zero_stage=system.zero_stage or 0,
        shard_size=system.ranks_of_a_copy,
        expert_parallel=system.expert_parallel_size,
        sequence=system.sequence_parallel.size,
        ring=system.sequence_parallel.type == "ring",
        engines=system.engines or 1,
        tensor=system.vllm.tensor_parallel_size or 1,
        pipeline=system.vllm.pipeline_parallel_size,
        engine_process=system.engines_in_processes,
        hybrid=bool(system.hybrid),
        placement=_on_kinds_of_gpus(system, facts),
        weight_plane=system.weight_plane,
        weight_copy=system.weight_copy,
        adapter_sync=system.adapter_sync,
        engine_weights=system.engine_weights or "model",
    )


def _on_kinds_of_gpus(system: SystemSection, facts: Facts | None) -> PlacementSection:
    """``system.placement`` with the kinds of GPUs of trainer and engines, if a cluster has
    several."""
    said = system.placement or PlacementSection()
    if facts is None or facts.hardware.accelerator is None or system.cluster == "none":
        return said
    samples = facts.engine_hardware or facts.hardware
    actor = said.actor.model_copy(update={"accelerator": facts.hardware.accelerator})
    rollout = said.rollout.model_copy(update={"accelerator": samples.accelerator})
    return said.model_copy(update={"actor": actor, "rollout": rollout})


def memory_said(system: SystemSection) -> Memory:
    return Memory(
        microbatch=system.max_tokens_per_microbatch,
        scoring=system.scoring_max_tokens,
        critic=system.critic_max_tokens,
        reward=system.reward_max_tokens,
        kv=system.kv_memory,
        checkpointing=system.gradient_checkpointing or False,
        offload_activations=bool(system.offload_activations),
        offload_optimizer=bool(system.offload_optimizer),
        offload_parameters=bool(system.offload_parameters),
        offload_reference=bool(system.offload_reference),
    )


def training_said(said: RunConfig, facts: Facts | None = None) -> Training:
    train = said.train
    rollout = said.rollout if isinstance(said, RLConfig) else None
    return Training(
        samples=rollout.samples if rollout else train.batch_size or 0,
        batch=train.batch_size,
        prompts=rollout.prompts_per_step if rollout else 0,
        group=rollout.group_size if rollout else 1,
        longest=longest_sample(said, lengths_said(said), facts) if facts else None,
        steps=train.steps,
        epochs=train.epochs,
        done=facts.done if facts else NOTHING,
        warmup=train.warmup_steps,
        lr=train.lr or 0.0,
        data_seed=said.data.seed or 0,
    )


def sampling_said(said: RunConfig) -> SamplingChoices:
    running = said.system.max_running or USUAL_RUNNING
    if isinstance(said, RLConfig):
        rollout = said.rollout
        seed = rollout.seed or 0
        queue = rollout.queue_size or 0
        return SamplingChoices(rollout.group_size, rollout.temperature, seed, running, queue)
    section = said.sampling_settings
    if isinstance(said, SamplingConfig) and section:
        return SamplingChoices(
            said.sampling.n or 1, section.temperature or 0.0, section.seed or 0, running
        )
    return SamplingChoices(running=running)


def intervals_said(said: RunConfig) -> Intervals:
    checkpoint = said.checkpoint
    evaluation = said.eval
    return Intervals(
        checkpoint.every,
        checkpoint.minutes,
        said.monitor.every,
        evaluation.every,
        evaluation.pass_at,
    )


def lengths_said(said: RunConfig) -> Lengths:
    episode = said.environment.max_tokens if isinstance(said, RLConfig) else None
    return Lengths(said.data.max_prompt_tokens, said.data.max_tokens, episode)


def vllm_said(system: SystemSection) -> Vllm:
    vllm = system.vllm
    return Vllm(bool(vllm.eager), bool(vllm.prefix_caching), vllm.max_model_len)


def longest_sample(said: RunConfig, lengths: Lengths, facts: Facts) -> int | None:
    """Tokens in the longest sample, or in samples that must share a micro-batch; None if
    unknown."""
    if said.supervised:
        return facts.together or facts.longest or lengths.sample
    if lengths.episode is not None:
        return lengths.episode
    prompt = facts.longest or lengths.prompt
    return None if prompt is None else prompt + said.new_tokens
