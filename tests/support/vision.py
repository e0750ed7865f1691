"""Tiny vision models with their processor, pictures, and what transformers computes with both."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tests.support import tiny
from tests.support.families import module_of
from tests.support.tiny_runs import write_lines
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.source import load_config
from tunesmith.models.vision.processing import ImageVocabulary, attach_vocabulary
from tunesmith.models.vision.rows import FIRST_ROW
from tunesmith.types import Sample, VisionTower

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VIDEO = "<|video_pad|>"
"""Which vLLM asks for."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 320
SQUARE_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
SQUARE_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Gemma 3's: its processor, not its template, writes the rest of an image's place."""
FAMILIES = ("gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")


def save_vision_model(
    path: Path,
    model_type: str = "qwen3_vl",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """A tiny vision model, as published, with its tokenizer and image processor."""
    square = model_type == "gemma3"
    tokens: list[str] = list(SQUARE_TOKENS if square else TOKENS)
    tokenizer = tiny.tokenizer(SQUARE_CHAT if square else CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens, VIDEO]})
    ids: Any = tokenizer.convert_tokens_to_ids(tokens)
    start, end, pad = ids
    module = module_of(model_type, dtype, vocab_size=VOCABULARY, **overrides)
    module.config.image_token_id = pad
    if square:
        module.config.boi_token_id = start
        module.config.eoi_token_id = end
    else:
        module.config.vision_start_token_id = start
        module.config.vision_end_token_id = end
        module.config.video_token_id = tokenizer.convert_tokens_to_ids(VIDEO)
    module.save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor = _square_processor if square else _patch_processor
    settings = processor(module.config.vision_config)
    (path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def _square_processor(vision: Any) -> dict[str, Any]:
    side = vision.image_size
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
    }


def _patch_processor(vision: Any) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def load_vision_model(
    path: Path,
    pictures: list[bytes],
    tower: VisionTower = "frozen",
    dtype: torch.dtype = torch.float32,
) -> tuple[CausalLM, ImageVocabulary]:
    """The model as a run loads it whose data has these pictures."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    attach_vocabulary(tokenizer, str(path), load_config(path))
    vocabulary: ImageVocabulary = tokenizer.image_vocabulary
    for number, data in enumerate(pictures):
        vocabulary.add(f"picture {number}", data)
    return CausalLM.load(path, tokenizer=tokenizer, tower=tower, dtype=dtype), vocabulary


def picture(number: int, width: int = 56, height: int = 84) -> bytes:
    """A PNG of a disc and a box, another for each number."""
    image = Image.new("RGB", (width, height), (40 * number % 256, 90, 200))
    draw = ImageDraw.Draw(image)
    draw.ellipse((5, 5 + 3 * number, 30, 30 + 3 * number), fill=(250, 30 * number % 256, 20))
    draw.rectangle((2 * number, 40, 2 * number + 15, 55), fill=(10, 240, 10))
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()


def write_pictures(folder: Path) -> Path:
    """Fill a directory with questions about six pictures, for each command."""
    for number in range(6):
        (folder / f"{number}.png").write_bytes(picture(number))
    asked = [{"prompt": "what?", "images": [f"{number}.png"]} for number in range(6)]
    (folder / "rewards.py").write_text(
        "def share(completions, images, **columns):\n"
        "    return [(c < 'N') + len(i[0]) for c, i in zip(completions, images)]\n"
    )
    write_lines(folder / "train.jsonl", [{**line, "answer": "x"} for line in asked])
    write_lines(folder / "sft.jsonl", [{**line, "completion": "a disc"} for line in asked])
    answers = {"chosen": "a disc", "rejected": "no"}
    write_lines(folder / "pairs.jsonl", [{**line, **answers} for line in asked])
    labels = [{"completion": "a disc", "label": number % 2 == 0} for number in range(6)]
    judged = [{**line, **label} for line, label in zip(asked, labels, strict=True)]
    write_lines(folder / "judged.jsonl", judged)
    return folder


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every weight of a model, by name."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def samples_with_images(vocabulary: ImageVocabulary) -> list[Sample]:
    """17 sequences: prompts with one image, with two and with none, and their answers."""
    images = [list(image.token_ids) for image in vocabulary.rows.all]
    a = images[0]
    b = images[1]
    c = images[-1]
    prompts = [[7, 8, *a, 9, 10], [7, 8, *b, 9, 10], [11, *c, 12, *a, 13], [14, 15, 16]]
    answers = [[30, 31, 32], [30, 40], [50], [51, 52, 53, 54, 55]]
    pairs = [(prompt, answer) for prompt in prompts for answer in answers]
    pairs.append(([*b, 17], [60, 61]))
    return [Sample([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in pairs]


def one_by_one(
    path: Path, vocabulary: ImageVocabulary, samples: list[Sample]
) -> tuple[Any, Tensor]:
    """Transformers' own model, and its log-probabilities of the samples, one at a time."""
    module: Any = AutoModelForImageTextToText.from_pretrained(path).eval()
    processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
    found: list[Tensor] = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        seen = ids >= FIRST_ROW
        images = {
            vocabulary.rows.at(row).first: vocabulary.rows.at(row) for row in ids[seen].tolist()
        }
        kwargs: dict[str, Any] = {}
        if images:
            pictures = [Image.open(io.BytesIO(image.read())) for image in images.values()]
            kwargs = dict(processor(images=pictures, return_tensors="pt"))
            kwargs.pop("num_crops", None)
            kwargs["mm_token_type_ids" if "image_grid_thw" in kwargs else "token_type_ids"] = (
                seen.long()[None]
            )
        ids = ids.masked_fill(seen, vocabulary.placeholder)
        module.model.rope_deltas = None
        logits = module(input_ids=ids[None], use_cache=False, **kwargs).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(chosen[torch.tensor(sample.loss_mask[1:])])
    return module, torch.cat(found)
