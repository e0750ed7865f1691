"""Images in a forest: what transformers computes one sequence at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.families import logprobs
from tests.support.training import forest_of
from tests.support.vision import (
    load_vision_model,
    picture,
    samples_with_images,
    save_vision_model,
)
from tunesmith.errors import DataError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.vision.kept import KeptImages
from tunesmith.models.vision.rows import FIRST_ROW, ImageRows, digest_of
from tunesmith.run.engines.local.engine import LocalEngine
from tunesmith.types import Completion, Sample, Sampling


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_another_image_changes_its_own_sequences_alone(tmp_path: Path, model_type: str) -> None:
    path = save_vision_model(tmp_path / "m", model_type)
    model, vocabulary = load_vision_model(path, [picture(0), picture(1), picture(2)])
    a, b, c = ([*image.token_ids] for image in vocabulary.rows.all)
    assert len(a) == len(b) == len(c)

    def scores(first: list[int]) -> torch.Tensor:
        ids = [[7, 8, *first, 9, 30, 31], [7, 8, *b, 9, 30, 31]]
        batch = [Sample(each, [False] * (len(each) - 2) + [True, True]) for each in ids]
        forest = forest_of(batch)
        assert next(s.length for s in forest.segments) == 2  # up to the images, which differ
        return logprobs(model, forest)[0].detach()

    one, other = scores(a), scores(c)
    assert torch.equal(one[2:], other[2:])
    assert (one[:2] - other[:2]).abs().max() > 1e-3


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3"])
def test_in_16_bits_a_frozen_tower_sees_what_the_model_s_own_does(
    tmp_path: Path, model_type: str
) -> None:
    """Rotary frequencies in 16 bits would turn the patches of a large image by wrong angles."""
    path = save_vision_model(tmp_path / "m", model_type)
    seen: list[torch.Tensor] = []
    for tower in ("frozen", "trained"):
        model, vocabulary = load_vision_model(
            path, [picture(0, 448, 448)], tower, dtype=torch.bfloat16
        )
        (image,) = vocabulary.rows.all
        assert model.vision is not None
        with torch.no_grad():
            seen.append(model.vision.features(image).embedded)
    assert seen[0].dtype == torch.bfloat16 and torch.equal(*seen)


def test_positions_of_images_by_hand() -> None:
    """Two segments: a text of two with an image of 2 × 3, then one more and an image of 1 × 2."""
    rows = ImageRows()
    wide = rows.add("a", b"a", b"a", (2, 3))
    small = rows.add("b", b"b", b"b", (1, 2))
    ids = np.array([5, 6, *wide.token_ids, 7, *small.token_ids, 8, 9, 9])
    positions = np.array([*range(8), *range(8, 12), 8, 9])
    segments = [(0, 8, -1), (8, 4, 0), (12, 2, 0)]
    want = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 5, 6],
    ]
    assert rows.positions(ids, positions, segments).tolist() == want
    assert rows.at(FIRST_ROW + 6) is small
    with pytest.raises(DataError):
        rows.at(FIRST_ROW + 8)


def test_features_are_computed_once_for_an_image(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path / "m")
    model, vocabulary = load_vision_model(path, [picture(0), picture(1), picture(0)])
    assert len(vocabulary.rows) == 2  # the same bytes are the same image
    assert model.vision is not None
    seen: list[tuple[int, ...]] = []
    model.vision.tower.register_forward_pre_hook(
        lambda _, args: seen.append(tuple(args[0].shape))  # pyright: ignore
    )
    batch = samples_with_images(vocabulary)
    first, _ = logprobs(model, forest_of(batch))
    again, _ = logprobs(model, forest_of(batch))
    assert len(seen) == 2
    assert torch.equal(first, again)
    reference = CausalLM.load(path, tokenizer=model.tokenizer)
    assert reference.vision is model.vision
    names = {name for name, _ in model.module.named_parameters()}
    assert not any("visual" in name for name in names)  # frozen, and never sent to engines


def test_rows_of_images_that_are_not_there_are_refused(tmp_path: Path) -> None:
    model, vocabulary = load_vision_model(save_vision_model(tmp_path / "m"), [picture(0)])
    engine = LocalEngine(model, kv_bytes=1 << 20, max_running=2, max_prefill_tokens=16)
    (image,) = vocabulary.rows.all

    async def ask(token: int, penalty: float = 1.0) -> Completion:
        return await engine.generate([7, token], Sampling(2, seed=0, repetition_penalty=penalty))

    for token in (image.token_ids[-1] + 1, 321):
        with pytest.raises(UserError):
            asyncio.run(ask(token))
    asyncio.run(ask(image.first, 1.2))
    asyncio.run(engine.close())


def test_the_latest_images_of_clients_are_kept_up_to_a_size(tmp_path: Path) -> None:
    _, vocabulary = load_vision_model(save_vision_model(tmp_path / "m"), [])
    sent = [picture(number) for number in range(4)]
    kept = tmp_path / "kept"
    vocabulary.kept = KeptImages(kept, most=sum(map(len, sent[:3])))
    first, second, third = (vocabulary.add("an image", data) for data in sent[:3])
    assert vocabulary.add("again", sent[0]) is first
    vocabulary.add("an image", sent[3])
    assert {file.name for file in kept.iterdir()} == {
        digest_of(sent[number]).hex() for number in (0, 2, 3)
    }
    assert first.read() == sent[0] and third.read() == sent[2]
    with pytest.raises(DataError, match="cannot read the image"):
        second.read()
    assert vocabulary.add("again", sent[1]) is second  # with the same ids
    assert second.read() == sent[1]
    assert len(list(kept.iterdir())) == 3
    again = KeptImages(kept, most=1)  # of a run that continues
    again.put(digest_of(b"another"), b"another")
    assert len(list(kept.iterdir())) == 1


def test_an_image_that_was_written_in_part_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"a picture"
    digest = digest_of(data)
    write = Path.write_bytes

    def killed(path: Path, data: bytes) -> None:
        write(path, data[:3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            KeptImages(tmp_path).put(digest, data)
    assert KeptImages(tmp_path).put(digest, data).read_bytes() == data
