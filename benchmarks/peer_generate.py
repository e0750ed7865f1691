"""``transformers.generate`` on a rollout: all completions in one padded batch."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from benchmarks.protocol import Measure, Result, answer, peak_memory_mb
from benchmarks.workload import EOS_ID, WORKLOADS


def measure(wanted: Measure) -> Result:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    workload = WORKLOADS[wanted.workload]
    lengths = workload.lengths()
    tokenizer = transformers.AutoTokenizer.from_pretrained(wanted.model, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(wanted.model, dtype=getattr(torch, wanted.dtype))
    texts = [text for text in workload.texts() for _ in range(workload.group)]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)

    def run(lengths: list[int]) -> float:
        forced = forced_lengths(prompts["input_ids"].shape[1], lengths)
        started = time.perf_counter()
        model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=max(lengths), logits_processor=[forced])
        return time.perf_counter() - started

    run([min(8, n) for n in lengths])
    runs = [run(lengths) for _ in range(wanted.repeats)]
    return Result({"rollout": runs}, sum(lengths), peak_memory_mb())


def forced_lengths(prompt_tokens: int, lengths: list[int]) -> Any:
    """A logits processor that ends row ``r`` after ``lengths[r % len(lengths)]`` tokens, and no earlier."""
    torch: Any = import_module("torch")
    ends = torch.tensor(lengths)

    def process(token_ids: Any, scores: Any) -> Any:
        written = token_ids.shape[1] - prompt_tokens
        over = ends.repeat(scores.shape[0] // len(ends)) - 1 <= written
        scores = scores.clone()
        scores[:, EOS_ID] = -float("inf")
        scores[over] = -float("inf")
        scores[over, EOS_ID] = 0.0
        return scores

    return process


if __name__ == "__main__":
    answer(measure)
