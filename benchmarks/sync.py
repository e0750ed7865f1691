"""How long new weights take to reach an engine in another process, per plane: ``python -m
benchmarks.sync --help``.

The clock runs from the trainer's ``publish`` to the answer of a process that has every tensor,
checked, in its own memory. A plain copy of the same bytes from memory to memory is timed too. Each
round takes every measurement once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import BEGIN, END, readme_results
from benchmarks.run import machine
from tunesmith.run.specs.planes import read_offer
from tunesmith.run.weights.base import Offer, Plane
from tunesmith.run.weights.broadcast import BroadcastPlane
from tunesmith.run.weights.directories import shared_directory
from tunesmith.run.weights.files import FilePlane
from tunesmith.run.weights.ipc import IpcPlane

RESULTS = Path(__file__).with_name("results") / "sync-cpu-2-core.json"
PAGE = Path(__file__).parent.parent / "docs" / "weights.md"
SIZES = {"tiny": (4, 1), "12 MB": (12_000_000, 24), "1.2 GB": (1_200_000_000, 72)}
"""Bytes, and the number of tensors they are split into."""
COPY = "plain copy"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync", description="Weights to another process."
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--disk", type=Path, help="a directory on disk; None: that of temporary files"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="put the table into docs/weights.md")
    parser.add_argument("--take", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.take:
        serve()
        return 0
    with tempfile.TemporaryDirectory(dir=given.disk) as disk:
        records = asyncio.run(run(given.sizes, given.rounds, Path(disk)))
    results = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(()),
        "rounds": given.rounds,
        **summarise(records),
        "records": records,
    }
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results), end="")
    if given.page:
        text = PAGE.read_text(encoding="utf-8")
        begin = BEGIN.format(given.out.name)
        [name] = readme_results(text)
        before = text.split(BEGIN.format(name), 1)[0]
        after = text.split(END, 1)[1]
        PAGE.write_text(f"{before}{begin}\n\n{table(results)}\n{END}{after}", encoding="utf-8")
    return 0


async def run(sizes: Sequence[str], rounds: int, disk: Path) -> list[dict[str, Any]]:
    """Measure every plane and size, ``rounds`` times; the first of each warms up and does not
    count."""
    records: list[dict[str, Any]] = []
    for size in sizes:
        weights = make_weights(size)
        total = sum(tensor.nbytes for tensor in weights.values())
        planes: dict[str, Plane] = {
            "memory": FilePlane(weights.items, shared_directory(2 * SIZES[size][0])),
            "disk": FilePlane(weights.items, shared_directory(0, disk)),
            "gloo": BroadcastPlane(weights.items, "cpu", room=total, plane="gloo", group="gloo"),
            "ipc": IpcPlane(weights.items, "cpu", total),
        }
        taker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.sync", "--take"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for number in range(-1, rounds):
            found = {COPY: {"seconds": copy(weights, into)}}
            for name, plane in planes.items():
                found[name] = await sync(plane, taker, number + 1)
            for name, figures in found.items():
                print(f"{size} {name}: {figures['seconds'] * 1e3:.1f} ms", flush=True)
                if number >= 0:
                    records.append({"round": number, "size": size, "plane": name, **figures})
        assert taker.stdin is not None
        taker.stdin.close()
        await taker.wait()
        for plane in planes.values():
            await plane.close()
    return records


def make_weights(size: str) -> dict[str, Tensor]:
    num_bytes, parts = SIZES[size]
    return {f"layers.{i}.weight": torch.randn(num_bytes // parts // 4) for i in range(parts)}


def copy(weights: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> float:
    started = time.perf_counter()
    for name, tensor in weights.items():
        into[name].copy_(tensor)
    return time.perf_counter() - started


async def sync(plane: Plane, taker: asyncio.subprocess.Process, version: int) -> dict[str, float]:
    assert taker.stdin is not None and taker.stdout is not None
    started = time.perf_counter()
    await plane.publish(version)
    published = time.perf_counter()
    [offer] = await plane.offer(1)
    taker.stdin.write(json.dumps(offer).encode() + b"\n")
    answer = await taker.stdout.readline()
    ended = time.perf_counter()
    if not answer:
        raise RuntimeError(f"the other process ended with {await taker.wait()}")
    return {
        "seconds": ended - started,
        "publish_seconds": published - started,
        "take_seconds": ended - published,
        "bytes": offer["bytes"],
    }


def serve() -> None:
    """The engine's side: take each offer into tensors that the first one allocates."""
    own: dict[str, Tensor] = {}
    for line in sys.stdin:
        offer: Offer = json.loads(line)
        for name, tensor in read_offer(offer):
            if name not in own:
                own[name] = torch.empty_like(tensor)
            own[name].copy_(tensor)
        print(json.dumps({"tensors": len(own)}), flush=True)


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Medians of the rounds, and the median ratio of a round's seconds to its plain copy."""
    return {"measures": list(_measures(records))}


def _measures(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    copies = {(r["size"], r["round"]): r["seconds"] for r in records if r["plane"] == COPY}
    for size, plane in dict.fromkeys((r["size"], r["plane"]) for r in records):
        own = [r for r in records if (r["size"], r["plane"]) == (size, plane)]
        figures = {k: median(r[k] for r in own) for k in own[0] if k.endswith("seconds")}
        ratio = median(r["seconds"] / copies[size, r["round"]] for r in own)
        yield {"size": size, "plane": plane, **figures, "over_copy": ratio}


def table(results: Mapping[str, Any]) -> str:
    facts = results["machine"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores; torch {facts['torch']}; median of {results['rounds']} rounds; "
        f"{results['date']}",
        "",
        "| bytes | plane | ms | of these publishing | taking | ÷ plain copy |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for m in results["measures"]:
        parts = [
            f"{m[key] * 1e3:.1f}" if key in m else "" for key in ("publish_seconds", "take_seconds")
        ]
        ratio = "" if m["size"] == "tiny" else f"{m['over_copy']:.1f}"
        lines.append(
            f"| {m['size']} | {m['plane']} | {m['seconds'] * 1e3:.1f} | {parts[0]} | {parts[1]} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
