"""Images in data lines: every way to name them, their places, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import random
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tests.support import tiny
from tests.support.vision import CHAT, SQUARE_CHAT, SQUARE_TOKENS, TOKENS, picture
from tunesmith.config.schema import DataSection
from tunesmith.errors import DataError, ModelError
from tunesmith.learn.data.preference import load_pairs, load_steps
from tunesmith.learn.data.prepare import load_samples, load_tasks
from tunesmith.models.vision import processing
from tunesmith.models.vision.processing import ImageVocabulary, Squares, attach_vocabulary
from tunesmith.models.vision.rows import FIRST_ROW

PART = {"type": "image"}
TEXT = {"type": "text", "text": "what?"}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    made = tiny.tokenizer(CHAT)
    made.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (tmp_path / "a.png").write_bytes(picture(0, 56, 84))
    (tmp_path / "b.png").write_bytes(picture(1, 56, 28))
    pad = made.convert_tokens_to_ids(TOKENS[-1])
    made.image_vocabulary = ImageVocabulary(str(tmp_path), pad)  # type: ignore[attr-defined]
    return made


def section(folder: Path, *lines: dict[str, Any], **settings: Any) -> DataSection:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return DataSection(train=str(path), **settings)


def ids_of(folder: Path, tokenizer: Any, line: dict[str, Any], **settings: Any) -> list[int]:
    data = section(folder, line, **settings)
    (task,) = load_tasks(data, data.train, tokenizer).items
    return list(task.prompt_ids)


def asked(*content: Any, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": list(content)}], **columns}


def test_every_way_to_name_an_image_gives_the_same_tokens(tmp_path: Path, tokenizer: Any) -> None:
    data = picture(0, 56, 84)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    ways = [
        asked(PART, TEXT, images=["a.png"]),
        asked(PART, TEXT, image={"bytes": None, "path": "a.png"}),
        asked({"type": "image", "image": "a.png"}, TEXT),
        asked({"type": "image", "path": str(tmp_path / "a.png")}, TEXT),
        asked({"type": "image_url", "image_url": {"url": url}}, TEXT),
        asked(TEXT, images=[url]),
        {"prompt": "what?", "images": [f"file://{tmp_path}/a.png"]},
    ]
    found = [ids_of(tmp_path, tokenizer, way) for way in ways]
    assert all(ids == found[0] for ids in found)
    rows = [token for token in found[0] if token >= FIRST_ROW]
    assert rows == [FIRST_ROW + at for at in range(2 * 3)]
    start, end, _ = tokenizer.convert_tokens_to_ids(list(TOKENS))
    at = found[0].index(FIRST_ROW)
    assert (found[0][at - 1], found[0][at + 6]) == (start, end)


@pytest.mark.parametrize("marks", [False, True])
def test_gemmas_images_are_squares_in_the_text_of_its_processor(
    tmp_path: Path, marks: bool
) -> None:
    """Args: marks: the template has ``{% generation %}`` tags, whose spans come after the image."""
    template = SQUARE_CHAT
    if marks:
        own = "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
        own += "{% endgeneration %}{% elif"
        template = template.replace("{% if m['content'] is string", own + " m['content'] is string")
        template = template.replace("{% endif %}<|im_end|>\n", "<|im_end|>{% endif %}\n")
    made: Any = tiny.tokenizer(template)
    made.add_special_tokens({"additional_special_tokens": list(SQUARE_TOKENS)})
    begin, end, row = made.convert_tokens_to_ids(list(SQUARE_TOKENS))
    settings = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "a.png").write_bytes(picture(0, 56, 84))
    config = SimpleNamespace(
        model_type="gemma3",
        boi_token_id=begin,
        eoi_token_id=end,
        image_token_id=row,
        mm_tokens_per_image=4,
    )
    attach_vocabulary(made, str(tmp_path), config)
    talk = asked(PART, TEXT)["prompt"] + [{"role": "assistant", "content": "a disc"}]
    data = section(tmp_path, {"messages": talk, "image": "a.png"})
    (sample,) = load_samples(data, data.train, made).items
    shown = made.decode(made.image_vocabulary.shown(sample.token_ids))
    assert "user\n\n\n<start_of_image><image_soft_token><end_of_image>\n\nwhat?" in shown
    rows = [token for token in sample.token_ids if token >= FIRST_ROW]
    assert rows == [FIRST_ROW + at for at in range(4)]
    learned = [t for t, own in zip(sample.token_ids, sample.loss_mask, strict=True) if own]
    assert made.decode(learned) == "a disc<|im_end|>"
    settings["do_pan_and_scan"] = True
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="do_pan_and_scan"):
        Squares(str(tmp_path), 2)


def test_images_have_no_loss_and_come_in_their_order(tmp_path: Path, tokenizer: Any) -> None:
    talk = [
        {"role": "user", "content": [TEXT, PART, {"type": "text", "text": "and"}, PART]},
        {"role": "assistant", "content": "two"},
    ]
    data = section(tmp_path, {"messages": talk, "images": ["b.png", "a.png"]}, loss_on="all")
    (sample,) = load_samples(data, data.train, tokenizer).items
    rows = [at for at, token in enumerate(sample.token_ids) if token >= FIRST_ROW]
    assert [sample.token_ids[at] - FIRST_ROW for at in rows] == [*range(2), *range(2, 8)]
    assert not any(sample.loss_mask[at] for at in rows)
    assert sample.loss_mask[rows[0] - 2] and sample.loss_mask[rows[-1] + 2]


def test_images_without_a_question_are_a_bad_line(tmp_path: Path, tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "a cat"}
    asked = [{"role": "user", "content": "what?"}, answer]
    silent = [{"role": "system", "content": "be brief"}, answer]
    lines = [{"messages": talk, "images": ["a.png"]} for talk in (silent, asked)]
    data = section(tmp_path, *lines)
    with pytest.raises(DataError, match=r"data\.jsonl:1: there is no question"):
        load_samples(data, data.train, tokenizer)
    data = section(tmp_path, *lines, skip_bad=True)
    kept = load_samples(data, data.train, tokenizer)
    assert len(kept.items) == 1 and kept.report.counts["bad"] == 1 and kept.report.kept == 1


def test_rewards_get_names_and_prompts_as_they_are(tmp_path: Path, tokenizer: Any) -> None:
    lines = [{"prompt": "what?", "image": "a.png"}, asked(PART, TEXT, images=["b.png"])]
    data = section(tmp_path, *lines)
    one, other = load_tasks(data, data.train, tokenizer).items
    assert (one.prompt, one.columns["images"]) == ("what?", ["a.png"])
    assert other.prompt == [{"role": "user", "content": [PART, TEXT]}]


def test_pairs_share_the_images_of_their_prompt(tmp_path: Path, tokenizer: Any) -> None:
    line = {"prompt": "what?", "images": ["a.png"], "chosen": "a disc", "rejected": "no"}
    data = section(tmp_path, line)
    (pair,) = load_pairs(data, data.train, tokenizer).items
    one, other = (sample.token_ids for sample in pair.samples)
    assert [t for t in one if t >= FIRST_ROW] == [t for t in other if t >= FIRST_ROW] != []


def animated() -> bytes:
    saved = io.BytesIO()
    frames = [Image.new("RGB", (28, 28), (shade, 0, 0)) for shade in (0, 200)]
    frames[0].save(saved, "GIF", save_all=True, append_images=frames[1:])
    return saved.getvalue()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (asked(TEXT, images=["none.png"]), "no file .*none.png"),
        (asked(TEXT, images=["https://example.com/a.png"]), "address"),
        (asked(TEXT, images=["data:image/png;base64,?"]), "data URL"),
        (asked(TEXT, images=[7]), "7"),
        (asked(TEXT, images=["text.png"]), "text.png.* not an image"),
        (asked(TEXT, images=["cut.png"]), "cut.png.* damaged"),
        (asked(TEXT, images=["moving.gif"]), "animated .2 frames"),
        (asked(TEXT, images=["huge.png"]), "5000 × 5000 pixels"),
        (asked(TEXT, images=["long.png"]), "300 × 1"),
        (asked(TEXT, images=["bomb.png"]), "more pixels than"),
        (asked(TEXT, images=["deep.png"]), "more than 8 bits"),
        (asked(PART, TEXT, images=["a.png", "b.png"]), "2 images and 1 place"),
        (asked(PART, PART, TEXT, images=["a.png"]), "1 images and 2 places"),
        (asked(PART, TEXT), "0 images and 1 place"),
        (asked({"type": "image", "image": "a.png"}, TEXT, images=["b.png"]), "one place"),
        (asked({"type": "video", "video": "a.mp4"}, TEXT), "another kind"),
        ({"prompt": [{"role": "user", "content": "x", "images": ["a.png"]}]}, "its parts"),
        ({"prompt": f"what? {TOKENS[-1]}"}, "0 images and 1 place"),
    ],
)
def test_what_cannot_be_used_is_refused_by_line(
    line: dict[str, Any],
    reason: str,
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processing, "MOST_PIXELS", 1 << 24)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(picture(0)[:-40])
    (tmp_path / "moving.gif").write_bytes(animated())
    Image.new("I;16", (9, 9)).save(tmp_path / "deep.png")
    for name, size in (("huge", (5000, 5000)), ("long", (300, 1)), ("bomb", (20_000, 10_000))):
        if name in str(line):
            Image.new("1", size).save(tmp_path / f"{name}.png")
    with pytest.raises(DataError, match=reason) as refused:
        ids_of(tmp_path, tokenizer, line)
    assert "data.jsonl:1" in str(refused.value)
    data = section(tmp_path, line, asked(PART, TEXT, images=["a.png"]), skip_bad=True)
    loaded = load_tasks(data, data.train, tokenizer)
    assert (len(loaded), loaded.report.counts["bad"]) == (1, 1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "TGA"])
def test_damaged_pictures_are_read_or_refused(kind: str) -> None:
    """Bytes of a file changed by chance, in the formats whose readers are in Python and in C."""
    draw = random.Random(kind)
    saved = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(saved, kind)
    for _ in range(200):
        changed = bytearray(saved.getvalue())
        for _ in range(draw.choice((1, 4, 16))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        with suppress(DataError), warnings.catch_warnings(action="ignore"):
            assert processing.picture_of("it", bytes(changed)).mode == "RGB"


def test_a_photo_with_its_preview_is_one_picture() -> None:
    """As phones save them; transparent and printed pictures are read too."""
    saved = io.BytesIO()
    photo = Image.new("RGB", (28, 20), (200, 0, 0))
    photo.save(saved, "MPO", save_all=True, append_images=[photo.resize((14, 10))])
    assert processing.picture_of("photo.jpg", saved.getvalue()).size == (28, 20)
    for mode, kind in (("CMYK", "JPEG"), ("P", "GIF"), ("LA", "PNG"), ("1", "PNG")):
        saved = io.BytesIO()
        photo.convert(mode).save(saved, kind)
        assert processing.picture_of("it", saved.getvalue()).mode == "RGB"


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_what_is_transparent_has_the_colour_under_it_as_in_the_familys_own_processor(
    family: str,
) -> None:
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    [kind] = [each for name, each in vars(module).items() if name.endswith("ImageProcessorPil")]
    seen = Image.new("RGBA", (2, 1), (10, 200, 30, 0))
    seen.putpixel((1, 0), (10, 200, 30, 128))
    saved = io.BytesIO()
    seen.save(saved, "PNG")
    read = processing.picture_of("it", saved.getvalue())
    assert [read.getpixel((x, 0)) for x in (0, 1)] == [(10, 200, 30)] * 2
    assert read.tobytes() == kind().convert_to_rgb(seen).tobytes()


def test_a_model_of_text_and_steps_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    data = section(tmp_path, asked(PART, TEXT, images=["a.png"]))
    blind: Any = tiny.tokenizer()
    with pytest.raises(DataError, match=r"text alone.*qwen3_vl"):
        load_tasks(data, data.train, blind)
    steps = {"prompt": "what?", "image": "a.png", "completions": ["x"], "labels": [True]}
    data = section(tmp_path, steps)
    with pytest.raises(DataError, match="steps"):
        load_steps(data, data.train, tokenizer, "\n")


def test_a_cut_never_splits_an_image(tmp_path: Path, tokenizer: Any) -> None:
    talk = [
        {"role": "user", "content": [PART, TEXT]},
        {"role": "assistant", "content": "a long answer"},
    ]
    line = {"messages": talk, "images": ["a.png"]}
    data = section(tmp_path, line)
    (whole,) = load_samples(data, data.train, tokenizer).items
    last = max(at for at, token in enumerate(whole.token_ids) if token >= FIRST_ROW)
    room = len(whole.token_ids) - last - 1
    for limit, kept in ((room, 1), (room + 2, 0)):
        data = section(tmp_path, line, line, max_tokens=limit, too_long="truncate_left")
        if kept:
            loaded = load_samples(data, data.train, tokenizer)
            assert [max(s.token_ids) < FIRST_ROW for s in loaded.items] == [True, True]
        else:
            with pytest.raises(DataError, match="middle of an image"):
                load_samples(data, data.train, tokenizer)
    data = section(tmp_path, asked(PART, TEXT, images=["a.png"]), asked(TEXT), max_prompt_tokens=30)
    shorter = data.model_copy(update={"too_long": "skip"})
    loaded = load_tasks(shorter, shorter.train, tokenizer)
    assert loaded.report.counts["too_long"] == 1


def test_another_image_of_the_same_name_is_other_data(tmp_path: Path, tokenizer: Any) -> None:
    data = section(tmp_path, asked(PART, TEXT, images=["a.png"]))
    first = load_tasks(data, data.train, tokenizer)
    (image,) = tokenizer.image_vocabulary.rows.all
    (tmp_path / "a.png").write_bytes(picture(3, 56, 84))
    assert load_tasks(data, data.train, tokenizer).fingerprint != first.fingerprint
    with pytest.raises(DataError, match="has changed"):
        image.read()
