"""Measure Tunesmith against its peers: ``python -m benchmarks.run --help``.

Rounds alternate: each round takes every measurement once, in a fresh process, so that a temporary
slowdown of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import DTYPES, PARTS, PEERS, SYSTEMS, Found, System, find
from benchmarks.protocol import Measure, ask
from benchmarks.report import show, summarise
from benchmarks.workload import WORKLOADS, build_model
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.instructions import cpu_flags
from tunesmith.run.trainers.limits import measure_limits

RESULTS = Path(__file__).with_name("results")
TABLES: dict[str, dict[str, Any]] = {
    "quick": {
        "workloads": ["A", "long"],
        "parts": ["rollout", "generate", "sft"],
        "dtype": ["bfloat16"],
        "rounds": 1,
    },
    "all": {"workloads": [name for name in WORKLOADS if name != "tiny"], "dtype": ["bfloat16"]},
}
"""The measurements of each choice of tables; the arguments override them."""
UNITS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "asimd": "NEON",
}
"""A CPU's units for matrix products, the fastest first, by their flags in /proc/cpuinfo, as far as
the libraries may use them."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.table is not None:
        parser.set_defaults(**TABLES[given.table])
        given = parser.parse_args(arguments)
    try:
        peers = _peers(given)
        earlier = _earlier(given.out) if given.add else None
    except ValueError as error:
        parser.error(str(error))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for results in run(
        given.workloads, given.parts, given.dtype, peers, given.rounds, earlier, given.models
    ):
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(results)
    print(f"written to {given.out}")
    return 1 if results["failed"] else 0


def run(
    workloads: Sequence[str],
    parts: Sequence[str],
    dtypes: Sequence[str],
    peers: Mapping[str, Found],
    rounds: int,
    earlier: Mapping[str, Any] | None = None,
    models: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Take all measurements ``rounds`` times; yields the contents of a results file after each
    round.

    Args:
        earlier: a results file whose rounds come before these.
        models: directory to find or write models in; None: a temporary directory.
    """
    earlier = earlier or {"workloads": {}, "peers": {}, "records": [], "failed": []}
    systems = [(s, python) for s in SYSTEMS if (python := _python(s, peers)) is not None]
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(dtypes),
        "workloads": earlier["workloads"]
        | {
            name: {**asdict(w), "completion_tokens": sum(w.lengths())}
            for name, w in WORKLOADS.items()
            if name in workloads
        },
        "peers": earlier["peers"]
        | {
            name: {
                "present": p.python is not None,
                "version": p.version,
                "install": PEERS[name].install,
            }
            for name, p in peers.items()
        },
    }
    records: list[dict[str, Any]] = [*earlier["records"]]
    failed: list[dict[str, Any]] = [*earlier["failed"]]
    first = 1 + max((record["round"] for record in records), default=-1)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        models = models or Path(directory)
        for shape in {WORKLOADS[name].model for name in workloads}:
            if not (models / shape.name / "tokenizer_config.json").exists():  # it is written last
                build_model(models / shape.name, shape)
        for number in range(first, first + rounds):
            for system, python, workload, part, dtype in _plan(systems, workloads, parts, dtypes):
                try:
                    record = _measure(system, python, workload, part, dtype, models)
                    records.append({"round": number, "commit": commit(), **record})
                except RuntimeError as error:
                    label = ", ".join([system.name, part, workload, dtype])
                    failed.append({"measure": label, "round": number, "error": str(error)})
                    print(f"{label}: failed: {error}", flush=True)
            taken = {**facts, "rounds": number + 1}
            yield {**taken, **summarise(records), "records": records, "failed": failed}


def _measure(
    system: System, python: str, workload: str, part: str, dtype: str, models: Path
) -> dict[str, Any]:
    """One measurement in its own process, as a record.

    Raises:
        RuntimeError: it failed.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        measure = Measure(
            system=system.name,
            part=part,
            workload=workload,
            dtype=dtype,
            model=str(models / WORKLOADS[workload].model.name),
            scratch=scratch,
            repeats=system.repeats,
            options=dict(system.options),
        )
        result = ask(system.module, measure, python)
    figures = ", ".join(f"{name} {median(runs):.2f} s" for name, runs in result.seconds.items())
    wall = time.perf_counter() - started
    print(f"{workload} {dtype} {system.name}: {figures} (in all {wall:.0f} s)", flush=True)
    return {
        "system": system.name,
        "part": part,
        "workload": workload,
        "dtype": dtype,
        **asdict(result),
    }


def _plan(
    systems: Sequence[tuple[System, str]],
    workloads: Sequence[str],
    parts: Sequence[str],
    dtypes: Sequence[str],
) -> Iterator[tuple[System, str, str, str, str]]:
    """The measurements of one round, in an order that puts compared ones next to each other."""
    for workload in workloads:
        for part in parts:
            for system, python in systems:
                if part in system.parts:
                    yield from (
                        (system, python, workload, part, d) for d in dtypes if d in system.dtypes
                    )


def _python(system: System, peers: Mapping[str, Found]) -> str | None:
    """The interpreter that measures a system; None if it is absent or not wanted."""
    if system.peer is None:
        return sys.executable
    return peers[system.peer].python if system.peer in peers else None


def _peers(given: argparse.Namespace) -> dict[str, Found]:
    """The requested peers and their interpreters.

    Raises:
        ValueError: an unknown peer, or a named one that is not installed.
    """
    auto = given.peers == "auto"
    names = list(PEERS) if auto else [] if given.peers == "none" else given.peers.split(",")
    found: dict[str, Found] = {}
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peers: '{name}' is not one of auto, none, {', '.join(PEERS)}")
        found[name] = find(name, {"trl": given.trl_python, "vllm": given.vllm_python}.get(name))
        if not auto and found[name].python is None:
            raise ValueError(f"--peers: {name} is not installed here: {PEERS[name].install}")
    return found


def _earlier(out: Path) -> dict[str, Any] | None:
    """The results file to add to; None if it does not exist yet.

    Raises:
        ValueError: it is from another machine or other versions.
    """
    if not out.exists():
        return None
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    keys = ("cpu", "units", "cores", "threads", "torch", "transformers")
    now = _facts()
    other = [key for key in keys if found["machine"].get(key) != now[key]]
    if other:
        raise ValueError(
            f"--add: {out} was measured with another {', '.join(other)}; name another file with --out"
        )
    return found


def commit() -> str:
    """Tunesmith's commit, with a + if files have changed since; empty outside a repository."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(asked, cwd=RESULTS, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine(dtypes: Sequence[str]) -> dict[str, Any]:
    limits = {dtype: asdict(measure_limits("cpu", dtype)) for dtype in DTYPES if dtype in dtypes}
    return {**_facts(), "limits": limits}


def _facts() -> dict[str, Any]:
    hardware = read_hardware()
    flags = cpu_flags()
    return {
        "cpu": hardware.cpu,
        "units": next((name for flag, name in UNITS.items() if flag in flags), ""),
        "cores": os.cpu_count(),
        "threads": hardware.cores,
        "environment": {
            k: v
            for k, v in os.environ.items()
            if k.startswith(("OMP_", "MKL_", "KMP_", "ATEN_", "ONEDNN_"))
        },
        "memory_gb": round(hardware.memory_total / 1e9, 1),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tunesmith")},
    }


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Tunesmith beside its peers."
    )
    parser.add_argument(
        "table", nargs="?", choices=list(TABLES), help="what to measure, if not as the options say"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["A", "B"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", default="auto", help=f"auto, none, or some of {','.join(PEERS)}")
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--trl-python", help="interpreter with TRL (or TUNESMITH_TRL_PYTHON)")
    parser.add_argument("--vllm-python", help="interpreter with vLLM (or TUNESMITH_VLLM_PYTHON)")
    parser.add_argument("--models", type=Path, help="keep the models in this directory")
    parser.add_argument("--out", type=Path, default=RESULTS / "latest.json")
    parser.add_argument(
        "--add", action="store_true", help="keep the rounds that --out holds, and add these"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
