"""LoRA (arXiv:2106.09685) with peft: ``W x`` becomes ``W x + (alpha / rank) · B A x``, and only A
and B are trained.

The layers are inserted into the Hugging Face module, so the sampler runs them too. B starts at
zero, so the initial model equals the base. A and B are float32 for any dtype of the base.

Dropout acts on the adapter's input in training passes only. Its random masks depend on how samples
are packed, unlike anything else in training, so it is off by default. Reinforcement learning
refuses it: the trainer's log-probabilities would differ from the sampler's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tunesmith.config.reading.files import ADAPTER_CONFIG, WEIGHTS
from tunesmith.errors import CheckpointError, ModelError, boundary
from tunesmith.models.kernels.quantised import quantised_weights, weights_of
from tunesmith.models.parallel.sharding import whole
from tunesmith.models.weight_checks import listed
from tunesmith.plan.facts.model_files import is_of_tower

_WHOLE = ".modules_to_save."
_OF_PEFT = (".lora_", _WHOLE, ".original_module.")
"""In the names of weights that the model has beside its own, and of those that modules which peft
trains whole replace."""
TRAINED = "default"
START = "start"
"""Names of peft adapters: the trained one, and the frozen copy of a saved one that training
continues."""
ANY_OF_PEFT = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    AttributeError,
    SafetensorError,
)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """The adapter in a model's module, trained instead of the module's own weights;
    ``adapters.attach`` inserts it."""

    peft: PeftModel
    save_merged: bool = False
    """Whether ``Decoder.save`` also writes the whole model, with the adapter merged in."""
    trust_remote_code: bool = False

    @contextmanager
    def reference(self) -> Generator[None]:
        """A context in which the model is the base or, if a saved adapter is continued, the base
        with that adapter."""
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
        whole = copy.deepcopy(self.peft).float().merge_and_unload()
        return whole.requires_grad_(False).eval()

    def base_numbers(self) -> int:
        """The number of parameters of the base."""
        named = self.peft.get_base_model().named_parameters()
        return sum(p.numel() for name, p in named if ".lora_" not in name and _WHOLE not in name)

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, under their names in the module."""
        for name, tensor in self.peft.get_base_model().state_dict().items():
            if f".{TRAINED}." in name and (".lora_" in name or _WHOLE in name):
                yield name, tensor

    @torch.no_grad()
    def saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights under their names in an adapter's file, on their device; the scale of
        each module is part of its B, so that ``alpha`` is the rank."""
        parts = self.peft.get_base_model().named_modules()
        scales = {n: part.scaling[TRAINED] for n, part in parts if isinstance(part, LoraLayer)}
        for name, tensor in self.own_weights():
            owner, _, factor = name.partition(".lora_")
            scaled = tensor * scales[owner] if factor[0] == "B" else tensor
            yield f"base_model.model.{name.replace(f'.{TRAINED}.', '.')}", scaled

    @torch.no_grad()
    def merged_weights(self, *, in_host_memory: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The weights of the base with the adapter merged in, under the base's names; the module is
        not changed.

        Each sum ``W + scale · B A`` is computed in float32 and rounded to the base's dtype; a
        quantised ``W`` is dequantised. The ranks of a sharded base iterate together.

        Args:
            in_host_memory: put sums and gathered weights on the CPU, because together they would be
                a second model on the GPU; if False, the caller has to drop each weight before
                taking the next.
        """
        module = self.peft.get_base_model()
        adapted = {
            name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)
        }
        quantised = quantised_weights(module)
        for name, part in module.state_dict().items():
            owner, is_adapted, rest = name.partition(".base_layer.")
            made = isinstance(part, DTensor)
            tensor = whole(part) if made else part
            if name in quantised:
                tensor = quantised[name].dequantised(tensor)
                made = True
            if is_adapted and rest == "weight":
                delta = cast(Any, adapted[owner]).get_delta_weight(TRAINED)
                tensor = (tensor.to(delta.device).float() + delta.float()).to(tensor.dtype)
                made = True
                del delta
            if made and in_host_memory:
                tensor = tensor.cpu()
            trained = name.replace(f"{_WHOLE}{TRAINED}.", ".")
            if is_adapted:
                yield f"{owner}.{rest}", tensor
            elif trained != name or not any(own in name for own in _OF_PEFT):
                yield trained, tensor
            del tensor

    def save(self, directory: Path, *, weights: bool = True) -> None:
        """Write a peft adapter directory; without ``weights``, its tensors are empty."""
        state = None if weights else {name: torch.empty(0) for name in self.peft.state_dict()}
        options: Any = {
            "selected_adapters": [TRAINED],
            "save_embedding_layers": False,
            "state_dict": state,
        }
        self.peft.save_pretrained(str(directory), **options)

    def load(self, directory: Path) -> None:
        """Load the weights that ``save`` wrote.

        Raises:
            CheckpointError: they are missing, damaged or belong to another adapter.
        """
        if not (directory / WEIGHTS).is_file():
            raise CheckpointError(
                f"{directory} holds no adapter: resume without lora.rank, or start a new run_dir.",
                keys=("lora.rank",),
            )
        with boundary(CheckpointError, f"cannot read {directory / WEIGHTS}", ANY_OF_PEFT):
            saved = load_file(directory / WEIGHTS)
        current = get_peft_model_state_dict(
            self.peft, adapter_name=TRAINED, save_embedding_layers=False
        )
        for name in sorted(saved.keys() | current.keys()):
            if name not in saved or name not in current or saved[name].shape != current[name].shape:
                raise CheckpointError(
                    f"{directory} holds another adapter than this run's: '{name}' differs. "
                    "Resume with the lora.rank and lora.targets of the first start, or start a "
                    "new run_dir.",
                    keys=("lora.rank", "lora.targets"),
                )
        set_peft_model_state_dict(self.peft, saved, adapter_name=TRAINED)

    def counts(self) -> tuple[int, int]:
        """The numbers of trained parameters and of all parameters."""
        sizes = [(p.requires_grad, count) for p, count in weights_of(self.peft)]
        return sum(n for trained, n in sizes if trained), sum(n for _, n in sizes)


def merge_into(module: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Merge an adapter into a module, its base, and return the module.

    If the adapter changes only one of a tied embedding and head, they are untied.

    Raises:
        ModelError: they do not fit together, or no weights of the base alone compute the same.
    """
    config = read_config(adapter)
    if config.alora_invocation_tokens:
        raise ModelError(
            f"{adapter / ADAPTER_CONFIG}: alora_invocation_tokens is set, so the adapter acts only "
            "after these tokens, "
            "and no merged weight can do that"
        )
    tied = module.config.tie_word_embeddings
    with boundary(
        ModelError, f"the adapter {adapter} does not fit {module.name_or_path}", ANY_OF_PEFT
    ):
        _resize(module, adapter)
        peft = PeftModel.from_pretrained(module, adapter)
        check_weights(adapter, peft)
        _separate(peft)
    with (
        warnings.catch_warnings(),
        boundary(ModelError, f"the adapter {adapter} cannot be merged", ANY_OF_PEFT),
    ):
        # What peft calls untied here is tied again below, if it is equal.
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        merged = cast(PreTrainedModel, peft.merge_and_unload(safe_merge=True))
    _repeat_layers(merged, config.layer_replication)
    embedding, head = (
        cast(Any, part) for part in (merged.get_input_embeddings(), merged.get_output_embeddings())
    )
    if tied and head is not None:  # a score model has none
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = (
            embedding.weight.equal(head.weight)
        )
        merged.all_tied_weights_keys = merged.get_expanded_tied_weights_keys(all_submodels=True)
        merged.tie_weights()
    return merged


def holds_tower(adapter: Path) -> bool:
    """Whether an adapter's file has weights of a tower that sees, beside the decoder's."""
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        keys = list(file.keys())
    return any(is_of_tower(key.removeprefix("base_model.model.")) for key in keys)


def _separate(module: nn.Module) -> None:
    """Give each module its own parameters: merged in place, a change of one would land in all that
    share its weight."""
    seen = set[int]()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(
                    part, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                )
            seen.add(id(parameter))


def _repeat_layers(module: PreTrainedModel, ranges: Sequence[tuple[int, int]] | None) -> None:
    """Describe in the configuration the layers that ``layer_replication`` has repeated."""
    if ranges:
        config: Any = module.config.get_text_config()
        layers = [layer for start, stop in ranges for layer in range(start, stop)]
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[layer] for layer in layers]


def stored_embeddings(module: PreTrainedModel, adapter: Path) -> dict[str, str]:
    """The names of the embedding and the head, those that an adapter's file holds whole, and their
    keys in it."""
    parts = {id(part) for part in (module.get_input_embeddings(), module.get_output_embeddings())}
    names = [name for name, part in module.named_modules() if id(part) in parts]
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        stored = list(file.keys())
    keys = [key for key in stored if key.endswith("weight") and ".lora_" not in key]
    return {name: key for name in names for key in keys if f".{name}." in key}


def _resize(module: PreTrainedModel, adapter: Path) -> None:
    """Give embedding and head as many rows as the adapter's file holds: a trainer may have added
    tokens.

    Raises:
        ModelError: the file has new rows for one of the two only.
    """
    stored = stored_embeddings(module, adapter)
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        rows = {name: file.get_slice(key).get_shape()[0] for name, key in stored.items()}
    current = cast(Any, module.get_input_embeddings()).weight.shape[0]
    if not rows or set(rows.values()) == {current}:
        return
    apart = module.get_output_embeddings() is not None and not module.config.tie_word_embeddings
    if len(set(rows.values())) > 1 or len(rows) < 1 + apart:
        found = " and ".join(f"{count} for {name}" for name, count in rows.items())
        raise ModelError(
            f"{adapter / WEIGHTS} has as rows of the vocabulary {found}, and the base has {current}"
        )
    module.resize_token_embeddings(max(rows.values()), mean_resizing=False)


def check_weights(path: Path, peft: PeftModel) -> None:
    """Refuse an adapter's file with missing or extra weights: peft only warns.

    The file may also hold the base's embedding and head, which peft adds if they are adapted or
    have another size.

    Raises:
        ModelError: names the weights and the file.
    """
    read = load_file(path / WEIGHTS)
    saved = read.keys()
    weights, whole = (
        get_peft_model_state_dict(peft, adapter_name=TRAINED, save_embedding_layers=base)
        for base in (False, True)
    )
    own = weights.keys()
    for names, problem, effect in (
        (
            own - saved,
            f"lacks weights that {ADAPTER_CONFIG} beside it describes",
            "they would be random numbers",
        ),
        (
            saved - own - whole.keys(),
            f"holds weights that {ADAPTER_CONFIG} beside it does not describe",
            "they have no place",
        ),
    ):
        if names:
            raise ModelError(
                f"{path / WEIGHTS} {problem}: {listed(names)}, and {effect}. The two files are not "
                "of one adapter, or the base is another model; save the adapter again with peft's "
                "save_pretrained, or name its base"
            )
    plain = {name: w for name, w in weights.items() if not isinstance(w, DTensor)}
    unread = [name for name, w in plain.items() if not w.cpu().equal(read[name].to(w.dtype))]
    if unread:
        raise ModelError(
            f"{path / WEIGHTS}: peft did not read {listed(unread)}: it takes them for weights of "
            "other names in this family; leave these modules out of the adapter"
        )


def read_config(path: Path) -> Any:
    """The configuration of a LoRA adapter; ModelError if the directory does not hold one as
    safetensors."""
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{path} holds no LoRA adapter: it has no {ADAPTER_CONFIG}")
    with boundary(ModelError, f"cannot read {path / ADAPTER_CONFIG}", ANY_OF_PEFT):
        config = PeftConfig.from_pretrained(str(path))
    if not isinstance(config, LoraConfig):
        raise ModelError(
            f"{path} is an adapter of type {config.peft_type}; only LoRA adapters work here"
        )
    with (
        boundary(ModelError, f"cannot read {path / WEIGHTS}", ANY_OF_PEFT),
        safe_open(path / WEIGHTS, framework="pt"),
    ):
        return config
