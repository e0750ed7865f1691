"""One arm of ``benchmarks.rft``, in a process of its own: a JSON argument in, a JSON line out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.protocol import peak_memory_mb
from tunesmith.build.rft import run_rft
from tunesmith.build.supervised import run_sft
from tunesmith.monitor.metrics import read_metrics


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    here, settings = Path(job["here"]), job["settings"]
    where = here / job["name"]
    said = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    data = [f"data.train={here / 'rft/round-1/train.jsonl'}", "data.prompt=prompt", "data.completion=completion"]
    common = ["system.threads=1", "monitor.progress=false"]
    run = [f"model.path={here / 'start'}", f"run_dir={where}", "data.chat=false", "train.lr=5e-4"]
    outcome = run_sft(None, [*run, *data, *common, *said])
    memory = peak_memory_mb()
    lines = [line for line in read_metrics(where / "metrics.jsonl") if "seconds" in line]
    evaluated = run_rft(
        "evaluate",
        here / "rft.toml",
        [f"run_dir={where}-evaluation", f"model.path={outcome.checkpoint}", *common],
    )
    found = {
        "seconds": sum(v for k, v in outcome.seconds.items() if k != "setup"),
        "phases": outcome.seconds,
        "steps": len(lines),
        "tokens": sum(line["tokens"] for line in lines),
        "peak_memory_mb": memory,
        "evaluation": evaluated.evaluations["base"],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
