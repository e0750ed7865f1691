"""Uploading models to the Hugging Face hub, each with a card that says how it was trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import ConfigError
from tunesmith.records.metrics import read_metrics
from tunesmith.records.run_dir import RunDir, own_command, shown_command

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD_FILE = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md")
_SHOWN = 12
"""Maximum number of metrics on a card."""
_FOLDERS = re.compile(r"""(?<![^"'=])/(?:[^"'\n/]*/)*(?=[^"'\n/])""")
"""The folders of an absolute path, which are private; only the file's name is published."""


def open_hub(config: RunConfig, run_dir: RunDir, report: Callable[[str], None]) -> Hub:
    """Create the repository of ``checkpoint.push_to_hub`` if it does not exist.

    Raises:
        ConfigError: the repository cannot be written to.
    """
    section = config.checkpoint
    assert section.push_to_hub is not None
    from huggingface_hub import HfApi

    api = HfApi(library_name="tunesmith", library_version=version("tunesmith"))
    try:
        api.create_repo(section.push_to_hub, private=section.hub_private, exist_ok=True)
    except Exception as error:
        raise ConfigError(
            f"checkpoint.push_to_hub = '{section.push_to_hub}' cannot be written to: "
            f"{_one_line(error)}. Log in with `hf auth login` or set HF_TOKEN, with the right to "
            "write there; or leave the key out",
            keys=("checkpoint.push_to_hub",),
        ) from None
    return Hub(api, config, run_dir, report)


@dataclass(frozen=True, slots=True)
class Hub:
    """Uploads a run's models. A failure is reported, not raised: the model is on disk."""

    api: HfApi
    config: RunConfig
    run_dir: RunDir
    report: Callable[[str], None]

    def describe(self, checkpoint: Path) -> None:
        """Write the card next to the model."""
        text = f"{_card(self.config, self.run_dir)}\n"
        (checkpoint / "model" / CARD_FILE).write_text(text, encoding="utf-8")

    def publish(self, checkpoint: Path, *, last: bool) -> None:
        """Upload a checkpoint's model; with ``checkpoint.push = "last"``, only the last one's."""
        section = self.config.checkpoint
        model = checkpoint / "model"
        if section.push == "last" and not last:
            return
        assert section.push_to_hub is not None
        message = f"{checkpoint.name} of {self.run_dir.path.name}"
        try:
            commit = self.api.upload_folder(
                repo_id=section.push_to_hub, folder_path=model, commit_message=message
            )
        except Exception as error:
            self.report(
                f"{model} could not be put on the hub: {_one_line(error)}. It is whole on disk; "
                f"put it there with: hf upload {section.push_to_hub} {model}"
            )
        else:
            self.report(f"{model} is on the hub: {commit.commit_url}")


def _card(config: RunConfig, run_dir: RunDir) -> str:
    """The card in the hub's format: metadata, followed by how the model was trained."""
    from huggingface_hub import ModelCard, ModelCardData

    path = config.model.path
    train = config.data.train
    parts = train if isinstance(train, tuple) else (train,)
    sources = [part if isinstance(part, str) else part.path for part in parts]
    names = [Path(source).name if Path(source).is_absolute() else source for source in sources]
    algorithm = config.algorithm.name if isinstance(config, RLConfig) else None
    command = shown_command([_FOLDERS.sub("", word) for word in own_command() or []])
    local = Path(path).is_absolute()
    data = ModelCardData(
        base_model=None if local else path,
        library_name="peft" if config.lora.on else "transformers",
        pipeline_tag="text-classification" if config.score_model else "text-generation",
        datasets=[name for name in names if "/" in name and not Path(name).suffix] or None,
        tags=[tag for tag in ("tunesmith", algorithm, config.lora.on and "lora") if tag],
    )
    facts = {
        "base model": Path(path).name if local else path,
        "command": f"`{command}`" if command else "Python",
        "algorithm": algorithm or type(config).__name__.removesuffix("Config").lower(),
        "data": ", ".join(names),
        "Tunesmith": version("tunesmith"),
    }
    # The newest evaluation; without one, the newest step.
    lines = read_metrics(run_dir.metrics)
    evaluations = [{k: v for k, v in line.items() if k.startswith("eval/")} for line in lines]
    newest = next((e for e in reversed(evaluations) if e), lines[-1] if lines else {})
    known = {k: v for k, v in newest.items() if isinstance(v, int | float)}
    plain = {k: v for k, v in known.items() if "/" not in k.removeprefix("eval/")}
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=run_dir.path.name,
        facts=facts,
        numbers=dict(list(plain.items())[:_SHOWN]),
        settings=_FOLDERS.sub("", (run_dir.path / "config.toml").read_text(encoding="utf-8")),
    )
    return str(card)


def _one_line(error: Exception) -> str:
    """An error as one line, without the access token."""
    from huggingface_hub.utils import get_token

    text = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    token = get_token()
    return text.replace(token, "***") if token else text
