"""``tunesmith launch slurm``: a job script for a cluster (``cli/slurm.py``)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli.arguments import Overrides, RunFile
from tunesmith.errors import ConfigError, StorageError, boundary, nearest

SCHEDULERS = ("slurm",)


def launch(
    scheduler: Annotated[str, typer.Argument(metavar="slurm", help="What runs jobs.", show_default=False)],
    run: RunFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of each machine.")] = 0,
    cpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="CPUs of each machine.", show_default="4, and 4 for each GPU")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter of the environment on the machines.", show_default="this one")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="An option of sbatch, such as --partition=gpu; may be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
) -> None:
    """Write a job script that starts a Ray cluster and a run on it.

    Example: tunesmith launch slurm run.toml --nodes 2 --gpus-per-node 8 --output job.sh
    """
    if scheduler not in SCHEDULERS:
        raise ConfigError(f"there is no scheduler '{scheduler}'.{nearest(scheduler, SCHEDULERS)}")
    from tunesmith.cli.slurm import SlurmJob
    from tunesmith.config.load import load_config
    from tunesmith.config.schema import RLConfig

    said = list(overrides or ())
    config = load_config(RLConfig, run, said)
    for key in ("system.cluster", "system.ray_address", "run_dir", "checkpoint.resume"):
        if any(text.partition("=")[0].strip() == key for text in said):
            raise ConfigError(f"override '{key}': the job script says it itself. Say it in {run}, or leave it out")
    if bad := [option for option in sbatch or () if not option.startswith("--")]:
        raise ConfigError(f"--sbatch {bad[0]}: options of sbatch are written --name=value, such as --partition=gpu")
    job = SlurmJob(
        run=run,
        overrides=said,
        run_dir=config.run_dir or Path("runs") / run.stem,
        nodes=nodes,
        gpus=gpus_per_node,
        cpus=cpus_per_node or 4 + 4 * gpus_per_node,
        # Not resolved: the interpreter of a virtual environment is a link to another one.
        python=(python or Path(sys.executable)).absolute(),
        directory=Path.cwd(),
        options=sbatch or (),
    )
    if output is None:
        print(job.script(), end="")
        return
    with boundary(StorageError, f"cannot write {output}", OSError):
        output.write_text(job.script())
    print(f"wrote {output}; submit it with: sbatch {output}")
