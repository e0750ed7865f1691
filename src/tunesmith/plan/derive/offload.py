"""Derivation of what to offload to host memory, if a GPU is otherwise short of memory and the host has room."""

from __future__ import annotations

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size
from tunesmith.plan.cost.layout import Price
from tunesmith.plan.cost.memory import MARGIN, host_problem, least_devices
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.processes.devices import on_gpu
from tunesmith.plan.processes.roles import keeps_frozen
from tunesmith.plan.rules.rules import refused_problems
from tunesmith.plan.rules.situation import situation

ACTIVATIONS, OPTIMIZER = "system.offload_activations", "system.offload_optimizer"
PARAMETERS = "system.offload_parameters"


def _with_and_without(config: RunConfig, key: str, facts: Facts) -> tuple[Price, Price, int] | None:
    """The trainer's minimum memory with and without a setting, and the free memory; None if unknown."""
    both = [least_devices(with_values(config, {key: value}), facts) for value in (True, False)]
    if not all(both):
        return None
    (_, with_it, free), (_, without, _) = (devices[0] for devices in both)
    return with_it, without, free


def derive_reference(filling: Filling, facts: Facts) -> None:
    """Offload frozen models while they do not score, if a GPU has no room for a sample besides them."""
    config, key = filling.config, "system.offload_reference"
    if not on_gpu(config) or not keeps_frozen(config):
        filling.fill(key, False, "the trainer's GPU holds no whole frozen model")
        return
    known_memory = _with_and_without(with_values(config, {"system.gradient_checkpointing": True}), key, facts)
    if known_memory is None:
        filling.fill(key, False, "the model's size is not known")
        return
    with_it, without, free = known_memory
    if without.peak <= free:
        filling.fill(key, False, "the frozen models fit the GPU")
    elif problem := host_problem(config, with_it, facts):
        filling.fill(key, False, f"it would take {problem}")
    else:
        away = format_size(with_it.scorer + with_it.judge)
        reason = f"the GPU is short of memory; {away} of frozen models are in host memory except while they score"
        filling.fill(key, True, reason)


def derive_parameters(filling: Filling, facts: Facts) -> None:
    """Offload the layers' weights if a GPU has room for a sample only without them, and the host has room for them."""
    config = filling.config
    stepped = not config.lora.on and known(config.system, "offload_optimizer") is None
    _derive_state(filling, facts, PARAMETERS, "the weights", with_values(config, {OPTIMIZER: True} if stepped else {}))


def derive_optimizer(filling: Filling, facts: Facts) -> None:
    """Offload master weights and moments if a GPU has room for a sample only without them, and the host has room."""
    config = filling.config
    if on_gpu(config) and config.system.offload_parameters and not config.lora.on:
        filling.fill(OPTIMIZER, True, "the weights are in host memory and are updated there")
    else:
        _derive_state(filling, facts, OPTIMIZER, "master weights and moments", config)


def _derive_state(filling: Filling, facts: Facts, key: str, what: str, config: RunConfig) -> None:
    """Set ``key`` if a GPU has room for a sample only without this part of the training state, and the host has room.

    Args:
        config: the run with all settings that ``key`` implies.
    """
    if not on_gpu(config):
        filling.fill(key, False, "there is no GPU whose memory it would save")
        return
    known_memory = _with_and_without(_frugal(config), key, facts)
    if known_memory is None:
        filling.fill(key, False, "the model's size is not known")
        return
    with_it, without, free = known_memory
    if without.peak <= MARGIN * free:
        filling.fill(key, False, f"{what} {'fit' if without.peak <= free else 'may fit'} the GPU")
    elif with_it.peak > MARGIN * free or any(refused_problems(situation(with_values(config, {key: True}), facts))):
        filling.fill(key, False, f"the run would still not fit, or has settings that need {what} on the GPU")
    elif problem := host_problem(config, with_it, facts):
        filling.fill(key, False, f"it would take {problem}")
    else:
        kept = format_size(with_it.host)
        filling.fill(key, True, f"{what} do not fit the GPU; each rank keeps {kept} in host memory")


def _frugal(config: RunConfig) -> RunConfig:
    """The run with the minimum GPU memory besides its weights and its optimizer."""
    turns = {"system.hybrid": True} if isinstance(config, RLConfig) and known(config.system, "hybrid") is None else {}
    sent = {ACTIVATIONS: True} if known(config.system, "offload_activations") is None else {}
    return with_values(config, {"system.gradient_checkpointing": True, **sent, **turns})


def derive_activations(filling: Filling, facts: Facts) -> None:
    """Offload activations if a GPU has no room for the layers' inputs, all that ``gradient_checkpointing`` keeps."""
    config, key = filling.config, ACTIVATIONS
    if not on_gpu(config):
        filling.fill(key, False, "there is no GPU whose memory it would save")
        return
    known_memory = _with_and_without(config, key, facts)
    if known_memory is None or config.system.gradient_checkpointing is not True:
        filling.fill(key, False, "they fit the GPU" if known_memory else "the model's size is not known")
        return
    with_it, without, free = known_memory
    problem = host_problem(config, with_it, facts)
    if without.peak <= free or with_it.peak > free:
        reason = "the inputs of the layers fit the GPU" if without.peak <= free else "the run would still not fit"
        filling.fill(key, False, reason)
    elif problem:
        filling.fill(key, False, f"it would take {problem}")
    else:
        gone = format_size(with_it.host - without.host)
        filling.fill(key, True, f"the GPU is short of memory without it; {gone} of layer inputs are in host memory")
