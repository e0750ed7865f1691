"""Routers that choose among groups of experts."""

from __future__ import annotations

import torch

from tests.support.families import build, samples
from tests.support.training import forest_of
from tunesmith.models.attention import ATTENTION_NAME, ForestAttention
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.experts.routing import Routing
from tunesmith.models.forest import Forest


def hidden(model: CausalLM, forest: Forest, routing: Routing) -> torch.Tensor:
    attention = ForestAttention(forest)
    return model.hidden(forest.token_ids, forest.position_ids, attention, routing=routing)


def test_experts_in_groups_that_a_router_would_not_choose_keep_their_scores() -> None:
    model = build("deepseek_v2", n_group=2, topk_group=1, topk_method="group_limited_greedy")
    model.module.set_attn_implementation(ATTENTION_NAME)
    forest = forest_of(samples())
    free = Routing(scored=True)
    hidden(model, forest, free)
    other_group = (free.experts + 2) % 4
    weights: list[torch.Tensor] = []
    router = model.runner.routers[0]
    router.module.register_forward_hook(lambda _module, _args, out: weights.append(out[1]))
    hidden(model, forest, Routing(other_group))
    scores = free.scores[0].logits.softmax(-1).gather(1, other_group[:, 0].long())
    scaling = model.module.config.routed_scaling_factor
    torch.testing.assert_close(weights[0], scores * scaling)
