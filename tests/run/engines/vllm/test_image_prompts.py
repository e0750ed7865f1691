"""What vLLM gets of prompts with images, and what is refused of what it makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.vision import FAMILIES, load_vision_model, picture, save_vision_model
from tunesmith.errors import EngineError
from tunesmith.run.engines.vllm.images import ImagePrompts


def test_a_prompt_has_a_placeholder_for_each_image(tmp_path: Path) -> None:
    _, vocabulary = load_vision_model(save_vision_model(tmp_path / "m"), [picture(0), picture(1)])
    a, b = vocabulary.rows.all
    prompts = ImagePrompts(vocabulary)
    ids = [7, *a.token_ids, *a.token_ids, 8, *b.token_ids]
    pad = vocabulary.placeholder
    prompt = prompts.prompt(ids)
    assert prompt["prompt_token_ids"] == [7, pad, pad, 8, pad]
    names = [image.digest.hex() for image in (a, a, b)]
    assert prompt["multi_modal_uuids"] == {"image": names}
    seen: Any = prompt["multi_modal_data"]
    assert [each.size for each in seen["image"]] == [
        (28 * image.width, 28 * image.height) for image in (a, a, b)
    ]
    assert prompts.prompt([7, 8]) == {"prompt_token_ids": [7, 8]}
    written = [pad if token > pad else token for token in ids]
    prompts.check(ids, written)
    with pytest.raises(EngineError, match="vLLM makes"):
        prompts.check(ids, written[1:])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_scaled_image_gives_the_tower_the_same_pixels(tmp_path: Path, model_type: str) -> None:
    sent = [picture(0, 150, 90)]
    _, vocabulary = load_vision_model(save_vision_model(tmp_path / "m", model_type), sent)
    (image,) = vocabulary.rows.all
    scaled = vocabulary.scaled(image)
    assert isinstance(scaled, Image.Image)
    pairs = zip(vocabulary.pixels.of(scaled), vocabulary.arguments(image), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
