"""Whether a directory holds a model that can be loaded, with its tokenizer; judged by its files,
without torch."""

from __future__ import annotations

from pathlib import Path

from tunesmith.errors import ModelError
from tunesmith.plan.facts.model_files import INDEX, ONE, check_files, weight_files, weights_in
from tunesmith.records.storage import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model", "vocab.json", "vocab.txt")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_model(directory: Path, *, whole: bool = True) -> None:
    """Check that a model's files are there.

    Args:
        whole: also tokenizer and weights.

    Raises:
        ModelError: the directory has no configuration, tokenizer or safetensors weights, or see
            ``check_files``.
    """
    if not directory.is_dir():
        raise ModelError(
            f"'{directory}' is a file; give the directory of a model in Hugging Face format"
        )
    check_files(directory)
    if not whole:
        return
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"'{directory}' has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): "
            "save the model's tokenizer into it with tokenizer.save_pretrained"
        )
    if not weight_files(directory):
        pickled = {file.suffix for file in directory.iterdir()} & {".bin", ".pt", ".pth"}
        unsafe = "only pickled weights, which can run code when loaded"
        content = unsafe if pickled else "no weights"
        raise ModelError(
            f"'{directory}' has {content} (no {ONE}, and no {INDEX}); save it as safetensors: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    weights_in(directory)  # every file of an index is there and whole


def lacks_template(directory: Path) -> bool:
    """Whether a model's files are known to have no chat template."""
    config = directory / TOKENIZER_CONFIG
    if not config.is_file() or any((directory / name).exists() for name in TEMPLATE_FILES):
        return False
    return not read_json(config, ModelError).get("chat_template")
