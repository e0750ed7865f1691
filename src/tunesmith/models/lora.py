"""LoRA (arXiv:2106.09685) with peft: ``W x`` becomes ``W x + (alpha / rank) · B A x``, and only A and B are trained.

The layers are inserted into the Hugging Face module, so the sampler runs them too. B starts at zero, so the initial
model equals the base. A and B are float32 for any dtype of the base.

Dropout acts on the adapter's input in training passes only. Its random masks depend on how samples are packed, unlike
anything else in training, so it is off by default. Reinforcement learning refuses it: the trainer's log-probabilities
would differ from the sampler's.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.errors import CheckpointError, ModelError, boundary
from tunesmith.kernels.quantised import weights_of
from tunesmith.models.loading import check_names
from tunesmith.parallel.host_memory import stored_state
from tunesmith.parallel.sharding import whole

WEIGHTS = "adapter_model.safetensors"
TRAINED, START = "default", "start"
"""Names of peft adapters: the trained one, and the frozen copy of a saved one that training continues."""
ANY_OF_PEFT = (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, SafetensorError)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """The adapter in a model's module, trained instead of the module's own weights; ``adapters.attach`` inserts it."""

    peft: PeftModel
    save_merged: bool = False
    """Whether ``Decoder.save`` also writes the whole model, with the adapter merged in."""
    trust_remote_code: bool = False

    @contextmanager
    def reference(self) -> Generator[None]:
        """A context in which the model is the base or, if a saved adapter is continued, the base with that adapter."""
        if START not in self.peft.peft_config:
            with self.peft.disable_adapter():
                yield
            return
        self.peft.set_adapter(START, inference_mode=True)
        try:
            yield
        finally:
            self.peft.set_adapter(TRAINED)

    @torch.inference_mode(False)
    def merged(self) -> PreTrainedModel:
        """A frozen float32 copy of the model with the adapter merged in."""
        whole = cast(Any, copy.deepcopy(self.peft).float()).merge_and_unload()
        return cast(PreTrainedModel, whole.requires_grad_(False).eval())

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, under their names in the module."""
        for name, tensor in self.peft.get_base_model().state_dict().items():
            if f".{TRAINED}." in name and ".lora_" in name:
                yield name, tensor

    @torch.no_grad()
    def merged_weights(self, *, in_host_memory: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The weights of the base with the adapter merged in, under the base's names; the module is not changed.

        Each sum ``W + scale · B A`` is computed in float32 and rounded to the base's dtype. The ranks of a sharded base
        iterate together.

        Args:
            in_host_memory: put sums and gathered weights on the CPU, because together they would be a second model on
                the GPU; if False, the caller has to drop each weight before taking the next.
        """
        module = self.peft.get_base_model()
        adapted = {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}
        for name, part in stored_state(module).items():
            owner, is_adapted, rest = name.partition(".base_layer.")
            made = isinstance(part, DTensor)
            tensor = whole(part) if made else part
            if is_adapted and rest == "weight":
                delta = cast(Any, adapted[owner]).get_delta_weight(TRAINED)
                tensor, made = (tensor.to(delta.device).float() + delta.float()).to(tensor.dtype), True
                del delta
            if made and in_host_memory:
                tensor = tensor.cpu()
            if is_adapted:
                yield f"{owner}.{rest}", tensor
            elif ".lora_" not in name:
                yield name, tensor
            del tensor

    def save(self, directory: Path) -> None:
        """Write a peft adapter directory."""
        self.peft.save_pretrained(str(directory), selected_adapters=[TRAINED], save_embedding_layers=False)

    def load(self, directory: Path) -> None:
        """Load the weights that ``save`` wrote.

        Raises:
            CheckpointError: they are missing, damaged or belong to another adapter.
        """
        if not (directory / WEIGHTS).is_file():
            raise CheckpointError(f"{directory} holds no adapter: resume without lora.rank, or start a new run_dir.")
        with boundary(CheckpointError, f"cannot read {directory / WEIGHTS}", ANY_OF_PEFT):
            saved = load_file(directory / WEIGHTS)
        current = get_peft_model_state_dict(self.peft, adapter_name=TRAINED, save_embedding_layers=False)
        for name in sorted(saved.keys() | current.keys()):
            if name not in saved or name not in current or saved[name].shape != current[name].shape:
                raise CheckpointError(
                    f"{directory} holds another adapter than this run's: '{name}' differs. "
                    "Resume with the lora.rank and lora.targets of the first start, or start a new run_dir."
                )
        set_peft_model_state_dict(self.peft, saved, adapter_name=TRAINED)

    def counts(self) -> tuple[int, int]:
        """The numbers of trained parameters and of all parameters."""
        sizes = [(p.requires_grad, count) for p, count in weights_of(self.peft)]
        return sum(n for trained, n in sizes if trained), sum(n for _, n in sizes)


def merge_into(module: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Merge an adapter into a module, its base, and return the module.

    Raises:
        ModelError: they do not fit together.
    """
    with boundary(ModelError, f"the adapter {adapter} does not fit {module.name_or_path}", ANY_OF_PEFT):
        peft = PeftModel.from_pretrained(module, adapter)
        check_weights(adapter, peft)
        return cast(PreTrainedModel, cast(Any, peft).merge_and_unload(safe_merge=True))


def check_weights(path: Path, peft: PeftModel) -> None:
    """Refuse an adapter's file with missing or extra weights: peft only warns."""
    if (path / WEIGHTS).is_file():
        saved = load_file(path / WEIGHTS).keys()
        current = get_peft_model_state_dict(peft, adapter_name=TRAINED, save_embedding_layers=False).keys()
        check_names(f"the adapter {path}", current - saved, saved - current)


def read_config(path: Path) -> Any:
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{path} holds no LoRA adapter: it has no {ADAPTER_CONFIG}")
    with boundary(ModelError, f"cannot read {path / ADAPTER_CONFIG}", ANY_OF_PEFT):
        config = cast(Any, PeftConfig.from_pretrained(str(path)))
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{path} is an adapter of type {config.peft_type}; only LoRA adapters work here")
    return config
