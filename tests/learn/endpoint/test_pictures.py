"""Images in requests: the same tokens whichever interface brings them, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support import tiny
from tests.support.episodes import check_tokens, load, made_task, ok, play
from tests.support.vision import CHAT, TOKENS, picture
from tunesmith.models.vision.kept import KeptImages
from tunesmith.models.vision.processing import ImageVocabulary
from tunesmith.models.vision.rows import FIRST_ROW
from tunesmith.types import Rollout, Status

HEAD = """
import asyncio, json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

def image(url):
    return {"type": "image_url", "image_url": {"url": url}}

def says(*parts):
    return {"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}

async def agent(client, a, b, **columns):
    ask = client.chat.completions.create
"""


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
def seeing(tmp_path: Path) -> Any:
    """A tokenizer of a model that sees, in a run that lets it."""
    made = tiny.tokenizer(CHAT)
    made.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    pad = made.convert_tokens_to_ids(TOKENS[-1])
    kept = KeptImages(tmp_path / "kept")
    vars(made)["image_vocabulary"] = ImageVocabulary(str(tmp_path), pad, closed="", kept=kept)
    return made


def played(tokenizer: Any, folder: Path, body: str, head: str = HEAD, **columns: str) -> Rollout:
    code = head + "".join(f"    {line}\n" for line in body.strip().splitlines())
    environments = load(folder, code, path="env.py:agent")
    urls = {"a": url_of(picture(0, 56, 84)), "b": url_of(picture(1, 56, 28)), **columns}
    task = made_task(tokenizer, **urls)
    (rollout,), engine = play(environments, tokenizer, [task], lambda _: "ok<|im_end|>")
    if rollout.status is Status.OK:
        check_tokens(rollout, engine)
    return rollout


def rows(rollout: Rollout) -> list[list[int]]:
    """The rows of images in each record, from the first on."""
    kept = ([t for t in r.token_ids if t >= FIRST_ROW] for r in rollout.records)
    return [[token - FIRST_ROW for token in tokens] for tokens in kept]


def test_a_conversation_grows_with_its_images(seeing: Any, tmp_path: Path) -> None:
    body = """
said = [says(image(a), "what?")]
first = await ask(messages=said)
said += [{"role": "assistant", "content": first.choices[0].message.content}, says("and", image(b), image(a))]
second = await ask(messages=said)
assert second.usage.prompt_tokens > first.usage.prompt_tokens + 8
return 1.0
"""
    rollout = ok(played(seeing, tmp_path, body))
    assert [len(record.turns) for record in rollout.records if record.turns] == [2]
    assert rows(rollout)[-1] == [*range(6), *range(6, 8), *range(6)]
    _, then, _ = rollout.messages
    image = {"type": "image"}
    assert then["content"] == [{"type": "text", "text": "and"}, image, image]
    assert "base64" not in json.dumps(rollout.messages)
    assert len(list((tmp_path / "kept").iterdir())) == 2  # and not in memory
    assert seeing.image_vocabulary.rows.at(FIRST_ROW).read() == picture(0, 56, 84)


def test_another_image_is_another_conversation(seeing: Any, tmp_path: Path) -> None:
    body = """
for url in (a, b):
    await ask(messages=[says(image(url), "what?"), {"role": "assistant", "content": "x"}, says("so?")])
return 1.0
"""
    rollout = ok(played(seeing, tmp_path, body))
    assert sorted(filter(None, rows(rollout))) == [[*range(6)], [*range(6, 8)]]


def test_every_interface_gives_the_same_tokens(seeing: Any, tmp_path: Path) -> None:
    body = """
kind, data = a.removeprefix("data:").split(";base64,")
source = {"type": "base64", "media_type": kind, "data": data}
await ask(messages=[says(image(a), "what?")])
await ask(messages=[says({"type": "image", "image": a}, "what?")])
block = {"type": "image", "source": source}
await client.messages.create(max_tokens=9, messages=[says(block, "what?")])
part = {"type": "input_image", "image_url": a}
content = [part, {"type": "input_text", "text": "what?"}]
await client.responses.create(input=[{"role": "user", "content": content}])
return 1.0
"""
    rollout = ok(played(seeing, tmp_path, body))
    prompts = {tuple(r.token_ids[: r.turns[0].start]) for r in rollout.records if r.turns}
    assert len(prompts) == 1


def animated() -> bytes:
    frames = [Image.new("RGB", (28, 28), (value, 0, 0)) for value in (0, 200)]
    made = io.BytesIO()
    frames[0].save(made, "GIF", save_all=True, append_images=frames[1:])
    return made.getvalue()


LONG = io.BytesIO()
Image.new("1", (300, 1)).save(LONG, "PNG")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/a.png", "no data URL"),
        ("/etc/hostname", "no data URL"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,!!", "cannot be read"),
        (url_of(b"no image"), "not an image"),
        (url_of(picture(0)[:-40]), "damaged"),
        (url_of(animated()), "animated"),
        (url_of(LONG.getvalue()), "300 × 1"),
    ],
)
def test_what_cannot_be_used_is_a_bad_request_with_its_place(
    url: str, reason: str, seeing: Any, tmp_path: Path
) -> None:
    head = HEAD.replace("agent(client, a, b", "agent(base_url, api_key, a, b").replace(
        "    ask = client.chat.completions.create\n", ""
    )
    body = """
body = json.dumps({"messages": [says(image(a), "or", image(b))]}).encode()
request = Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
try:
    await asyncio.to_thread(urlopen, request)
except HTTPError as error:
    raise ValueError(f"{error.code} {error.read().decode()}") from None
"""
    rollout = played(seeing, tmp_path, body, head, b=url)
    assert rollout.status is Status.ENVIRONMENT_FAILED
    _, _, body = str(rollout.error).partition("400 ")
    message = json.loads(body)["error"]["message"]
    assert "image 2 of the messages" in message and reason in message


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("[{**says(image(a)), 'role': 'assistant'}]", "assistant"),
        ("[says('\\ufdd0', image(a))]", "1 images and 2 places"),
        ("[says({'type': 'image'})]", "image 1"),
    ],
)
def test_images_that_have_no_place(messages: str, reason: str, seeing: Any, tmp_path: Path) -> None:
    rollout = played(seeing, tmp_path, f"await ask(messages={messages})")
    assert rollout.status is Status.ENVIRONMENT_FAILED and reason in str(rollout.error)


def test_models_and_runs_that_see_none_say_so(seeing: Any, tmp_path: Path) -> None:
    seeing.image_vocabulary.closed = "for a reason"
    for tokenizer, reason in ((seeing, "for a reason"), (tiny.tokenizer(CHAT), "text alone")):
        rollout = played(tokenizer, tmp_path, "await ask(messages=[says(image(a))])")
        assert rollout.status is Status.ENVIRONMENT_FAILED and reason in str(rollout.error)


def test_texts_of_tokens_are_no_images(seeing: Any, tmp_path: Path) -> None:
    """What a tool or a user writes does not become a place."""
    body = f"""
await ask(messages=[says(image(a), "what is {TOKENS[-1]}?")])
return 1.0
"""
    assert rows(ok(played(seeing, tmp_path, body)))[-1] == [*range(6)]
