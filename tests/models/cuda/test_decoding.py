"""Decode steps of Triton's kernels, recorded as CUDA graphs on a GPU, give what a whole pass gives.

Without a GPU the kernels are interpreted and nothing is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from tests.support.tiny import save_model
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cuda import attention, decoding
from tunesmith.models.cuda.decoding import CudaDecoding, CudaSteps, padded_rows
from tunesmith.models.cuda.triton import usable
from tunesmith.models.kernels.quantised import is_quantised
from tunesmith.run.engines.local import runner
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Completion, Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 10},
    "qwen3": {"head_dim": 48},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 18,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def without_a_gpu(interpretable: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    if DEVICE == "cuda":
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # and not TF32
        return
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    monkeypatch.setattr(runner, "decoding", lambda _: CudaDecoding())
    monkeypatch.setattr(decoding, "is_quantised", lambda module: not is_quantised(module))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


def engine_of(model: CausalLM, running: int = 8) -> LocalEngine:
    return LocalEngine(model, kv_bytes=1 << 20, max_running=running, max_prefill_tokens=64)


def sampled(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[Completion]:
    async def together() -> list[Completion]:
        pairs = enumerate(zip(prompts, lengths, strict=True))
        return await asyncio.gather(
            *(engine.generate(p, Sampling(n, ignore_eos=True, seed=i)) for i, (p, n) in pairs)
        )

    return asyncio.run(together())


def scores(model: CausalLM, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model.module.name_or_path, dtype=torch.float32)
    plain.load_state_dict({k: v.cpu() for k, v in model.module.state_dict().items()})
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = plain(ids).logits[0].log_softmax(-1)
    rows = logprobs[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()


PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [*range(4, 44)], [11]]
LENGTHS = [3, 9, 40, 5, 2]
if DEVICE == "cpu":  # the interpreter takes a second for a token
    FAMILIES = {"gemma2": FAMILIES["gemma2"]}
    LENGTHS = [2, 4, 2, 2, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_have_the_log_probabilities_of_a_whole_pass(tmp_path: Path, family: str) -> None:
    """While rows end, contexts pass the end of a block, and weights change."""
    save_model(tmp_path, family, **FAMILIES[family])
    model = CausalLM.load(tmp_path, device=DEVICE)
    engine = engine_of(model)
    for version in range(2):
        for prompt, done in zip(PROMPTS, sampled(engine, PROMPTS, LENGTHS), strict=True):
            wanted = scores(model, prompt, done.token_ids)
            assert done.logprobs == pytest.approx(wanted, abs=5e-4)
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(0.9)
        asyncio.run(engine.load_weights(version + 1))
    asyncio.run(engine.close())


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes a second for a token")
def test_the_same_tokens_after_a_sleep_and_with_other_rows_beside(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", head_dim=16)
    engine = engine_of(CausalLM.load(tmp_path, device=DEVICE))
    first = sampled(engine, PROMPTS, LENGTHS)
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    assert [c.token_ids for c in sampled(engine, PROMPTS, LENGTHS)] == [c.token_ids for c in first]
    alone = sampled(engine, PROMPTS[:2], LENGTHS[:2])
    assert [c.token_ids for c in alone] == [c.token_ids for c in first[:2]]
    asyncio.run(engine.close())


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are recorded on GPUs only")
def test_a_graph_serves_all_steps_of_its_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    record = decoding._Step._record

    def counted(step: Any, planes: Tensor) -> Any:
        recorded.append(step._numbers.shape[1])
        return record(step, planes)

    monkeypatch.setattr(decoding._Step, "_record", counted)
    save_model(tmp_path, "qwen3", head_dim=16)
    engine = engine_of(CausalLM.load(tmp_path, device=DEVICE))
    for _ in range(2):
        sampled(engine, PROMPTS, LENGTHS)
        asyncio.run(engine.load_weights(1))
    assert sorted(recorded) == sorted(set(recorded)) and set(recorded) <= {1, 2, 3, 4, 6}
    asyncio.run(engine.close())


def test_rows_are_padded_to_few_sizes() -> None:
    sizes = [padded_rows(n) for n in range(1, 300)]
    assert all(n <= size < 1.5 * n + 1 for n, size in enumerate(sizes, 1))
    assert sorted(set(sizes))[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]


def test_it_takes_models_on_gpus_where_triton_is() -> None:
    on_gpu = torch.device("cuda")
    assert CudaDecoding().fits(torch.bfloat16, on_gpu)
    assert not CudaDecoding().fits(torch.bfloat16, torch.device("cpu"))
    assert isinstance(CudaDecoding().steps(), CudaSteps)


def test_without_a_c_compiler_triton_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    usable.cache_clear()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert not CudaDecoding().fits(torch.bfloat16, torch.device("cuda"))
    monkeypatch.setenv("CC", "cc")
    usable.cache_clear()
    assert CudaDecoding().fits(torch.bfloat16, torch.device("cuda"))
    usable.cache_clear()
