"""Layers that carry a state from token to token: each sequence continues from its own, and those of
one prompt from the prompt's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support.tiny import save_model
from tunesmith.errors import ModelError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.kernels.attention import AttentionContext
from tunesmith.models.kernels.layers import ModuleRunner, State, StateContext, StatefulLayer
from tunesmith.run.engines.local import scheduler
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.run.engines.local.pool import KVLayout, KVPool
from tunesmith.types import Completion, Sampling

PROMPTS = ([5, 6, 7], [8] * 30, [9, 10, 11, 12, 13])


class Sums:
    """A kind of layer that adds to each token the sum of those up to it: the state is the sum."""

    layer_types = ()

    def supports(self, module: nn.Module) -> bool:  # noqa: ARG002
        return False

    def start(self, module: Any, count: int) -> State:
        return (torch.zeros(count, module.config.hidden_size),)

    def run(
        self,
        module: Any,  # noqa: ARG002
        x: Tensor,
        lengths: Sequence[int],
        state: State,
    ) -> tuple[Tensor, State]:
        parts = zip(x.split(list(lengths)), state[0], strict=True)
        sums = [before + part.cumsum(0) for part, before in parts]
        return x + torch.cat(sums), (torch.stack([total[-1] for total in sums]),)


class WithSums(ModuleRunner):
    """A decoder with such modules in its last layer."""

    modules = 1

    def __call__(
        self, token_ids: Tensor, position_ids: Tensor, attention: AttentionContext
    ) -> Tensor:
        hidden = super().__call__(token_ids, position_ids, attention)
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


@pytest.mark.parametrize(("tokens", "running"), [(4096, 7), (80, 7), (4096, 1)])
def test_each_sequence_continues_from_its_own_state(
    tokens: int, running: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room, preempted where memory is short, and one at a time; prompts in chunks and
    shared."""
    monkeypatch.setattr(scheduler, "HEADROOM", 1)
    model = with_state(tmp_path)
    states = 2 * running * 2 * 16 * 4
    engine = LocalEngine(
        model,
        kv_bytes=tokens * 2 * 2 * 2 * 8 * 4 + states,
        max_running=running,
        max_prefill_tokens=16,
        block_size=8,
    )

    async def all_of_them() -> list[Completion]:
        samplings = [Sampling(12 + i, ignore_eos=True, seed=i) for i in range(9)]
        return await asyncio.gather(
            *(engine.generate(PROMPTS[i % 3], s) for i, s in enumerate(samplings))
        )

    completions = asyncio.run(all_of_them())
    stats = engine.stats()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for i, done in enumerate(completions):
        expected = scores(plain, PROMPTS[i % 3], done.token_ids)
        assert done.logprobs == pytest.approx(expected, abs=1e-4)
    assert (stats.preemptions > 0) == (tokens == 80)


def test_slots_are_part_of_the_budget_and_come_back() -> None:
    layout = KVLayout(
        layers=2, kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"), state=8
    )
    assert layout.token_bytes == 2 * 2 * 4 * 4
    assert layout.state_bytes == 2 * 8 * 4
    pool = KVPool([layout], 10 * 64 + 3 * 64, block_size=1, slots=3)
    assert pool.blocks == 10
    assert pool.memories[0].nbytes == 13 * 64
    spans = [pool.admit(2) for _ in range(3)]
    assert {span.slot for span in spans} == {0, 1, 2}
    assert not pool.takes(1)
    pool.release(spans[1])
    assert pool.takes(1)
    assert not pool.takes(2)
    assert pool.admit(1).slot == 1
    with pytest.raises(UserError) as refused:
        KVPool([layout], 4 * 64, block_size=1, slots=3)
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
