"""LoRA: what is trained, saved, resumed and merged; the sampler and the reference see the right
weights."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.tiny import CHATML, save_model
from tests.support.tiny_runs import rl_settings, same_tensors, sft_settings, tensors, untimed
from tests.support.training import forest_of, whole
from tunesmith.config.schema import LoraSection, SFTConfig
from tunesmith.errors import CheckpointError, ConfigError, ModelError, StorageError
from tunesmith.learn.algorithms.objective import SFTObjective
from tunesmith.learn.data.micro_batches import Packing, build_forest
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Forest
from tunesmith.models.score_model import ScoreModel, whole_sequence
from tunesmith.run import assembly
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample, Sampling

PROMPT = [5, 9, 30, 77]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def samples() -> list[Sample]:
    return [
        Sample([*PROMPT, *rest], [False] * 4 + [True] * len(rest))
        for rest in ([8, 20, 6], [11], [60, 61, 62, 2])
    ]


def forest(indices: list[int] | None = None) -> Forest:
    return forest_of(samples(), indices)


def adapted(
    base: Path, dtype: torch.dtype = torch.float32, **section: Any
) -> TorchBackend[CausalLM]:
    model = CausalLM.load(base, dtype=dtype)
    torch.manual_seed(0)
    adapters.attach(model, LoraSection(**{"rank": 4, **section}))
    return TorchBackend(model, AdamWSettings(), CausalLM.predict)


def trained(backend: TorchBackend[Any], steps: int = 2) -> TorchBackend[Any]:
    for _ in range(steps):
        backend.forward_backward(whole(samples()), SFTObjective())
        backend.step(0.05)
    return backend


def logprobs(backend: TorchBackend[Any], *, reference: bool = False) -> Tensor:
    return torch.from_numpy(backend.score(whole(samples()), reference=reference)).float()


def hugging_face(model: Any) -> Tensor:
    """Log-probabilities of the samples' loss tokens by a plain Hugging Face model, one sequence at
    a time."""
    model.eval()
    rows: list[Tensor] = []
    for s in samples():
        ids = torch.tensor([s.token_ids])
        with torch.no_grad():
            logp = model(ids).logits[0].log_softmax(-1)
        rows.append(torch.stack([logp[t - 1, s.token_ids[t]] for t in range(4, len(s.token_ids))]))
    return torch.cat(rows)


def test_only_the_adapter_is_trained_and_has_optimizer_state(base: Path) -> None:
    backend = adapted(base)
    assert backend.model.adapter is not None
    before = {n: p.detach().clone() for n, p in backend.model.module.named_parameters()}
    # q, o 32x32; k, v 32->16; gate, up 32->64; down 64->32: rank times inputs and outputs, in two
    # layers.
    count = 2 * 4 * (2 * 64 + 2 * 48 + 3 * 96)
    assert backend.model.adapter.counts() == (
        count,
        count + sum(p.numel() for n, p in before.items() if "lora" not in n),
    )
    trained(backend)
    moved = {n for n, p in backend.model.module.named_parameters() if not p.equal(before[n])}
    assert moved == set(backend.optimizer.masters) == {n for n in before if "lora_" in n}


def test_at_first_it_is_the_base_and_the_reference_stays_it(base: Path) -> None:
    plain = TorchBackend(CausalLM.load(base), AdamWSettings(), CausalLM.predict)
    backend = adapted(base)
    torch.testing.assert_close(logprobs(backend), logprobs(plain))
    trained(backend)
    torch.testing.assert_close(logprobs(backend, reference=True), logprobs(plain))
    assert (logprobs(backend) - logprobs(plain)).abs().max() > 0.1
    assert all(p.requires_grad for p in backend.optimizer.masters.values()), (
        "scoring the reference freezes nothing"
    )


def test_the_gradient_is_autograds_and_independent_of_the_split(base: Path) -> None:
    backend = trained(adapted(base))
    whole = gradients(backend, [None])
    parts = gradients(backend, [[0], [2, 1]])
    model = backend.model.module.double()
    loss = -hugging_face_training(model).mean()
    expected = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    for a, b, c in zip(whole, parts, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(a.double(), c, rtol=1e-4, atol=1e-6)


def gradients(backend: TorchBackend[Any], split: list[list[int] | None]) -> list[Tensor]:
    batch = whole(samples()).batch
    assert batch is not None
    forests = tuple(build_forest(batch, indices) for indices in split)
    backend.forward_backward(Packing(forests, batch.num_predictions, batch), SFTObjective())
    return [p.grad.clone() for p in backend.optimizer.masters.values() if p.grad is not None]


def hugging_face_training(model: Any) -> Tensor:
    """As ``hugging_face``, with gradient, on the adapted module itself: one sequence in a forest at
    a time."""
    lm = CausalLM(model, None)  # pyright: ignore[reportArgumentType]
    found = [lm.predict(forest([i])).logprobs for i in range(3)]
    return torch.cat(found)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("mlp.down_proj",)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_named_targets_and_gradient_checkpointing(
    base: Path, targets: tuple[str, ...], checkpointing: bool
) -> None:
    """The base's first layers need no gradient, yet one has to pass from checkpoint to
    checkpoint."""
    backend = trained(adapted(base, targets=targets))
    names = {n.split(".lora_")[0].rpartition(".")[2] for n in backend.optimizer.masters}
    assert names == {t.rpartition(".")[2] for t in targets}
    plain = gradients(backend, [None])
    if checkpointing:
        backend.model.module.gradient_checkpointing_enable({"use_reentrant": False})
    for a, b in zip(plain, gradients(backend, [None]), strict=True):
        torch.testing.assert_close(a, b)
    assert all(g.abs().sum() > 0 for g in plain)


def test_dropout_falls_in_training_passes_only(base: Path) -> None:
    backend = trained(adapted(base, dropout=0.5))
    assert logprobs(backend).equal(logprobs(backend))
    first = gradients(backend, [None])
    second = gradients(backend, [None])
    assert not all(a.equal(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_sees_the_adapter(base: Path, dtype: torch.dtype) -> None:
    """Canary: after training steps, what the engine says of its tokens is what the trainer says."""
    backend = adapted(base, dtype)
    engine = LocalEngine(backend.model, kv_bytes=1 << 20, max_running=4, max_prefill_tokens=64)

    def sampled() -> tuple[Tensor, Tensor]:
        async def draw() -> Any:
            await engine.load_weights(backend.optimizer_steps)
            sampling = Sampling(max_new_tokens=12, ignore_eos=True, seed=1)
            return await asyncio.gather(*(engine.generate(PROMPT, sampling) for _ in range(3)))

        completions = asyncio.run(draw())
        drawn = [Sample([*PROMPT, *c.token_ids], [False] * 4 + [True] * 12) for c in completions]
        scored = torch.from_numpy(backend.score(whole(drawn))).float()
        return torch.tensor([p for c in completions for p in c.logprobs]), scored

    for _ in range(2):
        before = logprobs(backend)
        trained(backend)
        assert (logprobs(backend) - before).abs().max() > 0.1
        theirs, ours = sampled()
        torch.testing.assert_close(
            theirs, ours, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.05
        )


def test_saved_loaded_and_merged_it_is_the_same_model(base: Path, tmp_path: Path) -> None:
    backend = trained(adapted(base))
    ours = logprobs(backend)
    backend.model.save(tmp_path / "adapter")
    names = {f.name for f in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"} <= names
    assert "model.safetensors" not in names, "no copy of the base"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    size = plain.num_parameters()
    torch.testing.assert_close(
        hugging_face(PeftModel.from_pretrained(plain, tmp_path / "adapter")), ours
    )
    assert assembly.run_merge(tmp_path / "adapter", tmp_path / "merged") == str(base)
    merged = CausalLM.load(tmp_path / "merged")
    assert merged.module.num_parameters() == size
    found = logprobs(TorchBackend(merged, AdamWSettings(), CausalLM.predict))
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5)


def test_a_continued_adapter_starts_where_it_was_and_is_its_own_reference(
    base: Path, tmp_path: Path
) -> None:
    first = trained(adapted(base))
    first.model.save(tmp_path / "first")
    model = CausalLM.load(base)
    adapters.attach(model, LoraSection(path=tmp_path / "first"), path=tmp_path / "first")
    second = TorchBackend(model, AdamWSettings(), CausalLM.predict)
    assert logprobs(second).equal(logprobs(first))
    trained(second)
    torch.testing.assert_close(logprobs(second, reference=True), logprobs(first))
    assert (logprobs(second) - logprobs(first)).abs().max() > 0.1
    second.model.save(tmp_path / "second")
    assert json.loads((tmp_path / "second/adapter_config.json").read_text())["r"] == 4


def test_a_reward_model_trains_its_head_beside_the_adapter(base: Path, tmp_path: Path) -> None:
    told = BufferingHandler(100)
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(told)
    model = ScoreModel.load(base)
    logger.removeHandler(told)
    assert not told.buffer, "that a new head is in no file is no news"
    adapters.attach(model, LoraSection(rank=2))
    backend = TorchBackend(model, AdamWSettings(), ScoreModel.predict)

    def objective(_: Forest, predictions: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return (predictions.values - 1.0).square().sum(), {}

    sequences = whole([whole_sequence([5, 6, 7]), whole_sequence([5, 8])])
    losses = [
        backend.forward_backward(sequences, objective)["loss"]
        for _ in range(20)
        if backend.step(0.005)
    ]
    assert losses[-1] < losses[0] / 2
    model.save(tmp_path / "adapter")
    assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")
    with torch.no_grad():
        [forest] = sequences
        merged = ScoreModel.load(tmp_path / "merged").scores(forest)
        torch.testing.assert_close(merged, model.scores(forest), rtol=0, atol=1e-5)


def run(settings: list[str], kind: str = "rl") -> assembly.RunResult:
    return getattr(assembly, f"run_{kind}")(None, settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_run_saves_the_adapter_and_resumes_bit_for_bit(
    tmp_path: Path, base: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make = rl_settings if kind == "rl" else sft_settings
    settings: dict[str, Any] = {
        "lora__rank": 4,
        "train__steps": 4,
        "checkpoint__every": 2,
        "checkpoint__keep": 5,
    }
    settings |= {"algorithm__kl__coef": 0.1} if kind == "rl" else {"lora__dropout": 0.1}
    whole = run(make(tmp_path, base, "whole", **settings), kind)
    assert "LoRA: 4,096 of" in capsys.readouterr().out
    half = run(make(tmp_path, base, "half", **{**settings, "train__steps": 2}), kind)
    again = run(make(tmp_path, base, "half", **settings, checkpoint__resume=True), kind)
    same_tensors(whole.checkpoint.parent, again.checkpoint.parent)
    assert untimed(whole.run_dir / "metrics.jsonl") == untimed(again.run_dir / "metrics.jsonl")
    assert half.checkpoint.name == "model" and not any(
        "embed" in name for name in tensors(whole.checkpoint.parent)
    )
    with pytest.raises(CheckpointError, match=r"lora\.targets"):
        run(
            make(
                tmp_path,
                base,
                "half",
                **settings,
                lora__targets=["q_proj"],
                checkpoint__resume=True,
            ),
            kind,
        )
    without = {k: v for k, v in settings.items() if not k.startswith("lora")}
    with pytest.raises(CheckpointError, match=r"lora\.rank"):
        run(make(tmp_path, base, "half", **without, checkpoint__resume=True), kind)
    if kind == "rl":
        lines = untimed(whole.run_dir / "metrics.jsonl")
        assert lines[0]["ref_kl"] == pytest.approx(0, abs=1e-6) and lines[2]["ref_kl"] > 1e-4


def test_a_whole_model_beside_the_adapter_when_asked_for(tmp_path: Path, base: Path) -> None:
    (tmp_path / "own.jinja").write_text(f"{CHATML}{{# its own #}}")
    changed = {
        "lora__rank": 2,
        "lora__save_merged": True,
        "model__chat_template": str(tmp_path / "own.jinja"),
    }
    outcome = run(sft_settings(tmp_path, base, train__steps=2, **changed), "sft")
    merged = CausalLM.load(outcome.checkpoint.with_name("model_merged"))
    assert "its own" in str(cast(Any, merged.tokenizer).chat_template)
    start = CausalLM.load(base)
    names = {
        n for n, p in merged.module.named_parameters() if not p.equal(start.module.get_parameter(n))
    }
    assert names and all("proj" in n for n in names)
    continued = sft_settings(
        tmp_path, base, "on", train__steps=1, lora__path=str(outcome.checkpoint), train__lr=1e-9
    )
    torch.testing.assert_close(
        tensors(run(continued, "sft").checkpoint), tensors(outcome.checkpoint), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lora__alpha": 8}, "lora.alpha has no effect without an adapter"),
        ({"lora__targets": ["q_proj"]}, "lora.targets has no effect without an adapter"),
        (
            {"lora__rank": 2, "lora__targets": ["q_prj"]},
            "no linear module 'q_prj'. Did you mean 'q_proj'",
        ),
        ({"lora__rank": 2, "lora__targets": ["lm_head"]}, "no linear module 'lm_head'"),
        ({"lora__rank": 2, "lora__targets": []}, "lora.targets is empty"),
        ({"lora__rank": 0}, "above 0"),
        ({"model__quantize": "nf4"}, "cannot be trained; train an adapter on them: set lora.rank"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    tmp_path: Path, base: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(sft_settings(tmp_path, base, **changed), "sft")
    assert words in str(caught.value)


def test_dropout_is_refused_in_reinforcement_learning(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.dropout = 0\.1: .* sampled with"):
        run(rl_settings(tmp_path, base, lora__rank=2, lora__dropout=0.1))


def test_paths_that_hold_something_else_are_told(tmp_path: Path, base: Path) -> None:
    trained(adapted(base), 1).model.save(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"holds no LoRA adapter"):
        run(sft_settings(tmp_path, base, lora__path=str(base)), "sft")
    with pytest.raises(
        ConfigError, match=r"holds a LoRA adapter and no whole model.*\s.*tunesmith merge"
    ):
        run(sft_settings(tmp_path, tmp_path / "adapter"), "sft")
    with pytest.raises(ConfigError, match=r"lora\.rank has no effect with lora\.path"):
        run(sft_settings(tmp_path, base, lora__path=str(tmp_path / "adapter"), lora__rank=8), "sft")
    with pytest.raises(StorageError, match="exists already"):
        assembly.run_merge(tmp_path / "adapter", base)
    with pytest.raises(ConfigError, match="adapter_config"):
        assembly.run_merge(base, tmp_path / "merged")
    other = save_model(tmp_path / "other", hidden_size=16)
    with pytest.raises(ModelError, match="does not fit"):
        assembly.run_merge(tmp_path / "adapter", tmp_path / "merged", base=str(other))
    with pytest.raises(ModelError, match="CAUSAL_LM"):
        adapters.attach(ScoreModel.load(base), LoraSection(), path=tmp_path / "adapter")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_a_saved_adapter_with_more_than_low_rank_matrices_is_refused(
    tmp_path: Path, base: Path, extra: dict[str, Any], named: str
) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **extra)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(ModelError, match=rf"{named}.*tunesmith merge"):
        adapters.attach(CausalLM.load(base), LoraSection(), path=tmp_path / "adapter")
    assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")


def test_quantising_without_bitsandbytes_is_refused_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tunesmith.plan.rules import checks

    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    config = SFTConfig.model_validate(
        {
            "model": {"path": "m", "quantize": "int8"},
            "data": {"train": "t.jsonl"},
            "lora": {"rank": 4},
        }
    )
    with pytest.raises(
        ConfigError, match=r"needs bitsandbytes, which is not installed: pip install"
    ):
        checks.check(config)


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_an_adapter_on_a_quantised_base(tmp_path: Path, quantize: Any) -> None:
    wide = save_model(tmp_path / "wide", hidden_size=64, intermediate_size=128)
    model = CausalLM.load(wide, quantize=quantize)
    adapters.attach(model, LoraSection(rank=4))
    backend = TorchBackend(model, AdamWSettings(), partial(CausalLM.predict))
    exact = TorchBackend(CausalLM.load(wide), AdamWSettings(), CausalLM.predict)
    trained(backend, 1)
    grads = gradients(backend, [None])
    logprobs(backend)
    for a, b in zip(grads, gradients(backend, [None]), strict=True):
        torch.testing.assert_close(a, b, msg="a pass without gradient changed the gradient")
    trained(backend, 1)
    before = logprobs(backend, reference=True)
    torch.testing.assert_close(before, logprobs(exact), rtol=0, atol=0.1)
    alone = sum(backend.score(whole(samples(), [i]), reference=True) for i in range(3))
    torch.testing.assert_close(torch.from_numpy(alone).float(), before, rtol=0, atol=1e-4)
    assert (logprobs(backend) - before).abs().max() > 0.1
    model.save(tmp_path / "adapter")
    assembly.run_merge(tmp_path / "adapter", tmp_path / "merged")
    merged = TorchBackend(CausalLM.load(tmp_path / "merged"), AdamWSettings(), CausalLM.predict)
    torch.testing.assert_close(logprobs(merged), logprobs(backend), rtol=0, atol=0.2)
