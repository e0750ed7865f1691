"""One arm of ``benchmarks.rft``, in a separate process: a JSON argument in, a JSON line out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.protocol import peak_memory_mb
from tunesmith.run.assembly.train import run_sft
from tunesmith.run.offline.rft import run_rft


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    seconds, model = (_padded if job["trainer"] == "padded" else _tunesmith)(job)
    memory = _peak_memory_mb(job["device"])
    evaluated = run_rft(
        "evaluate",
        Path(job["rft"]),
        [
            f"run_dir={job['where']}-evaluation",
            f"model.path={model}",
            *_system(job),
            "monitor.progress=false",
        ],
    )
    found = {
        "seconds": seconds,
        "peak_memory_mb": memory,
        "evaluation": evaluated.evaluations["base"],
    }
    print(json.dumps(found), flush=True)


def _tunesmith(job: dict[str, Any]) -> tuple[float, str]:
    """Seconds of training without the set-up, and the trained model."""
    values = {
        "model.path": job["model"], "run_dir": job["where"], "data.train": job["answers"], "data.prompt": "prompt",
        "data.completion": "completion", "train.lr": job["lr"], "train.epochs": job["epochs"],
        "train.seed": job["seed"], "train.batch_size": 32, "monitor.progress": False, **job["settings"],
    }  # fmt: skip
    outcome = run_sft(
        None, [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *_system(job)]
    )
    return sum(v for k, v in outcome.seconds.items() if k != "setup"), str(outcome.checkpoint)


def _system(job: dict[str, Any]) -> list[str]:
    return [f"system.threads={job['threads']}", f"system.device={job['device']}"]


def _padded(job: dict[str, Any]) -> tuple[float, str]:
    """The same with Hugging Face's ``Trainer``: padded batches in random order, only the answer
    learned."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    lines = [
        json.loads(line) for line in Path(job["answers"]).read_text(encoding="utf-8").splitlines()
    ]
    data = Dataset.from_list(
        [_encoded(tokenizer, line["prompt"], line["completion"]) for line in lines]
    )
    on_gpu = job["device"] == "cuda"
    settings = {
        k: on_gpu if v == "on a GPU" else v
        for k, v in job["settings"].items()
        if v != "on a GPU" or on_gpu
    }
    arguments = TrainingArguments(
        output_dir=job["where"], num_train_epochs=job["epochs"], learning_rate=job["lr"], weight_decay=0.0,
        seed=job["seed"], report_to="none", use_cpu=not on_gpu, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), train_dataset=data)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    saved = f"{job['where']}/trained"
    trainer.accelerator.unwrap_model(model, keep_torch_compile=False).save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    return seconds, saved


def _encoded(tokenizer: Any, prompt: Any, completion: str) -> dict[str, list[int]]:
    """Tokens of a line, and labels for its answer only."""
    if isinstance(prompt, list) or tokenizer.chat_template:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": completion}], tokenize=False
        )
        ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
        answer = tokenizer(whole.removeprefix(asked), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
        answer = [
            *tokenizer(completion, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
    return {
        "input_ids": ids + answer,
        "labels": [-100] * len(ids) + answer,
        "attention_mask": [1] * len(ids + answer),
    }


def _peak_memory_mb(device: str) -> float:
    if device == "cpu":
        return peak_memory_mb()
    import torch

    return torch.cuda.max_memory_allocated() / 1e6


if __name__ == "__main__":
    main()
