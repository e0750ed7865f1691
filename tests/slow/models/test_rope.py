"""Every rotary embedding of transformers, also those whose frequencies depend on a sequence's
length."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support import tiny
from tests.support.families import SPECIAL, assert_same_gradients, gradients
from tests.support.training import forest_of
from tunesmith.errors import UserError
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.layers import ModuleRunner
from tunesmith.models.rope import LengthRule, RotaryByLength
from tunesmith.models.score_model import ScoreModel, whole_sequence
from tunesmith.run.engines.local import speculation
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Completion, Sample, Sampling

ORIGINAL = 16
"""Tokens up to which the tiny models here were "trained"; longer sequences are rotated
otherwise."""
FREQUENCIES = 4


def long(count: int = FREQUENCIES, theta: float = 100.0) -> dict[str, Any]:
    """The long factors are far from the short ones, so that a mistake shows."""
    factors = {"short_factor": [1.0] * count, "long_factor": [3.0 + 2 * i for i in range(count)]}
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        **factors,
    }


ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": long(),
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPE.items()},
    **{
        f"phi3-{name}": ("phi3", {"rope_parameters": ROPE[name]})
        for name in ("default", "longrope")
    },
    "phi3-partial": ("phi3", {"rope_parameters": {**long(2), "partial_rotary_factor": 0.5}}),
    # Neighbouring numbers are turned together, and half of them, in these.
    "cohere-dynamic": ("cohere", {"rope_parameters": ROPE["dynamic"]}),
    "glm-longrope": ("glm", {"rope_parameters": {**long(2), "partial_rotary_factor": 0.5}}),
    "gpt_neox-dynamic": (
        "gpt_neox",
        {"rope_parameters": {**ROPE["dynamic"], "partial_rotary_factor": 0.5}},
    ),
    # Frequencies of its own up to the context, those of "dynamic" behind it.
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {"rope_parameters": {**ROPE["dynamic"], "alpha": 50.0}},
    ),
    # Local and global layers have tables of their own.
    "gemma3_text": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": ROPE["dynamic"], "full_attention": long()}},
    ),
    "gemma3_text-linear": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": ROPE["default"],
                "full_attention": ROPE["linear"],
            }
        },
    ),
}


def config_of(model_type: str, settings: dict[str, Any], context: int = ORIGINAL) -> Any:
    own = (
        {"original_max_position_embeddings": ORIGINAL} if model_type == "phi3" else {}
    )  # over that of the rope
    own |= {**SPECIAL.get(model_type, {}), **copy.deepcopy(settings)}
    return AutoConfig.for_model(
        model_type, **{**tiny.SMALL, "max_position_embeddings": context, **own}
    )


def sharp(config: Any, auto: Any = AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    module = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.15) if parameter.dim() > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.1
            )
    return module


def samples() -> list[Sample]:
    """Prompts whose completions end before, at and behind the switch; nested ones; and some that go
    on unlearned."""
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(5, 300) for _ in range(count)]

    made: list[Sample] = []
    for prompt_length, lengths in ((9, (4, 7, 8, 11, 30)), (5, (3, 8)), (20, (2, 9)), (1, (7,))):
        prompt = draw(prompt_length)
        made.extend(Sample(prompt + draw(n), [False] * prompt_length + [True] * n) for n in lengths)
        longer = prompt + draw(3)
        made.append(Sample(longer + draw(4), [False] * len(longer) + [True] * 4))
    made.append(Sample(made[0].token_ids + draw(9), made[0].loss_mask + [False] * 9))
    return made


def one_at_a_time(module: Any, batch: Sequence[Sample]) -> Tensor:
    """With a new rotary embedding for each: in ``dynamic`` one keeps the frequencies of the longest
    sequence so far."""
    scored: list[Tensor] = []
    new = copy.deepcopy(module.base_model.rotary_emb)
    for sample in batch:
        module.base_model.rotary_emb = copy.deepcopy(new)
        tokens = torch.tensor(sample.token_ids)
        logprobs = module(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
        scored.append(chosen[torch.tensor(sample.loss_mask[1:])])
    return torch.cat(scored)


def test_all_rotary_embeddings_of_transformers_are_tried() -> None:
    assert set(ROPE) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("case", CASES)
def test_a_forest_equals_one_sequence_at_a_time(case: str) -> None:
    """Whether or not samples share their prompts."""
    plain = sharp(config_of(*CASES[case]))
    batch = samples()
    want = one_at_a_time(plain, batch)
    model = CausalLM(copy.deepcopy(plain), tiny.tokenizer())
    apart = [f"'{kind}'" in str(CASES[case]) for kind in ("longrope", "dynamic")]
    assert (model.lengths or LengthRule()) == LengthRule(
        *((ORIGINAL,) if found else () for found in apart)
    )
    want_gradients = gradients(CausalLM(plain, tiny.tokenizer()), want)
    model.module.set_attn_implementation(ATTENTION_NAME)
    runners = (model.runner, ModuleRunner(model.module.base_model))
    for share, runner in product((True, False), runners):
        model.runner = runner
        got = model.predict(forest_of(batch, share=share)).logprobs
        assert got is not None
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
        assert_same_gradients(gradients(model, got), want_gradients, 1e-4)


def test_a_sequence_is_scored_the_same_whatever_it_is_packed_with() -> None:
    model = CausalLM(sharp(config_of("phi3", {"rope_parameters": long()})), tiny.tokenizer())
    batch = samples()
    model.module.set_attn_implementation(ATTENTION_NAME)
    whole = forest_of(batch)
    together = model.predict(whole).logprobs
    assert together is not None
    for split in ([3], [0, 3, 4], list(range(7))):
        got = model.predict(forest_of(batch, split)).logprobs
        rows = torch.cat([(whole.sample == i).nonzero().squeeze(1) for i in split])
        torch.testing.assert_close(got, together[rows], rtol=0, atol=1e-5)


def test_only_prompts_on_both_sides_of_the_switch_stand_twice() -> None:
    model = CausalLM(sharp(config_of("phi3", {"rope_parameters": long()})), tiny.tokenizer())
    batch = samples()
    model.module.set_attn_implementation(ATTENTION_NAME)
    seen: list[int] = []
    model.module.base_model.embed_tokens.register_forward_hook(
        lambda _m, inputs, _o: seen.append(inputs[0].numel())
    )
    short = forest_of(batch, [0, 1, 6])
    whole = forest_of(batch[:5])
    model.predict(short)
    model.predict(whole)
    assert seen == [short.num_tokens, whole.num_tokens + 9]


def test_the_rule() -> None:
    config = config_of(
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": ROPE["dynamic"], "full_attention": long()}},
        64,
    )
    rule = LengthRule.of(config)
    assert rule == LengthRule((ORIGINAL,), (64,))
    assert [rule.alike(n) for n in (1, 16, 17, 64, 65, 70)] == [1, 1, 17, 17, 65, 70]
    assert LengthRule.of(config_of("llama", {})) is None
    assert LengthRule.of(AutoConfig.for_model("gpt2")) is None


def test_a_score_model_reads_its_sequences_at_their_own_length() -> None:
    """At 16 tokens the token that stands in for a target must not count."""
    config = config_of("phi3", {"rope_parameters": long(), "num_labels": 1}, 512)
    plain = sharp(config, AutoModelForSequenceClassification)
    rng = random.Random(0)
    sequences = [[rng.randrange(5, 300) for _ in range(n)] for n in (15, 16, 17, 40)]
    with torch.inference_mode():
        want = [
            float(plain(input_ids=torch.tensor([ids]), use_cache=False).logits) for ids in sequences
        ]
        model = ScoreModel(plain, tiny.tokenizer())
        plain.set_attn_implementation(ATTENTION_NAME)
        got = model.scores(forest_of([whole_sequence(ids) for ids in sequences]))
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_copies_and_saved_models_keep_their_rotary_embedding(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "m", "phi3", rope_parameters=long())
    model = CausalLM.load(tmp_path / "m")
    assert isinstance(model.module.base_model.rotary_emb, RotaryByLength)
    twice = CausalLM(copy.deepcopy(model.module), model.tokenizer)
    assert twice.lengths == model.lengths and isinstance(
        twice.module.base_model.rotary_emb, RotaryByLength
    )
    assert not isinstance(twice.module.base_model.rotary_emb.inner, RotaryByLength)
    model.save(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert set(plain.state_dict()) == set(model.module.state_dict())


def engine_of(model: CausalLM, tokens: int = 4096, **options: Any) -> LocalEngine:
    slot = 5 * 2 * model.module.config.num_key_value_heads * 8 * 4
    return LocalEngine(
        model, kv_bytes=tokens * slot, **{"max_running": 16, "max_prefill_tokens": 12, **options}
    )


def write(
    engine: LocalEngine, requests: Sequence[tuple[Sequence[int], Sampling]]
) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(prompt, sampling) for prompt, sampling in requests)
        )

    return asyncio.run(all_of_them())


def requests() -> list[tuple[list[int], Sampling]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 260) for _ in range(n)] for n in (3, 9, 15, 16, 17, 40)]
    return [
        (prompt, Sampling(n, temperature=t, seed=i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
        for n, t in ((4, 0.8), (30, 0.0), (25, 0.8))
    ]


def as_it_was_written(
    plain: Any, prompt: Sequence[int], written: Sequence[int], temperature: float
) -> list[float]:
    """Each token's log-probability in a pass over what stood before it, and nothing else."""
    found: list[float] = []
    for n, token in enumerate(written):
        logits = (
            plain(torch.tensor([[*prompt, *written[:n]]]), use_cache=False).logits[0, -1]
            / temperature
        )
        found.append(float(logits.log_softmax(-1)[token]))
    return found


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Any]:
    """A phi3 that switches at 16 tokens, and the same in plain Hugging Face."""
    path = tmp_path_factory.mktemp("phi3")
    sharp(config_of("phi3", {"rope_parameters": long()}, 512)).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return CausalLM.load(path), AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def plainly(
    phi: tuple[CausalLM, Any],
) -> tuple[Callable[..., list[float]], Callable[..., list[int]]]:
    """What Hugging Face says of tokens, and what it writes, computed once for all cases that ask
    the same."""
    _, plain = phi

    def written(prompt: tuple[int, ...], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        # With its cache, transformers 5.19 reads a single token at the switch and nothing before
        # it.
        options = {
            "do_sample": False,
            "max_new_tokens": count,
            "eos_token_id": None,
            "use_cache": False,
        }
        return plain.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, len(prompt) :
        ].tolist()

    return cache(partial(as_it_was_written, plain)), cache(written)


@pytest.mark.parametrize("speculative", ["off", "draft"])
@pytest.mark.parametrize("tokens", [4096, 208])
def test_generation_past_the_switch_is_hugging_faces(
    phi: tuple[CausalLM, Any],
    plainly: Any,
    speculative: str,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside longer and shorter ones, sharing prompts, in little memory, and several tokens at a
    time."""
    model = phi[0]
    (likelihoods, written) = plainly
    options: dict[str, Any] = {}
    monkeypatch.setattr(speculation, "MOST_ROWS_ON_CPU", speculation.MOST_ROWS)
    if speculative != "off":
        draft = CausalLM(copy.deepcopy(model.module), model.tokenizer)
        options = {"assistant": draft, "speculative_tokens": 3}
        tokens = 2 * tokens
    engine = engine_of(model, tokens, **options)
    asked = requests()
    with torch.inference_mode():
        for (prompt, sampling), done in zip(asked, write(engine, asked), strict=True):
            assert len(done.token_ids) == sampling.max_new_tokens
            want = likelihoods(tuple(prompt), tuple(done.token_ids), sampling.temperature or 1.0)
            assert done.logprobs == pytest.approx(want, abs=2e-4)
            if sampling.temperature == 0:
                assert done.token_ids == written(tuple(prompt), sampling.max_new_tokens)
    if speculative != "off":
        assert engine.stats().accepted_tokens > 0


def test_a_draft_model_that_switches_elsewhere_is_refused(phi: tuple[CausalLM, Any]) -> None:
    model, _ = phi
    draft = CausalLM(copy.deepcopy(model.module), model.tokenizer)
    draft.lengths = LengthRule((32,))
    with pytest.raises(UserError, match="draft_model"):
        engine_of(model, assistant=draft)


@pytest.mark.parametrize("damage", [5, "yarn", [1], {"rope_type": 3}, {"full_attention": 4}])
def test_damaged_parameters_are_no_rule(damage: Any) -> None:
    """``transformers`` refuses such a model when it is built."""
    assert (
        LengthRule.of(SimpleNamespace(rope_parameters=damage, max_position_embeddings=64)) is None
    )
