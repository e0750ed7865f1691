"""Layers that carry a state from token to token: each sequence continues from its own, and those of
one prompt from the prompt's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support.families import SPECIAL
from tests.support.tiny import save_model
from tunesmith.errors import ModelError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.experts.routing import Routing
from tunesmith.models.forest import PackedLengths
from tunesmith.models.kernels.attention import AttentionContext
from tunesmith.models.kernels.layers import ModuleRunner, State, StateContext, StatefulLayer
from tunesmith.run.engines.local import pool, scheduler
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.pool import KVLayout, KVPool, StatePart
from tunesmith.run.engines.local.runner import probe
from tunesmith.types import Completion, Sampling

PROMPTS = ([5, 6, 7], [8] * 30, [9, 10, 11, 12, 13])


class Sums:
    """A kind of layer that adds to each token the sum of those up to it: the state is the sum."""

    layer_types = ()

    def supports(self, module: nn.Module) -> bool:  # noqa: ARG002
        return False

    def run(
        self,
        module: Any,  # noqa: ARG002
        x: Tensor,
        lengths: PackedLengths,
        state: State | None,
    ) -> tuple[Tensor, State]:
        before = x.new_zeros(len(lengths), x.shape[1]) if state is None else state[0]
        parts = zip(x.split(list(lengths)), before, strict=True)
        sums = [before + part.cumsum(0) for part, before in parts]
        return x + torch.cat(sums), (torch.stack([total[-1] for total in sums]),)


class WithSums(ModuleRunner):
    """A decoder with such modules in its last layer."""

    modules = 1

    def __call__(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        routing: Routing | None = None,
    ) -> Tensor:
        hidden = super().__call__(token_ids, position_ids, attention, routing)
        assert isinstance(attention, StateContext)
        for _ in range(self.modules):
            hidden = attention.carry(StatefulLayer(1, self.model, Sums()), hidden)
        return hidden


def with_state(folder: Path) -> CausalLM:
    model = CausalLM.load(save_model(folder))
    model.runner = WithSums(model.module.base_model)
    return model


def scores(plain: Any, prompt: list[int], written: list[int]) -> list[float]:
    """Of all tokens in one pass."""
    with torch.inference_mode():
        hidden = plain.base_model(torch.tensor([[*prompt, *written]])).last_hidden_state[0]
        logits = plain.lm_head(hidden + hidden.cumsum(0))[len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(written).unsqueeze(1)).squeeze(1).tolist()


async def all_of_them(engine: LocalEngine) -> list[Completion]:
    samplings = [Sampling(12 + i, ignore_eos=True, seed=i) for i in range(9)]
    return await asyncio.gather(
        *(engine.generate(PROMPTS[i % 3], s) for i, s in enumerate(samplings))
    )


@pytest.mark.parametrize(("tokens", "running"), [(4096, 7), (80, 7), (4096, 1)])
def test_each_sequence_continues_from_its_own_state(
    tokens: int, running: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room, preempted where memory is short, and one at a time; prompts in chunks and
    shared."""
    monkeypatch.setattr(scheduler, "HEADROOM", 1)
    model = with_state(tmp_path)
    states = 2 * running * 32 * 4
    engine = LocalEngine(
        model,
        kv_bytes=tokens * 2 * 2 * 2 * 8 * 4 + states,
        max_running=running,
        max_prefill_tokens=16,
        block_size=8,
    )
    completions = asyncio.run(all_of_them(engine))
    stats = engine.stats()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for i, done in enumerate(completions):
        expected = scores(plain, PROMPTS[i % 3], done.token_ids)
        assert done.logprobs == pytest.approx(expected, abs=1e-4)
    assert (stats.preemptions > 0) == (tokens == 80)


def test_slots_are_part_of_the_budget_and_come_back() -> None:
    layout = KVLayout(
        layers=2,
        kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        states={
            0: [StatePart(torch.Size([2, 3]), torch.float32)],
            2: [
                StatePart(torch.Size([16]), torch.bfloat16),
                StatePart(torch.Size([2]), torch.float32),
            ],
        },
    )
    assert layout.token_bytes == 2 * 2 * 4 * 4
    assert layout.state_bytes == 6 * 4 + 16 * 2 + 2 * 4
    kept = KVPool([layout], 10 * 64 + 3 * 64, block_size=1, slots=3)
    assert kept.blocks == 10
    assert kept.memories[0].nbytes == 13 * 64
    spans = [kept.admit(2) for _ in range(3)]
    assert {span.slot for span in spans} == {0, 1, 2}
    assert not kept.takes(1)
    kept.release(spans[1])
    assert kept.takes(1)
    assert not kept.takes(2)
    assert kept.admit(1).slot == 1
    with pytest.raises(UserError) as refused:
        KVPool([layout], 4 * 64, block_size=1, slots=3)
    assert refused.value.keys == ("system.kv_memory",)


def test_states_take_three_quarters_at_most() -> None:
    state = {0: [StatePart(torch.Size([16]), torch.float32)]}
    layout = KVLayout(1, 1, 2, torch.float32, torch.device("cpu"), states=state)
    kept = KVPool([layout], 10 * 64, block_size=1, slots=100)
    assert (kept.memories[0].states[0][0].shape, kept.blocks) == ((7, 16), 3 * 64 // 16)
    with pytest.raises(UserError) as refused:
        KVPool([layout], 2 * 64, block_size=1, slots=100)
    assert refused.value.keys == ("system.kv_memory",)


def test_a_draft_model_is_refused(tmp_path: Path) -> None:
    """Rejected guesses cannot be taken out of a state."""
    model = with_state(tmp_path)
    with pytest.raises(UserError) as refused:
        LocalEngine(model, kv_bytes=1 << 20, max_running=2, max_prefill_tokens=16, assistant=model)
    assert refused.value.keys == ("system.draft_model",)


def test_two_states_in_a_layer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WithSums, "modules", 2)
    model = with_state(tmp_path)
    with pytest.raises(ModelError) as refused:
        LocalEngine(model, kv_bytes=1 << 20, max_running=2, max_prefill_tokens=16)
    assert refused.value.keys == ("system.engine",)


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "jamba", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("tokens", [4096, 144])
def test_families_with_states(
    family: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution alone, a delta net, a state space in layers of its own and beside attention:
    sampled tokens have the probabilities of a pass over the whole."""
    monkeypatch.setattr(scheduler, "HEADROOM", 1)
    monkeypatch.setattr(pool, "STATE_SHARE", 1)  # the states are larger than keys and values
    path = save_model(tmp_path, family, **SPECIAL[family])
    model = CausalLM.load(path)
    layout, cost = probe(model, compiled=True)
    assert set(layout.states) == {each.layer for each in model.runner.stateful}
    engine = LocalEngine(
        model,
        kv_bytes=tokens * cost.kv_bytes + 14 * layout.state_bytes,
        max_running=7,
        max_prefill_tokens=16,
        block_size=8,
    )
    completions = asyncio.run(all_of_them(engine))
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for i, done in enumerate(completions):
        with torch.inference_mode():
            ids = torch.tensor([[*PROMPTS[i % 3], *done.token_ids]])
            logits = plain(ids, use_cache=False).logits[0, len(PROMPTS[i % 3]) - 1 : -1]
        chosen = torch.tensor(done.token_ids).unsqueeze(1)
        expected = logits.log_softmax(-1).gather(1, chosen).squeeze(1).tolist()
        assert done.logprobs == pytest.approx(expected, abs=1e-4)
    assert (engine.stats().preemptions > 0) == (tokens == 144)
