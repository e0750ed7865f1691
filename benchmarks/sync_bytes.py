"""How many bytes new weights are, by plane and by what is sent: ``python -m benchmarks.sync_bytes
--help``.

Each plane hands them to another process, and says how many bytes that took from it: those of files,
or of buckets. Beside them stands what the trainer's side holds meanwhile: files of two versions, a
copy, or a bucket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.sync import PAGE, sync
from benchmarks.workload import SMALL, build_model
from tunesmith.config.schema import LoraSection
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.run.specs.planes import PlaneSpec
from tunesmith.run.weights.files import FilePlane

RESULTS = Path(__file__).with_name("results") / "sync-bytes.json"
BEGIN = "<!-- counted: sync-bytes.json -->"
END = "<!-- end of counted -->"
RANK = 16
CONTENTS: Mapping[str, Mapping[str, Any]] = {
    "merged": {},
    "adapter": {"merged": False},
    "adapter for vLLM": {"merged": False, "as_stored": True},
}
"""What is sent of a model with an adapter; without one it is sent in full."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync_bytes", description="Bytes of new weights."
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="put the table into docs/weights.md")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), SMALL, 256)
        rows = asyncio.run(measure(Path(folder)))
    results = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "rank": RANK, "rows": rows}
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results), end="")
    if given.page:
        before, after = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
        rest = after.split(END, 1)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{rest}", encoding="utf-8")
    return 0


async def measure(path: Path) -> list[dict[str, Any]]:
    """Each plane with the whole model, and with its adapter merged or alone."""
    taker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.sync", "--take"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    model = CausalLM.load(path, dtype=torch.bfloat16)
    rows: list[dict[str, Any]] = []

    async def count(content: str, options: Mapping[str, Any]) -> None:
        for kind in ("memory", "disk", "gloo", "ipc"):
            named: Any = {"kind": kind, "directory": path / "weights" if kind == "disk" else None}
            plane = PlaneSpec(**named, **options).build(model)
            assert plane is not None
            for version in (1, 2):
                found = await sync(plane, taker, version)
            figures = {"bytes": found["bytes"], "held": _held(plane)}
            rows.append({"plane": kind, "content": content, **figures})
            await plane.close()

    await count("full", {})
    attach(model, LoraSection(rank=RANK))
    for content, options in CONTENTS.items():
        await count(content, options)
    assert taker.stdin is not None
    taker.stdin.close()
    await taker.wait()
    return rows


def _held(plane: Any) -> int:
    """Bytes that a plane holds between two versions, or reserves during a transfer."""
    if isinstance(plane, FilePlane):
        return sum(file.stat().st_size for file in Path(plane.directory.name).iterdir())
    return plane.room


def table(results: Mapping[str, Any]) -> str:
    contents = ("full", *CONTENTS)
    lines = [
        f"SmolLM-shaped model of 0.1 billion parameters in bfloat16, its head tied; adapter of rank "
        f"{results['rank']} on all linear modules in float32; MB taken by one engine process, in "
        "brackets what the trainer's side holds for it",
        "",
        "| plane | " + " | ".join(contents) + " |",
        "| --- |" + " ---: |" * len(contents),
    ]
    rows = results["rows"]
    for plane in dict.fromkeys(row["plane"] for row in rows):
        own = {row["content"]: row for row in rows if row["plane"] == plane}
        cells = [
            f"{own[content]['bytes'] / 1e6:.1f} ({own[content]['held'] / 1e6:.1f})"
            for content in contents
        ]
        lines.append(f"| `{plane}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
