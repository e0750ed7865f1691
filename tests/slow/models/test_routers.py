"""The routers of every family are found, seen and made to choose."""

from __future__ import annotations

import pytest
import torch

from tests.support.families import assert_same_gradients, build, gradients, samples, settings_of
from tests.support.training import forest_of
from tunesmith.models.attention import ATTENTION_NAME, ForestAttention
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.experts.routing import Routing
from tunesmith.models.forest import Forest
from tunesmith.models.parallel.activations import compute_again
from tunesmith.plan.facts.experts import expert_widths
from tunesmith.plan.facts.families import families
from tunesmith.plan.facts.model import decoder_config

MIXTURES = [
    name
    for name, each in families().items()
    if not each.inner and expert_widths(decoder_config(settings_of(name)))
]


def hidden(model: CausalLM, forest: Forest, routing: Routing) -> torch.Tensor:
    attention = ForestAttention(forest)
    return model.hidden(forest.token_ids, forest.position_ids, attention, routing=routing)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_are_seen_and_forced(model_type: str) -> None:
    model = build(model_type)
    model.module.set_attn_implementation(ATTENTION_NAME)
    forest = forest_of(samples())
    free = Routing()
    want = hidden(model, forest, free)
    own = free.experts
    routers = model.runner.routers
    assert own.shape == (forest.num_tokens, len(routers), 2)
    assert all(router.experts == 4 for router in routers)
    # Each token's own experts change nothing.
    ours = gradients(model, want.sum(1))
    again = hidden(model, forest, Routing(own))
    torch.testing.assert_close(again, want, rtol=0, atol=1e-6)
    assert_same_gradients(gradients(model, again.sum(1)), ours, 1e-5)
    # Others are taken, and computed again in the backward pass, but not where none is wanted.
    others = torch.stack([(own[..., 0] + 1) % 4, (own[..., 0] + 2) % 4], -1)
    others[0] = -1
    compute_again(model.module, 1.0)
    model.module.train()
    forced = Routing(others)
    changed = hidden(model, forest, forced)
    changed.sum().backward()
    assert torch.equal(forced.experts[1:].sort().values, others[1:].sort().values)
    assert torch.equal(forced.experts[0, 0], own[0, 0])
    assert not torch.allclose(changed, want, atol=1e-3)
