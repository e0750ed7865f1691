"""``transformers.generate`` on a rollout, all completions in one padded batch; and greedy, with one
completion per prompt."""

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
    tokenizer = transformers.AutoTokenizer.from_pretrained(wanted.model, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        wanted.model, dtype=getattr(torch, wanted.dtype)
    )
    texts = asked(wanted)
    lengths = workload.lengths()
    sampled = {"do_sample": True, "top_k": 0} if wanted.part == "rollout" else {"do_sample": False}
    size = min(int(wanted.options.get("batch", len(texts))), len(texts))

    def run(most: int) -> float:
        started = time.perf_counter()
        for at in range(0, len(texts), size):
            prompts = tokenizer(texts[at : at + size], return_tensors="pt", padding=True)
            ends = [min(most, n) for n in lengths[at : at + size]]
            forced = forced_lengths(prompts["input_ids"].shape[1], ends)
            model.generate(
                **prompts, **sampled, max_new_tokens=max(ends), logits_processor=[forced]
            )
        return time.perf_counter() - started

    run(8)
    runs = [run(workload.longest) for _ in range(wanted.repeats)]
    return Result({wanted.part: runs}, sum(lengths), peak_memory_mb())


def asked(wanted: Measure) -> list[str]:
    """The prompt of each completion: shared within groups for a rollout, all different for
    ``generate``."""
    workload = WORKLOADS[wanted.workload]
    if wanted.part == "generate":
        return [prompt for prompt, _ in workload.examples()]
    return [text for text in workload.texts() for _ in range(workload.group)]


def forced_lengths(prompt_tokens: int, lengths: list[int]) -> Any:
    """A logits processor that ends row ``r`` after ``lengths[r % len(lengths)]`` tokens, and no
    earlier."""
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
