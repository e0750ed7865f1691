"""Prompts as the policy sees them, made one at a time, and worked examples put before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tunesmith.config.schema import DataSection, Source
from tunesmith.data.chat import ChatTemplate
from tunesmith.data.formats import Example, convert, detect
from tunesmith.data.learned import choose_template, with_system
from tunesmith.data.sources import BadLine, Row, read
from tunesmith.data.tokens import Tokenizer, encode, leading_ids, with_leading
from tunesmith.errors import DataError
from tunesmith.types import Message, Prompt

Shots = Sequence[tuple[str, str]]
"""Worked examples: (prompt, completion)."""


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Makes the token ids that ``load_tasks`` makes: once through the chat template, or plain text after BOS."""

    section: DataSection
    tokenizer: Tokenizer
    template: ChatTemplate | None
    separator: str = ""
    """After each worked example of a plain text prompt."""

    @classmethod
    def of(
        cls, section: DataSection, tokenizer: Tokenizer, prompts: Sequence[Prompt], separator: str = ""
    ) -> PromptEncoder:
        """For these prompts, which decide whether the chat template is used.

        Raises:
            ConfigError: the settings, the prompts and the tokenizer do not go together.
        """
        examples = [Example(f"prompt {i}", "", prompt=prompt) for i, prompt in enumerate(prompts)]
        return cls(section, tokenizer, choose_template(section, tokenizer, examples), separator)

    def ids(self, prompt: Prompt, tools: list[Any] | None = None, shots: Shots = ()) -> list[int]:
        """Token ids of a prompt, up to where the assistant begins to write.

        Args:
            shots: go before the question: as turns after the system message, or as text.

        Raises:
            DataError: the template refuses the conversation.
        """
        if self.template is None:
            before = "".join(f"{asked}{answered}{self.separator}" for asked, answered in shots)
            ids = encode(self.tokenizer, [before + cast("str", prompt)])[0]
            return with_leading(leading_ids(self.tokenizer), ids)
        messages = with_system(self.section, prompt)
        system = 0
        while system < len(messages) and messages[system]["role"] in ("system", "developer"):
            system += 1
        turns: list[Message] = []
        for asked, answered in shots:
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        text = self.template.whole([*messages[:system], *turns, *messages[system:]], tools, prompt=True)
        return encode(self.tokenizer, [text])[0]


def read_shots(path: Path) -> Shots:
    """The worked examples of a data file: lines with a prompt and a completion, both text.

    Raises:
        DataError: a line is not such an example, or there is none.
    """
    shots: list[tuple[str, str]] = []
    for row in read(Source(path=str(path))):
        if isinstance(row, BadLine):
            raise row
        shots.append(_shot(row))
    if not shots:
        raise DataError(f"{path} (rft.few_shot) holds no example")
    return shots


def _shot(row: Row) -> tuple[str, str]:
    example = convert(row, detect(row, "sft"), "sft")
    if not (isinstance(example.prompt, str) and isinstance(example.completion, str)):
        raise BadLine(row.where, "a worked example (rft.few_shot) is a prompt and a completion, both text")
    return example.prompt, example.completion
