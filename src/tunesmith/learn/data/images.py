"""Images in data lines: where they are named, and their places in a conversation's text.

In a message's text, an image is one character, ``IMAGE_MARK``; only the chat template gets it as a
part of its own. Images are named in the parts of messages, or by the line's column ``images``, in
the order of their places. Without places they come before the first question.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tunesmith.errors import DataError, shortened
from tunesmith.learn.data.sources import SourceRow
from tunesmith.plan.facts.families import seeing
from tunesmith.types import Message, Prompt

IMAGE_MARK = "\ufdd0"
"""A code point that Unicode keeps for a program's own use."""
COLUMNS = ("images", "image")
PARTS = ("image", "image_url", "input_image")
SOURCES = ("image", "image_url", "path", "url", "data")
VALID = "a path, a data URL (data:image/png;base64,…) or the bytes of a file"


def blind() -> DataError:
    """The refusal of a line with images for a model that reads text alone."""
    return DataError(
        "the line has images, and the model reads text alone: name a model of a family that sees "
        f"images ({', '.join(seeing())}) with model.path, or leave the images out"
    )


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image as a line names it."""

    name: str
    source: Path | bytes


@runtime_checkable
class OpenedPicture(Protocol):
    """A picture that a data set's reader has opened (Pillow's)."""

    def save(self, fp: io.BytesIO, format: str) -> None: ...


def read_image(row: SourceRow, place: str, value: object) -> NamedImage:
    """The image that a value names.

    Raises:
        BadLine: it names none, or a file that is not there.
    """
    if isinstance(value, Mapping):  # {"url": ...}, or the columns of an image data set
        value = value.get("bytes") or source_of(value)
    if isinstance(value, bytes):
        return NamedImage(f"{row.where}, {place}", value)
    if isinstance(value, OpenedPicture):
        saved = io.BytesIO()
        value.save(saved, "PNG")
        return NamedImage(f"{row.where}, {place}", saved.getvalue())
    if not isinstance(value, str) or not value:
        raise row.bad(f"{place} is {shortened(repr(value), 40)}; needs {VALID}")
    if value.startswith("data:"):
        try:
            return NamedImage(f"{row.where}, {place}", bytes_of(value))
        except DataError as error:
            raise row.bad(f"{place} is {error}") from error
    if value.startswith(("http://", "https://")):
        raise row.bad(
            f"{place} is an address ({shortened(value, 60)}), and nothing is fetched while a run "
            f"reads its data: save the image and give {VALID}"
        )
    path = Path(value.removeprefix("file://")).expanduser()
    path = path if path.is_absolute() else Path(row.file).parent / path
    if not path.is_file():
        raise row.bad(f"{place}: there is no file {path} (paths are relative to the data file)")
    return NamedImage(value, path)


def bytes_of(url: object) -> bytes:
    """The bytes in a data URL.

    Raises:
        DataError: it is none, or cannot be read.
    """
    if not isinstance(url, str) or not url.startswith("data:"):
        raise DataError(
            f"{shortened(repr(url), 60)} is no data URL (data:image/png;base64,…); addresses are "
            "not fetched, and files are not read"
        )
    kind, _, text = url.partition(",")
    try:
        if not kind.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"a data URL that cannot be read ({error})") from error


def source_of(part: Mapping[str, object]) -> object:
    """What a part or value names an image with; None: nothing."""
    named = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    return source_of(named) if isinstance(named, Mapping) else named


def image_part(row: SourceRow, place: str, part: Mapping[str, object]) -> NamedImage | None:
    """The image that a part of a message names; None if the line's column names it."""
    value = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    return None if value is None else read_image(row, place, value)


def named_in_columns(row: SourceRow) -> list[NamedImage]:
    """The images that a line's columns name."""
    named: list[NamedImage] = []
    for column in COLUMNS:
        value = row.columns.get(column)
        values: list[object] = value if isinstance(value, list) else [value]
        named += [read_image(row, f"'{column}'", one) for one in values if one is not None]
    return named


def taken_from(side: Prompt | None) -> tuple[list[NamedImage], Prompt | None]:
    """The images that messages name, and the messages without them."""
    if not isinstance(side, list):
        return [], side
    images = [image for message in side for image in message.get("images", ())]
    kept = [{key: value for key, value in message.items() if key != "images"} for message in side]
    return images, kept


def with_parts(message: Message) -> Message:
    """A message whose images are parts of their own, as chat templates take them."""
    content = message.get("content")
    if not isinstance(content, str) or IMAGE_MARK not in content:
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def shown(prompt: Prompt) -> Prompt:
    """A prompt as rewards and logs get it: a text without places, messages with parts."""
    if isinstance(prompt, str):
        return prompt.replace(IMAGE_MARK, "")
    return [with_parts(message) for message in prompt]
