"""LoRA (arXiv:2106.09685) with peft: ``W x`` becomes ``W x + (alpha / rank) · B A x``, and only A and B are trained.

The layers are inserted into the Hugging Face module, so the sampler runs them too. B starts at zero, so the initial
model equals the base. A and B are float32 for any dtype of the base.

Dropout acts on the adapter's input in training passes only. Its random masks depend on how samples are packed, unlike
anything else in training, so it is off by default. Reinforcement learning refuses it: the trainer's log-probabilities
would differ from the sampler's.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.config.schema import LoraSection
from tunesmith.errors import CheckpointError, ConfigError, ModelError, StorageError, boundary, nearest
from tunesmith.kernels.quantised import weights_of
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.decoder import Decoder
from tunesmith.models.loading import check_names, load_config
from tunesmith.models.score_model import ScoreModel
from tunesmith.parallel.host_memory import stored_state
from tunesmith.parallel.sharding import unshard_trained, whole

WEIGHTS = "adapter_model.safetensors"
TRAINED, START = "default", "start"
"""Names of peft adapters: the trained one, and the frozen copy of a saved one that training continues."""
_EXTENSIONS = ("use_dora", "bias", "lora_bias", "trainable_token_indices", "target_parameters", "layer_replication")
"""peft settings that go beyond two matrices per linear module."""
_FOREIGN = (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, SafetensorError)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """The adapter in a model's module; ``attach`` inserts it."""

    peft: PeftModel
    save_merged: bool = False
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
        """Write a peft adapter directory; with ``save_merged`` also the whole model, to ``<directory>_merged``."""
        self.peft.save_pretrained(str(directory), selected_adapters=[TRAINED], save_embedding_layers=False)
        if self.save_merged:
            merge(directory, directory.with_name(f"{directory.name}_merged"), trust_remote_code=self.trust_remote_code)

    def load(self, directory: Path) -> None:
        """Load the weights that ``save`` wrote.

        Raises:
            CheckpointError: they are missing, damaged or belong to another adapter.
        """
        if not (directory / WEIGHTS).is_file():
            raise CheckpointError(f"{directory} holds no adapter: resume without lora.rank, or start a new run_dir.")
        with boundary(CheckpointError, f"cannot read {directory / WEIGHTS}", _FOREIGN):
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


def attach(
    model: Decoder,
    section: LoraSection,
    *,
    path: Path | None = None,
    trust_remote_code: bool = False,
    frozen: bool = False,
) -> LoraAdapter:
    """Insert an adapter into ``model`` and freeze everything else except a new score head.

    Args:
        section: resolved.
        path: a saved adapter to continue.
        frozen: do not train the adapter either; then no copy of it is kept as the reference.

    Raises:
        ConfigError: the model has no module with a target's name.
        ModelError: the saved adapter is of another kind or for another model.
    """
    kind = "SEQ_CLS" if isinstance(model, ScoreModel) else "CAUSAL_LM"
    peft = _fresh(model, section, kind) if path is None else _continued(model, section, kind, path, frozen)
    unshard_trained(peft, model.device)
    model.adapter = LoraAdapter(peft, section.save_merged, trust_remote_code)
    return model.adapter


def _fresh(model: Decoder, section: LoraSection, kind: str) -> PeftModel:
    rank = section.rank
    assert rank is not None, "a new adapter needs a rank"
    linear = linear_modules(model.module.base_model)
    config = LoraConfig(
        task_type=kind,
        r=rank,
        lora_alpha=cast(int, section.alpha or 2 * rank),
        lora_dropout=section.dropout,
        target_modules=choose_targets(linear, section.targets),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in linear.values()),
    )
    with boundary(ModelError, "lora: peft cannot adapt this model", _FOREIGN):
        return cast(PeftModel, get_peft_model(model.module, config))


def _continued(model: Decoder, section: LoraSection, kind: str, path: Path, frozen: bool) -> PeftModel:
    config = _read_config(path)
    if config.task_type != kind:
        raise ModelError(f"{path} is an adapter for {config.task_type}, and this model is a {kind}")
    plain, heads = LoraConfig(), {"score", "classifier"}  # peft adds both to every adapter of a score model
    extensions = [name for name in _EXTENSIONS if getattr(config, name) != getattr(plain, name)]
    if extensions or not heads.issuperset(config.modules_to_save or ()):
        raise ModelError(
            f"{path} is not plain LoRA: it uses {', '.join(extensions or ['modules_to_save'])}. "
            f"Merge it with its base: tunesmith merge {path} OUT_DIR"
        )
    config.lora_dropout = section.dropout
    with boundary(ModelError, f"the adapter {path} does not fit the model", _FOREIGN):
        name = {"adapter_name": TRAINED, "is_trainable": not frozen}
        peft = PeftModel.from_pretrained(model.module, path, config=config, **cast(Any, name))
        _check_weights(path, peft)
        if frozen:
            return peft
        peft.load_adapter(str(path), START, is_trainable=False)
        peft.set_adapter(TRAINED)
    return peft


def check_targets(base: str | Path, section: LoraSection, *, trust_remote_code: bool = False) -> None:
    """Check ``lora.targets`` before the model's weights are loaded.

    Raises:
        ConfigError: as ``choose_targets``.
    """
    if isinstance(section.targets, tuple):
        config = load_config(base, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        choose_targets(linear_modules(cast(Any, module).base_model), section.targets)


def linear_modules(decoder: nn.Module) -> dict[str, nn.Module]:
    """The linear modules of a decoder, by dotted name, without the vocabulary or score head."""
    return {name: m for name, m in decoder.named_modules() if isinstance(m, nn.Linear | Conv1D)}


def choose_targets(linear: Iterable[str], targets: str | Sequence[str] | None) -> list[str]:
    """Names of modules to adapt; each is a module's last name, such as ``q_proj``, or the end of its dotted name.

    Raises:
        ConfigError: no module has the name of a target; names the nearest.
    """
    names = list(linear)
    own = sorted({name.rpartition(".")[2] for name in names})
    if targets is None or isinstance(targets, str):
        return own
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(f"lora.targets: the model has no linear module '{target}'.{nearest(target, own)}")
    return list(targets)


def merge(
    adapter: Path, out: Path, *, base: str | None = None, dtype: str | None = None, trust_remote_code: bool = False
) -> str:
    """Merge an adapter into its base, write the whole model, and return the base's path.

    The sum is computed in float32 and rounded to ``dtype``; None: the base's dtype.

    Raises:
        ModelError: the adapter or the base does not exist, or they do not fit together.
    """
    config = _read_config(adapter)
    base = base or config.base_model_name_or_path
    if not base:
        raise ModelError(f"{adapter} does not say which model it belongs to; name it with --base")
    stored = load_config(base, trust_remote_code=trust_remote_code).dtype
    kind = ScoreModel if config.task_type == "SEQ_CLS" else CausalLM
    model = kind.load(base, trust_remote_code=trust_remote_code)
    if (adapter / "tokenizer_config.json").is_file():
        with boundary(ModelError, f"cannot load the tokenizer of {adapter}", _FOREIGN):
            model.tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=trust_remote_code)
    with boundary(ModelError, f"the adapter {adapter} does not fit {base}", _FOREIGN):
        peft = PeftModel.from_pretrained(model.module, adapter)
        _check_weights(adapter, peft)
        merged = cast(Any, peft).merge_and_unload(safe_merge=True)
    merged.to(getattr(torch, dtype) if dtype else stored or torch.float32)
    with boundary(StorageError, f"cannot write {out}", OSError):
        model.save(out)
    return base


def _check_weights(path: Path, peft: PeftModel) -> None:
    """Refuse an adapter's file with missing or extra weights: peft only warns."""
    if (path / WEIGHTS).is_file():
        saved = load_file(path / WEIGHTS).keys()
        current = get_peft_model_state_dict(peft, adapter_name=TRAINED, save_embedding_layers=False).keys()
        check_names(f"the adapter {path}", current - saved, saved - current)


def _read_config(path: Path) -> Any:
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{path} holds no LoRA adapter: it has no {ADAPTER_CONFIG}")
    with boundary(ModelError, f"cannot read {path / ADAPTER_CONFIG}", _FOREIGN):
        config = cast(Any, PeftConfig.from_pretrained(str(path)))
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{path} is an adapter of type {config.peft_type}; only LoRA adapters work here")
    return config
