"""Examples as text: prompts as the policy sees them, and answers with their learned spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from tunesmith.config.schema import DataSection, Source
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.data.chat import ChatTemplate, Rendered, is_learned
from tunesmith.learn.data.chat_checks import THOUGHTS
from tunesmith.learn.data.formats import Example, convert, detect
from tunesmith.learn.data.images import IMAGE_MARK
from tunesmith.learn.data.report import LoadReport
from tunesmith.learn.data.sources import BadLine, read
from tunesmith.learn.data.tokens import encode, leading_ids, with_leading
from tunesmith.models.embedding_rows import without_row
from tunesmith.models.vision.processing import vocabulary_of
from tunesmith.types import Message, Prompt, Tokenizer, Tools, as_messages

Shots = Sequence[tuple[str, str]]
"""Worked examples: (prompt, completion)."""


def choose_template(
    section: DataSection, tokenizer: Tokenizer, examples: list[Example]
) -> ChatTemplate | None:
    """The chat template to use; None if prompts are plain text.

    Raises:
        ConfigError: the settings, the data and the tokenizer do not fit together.
    """
    talk = next((e for e in examples if isinstance(e.prompt or e.completion, list)), None)
    if talk is not None and section.chat is False:
        raise ConfigError(
            f"data.chat = false, but {talk.where} is a conversation, which needs the chat "
            "template. Leave data.chat out.",
            keys=("data.chat",),
        )
    chat = bool(tokenizer.chat_template) if section.chat is None else section.chat
    if talk is None and not (chat and any(e.prompt is not None for e in examples)):
        if section.system_prompt is not None:
            raise ConfigError(
                "data.system_prompt needs a chat template, but these prompts are plain text. "
                "Leave it out, or set data.chat = true with a tokenizer or model.chat_template "
                "that has one.",
                keys=("data.system_prompt",),
            )
        if section.chat_template_kwargs:
            why = "data.chat_template_kwargs has no effect: this data is plain text. Leave it out."
            raise ConfigError(why, keys=("data.chat_template_kwargs",))
        given = next((e for e in examples if e.tools), None)
        if given is not None:
            raise ConfigError(
                f"{given.where} has tools, which plain text has no place for. Drop the column, or "
                "name a template with model.chat_template, such as 'hermes' for ChatML models.",
                keys=("data.chat",) if section.chat is False else ("model.chat_template",),
            )
        return None
    template = ChatTemplate.of(tokenizer)
    sides = [side for e in examples for side in (e.prompt, e.completion) if isinstance(side, list)]
    roles = {message["role"] for side in sides for message in side}
    if section.system_prompt is not None or "system" in roles:
        template.check_system()
    return template


def with_places(example: Example, placeholder: str) -> Example:
    """The example with places for its images: before its first question, if it has none.

    Args:
        placeholder: the token that a text may have in such a place.

    Raises:
        DataError: it has no question.
    """
    texts = [_text(side) for side in (example.text, example.prompt, example.completion)]
    if any(IMAGE_MARK in text or placeholder in text for text in texts):
        return example
    marks = IMAGE_MARK * len(example.images)
    prompt = example.prompt
    if isinstance(prompt, str):
        return replace(example, prompt=marks + prompt)
    for name, side in (("prompt", prompt), ("completion", example.completion)):
        messages = side if isinstance(side, list) else []
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if users:
            first = {**messages[users[0]], "content": marks + messages[users[0]]["content"]}
            placed = [*messages[: users[0]], first, *messages[users[0] + 1 :]]
            return replace(example, **{name: placed})
    raise DataError("there is no question before which the images could come")


def _text(side: Prompt | None) -> str:
    return "".join(str(message["content"]) for message in as_messages(side or []))


def with_system(section: DataSection, prompt: Prompt) -> list[Message]:
    """A prompt as messages with the system prompt; a conversation that has its own system message
    keeps it."""
    messages = as_messages(prompt)
    if section.system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": section.system_prompt}, *messages]


def note_turn_end(template: ChatTemplate, texts: Iterable[Rendered], report: LoadReport) -> None:
    """Note in the report if no learned turn ends with a stop token."""
    marker = template.stop_marker
    problem = None
    ends = ((text.text, stop) for text in texts for _, stop in text.spans)
    if not template.ends_turns:
        problem = " ends assistant turns with no special token"
    elif template.marks_assistant and any(text.startswith(marker, stop) for text, stop in ends):
        problem = f"'s {{% generation %}} tags leave {marker.strip()} out"
    if problem:
        report.note(f"The chat template{problem}: the model does not learn to stop.")


def learned_texts(
    section: DataSection, example: Example, template: ChatTemplate | None
) -> list[Rendered]:
    """The texts of an example, with their learned spans."""
    if example.text is not None:
        return [Rendered(example.text, ((0, len(example.text)),))]
    prompt = example.prompt
    completion = example.completion
    assert prompt is not None and completion is not None
    if template is None:
        assert isinstance(prompt, str) and isinstance(completion, str)
        text = prompt + completion
        start = 0 if section.loss_on == "all" else len(prompt)
        return [Rendered(text, ((start, len(text)),))]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    talk_only = not prompt
    asked = [] if talk_only else with_system(section, prompt)
    messages = [*asked, *completion] if asked else with_system(section, completion)
    if section.loss_on == "all":
        if any(message.get("weight", 1) == 0 for message in messages):
            learned = "data.loss_on = 'all' learns every one"
            raise DataError(f"a message has weight 0, and {learned}; leave one out")
        text = template.whole(messages, example.tools)
        return [Rendered(text, ((0, len(text)),))]
    turns = [i for i, message in enumerate(messages) if is_learned(message)]
    first = 0 if talk_only or section.loss_on == "assistant" else len(messages) - len(completion)
    if talk_only and section.loss_on == "completion":
        first = turns[-1] if turns else 0
    if not turns or turns[-1] < first:
        raise DataError("no assistant turn to learn")
    for i in turns:
        parts = (messages[i].get(part) for part in ("content", "tool_calls", *THOUGHTS))
        if i >= first and not any(parts):
            empty = f"message {i + 1}, an assistant's turn, is empty"
            raise DataError(f"{empty}; leave it out, or give it weight 0")
    return template.learned(messages, example.tools, first)


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encodes prompts through the chat template, or as plain text after BOS."""

    section: DataSection
    tokenizer: Tokenizer
    template: ChatTemplate | None
    separator: str = ""
    """Text after each worked example in a plain text prompt."""

    @classmethod
    def of(
        cls,
        section: DataSection,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        separator: str = "",
    ) -> PromptEncoder:
        """An encoder for ``prompts``, with the template that ``choose_template`` returns for
        them."""
        examples = [Example(f"prompt {i}", "", prompt=prompt) for i, prompt in enumerate(prompts)]
        return cls(section, tokenizer, choose_template(section, tokenizer, examples), separator)

    def ids(self, prompt: Prompt, tools: Tools = None, shots: Shots = ()) -> list[int]:
        """Token ids of a prompt without images; see ``text``."""
        (ids,) = self.encode([self.text(prompt, tools, shots)])
        vocabulary = vocabulary_of(self.tokenizer)
        return ids if vocabulary is None else vocabulary.expanded(ids, ())[0]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts from ``text``; plain text gets the tokenizer's leading tokens
        (BOS)."""
        encoded = encode(self.tokenizer, texts)
        if self.template is not None:
            return encoded
        leading = leading_ids(self.tokenizer)
        return [with_leading(leading, ids) for ids in encoded]

    def text(self, prompt: Prompt, tools: Tools = None, shots: Shots = ()) -> str:
        """A prompt up to the start of the assistant's turn; DataError if the template refuses it.

        ``shots`` come before the question: as turns after the system message, or as text.
        """
        if self.template is None:
            assert isinstance(prompt, str)
            examples = [f"{asked}{answered}{self.separator}" for asked, answered in shots]
            return "".join([*examples, prompt])
        messages = with_system(self.section, prompt)
        system = list(takewhile(lambda m: m["role"] in ("system", "developer"), messages))
        turns: list[Message] = []
        for asked, answered in shots:
            turns.append({"role": "user", "content": asked})
            turns.append({"role": "assistant", "content": answered})
        return self.template.whole([*system, *turns, *messages[len(system) :]], tools, prompt=True)


def read_shots(path: Path, tokenizer: Tokenizer | None = None) -> Shots:
    """The worked examples in a data file whose lines have a prompt and a completion as text;
    DataError if not.

    Args:
        tokenizer: if given, the model's embedding must have a row for each token.
    """
    shots: list[tuple[str, str]] = []
    for row in read(Source(path=str(path))):
        if isinstance(row, BadLine):
            raise row
        example = convert(row, detect(row, "sft"), "sft")
        if not (isinstance(example.prompt, str) and isinstance(example.completion, str)):
            raise row.bad("a worked example (rft.few_shot) is a prompt and a completion, both text")
        if tokenizer is not None:
            ids = encode(tokenizer, [example.prompt + example.completion])[0]
            problem = without_row(tokenizer, ids)
            if problem:
                raise row.bad(problem)
        shots.append((example.prompt, example.completion))
    if not shots:
        raise DataError(f"{path} (rft.few_shot) holds no example")
    return shots
