"""Summaries of all rounds: medians, ratios round by round, and their tables.

``python -m benchmarks.report RESULTS.json [--readme]`` prints the tables of a results file;
``--readme`` puts them into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

OURS = "tunesmith"
WIDTH = 120
"""Columns that the tables need, also if the output is not a terminal."""
README = Path(__file__).with_name("README.md")
BEGIN = "<!-- results: {} -->"
END = "<!-- end of results -->"

Record = Mapping[str, Any]
"""A ``Measure``'s system, part, workload and dtype, its ``round``, and the fields of its
``Result``."""
Key = tuple[str, str, str, str]
"""Workload, figure, system, dtype."""


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what a page has between two markers."""
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + text + "\n" + end + rest.partition(end)[2])


def summarise(records: Iterable[Record]) -> dict[str, list[dict[str, Any]]]:
    """``measures`` and ``ratios`` of all rounds.

    A figure's value in a round is the median of that round's runs. A ratio is a system's seconds
    over ours in the same round, so that a temporary slowdown of the machine affects both; above 1
    ours is faster.
    """
    seconds: dict[Key, dict[int, float]] = defaultdict(dict)
    others: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        for figure, runs in record["seconds"].items():
            key = (record["workload"], figure, record["system"], record["dtype"])
            seconds[key][record["round"]] = median(runs)
            others[key].append(record)
    measures = [_measure(key, by_round, others[key]) for key, by_round in seconds.items()]
    ratios = [
        _ratio(theirs, by_round, ours, seconds[ours])
        for theirs, by_round in seconds.items()
        for ours in seconds
        if theirs[2] != OURS
        and ours[:3] == (*theirs[:2], OURS)
        and by_round.keys() & seconds[ours].keys()
    ]
    return {"measures": measures, "ratios": ratios}


def _measure(key: Key, by_round: Mapping[int, float], records: Sequence[Record]) -> dict[str, Any]:
    workload, figure, system, dtype = key
    facts: set[str] = set().union(*(r["facts"] for r in records))
    return {
        "workload": workload,
        "figure": figure,
        "system": system,
        "dtype": dtype,
        "seconds": median(by_round.values()),
        "rounds": [by_round[n] for n in sorted(by_round)],
        "tokens": records[-1]["tokens"],
        "peak_memory_mb": median(r["peak_memory_mb"] for r in records),
        **{
            name: median(r["facts"][name] for r in records if name in r["facts"])
            for name in sorted(facts)
        },
    }


def _ratio(
    theirs: Key, their_seconds: Mapping[int, float], ours: Key, our_seconds: Mapping[int, float]
) -> dict[str, Any]:
    workload, figure, system, dtype = theirs
    rounds = [their_seconds[n] / our_seconds[n] for n in sorted(their_seconds) if n in our_seconds]
    return {
        "workload": workload,
        "figure": figure,
        "system": system,
        "dtype": dtype,
        "our_dtype": ours[3],
        "rounds": rounds,
        "median": median(rounds),
    }


def speed_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: each system's seconds, and their ratio to ours."""
    dtypes = sorted({r["our_dtype"] for r in results["ratios"]}, reverse=True)
    header = ["workload", "figure", "system", "dtype", "rounds", "seconds", "peak MB"]
    header += [f"÷ ours {dtype}" for dtype in dtypes]
    found = {
        (*(r[k] for k in ("workload", "figure", "system", "dtype")), r["our_dtype"]): r["median"]
        for r in results["ratios"]
    }
    rows = [
        [
            *(key := (m["workload"], m["figure"], m["system"], m["dtype"])),
            str(len(m["rounds"])),
            f"{m['seconds']:.2f}",
            f"{m['peak_memory_mb']:.0f}",
            *(f"{found[at]:.1f}" if (at := (*key, dtype)) in found else "" for dtype in dtypes),
        ]
        for m in sorted(results["measures"], key=_place)
    ]
    return header, rows


def fact_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the values only ours reports: tokens per second, share of the limit,
    log-prob mismatch."""
    header = [
        "workload",
        "figure",
        "system",
        "dtype",
        "tokens",
        "tokens/s",
        "of limit",
        "mismatch max",
        "mean",
    ]
    rows = [
        [
            *(m["workload"], m["figure"], m["system"], m["dtype"], str(m["tokens"])),
            f"{m['tokens'] / m['seconds']:.0f}",
            f"{m['limit_share']:.1%}",
            *(f"{m[k]:.1e}" if k in m else "" for k in ("mismatch_max", "mismatch_mean")),
        ]
        for m in sorted(results["measures"], key=_place)
        if "limit_share" in m and "/" not in m["figure"]
    ]
    return header, rows


def _place(measure: Mapping[str, Any]) -> tuple[object, ...]:
    """Order of rows: by workload and figure, ours first."""
    return (
        measure["workload"],
        measure["figure"],
        measure["system"] != OURS,
        measure["system"],
        measure["dtype"],
    )


def machine_line(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    peers = results["peers"]
    present = [f"{name} {peer['version']}" for name, peer in peers.items() if peer["present"]]
    units = f" ({machine['units']})" if machine.get("units") else ""
    words = [
        f"{machine['cpu']}{units}, {machine['cores']} cores, {machine['threads']} threads",
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}",
        f"peers: {', '.join(present) or 'none'}",
        "medians of rounds",
        results["date"],
    ]
    return "; ".join(words)


def show(results: Mapping[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    console = Console(width=max(console.width, WIDTH))
    console.print(machine_line(results))
    for header, rows in (speed_rows(results), fact_rows(results)):
        table = Table()
        for place, name in enumerate(header):
            table.add_column(name, justify="left" if place < 4 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for failure in results["failed"]:
        console.print(f"failed: {failure['measure']}: {failure['error']}", markup=False)
    for name, peer in results["peers"].items():
        if not peer["present"]:
            console.print(f"{name} is absent. To measure it: {peer['install']}", markup=False)


def markdown(results: Mapping[str, Any]) -> str:
    """The machine and the tables, as in the README."""
    parts = [machine_line(results)]
    for header, rows in (speed_rows(results), fact_rows(results)):
        rule = ["---"] * 4 + ["---:"] * (len(header) - 4)
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows)))
    return "\n\n".join(parts) + "\n"


def readme_results(text: str) -> dict[str, str]:
    """The tables of a page, by the name of their results file."""
    before, after = BEGIN.split("{}")
    parts = (part.split(after, 1) for part in text.split(before)[1:])
    return {name: rest.split(END, 1)[0].strip() + "\n" for name, rest in parts}


def put_into(text: str, results: Path) -> str:
    """The README with new tables of a results file, for which it has markers."""
    begin = BEGIN.format(results.name)
    tables = markdown(json.loads(results.read_text(encoding="utf-8")))
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n\n{tables}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="Show a results file."
    )
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--readme", action="store_true", help="put its tables into benchmarks/README.md"
    )
    given = parser.parse_args()
    show(json.loads(given.results.read_text(encoding="utf-8")))
    if given.readme:
        README.write_text(
            put_into(README.read_text(encoding="utf-8"), given.results), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
