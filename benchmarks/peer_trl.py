"""TRL's GRPOTrainer on full steps, of which it says how long generating took."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from benchmarks.peer_generate import forced_lengths
from benchmarks.protocol import Measure, Result, answer, peak_memory_mb
from benchmarks.workload import WORKLOADS


def alternate(completions: list[str], **columns: Any) -> list[float]:  # noqa: ARG001
    return [float(i % 2) for i in range(len(completions))]


def measure(wanted: Measure) -> Result:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    workload = WORKLOADS[wanted.workload]
    tokenizer = transformers.AutoTokenizer.from_pretrained(wanted.model, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32)
    generating = _time_generate(model, workload.lengths())
    steps, begun = list[float](), list[float]()

    class Times(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(time.perf_counter() - begun[-1])

    micro_batch = min(int(wanted.options["micro_batch"]), workload.size)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=alternate,
        args=trl.GRPOConfig(
            output_dir=wanted.scratch,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=workload.size // micro_batch,
            num_generations=workload.group,
            max_completion_length=workload.longest,
            max_steps=1 + wanted.repeats,
            learning_rate=1e-6,
            beta=0.0,
            num_iterations=1,
            temperature=1.0,
            bf16=wanted.dtype == "bfloat16",
            use_cpu=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": text} for text in workload.texts() * (3 + wanted.repeats)]
        ),
        processing_class=tokenizer,
        callbacks=[Times()],
    )
    trainer.train()
    assert len(generating) == len(steps), "a step did not generate exactly once"
    seconds = {
        "step": steps[1:],
        "step/rollout": generating[1:],
        "step/train": [s - g for s, g in zip(steps[1:], generating[1:], strict=True)],
    }
    return Result(seconds, sum(workload.lengths()), peak_memory_mb())


def _time_generate(model: Any, lengths: list[int]) -> list[float]:
    """Have the model's ``generate`` force the lengths; the list takes the seconds of each call."""
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
