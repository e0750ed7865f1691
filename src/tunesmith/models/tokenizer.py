"""Loading a tokenizer, and the reasons why it cannot be."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tunesmith.errors import ConfigError, ModelError, boundary


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, chat_template: Path | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name, with its chat template replaced where one is given.

    Raises:
        ModelError: there is none, or it cannot be read.
        ConfigError: the chat template file cannot be read.
    """
    directory = Path(path)
    if directory.is_dir() and not any(directory.glob("tokenizer*")):
        raise ModelError(
            f"{directory} holds no tokenizer: there is no tokenizer.json or tokenizer_config.json beside the "
            "model. Save the tokenizer there too (tokenizer.save_pretrained)."
        )
    with boundary(ModelError, f"cannot load the tokenizer of {path}", (OSError, ValueError, ImportError)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        with boundary(ConfigError, f"model.chat_template: cannot read {chat_template}", OSError):
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer
