"""Guesses of an assistant: what is written stays what plain decoding writes, and guesses are used
where they pay."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.rules.checks import check
from tunesmith.run.assembly import run_rl
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.local import speculation
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Completion, Sampling

pytestmark = pytest.mark.usefixtures("guesses_in_batches")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    shape = {"num_hidden_layers": 1, "num_key_value_heads": 1}
    return CausalLM.load(save_model(tmp_path_factory.mktemp("smaller"), seed=1, **shape))


def run(
    model: CausalLM,
    assistant: CausalLM | None,
    *requests: tuple[Sequence[int], Sampling],
    **options: Any,
) -> tuple[list[Completion], EngineStats]:
    sizes = {"kv_bytes": 1 << 22, "max_running": 5, "max_prefill_tokens": 64, **options}
    engine = LocalEngine(model, assistant=assistant, **sizes)

    async def together() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(p, s) for p, s in requests))

    return asyncio.run(together()), engine.stats()


def mixed_requests() -> list[tuple[list[int], Sampling]]:
    """Every kind of sampling and of ending, prompts alone and shared, repetitive and not."""
    rng = random.Random(0)
    starts = [[rng.randrange(5, 260) for _ in range(n)] for n in (1, 6, 13)] + [[20, 21, 22] * 4]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3, "top_p": 0.7},
        {"temperature": 0.5, "top_k": 4, "min_p": 0.1},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "min_new_tokens": 9, "stop_token_ids": tuple(range(100))},
        {"temperature": 0.0, "stop": ("a", "7")},
        {"temperature": 0.2, "stop_token_ids": tuple(range(5, 60))},
    ]
    return [
        (p, Sampling(9 + 3 * i + j, seed=i, **k))
        for j, p in enumerate(starts)
        for i, k in enumerate(kinds)
    ]


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.token_ids, a.finish_reason, a.versions) == (
            b.token_ids,
            b.finish_reason,
            b.versions,
        )
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "llama"),
    ],
)
@pytest.mark.more
def test_what_is_written_is_what_plain_decoding_writes(
    family: str, tmp_path: Path, smaller: CausalLM
) -> None:
    """With a draft that is often right and one that always is, in every family's attention."""
    model = CausalLM.load(save_model(tmp_path, family, **FAMILIES[family]))
    requests = mixed_requests()
    plain, stats = run(model, None, *requests)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (0, 0)
    for assistant, tokens in ((smaller, 3), (model, 5)):
        done, stats = run(model, assistant, *requests, speculative_tokens=tokens)
        same(done, plain)
        assert stats.sampled_tokens == sum(len(c.token_ids) for c in done)
        assert stats.drafted_tokens >= stats.accepted_tokens > 0


async def test_while_the_engine_sleeps_nothing_is_prepared_of_either_model(
    llama: CausalLM, smaller: CausalLM
) -> None:
    sizes = {"kv_bytes": 1 << 22, "max_running": 5, "max_prefill_tokens": 64}
    engine = LocalEngine(llama, assistant=smaller, **sizes)

    def prepared() -> list[bool]:
        models = [runner._decode_model for runner in engine._runners]
        return [one._decoder is not None or one._head is not None for one in models]

    sampling = Sampling(6, temperature=0.0, ignore_eos=True)
    first = await engine.generate([5, 6, 7], sampling)
    assert prepared() == [True, True]
    await engine.sleep()
    assert prepared() == [False, False]
    await engine.wake()
    assert await engine.generate([5, 6, 7], sampling) == first
    await engine.close()
    assert prepared() == [False, False]


@pytest.mark.more
def test_preempted_requests_are_drafted_for_again(llama: CausalLM, smaller: CausalLM) -> None:
    """The budget ends within the guesses too: they take what room there is."""
    requests = [
        ([5, 6, 7, 8] * 2, Sampling(100, temperature=i / 3, ignore_eos=True, seed=i))
        for i in range(3)
    ]
    plain, _ = run(llama, None, *requests)
    done, stats = run(llama, smaller, *requests, kv_bytes=256 * 300)
    same(done, plain)
    assert stats.preemptions > 0 and stats.accepted_tokens > 0


def test_a_model_that_drafts_for_itself_is_always_right(llama: CausalLM) -> None:
    requests = [([7, 8, 9, 10 + i], Sampling(16, ignore_eos=True, seed=i)) for i in range(4)]
    done, stats = run(llama, llama, *requests)
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    assert stats.decode_steps == 3  # of 15 tokens after the first: five in each step
    assert all(len(c.token_ids) == 16 for c in done)


@pytest.mark.slow
def test_the_distribution_is_the_models(tmp_path: Path) -> None:
    """Of the second and third token together, over 2,500 seeds, by chi-square against the exact
    probabilities."""
    shape = {"vocab_size": 6, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16}
    model, other = (CausalLM.load(save_model(tmp_path / str(s), seed=s, **shape)) for s in (0, 1))
    for lm, sharpness in ((model, 12.0), (other, 8.0)):
        with torch.no_grad():
            lm.head.weight.mul_(sharpness)
    seeds = 2500
    requests = [([3, 4, 3, 4], Sampling(3, ignore_eos=True, seed=i)) for i in range(seeds)]
    sizes = {"max_running": speculation.MOST_ROWS, "speculative_tokens": 2}
    done, stats = run(model, other, *requests, **sizes)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    counts = Counter(tuple(c.token_ids[1:]) for c in done)
    exact = _joint(model, [3, 4, 3, 4])
    assert sum(exact.values()) == pytest.approx(1, abs=1e-5)
    common = {pair: p for pair, p in exact.items() if p * seeds >= 5}
    rare = 1 - sum(common.values())
    statistic = sum((counts[pair] - p * seeds) ** 2 / (p * seeds) for pair, p in common.items())
    left = seeds - sum(counts[pair] for pair in common)
    statistic += (left - rare * seeds) ** 2 / max(rare * seeds, 1.0)
    assert len(common) >= 8
    # Mean ``len(common)``, standard deviation ``sqrt(2 len(common))``: five of them, with seeds
    # that are fixed.
    assert statistic < len(common) + 5 * (2 * len(common)) ** 0.5


def _joint(model: CausalLM, prompt: list[int]) -> dict[tuple[int, int], float]:
    """Probabilities of the second and third token, summed over the first."""
    found: dict[tuple[int, int], float] = {}
    with torch.inference_mode():
        sequences = torch.tensor([[*prompt, a, b] for a in range(6) for b in range(6)])
        model.module.set_attn_implementation("eager")
        probs = model.module(sequences).logits[:, -3:].softmax(-1).double()
        model.module.set_attn_implementation("tunesmith")
    for row, (a, b) in enumerate((a, b) for a in range(6) for b in range(6)):
        for c in range(6):
            p = probs[row, 0, a] * probs[row, 1, b] * probs[row, 2, c]
            found[b, c] = found.get((b, c), 0.0) + float(p)
    return found


@pytest.mark.parametrize("limit", [1, 4])
def test_with_more_requests_at_once_nothing_is_guessed(
    llama: CausalLM, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MOST_ROWS_ON_CPU", limit)
    requests = [([30, 31] * 3, Sampling(20, temperature=0.0, ignore_eos=True))] * 4
    _, stats = run(llama, llama, *requests, max_running=limit + 1)
    assert (stats.drafted_tokens > 0) == (limit == 4)


@pytest.mark.parametrize("rows", [280, 320])
def test_a_draft_model_may_pad_the_vocabulary_to_another_size(
    rows: int, llama: CausalLM, tmp_path: Path
) -> None:
    """A tiny model draws tokens of the padding as often as any; some prompts hold one too."""
    assert llama.head.out_features == 300
    assistant = CausalLM.load(save_model(tmp_path, vocab_size=rows, num_hidden_layers=1))
    with torch.no_grad():  # it guesses tokens of the padding, which only it has
        assistant.head.weight[300:] *= 4
    sampling = [
        Sampling(20, ignore_eos=True, seed=i, repetition_penalty=1 + i % 2 * 0.3) for i in range(8)
    ]
    requests = [([5, 6, 7 + i, 295 if i > 5 else 9], s) for i, s in enumerate(sampling)]
    expected, _ = run(llama, None, *requests)
    assert any(token >= 280 for completion in expected for token in completion.token_ids)
    found, stats = run(llama, assistant, *requests, speculative_tokens=3)
    same(found, expected)
    assert stats.drafted_tokens > 0


def test_bad_settings_are_refused(llama: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="speculative_tokens = 0"):
        run(llama, llama, speculative_tokens=0)
    short = CausalLM.load(save_model(tmp_path / "short", max_position_embeddings=256))
    with pytest.raises(UserError, match="reads at most 256 tokens, but the model 512"):
        run(llama, short)
    other = CausalLM.load(save_model(tmp_path / "other"))
    other.tokenizer.add_tokens(["new"])
    with pytest.raises(UserError, match="different vocabulary"):
        run(llama, other)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["system.speculative_tokens=3"], ["system.speculative_tokens"]),
        (["system.speculative=ngram"], ["system.speculative"]),
        (
            ["system.draft_model=org/m", "system.engine_process=true", "system.engine=local"],
            ["system.draft_model"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    overrides: list[str], keys: list[str]
) -> None:
    least = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
    with pytest.raises(ConfigError) as refused:
        check(load_config(RLConfig, None, [*least, *overrides]))
    assert all(key in str(refused.value) for key in keys)


@pytest.mark.slow
def test_a_run_with_guesses_is_the_run_without(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    sharp = {"rollout__temperature": 0.02, "rollout__max_new_tokens": 24, "system__max_running": 1}
    run_rl(None, rl_settings(tmp_path, model, "plain", **sharp))
    draft = {"system__draft_model": str(model)}
    run_rl(None, rl_settings(tmp_path, model, "guessed", **draft, **sharp))
    plain, guessed = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "guessed")
    )
    rewards = [m["reward"] for m in plain if "reward" in m]
    assert rewards and [m["reward"] for m in guessed if "reward" in m] == pytest.approx(rewards)
    accepted = [m["draft_acceptance"] for m in guessed if "draft_acceptance" in m]
    assert max(accepted) > 0
    assert not any("draft_acceptance" in m for m in plain)
