"""The sampler draws what it says, and says what it drew."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.run.engines.local import sampler
from tunesmith.run.engines.local.requests import Uniforms
from tunesmith.run.engines.local.sampler import SamplingPlan, cut, inverse_cdf, sample
from tunesmith.run.engines.partial import StopStrings
from tunesmith.types import Sampling

CPU = torch.device("cpu")
ALMOST_ONE = 1 - 2**-53


def draw(
    logits: torch.Tensor, uniforms: Sequence[float], *settings_: Sampling
) -> tuple[list[int], list[float]]:
    plan = SamplingPlan.of(settings_, logits.shape[1], CPU)
    tokens, logprobs = sample(logits, plan, torch.tensor(uniforms, dtype=torch.float64))
    return tokens.tolist(), logprobs.tolist()


def columns(
    k: int = 99, p: float = 1.0, m: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor([[k]]), torch.tensor([[p]]), torch.tensor([[m]])


def test_inverse_cdf_by_hand() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, -1)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, ALMOST_ONE], dtype=torch.float64)
    assert inverse_cdf(probs, uniforms).tolist() == [1, 1, 3, 3, 4, 4]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([7, 300, 4099]),
    st.sampled_from([1, 40]),
    st.sampled_from([0.0, 0.5, 2**-53, ALMOST_ONE]),
)
def test_a_token_of_probability_zero_is_never_drawn(
    seed: int, vocab: int, rows: int, edge: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    probs = torch.rand(rows, vocab, generator=rng) ** 20
    probs[torch.rand(rows, vocab, generator=rng) < 0.9] = 0
    probs[:, seed % vocab] = 1e-30
    probs /= probs.sum(-1, keepdim=True)
    uniforms = torch.rand(rows, generator=rng, dtype=torch.float64)
    uniforms[0] = edge
    tokens = inverse_cdf(probs, uniforms)
    assert (probs.gather(1, tokens.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("rows", [1, 64])
def test_one_level_and_blocks_agree_with_float64(rows: int) -> None:
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(rows, 5000) * 3, -1)
    uniforms = torch.rand(rows, dtype=torch.float64)
    totals = probs.double().numpy().cumsum(-1)
    targets = uniforms.numpy() * totals[:, -1]
    expected = [
        int(np.searchsorted(t, u, side="right")) for t, u in zip(totals, targets, strict=True)
    ]
    assert inverse_cdf(probs, uniforms).tolist() == expected


@pytest.mark.parametrize(
    "setting",
    [
        Sampling(1, temperature=1.0),
        Sampling(1, temperature=0.7, top_k=5),
        Sampling(1, temperature=1.3, top_p=0.8),
        Sampling(1, min_p=0.05),
        Sampling(1, temperature=1.5, top_k=9, top_p=0.9, min_p=0.1),
    ],
)
def test_chi_squared_against_exact_probabilities(setting: Sampling) -> None:
    """40,000 draws by the engine's own uniforms; the 99.9% quantile of chi-squared by Wilson and
    Hilferty."""
    torch.manual_seed(1)
    draws = 40_000
    logits = torch.randn(1, 16) * 1.5
    uniforms = Uniforms(3)
    tokens, logprobs = draw(
        logits.expand(draws, -1), [uniforms[i] for i in range(draws)], *[setting] * draws
    )
    exact = by_definition(logits[0].double().numpy() / setting.temperature, setting)
    counts = np.bincount(tokens, minlength=16)
    assert counts[exact == 0].sum() == 0
    alive = exact > 0
    statistic = float((((counts - draws * exact) ** 2)[alive] / (draws * exact[alive])).sum())
    freedom = int(alive.sum()) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert logprobs[:50] == pytest.approx(np.log(exact[tokens[:50]]).tolist(), abs=1e-5)


def by_definition(logits: np.ndarray, setting: Sampling) -> np.ndarray:
    """The distribution after top_k, top_p and min_p, one token after the other."""
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])[: setting.top_k or None]
    kept = []
    reached = 0.0
    total = sum(probs[i] for i in ranked)
    for i in ranked:
        if reached < setting.top_p * total and probs[i] >= setting.min_p * probs[ranked[0]]:
            kept.append(i)
        reached += probs[i]
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def test_cuts_by_hand() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    assert cut(probs, *columns(k=2)).tolist() == [pytest.approx([0, 4 / 7, 3 / 7, 0])]
    assert cut(probs, *columns(p=0.65)).tolist() == [pytest.approx([0, 4 / 7, 3 / 7, 0])]
    assert cut(probs, *columns(p=0.75)).tolist() == [pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])]
    assert cut(probs, *columns(m=0.45)).tolist() == [pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])]
    assert cut(probs, *columns(p=1e-9)).tolist() == [[0, 1, 0, 0]]
    assert cut(torch.full((1, 4), 0.25), *columns(k=1)).tolist() == [[1, 0, 0, 0]]


def test_a_large_vocabulary_is_cut_as_if_all_of_it_were_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows with cuts inside and outside the candidates, ties across their border, and one token
    only."""
    peaked = torch.randn(3000).mul(4)
    flat = torch.randn(3000).mul(0.1)
    tied = torch.zeros(3000)
    tied[1500:] = 3.0
    single = torch.full((3000,), -1e4).index_fill(0, torch.tensor([2999]), 0.0)
    half_tied = torch.zeros(3000).index_fill(
        0, torch.arange(0, 1800, 3), 2.0
    )  # 600 that are likelier
    logits = torch.stack([peaked, flat, tied, single, half_tied, half_tied, peaked, peaked])
    probs = logits.softmax(-1)
    top_k = torch.tensor([[3000], [3000], [1023], [3000], [3000], [600], [1500], [20]])
    top_p = torch.tensor([[0.9], [0.9], [1.0], [0.5], [0.3], [1.0], [0.99], [1.0]])
    min_p = torch.tensor([[0.0], [0.0], [0.0], [0.0], [0.0], [0.5], [0.0], [0.1]])
    found = cut(probs, top_k, top_p, min_p)
    alone = torch.cat(
        [cut(*(t[i : i + 1] for t in (probs, top_k, top_p, min_p))) for i in range(8)]
    )
    assert torch.equal(found, alone), "a row does not depend on the others"
    monkeypatch.setattr(sampler, "CANDIDATES", 3000)
    whole = cut(probs, top_k, top_p, min_p)
    assert torch.equal(found > 0, whole > 0) and torch.allclose(found, whole, rtol=1e-5, atol=0)
    assert (found > 0).sum(-1).tolist()[2:6:3] == [1023, 600]
    assert found[2].nonzero().flatten().tolist() == list(range(1500, 2523)), (
        "ties go to the lower ids"
    )


def test_rows_keep_their_own_settings() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(4, -1)
    tokens, logprobs = draw(
        logits,
        [0.01, 0.01, 0.01, 0.01],
        Sampling(1, temperature=0.0),
        Sampling(1),
        Sampling(1, temperature=1e-3),
        Sampling(1, top_k=2),
    )
    assert tokens == [2, 0, 2, 1]
    z = math.log(sum(math.exp(x) for x in (0, 1, 2)))
    assert logprobs == pytest.approx([2 - z, 0 - z, 0, 1 - math.log(math.e + math.e**2)], abs=1e-6)


def test_all_greedy_takes_the_largest_at_temperature_one() -> None:
    tokens, logprobs = draw(
        torch.tensor([[3.0, 1.0], [0.0, 5.0]]), [0.9, 0.0], *[Sampling(1, temperature=0.0)] * 2
    )
    assert tokens == [0, 1]
    assert logprobs == pytest.approx(
        [-math.log1p(math.exp(-2)), -math.log1p(math.exp(-5))], abs=1e-6
    )


def test_logits_that_are_not_finite_show_as_nan() -> None:
    for rows in (1, 40):
        _, logprobs = draw(torch.full((rows, 4096), math.nan), [0.5] * rows, *[Sampling(1)] * rows)
        assert all(map(math.isnan, logprobs))


def test_uniforms_depend_on_seed_and_position_only() -> None:
    one = Uniforms(1)
    same = Uniforms(1)
    other = Uniforms(2)
    late = same[700]
    assert [one[i] for i in (0, 1, 700)] == [same[0], same[1], late]
    assert one[0] != other[0]
    assert Uniforms(None)[0] != Uniforms(None)[0]
    assert Uniforms(-1)[0] == Uniforms(2**64 - 1)[0]


def bytes_decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def tokens_until(text: str | bytes, *stop: str, least: int = 0, earlier: int = 0) -> int | None:
    """How many byte tokens are taken before one of ``stop`` is complete, besides so many earlier
    ones."""
    data = text.encode() if isinstance(text, str) else text
    watch = StopStrings(stop, bytes_decode, least, data[:earlier])
    data = data[earlier:]
    return next((n for n in range(1, len(data) + 1) if watch.completed_by(data[:n])), None)


def test_stop_strings() -> None:
    assert tokens_until("say STOP now", "STOP") == 8
    assert tokens_until("say STO P", "STOP") is None
    assert tokens_until("ab\n\ncd", "x", "\n\n") == 4
    assert tokens_until("naïve é end", "é") == len("naïve é".encode())
    assert tokens_until("日本語です", "本語") == 9
    assert tokens_until(b"\xff\xc3STOP", "STOP") == 6
    assert tokens_until("aaab", "aab") == 4


@settings(max_examples=200, deadline=None)
@given(st.text("ab é語\n", max_size=30), st.text("ab é語\n", min_size=1, max_size=4))
def test_stop_strings_are_found_as_soon_as_they_are_written(text: str, stop: str) -> None:
    at = text.find(stop)
    expected = None if at < 0 else len(text[: at + len(stop)].encode())
    assert tokens_until(text, stop) == expected


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab é語\n", max_size=30),
    st.text("ab é語\n", min_size=1, max_size=4),
    st.integers(0, 40),
)
def test_stop_strings_may_begin_in_earlier_tokens(text: str, stop: str, earlier: int) -> None:
    ends = [
        len(text[: at + len(stop)].encode()) for at in range(len(text)) if text.startswith(stop, at)
    ]
    expected = min((end - earlier for end in ends if end > earlier), default=None)
    assert tokens_until(text, stop, earlier=earlier) == expected


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=2),
    st.integers(0, 12),
)
def test_stop_strings_that_are_complete_too_early_are_passed_over(
    text: str, stop: list[str], least: int
) -> None:
    ends = [
        at + len(s)
        for s in stop
        for at in range(len(text))
        if text.startswith(s, at) and at + len(s) > least
    ]
    assert tokens_until(text, *stop, least=least) == min(ends, default=None)
