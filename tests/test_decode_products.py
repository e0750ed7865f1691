"""Products of few rows: every kind computes the same, the choice is measured once, and the engine samples as before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import save_model
from training import forest_of
from tunesmith.config.schema import LoraSection
from tunesmith.engines.local import choices, decode_model
from tunesmith.engines.local.choices import ROWS, choose, kept
from tunesmith.engines.local.engine import LocalEngine
from tunesmith.engines.local.measuring import _chosen, measured  # pyright: ignore[reportPrivateUsage]
from tunesmith.models import products
from tunesmith.models.adapters import attach
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.lean import PRODUCTS
from tunesmith.models.products import HEADS, LAYERS, Kind, works
from tunesmith.plan.prepared import SMALL, prepared_bytes
from tunesmith.types import Completion, Sample, Sampling

KINDS = [
    pytest.param(dtype, name, kind, is_head, id=f"{str(dtype)[6:]}-{name}-{'head' if is_head else 'layer'}")
    for is_head, table in enumerate((LAYERS, HEADS))
    for dtype, kinds in table.items()
    for name, kind in kinds.items()
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tunesmith" / "products"


@pytest.mark.parametrize(("dtype", "name", "kind", "is_head"), KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 208), (5, 200), (5, 208), (12, 3), (37, 48), (37, 1040)])
def test_each_kind_computes_the_product(
    dtype: torch.dtype, name: str, kind: Kind, is_head: int, biased: bool, rows: int, outputs: int
) -> None:
    if not works(kind, dtype):
        pytest.skip("this machine does not have it")
    weight, x = torch.randn(outputs, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    x = x.to(kind.rows or dtype)
    found = kind.prepare(weight, bias)(x)
    assert found.dtype == (torch.float32 if is_head else x.dtype)
    rounded = found.dtype == torch.bfloat16
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < (2**-8 if rounded else 2e-5 if name == "twice" else 1e-6)


def test_what_was_measured_is_kept(cache: Path) -> None:
    calls: list[int] = []

    def measure() -> dict[str, int]:
        calls.append(len(calls))
        return {"value": len(calls)}

    def valid(found: Any) -> bool:
        return isinstance(found, dict) and "value" in found

    assert kept({"shape": 1}, measure, valid) == kept({"shape": 1}, measure, valid) == {"value": 1}
    assert kept({"shape": 2}, measure, valid) == {"value": 2}
    for damaged in ("", "{", "[]", "null", '{"measured": 3}', '{"measured": {}}'):
        for file in cache.iterdir():
            file.write_text(damaged)
        before = len(calls)
        assert kept({"shape": 1}, measure, valid) == {"value": before + 1}
        assert kept({"shape": 1}, measure, valid) == {"value": before + 1}
    assert all(file.is_file() for file in cache.iterdir()), "nothing unfinished stays"


def test_the_first_process_to_write_decides_for_all(cache: Path) -> None:
    def slow() -> dict[str, int]:
        assert kept({}, lambda: {"value": 1}, bool) == {"value": 1}  # another process, meanwhile
        return {"value": 2}

    assert kept({}, slow, bool) == {"value": 1}
    assert len(list(cache.iterdir())) == 1


def test_where_nothing_can_be_kept_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept({}, lambda: pytest.fail("measured"), bool) is None
    monkeypatch.setattr(choices, "LEAST", 0)
    model = CausalLM.load(save_model(tmp_path / "model"), dtype=torch.bfloat16)
    assert model.lean is not None
    assert choose(model, model.lean, compiled=False) == choices.fixed(1000, [], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measured_choice_is_valid_and_repeats(
    cache: Path, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "LEAST", 0)
    model = CausalLM.load(save_model(tmp_path / "model", "gemma3_text", head_dim=16), dtype=dtype)
    assert model.lean is not None
    monkeypatch.setattr(choices, "fastest", lambda: None)
    found = choose(model, model.lean, compiled=True)
    assert [*found] == [*ROWS] and all(set(kinds) == {*PRODUCTS, "head"} for kinds in found.values())
    for kinds in found.values():
        assert len({LAYERS[dtype][kinds[name]].rows for name in PRODUCTS}) == 1
    monkeypatch.setattr(choices, "measured", lambda *_, **__: pytest.fail("measured again"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert choose(model, model.lean, compiled=True) == found
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["facts"]["torch"] == torch.__version__


def test_a_choice_of_compiled_products_is_only_used_where_they_are_there(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library may fail in one run and load in the next: each is measured, and each choice is kept."""
    asked: list[list[str]] = []

    def measure(*given: Any, **_: object) -> dict[str, Any]:
        _, _, rows, kinds = given
        asked.append(kinds)
        own, head = (products.COMPILED,) * 2 if products.COMPILED in kinds else (kinds[-1], "float32")
        return {str(number): {**dict.fromkeys(PRODUCTS, own), "head": head} for number in rows}

    model = CausalLM.load(save_model(tmp_path / "model"), dtype=torch.bfloat16)
    monkeypatch.setattr(choices, "LEAST", 0)
    monkeypatch.setattr(choices, "fastest", lambda: None)
    monkeypatch.setattr(choices, "measured", measure)

    def chosen(library: object) -> dict[int, choices.Choice]:
        monkeypatch.setattr(products, "functions", lambda: library)
        assert model.lean is not None
        return choose(model, model.lean, compiled=True)

    without = chosen(None)
    assert products.COMPILED not in {kind for kinds in without.values() for kind in kinds.values()}
    compiled = chosen(object())
    assert {kind for kinds in compiled.values() for kind in kinds.values()} == {products.COMPILED}
    assert chosen(None) == without and chosen(object()) == compiled and len(asked) == 2
    for file in cache.iterdir():  # as an earlier version wrote them: both name the compiled kind
        file.write_text(json.dumps({"measured": {str(rows): kinds for rows, kinds in compiled.items()}}))
    assert chosen(None) == without


def test_kinds_of_large_copies_are_not_tried_for_large_models(tmp_path: Path) -> None:
    model = CausalLM.load(save_model(tmp_path / "model"), dtype=torch.bfloat16)
    assert model.lean is not None
    for kinds in measured(model, model.lean, [1, 8], ["plain", "packed", "float32"], small=False).values():
        copied = [LAYERS[torch.bfloat16][kinds[name]].copied for name in PRODUCTS]
        assert max(copied) <= 2
    assert prepared_bytes(SMALL, 1 << 40) == 8 * SMALL and prepared_bytes(SMALL + 1, 1 << 40) == 4 * (SMALL + 1)
    assert prepared_bytes(1000, 8 * 8000 - 1) == 0


@pytest.mark.parametrize(("has", "kind"), [("tiles", products.COMPILED), ("pairs", products.PAIRS), ("", None)])
def test_a_cpu_that_multiplies_bfloat16_has_one_kind_for_all(
    tmp_path: Path, has: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(tunesmith_has_tiles=lambda: has == "tiles", tunesmith_has_pairs=lambda: has != "")
    monkeypatch.setattr(products, "functions", lambda: library)
    assert products.fastest() == kind
    model = CausalLM.load(save_model(tmp_path / "model"), dtype=torch.bfloat16)
    assert model.lean is not None
    if kind:
        assert choose(model, model.lean, compiled=True) == {1: dict.fromkeys((*PRODUCTS, "head"), kind)}
    unlike = choose(model, model.lean, compiled=False)
    assert not {products.COMPILED, products.PAIRS} & {one for kinds in unlike.values() for one in kinds.values()}


def test_pairs_of_an_odd_number_of_inputs_are_not_made() -> None:
    if products.functions() is None:
        pytest.skip("there is no C++ compiler")
    weight, x = torch.randn(32, 7).bfloat16(), torch.randn(3, 7).bfloat16()
    for table, close in ((LAYERS, 0.02), (HEADS, 1e-6)):
        found = table[torch.bfloat16][products.PAIRS].prepare(weight, None)(x)
        assert torch.allclose(found.double(), x.double() @ weight.double().t(), rtol=close, atol=close * 4)


def test_of_a_float32_model_that_copies_do_not_fit_beside_nothing_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles multiply bfloat16 weights only."""
    monkeypatch.setattr(decode_model, "fastest", lambda: products.COMPILED)
    monkeypatch.setattr(decode_model, "prepared_bytes", lambda *_: 0)
    monkeypatch.setattr(decode_model, "choose", lambda *_, **__: pytest.fail("prepared"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    model = CausalLM.load(save_model(tmp_path / "model"), dtype=torch.float32)
    decoder = decode_model.DecodeModel(model, compiled=True)
    assert decoder.for_rows(1) is model and decoder.for_rows(100) is model


def test_a_layer_is_of_one_compiled_kind_if_its_calls_save_more_than_others_are_faster() -> None:
    times = {name: {"plain": 2.0, "packed": 1.0, "panels": 1.25} for name in PRODUCTS}
    assert _chosen(times, 0.3) == dict.fromkeys(PRODUCTS, "panels")
    assert _chosen(times, 0.2) == dict.fromkeys(PRODUCTS, "packed")
    assert _chosen({**times, "down": {"plain": 2.0, "packed": 3.0}}, 0.3)["down"] == "plain"


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
    assert decoder.for_rows(1) is model and decoder.for_rows(100) is model
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
        logprobs = model.predict(forest_of([Sample([7, 8, 9, *token_ids], [False] * 3 + [True] * len(token_ids))]))
    assert isinstance(logprobs.logprobs, Tensor)
    return logprobs.logprobs.tolist()


@pytest.mark.parametrize("adapted", [False, True])
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
    tmp_path: Path, dtype: torch.dtype, kind: str, head: str, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after new weights, and after it slept."""
    chosen = {**dict.fromkeys(PRODUCTS, kind), "head": head}
    kinds = [LAYERS[dtype][kind], HEADS[dtype][head]]
    if not all(works(one, dtype) for one in kinds):
        pytest.skip("this machine does not have it")
    plain = dict.fromkeys((*PRODUCTS, "head"), "plain")
    monkeypatch.setattr(
        decode_model, "choose", lambda model, *_, **__: {4: chosen if model.module.dtype == dtype else plain}
    )
    model = CausalLM.load(save_model(tmp_path / "model", "qwen3", head_dim=16), dtype=dtype)
    if adapted:
        attach(model, LoraSection(rank=4, targets=["q_proj", "up_proj"]))
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
