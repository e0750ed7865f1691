"""How near steps of typical sizes come to what this CPU allows: ``python -m benchmarks.limits``.

The same as the end of ``tunesmith check machine``. With ``--kind avx2`` on a CPU that can do more,
PyTorch, oneDNN, MKL and Tunesmith are held to that kind's instructions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import gmtime, strftime

from benchmarks.report import README, write_between

RESULTS = Path(__file__).with_name("results")
KINDS = {
    "avx512-bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "avx2": ("avx2", "AVX2", "AVX2"),
}
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="hold the libraries to its instructions")
    parser.add_argument("--add", nargs="*", help="only these workloads, beside those on record")
    given = parser.parse_args(arguments)
    wanted = dict(zip(LIMITS, KINDS[given.kind], strict=True)) if given.kind else {}
    if wanted.items() - os.environ.items():  # read when the libraries are loaded
        command = [sys.executable, "-m", "benchmarks.limits", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **wanted})
    measure(given.kind, given.add)


def measure(kind: str | None, names: Sequence[str] | None) -> None:
    """Measure, record and show the workloads; without a kind they are only shown."""
    import torch

    from tunesmith.guide.tune.limits import WORKLOADS, LimitShare, limit_rows, limit_shares
    from tunesmith.plan.facts.hardware import read_hardware

    machine = read_hardware()
    torch.set_num_threads(machine.cores)
    file = RESULTS / f"limits-{kind}.json"
    record = json.loads(file.read_text()) if names is not None and file.exists() else {}
    found: dict[str, LimitShare | str] = {}
    found |= {name: LimitShare(**each) for name, each in record.get("workloads", {}).items()}
    for name in WORKLOADS.keys() - set(names or WORKLOADS):
        del WORKLOADS[name]
    found |= dict(limit_shares(machine))
    header, *rows = limit_rows(found)
    lines = [header, ["---", "---:", "---:", "---"], *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    print(table, flush=True)
    if kind is None:
        return
    record = {
        "machine": {"cpu": machine.cpu, "threads": machine.cores, "torch": torch.__version__},
        "held_to": kind,
        "dtype": "bfloat16" if machine.bf16 else "float32",
        "date": strftime("%Y-%m-%d", gmtime()),
        "workloads": {n: asdict(each) for n, each in found.items() if not isinstance(each, str)},
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
    write_between(README, f"<!-- limits: {kind} -->\n", "<!-- end of limits -->", table)


if __name__ == "__main__":
    main()
