"""Training on one device with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tunesmith.backends.base import LossFn
from tunesmith.backends.memory import memory_boundary
from tunesmith.backends.optimizer import AdamWSettings, MasterAdamW
from tunesmith.data.forest import Forest, Predictions
from tunesmith.errors import CheckpointError, boundary
from tunesmith.models.decoder import Decoder

OPTIMIZER_FILE = "optimizer.safetensors"
MODEL_DIRECTORY = "model"


M = TypeVar("M", bound=Decoder)


class TorchBackend(Generic[M]):
    """One model, its optimizer and, where a KL needs it, a frozen reference.

    ``predict`` runs a model on a forest: ``partial(CausalLM.predict, temperature=0.7)``, ``ScoreModel.predict``.
    """

    def __init__(
        self,
        model: M,
        settings: AdamWSettings,
        predict: Callable[[M, Forest], Predictions],
        *,
        reference: M | None = None,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        self.model, self.reference, self.predict = model, reference, predict
        self.optimizer = MasterAdamW(model.module, settings)
        self._version = 0
        torch.manual_seed(seed)
        if gradient_checkpointing:
            model.module.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def version(self) -> int:
        return self._version

    @torch.no_grad()
    def score(self, forest: Forest, *, reference: bool = False) -> Predictions:
        model = self.reference if reference else self.model
        assert model is not None, "this run has no reference model"
        model.module.eval()
        with memory_boundary(f"scoring {forest.num_tokens} tokens"):
            found = self.predict(model, forest.to(model.device))
        return Predictions(*(t if t is None else t.cpu() for t in (found.logprobs, found.entropy, found.values)))

    def forward_backward(self, forest: Forest, loss: LossFn) -> dict[str, float]:
        self.model.module.train()
        with memory_boundary(f"a micro-batch of {forest.num_tokens} tokens"):
            forest = forest.to(self.model.device)
            value, metrics = loss(forest, self.predict(self.model, forest))
            value.backward()  # pyright: ignore[reportUnknownMemberType]
        return {"loss": value.item(), **{name: float(m) for name, m in metrics.items()}}

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, lr: float) -> dict[str, float]:
        with memory_boundary("the optimizer step"):
            metrics = self.optimizer.step(lr)
        self._version += 1
        return metrics

    def save(self, directory: Path) -> None:
        self.model.save(directory / MODEL_DIRECTORY)
        tensors = self.optimizer.state()
        tensors["random:cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            tensors["random:cuda"] = torch.cuda.get_rng_state(self.model.device)
        contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(contiguous, directory / OPTIMIZER_FILE, metadata={"version": str(self._version)})

    def load(self, directory: Path) -> None:
        self._load_weights(directory / MODEL_DIRECTORY)
        with boundary(CheckpointError, f"cannot read {directory / OPTIMIZER_FILE}", Exception):
            tensors = load_file(directory / OPTIMIZER_FILE)
        torch.set_rng_state(tensors.pop("random:cpu"))
        if (state := tensors.pop("random:cuda", None)) is not None and self.model.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.model.device)
        self._check_names(directory, {key.split(":", 1)[1] for key in tensors})
        self.optimizer.load_state(tensors)
        self._version = int(_metadata(directory / OPTIMIZER_FILE)["version"])

    def _load_weights(self, directory: Path) -> None:
        saved = type(self.model).load(directory, dtype=self.model.module.dtype, device="cpu").module.state_dict()
        current = self.model.module.state_dict()
        different = [k for k, v in current.items() if k not in saved or saved[k].shape != v.shape]
        if different or len(saved) != len(current):
            name = different[0] if different else next(k for k in saved if k not in current)
            raise CheckpointError(
                f"{directory} holds another model than this run's: '{name}' differs. "
                "Resume with the model the run was started with, or start a new run_dir."
            )
        with torch.no_grad():
            for key, value in current.items():
                value.copy_(saved[key])

    def _check_names(self, directory: Path, names: set[str]) -> None:
        if unknown := names - set(self.optimizer.masters):
            raise CheckpointError(
                f"{directory} holds optimizer state of '{sorted(unknown)[0]}', which this run does not train"
            )


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return dict(opened.metadata())
