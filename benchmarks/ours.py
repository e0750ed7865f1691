"""Measurements of Tunesmith, with its derived system settings."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tunesmith.run.engines.local.engine as local_engine
from benchmarks.protocol import Measure, Result, answer, peak_memory_mb
from benchmarks.workload import FIRST_WORD, WORKLOADS, Workload
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.costs import PeakRates
from tunesmith.learn.algorithms.objective import policy_objective
from tunesmith.learn.data.batch import Batch
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve
from tunesmith.records.garbage import collect_as_usual, collect_rarely
from tunesmith.records.metrics import read_metrics
from tunesmith.run.assembly import run_rl
from tunesmith.run.assembly.train import run_sft
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.loop.learner import Learner
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.trainers.limits import measure_limits
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Completion, Sample, Sampling

REWARD = '''\
def alternate(completions, **columns):
    """Half of every group is right."""
    return [float(i % 2) for i in range(len(completions))]
'''
LR = 1e-6


def main() -> None:
    collect_rarely()  # as a command does
    answer(measure)


def measure(wanted: Measure) -> Result:
    match wanted.part:
        case "rollout":
            return asyncio.run(measure_rollout(wanted))
        case "train":
            return measure_train(wanted)
        case "step":
            return measure_step(wanted)
        case "sft":
            return measure_sft(wanted)
        case "generate":
            return measure_generate(wanted)
        case _:
            raise ValueError(f"no part is called '{wanted.part}'")


async def measure_rollout(wanted: Measure) -> Result:
    """All completions of the workload on the embedded engine, then the difference to the trainer's
    log-probs."""
    workload = WORKLOADS[wanted.workload]
    plan = _plan(wanted)
    model = _model(wanted)
    limits = _limits(wanted)
    engine = LocalEngine(
        model,
        kv_bytes=plan.memory.kv_bytes,
        max_running=plan.sampling.running,
        max_prefill_tokens=plan.said.system.max_prefill_tokens,
        limits=limits,
        rounded=plan.devices.engine_weights,
    )
    prompts = _prompts(model, workload)
    lengths = workload.lengths()
    seconds: list[float] = []
    completions: list[Completion] = []
    attainable = 0.0
    for version in range(1 + wanted.repeats):
        await engine.load_weights(version)
        started = time.perf_counter()
        counted = engine.stats()
        completions = await asyncio.gather(
            *(
                engine.generate(prompts[i // workload.group], Sampling(n, ignore_eos=True, seed=i))
                for i, n in enumerate(lengths)
            )
        )
        seconds.append(time.perf_counter() - started)
        attainable = engine.stats().since(counted).attainable_seconds
    await engine.close()
    peak = peak_memory_mb()
    sampler = [logprob for completion in completions for logprob in completion.logprobs]
    batch = _batch(prompts, [completion.token_ids for completion in completions], sampler, workload)
    distances = abs(_learner(wanted, model).score(batch) - batch.columns["old_logprobs"])
    mismatch = {"mismatch_max": float(distances.max()), "mismatch_mean": float(distances.mean())}
    facts = {"limit_share": attainable / seconds[-1], **mismatch}
    return Result({"rollout": seconds[1:]}, sum(lengths), peak, facts)


def measure_train(wanted: Measure) -> Result:
    """One optimizer step on all completions: packing, forward, head, backward, AdamW."""
    workload = WORKLOADS[wanted.workload]
    model = _model(wanted)
    learner = _learner(wanted, model)
    rng = random.Random(2)
    prompts = _prompts(model, workload)
    words = range(FIRST_WORD, workload.model.vocabulary)
    written = [rng.choices(words, k=length) for length in workload.lengths()]
    # The log-probability an untrained model gives every token, so that the loss's ratios are near
    # 1.
    old = [-math.log(workload.model.vocabulary)] * sum(workload.lengths())
    objective = policy_objective(_plan(wanted).algorithm)
    runs: list[float] = []
    metrics: dict[str, float] = {}
    for _ in range(1 + wanted.repeats):
        started = time.perf_counter()
        batch = _batch(prompts, written, old, workload)  # packed again each time
        metrics = learner.update(batch, objective)
        runs.append(time.perf_counter() - started)
    facts = {
        "limit_share": metrics["attainable_seconds"] / median(runs[1:]),
        "microbatches": metrics["microbatches"],
    }
    return Result({"train": runs[1:]}, int(metrics["trained_tokens"]), peak_memory_mb(), facts)


def measure_step(wanted: Measure) -> Result:
    """``tunesmith rl`` as a user runs it, except for the forced lengths; the first step warms
    up."""
    workload = WORKLOADS[wanted.workload]
    scratch = Path(wanted.scratch)
    lengths = workload.lengths()
    with _forced(lengths, workload.group):
        outcome = run_rl(None, [*_overrides(wanted), f"run_dir={scratch / 'run'}"])
    steps = read_metrics(outcome.run_dir / "metrics.jsonl")[1:]
    assert all(step["tokens"] == sum(lengths) for step in steps), "the lengths were not forced"
    seconds = {
        "step": [step["seconds"] for step in steps],
        "step/rollout": [step["seconds/rollout"] for step in steps],
        "step/train": [step["seconds/train"] for step in steps],
    }
    facts = _limit_share(steps)
    return Result(seconds, sum(lengths), peak_memory_mb(), facts)


def _limit_share(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median share of the limit; none where the run left it out, since it had measured the
    machine while something else ran."""
    shares = [step["limit_share"] for step in steps if "limit_share" in step]
    return {"limit_share": median(shares)} if shares else {}


def measure_sft(wanted: Measure) -> Result:
    """``tunesmith sft`` as a user runs it: every step is on all examples; the first one warms
    up."""
    workload = WORKLOADS[wanted.workload]
    scratch = Path(wanted.scratch)
    data = scratch / "examples.jsonl"
    lines = [{"prompt": prompt, "completion": written} for prompt, written in workload.examples()]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [
        f"train.batch_size={workload.size}",
        "data.shuffle=false",
        f"run_dir={scratch / 'run'}",
    ]
    outcome = run_sft(None, [*_settings(wanted, data), *_training(wanted), *settings])
    steps = read_metrics(outcome.run_dir / "metrics.jsonl")[1:]
    assert all(step["tokens"] == workload.example_tokens for step in steps), (
        "examples have other lengths"
    )
    facts = _limit_share(steps)
    return Result(
        {"sft": [step["seconds"] for step in steps]},
        workload.example_tokens,
        peak_memory_mb(),
        facts,
    )


def measure_generate(wanted: Measure) -> Result:
    """``tunesmith generate``, greedy, with one completion per prompt, except for the forced
    lengths.

    ``generate`` is its sampling phase, which ends when the answers are written; the command also
    loads the model.
    """
    workload = WORKLOADS[wanted.workload]
    scratch = Path(wanted.scratch)
    data = scratch / "prompts.jsonl"
    lengths = workload.lengths()
    data.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt, _ in workload.examples())
    )
    settings = [*_settings(wanted, data), f"sampling.max_new_tokens={workload.longest}"]
    taken: list[dict[str, float]] = []
    for number in range(1 + wanted.repeats):
        with _forced(lengths, 1):
            done = run_generate(None, [*settings, f"run_dir={scratch / f'run{number}'}"])
        written = [
            json.loads(line)["tokens"]
            for line in done.output.read_text(encoding="utf-8").splitlines()
        ]
        assert written == lengths, "the lengths were not forced"
        taken.append(done.usage)
    sampling = [usage["seconds/sampling"] for usage in taken[1:]]
    whole = [
        sum(s for name, s in usage.items() if name.startswith("seconds/")) for usage in taken[1:]
    ]
    return Result({"generate": sampling, "generate/command": whole}, sum(lengths), peak_memory_mb())


@contextmanager
def _forced(lengths: Sequence[int], group: int) -> Generator[None]:
    """Completion ``k`` of the ``n``-th prompt that the embedded engine gets under one version of
    the weights has ``lengths[n * group + k]`` tokens."""

    class ForcedLengths(LocalEngine):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._seen: dict[tuple[int, ...], list[int]] = {}
            super().__init__(*args, **settings)

        async def load_weights(self, version: int) -> None:
            self._seen = {}
            await super().load_weights(version)

        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            first = len(self._seen) * group
            rest = self._seen.setdefault(tuple(prompt_ids), [*lengths[first : first + group]])
            # The run says the model's ends as stops, too.
            forced = replace(
                sampling, max_new_tokens=rest.pop(0), ignore_eos=True, stop_token_ids=()
            )
            return await super().generate(prompt_ids, forced)

    local_engine.LocalEngine = ForcedLengths
    try:
        yield
    finally:
        local_engine.LocalEngine = LocalEngine


def _overrides(wanted: Measure) -> list[str]:
    """The workload's run file as settings on the command line, with its data and reward in the
    scratch directory."""
    workload = WORKLOADS[wanted.workload]
    scratch = Path(wanted.scratch)
    data = scratch / "tasks.jsonl"
    reward = scratch / "rewards.py"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in workload.texts()))
    reward.write_text(REWARD)
    return [
        *_settings(wanted, data),
        *_training(wanted),
        "data.shuffle=false",
        f'reward.functions=["{reward}:alternate"]',
        f"rollout.prompts_per_step={workload.prompts}",
        f"rollout.group_size={workload.group}",
        f"rollout.max_new_tokens={workload.longest}",
    ]


def _settings(wanted: Measure, data: Path) -> list[str]:
    """The settings common to all commands."""
    options = [f"{key}={json.dumps(value)}" for key, value in wanted.options.items()]
    paths = [f"model.path={wanted.model}", f"model.dtype={wanted.dtype}", f"data.train={data}"]
    return [*paths, "data.chat=false", "monitor.progress=false", *options]


def _training(wanted: Measure) -> list[str]:
    return [f"train.lr={LR}", f"train.steps={1 + wanted.repeats}"]


def _plan(wanted: Measure) -> Plan[RLConfig]:
    """The plan of the workload."""
    workload = WORKLOADS[wanted.workload]
    facts = Facts(
        hardware=read_hardware(),
        model=read_model_facts(Path(wanted.model)),
        train_size=workload.prompts,
        longest=workload.prompt_tokens,
    )
    plan = resolve(load_config(RLConfig, None, _overrides(wanted)), facts)
    torch.set_num_threads(plan.devices.threads)
    return plan


def _model(wanted: Measure) -> CausalLM:
    collect_as_usual()
    return CausalLM.load(wanted.model, dtype=getattr(torch, wanted.dtype))


def _limits(wanted: Measure) -> PeakRates:
    return measure_limits("cpu", "bfloat16" if wanted.dtype == "bfloat16" else "float32")


def _learner(wanted: Measure, model: CausalLM) -> Learner:
    plan = _plan(wanted)
    assert plan.algorithm and plan.memory.microbatch, "the run trains"
    return Learner(
        backend=TorchBackend(model, AdamWSettings(), CausalLM.predict),
        aggregation=plan.algorithm.aggregation,
        max_new_tokens=plan.said.rollout.max_new_tokens,
        learning_rate=lambda step: LR,  # noqa: ARG005
        max_tokens=plan.memory.microbatch,
        share_prompts=plan.said.system.share_prompts,
        flops_per_second=_limits(wanted).flops_per_second,
    )


def _prompts(model: CausalLM, workload: Workload) -> list[list[int]]:
    return [model.tokenizer(text)["input_ids"] for text in workload.texts()]


def _batch(
    prompts: list[list[int]], written: list[list[int]], old: list[float], workload: Workload
) -> Batch:
    """Completions as the learner gets them; half of every group is right."""
    samples: list[Sample] = []
    for i, ids in enumerate(written):
        prompt = prompts[i // workload.group]
        group = i // workload.group
        samples.append(Sample([*prompt, *ids], [False] * len(prompt) + [True] * len(ids), group))
    batch = Batch.of(samples)
    batch.add("old_logprobs", old)
    batch.add("advantages", [1.0 if place % 2 else -1.0 for place in batch.sample.tolist()])
    return batch


if __name__ == "__main__":
    main()
