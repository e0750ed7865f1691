"""Models put on the Hugging Face hub, with a card that says how they were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.preference import ScoreConfig
from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import ConfigError
from tunesmith.monitor.metrics import read_metrics
from tunesmith.monitor.run_dir import RunDir, own_command, shown_command

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelCard

CARD_FILE = "README.md"
_SHOWN = 12


def open_hub(config: RunConfig, run_dir: RunDir, report: Callable[[str], None]) -> Hub | None:
    """The repository of ``checkpoint.push_to_hub``, made where there is none; None where the key is left out.

    Raises:
        ConfigError: it cannot be written to, which is found before anything is trained.
    """
    section = config.checkpoint
    if section.push_to_hub is None:
        return None
    from huggingface_hub import HfApi

    api = HfApi(library_name="tunesmith", library_version=version("tunesmith"))
    try:
        api.create_repo(section.push_to_hub, private=section.hub_private, exist_ok=True)
    except Exception as error:
        raise ConfigError(
            f"checkpoint.push_to_hub = '{section.push_to_hub}' cannot be written to: {_told(error)}. Log in with "
            "`hf auth login` or set HF_TOKEN, with the right to write there; or leave the key out"
        ) from None
    return Hub(api, config, run_dir, report)


@dataclass(frozen=True, slots=True)
class Hub:
    """Where a run's models go. A push that fails is told, and loses nothing: the model is on disk."""

    api: HfApi
    config: RunConfig
    run_dir: RunDir
    report: Callable[[str], None]

    def describe(self, checkpoint: Path) -> None:
        """Write the card beside the model, so that it is there whoever copies it."""
        (checkpoint / "model" / CARD_FILE).write_text(str(self.card()), encoding="utf-8")

    def publish(self, checkpoint: Path, *, last: bool) -> None:
        section, model = self.config.checkpoint, checkpoint / "model"
        if section.push == "last" and not last:
            return
        assert section.push_to_hub is not None
        try:
            found = self.api.upload_folder(
                repo_id=section.push_to_hub,
                folder_path=model,
                commit_message=f"{checkpoint.name} of {self.run_dir.path.name}",
            )
        except Exception as error:
            self.report(
                f"{model} could not be put on the hub: {_told(error)}. It is whole on disk; put it there with: "
                f"hf upload {section.push_to_hub} {model}"
            )
        else:
            self.report(f"{model} is on the hub: {found.commit_url}")

    def card(self) -> ModelCard:
        """In the hub's format: metadata, then what somebody who finds the model wants to know."""
        from huggingface_hub import ModelCard, ModelCardData

        config, path = self.config, self.config.model.path
        algorithm = config.algorithm.name if isinstance(config, RLConfig) else None
        command = shown_command(own_command() or [])
        local = Path(path).is_absolute()
        data = ModelCardData(
            base_model=None if local else path,
            library_name="peft" if config.lora.on else "transformers",
            pipeline_tag="text-classification" if isinstance(config, ScoreConfig) else "text-generation",
            datasets=self._datasets() or None,
            tags=["tunesmith", *([algorithm] if algorithm else []), *(["lora"] if config.lora.on else [])],
        )
        facts = {
            "base model": Path(path).name if local else path,
            "command": f"`{command}`" if command else "Python",
            "algorithm": algorithm or type(config).__name__.removesuffix("Config").lower(),
            "data": ", ".join(_names(config)),
            "Tunesmith": version("tunesmith"),
        }
        rows = [f"| {name} | {text} |" for name, text in facts.items()]
        settings = (self.run_dir.path / "config.toml").read_text(encoding="utf-8")
        numbers = self._numbers()
        shown = [f"| {name} | {value:.6g} |" for name, value in numbers.items()]
        parts = [
            f"---\n{data.to_yaml()}\n---",
            f"# {self.run_dir.path.name}",
            "| | |\n| --- | --- |\n" + "\n".join(rows),
        ]
        parts += ["## Metrics\n\n| metric | value |\n| --- | --- |\n" + "\n".join(shown)] if shown else []
        parts.append(f"## Settings\n\n```toml\n{settings}```")
        return ModelCard("\n\n".join(parts) + "\n")

    def _datasets(self) -> list[str]:
        return [name for name in _names(self.config) if "/" in name and not Path(name).suffix]

    def _numbers(self) -> dict[str, float]:
        """The newest evaluation, else the newest step's."""
        lines = read_metrics(self.run_dir.metrics)
        evaluations = [{k: v for k, v in line.items() if k.startswith("eval/")} for line in lines]
        newest = next((e for e in reversed(evaluations) if e), lines[-1] if lines else {})
        plain = {k: v for k, v in newest.items() if isinstance(v, int | float) and "/" not in k.removeprefix("eval/")}
        return dict(list(plain.items())[:_SHOWN])


def _names(config: RunConfig) -> list[str]:
    """Of the training data: hub names as they are, of files their own."""
    found = config.data.train
    several: Sequence[Any] = found if isinstance(found, tuple) else (found,)
    paths = [one if isinstance(one, str) else one.path for one in several]
    return [Path(path).name if Path(path).is_absolute() else path for path in paths]


def _told(error: Exception) -> str:
    """What went wrong, in one line and without the token."""
    from huggingface_hub.utils import get_token

    text = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    token = get_token()
    return text.replace(token, "***") if token else text
