"""Speculative decoding: what is written stays what plain decoding writes, and guesses are used
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
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.documents import ROOT
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.rules.checks import check
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.requests import LocalRequest
from tunesmith.run.engines.local.speculation import (
    MOST_ROWS,
    MOST_ROWS_ON_CPU,
    NGRAMS,
    NgramDrafter,
    Speculation,
    look_up,
)
from tunesmith.run.placement import run_rl
from tunesmith.run.placement.engines import _speculation  # pyright: ignore[reportPrivateUsage]
from tunesmith.types import Completion, Sampling

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return CausalLM.load(save_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    shape = {"num_hidden_layers": 1, "num_key_value_heads": 1}
    return CausalLM.load(save_model(tmp_path_factory.mktemp("smaller"), seed=1, **shape))


def run(
    model: CausalLM,
    speculation: Speculation | None,
    *requests: tuple[Sequence[int], Sampling],
    **options: Any,
) -> tuple[list[Completion], EngineStats]:
    sizes = {"kv_bytes": 1 << 22, "max_running": 5, "max_prefill_tokens": 64, **options}
    engine = LocalEngine(model, speculation=speculation, **sizes)

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
def test_what_is_written_is_what_plain_decoding_writes(
    family: str, tmp_path: Path, smaller: CausalLM
) -> None:
    """With every drafter, in every family's attention."""
    model = CausalLM.load(save_model(tmp_path, family, **FAMILIES[family]))
    requests = mixed_requests()
    plain, stats = run(model, None, *requests)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (0, 0)
    for speculation in (Speculation(3), Speculation(3, smaller), Speculation(5, model)):
        done, stats = run(model, speculation, *requests)
        same(done, plain)
        assert stats.sampled_tokens == sum(len(c.token_ids) for c in done)
        assert stats.drafted_tokens >= stats.accepted_tokens > 0


@pytest.mark.parametrize("drafted", [False, True])
def test_preempted_requests_are_drafted_for_again(
    llama: CausalLM, smaller: CausalLM, drafted: bool
) -> None:
    """The budget ends within the guesses too: they take what room there is."""
    requests = [
        ([5, 6, 7, 8] * 2, Sampling(100, temperature=i / 3, ignore_eos=True, seed=i))
        for i in range(3)
    ]
    plain, _ = run(llama, None, *requests)
    speculation = Speculation(4, smaller if drafted else None)
    done, stats = run(llama, speculation, *requests, kv_bytes=256 * (416 if drafted else 320))
    same(done, plain)
    assert stats.preemptions > 0 and stats.accepted_tokens > 0


def test_a_model_that_drafts_for_itself_is_always_right(llama: CausalLM) -> None:
    requests = [([7, 8, 9, 10 + i], Sampling(16, ignore_eos=True, seed=i)) for i in range(4)]
    done, stats = run(llama, Speculation(4, llama), *requests)
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    assert stats.decode_steps == 3  # of 15 tokens after the first: five in each step
    assert all(len(c.token_ids) == 16 for c in done)


def test_text_that_repeats_is_foreseen(llama: CausalLM) -> None:
    greedy = Sampling(60, temperature=0.0, ignore_eos=True)
    (alone,), stats = run(llama, Speculation(4), ([30, 31, 30, 31, 30, 31], greedy))
    if len(set(alone.token_ids[-20:])) < 20:
        assert stats.accepted_tokens > 0 and stats.decode_steps < 59


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_guess_will_do(seed: int, llama: CausalLM) -> None:
    """Right ones, wrong ones, some for no row: the tokens stay the same."""
    rng = random.Random(seed)
    requests = [
        ([5 + i, 6, 7], Sampling(10 + i, temperature=i / 2, ignore_eos=True, seed=i))
        for i in range(4)
    ]
    plain, _ = run(llama, None, *requests)
    answers = {tuple(p): c.token_ids for (p, _), c in zip(requests, plain, strict=True)}

    def guess(
        _: NgramDrafter, running: Sequence[LocalRequest], most: Sequence[int]
    ) -> list[list[int]]:
        drafts: list[list[int]] = []
        for request, n in zip(running, most, strict=True):
            right = answers[request.prompt_ids][len(request.token_ids) :][
                : rng.randint(0, max(n, 0))
            ]
            drafts.append([t if rng.random() < 0.7 else rng.randrange(300) for t in right])
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramDrafter, "propose", guess)
        done, _ = run(llama, Speculation(4), *requests)
    same(done, plain)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_the_distribution_is_the_models(draft: str, tmp_path: Path) -> None:
    """Of the second and third token together, over 2,500 seeds, by chi-square against the exact
    probabilities."""
    shape = {"vocab_size": 6, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16}
    model, other = (CausalLM.load(save_model(tmp_path / str(s), seed=s, **shape)) for s in (0, 1))
    for lm, sharpness in ((model, 12.0), (other, 8.0)):
        with torch.no_grad():
            lm.head.weight.mul_(sharpness)
    seeds = 2500
    requests = [([3, 4, 3, 4], Sampling(3, ignore_eos=True, seed=i)) for i in range(seeds)]
    done, stats = run(
        model, Speculation(2, other if draft == "model" else None), *requests, max_running=MOST_ROWS
    )
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


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_the_newest_longest_ngram_is_looked_up(tokens: list[int], count: int) -> None:
    places = [
        next(
            (i for i in range(len(tokens) - 1, n - 1, -1) if tokens[i - n : i] == tokens[-n:]), None
        )
        for n in NGRAMS
    ]
    place = next((place for place in places if place is not None), None)
    found = look_up(tokens, count)
    if place is None:
        assert found == []
    else:
        assert found[: len(tokens) - place] == tokens[place : place + count] and len(found) <= count


def test_many_requests_at_once_are_decoded_without_guesses(llama: CausalLM) -> None:
    requests = [([30, 31] * 3, Sampling(20, temperature=0.0, ignore_eos=True))] * (MOST_ROWS + 1)
    _, stats = run(llama, Speculation(4), *requests, max_running=64)
    assert stats.drafted_tokens == 0 and stats.decode_steps == 19


@pytest.mark.parametrize(("rows", "guesses"), [(1, True), (2, False)])
def test_an_engine_on_a_cpu_guesses_for_one_request_alone(
    llama: CausalLM, rows: int, guesses: bool
) -> None:
    requests = [([30, 31] * 3, Sampling(20, temperature=0.0, ignore_eos=True))] * rows
    _, stats = run(llama, Speculation(4, at_once=MOST_ROWS_ON_CPU), *requests)
    assert (stats.drafted_tokens > 0) == guesses


def test_the_limit_on_a_cpu_is_the_largest_batch_in_which_usual_guesses_were_measured_to_pay() -> (
    None
):
    """With 70% of the guesses right."""
    rows = json.loads((ROOT / "benchmarks/results/speculation-cpu.json").read_text())["rows"]
    assert (
        max(row["rows"] for row in rows if row["right"] == 0.7 and row["ratio"] > 1)
        == MOST_ROWS_ON_CPU
    )


@pytest.mark.parametrize(("device", "most"), [("cpu", MOST_ROWS_ON_CPU), ("cuda:0", MOST_ROWS)])
def test_the_limit_follows_the_device(device: str, most: int) -> None:
    least = [
        "model.path=org/m",
        "data.train=org/d",
        "reward.functions=['math']",
        "system.speculative=ngram",
    ]
    made = _speculation(load_config(RLConfig, None, [*least, f"system.device={device}"]))
    assert made is not None and made.at_once == most


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
    found, stats = run(llama, Speculation(3, assistant), *requests)
    same(found, expected)
    assert stats.drafted_tokens > 0


def test_bad_settings_are_refused(llama: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="speculative_tokens = 0"):
        run(llama, Speculation(0))
    short = CausalLM.load(save_model(tmp_path / "short", max_position_embeddings=256))
    with pytest.raises(UserError, match="reads at most 256 tokens, but the model 512"):
        run(llama, Speculation(2, short))
    other = CausalLM.load(save_model(tmp_path / "other"))
    other.tokenizer.add_tokens(["new"])
    with pytest.raises(UserError, match="different vocabulary"):
        run(llama, Speculation(2, other))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["system.speculative_tokens=3"],
            "system.speculative_tokens has no effect with system.speculative = ",
        ),
        (["system.speculative=draft"], 'system.speculative = "draft" needs system.draft_model'),
        (
            ["system.speculative=ngram", "system.draft_model=org/m"],
            "system.draft_model has no effect",
        ),
        (["system.speculative=guess"], "'off', 'ngram', 'draft'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], told: str) -> None:
    least = ["model.path=org/m", "data.train=org/d", 'reward.functions=["math"]']
    with pytest.raises(ConfigError, match=told):
        check(load_config(RLConfig, None, [*least, *overrides]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_a_run_with_guesses_is_the_run_without(kind: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    sharp = {"rollout__temperature": 0.02, "rollout__max_new_tokens": 24, "system__max_running": 1}
    extra = {"system__draft_model": str(model)} if kind == "draft" else {}
    run_rl(None, rl_settings(tmp_path, model, "plain", **sharp))
    run_rl(
        None, rl_settings(tmp_path, model, "guessed", system__speculative=kind, **sharp, **extra)
    )
    plain, guessed = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "guessed")
    )
    rewards = [m["reward"] for m in plain if "reward" in m]
    assert rewards and [m["reward"] for m in guessed if "reward" in m] == pytest.approx(rewards)
    accepted = [m["draft_acceptance"] for m in guessed if "draft_acceptance" in m]
    assert max(accepted) > 0
    assert not any("draft_acceptance" in m for m in plain)
