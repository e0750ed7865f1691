"""The compiled decode step computes what PyTorch's operations do; where nothing can be compiled,
those run."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.support.tiny import save_model
from tunesmith.config.commands import GenerateConfig
from tunesmith.config.load import load_config
from tunesmith.config.schema import SFTConfig
from tunesmith.costs import PeakRates
from tunesmith.errors import ConfigError, EngineError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.cpu import decoding, functions, native, products
from tunesmith.models.cpu.decoding import ACTIVATIONS, SharedRows
from tunesmith.models.cpu.native import OPERATIONS, load
from tunesmith.models.cpu.products import compiled
from tunesmith.models.kernels.decoding import KVSpan, tables
from tunesmith.plan.facts.hardware import compilers, find_compiler, read_hardware
from tunesmith.plan.facts.model import read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve
from tunesmith.records.costs import largest_costs
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.local import runner
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.runner import probe
from tunesmith.run.loop.profiling import StepProfiler
from tunesmith.run.specs.from_plan import load_tokenizer, model_spec
from tunesmith.types import Completion, Sampling

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
MULTIPLES = st.sampled_from([32, 64, 96, 128])
"""Head sizes of whole vectors, which have products of their own."""
TYPES = st.sampled_from([torch.float32, torch.bfloat16])
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 10},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 48},
    "mistral": {"sliding_window": 8, "head_dim": 24},
    "phi3": {"sliding_window": 6},
    "smollm3": {"num_hidden_layers": 4},
    "gemma": {"head_dim": 80, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 18,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


SLOTS = 5
"""Of a block."""


def in_blocks(bank: Tensor, span: KVSpan, plane: int, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """The ``[2, K, D]`` keys and values of each token of a span."""
    for at in range(tokens):
        yield at, bank[plane : plane + 2, span.blocks[at // SLOTS], :, at % SLOTS]


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    prompts = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    row = st.tuples(st.sampled_from(range(len(prompts))), st.integers(0, 40))
    return {
        "prompts": prompts,
        "rows": draw(st.lists(row, min_size=1, max_size=12)),
        "kv_heads": draw(st.sampled_from([1, 2, 3])),
        "share": draw(st.sampled_from([1, 2, 3, 7, 9])),
        "dim": draw(st.one_of(st.integers(1, 70).map(lambda half: 2 * half), MULTIPLES)),
        "dtypes": draw(st.tuples(TYPES, TYPES)),
        "window": draw(st.sampled_from([0, 1, 5, 40, 1000])),
        "softcap": draw(st.sampled_from([0.0, 2.0, 50.0])),
        "norms": draw(st.booleans()),
        "rotates": draw(st.booleans()),
        "threads": draw(st.sampled_from([1, 2, 5])),
        "layer": draw(st.sampled_from([0, 1])),
    }


@needs_compiler
@given(shapes(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
@pytest.mark.more
def test_attention_is_that_of_each_row_alone(shape: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    assert compiled()
    rows = shape["rows"]
    heads_kv = shape["kv_heads"]
    share = shape["share"]
    dim = shape["dim"]
    heads, plane, (row_type, bank_type) = heads_kv * share, 2 * shape["layer"], shape["dtypes"]
    # What no row has written is NaN, which no result may have seen.
    bank = torch.full((4, 160, heads_kv, SLOTS, dim), math.nan, dtype=bank_type)
    free = torch.randperm(160).tolist()
    spans = [KVSpan([free.pop() for _ in range(15)]) for _ in shape["prompts"]]
    own_spans = [KVSpan([free.pop() for _ in range(n // SLOTS + 1)]) for _, n in rows]
    prompts = torch.zeros(4, len(spans), heads_kv, 70, dim, dtype=bank_type)
    own = torch.zeros(4, len(rows), heads_kv, 48, dim, dtype=bank_type)
    for i, length in enumerate(shape["prompts"]):
        prompts[plane : plane + 2, i, :, :length] = torch.randn(2, heads_kv, length, dim)
    for i, (_, written) in enumerate(rows):
        own[plane : plane + 2, i, :, :written] = torch.randn(2, heads_kv, written, dim)
    q_norm, k_norm = (torch.rand(2, dim) + 0.5).unbind() if shape["norms"] else (None, None)
    cos, sin = torch.randn(2, 200, dim).unbind()
    qkv = torch.randn(len(rows), (heads + 2 * heads_kv) * dim).to(row_type)
    for i, length in enumerate(shape["prompts"]):
        for at, place in in_blocks(bank, spans[i], plane, length):
            place.copy_(prompts[plane : plane + 2, i, :, at])
    for i, (_, written) in enumerate(rows):
        for at, place in in_blocks(bank, own_spans[i], plane, written):
            place.copy_(own[plane : plane + 2, i, :, at])
    owners = [spans[p] for p, _ in rows]
    lengths = [shape["prompts"][p] for p, _ in rows]
    written = [n for _, n in rows]
    places = [length + n for length, n in zip(lengths, written, strict=True)]
    step = SharedRows(owners, lengths, share).step(
        bank, torch.tensor(written), torch.tensor(places), tables(own_spans), [cos, sin]
    )
    scale = dim**-0.5
    narrow = {row_type, bank_type} == {torch.bfloat16}
    in_pairs = narrow and dim % 32 == 0 and OPERATIONS.has_pairs()
    weights = [torch.ones(1)] * 4
    kind = 0 if shape["rotates"] else -1
    layer = OPERATIONS.layer(
        shape["layer"], heads, shape["window"], scale, shape["softcap"], 1e-6, kind, 0,
        q_norm, k_norm, *weights, [],
    )  # fmt: skip
    with threads(shape["threads"]):
        out = OPERATIONS.attend(step, layer, qkv)
    for i, (prompt, written) in enumerate(rows):
        for at, place in in_blocks(bank, own_spans[i], plane, written + 1):
            own[plane : plane + 2, i, :, at] = place
        q, k, v = qkv[i].double().view(-1, dim).split([heads, heads_kv, heads_kv])
        q = normed(q, q_norm, 1e-6)
        k = normed(k, k_norm, 1e-6)
        if shape["rotates"]:
            at = shape["prompts"][prompt] + written
            q, k = (x * cos[at] + x.roll(dim // 2, -1) * sin[at] for x in (q, k))
        assert torch.allclose(own[plane, i, :, written].double(), k, rtol=0.01, atol=0.02)
        assert torch.equal(own[plane + 1, i, :, written], v.to(bank_type))
        keys, values = (
            torch.cat(
                (prompts[p, prompt, :, : shape["prompts"][prompt]], own[p, i, :, : written + 1]), 1
            ).double()
            for p in (plane, plane + 1)
        )
        first = max(0, keys.shape[1] - shape["window"]) if shape["window"] else 0
        queries = q.view(heads_kv, share, dim) * scale
        if in_pairs:
            queries = queries.bfloat16().double()
        scores = queries @ keys[:, first:].transpose(1, 2)
        scores = (
            torch.tanh(scores / shape["softcap"]) * shape["softcap"] if shape["softcap"] else scores
        )
        expected = (scores.softmax(-1) @ values[:, first:]).flatten()
        close: dict[str, Any] = (
            {"rtol": 1e-4, "atol": 1e-4}
            if row_type == torch.float32
            else {"rtol": 2**-8, "atol": 2**-7}
        )
        torch.testing.assert_close(out[i].double(), expected, **close)


@needs_compiler
@given(
    st.integers(1, 40),
    st.integers(1, 1100),
    TYPES,
    st.booleans(),
    st.booleans(),
    st.sampled_from(list(ACTIVATIONS)),
)
@settings(max_examples=40, deadline=None)
def test_norms_and_activations(
    rows: int, width: int, dtype: torch.dtype, adds: bool, inner: bool, kind: Any
) -> None:
    assert compiled()
    x = torch.randn(rows, width) * 3
    y = (torch.randn(rows, width) * 3).to(dtype)
    weight, own = torch.rand(2, width).unbind()
    expected = x.double()
    if adds:
        expected = expected + normed(y.double(), own if inner else None, 1e-5)
    more = (y, own if inner else None) if adds else (None, None)
    out = OPERATIONS.add_norm(x, *more, weight, 1e-5, dtype == torch.bfloat16)
    close = 1e-4 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.double(), normed(expected, weight, 1e-5), rtol=close, atol=close)
    both = (torch.randn(rows, 2 * width) * 10).to(dtype)
    out = OPERATIONS.gated(both, ACTIVATIONS[kind])
    gate, up = both.double().chunk(2, -1)
    active = (
        F.silu(gate)
        if kind == "silu"
        else F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    )
    torch.testing.assert_close(out.double(), active * up, rtol=close, atol=1e-4)


@needs_compiler
@given(
    st.integers(1, 300),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_drawn_by_the_inverse_of_the_distribution(
    vocabulary: int, rows: int, temperature: float, threads: int
) -> None:
    logits = torch.randn(rows, vocabulary) * 4
    uniforms = torch.rand(rows, dtype=torch.float64)
    logits[:, 1 : vocabulary // 2 : 3] = -math.inf
    tokens, logprobs = drawn(logits, temperature, uniforms, threads)
    probs = (logits.double() / (temperature or 1)).softmax(-1)
    chosen = probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (chosen > 0).all()
    torch.testing.assert_close(logprobs.double(), chosen.log(), rtol=0, atol=1e-5)
    if temperature == 0:
        assert tokens.tolist() == logits.argmax(-1).tolist()
    else:
        after = probs.cumsum(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        assert ((after - chosen - 1e-6 <= uniforms) & (uniforms <= after + 1e-6)).all()


@needs_compiler
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_not_drawn_from(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 20] = bad
    finite = (
        drawn(logits, temperature, torch.rand(3, dtype=torch.float64), 1)[1].isfinite().tolist()
    )
    assert finite == [True, False, True]


def drawn(
    logits: Tensor, temperature: float, uniforms: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    assert compiled()
    with threads(count):
        return OPERATIONS.draw(logits, torch.full((len(logits),), temperature), uniforms)


@contextmanager
def threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def completions(model: CausalLM, requests: int = 9, **options: Any) -> list[Completion]:
    engine = LocalEngine(model, kv_bytes=1 << 22, max_running=7, max_prefill_tokens=40, **options)
    prompts = [[5 + (7 * i + 3 * j) % 250 for j in range(n)] for i, n in enumerate((1, 12, 33))]

    async def all_of_them() -> list[Completion]:
        samplings = [
            Sampling(10 + 3 * i, temperature=i % 3 / 2, seed=i, ignore_eos=True)
            for i in range(requests)
        ]
        return await asyncio.gather(
            *(engine.generate(prompts[i % 3], s) for i, s in enumerate(samplings))
        )

    return asyncio.run(all_of_them())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_samples_as_with_pytorchs_operations(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = CausalLM.load(save_model(tmp_path, family, **FAMILIES[family]), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1).add_(torch.randn_like(weight) * 0.02)
    model.module.to(dtype)  # pyright: ignore[reportArgumentType]
    model.runner.bind()
    plain, compiled = (completions(model, compiled=flag) for flag in (False, True))
    close = 1e-4 if dtype == torch.float32 else 0.1
    for one, other in zip(plain, compiled, strict=True):
        same = next(
            (
                i
                for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True))
                if a != b
            ),
            None,
        )
        assert same is None or dtype == torch.bfloat16
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=close)
    assert any(a.logprobs != b.logprobs for a, b in zip(plain, compiled, strict=True)), (
        "the same path ran twice"
    )


@needs_compiler
@pytest.mark.parametrize(
    ("family", "dtype", "compiled", "kept"),
    [
        ("qwen3", torch.bfloat16, True, torch.bfloat16),
        ("qwen3", torch.bfloat16, False, torch.float32),
        ("qwen3", torch.float16, True, torch.float32),
        ("qwen3", torch.float32, True, torch.float32),
        ("gpt2", torch.bfloat16, True, torch.float32),
    ],
)
def test_keys_and_values_have_the_type_that_is_read_fastest(
    family: str, dtype: torch.dtype, compiled: bool, kept: torch.dtype, tmp_path: Path
) -> None:
    model = CausalLM.load(save_model(tmp_path, family), dtype=dtype)
    layout, cost = probe(model, compiled=compiled)
    assert layout.dtype == kept and layout.token_bytes == cost.kv_bytes


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_taken_together_are_those_taken_one_by_one(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end at their length or at a token of their own, and start later than others."""
    model = CausalLM.load(save_model(tmp_path, family, **FAMILIES[family]), dtype=dtype)
    prompts = [[5 + (7 * i + 3 * j) % 250 for j in range(n)] for i, n in enumerate((1, 12, 33))]
    samplings = [
        Sampling(9 * i + 1, seed=i, stop_token_ids=tuple(range(i, 250, 40)), ignore_eos=i % 2 == 0)
        for i in range(9)
    ]

    def sampled(together: int) -> tuple[list[Completion], EngineStats]:
        monkeypatch.setattr(runner, "STEPS_TOGETHER", together)
        engine = LocalEngine(
            model,
            kv_bytes=1 << 18,
            max_running=5,
            max_prefill_tokens=40,
            limits=PeakRates(1e9, 1e9),
        )

        async def all_of_them() -> list[Completion]:
            requests = enumerate(samplings)
            return await asyncio.gather(*(engine.generate(prompts[i % 3], s) for i, s in requests))

        return asyncio.run(all_of_them()), engine.stats()

    (ones, counted), (others, also) = sampled(1), sampled(16)
    assert ones == others and {one.finish_reason for one in ones} == {"stop", "length"}
    times = {"decode_seconds": 0, "prefill_seconds": 0, "attainable_seconds": 0, "peak_kv_bytes": 0}
    assert replace(counted, **times) == replace(also, **times)
    assert also.attainable_seconds == pytest.approx(counted.attainable_seconds)


@needs_compiler
def test_a_trace_has_the_compiled_calls(tmp_path: Path) -> None:
    model = CausalLM.load(save_model(tmp_path / "model"), dtype=torch.float32)
    profiler = StepProfiler(tmp_path, [1])
    profiler.begin(1)
    completions(model, requests=2)
    trace = profiler.end(1)
    assert trace is not None
    named = {
        name: seconds
        for name, seconds in largest_costs(trace, 1000)
        if name.startswith("tunesmith::")
    }
    decoding = ("step", "layer", "product", "multiply", "draw", "decode")
    prompts = ("norm", "heads", "gate")
    by_head_size = {"tunesmith::panel", "tunesmith::attend_forest"}
    assert named.keys() - by_head_size == {f"tunesmith::{name}" for name in (*decoding, *prompts)}
    assert min(named.values()) > 0


@needs_compiler
def test_weights_that_are_not_finite_are_noticed(tmp_path: Path) -> None:
    model = CausalLM.load(save_model(tmp_path))
    with torch.no_grad():
        model.module.model.layers[0].self_attn.v_proj.weight[3] = math.nan
    with pytest.raises(EngineError, match="not finite"):
        completions(model)


PROGRAM = 'from tunesmith.models.cpu.native import load; print(load("decode"))'


@needs_compiler
@pytest.mark.slow
def test_processes_that_compile_at_once_keep_one_library(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=-1, text=True)
        for _ in "ab"
    ]
    said = [process.communicate(timeout=300)[0].splitlines() for process in running]
    assert [lines[-1] for lines in said] == [
        "True",
        "True",
    ]  # before it, on a busy machine: patience
    (kept,) = (tmp_path / "cache" / "tunesmith" / "native").iterdir()
    written = kept.stat().st_mtime_ns
    again = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == "True" and kept.stat().st_mtime_ns == written


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that is compiled at once, for ``loads``, and where it is kept."""
    (tmp_path / "small.cpp").write_text("int seven() { return 7; }")
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tunesmith" / "native"


def loads() -> bool:
    return native.load_now.__wrapped__("small")


@needs_compiler
@pytest.mark.usefixtures("small")
def test_threads_that_load_at_once_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    together = Barrier(2)

    def counted(what: str) -> AbstractContextManager[None]:
        waits.append(what)
        return nullcontext()

    def load_together() -> bool:
        together.wait()
        return load("once")

    (native.SOURCES / "once.cpp").write_text("int seven() { return 7; }")
    monkeypatch.setattr(native, "long_wait", counted)
    with ThreadPoolExecutor() as threads:
        loaded = [threads.submit(load_together) for _ in range(2)]
    assert [each.result() for each in loaded] == [True, True]
    assert len(waits) == 1


@needs_compiler
@pytest.mark.more
def test_a_damaged_library_is_compiled_anew(small: Path) -> None:
    """To load the beginning of one ends the process with SIGBUS. A mapped file is not written to,
    but replaced."""
    assert loads()
    (kept,) = small.iterdir()
    whole = kept.read_bytes()
    other = small / "small-0123456789abcdef.so"
    other.write_bytes(b"of another compiler")
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1], bytes(len(whole))):
        (small / "new").write_bytes(damaged)
        (small / "new").replace(kept)
        assert loads()
        assert {file.name for file in small.iterdir()} == {kept.name, other.name}
        assert kept.read_bytes() == whole
    written = kept.stat().st_mtime_ns
    assert loads() and kept.stat().st_mtime_ns == written, "what is whole is not compiled again"


@needs_compiler
def test_a_compiler_may_have_a_wrapper_and_arguments(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env {find_compiler()} -Wall")
    assert loads() and len([*small.iterdir()]) == 1


def test_the_command_of_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced = tmp_path / "with a space"
    spaced.write_text("")
    spaced.chmod(0o755)
    for value, found in [
        (str(spaced), [str(spaced)]),
        (f"'{spaced}' -m64", [str(spaced), "-m64"]),
        (f"{sys.executable} -m64 'a b'", [sys.executable, "-m64", "a b"]),
        ("no_such_compiler -m64", None),
        (f"'{sys.executable}", None),
        ("  ", None),
    ]:
        monkeypatch.setenv("CXX", value)
        command = find_compiler()
        assert (command and shlex.split(command)) == found
        assert repr(value) in compilers()
    monkeypatch.delenv("CXX")
    assert "g++" in compilers()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "no C++ compiler"),
        (
            '#!/bin/sh\n[ "$1" = --version ] || { echo "no such option" >&2; exit 1; }\n',
            "no such option",
        ),
        (
            '#!/bin/sh\nfor i; do if [ "$o" = -o ]; then echo junk > $i; fi; o=$i; done\n',
            "decode.so",
        ),
    ],
)
@pytest.mark.more
def test_without_a_library_pytorchs_operations_run(
    script: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler = tmp_path / "compiler"
    if script is not None:
        compiler.write_text(script)
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decoding, "compiled", lambda: native.load_now.__wrapped__("decode"))
    monkeypatch.setattr(products, "compiled", lambda: False)
    model = CausalLM.load(save_model(tmp_path / "model"))
    sampled = completions(model)
    assert said in capsys.readouterr().err
    assert sampled == completions(model, compiled=False)
    # The plan has counted keys and values of the model's type, and PyTorch's operations read those
    # too.
    narrow = CausalLM.load(tmp_path / "model", dtype=torch.bfloat16)
    assert probe(narrow, compiled=True)[0].dtype == torch.bfloat16
    found = completions(narrow)
    exact = completions(narrow, compiled=False)
    first = [[c.logprobs[0] for c in side] for side in (found, exact)]
    assert first[0] == pytest.approx(first[1], abs=0.05)


def test_the_setting_is_derived_from_compiler_family_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    other = save_model(tmp_path / "other", "gpt2")
    data.write_text('{"prompt": "a"}\n')

    def found(model: Path, compiler: str | None, *more: str) -> bool:
        monkeypatch.setenv("CXX", compiler or str(tmp_path / "none"))
        given = [
            f"model.path={model}",
            f"data.train={data}",
            "system.device=cpu",
            "sampling.max_new_tokens=8",
            *more,
        ]
        config = load_config(GenerateConfig, None, given)
        return resolve(config, Facts(read_hardware(), read_model_facts(model))).settings[
            "system.compile"
        ]

    assert found(directory, sys.executable) and not found(
        directory, sys.executable, "system.compile=false"
    )
    assert not found(directory, None) and not found(other, sys.executable)
    for model, compiler in ((directory, None), (other, sys.executable)):
        with pytest.raises(ConfigError, match=r"system\.compile"):
            found(model, compiler, "system.compile=true")


@pytest.mark.parametrize("has", ["tiles", "pairs", ""])
def test_training_of_other_layers_compiles_where_the_cpu_multiplies_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str
) -> None:
    directory = save_model(tmp_path / "model", "gpt2")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(functions, "_allowed", True)
    hardware = replace(read_hardware(), tiles=has == "tiles", pairs=has == "pairs")
    facts = Facts(hardware, read_model_facts(directory))

    def found(*more: str) -> Plan[SFTConfig]:
        given = [
            f"model.path={directory}",
            f"data.train={data}",
            "system.device=cpu",
            "model.dtype=bfloat16",
            *more,
        ]
        return resolve(load_config(SFTConfig, None, given), facts)

    assert found().devices.compile == bool(has)
    assert not found("model.dtype=float32").devices.compile
    if not has:
        with pytest.raises(ConfigError, match=r"system\.compile"):
            found("system.compile=true")
    config = found("system.compile=false")
    model_spec(config).build(load_tokenizer(config.said))
    assert not functions.usable()


@pytest.mark.parametrize(
    ("dtype", "compiles"), [("float32", True), ("bfloat16", True), ("float16", False)]
)
def test_training_of_lean_layers_compiles_on_any_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, compiles: bool
) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    directory = save_model(tmp_path / "model", "qwen3")
    hardware = replace(read_hardware(), tiles=False, pairs=False)
    settings = [f"model.path={directory}", f"model.dtype={dtype}", "data.train=org/data"]
    plan = resolve(
        load_config(SFTConfig, None, [*settings, "system.device=cpu"]),
        Facts(hardware, read_model_facts(directory)),
    )
    assert plan.devices.compile == compiles


@needs_compiler
def test_the_library_shares_the_threads_of_torch() -> None:
    """A second OpenMP would have a second team, and each operation would wait for sleeping
    threads."""
    torch.ones(1).sum()
    assert load("decode")
    loaded = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line
    }
    assert len(loaded) <= 1


def test_blocks_of_rows_follow_their_spans() -> None:
    """Also where another row of the same prompt takes the place of one that ended."""
    prompt = KVSpan([0])
    first, second, third = (KVSpan([block]) for block in (1, 2, 3))
    rows = SharedRows([prompt, prompt], [4, 4], 1)
    assert rows.own([first, second]).tolist() == [[1], [2]]
    assert rows.own([first, third]).tolist() == [[1], [3]]
    third.blocks.append(4)
    assert rows.own([first, third]).tolist() == [[1, 0], [3, 4]]
