"""Images that come with a conversation's messages: in the text each is a place, and the message
holds the image itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunesmith.errors import DataError, EpisodeError
from tunesmith.learn.data.images import IMAGE_MARK, PARTS, bytes_of, source_of, with_parts
from tunesmith.models.vision.processing import vocabulary_of
from tunesmith.models.vision.rows import Image
from tunesmith.types import Message, Tokenizer, text_of_content


def with_images(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark for each image in their text, and the images under ``images``.

    Raises:
        EpisodeError: an image cannot be used.
    """
    read: list[Message] = []
    number = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list) or not any(map(_is_image, content)):
            read.append(message)
            continue
        if message.get("role") == "assistant":
            raise EpisodeError("an assistant's message has an image, which the policy cannot write")
        texts: list[str] = []
        images: list[Image] = []
        for part in content:
            if not _is_image(part):
                texts.append(text_of_content([part]))
                continue
            number += 1
            images.append(_opened(tokenizer, f"image {number} of the messages", part))
            texts.append(IMAGE_MARK)
        read.append({**message, "content": "".join(texts), "images": images})
    return read


def images_of(messages: Sequence[Message]) -> list[Image]:
    """The images that ``with_images`` has put into messages, in order."""
    return [image for message in messages for image in message.get("images", ())]


def without_images(message: Message) -> Message:
    """A message of ``with_images`` as rewards and logs get it: with parts for its places."""
    return with_parts({name: value for name, value in message.items() if name != "images"})


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def _opened(tokenizer: Tokenizer, place: str, part: Mapping[str, object]) -> Image:
    vocabulary = vocabulary_of(tokenizer)
    reason = "the model reads text alone" if vocabulary is None else vocabulary.closed
    if vocabulary is None or reason:
        raise EpisodeError(f"{place} cannot be seen: {reason}")
    value = source_of(part)
    try:
        return vocabulary.add(place, bytes_of(value))
    except DataError as error:  # the request is wrong, not a line of data
        raise EpisodeError(f"{place}: {error}") from error
