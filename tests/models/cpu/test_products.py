"""Products of few rows: every kind computes the same, and the engine samples as before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.tiny import save_model
from tests.support.training import forest_of
from tunesmith.config.schema import LoraSection
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu import decoding, products
from tunesmith.models.cpu.products import HEADS, LAYERS, Kind, works
from tunesmith.models.prepared import PreparedLinear
from tunesmith.plan.cost import copies
from tunesmith.plan.cost.copies import SMALL, merges_adapter, prepared_bytes
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.run.engines.local import decode_model
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Completion, Sample, Sampling

KINDS = [
    pytest.param(
        dtype, name, kind, is_head, id=f"{str(dtype)[6:]}-{name}-{'head' if is_head else 'layer'}"
    )
    for is_head, table in enumerate((LAYERS, HEADS))
    for dtype, kinds in table.items()
    for name, kind in kinds.items()
]


def chosen(dtype: torch.dtype, is_head: int) -> set[str]:
    """The kinds that this machine may choose for a layer or the head."""
    cases = [(small, compiled) for small in (True, False) for compiled in (True, False)]
    return {
        products.fastest(dtype, small=small, allowed=compiled)[is_head] for small, compiled in cases
    }


@pytest.mark.parametrize(("dtype", "name", "kind", "is_head"), KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs"), [(1, 208), (5, 200), (5, 208), (12, 3), (37, 48), (37, 1040)]
)
def test_each_kind_computes_the_product(
    dtype: torch.dtype, name: str, kind: Kind, is_head: int, biased: bool, rows: int, outputs: int
) -> None:
    if not works(kind, dtype):
        assert name not in chosen(dtype, is_head)
        return
    weight = torch.randn(outputs, 96).to(dtype)
    x = torch.randn(rows, 96).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    x = x.to(kind.rows or dtype)
    found = kind.prepare(weight, bias)(x)
    assert found.dtype == (torch.float32 if is_head else x.dtype)
    rounded = found.dtype == torch.bfloat16
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < (2**-8 if rounded else 2e-5 if name == "twice" else 1e-6)


def test_large_models_prepare_fewer_bytes_per_weight() -> None:
    assert prepared_bytes(SMALL, 1 << 40) == 8 * SMALL and prepared_bytes(
        SMALL + 1, 1 << 40
    ) == 4 * (SMALL + 1)
    assert prepared_bytes(1000, 4 * 8000 - 1) == 0


@pytest.mark.parametrize(
    ("has", "kind"),
    [("tiles", products.COMPILED), ("pairs", products.PAIRS), ("", products.PANELS)],
)
def test_compiled_products_are_of_one_kind(
    has: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = SimpleNamespace(has_tiles=lambda: has == "tiles", has_pairs=lambda: has != "")
    monkeypatch.setattr(products, "OPERATIONS", operations)
    monkeypatch.setattr(products, "compiled", lambda: True)
    assert products.fastest(torch.bfloat16, small=True, allowed=True) == (kind, kind)
    assert products.fastest(torch.float32, small=True, allowed=True) == (
        products.PANELS,
        products.PANELS,
    )


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_without_compiled_functions_weights_are_packed_where_that_works(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        products, "works", lambda _, weights: has_bfloat16 or weights == torch.float32
    )
    monkeypatch.setattr(products, "compiled", lambda: False)
    for compiled in (True, False):
        assert products.fastest(torch.float32, small=False, allowed=compiled) == (
            "packed",
            "packed",
        )
        kinds = [
            products.fastest(torch.bfloat16, small=small, allowed=compiled)
            for small in (True, False)
        ]
        assert kinds == (
            [("packed", "twice")] * 2
            if has_bfloat16
            else [("float32", "float32"), ("plain", "float32")]
        )


def test_pairs_of_an_odd_number_of_inputs_are_not_made() -> None:
    if not products.compiled():
        pytest.skip("there is no C++ compiler")
    weight = torch.randn(32, 7).bfloat16()
    x = torch.randn(3, 7).bfloat16()
    for table, close in ((LAYERS, 0.02), (HEADS, 1e-6)):
        found = table[torch.bfloat16][products.PAIRS].prepare(weight, None)(x)
        assert torch.allclose(
            found.double(), x.double() @ weight.double().t(), rtol=close, atol=close * 4
        )


def test_of_a_float32_model_that_copies_do_not_fit_beside_nothing_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "prepared_bytes", lambda *_: 0)
    model = CausalLM.load(save_model(tmp_path / "model"), dtype=torch.float32)
    assert decode_model.DecodeModel(model, compiled=True).decoder() is model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_a_model_of_another_shape_nothing_is_prepared_but_a_float32_head(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Kind(lambda *_: pytest.fail("prepared"), dtype, 4)
    for table in (*LAYERS.values(), *HEADS.values()):
        for name in table.keys() - {"plain", "float32"}:
            monkeypatch.setitem(table, name, refused)
    model = CausalLM.load(save_model(tmp_path / "model", "gpt2"), dtype=dtype)
    decoder = decode_model.DecodeModel(model, compiled=True)
    assert decoder.decoder() is model
    hidden = torch.randn(3, model.head.in_features).to(dtype)
    exact = hidden.double() @ model.head.weight.detach().double().t()
    assert decoder.logits(hidden).dtype == torch.float32
    assert torch.allclose(decoder.logits(hidden).double(), exact, atol=1e-6)


def completions(engine: LocalEngine, rows: int) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        sampling = [Sampling(6, ignore_eos=True, seed=i) for i in range(rows)]
        return await asyncio.gather(*(engine.generate([7, 8, 9], s) for s in sampling))

    return asyncio.run(all_of_them())


def scores(model: CausalLM, token_ids: Sequence[int]) -> list[float]:
    """Of the tokens after the prompt of three, by the trainer."""
    with torch.no_grad():
        logprobs = model.predict(
            forest_of([Sample([7, 8, 9, *token_ids], [False] * 3 + [True] * len(token_ids))])
        )
    assert isinstance(logprobs.logprobs, Tensor)
    return logprobs.logprobs.tolist()


@pytest.mark.parametrize("adapter", [None, "merged", "beside"])
@pytest.mark.parametrize(
    ("dtype", "kind", "head"),
    [
        (torch.float32, "packed", "packed"),
        (torch.bfloat16, "packed", "twice"),
        (torch.bfloat16, "float32", "float32"),
        (torch.bfloat16, "plain", "twice"),
        (torch.bfloat16, "compiled", "compiled"),
        (torch.bfloat16, "compiled", "float32"),
        (torch.float32, "panels", "panels"),
        (torch.bfloat16, "panels", "panels"),
        (torch.bfloat16, "pairs", "pairs"),
    ],
)
def test_the_engine_samples_as_the_trainer_scores_with_every_kind(
    tmp_path: Path,
    dtype: torch.dtype,
    kind: str,
    head: str,
    adapter: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before and after new weights, and after it slept; a machine does not choose what it does not
    have."""
    kinds = [LAYERS[dtype][kind], HEADS[dtype][head]]
    if not all(works(one, dtype) for one in kinds):
        assert kind not in chosen(dtype, 0) or head not in chosen(dtype, 1)
        return
    monkeypatch.setattr(
        decoding,
        "fastest",
        lambda weights, **_: (kind, head) if weights == dtype else ("plain", "plain"),
    )
    model = CausalLM.load(save_model(tmp_path / "model", "qwen3", head_dim=16), dtype=dtype)
    if adapter:
        attach(model, LoraSection(rank=4, targets=["q_proj", "up_proj"]))
        merges = adapter == "merged"
        monkeypatch.setattr(decode_model, "merges_adapter", lambda _: merges)
    engine = LocalEngine(model, kv_bytes=1 << 20, max_running=8, max_prefill_tokens=64)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06

    def check() -> list[list[float]]:
        found = completions(engine, 4)
        for done in found:
            assert done.logprobs == pytest.approx(scores(model, done.token_ids), abs=tolerance)
        return [done.logprobs for done in found]

    before = check()
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    asyncio.run(engine.load_weights(1))
    after = check()
    assert after != before

    async def sleep() -> None:
        await engine.sleep()
        await engine.wake()

    asyncio.run(sleep())
    assert check() == after


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(129, 40, 33), (300, 17, 1100), (65, 7, 9)]
)
def test_a_row_does_not_depend_on_those_beside_it(rows: int, outputs: int, inputs: int) -> None:
    """Panels take the rows of a prompt in parts."""
    if not products.compiled():
        pytest.skip("there is no compiler")
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    x = torch.randn(rows, inputs)
    product = LAYERS[torch.float32][products.PANELS].prepare(weight, bias)
    found = product(x)
    exact = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    for row in (0, 1, rows // 2, rows - 1):
        assert torch.equal(product(x[row : row + 1])[0], found[row])


def test_the_engine_merges_an_adapter_exactly_where_the_plan_counts_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter's own parameters do not count."""
    path = save_model(tmp_path)
    facts = known_model_facts(str(path))
    assert facts is not None and facts.parameters is not None
    model = CausalLM.load(path)
    attach(model, LoraSection(rank=4))
    for most, merges in ((facts.parameters, True), (facts.parameters - 1, False)):
        monkeypatch.setattr(copies, "SMALL", most)
        assert merges_adapter(facts.parameters) is merges
        decoder = decode_model.DecodeModel(model, compiled=False).decoder()
        assert any(".lora_" in name for name, _ in decoder.module.named_parameters()) is not merges


def test_prompts_of_a_float32_model_are_read_by_the_products_that_decode(tmp_path: Path) -> None:
    if not products.compiled():
        pytest.skip("there is no compiler")
    model = CausalLM.load(save_model(tmp_path / "model", "qwen3", head_dim=16), dtype=torch.float32)
    engine = LocalEngine(model, kv_bytes=1 << 20, max_running=8, max_prefill_tokens=64)
    runner = engine._runner
    assert runner._prefill_model() is runner._decode_model.decoder() is not model
    for done in completions(engine, 4):
        assert done.logprobs == pytest.approx(scores(model, done.token_ids), abs=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["olmo2", "lfm2", "granite", "qwen3_moe", "gpt_neox"])
def test_modules_of_hugging_face_decode_with_prepared_weights(
    family: str, dtype: torch.dtype, adapted: bool, tmp_path: Path
) -> None:
    """Attention, gated convolutions, experts beside attention, and biases; before and after new
    weights. The model's own modules stay as they are."""
    model = CausalLM.load(save_model(tmp_path / "model", family), dtype=dtype)
    if adapted:
        attach(model, LoraSection(rank=4))
    own = [type(module) for module in model.module.modules()]
    engine = LocalEngine(model, kv_bytes=1 << 20, max_running=8, max_prefill_tokens=64)
    decoder = engine._runner._decode_model.decoder()  # pyright: ignore[reportPrivateUsage]
    assert any(isinstance(module, PreparedLinear) for module in decoder.module.modules())
    told = []
    for version in range(2):
        asyncio.run(engine.load_weights(version))
        found = completions(engine, 4)
        for done in found:
            close = 1e-4 if dtype == torch.float32 else 0.06
            assert done.logprobs == pytest.approx(scores(model, done.token_ids), abs=close)
        told.append([done.logprobs for done in found])
        with torch.no_grad():
            for parameter in model.module.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    assert told[0] != told[1]
    assert own == [type(module) for module in model.module.modules()]
