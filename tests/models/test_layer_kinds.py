"""A family and a kind of layer with a state, added from outside of the package; here one that the
package has too."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from tests.support.families import (
    assert_same_gradients,
    build,
    gradients,
    logprobs,
    module_of,
    one_at_a_time,
    samples,
)
from tests.support.training import forest_of
from tunesmith.config import doors
from tunesmith.config.doors import Door
from tunesmith.errors import ModelError
from tunesmith.models.attention import ATTENTION_NAME
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Segment, levels
from tunesmith.models.kernels.layers import KINDS
from tunesmith.plan.facts import families
from tunesmith.types import Sample

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another package's entry points add."""
    place = "tests.support.short_convolutions"
    points = [
        EntryPoint("lfm2", f"{place}:FAMILIES", "tunesmith.families"),
        EntryPoint("conv", f"{place}:CONVOLUTIONS", "tunesmith.layer_kinds"),
    ]
    monkeypatch.setattr(
        doors, "entry_points", lambda group: [p for p in points if p.group == group]
    )
    for door in (families.DOOR, KINDS):
        monkeypatch.setitem(vars(door), "rooms", Door[object](door.name).rooms)


def forest_model() -> CausalLM:
    model = build("lfm2", **SIZES)
    model.module.set_attn_implementation(ATTENTION_NAME)
    assert [each.layer for each in model.runner.stateful] == [0, 2]
    return model


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_forest_equals_one_sequence_at_a_time(checkpointing: bool) -> None:
    """Completions continue from the state at their prompt's end, and gradients return to it."""
    plain = module_of("lfm2", **SIZES)
    want = one_at_a_time(plain, samples(), 1.0)
    model = forest_model()
    if checkpointing:
        model.module.gradient_checkpointing_enable({"use_reentrant": False})
        model.module.train()
    forest = forest_of(samples())
    assert len(levels(forest.segments, torch.device("cpu"))) == 2
    got, _ = logprobs(model, forest)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, got), gradients(plain, want), 1e-4)


@pytest.mark.usefixtures("added")
def test_neighbours_see_nothing_of_each_other() -> None:
    model = forest_model()
    batch = samples()
    others = [Sample([7] * len(s.token_ids), s.loss_mask) for s in batch[3:]]
    with torch.no_grad():
        before, after = (
            logprobs(model, forest_of(batch[:3] + rest))[0] for rest in (batch[3:], others)
        )
    own = sum(sum(sample.loss_mask) for sample in batch[:3])
    assert torch.equal(before[:own], after[:own])
    assert not torch.equal(before[own:], after[own:])


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("missing", [families.DOOR, KINDS])
def test_without_one_of_the_additions_the_family_is_refused(
    missing: Door[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(missing), "rooms", ())
    with pytest.raises(ModelError, match="'lfm2'"):
        build("lfm2", **SIZES)


def test_levels_by_hand() -> None:
    table = [(0, 3, -1), (3, 2, 0), (5, 1, 1), (6, 4, 0), (10, 2, -1), (12, 1, 4)]
    found = levels([Segment(*row) for row in table], torch.device("cpu"))
    assert [(g.rows.tolist(), g.lengths, g.parents.tolist()) for g in found] == [
        ([0, 1, 2, 10, 11], (3, 2), []),
        ([3, 4, 6, 7, 8, 9, 12], (2, 4, 1), [0, 0, 1]),
        ([5], (1,), [0]),
    ]
