"""TRL's GRPOTrainer on full steps, with the seconds of generation, and its SFTTrainer with
packing."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from benchmarks.peer_generate import forced_lengths
from benchmarks.protocol import Measure, Result, answer, peak_memory_mb
from benchmarks.workload import QWEN3, WORKLOADS


def alternate(completions: list[str], **columns: Any) -> list[float]:  # noqa: ARG001
    return [float(i % 2) for i in range(len(completions))]


def measure(wanted: Measure) -> Result:
    return measure_sft(wanted) if wanted.part == "sft" else measure_step(wanted)


def measure_sft(wanted: Measure) -> Result:
    """Optimizer steps on all examples, which are packed once, before training begins."""
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    workload = WORKLOADS[wanted.workload]
    tokenizer, model = _load(wanted)
    steps, times = _times()
    longest = workload.prompt_tokens + max(workload.lengths())
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            packing=True,
            max_length=max(int(wanted.options["packed"]), longest),
            per_device_train_batch_size=int(wanted.options["micro_batch"]),
            # A step is an epoch, for any number of packed rows, so its tokens are those of all
            # examples.
            gradient_accumulation_steps=workload.size,
            num_train_epochs=1 + wanted.repeats,
            **_common(wanted),
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": prompt, "completion": written} for prompt, written in workload.examples()]
        ),
        processing_class=tokenizer,
        callbacks=[times],
    )
    tokens = sum(len(row) for row in trainer.train_dataset["input_ids"])
    assert tokens == workload.example_tokens, (
        f"{tokens} tokens instead of {workload.example_tokens}"
    )
    trainer.train()
    assert len(steps) == 1 + wanted.repeats, "an epoch was not one step"
    return Result({"sft": steps[1:]}, tokens, peak_memory_mb())


def measure_step(wanted: Measure) -> Result:
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    workload = WORKLOADS[wanted.workload]
    tokenizer, model = _load(wanted)
    generating = _time_generate(model, workload.lengths())
    steps, times = _times()
    micro_batch = int(wanted.options["large" if workload.model is QWEN3 else "micro_batch"])
    micro_batch = next(n for n in range(micro_batch, 0, -1) if workload.size % n == 0)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=alternate,
        args=trl.GRPOConfig(
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=workload.size // micro_batch,
            num_generations=workload.group,
            max_completion_length=workload.longest,
            max_steps=1 + wanted.repeats,
            beta=0.0,
            num_iterations=1,
            temperature=1.0,
            **_common(wanted),
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": text} for text in workload.texts() * (3 + wanted.repeats)]
        ),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer.train()
    assert len(generating) == len(steps), "a step did not generate exactly once"
    seconds = {
        "step": steps[1:],
        "step/rollout": generating[1:],
        "step/train": [s - g for s, g in zip(steps[1:], generating[1:], strict=True)],
    }
    return Result(seconds, sum(workload.lengths()), peak_memory_mb())


def _load(wanted: Measure) -> tuple[Any, Any]:
    """Tokenizer and model, with float32 weights for the optimizer."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(wanted.model, padding_side="left")
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(
        wanted.model, dtype=torch.float32
    )


def _common(wanted: Measure) -> dict[str, Any]:
    """Settings of both trainers."""
    return {
        "output_dir": wanted.scratch,
        "learning_rate": 1e-6,
        "bf16": wanted.dtype == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def _times() -> tuple[list[float], Any]:
    """Seconds of a trainer's steps, and the callback that appends them."""
    transformers: Any = import_module("transformers")
    steps = list[float]()
    begun = list[float]()

    class Times(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(time.perf_counter() - begun[-1])

    return steps, Times()


def _time_generate(model: Any, lengths: list[int]) -> list[float]:
    """Make the model's ``generate`` force the lengths; the list collects the seconds of each
    call."""
    seconds: list[float] = []
    kind: Any = type(model)
    original = kind.generate

    def generate(self: Any, *args: Any, **options: Any) -> Any:
        token_ids = options.get("input_ids")
        token_ids = args[0] if token_ids is None else token_ids
        started = time.perf_counter()
        forced = [forced_lengths(token_ids.shape[1], lengths)]
        written = original(self, *args, logits_processor=forced, **options)
        seconds.append(time.perf_counter() - started)
        return written

    kind.generate = generate
    return seconds


if __name__ == "__main__":
    answer(measure)
