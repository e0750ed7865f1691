"""Checks that every command makes before it runs the user's code or loads anything heavy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

from tunesmith.config.commands import (
    DistillConfig,
    GenerateConfig,
    OfflineDistillConfig,
    RFTConfig,
    SamplingConfig,
)
from tunesmith.config.judges import POLICY
from tunesmith.config.schema import RewardSection, RLConfig, RunConfig
from tunesmith.config.values import parse_size
from tunesmith.errors import CheckpointError, ConfigError, about
from tunesmith.learn.data.chat import NO_TEMPLATE
from tunesmith.learn.data.formats import Example
from tunesmith.learn.data.images import blind
from tunesmith.learn.data.prompts import read_shots
from tunesmith.learn.environments.loading import check_agents, check_environment
from tunesmith.learn.rewards.loading import check_rewards
from tunesmith.models.directory import check_model, lacks_template
from tunesmith.models.embedding_rows import added_without_row, check_texts, texts_in
from tunesmith.plan.devices import Devices
from tunesmith.plan.facts.adapter import read_adapter
from tunesmith.plan.facts.families import family_around
from tunesmith.plan.facts.hardware import Hardware, read_hardware
from tunesmith.plan.facts.hub import known_model_facts, known_parameters
from tunesmith.plan.facts.measured import read_tuned
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.mixed import kinds_of_machines
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve
from tunesmith.records.run_dir import RunDir, check_run_dir
from tunesmith.records.standing import read_standing
from tunesmith.run.assembly.environments import check_run_rewards, instances_for, sharing_process
from tunesmith.run.assembly.examining import examine_user_code, first_lines
from tunesmith.run.assembly.sinks import check_sinks
from tunesmith.run.engines.interpreter import check_interpreter, fast_engine
from tunesmith.run.loop.checkpoint import Checkpoints
from tunesmith.run.processes.launch import Launch

C = TypeVar("C", bound=RunConfig)
Resume = bool | Literal["auto"] | Path


def with_launched_ranks(config: C) -> C:
    """The configuration with ``torchrun``'s processes as the trainer's ranks, if it started this
    one.

    Raises:
        ConfigError: the settings ask for other processes.
    """
    launch = Launch.of()
    system = config.system
    if launch is None or isinstance(config, GenerateConfig):
        return config
    started = f"the launcher started {launch.world} processes (WORLD_SIZE)"
    if system.cluster != "none":
        raise ConfigError(
            f'{started}, and system.cluster = "{system.cluster}" starts its own; leave one of them '
            "out",
            keys=("system.cluster",),
        )
    if launch.several_machines and config.rl:
        if launch.world % launch.local_world:
            raise ConfigError(
                f"{started}, {launch.local_world} of them on this machine: start as many on each "
                "(torchrun --nproc-per-node)"
            )
        check_launched_ranks(config, launch.world)
        if "trainer_ranks" in system.model_fields_set or (
            system.device != "cpu" and read_hardware().gpus
        ):
            return config  # else the plan chooses which of the GPUs train
    elif "trainer_ranks" in system.model_fields_set and system.trainer_ranks != launch.world:
        raise ConfigError(
            f"system.trainer_ranks = {system.trainer_ranks}, and {started}; leave it out",
            keys=("system.trainer_ranks",),
        )
    return config.model_copy(
        update={"system": system.model_copy(update={"trainer_ranks": launch.world})}
    )


def check_launched_ranks(config: RunConfig, processes: int) -> None:
    """Refuse more trainer ranks than a launcher starts processes on several machines.

    Raises:
        ConfigError: there are more.
    """
    ranks = config.system.trainer_ranks
    if ranks is not None and ranks > processes:
        raise ConfigError(
            f"system.trainer_ranks = {ranks}, and the launcher starts {processes} processes on all "
            "machines together; lower it, leave it out, or start more processes",
            keys=("system.trainer_ranks",),
        )


def check_run(config: C, base_dir: Path, *, hub: bool = True, imports: bool = False) -> Plan[C]:
    """Check settings, files and machine; return what can be planned so far.

    Args:
        hub: also check data sets on the hub, which fetches them.
        imports: also import the user's code, in another process; a run imports it itself.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: the run cannot work.
    """
    facts = facts_of_run(config, base_dir)
    plan = resolve(config, facts)
    _check_device(plan.devices)
    engine = plan.devices.engine.name
    note = check_inputs(config, base_dir, facts.model, engine, hub=hub, imports=imports)
    return replace(plan, notes=(*plan.notes, note)) if note else plan


def check_inputs(
    config: RunConfig,
    base_dir: Path,
    model: ModelFacts | None,
    engine: str,
    *,
    hub: bool,
    imports: bool,
) -> str | None:
    """The part of ``check_run`` that does not depend on the machine; return a note about code that
    was not checked."""
    if isinstance(config, RLConfig):
        near = sharing_process(config, base_dir)
        check_run_rewards(near, base_dir)
        check_environment(near.environment, base_dir)
        check_agents(config.environment, base_dir)
    elif isinstance(config, SamplingConfig) and config.reward is not None:
        check_rewards(config.reward, base_dir)
    check_sinks(config.monitor.sinks, base_dir)
    check_interpreter(config, engine)
    for key, path in _model_paths(config):
        directory = Path(path).expanduser()
        if directory.is_dir():
            with about(key):
                check_model(directory)
    examples = _check_data(config, hub, model)
    _check_template(config, examples)
    if config.run_dir is not None:
        check_run_dir(
            config.run_dir, resumes(config.command, config.checkpoint.resume, config.run_dir)
        )
        checkpoint_to_continue(config, RunDir(config.run_dir))
    return examine_user_code(config, base_dir, examples) if imports else None


def _model_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The setting and the path of every language model that the run loads with a tokenizer."""
    for key in ("model.path", "critic.path", "teacher.path", "rft.sampler", "system.draft_model"):
        section, _, name = key.partition(".")
        path = getattr(getattr(config, section, None), name, None)
        if path is not None and not (key == "teacher.path" and path == POLICY):
            yield key, path


@about("model.path")
def _check_template(config: RunConfig, examples: Sequence[Example]) -> None:
    """Refuse conversations for a model whose files have no chat template; others are judged with
    the tokenizer."""
    talk = next(
        (e for e in examples if isinstance(e.prompt, list) or isinstance(e.completion, list)), None
    )
    directory = Path(config.model.path).expanduser()
    needed = config.data.chat is True or talk is not None
    if (
        needed
        and config.model.chat_template is None
        and directory.is_dir()
        and lacks_template(directory)
    ):
        what = f"{talk.where} is a conversation" if talk else "data.chat = true"
        raise ConfigError(
            f"{what}, and the tokenizer in '{directory}' has no chat template: {NO_TEMPLATE}"
        )


def resumes(command: str, resume: Resume, run_dir: Path) -> Resume:
    """``checkpoint.resume``; a command that answers prompts always finds the remaining work of its
    own runs.

    Raises:
        ConfigError: the directory holds the answers of another command.
    """
    standing = read_standing(run_dir)
    if standing and standing.command != command:
        raise ConfigError(
            f"{run_dir} holds a run of tunesmith {standing.command}; choose another run_dir",
            keys=("run_dir",),
        )
    return "auto" if standing else resume


def facts_of_run(
    config: RunConfig, base_dir: Path | None = None, machines: Sequence[Hardware] = ()
) -> Facts:
    """Facts known before the data is read.

    Args:
        base_dir: the run file's directory, next to which the user's code is read; None: it is not
            read.
        machines: other machines than this one, of different kinds.
    """
    reward = _rewards_of(config)
    judges = [each for each in (reward.judge if reward else ()) if each.path]
    trusted = config.model.trust_remote_code
    model = known_model_facts(config.model.path, trust_remote_code=trusted)
    launch = Launch.of()
    machine, *others = machines or _own_machines(config, launch)
    keeps_tuned = config.system.tuned and not machine.named
    draft = config.system.draft_model
    with about("system.draft_model"):
        draft_facts = known_model_facts(draft) if draft is not None else None
    return Facts(
        machine,
        model,
        adapter=read_adapter(config.lora.path),
        frozen_parameters=frozen_parameters(config),
        judge_parameters=sum(known_parameters(str(each.path)) or 0 for each in judges),
        judge_kv=sum(parse_size(each.kv_memory) for each in judges),
        draft=draft_facts,
        ranks_here=launch.local_world if launch else None,
        fast_engine=fast_engine(config, machine),
        tuned=read_tuned(config, machine, model) if keeps_tuned else None,
        instances_for=instances_for(config, base_dir) if base_dir else None,
        other_hardware=tuple(others),
    )


def _own_machines(config: RunConfig, launch: Launch | None) -> Sequence[Hardware]:
    """The machines that a run started here has: of a Ray cluster those with GPUs, or else those
    that a launcher started."""
    here = read_hardware()
    if launch:
        here = replace(here, nodes=launch.machines)
    on_ray = config.rl and config.system.cluster == "ray" and config.system.device != "cpu"
    if not on_ray or find_spec("ray") is None:  # which is refused elsewhere
        return [here]
    from tunesmith.run.processes.ray_cluster import read_machines

    found = read_machines(config.system, here)
    return kinds_of_machines(found, len(here.gpus)) if found else [here]


def frozen_parameters(config: RunConfig) -> int:
    """Total parameters of reward models and a teacher, as far as their sizes are known."""
    reward = _rewards_of(config)
    rewards = sum(known_parameters(model.path) or 0 for model in (reward.models if reward else ()))
    if not isinstance(config, DistillConfig | OfflineDistillConfig):
        return rewards
    if config.teacher.url is not None or config.teacher.path == POLICY:
        return rewards
    # Assume that a teacher is no smaller than its student.
    return rewards + (
        known_parameters(config.teacher.path) or known_parameters(config.model.path) or 0
    )


def _rewards_of(config: RunConfig) -> RewardSection | None:
    return config.reward if isinstance(config, RLConfig | SamplingConfig) else None


def checkpoint_to_continue(config: RunConfig, run_dir: RunDir) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` refers to; None for a new run.

    Raises:
        CheckpointError: there is no checkpoint yet.
    """
    resume = config.checkpoint.resume
    if resume is False:
        return None
    if isinstance(resume, Path):
        return resume
    checkpoint = Checkpoints(run_dir.checkpoints, config.checkpoint.keep).newest()
    if checkpoint is None and resume != "auto":
        raise CheckpointError(
            f"checkpoint.resume: there is no checkpoint to resume in {run_dir.checkpoints}: the "
            "run ended before its first one. Start it again without checkpoint.resume, in "
            "another run_dir or after deleting this one",
            keys=("checkpoint.resume",),
        )
    return checkpoint


def _check_data(config: RunConfig, hub: bool, model: ModelFacts | None) -> list[Example]:
    """Read each source up to its first usable line, whose tokens must be in the embedding; return
    those lines."""
    added = (
        added_without_row(Path(config.model.path).expanduser(), model.vocab_size) if model else {}
    )

    def check(example: Example) -> None:
        if example.images and model and not family_around(model.family).images:
            raise blind()
        texts = texts_in(
            [example.text, example.prompt, example.completion, example.rejected, example.steps]
        )
        check_texts(
            [*texts, config.data.system_prompt or ""], added, model.vocab_size if model else 0
        )

    examples = first_lines(config, hub=hub, check=check)
    if isinstance(config, RFTConfig) and config.rft.few_shot is not None:
        with about("rft.few_shot"):
            read_shots(config.rft.few_shot)
    return examples


def _check_device(devices: Devices) -> None:
    """Ask torch for a GPU if nothing else has detected one."""
    device = devices.device
    if device == "cpu" or devices.cluster != "none" or read_hardware().gpus:
        return
    import torch

    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        found = f"torch sees {count} GPUs" if count else f"torch {torch.__version__} sees no GPU"
        raise ConfigError(
            f"system.device = '{device}', and {found} here; set 'cpu', or leave it out",
            keys=("system.device",),
        )
