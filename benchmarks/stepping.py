"""The same requests through plain vLLM and through our engine around it: ``python -m
benchmarks.stepping --help``, in an environment with vLLM.

Plain vLLM is its ``AsyncLLM``, which ``vllm serve`` runs, without HTTP. Each arm is a process with a
model of 0.1 billion parameters; they take turns, and the idle one waits for a line. In half of the
rounds weights are replaced ten times while requests are in flight, by each arm's own way: plain vLLM
reads files with the same tensors, tied ones under both names. Our arm then recomputes the
log-probability of every token with the weights of its version, and tells how long it worked outside
vLLM's steps. The two arms of a round are compared with each other, because other work on the
machine slows both; the CPU's seconds hardly depend on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import psutil

from benchmarks.run import machine
from benchmarks.workload import SMALL, Workload, build_model

RESULTS = Path(__file__).with_name("results") / "stepping-cpu-2-core.json"
WORKLOAD = Workload(prompts=4, group=4, prompt_tokens=64, median=24, longest=48, model=SMALL)
NEW = "new"
"""The directory of the weights that plain vLLM reads."""
LOADS = 10
CONTEXT = 256
KV_BYTES = 1 << 28
TOLERANCE = 1e-2
"""Nats by which a recomputed log-probability may differ."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Arm(Protocol):
    async def write(self, number: int, prompt: list[int], length: int) -> Any: ...

    async def load(self, version: int) -> None: ...

    def steps(self) -> float:
        """Seconds in vLLM's steps since the start; 0: nobody counts them."""
        ...

    def wrong(self, prompts: Sequence[list[int]], completions: Sequence[Any]) -> int:
        """Tokens whose version is not that of the weights that drew them."""
        ...

    async def close(self) -> None: ...


class Plain:
    """vLLM's ``AsyncLLM``, which reads the files again for new weights."""

    def __init__(self, model: str) -> None:
        vllm: Any = import_module("vllm")
        engine: Any = import_module("vllm.v1.engine.async_llm").AsyncLLM
        arguments: Any = import_module("vllm.engine.arg_utils").AsyncEngineArgs
        self._sampling = vllm.SamplingParams
        self._last = import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        self._model = model
        self._vllm = engine.from_engine_args(
            arguments(
                model=model,
                dtype="float32",
                max_model_len=CONTEXT,
                kv_cache_memory_bytes=KV_BYTES,
                max_num_seqs=WORKLOAD.size,
                enforce_eager=True,
                block_size=32,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
            )
        )

    async def write(self, number: int, prompt: list[int], length: int) -> Any:
        sampling = self._sampling(
            max_tokens=length,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=self._last,
        )
        given = {"prompt_token_ids": prompt}
        name = f"{number} {time.monotonic()}"
        return [done async for done in self._vllm.generate(given, sampling, name)][-1]

    async def load(self, version: int) -> None:
        del version
        await self._vllm.pause_generation(mode="keep", clear_cache=False)
        new = {"weights_path": f"{self._model}/{NEW}"}
        await self._vllm.collective_rpc("reload_weights", kwargs=new)
        await self._vllm.resume_generation()

    def steps(self) -> float:
        return 0.0

    def wrong(self, prompts: Sequence[list[int]], completions: Sequence[Any]) -> int:
        del prompts, completions
        return 0

    async def close(self) -> None:
        self._vllm.shutdown()


class Ours:
    """Our engine. A version is a scale of the logits, so that keys and values of older weights stay
    right, and every token tells which weights drew it."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from tunesmith.run.engines.vllm.engine import VllmEngine
        from tunesmith.run.engines.vllm.start import VllmSettings

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._norm = self._model.model.norm.weight
        settings = VllmSettings(
            model,
            "float32",
            max_model_len=CONTEXT,
            kv_bytes=KV_BYTES,
            max_running=WORKLOAD.size,
        )
        self._engine = VllmEngine(settings, lambda: self._model.state_dict().items())

    async def write(self, number: int, prompt: list[int], length: int) -> Any:
        from tunesmith.types import Sampling

        del number
        sampling = Sampling(max_new_tokens=length, ignore_eos=True)
        return await self._engine.generate(prompt, sampling)

    async def load(self, version: int) -> None:
        self._scale(version)
        await self._engine.load_weights(version)

    def steps(self) -> float:
        stats = self._engine.stats()
        return stats.prefill_seconds + stats.decode_seconds

    def wrong(self, prompts: Sequence[list[int]], completions: Sequence[Any]) -> int:
        self._scale(0)
        return sum(map(self._wrong, prompts, completions))

    async def close(self) -> None:
        await self._engine.close()

    def _scale(self, version: int) -> None:
        self._norm.data.fill_(1.0 + version)

    def _wrong(self, prompt: list[int], done: Any) -> int:
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + done.token_ids])).logits[0]
        scales = torch.tensor(done.versions).add(1).unsqueeze(1)
        drawn = torch.tensor(done.token_ids).unsqueeze(1)
        own = (logits[len(prompt) - 1 : -1] * scales).log_softmax(-1).gather(1, drawn).squeeze(1)
        return int((own - torch.tensor(done.logprobs)).abs().gt(TOLERANCE).sum())


ARMS: Mapping[str, Callable[[str], Arm]] = {"plain": Plain, "ours": Ours}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stepping", description="Our engine beside plain vLLM."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--arm", choices=[*ARMS], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.arm:
        asyncio.run(serve(ARMS[given.arm](given.model)))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        build_model(Path(directory), SMALL, CONTEXT)
        write_new(Path(directory))
        records = compare(directory, given.rounds)
    results = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(()),
        "load": os.getloadavg(),
        "vllm": import_module("vllm.version").__version__,
        "tokens": sum(WORKLOAD.lengths()),
        "arms": summarise(records),
        "records": records,
    }
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results), end="")
    return 0


def write_new(model: Path) -> None:
    """The weights that our arm hands over, as files for the other."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    (model / NEW).mkdir()
    state = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    save_file(
        {name: each.clone() for name, each in state.items()}, model / NEW / "model.safetensors"
    )


def compare(model: str, rounds: int) -> list[dict[str, Any]]:
    """The rounds of both arms in turn, after one that warms up. In a round with new weights, these
    come within the time that the requests took without."""
    arms = {arm: _start(arm, model) for arm in ARMS}
    for process in arms.values():
        _ask(process, {"loads": 0, "apart": 0.0})
    records: list[dict[str, Any]] = []
    for number in range(rounds):
        apart = 0.0
        turns = [*arms.items()][:: -1 if number % 2 else 1]
        for loads in (0, LOADS):
            for arm, process in turns:
                found = _ask(process, {"loads": loads, "apart": apart})
                print(f"{arm}, {loads} loads: {found}", file=sys.stderr, flush=True)
                records.append({"round": number, "arm": arm, **found})
            apart = min(r["seconds"] for r in records if not r["loads"]) / (4 * LOADS)
    for process in arms.values():
        process.communicate(timeout=60)
    return records


def _start(arm: str, model: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stepping", "--arm", arm, "--model", model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env=os.environ | ENVIRONMENT,
    )


def _ask(process: subprocess.Popen[str], wanted: Mapping[str, float]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(wanted) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith('{"seconds"'):
            return json.loads(line)
    raise RuntimeError(f"an arm ended with exit code {process.wait()}")


async def serve(arm: Arm) -> None:
    """Answer each line of standard input with one round."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted = json.loads(line)
        found = await once(arm, wanted["loads"], wanted["apart"])
        print(f"\n{json.dumps(found)}", flush=True)
    await arm.close()


async def once(arm: Arm, loads: int, apart: float) -> dict[str, Any]:
    """All requests at once, with ``loads`` new weights meanwhile, ``apart`` seconds apart."""
    first = range(4, 4 + WORKLOAD.prompts)
    prompts = [[4 + (n * 31 + i) % 31_000 for i in range(WORKLOAD.prompt_tokens)] for n in first]
    asked = [prompt for prompt in prompts for _ in range(WORKLOAD.group)]
    lengths = WORKLOAD.lengths()
    if loads:
        await arm.load(0)
    began = time.perf_counter()
    writing = [
        asyncio.ensure_future(arm.write(number, prompt, length))
        for number, (prompt, length) in enumerate(zip(asked, lengths, strict=True))
    ]
    in_flight = 0
    loading = 0.0
    steps = arm.steps()
    cpu = cpu_seconds()
    for version in range(1, loads + 1):
        await asyncio.sleep(apart)
        started = time.perf_counter()
        await arm.load(version)
        loading += time.perf_counter() - started
        in_flight += not all(each.done() for each in writing)
    completions = await asyncio.gather(*writing)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu": cpu_seconds() - cpu,
        "loads": loads,
        "loading": loading,
        "steps": arm.steps() - steps,
        "in_flight": in_flight,
        "wrong": arm.wrong(asked, completions) if loads else 0,
    }


def cpu_seconds() -> float:
    """Of this process and those that it has started."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def summarise(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each arm, without and with new weights: seconds, and the speed beside plain vLLM's, as the
    median over rounds in which both did the same."""
    keys = dict.fromkeys((r["loads"], r["arm"]) for r in records)
    own = {key: [r for r in records if (r["loads"], r["arm"]) == key] for key in keys}
    return [
        {
            "arm": arm,
            "loads": loads,
            "least": min(r["seconds"] for r in own[loads, arm]),
            "median": median(r["seconds"] for r in own[loads, arm]),
            "ratio": median(
                plain["seconds"] / r["seconds"]
                for plain, r in zip(own[loads, "plain"], own[loads, arm], strict=True)
            ),
            "loading": median(r["loading"] for r in own[loads, arm]),
            "steps": median(r["steps"] for r in own[loads, arm]),
            "cpu": median(r["cpu"] for r in own[loads, arm]),
            "wrong": sum(r["wrong"] for r in own[loads, arm]),
            "in_flight": min(r["in_flight"] for r in own[loads, arm]),
        }
        for loads, arm in keys
    ]


def table(results: Mapping[str, Any]) -> str:
    facts = results["machine"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores; torch {facts['torch']}, vLLM {results['vllm']}; "
        f"{results['tokens']} tokens a round; {results['date']}",
        "",
        "| engine | new weights in a round | with requests in flight | least s | median s | "
        "of it, loading | in steps | CPU s | speed ÷ plain | wrong versions |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in results["arms"]:
        wrong = row["wrong"] if row["loads"] and row["arm"] == "ours" else ""
        steps = f"{row['steps']:.2f}" if row["arm"] == "ours" else ""
        lines.append(
            f"| {row['arm']} | {row['loads']} | {row['in_flight']} | {row['least']:.2f} | "
            f"{row['median']:.2f} | {row['loading']:.2f} | {steps} | {row['cpu']:.2f} | "
            f"{row['ratio']:.2f} | {wrong} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
