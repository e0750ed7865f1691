"""vLLM's CPU build on a rollout, and greedy with one completion per prompt; in-process."""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

from benchmarks.peer_generate import asked
from benchmarks.protocol import Measure, Result, answer, peak_memory_mb
from benchmarks.workload import WORKLOADS

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def measure(wanted: Measure) -> Result:
    os.environ.update(SETTINGS)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        _hold_to_avx2()
    vllm: Any = import_module("vllm")
    workload = WORKLOADS[wanted.workload]
    lengths = workload.lengths()
    llm = vllm.LLM(
        model=wanted.model,
        dtype=wanted.dtype,
        enforce_eager=not wanted.options["compiled"],
        max_model_len=4096,
        kv_cache_memory_bytes=1 << 30,
        # With the default of 128, a group would never share a prompt with fewer tokens.
        block_size=32,
        max_num_seqs=workload.size,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    prompts = asked(wanted)
    drawn = (
        {"temperature": 1.0, "logprobs": 0} if wanted.part == "rollout" else {"temperature": 0.0}
    )
    sampling = [
        vllm.SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **drawn)
        for n in lengths
    ]
    runs: list[float] = []
    for _ in range(1 + wanted.repeats):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        written = llm.generate(prompts, sampling, use_tqdm=False)
        runs.append(time.perf_counter() - started)
        assert [len(w.outputs[0].token_ids) for w in written] == lengths, (
            "the lengths were not forced"
        )
    return Result({wanted.part: runs[1:]}, sum(lengths), peak_memory_mb())


def _hold_to_avx2() -> None:
    """vLLM chooses its library of kernels by what the CPU can do, whatever PyTorch is held to: of
    its three, take the one for AVX2, and nothing that was compiled for another kind."""
    cpu = import_module("torch").cpu
    for unit in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16"):
        setattr(cpu, f"_is_{unit}_supported", lambda: False)
    os.environ["VLLM_CACHE_ROOT"] = os.path.expanduser("~/.cache/vllm-avx2")


if __name__ == "__main__":
    answer(measure)
