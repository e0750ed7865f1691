"""``tunesmith launch slurm``: a job script that starts a run on several machines, with Ray or with
torchrun.

It is made from ``slurm.sh`` or ``slurm_torchrun.sh``.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tunesmith.cli.arguments import Overrides, RunFile
from tunesmith.errors import ConfigError, StorageError, boundary, nearest
from tunesmith.records.run_dir import shown_command
from tunesmith.records.storage import check_output, write_output

if TYPE_CHECKING:
    from tunesmith.config.schema import RunConfig


def launch(
    scheduler: Annotated[Literal["slurm"], typer.Argument(metavar="slurm", help="What runs jobs.")],
    run: RunFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of each machine.")] = 0,
    cpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="CPUs of each machine.", show_default="4, and 4 for each GPU"),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Interpreter of the environment on the machines.", show_default="this one"
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="An option of sbatch, such as --partition=gpu; may be repeated."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="The command, such as sft.", show_default="by the run file's sections"),
    ] = None,
    ray: Annotated[
        bool | None,
        typer.Option(help="Whether on a Ray cluster.", show_default="where the policy samples"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="standard output"),
    ] = None,
) -> None:
    """Write a Slurm job script that starts a run on several machines, with Ray or with torchrun.

    Example: tunesmith launch slurm run.toml --nodes 2 --gpus-per-node 8 --output job.sh
    """
    from tunesmith.config.load import load_config

    settings = list(overrides or ())
    config = load_config(_kind(command, run, settings), run, settings)
    _check_given(run, settings, sbatch or ())
    # not resolved: in a virtual environment it is a link
    interpreter = (python or Path(sys.executable)).absolute()
    cpus = cpus_per_node or 4 + 4 * gpus_per_node
    job = Job(run, nodes, gpus_per_node, cpus, interpreter, sbatch or ())
    on_ray = _on_ray(config, ray, nodes)
    words = _words(job, config, settings, ray=on_ray)
    _deliver(_script(scheduler if on_ray else f"{scheduler}_torchrun", words), output, settings)


@dataclass(frozen=True, slots=True)
class Job:
    run: Path
    """The run file."""
    nodes: int
    gpus: int
    cpus: int
    """CPU cores of each machine."""
    python: Path
    sbatch: Sequence[str]
    """Further options."""

    @property
    def options(self) -> list[str]:
        return [
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={self.cpus}",
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            f"--job-name={self.run.stem}",
            f"--output={self.run.stem}-%j.log",
            "--open-mode=append",
            "--requeue",
            *self.sbatch,
        ]


def _words(
    job: Job, config: RunConfig, overrides: Sequence[str], *, ray: bool
) -> Mapping[str, str]:
    """What the script's ``@names@`` stand for."""
    run_dir = shlex.quote(str(config.run_dir or Path("runs") / job.run.stem))
    settings = ["system.cluster=ray"] if ray else []
    settings += ["checkpoint.resume=auto"] if config.trains else []
    settings.append(f"run_dir={run_dir}")
    return {
        "command": config.command,
        "nodes": str(job.nodes),
        "ranks": str(_ranks(config, ray, job.nodes, job.gpus)),
        "options": "\n".join(f"#SBATCH {option}" for option in job.options),
        "directory": shlex.quote(str(Path.cwd())),
        "python": shlex.quote(str(job.python)),
        "ray": shlex.quote(str(job.python.parent / "ray")),
        "run": shlex.quote(str(job.run)),
        "overrides": " ".join([*settings, shlex.join(overrides)]).rstrip(),
        "gpus": str(job.gpus),
        "cpus": str(job.cpus),
    }


def _deliver(script: str, output: Path | None, overrides: list[str]) -> None:
    if output is None:
        print(script, end="")
        return
    secret = shown_command(overrides) != shlex.join(overrides)
    check_output(output, "--output", "# Written by tunesmith launch")
    write_output(output, script.encode(), private=secret)
    if secret and output.is_file():
        with boundary(StorageError, f"cannot make {output} private", OSError):
            output.chmod(0o600)
        print(
            f"note: {output} holds secrets of the settings, which the job needs; "
            "only this user can read it"
        )
    print(f"wrote {output}; submit it with: sbatch {output}")


def _check_given(run: Path, overrides: Sequence[str], sbatch: Sequence[str]) -> None:
    """Reject (ConfigError) options that the script sets itself, and words that are not options of
    sbatch."""
    for key in ("system.cluster", "system.ray_address", "run_dir", "checkpoint.resume"):
        if any(text.partition("=")[0].strip() == key for text in overrides):
            raise ConfigError(
                f"override '{key}': the job script sets it. Set it in {run}, or leave it out"
            )
    bad = [option for option in sbatch if not option.startswith("--")]
    if bad:
        raise ConfigError(
            f"--sbatch {bad[0]}: options of sbatch are written --name=value, "
            "such as --partition=gpu"
        )


def _ranks(config: RunConfig, ray: bool, nodes: int, gpus: int) -> int:
    """Number of processes that torchrun starts on each machine.

    Raises:
        ConfigError: the settings require a different total number of trainer ranks.
    """
    chosen = config.rl and nodes > 1  # the plan chooses which GPUs train
    ranks = max(1, gpus) if chosen or not config.samples else 1
    processes = 1 if ray else nodes * ranks
    said = config.system.trainer_ranks
    wrong = said is not None and (said > processes if chosen else said != processes)
    if processes > 1 and wrong:
        raise ConfigError(
            f"system.trainer_ranks = {said}, and the job starts {processes} processes, one for "
            "each GPU of its machines; leave it out, or change --nodes or --gpus-per-node"
        )
    return ranks


def _kind(command: str | None, run: Path, overrides: list[str]) -> type[RunConfig]:
    from tunesmith.config.commands import KINDS
    from tunesmith.config.load import find_kind

    found = find_kind(run, overrides)
    if command is None or command == found.command:
        return found
    if command not in KINDS:
        raise ConfigError(
            f"--command {command}: there is no such command.{nearest(command, KINDS)}"
        )
    return KINDS[command]


def _on_ray(config: RunConfig, asked: bool | None, nodes: int) -> bool:
    """Whether to run on a Ray cluster.

    Raises:
        ConfigError: the run cannot be started as requested or on the requested number of machines.
    """
    samples = config.rl
    if asked and not samples:
        raise ConfigError(f"--ray: tunesmith {config.command} does not use Ray; leave it out")
    ray = samples if asked is None else asked
    if config.system.cluster == "ray" and asked is False:
        raise ConfigError(
            '--no-ray: the run file has system.cluster = "ray"; leave one of the two out',
            keys=("system.cluster",),
        )
    if nodes > 1 and config.samples and not samples:
        raise ConfigError(
            f"--nodes {nodes}: tunesmith {config.command} samples on one machine; say --nodes 1"
        )
    return ray


def _script(template_name: str, words: Mapping[str, str]) -> str:
    """A script whose ``@names@`` are replaced with ``words``."""
    template = Path(__file__).with_name(f"{template_name}.sh").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda place: words[place[1]], template)
