"""Whole runs on data with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.long import again
from tests.support.rank_runs import same
from tests.support.tiny_runs import rl_settings, sft_settings, write_lines
from tests.support.vision import save_vision_model, weights_of
from tunesmith.plan.facts.model_files import is_of_tower
from tunesmith.run import assembly


@pytest.mark.parametrize("changed", [{}, {"lora__rank": 4}], ids=["whole", "lora"])
def test_learns_by_example_by_preference_and_by_reward(
    picture_folder: Path, changed: dict[str, Any]
) -> None:
    model = save_vision_model(picture_folder / "model")
    shared: dict[str, Any] = {"data__chat": None, **changed}
    settings = sft_settings(
        picture_folder, model, **shared, data__train=str(picture_folder / "sft.jsonl")
    )
    losses = [line["loss"] for line in assembly.run_sft(None, settings).metrics]
    assert losses[-1] < losses[0]
    pairs = sft_settings(
        picture_folder,
        model,
        "dpo",
        **shared,
        data__train=str(picture_folder / "pairs.jsonl"),
        train__lr=1e-3,
    )
    assert assembly.run_dpo(None, pairs).metrics[-1]["accuracy"] == 1.0
    judged = sft_settings(
        picture_folder,
        model,
        "kto",
        **shared,
        data__train=str(picture_folder / "judged.jsonl"),
        train__lr=1e-3,
    )
    assert assembly.run_kto(None, judged).metrics[-1]["grad_norm"] > 0
    again: dict[str, Any] = {"algorithm__kl__coef": 0.1, "system__gradient_checkpointing": True}
    outcome = assembly.run_rl(None, rl_settings(picture_folder, model, **shared, **again))
    assert all(line["ratio"] == pytest.approx(1, abs=1e-4) for line in outcome.metrics)
    assert all(line["grad_norm"] > 0 for line in outcome.metrics)
    if changed:
        return
    before = weights_of(model)
    after = weights_of(outcome.checkpoint)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))
    AutoModelForImageTextToText.from_pretrained(outcome.checkpoint)


RANKS = {"system__trainer_ranks": 2, "system__zero_stage": 3}


@pytest.mark.parametrize(
    "places",
    [
        {**RANKS, "system__engines": 2},
        again({"system__engine_process": True}),
        again({**RANKS, "system__cluster": "ray"}),
    ],
    ids=["ranks", "engine", "ray"],
)
def test_what_other_processes_compute_with_images_is_the_same(
    picture_folder: Path, places: dict[str, Any]
) -> None:
    """A reference, ranks that shard the model, and engines with their own copy."""
    model = save_vision_model(picture_folder / "model")
    shared: dict[str, Any] = {"data__chat": None, "train__lr": 1e-3, "algorithm__kl__coef": 0.1}
    same(
        assembly.run_rl(None, rl_settings(picture_folder, model, "one", **shared)),
        assembly.run_rl(None, rl_settings(picture_folder, model, "two", **shared, **places)),
    )


AGENT = """
from base64 import b64encode
from pathlib import Path

async def agent(client, name, **columns):
    data = b64encode((Path(__file__).parent / name).read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
    said = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
    reply = (await client.chat.completions.create(messages=said)).choices[0].message.content
    said += [{"role": "assistant", "content": reply}, {"role": "user", "content": [image]}]
    reply = (await client.chat.completions.create(messages=said)).choices[0].message.content
    return float(sum(c < "N" for c in reply))
"""


@pytest.mark.parametrize("places", [{}, again({**RANKS, "system__engines": 2})])
def test_an_agents_client_trains_a_model_that_sees(
    picture_folder: Path, places: dict[str, Any]
) -> None:
    """Its images come while the run goes on; trainer and engine know them."""
    (picture_folder / "agent.py").write_text(AGENT)
    lines = [{"prompt": "Go.", "name": f"{number}.png"} for number in range(6)]
    write_lines(picture_folder / "train.jsonl", lines)
    model = save_vision_model(picture_folder / "model")
    settings: dict[str, Any] = {
        "data__chat": None,
        "environment__path": str(picture_folder / "agent.py:agent"),
        "reward__functions": None,
        "train__lr": 1e-3,
        **places,
    }
    outcome = assembly.run_rl(None, rl_settings(picture_folder, model, "agent", **settings))
    assert all(line["ratio"] == pytest.approx(1, abs=1e-4) for line in outcome.metrics)
    assert all(line["grad_norm"] > 0 for line in outcome.metrics)
    assert len(list((picture_folder / "agent" / "images").iterdir())) == 6


def test_ranks_learn_images_by_example_as_one(picture_folder: Path) -> None:
    model = save_vision_model(picture_folder / "model", "qwen3_5")
    settings = {
        "data__chat": None,
        "data__train": str(picture_folder / "sft.jsonl"),
        "train__lr": 1e-3,
    }
    one = assembly.run_sft(None, sft_settings(picture_folder, model, "one", **settings))
    same(
        one,
        assembly.run_sft(None, sft_settings(picture_folder, model, "two", **settings, **RANKS)),
    )


def test_a_continued_run_is_bitwise_the_same(picture_folder: Path) -> None:
    model = save_vision_model(picture_folder / "model", "qwen2_5_vl")
    shared: dict[str, Any] = {"data__chat": None, "checkpoint__every": 2, "train__steps": 4}
    whole = assembly.run_rl(None, rl_settings(picture_folder, model, "whole", **shared)).checkpoint
    assembly.run_rl(
        None, rl_settings(picture_folder, model, "half", **{**shared, "train__steps": 2})
    )
    half = assembly.run_rl(
        None, rl_settings(picture_folder, model, "half", **shared, checkpoint__resume="auto")
    ).checkpoint
    one = weights_of(whole)
    other = weights_of(half)
    assert all(torch.equal(one[name], other[name]) for name in one)
