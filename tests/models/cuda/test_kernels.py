"""Triton's kernels of decode steps beside plain operations, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from tunesmith.models.cuda import attention
from tunesmith.models.cuda.attention import BlockAttention
from tunesmith.models.cuda.draw import CHUNK, draw
from tunesmith.models.cuda.layer_kernels import OPERATIONS
from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.models.kernels.functions import HeadShape
from tunesmith.models.kernels.lean_ops import OURS, Activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter multiplies no bfloat16 matrices."""
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}
pytestmark = pytest.mark.gpu


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    limit = CLOSE[found.dtype] * float(wanted.abs().max())
    assert float((found.float() - wanted.float()).abs().max()) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_a_norm(dtype: torch.dtype, offset: bool) -> None:
    x = drawn(3, 96, dtype=dtype)
    weight = drawn(96, dtype=dtype, seed=1)
    assert_close(
        OPERATIONS.rms_norm(x, weight, 1e-6, offset), OURS.rms_norm(x, weight, 1e-6, offset)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_heads(dtype: torch.dtype, norms: bool, rotates: bool) -> None:
    shape = HeadShape(4, 2, 1e-6, True)
    x = drawn(3, 8 * 48, dtype=dtype)
    tables = (drawn(3, 1, 48, dtype=dtype, seed=1), drawn(3, 1, 48, dtype=dtype, seed=2))
    weights = [drawn(48, dtype=dtype, seed=3), drawn(48, dtype=dtype, seed=4)] if norms else []
    of = tables if rotates else None
    for found, wanted in zip(
        OPERATIONS.heads(x, of, weights, shape), OURS.heads(x, of, weights, shape), strict=True
    ):
        assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates(dtype: torch.dtype, activation: Activation) -> None:
    x = drawn(3, 2 * 1100, dtype=dtype)
    assert_close(OPERATIONS.gated(x, activation), OURS.gated(x, activation))


RULES = [
    pytest.param(AttentionRule(0.2), id="plain"),
    pytest.param(AttentionRule(0.2, window=70), id="window"),
    pytest.param(AttentionRule(0.2, window=3), id="short window"),
    pytest.param(AttentionRule(0.2, softcap=1.5), id="soft cap"),
]
LENGTHS = [(5, 0), (64, 31), (150, 32), (33, 170)]
"""Tokens of the prompt and of the row's own, per row; the first two rows share a prompt's blocks."""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("programs", [1, 20, 500])
def test_attention_to_blocks(
    monkeypatch: pytest.MonkeyPatch, rule: AttentionRule, dtype: torch.dtype, programs: int
) -> None:
    """Of 1, 2 or 16 parts; a row without a prompt writes nothing."""
    monkeypatch.setattr(attention, "PROGRAMS", programs)
    query_heads, kv_heads, size = 4, 2, 24
    slots = 32
    planes = drawn(4, 40, kv_heads, slots, size, dtype=dtype)
    before = planes.clone()
    rows = len(LENGTHS) + 1
    free = iter(torch.randperm(39, generator=torch.Generator().manual_seed(1)).tolist())
    tables = [torch.full((rows, 8), 39, dtype=torch.int32) for _ in range(2)]
    for row, lengths in enumerate(LENGTHS):
        for table, length, new in zip(tables, lengths, (0, 1), strict=True):
            for at in range(-(-(length + new) // slots)):
                table[row, at] = next(free)
    tables[0][1, 0] = tables[0][0, 0]
    lengths = torch.tensor([*LENGTHS, (0, 0)]).t().contiguous().to(DEVICE)
    query = drawn(rows, query_heads, size, dtype=dtype, seed=2)
    key = drawn(rows, kv_heads, size, dtype=dtype, seed=3)
    value = drawn(rows, kv_heads, size, dtype=dtype, seed=4)
    prompts, own = (table.to(DEVICE) for table in tables)
    attention_to = BlockAttention(planes.unbind(), lengths, prompts, own)
    out = attention_to.attend(1, query, key, value, rule)

    for row, (prompt, written) in enumerate(LENGTHS):
        block = int(own[row, written // slots])
        for plane, new in ((2, key), (3, value)):
            assert torch.equal(planes[plane, block, :, written % slots], new[row])
            before[plane, block, :, written % slots] = new[row]
        keys, values = (
            torch.cat(
                (
                    before[plane, prompts[row].long()].transpose(0, 1).flatten(1, 2)[:, :prompt],
                    before[plane, own[row].long()].transpose(0, 1).flatten(1, 2)[:, : written + 1],
                ),
                1,
            )
            .double()
            .repeat_interleave(query_heads // kv_heads, 0)
            for plane in (2, 3)
        )
        if rule.window is not None:
            keys, values = (t[:, -rule.window :] for t in (keys, values))
        scores = torch.einsum("hd,hcd->hc", query[row].double(), keys) * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        wanted = torch.einsum("hc,hcd->hd", scores.softmax(-1), values)
        assert_close(out[row], wanted.to(dtype))
    assert torch.equal(planes, before)


@pytest.mark.parametrize("vocabulary", [5, CHUNK, 2 * CHUNK + 77])
def test_draws(vocabulary: int) -> None:
    """The first token at which the cumulative probability exceeds the number; greedy rows, the
    likeliest; a token of probability 0 never."""
    logits = 2 * drawn(6, vocabulary)
    logits[3, vocabulary // 2 :] = -torch.inf
    temperatures = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0], device=DEVICE)
    numbers = [0.0, 0.3, 0.5, 1 - 2**-53, 0.999, 0.62]
    uniforms = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
    tokens, logprobs = draw(logits, temperatures, uniforms)
    for row, (temperature, number) in enumerate(zip(temperatures.tolist(), numbers, strict=True)):
        token = int(tokens[row])
        scaled = logits[row].double() / (temperature or 1.0)
        if temperature == 0:
            assert token == int(scaled.argmax())
        else:
            ends = scaled.softmax(-1).cumsum(-1)
            near = 1e-6
            assert float(ends[token]) > number - near
            assert token == 0 or float(ends[token - 1]) <= number + near
            assert float(scaled[token]) > -torch.inf
        assert float(logprobs[row]) == pytest.approx(float(scaled.log_softmax(-1)[token]), abs=1e-4)


def test_logits_that_are_not_finite_have_no_log_probability() -> None:
    logits = drawn(2, 50)
    logits[1, 3] = torch.nan
    one = torch.ones(2, device=DEVICE)
    tokens, logprobs = draw(logits, one, one.double() / 2)
    assert bool(logprobs[0].isfinite()) and bool(logprobs[1].isnan())
    assert 0 <= int(tokens[1]) < 50
