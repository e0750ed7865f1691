"""Makes what this run needs: pictures of discs and boxes, questions about them, and a tiny vision
model."""

import json
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tunesmith.guide.recipes.arithmetic import write_lines

HERE = Path(__file__).parent
CELL = 28  # pixels: one token of the model
SIDE = 3  # cells
MOST = 4  # shapes of a kind
SHAPES = ("discs", "boxes")
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<vision>", "</vision>", "<image>")
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<vision><image></vision>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def draw(path: Path, rng: random.Random) -> dict[str, int]:
    """A picture with a shape in some of its cells; returns how many there are of each."""
    counts = {shape: rng.randint(0, MOST) for shape in SHAPES}
    shapes = [shape for shape, count in counts.items() for _ in range(count)]
    cells = rng.sample([(x, y) for x in range(SIDE) for y in range(SIDE)], len(shapes))
    picture = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for shape, (x, y) in zip(shapes, cells, strict=True):
        left, top = x * CELL + rng.randint(2, 5), y * CELL + rng.randint(2, 5)
        place = (left, top, left + 20, top + 20)
        (pen.ellipse if shape == "discs" else pen.rectangle)(place, fill="black")
    picture.save(path, compress_level=1)
    return counts


def questions(name: str, count: int, rng: random.Random) -> list[dict[str, object]]:
    folder = HERE / "pictures"
    folder.mkdir(exist_ok=True)
    lines: list[dict[str, object]] = []
    for number in range(count):
        path = folder / f"{name}-{number}.png"
        counts = draw(path, rng)
        shape = rng.choice(SHAPES)
        line = {"prompt": f"{shape}?", "images": [f"pictures/{path.name}"]}
        lines.append({**line, "answer": str(counts[shape])})
    return lines


def make_model(path: Path) -> None:
    words = [*SPECIAL, *SHAPES, "?", *map(str, range(10))]
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|\w+|\W"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=list(SPECIAL[2:]),
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            "vocab_size": len(words),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
            },
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": CELL // 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
        image_token_id=SPECIAL.index("<image>"),
        vision_start_token_id=SPECIAL.index("<vision>"),
        vision_end_token_id=SPECIAL.index("</vision>"),
    )
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():  # a tower that nobody has trained: wide enough that pictures differ
        for weight in model.model.visual.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
    model.save_pretrained(path)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": CELL // 2,
        "merge_size": 2,
        "size": {"shortest_edge": CELL**2, "longest_edge": (SIDE * CELL) ** 2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))


def main() -> None:
    rng = random.Random(0)
    make_model(HERE / "model")
    train = questions("train", 1500, rng)
    write_lines(HERE / "train.jsonl", train)
    write_lines(HERE / "held_out.jsonl", questions("held_out", 150, rng))
    asked = [{key: line[key] for key in ("prompt", "images")} for line in train]
    answers = [{**one, "completion": two["answer"]} for one, two in zip(asked, train, strict=True)]
    write_lines(HERE / "examples.jsonl", answers)


if __name__ == "__main__":
    main()
