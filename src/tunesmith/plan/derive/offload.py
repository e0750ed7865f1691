"""Derivation of what to offload to host memory, if a GPU is otherwise short of memory and the host has room."""

from __future__ import annotations

from collections.abc import Callable

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import format_size
from tunesmith.plan.cost.device import Price
from tunesmith.plan.cost.memory import MARGIN, host_problem, planned_devices
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.processes.devices import on_gpu
from tunesmith.plan.processes.roles import keeps_frozen
from tunesmith.plan.rules.rules import refused_problems
from tunesmith.plan.rules.situation import situation

ACTIVATIONS, OPTIMIZER = "system.offload_activations", "system.offload_optimizer"
PARAMETERS = "system.offload_parameters"


def derive_reference(filling: Filling, facts: Facts) -> None:
    """Offload frozen models while they do not score, if a GPU has no room for a sample besides them."""
    config, key = filling.config, "system.offload_reference"

    def choose(with_it: Price, without: Price, free: int) -> tuple[bool, str]:
        if without.peak <= free:
            return False, "the frozen models fit the GPU"
        away = format_size(with_it.scorer + with_it.judge)
        return True, f"the GPU is short of memory; {away} of frozen models are in host memory except while they score"

    if not on_gpu(config) or not keeps_frozen(config):
        filling.fill(key, False, "the trainer's GPU holds no whole frozen model")
    else:
        _derive(filling, facts, key, with_values(config, {"system.gradient_checkpointing": True}), choose)


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

    def choose(with_it: Price, without: Price, free: int) -> tuple[bool, str]:
        if without.peak <= MARGIN * free:
            return False, f"{what} {'fit' if without.peak <= free else 'may fit'} the GPU"
        refused = any(refused_problems(situation(with_values(config, {key: True}), facts)))
        if with_it.peak > MARGIN * free or refused:
            return False, f"the run would still not fit, or has settings that need {what} on the GPU"
        return True, f"{what} do not fit the GPU; each rank keeps {format_size(with_it.host)} in host memory"

    turns = {"system.hybrid": True} if isinstance(config, RLConfig) and known(config.system, "hybrid") is None else {}
    sent = {ACTIVATIONS: True} if known(config.system, "offload_activations") is None else {}
    _derive(filling, facts, key, with_values(config, {"system.gradient_checkpointing": True, **sent, **turns}), choose)


def derive_activations(filling: Filling, facts: Facts) -> None:
    """Offload activations if a GPU has no room for the layers' inputs, all that ``gradient_checkpointing`` keeps."""
    config = filling.config

    def choose(with_it: Price, without: Price, free: int) -> tuple[bool, str]:
        if config.system.gradient_checkpointing is not True:
            return False, "they fit the GPU"
        if without.peak <= free or with_it.peak > free:
            fit = without.peak <= free
            return False, "the inputs of the layers fit the GPU" if fit else "the run would still not fit"
        gone = format_size(with_it.host - without.host)
        return True, f"the GPU is short of memory without it; {gone} of layer inputs are in host memory"

    _derive(filling, facts, ACTIVATIONS, config, choose)


def _derive(
    filling: Filling, facts: Facts, key: str, config: RunConfig, choose: Callable[[Price, Price, int], tuple[bool, str]]
) -> None:
    """Set ``key`` as chosen, if there is a GPU and the host has room.

    Args:
        config: the run for which minimum memory is compared.
        choose: the value and its reason, from the trainer's memory with and without ``key``, and its free memory.
    """
    if not on_gpu(config):
        filling.fill(key, False, "there is no GPU whose memory it would save")
        return
    both = [planned_devices(with_values(config, {key: value}), facts, least=True) for value in (True, False)]
    if not all(both):
        filling.fill(key, False, "the model's size is not known")
        return
    (_, with_it, free), (_, without, _) = (devices[0] for devices in both)
    value, reason = choose(with_it, without, free)
    if value and (problem := host_problem(config, with_it, facts)):
        value, reason = False, f"it would take {problem}"
    filling.fill(key, value, reason)
