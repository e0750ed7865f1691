"""How long the phases of a step take on this machine's CPU, at the rates measured on it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tunesmith.config.commands import DPOConfig, KTOConfig, ScoreConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import parse_size
from tunesmith.plan.cost.memory import bytes_per_number, kv_bytes_per_number, longest_sample
from tunesmith.plan.cost.phases import Work, again_seconds, phase_seconds
from tunesmith.plan.facts.measured import read_rates
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.processes.devices import on_gpu
from tunesmith.plan.processes.roles import has_critic, keeps_reference
from tunesmith.plan.rules.situation import rollout_samples


def measurable(config: RunConfig, facts: Facts) -> bool:
    """Whether a run does what the rates were measured for: training a whole model in one process on a CPU."""
    system, model = config.system, facts.model
    if on_gpu(config) or facts.hardware.named or not config.trains or model is None or not model.parameters:
        return False
    processes = system.trainer_ranks > 1 or known(system, "engine_process") or system.engine_kind.served
    other = config.lora.on or config.model.quantize or has_critic(config) or isinstance(config, ScoreConfig)
    return not processes and not other and system.cluster == "none" and config.command != "distill"


def cpu_seconds(config: RunConfig, facts: Facts) -> dict[str, float]:
    """Seconds of each phase of a resolved run's step, and of the whole ``step``. Every sample is assumed to have the
    maximum length. Empty if nothing was measured, or if the run does something other than what was measured.
    """
    longest, number = longest_sample(config, facts), bytes_per_number(config)
    rates = read_rates(facts.hardware, number) if measurable(config, facts) and longest else None
    if rates is None or not longest or known(config.system, "threads") != facts.hardware.cores:
        return {}
    work, rl, passes, decoupled = work_of(config, facts, longest), isinstance(config, RLConfig), 1, False
    if isinstance(config, RLConfig):
        passes, decoupled = config.train.passes_per_batch, bool(known(config.algorithm, "decoupled"))
    batch = known(config.train, "batch_size") or work.samples
    steps = passes * max(1, ceil(work.samples / batch))
    found = phase_seconds(work, rates)
    again = config.system.gradient_checkpointing * again_seconds(work, rates)
    scored = bool(keeps_reference(config)) + decoupled
    phases = {name: found[name] for name in ("prefill", "decode", "sync") if rl}
    phases |= {"scoring": scored * found["scoring"]} if scored else {}
    phases |= {"forward and backward": passes * (found["forward and backward"] + again)}
    phases |= {"optimizer": steps * found["optimizer"]}
    return {**phases, "step": sum(phases.values())}


def work_of(config: RunConfig, facts: Facts, longest: int) -> Work:
    model, system = facts.model, config.system
    assert model is not None, "it was checked"
    micro, number = system.max_tokens_per_microbatch, bytes_per_number(config)
    if not isinstance(config, RLConfig):
        each = 2 if isinstance(config, DPOConfig | KTOConfig) else 1
        length = longest // each
        return Work(model, number, each * config.train.batch_size, 1, 1, max(1, length - 1), micro, share=False)
    new, samples = config.rollout.max_new_tokens, rollout_samples(config)
    work = Work(
        model, number, config.rollout.prompts_per_step, config.rollout.group_size, max(1, longest - new), new, micro
    )
    kept = model.kv_bytes_per_token(kv_bytes_per_number(config, facts)) * longest
    held = parse_size(system.kv_memory) // kept if known(system, "kv_memory") else samples
    return replace(work, share=system.share_prompts, running=max(1, min(system.max_running, held)))
